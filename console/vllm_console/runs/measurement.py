"""A client's measurement of a run: a ramp, or the result of another tool. Stored with the run as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from vllm_console.text import percent, seconds
from vllm_launchers.units import three_digits

RAMP = "ramp"

_LIMITS = {
    "ttft_p99_seconds": "TTFT p99",
    "itl_p99_seconds": "ITL p99",
    "preemption_rate": "preemptions",
    "kv_cache_usage": "KV cache usage",
    "queue": "a growing queue",
    "failures": "failed requests",
    "client": "the client",
    "server": "the server, which stopped answering",
}


def limit_text(name: str) -> str:
    """The limiting factor of a rate, as text."""
    return _LIMITS.get(name, name)


def attained_text(share: float | None) -> str:
    """The share of requests that met the objectives: ``99.2%``."""
    return "100%" if share is not None and share >= 0.9995 else percent(share, 1)


class Measurement(msgspec.Struct, frozen=True):
    """One measurement. ``kind`` is ``ramp``, ``vllm bench serve`` or ``guidellm``; ``at`` when it ended (Unix seconds).

    ``steps`` are as printed by ``ramp --json``, one per rate; fields that a tool does not report are null.
    """

    kind: str
    at: float
    steps: tuple[Mapping[str, Any], ...]
    ceiling_requests_per_second: float | None = None
    goodput: float | None = None
    limited_by: str | None = None
    sentence: str = ""
    limits: Mapping[str, float] = msgspec.field(default_factory=dict)
    """The objectives of a ramp."""

    @classmethod
    def of_ramp(cls, found: Mapping[str, Any], at: float, limits: Mapping[str, float]) -> Measurement:
        """A finished ramp, from what ``ramp --json`` prints."""
        ceiling, limited_by = found["ceiling_requests_per_second"], found["limited_by"]
        return cls(RAMP, at, tuple(found["steps"]), ceiling, found["goodput"], limited_by, found["sentence"], limits)

    def document(self) -> dict[str, Any]:
        """The measurement as printed by ``runs --json``."""
        return {
            "kind": self.kind,
            "at": self.at,
            "steps": [dict(step) for step in self.steps],
            "ceiling_requests_per_second": self.ceiling_requests_per_second,
            "goodput": self.goodput,
            "limited_by": self.limited_by,
            "sentence": self.sentence,
        }

    @property
    def summary(self) -> str:
        """The ceiling, or the rates measured, in a few words."""
        if self.ceiling_requests_per_second is not None:
            return f"ceiling {three_digits(self.ceiling_requests_per_second)} req/s"
        if self.kind == RAMP:
            return "the objectives held at no rate" if self.limited_by else "ceiling not reached"
        rates = [step["rate"] for step in self.steps if step.get("rate") is not None]
        if not rates:
            return "rate unknown"
        ends = dict.fromkeys((min(rates), max(rates)))
        return f"{' to '.join(map(three_digits, ends))} req/s"

    def curve(self, latency: str) -> list[tuple[float, float]]:
        """Rate and p99 (seconds) of ``ttft_seconds`` or ``itl_seconds``, by rate; the last value of a repeated rate.

        If only a lower bound of a p99 is known, that is used.
        """
        found: dict[float, float] = {}
        for step in self.steps:
            known = step.get(latency) or {}
            value = known.get("p99") or known.get("p99_above")
            if step.get("rate") and value:
                found[step["rate"]] = value
        return sorted(found.items())


def newest_ramp(measurements: Sequence[Measurement]) -> Measurement | None:
    """The newest measurement with a curve; None if there is none."""
    return next((one for one in reversed(measurements) if len(one.curve("ttft_seconds")) > 1), None)


# -- the curve as text ------------------------------------------------------------------------------------------------

WIDTH, HEIGHT = 28, 7


class RampCurve(msgspec.Struct, frozen=True):
    """One line of a plot: its mark, its points (rate, seconds), and its ceiling in requests per second."""

    mark: str
    points: Sequence[tuple[float, float]]
    ceiling: float | None = None


def plot(title: str, curves: Sequence[RampCurve], limit: float | None) -> list[str]:
    """Plot curves over the rate, both axes logarithmic: a dashed line is the limit, bars are the ceilings.

    Returns lines of equal width; none without a point.
    """
    points = [point for curve in curves for point in curve.points]
    if not points:
        return []
    xs = [x for x, _ in points] + [curve.ceiling for curve in curves if curve.ceiling is not None]
    ys = [y for _, y in points] + ([limit] if limit is not None else [])
    left, right = _ends(xs)
    bottom, top = _ends(ys)

    def column(x: float) -> int:
        return round((math.log(x) - left) / (right - left) * (WIDTH - 1))

    def row(y: float) -> int:
        return HEIGHT - 1 - round((math.log(y) - bottom) / (top - bottom) * (HEIGHT - 1))

    cells = [[" "] * WIDTH for _ in range(HEIGHT)]
    if limit is not None:
        cells[row(limit)] = list("- " * (WIDTH // 2))
    for line in cells:
        for curve in curves:
            if curve.ceiling is not None:
                line[column(curve.ceiling)] = "|"
    for mark, x, y in ((curve.mark, x, y) for curve in curves for x, y in curve.points):
        cells[row(y)][column(x)] = mark
    labels = {row(math.exp(at)): seconds(math.exp(at)) for at in (bottom, top)}
    if limit is not None:
        labels.setdefault(row(limit), seconds(limit))
    lines = [f"{title:<{WIDTH + 7}}"]
    lines += [
        f"{labels.get(index, ''):>6}{'+' if index in labels else '|'}{''.join(line)}"
        for index, line in enumerate(cells)
    ]
    ends = three_digits(math.exp(left)), f"{three_digits(math.exp(right))} req/s"
    lines.append(f"{'':7}{ends[0]}{ends[1]:>{WIDTH - len(ends[0])}}")
    return lines


def plots_side_by_side(left: Sequence[str], right: Sequence[str]) -> list[str]:
    """Two plots next to each other."""
    if not left or not right:
        return [line.rstrip() for line in (*left, *right)]
    return [f"{one}   {other}".rstrip() for one, other in zip(left, right, strict=True)]


def plots(curves: Sequence[tuple[str, Measurement]]) -> list[str]:
    """TTFT and ITL p99 over the rate, for one or more measurements, each with its mark."""
    limits = next((found.limits for _, found in curves if found.limits), {})
    panels = []
    for title, latency, limit in (
        ("TTFT p99", "ttft_seconds", "ttft_p99_seconds"),
        ("ITL p99", "itl_seconds", "itl_p99_seconds"),
    ):
        drawn = [RampCurve(mark, found.curve(latency), found.ceiling_requests_per_second) for mark, found in curves]
        panels.append(plot(title, drawn, limits.get(limit)))
    return plots_side_by_side(*panels)


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Logarithms of the smallest and largest value, moved apart if nearly equal."""
    low, high = math.log(min(values)), math.log(max(values))
    return (low, high) if high - low > 0.1 else (low - 0.5, high + 0.5)
