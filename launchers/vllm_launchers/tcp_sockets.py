"""The TCP sockets of this network namespace, from the kernel. Standard library only: every package may use it."""

from __future__ import annotations

import contextlib
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from vllm_launchers.procfs import PROC
from vllm_launchers.values import Value

_MAPPED = bytes(10) + b"\xff\xff"
_LOOPBACK_6 = bytes(15) + b"\x01"

LISTEN = 10
"""The state of a socket that listens, from ``include/net/tcp_states.h``, as are the others."""


class TcpSocket(Value):
    """A socket: local port, state, owner, inode, and local address in network byte order (4 or 16 bytes)."""

    port: int
    state: int
    uid: int
    inode: str
    address: bytes = b""

    @property
    def listening(self) -> bool:
        """Whether it listens."""
        return self.state == LISTEN

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.address[:-4] in (b"", _MAPPED):
            return self.address[-4:-3] == b"\x7f"
        return self.address == _LOOPBACK_6

    @property
    def ip(self) -> str:
        """The local address in standard notation; an IPv4 address in an IPv6 socket as IPv4."""
        import socket  # see `addresses.family_of`

        data = self.address.removeprefix(_MAPPED) if len(self.address) == 16 else self.address
        return socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, data)

    @property
    def link(self) -> str:
        """The link text of a descriptor for it, as in `procfs.open_files`."""
        return f"socket:[{self.inode}]"


def tcp_sockets() -> Iterator[TcpSocket]:
    """Every TCP socket, over IPv4 and IPv6. Slow: the kernel goes through a table of all possible connections, which
    has hundreds of thousands of entries on a machine with much memory, connections or not."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            text = Path(f"{PROC}/net/{name}").read_text(encoding="utf-8", errors="replace")
            for words in map(str.split, text.splitlines()[1:]):
                if len(words) > 9:
                    address, _, port = words[1].rpartition(":")
                    yield TcpSocket(int(port, 16), int(words[3], 16), int(words[7]), words[9], _from_words(address))


def listening_sockets() -> list[TcpSocket]:
    """Every TCP socket that listens, over IPv4 and IPv6."""
    try:
        return list(_listening())
    except (OSError, struct.error):  # no such sockets here, as in gVisor
        return [row for row in tcp_sockets() if row.listening]


def _from_words(text: str) -> bytes:
    """An address as in ``/proc/net/tcp``: words of four bytes, hexadecimal, each in the machine's byte order."""
    words = bytes.fromhex(text)
    return b"".join(int.from_bytes(words[at : at + 4], sys.byteorder).to_bytes(4) for at in range(0, len(words), 4))


# -- sock_diag(7): the kernel goes through the listening sockets alone ------------------------------------------------

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _IPPROTO_TCP = 4, 20, 6
_REQUEST_AND_DUMP = 0x301
_ERROR, _DONE, _INTERRUPTED = 2, 3, 0x10
_HEADER = struct.Struct("=IHHII")
"""``nlmsghdr``: length, type, flags, sequence number, port."""
_REQUEST = struct.Struct("=BBBxI48x")
"""``inet_diag_req_v2``: family, protocol, extensions, a bit for each state, any socket."""
_MESSAGE = struct.Struct("=BB2x2s2x16s16x12x12xII")
"""``inet_diag_msg``: family, state, port and address of this end, owner, inode."""
_MOST_BYTES = 1 << 16
_SECONDS = 1.0


def _listening() -> Iterator[TcpSocket]:
    """Raises OSError if the kernel does not answer that."""
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
