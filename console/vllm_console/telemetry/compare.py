"""Whether a change helped: two runs' windows set beside each other, conservatively. Pure.

The minutes after the start and at the edges of the traffic are left out. Then it is asked whether the traffic was
alike: as many requests a second, as long prompts and answers. Where clients wait for answers the rate is what the
server makes of it, and as many requests in flight are as good. Where only some minutes were alike, only these are
compared. A figure is better or worse when its median moved by at least 5 % and the interval of that movement, widened
for the number of figures that are judged, does not hold zero; and never in the direction in which a difference of
traffic points anyway.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vllm_console.telemetry.compare_words import notes, sentence
from vllm_console.telemetry.comparison import Comparison, Factor, Figure, Likeness, Side, Verdict
from vllm_console.telemetry.ledger import FlagChange, Run, changes
from vllm_console.telemetry.resample import difference, median
from vllm_console.telemetry.run_windows import WINDOW_SECONDS, RunWindow

WARM_UP = 2
"""Windows after a start that are left out: compiling goes on, and the prefix cache fills."""
FEWEST = 5
"""Windows of each run below which nothing is said."""
MOST = 120
"""Windows of each run that are looked at, the newest."""
MOST_EARLIER = 60
"""Windows of an earlier run that are looked at for how figures drift."""
SMALLEST_CHANGE = 0.05
SMALLEST_SHARE = 0.005
"""Changes below these are none, however sure: of a figure, and of a share such as preemptions per request."""
ALIKE, ROUGHLY = 0.10, 0.25
"""Traffic is alike up to 10 % more or less, and roughly alike up to 25 %."""
STEADY = 0.03
"""How much the requests in flight vary at most, as a share, where clients wait for answers."""
DRAINING = 0.1
"""Windows in which less than this share of the usual requests came are left out."""
ENOUGH_FOR_P99 = {"ttft_p99": 30.0, "e2e_p99": 30.0}
"""Requests in a window below which a 99th percentile is only its slowest one."""

_FACTORS = (
    ("requests_per_second", "requests", "/s"),
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
    ("preemption_share", "preempted", "share"),
    ("preemptions_per_minute", "preemptions", "/min"),
    ("kv_cache_usage", "KV cache", "share"),
    ("hit_rate", "prefix hits", "share"),
)
_LARGEST = 20.0
"""Bounds of a ratio beyond all measure, as a power of e."""
THROUGHPUT = "generation_tokens_per_second"
JUDGED = (*(f"{key}_{part}" for key, _ in _LATENCIES for part in ("mean", "p99")), THROUGHPUT, "preemption_share")
LEVEL = 1 - 0.05 / len(JUDGED)
_GOALS = {
    "ttft_p99": "ttft_p99_seconds",
    "itl_p99": "itl_p99_seconds",
    "kv_cache_usage": "kv_cache_usage",
    "preemption_share": "preemption_rate",
}


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run with its windows, oldest first. ``warm_at`` is when its first `WARM_UP` windows had ended."""

    run: Run
    windows: Sequence[RunWindow]
    warm_at: float | None = None


@dataclass(frozen=True, slots=True)
class _Traffic:
    """How alike the traffic was. ``waiting``: clients wait for answers; ``heavier``, ``lighter``: it was so after."""

    likeness: Likeness
    factors: tuple[Factor, ...]
    waiting: bool = False
    heavier: bool = False
    lighter: bool = False


def compare(before: Recorded, after: Recorded, earlier: Recorded | None = None) -> Comparison:
    """Set two runs side by side; ``before`` is what ``after`` is measured against.

    A longer ``earlier`` run of the same server shows how its figures drift, which short runs hide.
    """
    one, other = usable(before), usable(after)
    matched = False
    traffic = _traffic(one, other)
    if traffic.likeness is Likeness.DIFFERENT:
        pair = _alike_only(one, other)
        if pair is not None and (like := _traffic(*pair)).likeness is not Likeness.DIFFERENT:
            (one, other), traffic, matched = pair, like, True
    sides = tuple(_side(recorded, used) for recorded, used in ((before, one), (after, other)))
    enough = not sides[0].missing and not sides[1].missing
    drift = _alike(usable(earlier), one)[-MOST_EARLIER:] if earlier is not None and enough else []
    figures = tuple(
        _figure(key, name, unit, one, other, after.run, traffic, _values(drift, key) if enough else None)
        for key, name, unit in _FIGURES
    )
    found = Comparison(
        before=sides[0],
        after=sides[1],
        verdict=_overall(figures, traffic, enough),
        sentence="",
        traffic=traffic.likeness,
        factors=traffic.factors,
        figures=figures,
        differences=differences(before.run, after.run),
    )
    return _told(found, traffic, matched)


def _told(found: Comparison, traffic: _Traffic, matched: bool) -> Comparison:
    return replace(found, sentence=sentence(found), notes=notes(found, waiting=traffic.waiting, matched=matched))


def differences(before: Run, after: Run) -> tuple[FlagChange, ...]:
    """What the two ran with that is not the same: flags, and also model, engine and GPUs."""
    pairs = (
        ("model", before.model, after.model),
        ("engine", _engine(before), _engine(after)),
        ("GPUs", _gpus(before), _gpus(after)),
    )
    besides = (FlagChange(name, one, other) for name, one, other in pairs if one != other and one and other)
    return (*changes(before.flags, after.flags), *besides) if before.flags or after.flags else tuple(besides)


def _engine(run: Run) -> str:
    return " ".join(filter(None, (run.engine, run.version, run.build)))


def _gpus(run: Run) -> str:
    return " ".join(filter(None, (run.gpu_kind, ",".join(map(str, run.gpus)))))


def usable(recorded: Recorded) -> list[RunWindow]:
    """The windows that can be compared: warm, and with traffic from their beginning to their end."""
    warm = [w for w in recorded.windows if recorded.warm_at is not None and w.at >= recorded.warm_at - 0.001]
    # While a queue is worked off after the traffic has ended, nothing comes.
    came = [rate for rate in _values(warm, "requests_per_second") if rate > 0]
    least = DRAINING * median(came) if came else 0.0
    warm = [w for w in warm if w.figures.get("requests_per_second", least) >= least]
    inner = []
    for index, window in enumerate(warm):
        begins = index > 0 and window.at - warm[index - 1].end > window.seconds / 2
        ends = index + 1 < len(warm) and warm[index + 1].at - window.end > window.seconds / 2
        if not begins and not ends:
            inner.append(window)
    return (inner if len(inner) >= FEWEST else warm)[-MOST:]


def _side(recorded: Recorded, used: Sequence[RunWindow]) -> Side:
    seconds = median([window.seconds for window in recorded.windows]) if recorded.windows else WINDOW_SECONDS
    missing = max(0, FEWEST - len(used))
    if missing and recorded.warm_at is None:
        missing += WARM_UP - min(WARM_UP, len(recorded.windows))
    return Side(recorded.run, recorded.run.windows, len(used), missing, seconds)


def _values(windows: Sequence[RunWindow], key: str) -> list[float]:
    return [window.figures[key] for window in windows if key in window.figures]


def _middle(windows: Sequence[RunWindow], key: str) -> float | None:
    values = _values(windows, key)
    return median(values) if values else None


# -- traffic -------------------------------------------------------------------------------------------------------


def _traffic(before: Sequence[RunWindow], after: Sequence[RunWindow]) -> _Traffic:
    factors = tuple(_factor(key, name, unit, before, after) for key, name, unit in _FACTORS)
    by_key = {factor.key: factor for factor in factors}
    rate, flying = by_key["requests_per_second"], by_key["in_flight"]
    waiting = (
        rate.likeness is not Likeness.ALIKE
        and flying.likeness is Likeness.ALIKE
        and flying.before is not None
        and flying.before >= 2
        and _steady(_values(before, "in_flight"))
        and _steady(_values(after, "in_flight"))
    )
    counted = [by_key[key] for key in _LENGTHS] + ([] if waiting else [rate])
    grades = {factor.likeness for factor in counted}
    worst = next(
        (grade for grade in (Likeness.DIFFERENT, Likeness.ROUGHLY) if grade in grades),
        Likeness.UNKNOWN if rate.likeness is Likeness.UNKNOWN else Likeness.ALIKE,
    )
    more = [factor.change for factor in counted if factor.key in _LOAD and factor.change is not None]
    return _Traffic(
        worst,
        factors,
        waiting,
        heavier=any(change > ALIKE for change in more),
        lighter=any(change < -ALIKE for change in more),
    )


def _steady(values: Sequence[float]) -> bool:
    """Whether so many requests are in flight all the time, as when clients send one when one is answered."""
    middle = median(values)
    return median([abs(value - middle) for value in values]) <= STEADY * middle


def _factor(key: str, name: str, unit: str, before: Sequence[RunWindow], after: Sequence[RunWindow]) -> Factor:
    one, other = _middle(before, key), _middle(after, key)
    # A 95th percentile is known to a bucket only, and the next bucket begins at twice as much or more.
    wide = 6.0 if key.endswith("p95") else 1.0
    return Factor(key, name, unit, one, other, _likeness(one, other, wide))


def _likeness(one: float | None, other: float | None, wide: float = 1.0) -> Likeness:
    if one is None or other is None:
        return Likeness.UNKNOWN
    if one <= 0 or other <= 0:
        return Likeness.ALIKE if one == other else Likeness.DIFFERENT
    apart = max(one / other, other / one) - 1
    return (
        Likeness.ALIKE if apart <= ALIKE * wide else Likeness.ROUGHLY if apart <= ROUGHLY * wide else Likeness.DIFFERENT
    )


def _alike_only(
    before: Sequence[RunWindow], after: Sequence[RunWindow]
) -> tuple[list[RunWindow], list[RunWindow]] | None:
    """The windows of both whose traffic was like that of the run with fewer of them; None where these are too few."""
    fewer = before if len(before) < len(after) else after
    if min(len(before), len(after)) < FEWEST:
        return None
    one, other = _alike(before, fewer), _alike(after, fewer)
    return (one, other) if min(len(one), len(other)) >= FEWEST else None


def _alike(windows: Sequence[RunWindow], pattern: Sequence[RunWindow]) -> list[RunWindow]:
    """Those windows whose traffic was like that of ``pattern``; none where that is not known."""
    middles = {key: middle for key in _LOAD if (middle := _middle(pattern, key)) is not None}
    if len(middles) < len(_LOAD):
        return []

    def like(window: RunWindow) -> bool:
        return all(
            _likeness(middle, window.figures.get(key)) in (Likeness.ALIKE, Likeness.ROUGHLY)
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
) -> Figure:
    """``earlier`` is None where there are too few windows to judge by."""
    goal = run.objectives.get(_GOALS.get(key, ""))
    one, other = _values(before, key), _values(after, key)
    if not one or not other:
        verdict = Verdict.TOO_LITTLE if key in JUDGED and (one or other) else None
        return Figure(
            key, name, unit, median(one) if one else None, median(other) if other else None, verdict=verdict, goal=goal
        )
    if min(len(one), len(other)) < FEWEST or earlier is None:
        verdict = Verdict.TOO_LITTLE if key in JUDGED else None
        change = median(other) - median(one)
        return Figure(key, name, unit, median(one), median(other), change, verdict=verdict, goal=goal)
    change, low, high = _difference(one, other, unit, earlier)
    figure = Figure(key, name, unit, median(one), median(other), change, low, high, goal=goal)
    if key not in JUDGED or not _enough_for(key, before, after):
        return figure
    return replace(figure, verdict=_judge(figure, traffic))


def _difference(
    before: Sequence[float], after: Sequence[float], unit: str, earlier: Sequence[float]
) -> tuple[float, float, float]:
    """A change and its interval; of latencies and rates by their ratio, since they scatter in shares of themselves."""
    if unit == "share" or min(*before, *after) <= 0:
        return difference(before, after, LEVEL, earlier)
    logs = [[math.log(value) for value in values if value > 0] for values in (before, after, earlier)]
    ratios = difference(logs[0], logs[1], LEVEL, logs[2])
    one, other = median(before), median(after)
    low, high = (one * math.expm1(min(bound, _LARGEST)) for bound in ratios[1:])
    return other - one, low, high


def _enough_for(key: str, before: Sequence[RunWindow], after: Sequence[RunWindow]) -> bool:
    """Whether a quantile rests on enough requests in each window."""
    fewest = ENOUGH_FOR_P99.get(key, 0.0)
    return all((_middle(windows, "requests") or 0.0) >= fewest for windows in (before, after))


def _judge(figure: Figure, traffic: _Traffic) -> Verdict:
    if traffic.likeness in (Likeness.DIFFERENT, Likeness.UNKNOWN):
        return Verdict.NOT_COMPARABLE
    assert figure.before is not None
    assert figure.change is not None
    assert figure.low is not None
    assert figure.high is not None
    least = max(SMALLEST_CHANGE * abs(figure.before), SMALLEST_SHARE if figure.unit == "share" else 0.0)
    more, less = _explained(figure, traffic)
    rose = figure.change - more >= least and figure.low > more
    fell = figure.change - less <= -least and figure.high < less
    if not rose and not fell:
        return Verdict.NO_DIFFERENCE
    better = rose if figure.key == THROUGHPUT else fell
    if figure.key != THROUGHPUT and ((better and traffic.lighter) or (not better and traffic.heavier)):
        return Verdict.NOT_COMPARABLE
    return Verdict.BETTER if better else Verdict.WORSE


def _explained(figure: Figure, traffic: _Traffic) -> tuple[float, float]:
    """How much of a rise, and of a fall, the traffic alone brings about: a server generates what it is asked for."""
    if figure.key != THROUGHPUT or traffic.waiting or figure.before is None:
        return 0.0, 0.0
    asked = 1.0
    for factor in traffic.factors:
        if factor.key in ("requests_per_second", "answer_length_mean"):
            asked *= 1 + (factor.change or 0.0)
    moved = (asked - 1) * figure.before
    return max(0.0, moved), min(0.0, moved)


def _overall(figures: Sequence[Figure], traffic: _Traffic, enough: bool) -> Verdict:
    if not enough:
        return Verdict.TOO_LITTLE
    said = {figure.verdict for figure in figures if figure.verdict is not None}
    if traffic.likeness in (Likeness.DIFFERENT, Likeness.UNKNOWN):
        return Verdict.NOT_COMPARABLE
    if Verdict.BETTER in said and Verdict.WORSE in said:
        return _weighed(figures)
    if Verdict.BETTER in said:
        return Verdict.BETTER
    for verdict in (Verdict.WORSE, Verdict.NOT_COMPARABLE, Verdict.NO_DIFFERENCE):
        if verdict in said:
            return verdict
    return Verdict.TOO_LITTLE


def _weighed(figures: Sequence[Figure]) -> Verdict:
    """Where some figures are better and others worse: what whole requests take decides, unless objectives object."""
    whole = next((figure.verdict for figure in figures if figure.key == "e2e_mean"), None)
    goals = {figure.meets for figure in figures}
    if whole is Verdict.BETTER and (True, False) not in goals:
        return Verdict.BETTER
    return Verdict.WORSE if whole is Verdict.WORSE and (False, True) not in goals else Verdict.MIXED
