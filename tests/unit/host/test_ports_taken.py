"""Ports: free or in use, and by whom."""

from __future__ import annotations

import errno
import os
import pwd
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from vllm_launchers.host.ports import PortError, PortUse, check_port, free_port, host_problem, listening_ports


@pytest.fixture
def bound() -> Iterator[socket.socket]:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # like vLLM up to 0.24
        server.bind(("127.0.0.1", 0))
        yield server


def test_listener_is_named(bound: socket.socket) -> None:
    bound.listen()
    port = bound.getsockname()[1]
    for host in ("127.0.0.1", "0.0.0.0", "localhost"):
        use = check_port(host, port)
        assert use is not None
        assert use.pid == os.getpid()
        assert use.user == pwd.getpwuid(os.getuid()).pw_name
        assert str(use).startswith(f"is in use by {use.command} (pid {os.getpid()}")
    assert port in listening_ports(os.getpid())


LISTEN_AT = "import socket, sys; s = socket.create_server((sys.argv[1], int(sys.argv[2]))); print(flush=True); input()"


def test_listener_at_the_given_address_is_named(bound: socket.socket) -> None:
    bound.listen()
    port = bound.getsockname()[1]
    argv = [sys.executable, "-c", LISTEN_AT, "127.0.0.2", str(port)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        uses = [check_port(host, port) for host in ("127.0.0.1", "127.0.0.2")]
        other.communicate(b"\n")
    assert [use and use.pid for use in uses] == [os.getpid(), other.pid]


def test_loading_server_holds_its_port(bound: socket.socket) -> None:
    use = check_port("127.0.0.1", bound.getsockname()[1])
    assert use is not None
    assert "does not listen yet" in str(use)


def test_leftover_connections_do_not_occupy_a_port() -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.close()
            client.recv(1)
    assert check_port("127.0.0.1", port) is None


def test_port_that_needs_root_is_not_called_another_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket, "socket", type("Refusing", (socket.socket,), {"bind": refuse}))
    assert str(check_port("127.0.0.1", 80)) == "is not open to your user: ports below 1024 need a privilege"


def test_free_port_skips_occupied_ports(bound: socket.socket) -> None:
    port = bound.getsockname()[1]
    found = free_port("127.0.0.1", port, taken={port + 1})
    assert found > port + 1
    assert check_port("127.0.0.1", found) is None
    with pytest.raises(PortError, match="no port from 65536"):
        free_port("127.0.0.1", 65536)


def test_hosts_are_checked() -> None:
    assert host_problem("127.0.0.1") is None
    assert host_problem("localhost") is None
    assert "not an address of this machine" in str(host_problem("192.0.2.1"))
    assert check_port("192.0.2.1", 8000) is None


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (PortUse(7, "vllm", "anna"), "is in use by vllm (pid 7, user anna)"),
        (PortUse(user="anna"), "is in use by a process of anna"),
        (PortUse(), "is in use by another process"),
    ],
)
def test_port_use_is_formatted(use: PortUse, text: str) -> None:
    assert str(use) == text
