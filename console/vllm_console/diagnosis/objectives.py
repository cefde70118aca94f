"""A server's objectives compared with its performance over a window: each with figure, limit and source. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import msgspec
from msgspec.structs import replace

from vllm_console.diagnosis.finding import Finding, Measure, Severity
from vllm_console.diagnosis.live.frame_sums import SUSTAINED_STEPS
from vllm_console.diagnosis.live.rule import objectives_of
from vllm_console.history.frames import STEP_SECONDS
from vllm_console.metrics.quantile import Quantile, Quantiles
from vllm_console.metrics.sample import EngineSample, Sample, Window
from vllm_console.metrics.window import combine, growths, preemptions_per_request, quantiles, restarted_engines
from vllm_console.text import UNKNOWN, duration, percent, seconds
from vllm_launchers.presets.model import Objectives

MOSTLY = 0.9
"""If usage is known for a smaller fraction of the window than this, the text says so."""

CODES: Mapping[str, tuple[str, ...]] = {
    "kv_cache_usage": ("kv_cache_pressure",),
    "preemption_rate": ("preempting",),
    "ttft_p99_seconds": ("slow_first_token",),
    "itl_p99_seconds": ("slow_tokens",),
}
"""Finding for each missed objective: without a figure, the objective counts as missed while that finding is open."""

NAMES = {
    "kv_cache_usage": "KV cache usage",
    "preemption_rate": "preemptions per request",
    "ttft_p99_seconds": "TTFT p99",
    "itl_p99_seconds": "ITL p99",
}
"""Display names of all objectives of a preset."""

SUSTAINED = "KV cache usage (sustained peak)"
"""Name of the figure that is judged: the highest usage held for `SUSTAINED_STEPS`, neither the mean nor the maximum."""


class Judged(msgspec.Struct, frozen=True):
    """One objective. Shares are from 0 to 1, latencies in seconds.

    ``value`` and ``ok`` are None if there is nothing to judge by: not reported, or nothing served. A latency also has
    its ``bucket``: if that has only one end, ``value`` is None, and ``ok`` follows from that end or is None.
    ``seconds`` is how long the value is known for, if that is not the whole window. ``exact`` means that it comes from
    the records of a probe, not from buckets.
    """

    name: str
    value: float | None
    limit: float
    ok: bool | None
    source: str
    seconds: float | None = None
    bucket: Quantile | None = None
    note: str = ""
    """What the figure excludes, in a few words."""
    exact: bool = False

    @property
    def sentence(self) -> str:
        """For users: the objective, its limit, and the limit's source."""
        return f"{self._sentence}; {self.note}" if self.note else self._sentence

    @property
    def _sentence(self) -> str:
        title = NAMES[self.name]
        limit = f"{self._shown(self.limit)} ({self.source})"
        if self.ok is None and self.bucket is not None:
            return f"{title} is {self.bucket.text}, so it can't be judged against its limit of {limit}"
        if self.ok is None:
            return f"{title} has no data; limit {limit}"
        known = f"; known for {duration(self.seconds)} of the window" if self.seconds is not None else ""
        title = SUSTAINED if self.name == "kv_cache_usage" else title
        over = "above" if self.ok is False else "within"
        return f"{title} is {self.text}, {over} its limit of {limit}{known}"

    @property
    def text(self) -> str:
        """The formatted figure."""
        if self.value is None:
            return self.bucket.text if self.bucket is not None else UNKNOWN
        rough = "~" if self.bucket is not None and self.bucket.wide else ""
        return rough + self._shown(self.value)

    @property
    def limit_text(self) -> str:
        """The formatted limit."""
        return self._shown(self.limit)

    def _shown(self, value: float) -> str:
        if self.name == "preemption_rate":
            return f"{value:.2g}"
        if not self.name.endswith("_seconds"):
            return percent(value, 1)
        # Near the limit, a rounded figure would look like the limit itself.
        shown = seconds(value)
        return f"{value:.3f}s" if shown == seconds(self.limit) and value != self.limit else shown


class ServedWindow(msgspec.Struct, frozen=True):
    """Performance over the samples of a window; None means not reported. Usage is known for ``usage_seconds`` of it."""

    usage: float | None = None
    usage_seconds: float = 0.0
    counted: EngineSample | None = None
    running_max: float = 0.0
    running: float | None = None
    """Requests running at the end."""

    @property
    def idle(self) -> bool:
        """Whether no request was served, as far as that is reported."""
        counted = self.counted
        if counted is None:
            return True
        moved = (counted.requests_finished_total, counted.generation_tokens_total, counted.prompt_tokens_total)
        return not any(moved) and self.running_max < 1


def served_window(samples: Sequence[Sample], often: Iterable[Sample] | None = None) -> ServedWindow:
    """Performance over these samples of one generation of a server, oldest first; engines may restart in between.

    If they are further apart than `STEP_SECONDS`, ``often`` provides closer samples to judge usage by.
    """
    if not samples:
        return ServedWindow()
    usage, usage_seconds = _sustained_usage(samples if often is None else often)
    running = [combine(sample.engines.values()).requests_running or 0.0 for sample in samples]
    counted = combine(grown for before, after in _stretches(samples) for grown in growths(before, after))
    reported = len(samples) > 1 and any(sample.engines for sample in samples)
    return ServedWindow(usage, usage_seconds, counted if reported else None, max(running), running[-1])


def _stretches(samples: Sequence[Sample]) -> Iterable[tuple[Sample, Sample]]:
    """First and last sample of each stretch without an engine restart; a new start counts from its beginning."""
    first = last = samples[0]
    for sample in samples[1:]:
        if anew := restarted_engines(last, sample):
            yield first, last
            first = replace(last, engines={label: one for label, one in last.engines.items() if label not in anew})
        last = sample
    yield first, last


def _sustained_usage(samples: Iterable[Sample]) -> tuple[float | None, float]:
    """The highest usage of the fullest engine reached in each of three consecutive steps, and for how long usage is
    known.

    A step without a sample ends a row: the highest of three samples that are minutes apart are just peaks.
    """
    steps: dict[int, float] = {}
    for sample in samples:
        step = int(sample.at // STEP_SECONDS)
        for one in sample.engines.values():
            usage = one.kv_cache_usage
            if usage is not None and usage >= steps.get(step, 0.0):
                steps[step] = usage
    if not steps:
        return None, 0.0
    length = min(SUSTAINED_STEPS, max(steps) - min(steps) + 1)
    rows = [row for row in (range(step, step + length) for step in steps) if all(at in steps for at in row)]
    known = {at for row in rows for at in row}
    return max((min(steps[at] for at in row) for row in rows), default=None), len(known) * STEP_SECONDS


def judge_objectives(
    done: ServedWindow,
    objectives: Objectives | None,
    preset: str,
    span: float | None = None,
    exact: Mapping[str, Quantiles] = MappingProxyType({}),
) -> tuple[Judged, ...]:
    """Judge each objective over a window; without a preset our defaults apply, and the source says so.

    ``span`` is how many seconds of it were recorded; if usage is known for less, the text says so. ``exact`` are
    latencies that are known exactly; they replace the estimates from buckets.
    """
    counted = done.counted or EngineSample()
    p99 = {key: exact[key].p99 if key in exact else _p99(counted, key) for key in ("ttft", "itl")}
    judged = _judge(done.usage, _preempted(done), p99, objectives_of(objectives, preset))
    if span is not None and done.usage_seconds < MOSTLY * span:
        judged[0] = replace(judged[0], seconds=done.usage_seconds)
    return tuple(replace(one, exact=one.name.removesuffix("_p99_seconds") in exact) for one in judged)


def judge_window(
    window: Window, samples: Iterable[Sample], objectives: Objectives | None, preset: str
) -> tuple[Judged, ...]:
    """Judge each objective over the window that panes show; ``samples`` are its samples, for sustained usage."""
    p99 = {key: found.p99 for key, found in window.latencies.items()}
    usage, _ = _sustained_usage(samples)
    return tuple(_judge(usage, window.preemption_share, p99, objectives_of(objectives, preset)))


def _judge(
    usage: float | None,
    preempted: float | None,
    p99: Mapping[str, Quantile | None],
    objectives: tuple[Objectives, str],
) -> list[Judged]:
    limits, source = objectives
    return [
        _judged("kv_cache_usage", usage, limits.kv_cache_usage, source),
        _judged("preemption_rate", preempted, limits.preemption_rate, source),
        _judged_latency("ttft_p99_seconds", p99.get("ttft"), limits.ttft_p99_seconds, source),
        _judged_latency("itl_p99_seconds", p99.get("itl"), limits.itl_p99_seconds, source),
    ]


def _judged(name: str, value: float | None, limit: float, source: str) -> Judged:
    return Judged(name, value, limit, None if value is None else value <= limit, source)


def _judged_latency(name: str, found: Quantile | None, limit: float, source: str) -> Judged:
    if found is None:
        return Judged(name, None, limit, None, source)
    return Judged(name, found.value, limit, found.within(limit), source, bucket=found)


def _preempted(done: ServedWindow) -> float | None:
    counted = done.counted or EngineSample()
    return preemptions_per_request(counted.preemptions_total, counted.requests_finished_total, done.running)


def _p99(counted: EngineSample, key: str) -> Quantile | None:
    histogram = counted.histograms.get(key)
    return quantiles(histogram).p99 if histogram is not None else None


def agreed(findings: Sequence[Finding], judged: Sequence[Judged]) -> tuple[Finding, ...]:
    """Make `Healthy` consistent with the objectives: drop it while one is missed, otherwise show their figures."""
    if not judged:
        return tuple(findings)
    missed = any(one.ok is False for one in judged)
    return tuple(
        replace(one, measures=_measures(judged)) if one.severity is Severity.GOOD else one
        for one in findings
        if one.severity is not Severity.GOOD or not missed
    )


def _measures(judged: Sequence[Judged]) -> tuple[Measure, ...]:
    held = {"kv_cache_usage": "KV cache usage (sustained)"}
    known = (one for one in judged if one.ok is not None)
    return tuple(Measure(held.get(one.name, NAMES[one.name]), one.text, one.limit_text, one.source) for one in known)


def missed(name: str, judged: Iterable[Judged], findings: Iterable[Finding]) -> bool:
    """Whether an objective is missed now, by the last minute's judgment.

    If that is undecided: whether its finding is open and not recovering. A figure within its limit is never missed.
    """
    met = next((one.ok for one in judged if one.name == name), None)
    if met is not None:
        return not met
    return any(one.code in CODES[name] and not one.recovering for one in findings)
