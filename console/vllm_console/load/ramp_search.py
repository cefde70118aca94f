"""Which request rate to try next, and whether a step at a rate meets the objectives. Pure.

A rate is doubled until it fails (or halved until it holds), then the bracket is bisected; near the ceiling all steps
together say where it is (`next_step`). A step is judged while it runs, so that it ends as soon as its outcome is clear.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise, repeat
from operator import add, mul, sub

import msgspec

from vllm_console.load.report import sorted_quantile
from vllm_console.metrics.window import preemptions_per_request
from vllm_launchers.presets.model import Objectives

TOLERANCE = 0.04
"""The bracket around the ceiling is closed when its ends are this far apart, as a share of the lower one."""

ATTAINED = 0.99
"""A share of requests (of gaps between tokens) within the limit: the objectives are 99th percentiles."""

P_HOLDS, P_FAILS = 0.995, 0.94
"""Attainment that is to count as holding, and as failing, for the sequential test; between them either may come out.

They are far apart, for steps far from the ceiling to be short; near it, steps are not ended early."""

CERTAIN = math.log(0.95 / 0.05)
"""Wald's threshold for 5% errors of both kinds."""

_PER_HIT = math.log(P_HOLDS / P_FAILS)
_PER_MISS = math.log((1 - P_HOLDS) / (1 - P_FAILS))

GROWTH = 0.04
"""More requests in flight at a step's end than at its beginning, as a share of those that came: a growing queue."""

CHANCE = 2.33
"""How many standard deviations more that is to be: 1% of the steps with a steady queue look like it, or fewer. The
number in flight is Poisson distributed then (M/G/∞), and the variance of a difference is at most the sum of both."""

FEWEST_SECONDS = 8.0
"""No step is called good sooner: short ones see neither a growing queue nor a full batch."""

FEWEST_REQUESTS = 10
"""With fewer requests, a step says nothing of the gaps between tokens that most of them have."""

MANY_PREEMPTIONS = 5
"""With fewer, a step is not ended early because of them."""


class StepFigures(msgspec.Struct, frozen=True):
    """What a step has measured so far, without its warm-up; None is unknown.

    ``ttft`` counts requests within the limit and beyond it; one that failed, or waits longer already, is beyond.
    ``itl`` counts gaps between tokens likewise. ``in_flight`` are evenly spaced counts of
    this client's unfinished requests, ``kv_cache_usage`` samples of the fullest engine. ``send_delay`` is the p99 of
    how late requests were sent although there was room for them, in seconds.
    """

    rate: float
    seconds: float
    ttft: tuple[int, int] = (0, 0)
    itl: tuple[int, int] = (0, 0)
    failed: int = 0
    in_flight: Sequence[float] = ()
    kv_cache_usage: Sequence[float] = ()
    preemptions: float | None = None
    finished: float | None = None
    running: float | None = None
    send_delay: float | None = None


class StepOutcome(msgspec.Struct, frozen=True):
    """Whether the objectives hold at a step's rate, the share attained, and the objective that fails.

    ``limited_by`` is an objective's name, or ``failures``, ``queue`` (it keeps growing) or ``client`` (this client
    cannot send as fast).
    """

    ok: bool
    attained: float | None
    limited_by: str = ""
    ttft: tuple[float, float] = (0, 0)
    itl: tuple[float, float] = (0, 0)
    """Observations within and beyond each limit: requests, and engine steps."""


def attained_share(figures: StepFigures) -> float | None:
    """The lower of two shares: requests with TTFT within its limit, gaps between tokens within theirs."""
    shares = [within / (within + beyond) for within, beyond in (figures.ttft, figures.itl) if within + beyond]
    return min(shares, default=None)


def evidence(within: float, beyond: float) -> float:
    """Log-likelihood ratio of a holding rate against a failing one (Wald's sequential test of a binomial share)."""
    return within * _PER_HIT + beyond * _PER_MISS


def judge_step(
    figures: StepFigures,
    objectives: Objectives,
    *,
    fewest_seconds: float = FEWEST_SECONDS,
    final: bool = False,
    early: bool = True,
) -> StepOutcome | None:
    """The outcome of a step; None while more must be measured, which ``final`` excludes.

    With ``early`` a step ends as soon as its outcome is clear.

    Gaps of requests that run together are not independent, so those of an engine step count as one observation.
    """
    reason = _fails_clearly(figures, objectives, fewest_seconds) if early else ""
    if not reason and not final and not (early and _holds_clearly(figures, fewest_seconds)):
        return None
    reason = reason or _failing(figures, objectives)
    return StepOutcome(not reason, attained_share(figures), reason, figures.ttft, _engine_steps(figures))


def _engine_steps(figures: StepFigures) -> tuple[float, float]:
    """Engine steps within the limit of ITL and beyond: in each of them, every running request has a gap."""
    running = sum(figures.in_flight) / len(figures.in_flight) if figures.in_flight else 1.0
    within, beyond = (gaps / max(1.0, running) for gaps in figures.itl)
    return within, beyond


def _evidence(figures: StepFigures) -> tuple[float, float]:
    """The evidence of both latencies."""
    return evidence(*figures.ttft), evidence(*_engine_steps(figures))


def _holds_clearly(figures: StepFigures, fewest_seconds: float) -> bool:
    return figures.seconds >= fewest_seconds and min(_evidence(figures)) >= CERTAIN and not _grows(figures)


def _fails_clearly(figures: StepFigures, objectives: Objectives, fewest_seconds: float) -> str:
    first, gaps = _evidence(figures)
    if first <= -CERTAIN:
        return "failures" if 2 * figures.failed > figures.ttft[1] else _first_limit(figures)
    if gaps <= -CERTAIN and figures.seconds >= fewest_seconds and sum(figures.ttft) >= FEWEST_REQUESTS:
        return "itl_p99_seconds"
    preempted = figures.preemptions or 0.0
    share = _preemption_share(figures) or 0.0
    if preempted >= MANY_PREEMPTIONS and share > 3 * objectives.preemption_rate:
        return "preemption_rate"
    usage = _usage(figures)
    if figures.seconds >= fewest_seconds and usage is not None and usage > objectives.kv_cache_usage:
        return "kv_cache_usage"
    return ""


def _first_limit(figures: StepFigures) -> str:
    """What a missed TTFT is due to: this client, or the server."""
    return "client" if _client_is_late(figures) else "ttft_p99_seconds"


def _failing(figures: StepFigures, objectives: Objectives) -> str:
    """The first objective that a finished step misses; empty if it meets all."""
    ttft, itl = (
        within / (within + beyond) if within + beyond else 1.0 for within, beyond in (figures.ttft, figures.itl)
    )
    decided = sum(figures.ttft)
    share, usage = _preemption_share(figures), _usage(figures)
    checks: Mapping[str, bool] = {
        "failures": bool(decided) and figures.failed > (1 - ATTAINED) * decided,
        _first_limit(figures): ttft < ATTAINED,
        "itl_p99_seconds": itl < ATTAINED,
        "preemption_rate": share is not None and share > objectives.preemption_rate,
        "kv_cache_usage": usage is not None and usage > objectives.kv_cache_usage,
        "queue": _grows(figures) or not decided,
    }
    return next((name for name, missed in checks.items() if missed), "")


def _client_is_late(figures: StepFigures) -> bool:
    return figures.send_delay is not None and figures.send_delay > 0.25


def _usage(figures: StepFigures) -> float | None:
    """The median, so that a single peak violates nothing."""
    return sorted_quantile(sorted(figures.kv_cache_usage), 0.5) if figures.kv_cache_usage else None


def _preemption_share(figures: StepFigures) -> float | None:
    return preemptions_per_request(figures.preemptions, figures.finished, figures.running)


def _grows(figures: StepFigures) -> bool:
    """Whether the requests in flight became more by more than chance: the last third against the first."""
    counts = figures.in_flight
    third = len(counts) // 3
    if not third:
        return False
    first, last = sum(counts[:third]) / third, sum(counts[-third:]) / third
    came = figures.rate * figures.seconds * 2 / 3
    return last - first > max(3.0, CHANCE * math.sqrt(first + last), GROWTH * came)


# -- the rates --------------------------------------------------------------------------------------------------------

NEAR = 1.25
"""When the bracket's ends are this far apart, the rest of the time is spent where the ceiling is by all steps."""

USED = 1.4
"""Only steps at most this far from the bracket's middle, or from the ceiling, tell where it is."""

MOVED, MOST_MOVES = 0.1, 5
"""Where the ceiling is further from the middle than this, by logarithm, the steps around it are looked at anew."""

PRECISE = 0.015
"""The standard error of the ceiling, as a share of it, at which the search ends."""

UNSURE, UNSURE_STEPS = 0.06, 8
"""Until the standard error of the ceiling is this small, a step takes the time left divided by so many steps."""

SCATTER_OF_GAPS = 0.8
"""How much more slow engine steps scatter than independent ones would (a ratio of variances): they are mostly due to
one long prompt each, and the lengths of a step's prompts are stratified. It was 0.3 to 0.9 on the simulated engine."""

FEWEST_TOGETHER, MOST_TOGETHER = 3.0, 8.0
"""The same of late first tokens, which come in bursts: as many as came in one step, between these."""

OVERLOADED = 0.1
"""From this share of misses on, a failed step says only that its rate is too high: its queue grew, and with it the
share of misses, for as long as the step took."""

CLOSE, SURE_STEPS = 1.05, 2
"""So many steps have to hold this close below a bisected ceiling: one may have been lucky."""

_LOGIT = math.log((1 - ATTAINED) / ATTAINED)
_PLACES = tuple(place / 150 for place in range(-50, 51))
"""Where the ceiling may be: the logarithm of its ratio to the bracket's middle. All are equally likely before."""
_SLOPES = {
    "ttft_p99_seconds": tuple((4 * 1.5**step, 1.0) for step in range(7)),
    "itl_p99_seconds": tuple((1.5**step, 4.0 if step in (1, 2) else 1.0) for step in range(10)),
}
"""How the log-odds of a miss may rise with the logarithm of the rate, and how likely each is before, up to a factor.

A slow gap is mostly due to the prompt of another request, so their share rises as the rate does, and a little more,
since steps become longer; where batches are too large, it rises far more. That of late first tokens rises with up to
its 40th power."""

_TAIL = 0.05

_QUEUE_SLOPES = (30.0, 60.0, 120.0)
"""How the logarithm of how often queues build up may rise with that of the rate: all equally likely before."""

LONG_STEP = 5000
LAPSE = 0.05
"""How often a step sees a queue or none for another reason, such as a disturbance of the machine."""

_TTFT, _ITL = _LATENCIES = ("ttft_p99_seconds", "itl_p99_seconds")
_QUEUE = "queue"


class TriedRate(msgspec.Struct, frozen=True):
    """A step that was done: its rate, whether the objectives held, what failed first, and observations within and
    beyond each latency's limit.
    """

    rate: float
    ok: bool
    limited_by: str = ""
    ttft: tuple[float, float] = (0, 0)
    itl: tuple[float, float] = (0, 0)


class NextStep(msgspec.Struct, frozen=True):
    """The rate of the next step; ``full``: it is to take all of its time, since every observation counts."""

    rate: float
    full: bool = False


class Ceiling(msgspec.Struct, frozen=True):
    """Where the objectives stop to hold (requests per second), between ``low`` and ``high``, and what fails there.

    Where it is an estimate, ``error`` is its standard error as a share, and the ends are those of a 90% interval. Else
    it is the lower end of the bracket, and ``error`` None.
    """

    rate: float
    low: float
    high: float
    limited_by: str
    error: float | None = None


class Bracket(msgspec.Struct, frozen=True):
    """The highest rate that holds below the lowest that fails; None where there is none."""

    low: float | None
    high: float | None

    @property
    def ratio(self) -> float:
        """How far its ends are apart; infinite if one is missing."""
        return math.inf if self.low is None or self.high is None else self.high / self.low


def bracket(tried: Sequence[TriedRate]) -> Bracket:
    """What is known of the ceiling: where the outcomes turn.

    They may contradict each other, since a disturbance of the machine makes a rate fail that holds. Then it is where
    the fewest outcomes are on the wrong side, the lower place if two are equal. While a rate has failed close to the
    highest one that held, it is below that failure: the ceiling is near, though misses, which come in bursts, hide it.
    """
    rates = sorted({one.rate for one in tried})

    def wrong(low: float) -> int:
        return sum(1 for one in tried if one.ok is not (one.rate <= low))

    lows = [0.0, *rates]
    low = min(lows, key=wrong)  # the first, so the lowest, of equal ones
    failed = max((one.rate for one in tried if not one.ok), default=0.0)
    if low and low == rates[-1] and failed * NEAR >= low:
        low = min((rate for rate in lows if rate < failed), key=wrong)
    high = next((rate for rate in rates if rate > low), None)
    return Bracket(low or None, high)


def next_step(tried: Sequence[TriedRate], start: float, lowest: float, highest: float) -> NextStep | None:
    """The next step, between ``lowest`` and ``highest`` requests per second; None at the end.

    Near the ceiling a single step cannot tell a rate that holds from one that fails: misses come in bursts. So from
    there on each step is at the ceiling as estimated from all of them, until the estimate is precise. A ceiling that
    is due to neither latencies nor a queue (a full KV cache, preemptions) is bisected to the end, where a rate counts
    that held more than once.
    """
    known = bracket(tried)
    if known.low is None or known.high is None:
        rate = _widened(known, start, lowest, highest)
        return None if rate is None else NextStep(rate)
    if known.ratio > NEAR and not _contradicted(tried, known.high):
        return NextStep(math.sqrt(known.low * known.high))
    found = ceiling(tried)
    if found is None or found.error is None:
        if known.ratio > 1 + TOLERANCE:
            return NextStep(math.sqrt(known.low * known.high), full=True)
        held = sum(1 for one in tried if one.ok and known.low / CLOSE <= one.rate <= known.low)
        return NextStep(known.low, full=True) if held < SURE_STEPS else None
    if found.error <= PRECISE:
        return None
    return NextStep(found.rate, full=True)


def _widened(known: Bracket, start: float, lowest: float, highest: float) -> float | None:
    """The next rate while one end of the bracket is missing; None if there is no room left."""
    if known.low is not None:
        return min(2 * known.low, highest) if known.low < highest else None
    if known.high is not None:
        return max(known.high / 2, lowest) if known.high > lowest else None
    return min(max(start, lowest), highest)


def ceiling(tried: Sequence[TriedRate]) -> Ceiling | None:
    """The ceiling by all steps so far; None unless a rate held and another one failed.

    It is the lowest of three: where the share of late first tokens reaches its limit, where that of slow gaps does, and
    where the server's capacity ends, beyond which a queue grows.
    """
    known = bracket(tried)
    if known.low is None or known.high is None:
        return None
    low, high = known.low, known.high
    limited_by = next(one.limited_by for one in reversed(tried) if one.rate == high and not one.ok)
    by_bracket = Ceiling(low, low, high, limited_by)
    far = known.ratio > NEAR and not _contradicted(tried, high)
    if far or limited_by not in (*_LATENCIES, _QUEUE):
        return by_bracket
    found, middle = by_bracket, math.sqrt(low * high)
    for _ in range(MOST_MOVES):
        moved = _estimated(tried, middle)
        if moved is None:
            break
        found, middle, before = moved, moved.rate, middle
        if abs(math.log(middle / before)) < MOVED:
            break
    return found


def _contradicted(tried: Sequence[TriedRate], high: float) -> bool:
    """Whether a rate held that is no lower than the bracket's upper end: then chance decides outcomes between, and all
    steps together tell more than the bracket, however far its ends are apart."""
    return any(one.ok and one.rate >= high for one in tried)


def _estimated(tried: Sequence[TriedRate], middle: float) -> Ceiling | None:
    """The ceiling by all steps near ``middle``; None if none of them tells."""
    used = [one for one in tried if middle / USED <= one.rate <= middle * USED]
    gaps, first = _points(used, middle, _ITL), _points(used, middle, _TTFT)
    if not gaps and not first:
        return None
    estimated = {_ITL: _posterior(gaps, _SLOPES[_ITL], SCATTER_OF_GAPS)} if gaps else {}
    queued = [one for one in used if _queued(one)]
    if queued:
        estimated[_QUEUE if queued[-1].limited_by == _QUEUE else _TTFT] = _of_queues(used, middle)
    elif first:
        together = max(beyond for _, _, beyond in first)
        scatter = min(MOST_TOGETHER, max(FEWEST_TOGETHER, together))
        estimated[_TTFT] = _posterior(first, _SLOPES[_TTFT], scatter)
    return _lowest(estimated, middle)


def _lowest(estimated: Mapping[str, list[float]], middle: float) -> Ceiling:
    """The lowest of several ceilings, each known by how likely it is at each of `_PLACES`."""
    beyond = [1.0] * len(_PLACES)  # the probability that all of them are higher
    for chances in estimated.values():
        beyond = [one * max(0.0, 1 - up_to) for one, up_to in zip(beyond, accumulate(chances), strict=True)]
    reached = [1 - one for one in beyond]
    chances = [reached[0], *(later - one for one, later in pairwise(reached))]
    mean = sum(map(mul, _PLACES, chances))
    error = math.sqrt(sum(chance * (place - mean) ** 2 for place, chance in zip(_PLACES, chances, strict=True)))
    rate, low, high = (middle * math.exp(_quantile(reached, share)) for share in (0.5, _TAIL, 1 - _TAIL))
    limited_by = min(estimated, key=lambda name: _quantile(list(accumulate(estimated[name])), 0.5))
    return Ceiling(rate, low, high, limited_by, error)


def _points(used: Sequence[TriedRate], middle: float, name: str) -> list[tuple[float, float, float]]:
    """For each step that measured a latency: its rate, as the logarithm of its ratio to the middle, and observations
    within and beyond the limit. Those of an overloaded step say nothing but that."""
    found = []
    for one in used:
        shares = one.ttft if name == _TTFT else one.itl
        if sum(shares) and (one.ok or not _overloaded(shares)):
            found.append((math.log(one.rate / middle), *shares))
    return found


def _of_queues(used: Sequence[TriedRate], middle: float) -> list[float]:
    """How likely a queue begins to build up at each of `_PLACES`, by whether each step saw one.

    Queues build up now and then, and the more often the higher the rate is; each makes many requests late, so a step
    counts as one observation. The ceiling is where every other step of `LONG_STEP` requests would see one.
    """
    steps = [(math.log(one.rate / middle), _late(one), sum(one.ttft) / LONG_STEP) for one in used]

    chances = [0.0] * len(_PLACES)
    for slope in _QUEUE_SLOPES:
        likelihoods = [1.0] * len(_PLACES)
        for x, late, share in steps:
            most = share * math.log(2)  # queues in the step, at the ceiling itself
            there = -most * math.exp(slope * x)
            none = [(1 - 2 * LAPSE) * math.exp(there * factor) + LAPSE for factor in _factors(slope)]
            likelihoods = list(map(mul, likelihoods, [1 - one for one in none] if late else none))
        chances = list(map(add, chances, likelihoods))
    total = sum(chances)
    return [chance / total for chance in chances]


def _late(one: TriedRate) -> bool:
    """Whether a step failed for another reason than a few slow gaps."""
    return not one.ok and (one.limited_by != _ITL or _overloaded(one.itl))


def _queued(one: TriedRate) -> bool:
    """Whether a step's queue grew, or it missed a limit by far."""
    return _late(one) and (one.limited_by not in _LATENCIES or any(map(_overloaded, (one.ttft, one.itl))))


def _overloaded(shares: tuple[float, float]) -> bool:
    within, beyond = shares
    return beyond > OVERLOADED * (within + beyond)


def _quantile(reached: Sequence[float], share: float) -> float:
    """The place up to which so much of the chances lies, which are even from one place to the next."""
    place = max(1, min(bisect_left(reached, share), len(_PLACES) - 1))
    below, above = reached[place - 1], reached[place]
    part = min(1.0, max(0.0, (share - below) / (above - below))) if above > below else 1.0
    return _PLACES[place - 1] + part * (_PLACES[place] - _PLACES[place - 1])


def _posterior(
    points: Sequence[tuple[float, float, float]], slopes: Sequence[tuple[float, float]], scatter: float
) -> list[float]:
    """How likely each of `_PLACES` is where the share of misses reaches its limit.

    ``points`` are the logarithm of a rate, and observations within and beyond the limit there. The log-odds of a miss
    are a straight line over the logarithm of the rate (logistic regression), here with the place of the limit as a
    parameter, and summed over all ``slopes`` by their weight. Misses ``scatter`` by so much more than independent ones.
    """
    logs = [
        [math.log(weight) + likelihood / scatter for likelihood in _log_likelihoods(points, slope)]
        for slope, weight in slopes
    ]
    most = max(map(max, logs))
    chances = [sum([math.exp(one - most) for one in at_place]) for at_place in zip(*logs, strict=True)]
    total = sum(chances)
    return [chance / total for chance in chances]


def _log_likelihoods(points: Sequence[tuple[float, float, float]], slope: float) -> list[float]:
    """The logarithm of how likely all observations are with the limit at each of `_PLACES`.

    ``points`` are no further from the middle than `USED`, so that no odds are too large for a float.
    """
    rises = [slope * place for place in _PLACES]
    late = sum([beyond for _, _, beyond in points])
    odds_of_late = sum([beyond * (_LOGIT + slope * x) for x, _, beyond in points])
    found: Iterable[float] = [odds_of_late - late * rise for rise in rises]
    factors = _factors(slope)
    for x, within, beyond in points:
        odds = map(mul, repeat(math.exp(_LOGIT + slope * x)), factors)
        found = map(sub, found, map(mul, repeat(within + beyond), map(math.log1p, odds)))
    return list(found)


@cache
def _factors(slope: float) -> tuple[float, ...]:
    """By how much the odds at a rate are less with the limit at each of `_PLACES` than with the limit in the middle."""
    return tuple(math.exp(-slope * place) for place in _PLACES)


def step_seconds(tried: Sequence[TriedRate], left: float, longest: float) -> float:
    """How long the next step may take with its warm-up, of ``left`` seconds: a share, and ``longest`` at most.

    While a ceiling that all steps tell is still unsure, steps are short, since the next one may be far away. At the
    end one step takes what is left: shorter ones would spend much of it on warming up.
    """
    known = bracket(tried)
    found = ceiling(tried) if known.ratio <= NEAR else None
    if found is not None and found.error is not None:
        if found.error > UNSURE:
            return min(longest, left / UNSURE_STEPS)
        return left if left <= longest else min(longest, left / 2)
    return min(longest, left / max(1, _steps_left(known)))


def _steps_left(known: Bracket) -> int:
    """About how many steps it takes until the bracket is closed, for sharing out the time."""
    if known.low is None or known.high is None:
        return 8
    if known.ratio <= NEAR:
        return 3
    return math.ceil(math.log(math.log(known.ratio) / math.log(NEAR), 2)) + 4
