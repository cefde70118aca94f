"""Processes as ``/proc`` shows them: identity, descent, and signals that reach the right process.

A signal is sent only after pid, start time and boot match, through a pidfd opened *before* that check, so that a reused
pid is never hit.

A check that fails for lack of descriptors or memory raises OSError: treating it as an exit would later end living
processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, KeysView, Mapping
from functools import cache
from pathlib import Path

from vllm_launchers import procfs
from vllm_launchers.keeper.records import ProcessIdentity
from vllm_launchers.procfs import PROC, ProcessStat, pids

Table = Mapping[int, ProcessStat]

KEEPER_TITLE = "vllm-keeper"


@cache
def boot_id() -> str:
    """This boot's identity; start times are comparable only within one boot."""
    try:
        return Path(PROC, "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def stat(pid: int) -> ProcessStat | None:
    """The state of one process; None if it does not exist. Raises OSError if descriptors or memory ran out."""
    return procfs.stat(pid, sure=True)


def identity(pid: int) -> ProcessIdentity | None:
    """The identity of the process that has this pid now."""
    found = stat(pid)
    return identity_of(found) if found else None


def identity_of(process: ProcessStat) -> ProcessIdentity:
    """Pid, start time and boot ID: identifies a process even if its pid is reused."""
    return ProcessIdentity(process.pid, process.start_time, boot_id())


def alive(process: ProcessIdentity | None) -> bool:
    """Whether this exact process is running (a zombie is not)."""
    return process is not None and _running(process) is not None


def is_stopped(process: ProcessIdentity) -> bool:
    """Whether this exact process is stopped, by a signal or a debugger."""
    found = _running(process)
    return found is not None and found.state in "Tt"


def _running(process: ProcessIdentity) -> ProcessStat | None:
    """The state of this exact process while it runs."""
    found = stat(process.pid) if process.boot_id == boot_id() else None
    return found if found is not None and found.running and found.start_time == process.start_time else None


def table() -> Table:
    """All visible processes."""
    return {pid: process for pid in pids() if (process := stat(pid)) is not None}


def descendants(processes: Table, ancestors: Iterable[int]) -> KeysView[int]:
    """`procfs.descendants` in a table."""
    return procfs.descendants(processes.values(), ancestors)


def owner(pid: int) -> int | None:
    """Real uid of a process; None if it is gone. (The owner of ``/proc/PID`` is root for undumpable processes.)"""
    try:
        for line in Path(PROC, str(pid), "status").read_bytes().splitlines():
            if line.startswith(b"Uid:"):
                return int(line.split()[1])
    except OSError:
        return None
    return None


def open_pidfd(process: ProcessIdentity) -> int | None:
    """A descriptor for this exact process, readable once it has ended; None if it is gone.

    Raises OSError if the kernel has no pidfds (before Linux 5.3, or blocked by a sandbox).
    """
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    found = False
    try:
        found = alive(process)
    finally:
        if not found:
            os.close(fd)
    return fd if found else None


def send(process: ProcessIdentity, number: int) -> bool:
    """Signal this exact process; False if it is gone or not ours to signal."""
    try:
        fd = open_pidfd(process)
    except OSError:  # no pidfds: check, then signal immediately
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


def end_session(leader: ProcessIdentity) -> None:
    """Kill a session leader and everything that it started."""
    processes = table()
    found = processes.get(leader.pid)
    if found is not None and found.start_time != leader.start_time:
        return  # a pid is not reused while a session has that number
    below = descendants(processes, [leader.pid])
    session = {pid for pid, process in processes.items() if process.session == leader.pid}
    for pid in (below | session) - {leader.pid}:
        send(identity_of(processes[pid]), signal.SIGKILL)
    send(leader, signal.SIGKILL)


def signal_name(number: int) -> str:
    """``SIGKILL (9)``, or ``signal 40`` if it has no name."""
    try:
        return f"{signal.Signals(number).name} ({number})"
    except ValueError:
        return f"signal {number}"
