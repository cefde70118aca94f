"""What follows from the records of this person's servers, and from the command lines of others'."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_console.fleet.api import FleetError
from vllm_console.fleet.model import State as Seen
from vllm_console.fleet.observing import ObservedWatch
from vllm_console.fleet.records import Records
from vllm_console.fleet.service import LocalFleet
from vllm_launchers.keeper import store
from vllm_launchers.keeper.records import Generation, LaunchSpec, ServerRecord, State
from vllm_launchers.machine.processes import ObservedServer


def record(name: str, port: int, state: State) -> ServerRecord:
    """A server as its keeper left it."""
    spec = LaunchSpec(("vllm", "serve"), "127.0.0.1", port)
    return ServerRecord(name, state, 1.0, 1.0, (Generation(1, spec, 1.0),))


def test_a_server_that_waits_to_start_again_keeps_its_name_and_its_port(tmp_path: Path) -> None:
    ended = record("chat", 8055, State.FAILED)
    waits = replace(record("chat", 8055, State.FAILED), next_attempt_at=time.time() + 60)
    lives = record("batch", 8056, State.READY)
    for one in (waits, lives):
        store.write_record(store.prepare(tmp_path, one.name), one)
    assert Records(tmp_path).taken_ports() == {8055, 8056}
    assert Records(tmp_path).taken_ports("chat") == {8056}, "its own is not somebody else's"
    assert Records(tmp_path).free_name("chat") == "chat-2"
    store.write_record(store.prepare(tmp_path, "chat"), ended)
    assert Records(tmp_path).taken_ports() == {8056}
    assert Records(tmp_path).free_name("chat") == "chat"


def test_a_folder_that_cannot_be_read_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "servers").write_text("no folder")
    fleet = LocalFleet(tmp_path, observe=False, gpus=False)
    with pytest.raises(FleetError, match="servers"):
        fleet.snapshot()
    fleet.close()


@pytest.mark.parametrize("host", ["a b", "a:b", "[x", "\x1b[31m"])
def test_a_strange_address_in_somebodys_command_line_is_said_of_that_server_alone(host: str) -> None:
    """Any user of a machine can write such a command line."""
    watch = ObservedWatch(ObservedServer(1, 1, "anna", ("vllm", "serve", "m", "--host", host), 7999, host, "m"), 0.1)
    assert watch.looked.wait(10)
    view = watch.view(None, ())
    assert view.state is Seen.UNRESPONSIVE
    assert view.reason.endswith(("this is no address; write http://HOST:PORT.", "check host and port."))
    assert "\x1b" not in view.reason
    watch.close()
