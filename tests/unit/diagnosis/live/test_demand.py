"""Demand above the hardware's capacity is reported with its cause, only if the metrics show it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from vllm_console.diagnosis.finding import Finding
from vllm_console.diagnosis.live.findings import findings
from vllm_console.diagnosis.live.rule import Evidence, GpuMoment
from vllm_console.history.frames import Frames
from vllm_console.metrics.sample import EngineSample, Histogram, Sample
from vllm_launchers.host.gpu.host import Gpu, Holder
from vllm_launchers.presets.model import Objectives
from vllm_launchers.vllm.flags.changes import Changes

START = 1_000_000.0
BOUNDS = (0.025, 0.05, 0.1, 0.2, 0.5, math.inf)
OBJECTIVES = Objectives(ttft_p99_seconds=2.0, itl_p99_seconds=0.1, kv_cache_usage=0.85, preemption_rate=0.02)


def found(
    itl: dict[float, float],
    *,
    running: float = 64,
    usage: float = 0.4,
    at_last: float | None = None,
    steady: bool = False,
    **known: Any,
) -> dict[str, Finding]:
    """Findings of two minutes with a growing queue; ``itl`` maps gaps in seconds to tokens per second.

    ``at_last`` is the KV cache usage of the last twenty seconds. With a ``steady`` queue, each request waits five
    seconds in it.
    """
    frames = Frames()
    for at in range(49):
        seconds = 2.5 * at
        usage = at_last if at_last is not None and seconds > 100 else usage
        counts = tuple(seconds * sum(rate for gap, rate in itl.items() if gap <= bound) for bound in BOUNDS)
        gaps = Histogram(BOUNDS, counts, seconds * sum(gap * rate for gap, rate in itl.items()))
        histograms = {"itl": gaps}
        if steady:
            waits = Histogram((2.0, 8.0, math.inf), (0.0, 4.0 * seconds, 4.0 * seconds), 20.0 * seconds)
            prompts = Histogram((2.0, 8.0, math.inf), (4.0 * seconds,) * 3, 0.4 * seconds)
            histograms |= {"ttft": waits, "queue": waits, "prefill": prompts}
        engine = EngineSample(
            requests_running=running, requests_waiting=20.0 if steady else 2.0 * at,
            kv_cache_usage=usage, preemptions_total=0,
            prompt_tokens_total=400.0 * seconds, generation_tokens_total=seconds * sum(itl.values()),
            requests_finished_total=4.0 * seconds, histograms=histograms,
        )  # fmt: skip
        frames.append(Sample(START + seconds, {"0": engine}, 100_000))
    evidence = {"now": START + 120, "ready_at": START - 60, "frames": frames.since(0.0), "build": "cuda",
                "flags": {"max-num-seqs": 64}, "preset_objectives": OBJECTIVES, "quantized": True}  # fmt: skip
    return {finding.code: finding for finding in findings(Evidence(**(evidence | known)))}


SLOW = {0.15: 400.0}
FAST = {0.03: 2000.0}
SPIKES = {0.03: 2000.0, 0.4: 60.0}
"""Most gaps are short, but the p99 is far above its objective because single steps are slow."""


def test_slow_steps_offer_neither_more_nor_fewer_sequences() -> None:
    seen = found(SLOW)
    finding = seen["oversubscribed_sequences"]
    assert finding.cause.startswith(
        "Demand exceeds what this GPU can serve: with 64 sequences ITL is 150ms on average."
    )
    assert [fix.changes.empty for fix in finding.fixes] == [True]
    assert "split the model over more GPUs, serve a smaller model, or send fewer requests" in finding.fixes[0].why
    assert any((one.name, one.value, one.limit) == ("ITL mean", "150ms", "100ms") for one in finding.measures)
    assert "slow_tokens" not in seen, "one finding tells the story"


def test_figures_within_their_limits_are_marked() -> None:
    """They are no evidence of the finding: it is not shown by them alone."""
    sequences, memory = found(FAST)["oversubscribed_sequences"], found(FAST, usage=0.95)["oversubscribed_memory"]
    assert {one.name: one.within for one in sequences.measures if one.limit} == {
        "running": False, "KV cache usage": True,
    }  # fmt: skip
    assert {one.name: one.within for one in memory.measures if one.limit}["KV cache usage"] is False


def test_faster_steps_are_offered_first() -> None:
    finding = found(SLOW, quantized=False, compute_capability=(9, 0))["oversubscribed_sequences"]
    assert finding.fixes[0].changes.set == {"quantization": "fp8"}
    assert "smaller or quantized model" in finding.fixes[-1].why


@pytest.mark.parametrize("itl", [FAST, SPIKES], ids=["fast", "spikes"])
def test_fast_steps_offer_more_sequences(itl: dict[float, float]) -> None:
    finding = found(itl)["oversubscribed_sequences"]
    assert finding.cause == "At most 64 sequences run at once (max-num-seqs)."
    assert "max-num-seqs" in finding.fixes[0].changes.set


@pytest.mark.parametrize(("tokens", "offered"), [(8192, True), (512, False)])
def test_more_sequences_need_room_for_their_drafts(tokens: int, offered: bool) -> None:
    flags = {"max-num-seqs": 64, "max-num-batched-tokens": tokens, "spec-method": "eagle3", "spec-tokens": 5}
    finding = found(FAST, flags=flags)["oversubscribed_sequences"]
    assert any("max-num-seqs" in fix.changes.set for fix in finding.fixes) is offered


def test_full_cache_is_a_memory_finding() -> None:
    seen = found(SLOW, usage=0.95)
    assert "oversubscribed_sequences" not in seen
    assert "Demand exceeds the KV cache" in seen["oversubscribed_memory"].cause


def test_sequence_limit_is_the_cause_when_the_cache_has_room() -> None:
    seen = found(FAST, usage=0.8)
    assert "oversubscribed_memory" not in seen
    finding = seen["oversubscribed_sequences"]
    assert "with 80% of the KV cache in use" in finding.symptom
    assert finding.cause.endswith("holds about 68 of these within its objective, so a higher limit would not help.")
    assert all(fix.changes.empty for fix in finding.fixes), "68 instead of 64 would change next to nothing"


def test_larger_cache_makes_room_for_more_sequences() -> None:
    """The only fix was once a second server, even beside 60 GiB of free memory."""
    server = Holder(pid=1, gib=40.0, server="chat")
    gpu = Gpu(index=0, memory_gib=80.0, free_gib=40.0, used_gib=40.0, used_by=(server,))
    known: dict[str, Any] = {"server": "chat", "compute_capability": (9, 0), "release": (0, 19, 0), "usage": 0.8}
    flags = {"max-num-seqs": 64, "gpu-memory-utilization": 0.5}
    roomy = known | {"flags": flags, "moments": (GpuMoment(START, (gpu,)),), "spare_gib": {0: 40.0}, "cache_gib": 18.0}
    finding = found(FAST, **roomy)["oversubscribed_sequences"]
    assert finding.cause.endswith("within its objective, so a higher limit alone would not help.")
    assert finding.fixes[0].changes == Changes({"gpu-memory-utilization": 0.95, "max-num-seqs": 200})
    assert finding.fixes[0].why == (
        "The KV cache gets 36.0 GiB more, which is free now. "
        "200 sequences of the current length then fit into the KV cache."
    )
    finding = found(FAST, **known)["oversubscribed_sequences"]  # nothing is known of its GPU's memory
    assert finding.fixes[0].changes == Changes({"kv-cache-dtype": "fp8", "max-num-seqs": 136})
    hybrid = found(FAST, **known, linear_layers=True)["oversubscribed_sequences"]  # its states stay as large
    assert all("max-num-seqs" not in fix.changes.set for fix in hybrid.fixes)
    waiting = found(FAST, **known, steady=True)["slow_first_token"]
    assert waiting.fixes[0].changes == finding.fixes[0].changes


def test_no_more_sequences_are_offered_than_there_are_states() -> None:
    for states, sequences in ((None, 136), (100, 88)):
        finding = found(FAST, linear_layers=True, most_sequences=states)["oversubscribed_sequences"]
        assert finding.fixes[0].changes.set == {"max-num-seqs": sequences}
    assert finding.fixes[0].why == "The KV cache has a block for the state of each of 88 sequences."
    for states, held in ((72, 68), (50, 64)):  # 64 run, although only 50 were estimated
        finding = found(FAST, linear_layers=True, most_sequences=states)["oversubscribed_sequences"]
        assert all(fix.changes.empty for fix in finding.fixes)
        assert finding.cause.endswith(
            f"vLLM starts with about {held} at most, since the KV cache needs a block for the state of each, so a "
            "higher limit would not help."
        )


@pytest.mark.parametrize(("tokens", "sequences"), [(8192, 136), (256, 128), (192, None)])
def test_more_sequences_leave_room_for_prompts_in_a_step(tokens: int, sequences: int | None) -> None:
    """As many sequences as a step has tokens would leave next to nothing for prompts."""
    flags = {"max-num-seqs": 64, "max-num-batched-tokens": tokens}
    offered = [
        fix.changes.set.get("max-num-seqs") for fix in found(FAST, flags=flags)["oversubscribed_sequences"].fixes
    ]
    assert offered == ([None] if sequences is None else [sequences, None])


def test_full_cache_finding_shows_the_values_that_raised_it() -> None:
    """And not the newest values, while the finding is kept for another half minute."""
    finding = found(FAST, usage=0.95, at_last=0.75)["oversubscribed_memory"]
    assert "the KV cache is 95% full" in finding.symptom
    assert [one.value for one in finding.measures if one.name == "KV cache usage"] == ["95%"]


def test_prompt_rate_above_capacity_has_no_flag_fix() -> None:
    finding = found(FAST, running=20)["oversubscribed_compute"]
    assert finding.cause.startswith("Demand exceeds what this GPU can serve: prompts arrive faster")
    assert [fix.changes.empty for fix in finding.fixes] == [True]
    helped = found(FAST, running=20, flags={"max-num-seqs": 64, "enable-chunked-prefill": False})
    assert helped["oversubscribed_compute"].cause == "Prompts arrive faster than the GPU prefills them."
    assert helped["oversubscribed_compute"].fixes[0].changes.set == {"enable-chunked-prefill": True}


@pytest.mark.parametrize("running", [20, 64, 300])
def test_unknown_flags_are_no_evidence(running: float) -> None:
    """An attached endpoint was once said to have room for more sequences, by vLLM's default of max-num-seqs."""
    for steady in (False, True):
        for finding in found(FAST, running=running, flags={}, flags_known=False, steady=steady).values():
            assert "max-num-seqs" not in f"{finding.symptom} {finding.cause}"
            assert all(not one.limit and not one.source for one in finding.measures if one.name == "running")
            assert all(fix.changes.empty for fix in finding.fixes)
    growing = found(FAST, running=running, flags={}, flags_known=False)
    (code,) = {"oversubscribed_compute", "oversubscribed_sequences"} & set(growing)
    assert "limit of running requests" in growing[code].cause


def test_cpu_build_is_not_told_about_a_gpu_that_prefills() -> None:
    flags = {"max-num-seqs": 64, "enable-chunked-prefill": False}
    finding = found(FAST, running=20, flags=flags, build="cpu")["oversubscribed_compute"]
    assert finding.cause == "Prompts arrive faster than the machine prefills them."


def test_cpu_build_is_not_advised_to_add_a_gpu() -> None:
    finding = found(SLOW, build="cpu")["oversubscribed_sequences"]
    assert "this machine can serve" in finding.cause
    assert "GPU" not in finding.fixes[-1].why


def test_neither_missed_latency_is_fixed_at_the_others_cost() -> None:
    seen = found(SLOW, steady=True)
    assert {"slow_tokens", "slow_first_token"} <= seen.keys()
    for code in ("slow_tokens", "slow_first_token"):
        assert all("max-num-seqs" not in fix.changes.set for fix in seen[code].fixes), code
        assert "send fewer requests" in seen[code].fixes[-1].why
    assert "Fewer at once would lengthen the queue" in seen["slow_tokens"].cause
    assert "More would slow every stream: ITL is 150ms on average" in seen["slow_first_token"].cause


def test_slow_single_steps_offer_more_sequences() -> None:
    seen = found(SPIKES, steady=True)
    changes = [
        fix.changes.set for finding in seen.values() for fix in finding.fixes if "max-num-seqs" in fix.changes.set
    ]
    assert changes == [{"max-num-seqs": 136}], "in one direction"


def test_block_override_that_limits_sequences_on_a_cpu_is_removed() -> None:
    """A second server on another machine was once the only fix, though vLLM had logged room for 400 times more."""
    flags = {"max-num-seqs": 64, "num-gpu-blocks-override": 160}
    cpu: dict[str, Any] = {"build": "cpu", "usage": 0.8, "flags": flags, "steady": True}
    finding = found(FAST, **cpu, blocks_without_override=409.6)["slow_first_token"]
    assert finding.cause.endswith(
        "holds about 68 of these within its objective, because --num-gpu-blocks-override limits it."
    )
    assert finding.fixes[0].changes == Changes({"max-num-seqs": 256}, unset=("num-gpu-blocks-override",))
    assert finding.fixes[0].why.startswith(
        "--num-gpu-blocks-override limits the KV cache to 100,000 tokens; 40,960,000 would fit, by vLLM's log."
    )
    for unproven in (None, 1.0):
        finding = found(FAST, **cpu, blocks_without_override=unproven)["slow_first_token"]
        assert finding.cause.endswith("so a higher limit would not help.")
        assert all(fix.changes.empty for fix in finding.fixes)


def test_block_override_is_the_first_fix_of_a_full_cache_on_a_cpu() -> None:
    flags = {"max-num-seqs": 64, "num-gpu-blocks-override": 160}
    finding = found(FAST, usage=0.95, build="cpu", flags=flags, blocks_without_override=2.0)["oversubscribed_memory"]
    assert finding.fixes[0].changes == Changes(unset=("num-gpu-blocks-override",))
