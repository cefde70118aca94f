"""Which sockets listen, according to both kernel interfaces."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable

import pytest

from vllm_launchers import listeners, procfs
from vllm_launchers.listeners import TcpSocket, listening_sockets


def refused(*_: object) -> socket.socket:
    raise OSError("no such protocol")


def by_proc() -> Iterable[TcpSocket]:
    return (row for row in listeners.tcp_sockets() if row.listening)


@pytest.fixture(params=["sock_diag", "/proc"])
def found(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[TcpSocket]]:
    """Listening sockets of a port, queried with one interface and with the other."""

    def ask(port: int) -> list[TcpSocket]:
        with monkeypatch.context() as only:
            if request.param == "/proc":
                only.setattr(listeners, "_kernel_listing", refused)
            else:
                only.setattr(listeners, "tcp_sockets", refused)
            return [row for row in listening_sockets() if row.port == port]

    return ask


@pytest.mark.parametrize(
    ("family", "address", "ip", "loopback"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1", True),
        (socket.AF_INET, "0.0.0.0", "0.0.0.0", False),
        (socket.AF_INET6, "::1", "::1", True),
        (socket.AF_INET6, "::", "::", False),
        (socket.AF_INET6, "::ffff:127.0.0.1", "127.0.0.1", True),
    ],
)
def test_listening_socket_and_its_owner(
    found: Callable[[int], list[TcpSocket]], family: int, address: str, ip: str, loopback: bool
) -> None:
    with socket.socket(family) as server:
        server.bind((address, 0))
        port, inode = server.getsockname()[1], str(os.fstat(server.fileno()).st_ino)

        def own() -> list[TcpSocket]:
            """Another process may listen at this port of another address."""
            return [one for one in found(port) if one.inode == inode]

        assert not own(), "it does not listen yet"
        server.listen()
        (row,) = own()
        assert (row.uid, row.ip, row.loopback, row.listening) == (os.getuid(), ip, loopback, True)
        assert row.link in (procfs.open_files(os.getpid()) or ())
        with socket.create_connection((ip, port) if ip not in ("0.0.0.0", "::") else ("localhost", port)):
            assert own() == [row], "its connections do not listen"
    assert not own()


def test_both_methods_give_the_same() -> None:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(300)]  # more than fits into one kernel reply
    ports = {server.getsockname()[1] for server in servers}
    both = [{row for row in way() if row.port in ports} for way in (listening_sockets, by_proc)]
    assert both[0] == both[1]
    assert len(both[0]) == 300
    for server in servers:
        server.close()
