"""Connections that reach one process, although other processes listen on the same port number."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from vllm_launchers.listeners import Owner, WrongProcessError, connect, owned, trusted

NOBODY = 65534
FOREIGN = """
import os, socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
if len(sys.argv) > 3: os.setuid(int(sys.argv[3]))
with socket.socket(family) as server:
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((sys.argv[1], int(sys.argv[2])))
    server.listen()
    print(server.getsockname()[1], flush=True)
    sys.stdin.read()
"""
Start = Callable[..., tuple[Owner, int]]


@pytest.fixture
def foreign() -> Iterator[Start]:
    """``foreign(address, port, *, user)`` starts another process that listens there; returns its identity and the
    port."""
    running: list[subprocess.Popen[str]] = []

    def start(address: str, port: int = 0, *, user: int | None = None) -> tuple[Owner, int]:
        words = [sys.executable, "-c", FOREIGN, address, str(port), *([str(user)] if user is not None else [])]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None
        bound = int(process.stdout.readline())
        owner = Owner.of(process.pid)
        assert owner is not None
        return owner, bound

    yield start
    for process in running:
        process.communicate()


@pytest.fixture
def itself() -> Owner:
    found = Owner.of(os.getpid())
    assert found is not None
    return found


def listening(address: str, port: int = 0) -> socket.socket:
    server = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    if ":" in address:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    server.bind((address, port))
    server.listen()
    return server


@pytest.mark.parametrize(
    ("bound", "asked"),
    [("127.0.0.1", "127.0.0.1"), ("127.0.0.2", "127.0.0.2"), ("0.0.0.0", "127.0.0.1"), ("::1", "::1"), ("::", "::1")],
)
def test_address_is_that_of_the_socket(itself: Owner, bound: str, asked: str) -> None:
    with listening(bound) as server:
        port = server.getsockname()[1]
        found = itself.listener(port)
        assert found is not None
        assert (found.address, found.port) == (asked, port)
        with itself.connect(port, 5) as connection:
            assert connection.getpeername()[:2] == (asked, port)


def test_process_at_another_address_of_the_name_is_not_contacted(itself: Owner, foreign: Start) -> None:
    """``localhost`` may resolve to ``::1`` first, but our server listens at 127.0.0.1."""
    with listening("127.0.0.1") as server:
        port = server.getsockname()[1]
        foreign("::1", port)
        with itself.connect(port, 5) as connection:
            assert connection.getpeername()[0] == "127.0.0.1"


def test_port_of_another_process_is_refused(foreign: Start) -> None:
    server, _ = foreign("127.0.0.1")
    _, port = foreign("127.0.0.1")
    with pytest.raises(WrongProcessError, match=f"another process answers on port {port}"):
        server.connect(port, 5)


def test_closed_port_has_no_listener(itself: Owner) -> None:
    with listening("127.0.0.1") as server:
        port = server.getsockname()[1]
    assert itself.listener(port) is None
    with pytest.raises(ConnectionRefusedError):
        itself.connect(port, 5)


def test_child_of_the_server_counts_as_the_server(itself: Owner, foreign: Start) -> None:
    child, port = foreign("127.0.0.1")
    assert itself.listener(port) == child.listener(port) == owned(port, [child.pid])
    with pytest.raises(WrongProcessError):
        owned(port, [os.getpid()])


def test_reused_pid_is_not_the_server(foreign: Start) -> None:
    child, port = foreign("127.0.0.1")
    with pytest.raises(WrongProcessError):
        Owner(child.pid, child.start_time + 1).listener(port)


def test_socket_replaced_while_connecting_is_not_trusted(itself: Owner) -> None:
    """Another process that briefly holds the port gets a connection, but no data."""
    servers = [listening("127.0.0.1")]
    port = servers[0].getsockname()[1]

    def lookup():
        found = itself.listener(port)
        servers.pop().close()
        servers.append(listening("127.0.0.1", port))
        return found

    servers[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        with pytest.raises((WrongProcessError, OSError)):
            connect(lookup, 5)
    finally:
        for server in servers:
            server.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be several users")
def test_user_decides_for_an_unreadable_process(foreign: Start) -> None:
    """As a user who can't read others' descriptors: the owner of the server may respond, a third user may not."""
    server, port = foreign("127.0.0.1", user=NOBODY)
    _, taken = foreign("127.0.0.1", user=NOBODY - 1)
    with pytest.raises(WrongProcessError, match=f"another user .uid {NOBODY}."):
        trusted("localhost", port)
    script = (
        "import os, socket\n"  # loaded while that user may still read Python's files
        "from vllm_launchers.listeners import Owner, WrongProcessError\n"
        "os.setuid(1234)\n"
        f"owner = Owner({server.pid}, {server.start_time})\n"
        f"print(owner.listener({port}).address)\n"
        f"try: owner.listener({taken})\n"
        "except WrongProcessError: print('foreign')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.split() == ["127.0.0.1", "foreign"], done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be several users")
def test_address_of_this_user_is_chosen_among_several(foreign: Start, monkeypatch) -> None:
    """As on a machine where ``/etc/hosts`` has ``::1 localhost`` and another user binds ``::1``."""
    with listening("127.0.0.1") as server:
        port = server.getsockname()[1]
        foreign("::1", port, user=NOBODY)
        both = [(family, 1, 6, "", (address, port)) for family, address in ((10, "::1"), (2, "127.0.0.1"))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
        found = trusted("localhost", port)
    assert found is not None
    assert found.address == "127.0.0.1"


def test_no_listener_under_a_name() -> None:
    with listening("127.0.0.1") as server:
        port = server.getsockname()[1]
    assert trusted("localhost", port) is None
