"""Whether a change helped: compares two runs' windows conservatively. Pure.

The minutes after the start and at the edges of the traffic are left out. Then the traffic is compared: requests per
second, prompt and output lengths. With closed-loop clients, the server determines the rate, so an equal number of
requests in flight is enough. If traffic was similar in only some minutes, only these are compared. A figure is better
or worse if its median moved by at least 5% and the interval of that movement, widened for the number of figures judged,
excludes zero; but never in the direction in which a difference in traffic would move it anyway. If the interval
includes zero and also a large movement, the figure is inconclusive.

If a quantile is only known to lie below the end of its bucket, that end is used: it moves less than the real quantile,
never more.

The run after is judged when it has `FEWEST` windows, again at twice as many, and so on up to `MOST_WINDOWS`. The first
difference found over enough requests is kept, because traffic of a later hour says nothing about the change. A slowdown
is not kept while there are far fewer prefix hits than before: the cache may still be filling.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from enum import StrEnum
from statistics import median

import msgspec
from msgspec.structs import replace

from vllm_console.history import energy
from vllm_console.metrics.quantile import PARTS, Quantile, middle
from vllm_console.runs.confidence import difference
from vllm_console.runs.store import FlagChange, Run, changes
from vllm_console.runs.windows import WINDOW_SECONDS, RunWindow, adjoin, by_exact, exact_keys

THROUGHPUT = "generation_tokens_per_second"
MAJOR = ("ttft_mean", "e2e_mean", THROUGHPUT)
"""Latency and throughput: while one of these is inconclusive, minor figures do not decide the verdict. A figure that
missed its objective before counts as major too, since the change was meant to improve it; so does one that got worse
and newly misses it (`ComparedFigure.newly_missed`).
"""


SHARES = ("share", "per request")
"""Units in which a change is given in points, since the share itself may be zero."""
COUNTS = ("per request", "/min")
"""Units of figures that count events, such as preemptions."""
WARM_UP = 2
"""Windows left out after a start, while compilation continues and the prefix cache fills."""
FEWEST = 5
"""Minimum windows of each run for a verdict."""
MOST_WINDOWS = 120
"""Maximum number of windows used of the run after (its oldest)."""
NEAREST = 10
"""Number of windows used of the run before (its newest), unless twice those of the run after is more."""
MOST_WINDOWS_SEARCHED = 4 * MOST_WINDOWS
"""Maximum number of windows of the run after that are searched."""
ENOUGH_REQUESTS = 100
"""A difference over at least this many requests of each run is kept, whatever comes later."""
MOST_EARLIER = 60
"""Maximum number of windows of an earlier run used to estimate drift."""
SMALLEST_CHANGE = 0.05
SMALLEST_SHARE = 0.005
"""Smaller changes count as no difference, however certain: relative for a figure, absolute for a share."""
LARGE_CHANGE, LARGE_SHARE = 0.25, 0.05
"""A median that moved this much does not count as unchanged: relative for a figure, absolute for a share."""
WIDEST, WIDEST_SHARE = 20.0, 1.0
"""Intervals around zero are not shown if their ends differ by more than this factor, or a share's by more than this."""
DOUBLED, HALVED = 1.0, -0.5
"""If a change this large is possible, a figure is inconclusive."""
ALIKE_WITHIN, ROUGHLY_WITHIN = 0.10, 0.25
"""Traffic within 10% is similar, within 25% roughly similar."""
OTHER_LOAD_FACTOR = 2.0
"""A window with more than this many times the load, or less than its inverse, counts as different traffic."""
STEADY = 0.03
"""Largest relative variation (median absolute deviation) of requests in flight for closed-loop clients."""
DRAINING = 0.1
"""Windows with less than this share of the usual requests are left out."""
HITS_APART = 0.2
"""A change of the prefix hits by at least this share may itself explain a difference."""
ENOUGH_FOR_P99 = {"ttft_p99": 30.0, "e2e_p99": 30.0}
"""With fewer requests in a window, the 99th percentile is just the slowest request."""

_FACTORS = (
    ("requests_per_second", "arrivals", "/s"),
    ("prompt_length_mean", "prompt length", "tokens"),
    ("answer_length_mean", "answer length", "tokens"),
    ("prompt_length_p95", "prompt length p95", "tokens"),
    ("answer_length_p95", "answer length p95", "tokens"),
    ("in_flight", "requests in flight", ""),
)
_LOAD = ("requests_per_second", "prompt_length_mean", "answer_length_mean")
_LENGTHS = tuple(key for key, _, _ in _FACTORS if "length" in key)

_LATENCIES = (("ttft", "TTFT"), ("itl", "ITL"), ("e2e", "end-to-end"))
_FIGURES = (
    *((f"{key}_{part}", f"{name} {part}", "s") for key, name in _LATENCIES for part in ("mean", "p50", "p90", "p99")),
    ("generation_tokens_per_second", "tokens out", "/s"),
    ("prompt_tokens_per_second", "tokens in", "/s"),
    ("preemption_share", "preemptions/req", "per request"),
    ("preemptions_per_minute", "preemptions", "/min"),
    ("kv_cache_usage", "KV cache mean", "share"),
    ("hit_rate", "prefix hits", "share"),
    *zip(energy.FIGURES, ("J/token out", "J/token", "J/request"), ("J", "J", "J"), strict=True),
)
_LENGTH_QUANTILES = tuple(key for key in _LENGTHS if key.endswith("p95"))
QUANTILES = tuple(f"{key}_{part}" for key, _ in _LATENCIES for part, _ in PARTS)
_LARGEST = 20.0
"""Cap on a log ratio."""
JUDGED = (*(f"{key}_{part}" for key, _ in _LATENCIES for part in ("mean", "p99")), THROUGHPUT, "preemption_share")
LEVEL = 1 - 0.05 / len(JUDGED)
_OBJECTIVES = {
    "ttft_p99": "ttft_p99_seconds",
    "itl_p99": "itl_p99_seconds",
    "kv_cache_usage": "kv_cache_usage",
    "preemption_share": "preemption_rate",
}


class ComparisonVerdict(StrEnum):
    """The verdict on a change. `MIXED` applies only to a whole comparison: some figures are better, others worse."""

    BETTER = "better"
    WORSE = "worse"
    MIXED = "mixed"
    NO_DIFFERENCE = "no significant difference"
    INCONCLUSIVE = "inconclusive"
    """It moved a lot, or may have, but its windows vary so much that this may be chance."""
    NOT_COMPARABLE = "not comparable"
    TOO_LITTLE = "not enough data"


DECIDED = (ComparisonVerdict.BETTER, ComparisonVerdict.WORSE, ComparisonVerdict.MIXED)
"""Verdicts that state an effect of the change."""


class TrafficMatch(StrEnum):
    """How similar one aspect of the traffic was."""

    ALIKE = "similar"
    ROUGHLY = "roughly similar"
    DIFFERENT = "different"
    UNKNOWN = "not reported"


class ComparedFigure(msgspec.Struct, frozen=True):
    """One figure before and after: medians over windows, in ``unit`` (``s``, ``/s``, ``share``, ``/min``).

    ``change`` is after minus before, ``low`` and ``high`` its interval, jointly at 95% for all judged figures.
    ``verdict`` is None for figures that are only displayed. ``objective`` is None if there is none. ``buckets`` are
    those of a quantile's two medians: if one has a single end, ``before`` or ``after`` is that end
    (`Quantile.nearest`).
    """

    key: str
    name: str
    unit: str
    before: float | None
    after: float | None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    verdict: ComparisonVerdict | None = None
    objective: float | None = None
    buckets: tuple[Quantile | None, Quantile | None] = (None, None)
    exact: bool = False
    """Whether it is a quantile that is exact in every minute of both runs."""
    variable: bool = False
    """Whether its minutes vary so much that the interval is uninformative; ``low`` and ``high`` are then None."""

    @property
    def bounded(self) -> tuple[bool, bool]:
        """For ``before`` and ``after``: whether the value is only the end of a bucket."""
        one, other = (bucket is not None and bucket.value is None for bucket in self.buckets)
        return one, other

    @property
    def incomparable(self) -> bool:
        """Whether both medians fell into the same bucket with one end: their difference is unknown."""
        return all(self.bounded) and self.before == self.after

    def share(self, value: float | None) -> float | None:
        """A change as a share of the figure before; None if that is zero."""
        return value / self.before if value is not None and self.before else None

    @property
    def missed(self) -> bool:
        """Whether it missed its objective before, so that the change was meant to improve it."""
        return self.verdict is not None and self.meets is not None and not self.meets[0]

    @property
    def newly_missed(self) -> bool:
        """Whether it got worse and no longer meets its objective."""
        return self.verdict is ComparisonVerdict.WORSE and self.meets == (True, False)

    @property
    def major(self) -> bool:
        """Whether a verdict may rest on it alone."""
        return self.key in MAJOR or self.missed or self.newly_missed

    @property
    def meets(self) -> tuple[bool, bool] | None:
        """Whether the objective was met before, and after."""
        if self.objective is None or self.before is None or self.after is None:
            return None
        one, other = (
            value <= self.objective if bucket is None else bucket.within(self.objective)
            for value, bucket in zip((self.before, self.after), self.buckets, strict=True)
        )
        return None if one is None or other is None else (one, other)


class Factor(msgspec.Struct, frozen=True):
    """One property of the traffic before and after, as medians over windows.

    ``open`` says for each value whether it is only a lower bound: a p95 of lengths above vLLM's last bucket. ``exact``
    says whether a length quantile is exact in every minute of both runs.
    """

    key: str
    name: str
    unit: str
    before: float | None
    after: float | None
    likeness: TrafficMatch
    open: tuple[bool, bool] = (False, False)
    exact: bool = False

    @property
    def noise(self) -> bool:
        """Whether it is a length quantile, which scatters so much that even a large change may be chance."""
        return self.key in _LENGTH_QUANTILES

    @property
    def change(self) -> float | None:
        """The relative change, after versus before; None if unknown."""
        if any(self.open) or not self.before or self.after is None:
            return None
        return (self.after - self.before) / self.before


class Side(msgspec.Struct, frozen=True):
    """One of the two runs: how many windows it has, were compared, and are still needed; and the window length.

    ``requests`` is the number of requests that ended in the compared windows; ``since`` and ``until`` (Unix seconds)
    bound these windows, None if there are none.
    """

    run: Run
    windows: int
    compared: int
    missing: int
    seconds: float
    requests: float = 0.0
    since: float | None = None
    until: float | None = None

    @property
    def by_minute(self) -> bool:
        """Whether its windows count as minutes; a tolerance is needed because scrapes do not end on the second."""
        return 50 <= self.seconds <= 70

    @property
    def minutes_missing(self) -> float:
        """How many more minutes of traffic are needed."""
        return self.missing if self.by_minute else self.missing * self.seconds / 60


class Comparison(msgspec.Struct, frozen=True):
    """Two runs compared; `runs.text` renders the result.

    ``traffic`` is how similar the traffic was overall. ``differences`` lists differences in flags, and in ``model``,
    ``engine`` or ``GPUs``. ``closed_loop``: clients seem to wait for answers, so the request rate counts as a result.
    ``matched``: only minutes with similar traffic were compared. ``kept``: later traffic does not change the result any
    more. ``again`` is the number of windows of the run after at which it is judged again, None if it is not.
    ``skipped`` lists the runs in between that are too short to compare.
    """

    before: Side
    after: Side
    verdict: ComparisonVerdict
    traffic: TrafficMatch
    factors: tuple[Factor, ...]
    figures: tuple[ComparedFigure, ...]
    differences: tuple[FlagChange, ...]
    closed_loop: bool = False
    matched: bool = False
    kept: bool = False
    again: int | None = None
    skipped: tuple[Run, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether neither run has any data, so that there is no figure to show."""
        known = [(one.before, one.after) for one in self.factors] + [(one.before, one.after) for one in self.figures]
        return all(pair == (None, None) for pair in known)

    @property
    def judged(self) -> tuple[ComparedFigure, ...]:
        """The figures that the verdict rests on."""
        return tuple(figure for figure in self.figures if figure.verdict is not None)

    @property
    def hits_apart(self) -> ComparedFigure | None:
        """The prefix hits, if they changed by at least `HITS_APART` although prefix caching was not switched."""
        if any(change.flag == "enable-prefix-caching" for change in self.differences):
            return None
        hits = next((figure for figure in self.figures if figure.key == "hit_rate"), None)
        return hits if hits is not None and abs(hits.change or 0.0) >= HITS_APART else None


class Recorded(msgspec.Struct, frozen=True):
    """A run with its windows, oldest first. ``warm_at`` is when its first `WARM_UP` windows ended."""

    run: Run
    windows: Sequence[RunWindow]
    warm_at: float | None = None


class _Traffic(msgspec.Struct, frozen=True):
    """How similar the traffic was. ``closed_loop``: clients wait for answers; ``heavier``, ``lighter``: afterwards."""

    likeness: TrafficMatch
    factors: tuple[Factor, ...]
    closed_loop: bool = False
    heavier: bool = False
    lighter: bool = False


def compare(before: Recorded, after: Recorded, earlier: Recorded | None = None) -> Comparison:
    """Compare two runs; ``before`` is the baseline for ``after``.

    A longer ``earlier`` run of the same server shows drift that short runs hide; so do older windows of ``before``.
    """
    one = usable(_warm(before))
    drift = max(one, usable(_warm(earlier)) if earlier is not None else [], key=len)
    found = None
    for other, again in _stages(_warm(after)[:MOST_WINDOWS_SEARCHED]):
        found = _compare(before, after, one[-max(NEAREST, 2 * len(other)) :], other, drift)
        found = replace(found, again=again if after.run.ended_at is None else None)
        decided = found.verdict in DECIDED and min(found.before.requests, found.after.requests) >= ENOUGH_REQUESTS
        if (decided and not _maybe_cold(found)) or len(other) >= MOST_WINDOWS:
            return replace(found, kept=True, again=None)
    return found if found is not None else _compare(before, after, one[-NEAREST:], usable(_warm(after)), drift)


def _maybe_cold(found: Comparison) -> bool:
    """Whether the prefix cache may still be filling after the start, which would explain a slowdown."""
    hits = found.hits_apart
    return found.verdict is not ComparisonVerdict.BETTER and hits is not None and (hits.change or 0.0) < 0


def _stages(windows: Sequence[RunWindow]) -> Iterator[tuple[list[RunWindow], int]]:
    """The usable windows each time a run is judged (later ones do not affect them), and the number needed next."""
    due = FEWEST
    for end in range(FEWEST, len(windows) + 1):
        if end >= due and len(found := usable(windows[:end])) >= due:
            yield found, min(2 * due, MOST_WINDOWS)
            due = min(2 * due, MOST_WINDOWS) if due < MOST_WINDOWS else len(windows) + 1


def _compare(
    before: Recorded,
    after: Recorded,
    one: list[RunWindow],
    other: list[RunWindow],
    drift: Sequence[RunWindow],
) -> Comparison:
    """Compare two runs over these windows; ``drift`` are those of an earlier run."""
    alike = _without_other_traffic(one, other)
    matched = len(alike) < len(one)
    one = alike
    traffic = _traffic(one, other)
    if traffic.likeness is TrafficMatch.DIFFERENT:
        pair = _alike_only(one, other)
        if pair is not None and (like := _traffic(*pair)).likeness is not TrafficMatch.DIFFERENT:
            (one, other), traffic, matched = pair, like, True
    sides = tuple(
        _side(recorded, used, like) for recorded, used, like in ((before, one, after), (after, other, before))
    )
    enough = not sides[0].missing and not sides[1].missing
    drift = _alike(drift, one)[-MOST_EARLIER:] if enough else []
    # Mixing one run's estimates with the other's exact quantiles would itself cause a difference.
    exact = exact_keys(one, QUANTILES) & exact_keys(other, QUANTILES)
    one, other, drift = by_exact(one, exact), by_exact(other, exact), by_exact(drift, exact_keys(drift, exact))
    figures = tuple(
        replace(
            _figure(key, name, unit, one, other, after.run, traffic, _values(drift, key) if enough else None),
            exact=key in exact,
        )
        for key, name, unit in _FIGURES
        # Most machines report no energy: omit the rows.
        if key not in energy.FIGURES or _values(one, key) or _values(other, key)
    )
    return Comparison(
        before=sides[0],
        after=sides[1],
        verdict=_overall(figures, traffic, enough),
        traffic=traffic.likeness,
        factors=traffic.factors,
        figures=figures,
        differences=differences(before.run, after.run),
        closed_loop=traffic.closed_loop,
        matched=matched,
    )


def differences(before: Run, after: Run) -> tuple[FlagChange, ...]:
    """The differences between the two: flags, and also model, engine and GPUs."""
    pairs = (
        ("model", before.model, after.model),
        ("engine", _engine(before), _engine(after)),
        _gpus(before, after),
    )
    besides = [FlagChange(name, one, other) for name, one, other in pairs if one != other and one and other]
    return (*changes(before.flags, after.flags), *besides) if before.flags or after.flags else tuple(besides)


def _engine(run: Run) -> str:
    return " ".join(filter(None, (run.engine, run.version, run.build)))


def _gpus(before: Run, after: Run) -> tuple[str, str, str]:
    """The GPUs of both, where known for both: a run planned on a recorded host may lack the list or the model."""
    kinds = bool(before.gpu_kind and after.gpu_kind)
    lists = bool(before.gpus and after.gpus)
    one, other = (
        " ".join(filter(None, (run.gpu_kind if kinds else "", ",".join(map(str, run.gpus)) if lists else "")))
        for run in (before, after)
    )
    return "GPUs", one, other


def _warm(recorded: Recorded) -> list[RunWindow]:
    return [w for w in recorded.windows if recorded.warm_at is not None and w.at >= recorded.warm_at - 0.001]


def usable(windows: Sequence[RunWindow]) -> list[RunWindow]:
    """Of warm windows, the comparable ones: with traffic from beginning to end."""
    # While a queue drains at the end of the traffic, no requests arrive.
    came = [rate for rate in _values(windows, "requests_per_second") if rate > 0]
    least = DRAINING * median(came) if came else 0.0
    busy = [w for w in windows if w.figures.get("requests_per_second", least) >= least]
    inner = []
    for index, window in enumerate(busy):
        begins = index > 0 and not adjoin(busy[index - 1], window)
        ends = index + 1 < len(busy) and not adjoin(window, busy[index + 1])
        if not begins and not ends:
            inner.append(window)
    return inner if len(inner) >= FEWEST else busy


def _side(recorded: Recorded, used: Sequence[RunWindow], other: Recorded) -> Side:
    """``other`` is the other run; its window length is assumed if this one has no windows yet."""
    known = recorded.windows or other.windows
    seconds = median([window.seconds for window in known]) if known else WINDOW_SECONDS
    missing = max(0, FEWEST - len(used))
    if missing and recorded.warm_at is None:
        missing += WARM_UP - min(WARM_UP, len(recorded.windows))
    since, until = (used[0].at, used[-1].end) if used else (None, None)
    requests = sum(_values(used, "requests"))
    return Side(recorded.run, recorded.run.windows, len(used), missing, seconds, requests, since, until)


def _values(windows: Sequence[RunWindow], key: str) -> list[float]:
    if key in QUANTILES:
        return [found.nearest for window in windows if (found := window.quantile(key)) is not None]
    return [window.figures[key] for window in windows if key in window.figures]


def _middle(windows: Sequence[RunWindow], key: str) -> float | None:
    values = _values(windows, key)
    return median(values) if values else None


# -- traffic -------------------------------------------------------------------------------------------------------


def _traffic(before: Sequence[RunWindow], after: Sequence[RunWindow]) -> _Traffic:
    factors = tuple(_factor(key, name, unit, before, after) for key, name, unit in _FACTORS)
    by_key = {factor.key: factor for factor in factors}
    rate, flying = by_key["requests_per_second"], by_key["in_flight"]
    closed_loop = (
        rate.likeness is not TrafficMatch.ALIKE
        and flying.likeness is TrafficMatch.ALIKE
        and flying.before is not None
        and flying.before >= 2
        and _steady(_values(before, "in_flight"))
        and _steady(_values(after, "in_flight"))
    )
    counted = [by_key[key] for key in _LENGTHS] + ([] if closed_loop else [rate])
    grades = {factor.likeness for factor in counted}
    worst = next(
        (grade for grade in (TrafficMatch.DIFFERENT, TrafficMatch.ROUGHLY) if grade in grades),
        TrafficMatch.UNKNOWN if rate.likeness is TrafficMatch.UNKNOWN else TrafficMatch.ALIKE,
    )
    more = [factor.change for factor in counted if factor.key in _LOAD and factor.change is not None]
    return _Traffic(
        worst,
        factors,
        closed_loop,
        heavier=any(change > ALIKE_WITHIN for change in more),
        lighter=any(change < -ALIKE_WITHIN for change in more),
    )


def _steady(values: Sequence[float]) -> bool:
    """Whether the number in flight is constant, as with clients that send the next request after an answer."""
    middle = median(values)
    return median([abs(value - middle) for value in values]) <= STEADY * middle


def _factor(key: str, name: str, unit: str, before: Sequence[RunWindow], after: Sequence[RunWindow]) -> Factor:
    if key not in _LENGTH_QUANTILES:
        one, other = _middle(before, key), _middle(after, key)
        return Factor(key, name, unit, one, other, _likeness(one, other))
    exact = bool(exact_keys(before, (key,)) & exact_keys(after, (key,)))
    if exact:
        before, after = by_exact(before, (key,)), by_exact(after, (key,))
    found = [middle([p95 for one in windows if (p95 := one.quantile(key)) is not None]) for windows in (before, after)]
    one, other = (p95.guess if p95 is not None else None for p95 in found)
    is_open = (found[0] is not None and found[0].high is None, found[1] is not None and found[1].high is None)
    # An estimate is known only to its bucket, and buckets at least double in size. An exact one is, per minute, one of
    # the few longest requests.
    return Factor(key, name, unit, one, other, _likeness(one, other, wide=6.0), is_open, exact)


def _likeness(one: float | None, other: float | None, wide: float = 1.0) -> TrafficMatch:
    if one is None or other is None:
        return TrafficMatch.UNKNOWN
    if one <= 0 or other <= 0:
        return TrafficMatch.ALIKE if one == other else TrafficMatch.DIFFERENT
    change = max(one / other, other / one) - 1
    return (
        TrafficMatch.ALIKE
        if change <= ALIKE_WITHIN * wide
        else TrafficMatch.ROUGHLY
        if change <= ROUGHLY_WITHIN * wide
        else TrafficMatch.DIFFERENT
    )


def _without_other_traffic(before: list[RunWindow], after: Sequence[RunWindow]) -> list[RunWindow]:
    """The windows before, without those whose traffic clearly differs from that after, unless too few remain."""
    middles = {key: middle for key in _LOAD if (middle := _middle(after, key))}
    kept = [
        window
        for window in before
        if all(
            1 / OTHER_LOAD_FACTOR <= window.figures.get(key, middle) / middle <= OTHER_LOAD_FACTOR
            for key, middle in middles.items()
        )
    ]
    return kept if len(kept) >= FEWEST else before


def _alike_only(
    before: Sequence[RunWindow], after: Sequence[RunWindow]
) -> tuple[list[RunWindow], list[RunWindow]] | None:
    """The windows of both with traffic like that of the run with fewer windows; None if too few."""
    fewer = before if len(before) < len(after) else after
    if min(len(before), len(after)) < FEWEST:
        return None
    one, other = _alike(before, fewer), _alike(after, fewer)
    return (one, other) if min(len(one), len(other)) >= FEWEST else None


def _alike(windows: Sequence[RunWindow], pattern: Sequence[RunWindow]) -> list[RunWindow]:
    """The windows with traffic like that of ``pattern``; none if that is unknown."""
    middles = {key: middle for key in _LOAD if (middle := _middle(pattern, key)) is not None}
    if len(middles) < len(_LOAD):
        return []

    def like(window: RunWindow) -> bool:
        return all(
            _likeness(middle, window.figures.get(key)) in (TrafficMatch.ALIKE, TrafficMatch.ROUGHLY)
            for key, middle in middles.items()
        )

    return [window for window in windows if like(window)]


# -- figures -------------------------------------------------------------------------------------------------------


def _figure(
    key: str,
    name: str,
    unit: str,
    before: Sequence[RunWindow],
    after: Sequence[RunWindow],
    run: Run,
    traffic: _Traffic,
    earlier: Sequence[float] | None,
) -> ComparedFigure:
    """``earlier`` is None if there are too few windows for a verdict."""
    objective = run.objectives.get(_OBJECTIVES.get(key, ""))
    one, other = _values(before, key), _values(after, key)
    buckets = _bucket(before, key), _bucket(after, key)
    figure = ComparedFigure(
        key,
        name,
        unit,
        median(one) if one else None,
        median(other) if other else None,
        objective=objective,
        buckets=buckets,
    )
    figure = replace(figure, before=_nearest(figure.before, buckets[0]), after=_nearest(figure.after, buckets[1]))
    judged = key in JUDGED and not figure.incomparable
    if figure.before is None or figure.after is None:
        return replace(figure, verdict=ComparisonVerdict.TOO_LITTLE if judged and (one or other) else None)
    figure = replace(figure, change=figure.after - figure.before)
    if min(len(one), len(other)) < FEWEST or earlier is None:
        return replace(figure, verdict=ComparisonVerdict.TOO_LITTLE if judged else None)
    _, low, high = _difference(one, other, unit, earlier)
    figure = replace(figure, low=low, high=high)
    if judged and _enough_for(key, before, after):
        figure = replace(figure, verdict=_judge(figure, traffic))
    return replace(figure, low=None, high=None, variable=True) if _is_variable(figure) else figure


def _is_variable(figure: ComparedFigure) -> bool:
    """Whether the interval includes zero and spans a factor of `WIDEST` (for a share, more than `WIDEST_SHARE`)."""
    before, low, high = figure.before or 0.0, figure.low or 0.0, figure.high or 0.0
    if not low < 0 < high:
        return False
    if figure.unit in SHARES:
        return high - low > WIDEST_SHARE
    return before + high > WIDEST * max(0.0, before + low)


def _bucket(windows: Sequence[RunWindow], key: str) -> Quantile | None:
    """The bucket of a quantile's median over windows; None for other figures."""
    if key not in QUANTILES:
        return None
    return middle([found for window in windows if (found := window.quantile(key)) is not None])


def _nearest(value: float | None, bucket: Quantile | None) -> float | None:
    return value if bucket is None else bucket.nearest


def _difference(
    before: Sequence[float], after: Sequence[float], unit: str, earlier: Sequence[float]
) -> tuple[float, float, float]:
    """A change and its interval; by ratio for latencies and rates, because they scatter multiplicatively."""
    if unit in (*SHARES, *COUNTS) or min(*before, *after) <= 0:
        return difference(before, after, LEVEL, earlier, counts=unit in COUNTS)
    logs = [[math.log(value) for value in values if value > 0] for values in (before, after, earlier)]
    ratios = difference(logs[0], logs[1], LEVEL, logs[2])
    one, other = median(before), median(after)
    low, high = (one * math.expm1(min(bound, _LARGEST)) for bound in ratios[1:])
    return other - one, low, high


def _enough_for(key: str, before: Sequence[RunWindow], after: Sequence[RunWindow]) -> bool:
    """Whether each run has enough requests per window for a quantile."""
    fewest = ENOUGH_FOR_P99.get(key, 0.0)
    return all((_middle(windows, "requests") or 0.0) >= fewest for windows in (before, after))


def _judge(figure: ComparedFigure, traffic: _Traffic) -> ComparisonVerdict:
    if traffic.likeness in (TrafficMatch.DIFFERENT, TrafficMatch.UNKNOWN):
        return ComparisonVerdict.NOT_COMPARABLE
    assert figure.before is not None
    assert figure.change is not None
    assert figure.low is not None
    assert figure.high is not None
    least = max(SMALLEST_CHANGE * abs(figure.before), SMALLEST_SHARE if figure.unit in SHARES else 0.0)
    more, less = _explained(figure, traffic)
    rose = figure.change - more >= least and figure.low > more
    fell = figure.change - less <= -least and figure.high < less
    if not rose and not fell:
        return (
            ComparisonVerdict.INCONCLUSIVE
            if _may_be_large(figure, traffic, more, less)
            else ComparisonVerdict.NO_DIFFERENCE
        )
    better = rose if figure.key == THROUGHPUT else fell
    if figure.key != THROUGHPUT and ((better and traffic.lighter) or (not better and traffic.heavier)):
        return ComparisonVerdict.NOT_COMPARABLE
    return ComparisonVerdict.BETTER if better else ComparisonVerdict.WORSE


def _may_be_large(figure: ComparedFigure, traffic: _Traffic, more: float, less: float) -> bool:
    """Whether a figure without a certain difference moved a lot, or may have moved by any amount.

    ``more`` and ``less`` are the changes that the traffic explains. With open-loop clients, throughput scatters with
    their requests, so it is never inconclusive.
    """
    if figure.change is None or figure.low is None or figure.high is None:
        return False
    if figure.key == THROUGHPUT and not traffic.closed_loop:
        return False
    moved = max(figure.change - more, less - figure.change)
    if figure.unit in SHARES:
        return moved >= LARGE_SHARE
    change, low, high = (figure.share(value) for value in (moved, figure.low - less, figure.high - more))
    if change is None or low is None or high is None:
        return False
    return change >= LARGE_CHANGE or high >= DOUBLED or low <= HALVED


def _explained(figure: ComparedFigure, traffic: _Traffic) -> tuple[float, float]:
    """The rise and the fall that traffic alone explains: a server generates what it is asked for."""
    if figure.key != THROUGHPUT or traffic.closed_loop or figure.before is None:
        return 0.0, 0.0
    asked = 1.0
    for factor in traffic.factors:
        if factor.key in ("requests_per_second", "answer_length_mean"):
            asked *= 1 + (factor.change or 0.0)
    moved = (asked - 1) * figure.before
    return max(0.0, moved), min(0.0, moved)


def _overall(figures: Sequence[ComparedFigure], traffic: _Traffic, enough: bool) -> ComparisonVerdict:
    if not enough:
        return ComparisonVerdict.TOO_LITTLE
    verdicts = {figure.verdict for figure in figures if figure.verdict is not None}
    if traffic.likeness in (TrafficMatch.DIFFERENT, TrafficMatch.UNKNOWN):
        return ComparisonVerdict.NOT_COMPARABLE
    if major_open(figures):
        return ComparisonVerdict.INCONCLUSIVE
    if ComparisonVerdict.BETTER in verdicts and ComparisonVerdict.WORSE in verdicts:
        return _weighed(figures)
    if ComparisonVerdict.BETTER in verdicts:
        return ComparisonVerdict.BETTER
    for verdict in (
        ComparisonVerdict.WORSE,
        ComparisonVerdict.NOT_COMPARABLE,
        ComparisonVerdict.NO_DIFFERENCE,
        ComparisonVerdict.INCONCLUSIVE,
    ):
        if verdict in verdicts:
            return verdict
    return ComparisonVerdict.TOO_LITTLE


def major_open(figures: Sequence[ComparedFigure]) -> bool:
    """Whether a major figure is inconclusive and no other one is decided, so that minor figures may not decide."""
    major = {figure.verdict for figure in figures if figure.major}
    return ComparisonVerdict.INCONCLUSIVE in major and not major.intersection(
        (ComparisonVerdict.BETTER, ComparisonVerdict.WORSE)
    )


def _weighed(figures: Sequence[ComparedFigure]) -> ComparisonVerdict:
    """Weigh figures of which some are better and others worse. An objective newly met or newly missed, or the
    end-to-end latency, decides; unless the other, or throughput, contradicts.
    """

    def found(verdict: ComparisonVerdict, *keys: str) -> bool:
        return any(figure.verdict is verdict for figure in figures if figure.key in keys)

    def objectives(met: tuple[bool, bool], *verdicts: ComparisonVerdict) -> bool:
        return any(figure.meets == met for figure in figures if not verdicts or figure.verdict in verdicts)

    gained, lost = (False, True), (True, False)
    helps = found(ComparisonVerdict.BETTER, "e2e_mean") or objectives(gained, ComparisonVerdict.BETTER)
    harms = found(ComparisonVerdict.WORSE, "e2e_mean") or objectives(lost, ComparisonVerdict.WORSE)
    if helps and not (harms or found(ComparisonVerdict.WORSE, THROUGHPUT) or objectives(lost)):
        return ComparisonVerdict.BETTER
    return ComparisonVerdict.WORSE if harms and not (helps or objectives(gained)) else ComparisonVerdict.MIXED
