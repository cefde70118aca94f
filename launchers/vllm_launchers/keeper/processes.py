"""Processes as ``/proc`` shows them: who they are, who descends from whom, and signals that reach the right one.

A signal goes out only after pid, start time and boot match, through a pidfd opened *before* the look, so that a pid
that was given to somebody else in between is never hit.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from vllm_launchers.keeper.records import ProcessIdentity

PROC = Path("/proc")


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

    @property
    def identity(self) -> ProcessIdentity:
        """Who it is, beyond its pid."""
        return ProcessIdentity(self.pid, self.start_time, boot_id())


Table = Mapping[int, ProcessStat]


@cache
def boot_id() -> str:
    """This boot's identity; start times are comparable only within one boot."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def stat(pid: int) -> ProcessStat | None:
    """Look at one process; None where there is none."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
        try:
            text = os.read(fd, 4096)
        finally:
            os.close(fd)
    except OSError:
        return None
    # The command's name stands in parentheses and may hold anything, parentheses too.
    words = text[text.rfind(b")") + 2 :].split()
    if len(words) < 20:
        return None
    return ProcessStat(pid, words[0].decode(), int(words[1]), int(words[3]), int(words[19]))


def identity(pid: int) -> ProcessIdentity | None:
    """Who has this pid now."""
    found = stat(pid)
    return found.identity if found else None


def alive(process: ProcessIdentity | None) -> bool:
    """Whether this very process runs (a zombie does not)."""
    if process is None or process.boot_id != boot_id():
        return False
    found = stat(process.pid)
    return found is not None and found.running and found.start_time == process.start_time


def table() -> Table:
    """Every process that can be seen."""
    found = (stat(int(entry.name)) for entry in os.scandir(PROC) if entry.name.isdigit())
    return {process.pid: process for process in found if process is not None}


def descendants(processes: Table, ancestors: Iterable[int]) -> set[int]:
    """The pids below some processes, themselves left out."""
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    below: set[int] = set()
    waiting = list(ancestors)
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child not in below:
                below.add(child)
                waiting.append(child)
    return below


def owner(pid: int) -> int | None:
    """Real uid of a process; None where it is gone. (The owner of ``/proc/PID`` is root for undumpable ones.)"""
    try:
        for line in (PROC / str(pid) / "status").read_bytes().splitlines():
            if line.startswith(b"Uid:"):
                return int(line.split()[1])
    except OSError:
        return None
    return None


def open_files(pid: int) -> list[str] | None:
    """What its descriptors lead to, as link texts; None where that may not be seen."""
    folder = PROC / str(pid) / "fd"
    found = []
    try:
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                found.append(str(Path(entry.path).readlink()))
    except OSError:
        return None
    return found


def open_pidfd(process: ProcessIdentity) -> int | None:
    """A descriptor for this very process, readable once it has ended; None where it is gone.

    Raises OSError where the kernel has no pidfds (before Linux 5.3, or forbidden by a sandbox).
    """
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if alive(process):
        return fd
    os.close(fd)
    return None


def send(process: ProcessIdentity, number: int) -> bool:
    """Signal this very process; False where it is gone or is not ours to signal."""
    try:
        fd = open_pidfd(process)
    except OSError:  # no pidfds here: look, then signal at once
        if not alive(process):
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)
            return True
        return False
    if fd is None:
        return False
    try:
        signal.pidfd_send_signal(fd, number)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(fd)
    return True


def signal_name(number: int) -> str:
    """``SIGKILL (9)``, or ``signal 40`` where it has no name."""
    try:
        return f"{signal.Signals(number).name} ({number})"
    except ValueError:
        return f"signal {number}"
