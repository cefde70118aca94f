"""What a run's records must tell before a prediction is made from them."""

from __future__ import annotations

import pytest

from fakes.virtual_records import record, traffic
from vllm_console.fleet.predictions import RunRecording, evidence_of
from vllm_console.fleet.verbs import FleetError


def test_where_every_step_had_a_preempted_request_it_is_reported_and_nothing_fails() -> None:
    found = record("--max-num-seqs 48 --max-model-len 4096", traffic(100, 2.6, seed=1, shared=0))
    whole, part = evidence_of(RunRecording(found.requests, found.steps), "chat", found.limits)
    assert whole.steps
    assert part.steps
    preempted = [one._replace(preemptions=1) for one in found.requests]
    with pytest.raises(FleetError, match="no recorded step ran without a preempted request"):
        evidence_of(RunRecording(preempted, found.steps), "chat", found.limits)
