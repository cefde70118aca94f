"""Processes that keepers of this user started and that no keeper has any more; and how they are ended.

A keeper that adopts ends what a server left behind. What is found here is left when that cannot be: the server's
folder was deleted while it ran, its record says that it has ended, or cannot be read.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_launchers.keeper import daemon, evidence, memory, processes, store
from vllm_launchers.keeper.errors import KeeperError, NewerRecordError, NoSuchServerError
from vllm_launchers.keeper.records import ProcessIdentity
from vllm_launchers.procfs import PROC, access_mode, descriptors

LOCK = "keeper.lock"
KEEPER = daemon.NAME.decode()
TERM_SECONDS, KILL_SECONDS = 5.0, 5.0
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Orphan:
    """A process that is left of a server: who it is, its title, the server's folder, and why it is thought to be."""

    process: ProcessIdentity
    title: str
    folder: str
    why: str


@dataclass(frozen=True, slots=True)
class Orphans:
    """What was found, and a sentence for each that is none of these and yet has no keeper."""

    found: tuple[Orphan, ...] = ()
    spared: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Held:
    """A file of a server's folder that a process holds open: the folder as the kernel names it, whether it is there."""

    folder: str
    there: bool


def find(root: Path) -> Orphans:
    """Look through the processes of this user. ``root``: the state folder in question; what was started from another
    is spared."""
    table = processes.table()
    held: dict[int, _Held] = {}
    kept: set[str] = set()
    for pid in table:
        if pid == os.getpid() or processes.owner(pid) != os.getuid():
            continue
        links = descriptors(pid) or {}
        if title(pid) == KEEPER:
            kept |= {folder for link in links.values() if (folder := _folder(link, evidence.PIPE)) is not None}
            continue
        lock = next((folder for link in links.values() if (folder := _folder(link, LOCK)) is not None), None)
        if lock is not None:
            kept.add(lock)  # a console that is about to start a keeper
        elif (holding := _held(pid, links)) is not None:
            held[pid] = holding
    verdicts = {one.folder: _judge(Path(one.folder)) for one in held.values() if one.there}
    found: list[Orphan] = []
    spared: set[str] = set()
    for pid, one in held.items():
        if one.folder in kept and one.there:
            continue
        why, sentence = verdicts[one.folder] if one.there else ("the folder of its server was deleted", "")
        if Path(one.folder).is_relative_to(root.resolve()):
            if why:
                found.append(Orphan(processes.identity_of(table[pid]), title(pid), one.folder, why))
            elif sentence:
                spared.add(sentence)
        elif why:
            state = Path(one.folder).parent.parent
            spared.add(f"pid {pid} ({title(pid)}): {why}; see 'vllm-console --state {state} leftovers'")
    known = {orphan.process for orphan in found}
    found += [orphan for orphan in _remembered(root) if orphan.process not in known]
    return Orphans(tuple(found), tuple(sorted(spared)))


def left_of(folder: Path) -> list[int]:
    """The pids of all processes that hold on to a server's folder or were seen among its own, its keeper apart."""
    pipe = folder.resolve() / evidence.PIPE
    candidates = [pid for pid in processes.table() if pid != os.getpid() and title(pid) != KEEPER]
    remembered = {member.pid for member in memory.read(folder).members if processes.alive(member)}
    return [pid for pid in candidates if pid in remembered or evidence.is_servers(pid, pipe)]


def end(orphans: Iterable[Orphan], root: Path) -> tuple[list[Orphan], list[str]]:
    """End them: SIGTERM, and after a while SIGKILL. Returns those that are gone, and a sentence for each that is not.

    Each is looked at again first: one that is not found any more is left alone. Takes 10 s at most.
    """
    wanted = list(orphans)
    still = {orphan.process for orphan in find(root).found}
    ours = [orphan for orphan in wanted if orphan.process in still]
    for number, patience in ((signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
        for orphan in ours:
            processes.send(orphan.process, number)
            processes.send(orphan.process, signal.SIGCONT)  # one that is stopped would never notice
        deadline = time.monotonic() + patience
        while any(processes.alive(orphan.process) for orphan in ours) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
    gone = [orphan for orphan in wanted if not processes.alive(orphan.process)]
    left = [orphan for orphan in wanted if orphan not in gone]
    return gone, [
        f"pid {one.process.pid} ({one.title}): "
        + ("does not end even by SIGKILL" if one in ours else "is looked after again, or cannot be told from others'")
        for one in left
    ]


def title(pid: int) -> str:
    """A process's name of at most 15 characters, which vLLM sets for its engines and workers."""
    try:
        return Path(PROC, str(pid), "comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def _held(pid: int, links: Mapping[int, str]) -> _Held | None:
    """Which server's log pipe, or companion's log, a process has open as only keepers hand it out."""
    for name, access in ((evidence.PIPE, (os.O_RDWR,)), (evidence.COMPANION_LOG, (os.O_WRONLY, os.O_RDWR))):
        for number, link in links.items():
            folder = _folder(link, name)
            if folder is None or access_mode(pid, number) not in access:
                continue
            if link.endswith(evidence.DELETED):
                return _Held(folder, there=False)
            if evidence.holds(pid, Path(folder, name), *access):
                return _Held(folder, there=True)
    return None


def _folder(link: str, name: str) -> str | None:
    """The server's folder, where a link leads to a file of this name in one."""
    path = Path(link.removesuffix(evidence.DELETED))
    return str(path.parent) if path.name == name and path.parent.parent.name == "servers" else None


def _judge(folder: Path) -> tuple[str, str]:
    """Why what holds on to a server's folder is an orphan, empty where it is none; then a sentence where that helps."""
    if store.lock_is_held(folder):
        return "", ""
    try:
        record = store.read_record(folder)
    except NewerRecordError:
        return "", f"{folder}: its record is of a newer version, which alone can judge what is left of its server"
    except NoSuchServerError:
        return "the record of its server was deleted", ""
    except KeeperError as error:
        return f"the record of its server cannot be read ({error})", ""
    # One that needs a keeper is adopted at the next look.
    return ("", "") if record.needs_keeper else (f"its server is {record.state}", "")


def _remembered(root: Path) -> Iterator[Orphan]:
    """Processes that hold nothing open, and that a keeper saw among those of a server which has ended."""
    try:
        folders = sorted(store.servers_folder(root).iterdir())
    except OSError:
        return
    for folder in folders:
        members = [one for one in memory.read(folder).members if processes.alive(one)]
        if members and (why := _judge(folder)[0]):
            for member in members:
                if processes.owner(member.pid) == os.getuid():
                    yield Orphan(
                        member, title(member.pid), str(folder), f"{why}; its keeper saw it among its processes"
                    )
