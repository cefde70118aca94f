"""What was predicted of a change next to what was measured, in words."""

from __future__ import annotations

from vllm_console.prediction.score import KeptPrediction, outcomes
from vllm_console.text import rate, seconds

TITLES = {
    f"{key}_{part}": f"{title} {part}"
    for key, title in (("ttft", "TTFT"), ("itl", "ITL"), ("e2e", "end-to-end"))
    for part in ("p50", "p90", "p99", "mean")
} | {"tokens_per_second": "tokens/s"}


LEAST_DRIFT = 0.01
"""A smaller difference of the engine's speed is not told."""


def outcome_lines(kept: KeptPrediction) -> list[str]:
    """A table of the figures of which both are known, and sentences; the machine's drift on a line of its own."""
    if kept.unlike:
        return ["A prediction was made of this change, for other traffic than came: it can't be judged."]
    lines = [f"  {'':<17}{'PREDICTED':>10}   {'90% INTERVAL':<22}{'MEASURED':>10}"]
    for one in outcomes(kept):
        form = seconds if one.name != "tokens_per_second" else _rate
        interval = f"{form(one.low)} to {form(one.high)}"
        shown = {form(bound) for bound in (one.low, one.high)}  # what reads like a bound is not told to be beyond it
        within = "within" if one.within or form(one.measured) in shown else "! outside"
        title = TITLES.get(one.name, one.name)
        lines.append(f"  {title:<17}{form(one.predicted):>10}   {interval:<22}{form(one.measured):>10}  {within}")
    if kept.drift is not None and abs(kept.drift) >= LEAST_DRIFT:
        slower = "slower" if kept.drift > 0 else "faster"
        lines.append(f"The same steps are {abs(kept.drift):.0%} {slower} since the restart: the machine or the engine.")
    if kept.outside:
        lines.append("This prediction was outside what the server had shown; it does not count in the track record.")
    return lines


def _rate(value: float | None) -> str:
    return rate(value, "tok")
