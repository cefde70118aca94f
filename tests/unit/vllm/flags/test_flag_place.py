from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_launchers.vllm.engines import Engine, EngineKind, simulated_engine
from vllm_launchers.vllm.flags.flag_table import FlagsUnknownError
from vllm_launchers.vllm.flags.learn import learn_flags
from vllm_launchers.vllm.flags.source_location import package_folder, package_version


def test_package_next_to_the_commands_python_is_read(environment, made_files) -> None:
    folder = environment.install()
    assert package_folder(environment.engine()) == folder
    table = learn_flags(environment.engine())
    assert (table.version, table.source) == ("0.32.0+cpu", "installation")
    assert table.flags["speed"].aliases == ("-s",)


def test_engine_run_by_its_python_is_read(environment) -> None:
    folder = environment.install()
    assert package_folder(environment.engine(str(environment.python), "-m", "vllm.entrypoints.cli.main")) == folder


def test_editable_installation_is_followed_to_its_source(environment, made_files, tmp_path, write_files) -> None:
    source = write_files(tmp_path / "my checkout" / "vllm", made_files)
    (source / "_version.py").write_text("__version__ = version = '0.33.1.dev5'\n")
    place = environment.site / f"vllm-{environment.version}.dist-info/direct_url.json"
    place.write_text(json.dumps({"url": (tmp_path / "my checkout").as_uri(), "dir_info": {"editable": True}}))
    assert package_folder(environment.engine()) == source
    assert package_version(source) == "0.33.1.dev5"


@pytest.mark.parametrize("relative", [False, True])
def test_path_file_is_followed_to_its_source(environment, made_files, tmp_path, write_files, relative: bool) -> None:
    source = write_files(tmp_path / "checkout" / "vllm", made_files)
    line = os.path.relpath(source.parent, environment.site) if relative else str(source.parent)
    (environment.site / "a.pth").write_text(f"# a comment\nimport something\n\n{line}\n")
    assert package_folder(environment.engine()).resolve() == source.resolve()


def test_damaged_editable_metadata_is_skipped(environment) -> None:
    place = environment.site / f"vllm-{environment.version}.dist-info/direct_url.json"
    for text in ("{", "[]", '{"url": 5}', '{"url": "https://example.org/x"}'):
        place.write_text(text)
        with pytest.raises(FlagsUnknownError, match="was not found"):
            package_folder(environment.engine())


def test_script_that_forwards_all_arguments_is_followed(environment) -> None:
    folder = environment.install()
    wrapper = environment.script(f'#!/bin/sh\nexport A=1\nexec "{environment.command}" "$@"\n', "wrapper")
    assert package_folder(environment.engine(str(wrapper))) == folder


@pytest.mark.parametrize(
    "text",
    [
        '#!/bin/sh\nexec docker run vllm/vllm-openai vllm "$@"\n',
        '#!/bin/sh\napptainer exec image.sif /usr/bin/vllm "$@"\n',
        '#!/bin/sh\nexec /nowhere/bin/vllm "$@"\n',
        '#!/bin/sh\nexec {command} "$@"\nexec {command} "$@"\n',
        '#!/bin/sh\nexec {wrapper} "$@"\n',
    ],
)
def test_flags_of_other_scripts_are_unknown(environment, text: str) -> None:
    environment.install()
    place = environment.root / "bin" / "wrapped"
    place.mkdir()
    wrapper = environment.script(text.format(command=environment.command, wrapper=place / "vllm"), "wrapped/vllm")
    with pytest.raises(FlagsUnknownError, match="script around vLLM"):
        package_folder(environment.engine(str(wrapper)))


def test_missing_source_error_names_the_place(environment) -> None:
    with pytest.raises(FlagsUnknownError, match=str(environment.python)):
        learn_flags(environment.engine())
    (environment.site / "vllm").mkdir()
    with pytest.raises(FlagsUnknownError, match="was not found"):
        learn_flags(environment.engine())


def test_missing_command_is_reported(environment) -> None:
    environment.command.unlink()
    with pytest.raises(FlagsUnknownError, match=f"{environment.command}: can't be read: No such file"):
        learn_flags(environment.engine())


def test_simulated_engine_has_no_source() -> None:
    with pytest.raises(FlagsUnknownError, match="simulated"):
        learn_flags(simulated_engine())
    with pytest.raises(FlagsUnknownError):
        learn_flags(Engine(EngineKind.VLLM, (), None, None, ""))


def test_package_code_is_not_executed(environment, made_files, write_files: Callable[..., Path]) -> None:
    trap = environment.root / "ran"
    code = f"open({str(trap)!r}, 'w').close()\nraise SystemExit(1)\n"
    folder = write_files(
        environment.site / "vllm",
        {name: code + textwrap.dedent(text) for name, text in made_files.items()} | {"__init__.py": code},
    )
    assert "speed" in learn_flags(environment.engine()).flags
    assert not trap.exists()
    assert not list(folder.rglob("__pycache__"))
