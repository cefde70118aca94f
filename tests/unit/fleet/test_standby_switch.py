"""Switching a standby pair: what is checked first, the order of steps, and what aborts it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace as changed

from vllm_console.diagnosis.finding import Severity
from vllm_console.diagnosis.live.sleep import SHOWN_SECONDS, after_sleep
from vllm_console.fleet import standby
from vllm_console.fleet.snapshot import ServerView, SleepView, paired
from vllm_console.fleet.standby import Sleeping, sleep_view, wanted_gib
from vllm_launchers.errors import OperationError, RefusedError
from vllm_launchers.host.gpu.host import Gpu, Holder, Host
from vllm_launchers.keeper import folders
from vllm_launchers.keeper.records import Generation, LaunchSpec, ServerRecord, Sleep, SleepStep, State
from vllm_launchers.launch.details import Details, pack
from vllm_launchers.launch.server_records import ServerRecords
from vllm_launchers.values import replace
from vllm_launchers.vllm.modelfacts.facts import ModelFacts


def record(name: str, state: State, *, standby_of: str = "", **details: Any) -> ServerRecord:
    given: dict[str, Any] = {"gpus": (0,), "flags": {"gpu-memory-utilization": 0.9}, **details}
    packed = pack(Details(standby_of=standby_of, **given))
    spec = LaunchSpec((), "127.0.0.1", 8000, sleep_mode=True, details=packed)
    sleep = Sleep(1, 0.0, SleepStep.ASLEEP) if state is State.ASLEEP else None
    return ServerRecord(name, state, 0.0, 0.0, (Generation(1, spec, 0.0),), sleep=sleep)


class Keepers:
    """Replaces the keepers' client: requests take effect at once, or fail as configured."""

    def __init__(self, state: Path, *records: ServerRecord) -> None:
        self.state = state
        self.records = {one.name: one for one in records}
        self.asked: list[str] = []
        self.asleep = Sleep(1, 0.0, SleepStep.ASLEEP)
        self.awake = Sleep(1, 0.0, SleepStep.AWAKE, checked=4)
        self.gpu = Gpu(
            0, name="A6000", memory_gib=48.0, free_gib=3.0, used_gib=45.0, used_by=(Holder(1, server="chat", gib=44.0),)
        )

    def all(self) -> tuple[list[ServerRecord], list[str]]:
        return list(self.records.values()), []

    def read(self, _: Path, name: str) -> ServerRecord:
        return self.records[name]

    def sleep(self, _: Path, name: str, level: int, seconds: float) -> None:
        self.asked.append(f"sleep {name} {level} {seconds:g}")
        slept = self.asleep.step is SleepStep.ASLEEP
        self.records[name] = replace(
            self.records[name], state=State.ASLEEP if slept else State.READY, sleep=self.asleep
        )
        if slept:
            self.gpu = changed(self.gpu, free_gib=47.0, used_by=())

    def wake(self, _: Path, name: str) -> None:
        self.asked.append(f"wake {name}")
        self.records[name] = replace(self.records[name], state=State.READY, sleep=self.awake)

    def wait_for(self, _: Path, name: str, __: object, ___: float) -> ServerRecord:
        return self.records[name]

    def host(self, _: Details) -> Host | None:
        return Host(gpus=(self.gpu,))


@pytest.fixture
def keepers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Keepers:
    found = Keepers(tmp_path, record("chat", State.READY), record("coder", State.ASLEEP, standby_of="chat"))
    for name in found.records:
        folders.server_folder(tmp_path, name).mkdir(parents=True)
    monkeypatch.setattr(standby, "client", found)
    monkeypatch.setattr(standby, "FREED_SECONDS", 0.0)
    return found


def sleeping(keepers: Keepers, facts: ModelFacts | None = None) -> Sleeping:
    records = cast("ServerRecords", SimpleNamespace(read=keepers.all))
    return Sleeping(keepers.state, records, lambda _: facts, keepers.host, keepers.asked.append)


def test_switch_sleeps_one_checks_memory_and_wakes_the_other(keepers: Keepers) -> None:
    messages: list[str] = []
    sleeping(keepers).wake(keepers.records["coder"], 1, 60.0, messages.append)
    assert keepers.asked == ["chat", "sleep chat 1 60", "wake coder"]
    assert messages[-3:] == [
        "coder: GPU 0 has the 42.7 GiB it needs",
        "coder: waking up",
        "coder: awake; 4 golden prompts answered as before",
    ]


def test_memory_not_freed_leaves_the_server_asleep(keepers: Keepers) -> None:
    keepers.records["chat"] = record("chat", State.ASLEEP)
    with pytest.raises(OperationError, match=r"coder stays asleep because .* 39\.7 GiB were not freed"):
        sleeping(keepers).wake(keepers.records["coder"], 1, 60.0, lambda _: None)
    assert keepers.asked == []


def test_half_failed_switch_says_that_neither_serves(keepers: Keepers) -> None:
    keepers.gpu = changed(keepers.gpu, memory_gib=60.0)
    with pytest.raises(OperationError, match="coder and chat are both asleep, and neither serves"):
        sleeping(keepers).wake(keepers.records["coder"], 1, 60.0, lambda _: None)
    assert keepers.asked == ["chat", "sleep chat 1 60"]


def test_without_a_driver_free_memory_is_not_confirmed(keepers: Keepers) -> None:
    messages: list[str] = []
    keepers.host = lambda _: Host(problem="no driver")  # type: ignore[method-assign]
    sleeping(keepers).wake(keepers.records["coder"], 1, 60.0, messages.append)
    assert "coder: could not confirm that its GPUs have free memory: no driver" in messages


def test_server_that_stays_awake_keeps_the_other_asleep(keepers: Keepers) -> None:
    keepers.asleep = Sleep(1, 0.0, SleepStep.CANCELED, message="3 requests left after 60 s")
    with pytest.raises(OperationError, match="chat did not go to sleep and is ready: 3 requests left"):
        sleeping(keepers).wake(keepers.records["coder"], 1, 60.0, lambda _: None)
    assert keepers.asked == ["chat", "sleep chat 1 60"]


def test_different_answers_after_waking_are_an_error(keepers: Keepers) -> None:
    keepers.awake = Sleep(1, 0.0, SleepStep.MISMATCH, message="4 of 4 golden prompts answered differently")
    with pytest.raises(OperationError, match="coder was restarted because 4 of 4 golden"):
        sleeping(keepers).wake(keepers.records["coder"], 1, 60.0, lambda _: None)


def test_only_a_sleeping_server_is_woken(keepers: Keepers) -> None:
    with pytest.raises(OperationError, match="chat is ready, not asleep"):
        sleeping(keepers).wake(keepers.records["chat"], 1, 60.0, lambda _: None)


def test_concurrent_switches_wake_only_one_of_a_pair(keepers: Keepers, monkeypatch: pytest.MonkeyPatch) -> None:
    other: list[str] = []

    def meanwhile(_: Path, name: str, __: object, ___: float) -> ServerRecord:
        with pytest.raises(OperationError, match="another command wakes up or starts"):
            sleeping(keepers).wake(keepers.records["chat"], 1, 60.0, other.append)
        return keepers.records[name]

    monkeypatch.setattr(keepers, "wait_for", meanwhile)
    sleeping(keepers).wake(keepers.records["coder"], 1, 60.0, lambda _: None)
    assert keepers.asked == ["chat", "sleep chat 1 60", "wake coder"]
    assert other == []


def test_sleep_level_that_gives_wrong_answers_is_refused(keepers: Keepers) -> None:
    gemma = ModelFacts("m", architecture="Gemma3ForCausalLM")
    with pytest.raises(RefusedError, match="Use --level 1"):
        sleeping(keepers, gemma).sleep(keepers.records["chat"], 2, 60.0, lambda _: None)


def test_weights_above_host_memory_are_refused_at_level_1(keepers: Keepers) -> None:
    big = record("chat", State.READY, predicted={"weights_gib": 1e6})
    with pytest.raises(RefusedError, match="Use --level 2"):
        sleeping(keepers).sleep(big, 1, 60.0, lambda _: None)
    assert keepers.asked == []


def test_required_memory_is_the_share_minus_what_it_holds() -> None:
    gpu = Gpu(0, memory_gib=48.0, free_gib=1.0, used_gib=47.0, used_by=(Holder(1, server="coder", gib=0.6),))
    details = Details(gpus=(0,), flags={"gpu-memory-utilization": 0.9})
    assert wanted_gib(Host(gpus=(gpu,)), "coder", details) == {0: pytest.approx(48 * 0.9 - 0.6 - 0.5, abs=0.01)}
    fixed = Details(gpus=(0,), flags={"kv-cache-memory-bytes": "4G"})
    assert wanted_gib(Host(gpus=(gpu,)), "coder", fixed) == {}


def test_host_memory_is_held_only_at_level_1() -> None:
    details = Details(flags={"tensor-parallel-size": 2}, predicted={"weights_gib": 7.5})
    first, second = (sleep_view(Sleep(level, 0.0, SleepStep.ASLEEP), details) for level in (1, 2))
    assert first is not None
    assert second is not None
    assert (first.host_gib, second.host_gib) == (15.0, None)
    assert first.sentence == "asleep, level 1, about 15.0 GiB of weights in host memory"
    assert second.sentence == "asleep, level 2, weights discarded"


def test_pair_members_name_each_other() -> None:
    views = [ServerView(name, State.READY, 0.0) for name in ("chat", "coder", "alone")]
    views[1] = changed(views[1], partner="chat")
    assert [one.partner for one in paired(views, 0.0)] == ["coder", "chat", ""]
    assert [one.partner for one in paired(views[1:], 0.0)] == ["", ""]


def test_pair_with_neither_serving_is_a_finding_unless_switching() -> None:
    slept = SleepView(SleepStep.ASLEEP, 1, 100.0)
    views = [
        ServerView(name, State.ASLEEP, 100.0, partner=other, sleep=slept)
        for name, other in (("chat", ""), ("coder", "chat"))
    ]
    found = [one.findings[0] for one in paired(views, 140.0)]
    assert [(one.code, one.severity, one.since) for one in found] == [("pair_asleep", "critical", 100.0)] * 2
    assert found[0].fixes[1].why == "Wake coder up: vllm-console wake coder."
    assert not any(one.findings for one in paired(views, 110.0)), "between the halves of a switch"
    waking = changed(views[1], sleep=SleepView(SleepStep.WAKING, 1, 100.0))
    assert not any(one.findings for one in paired([views[0], waking], 140.0))
    assert not any(one.findings for one in paired([changed(views[0], state=State.READY), views[1]], 140.0))


def test_wrong_answers_are_a_temporary_critical_finding() -> None:
    sleep = Sleep(2, 0.0, SleepStep.MISMATCH, 100.0, checked=4, differing=("a", "b"))
    found = after_sleep(sleep, 200.0)
    assert found is not None
    assert (found.code, found.severity, found.since) == ("wrong_answers_after_sleep", Severity.CRITICAL, 100.0)
    assert "2 of 4" in found.symptom
    assert after_sleep(sleep, 101.0 + SHOWN_SECONDS) is None
    failed = after_sleep(replace(sleep, step=SleepStep.FAILED, message="/wake_up: 500"), 200.0)
    assert failed is not None
    assert failed.code == "wake_up_failed"
    assert after_sleep(replace(sleep, step=SleepStep.AWAKE), 200.0) is None
