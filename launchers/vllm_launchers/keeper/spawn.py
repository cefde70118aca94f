"""Starts a process in a session of its own, held at a gate until who it is has been written down.

The child waits between fork and exec until its parent opens the gate. A parent that dies before that closes the
gate and the child ends unseen: there is never a server that no record knows.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_launchers.keeper import processes
from vllm_launchers.keeper.records import ProcessIdentity

_RESET = (
    *(signal.SIGPIPE, signal.SIGXFSZ, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM),
    *(signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2),
)
_FAILURE = struct.Struct("ii")
_IN_FOLDER, _IN_EXEC, _ELSEWHERE = range(3)


class SpawnError(Exception):
    """A command could not be started; the message is a clause for people."""


@dataclass(frozen=True, slots=True)
class Command:
    """What to run: words, the whole environment, the working folder, and where its output goes."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    cwd: str
    output_fd: int
    umask: int = 0o022


def start(command: Command, before: Callable[[ProcessIdentity], None]) -> ProcessIdentity:
    """Start it; ``before`` is called with its identity while it is still held back. Raises `SpawnError`, OSError.

    The process is its own session leader, so its pid is its session's number too.
    """
    executable = find(command.argv[0], command.environment.get("PATH", os.defpath))
    ends: list[int] = []
    try:
        ends += os.pipe()
        ends += os.pipe()
        pid = os.fork()
    except OSError:  # no descriptors or processes left: who tries again must not use up more of them
        for end in ends:
            os.close(end)
        raise
    gate_read, gate_write, failure_read, failure_write = ends
    if pid == 0:
        os.close(gate_write)
        _become(command, executable, gate_read, failure_write)
    os.close(gate_read)
    os.close(failure_write)
    try:
        child = processes.identity(pid)
        if child is None:
            raise SpawnError("it ended before it began; is the machine out of memory?")
        before(child)
        with contextlib.suppress(BrokenPipeError):  # it has already ended, and says why
            os.write(gate_write, b"!")
    finally:
        os.close(gate_write)
        failure = _read_all(failure_read)
        os.close(failure_read)
    if failure:
        raise SpawnError(_explain(command, executable, *_FAILURE.unpack(failure)))
    return child


def find(word: str, path: str) -> str:
    """The executable that a command's first word names. Raises `SpawnError`."""
    if "/" in word:
        return word
    for folder in path.split(os.pathsep):
        candidate = Path(folder or ".") / word
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return str(candidate)
    raise SpawnError(f"there is no executable named {word} on PATH")


def _become(command: Command, executable: str, gate: int, failure: int) -> None:
    """In the child: become the command, or report why not. Never returns."""
    step = _ELSEWHERE
    try:
        signal.set_wakeup_fd(-1)
        os.setsid()
        for number in _RESET:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.umask(command.umask)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(command.output_fd, 1)
        os.dup2(command.output_fd, 2)
        step = _IN_FOLDER
        os.chdir(command.cwd)
        if os.read(gate, 1):
            step = _IN_EXEC
            os.execve(executable, list(command.argv), dict(command.environment))
    except OSError as error:
        os.write(failure, _FAILURE.pack(step, error.errno or 0))
    except ValueError:  # a NUL byte in a word or a variable
        os.write(failure, _FAILURE.pack(step, errno.EINVAL))
    finally:
        os._exit(127)


def _read_all(fd: int) -> bytes:
    data = b""
    while chunk := os.read(fd, 64):
        data += chunk
    return data


def _explain(command: Command, executable: str, step: int, number: int) -> str:
    if step == _IN_FOLDER:
        return f"its working folder {command.cwd} cannot be entered: {os.strerror(number)}"
    if step == _IN_EXEC and number == errno.ENOENT:
        missing = (
            "its interpreter (first line) does not exist" if Path(executable).exists() else "there is no such file"
        )
        return f"{executable} cannot be run: {missing}"
    if step == _IN_EXEC and number == errno.EACCES:
        return f"{executable} cannot be run: it is not executable (or on a file system mounted noexec)"
    return f"{executable} cannot be run: {os.strerror(number)}"
