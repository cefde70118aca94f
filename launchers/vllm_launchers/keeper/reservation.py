"""Holds a server's port between two of its processes, so that nobody else takes it in the meantime."""

from __future__ import annotations

import contextlib
import socket

from vllm_launchers.addresses import family_of


class Reservation:
    """The port of one server. Only the keeper's loop calls this; no method raises."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._place: tuple[str, int] | None = None

    @property
    def held(self) -> bool:
        """Whether the port is held now."""
        return self._socket is not None

    def hold(self, host: str, port: int) -> None:
        """Hold the port if it is already free; call again until `held`."""
        if self._socket is not None and self._place != (host, port):
            self.release()
        if self._socket is None:
            self._socket, self._place = _bound(host, port), (host, port)
        if self._socket is not None:
            self._reusable(on=False)

    def admit(self, host: str, port: int, *, shared: bool) -> None:
        """Let a process that is about to start bind this address beside this socket."""
        if self._place != (host, port):
            self.release()
        elif not shared:
            self._reusable(on=True)

    def release(self) -> None:
        """Release the port, because the server has it or none will be started."""
        if self._socket is not None:
            self._socket.close()
        self._socket = self._place = None

    def _reusable(self, *, on: bool) -> None:
        if self._socket is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(on))


def _bound(host: str, port: int) -> socket.socket | None:
    """A socket bound to the address the way vLLM binds it; None if it is taken or does not exist."""
    candidate = None
    with contextlib.suppress(OSError, TypeError, UnicodeError, OverflowError):  # TypeError: a NUL byte in the name
        candidate = socket.socket(family_of(host), socket.SOCK_STREAM)
        # Set while binding: connections of the last generation linger for a minute and must not block it.
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        candidate.bind((host.strip("[]"), port))
        return candidate
    if candidate is not None:
        candidate.close()
    return None
