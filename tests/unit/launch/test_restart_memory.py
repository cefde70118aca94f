"""A restart is not refused because of the memory that the server itself holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from vllm_launchers.host.gpu.host import Gpu, Holder, Host, MigInstance
from vllm_launchers.keeper.records import Generation, LaunchSpec, ServerRecord, State
from vllm_launchers.launch.details import Details, pack
from vllm_launchers.launch.inputs_reader import PlanInputsReader
from vllm_launchers.launch.planner import Planner
from vllm_launchers.launch.request import RestartOptions
from vllm_launchers.presets.load import read_presets
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.changes import Changes, Flags
from vllm_launchers.vllm.startup_reports import StartupReportStore

CHATBOT = read_presets(None)[0]["chatbot"]
DETAILS = Details(
    preset="chatbot",
    model="/models/eight",
    engine=Engine(EngineKind.VLLM, ("/opt/vllm",), "0.33.0", "cuda", "/opt/vllm"),
    flags={"gpu-memory-utilization": 0.9},
    workload=CHATBOT.workload,
    objectives=CHATBOT.objectives,
)
L4 = Gpu(0, "GPU-0", "NVIDIA L4", 22.5, 2.0, used_gib=20.1)
OTHER = replace(L4, index=1, uuid="GPU-1")
SLICE = MigInstance("MIG-half", "3g.20gb", 19.6, 1.2, 1, 0)
A100 = Gpu(0, "GPU-0", "NVIDIA A100-SXM4-40GB", 39.5, 21.0, mig_mode=True, mig=(SLICE,))


class Source:
    recorded_host = None
    watching = has_driver = True

    def __init__(self, *gpus: Gpu) -> None:
        self.host = Host(gpus=gpus)

    def read(self) -> Host:
        return self.host


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The errors about memory with which a restart is planned."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def held(*gpus: Gpu, state: State = State.READY, changes: Flags | None = None, **details: object) -> list[str]:
        source = Source(*gpus)
        planner = Planner(tmp_path, PlanInputsReader(source), StartupReportStore(tmp_path / "reports.json"), (), source)
        spec = LaunchSpec(("/opt/vllm",), "127.0.0.1", 8000, details=pack(replace(DETAILS, **details)))
        record = ServerRecord("chat", state, 0.0, 0.0, (Generation(1, spec, 0.0),))
        plan = planner.plan_restart(record, Changes(changes or {}), RestartOptions()).plan
        return [found.message for found in plan.findings if found.code == "memory_held"]

    return held


def test_on_a_slice(held) -> None:
    mine, theirs = (replace(A100, used_by=(Holder(1, "me", 18.4, server=name, instance=1),)) for name in ("chat", None))
    environment = {"CUDA_VISIBLE_DEVICES": SLICE.uuid}
    assert held(theirs, gpus=(0,), environment=environment)
    assert not held(mine, gpus=(0,), environment=environment)


def test_of_unknown_size(held) -> None:
    assert held(replace(L4, used_by=(Holder(1, "anna"),)), gpus=(0,), state=State.STOPPED)
    assert not held(replace(L4, used_by=(Holder(1, "me", server="chat"),)), gpus=(0,))


@pytest.mark.parametrize("listed", [(), (Holder(4711, gib=19.6),)])
@pytest.mark.parametrize("gpus", [(), (0,)])
def test_where_the_driver_hides_its_processes(held, listed: tuple[Holder, ...], gpus: tuple[int, ...]) -> None:
    hidden = replace(L4, used_by=listed)
    assert not held(hidden, OTHER, gpus=gpus)
    for state in (State.STARTING, State.ASLEEP, State.STOPPED):
        assert held(hidden, OTHER, gpus=gpus, state=state)


def test_hidden_memory_beyond_its_share_stays_taken(held) -> None:
    """Another server, also hidden, has the rest."""
    half = {"gpu-memory-utilization": 0.45}
    assert not held(L4, gpus=(0,), flags=half)
    assert held(L4, gpus=(0,), flags=half, changes={"gpu-memory-utilization": 0.9})
    assert not held(
        L4, gpus=(0,), flags={**half, "kv-cache-memory-bytes": 2**33}, changes={"gpu-memory-utilization": 0.9}
    )


def test_what_another_user_is_seen_to_hold_stays_taken(held) -> None:
    anna = Holder(2, "anna", 19.0)
    for listed in ((anna,), (anna, Holder(4711, gib=1.0))):
        assert held(replace(L4, used_by=listed), gpus=(0,))


def test_first_visible_gpu_is_its_own(held) -> None:
    assert not held(OTHER, L4, environment={"CUDA_VISIBLE_DEVICES": "1"})


def test_of_memory_shared_with_the_cpu(held) -> None:
    """The server's processes hold an unknown part of it outside the GPU."""
    gb10 = Gpu(0, "GPU-0", "NVIDIA GB10", 119.7, 8.0, used_by=(Holder(1, "me", 90.0, server="chat"),))
    assert held(gb10, state=State.STOPPED) == []
    assert held(replace(gb10, used_by=(Holder(1, "anna", 90.0),)), state=State.STOPPED)
