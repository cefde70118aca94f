"""Findings about the engine and GPUs in constructed cases: reported where expected, and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from vllm_console.diagnosis.finding import Finding, Fix, Severity
from vllm_console.diagnosis.live.engine import suspected_hang
from vllm_console.diagnosis.live.findings import FIX_RENEWED_SECONDS, findings
from vllm_console.diagnosis.live.rule import Evidence, GpuMoment
from vllm_console.diagnosis.objectives import Judged, missed
from vllm_console.history.frames import Frame, Frames
from vllm_console.metrics.sample import COUNTERS, EngineSample, Histogram, Sample
from vllm_console.text import clock
from vllm_launchers.host.gpu.host import Gpu, GpuClaim, Holder
from vllm_launchers.presets.model import Objectives

START = 1_000_000.0
COUNT = 12

OURS = Holder(pid=10, user="me", gib=40.0, server="chat", command="VLLM::EngineCore")
GOOD = Gpu(
    index=0, name="NVIDIA L40S", memory_gib=45.0, free_gib=4.0, used_gib=41.0, used_by=(OURS,), utilization=90.0,
    memory_utilization=60.0, throttle=(), clock_mhz=2400, clock_max_mhz=2520, pcie_generation=4,
    pcie_generation_max=4, pcie_width=16, pcie_width_max=16, power_w=280.0, power_limit_w=350.0, temperature_c=70.0,
)  # fmt: skip
SERVING = EngineSample(
    requests_running=3, requests_waiting=0, kv_cache_usage=0.4, preemptions_total=0, prompt_tokens_total=900,
    generation_tokens_total=2000, requests_finished_total=5, prefix_cache_queries_total=900,
    prefix_cache_hits_total=400,
)  # fmt: skip
SILENT = replace(SERVING, prompt_tokens_total=0, generation_tokens_total=0, requests_finished_total=0)


def frames_of(*grown: EngineSample) -> tuple[Frame, ...]:
    """Frames with these counts, from samples every 2.5 seconds."""
    frames, counted = Frames(), EngineSample()
    for at, one in enumerate(grown):
        if at == 0:
            frames.append(Sample(START, {"0": EngineSample()}, kv_cache_tokens=50_000))
        sums = [(name, getattr(counted, name), getattr(one, name)) for name in COUNTERS]
        counted = replace(one, **{name: new if new is None else (old or 0) + new for name, old, new in sums})
        for part in range(1, 5):
            frames.append(Sample(START + 10 * at + 2.5 * part, {"0": counted}, kv_cache_tokens=50_000))
    return frames.since(0.0)


def evidence(
    gpu: Callable[[int], Gpu | None] = lambda _: GOOD, grown: EngineSample = SERVING, **known: Any
) -> Evidence:
    """Two minutes of equal frames; ``gpu`` returns the GPU for each sample, every five seconds."""
    samples = [(at, gpu(at)) for at in range(2 * COUNT)]
    moments = tuple(GpuMoment(START + 5 * at + 1, (seen,)) for at, seen in samples if seen is not None)
    frames = frames_of(*[grown] * COUNT)
    return Evidence(
        **{
            "now": frames[-1].end,
            "ready_at": START - 60,
            "frames": frames,
            "moments": moments,
            "server": "chat",
            **known,
        }
    )


def codes(found: Evidence) -> set[str]:
    return {finding.code for finding in findings(found)}


def find(found: Evidence, code: str) -> Finding:
    return next(finding for finding in findings(found) if finding.code == code)


def growing(at: int) -> Gpu:
    other = Holder(pid=99, user="anna", gib=1.0 + 0.2 * at, command="python train.py")
    return replace(GOOD, used_by=(OURS, other), free_gib=5.5 - 0.2 * at)


def steady(at: int) -> Gpu:
    return replace(growing(0), utilization=80.0 + at % 3)


RESERVE = {"reserve_gib": {0: 5.0}}
SPLIT = {"flags": {"tensor-parallel-size": 2}, "link": "SYS"}
STALLED = replace(GOOD, utilization=99.0, memory_utilization=12.0)

CLAIM = GpuClaim("anna", START + 9000, "training", words="claimed until 18:00 by anna: training")

CASES = {
    "hot": ("gpu_throttled", replace(GOOD, throttle=("too hot (hardware)",)), {}, Severity.WARNING),
    "power brake": ("gpu_throttled", replace(GOOD, throttle=("power brake",)), {}, Severity.WARNING),
    "power limit": ("gpu_throttled", replace(GOOD, throttle=("power limit",), clock_mhz=1500), {}, Severity.NOTE),
    "narrow": ("pcie_narrow", replace(GOOD, pcie_width=4), {}, Severity.NOTE),
    "old generation": ("pcie_narrow", replace(GOOD, pcie_generation=1), {}, Severity.NOTE),
    "narrow and split": ("pcie_narrow", replace(GOOD, pcie_width=8), SPLIT, Severity.WARNING),
    "reserve": ("gpu_memory_below_reserve", GOOD, RESERVE, Severity.WARNING),
    "claimed": ("gpu_claimed", replace(GOOD, claims=(CLAIM,)), {}, Severity.NOTE),
    "stalls": ("tensor_parallel_stalls", STALLED, SPLIT, Severity.WARNING),
    "idle": ("starved_by_clients", replace(GOOD, utilization=5.0), {}, Severity.NOTE),
}


@pytest.mark.parametrize("case", CASES)
def test_finding_has_a_measure_and_a_fix(case: str) -> None:
    code, gpu, known, severity = CASES[case]
    finding = find(evidence(lambda _: gpu, **known), code)
    assert finding.severity is severity
    assert finding.since == (START + 50 if case == "idle" else START)  # "idle" needs a full minute of traffic
    assert finding.measures
    assert finding.fixes


@pytest.mark.parametrize("case", CASES)
def test_finding_ends_with_its_cause(case: str) -> None:
    code, gpu, known, _ = CASES[case]
    if case == "reserve":
        well = replace(gpu, free_gib=6.0)
    elif case == "idle":
        well = replace(gpu, utilization=90.0)
    else:
        well = GOOD
    assert code in codes(evidence(lambda at: gpu if at < 2 * COUNT - 4 else well, **known)), "20 s are too short"
    assert code not in codes(evidence(lambda at: gpu if at < 2 * COUNT - 8 else well, **known))


@pytest.mark.parametrize("case", CASES)
def test_one_sample_or_none_gives_no_finding(case: str) -> None:
    code, gpu, known, _ = CASES[case]
    good = replace(GOOD, free_gib=6.0)
    assert code not in codes(evidence(lambda at: gpu if at in (8, 9) else good, **known))
    assert code not in codes(evidence(lambda _: None, **known))
    assert code not in codes(evidence(lambda at: gpu if at < 12 else None, **known)), "not sampled for a minute"


@pytest.mark.parametrize(
    "gpu",
    [
        GOOD,
        Gpu(index=0),
        replace(GOOD, throttle=("power limit",)),  # at nearly its maximum clock, which is normal
        replace(GOOD, throttle=("idle",), utilization=40.0),
        replace(GOOD, pcie_generation=1, pcie_width=8, utilization=30.0),  # an idle link saves power
        replace(GOOD, used_by=None, free_gib=None, utilization=None, throttle=None),
        replace(GOOD, claims=(replace(CLAIM, mine=True),)),
    ],
)
def test_normal_or_unreported_values_raise_nothing(gpu: Gpu) -> None:
    assert codes(evidence(lambda _: gpu, **RESERVE if gpu.free_gib is None else {})) <= {"healthy"}


def test_growing_foreign_process_is_named_with_its_owner() -> None:
    finding = find(evidence(growing), "gpu_memory_contended")
    assert "anna" in finding.symptom
    assert "python train.py" in finding.symptom
    assert any("→" in measure.value for measure in finding.measures)
    assert all(fix.changes.empty for fix in finding.fixes)  # no fix takes what others hold
    assert "anna (pid 99)" in finding.fixes[0].why
    assert finding.severity is Severity.WARNING  # less than a GiB is left


def test_process_that_grew_at_once_is_named() -> None:
    def jump(at: int) -> Gpu:
        other = Holder(pid=50, user="ben", gib=20.0, command="python serve.py")
        grown = Holder(pid=99, user="anna", gib=1.0 if at < COUNT else 6.0, command="python train.py")
        return replace(GOOD, used_by=(OURS, other, grown))

    finding = find(evidence(jump), "gpu_memory_contended")
    assert "anna's python train.py (pid 99) keeps growing" in finding.symptom
    assert finding.measures[0].value == "1.0 → 6.0 GiB"


def test_own_growing_server_can_be_stopped() -> None:
    def growing_of_ours(at: int) -> Gpu:
        return replace(growing(at), used_by=(OURS, replace(growing(at).holders[1], server="docs")))

    finding = find(evidence(growing_of_ours), "gpu_memory_contended")
    assert "server docs keeps growing" in finding.symptom
    assert "stop server docs" in finding.fixes[0].why


def test_ending_finding_keeps_its_last_values() -> None:
    """It lasts until three consecutive frames are good, but the newest sample no longer shows it."""
    hot = replace(GOOD, throttle=("too hot (hardware)",), temperature_c=96.0)
    ending = find(evidence(lambda at: hot if at < 2 * COUNT - 2 else GOOD), "gpu_throttled")
    assert ending.severity is Severity.WARNING
    assert ending.symptom == "GPU 0 is throttled: too hot (hardware)."
    assert [(one.name, one.value) for one in ending.measures][:2] == [
        ("GPU 0 temperature", "96°C"),
        ("GPU 0 clock", "2400 of 2520 MHz"),
    ]
    narrow = replace(GOOD, pcie_width=4, pcie_generation=3)
    assert find(evidence(lambda at: narrow if at < 2 * COUNT - 2 else GOOD), "pcie_narrow").symptom == (
        "GPU 0 has a degraded PCIe link: ×4 of ×16 and generation 3 of 4."
    )


@pytest.mark.parametrize(
    ("flags", "severity", "use"),
    [
        ({}, Severity.NOTE, "It only slows weight loading."),
        ({"cpu-offload-gb": 0}, Severity.NOTE, "It only slows weight loading."),
        ({"cpu-offload-gb": 8}, Severity.WARNING, "--cpu-offload-gb uses this link."),
        ({"kv-offloading-size": 8}, Severity.WARNING, "--kv-offloading-size uses this link."),
        ({"kv-transfer-config.kv_connector": "X"}, Severity.WARNING, "--kv-transfer-config uses this link."),
    ],
)
def test_a_narrow_link_slows_what_is_moved_over_it(flags: dict[str, Any], severity: Severity, use: str) -> None:
    finding = find(evidence(lambda _: replace(GOOD, pcie_width=4), flags=flags), "pcie_narrow")
    assert (finding.severity, finding.cause) == (
        severity,
        f"Slot, riser or BIOS setting; no vLLM flag changes it. {use}",
    )


@pytest.mark.parametrize(
    "gpu", [steady, lambda _: GOOD, lambda at: replace(GOOD, used_by=(replace(OURS, gib=30.0 + at),))]
)
def test_constant_processes_and_own_growth_are_not_contention(gpu: Callable[[int], Gpu]) -> None:
    assert "gpu_memory_contended" not in codes(evidence(gpu))


def test_memory_below_the_reserve_offers_what_the_server_can_free() -> None:
    short = evidence(flags={"gpu-memory-utilization": 0.9}, **RESERVE)
    finding = find(short, "gpu_memory_below_reserve")
    # Needed are 5 GiB and a margin of 0.25, and 4 are free: 1.25 of 45 GiB are 3%.
    assert finding.fixes[0].changes.set == {"gpu-memory-utilization": 0.87}
    assert finding.measures[0].source == "[reserve] of your settings"
    assert finding.symptom == "GPU 0 has 4.0 GiB free of the 5.0 GiB kept for others."
    assert "gpu_memory_below_reserve" not in codes(evidence(flags={"gpu-memory-utilization": 0.9}))


def test_smaller_cache_still_has_a_block_for_each_state() -> None:
    flags = {"gpu-memory-utilization": 0.9, "max-num-seqs": 64}
    smaller = {"gpu-memory-utilization": 0.87}
    # 3% of 45 GiB are 1.35 of 13.5: of 64 blocks 57.6 are left, 54 of them surely.
    for states, changes in ((None, smaller), (100, smaller), (64, {**smaller, "max-num-seqs": 54})):
        short = evidence(flags=flags, cache_gib=13.5, linear_layers=True, most_sequences=states, **RESERVE)
        assert find(short, "gpu_memory_below_reserve").fixes[0].changes.set == changes


@pytest.mark.parametrize(
    "known",
    [{}, {"flags": {"tensor-parallel-size": 2}}, SPLIT | {"link": "NV4"}, {"flags": {}, "link": "SYS"}],
)
def test_stalls_need_tensor_parallelism_over_a_slow_link(known: dict[str, Any]) -> None:
    assert "tensor_parallel_stalls" not in codes(evidence(lambda _: STALLED, **known))


def test_fewer_gpus_are_offered_only_if_the_weights_fit() -> None:
    def offered(weights: float | None) -> list[dict[str, Any]]:
        found = find(evidence(lambda _: STALLED, weights_gib=weights, **SPLIT), "tensor_parallel_stalls")
        return [dict(fix.changes.set) for fix in found.fixes]

    stages = {"tensor-parallel-size": 1, "pipeline-parallel-size": 2}
    assert offered(8.0) == [{"tensor-parallel-size": 1}, stages]
    assert offered(18.0) == [stages]
    assert offered(None) == [stages]


def test_dead_engine_is_reported_at_once_and_alone() -> None:
    dead = evidence(health_problem="/health on port 8503: HTTP 503 (3 times in a row)", health_since=START + 100)
    assert codes(dead) == {"engine_dead"}
    assert codes(replace(dead, frames=())) == {"engine_dead"}
    assert find(dead, "engine_dead").since == START + 100
    assert "engine_dead" not in codes(replace(dead, health_problem="/health on port 8503: no response within 2 s"))


def test_suspected_hang_is_reported_after_a_request_confirms_it() -> None:
    silent = evidence(grown=SILENT)
    assert suspected_hang(silent.frames) == START + 10  # in the first frame, the cache usage may still have grown
    assert "engine_hung" not in codes(silent)
    assert "engine_hung" not in codes(replace(silent, silent_seconds=4.0))
    assert "engine_hung" not in codes(replace(silent, silent_seconds=0.0))
    confirmed = find(replace(silent, silent_seconds=16.0), "engine_hung")
    assert confirmed.severity is Severity.CRITICAL
    idle = evidence(lambda _: replace(GOOD, utilization=0.0), SILENT, silent_seconds=16.0)
    assert codes(idle) == {"engine_hung"}, "nothing else matters then"


@pytest.mark.parametrize(
    "grown",
    [
        [SERVING] * 6,
        [replace(SILENT, requests_running=0)] * 6,
        [replace(SILENT, kv_cache_usage=0.1 + 0.05 * at) for at in range(6)],  # a long prompt takes block after block
        [SILENT, SILENT, SERVING],
        [SERVING, SERVING, SILENT, SILENT],
        [replace(SILENT, generation_tokens_total=None)] * 6,
        [],
    ],
)
def test_no_hang_is_suspected(grown: list[EngineSample]) -> None:
    assert suspected_hang(frames_of(*grown)) is None


def test_waiting_requests_while_none_runs() -> None:
    stuck = replace(SILENT, requests_running=0, requests_waiting=2, kv_cache_usage=0.0)
    finding = find(evidence(grown=stuck), "not_admitted")
    assert finding.severity is Severity.CRITICAL
    assert "2 requests wait" in finding.symptom
    assert "paused" in finding.fixes[0].why  # there is enough memory for them
    longer = evidence(grown=stuck, max_model_len=65_536, flags={"max-model-len": 65_536})  # the cache holds 50,000
    fixes = find(longer, "not_admitted").fixes
    assert fixes[-1].changes.set == {"max-model-len": 47_488}
    assert "not_admitted" not in codes(evidence(grown=replace(stuck, requests_running=1)))
    assert "not_admitted" not in codes(evidence(grown=replace(stuck, requests_waiting=None)))


def test_nothing_is_reported_after_a_restart_or_with_old_data() -> None:
    bad = evidence(lambda _: replace(GOOD, throttle=("too hot (hardware)",)), **RESERVE)
    assert codes(bad) >= {"gpu_throttled", "gpu_memory_below_reserve"}
    assert codes(replace(bad, ready_at=bad.now - 40)) == set()
    assert codes(replace(bad, now=bad.now + 60)) == set()


@pytest.mark.parametrize("free", [3.0, None])
def test_memory_held_or_reserved_by_others_is_never_offered(free: float | None) -> None:
    """Pressure on a GPU that has nothing to spare."""
    full = replace(SERVING, kv_cache_usage=0.95)
    flags = {"gpu-memory-utilization": 0.8, "max-num-seqs": 64}
    spare = {} if free is None else {0: free - 2.5}
    tight = evidence(grown=full, flags=flags, spare_gib=spare, build="cpu", compute_capability=(8, 9))
    offered = [dict(fix.changes.set) for fix in find(tight, "kv_cache_pressure").fixes]
    assert offered == [{"max-num-seqs": 2}]
    roomy = replace(tight, spare_gib={0: 8.0}, build="cuda")
    offered = [dict(fix.changes.set) for fix in find(roomy, "kv_cache_pressure").fixes]
    assert offered[:2] == [{"kv-cache-dtype": "fp8"}, {"gpu-memory-utilization": 0.95}]


def test_all_free_memory_is_offered_but_not_what_the_next_start_lacks() -> None:
    full = replace(SERVING, kv_cache_usage=0.95)

    def offered(share: float | None, held: float, spare: float, **known: Any) -> list[Fix]:
        gpu = replace(GOOD, free_gib=45.0 - held, used_gib=held, used_by=(replace(OURS, gib=held),))
        flags = {"max-num-seqs": 64, **({} if share is None else {"gpu-memory-utilization": share})}
        known = {"compute_capability": (8, 9), "release": (0, 19, 0), "spare_gib": {0: spare}, **known}
        fixes = find(evidence(lambda _: gpu, full, flags=flags, **known), "kv_cache_pressure").fixes
        return [fix for fix in fixes if "gpu-memory-utilization" in fix.changes.set]

    def shares(share: float | None, held: float, spare: float, **known: Any) -> list[object]:
        return [fix.changes.set["gpu-memory-utilization"] for fix in offered(share, held, spare, **known)]

    assert shares(0.3, 13.5, 20.0) == [0.73]  # 0.3 and 19.5 of 45 GiB
    assert shares(0.3, 15.0, 20.0) == [0.73]  # what it holds beyond its share, it holds again
    assert shares(0.3, 9.0, 20.0) == [0.63]  # vLLM would find only 29 GiB free when it starts
    assert shares(0.3, 13.5, 31.5) == [0.95]
    assert shares(None, 40.5, 4.5) == [0.95]  # the default of this release is 0.9
    assert shares(None, 40.5, 4.5, flags_known=False) == []
    assert shares(0.94, 42.3, 2.7) == [] == shares(0.3, 13.5, 1.0)
    assert shares(0.3, 9.0, 20.0, server="other") == [0.63]  # invisible: at most all that is used
    sliced = replace(GOOD, mig_mode=True, free_gib=31.5, used_gib=13.5, used_by=(replace(OURS, gib=13.5),))
    on_slice = evidence(lambda _: sliced, full, flags={"gpu-memory-utilization": 0.3}, spare_gib={0: 20.0})
    assert all("gpu-memory-utilization" not in fix.changes.set for fix in find(on_slice, "kv_cache_pressure").fixes)
    (fix,) = offered(0.3, 13.5, 20.0)
    assert fix.why == "The KV cache gets 19.4 GiB more, which is free now."
    assert fix.tradeoff == "0.6 GiB are left for other processes."

    def first(gib: float) -> object:
        gpu = replace(GOOD, free_gib=31.5, used_gib=13.5, used_by=(replace(OURS, gib=13.5),))
        known = {"compute_capability": (8, 9), "spare_gib": {0: 20.0}, "cache_gib": gib}
        flags = {"gpu-memory-utilization": 0.3, "max-num-seqs": 64}
        return next(
            iter(find(evidence(lambda _: gpu, full, flags=flags, **known), "kv_cache_pressure").fixes[0].changes.set)
        )

    assert first(10.0) == "gpu-memory-utilization"  # more than doubles the KV cache, without a change of output
    assert first(30.0) == "kv-cache-dtype"


def test_unconfirmable_hang_is_reported_as_apparent() -> None:
    known = {"unasked": "a read-only console sends none"}
    hung = evidence(grown=SILENT, **known)
    (found,) = findings(hung)
    assert (found.code, found.severity) == ("engine_hung", Severity.WARNING)
    assert found.symptom.startswith("It seems to hang: ")
    assert "a read-only console sends none" in found.cause
    assert found.since == hung.frames[1].start  # the first frame that equals the previous one
    short = frames_of(*[SERVING] * 6, *[SILENT] * 5)
    assert "engine_hung" not in codes(evidence(**known, frames=short, now=short[-1].end))


def test_removing_the_cache_limit_is_offered_only_if_memory_allows() -> None:
    pressed = replace(SERVING, kv_cache_usage=0.95)
    known: dict[str, Any] = {
        "flags": {"num-gpu-blocks-override": 100, "gpu-memory-utilization": 0.9, "max-num-seqs": 64},
        "compute_capability": (9, 0), "quantized": False, "cache_gib": 1.0,
    }  # fmt: skip

    def offered(**more: Any) -> list[tuple[list[str], tuple[str, ...]]]:
        found = find(evidence(grown=pressed, **{**known, **more}), "kv_cache_pressure")
        return [(sorted(one.changes.set), one.changes.unset) for one in found.fixes]

    fewer = (["max-num-seqs"], ())
    free = ([], ("num-gpu-blocks-override",))
    assert offered(cache_free_gib=3.0, spare_gib={0: 4.0}) == [free, fewer]
    # Others hold that memory; no more memory is free; free memory is unknown.
    assert offered(cache_free_gib=3.0, spare_gib={0: 2.0}) == [fewer]
    assert offered(cache_free_gib=1.05, spare_gib={0: 4.0}) == [fewer]
    assert offered(cache_free_gib=None, spare_gib={0: 4.0}) == [fewer]


def test_fix_stays_unchanged_until_the_finding_ends() -> None:
    """The values that it is based on drift: fewer requests run each minute."""
    drifting = [replace(SERVING, kv_cache_usage=0.95, requests_running=64 - 2 * at) for at in range(25)]
    frames = frames_of(*drifting)
    shown = []
    for count in range(6, len(frames) + 1):
        now = evidence(frames=frames[:count], now=frames[count - 1].end, moments=(), flags={"max-num-seqs": 256})
        shown.append(str(find(now, "kv_cache_pressure").fixes))
    anew = next(
        at for at, frame in enumerate(frames[5:]) if frame.end // FIX_RENEWED_SECONDS > START // FIX_RENEWED_SECONDS
    )
    assert len(set(shown[:anew])) == len(set(shown[anew:])) == 1
    assert shown[0] != shown[-1], "every ten minutes of the clock"


def test_fix_of_a_calm_moment_is_not_kept() -> None:
    """The ten-minute mark fell into a short recovery: the cause said "Recovering" and nothing was offered at 97%."""
    before_mark = round((START // FIX_RENEWED_SECONDS + 1) * FIX_RENEWED_SECONDS - START) // 10
    usage = [0.95] * (before_mark - 6) + [0.83] * 6 + [0.97] * 4
    frames = frames_of(*[replace(SERVING, kv_cache_usage=one, requests_running=64) for one in usage])
    calm = evidence(frames=frames[:before_mark], now=frames[before_mark - 1].end, flags={"max-num-seqs": 256})
    assert find(calm, "kv_cache_pressure").recovering
    full = evidence(frames=frames, now=frames[-1].end, flags={"max-num-seqs": 256})
    finding = find(full, "kv_cache_pressure")
    assert not finding.recovering
    assert "Recovering" not in finding.cause
    assert finding.fixes


FULL = replace(
    SERVING, requests_running=5, kv_cache_usage=0.99, preemptions_total=2, requests_finished_total=1,
    generation_tokens_total=300,
)  # fmt: skip


@pytest.mark.parametrize(
    ("grown", "symptom"),
    [
        (FULL, "12 {}, 2 per finished request."),
        (replace(FULL, requests_finished_total=0), "12 {}, 2.4 per running request."),
        (
            replace(FULL, requests_finished_total=8),
            "12 {}, 0.25 per finished request.",
        ),
    ],
)
def test_preemption_share_never_exceeds_one(grown: EngineSample, symptom: str) -> None:
    known = evidence(grown=grown)
    assert find(known, "preempting").symptom == symptom.format("preemptions in the last minute")
    later = replace(known, now=known.frames[-1].end + 25)
    minute = f"in the minute to {clock(known.frames[-1].end, later.now, seconds=True)}"
    assert find(later, "preempting").symptom == symptom.format(f"preemptions/min {minute}")


CALM = replace(FULL, preemptions_total=0, kv_cache_usage=0.5)
FEW = replace(CALM, preemptions_total=1, requests_finished_total=100)
STOPPED = replace(SILENT, requests_running=0, kv_cache_usage=0.0)


@pytest.mark.parametrize("pause", [CALM, STOPPED, FEW])
def test_bursts_of_preemption_within_five_minutes_are_one_finding(pause: EngineSample) -> None:
    grown = [FULL] * 4
    for _ in range(2):
        grown += [pause] * 28 + [FULL] * 4
    frames = frames_of(*grown)
    for count in range(4, len(frames) + 1):
        now = evidence(frames=frames[:count], now=frames[count - 1].end, moments=())
        assert find(now, "preempting").since == START, count


def test_preempting_ends_after_five_minutes_without_a_preemption() -> None:
    for calm, holds in ((29, True), (30, False)):
        frames = frames_of(*[FULL] * COUNT, *[CALM] * calm)
        found = evidence(frames=frames, now=frames[-1].end, moments=())
        assert ("preempting" in codes(found)) is holds


def test_preempting_ends_after_five_minutes_within_its_objective() -> None:
    fewer = replace(CALM, preemptions_total=1, requests_finished_total=66)  # 1.5% of the requests, objective 2%
    for calm, holds in ((33, True), (40, False)):
        frames = frames_of(*[FULL] * COUNT, *[fewer] * calm)
        found = evidence(frames=frames, now=frames[-1].end, moments=())
        assert ("preempting" in codes(found)) is holds
        if holds:
            cause = "Recovering: the finding closes after 5m with preemptions within their objective."
            assert find(found, "preempting").cause == cause


def test_between_bursts_the_last_one_is_shown_with_its_fixes() -> None:
    frames = frames_of(*[FULL] * COUNT, *[CALM] * 12)
    flags = {"max-num-seqs": 16}
    burst = find(evidence(frames=frames[:COUNT], now=frames[COUNT - 1].end, moments=(), flags=flags), "preempting")
    calm = find(evidence(frames=frames, now=frames[-1].end, moments=(), flags=flags), "preempting")
    assert (burst.recovering, calm.recovering) == (False, True)
    assert calm.fixes == burst.fixes != ()
    at = clock(frames[COUNT + 4].end, frames[-1].end, seconds=True)
    assert re.fullmatch(rf"\d+ preemptions/min in the minute to {at}, .* request; hardly any since\.", calm.symptom)
    assert calm.cause.endswith("Preemption comes in bursts: the finding closes after 5m with hardly any.")


def test_paused_preemption_hides_no_other_finding() -> None:
    full = replace(CALM, kv_cache_usage=0.95)
    frames = frames_of(*[FULL] * COUNT, *[full] * 12)
    assert {"preempting", "kv_cache_pressure"} <= codes(evidence(frames=frames, now=frames[-1].end, moments=()))
    just = frames[: COUNT + 3]
    assert "kv_cache_pressure" not in codes(evidence(frames=just, now=just[-1].end, moments=()))


@pytest.mark.parametrize(("busy", "pause"), [(1, 2), (2, 3), (1, 5), (3, 9), (5, 7)])
def test_no_finding_about_an_idle_gpu_in_sparse_traffic(busy: int, pause: int) -> None:
    """Requests every 30 to 200 seconds once caused a new report each. A pause has no requests."""
    frames = frames_of(*([SERVING] * busy + [STOPPED] * pause) * 8)
    moments = tuple(GpuMoment(frame.start + 1, (replace(GOOD, utilization=5.0),)) for frame in frames)
    reported = [
        count
        for count in range(4, len(frames) + 1)
        if "starved_by_clients" in codes(evidence(frames=frames[:count], now=frames[count - 1].end, moments=moments))
    ]
    assert reported == []


@pytest.mark.parametrize(("idle", "holds"), [(20.0, True), (30.0, False)])
def test_traffic_findings_end_with_the_traffic(idle: float, holds: bool) -> None:
    found = evidence(lambda _: replace(GOOD, utilization=5.0), idle_seconds=idle)
    assert ("starved_by_clients" in codes(found)) is holds


def test_without_lengths_fewer_sequences_follow_the_fewest_running() -> None:
    """Twelve were admitted while they were short, but five is what fits."""
    frames = frames_of(*[FULL] * COUNT)
    crowded = (*frames[:-3], replace(frames[-3], running_max=12), *frames[-2:])
    found = evidence(frames=crowded, flags={"max-num-seqs": 16}, build="cpu")
    (fix,) = find(found, "preempting").fixes
    assert fix.changes.set == {"max-num-seqs": 3}


def test_server_without_a_gpu_is_advised_another_machine() -> None:
    frames = tuple(
        replace(frame, waiting_min=10.0 * at, waiting_max=10.0 * at + 3)
        for at, frame in enumerate(frames_of(*[FULL] * COUNT))
    )
    fewer = "Send fewer concurrent requests, or start a second server on another machine"
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"build": "cpu"}, f"{fewer}."),
        ({"build": "cuda"}, "Start a second server on another GPU, or send fewer concurrent requests."),
        ({"free_gpus": (3, 4), "gpus": 1}, "Start a second server on GPU 3, or send fewer concurrent requests."),
        ({"free_gpus": (3, 4), "gpus": 2}, "Start a second server on GPU 3,4, or send fewer concurrent requests."),
        ({"free_gpus": (3,), "gpus": 2}, f"{fewer}: only GPU 3 is free here, and this one has 2 GPUs."),
        ({"free_gpus": (), "gpus": 1}, f"{fewer}: no GPU like its own is free here."),
    )
    for known, why in cases:
        assert find(evidence(frames=frames, **known), "oversubscribed_memory").fixes[-1].why == why


def test_canceling_clients_do_not_hide_a_hang() -> None:
    """Their requests count as finished, as does the one-token request of each console."""
    gives_up = replace(SILENT, requests_finished_total=1)
    assert suspected_hang(frames_of(SERVING, *[gives_up] * 6)) is not None
    hung = evidence(grown=replace(gives_up, requests_waiting=9), silent_seconds=30.0)
    assert codes(hung) == {"engine_hung"}


def test_queue_before_a_stuck_engine_is_not_a_compute_shortage() -> None:
    stuck = tuple(
        replace(frame, waiting_min=10.0 * at, waiting_max=10.0 * at + 3)
        for at, frame in enumerate(frames_of(*[SILENT] * COUNT))
    )
    assert "oversubscribed_compute" not in codes(evidence(frames=stuck))
    nobody = tuple(replace(frame, running_max=0, grown=replace(frame.grown, requests_running=0)) for frame in stuck)
    assert codes(evidence(frames=nobody)) == {"not_admitted"}
    again = evidence(frames=(*nobody[:-1], replace(nobody[-1], running_max=9)))
    assert find(again, "not_admitted").symptom == "Requests waited while none ran; some run again now."


TIGHT = replace(
    SERVING, requests_running=12, kv_cache_usage=0.9, requests_finished_total=1, generation_tokens_total=300
)


def fix(found: Evidence, code: str) -> Any:
    return next(one for one in find(found, code).fixes if "max-num-seqs" in one.changes.set)


def test_reason_for_fewer_sequences_matches_their_number() -> None:
    """``--max-num-seqs 1: 1 sequences fit into the KV cache`` was once shown while 12 ran, because one frame had
    one."""
    frames = frames_of(*[TIGHT] * COUNT)
    alone = replace(frames[-2], usage_max=0.05, grown=replace(frames[-2].grown, requests_running=1))
    seen = evidence(frames=(*frames[:-2], alone, frames[-1]), flags={"max-num-seqs": 16}, build="cpu")
    offered = fix(seen, "kv_cache_pressure")
    assert offered.changes.set == {"max-num-seqs": 8}, "12, by 85 of the 90 % that they held, in steps of eight"
    assert "the KV cache was too full with 12" in offered.why
    assert "fit into" not in offered.why


def test_one_sequence_is_singular() -> None:
    few = replace(TIGHT, requests_running=2, preemptions_total=2)
    offered = fix(evidence(grown=few, flags={"max-num-seqs": 16}, build="cpu"), "preempting")
    assert offered.changes.set == {"max-num-seqs": 1}
    assert offered.why.startswith("Run at most 1 sequence: ")


def test_fewer_sequences_for_speed_do_not_mention_the_kv_cache() -> None:
    slow = Histogram((0.1, 1.0, float("inf")), (0.0, 5000.0, 5000.0), 2500.0)
    served = replace(SERVING, requests_running=32, histograms={"itl": slow})
    frames = slow_frames(served)[:6]
    seen = evidence(frames=frames, now=frames[-1].end, flags={"max-num-seqs": 64}, build="cpu")
    finding = find(seen, "slow_tokens")
    offered = next(one for one in finding.fixes if "max-num-seqs" in one.changes.set)
    assert offered.changes.set == {"max-num-seqs": 16}
    assert offered.why == "A step of 16 sequences, about half of the 32 running, takes less time."


def test_cause_and_fix_of_an_earlier_minute_name_it() -> None:
    """``Steps with 201 sequences take too long`` was shown beside ``running 41``."""
    slow = Histogram((0.1, 1.0, float("inf")), (0.0, 5000.0, 5000.0), 2500.0)
    busy, calmer = (
        slow_frames(replace(SERVING, requests_running=count, histograms={"itl": slow})) for count in (32, 12)
    )
    frames = (*busy[:6], *calmer[6:])
    known: dict[str, Any] = {"flags": {"max-num-seqs": 64}, "build": "cpu"}
    then = find(evidence(frames=frames[:6], now=frames[5].end, **known), "slow_tokens")
    assert then.cause == "Steps with 32 sequences take too long on this machine."
    now = find(evidence(frames=frames, now=frames[-1].end, **known), "slow_tokens")
    assert next(one.value for one in now.measures if one.name == "peak running") == "12"
    minute = f" in the minute to {clock(frames[5].end, frames[-1].end)}"
    assert now.cause == f"Steps with 32 sequences{minute} took too long on this machine."
    assert f"about half of the 32 running{minute}, takes less time." in str(now.fixes)


def slow_frames(served: EngineSample) -> tuple[Frame, ...]:
    """Frames with these observed gaps between tokens."""
    return tuple(
        replace(frame, grown=replace(frame.grown, histograms=served.histograms))
        for frame in frames_of(*[served] * COUNT)
    )


def test_pressure_persists_through_a_pause_with_its_last_values() -> None:
    paused = replace(SILENT, requests_running=0, kv_cache_usage=0.0)
    frames = frames_of(*[TIGHT] * COUNT, *[paused] * 30)
    held = [
        finding
        for count in range(COUNT, len(frames) + 1)
        for finding in findings(
            evidence(frames=frames[:count], now=frames[count - 1].end, idle_seconds=10.0 * (count - COUNT))
        )
        if finding.code == "kv_cache_pressure"
    ]
    assert len(held) == 30, "five minutes"
    assert {one.measures[0].value for one in held} == {"90%"}
    until = clock(frames[COUNT - 1].end, frames[-1].end, seconds=True)
    assert held[-1].symptom == f"KV cache usage peaked at 90% in the minute to {until}; no request has run since."
    again = frames_of(*[TIGHT] * COUNT, *[paused] * 10, *[SERVING] * 3)
    assert "kv_cache_pressure" not in codes(evidence(frames=again, now=again[-1].end)), "good frames still end it"


def test_pressure_ends_after_five_minutes_within_its_objective() -> None:
    """Between the objective and the usage that ends it at once, it stayed open until it left the last half hour."""
    within = replace(TIGHT, kv_cache_usage=0.83)
    for minutes, expected in ((4.5, True), (5, False)):
        frames = frames_of(*[TIGHT] * COUNT, *[within] * round(minutes * 6))
        known = evidence(frames=frames, now=frames[-1].end)
        assert ("kv_cache_pressure" in codes(known)) is expected
        if expected:
            cause = "Recovering: the finding closes after 30s at 80% or less, or 5m within the objective."
            assert find(known, "kv_cache_pressure").cause == cause
    frames = frames_of(*[TIGHT] * COUNT, *[*[within] * 20, TIGHT] * 2, *[within] * 20)
    assert "kv_cache_pressure" in codes(evidence(frames=frames, now=frames[-1].end)), "not five minutes at a time"
    idle = replace(SILENT, requests_running=0, kv_cache_usage=0.0)
    frames = frames_of(*[TIGHT] * COUNT, *[within] * 20, *[idle] * 12)
    assert "kv_cache_pressure" in codes(evidence(frames=frames, now=frames[-1].end)), "a pause does not count"


def test_explained_finding_does_not_appear_in_or_after_a_pause() -> None:
    bounds = (0.1, 1.0, float("inf"))
    full = replace(FULL, histograms={"itl": Histogram(bounds, (0.0, 500.0, 500.0), 250.0)})
    none = {"itl": Histogram(bounds, (0.0, 0.0, 0.0), 0.0)}
    paused = replace(SILENT, requests_running=0, kv_cache_usage=0.0, histograms=none)
    served = [*[full] * COUNT, *[paused] * COUNT, *[full] * COUNT]
    frames = tuple(
        replace(frame, grown=replace(frame.grown, histograms=one.histograms))
        for frame, one in zip(frames_of(*served), served, strict=True)
    )
    for count in range(COUNT, len(frames) + 1):
        idle = 10.0 * (count - COUNT) if count <= 2 * COUNT else 0.0
        assert "slow_tokens" not in codes(evidence(frames=frames[:count], now=frames[count - 1].end, idle_seconds=idle))


TIMES = (0.5, 0.9, 1.1, 3.0, float("inf"))


def first_tokens(*counts: tuple[float, ...]) -> tuple[Frame, ...]:
    """Frames with these observed times to the first token."""
    return tuple(
        replace(frame, grown=replace(frame.grown, histograms={"ttft": Histogram(TIMES, one, one[-1])}))
        for frame, one in zip(frames_of(*[SERVING] * len(counts)), counts, strict=True)
    )


def test_latency_within_its_objective_again_is_recovering_without_fixes() -> None:
    """``TTFT p99 is 938ms again; the objective is 1.0s`` was once a warning with fixes because it was above 80% of the
    limit."""
    slow, near = (0.0, 0.0, 0.0, 100.0, 100.0), (0.0, 100.0, 100.0, 100.0, 100.0)
    objectives = Objectives(ttft_p99_seconds=1.0, itl_p99_seconds=0.1, kv_cache_usage=0.85, preemption_rate=0.02)
    known: dict[str, Any] = {"preset_objectives": objectives, "quantized": False, "compute_capability": (8, 9)}
    before = find(evidence(frames=first_tokens(*[slow] * COUNT), **known), "slow_first_token")
    assert before.fixes
    assert not before.recovering
    frames = first_tokens(*[slow] * COUNT, *[near] * 7)
    found = find(evidence(frames=frames, now=frames[-1].end, **known), "slow_first_token")
    assert found.recovering
    assert found.measures[0].within
    assert found.fixes == ()
    until = clock(frames[COUNT + 4].end, frames[-1].end)
    assert found.symptom.startswith(f"TTFT p99 was above its objective of 1.0s until {until}; ")
    assert found.symptom.endswith("ms.")


def busy_api_server(waiting: float) -> tuple[Frame, ...]:
    """Frames with a TTFT of 2 s, of which 0.2 s are in the engine, and gaps of 20 ms."""
    bounds = (0.05, 0.5, 1.9, 2.1, float("inf"))

    def all_at(seconds: float, count: float) -> Histogram:
        counts = tuple(count if seconds <= bound else 0.0 for bound in bounds)
        return Histogram(bounds, counts, seconds * count)

    histograms = {"ttft": all_at(2.0, 50.0), "queue": all_at(0.1, 50.0), "prefill": all_at(0.1, 50.0)}
    histograms |= {"itl": all_at(0.02, 5000.0)}
    return slow_frames(replace(SERVING, requests_waiting=waiting, histograms=histograms))


def test_ttft_outside_the_engine_is_due_to_the_api_server() -> None:
    finding = find(evidence(frames=busy_api_server(0)), "slow_first_token")
    assert finding.cause.startswith("Most of this time is spent in the API server")
    assert ("neither queue nor prefill", "1.8s") in [(one.name, one.value) for one in finding.measures]
    assert finding.fixes[0].changes.set == {"api-server-count": 2}
    two = find(evidence(frames=busy_api_server(0), flags={"api-server-count": 2}), "slow_first_token")
    assert all(not fix.changes.set for fix in two.fixes)


def test_api_server_is_not_blamed_while_requests_wait_in_the_engine() -> None:
    """vLLM counts queue time when a request finishes, so requests waiting now are not included yet."""
    finding = find(evidence(frames=busy_api_server(12)), "slow_first_token")
    assert "API server" not in finding.cause


def test_earlier_engine_queue_is_not_blamed_on_the_api_server() -> None:
    """At the end of a burst with long outputs nothing waits, and the finished requests had hardly waited."""
    frames = busy_api_server(0)
    earlier = [replace(one, waiting_max=40.0) for one in frames[:-6]]
    assert "API server" not in find(evidence(frames=(*earlier, *frames[-6:])), "slow_first_token").cause


@pytest.mark.parametrize(("gap", "count"), [(1.2, 1.0), (0.02, 500.0)])
def test_api_server_is_not_the_only_cause_if_steps_may_have_been_long(gap: float, count: float) -> None:
    """A long gap is one of a long step; with few tokens, no stream may have run during one."""
    frames = busy_api_server(0)
    itl = frames[-1].grown.histograms["itl"]
    more = Histogram(itl.bounds, tuple(count if gap <= bound else 0.0 for bound in itl.bounds), gap * count)
    if count < 500.0:
        more = Histogram(itl.bounds, tuple(map(sum, zip(itl.counts, more.counts, strict=True))), itl.sum + more.sum)
    frames = tuple(
        replace(one, grown=replace(one.grown, histograms={**one.grown.histograms, "itl": more})) for one in frames
    )
    finding = find(evidence(frames=frames), "slow_first_token")
    assert "in the API server, or waiting for the end of a long step" in finding.cause
    assert all(not fix.changes.set for fix in finding.fixes)


def test_api_server_is_not_blamed_for_a_step_that_takes_whole_frames() -> None:
    """Seven requests came during a step of 91 s: vLLM reads and queues them only at its end."""
    frames = [replace(one, still=("0",)) if at == 2 else one for at, one in enumerate(busy_api_server(0))]
    finding = find(evidence(frames=frames), "slow_first_token")
    assert finding.cause.startswith("Prefill is slow, of the request's own prompt or of those ahead of it.")


@pytest.mark.parametrize(
    "known",
    [
        {"flags": {"data-parallel-size": 2}},
        {"flags": {"data-parallel-size": 2, "data-parallel-external-lb": True}},
        {"flags": {"enable-fault-tolerance": True}},
        {"flags": {"enable-elastic-ep": True}},
        {"environment": {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}},
        {"environment": {"VLLM_RUST_FRONTEND_PATH": "/opt/frontend"}},
        {"release": (0, 8, 5)},
        {"build": "cpu"},
        {"simulated": True},
    ],
    ids=str,
)
def test_second_api_server_is_offered_only_where_supported_and_useful(known: dict[str, Any]) -> None:
    found = find(evidence(frames=busy_api_server(0), **known), "slow_first_token")
    assert "API server" in found.cause
    assert all(not fix.changes.set for fix in found.fixes)


def test_pressure_below_its_objective_is_recovering() -> None:
    full, near = (replace(SERVING, kv_cache_usage=usage) for usage in (0.95, 0.83))
    frames = frames_of(*[full] * COUNT, *[near] * 7)
    found = find(evidence(frames=frames, now=frames[-1].end), "kv_cache_pressure")
    assert (found.recovering, found.fixes) == (True, ())
    assert found.measures[0].within
    assert "was above its objective of 85%" in found.symptom


@pytest.mark.parametrize(("ok", "recovering", "expected"), [
    (True, False, False), (False, True, True), (None, False, True), (None, True, False),
])  # fmt: skip
def test_value_within_its_objective_is_not_marked(ok: bool | None, recovering: bool, expected: bool) -> None:
    judged = Judged("ttft_p99_seconds", 0.88, 1.0, ok, "preset")
    lasting = Finding("slow_first_token", Severity.WARNING, START, "", "", recovering=recovering)
    assert missed("ttft_p99_seconds", (judged,), (lasting,)) is expected
