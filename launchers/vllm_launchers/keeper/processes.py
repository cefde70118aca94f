"""Processes as ``/proc`` shows them: who they are, who descends from whom, and signals that reach the right one.

A signal goes out only after pid, start time and boot match, through a pidfd opened *before* the look, so that a pid
that was given to somebody else in between is never hit.

A look for which no descriptor or memory was left raises OSError: whoever took that for an end would go on to end what
lives.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from vllm_launchers import procfs
from vllm_launchers.keeper.records import ProcessIdentity
from vllm_launchers.procfs import PROC, ProcessStat, pids

Table = Mapping[int, ProcessStat]


@cache
def boot_id() -> str:
    """This boot's identity; start times are comparable only within one boot."""
    try:
        return Path(PROC, "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def stat(pid: int) -> ProcessStat | None:
    """Look at one process; None where there is none. Raises OSError where nothing is left to look with."""
    return procfs.stat(pid, sure=True)


def identity(pid: int) -> ProcessIdentity | None:
    """Who has this pid now."""
    found = stat(pid)
    return identity_of(found) if found else None


def identity_of(process: ProcessStat) -> ProcessIdentity:
    """Who a process is, beyond its pid."""
    return ProcessIdentity(process.pid, process.start_time, boot_id())


def alive(process: ProcessIdentity | None) -> bool:
    """Whether this very process runs (a zombie does not)."""
    if process is None or process.boot_id != boot_id():
        return False
    found = stat(process.pid)
    return found is not None and found.running and found.start_time == process.start_time


def is_stopped(process: ProcessIdentity) -> bool:
    """Whether this very process was stopped by a signal, or by a debugger, and has not gone on."""
    found = stat(process.pid) if alive(process) else None
    return found is not None and found.state in "Tt"


def table() -> Table:
    """Every process that can be seen."""
    return {pid: process for pid in pids() if (process := stat(pid)) is not None}


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
        for line in Path(PROC, str(pid), "status").read_bytes().splitlines():
            if line.startswith(b"Uid:"):
                return int(line.split()[1])
    except OSError:
        return None
    return None


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
