"""The port of a server between two of its generations."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from fakes.ports import binds, free_port
from vllm_launchers.keeper.reservation import Reservation

HOST = "127.0.0.1"


@pytest.fixture
def reservation() -> Iterator[Reservation]:
    made = Reservation()
    yield made
    made.release()


@pytest.fixture
def port() -> int:
    return free_port()


def test_reserved_port_is_given_to_nobody(reservation: Reservation, port: int) -> None:
    reservation.hold(HOST, port)
    assert reservation.held
    assert not binds(port)
    assert not binds(port, socket.SO_REUSEADDR)
    reservation.release()
    assert not reservation.held
    assert binds(port)


def test_port_is_reserved_despite_lingering_connections(reservation: Reservation) -> None:
    """A server that closes its connections leaves them in TIME_WAIT, which prevents a plain bind for a minute."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((HOST, 0))
        server.listen()
        port = server.getsockname()[1]
        with socket.create_connection((HOST, port)) as client:
            server.accept()[0].close()
            client.recv(1)
    assert not binds(port)
    reservation.hold(HOST, port)
    assert reservation.held


def test_port_in_use_is_reserved_once_released(reservation: Reservation, port: int) -> None:
    with socket.socket() as server:
        server.bind((HOST, port))
        server.listen()
        reservation.hold(HOST, port)
        assert not reservation.held
    reservation.hold(HOST, port)
    assert reservation.held


def test_admitted_server_binds_and_listens(reservation: Reservation, port: int) -> None:
    reservation.hold(HOST, port)
    reservation.admit(HOST, port, shared=False)
    assert binds(port, socket.SO_REUSEADDR), "as vLLM since 0.25 binds"
    assert not binds(port), "a program that does not set it is kept out all the time"
    reservation.hold(HOST, port)
    assert not binds(port, socket.SO_REUSEADDR), "kept again, for the next attempt"


def test_only_the_admitted_server_shares_the_port(reservation: Reservation, port: int) -> None:
    reservation.hold(HOST, port)
    reservation.admit(HOST, port, shared=True)
    assert binds(port, socket.SO_REUSEADDR, socket.SO_REUSEPORT), "as vLLM up to 0.24 binds"
    assert not binds(port, socket.SO_REUSEADDR)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be several users")
def test_another_user_cannot_share_the_port(reservation: Reservation, port: int) -> None:
    reservation.hold(HOST, port)
    reservation.admit(HOST, port, shared=True)
    script = (
        "import os, socket; os.setuid(65534); s = socket.socket()\n"
        "for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT): s.setsockopt(socket.SOL_SOCKET, option, 1)\n"
        f"s.bind(('{HOST}', {port}))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert "Address already in use" in done.stderr


def test_invalid_address_is_not_reserved(reservation: Reservation) -> None:
    for host, number in (("203.0.113.7", 8000), ("no such name", 8000), (HOST, 70_000), ("\x00", 1)):
        reservation.hold(host, number)
        assert not reservation.held
        reservation.admit(host, number, shared=False)
    reservation.release()


def test_changing_the_port_releases_the_old_one(reservation: Reservation, port: int) -> None:
    reservation.hold(HOST, port)
    reservation.admit(HOST, port + 1, shared=False)
    assert binds(port)
