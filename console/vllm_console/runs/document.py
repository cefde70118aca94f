"""Runs and comparisons as JSON documents (a contract)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vllm_console.history.energy import FIGURES as ENERGY
from vllm_console.history.energy import Tariff, energy_costs
from vllm_console.metrics.quantile import Quantile
from vllm_console.runs.compare import QUANTILES, ComparedFigure, Comparison, Factor, Side
from vllm_console.runs.measurement import newest_ramp
from vllm_console.runs.startup import saved
from vllm_console.runs.store import KEY_QUANTILES, FlagChange, Run
from vllm_console.runs.text import notes, verdict_text


def run_document(run: Run, runs: Sequence[Run] = ()) -> dict[str, Any]:
    """A run as printed by ``runs --json``; ``runs`` are all runs, newest first, for comparing its start."""
    earlier = [one for one in runs if one.server == run.server and one.id < run.id]
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
        "startup": dict(run.startup) or None,
        "startup_saved": [
            {"measure": one.measure, "seconds": round(one.seconds, 2), "before": one.before.id}
            for one in saved(run, earlier)
        ],
        "memory": dict(run.report) or None,
        "exit": dict(run.ended) or None,
        "cause": run.cause or None,
        "windows": run.windows,
        "last_at": run.last_at,
        "figures": _key_figures(run),
        "finding_minutes": {code: round(minutes, 1) for code, minutes in run.findings.items()},
        "measurements": [found.document() for found in run.measurements],
        "judged_from_history_until": run.judged_until,
        "server_removed": run.removed,
        "replayable": run.replayable,
    }


def _key_figures(run: Run) -> dict[str, Any]:
    """The figures; a quantile known only to its bucket is null, next to the ends of the bucket."""
    bounded = {name: None for name in KEY_QUANTILES if name not in run.figures and f"{name}_below" in run.figures}
    opened = {name: None for name in KEY_QUANTILES if name not in run.figures and f"{name}_above" in run.figures}
    return {**bounded, **opened, **run.figures}


def comparison_document(found: Comparison, tariff: Tariff | None = None) -> dict[str, Any]:
    """A comparison as printed by ``compare --json``."""
    return {
        "verdict": str(found.verdict),
        "kept": found.kept,
        "sentence": verdict_text(found),
        "notes": list(notes(found)),
        "changed": [_change(change) for change in found.differences],
        "before": _side(found.before),
        "after": _side(found.after),
        "traffic": {"likeness": str(found.traffic), "factors": [_factor(factor) for factor in found.factors]},
        "figures": [_figure(figure) for figure in found.figures],
        "energy_cost": _energy_cost(found, tariff),
    }


def _energy_cost(found: Comparison, tariff: Tariff | None) -> dict[str, Any] | None:
    """The energy cost of a million tokens; None without a price or known energy."""
    sides = {figure.key: (figure.before, figure.after) for figure in found.figures if figure.key in ENERGY}
    if tariff is None or not sides:
        return None
    costs = {
        when: energy_costs({key: both[at] for key, both in sides.items() if both[at] is not None}, tariff)
        for at, when in enumerate(("before", "after"))
    }
    return {**costs, "currency": tariff.currency}


def _change(change: FlagChange) -> dict[str, Any]:
    return {"flag": change.flag, "before": change.before, "after": change.after}


def _side(side: Side) -> dict[str, Any]:
    ramp = newest_ramp(side.run.measurements)
    return {
        "run": side.run.id,
        "server": side.run.server,
        "generation": side.run.generation,
        "windows": side.windows,
        "compared": side.compared,
        "ceiling_requests_per_second": ramp.ceiling_requests_per_second if ramp is not None else None,
        "minutes_missing": math.ceil(side.minutes_missing),
        "since": side.since,
        "until": side.until,
    }


def _factor(factor: Factor) -> dict[str, Any]:
    return {
        "name": factor.key,
        **_factor_side("before", factor.before, factor.open[0]),
        **_factor_side("after", factor.after, factor.open[1]),
        "change": factor.change,
        "likeness": str(factor.likeness),
        **({"exact": factor.exact} if factor.key.endswith("p95") else {}),
    }


def _factor_side(name: str, value: float | None, is_open: bool) -> dict[str, Any]:
    return {name: None, f"{name}_above": value} if is_open else {name: value}


def _figure(figure: ComparedFigure) -> dict[str, Any]:
    return {
        "name": figure.key,
        "unit": figure.unit,
        **_sided("before", figure.before, figure.buckets[0]),
        **_sided("after", figure.after, figure.buckets[1]),
        "change": None if figure.incomparable else figure.change,
        "low": None if any(figure.bounded) else figure.low,
        "high": None if any(figure.bounded) else figure.high,
        "verdict": str(figure.verdict) if figure.verdict is not None else None,
        "goal": figure.objective,
        **({"exact": figure.exact} if figure.key in QUANTILES else {}),
    }


def _sided(name: str, value: float | None, bucket: Quantile | None) -> dict[str, Any]:
    """One side of a figure; a quantile with the ends of its bucket, and null if that has only one end."""
    if bucket is None:
        return {name: value}
    return {name: bucket.value, f"{name}_below": bucket.below, f"{name}_above": bucket.above}
