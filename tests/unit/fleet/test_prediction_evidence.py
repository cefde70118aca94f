"""What a run's records must tell before a prediction is made from them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Never

import pytest
from msgspec.structs import replace

from fakes.virtual_records import record, traffic
from vllm_console.fleet import predictions
from vllm_console.fleet.predictions import RunRecording, evidence_of, limits_after, limits_of
from vllm_console.fleet.verbs import FleetError
from vllm_console.metrics.parse import CacheConfig
from vllm_console.prediction.evidence import NoEvidenceError
from vllm_launchers.engine_model.gpus import batch_defaults
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.vllm.release_defaults import NEWEST


def test_where_every_step_had_a_preempted_request_it_is_reported_and_nothing_fails() -> None:
    found = record("--max-num-seqs 48 --max-model-len 4096", traffic(100, 2.6, seed=1, shared=0))
    whole, part = evidence_of(RunRecording(found.requests, found.steps), "chat", found.limits)
    assert whole.steps
    assert part.steps
    preempted = [one._replace(preemptions=1) for one in found.requests]
    with pytest.raises(FleetError, match="no recorded step ran without a preempted request"):
        evidence_of(RunRecording(preempted, found.steps), "chat", found.limits)


def test_where_no_step_is_known_for_another_reason_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = record("--max-num-seqs 48 --max-model-len 4096", traffic(100, 2.6, seed=1, shared=0))
    seen = RunRecording(found.requests, found.steps)
    whole, _ = evidence_of(seen, "chat", found.limits)
    unknown = replace(whole, steps=(), flaw="no steps were recorded")
    monkeypatch.setattr(predictions, "gather", lambda *_, **__: unknown)
    with pytest.raises(FleetError, match=r"^chat: no steps were recorded: what a step costs is not known$"):
        evidence_of(seen, "chat", found.limits)


def test_a_warning_of_the_present_flags_hides_no_error_of_the_changed_ones() -> None:
    def plan(level: Level) -> Any:
        return SimpleNamespace(findings=(PlanFinding("flag_value", level, f"{level} of a value"),), flags={})

    details: Any = SimpleNamespace(flags={"tensor-parallel-size": 2})
    cache = CacheConfig(1000, 16, True)
    warned, refused = plan(Level.WARNING), plan(Level.ERROR)
    assert limits_after(details, None, cache, warned, refused) == "It would not start: error of a value."
    runs = limits_after(details, None, cache, refused, refused)
    assert "tensor-parallel-size" in str(runs), "it runs despite the same error"


@pytest.mark.parametrize(("seqs", "step", "graphs"), [(24, 4096, 48), (256, 4096, 512), (256, 256, 256)])
def test_cuda_graphs_reach_to_twice_as_many_tokens_as_sequences(seqs: int, step: int, graphs: int) -> None:
    flags = {"max-num-seqs": seqs, "max-num-batched-tokens": step, "max-model-len": 4096}
    details: Any = SimpleNamespace(engine=None, gpu_name="NVIDIA L40S")
    assert limits_of(flags, details, None, CacheConfig(1000, 16, True)).graphs == graphs


def test_a_run_without_that_flag_is_scored_with_the_tokens_per_step_that_vllm_takes(
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
