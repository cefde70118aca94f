"""The records of this user's servers, read again only when they changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_launchers.keeper import client
from vllm_launchers.keeper.errors import KeeperError, NoSuchServerError
from vllm_launchers.keeper.records import ServerRecord, State

KnownRecords = dict[str, tuple[object, ServerRecord]]
"""Records by name, each with the stamp that its file had when it was read."""


def read_changed(
    known: KnownRecords, names: Sequence[str], stamp: Callable[[str], object], read: Callable[[str], ServerRecord]
) -> tuple[list[ServerRecord], list[str]]:
    """The named records, and a sentence for each that cannot be read; only those with a new stamp are read again."""
    records, problems = [], []
    for gone in set(known).difference(names):  # another thread may read them too
        known.pop(gone, None)
    for name in names:
        try:
            now, found = stamp(name), known.get(name)
            if found is None or found[0] != now:
                found = known[name] = (now, read(name))
            records.append(found[1])
        except NoSuchServerError:
            continue  # just removed
        except (KeeperError, OSError) as error:
            problems.append(str(error))
    return records, problems


class ServerRecords:
    """All records below one state folder."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._known: KnownRecords = {}

    def read(self) -> tuple[list[ServerRecord], list[str]]:
        """All records in order of name, and a sentence for each that cannot be read.

        Raises:
            KeeperError: the folder itself cannot be read.
        """
        return read_changed(
            self._known,
            client.names(self._state),
            lambda name: client.stamp(self._state, name),
            lambda name: client.read(self._state, name),
        )

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
