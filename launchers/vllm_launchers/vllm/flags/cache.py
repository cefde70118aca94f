"""Flags learned from each installation, cached on disk: one file per package folder, read in a few milliseconds.

A file is valid for an installation's version and for the modification times and sizes of the files that define flags.
If any of these change, the flags are learned again. Several processes may write at once; the last one wins.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

import msgspec

from vllm_launchers.private import make_folder, open_regular, replace_file, user_folder
from vllm_launchers.typed_decoding import decode_json
from vllm_launchers.vllm.engines import Engine
from vllm_launchers.vllm.flags.flag_table import FlagsUnknownError, FlagTable
from vllm_launchers.vllm.flags.source_location import MARK, package_folder

FORMAT = 5
"""Increment when the file format or the way of reading the source changes, so that older files are not used."""

_MOST_BYTES = 20_000_000
_SOURCES = (
    *("*.py", "config/*.py", "entrypoints/*/cli_args.py", "tool_parsers/__init__.py", "reasoning/__init__.py"),
    *("model_executor/layers/quantization/*.py", "v1/attention/backends/cpu_attn.py"),
    "distributed/kv_transfer/kv_connector/factory.py",
)
_BESIDE = ("torch/version.py", "torch/lib/libtorch_python.so")


class _Kept(msgspec.Struct, frozen=True):
    format: int
    folder: str
    stamp: str
    table: FlagTable


class _Format(msgspec.Struct, frozen=True):
    format: int


class FlagCache:
    """Flags of installations, learned once. Safe for several processes; methods may block on the disk."""

    def __init__(self, folder: Path | None = None) -> None:
        """``folder`` need not exist. Default: the user's cache."""
        self._folder = folder
        self._read_before: dict[Path, tuple[str, FlagTable]] = {}

    @property
    def folder(self) -> Path:
        """The cache's folder."""
        return self._folder if self._folder is not None else default_folder()

    def get(self, engine: Engine) -> FlagTable | None:
        """The cached flags of an engine; None if they were not learned, or if the engine has changed since."""
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
        stamp = _stamp(place, engine)  # before reading, so that a change meanwhile makes the table invalid
        table = learn_flags(engine)
        with contextlib.suppress(OSError):  # a full or read-only disk: the flags are learned again next time
            self._write(place, _Kept(FORMAT, str(place), stamp, table))
        return table

    def _path(self, place: Path) -> Path:
        return self.folder / f"{hashlib.sha256(os.fsencode(place)).hexdigest()[:24]}.json"

    def _read(self, place: Path, stamp: str) -> FlagTable | None:
        try:
            with open_regular(self._path(place)) as file:
                data = file.read(_MOST_BYTES)
            if decode_json(data, _Format).format != FORMAT:
                return None
            kept = decode_json(data, _Kept)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return kept.table if kept.stamp == stamp and kept.folder == str(place) else None

    def _write(self, place: Path, kept: _Kept) -> None:
        path = self._path(place)
        make_folder(path.parent)
        replace_file(path, msgspec.json.encode(kept))


def default_folder() -> Path:
    """The folder for learned flags, in the user's cache folder (``XDG_CACHE_HOME``)."""
    return user_folder("XDG_CACHE_HOME", ".cache") / "flags"


def _stamp(place: Path, engine: Engine) -> str:
    """A digest of version, build, and files that define flags: it changes when the installation does."""
    digest = hashlib.sha256(f"{engine.version}\n{engine.build}\n".encode())
    files = sorted({place / MARK, *(path for pattern in _SOURCES for path in place.glob(pattern))})
    files += [place.parent / name for name in _BESIDE]
    for path in files:
        with contextlib.suppress(OSError):
            found = path.stat()
            digest.update(f"{path.name} {found.st_mtime_ns} {found.st_size}\n".encode())
    return digest.hexdigest()
