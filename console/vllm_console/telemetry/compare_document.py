"""Runs and comparisons as JSON documents (a contract)."""

from __future__ import annotations

from typing import Any

from vllm_console.telemetry.comparison import Comparison, Factor, Figure, Side
from vllm_console.telemetry.ledger import FlagChange, Run


def run_document(run: Run) -> dict[str, Any]:
    """A run as ``runs --json`` prints it."""
    return {
        "id": run.id,
        "server": run.server,
        "generation": run.generation,
        "preset": run.preset or None,
        "model": run.model or None,
        "engine": run.engine or None,
        "engine_version": run.version or None,
        "engine_build": run.build or None,
        "gpus": list(run.gpus),
        "gpu_kind": run.gpu_kind or None,
        "flags": dict(run.flags),
        "changed": [_change(change) for change in run.changed],
        "before": run.before,
        "started_at": run.started_at,
        "ready_at": run.ready_at,
        "ended_at": run.ended_at,
        "restarts": run.attempts,
        "stages": [{"name": name, "seconds": seconds, "detail": detail} for name, seconds, detail in run.stages],
        "memory": dict(run.report) or None,
        "exit": dict(run.ended) or None,
        "cause": run.cause or None,
        "windows": run.windows,
        "last_at": run.last_at,
        "figures": dict(run.figures),
        "condition_minutes": {code: round(minutes, 1) for code, minutes in run.conditions.items()},
        "judged_from_history_until": run.judged_until,
    }


def comparison_document(found: Comparison) -> dict[str, Any]:
    """A comparison as ``compare --json`` prints it."""
    return {
        "verdict": str(found.verdict),
        "sentence": found.sentence,
        "notes": list(found.notes),
        "changed": [_change(change) for change in found.differences],
        "before": _side(found.before),
        "after": _side(found.after),
        "traffic": {"likeness": str(found.traffic), "factors": [_factor(factor) for factor in found.factors]},
        "figures": [_figure(figure) for figure in found.figures],
    }


def _change(change: FlagChange) -> dict[str, Any]:
    return {"flag": change.flag, "before": change.before, "after": change.after}


def _side(side: Side) -> dict[str, Any]:
    return {
        "run": side.run.id,
        "server": side.run.server,
        "generation": side.run.generation,
        "windows": side.windows,
        "compared": side.compared,
        "minutes_missing": side.minutes_missing,
    }


def _factor(factor: Factor) -> dict[str, Any]:
    return {
        "name": factor.key,
        "before": factor.before,
        "after": factor.after,
        "change": factor.change,
        "likeness": str(factor.likeness),
    }


def _figure(figure: Figure) -> dict[str, Any]:
    return {
        "name": figure.key,
        "unit": figure.unit,
        "before": figure.before,
        "after": figure.after,
        "change": figure.change,
        "low": figure.low,
        "high": figure.high,
        "verdict": str(figure.verdict) if figure.verdict is not None else None,
        "goal": figure.goal,
    }
