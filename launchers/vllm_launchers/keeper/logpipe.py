"""The server's output on its way to the log: a named pipe that is looked into before anything is taken out of it.

The server writes into ``server.pipe``, which server and keeper both hold open for reading *and* writing. So a keeper
that dies gives the server no SIGPIPE, and what the server writes meanwhile (up to the pipe's 1 MiB; then its writes
wait) is there for the next keeper. So is what the dead one had not taken out, which it does only with what it has
written down. What nobody had read when the last holder ended is lost with the pipe.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import select
import stat
import termios
from pathlib import Path

from vllm_launchers.keeper.errors import KeeperError

PIPE_BYTES = 1 << 20
CHUNK = 1 << 18
SPLICE_F_NONBLOCK = 2


def open_pipe(folder: Path, blocking: bool) -> int:
    """Open (and make, if need be) the server's log pipe for reading and writing."""
    path = folder / "server.pipe"
    with contextlib.suppress(FileExistsError):
        os.mkfifo(path, 0o600)
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | (0 if blocking else os.O_NONBLOCK))
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        os.close(fd)
        raise KeeperError(f"{path} is no pipe; move it away")
    _enlarge(fd, PIPE_BYTES)
    return fd


class LogPipe:
    """The reading end. Bytes are looked at with `peek` and stay until `take`; neither waits."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._copy, self._copy_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        _enlarge(self._copy, CHUNK)
        self._nothing = os.open(os.devnull, os.O_WRONLY)
        self._tee = ctypes.CDLL(None, use_errno=True).tee
        self._tee.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_size_t, ctypes.c_uint)
        self._tee.restype = ctypes.c_ssize_t
        self._room = select.poll()
        self._room.register(fd, select.POLLOUT)

    def waiting(self) -> int:
        """How many bytes are in it."""
        return int.from_bytes(fcntl.ioctl(self.fd, termios.FIONREAD, bytes(4)), "little")

    @property
    def full(self) -> bool:
        """Whether a writer would have to wait."""
        return not any(event & select.POLLOUT for _, event in self._room.poll(0))

    def peek(self) -> bytes:
        """The first bytes in it, 256 KiB at most; not always all that it could be. Raises OSError."""
        count = self._tee(self.fd, self._copy_end, CHUNK, SPLICE_F_NONBLOCK)
        if count < 0:
            number = ctypes.get_errno()
            if number in (errno.EAGAIN, errno.EINTR):
                return b""
            raise OSError(number, os.strerror(number))
        return os.read(self._copy, count) if count else b""

    def take(self, count: int) -> None:
        """Drop the first ``count`` bytes in it."""
        while count > 0:
            dropped = os.splice(self.fd, self._nothing, count)
            if dropped == 0:
                return
            count -= dropped


class Position:
    """``log.position``: inode and offset in the log up to where all that was taken out of the pipe is written.

    What stands in the log behind it was written by a keeper that died before it took it out. Never raises.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "log.position"
        self._fd = -1

    def read(self) -> tuple[int, int] | None:
        """What was written last; None where there is nothing."""
        self._open()
        with contextlib.suppress(OSError, ValueError):
            inode, offset = map(int, os.pread(self._fd, 100, 0).split())
            return inode, offset
        return None

    def write(self, inode: int | None, offset: int) -> None:
        """Write it. Where that fails (disk full), the next keeper goes by what it finds in log and pipe."""
        if self._fd < 0:
            self._open()
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, b"%020d %020d\n" % (inode or 0, offset), 0)

    def _open(self) -> None:
        with contextlib.suppress(OSError):
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def _enlarge(fd: int, size: int) -> None:
    with contextlib.suppress(OSError):  # the user's allowance for pipes may be used up: a smaller one works too
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, size)
