"""Which servers are a standby pair, and when one of them may be started."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_launchers.errors import NotFoundError, OperationError, UsageError
from vllm_launchers.keeper import folders
from vllm_launchers.keeper.records import Generation, LaunchSpec, ServerRecord, State
from vllm_launchers.launch.details import Details, pack
from vllm_launchers.launch.request import LaunchRequest
from vllm_launchers.launch.standby import (
    find_other,
    one_switch,
    partner_of,
    refuse_awake,
    refuse_beside_partner,
    standby_request,
)
from vllm_launchers.plan.flags import SLEEP_MODE


def record(
    name: str,
    state: State = State.READY,
    *,
    standby_of: str = "",
    sleep_mode: bool = True,
    gpus: tuple[int, ...] = (2,),
    environment: dict[str, str] | None = None,
) -> ServerRecord:
    details = pack(Details(gpus=gpus, standby_of=standby_of, environment=environment or {}))
    spec = LaunchSpec((), "127.0.0.1", 8000, sleep_mode=sleep_mode, details=details)
    return ServerRecord(name, state, 0.0, 0.0, (Generation(1, spec, 0.0),))


def test_each_of_a_pair_knows_the_other() -> None:
    chat, coder, alone = record("chat"), record("coder", standby_of="chat"), record("alone")
    servers = [chat, coder, alone]
    assert partner_of(servers, "chat") == coder
    assert partner_of(servers, "coder") == chat
    assert partner_of(servers, "alone") is None
    assert partner_of([coder], "coder") is None
    assert partner_of([chat, record("coder", State.STOPPED, standby_of="chat")], "chat") is None


def test_standby_takes_the_gpus_with_sleep_mode() -> None:
    request = standby_request(LaunchRequest("batch", standby_of="chat"), record("chat"))
    assert request.gpus == (2,)
    assert request.changes.set == {SLEEP_MODE: True}
    with pytest.raises(UsageError, match="omit --gpus"):
        standby_request(LaunchRequest("batch", standby_of="chat", gpus=(0,)), record("chat"))


@pytest.mark.parametrize(
    ("gpus", "variables"),
    [
        ((), {"CUDA_VISIBLE_DEVICES": "1"}),
        ((), {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}),
        ((2,), {"CUDA_VISIBLE_DEVICES": "MIG-a", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
    ],
)
def test_standby_has_the_variables_that_choose_the_gpus(gpus: tuple[int, ...], variables: dict[str, str]) -> None:
    other = record("chat", gpus=gpus, environment={**variables, "NOTE": "chat"})
    request = standby_request(LaunchRequest("batch", standby_of="chat", environment={"NOTE": "batch"}), other)
    assert request.environment == {**variables, "NOTE": "batch"}


def test_standby_on_whole_gpus_has_their_indices() -> None:
    other = record("chat", environment={"CUDA_VISIBLE_DEVICES": "2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    request = standby_request(LaunchRequest("batch", standby_of="chat"), other)
    assert (request.gpus, request.environment) == ((2,), {})


def test_invalid_standby_targets_are_refused() -> None:
    with pytest.raises(NotFoundError):
        find_other([], "chat")
    with pytest.raises(OperationError, match="stopped"):
        find_other([record("chat", State.STOPPED)], "chat")
    with pytest.raises(OperationError, match=f"--set {SLEEP_MODE}=true"):
        find_other([record("chat", sleep_mode=False)], "chat")
    with pytest.raises(OperationError, match="a standby pair already"):
        find_other([record("chat"), record("coder", standby_of="chat")], "chat")
    assert find_other([record("chat"), record("old", State.STOPPED, standby_of="chat")], "chat").name == "chat"


def test_other_server_must_sleep_first() -> None:
    refuse_awake(record("chat", State.ASLEEP))
    with pytest.raises(OperationError, match="vllm-console sleep chat"):
        refuse_awake(record("chat"))


@pytest.mark.parametrize("state", [State.ASLEEP, State.STOPPED, State.FAILED])
def test_server_is_not_started_next_to_its_awake_partner(state: State) -> None:
    coder = record("coder", state, standby_of="chat")
    with pytest.raises(OperationError, match="put chat to sleep first"):
        refuse_beside_partner([record("chat"), coder], coder)
    refuse_beside_partner([record("chat", State.ASLEEP), coder], coder)
    refuse_beside_partner([coder], coder)


def test_every_server_on_its_gpus_counts_as_its_partner() -> None:
    chat, old = record("chat", State.ASLEEP), record("old", State.STOPPED, standby_of="chat")
    servers = [chat, old, record("coder", standby_of="chat")]
    assert partner_of(servers, "old") == servers[2]
    with pytest.raises(OperationError, match="put coder to sleep first"):
        refuse_beside_partner(servers, old)
    elsewhere = record("chat", gpus=(3,))
    assert partner_of([elsewhere, old], "old") is None


def test_all_servers_on_the_same_gpus_share_one_lock(tmp_path: Path) -> None:
    servers = [record("chat"), record("old", State.STOPPED, standby_of="chat"), record("coder", standby_of="chat")]
    for one in (*servers, record("alone")):
        folders.server_folder(tmp_path, one.name).mkdir(parents=True)
    with one_switch(tmp_path, servers, "coder"):
        for name in ("old", "chat"):
            with pytest.raises(OperationError, match="another command"), one_switch(tmp_path, servers, name):
                pass
        with one_switch(tmp_path, [*servers, record("alone")], "alone"):
            pass
    with one_switch(tmp_path, servers, "old"):
        pass


def test_serving_server_may_be_restarted() -> None:
    chat = record("chat")
    refuse_beside_partner([chat, record("coder", State.ASLEEP, standby_of="chat")], chat)
