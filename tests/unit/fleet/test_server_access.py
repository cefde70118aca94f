"""Why a server can't be acted on if it has no record."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vllm_console.fleet.access import ServerAccess
from vllm_console.fleet.snapshot import FleetSnapshot
from vllm_launchers.errors import NotFoundError, OperationError
from vllm_launchers.keeper import folders
from vllm_launchers.keeper.records import Generation, LaunchSpec, ServerRecord, State

NOTHING = FleetSnapshot(at=0.0, hostname="here", servers=())


def write(state: Path, name: str) -> ServerRecord:
    generation = Generation(1, LaunchSpec(("vllm",), "127.0.0.1", 1), 1.0, 2.0, 3.0)
    record = ServerRecord(name, State.STOPPED, 3.0, 1.0, (generation,))
    folders.write_record(folders.prepare(state, name), record)
    return record


def access(state: Path) -> ServerAccess:
    return ServerAccess(state, lambda: NOTHING, read_only=False, read_only_by="")


def test_known_servers_are_named_with_unreadable_records(tmp_path: Path) -> None:
    write(tmp_path, "chat")
    write(tmp_path, "broken")
    (tmp_path / "servers" / "broken" / "record.json").write_text("{")
    with pytest.raises(NotFoundError) as missing:
        access(tmp_path).adopt_ours("nosuch")
    assert str(missing.value) == ("no server is called 'nosuch'; your servers: broken (its record can't be read), chat")


def test_server_being_created_is_not_reported_as_missing(tmp_path: Path) -> None:
    lock = folders.take_lock(folders.prepare(tmp_path, "chat"))
    assert lock is not None
    with pytest.raises(OperationError, match="chat is being created by another command") as refused:
        access(tmp_path).adopt_ours("chat")
    assert refused.value.exit_code == 1
    os.close(lock)


def test_server_created_while_it_is_looked_for_is_found(tmp_path: Path) -> None:
    def snapshot() -> FleetSnapshot:
        write(tmp_path, "chat")
        return NOTHING

    found = ServerAccess(tmp_path, snapshot, read_only=False, read_only_by="").adopt_ours("chat")
    assert found.name == "chat"
