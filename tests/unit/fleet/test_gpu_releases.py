"""After a stop: memory that is released, memory that is not, and memory taken by another process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from vllm_console.fleet.gpus import Releases
from vllm_console.fleet.local import LocalFleet
from vllm_launchers.errors import OperationError
from vllm_launchers.host.gpu.document import read_host
from vllm_launchers.host.gpu.host import Gpu, Holder, Host
from vllm_launchers.keeper import client, folders
from vllm_launchers.keeper.errors import SilentError
from vllm_launchers.keeper.records import Generation, LaunchSpec, ServerRecord, State

CHAT = Holder(pid=10, user="ben", gib=40.0, server="chat")
BARE = read_host(Path("1xrtx4090"))


def on_gpu(free: float, *holders: Holder) -> Host:
    gpu = Gpu(index=0, name="A6000", memory_gib=48.0, free_gib=free, used_gib=48.0 - free, used_by=holders)
    return replace(BARE, gpus=(gpu,))


class Machine:
    """A host that a test changes, and a server that ends when the test says so."""

    def __init__(self) -> None:
        self.host: Host | None = on_gpu(7.5, CHAT)
        self.ended = threading.Event()
        self.releases = Releases(lambda: self.host, timeout=0.0)

    def stop(self) -> None:
        self.releases.watch("chat", self.ended.is_set)

    def until(self, true: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not true():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def threads(self) -> int:
        return sum(thread.name == "release-chat" for thread in threading.enumerate())


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_released_memory_is_not_mentioned(machine: Machine) -> None:
    machine.stop()
    machine.host = on_gpu(47.5)
    machine.ended.set()
    machine.until(lambda: not machine.threads())
    assert machine.releases.notice("chat") == ""


def test_unreleased_memory_names_its_holder_until_it_is_free(machine: Machine) -> None:
    machine.stop()
    machine.host = on_gpu(7.5, replace(CHAT, server=None))
    machine.ended.set()
    machine.until(lambda: machine.releases.notice("chat"))
    assert machine.releases.notice("chat") == (
        "ended, but GPU 0: 39.5 GiB were not freed; pid 10 of ben still holds 40.0 GiB"
    )
    machine.host = on_gpu(47.5)
    machine.until(lambda: not machine.threads())
    assert machine.releases.notice("chat") == ""


def test_nothing_is_reported_while_the_server_ends(machine: Machine) -> None:
    machine.stop()
    assert machine.threads() == 1
    assert machine.releases.notice("chat") == ""
    machine.releases.forget("chat")
    machine.until(lambda: not machine.threads())


def test_memory_taken_by_a_new_process_was_released(machine: Machine) -> None:
    machine.stop()
    machine.host = on_gpu(10.0, Holder(pid=99, user="anna", gib=37.5))
    machine.ended.set()
    machine.until(lambda: not machine.threads())
    assert machine.releases.notice("chat") == ""


@pytest.mark.parametrize("server", [None, "coder"], ids=["a tenant's", "our own that loads"])
def test_memory_taken_by_a_growing_process_was_released(machine: Machine, server: str | None) -> None:
    other = Holder(pid=20, user="anna", gib=1.0, server=server)
    machine.host = on_gpu(6.5, CHAT, other)
    machine.stop()
    machine.host = on_gpu(10.0, replace(other, gib=37.5))
    machine.ended.set()
    machine.until(lambda: not machine.threads())
    assert machine.releases.notice("chat") == ""


def test_growing_process_is_not_blamed_for_missing_memory(machine: Machine) -> None:
    other = Holder(pid=20, user="anna", gib=1.0)
    machine.host = on_gpu(6.5, CHAT, other)
    machine.stop()
    machine.host = on_gpu(6.5, replace(other, gib=11.0))
    machine.ended.set()
    machine.until(lambda: machine.releases.notice("chat"))
    assert machine.releases.notice("chat") == (
        "ended, but GPU 0: 29.5 GiB were not freed, and no visible process holds them"
    )
    machine.host = on_gpu(36.5, replace(other, gib=11.0))
    machine.until(lambda: not machine.threads())


def test_start_with_the_same_name_clears_the_notice(machine: Machine) -> None:
    machine.stop()
    machine.ended.set()
    machine.until(lambda: machine.releases.notice("chat"))
    machine.releases.forget("chat")
    assert machine.releases.notice("chat") == ""
    machine.until(lambda: not machine.threads())
    assert machine.releases.notice("chat") == ""


def test_no_thread_starts_without_gpus(machine: Machine) -> None:
    machine.releases.watch("other", machine.ended.is_set)
    machine.host = None
    machine.stop()
    assert machine.threads() == 0


def test_refused_stop_leaves_no_waiting_thread(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = Generation(1, LaunchSpec(("vllm",), "127.0.0.1", 1), 1_000.0)
    folders.write_record(
        folders.prepare(tmp_path, "chat"), ServerRecord("chat", State.READY, 1_001.0, 1_000.0, (generation,))
    )

    def refuse(*_: object) -> ServerRecord:
        raise SilentError("its keeper does not answer")

    monkeypatch.setattr(client, "adopt", lambda *_: False)
    monkeypatch.setattr(client, "stop", refuse)
    fleet = LocalFleet(tmp_path, interactive=True, observe=False, gpus=False)
    fleet._releases = machine.releases
    with pytest.raises(OperationError, match="does not answer"):
        fleet.stop("chat")
    machine.until(lambda: not machine.threads())
    fleet.close()
