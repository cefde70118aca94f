"""A server's objectives against what it did over a window: each with figure, limit and its source. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from vllm_console.diagnosis.conditions.rule import Situation
from vllm_console.format import duration, percent, seconds
from vllm_console.telemetry.model import EngineSample, Sample
from vllm_console.telemetry.window import combine, growths, quantiles, restarted
from vllm_launchers.presets.model import Objectives

STEP_SECONDS = 10.0
SUSTAINED_STEPS = 3
"""The KV cache's usage is that which held for three steps of ten seconds: one peak breaks nothing."""

MOSTLY = 0.9
"""Where usage is known for less of the window, that is told."""

NAMES = {
    "kv_cache_usage": "KV cache usage",
    "preemption_rate": "share of requests preempted",
    "ttft_p99_seconds": "TTFT p99",
    "itl_p99_seconds": "ITL p99",
}
"""Every objective of a preset, as people call it."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One objective. Shares go from 0 to 1, latencies are in seconds.

    ``value`` and ``ok`` are None where there was nothing to judge it by: not reported, or nothing served.
    ``seconds`` is how long it is known for, where that is not the whole window.
    """

    name: str
    value: float | None
    limit: float
    ok: bool | None
    source: str
    seconds: float | None = None

    @property
    def sentence(self) -> str:
        """For people: what it is, its limit, and where that is from."""
        title = NAMES[self.name]
        limit = f"{self._shown(self.limit)} ({self.source})"
        if self.value is None:
            return f"{title} could not be judged; its limit is {limit}"
        known = f"; it is known for {duration(self.seconds)} of the window" if self.seconds is not None else ""
        over = "above" if self.ok is False else "within"
        return f"{title} is {self._shown(self.value)}, {over} its limit of {limit}{known}"

    def _shown(self, value: float) -> str:
        if not self.name.endswith("_seconds"):
            return percent(value, 1)
        # Near the limit a rounded figure would read as the limit itself.
        shown = seconds(value)
        return f"{value:.3f}s" if shown == seconds(self.limit) and value != self.limit else shown


@dataclass(frozen=True, slots=True)
class Served:
    """What a server did over the samples of a window. None is 'not reported'.

    ``usage_seconds`` is for how much of it the KV cache's usage is known.
    """

    usage: float | None = None
    usage_seconds: float = 0.0
    counted: EngineSample | None = None
    running_min: float = 0.0
    running_max: float = 0.0

    @property
    def idle(self) -> bool:
        """Whether no request was served in it, as far as that is reported."""
        counted = self.counted
        if counted is None:
            return True
        moved = (counted.requests_finished_total, counted.generation_tokens_total, counted.prompt_tokens_total)
        return not any(moved) and self.running_max < 1


def served(samples: Sequence[Sample], often: Iterable[Sample] | None = None) -> Served:
    """What happened over these looks at one generation of a server, oldest first; engines may begin anew within.

    Where they are further apart than `STEP_SECONDS`, usage is judged by ``often``, which are not.
    """
    if not samples:
        return Served()
    usage, usage_seconds = _sustained_usage(samples if often is None else often)
    running = [combine(sample.engines.values()).requests_running or 0.0 for sample in samples]
    counted = combine(grown for before, after in _stretches(samples) for grown in growths(before, after))
    reported = len(samples) > 1 and any(sample.engines for sample in samples)
    return Served(usage, usage_seconds, counted if reported else None, min(running), max(running))


def _stretches(samples: Sequence[Sample]) -> Iterable[tuple[Sample, Sample]]:
    """First and last look of each stretch in which no engine began anew; a new start is counted from its begin."""
    first = last = samples[0]
    for sample in samples[1:]:
        known = last.engines
        anew = {label for label, one in sample.engines.items() if label in known and restarted(known[label], one)}
        if anew:
            yield first, last
            first = replace(last, engines={label: one for label, one in known.items() if label not in anew})
        last = sample
    yield first, last


def _sustained_usage(samples: Iterable[Sample]) -> tuple[float | None, float]:
    """The highest usage of the fullest engine that was reached in each of three steps in a row; how long is known.

    Steps without a look end a row: the highest of three looks that are minutes apart are peaks and no more.
    """
    steps: dict[int, float] = {}
    for sample in samples:
        usages = [one.kv_cache_usage for one in sample.engines.values() if one.kv_cache_usage is not None]
        if usages:
            step = int(sample.at // STEP_SECONDS)
            steps[step] = max(*usages, steps.get(step, 0.0))
    if not steps:
        return None, 0.0
    length = min(SUSTAINED_STEPS, max(steps) - min(steps) + 1)
    rows = [row for row in (range(step, step + length) for step in steps) if all(at in steps for at in row)]
    known = {at for row in rows for at in row}
    return max((min(steps[at] for at in row) for row in rows), default=None), len(known) * STEP_SECONDS


def goals_of(objectives: Objectives | None, preset: str) -> tuple[Objectives, str]:
    """A server's thresholds and where they come from, as its conditions have them."""
    situation = Situation(now=0.0, ready_at=0.0, frames=(), objectives=objectives, preset=preset)
    return situation.goals, situation.goals_source


def judge(done: Served, objectives: Objectives | None, preset: str, span: float | None = None) -> tuple[Judged, ...]:
    """Each objective over a window; without a preset's our defaults are taken, and the source says so.

    ``span`` is how many seconds of it were recorded, so that it can be told where usage is known for less.
    """
    goals, source = goals_of(objectives, preset)
    counted = done.counted or EngineSample()
    values = {
        "kv_cache_usage": done.usage,
        "preemption_rate": _preempted(counted),
        "ttft_p99_seconds": _p99(counted, "ttft"),
        "itl_p99_seconds": _p99(counted, "itl"),
    }
    judged = [_judged(name, value, getattr(goals, name), source) for name, value in values.items()]
    if span is not None and done.usage_seconds < MOSTLY * span:
        judged[0] = replace(judged[0], seconds=done.usage_seconds)
    return tuple(judged)


def _judged(name: str, value: float | None, limit: float, source: str) -> Judged:
    return Judged(name, value, limit, None if value is None else value <= limit, source)


def _preempted(counted: EngineSample) -> float | None:
    """Preemptions per finished request; where none finished each one counts whole."""
    if counted.preemptions_total is None or counted.requests_finished_total is None:
        return None
    if not counted.preemptions_total and not counted.requests_finished_total:
        return None
    return counted.preemptions_total / max(1.0, counted.requests_finished_total)


def _p99(counted: EngineSample, key: str) -> float | None:
    histogram = counted.histograms.get(key)
    return quantiles(histogram).p99 if histogram is not None else None
