"""What servers that have ended left on this machine: processes without a keeper, and files in ``/dev/shm``."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_launchers.keeper.orphans import Orphan
    from vllm_launchers.machine.leftovers import LeftFile

FIRST_LOOK_SECONDS, LOOK_SECONDS = 5.0, 60.0
"""When a console looks for the first time, and how often after: a look takes a quarter of a second of CPU."""


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Processes and files that may go, and a sentence for each thing that is not touched."""

    processes: Sequence[Orphan] = ()
    files: Sequence[LeftFile] = ()
    spared: Sequence[str] = ()

    @property
    def empty(self) -> bool:
        """Whether nothing is there to be removed."""
        return not self.processes and not self.files

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class Removed:
    """What was ended and removed, and a sentence for each thing that was not."""

    processes: Sequence[Orphan] = field(default_factory=tuple)
    files: Sequence[LeftFile] = field(default_factory=tuple)
    problems: Sequence[str] = ()


def look(state: Path) -> Leftovers:
    """Look once. ``state``: the state folder whose keepers' processes are meant."""
    from vllm_launchers.keeper import orphans
    from vllm_launchers.machine import leftovers

    found = orphans.find(state)
    files = leftovers.find(_recorded(state))
    return Leftovers(found.found, files.found, (*found.spared, *files.spared))


def remove(state: Path, wanted: Leftovers) -> Removed:
    """End and remove what a look has found, each only if another look finds it too. Takes about 10 s at most."""
    from vllm_launchers.keeper import orphans
    from vllm_launchers.machine import leftovers

    ended, unended = orphans.end(wanted.processes, state)
    # Only now: files that these processes used are found at a later look.
    gone, problems = leftovers.remove(wanted.files, leftovers.find(_recorded(state)))
    return Removed(ended, gone, (*unended, *problems))


def words(found: Leftovers) -> str:
    """How much there is, as ``2 processes and 10 files (674 MiB) in /dev/shm``."""
    parts = []
    if number := len(found.processes):
        parts.append("1 process" if number == 1 else f"{number} processes")
    if number := len(found.files):
        parts.append(f"{'1 file' if number == 1 else f'{number} files'} ({size_words(found.size)}) in /dev/shm")
    return " and ".join(parts) or "nothing"


def size_words(size: int) -> str:
    """Bytes for people."""
    if size < 1 << 20:
        return f"{max(1, size >> 10)} KiB"
    return f"{size / (1 << 20):.0f} MiB" if size < 1 << 30 else f"{size / (1 << 30):.1f} GiB"


def process_words(orphan: Orphan) -> str:
    """One process, in a line."""
    return f"pid {orphan.process.pid} {orphan.title}: of server {os.path.basename(orphan.folder)}; {orphan.why}"  # noqa: PTH119


def file_words(file: LeftFile) -> str:
    """One file, in a line."""
    return f"{file.path} ({size_words(file.size)}): {file.why}; nobody has it open"


class LeftoversVerbs:
    """The fleet's verbs about it, and the notice in a console."""

    _state: Path
    _charts: bool
    _leftovers_watch: LeftoversWatch | None = None

    def leftovers(self) -> Leftovers:
        """What servers that have ended left: processes without a keeper, and files in ``/dev/shm``. Only looks."""
        return look(self._state)

    def remove_leftovers(self, wanted: Leftovers) -> Removed:
        """End and remove what `leftovers` found, as far as it is still so.

        Raises:
            RefusedError: this console is read-only.
        """
        self._refuse_read_only()
        removed = remove(self._state, wanted)
        if self._leftovers_watch is not None:
            self._leftovers_watch.again()
        return removed

    def _refuse_read_only(self) -> None:
        raise NotImplementedError

    def _leftovers_notice(self) -> list[str]:
        """What a console says of it; commands look only when they are asked to."""
        if not self._charts:
            return []
        if self._leftovers_watch is None:
            self._leftovers_watch = LeftoversWatch(self._state)
        return self._leftovers_watch.notices


class LeftoversWatch:
    """Looks now and then in a thread of its own; ``notices`` is what there is to say."""

    def __init__(self, state: Path) -> None:
        self.notices: list[str] = []
        self._state = state
        self._wake = threading.Event()
        self._ended = False
        threading.Thread(target=self._watch, name="leftovers", daemon=True).start()

    def again(self) -> None:
        """Look at once."""
        self.notices = []
        self._wake.set()

    def close(self) -> None:
        """Look no more."""
        self._ended = True
        self._wake.set()

    def _watch(self) -> None:
        wait = FIRST_LOOK_SECONDS
        while not self._wake.wait(wait) or not self._ended:
            self._wake.clear()
            wait = LOOK_SECONDS
            with contextlib.suppress(OSError, ValueError):
                found = look(self._state)
                self.notices = [f"Servers that have ended left {words(found)}: X removes it"] if not found.empty else []


def _recorded(state: Path) -> dict[str, int]:
    """What keepers saw of shared memory in their servers, name to inode."""
    from vllm_launchers.keeper import memory, store

    found: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for folder in store.servers_folder(state).iterdir():
            found |= memory.read(folder).shared_memory
    return found
