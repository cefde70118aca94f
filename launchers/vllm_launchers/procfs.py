"""Reads data about processes from ``/proc``. Standard library only: every package may use it."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterable, Iterator, KeysView
from pathlib import Path

from vllm_launchers.values import Value

PROC = "/proc"
SHARED_MEMORY = "/dev/shm"
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


class ProcessStat(Value):
    """Fields of ``/proc/PID/stat``. ``start_time``: clock ticks since boot. ``state``: a letter, of the main thread."""

    pid: int
    state: str
    parent: int
    session: int
    start_time: int
    threads: int = 1

    @property
    def running(self) -> bool:
        """Whether the process is running, i.e. not a zombie.

        If only the main thread has ended, the others still hold files and GPU memory.
        """
        return self.state not in "ZXx" or self.threads > 1


def stat(pid: int, proc: str = PROC, *, sure: bool = False) -> ProcessStat | None:
    """Read one process; None if that is not possible. ``sure``: raise OSError if only descriptors or memory ran out."""
    try:
        fd = os.open(f"{proc}/{pid}/stat", os.O_RDONLY)
        try:
            text = os.read(fd, 4096)
        finally:
            os.close(fd)
    except OSError as error:
        if sure and error.errno in _SHORT:
            raise
        return None
    # The command name is in parentheses and may contain anything, even parentheses.
    words = text[text.rfind(b")") + 2 :].split()
    if len(words) < 20:
        return None
    return ProcessStat(pid, words[0].decode(), int(words[1]), int(words[3]), int(words[19]), int(words[17]))


def started_at(start_time: int) -> float:
    """When a process was started (Unix seconds), from field 22 of its ``/proc/PID/stat``."""
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return booted + start_time / os.sysconf("SC_CLK_TCK")


def pids(proc: str = PROC) -> list[int]:
    """The pids of all visible processes."""
    return [int(name) for name in os.listdir(proc) if name.isdecimal()]  # noqa: PTH208 - names are all that is wanted


def descendants(processes: Iterable[ProcessStat], ancestors: Iterable[int]) -> KeysView[int]:
    """Pids of all descendants, nearest first, not including the ancestors themselves."""
    children: dict[int, list[int]] = {}
    for process in processes:
        children.setdefault(process.parent, []).append(process.pid)
    below: dict[int, None] = {}
    waiting = list(ancestors)
    for pid in waiting:
        new = [child for child in children.get(pid, ()) if child not in below]
        below.update(dict.fromkeys(new))
        waiting += new
    return below.keys()


def title(pid: int) -> str:
    """A process's name (at most 15 characters), which vLLM sets for its engines and workers; empty if it is gone."""
    try:
        return Path(f"{PROC}/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def command_lines() -> Iterator[tuple[int, list[str]]]:
    """The pid and the command line of each visible process that has one."""
    for pid in pids():
        with contextlib.suppress(OSError):  # it has just ended
            words = Path(f"{PROC}/{pid}/cmdline").read_bytes().rstrip(b"\0")
            if words:
                yield pid, os.fsdecode(words).split("\0")


def resident_mib(pid: int) -> int | None:
    """Resident memory of a process and its children in MiB; None if it is gone or hidden.

    Pages that they share are counted once for each.
    """
    try:
        with open(f"{PROC}/{pid}/task/{pid}/children", "rb") as file:  # noqa: PTH123 - cheaper than a Path
            children = file.read().split()
        pages = _resident_pages(pid)
    except (OSError, ValueError, IndexError):
        return None
    for child in children:
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has just ended
            pages += _resident_pages(int(child))
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def _resident_pages(pid: int) -> int:
    with open(f"{PROC}/{pid}/statm", "rb") as file:  # noqa: PTH123 - cheaper than a Path
        return int(file.read().split()[1])


def open_files(pid: int) -> list[str] | None:
    """Link texts of a process's open descriptors; None if hidden (another user's process)."""
    found = descriptors(pid)
    return None if found is None else list(found.values())


def descriptors(pid: int) -> dict[int, str] | None:
    """A process's open descriptors with their link texts; None if hidden."""
    found = {}
    try:
        with os.scandir(f"{PROC}/{pid}/fd") as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    found[int(entry.name)] = os.readlink(entry.path)  # noqa: PTH115 - a process has thousands of files
    except OSError:
        return None
    return found


def access_mode(pid: int, descriptor: int) -> int | None:
    """The access mode of a descriptor: ``os.O_RDONLY``, ``os.O_WRONLY`` or ``os.O_RDWR``; None if hidden."""
    try:
        text = Path(f"{PROC}/{pid}/fdinfo/{descriptor}").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    flags = [line.split()[1] for line in text.splitlines() if line.startswith("flags:")]
    return int(flags[0], 8) & os.O_ACCMODE if flags else None


class MappedFile(Value):
    """A file mapped by a process: its device as in `os.stat_result`, its inode, and a name that it has or had."""

    device: int
    inode: int
    path: str


def mapped_files(pid: int) -> set[MappedFile] | None:
    """The files that a process has mapped; None if hidden (another user's process)."""
    try:
        text = Path(f"{PROC}/{pid}/maps").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    found = set()
    for row in text.splitlines():
        words = row.split(maxsplit=5)  # addresses, rights, offset, device, inode, path
        if len(words) == 6 and words[4] != "0":
            major, minor = words[3].split(":")
            found.add(MappedFile(os.makedev(int(major, 16), int(minor, 16)), int(words[4]), words[5]))
    return found


def other_network(pid: int) -> bool:
    """Whether a process is in another network namespace: a container, whose ports are not this machine's.

    False if that can't be determined. The link ``ns/net`` is hidden for another user's process, but the inode of its
    ``net/tcp`` is not, and each namespace has its own.
    """
    try:
        return os.readlink(f"{PROC}/{pid}/ns/net") != os.readlink(f"{PROC}/self/ns/net")  # noqa: PTH115 - as above
    except OSError:
        try:
            return os.stat(f"{PROC}/{pid}/net/tcp").st_ino != os.stat(f"{PROC}/self/net/tcp").st_ino  # noqa: PTH116
        except OSError:
            return False
