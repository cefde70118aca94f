"""TCP sockets of this network namespace, and connections to exactly one process.

Another user may listen on the same port number: a name such as ``localhost`` has several addresses, and another user
can bind one that our server left free. So the address comes from the kernel, not from the name: it is that of a
listening socket of the server's own processes. The socket is looked up before connecting and again afterwards. If it
still listens then, it did all the time, during which Linux lets no other user bind its address. Nothing is sent before
that check.

Standard library only: every package may use it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_launchers.addresses import is_wildcard, reachable
from vllm_launchers.procfs import PROC, descendants, open_files, other_network, pids, stat
from vllm_launchers.values import Value

if TYPE_CHECKING:
    import socket

_MAPPED = bytes(10) + b"\xff\xff"
_LOOPBACK_6 = bytes(15) + b"\x01"

LISTEN = 10
"""State of a listening socket, from ``include/net/tcp_states.h``, like the other states."""


class TcpSocket(Value):
    """A TCP socket: local port, state, owner, inode, and local address in network byte order (4 or 16 bytes)."""

    port: int
    state: int
    uid: int
    inode: str
    address: bytes = b""

    @property
    def listening(self) -> bool:
        """Whether the socket is listening."""
        return self.state == LISTEN

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the socket."""
        if self.address[:-4] in (b"", _MAPPED):
            return self.address[-4:-3] == b"\x7f"
        return self.address == _LOOPBACK_6

    @property
    def ip(self) -> str:
        """The local address in standard notation; an IPv4 address in an IPv6 socket is shown as IPv4."""
        import socket  # see `addresses.family_of`

        data = self.address.removeprefix(_MAPPED) if len(self.address) == 16 else self.address
        return socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, data)

    @property
    def link(self) -> str:
        """Link text of a descriptor for the socket, as in `procfs.open_files`."""
        return f"socket:[{self.inode}]"


def tcp_sockets() -> Iterator[TcpSocket]:
    """All TCP sockets, IPv4 and IPv6. Slow: the kernel scans a table of all possible connections, which has hundreds of
    thousands of entries on a machine with much memory, regardless of actual connections."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            text = Path(f"{PROC}/net/{name}").read_text(encoding="utf-8", errors="replace")
            for words in map(str.split, text.splitlines()[1:]):
                if len(words) > 9:
                    address, _, port = words[1].rpartition(":")
                    yield TcpSocket(int(port, 16), int(words[3], 16), int(words[7]), words[9], _from_words(address))


def listening_sockets() -> list[TcpSocket]:
    """All listening TCP sockets, IPv4 and IPv6."""
    try:
        return list(_kernel_listing())
    except (OSError, struct.error):  # no such netlink sockets, as in gVisor
        return [row for row in tcp_sockets() if row.listening]


def _from_words(text: str) -> bytes:
    """Decode an address from ``/proc/net/tcp``: hexadecimal four-byte words in the machine's byte order."""
    words = bytes.fromhex(text)
    return b"".join(int.from_bytes(words[at : at + 4], sys.byteorder).to_bytes(4) for at in range(0, len(words), 4))


# -- sock_diag(7): the kernel scans only the listening sockets --------------------------------------------------------

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _IPPROTO_TCP = 4, 20, 6
_REQUEST_AND_DUMP = 0x301
_ERROR, _DONE, _INTERRUPTED = 2, 3, 0x10
_HEADER = struct.Struct("=IHHII")
"""``nlmsghdr``: length, type, flags, sequence number, port."""
_REQUEST = struct.Struct("=BBBxI48x")
"""``inet_diag_req_v2``: family, protocol, extensions, bit mask of states, any socket."""
_MESSAGE = struct.Struct("=BB2x2s2x16s16x12x12xII")
"""``inet_diag_msg``: family, state, local port and address, owner, inode."""
_MOST_BYTES = 1 << 16
_SECONDS = 1.0


def _kernel_listing() -> Iterator[TcpSocket]:
    """List sockets by sock_diag. Raises OSError if the kernel does not support that."""
    import socket

    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_SECONDS)
        for family in (socket.AF_INET, socket.AF_INET6):
            body = _REQUEST.pack(family, _IPPROTO_TCP, 0, 1 << LISTEN)
            size = _HEADER.size + len(body)
            kernel.send(_HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _REQUEST_AND_DUMP, 0, 0) + body)
            done = False
            while not done:
                data, at = kernel.recv(_MOST_BYTES), 0
                while at < len(data) and not done:
                    length, kind, flags, *_ = _HEADER.unpack_from(data, at)
                    if kind == _ERROR or flags & _INTERRUPTED or length < _HEADER.size:
                        raise OSError("sock_diag gave no answer")
                    done = kind == _DONE
                    if not done:
                        _, state, port, address, uid, inode = _MESSAGE.unpack_from(data, at + _HEADER.size)
                        address = address[:4] if family == socket.AF_INET else address
                        yield TcpSocket(int.from_bytes(port, "big"), state, uid, str(inode), address)
                    at += (length + 3) & ~3


class WrongProcessError(ConnectionError):
    """A process other than the expected server answers on a port. The message is one sentence for users."""


class Listener(Value):
    """A listening TCP socket: a numeric address at which this machine reaches it, its port and its inode."""

    address: str
    port: int
    inode: str


class Owner(Value):
    """A server's process. ``start_time`` is in clock ticks since boot, as in ``/proc/PID/stat``.

    Its descendants count as the same server, because vLLM's API servers are children of the process that was started.
    """

    pid: int
    start_time: int

    @classmethod
    def of(cls, pid: int) -> Owner | None:
        """The process that currently has this pid; None if there is none."""
        found = stat(pid)
        return cls(pid, found.start_time) if found is not None else None

    def listener(self, port: int) -> Listener | None:
        """Where the server's processes listen on ``port``; None if nothing listens there.

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

    def connect(self, port: int, timeout: float) -> socket.socket:
        """Connect to one of the server's processes; each wait ends after ``timeout`` seconds.

        Raises:
            ConnectionRefusedError: nothing listens on the port.
            WrongProcessError: only other processes listen there.
            OSError: no connection could be made.
        """
        return connect(lambda: self.listener(port), timeout)


def connect(lookup: Callable[[], Listener | None], timeout: float) -> socket.socket:
    """Connect to the socket that ``lookup`` finds, and check that it still listens. Raises like `Owner.connect`."""
    import socket  # see `addresses.family_of`

    before = lookup()
    if before is None:
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    # As bytes, because for a str Python would load a megabyte of IDNA tables.
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

    If their descriptors can't be read (another user's), or they have their own network namespace (a container whose
    port is published here), the socket's owner decides: it must be their user, or root, who publishes containers'
    ports.

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
    """A socket of this user or root that answers under a host's name; None if nothing listens.

    Raises:
        WrongProcessError: only another user's process listens.
        OSError: the name has no address.
    """
    import socket

    rows = _listening(port)
    others: set[int] = set()
    for *_, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        address = str(place[0])
        # The kernel prefers a socket bound to exactly this address over one bound to all addresses.
        for row in [one for one in rows if one.ip == address] or [one for one in rows if is_wildcard(one.ip)]:
            if row.uid in (os.getuid(), 0):
                return Listener(address, port, row.inode)
            others.add(row.uid)
    if not others:
        return None
    who = " and ".join(f"uid {uid}" for uid in sorted(others))
    raise WrongProcessError(f"port {port} of {host} is answered by a process of another user ({who})")


def listens(listener: Listener) -> bool:
    """Whether a socket found earlier still listens, which means that a connection made since has reached it."""
    return any(row.inode == listener.inode for row in _listening(listener.port))


def _listening(port: int) -> list[TcpSocket]:
    return [row for row in listening_sockets() if row.port == port]


def _reached(candidates: Iterable[TcpSocket], rows: Collection[TcpSocket]) -> Listener | None:
    """The first candidate that a connection to its address would reach: the kernel prefers a socket bound to exactly
    that address over one bound to all addresses."""
    for row in candidates:
        address = reachable(row.ip)
        if row.ip == address or not any(other.ip == address and other.uid != row.uid for other in rows):
            return Listener(address, row.port, row.inode)
    return None


def _tree(root: int) -> Iterator[int]:
    """A process and its descendants. The process comes first: it usually matches, which saves reading all others."""
    yield root
    yield from descendants(filter(None, map(stat, pids())), [root])


def _owner_of(pid: int) -> set[int]:
    try:
        return {Path(PROC, str(pid)).stat().st_uid}
    except OSError:
        return set()


def _wrong_process(port: int) -> WrongProcessError:
    return WrongProcessError(f"another process answers on port {port}")
