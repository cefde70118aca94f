"""Evidence for a server without the probe: its traffic reconstructed from samples of its ``/metrics``. Pure.

Two samples show how many requests arrived, began and ended between them, and the sums over those that ended: prompt and
generated tokens and end-to-end time, each value in a bucket. So lengths are drawn within their buckets and adjusted to
the sums; a request that ended arrived its end-to-end time earlier; and each interval gets as many arrivals as the
numbers in flight and ended imply, at random moments. Each seed gives a different traffic that agrees with all of this.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec

from vllm_console.metrics.quantile import PARTS, quantile
from vllm_console.metrics.sample import LATENCIES, LENGTHS, EngineSample, Histogram, Sample
from vllm_console.metrics.window import growth
from vllm_console.prediction.evidence import (
    FEWEST_REQUESTS,
    MOST_REQUESTS,
    MOST_SECONDS,
    PAUSE_SECONDS,
    NoEvidenceError,
    SeenStep,
    TrafficEvidence,
    format_few,
)
from vllm_console.prediction.figures import FEWEST_FOR, Figures, Known, Spread
from vllm_launchers.engine_model.traffic_replay import Arrival

GAP_SECONDS = 15.0
"""Counts between two samples further apart are not used, because their time is unknown."""
MOST_HITS = 0.05
"""Maximum share of prompt tokens found in the prefix cache: the metrics don't show which prompts share them."""
_KEYS = (*LATENCIES, *LENGTHS)
_NEEDED = ("ttft", "itl", "e2e", *LENGTHS)
_SPREAD = (0.05, 0.95)
"""Shares between which a bucket's end is a useful quantile."""
_FEW = 3
"""Differences between two counts up to this are ignored, because they are of slightly different moments."""
_MANY = 0.03
_SEVERAL = 1.2
"""Tokens per inter-token interval from which a step counts as generating several."""


class _EngineGauges(msgspec.Struct, frozen=True):
    running: float
    waiting: float
    usage: float | None

    @property
    def in_flight(self) -> int:
        return round(self.running + self.waiting)

    @classmethod
    def of(cls, engine: EngineSample) -> _EngineGauges | None:
        if engine.requests_running is None or engine.requests_waiting is None:
            return None
        return cls(engine.requests_running, engine.requests_waiting, engine.kv_cache_usage)


class _Interval(msgspec.Struct, frozen=True):
    """Counts between two samples (Unix seconds), the gauges before and after, and how many requests ``came``."""

    start: float
    end: float
    before: _EngineGauges
    after: _EngineGauges
    grown: EngineSample
    came: int

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def ended(self) -> int:
        return int(self.grown.histograms["e2e"].count)

    @property
    def quiet(self) -> bool:
        return not (self.came or self.ended or self.after.in_flight)


class _Request(msgspec.Struct, frozen=True):
    """A possible request: when it arrived (Unix seconds), and its lengths in tokens."""

    at: float
    prompt: int
    output: int


def reconstruct(
    samples: Sequence[Sample], budget: int, longest: int, *, seed: int = 0, most: int = MOST_REQUESTS
) -> TrafficEvidence:
    """Traffic that agrees with the newest of ``samples`` (oldest first, of one run), up to the last pause.

    ``budget`` is the server's tokens per step, ``longest`` the maximum length of a request.

    Raises:
        NoEvidenceError: too little is known, or the metrics can't show this traffic.
    """
    intervals = _newest(list(_intervals(samples)), most)
    ended = sum(one.ended for one in intervals)
    if ended < FEWEST_REQUESTS:
        raise NoEvidenceError(_few_ended(ended, samples))
    dice = random.Random(seed)
    busy = intervals[: 1 + max(place for place, one in enumerate(intervals) if one.came)]
    before = intervals[0].before.in_flight
    requests = _requests(intervals, before, longest, dice)
    zero, since, until = requests[0].at, busy[0].start, busy[-1].end
    total = _sum(intervals)
    observed, ends = _observed(total, busy, until - since)
    front = _front(total, busy)
    steps = tuple(_steps(busy, total, budget, zero))
    return TrafficEvidence(
        arrivals=tuple(Arrival(one.at - zero, one.prompt, one.output) for one in requests),
        fronts=(front,) * len(requests),
        first=before,
        end=len(requests),
        since=since - zero,
        until=until - zero,
        observed=observed,
        ttft=_known(total["ttft"], front),
        itl=_known(_sum(busy)["itl"]),
        e2e=_known(total["e2e"], front),
        cached_tokens=0,
        steps=steps,
        most_running=round(max(one.after.running for one in busy)),
        flaw=_flaw(intervals) or ("" if steps else "no inter-token latency was recorded"),
        ends=ends,
    )


def _few_ended(ended: int, samples: Sequence[Sample]) -> str:
    """An error message: the traffic found so far, and what to do."""
    few = format_few(ended, "request", "has ended", "have ended")
    now = [_EngineGauges.of(one) for one in samples[-1].engines.values()] if samples else []
    under_way = round(sum(one.in_flight for one in now if one is not None))
    if under_way:
        more = f", and {under_way:,} {'is' if under_way == 1 else 'are'} in flight: try again once more have ended"
    else:
        more = ": send traffic first"
    return f"{few} in the recorded traffic; a prediction needs at least {FEWEST_REQUESTS}{more}"


# -- counts ------------------------------------------------------------------------------------------------------------


def _intervals(samples: Sequence[Sample]) -> Iterator[_Interval]:
    """The intervals between samples. Raises NoEvidenceError."""
    for before, after in pairwise(samples):
        if len(after.engines) > 1:
            raise NoEvidenceError("it has several engines, whose requests its metrics don't tell apart well enough")
        if not after.engines or before.engines.keys() != after.engines.keys():
            continue
        (one,), (other,) = before.engines.values(), after.engines.values()
        grown = growth(one, other, _KEYS)
        first, last, ended = _EngineGauges.of(one), _EngineGauges.of(other), grown.requests_finished_total
        missing = [key for key in _NEEDED if key not in grown.histograms]
        if missing or ended is None or first is None or last is None or grown.generation_tokens_total is None:
            raise NoEvidenceError("its metrics lack request times or lengths")
        came = last.in_flight - first.in_flight + round(ended)
        yield _Interval(before.at, after.at, first, last, grown, came)


def _newest(intervals: Sequence[_Interval], most: int) -> list[_Interval]:
    """The newest intervals with traffic, without a gap or long pause in them, with about ``most`` ended requests."""
    kept: list[_Interval] = []
    ended, idle = 0, 0.0
    for one in reversed(intervals):
        if kept and (kept[-1].start - one.end > 1e-3 or one.seconds > GAP_SECONDS):
            break
        idle = idle + one.seconds if one.quiet else 0.0
        if one.quiet and not kept:
            continue
        enough = ended >= FEWEST_REQUESTS
        if enough and (idle > PAUSE_SECONDS or ended >= most or kept[0].end - one.start > MOST_SECONDS):
            break
        kept.append(one)
        ended += one.ended
    while kept and kept[-1].quiet:
        kept.pop()
    return kept[::-1]


def _sum(intervals: Sequence[_Interval]) -> dict[str, Histogram]:
    """All observations of these intervals, which have the same buckets."""
    found: dict[str, Histogram] = {}
    for one in intervals:
        for key, histogram in one.grown.histograms.items():
            known = found.get(key)
            if known is None or known.bounds != histogram.bounds:
                found[key] = histogram
                continue
            counts = tuple(map(sum, zip(known.counts, histogram.counts, strict=True)))
            found[key] = Histogram(known.bounds, counts, known.sum + histogram.sum)
    return found


def _flaw(intervals: Sequence[_Interval]) -> str:
    """Why traffic that agrees with the metrics would differ from the real traffic; empty if it would not."""

    def counted(name: str) -> float:
        return math.fsum(getattr(one.grown, name) or 0.0 for one in intervals)

    total = _sum(intervals)
    if counted("preemptions_total"):
        return "requests were preempted, and traffic reconstructed from metrics is too inaccurate near preemption"
    if counted("prefix_cache_hits_total") > MOST_HITS * max(1.0, total["prompt_tokens"].sum):
        return "metrics don't show which prompts share a prefix, which matters for this server"
    came = sum(one.came for one in intervals)
    allowed = _FEW + _MANY * came
    began = total["ttft"].count + intervals[-1].after.waiting - intervals[0].before.waiting
    lost = sum(-one.came for one in intervals if one.came < 0)
    aborted = counted("requests_finished_total") - total["e2e"].count
    if began - came > allowed or lost > allowed or aborted > allowed:
        return "requests were aborted or their clients disconnected, and metrics don't show how long these ran"
    if counted("generation_tokens_total") > _SEVERAL * (total["itl"].count + total["ttft"].count):
        return "it generates several tokens per step, which is not modeled"
    return ""


# -- traffic that agrees with it ---------------------------------------------------------------------------------------


def _requests(intervals: Sequence[_Interval], before: int, longest: int, dice: random.Random) -> list[_Request]:
    """Requests in order of arrival, ``before`` of them before the first interval.

    Those that ended are ordered by their derived arrival, and are assigned the arrival moments in turn.
    """
    ended = [one for interval in intervals for one in _cohort(interval, longest, dice)]
    begin, end = intervals[0].start, intervals[-1].end
    moments = sorted(
        one.start + dice.random() * one.seconds for one in intervals for _ in range(max(0, one.came))
    )  # fmt: skip
    # Those still in flight are only known to have arrived recently and to be long; longer ones are more likely.
    took = [finished - one.at for one, finished in ended]
    missing = max(0, before + len(moments) - len(ended))
    for place in dice.choices(range(len(ended)), took, k=missing):
        one, _ = ended[place]
        ended.append((msgspec.structs.replace(one, at=end - dice.random() * took[place]), end))
    found = sorted((one for one, _ in ended), key=lambda one: one.at)
    early = [min(one.at, begin) for one in found[: len(found) - len(moments)]]
    return [
        msgspec.structs.replace(one, at=at) for one, at in zip(found, [*early, *moments][: len(found)], strict=False)
    ]


def _cohort(interval: _Interval, longest: int, dice: random.Random) -> list[tuple[_Request, float]]:
    """The requests that ended in an interval, each with its end: longer answers took longer."""
    histograms = interval.grown.histograms
    prompts = _drawn(histograms["prompt_tokens"], longest, dice)
    outputs = sorted(_drawn(histograms["generation_tokens"], longest, dice))
    took = sorted(_drawn(histograms["e2e"], math.inf, dice))
    dice.shuffle(prompts)
    found = []
    for prompt, output, seconds in zip(prompts, outputs, took, strict=False):
        finished = interval.start + dice.random() * interval.seconds
        given = max(1, round(prompt))
        made = max(1, min(round(output), longest - given))
        found.append((_Request(finished - seconds, given, made), finished))
    return found


def _drawn(histogram: Histogram, longest: float, dice: random.Random) -> list[float]:
    """Values that a histogram may have observed: each in its bucket, with the right sum as far as possible."""
    found: list[tuple[float, float, float]] = []
    low, below = 0.0, 0.0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=True):
        high = bound if math.isfinite(bound) else max(low, min(longest, histogram.sum))
        for _ in range(round(count - below)):
            found.append((low + dice.random() * (high - low), low, high))
        low, below = min(bound, high), count
    missing = histogram.sum - math.fsum(value for value, _, _ in found)
    room = [high - value if missing > 0 else value - low for value, low, high in found]
    share = min(1.0, abs(missing) / math.fsum(room)) if any(room) else 0.0
    return [value + math.copysign(space * share, missing) for (value, _, _), space in zip(found, room, strict=True)]


# -- measured figures --------------------------------------------------------------------------------------------------


def _observed(
    total: dict[str, Histogram], busy: Sequence[_Interval], seconds: float
) -> tuple[Figures, tuple[Figures, Figures]]:
    """The measured figures, and their lowest and highest possible values: quantiles are known only to a bucket."""

    def spreads(end: str) -> tuple[Spread, Spread, Spread]:
        return _spread(total["ttft"], end), _spread(total["itl"], end), _spread(total["e2e"], end)

    usages = [one.after.usage * one.seconds for one in busy if one.after.usage is not None]
    rates = (
        math.fsum(one.grown.generation_tokens_total or 0.0 for one in busy) / seconds,
        math.fsum(one.after.waiting * one.seconds for one in busy) / seconds,
        math.fsum(one.grown.preemptions_total or 0.0 for one in busy) / seconds * 60,
        math.fsum(usages) / seconds if len(usages) == len(busy) else None,
    )
    return Figures(*spreads(""), *rates), (Figures(*spreads("low"), *rates), Figures(*spreads("high"), *rates))


def _spread(histogram: Histogram, end: str) -> Spread:
    """A latency's quantiles, or one end of each one's bucket; its mean is exact."""
    if not histogram.count:
        return Spread()
    parts: dict[str, float | None] = {}
    for name, q in PARTS:
        found = quantile(q, histogram.bounds, histogram.counts) if histogram.count >= FEWEST_FOR[name] else None
        if found is not None and found.high is not None:
            parts[name] = getattr(found, end) if end else found.value
    return Spread(**parts, mean=histogram.sum / histogram.count)


def _known(histogram: Histogram, front: float = 0.0) -> Known:
    """The latency distribution in the engine from a histogram: each bucket's end is a quantile. Excludes ``front``."""
    count = histogram.count
    if not count:
        return Known()
    shares = [(one / count, bound - front) for bound, one in zip(histogram.bounds, histogram.counts, strict=True)]
    points = [(share, bound) for share, bound in shares if _SPREAD[0] <= share <= _SPREAD[1] and bound > 0]
    # If everything is in one bucket, only the mean is known; it counts as much as all points together.
    return Known((*points,), max(0.0, histogram.sum / count - front), max(1, len(points)))


def _front(total: dict[str, Histogram], busy: Sequence[_Interval]) -> float:
    """Average seconds of a request in the front end: its total time less its stages in the engine, and less the wait
    for the running step, half a step on average.
    """
    stages = [total.get(key) for key in ("queue", "prefill", "decode")]
    known = [one for one in stages if one is not None and one.count]
    if len(known) < len(stages):
        return 0.0
    left = total["e2e"].sum / total["e2e"].count - sum(one.sum / one.count for one in known)
    itl = total["itl"]
    step = itl.sum / itl.count if itl.count else 0.0
    working = sum(one.after.running > 0 for one in busy) / len(busy)
    return max(0.0, left - working * step / 2)


def _steps(busy: Sequence[_Interval], total: dict[str, Histogram], budget: int, zero: float) -> Iterator[SeenStep]:
    """Steps for the fit to start from: each interval's typical step, and the prefills of requests that ended in it."""
    context = total["prompt_tokens"].sum / total["prompt_tokens"].count
    context += total["generation_tokens"].sum / total["generation_tokens"].count / 2
    for one in busy:
        itl = one.grown.histograms["itl"]
        if not itl.count or one.after.running < 1:
            continue
        took = itl.sum / itl.count
        decoding = max(1.0, itl.sum / one.seconds)  # by Little's law
        prompts = (one.grown.prompt_tokens_total or 0.0) * took / one.seconds
        reads = decoding * (context + 1)
        if took > 0:
            yield SeenStep(
                one.start - zero, took, round(decoding), round(decoding + prompts), reads, reads, int(prompts > 0)
            )
        prefill, given = one.grown.histograms.get("prefill"), one.grown.histograms["prompt_tokens"]
        if prefill is not None and prefill.count and 0 < given.sum / prefill.count < budget / 2:
            tokens, seconds = given.sum / prefill.count, prefill.sum / prefill.count
            if seconds > 0:
                yield SeenStep(
                    one.start - zero, seconds, round(decoding + 1), round(decoding + tokens), reads + tokens,
                    reads + tokens * (tokens + 1) / 2, 1,
                )  # fmt: skip
