"""Connects to one process and no other, although another user may listen on the same port number.

A name such as ``localhost`` has several addresses, and another user can bind the one that our server left free. So the
address comes from the kernel, not from the name: it is where a socket of the server's own processes
listens. The socket is looked up before connecting, and again afterwards. If it still listens then, it did all the time,
and Linux lets no other user bind its address meanwhile. Nothing is sent before that.

Standard library only: every package may use it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_launchers.procfs import PROC, open_files, other_network, pids, stat
from vllm_launchers.tcp_sockets import TcpSocket, listening_sockets
from vllm_launchers.values import Value

if TYPE_CHECKING:
    import socket

_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Wildcard addresses of each family, and where this machine reaches a server that listens on them."""


class WrongProcessError(ConnectionError):
    """A port is answered by a process other than the expected server. The message is one sentence for people."""


class Listener(Value):
    """A listening TCP socket: a numeric address at which this machine reaches it, its port, its inode."""

    address: str
    port: int
    inode: str


class Owner(Value):
    """A server's process: ``start_time`` in clock ticks since boot, as in ``/proc/PID/stat``.

    Its descendants count as the same server: vLLM's API servers are children of the process that was started.
    """

    pid: int
    start_time: int

    @classmethod
    def of(cls, pid: int) -> Owner | None:
        """The process that has this pid now; None if there is none."""
        found = stat(pid)
        return cls(pid, found.start_time) if found is not None else None

    def listener(self, port: int) -> Listener | None:
        """Where its processes listen on ``port``; None if they don't.

        Raises:
            WrongProcessError: only other processes listen there.
        """
        rows = _listening(port)
        if not rows:
            return None
        found = stat(self.pid)
        if found is None or found.start_time != self.start_time:
            raise _wrong_process(port)
        return owned(port, _tree(self.pid), rows)

    def require(self, port: int) -> Listener:
        """Like `listener`, for a client that is about to connect.

        Raises:
            ConnectionRefusedError: nothing listens there.
            WrongProcessError: only other processes listen there.
        """
        found = self.listener(port)
        if found is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        return found

    def confirm(self, before: Listener) -> None:
        """Check that the socket found before connecting still listens: then it is the one connected to.

        Raises:
            WrongProcessError: it does not.
        """
        if not listens(before):
            raise _wrong_process(before.port)

    def connect(self, port: int, timeout: float) -> socket.socket:
        """A connection to one of its processes; each wait ends after ``timeout`` seconds.

        Raises:
            ConnectionRefusedError: nothing listens on the port.
            WrongProcessError: only other processes listen there.
            OSError: no connection could be made.
        """
        return connect(lambda: self.listener(port), timeout)


def connect(lookup: Callable[[], Listener | None], timeout: float) -> socket.socket:
    """A connection to the socket that ``lookup`` finds and that still listens afterwards; errors as `Owner.connect`."""
    import socket  # see `addresses.family_of`

    before = lookup()
    if before is None:
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    # As bytes: for a str Python would load a megabyte of IDNA tables.
    made = socket.create_connection((before.address.encode(), before.port), timeout=timeout)  # type: ignore[arg-type]
    try:
        if not listens(before):
            raise _wrong_process(before.port)
    except OSError:
        made.close()
        raise
    return made


def owned(port: int, members: Iterable[int], rows: Collection[TcpSocket] | None = None) -> Listener | None:
    """Where one of the processes ``members`` (pids) listens on ``port``; None if nothing listens there.

    If their descriptors cannot be read (another user's), or they have their own network namespace (a container with its
    port published here), the socket's user decides: theirs, or root, who publishes containers' ports.

    Raises:
        WrongProcessError: only other processes listen there.
    """
    rows = _listening(port) if rows is None else rows
    if not rows:
        return None
    unseen: set[int] = set()
    for pid in members:
        files = open_files(pid)
        if files is None or other_network(pid):
            unseen |= _owner_of(pid) | {0}
            continue
        links = set(files)
        if found := _reached([row for row in rows if row.link in links], rows):
            return found
    if unseen and (found := _reached([row for row in rows if row.uid in unseen], rows)):
        return found
    raise _wrong_process(port)


def trusted(host: str, port: int) -> Listener | None:
    """A socket of this user, or of root, that answers here under a host's name; None if nothing listens.

    Raises:
        WrongProcessError: only another user's process listens.
        OSError: the name has no address.
    """
    import socket

    rows = _listening(port)
    others: set[int] = set()
    for *_, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        address = str(place[0])
        # The kernel prefers a socket bound to exactly this address to one bound to all of them.
        for row in [one for one in rows if one.ip == address] or [one for one in rows if one.ip in _ANY]:
            if row.uid in (os.getuid(), 0):
                return Listener(address, port, row.inode)
            others.add(row.uid)
    if not others:
        return None
    who = " and ".join(f"uid {uid}" for uid in sorted(others))
    raise WrongProcessError(f"port {port} of {host} is answered by a process of another user ({who})")


def listens(listener: Listener) -> bool:
    """Whether a found socket still listens: then a connection made meanwhile has reached it."""
    return any(row.inode == listener.inode for row in _listening(listener.port))


def _listening(port: int) -> list[TcpSocket]:
    return [row for row in listening_sockets() if row.port == port]


def _reached(candidates: Iterable[TcpSocket], rows: Collection[TcpSocket]) -> Listener | None:
    """The first candidate that a connection to its address would come to: a socket bound to just that address is
    preferred by the kernel to one bound to all."""
    for row in candidates:
        address = _ANY.get(row.ip, row.ip)
        if row.ip == address or not any(other.ip == address and other.uid != row.uid for other in rows):
            return Listener(address, row.port, row.inode)
    return None


def _tree(root: int) -> Iterator[int]:
    """A process and its descendants: itself first, since it is usually the one, before all others are read."""
    yield root
    children: dict[int, list[int]] = {}
    for pid in pids():
        if (found := stat(pid)) is not None:
            children.setdefault(found.parent, []).append(pid)
    below = list(children.get(root, ()))
    for pid in below:
        below += children.get(pid, ())
    yield from below


def _owner_of(pid: int) -> set[int]:
    try:
        return {Path(PROC, str(pid)).stat().st_uid}
    except OSError:
        return set()


def _wrong_process(port: int) -> WrongProcessError:
    return WrongProcessError(f"port {port} is answered by a process that is not this server's")
