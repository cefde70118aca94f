"""Finds the engines that can be launched: installed vLLMs, identified from their files alone, and the simulated one.

``vllm --version`` takes more than seven seconds, so version and build are read from the metadata of the environment
that the command's first line names. Engines that this program installed are virtual environments, one per version, in
the user's data folder.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NoReturn

import msgspec

from vllm_launchers.errors import OperationError
from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.vllm.installed_packages import Distribution, installed_vllm, script_interpreter, which
from vllm_launchers.vllm.release_defaults import SIMULATED_VERSION, Release, parse_release

MARKER = "vllm-console-complete"
"""File created as the last step of an installation; an environment without it is not used."""

NAME = lazy_pattern(r"[0-9][0-9A-Za-z.+_]{0,40}(?:-cpu)?")
"""Name of an installed engine: its version, plus ``-cpu`` for the CPU build."""


def engines_folder(environ: Mapping[str, str]) -> Path | None:
    """The folder for installed engines; None without a home folder."""
    data, home = environ.get("XDG_DATA_HOME", ""), environ.get("HOME", "")
    if data.startswith("/"):
        return Path(data) / "vllm-console/engines"
    return Path(home) / ".local/share/vllm-console/engines" if home.startswith("/") else None


def managed_engines(environ: Mapping[str, str]) -> list[Path]:
    """Environments of complete installations, newest version first."""
    return [folder for folder in _environments(environ) if (folder / MARKER).is_file()]


def unfinished_engines(environ: Mapping[str, str]) -> list[Path]:
    """Environments whose installation is running or was interrupted."""
    return [folder for folder in _environments(environ) if folder.is_dir() and not (folder / MARKER).is_file()]


def _environments(environ: Mapping[str, str]) -> list[Path]:
    folder = engines_folder(environ)
    if folder is None:
        return []
    try:
        names = sorted(os.listdir(folder), key=_order, reverse=True)  # noqa: PTH208
    except OSError:
        return []
    return [folder / name for name in names if NAME.fullmatch(name)]


def managed_engine(name: str, environ: Mapping[str, str]) -> Path | None:
    """The environment of that name, complete or not; None if there is none."""
    folder = engines_folder(environ)
    if folder is None or not NAME.fullmatch(name) or (folder / name).is_symlink() or not (folder / name).is_dir():
        return None
    return folder / name


def remove_engine(path: Path, report: Callable[[int, int | None, int], None] = lambda *_: None) -> int:
    """Delete an environment and return the number of bytes freed.

    The marker is deleted first, so that a partly deleted environment is not used. ``report`` receives the number of
    files deleted, the total, and the bytes freed. While files are still being counted, it receives the count so far and
    None.

    Raises:
        OSError: a part of it can't be deleted.
    """
    (path / MARKER).unlink(missing_ok=True)
    total = 0
    for _, _, names in os.walk(path):
        total += len(names)
        report(total, None, 0)
    done = freed = 0
    for folder, folders, names in os.walk(path, topdown=False, onerror=_raise):
        inside = Path(folder)
        for name in names:
            found = os.lstat(inside / name)
            (inside / name).unlink()
            freed += found.st_blocks * 512 if found.st_nlink == 1 else 0
        for name in folders:
            if (inside / name).is_symlink():
                (inside / name).unlink()
            else:
                (inside / name).rmdir()
        done += len(names)
        report(done, total, freed)
    path.rmdir()
    (path.parent / f"{path.name}.log").unlink(missing_ok=True)  # left by a failed installation
    return freed


def _raise(error: OSError) -> NoReturn:
    raise error


def disk_bytes(path: Path) -> int:
    """Disk space used by a folder's files. Hard links count once; symbolic links are not followed."""
    seen: dict[tuple[int, int], int] = {}
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                found = os.lstat(Path(folder) / name)
            except OSError:  # deleted in the meantime
                continue
            seen[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(seen.values())


def free_bytes(folder: Path) -> int:
    """Free space on the disk of a folder, which need not exist yet."""
    import shutil  # rarely needed, and it imports every archive format

    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _order(name: str) -> tuple[list[int], bool]:
    version, _, build = name.partition("-")
    return [int(part) for part in re.findall(r"\d+", version)], build != "cpu"


class EngineKind(StrEnum):
    """Which engine runs a server."""

    VLLM = "vllm"
    SIMULATED = "simulated"


class Engine(msgspec.Struct, frozen=True):
    """An engine that can be launched: a real vLLM installation or the simulated one.

    ``command`` precedes ``serve`` in argv. ``version`` is None if it cannot be determined without running the engine.
    ``build`` is ``cuda``, ``cpu``, ``rocm``, … or ``simulated``, None if unknown. ``note`` is a sentence for users.
    ``plugins`` are the vLLM plugins installed with it; ``lacks`` are packages that some of its flags need and that are
    known to be missing.
    """

    kind: EngineKind
    command: tuple[str, ...]
    version: str | None
    build: str | None
    path: str
    note: str = ""
    plugins: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()

    @property
    def release(self) -> Release | None:
        """The version as comparable numbers, or None: ``(0, 32, 0)`` for ``0.32.0+cpu``."""
        return parse_release(self.version or "")

    @property
    def label(self) -> str:
        """Short text for a screen, e.g. ``vLLM 0.32.0 cpu`` or ``simulated 0.33.0``."""
        name = "vLLM" if self.kind is EngineKind.VLLM else "simulated"
        return " ".join(part for part in (name, self.public_version or "version unknown", self._build_label) if part)

    @property
    def public_version(self) -> str | None:
        """The version without its local part, for display: ``0.32.0`` for ``0.32.0+cpu``."""
        return self.version.partition("+")[0] if self.version else None

    @property
    def _build_label(self) -> str:
        return "" if self.build in (None, "simulated") else str(self.build)


MODULE = ("-m", "vllm.entrypoints.cli.main")
"""How to run vLLM with a Python that has no ``vllm`` command."""

_HEAD_BYTES = 8192
# Plain text, compiled on first use: most commands never inspect an engine.
_IMPORTS_VLLM = r"(?m)^\s*(?:from|import)\s+vllm\b|vllm\.entrypoints|load_entry_point\(\s*['\"]vllm|/vllm['\"]"
_RUNS_VLLM = r"(?m)(?:^|[\s/\"'=])vllm(?:[\s\"']|$)|vllm\.entrypoints"
_SHIM = r"\b(?:pyenv|asdf|mise|rtx)\b"
_DOCKER = r"(?i)\bdocker-compose\b|\b(?:docker|nerdctl)[\"'}]*[ \t][^\n;|&]*\b(?:run|exec|compose|start)\b"
"""Clients of a daemon that owns the containers' processes. Those of Apptainer and Podman belong to the caller."""


class EngineError(OperationError):
    """The path is not a runnable vLLM; the message is one clear sentence."""


def simulated_engine() -> Engine:
    """The engine that needs no GPU and no vLLM; it is part of this program."""
    command = (sys.executable, "-m", "vllm_launchers.simulated")
    return Engine(EngineKind.SIMULATED, command, SIMULATED_VERSION, "simulated", sys.executable)


def find_engines(paths: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> list[Engine]:
    """Return every vLLM on this machine once. Unusable ones are left out; `engine_problems` says why.

    Order: ``paths``, ``PATH``, the active environment, this program's environment, then engines that this program
    installed, newest first.
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
    """Why `find_engines` leaves out engines named by the user or found on ``PATH``, one sentence each."""
    environ = os.environ if environ is None else environ
    problems = []
    for path in dict.fromkeys((*paths, *_candidates(environ))):
        try:
            engine_at(path, environ)
        except EngineError as error:
            problems.append(str(error))
    return problems


def engine_at(path: str, environ: Mapping[str, str] | None = None) -> Engine:
    """Return the vLLM at ``path``: its command, its environment's folder or Python, or an installed engine's name.

    Raises:
        EngineError: it does not exist, cannot be run, or is not a vLLM.
    """
    environ = os.environ if environ is None else environ
    if not path or "\0" in path:
        raise EngineError("an empty path names no vLLM; give the path of a 'vllm' command or of its environment")
    place = Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises for an unknown user
    if "/" not in path and not place.exists():
        managed = managed_engine(path, environ)
        place = managed if managed and (managed / MARKER).is_file() else which(path, environ) or place
    # Made absolute but not resolved: a venv's python is a link to a Python outside, and the link's location counts.
    place = place.absolute()
    try:
        if not place.exists():
            raise EngineError(f"{place}: does not exist; give the path of a 'vllm' command or of its environment")
        return _in_folder(place) if place.is_dir() else _from_file(place, environ)
    except OSError as error:
        raise EngineError(f"{place}: can't be read: {os.strerror(error.errno or 0)}") from error


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
    yield from map(str, managed_engines(environ))


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
        raise EngineError(f"{path}: can't be executed (chmod +x, or give the 'vllm' command of the environment)")
    if re.fullmatch(r"python[0-9.]*", path.name):
        return _from_python(path)
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if not head.startswith(b"#!"):
        raise EngineError(f"{path}: is not vLLM; vLLM's command is a Python script that imports it")
    text = head.decode("utf-8", "replace")
    interpreter = script_interpreter(path, text, environ)
    if interpreter is None:
        return _from_wrapper(path, text)
    if not re.search(_IMPORTS_VLLM, text):
        raise EngineError(f"{path}: is not vLLM; it is a Python script that does not import it")
    if not interpreter.exists():
        raise EngineError(f"{path}: its Python {interpreter} is gone; the environment was moved or removed")
    return _engine((str(path),), path, installed_vllm(interpreter))


def _from_wrapper(path: Path, text: str) -> Engine:
    """A script that eventually runs vLLM as a child: Apptainer, a module system, a shim."""
    code = "\n".join(line for line in text.splitlines() if not re.match(r"\s*(?:#|echo\b|printf\b)", line))
    if "vllm" in code and re.search(_DOCKER, code.replace("\\\n", " ")):
        raise EngineError(
            f"{path}: runs vLLM in Docker, whose containers are not its own processes, so it would never be "
            "detected as ready and stopping it would leave the container on the GPU; install vLLM in an environment, "
            "or run the container yourself: its server is then shown among those of others"
        )
    if not re.search(_RUNS_VLLM, code) and not (path.name == "vllm" and re.search(_SHIM, code)):
        raise EngineError(f"{path}: is not vLLM; it is a script that does not run it")
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
    return Engine(
        EngineKind.VLLM,
        command,
        distribution.version,
        distribution.build,
        str(path),
        distribution.note,
        distribution.plugins,
        distribution.lacks,
    )
