"""What would make the next startup faster."""

from __future__ import annotations

from typing import Any

from vllm_console.diagnosis.finding import Severity
from vllm_console.diagnosis.live.startup import LastStart, disturbed_start, slow_startup
from vllm_console.logs.startup_facts import Stage, StartupFacts
from vllm_launchers.plan.budget.engine_report import read_report
from vllm_launchers.units import GIB
from vllm_launchers.vllm.fast_loaders import FastLoader

STAGES = {"imports": 8.0, "weights": 30.0, "compile": 20.0, "kv cache": 5.0}


def start(stages: dict[str, float] = STAGES, flags: dict[str, Any] | None = None, **more: Any) -> LastStart:
    facts = StartupFacts(**more.pop("facts", {}))
    return LastStart(5.0, [Stage(name, 0.0, took) for name, took in stages.items()], facts, flags or {}, **more)


def changes(one: LastStart) -> list[dict[str, Any]]:
    found = slow_startup(one)
    return [dict(fix.changes.set) for fix in found.fixes] if found is not None else []


def test_no_finding_without_a_saving() -> None:
    assert slow_startup(start()) is None
    assert slow_startup(start({"imports": 8.0}, pin_bytes=GIB)) is None, "too short to matter"


def test_suggested_cache_size_skips_memory_profiling() -> None:
    found = slow_startup(start(pin_bytes=13 * GIB, facts={"kv_measure_seconds": 9.0}))
    assert found is not None
    assert (found.severity, found.since) == (Severity.NOTE, 5.0)
    fix = found.fixes[0]
    assert fix.changes.set == {"kv-cache-memory-bytes": 13 * GIB}
    assert "took 9.0s" in fix.why
    assert "neighbors" in fix.tradeoff
    assert "gpu-memory-utilization" in fix.tradeoff


def test_cache_size_is_not_offered_if_fixed_or_without_saving() -> None:
    assert changes(start(pin_bytes=GIB, facts={"kv_measure_seconds": 0.0})) == []
    assert changes(start(pin_bytes=GIB, facts={"kv_measure_seconds": 4.0})) == [], "4 of 63 s are not worth the risk"
    assert changes(start(pin_bytes=GIB, facts={"kv_pinned": "plan"})) == []
    assert changes(start(flags={"kv-cache-memory-bytes": 7}, pin_bytes=GIB)) == []
    assert changes(start(flags={"num-gpu-blocks-override": 7}, pin_bytes=GIB)) == []


def test_startup_plan_is_named_where_vllm_has_it() -> None:
    old, new = (slow_startup(start(pin_bytes=GIB, release=release)) for release in ((0, 25, 1), (0, 26, 0)))
    assert old is not None
    assert new is not None
    assert [len(found.fixes) for found in (old, new)] == [1, 2]
    assert "VLLM_ENABLE_STARTUP_PLAN=1" in new.fixes[1].why


def test_disabled_compile_cache_is_named_from_log_or_environment() -> None:
    for one in (start(facts={"compile_cache": "disabled"}), start(cache_off=True)):
        found = slow_startup(one)
        assert found is not None
        assert "VLLM_DISABLE_COMPILE_CACHE" in found.fixes[0].why
        assert found.fixes[0].changes.empty
    assert slow_startup(start({"imports": 30.0, "compile": 1.0}, cache_off=True)) is None, "it costs nothing"
    assert slow_startup(start(cache_off=True, facts={"compile_cache": "hit"})) is None


def test_fast_loader_is_offered_when_weights_take_long() -> None:
    loaders = (FastLoader("runai_streamer", "It costs."), FastLoader("fastsafetensors", "More."))
    assert changes(start(loaders=loaders)) == [{"load-format": "runai_streamer"}]
    assert changes(start({"imports": 60.0, "weights": 11.0}, loaders=loaders)) == []
    assert changes(start(loaders=loaders, facts={"weights_seconds": 3.0})) == []


H100 = "NVIDIA H100 80GB HBM3"

DISTURBED = (
    "(EngineCore pid=1733) INFO 11-26 09:52:01 [gpu_worker.py:560] Available KV cache memory: 17.61 GiB",
    "(EngineCore pid=1733) INFO 11-26 09:52:01 [kv_cache_utils.py:2177] GPU KV cache size: 144,240 tokens",
    "(EngineCore pid=1733) INFO 11-26 09:52:08 [gpu_worker.py:857] Free memory on device (78.66/79.18 GiB) on startup."
    " Desired GPU memory utilization is (0.5, 39.59 GiB). Actual usage is 13.5 GiB for weight, 0.5 GiB for peak"
    " activation, 7.98 GiB for non-torch memory, and 1.0 GiB for CUDAGraph memory. Replace gpu_memory_utilization"
    " config with `--kv-cache-memory=17676226048` (16.46 GiB) to fit into requested memory, or"
    " `--kv-cache-memory=59632569856` (55.54 GiB) to fully utilize gpu memory.",
)


def test_memory_taken_by_a_neighbor_during_startup_is_reported() -> None:
    report = read_report(DISTURBED)
    assert report.disturbed(H100, {}, {})
    found = disturbed_start(report, 204_352.0, 5.0)
    assert (found.severity, found.since) == (Severity.WARNING, 5.0)
    assert [(one.name, one.value, one.limit) for one in found.measures] == [
        ("non-torch memory", "8.0 GiB", "4.0 GiB"), ("KV cache tokens", "144k", "204k"),
    ]  # fmt: skip
    assert found.fixes[0].changes.empty
    assert len(disturbed_start(report, None, 5.0).measures) == 2, "without a plan its own value is reported"


def test_memory_of_vllm_and_nccl_is_not_a_disturbance() -> None:
    assert not read_report([line.replace("7.98", "0.22") for line in DISTURBED]).disturbed(H100, {}, {})
    assert not read_report(DISTURBED[:2]).disturbed(H100, {}, {})
    later = [line.replace("for weight,", "for consumed memory (weights + non-torch),") for line in DISTURBED]
    later = [line.replace(" 7.98 GiB for non-torch memory,", "") for line in later]
    assert not read_report(later).disturbed(H100, {}, {}), "0.32: one figure with the weights tells nothing"


def test_vllm_memory_outside_pytorch_is_not_a_disturbance() -> None:
    report = read_report(DISTURBED)
    assert not report.disturbed("NVIDIA GB10", {}, {}), "what vLLM's own processes take counts there"
    assert not report.disturbed(H100, {"all2all-backend": "deepep_low_latency"}, {})
    assert not report.disturbed(H100, {}, {"VLLM_ALL2ALL_BACKEND": "deepep_high_throughput"})
    assert report.disturbed(H100, {"all2all-backend": "allgather_reducescatter"}, {})
