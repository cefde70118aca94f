"""Findings of a server whose flags are not known: what depends on a flag's value is left out. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from vllm_console.diagnosis.finding import Finding, Fix, Measure, Severity
from vllm_console.diagnosis.live.engine import RESTART
from vllm_launchers.plan.model import Changes

ELSEWHERE = Fix(Changes(), "Its flags are not known here, so no change of them is offered: see how it was started.")

RESTART_THERE = Fix(Changes(), "Restart it where it was started; requests in flight are lost.")

QUEUED = "Requests wait in the queue although the KV cache has room: its limit of running requests may be reached."
QUEUED_FIRST = "Requests wait in the queue."

OF_DEFAULTS = frozenset({"prefix_cache_idle", "prefix_cache_off", "context_unused"})
"""Findings that follow from a flag's value alone."""


def without_flags(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings, with nothing in them that follows from a flag which may be set otherwise."""
    return tuple(_without_flags(finding) for finding in findings if finding.code not in OF_DEFAULTS)


def _without_flags(finding: Finding) -> Finding:
    kept = (fix for fix in finding.fixes if not (fix.changes.set or fix.changes.unset))
    fixes = tuple(RESTART_THERE if fix == RESTART else fix for fix in kept)
    if finding.severity is not Severity.GOOD and len(fixes) < len(finding.fixes):
        fixes = (*fixes, ELSEWHERE)
    measures = tuple(
        Measure(one.name, one.value) if one.source.startswith("max-num-seqs") else one for one in finding.measures
    )
    cause = finding.cause
    if finding.code == "oversubscribed_sequences":
        cause = QUEUED
    elif finding.code == "slow_first_token" and "run at once" in cause:
        cause = QUEUED_FIRST
    return replace(finding, fixes=fixes, measures=measures, cause=cause)
