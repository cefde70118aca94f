"""The monitor: a driver that hangs, fails, recovers; a GPU that falls off the bus; memory released or not."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from vllm_launchers.host.gpu.host import DriverError, Gpu, Holder, Host, with_servers
from vllm_launchers.host.gpu.monitor import GpuMonitor, wait_until_freed
from vllm_launchers.host.gpu.reader import REOPEN_AFTER

HOST = Host(hostname="box", gpus=(Gpu(0, memory_gib=24.0, free_gib=20.0),))


class FakeReader:
    """A driver whose samples are set by the test."""

    def __init__(self) -> None:
        self.hold = threading.Event()
        self.hold.set()
        self.problem: str | None = None
        self.opened = self.sampled = self.inside = self.most_inside = 0

    def open(self) -> None:
        self.opened += 1

    def sample(self, at: float) -> Host:
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        assert self.hold.wait(60)
        self.inside -= 1
        self.sampled += 1
        if self.problem:
            raise DriverError(self.problem)
        return replace(HOST, at=at)

    def close(self) -> None:
        return


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


@pytest.fixture
def reader() -> FakeReader:
    return FakeReader()


@pytest.fixture
def watch(reader: FakeReader) -> Any:
    watch = GpuMonitor(interval=0.01, deadline=0.2, open_reader=lambda: reader)
    watch.start()
    yield watch
    reader.hold.set()
    watch.close()


def test_hung_driver_is_reported_and_recovers(watch: GpuMonitor, reader: FakeReader) -> None:
    until(lambda: watch.latest().gpus)
    reader.hold.clear()
    until(lambda: watch.latest().problem)
    found = watch.latest()
    assert found.problem.startswith("driver not answering since ")
    assert found.gpus == HOST.gpus
    sampled = reader.sampled
    reader.hold.set()
    until(lambda: not watch.latest().problem)
    assert reader.sampled > sampled
    assert reader.most_inside == 1


def test_hung_driver_blocks_nobody_and_gets_no_second_call(watch: GpuMonitor, reader: FakeReader) -> None:
    until(lambda: watch.latest().gpus)
    reader.hold.clear()
    until(lambda: watch.latest().problem)
    threads = threading.active_count()
    for _ in range(2000):
        assert isinstance(watch.latest(), Host)
    assert threading.active_count() <= threads
    assert reader.inside == 1


def test_failing_driver_is_reopened_until_it_works(watch: GpuMonitor, reader: FakeReader) -> None:
    until(lambda: watch.latest().gpus)
    reader.problem = "the driver is gone"
    until(lambda: watch.latest().problem == "the driver is gone")
    assert not watch.latest().gpus
    opened = reader.opened
    until(lambda: reader.opened > opened)
    reader.problem = None
    until(lambda: watch.latest().gpus and not watch.latest().problem)


def test_reader_exception_is_reported_and_does_not_end_the_monitor(watch: GpuMonitor, reader: FakeReader) -> None:
    until(lambda: watch.latest().gpus)
    sample, reader.sample = reader.sample, lambda at: {}["x"]  # type: ignore[method-assign, assignment, index]
    until(lambda: "KeyError" in watch.latest().problem)
    reader.sample = sample  # type: ignore[method-assign]
    until(lambda: not watch.latest().problem)


WATCHED = """
import json, os, sys, time
from vllm_launchers.host.gpu.document import encode_host
from vllm_launchers.host.gpu.monitor import GpuMonitor
control = os.environ["NVML_STUB_CONTROL"]
watch = GpuMonitor(interval=0.02, deadline=0.3)
def say(*lines):
    with open(control + ".new", "w") as file:
        file.write("".join(line + "\\n" for line in lines))
    os.replace(control + ".new", control)
def until(condition):
    deadline = time.monotonic() + 30
    while not condition(watch.latest()):
        assert time.monotonic() < deadline, watch.latest()
        time.sleep(0.01)
    found = watch.latest()
    return {"problem": found.problem, **encode_host(found)}
"""


def test_gpu_that_falls_off_the_bus_is_marked_and_others_continue(
    recorded: Callable[[str], Host], make_stub: Callable[[Host], Any]
) -> None:
    source = (
        WATCHED
        + """
watch.start()
before = until(lambda w: w.gpus)
say("xid 1 79")
until(lambda w: w.gpus[1].xid == 79)
say("* 1 15 0")
lost = until(lambda w: w.gpus and w.gpus[1].lost)
say()
back = until(lambda w: w.gpus and not w.gpus[1].lost)
print(json.dumps([before, lost, back]))
"""
    )
    before, lost, back = make_stub(recorded("4xa6000")).run(source)
    assert lost["problem"] == ""
    gone, other = lost["gpus"][1], lost["gpus"][2]
    assert "fell off the bus" in gone["lost"]
    assert gone["xid"] == 79
    assert gone["name"] == before["gpus"][1]["name"]
    assert gone["free_gib"] is None
    assert other["free_gib"] == before["gpus"][2]["free_gib"]
    assert lost["islands"] == [[0, 1], [2, 3]]
    assert back["gpus"][1]["free_gib"] == before["gpus"][1]["free_gib"]


def test_reset_gpu_is_seen_by_its_new_handle(recorded: Callable[[str], Host], make_stub: Callable[[Host], Any]) -> None:
    source = (
        WATCHED
        + """
watch.start()
before = until(lambda w: w.gpus)
say("* 1 15 0")
until(lambda w: w.gpus[1].lost)
say("reset 1")
back = until(lambda w: w.gpus and not w.gpus[1].lost)
say("xid 1 63")
heard = until(lambda w: w.gpus[1].xid == 63)
print(json.dumps([before, back, heard]))
"""
    )
    before, back, heard = make_stub(recorded("4xa6000")).run(source)
    assert [gpu["free_gib"] for gpu in back["gpus"]] == [gpu["free_gib"] for gpu in before["gpus"]]
    assert [port["active"] for port in heard["gpus"][1]["nvlinks"]] == [True] * 4
    assert back["links"] == before["links"]


def test_driver_is_reopened_less_often_for_a_lost_gpu(
    recorded: Callable[[str], Host], make_stub: Callable[[Host], Any]
) -> None:
    code = """
import json
import pynvml
from vllm_launchers.host.gpu.reader import REOPEN_AFTER, GpuReader
opened = []
init = pynvml.nvmlInit
pynvml.nvmlInit = lambda: opened.append(at) or init()
at = 0
reader = GpuReader()
reader.open()
for at in range(1, 8 * REOPEN_AFTER):
    host = reader.sample(float(at))
print(json.dumps([opened, [bool(gpu.lost) for gpu in host.gpus]]))
"""
    stub = make_stub(recorded("4xa6000"))
    stub.set("* 2 15 0")
    opened, lost = stub.run(code)
    gaps = [after - before for before, after in pairwise(opened)]
    assert len(gaps) == 3
    assert gaps[1] == 2 * REOPEN_AFTER
    assert gaps[2] == 4 * REOPEN_AFTER
    assert lost == [False, False, True, False]


def test_reset_visible_only_to_a_new_driver_is_seen(
    recorded: Callable[[str], Host], make_stub: Callable[[Host], Any]
) -> None:
    code = """
import json, os
from vllm_launchers.host.gpu.reader import REOPEN_AFTER, GpuReader
control = os.environ["NVML_STUB_CONTROL"]
reader = GpuReader()
reader.open()
answers = [reader.sample(0.0)]
with open(control, "w") as file:
    file.write("reset_with_init 2\\n")
answers += [reader.sample(float(at)) for at in range(1, REOPEN_AFTER + 1)]
print(json.dumps([[[gpu.index, gpu.name, gpu.free_gib, bool(gpu.lost)] for gpu in host.gpus] for host in answers]))
"""
    first, *while_lost, last = make_stub(recorded("4xa6000")).run(code)
    assert last == first
    for seen in while_lost:
        assert [gpu[3] for gpu in seen] == [False, False, True, False]
        assert seen[2][:3] == [2, first[2][1], None]
        assert seen[3] == first[3]


@pytest.mark.parametrize(
    "function", ["nvmlInitWithFlags", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetHandleByIndex_v2"]
)
def test_hung_driver_call_does_not_block_the_snapshot(
    function: str, recorded: Callable[[str], Host], make_stub: Callable[[Host], Any]
) -> None:
    source = (
        WATCHED
        + """
say(f"{sys.argv[1]} -1 0 120")
watch.start()
hung = until(lambda w: w.problem)
say()
back = until(lambda w: w.gpus and not w.problem)
print(json.dumps([hung, back]))
"""
    )
    hung, back = make_stub(recorded("2xrtx3090")).run(source, function)
    assert hung["problem"].startswith("driver not answering since ")
    assert hung["memory_gib"]
    assert len(back["gpus"]) == 2


def test_single_sample_of_a_hung_driver_ends_with_a_message(
    recorded: Callable[[str], Host], make_stub: Callable[[Host], Any]
) -> None:
    stub = make_stub(recorded("2xrtx3090"))
    stub.set("nvmlInitWithFlags -1 0 120")
    lines = ("import json; from vllm_launchers.host.gpu.monitor import read_once", "found = read_once(deadline=0.5)")
    source = "\n".join([*lines, "print(json.dumps(found.problem))"])
    assert "not answer" in stub.run(source)


def holding(free: float, *holders: Holder) -> Host:
    return Host(gpus=(Gpu(0, memory_gib=48.0, free_gib=free, used_gib=48.0 - free, used_by=holders),))


def test_memory_being_freed_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_launchers.host.gpu.monitor.FREED_POLL_SECONDS", 0.001)
    samples = iter([holding(10.0), holding(30.0), holding(47.0)])
    assert wait_until_freed(lambda: next(samples), {0: 45.0}).freed


def test_unreleased_memory_names_its_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_launchers.host.gpu.monitor.FREED_POLL_SECONDS", 0.001)
    host = holding(10.0, Holder(7, user="bob", gib=2.0), Holder(42, user="anna", gib=35.5))
    found = wait_until_freed(lambda: host, {0: 45.0}, ours={7}, timeout=0.01)
    assert not found.freed
    assert "pid 7 of bob" in found.reason
    found = wait_until_freed(lambda: host, {0: 45.0}, timeout=0.01)
    assert "35.0 GiB were not freed; pid 42 of anna still holds 35.5 GiB" in found.reason


def test_memory_shared_with_the_cpu_is_not_waited_for() -> None:
    shared = Gpu(0, name="NVIDIA GB10", memory_gib=119.7, free_gib=10.0, used_by=(Holder(42, user="anna", gib=35.5),))
    assert wait_until_freed(lambda: Host(gpus=(shared,)), {0: 45.0}, timeout=0.01).freed


def test_recorded_host_names_the_servers_on_its_gpus(recorded: Callable[[str], Host]) -> None:
    host = recorded("8xl40s")
    found = with_servers(host, {90133: "chat"})
    assert found.gpus[2].holders[0].server == "chat"
    assert found.gpus[0] == host.gpus[0]


def test_last_snapshot_is_json(watch: GpuMonitor) -> None:
    from vllm_launchers.host.gpu.document import encode_host

    until(lambda: watch.latest().gpus)
    assert json.loads(json.dumps(encode_host(watch.latest())))["hostname"] == "box"
