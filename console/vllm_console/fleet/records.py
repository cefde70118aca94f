"""The records of this person's servers, each read again only when it has changed, and what follows from them."""

from __future__ import annotations

from pathlib import Path

from vllm_launchers.keeper import client
from vllm_launchers.keeper.errors import KeeperError
from vllm_launchers.keeper.records import ServerRecord, State


class Records:
    """All records below one state folder."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._known: dict[str, tuple[object, ServerRecord]] = {}

    def read(self) -> tuple[list[ServerRecord], list[str]]:
        """All records by name, and a sentence for each that cannot be read.

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
        """The ports of all servers that live, or wait to be started again; that of one may be left out."""
        return {record.current.spec.port for record in self.read()[0] if record.needs_keeper and record.name != but}

    def starting(self) -> list[str]:
        """The names of all servers that are on their way up."""
        return [record.name for record in self.read()[0] if record.state is State.STARTING]

    def free_name(self, wanted: str) -> str:
        """That name, or the first of ``name-2``, ``name-3``, …: one that no server has that lives, or will again."""
        live = {record.name for record in self.read()[0] if record.needs_keeper}
        number = 1
        name = wanted
        while name in live:
            number += 1
            name = f"{wanted}-{number}"
        return name
