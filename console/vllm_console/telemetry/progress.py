"""How far a start has come, how long it will go on, and whether it still gives a sign of life. Pure.

Measured by an earlier start: as long as each stage took then, so much of the way it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from vllm_console.telemetry.model import Stage
from vllm_launchers.plan.budget.model import EngineReport

Durations = Mapping[str, float]
"""Seconds by stage, in the order of the stages."""

DOWNLOAD = "download"
"""A stage that the next start does not have: it measures no way."""

FIRST = "imports"
"""The stage that the way is measured from: nothing is said before it."""

KNEE = 0.8
"""Up to this share of a stage's usual time its progress goes with the clock; from then on ever slower."""

LATE = 1.5
"""A stage that takes so many times its usual time, and `GRACE_SECONDS` more, is overdue."""
GRACE_SECONDS = 5.0

QUIET_SECONDS: Durations = {
    "process": 60,
    "imports": 90,
    "config": 120,
    "download": 60,
    "weights": 180,
    "compile": 300,
    "memory profile": 180,
    "kv cache": 90,
    "graphs": 180,
    "warm-up": 180,
    "server": 60,
}
"""How long a stage may be silent: a large model's weights, a compilation and CUDA graphs print nothing for minutes."""
QUIET_TIMES = 3.0
"""A stage that took long before may be silent for this many times that."""


@dataclass(frozen=True, slots=True)
class Progress:
    """``share`` of the way, from 0 to 1, and seconds left (None where a stage takes longer than it did).

    ``usual`` is how long the earlier start took in all, without a download.
    """

    share: float
    seconds_left: float | None
    usual: float


@dataclass(frozen=True, slots=True)
class Startup:
    """A way up beyond its stages. ``progress`` is None where no earlier start is known, or when it is over.

    ``quiet_seconds`` is how long neither log nor model cache has grown, once that is longer than usual; ``report`` what
    the engine said of its memory.
    """

    progress: Progress | None = None
    quiet_seconds: float | None = None
    report: EngineReport = field(default_factory=EngineReport)


def progress(stages: Sequence[Stage], earlier: Durations, now: float) -> Progress | None:
    """How far a start is by the durations of an earlier one; None where these say nothing.

    Stages that took time before and have not begun count as done once a later one has.
    """
    usual = _joined(earlier)
    whole = sum(usual.values())
    if not stages or whole <= 0:
        return None
    stages = [replace(stages[0], name=FIRST), *stages[1:]]
    present = stages[-1]
    if present.name == FIRST:
        present = replace(present, started_at=stages[0].started_at)
    order = list(usual)
    begun = {stage.name for stage in stages[:-1]}
    furthest = max((order.index(stage.name) for stage in stages if stage.name in usual), default=-1)
    passed = {name for name in usual if name in begun or order.index(name) < furthest} - {present.name}
    done = sum(usual[name] for name in passed)
    rest = sum(seconds for name, seconds in usual.items() if name not in passed and name != present.name)
    if present.seconds is not None:
        done += usual.get(present.name, 0.0)
        return Progress(min(1.0, done / whole), rest, whole)
    if present.name not in usual:
        return Progress(min(1.0, done / whole), None, whole)
    expected, spent = usual[present.name], max(0.0, now - present.started_at)
    share = share_of(present.detail)
    inner = share if share is not None else _by_clock(spent, expected)
    overdue = spent > LATE * expected + GRACE_SECONDS
    left = None if overdue else max(0.0, expected - spent) + rest
    return Progress(min(1.0, (done + inner * expected) / whole), left, whole)


def _joined(earlier: Durations) -> dict[str, float]:
    """What a start is measured by. Process and imports are one: the first line of log comes late in the imports."""
    usual = {FIRST: 0.0}
    for name, seconds in earlier.items():
        if name != DOWNLOAD:
            joined = FIRST if name == "process" else name
            usual[joined] = usual.get(joined, 0.0) + max(0.0, seconds)
    return usual


def _by_clock(spent: float, expected: float) -> float:
    """The share of a stage that the time spent in it stands for: never quite all of it."""
    if expected <= 0:
        return 0.0
    share = spent / expected
    if share <= KNEE:
        return share
    beyond = (share - KNEE) / (1 - KNEE)
    return KNEE + (1 - KNEE) * (1 - 1 / (1 + beyond))


def share_of(detail: str) -> float | None:
    """The share in a stage's figure, where it ends in a percentage: ``61 %`` is 0.61, ``4 of 15 GiB, 28 %`` 0.28."""
    text = detail.rstrip()
    if not text.endswith("%"):
        return None
    try:
        share = float(text.removesuffix("%").replace(",", " ").split()[-1]) / 100
    except (ValueError, IndexError):
        return None
    return share if 0 <= share <= 1 else None


def too_quiet(stages: Sequence[Stage], earlier: Durations, silent_seconds: float) -> float | None:
    """``silent_seconds`` where that is longer than the present stage may be silent; else None."""
    if not stages or stages[-1].seconds is not None:
        return None
    name = stages[-1].name
    limit = max(QUIET_SECONDS.get(name, 180.0), QUIET_TIMES * earlier.get(name, 0.0))
    return silent_seconds if silent_seconds > limit else None


def durations(stages: Sequence[Stage]) -> Durations:
    """What to keep of a start that is over, to measure the next one by."""
    return {stage.name: stage.seconds for stage in stages if stage.seconds is not None and stage.name != DOWNLOAD}
