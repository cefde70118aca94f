"""One launch at a time: between choosing a port or a name and the record that claims it, nobody else may choose."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from vllm_console.fleet.api import FleetError
from vllm_launchers.private import lock, open_file, own_folder

PATIENCE_SECONDS = 30.0
"""Longer than a launch takes to be claimed (well under a second), by far."""

OTHERS_PATIENCE_SECONDS = 5.0
"""How long other persons' launches are waited for."""


@contextlib.contextmanager
def turn(state: Path, patience: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Hold the launch lock of a state folder; it goes with the process that holds it.

    Raises:
        FleetError: somebody else holds it for longer than ``patience`` seconds, or the folder cannot be written.
    """
    path = state / "launch.lock"
    try:
        own_folder(state)
        fd = open_file(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError as error:
        raise FleetError(f"{path}: cannot be written: {error.strerror}") from error
    try:
        _wait_for(fd, path, patience)
        with _among_all():
            yield
    finally:
        os.close(fd)


def _wait_for(opened: int, path: Path, patience: float) -> None:
    try:
        lock(opened, patience)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            told = f"another console has been launching a server for {patience:.0f} s; try again later"
        else:
            told = f"{path}: cannot be locked: {os.strerror(error.errno or 0)}"
        raise FleetError(told) from error


@contextlib.contextmanager
def _among_all() -> Iterator[None]:
    """One launch at a time among all persons of this machine, or two could choose the same free port.

    A name in the abstract namespace needs no folder that everybody may write, and goes with its process. Nobody can be
    made to give it back, so a launch goes on without it after a while: its port is then only as safe as a look at it.
    """
    with socket.socket(socket.AF_UNIX) as name:
        deadline = time.monotonic() + OTHERS_PATIENCE_SECONDS
        while True:
            try:
                name.bind("\0vllm-console/launch")
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                    break
            time.sleep(0.02)
        yield
