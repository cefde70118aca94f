"""Which GPUs a launch gets on recorded hosts: the best set, the requested one, within a share, or a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from vllm_console.fleet.gpus import occupied
from vllm_console.fleet.local import LocalFleet
from vllm_console.settings import Config, ConfigError, gpu_shares, read_settings
from vllm_launchers.errors import RefusedError, UsageError
from vllm_launchers.host.gpu.document import read_host
from vllm_launchers.host.gpu.host import Gpu, Holder, Host
from vllm_launchers.host.gpu.sharing import GpuShare
from vllm_launchers.launch import planner
from vllm_launchers.launch.errors import NoPlaceError
from vllm_launchers.launch.place import GpuRequest, Place, find_place, find_place_again, kept_slice
from vllm_launchers.launch.request import LaunchRequest
from vllm_launchers.plan.budget.budget import MemoryBudget
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.changes import Changes

VLLM = Engine(EngineKind.VLLM, ("/opt/vllm/bin/vllm",), "0.33.0", "cuda", "/opt/vllm/bin/vllm")
OLD = replace(VLLM, version="0.20.0")
CPU = replace(VLLM, build="cpu")


def place(
    host: Host | str | None, place: str = "auto", *gpus: int, shares: tuple[GpuShare, ...] = (), engine: Engine = VLLM,
    **flags: Any,
) -> Place:  # fmt: skip
    found = read_host(Path(host)) if isinstance(host, str) else host
    named = {name.replace("_", "-"): value for name, value in flags.items()}
    return find_place(GpuRequest(named, engine), found, place, gpus, shares)


@pytest.mark.parametrize(
    ("host", "size", "gpus"),
    [
        ("4xa6000", 1, (1,)),  # leaves the other NVLink pair intact
        ("4xa6000", 2, (2, 3)),
        ("8xh100", 4, (4, 5, 6, 7)),
        ("8xl40s", 2, (0, 1)),
        ("1xrtx4090", 1, (0,)),
    ],
)
def test_auto_takes_the_best_set_for_the_tensor_parallel_size(host: str, size: int, gpus: tuple[int, ...]) -> None:
    found = place(host, tensor_parallel_size=size, gpu_memory_utilization=0.9)
    assert found.gpus == gpus
    assert found.sets[0].gpus == gpus
    assert found.reason == found.sets[0].reason
    assert found.environment == {}


def test_text_size_is_parsed_like_vllm() -> None:
    assert place("8xh100", tensor_parallel_size="04") == place("8xh100", tensor_parallel_size=4)


def test_placement_that_does_not_fit_names_holders_and_sets() -> None:
    with pytest.raises(NoPlaceError, match=r"43\.2 GiB free.*anna holds 20\.5 GiB.*utilization 0\.56") as raised:
        place("4xa6000", tensor_parallel_size=4, gpu_memory_utilization=0.9)
    assert raised.value.sets[0].gpus == (0, 1, 2, 3)
    assert place("4xa6000", tensor_parallel_size=4, gpu_memory_utilization=0.5).gpus == (0, 1, 2, 3)


def test_offered_share_causes_no_plan_warning() -> None:
    with pytest.raises(NoPlaceError, match=r"utilization 0\.95"):
        place("4xa6000", gpu_memory_utilization=1)
    assert place("4xa6000", gpu_memory_utilization=1.5).gpus == place("4xa6000").gpus, "vLLM refuses that anyway"


@pytest.mark.parametrize(("more", "fits"), [(0.0, True), (0.04, True), (0.06, False)])
def test_required_memory_is_not_rounded_above_free_memory(more: float, fits: bool) -> None:
    """23.38 GiB are free on each GPU; a cache of a given size takes what is there."""
    host = read_host(Path("2xrtx3090"))
    host = replace(host, gpus=tuple(replace(gpu, free_gib=23.38) for gpu in host.gpus))
    taken = MemoryBudget(
        weights_gib=1.0, overhead_gib=1.0, graphs_gib=0.0, kv_gib=21.38 + more, kv_bytes_per_token=None,
        kv_tokens=None, max_model_len=None, max_concurrency=None, fixed=True,
    )  # fmt: skip
    wanted = GpuRequest({"gpu-memory-utilization": 0.9}, VLLM, taken)
    if fits:
        assert find_place(wanted, host, "auto", ()).gpus
    else:
        with pytest.raises(NoPlaceError, match=r"23\.5 GiB free.*23\.4 GiB available"):
            find_place(wanted, host, "auto", ())


def test_memory_shared_with_the_cpu_is_enough_or_not() -> None:
    gb10 = Gpu(0, "GPU-0", "NVIDIA GB10", 119.7, 66.0, used_by=(Holder(7, "anna", 30.0, command="python"),))
    assert place(Host(gpus=(gb10,)), gpu_memory_utilization=0.5).gpus == (0,)
    with pytest.raises(NoPlaceError, match=r"66\.0 GiB available"):
        place(Host(gpus=(gb10,)), gpu_memory_utilization=0.92)


def test_tensor_parallelism_across_the_interconnect_is_warned_about() -> None:
    across = place("4xa6000", tensor_parallel_size=4, gpu_memory_utilization=0.5)
    assert any("crosses the CPU interconnect" in text for text in across.warnings)
    piped = place("4xa6000", tensor_parallel_size=2, pipeline_parallel_size=2, gpu_memory_utilization=0.5)
    assert piped.gpus == (0, 1, 2, 3)
    assert not any("crosses" in text for text in piped.warnings)
    assert any("anna" in text for text in piped.warnings)


def test_without_gpus_auto_is_refused_but_offered_is_not() -> None:
    for host in (None, Host(problem="no NVIDIA driver was found")):
        with pytest.raises(NoPlaceError, match="no GPUs can be chosen"):
            place(host)
        assert place(host, "offered") == Place()
        assert place(host, "", 0, 1).gpus == (0, 1)


def test_named_gpus_are_taken_with_all_warnings() -> None:
    found = place("4xa6000", "", 0, gpu_memory_utilization=0.9)
    assert found.gpus == (0,)
    assert found.warnings[0] == (
        "the server needs 43.2 GiB on each GPU, but GPU 0 has 27.1 GiB available: vLLM will not start"
    )  # fmt: skip
    assert any("anna holds 20.5 GiB" in text for text in found.warnings)
    assert place("4xa6000", "", 3, 2, tensor_parallel_size=2).gpus == (3, 2)
    with pytest.raises(UsageError, match="there is no GPU 9 here; there are 0-3"):
        place("4xa6000", "", 9)
    assert place("4xa6000", "").gpus == ()


def test_share_applies_to_named_and_chosen_gpus() -> None:
    shares = tuple(GpuShare(index, gib=24.0) for index in range(4))
    with pytest.raises(NoPlaceError, match=r"your share is 24\.0 GiB.*utilization 0\.49"):
        place("4xa6000", "", 1, shares=shares, gpu_memory_utilization=0.9)
    with pytest.raises(NoPlaceError, match=r"your share is 24\.0 GiB"):
        place("4xa6000", shares=shares, gpu_memory_utilization=0.9)
    assert place("4xa6000", "", 1, shares=shares, gpu_memory_utilization=0.49).gpus == (1,)
    one = place("4xa6000", shares=(GpuShare(1, gib=24.0),), gpu_memory_utilization=0.9)
    assert one.gpus == (2,)


def test_mig_slice_is_set_by_uuid_and_kept_over_restarts() -> None:
    found = place("1xa100-mig")
    assert found.gpus == (0,)
    assert found.environment["CUDA_VISIBLE_DEVICES"].startswith("MIG-")
    assert kept_slice(found.environment) == found.environment
    other = found.sets[1].mig
    assert other is not None
    assert place("1xa100-mig", other.uuid).environment["CUDA_VISIBLE_DEVICES"] == other.uuid
    assert any("may not start on a MIG slice" in text for text in place("1xa100-mig", engine=OLD).warnings)
    with pytest.raises(NoPlaceError, match="no MIG slice MIG-none"):
        place("1xa100-mig", "MIG-none")
    assert kept_slice({"CUDA_VISIBLE_DEVICES": "0,1"}) == {}


def test_each_of_many_equal_slices_can_be_named() -> None:
    host = read_host(Path("1xa100-mig"))
    (gpu,) = host.gpus
    parts = tuple(replace(gpu.mig[0], uuid=f"MIG-{number}") for number in range(7))
    for part in parts:
        found = place(replace(host, gpus=(replace(gpu, mig=parts),)), part.uuid, gpu_memory_utilization=0.5)
        assert found.environment["CUDA_VISIBLE_DEVICES"] == part.uuid


def test_each_of_unequal_gpus_needs_its_own_share() -> None:
    host = read_host(Path("4xa6000"))
    small = [replace(gpu, name="NVIDIA L4", memory_gib=22.5, free_gib=22.1, used_gib=0.4) for gpu in host.gpus[2:]]
    mixed = replace(host, gpus=(*host.gpus[:2], *small))
    assert place(mixed, gpu_memory_utilization=0.9).gpus == (1,)
    assert place(mixed, tensor_parallel_size=2, gpu_memory_utilization=0.9).gpus == (2, 3)
    # 0.55 of 48 GiB is free next to anna's processes, so only the pair of larger GPUs fits.
    assert place(mixed, "", 0, gpu_memory_utilization=0.55).warnings == ("GPU 0: anna holds 20.5 GiB",)
    with pytest.raises(NoPlaceError, match=r"19\.3 to 40\.9 GiB free.*anna.*utilization 0\.56"):
        place(mixed, tensor_parallel_size=4, gpu_memory_utilization=0.85)


def test_kv_cache_in_bytes_needs_at_least_the_utilization() -> None:
    cache = {"kv_cache_memory_bytes": 30 * 1024**3}
    assert "27.1 GiB available" in place("4xa6000", "", 0, gpu_memory_utilization=0.9, **cache).warnings[0]
    assert (
        place("4xa6000", "", 0, gpu_memory_utilization=0.3, **cache)
        .warnings[0]
        .startswith("the server needs 30 GiB on each GPU")
    )
    assert place("4xa6000", "", 1, gpu_memory_utilization=0.3, **cache).warnings == ()


def test_slice_needs_its_own_share_or_is_refused_with_a_fix() -> None:
    host = read_host(Path("1xa100-mig"))
    gpu = host.gpus[0]
    fuller = tuple(replace(part, free_gib=(part.free_gib or 0.0) * 0.7) for part in gpu.mig)
    with pytest.raises(NoPlaceError, match=r"needs a GPU with .* free.*--gpu-memory-utilization 0\.6"):
        place(replace(host, gpus=(replace(gpu, mig=fuller),)), gpu_memory_utilization=0.9)


def again(gpus: tuple[int, ...], size: int, host: Host | None = None, *, chosen: bool = True, **more: Any) -> Place:
    wanted = GpuRequest({"tensor-parallel-size": size, "gpu-memory-utilization": 0.9}, more.pop("engine", VLLM))
    return find_place_again(wanted, host or read_host(Path("4xa6000")), gpus, chosen=chosen, **more)


def test_restart_with_as_many_gpus_keeps_them() -> None:
    assert again((0,), 1) == Place((0,), chosen=True)
    assert again((0, 1), 2, chosen=False) == Place((0, 1))
    assert again((), 2) == Place((), chosen=True)


def test_restart_with_another_number_of_chosen_gpus_is_placed_again() -> None:
    more = again((1,), 2)
    assert more.gpus == (2, 3)
    assert more.reason == "2,3: NVLink ×4, 112 GB/s, both idle"
    assert more.warnings == ("needs 2 GPUs now: moves from GPU 1 to 2,3",)
    fewer = again((2, 3), 1)
    assert fewer.gpus == (1,)
    assert fewer.chosen
    with pytest.raises(NoPlaceError, match=r"anna holds 20\.5 GiB"):
        again((2, 3), 4)
    shares = tuple(GpuShare(index, gib=24.0) for index in (2, 3))
    with pytest.raises(NoPlaceError, match=r"your share is 24\.0 GiB"):
        again((1,), 3, shares=shares)


def test_restart_with_more_gpus_than_named_is_refused_with_a_fix() -> None:
    with pytest.raises(NoPlaceError, match=r"needs 2 GPUs but has GPU 0: stop it .* --gpus auto"):
        again((0,), 2, chosen=False)
    with pytest.raises(NoPlaceError, match="--gpus auto"):
        again((0,), 2, Host(problem="no driver"))
    assert again((0, 1), 1, chosen=False) == Place((0, 1))
    assert again((0,), 2, engine=CPU) == Place((0,), chosen=True)


def test_chosen_gpus_are_distinguished_from_named_ones() -> None:
    assert place("4xa6000").chosen
    assert place("4xa6000", "offered").chosen
    assert not place("4xa6000", "", 1).chosen


def test_cpu_build_gets_no_gpus() -> None:
    assert place("4xa6000", engine=CPU) == Place()


def test_simulated_servers_hold_memory_on_a_recorded_host(fakes: Any) -> None:
    host = occupied(read_host(Path("4xa6000")), [fakes.coder(0.0)])
    gpu = host.gpus[1]
    assert [(holder.server, holder.gib) for holder in gpu.holders] == [("coder", 42.229)]
    assert gpu.free_gib == pytest.approx(47.588 - 42.229)
    assert host.gpus[0] == read_host(Path("4xa6000")).gpus[0]


def test_simulated_load_uses_only_its_own_gpu(fakes: Any) -> None:
    recorded = read_host(Path("4xa6000"))
    server = fakes.coder(0.0)
    assert server.window is not None

    def seen(running: float | None) -> Gpu:
        host = occupied(recorded, [replace(server, window=replace(server.window, requests_running=running))])
        assert host.gpus[2:] == recorded.gpus[2:]
        return host.gpus[1]

    idle, one, many = seen(0.0), seen(1.0), seen(60.0)
    assert (idle.utilization, idle.power_w, idle.throttle) == (0, 28.0, ("idle",))
    assert seen(None).utilization == 0
    for busy in (one, many):
        assert busy.utilization == 97
        assert busy.throttle == ()
        assert busy.power_limit_w is not None
        assert busy.power_w is not None
        assert busy.power_limit_w / 2 < busy.power_w <= busy.power_limit_w
        assert busy.free_gib == idle.free_gib
    assert (one.power_w or 0) < (many.power_w or 0)
    assert (one.temperature_c or 0) < (many.temperature_c or 0)


def test_simulated_server_is_timed_as_its_recorded_gpu(tmp_path: Path) -> None:
    for name, timed in (("4xa6000", "NVIDIA RTX A6000"), ("8xl40s", "NVIDIA L40S")):
        fleet = LocalFleet(tmp_path, observe=False, host_file=Path(name), interactive=True)
        plan = fleet.plan(LaunchRequest("chatbot", engine="simulated"))
        assert len(plan.gpus) == 1
        assert plan.environment["SIMULATED_GPU"] == timed
        assert fleet.plan(LaunchRequest("chatbot", engine="simulated", gpus=(0,))).environment["SIMULATED_GPU"] == timed
        fleet.close()


def test_simulated_gpu_on_a_machine_without_gpus_is_an_assumption(tmp_path: Path) -> None:
    fleet = LocalFleet(tmp_path, observe=False, gpus=False, interactive=True)
    for environment, name in (({}, "NVIDIA RTX A6000"), ({"SIMULATED_GPU": "L40S"}, "NVIDIA L40S")):
        plan = fleet.plan(LaunchRequest("chatbot", engine="simulated", environment=environment))
        assert plan.memory is not None
        assert plan.memory.assumed[0] == f"a simulated {name} (SIMULATED_GPU chooses another)"
    fleet.close()
    recorded = LocalFleet(tmp_path, observe=False, host_file=Path("8xl40s"), interactive=True)
    plan = recorded.plan(LaunchRequest("chatbot", engine="simulated"))
    assert plan.memory is not None
    assert not plan.memory.assumed
    recorded.close()


def test_gpu_other_than_the_recorded_hosts_is_refused(tmp_path: Path) -> None:
    fleet = LocalFleet(tmp_path, observe=False, host_file=Path("4xa6000"), interactive=True)
    same = LaunchRequest("chatbot", engine="simulated", environment={"SIMULATED_GPU": "RTX A6000"})
    assert fleet.plan(same).environment["SIMULATED_GPU"] == "NVIDIA RTX A6000"
    with pytest.raises(UsageError, match=r"SIMULATED_GPU=L40S, but the recorded host's GPU \d \(NVIDIA RTX A6000\)"):
        fleet.plan(replace(same, environment={"SIMULATED_GPU": "L40S"}))
    fleet.close()


def test_recorded_host_is_planned_with_but_starts_no_real_server(tmp_path: Path) -> None:
    fleet = LocalFleet(tmp_path, observe=False, host_file=Path("4xa6000"), interactive=True)
    snapshot = fleet.snapshot()
    assert snapshot.host is not None
    assert snapshot.host.driver == "580.95.05"
    assert snapshot.host_recorded
    two = Changes(set={"tensor-parallel-size": 2})
    plan = fleet.plan(LaunchRequest("chatbot", engine="simulated", changes=two, place="auto"))
    assert plan.gpus == (2, 3)
    assert plan.environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert plan.environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert plan.placement == "2,3: NVLink ×4, 112 GB/s, both idle"
    assert plan.reasons["gpus"].startswith(plan.placement)
    assert len(plan.sets) > 1
    with pytest.raises(RefusedError, match="recorded host"):
        fleet._launcher.planner.refuse_elsewhere(replace(plan, engine=VLLM))
    fleet.close()


def test_local_cpu_build_does_not_affect_a_plan_for_recorded_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Engine(EngineKind.VLLM, ("/v/bin/vllm",), "0.32.0+cpu", "cpu", "/v/bin/vllm")
    monkeypatch.setattr(planner, "find_engines", lambda _paths: [here])
    fleet = LocalFleet(tmp_path, observe=False, host_file=Path("8xh100"), interactive=True)
    plan = fleet.plan(LaunchRequest("chatbot", place="offered"))
    assert (plan.engine.build, plan.engine.version) == ("cuda", "0.32.0")
    assert len(plan.gpus) == 1
    assert plan.memory is not None
    assert plan.memory.per_gpu[0].total_gib > 70
    assert any("The vLLM here is a CPU build" in found.message for found in plan.findings)
    fleet.close()


def test_fleet_without_gpus_shows_none_and_still_plans(tmp_path: Path) -> None:
    fleet = LocalFleet(tmp_path, observe=False, gpus=False, interactive=True)
    snapshot = fleet.snapshot()
    assert (snapshot.host, snapshot.host_problem, snapshot.host_recorded) == (None, "", False)
    plan = fleet.plan(LaunchRequest("chatbot", engine="simulated", place="offered"))
    assert (plan.gpus, plan.sets) == ((), ())
    fleet.close()


def test_missing_host_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no such file"):
        LocalFleet(tmp_path, host_file=tmp_path / "missing.json")


def test_shares_in_the_config_file(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[shares]\n0 = "24 GiB"\n1 = "50 %"\n2 = 0.25\n')
    assert gpu_shares(read_settings(path)) == (
        GpuShare(0, gib=24.0),
        GpuShare(1, fraction=0.5),
        GpuShare(2, fraction=0.25),
    )
    assert gpu_shares(Config()) == ()
    for line, message in (
        ('first = "24 GiB"', "'first' is not a GPU index"),
        ('0 = "a lot"', "is not a valid share of its memory; expected '24 GiB'"),
        ("0 = true", "shares"),
    ):
        path.write_text(f"[shares]\n{line}\n")
        with pytest.raises(ConfigError, match=message) as error:
            read_settings(path)
        assert str(error.value).startswith(str(path))
        assert "\n" not in str(error.value)


def test_memory_beyond_a_fixed_cache_is_required_too() -> None:
    memory = MemoryBudget(6.0, 1.0, 0.5, 30.0, None, None, None, None, fixed=True)
    wanted = GpuRequest({"kv-cache-memory-bytes": "30G"}, VLLM, memory)
    gpu = Gpu(0, memory_gib=48.0)
    assert wanted.need(gpu) == pytest.approx(44.156, abs=0.001)  # the share plus CUDA itself
    assert GpuRequest({**wanted.flags, "gpu-memory-utilization": 0.3}, VLLM, memory).need(gpu) == 37.5


@pytest.mark.parametrize(("weights", "named"), [(5.7, False), (0.2, True)])
def test_share_below_the_weights_is_not_offered(weights: float, named: bool) -> None:
    memory = MemoryBudget(weights, 1.0, 0.5, 14.0, None, None, None, None)
    full = Host(gpus=(Gpu(0, name="NVIDIA GeForce RTX 4090", memory_gib=24.0, free_gib=1.5),))
    with pytest.raises(NoPlaceError) as refused:
        find_place(GpuRequest({}, VLLM, memory), full, "auto", ())
    assert ("It would fit with" in str(refused.value)) is named


@pytest.mark.parametrize(("cache", "named"), [(12.0, False), (2.0, True)])
def test_share_that_holds_a_fixed_cache_is_offered(cache: float, named: bool) -> None:
    memory = MemoryBudget(5.7, 1.0, 0.5, cache, None, None, None, None, fixed=True)
    part = Host(gpus=(Gpu(0, name="NVIDIA GeForce RTX 4090", memory_gib=24.0, free_gib=12.0),))
    with pytest.raises(NoPlaceError) as refused:
        find_place(GpuRequest({"num-gpu-blocks-override": 100}, VLLM, memory), part, "auto", ())
    assert ("It would fit with --gpu-memory-utilization 0.48" in str(refused.value)) is named
