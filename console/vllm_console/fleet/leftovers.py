"""Leftovers of ended servers on this machine: processes without a keeper, and files in ``/dev/shm``."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from vllm_console.text import size as size_text
from vllm_launchers.errors import OperationError
from vllm_launchers.keeper.folders import command_text
from vllm_launchers.units import counted

if TYPE_CHECKING:
    from vllm_launchers.host.shared_memory import LeftFile
    from vllm_launchers.keeper.orphans import Orphan

FIRST_SEARCH_SECONDS, SEARCH_SECONDS = 5.0, 300.0
"""When a console first searches for leftovers, and how often after that: a search takes 0.25 s of CPU time."""


class Leftovers(msgspec.Struct, frozen=True):
    """Processes and files that can be removed, and a sentence for each one that must not be touched."""

    processes: Sequence[Orphan] = ()
    files: Sequence[LeftFile] = ()
    spared: Sequence[str] = ()

    @property
    def empty(self) -> bool:
        """Whether there is nothing to remove."""
        return not self.processes and not self.files

    @property
    def size(self) -> int:
        """Total bytes of the files."""
        return sum(file.size for file in self.files)


class Removed(msgspec.Struct, frozen=True):
    """The ended processes and removed files, and a sentence for each one that was not."""

    processes: Sequence[Orphan] = msgspec.field(default_factory=tuple)
    files: Sequence[LeftFile] = msgspec.field(default_factory=tuple)
    problems: Sequence[str] = ()


def find_leftovers(state: Path) -> Leftovers:
    """Search once; ``state`` is the state folder whose keepers' processes to search for."""
    from vllm_launchers.host import shared_memory
    from vllm_launchers.keeper import orphans

    found = orphans.find(state)
    files = shared_memory.find(_recorded(state))
    return Leftovers(found.found, files.found, (*found.spared, *files.spared))


def remove_leftovers(state: Path, wanted: Leftovers) -> Removed:
    """End and remove what a search found, each only if a second search finds it too. Takes up to about 10 s."""
    from vllm_launchers.host import shared_memory
    from vllm_launchers.keeper import orphans

    ended, unended = orphans.end(wanted.processes, state)
    # Search after the processes ended, to find files that they used.
    gone, problems = shared_memory.remove(wanted.files, shared_memory.find(_recorded(state)))
    return Removed(ended, gone, (*unended, *problems))


def format_leftovers(found: Leftovers) -> str:
    """The amount as text: ``2 processes and 10 files (674 MiB) in /dev/shm``."""
    parts = []
    if number := len(found.processes):
        parts.append("1 process" if number == 1 else f"{number} processes")
    if number := len(found.files):
        parts.append(f"{counted(number, 'file')} ({size_text(found.size)}) in /dev/shm")
    return " and ".join(parts) or "nothing"


def lost_servers(found: Iterable[Orphan]) -> list[Path]:
    """The folders of servers that were deleted while these ran."""
    from vllm_launchers.keeper.orphans import FOLDER_DELETED

    return sorted({Path(one.folder) for one in found if one.why == FOLDER_DELETED})


def find_lost(state: Path) -> list[Path]:
    """`lost_servers` among all processes, for the state folder ``state``."""
    from vllm_launchers.keeper import orphans

    return lost_servers(orphans.find(state).found)


def format_lost(folders: Collection[Path]) -> str:
    """A sentence naming servers that may still serve but can't be reached, by their folders; empty if none."""
    if not folders:
        return ""
    one, names = len(folders) == 1, ", ".join(folder.name for folder in folders)
    return (
        f"The {'folder' if one else 'folders'} of {names} {'was' if one else 'were'} deleted while "
        f"{'it' if one else 'they'} ran: {'it' if one else 'they'} may still serve, but can only be ended"
    )


def format_lost_here(state: Path, folders: Collection[Path]) -> str:
    """`format_lost` with the command that ends them; empty if none."""
    lost = format_lost(folders)
    return lost and f"{lost}; {command_text(state, 'leftovers --remove')} does that"


def process_lines(found: Iterable[Orphan]) -> list[str]:
    """The processes, in one line for all that differ only in their pids."""
    alike: dict[str, list[str]] = {}
    for one in found:
        what = f"{one.title}: of server {os.path.basename(one.folder)}; {one.why}"  # noqa: PTH119
        alike.setdefault(what, []).append(str(one.process.pid))
    return [f"pid{'s' if len(pids) > 1 else ''} {', '.join(pids)} {what}" for what, pids in alike.items()]


def files_by_reason(files: Iterable[LeftFile]) -> dict[str, list[LeftFile]]:
    """The files, by a line that says how many there are and why they are leftovers."""
    found: dict[str, list[LeftFile]] = {}
    for file in files:
        found.setdefault(file.why, []).append(file)
    return {_files_line(why, alike): alike for why, alike in found.items()}


def _files_line(why: str, files: Sequence[LeftFile]) -> str:
    them = "it" if len(files) == 1 else "them"
    return f"{counted(len(files), 'file')} in /dev/shm: {why}; no process has {them} open"


def name_and_size(file: LeftFile) -> str:
    """``psm_0f1e (64 MiB)``."""
    return f"{os.path.basename(file.path)} ({size_text(file.size)})"  # noqa: PTH119


class FleetLeftovers:
    """Finds and removes what ended servers left: processes without a keeper, and files in ``/dev/shm``."""

    def __init__(self, state: Path, refuse_read_only: Callable[[], None]) -> None:
        self._state, self._refuse_read_only = state, refuse_read_only
        self._found = Leftovers()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._ended = False

    def find(self) -> Leftovers:
        """Search once. Changes nothing."""
        return find_leftovers(self._state)

    def remove(self, wanted: Leftovers) -> Removed:
        """End and remove what `find` found, if it is still there.

        Raises:
            RefusedError: this console is read-only.
        """
        self._refuse_read_only()
        removed = remove_leftovers(self._state, wanted)
        self._found = Leftovers()
        self._wake.set()  # search again now
        return removed

    def notices(self, lost: Collection[Path]) -> list[str]:
        """What a search in another thread, started by the first call, found in the last minutes, as sentences.

        ``lost`` are the folders of the servers that are known to run although these were deleted. A search is rare but
        finds more, such as those that don't serve.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="leftovers", daemon=True)
            self._thread.start()
        found = replace(self._found, processes=[one for one in self._found.processes if _remains(one)])
        known = {*lost, *lost_servers(found.processes)}
        if not known and found.empty:
            return []
        what = format_lost(sorted(known)) or f"Ended servers left {format_leftovers(found)} behind"
        return [f"{what}: the command 'remove leftovers' lists and removes them"]

    def close(self) -> None:
        """Stop searching."""
        self._ended = True
        self._wake.set()

    def _watch(self) -> None:
        wait = FIRST_SEARCH_SECONDS
        while not self._wake.wait(wait) or not self._ended:
            self._wake.clear()
            wait = SEARCH_SECONDS
            with contextlib.suppress(OSError, ValueError, OperationError):
                found = find_leftovers(self._state)
                # Files that any program may have left are no reason for a notice; X and ``leftovers`` list them.
                self._found = replace(found, files=[file for file in found.files if file.sure])


def _remains(orphan: Orphan) -> bool:
    """Whether it still runs, and its server's folder, if deleted, was not created again by the server's keeper."""
    from vllm_launchers.keeper import orphans, processes

    recovered = orphan.why == orphans.FOLDER_DELETED and Path(orphan.folder).is_dir()
    return not recovered and processes.alive(orphan.process)


def _recorded(state: Path) -> dict[str, int]:
    """The shared memory that keepers recorded for their servers: name to inode."""
    from vllm_launchers.keeper import folders, process_group

    found: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for folder in folders.servers_folder(state).iterdir():
            found |= process_group.recorded(folder).shared_memory
    return found
