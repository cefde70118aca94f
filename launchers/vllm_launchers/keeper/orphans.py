"""Orphans: processes started by this user's keepers that no longer have a keeper; how to find and end them.

A keeper that adopts a server ends its leftovers. Orphans are what remains when that is not possible: the server's
folder was deleted while it ran, or its record says that it has ended or can't be read.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from vllm_launchers.keeper import folders, location, process_group, processes
from vllm_launchers.keeper.errors import KeeperError, NewerRecordError, NoSuchServerError
from vllm_launchers.keeper.files import LOCK, OUTPUT, SIDECAR_LOG
from vllm_launchers.keeper.processes import KEEPER_TITLE
from vllm_launchers.keeper.records import ProcessIdentity, State
from vllm_launchers.procfs import access_mode, descriptors, title
from vllm_launchers.values import Value

FOLDER_DELETED = "its folder was deleted while it ran, so no other command reaches it"
"""Why a server's processes are orphans although they may still serve and have a keeper: nobody can reach it."""
TERM_SECONDS, KILL_SECONDS = 5.0, 5.0
POLL_SECONDS = 0.05


class Orphan(Value):
    """A leftover process of a server: its identity, its title, the server's folder, and why it is an orphan."""

    process: ProcessIdentity
    title: str
    folder: str
    why: str


class Orphans(Value):
    """The orphans found, and a sentence for each process that has no keeper but must not be ended."""

    found: tuple[Orphan, ...] = ()
    spared: tuple[str, ...] = ()


class _Held(Value):
    """A server's file that a process holds open: the folder as the kernel names it, and whether the file is there."""

    folder: str
    there: bool


def find(root: Path) -> Orphans:  # noqa: C901 (every branch is a reason not to signal)
    """Search this user's processes. ``root``: the state folder; processes that belong to another one are spared."""
    table = processes.table()
    held: dict[int, _Held] = {}
    kept: dict[str, set[int]] = {}
    """Maps a server's folder to its keepers, or to the console that is about to start one."""
    for pid in table:
        if pid == os.getpid() or processes.owner(pid) != os.getuid():
            continue
        links = descriptors(pid) or {}
        if title(pid) == KEEPER_TITLE:
            for folder in {_folder(link, OUTPUT) for link in links.values()} - {None}:
                kept.setdefault(str(folder), set()).add(pid)
            continue
        lock = next((folder for link in links.values() if (folder := _folder(link, LOCK)) is not None), None)
        if lock is not None:
            kept.setdefault(lock, set()).add(pid)  # a console that is about to start a keeper
        elif (holding := _held(pid, links)) is not None:
            held[pid] = holding
    reasons = {one.folder: _orphaned(Path(one.folder)) for one in held.values() if one.there}
    found: list[Orphan] = []
    spared: set[str] = set()
    for pid, one in held.items():
        if one.folder in kept and (one.there or Path(one.folder).is_dir()):
            why, sentence = _older_than_server(table, pid, Path(one.folder), kept[one.folder]), ""
        else:
            why, sentence = reasons[one.folder] if one.there else (FOLDER_DELETED, "")
        if Path(one.folder).is_relative_to(root.resolve()):
            if why:
                found.append(Orphan(processes.identity_of(table[pid]), title(pid), one.folder, why))
            elif sentence:
                spared.add(sentence)
        elif why:
            state = Path(one.folder).parent.parent
            spared.add(f"pid {pid} ({title(pid)}): {why}; see {folders.command_text(state, 'leftovers')}")
    known = {orphan.process for orphan in found}
    found += [orphan for orphan in _recorded(root) if orphan.process not in known]
    return Orphans(tuple(found), tuple(sorted(spared)))


def deleted_folder(pid: int) -> Path | None:
    """The folder of the server that a process belongs to, if it was deleted while the process ran; else None."""
    held = _held(pid, descriptors(pid) or {})
    return Path(held.folder) if held is not None and not held.there else None


def left_of(folder: Path) -> list[int]:
    """The pids of all processes that have a server's output open or were recorded in its group, except its keeper."""
    output = folder.resolve() / OUTPUT
    candidates = [pid for pid in processes.table() if pid != os.getpid() and title(pid) != KEEPER_TITLE]
    recorded = {member.pid for member in process_group.recorded(folder).members if processes.alive(member)}
    return [pid for pid in candidates if pid in recorded or process_group.has_output(pid, output)]


def end(orphans: Iterable[Orphan], root: Path) -> tuple[list[Orphan], list[str]]:
    """End orphans: SIGTERM, then SIGKILL. Returns those that are gone, and a sentence for each that is not.

    Each is checked again first: a process that is no longer an orphan is left alone. Takes at most 10 s.
    """
    wanted = list(orphans)
    still = {orphan.process for orphan in find(root).found}
    ours = [orphan for orphan in wanted if orphan.process in still]
    for number, timeout in ((signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
        for orphan in ours:
            processes.send(orphan.process, number)
            processes.send(orphan.process, signal.SIGCONT)  # a stopped process would never react
        deadline = time.monotonic() + timeout
        while any(processes.alive(orphan.process) for orphan in ours) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
    gone = [orphan for orphan in wanted if not processes.alive(orphan.process)]
    left = [orphan for orphan in wanted if orphan not in gone]
    return gone, [
        f"pid {one.process.pid} ({one.title}): "
        + ("survives SIGKILL" if one in ours else "has a keeper again, or can't be identified with certainty")
        for one in left
    ]


def _older_than_server(table: processes.Table, pid: int, folder: Path, keepers: set[int]) -> str:
    """Why a process with an open file in a server's folder is not supervised by that folder's keeper; empty if it is.

    A keeper knows its server's descendants and everything that started after the server. An older process belongs to an
    earlier server.
    """
    try:
        record = folders.read_record(folder)
    except KeeperError:
        return ""
    server = record.server
    if record.state is not State.READY or server is None or not processes.alive(server):
        return ""  # the keeper may be ending the leftovers right now
    below = processes.descendants(table, [*keepers, server.pid])
    sidecar = record.sidecar.pid if record.sidecar is not None else 0
    process, theirs = table[pid], {server.pid, sidecar, *below}
    if pid in theirs or process.session in theirs or process.start_time >= server.start_time:
        return ""
    if processes.identity_of(process) in process_group.recorded(folder).members:
        return ""
    return f"it is older than the current server {folder.name}, and not a child of its keeper"


def _held(pid: int, links: Mapping[int, str]) -> _Held | None:
    """The server's output or sidecar log that a process has open the way only keepers hand it out; None if neither."""
    for name, access in ((OUTPUT, (os.O_RDWR,)), (SIDECAR_LOG, (os.O_WRONLY, os.O_RDWR))):
        for number, link in links.items():
            folder = _folder(link, name)
            if folder is None or access_mode(pid, number) not in access:
                continue
            if link.endswith(process_group.DELETED):
                return _Held(folder, there=False)
            if process_group.holds_open(pid, Path(folder, name), *access):
                return _Held(folder, there=True)
    return None


def _folder(link: str, name: str) -> str | None:
    """The server's folder, if a link points to a file with this name in one."""
    path = Path(link.removesuffix(process_group.DELETED))
    return str(path.parent) if path.name == name and path.parent.parent.name == "servers" else None


def _orphaned(folder: Path) -> tuple[str, str]:
    """Why a process in a server's folder is an orphan (empty if it is not), and a sentence if it must be spared."""
    if folders.lock_is_held(folder):
        return "", ""
    try:
        record = folders.read_record(folder)
        if place := location.elsewhere(folder, record):
            return "", f"{folder}: its server runs {place}; clean up there"
    except NewerRecordError:
        return "", f"{folder}: its record was written by a newer vllm-console; clean up with that version"
    except NoSuchServerError:
        return "the record of its server was deleted", ""
    except KeeperError as error:
        return f"the record of its server can't be read ({error})", ""
    # A server that needs a keeper is adopted at the next poll.
    return ("", "") if record.needs_keeper else (f"its server is {record.state}", "")


def _recorded(root: Path) -> Iterator[Orphan]:
    """Processes that have no such file open but that a keeper recorded in the group of a server that has ended."""
    try:
        found = sorted(folders.servers_folder(root).iterdir())
    except OSError:
        return
    for folder in found:
        members = [one for one in process_group.recorded(folder).members if processes.alive(one)]
        if members and (why := _orphaned(folder)[0]):
            for member in members:
                if processes.owner(member.pid) == os.getuid():
                    yield Orphan(member, title(member.pid), str(folder), f"{why}; its keeper recorded it")
