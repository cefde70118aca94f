"""The records of this user's servers, read again only when they changed."""

from __future__ import annotations

from pathlib import Path

from vllm_launchers.keeper import client
from vllm_launchers.keeper.errors import KeeperError
from vllm_launchers.keeper.records import ServerRecord, State


class ServerRecords:
    """All records below one state folder."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._known: dict[str, tuple[object, ServerRecord]] = {}

    def read(self) -> tuple[list[ServerRecord], list[str]]:
        """All records in order of name, and a sentence for each that cannot be read.

        Raises:
            KeeperError: the folder itself cannot be read.
        """
        records, problems = [], []
        names = client.names(self._state)
        for gone in set(self._known).difference(names):  # another thread may read them too
            self._known.pop(gone, None)
        for name in names:
            try:
                stamp = client.stamp(self._state, name)
                known = self._known.get(name)
                if known is None or known[0] != stamp:
                    known = (stamp, client.read(self._state, name))
                    self._known[name] = known
                records.append(known[1])
            except KeeperError as error:
                problems.append(str(error))
        return records, problems

    def taken_ports(self, but: str = "") -> set[int]:
        """The ports of all servers that are up or will be restarted, except those of server ``but``."""
        return {record.current.spec.port for record in self.read()[0] if record.needs_keeper and record.name != but}

    def starting(self) -> list[str]:
        """Names of all servers that are starting."""
        return [record.name for record in self.read()[0] if record.state is State.STARTING]

    def free_name(self, wanted: str) -> str:
        """``wanted``, or the first of ``wanted-2``, … that no server uses that is up or will be restarted."""
        live = {record.name for record in self.read()[0] if record.needs_keeper}
        number = 1
        name = wanted
        while name in live:
            number += 1
            name = f"{wanted}-{number}"
        return name
