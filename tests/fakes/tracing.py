"""Faults at system calls: a traced child is killed at its n-th file operation, or that operation fails.

Uses ptrace, so it also covers SQLite and the C library, and needs no compiler and no root.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
from collections.abc import Callable
from dataclasses import dataclass

TRACEME, SYSCALL, SETOPTIONS, POKEUSER, GET_SYSCALL_INFO = 0, 24, 0x4200, 6, 0x420E
SYSGOOD, EXITKILL = 1, 0x100000
ENTRY, EXIT = 1, 2
ORIG_RAX, RAX = 15 * 8, 10 * 8

X86 = platform.machine() == "x86_64"
LOCKING = {"flock": 73}
CHANGING = {
    "write": 1, "open": 2, "pwrite64": 18, "writev": 20, "fsync": 74, "fdatasync": 75, "truncate": 76, "ftruncate": 77,
    "rename": 82, "mkdir": 83, "unlink": 87, "chmod": 90, "fchmod": 91, "openat": 257, "mkdirat": 258, "unlinkat": 263,
    "renameat": 264, "fallocate": 285, "pwritev": 296, "renameat2": 316,
}  # fmt: skip
"""File operations on x86-64. On other machines a child is killed at any system call, and none can be made to fail."""

DONE, TOLD, RAISED = 0, 3, 4


class _Info(ctypes.Structure):
    _fields_ = (
        *(("op", ctypes.c_uint8), ("pad", ctypes.c_uint8 * 3), ("arch", ctypes.c_uint32)),
        *(("ip", ctypes.c_uint64), ("sp", ctypes.c_uint64), ("number", ctypes.c_uint64), ("rest", ctypes.c_uint64 * 8)),
    )


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, pid: int, address: int = 0, data: int = 0) -> int:
    return int(_libc.ptrace(request, pid, ctypes.c_void_p(address), ctypes.c_void_p(data & (2**64 - 1))))


@dataclass(frozen=True, slots=True)
class Outcome:
    """``struck``: whether the fault happened. ``code``: the child's exit code (DONE, TOLD, RAISED), None if killed."""

    struck: bool
    code: int | None


def strike(act: Callable[[], int], at: int, error: int | None = None) -> Outcome:
    """Run ``act`` in a child and kill it before its ``at``-th file operation, or make that fail with ``error``.

    ``act`` returns DONE or TOLD; RAISED means an uncaught exception.
    """
    child = os.fork()
    if child == 0:
        code = RAISED
        try:
            _ptrace(TRACEME, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
            code = act()
        finally:
            os._exit(code)
    os.waitpid(child, 0)
    assert _ptrace(SETOPTIONS, child, 0, SYSGOOD | EXITKILL) == 0, "no tracing here"
    numbers = {**CHANGING, **({} if error else LOCKING)}.values() if X86 else None
    seen, struck, failing, passed_on = 0, False, False, 0
    while True:
        _ptrace(SYSCALL, child, 0, passed_on)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            return Outcome(struck, os.WEXITSTATUS(status) if os.WIFEXITED(status) else None)
        passed_on = 0
        if os.WSTOPSIG(status) != signal.SIGTRAP | 0x80:
            passed_on = os.WSTOPSIG(status)
            continue
        info = _Info()
        _ptrace(GET_SYSCALL_INFO, child, ctypes.sizeof(info), ctypes.addressof(info))
        if failing and info.op == EXIT:
            _ptrace(POKEUSER, child, RAX, -(error or 0))
            failing = False
        elif info.op == ENTRY and not struck and (numbers is None or info.number in numbers):
            if seen == at:
                struck = True
                if error is None:
                    os.kill(child, signal.SIGKILL)
                else:
                    _ptrace(POKEUSER, child, ORIG_RAX, -1)
                    failing = True
            seen += 1
