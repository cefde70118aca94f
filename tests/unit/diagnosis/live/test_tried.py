"""Fixes that restore the flags of an earlier run report what happened in that run."""

from __future__ import annotations

from vllm_console.diagnosis.finding import Finding, Fix, Severity
from vllm_console.diagnosis.live.findings import OF_TRAFFIC
from vllm_console.diagnosis.live.fixes import with_experience
from vllm_console.runs.store import PastRun
from vllm_launchers.vllm.flags.changes import Changes

FLAGS = {"max-num-seqs": 16, "max-model-len": 4096}
FEWER = Fix(Changes({"max-num-seqs": 4}), "Shorter steps.", "TTFT can rise.")
SHORTER = Fix(Changes({"max-model-len": 2048}), "More requests fit.")
FINDING = Finding("slow_tokens", Severity.WARNING, 0.0, "ITL p99 is 113ms.", "Slow.", fixes=(FEWER, SHORTER))


def fixes(*earlier: PastRun) -> tuple[Fix, ...]:
    return with_experience(FINDING, FLAGS, earlier, OF_TRAFFIC).fixes


def run(number: int, *findings: tuple[str, float, float], **flags: int) -> PastRun:
    return PastRun(number, 0.0, findings=findings, flags={**FLAGS, "max-num-seqs": 4, **flags})


def test_earlier_run_with_these_flags_is_a_tradeoff_and_ranks_last() -> None:
    first, last = fixes(run(1, ("slow_first_token", 0.0, 400.0), ("slow_first_token", 500.0, 820.0)))
    assert first == SHORTER
    assert last.changes == FEWER.changes
    assert last.tradeoff == "TTFT can rise. Run 1 used these flags and had: TTFT above objective for 12m."


def test_newest_matching_run_counts() -> None:
    older, newer = run(1, ("slow_first_token", 0.0, 720.0)), run(2)
    assert fixes(newer, older) == (FEWER, SHORTER)


def test_other_flags_and_short_or_unrelated_findings_are_ignored() -> None:
    bad = ("slow_first_token", 0.0, 720.0)
    assert fixes(run(1, bad, **{"max-model-len": 1024})) == FINDING.fixes
    assert fixes(run(1, bad, **{"max-num-batched-tokens": 512})) == FINDING.fixes
    assert fixes(run(1, ("slow_first_token", 0.0, 60.0), ("pcie_narrow", 0.0, 9000.0))) == FINDING.fixes
