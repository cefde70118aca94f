"""Learns the flags of an installed vLLM from its source: nothing is run or imported, no dependency is needed.

Configuration classes, ``add_cli_args`` and ``make_arg_parser`` are read as text and followed as far as they register
flags. That takes well under a second of CPU time. The result is kept on disk, in a file per package folder, which is
valid for the installation's version and the modification times and sizes of the files that define flags. Several
processes may write at once: the last one wins.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import hashlib
import os
from pathlib import Path

import msgspec
from msgspec.structs import replace

from vllm_launchers.private import make_folder, open_file, open_regular, user_folder
from vllm_launchers.typed_decoding import decode_json
from vllm_launchers.vllm.engines import Engine
from vllm_launchers.vllm.flags.evaluate import Evaluator
from vllm_launchers.vllm.flags.flag_table import FlagSpec, FlagsUnknownError, FlagTable
from vllm_launchers.vllm.flags.limits import limits
from vllm_launchers.vllm.flags.package import Module, Package, Symbol
from vllm_launchers.vllm.flags.source_location import MARK, package_folder, package_version
from vllm_launchers.vllm.flags.spec import ArgumentGroup, Registration, flag_spec
from vllm_launchers.vllm.flags.variables import reads_all, variable_specs

__all__ = ["FlagsUnknownError", "learn_flags", "learn_folder"]

PARSERS = (
    "vllm.entrypoints.common.cli_args",  # since 0.33
    "vllm.entrypoints.launchers.cli_args",  # since 0.28
    "vllm.entrypoints.openai.cli_args",
)
"""Modules that have contained ``make_arg_parser``, newest first."""

_DEVICES = {"cuda": "cuda", "rocm": "cuda", "cpu": "cpu", "xpu": "xpu", "tpu": "tpu"}
"""A build's PyTorch device; an AMD GPU is ``cuda`` too."""

_PARSER_NAMES = {
    "tool-call-parser": ("vllm.tool_parsers", "_TOOL_PARSERS_TO_REGISTER"),
    "reasoning-parser": ("vllm.reasoning", "_REASONING_PARSERS_TO_REGISTER"),
}
"""Flags that take a name from a registry, and the module's dictionary with it (since 0.12)."""

_FEWEST = 20
"""No vLLM has so few flags: finding fewer means that its source was not understood."""


def learn_flags(engine: Engine) -> FlagTable:
    """Every flag of ``vllm serve`` of an installation.

    Raises:
        FlagsUnknownError: its files cannot be found, read or understood; the text is one sentence.
    """
    folder = package_folder(engine)
    return learn_folder(folder, version=engine.version or package_version(folder), build=engine.build)


def learn_folder(folder: Path, *, version: str | None = None, build: str | None = None) -> FlagTable:
    """The same for a folder with vLLM's source: the package itself, with ``engine/arg_utils.py`` in it.

    Raises:
        FlagsUnknownError: as for `learn_flags`.
    """
    collecting = gc.isenabled()
    gc.disable()  # a hundred thousand small nodes, and no garbage among them
    try:
        return _learn(folder, version, build)
    except OSError as error:
        raise FlagsUnknownError(f"{folder}: vLLM's source cannot be read: {error.strerror or error}") from error
    except RecursionError as error:
        raise FlagsUnknownError(f"{folder}: vLLM's source is nested too deeply to be understood") from error
    finally:
        if collecting:
            gc.enable()


def _learn(folder: Path, version: str | None, build: str | None) -> FlagTable:
    package = Package(folder)
    module = next((found for name in PARSERS if _makes_parser(found := package.module(name))), None)
    if module is None:
        raise FlagsUnknownError(f"{folder}: its source has no make_arg_parser where vLLM 0.10 to 0.33 have it")
    facts: dict[str, object] = {}
    if device := _DEVICES.get(build or ""):
        facts["vllm.platforms.current_platform.device_type"] = device
    evaluator = Evaluator(package, facts)
    registration = Registration(evaluator)
    registration.follow(
        Symbol(f"{module.name}.make_arg_parser", module, module.names["make_arg_parser"]), [ArgumentGroup()]
    )
    flags: dict[str, FlagSpec] = {}
    for registered in registration.found:
        if (spec := flag_spec(evaluator, registered)) is not None:
            flags.setdefault(spec.name, spec)
    if len(flags) < _FEWEST:
        raise FlagsUnknownError(f"{folder}: only {len(flags)} flags were found in its source, which was not understood")
    _add_parser_names(evaluator, flags)
    _add_opposites(package, flags)
    envs = package.module("vllm.envs")
    values, all_read = ({}, False) if envs is None else (variable_specs(envs), reads_all(envs))
    return FlagTable(version, "installation", flags, _variables(package), values, all_read, limits(package))


def _makes_parser(module: Module | None) -> bool:
    return module is not None and isinstance(module.names.get("make_arg_parser"), ast.FunctionDef)


def _add_parser_names(evaluator: Evaluator, flags: dict[str, FlagSpec]) -> None:
    for flag, (name, registry) in _PARSER_NAMES.items():
        module = evaluator.package.module(name)
        node = module.names.get(registry) if module is not None else None
        if flag in flags and isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Dict):
            keys = (key.value for key in node.value.keys if isinstance(key, ast.Constant))
            flags[flag] = replace(flags[flag], words=tuple(sorted(key for key in keys if isinstance(key, str))))


def _add_opposites(package: Package, flags: dict[str, FlagSpec]) -> None:
    """Since 0.33 ``--enable-x`` also has ``--disable-x``, and the other way round."""
    module = package.module("vllm.utils.argparse_utils")
    if module is None or "EnableDisableAction" not in module.names:
        return
    for name, spec in list(flags.items()):
        prefix, _, rest = name.partition("-")
        other = {"enable": "disable", "disable": "enable"}.get(prefix)
        if other and spec.negatable:
            flags[name] = replace(spec, opposite=f"{other}-{rest}")


def _variables(package: Package) -> frozenset[str]:
    """Environment variables that ``vllm/envs.py`` reads."""
    module = package.module("vllm.envs")
    if module is None:
        return frozenset()
    table = module.names.get("environment_variables")
    if not isinstance(table, (ast.Assign, ast.AnnAssign)) or table.value is None:
        return frozenset()
    names = {
        key.value
        for node in ast.walk(table.value)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }
    return frozenset(name for name in names if name.startswith("VLLM_"))


FORMAT = 2
"""Raised when the file format, or the way of reading the source, changes, so that older files are not used."""

_LONGEST = 20_000_000
_SOURCES = (
    *("*.py", "config/*.py", "entrypoints/*/cli_args.py", "tool_parsers/__init__.py", "reasoning/__init__.py"),
    *("model_executor/layers/quantization/*.py", "v1/attention/backends/cpu_attn.py"),
)
_BESIDE = ("torch/version.py", "torch/lib/libtorch_python.so")


class _Kept(msgspec.Struct, frozen=True):
    """One file of the cache."""

    format: int
    folder: str
    stamp: str
    table: FlagTable


class _Format(msgspec.Struct, frozen=True):
    format: int


class FlagCache:
    """Flags of installations, learned once. Safe for several processes; methods may block on the disk."""

    def __init__(self, folder: Path | None = None) -> None:
        """``folder`` need not exist; default: the user's own cache."""
        self._folder = folder
        self._read_before: dict[Path, tuple[str, FlagTable]] = {}

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return self._folder if self._folder is not None else default_folder()

    def get(self, engine: Engine) -> FlagTable | None:
        """The cached flags of an engine, without learning them; None if not learned, or if it has changed since."""
        try:
            place = package_folder(engine)
        except FlagsUnknownError:
            return None
        stamp = _stamp(place, engine)
        if (held := self._read_before.get(place)) is not None and held[0] == stamp:
            return held[1]
        if (table := self._read(place, stamp)) is not None:
            self._read_before[place] = (stamp, table)
        return table

    def learn(self, engine: Engine) -> FlagTable:
        """Learn an engine's flags from its source and cache them. Takes a fraction of a second.

        Raises:
            FlagsUnknownError: they cannot be learned; the message is one sentence.
        """
        from vllm_launchers.vllm.flags.learn import learn_flags  # not needed if everything is cached

        place = package_folder(engine)
        stamp = _stamp(place, engine)  # before reading: a change while reading makes it be learned again
        table = learn_flags(engine)
        with contextlib.suppress(OSError):  # a full or read-only disk: it is learned again next time
            self._write(place, _Kept(FORMAT, str(place), stamp, table))
        return table

    def _path(self, place: Path) -> Path:
        return self.folder / f"{hashlib.sha256(os.fsencode(place)).hexdigest()[:24]}.json"

    def _read(self, place: Path, stamp: str) -> FlagTable | None:
        try:
            with open_regular(self._path(place)) as file:
                data = file.read(_LONGEST)
            if decode_json(data, _Format).format != FORMAT:
                return None
            kept = decode_json(data, _Kept)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return kept.table if kept.stamp == stamp and kept.folder == str(place) else None

    def _write(self, place: Path, kept: _Kept) -> None:
        path = self._path(place)
        make_folder(path.parent)
        fresh = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
        try:
            handle = open_file(fresh, os.O_WRONLY | os.O_EXCL)
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.encode(kept))
            fresh.replace(path)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise


def default_folder() -> Path:
    """The folder for learned flags, in the user's cache folder (``XDG_CACHE_HOME``)."""
    return user_folder("XDG_CACHE_HOME", ".cache") / "flags"


def _stamp(place: Path, engine: Engine) -> str:
    """Changes when the installation does: version, build, and the files that define flags."""
    digest = hashlib.sha256(f"{engine.version}\n{engine.build}\n".encode())
    files = sorted({place / MARK, *(path for pattern in _SOURCES for path in place.glob(pattern))})
    files += [place.parent / name for name in _BESIDE]
    for path in files:
        with contextlib.suppress(OSError):
            found = path.stat()
            digest.update(f"{path.name} {found.st_mtime_ns} {found.st_size}\n".encode())
    return digest.hexdigest()
