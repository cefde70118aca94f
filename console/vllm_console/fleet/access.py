"""Which servers the parts of a fleet may read and act on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from vllm_console.fleet.leftovers import find_lost, format_lost_here
from vllm_console.fleet.snapshot import FleetSnapshot
from vllm_launchers.errors import NotFoundError, OperationError, RefusedError
from vllm_launchers.keeper import client
from vllm_launchers.keeper.errors import BadNameError, KeeperError, NoSuchServerError
from vllm_launchers.keeper.records import ServerRecord
from vllm_launchers.launch.errors import read_only_error


class ServerAccess:
    """Finds the record of a server by its name, and refuses what this fleet may not do.

    ``snapshot`` takes a fleet snapshot, which also has the servers without a record. ``read_only_by`` says who made the
    fleet read-only.
    """

    def __init__(
        self, state: Path, snapshot: Callable[[], FleetSnapshot], *, read_only: bool, read_only_by: str
    ) -> None:
        self._state, self._snapshot = state, snapshot
        self.read_only, self.read_only_by = read_only, read_only_by

    def refuse_read_only(self) -> None:
        """Raise RefusedError if the fleet is read-only."""
        if self.read_only:
            raise read_only_error(self.read_only_by)

    def record(self, name: str) -> ServerRecord | None:
        """The record of a server of ours; None if there is none of that name.

        Raises:
            KeeperError: it can't be read.
        """
        try:
            return client.read(self._state, name)
        except (BadNameError, NoSuchServerError):  # others' servers have names that ours cannot have
            return None

    def recorded(self, name: str, without: str = "nothing records its requests") -> ServerRecord:
        """The record of a server of ours, for reading.

        Raises:
            RefusedError: there is no record; the sentence ends in ``without``.
            NotFoundError: there is no server of that name.
        """
        if (record := self.record(name)) is not None:
            return record
        if (seen := self._snapshot().server(name)) is not None:
            what = "is attached" if seen.attached is not None else "was not started by vllm-console"
            raise RefusedError(f"{name} {what}, so {without}")
        self._refuse_lost(name)
        raise NotFoundError(f"no server is called '{name}'; see 'vllm-console list'")

    def adopt_ours(self, name: str) -> ServerRecord:
        """The record of a server that may be acted on; if its keeper is gone, a new one adopts the server first.

        Raises:
            RefusedError: the fleet is read-only, another user started the server, or it runs on another host.
            NotFoundError: there is no server of that name.
            OperationError: it is being created, or its record can't be read.
        """
        self.refuse_read_only()
        record = self.record(name)
        if record is None:
            self._refuse_missing(name)
            record = client.read(self._state, name)
        if client.adopt(self._state, record):
            record = client.read(self._state, name)
        client.refuse_elsewhere(self._state, record)
        return record

    def _refuse_missing(self, name: str) -> None:
        """Raise an error that says why a server has no record, unless it has got one by now."""
        seen = self._snapshot().server(name)
        if seen is not None and not seen.ours:
            raise RefusedError(f"{name} {seen.foreign}")
        self._refuse_lost(name)
        with contextlib.suppress(BadNameError):
            if client.keeper_alive(self._state, name) and self.record(name) is None:
                raise OperationError(f"{name} is being created by another command: try again once it is listed")
        if self.record(name) is None:
            names = ", ".join(self._names())
            known = f"your servers: {names}" if names else "you have no servers yet"
            raise NotFoundError(f"no server is called '{name}'; {known}")

    def _refuse_lost(self, name: str) -> None:
        if lost := [folder for folder in find_lost(self._state) if folder.name == name]:
            raise NotFoundError(format_lost_here(self._state, lost))

    def _names(self) -> Iterator[str]:
        """The names of this user's servers; says which of their records can't be read."""
        for name in client.names(self._state):
            try:
                client.read(self._state, name)
                yield name
            except NoSuchServerError:
                continue
            except KeeperError:
                yield f"{name} (its record can't be read)"
