from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vllm_launchers.prepared.command import BOOTSTRAP, prepared_command

IMPORT = "from vllm.entrypoints.cli.main import main\n"
PIP = "#!{python}\n# -*- coding: utf-8 -*-\nimport re\nimport sys\n" + IMPORT
PIP += "if __name__ == '__main__':\n    sys.argv[0] = re.sub(r'(-script\\.pyw|\\.exe)?$', '', sys.argv[0])\n"
PIP += "    sys.exit(main())\n"
ENDS = "import sys\n" + IMPORT + "sys.exit(main())\n"
UV = "import sys\n" + IMPORT + "if __name__ == '__main__':\n    if sys.argv[0].endswith('-script.pyw'):\n"
UV += "        sys.argv[0] = sys.argv[0][:-11]\n    elif sys.argv[0].endswith('.exe'):\n"
UV += "        sys.argv[0] = sys.argv[0][:-4]\n    sys.exit(main())\n"

FORMS = {
    "pip": PIP,
    "uv": "#!{python}\n# -*- coding: utf-8 -*-\n" + UV,
    "pip, long path": "#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\nimport sys\n"
    + IMPORT
    + "sys.exit(main())\n",
    "uv, long path": "#!/bin/sh\n'''exec' '{python}' \"$0\" \"$@\"\n' '''\n" + UV,
    "uv, relocatable": (
        "#!/bin/sh\n'''exec' \"$(dirname -- \"$(realpath -- \"$0\")\")\"/'python' \"$0\" \"$@\"\n' '''\nimport sys\n"
        + UV
    ),
    "env": "#!/usr/bin/env python\n" + ENDS,
}
OTHERS = {
    "sets a variable first": "#!{python}\nimport os, sys\nos.environ['A'] = 'b'\n" + IMPORT + "sys.exit(main())\n",
    "patches vLLM first": "#!{python}\nimport sys\nimport vllm.envs\n" + IMPORT + "sys.exit(main())\n",
    "imports inside": "#!{python}\nimport sys\n" + IMPORT + "if 1:\n    import patches\n    sys.exit(main())\n",
    "calls more": "#!{python}\nimport sys\n" + IMPORT + "prepare()\nsys.exit(main())\n",
    "another module": "#!{python}\nfrom vllm.entrypoints.openai.api_server import main\nmain()\n",
    "does not import vLLM": "#!{python}\nimport sys\nsys.exit(0)\n",
    "not Python inside": "#!{python}\nthis is no Python\n",
    "shell": '#!/bin/bash\nmodule load cuda\nexec {python} -m vllm.entrypoints.cli.main "$@"\n',
    "container": '#!/bin/sh\nexec apptainer run vllm.sif "$@"\n',
    "env with options": "#!/usr/bin/env -S python -I\n" + ENDS,
    "its Python is gone": "#!/nowhere/bin/python\n" + ENDS,
    "too long": "#!{python}\n" + ENDS + "#" * 10_000,
    "no text": "#!{python}\n\udcff",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of commands of an environment, with its Python."""
    folder = tmp_path / "venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(sys.executable)
    return folder


def written(folder: Path, text: str) -> Path:
    script = folder / "vllm"
    script.write_bytes(text.format(python=folder / "python").encode(errors="surrogateescape"))
    script.chmod(0o755)
    return script


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS)
def test_scripts_of_installers_are_recognized(folder: Path, text: str) -> None:
    script = written(folder, text)
    words = prepared_command([str(script), "serve", "m", "--port", "81"], {"PATH": str(folder)})
    assert words == (str(folder / "python"), str(BOOTSTRAP), str(script), "serve", "m", "--port", "81")


@pytest.mark.parametrize("text", OTHERS.values(), ids=OTHERS)
def test_command_with_extra_code_is_run_itself(folder: Path, text: str) -> None:
    script = written(folder, text)
    assert prepared_command([str(script), "serve", "m"], {"PATH": str(folder)}) == ()


def test_interpreter_options_are_kept(folder: Path) -> None:
    script = written(folder, PIP.replace("{python}", "{python} -sP"))
    words = prepared_command([str(script), "serve", "m"], {})
    assert words == (str(folder / "python"), "-sP", str(BOOTSTRAP), str(script), "serve", "m")


def test_linked_command_is_kept_and_its_interpreter_found(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "vllm"
    link.symlink_to(written(folder, FORMS["uv, relocatable"]))
    words = prepared_command([str(link), "serve", "m"], {})
    assert words == (str(folder / "python"), str(BOOTSTRAP), str(link), "serve", "m")


def test_command_by_name(folder: Path) -> None:
    script = written(folder, PIP)
    words = prepared_command(["vllm", "serve", "m"], {"PATH": str(folder)})
    assert words == (str(folder / "python"), str(BOOTSTRAP), str(script), "serve", "m")


def test_vllm_run_as_a_module(folder: Path) -> None:
    python = str(folder / "python")
    words = prepared_command([python, "-m", "vllm.entrypoints.cli.main", "serve", "m"], {})
    assert words == (python, str(BOOTSTRAP), "vllm.entrypoints.cli.main", "serve", "m")


@pytest.mark.parametrize(
    "words",
    [
        ["{python}", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"],
        ["{python}", "-m", "another.module", "serve", "m"],
        ["{python}", "-I", "-m", "vllm.entrypoints.cli.main", "serve", "m"],
        ["{vllm}", "bench", "serve"],
        ["{vllm}"],
        ["/nowhere/vllm", "serve", "m"],
        ["nowhere", "serve", "m"],
        ["podman", "run", "vllm", "serve", "m"],
        [],
    ],
)
def test_commands_that_cannot_be_prepared(folder: Path, words: list[str]) -> None:
    script = written(folder, PIP)
    argv = [word.format(python=folder / "python", vllm=script) for word in words]
    assert prepared_command(argv, {"PATH": str(folder)}) == ()


def test_bootstrap_exists() -> None:
    assert BOOTSTRAP.is_file()


def test_simulated_engine_is_prepared_by_its_own_module() -> None:
    argv = (sys.executable, "-m", "vllm_launchers.simulated", "serve", "m", "--port", "81")
    prepared = prepared_command(argv)
    assert prepared == (sys.executable, "-m", "vllm_launchers.simulated.prepared", "serve", "m", "--port", "81")
