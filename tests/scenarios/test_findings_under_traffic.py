"""Each running finding is caused by traffic and flags, named, fixed by the first fix offered, and gone afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fakes.virtual_records import known_by_length
from vllm_console.diagnosis.finding import Finding, Fix, Severity
from vllm_launchers.engine_model.scheduler import Request
from vllm_launchers.presets.load import read_presets
from vllm_launchers.presets.model import Objectives, Workload

OBJECTIVES = Objectives(ttft_p99_seconds=2.0, itl_p99_seconds=0.1, kv_cache_usage=0.85, preemption_rate=0.02)
KNOWN = {"preset_objectives": OBJECTIVES, "preset": "chatbot"}
PRESETS = read_presets()[0]
VOCABULARY = range(50_000)

Traffic = Callable[[], list[Request]]


def steadily(rate: float, seconds: float, prompt: int, output: int) -> list[Request]:
    return requests([index / rate for index in range(int(rate * seconds))], prompt, output, seed=1)


def randomly(rate: float, seconds: float, prompt: int, output: int, *, shared: int = 0, seed: int = 1) -> list[Request]:
    """Poisson arrivals; ``shared`` first tokens of each prompt are the same."""
    rng, at, times = random.Random(seed), 0.0, []
    while (at := at + rng.expovariate(rate)) < seconds:
        times.append(at)
    return requests(times, prompt, output, shared=shared, seed=seed)


def requests(times: list[float], prompt: int, output: int, *, shared: int = 0, seed: int) -> list[Request]:
    rng = random.Random(seed)
    common = rng.choices(VOCABULARY, k=shared)
    made = []
    for index, at in enumerate(times):
        tokens = common + rng.choices(VOCABULARY, k=prompt - shared)
        made.append(known_by_length(f"{seed}-{prompt}-{index}", tokens, output, at, index))
    return made


def top(finding: Finding) -> Fix:
    """The first fix that can be staged."""
    return next(fix for fix in finding.fixes if not fix.changes.empty)


def fixed(server: Any, traffic: Traffic, seconds: float, code: str) -> tuple[Any, Finding, Any]:
    """Serve, find the finding, apply its first fix, and serve the same again without the finding."""
    before = server.serve(traffic(), seconds)
    assert code in before.codes, before.history[-1]
    finding = before.finding(code)
    after = server.changed(top(finding).changes).serve(traffic(), seconds)
    assert code not in after.ever, after.history
    return before, finding, after


def test_batched_iterations_equal_single_ones(server) -> None:
    """With preemptions, shared prefixes, and queued requests."""
    flags = {"max-model-len": 4096, "num-gpu-blocks-override": 600, "max-num-seqs": 16, "enable-prefix-caching": True}
    tight = server(flags, **KNOWN)
    together, one_by_one = (
        replace(tight, together=so).serve(randomly(4.0, 60, 600, 300, shared=200), 60) for so in (True, False)
    )
    assert together.frames.since(0.0) == one_by_one.frames.since(0.0)
    assert together.history == one_by_one.history
    assert "preempting" in together.ever


def test_preempting_is_fixed_by_fewer_sequences_as_a_last_resort(server) -> None:
    flags = {"max-model-len": 4096, "num-gpu-blocks-override": 1500, "max-num-seqs": 64}
    before, finding, _ = fixed(
        server(flags, build="cpu", **KNOWN), lambda: steadily(4.0, 180, 300, 500), 180, "preempting"
    )
    assert finding.severity is Severity.CRITICAL
    assert "kv_cache_pressure" not in before.codes  # "preempting" is its more severe form
    change = top(finding).changes
    assert set(change.set) == {"max-num-seqs"}
    assert 24 <= int(change.set["max-num-seqs"]) < 64
    assert any(measure.source == "objectives of preset chatbot" for measure in finding.measures)


def test_fewer_sequences_fit_the_recent_requests(server) -> None:
    """``32 → 17`` once did not end preemptions: 17 had run well with requests a third as long."""
    short = steadily(4.4, 60, 400, 150)
    bursts = [60.0 + 20 * burst + 0.2 * at for burst in range(7) for at in range(20)]
    flags = {"max-model-len": 2048, "num-gpu-blocks-override": 1200, "max-num-seqs": 32}
    _, finding, after = fixed(
        server(flags, build="cpu", **KNOWN), lambda: short + requests(bursts, 800, 800, seed=2), 200, "preempting"
    )
    change, why = int(top(finding).changes.set["max-num-seqs"]), top(finding).why
    assert 0.85 * 1200 * 16 / 1600 - 2 <= change <= 0.85 * 1200 * 16 / 1600, why
    assert "kv_cache_pressure" not in after.ever


def test_preempting_is_fixed_by_an_fp8_cache_where_supported(server) -> None:
    flags = {"max-model-len": 4096, "kv-cache-memory-bytes": 3_500_000_000, "max-num-seqs": 128}
    hopper = server(flags, gpu="H100 80GB", compute_capability=(9, 0), **KNOWN)
    _, finding, after = fixed(hopper, lambda: steadily(17.0, 100, 300, 500), 100, "preempting")
    assert top(finding).changes.set == {"kv-cache-dtype": "fp8"}
    assert [dict(fix.changes.set) for fix in finding.fixes][1:], "fewer sequences come after it"
    assert "healthy" in after.codes


def test_kv_cache_pressure_before_any_preemption(server) -> None:
    flags = {"max-model-len": 4096, "kv-cache-memory-bytes": 1040 * 16 * 147_456, "max-num-seqs": 64}
    tight = server(flags, compute_capability=(8, 9), **KNOWN)
    before, finding, _ = fixed(tight, lambda: steadily(3.0, 150, 300, 500), 150, "kv_cache_pressure")
    assert "preempting" not in before.ever
    assert finding.measures[0].limit == "85%"
    assert top(finding).changes.set == {"kv-cache-dtype": "fp8"}
    assert [set(fix.changes.set) for fix in finding.fixes] == [{"kv-cache-dtype"}, {"max-num-seqs"}]


def test_sequence_limit_and_memory_shortage_are_distinguished(server) -> None:
    """The queue grows in both cases: one is fixed by more sequences, the other must not be."""
    few = server({"max-model-len": 4096, "max-num-seqs": 16}, **KNOWN)
    before, finding, after = fixed(few, lambda: randomly(2.8, 180, 300, 400), 180, "oversubscribed_sequences")
    assert "oversubscribed_memory" not in before.ever
    assert int(top(finding).changes.set["max-num-seqs"]) > 16
    assert after.codes == {"healthy"}

    flags = {"max-model-len": 4096, "kv-cache-memory-bytes": 16_000 * 147_456, "max-num-seqs": 128}
    small = server(flags, gpu="H100 80GB", compute_capability=(9, 0), **KNOWN)
    before, finding, _ = fixed(small, lambda: randomly(4.5, 150, 3000, 200), 150, "oversubscribed_memory")
    assert "oversubscribed_sequences" not in before.ever
    assert top(finding).changes.set == {"kv-cache-dtype": "fp8"}
    assert all("max-num-seqs" not in fix.changes.set for fix in finding.fixes)


def test_sudden_queue_is_offered_more_sequences(server) -> None:
    """A constant backlog is not oversubscription, but its requests only wait because of the limit."""
    few = server({"max-model-len": 4096, "max-num-seqs": 16}, gpu="H100 80GB", **KNOWN)

    def traffic() -> list[Request]:
        return requests([1.0 + index / 1000 for index in range(300)], 300, 400, seed=1) + steadily(1.0, 60, 300, 400)

    before = few.serve(traffic(), 60)
    finding = before.finding("slow_first_token")
    assert "oversubscribed_sequences" not in before.ever
    assert finding.cause == "Requests wait in the queue: only 16 run at once."
    assert int(top(finding).changes.set["max-num-seqs"]) == 64


def test_prompts_arriving_faster_than_computed(server) -> None:
    """Neither sequences nor memory limit the queue; quantized weights compute faster."""
    plain = server(
        {"max-model-len": 8192}, "Qwen/Qwen3-8B", gpu="L40S", compute_capability=(8, 9), quantized=False, **KNOWN
    )
    _, finding, after = fixed(plain, lambda: randomly(4.5, 120, 3000, 10), 120, "oversubscribed_compute")
    assert top(finding).changes.set == {"quantization": "fp8"}
    assert after.codes == {"healthy"}


def test_prefill_contention_in_large_steps(server) -> None:
    def traffic() -> list[Request]:
        return randomly(1.0, 240, 50, 300) + randomly(0.15, 240, 8000, 20, seed=2)

    flags = {"max-model-len": 16384, "max-num-batched-tokens": 8192, "max-num-seqs": 64}
    _, finding, _ = fixed(server(flags, **KNOWN), traffic, 240, "prefill_contention")
    assert int(top(finding).changes.set["max-num-batched-tokens"]) <= 1024


def test_prefill_contention_of_rare_long_prompts_without_chunking(server) -> None:
    def traffic() -> list[Request]:
        return randomly(3.0, 240, 50, 300) + randomly(0.06, 240, 7000, 20, seed=2)

    flags = {"max-model-len": 8192, "max-num-batched-tokens": 8192, "max-num-seqs": 64, "enable-chunked-prefill": False}
    _, finding, _ = fixed(server(flags, **KNOWN), traffic, 240, "prefill_contention")
    assert top(finding).changes.set["enable-chunked-prefill"] is True


def test_prefix_cache_without_hits(server) -> None:
    on = server({"max-model-len": 4096, "enable-prefix-caching": True}, gpu="H100 80GB", **KNOWN)
    before, finding, after = fixed(on, lambda: randomly(1.0, 400, 500, 50), 400, "prefix_cache_idle")
    assert finding.severity is Severity.NOTE
    assert "healthy" in before.codes
    assert after.codes == {"healthy"}


def test_repeated_prefixes_with_caching_off(server) -> None:
    flags = {"max-model-len": 4096, "enable-prefix-caching": False}
    off = server(flags, gpu="H100 80GB", workload=Workload(2000, 50, 0.6, 16), **KNOWN)
    _, finding, after = fixed(off, lambda: randomly(1.0, 120, 2000, 50, shared=1200), 120, "prefix_cache_missed")
    assert "by its preset" in finding.symptom
    assert after.codes == {"healthy"}


def test_earlier_measurement_overrides_the_preset(server) -> None:
    flags = {"max-model-len": 4096, "enable-prefix-caching": False}
    known = {"workload": Workload(2000, 50, 0.6, 16), "earlier_reuse": 0.01, **KNOWN}
    unique = server(flags, gpu="H100 80GB", **known).serve(randomly(1.0, 120, 500, 50), 120)
    assert unique.codes == {"healthy"}


def test_unused_context(server) -> None:
    long = server({"max-model-len": 32768}, gpu="H100 80GB", **KNOWN)
    _, finding, after = fixed(long, lambda: randomly(2.0, 180, 500, 100), 180, "context_unused")
    assert 600 <= int(top(finding).changes.set["max-model-len"]) <= 4096
    assert after.codes == {"healthy"}


RATES = {"chatbot": 1.5, "batch": 2.0, "code-generation": 0.25, "long-document": 0.02}
"""Requests per second that an H100 serves easily."""


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", sorted(RATES))
def test_healthy_server_has_no_findings_in_ten_minutes(server, workload_requests, name: str, seed: int) -> None:
    preset = PRESETS[name]
    flags = {flag: setting.value for flag, setting in preset.flags.items()}
    known = {"preset_objectives": preset.objectives, "workload": preset.workload, "preset": name}
    sent = workload_requests(
        preset.workload, rate=RATES[name], seconds=600, longest=int(flags["max-model-len"]), seed=seed
    )
    served = server(flags, preset.model, gpu="H100 80GB", compute_capability=(9, 0), **known).serve(sent, 600)
    assert served.ever == {"healthy"}
    assert len(served.ctx.frames) == 60
