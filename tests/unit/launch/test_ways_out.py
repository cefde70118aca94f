"""Launches for which no GPUs have room: what is proposed really makes them fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fakes.crowded_host import Held, crowded_host
from vllm_console.fleet.local import LocalFleet
from vllm_launchers.host.gpu.document import read_host
from vllm_launchers.launch.errors import NoPlaceError
from vllm_launchers.launch.launch_plan import LaunchPlan, plan_launch
from vllm_launchers.launch.place import GpuFinder
from vllm_launchers.launch.request import LaunchRequest
from vllm_launchers.launch.resolved_request import ResolvedRequest
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.presets.load import read_presets
from vllm_launchers.presets.model import Workload
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.changes import Changes
from vllm_launchers.vllm.modelfacts.facts import LayerKind, ModelFacts

VLLM = Engine(EngineKind.VLLM, ("/opt/vllm",), "0.33.0", "cuda", "/opt/vllm")
EIGHT = ModelFacts(
    model="/models/eight", source="folder", architecture="LlamaForCausalLM", layers=(LayerKind.FULL,) * 32,
    hidden_size=4096, intermediate_size=14336, heads=32, kv_heads=8, head_dim=128, vocabulary=128_256,
    max_context=131_072, dtype="bfloat16", weight_bytes=16 * 10**9, bytes_to_download=0,
)  # fmt: skip
SEVENTY = replace(EIGHT, model="/models/seventy", layers=(LayerKind.FULL,) * 80, heads=64, hidden_size=8192,
                  intermediate_size=28672, weight_bytes=71 * 10**9)  # fmt: skip
PAIR: Mapping[int, Sequence[Held]] = {0: (("editor", 21.1),), 1: (("docs", 7.2),)}
"""On two GPUs of 24 GiB: 2.3 GiB are free on the first and 16.4 on the second."""

UTILIZATION, TENSOR = "gpu-memory-utilization", "tensor-parallel-size"

Make = Callable[..., LaunchPlan]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[LocalFleet]:
    host = crowded_host(tmp_path / "host.json", "2xrtx3090", PAIR)
    fleet = LocalFleet(tmp_path, observe=False, host_file=host, interactive=True)
    yield fleet
    fleet.close()


def request(**more: Any) -> LaunchRequest:
    given = {name.replace("_", "-"): value for name, value in more.pop("set", {}).items()}
    return LaunchRequest("chatbot", **({"engine": "simulated", "place": "offered", "changes": Changes(given)} | more))


def refusal(fleet: LocalFleet, **more: Any) -> NoPlaceError:
    with pytest.raises(NoPlaceError) as refused:
        fleet.plan(request(**more))
    return refused.value


def held(plan: Plan) -> PlanFinding:
    return next(one for one in plan.findings if one.code == "memory_held")


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A launch on a recorded host with these holders, whose ``sizes`` the driver reports or not."""

    def make(
        facts: ModelFacts | None,
        name: str,
        holders: Mapping[int, Sequence[Held]],
        set: Any = None,
        *,
        sizes: bool = True,
        **more: Any,
    ) -> LaunchPlan:
        asked = ResolvedRequest(
            read_presets(None)[0]["chatbot"], VLLM, Changes(set or {}), facts.model if facts else "org/unknown",
            "127.0.0.1", 8000, {}, gpu_finder=GpuFinder("offered"), **more,
        )  # fmt: skip
        host = read_host(crowded_host(tmp_path / "h.json", name, holders))
        if not sizes:
            listed = (tuple(replace(holder, gib=None) for holder in gpu.holders) for gpu in host.gpus)
            gpus = (replace(gpu, used_by=used_by) for gpu, used_by in zip(host.gpus, listed, strict=True))
            host = replace(host, gpus=tuple(gpus))
        return plan_launch(asked, PlanInputs(facts, host=host))

    return make


def test_lower_utilization_is_the_fix_of_chosen_gpus_as_of_named_ones(fleet: LocalFleet) -> None:
    refused = refusal(fleet)
    assert refused.fix == Changes(set={UTILIZATION: 0.67})
    assert str(refused).endswith("(GPU 1: docs (yours) holds 7.2 GiB). It would fit with --gpu-memory-utilization 0.67")
    assert held(fleet.plan(request(place="", gpus=(1,)))).fix == refused.fix
    plan = fleet.plan(request(changes=refused.fix))
    assert plan.gpus == (1,)
    assert plan.memory is not None
    assert plan.memory.fits
    assert not [one for one in plan.findings if one.code == "memory_held"]


def test_fix_keeps_the_layout_that_another_utilization_would_change(fleet: LocalFleet) -> None:
    busy = Workload(3072, 768, 0.5, 128)
    refused = refusal(fleet, workload=busy)
    assert refused.fix == Changes(set={UTILIZATION: 0.67, TENSOR: 1})
    assert str(refused).endswith("It would fit with --gpu-memory-utilization 0.67 --tensor-parallel-size 1")
    assert fleet.plan(request(workload=busy, changes=refused.fix)).gpus == (1,)


def test_fewer_gpus_are_offered_before_a_server_is_stopped(fleet: LocalFleet) -> None:
    """Two GPUs were chosen for the workload; one with room holds fewer of its requests."""
    busy, share = Workload(3072, 768, 0.5, 128), {UTILIZATION: 0.55}
    refused = refusal(fleet, workload=busy, changes=Changes(set=share))
    assert refused.fix == Changes(set={TENSOR: 1})
    assert str(refused).endswith(". It would fit with --tensor-parallel-size 1")
    assert fleet.plan(request(workload=busy, changes=Changes(set={**share, TENSOR: 1}))).gpus == (1,)


def test_share_that_leaves_no_room_for_the_cache_is_not_offered(make: Make) -> None:
    """The weights alone would fit in the 15.8 GiB."""
    with pytest.raises(NoPlaceError) as refused:
        make(EIGHT, "2xrtx3090", {**PAIR, 0: (("@anna", 21.1),)}, {TENSOR: 1})
    assert refused.value.fix is None
    assert str(refused.value).endswith("(GPU 1: docs (yours) holds 7.2 GiB): stop docs to make room")


def test_cache_size_that_fits_nowhere_is_named_as_the_reason(make: Make) -> None:
    """More GPUs were chosen, and a smaller model was advised."""
    size = "kv-cache-memory-bytes"
    with pytest.raises(NoPlaceError) as refused:
        make(EIGHT, "4xa6000", {}, {size: 100 * 2**30})
    assert refused.value.fix == Changes(unset=(size,))
    assert str(refused.value).startswith("the server needs a GPU with ")
    assert str(refused.value).endswith(f". It would fit without --{size}")
    plan = make(EIGHT, "4xa6000", {}, {size: 100 * 2**20}).plan
    assert len(plan.gpus) == 1
    assert [one.fix for one in plan.findings if one.level is Level.ERROR] == [Changes(unset=(size,))]


def test_share_for_an_unknown_model_is_offered_with_a_condition(make: Make) -> None:
    with pytest.raises(NoPlaceError) as refused:
        make(None, "2xrtx3090", PAIR)
    assert str(refused.value).endswith("--gpu-memory-utilization 0.67, if the model itself fits")


@pytest.mark.parametrize(
    ("holders", "advice"),
    [
        ({1: (("chatbot", 44.1),), 2: (("big", 44.1),), 3: (("big", 44.1),)}, ": stop big to make room"),
        ({1: (("a", 44.1),), 2: (("b", 44.1),), 3: (("c", 44.1),)}, ": stop a and b to make room"),
        (
            {1: (("chatbot", 44.1),), 2: (("@bob", 44.1),), 3: (("@bob", 44.1),)},
            ": choose a smaller model and a lower --gpu-memory-utilization",
        ),
    ],
)
def test_only_servers_whose_stop_makes_room_are_named(
    make: Make, holders: Mapping[int, Sequence[Held]], advice: str
) -> None:
    """Anna holds 20.5 GiB of GPU 0, which comes closest together with GPU 1."""
    if advice.startswith(": stop a"):
        holders = {**holders, 0: (("d", 20.0),)}
    with pytest.raises(NoPlaceError) as refused:
        make(SEVENTY, "4xa6000", holders, {TENSOR: 2, UTILIZATION: 0.92})
    assert refused.value.problem.startswith("the server needs 2 GPUs, each with 44.2 GiB free; GPU 0,1 come closest")
    assert str(refused.value) == refused.value.problem + advice


@pytest.mark.parametrize(
    ("holders", "advice"),
    [
        ((("docs", 21.1),), ": stop docs to make room"),
        ((("docs", 7.1), ("mail", 14.0)), ": stop docs and mail to make room"),
        ((("docs", 20.1), ("@bob", 1.0)), ": choose a smaller model and a lower --gpu-memory-utilization"),
    ],
)
def test_stopped_server_frees_only_memory_that_no_other_may_hold(
    make: Make, holders: Sequence[Held], advice: str
) -> None:
    with pytest.raises(NoPlaceError) as refused:
        make(EIGHT, "2xrtx3090", {0: (("@anna", 21.1),), 1: holders}, {TENSOR: 1}, sizes=False)
    assert str(refused.value) == refused.value.problem + advice


def test_server_is_not_stopped_for_the_one_that_replaces_it(make: Make) -> None:
    with pytest.raises(NoPlaceError) as refused:
        make(EIGHT, "2xrtx3090", {**PAIR, 0: (("@anna", 21.1),)}, {TENSOR: 1}, beside="docs")
    assert "stop" not in str(refused.value)


def test_held_memory_does_not_prevent_a_simulated_start_and_the_warning_says_so(fleet: LocalFleet) -> None:
    found = held(fleet.plan(request(place="", gpus=(1,))))
    assert found.level is Level.WARNING
    assert found.message.endswith("so vLLM will not start; the simulated engine starts anyway")
    real = held(fleet.plan(request(place="", gpus=(1,), engine="vllm", vllm_version="0.33.0")))
    assert real.level is Level.ERROR
    assert real.message.endswith("so vLLM will not start")


def test_layouts_without_a_place_are_not_offered(fleet: LocalFleet, tmp_path: Path) -> None:
    lower = {UTILIZATION: 0.67}
    for place in ("offered", ""):  # auto and none on the launch screen
        assert fleet.plan(request(set=lower, place=place)).alternatives == ()
    empty = LocalFleet(tmp_path / "empty", observe=False, host_file=Path("2xrtx3090"), interactive=True)
    pair = next(one for one in empty.plan(request(set=lower)).alternatives if one.label == "TP 2")
    assert len(empty.plan(request(changes=Changes({**lower, **pair.changes.set}))).gpus) == 2
    empty.close()


def test_layout_on_fewer_gpus_than_named_needs_a_place_of_its_own(fleet: LocalFleet) -> None:
    """The launch screen then chooses the GPUs."""
    named = request(set={UTILIZATION: 0.67, TENSOR: 2}, place="", gpus=(0, 1))
    assert {one.layout.total for one in fleet.plan(named).alternatives} == {1, 2}
    full = request(set={UTILIZATION: 0.92, TENSOR: 2}, place="", gpus=(0, 1))
    assert {one.layout.total for one in fleet.plan(full).alternatives} == {2}
