"""What was learned of each installation, kept on disk: a file per package folder, read in a few milliseconds.

A file holds for the version of the installation and the modification times and sizes of the files that flags come
from; when one of them changes the flags are learned anew. Several processes may write at once: the last one wins.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from pathlib import Path

import msgspec

from vllm_launchers.machine.flags.errors import FlagsUnknownError
from vllm_launchers.machine.flags.model import FlagTable
from vllm_launchers.machine.flags.place import MARK, package_folder
from vllm_launchers.machine.model import Engine
from vllm_launchers.private import make_folder, open_file

FORMAT = 1
"""Raised when files of an older form, or made by an older way of reading the source, must not be used."""

_LONGEST = 20_000_000
_SOURCES = ("*.py", "config/*.py", "entrypoints/*/cli_args.py", "tool_parsers/__init__.py", "reasoning/__init__.py")


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
        """``folder`` need not exist; by default it is the person's own cache."""
        self._folder = folder
        self._read_before: dict[Path, tuple[str, FlagTable]] = {}

    @property
    def folder(self) -> Path:
        """Where the files lie."""
        return self._folder if self._folder is not None else default_folder()

    def get(self, engine: Engine) -> FlagTable | None:
        """What is known of an engine, without learning it; None when it was not learned, or has changed since."""
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
        """Learn an engine's flags from its source and keep them. Takes part of a second.

        Raises:
            FlagsUnknownError: they cannot be learned; the text is one sentence.
        """
        from vllm_launchers.machine.flags.learn import learn_flags  # not wanted when all is known

        place = package_folder(engine)
        stamp = _stamp(place, engine)  # before it is read: a change while it is read makes it be learned again
        table = learn_flags(engine)
        with contextlib.suppress(OSError):  # a full or read-only disk: it is only learned again next time
            self._write(place, _Kept(FORMAT, str(place), stamp, table))
        return table

    def _path(self, place: Path) -> Path:
        return self.folder / f"{hashlib.sha256(os.fsencode(place)).hexdigest()[:24]}.json"

    def _read(self, place: Path, stamp: str) -> FlagTable | None:
        try:
            with self._path(place).open("rb") as file:
                data = file.read(_LONGEST)
            if msgspec.json.decode(data, type=_Format).format != FORMAT:
                return None
            kept = msgspec.json.decode(data, type=_Kept)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return kept.table if kept.stamp == stamp and kept.folder == str(place) else None

    def _write(self, place: Path, kept: _Kept) -> None:
        path = self._path(place)
        make_folder(path.parent)
        fresh = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            handle = open_file(fresh, os.O_WRONLY | os.O_EXCL)
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.encode(kept))
            fresh.replace(path)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise


def default_folder() -> Path:
    """The folder for what was learned, under the person's cache folder (``XDG_CACHE_HOME``)."""
    from platformdirs import user_cache_path

    return user_cache_path("vllm-console") / "flags"


def _stamp(place: Path, engine: Engine) -> str:
    """Changes when the installation does: version, build, and the files that flags come from."""
    digest = hashlib.sha256(f"{engine.version}\n{engine.build}\n".encode())
    files = sorted({place / MARK, *(path for pattern in _SOURCES for path in place.glob(pattern))})
    for path in files:
        with contextlib.suppress(OSError):
            found = path.stat()
            digest.update(f"{path.name} {found.st_mtime_ns} {found.st_size}\n".encode())
    return digest.hexdigest()
