"""Whether a port can be bound, who holds it, and the next free port.

vLLM up to 0.24 binds with ``SO_REUSEPORT``, so two servers could silently share a port: it is checked here first.
"""

from __future__ import annotations

import errno
import os
import pwd
import socket
from collections.abc import Collection

import msgspec

from vllm_launchers.addresses import family_of, is_wildcard
from vllm_launchers.errors import OperationError
from vllm_launchers.listeners import listening_sockets, tcp_sockets
from vllm_launchers.procfs import open_files, pids, title

LAST_PORT = 65535
_GONE = frozenset({4, 5, 6, 8, 9, 11})
"""Connection states that outlive the server: FIN_WAIT1, FIN_WAIT2, TIME_WAIT, CLOSE_WAIT, LAST_ACK, CLOSING."""


class PortError(OperationError):
    """No port is available; the message is one sentence."""


class PortUse(msgspec.Struct, frozen=True):
    """Why a port can't be bound: who holds it, or ``reason``. Unknown fields (another user's process) are None."""

    pid: int | None = None
    command: str | None = None
    user: str | None = None
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return self.reason
        if self.pid is None:
            return f"is in use by a process of {self.user}" if self.user else "is in use by another process"
        details = f"pid {self.pid}" + (f", user {self.user}" if self.user else "")
        return f"is in use by {self.command or 'a process'} ({details})"


def check_port(host: str, port: int) -> PortUse | None:
    """Why ``port`` of ``host`` can't be bound, as the predicate of a sentence about the port; None if it can.

    Also None if ``host`` is not an address of this machine: then the port is not the problem (see `host_problem`).
    """
    number, address = _bind(host, port, reuse=False)
    if number == errno.EACCES:
        return PortUse(reason="is not open to your user: ports below 1024 need a privilege")
    if number != errno.EADDRINUSE:
        return None
    rows = [row for row in tcp_sockets() if row.port == port]
    if not is_wildcard(address):
        rows = [row for row in rows if row.ip == address or is_wildcard(row.ip)]
    listening = [row for row in rows if row.listening]
    if not listening and any(row.state in _GONE for row in rows):
        if _bind(host, port, reuse=True)[0] == 0:
            return None  # only connections of an ended server; vLLM binds over those
        return PortUse(reason="is in use by connections of a server that has just ended; they close within a minute")
    if listening:
        pid = _holder(listening[0].link)
        return PortUse(pid, _command(pid) if pid is not None else None, user_name(listening[0].uid))
    # vLLM binds its port immediately but listens minutes later, once the model is loaded.
    return PortUse(reason="is in use by a process that does not listen yet, such as a server that is starting")


def free_port(host: str, start: int, taken: Collection[int] = ()) -> int:
    """The first port from ``start`` on that can be bound and is not in ``taken``.

    Raises:
        PortError: there is none.
    """
    for port in range(max(start, 1), LAST_PORT + 1):
        if port not in taken and check_port(host, port) is None:
            return port
    raise PortError(f"no port from {start} to {LAST_PORT} is free on {host}")


def host_problem(host: str) -> str | None:
    """Why no server can listen on ``host``, as a sentence; None if one can."""
    number, _ = _bind(host, 0, reuse=True)
    if number == 0:
        return None
    if number == errno.EADDRNOTAVAIL:
        return f"host {host}: is not an address of this machine; omit --host for 127.0.0.1"
    return f"host {host}: can't be used ({os.strerror(number) if number > 0 else 'no such name'})"


def _bind(host: str, port: int, *, reuse: bool) -> tuple[int, str]:
    """0 on success, else the errno (-1 if the host name has no address), and the address."""
    ip = ""
    try:
        # For a name such as localhost with several addresses, use the one that vLLM would bind.
        name, wanted = host.strip("[]") or None, family_of(host)
        family, kind, protocol, _, address = socket.getaddrinfo(
            name, port, wanted, socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        ip = str(address[0]).partition("%")[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
            probe.bind(address)
    except (socket.gaierror, UnicodeError, OverflowError):
        return -1, ip
    except OSError as error:
        return error.errno or -1, ip
    return 0, ip


def listening_ports(pid: int) -> tuple[int, ...]:
    """Ports on which a process listens, lowest first; empty if its files can't be read (another user's)."""
    files = set(open_files(pid) or ())
    if not files:
        return ()
    return tuple(sorted({row.port for row in listening_sockets() if row.link in files}))


def listens_to_itself(port: int, user: str) -> bool:
    """Whether this user's process listens on a port, at local addresses only. False if that can't be determined."""
    rows = [row for row in listening_sockets() if row.port == port]
    return bool(rows) and all(row.loopback and user_name(row.uid) == user for row in rows)


def _holder(socket_link: str) -> int | None:
    return next((pid for pid in pids() if socket_link in (open_files(pid) or ())), None)


def _command(pid: int) -> str | None:
    return "".join(character for character in title(pid) if character.isprintable()) or None


def user_name(uid: int) -> str:
    """The name of a user, or ``uid 1234`` if there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
