"""Diagnoses and conditions as JSON documents, and as lines for people. Pure."""

from __future__ import annotations

from typing import Any

from vllm_console.diagnosis.model import Condition, Diagnosis, Remedy
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


def condition_document(condition: Condition) -> dict[str, Any]:
    """``code``, ``severity``, ``since`` (Unix seconds), ``symptom``, ``cause``, ``measures``, ``remedies``."""
    return {
        "code": condition.code,
        "severity": condition.severity.value,
        "since": condition.since,
        "symptom": condition.symptom,
        "cause": condition.cause,
        "measures": [
            {"name": one.name, "value": one.value, "limit": one.limit or None, "source": one.source or None}
            for one in condition.measures
        ],
        "remedies": [remedy_document(remedy) for remedy in condition.remedies],
    }


def condition_lines(condition: Condition, since: str) -> list[str]:
    """For people: what it is, since when (in words), the figures that show it, and what would mend it."""
    lines = [f"{condition.code} ({condition.severity}, {since}): {condition.symptom} {condition.cause}"]
    for measure in condition.measures:
        limit = f", limit {measure.limit}" if measure.limit else ""
        source = f" ({measure.source})" if measure.source else ""
        lines.append(f"  {measure.name} {measure.value}{limit}{source}")
    return lines + [f"  {line}" for remedy in condition.remedies for line in remedy_lines(remedy)]


def remedy_lines(remedy: Remedy) -> list[str]:
    """For people: the change, or what to do where it is none; why; its price."""
    words = change_words(remedy.changes)
    lines = [words, f"    {remedy.why}"] if words else [remedy.why]
    return [*lines, f"    Price: {remedy.price}"] if remedy.price else lines


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
    lines += [f"  {line}" for remedy in diagnosis.remedies for line in remedy_lines(remedy)]
    if diagnosis.also:
        lines += ["", f"May also play a part: {', '.join(diagnosis.also)}"]
    return lines
