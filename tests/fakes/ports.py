"""Unique ports for test servers, also across parallel test processes."""

from __future__ import annotations

import itertools
import os
import socket

FIRST, EACH, WORKERS = 20000, 1500, 8
"""Below the ephemeral ports, which clients could occupy."""


def _numbers() -> itertools.cycle[int]:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    first = FIRST + int(worker) % WORKERS * EACH
    begin = os.getpid() % EACH  # another test run on this machine starts elsewhere
    return itertools.cycle([*range(first + begin, first + EACH), *range(first, first + begin)])


_next = _numbers()


def free_port() -> int:
    """A free port of 127.0.0.1 that this test process has not returned recently."""
    for port in itertools.islice(_next, EACH):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"none of {EACH} ports is free")


def binds(port: int, *options: int, listen: bool = True) -> bool:
    with socket.socket() as taken:
        for option in options:
            taken.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            taken.bind(("127.0.0.1", port))
            if listen:
                taken.listen()
        except OSError:
            return False
        return True
