"""The order of several findings."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from vllm_console.diagnosis.finding import Finding, Fix, Severity
from vllm_console.diagnosis.live.findings import RULES, findings
from vllm_console.diagnosis.live.rule import Evidence, Judgment, Rule
from vllm_console.history.frames import Frame
from vllm_console.metrics.sample import EngineSample
from vllm_launchers.vllm.flags.changes import Changes

FRAMES = [Frame(1, at * 10.0, at * 10.0 + 10, EngineSample(generation_tokens_total=50.0)) for at in range(16)]
FIX = (Fix(Changes({"max-num-seqs": 24}), "More run at once."),)


class Held(Rule):
    """A finding that has lasted since its first bad frame; it relates to others as the real one of that code."""

    def __init__(self, code: str, begins: int, fixes: tuple[Fix, ...] = FIX) -> None:
        self.code, self.begins, self.fixes = code, begins, fixes
        real = next(rule for rule in RULES if rule.code == code)
        self.explained_by, self.missed_objective, self.optional = (
            real.explained_by,
            real.missed_objective,
            real.optional,
        )

    def verdicts(self, evidence: Evidence) -> Sequence[Judgment]:
        return [Judgment.HOLDS if at >= self.begins else Judgment.FAILS for at in range(len(evidence.frames))]

    def describe(self, _evidence: Evidence, since: float) -> Finding:
        return Finding(self.code, Severity.WARNING, since, "", "", fixes=self.fixes)


@pytest.mark.parametrize(
    ("rules", "order"),
    [
        ([Held("prefill_contention", 4), Held("slow_first_token", 8)], ["slow_first_token", "prefill_contention"]),
        ([Held("prefill_contention", 4), Held("slow_first_token", 8, ())], ["prefill_contention", "slow_first_token"]),
        ([Held("drafts_rejected", 4), Held("uneven_ranks", 8)], ["uneven_ranks", "drafts_rejected"]),
        ([Held("uneven_ranks", 8), Held("tensor_parallel_stalls", 6)], ["tensor_parallel_stalls", "uneven_ranks"]),
    ],
)
def test_missed_objective_with_a_fix_comes_first_and_one_without_last(rules: list[Held], order: list[str]) -> None:
    found = findings(Evidence(now=160.0, ready_at=0.0, frames=FRAMES), rules)
    assert [one.code for one in found] == order


def test_findings_are_explained_by_findings_that_exist() -> None:
    assert {code for rule in RULES for code in rule.explained_by} <= {rule.code for rule in RULES}


def test_only_findings_of_traffic_stay_through_its_pauses() -> None:
    assert all(rule.of_traffic for rule in RULES if rule.through_pauses)
