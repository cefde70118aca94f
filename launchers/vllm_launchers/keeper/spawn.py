"""Starts a process in its own session, held back until its identity has been recorded.

The child waits between fork and exec until its parent writes to a pipe. If the parent dies before that, the pipe closes
and the child exits, so there is never a server without a record.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vllm_launchers.keeper import process_group, processes
from vllm_launchers.keeper.context import KeeperContext, complete_secrets
from vllm_launchers.keeper.files import SIDECAR_LOG
from vllm_launchers.keeper.records import LaunchSpec, ProcessIdentity
from vllm_launchers.probe.environment import with_probe
from vllm_launchers.values import Value

_RESET = (
    *(signal.SIGPIPE, signal.SIGXFSZ, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM),
    *(signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2),
)
_FAILURE = struct.Struct("ii")
SHORTAGES = frozenset(
    {
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.ENOSPC, errno.EDQUOT),
        *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT),
    }
)
"""Errors that may be temporary: a resource has run out, or a file system can't be reached."""
REPLACED = frozenset({errno.ENOENT, errno.ETXTBSY})
"""Errors that may be temporary if the same command has run before: it may be in the middle of a reinstallation."""
_IN_FOLDER, _IN_EXEC, _ELSEWHERE = range(3)


class SpawnError(Exception):
    """A command could not be started; the message is a clause, and ``number`` is the `errno`."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)
        self.number = number


CONTROL_FD = 3
"""The number of the control socket's descriptor in the started process."""
_ABOVE = 10
"""Descriptors that must survive until exec are moved to this number or above, out of the way of the fixed ones."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
"""Loaded here, because a forked child must not have to load anything."""


class ProcessCommand(Value):
    """What to run: argv, the whole environment, the working folder, and where its output goes.

    ``control_fd`` becomes descriptor `CONTROL_FD`; -1 for none. ``dies_with_parent``: the kernel kills it when this
    process ends, unless it resets that.
    """

    argv: Sequence[str]
    environment: Mapping[str, str]
    cwd: str
    output_fd: int
    umask: int = 0o022
    control_fd: int = -1
    dies_with_parent: bool = False


def server_process_command(
    context: KeeperContext, spec: LaunchSpec, argv: Sequence[str], given: Mapping[str, str], output: int = -1
) -> ProcessCommand:
    """A command with the server's environment. Raises `SecretMissingError`."""
    environment = {**context.environment, **spec.environment, **complete_secrets(spec, given, context.environment)}
    if spec.probe:
        environment = with_probe(environment, context.folder.resolve())
    return ProcessCommand(argv, environment, spec.cwd, output, context.umask)


def start(command: ProcessCommand, before: Callable[[ProcessIdentity], None]) -> ProcessIdentity:
    """Start it; ``before`` is called with its identity while it is still held back. Raises `SpawnError`, OSError.

    The process leads its own session, so its pid is also its session's number.
    """
    executable = find(command.argv[0], command.environment.get("PATH", os.defpath))
    ends: list[int] = []
    try:
        ends += os.pipe()
        ends += os.pipe()
        pid = os.fork()
    except OSError:  # no descriptors or processes left: a retry must not use up more of them
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
            raise SpawnError("it ended before exec; is the machine out of memory?", errno.ENOMEM)
        before(child)
        with contextlib.suppress(BrokenPipeError):  # it has already ended and reports why
            os.write(gate_write, b"!")
    finally:
        os.close(gate_write)
        failure = _read_all(failure_read)
        os.close(failure_read)
    if failure:
        step, number = _FAILURE.unpack(failure)
        raise SpawnError(_explain(command, executable, step, number), number)
    return child


def find(word: str, path: str) -> str:
    """The executable for a command's first word. Raises `SpawnError`."""
    if "/" in word:
        return word
    for folder in path.split(os.pathsep):
        candidate = Path(folder or ".") / word
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return str(candidate)
    raise SpawnError(f"no executable named {word} on PATH", errno.ENOENT)


def _become(command: ProcessCommand, executable: str, gate: int, failure: int) -> None:
    """In the child: become the command, or report why that failed. Never returns."""
    step = _ELSEWHERE
    try:
        if command.dies_with_parent and _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")
        gate, failure = _moved_up(gate), _moved_up(failure)
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
        if command.control_fd >= 0:
            os.dup2(_moved_up(command.control_fd), CONTROL_FD)
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


def _moved_up(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _ABOVE)


def _read_all(fd: int) -> bytes:
    data = b""
    while chunk := os.read(fd, 64):
        data += chunk
    return data


def _explain(command: ProcessCommand, executable: str, step: int, number: int) -> str:
    if step == _IN_FOLDER:
        return f"can't enter its working folder {command.cwd}: {os.strerror(number)}"
    if step == _IN_EXEC and number == errno.ENOENT:
        missing = "its interpreter (first line) does not exist" if Path(executable).exists() else "no such file"
        return f"can't run {executable}: {missing}"
    if step == _IN_EXEC and number == errno.EACCES:
        return f"can't run {executable}: it is not executable (or on a file system mounted noexec)"
    return f"can't run {executable}: {os.strerror(number)}"


# -- the sidecar ------------------------------------------------------------------------------------------------------


BACKOFF_SECONDS = 1.0
BACKOFF_CAP_SECONDS = 60.0
STEADY_SECONDS = 60.0
"""After running this long, the back-off is reset."""
TERMINATE_SECONDS = 5.0
LOG_BYTES = 1 << 20

Changed = Callable[[ProcessIdentity | None], None]


class SidecarCommand(Value):
    """A sidecar's command, with its placeholders filled in."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    cwd: str
    umask: int


def fill(words: tuple[str, ...], server: ProcessIdentity, generation: int) -> tuple[str, ...]:
    """Fill the server's pid, start time and generation into the sidecar's argv."""
    values = {"{pid}": server.pid, "{start_time}": server.start_time, "{generation}": generation}
    filled = []
    for word in words:
        for name, value in values.items():
            word = word.replace(name, str(value))
        filled.append(word)
    return tuple(filled)


class Sidecar:
    """Keeps one command running while it is wanted. Driven by `tick`; never blocks."""

    def __init__(self, folder: Path, changed: Changed, note: Callable[[str], None]) -> None:
        self.process: ProcessIdentity | None = None
        self._log = folder.resolve() / SIDECAR_LOG
        self._changed = changed
        self._note = note
        self._wanted: SidecarCommand | None = None
        self._fresh = False
        self._started_at = 0.0
        self._next_start = 0.0
        self._backoff = BACKOFF_SECONDS
        self._terminated_at: float | None = None
        self._stuck = False

    @property
    def gone(self) -> bool:
        """Whether no sidecar has to be waited for. One that survives SIGKILL is left to the kernel."""
        return self.process is None or self._stuck

    @property
    def busy(self) -> bool:
        """Whether the sidecar is about to start or end."""
        return self.process is None if self._wanted else self.process is not None

    def want(self, wanted: SidecarCommand | None) -> None:
        """From now on run this instead of the current command; None to run nothing."""
        self._wanted = wanted if wanted and wanted.argv else None
        self._fresh = True
        self._backoff = BACKOFF_SECONDS
        self._next_start = 0.0

    def is_mine(self, process: ProcessIdentity) -> bool:
        """Whether the recorded process is alive and writes this sidecar's log; otherwise it is a different process."""
        return processes.alive(process) and process_group.is_sidecar(process.pid, self._log)

    def adopt(self, process: ProcessIdentity, wanted: SidecarCommand | None) -> None:
        """Take over a sidecar that another keeper started."""
        self.process = process
        self._wanted = wanted
        self._fresh = False

    def tick(self, now: float) -> None:
        """Check the sidecar and do what is due."""
        if self.process is not None and not processes.alive(self.process):
            self._ended(now)
        if self.process is not None and (self._wanted is None or self._fresh):
            self._end(now)
        elif self.process is None and self._wanted is not None and now >= self._next_start:
            self._start(self._wanted, now)
        _bound(self._log)

    def _ended(self, now: float) -> None:
        expected = self._terminated_at is not None
        self.process, self._terminated_at, self._stuck = None, None, False
        if not expected and self._wanted is not None:
            if now - self._started_at >= STEADY_SECONDS:
                self._backoff = BACKOFF_SECONDS
            self._note(f"the sidecar exited unexpectedly; restarting it in {self._backoff:g}s")
            self._next_start = now + self._backoff
            self._backoff = min(self._backoff * 2, BACKOFF_CAP_SECONDS)
        self._changed(None)

    def _end(self, now: float) -> None:
        if self.process is None:
            return
        if self._terminated_at is None:
            self._terminated_at = now
            processes.send(self.process, signal.SIGTERM)
        elif now - self._terminated_at >= TERMINATE_SECONDS:
            processes.send(self.process, signal.SIGKILL)
            self._stuck = now - self._terminated_at >= 2 * TERMINATE_SECONDS

    def _start(self, wanted: SidecarCommand, now: float) -> None:
        self._fresh = False
        try:
            log = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                command = ProcessCommand(wanted.argv, wanted.environment, wanted.cwd, log, wanted.umask)
                self.process = start(command, self._changed)
            finally:
                os.close(log)
            self._started_at = now
        except (OSError, SpawnError) as error:
            self._note(f"can't start the sidecar: {error}; trying again in {self._backoff:g}s")
            self._changed(None)
            self._next_start = now + self._backoff
            self._backoff = min(self._backoff * 2, BACKOFF_CAP_SECONDS)


def _bound(path: Path) -> None:
    """Empty a sidecar's log when it grows too large (it is opened for appending, so writing continues)."""
    try:
        if path.stat(follow_symlinks=False).st_size <= LOG_BYTES:
            return
        log = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        os.ftruncate(log, 0)
    except OSError:
        return
    finally:
        os.close(log)
