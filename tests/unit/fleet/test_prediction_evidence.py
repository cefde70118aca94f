"""What a run's records must contain for a prediction."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Never

import pytest
from msgspec.structs import replace

from fakes.virtual_records import record, traffic
from vllm_console.fleet import predictions
from vllm_console.fleet.predictions import RunRecording, evidence_of, limits_after, limits_of, reported_cache
from vllm_console.metrics.parse import CacheConfig
from vllm_console.prediction.evidence import NoEvidenceError
from vllm_launchers.engine_model.gpu_models import batch_defaults
from vllm_launchers.errors import OperationError
from vllm_launchers.plan.budget.budget import GpuShape
from vllm_launchers.plan.budget.estimate import estimate
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.vllm.modelfacts.facts import LayerKind, ModelFacts
from vllm_launchers.vllm.release_defaults import NEWEST


def test_traffic_with_a_preempted_request_in_every_step_is_reported() -> None:
    found = record("--max-num-seqs 48 --max-model-len 4096", traffic(100, 2.6, seed=1, shared=0))
    whole, part = evidence_of(RunRecording(found.requests, found.steps), "chat", found.limits)
    assert whole.steps
    assert part.steps
    preempted = [one._replace(preemptions=1) for one in found.requests]
    with pytest.raises(OperationError, match="no recorded step ran without a preempted request"):
        evidence_of(RunRecording(preempted, found.steps), "chat", found.limits)


def test_other_reason_for_unknown_step_costs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = record("--max-num-seqs 48 --max-model-len 4096", traffic(100, 2.6, seed=1, shared=0))
    seen = RunRecording(found.requests, found.steps)
    whole, _ = evidence_of(seen, "chat", found.limits)
    unknown = replace(whole, steps=(), flaw="no steps were recorded")
    monkeypatch.setattr(predictions, "gather", lambda *_, **__: unknown)
    with pytest.raises(OperationError, match=r"^chat: no steps were recorded, so the cost of a step is unknown$"):
        evidence_of(seen, "chat", found.limits)


def test_warnings_of_current_flags_do_not_hide_new_errors() -> None:
    def plan(level: Level) -> Any:
        return SimpleNamespace(findings=(PlanFinding("flag_value", level, f"{level} of a value"),), flags={})

    details: Any = SimpleNamespace(flags={"tensor-parallel-size": 2})
    cache = CacheConfig(1000, 16, True)
    warned, refused = plan(Level.WARNING), plan(Level.ERROR)
    assert limits_after(details, None, cache, warned, refused) == "It would not start: error of a value."
    runs = limits_after(details, None, cache, refused, refused)
    assert "tensor-parallel-size" in str(runs), "it runs despite the same error"


def test_error_of_current_flags_does_not_hide_another_of_its_kind() -> None:
    def plan(*messages: str) -> Any:
        return SimpleNamespace(
            findings=tuple(PlanFinding("flag_value", Level.ERROR, one) for one in messages), flags={}
        )

    details: Any = SimpleNamespace(flags={"tensor-parallel-size": 2})
    before, after = plan("--seed is no number"), plan("--seed is no number", "--max-num-seqs must be 1 or more")
    found = limits_after(details, None, CacheConfig(1000, 16, True), before, after)
    assert found == "It would not start: --max-num-seqs must be 1 or more."


def test_several_engines_are_named_as_what_is_not_modeled(monkeypatch: pytest.MonkeyPatch) -> None:
    line = 'vllm:cache_config_info{{block_size="16",engine="{}",num_gpu_blocks="2000"}} 1.0'
    body: list[str] = []
    endpoint = SimpleNamespace(metrics_text=lambda: "\n".join(body), close=lambda: None)
    monkeypatch.setattr(predictions, "Scraper", lambda *_, **__: endpoint)
    monkeypatch.setattr(predictions, "unpack", lambda _: SimpleNamespace(flags={}))
    spec = SimpleNamespace(details=None, host="127.0.0.1", port=8000)
    server = SimpleNamespace(pid=1, start_time=1)
    record: Any = SimpleNamespace(
        name="chat", state=SimpleNamespace(alive=True), server=server, current=SimpleNamespace(spec=spec)
    )
    with pytest.raises(OperationError, match="chat does not report the size of its KV cache"):
        reported_cache(record)
    body.append(line.format(0))
    assert reported_cache(record).blocks == 2000
    body.append(line.format(1))
    with pytest.raises(
        OperationError, match=r"^chat has 2 data-parallel engines, and how requests are spread over them"
    ):
        reported_cache(record)


PLAIN = ModelFacts(
    "acme/plain", layers=(LayerKind.FULL,) * 48, hidden_size=3840, heads=16, kv_heads=8, head_dim=256,
    intermediate_size=15360, vocabulary=262144, weight_bytes=24_400_000_000, dtype="bfloat16", max_context=131072,
)  # fmt: skip
WINDOWED = replace(PLAIN, layers=((LayerKind.SLIDING,) * 5 + (LayerKind.FULL,)) * 8, window=1024)
STATES = replace(PLAIN, layers=((LayerKind.LINEAR,) * 3 + (LayerKind.FULL,)) * 12, state_bytes=2**20)
A100 = "NVIDIA A100-SXM4-80GB"


def blocks_after(facts: ModelFacts, before: dict[str, Any], change: dict[str, Any]) -> tuple[int | str, float]:
    """The number of blocks (20,000 before) after a change, or why it is unknown; and the planned ratio of the bytes."""
    flags = {"max-model-len": 131072, **before}
    plans: list[Any] = [
        SimpleNamespace(findings=(), flags=one, memory=estimate(facts, one, [GpuShape(A100, 80.0)]))
        for one in (flags, {**flags, **change})
    ]
    details: Any = SimpleNamespace(flags=flags, engine=None, gpu_name=A100)
    found = limits_after(details, facts, CacheConfig(20_000, 16, True), *plans)
    one, other = (plan.memory.kv_gib for plan in plans)
    return (found if isinstance(found, str) else found.blocks), other / one


@pytest.mark.parametrize(("sequences", "starts"), [(512, True), (1000, True), (1001, False)])
def test_more_sequences_than_blocks_for_their_states_would_not_start(sequences: int, starts: bool) -> None:
    flags: list[dict[str, Any]] = [{"max-num-seqs": count, "max-model-len": 8192} for count in (256, sequences)]
    plans: list[Any] = [
        SimpleNamespace(findings=(), flags=one, memory=estimate(STATES, one, [GpuShape(A100, 80.0)])) for one in flags
    ]
    details: Any = SimpleNamespace(flags=flags[0], engine=None, gpu_name=A100)
    blocks = round(1000 * plans[0].memory.kv_gib / plans[1].memory.kv_gib)
    found = limits_after(details, STATES, CacheConfig(blocks, 16, False), *plans)
    assert isinstance(found, str) is not starts
    assert starts or found == ("It would not start: its KV cache has 1,000 blocks for the states of 1,001 sequences.")


def test_length_changes_no_cache_blocks() -> None:
    for length in (8192, 100_000, 100_001):
        assert blocks_after(PLAIN, {}, {"max-model-len": length})[0] == 20_000


def test_cache_blocks_follow_the_cache_size() -> None:
    for facts in (PLAIN, WINDOWED, STATES):
        blocks, ratio = blocks_after(facts, {"max-num-batched-tokens": 2048}, {"max-num-batched-tokens": 65536})
        assert ratio < 0.95
        assert blocks == pytest.approx(20_000 * ratio, abs=1), "in-flight tokens are part of what a window holds"
    blocks, ratio = blocks_after(PLAIN, {}, {"gpu-memory-utilization": 0.7})
    assert blocks == pytest.approx(20_000 * ratio, abs=1)
    blocks, ratio = blocks_after(PLAIN, {}, {"kv-cache-dtype": "fp8"})
    assert blocks == pytest.approx(40_000 * ratio, abs=1)


@pytest.mark.parametrize("facts", [WINDOWED, STATES])
@pytest.mark.parametrize(
    "change", [{"max-model-len": 8192}, {"gpu-memory-utilization": 0.7}, {"num-gpu-blocks-override": 9000}]
)
def test_effects_on_window_and_state_layers_are_not_modeled(facts: ModelFacts, change: dict[str, Any]) -> None:
    (flag,) = change
    reason = blocks_after(facts, {}, change)[0]
    assert str(reason).startswith(f"The effect of {flag} on models with layers that keep a window or a state")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"speculative-config": "{}"}, "speculative decoding"),
        ({"speculative-config.method": "ngram"}, "speculative decoding"),
        ({"spec-method": "ngram", "spec-tokens": 3}, "speculative decoding"),
        ({"kv-transfer-config": "{}"}, "kv-transfer-config"),
        ({"kv-transfer-config.kv_connector": "NixlConnector"}, "kv-transfer-config"),
        ({"scheduling-policy": "priority"}, "scheduling-policy"),
        ({"pipeline-parallel-size": 1, "scheduling-policy": "fcfs"}, ""),
    ],
)
def test_unmodeled_schedulers_are_named_in_any_spelling(flags: dict[str, Any], named: str) -> None:
    found = blocks_after(PLAIN, flags, {"max-num-seqs": 100})[0]
    assert str(found).startswith(f"It runs with {named}," if named else "2"), found


@pytest.mark.parametrize(("seqs", "step", "graphs"), [(24, 4096, 48), (256, 4096, 512), (256, 256, 256)])
def test_cuda_graphs_reach_twice_as_many_tokens_as_sequences(seqs: int, step: int, graphs: int) -> None:
    flags = {"max-num-seqs": seqs, "max-num-batched-tokens": step, "max-model-len": 4096}
    details: Any = SimpleNamespace(engine=None, gpu_name="NVIDIA L40S")
    assert limits_of(flags, details, None, CacheConfig(1000, 16, True)).graphs == graphs


def test_run_without_the_flag_uses_vllms_default_tokens_per_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[int] = []

    class Seen:
        def evidence(self, _: int, budget: int, longest: int) -> Never:
            asked.append(budget)
            raise NoEvidenceError(f"nothing of {longest} tokens")

    monkeypatch.setattr(predictions, "unpack", lambda _: SimpleNamespace(engine=None, gpu_name="NVIDIA L40S"))
    monkeypatch.setattr(predictions, "_seen", lambda *_: Seen())
    record: Any = SimpleNamespace(current=SimpleNamespace(spec=SimpleNamespace(details={})))
    kept: Any = SimpleNamespace(settled=False, changed={})
    before: Any = SimpleNamespace(id=1)
    for flags in ({}, {"max-num-batched-tokens": 512}):
        run: Any = SimpleNamespace(
            before=1, ready_at=1.0, ended_at=2.0, generation=2, changed=(), flags={"max-model-len": 4096, **flags}
        )
        assert predictions._settle(tmp_path, record, kept, before, run, 16) is kept
    assert asked == [batch_defaults("NVIDIA L40S", 44.0, NEWEST)[1], 512]
