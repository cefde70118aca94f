"""What earlier runs of a server say about fixes that would bring their flags back. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vllm_console.diagnosis.finding import Finding, Fix, title_of_code
from vllm_console.text import round_duration
from vllm_launchers.plan.model import Changes, Flags, same_value
from vllm_launchers.vllm.flags.changes import changed

if TYPE_CHECKING:
    from vllm_console.runs.store import PastRun

LEAST_SECONDS = 120.0
"""A finding that was open for less in an earlier run says nothing about its flags."""


def with_experience(finding: Finding, flags: Flags, earlier: Sequence[PastRun], codes: Sequence[str]) -> Finding:
    """Add to each fix's trade-off which findings an earlier run with the fix's flags had; such fixes come last.

    ``earlier`` is newest first. ``codes`` are the findings that count: those about what requests experience.
    """
    known = [(fix, _experience(fix.changes, flags, earlier, codes)) for fix in finding.fixes]
    if not any(sentence for _, sentence in known):
        return finding
    known.sort(key=lambda one: bool(one[1]))
    return replace(finding, fixes=tuple(_with_tradeoff(fix, sentence) for fix, sentence in known))


def _with_tradeoff(fix: Fix, sentence: str) -> Fix:
    return replace(fix, tradeoff=f"{fix.tradeoff} {sentence}".strip()) if sentence else fix


def _experience(changes: Changes, flags: Flags, earlier: Sequence[PastRun], codes: Sequence[str]) -> str:
    """One sentence about the newest earlier run with exactly the flags after ``changes``; empty if nothing is known."""
    if changes.empty:
        return ""
    after = changed(flags, changes)
    run = next((run for run in earlier if _same(run.flags, after)), None)
    if run is None:
        return ""
    held: dict[str, float] = defaultdict(float)
    for code, since, until in run.findings:
        if code in codes:
            held[code] += until - since
    longest = sorted(((length, code) for code, length in held.items() if length >= LEAST_SECONDS), reverse=True)
    found = " and ".join(f"{title_of_code(code)} for {round_duration(length)}" for length, code in longest[:2])
    return f"Run {run.generation} used these flags and had: {found}." if found else ""


def _same(one: Flags, other: Flags) -> bool:
    return one.keys() == other.keys() and all(same_value(one[name], other[name]) for name in one)
