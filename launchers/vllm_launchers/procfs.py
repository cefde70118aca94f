"""What ``/proc`` says of processes and sockets, read and taken apart. Standard library only: every room may use it."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = "/proc"
SHARED_MEMORY = "/dev/shm"
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_LISTEN = "0A"
_MAPPED = bytes(10) + b"\xff\xff"
_LOOPBACK_6 = bytes(15) + b"\x01"


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """What ``/proc/PID/stat`` says. ``start_time`` in clock ticks since boot, ``state`` as one letter."""

    pid: int
    state: str
    parent: int
    session: int
    start_time: int

    @property
    def running(self) -> bool:
        """Whether it is more than a corpse that waits to be reaped."""
        return self.state not in "ZXx"


@dataclass(frozen=True, slots=True)
class TcpSocket:
    """A line of ``/proc/net/tcp``: local port, state as the two hexadecimal digits there, owner, inode, and the local
    address as it stands there: words of four bytes, hexadecimal, each in the machine's byte order."""

    port: int
    state: str
    uid: int
    inode: str
    address: str = ""

    @property
    def listening(self) -> bool:
        """Whether it waits for connections."""
        return self.state == _LISTEN

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        words = bytes.fromhex(self.address)
        data = b"".join(int.from_bytes(words[at : at + 4], sys.byteorder).to_bytes(4) for at in range(0, len(words), 4))
        return data[-4:-3] == b"\x7f" if data[:-4] in (b"", _MAPPED) else data == _LOOPBACK_6

    @property
    def link(self) -> str:
        """What a descriptor of it leads to, as `open_files` has it."""
        return f"socket:[{self.inode}]"


def stat(pid: int, proc: str = PROC, *, sure: bool = False) -> ProcessStat | None:
    """Look at one process; None where there is none, or it cannot be looked at.

    ``sure``: where only a descriptor or memory to look with was missing, that raises OSError.
    """
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
    # The command's name stands in parentheses and may hold anything, parentheses too.
    words = text[text.rfind(b")") + 2 :].split()
    if len(words) < 20:
        return None
    return ProcessStat(pid, words[0].decode(), int(words[1]), int(words[3]), int(words[19]))


def pids(proc: str = PROC) -> list[int]:
    """The pids of every process that can be seen."""
    return [int(name) for name in os.listdir(proc) if name.isdecimal()]  # noqa: PTH208 - names are all that is wanted


def open_files(pid: int) -> list[str] | None:
    """What its descriptors lead to, as link texts; None where that may not be seen (another user's process)."""
    found = descriptors(pid)
    return None if found is None else list(found.values())


def descriptors(pid: int) -> dict[int, str] | None:
    """Its open descriptors and what each leads to, as link texts; None where that may not be seen."""
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
    """How a process has a descriptor open: ``os.O_RDONLY``, ``os.O_WRONLY`` or ``os.O_RDWR``; None where unseen."""
    try:
        text = Path(f"{PROC}/{pid}/fdinfo/{descriptor}").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    flags = [line.split()[1] for line in text.splitlines() if line.startswith("flags:")]
    return int(flags[0], 8) & os.O_ACCMODE if flags else None


@dataclass(frozen=True, slots=True)
class MappedFile:
    """A file that a process has mapped: its device as in `os.stat_result`, its inode, and a name that it once had."""

    device: int
    inode: int
    path: str


def mapped_files(pid: int) -> set[MappedFile] | None:
    """The files that a process has mapped; None where that may not be seen (another user's process)."""
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


def tcp_sockets() -> Iterator[TcpSocket]:
    """Every TCP socket in this network namespace, over IPv4 and IPv6."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            text = Path(f"{PROC}/net/{name}").read_text(encoding="ascii", errors="replace")
            for words in map(str.split, text.splitlines()[1:]):
                if len(words) > 9:
                    address, _, port = words[1].rpartition(":")
                    yield TcpSocket(int(port, 16), words[3], int(words[7]), words[9], address)
