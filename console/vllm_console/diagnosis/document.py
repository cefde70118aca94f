"""A diagnosis as the JSON document of ``diagnose --json``, and as lines for people. Pure."""

from __future__ import annotations

from typing import Any

from vllm_console.diagnosis.model import Diagnosis, Remedy
from vllm_launchers.plan.flags import flag_words
from vllm_launchers.plan.model import Changes


def diagnosis_document(diagnosis: Diagnosis) -> dict[str, Any]:
    """``cause``, ``confidence``, ``line``, ``evidence``, ``explanation``, ``remedies``, ``also``."""
    return {
        "cause": diagnosis.cause.value,
        "confidence": diagnosis.confidence,
        "line": diagnosis.line,
        "evidence": diagnosis.evidence,
        "explanation": diagnosis.explanation,
        "remedies": [remedy_document(remedy) for remedy in diagnosis.remedies],
        "also": [cause.value for cause in diagnosis.also],
    }


def remedy_document(remedy: Remedy) -> dict[str, Any]:
    """``set``, ``unset``, ``why``, ``price``."""
    return {
        "set": dict(remedy.changes.set),
        "unset": list(remedy.changes.unset),
        "why": remedy.why,
        "price": remedy.price,
    }


def change_words(changes: Changes) -> str:
    """A change as a person would type it: ``--max-num-seqs 128``, ``without --swap-space``."""
    parts = [" ".join(flag_words(changes.set))] if changes.set else []
    parts += [f"without --{name}" for name in changes.unset]
    return ", ".join(parts)


def diagnosis_lines(diagnosis: Diagnosis) -> list[str]:
    """For people: what it is, the line that shows it, and what would mend it."""
    sure = "" if diagnosis.confidence >= 0.9 else f" (confidence {diagnosis.confidence:.0%})"
    lines = [f"{diagnosis.cause}{sure}: {diagnosis.explanation}"]
    if diagnosis.evidence:
        lines += ["", f"line {diagnosis.line}: {diagnosis.evidence}"]
    if diagnosis.remedies:
        lines += ["", "What would mend it, the best first:"]
    for remedy in diagnosis.remedies:
        words = change_words(remedy.changes)
        lines.append(f"  {words}" if words else f"  {remedy.why}")
        if words:
            lines.append(f"      {remedy.why}")
        if remedy.price:
            lines.append(f"      Price: {remedy.price}")
    if diagnosis.also:
        lines += ["", f"May also play a part: {', '.join(diagnosis.also)}"]
    return lines
