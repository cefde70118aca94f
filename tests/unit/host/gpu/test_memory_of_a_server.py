"""What a server holds counts as free for its next start: on a MIG slice, and where the driver hides sizes or pids."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from vllm_launchers.host.gpu.document import read_host
from vllm_launchers.host.gpu.host import Gpu, Holder, Host
from vllm_launchers.host.gpu.sharing import holdings, slice_gpu, without_server

ANNA = Holder(2, "anna", 3.0)


def left(*holders: Holder, hidden_on: Mapping[int, float] | None = None) -> Gpu:
    """A GPU with 4 of 48 GiB free after the end of ``chat``."""
    gpu = Gpu(0, memory_gib=48.0, free_gib=4.0, used_gib=44.0, used_by=holders)
    seen = without_server(Host(gpus=(gpu,)), "chat", hidden_on)
    assert seen is not None
    return seen.gpus[0]


def test_reported_memory_is_free() -> None:
    gpu = left(Holder(1, "me", 40.0, server="chat"), ANNA)
    assert (gpu.free_gib, gpu.used_gib, gpu.holders) == (44.0, 4.0, (ANNA,))
    assert left(ANNA).free_gib == 4.0
    assert without_server(None, "chat") is None


DESKTOP = Holder(3, "me", kind="graphics")
CHAT = Holder(7, "me", server="chat")


@pytest.mark.parametrize("other", [ANNA, DESKTOP])
def test_memory_of_unknown_size_is_free(other: Holder) -> None:
    gpu = left(other, CHAT)
    assert gpu.free_gib == 48.0 - (other.gib or 0.0)
    assert (gpu.holders, holdings(gpu).unseen) == ((other,), 0.0)


@pytest.mark.parametrize("other", [replace(ANNA, gib=None), replace(CHAT, pid=8, server="docs"), Holder(4711)])
def test_memory_that_may_be_of_another_process_stays_taken(other: Holder) -> None:
    assert left(other, CHAT).free_gib == left(CHAT, other).free_gib == 4.0
    assert left(other, CHAT, replace(CHAT, pid=9, gib=10.0)).free_gib == 14.0, "what the server is reported to hold"


def test_servers_of_unknown_size_free_their_memory_together() -> None:
    host = Host(gpus=(left(CHAT, replace(CHAT, pid=8, server="docs")),))
    freed = without_server(host, "docs")
    assert freed is not None
    assert freed.gpus[0].free_gib == 48.0


def test_memory_on_a_slice_is_free() -> None:
    host = read_host(Path("1xa100-mig"))
    gpu = host.gpus[0]
    held = next(part for part in gpu.mig if (part.free_gib or 0.0) < 0.9 * (part.memory_gib or 0.0))
    own = tuple(replace(one, server="chat") if one.instance == held.gpu_instance else one for one in gpu.holders)
    seen = without_server(replace(host, gpus=(replace(gpu, used_by=own),)), "chat")
    assert seen is not None
    (freed,) = seen.gpus
    part = next(part for part in freed.mig if part.uuid == held.uuid)
    assert part.free_gib == pytest.approx(held.memory_gib, abs=1.0)
    assert not holdings(slice_gpu(freed, part)).unseen
    assert [one for one in freed.mig if one != part] == [one for one in gpu.mig if one != held]


@pytest.mark.parametrize("listed", [(), (ANNA, Holder(4711, gib=41.0)), (ANNA,)])
def test_hidden_memory_on_its_gpus_is_free(listed: tuple[Holder, ...]) -> None:
    """The driver lists no processes, or only pids of another namespace."""
    gpu = left(*listed, hidden_on={0: 44.5})
    taken = 3.0 if listed else 0.0
    assert (gpu.free_gib, gpu.holders) == (48.0 - taken, listed[:1])
    assert left(*listed, hidden_on={1: 44.5}).free_gib == 4.0
    assert left(*listed, hidden_on={0: 20.0}).free_gib == 24.0, "no more than its share"


def test_hidden_memory_that_may_be_of_another_process_stays_taken() -> None:
    listed = (Holder(4711, gib=20.0), Holder(4712, gib=21.0))
    assert left(*listed, hidden_on={0: 44.5}).free_gib == 4.0
    assert left(replace(ANNA, gib=None), hidden_on={0: 44.5}).free_gib == 4.0
    windows = Holder(4713, gib=0.4, kind="graphics")
    assert left(Holder(4711, gib=41.0), windows, hidden_on={0: 44.5}).free_gib == 45.0


def test_hidden_memory_stays_taken_if_the_driver_lists_the_server() -> None:
    shown = Gpu(0, memory_gib=48.0, free_gib=8.0, used_gib=40.0, used_by=(Holder(1, gib=40.0, server="chat"),))
    hidden = Gpu(1, memory_gib=48.0, free_gib=28.0, used_gib=20.0)
    seen = without_server(Host(gpus=(shown, hidden)), "chat", {0: 40.5, 1: 40.5})
    assert seen is not None
    assert [gpu.free_gib for gpu in seen.gpus] == [48.0, 28.0]
