"""Finds the engines that can be launched: installed vLLMs, known by their files alone, and the simulated one.

``vllm --version`` takes more than seven seconds, so version and build are read from the metadata of the
environment that the command's first line names.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from vllm_launchers.machine.installed import Distribution, installed_vllm, script_interpreter, which
from vllm_launchers.machine.model import Engine, EngineKind

SIMULATED_VERSION = "0.33.0"
"""The release whose behaviour the simulated engine imitates."""

MODULE = ("-m", "vllm.entrypoints.cli.main")
"""How vLLM is run from a Python without its command."""

_HEAD_BYTES = 8192
_IMPORTS_VLLM = re.compile(
    r"^\s*(?:from|import)\s+vllm\b|vllm\.entrypoints|load_entry_point\(\s*['\"]vllm|/vllm['\"]", re.MULTILINE
)
_RUNS_VLLM = re.compile(r"(?:^|[\s/\"'=])vllm(?:[\s\"']|$)|vllm\.entrypoints", re.MULTILINE)
_SHIM = re.compile(r"\b(?:pyenv|asdf|mise|rtx)\b")
_DOCKER = re.compile(
    r"\bdocker-compose\b|\b(?:docker|nerdctl)[\"'}]*[ \t][^\n;|&]*\b(?:run|exec|compose|start)\b", re.IGNORECASE
)
"""Clients of a daemon, whose containers are its processes; those of Apptainer and Podman are their caller's."""


class EngineError(Exception):
    """What was named is no vLLM that can be run; the text is one clear sentence."""


def simulated_engine() -> Engine:
    """The engine that needs no GPU and no vLLM; it is part of this program."""
    command = (sys.executable, "-m", "vllm_launchers.simulated")
    return Engine(EngineKind.SIMULATED, command, SIMULATED_VERSION, "simulated", sys.executable)


def find_engines(paths: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> list[Engine]:
    """Every vLLM of this machine, each once: ``paths`` first, then ``PATH``, the active environment, this program's.

    What cannot be used is left out; `engine_problems` says why.
    """
    environ = os.environ if environ is None else environ
    engines: dict[tuple[str, ...], Engine] = {}
    for candidate in (*paths, *_candidates(environ)):
        try:
            engine = engine_at(candidate, environ)
        except EngineError:
            continue
        engines.setdefault((os.path.realpath(engine.command[0]), *engine.command[1:]), engine)
    return list(engines.values())


def engine_problems(paths: Sequence[str], environ: Mapping[str, str] | None = None) -> list[str]:
    """Why `find_engines` leaves out what it does, a sentence each: paths that a person named, commands on ``PATH``."""
    environ = os.environ if environ is None else environ
    problems = []
    for path in dict.fromkeys((*paths, *_candidates(environ))):
        try:
            engine_at(path, environ)
        except EngineError as error:
            problems.append(str(error))
    return problems


def engine_at(path: str, environ: Mapping[str, str] | None = None) -> Engine:
    """The vLLM at ``path``: its command, a virtual environment's folder, or that environment's Python.

    Raises:
        EngineError: there is nothing, it cannot be run, or it is no vLLM.
    """
    environ = os.environ if environ is None else environ
    if not path or "\0" in path:
        raise EngineError("an empty path names no vLLM; give the path of a 'vllm' command or of its environment")
    place = Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises for an unknown user
    if "/" not in path and not place.exists():
        place = which(path, environ) or place
    # Made absolute but not resolved: a venv's python is a link out of it, and the link's place is what counts.
    place = place.absolute()
    try:
        if not place.exists():
            raise EngineError(f"{place}: does not exist; give the path of a 'vllm' command or of its environment")
        return _in_folder(place) if place.is_dir() else _from_file(place, environ)
    except OSError as error:
        raise EngineError(f"{place}: cannot be read: {os.strerror(error.errno or 0)}") from error


def _candidates(environ: Mapping[str, str]) -> Iterator[str]:
    folders = [folder for folder in environ.get("PATH", "").split(os.pathsep) if folder]
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if prefix := environ.get(variable):
            folders.append(str(Path(prefix) / "bin"))
    folders.append(str(Path(sys.executable).parent))
    for folder in dict.fromkeys(folders):
        command = Path(folder) / "vllm"
        if command.is_file():
            yield str(command)


def _in_folder(folder: Path) -> Engine:
    for command in (folder / "bin" / "vllm", folder / "vllm"):
        if command.is_file():
            return _from_file(command, os.environ)
    for python in (folder / "bin" / "python", folder / "python"):
        if python.is_file():
            return _from_python(python)
    raise EngineError(f"{folder}: is a folder without bin/vllm; give a virtual environment in which vLLM is installed")


def _from_file(path: Path, environ: Mapping[str, str]) -> Engine:
    if not path.is_file():
        raise EngineError(f"{path}: is neither a command nor a folder")
    if not os.access(path, os.X_OK):
        raise EngineError(f"{path}: cannot be executed (chmod +x, or give the 'vllm' command of the environment)")
    if re.fullmatch(r"python[0-9.]*", path.name):
        return _from_python(path)
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if not head.startswith(b"#!"):
        raise EngineError(f"{path}: is no vLLM; vLLM's command is a Python script that imports it")
    text = head.decode("utf-8", "replace")
    interpreter = script_interpreter(path, text, environ)
    if interpreter is None:
        return _from_wrapper(path, text)
    if not _IMPORTS_VLLM.search(text):
        raise EngineError(f"{path}: is no vLLM; it is a Python script that does not import it")
    if not interpreter.exists():
        raise EngineError(f"{path}: its Python {interpreter} is gone; the environment was moved or removed")
    return _engine((str(path),), path, installed_vllm(interpreter))


def _from_wrapper(path: Path, text: str) -> Engine:
    """A script of another kind that runs vLLM in the end, below it: Apptainer, a module system, a shim."""
    code = "\n".join(line for line in text.splitlines() if not re.match(r"\s*(?:#|echo\b|printf\b)", line))
    if "vllm" in code and _DOCKER.search(code.replace("\\\n", " ")):
        raise EngineError(
            f"{path}: runs vLLM in Docker, whose containers are not its own processes, so it would never be seen ready "
            "and stopping it would leave the container on the GPU; install vLLM in an environment, or run the "
            "container yourself: its server is then shown among those of others"
        )
    if not _RUNS_VLLM.search(code) and not (path.name == "vllm" and _SHIM.search(code)):
        raise EngineError(f"{path}: is no vLLM; it is a script that does not run it")
    note = "its command is a script around vLLM, so its version is known only once it runs"
    return Engine(EngineKind.VLLM, (str(path),), None, None, str(path), note)


def _from_python(python: Path) -> Engine:
    distribution = installed_vllm(python)
    if distribution is None:
        raise EngineError(f"{python}: vLLM is not installed in this Python (pip install vllm)")
    command = python.parent / "vllm"
    if command.is_file() and os.access(command, os.X_OK):
        return _engine((str(command),), command, distribution)
    return _engine((str(python), *MODULE), python, distribution)


def _engine(command: tuple[str, ...], path: Path, distribution: Distribution | None) -> Engine:
    if distribution is None:
        note = "its environment does not say which vLLM is installed, so its version is known only once it runs"
        return Engine(EngineKind.VLLM, command, None, None, str(path), note)
    return Engine(EngineKind.VLLM, command, distribution.version, distribution.build, str(path), distribution.note)
