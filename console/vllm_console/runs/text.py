"""A comparison as text: the verdict, caveats, and each figure. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from vllm_console.history.energy import FIGURES as ENERGY
from vllm_console.history.energy import Tariff, cost_text, joules_text
from vllm_console.runs.compare import (
    ALIKE_WITHIN,
    FEWEST,
    MOST_WINDOWS,
    QUANTILES,
    WARM_UP,
    ComparedFigure,
    Comparison,
    ComparisonVerdict,
    Factor,
    Side,
    TrafficMatch,
)
from vllm_console.runs.measurement import newest_ramp
from vllm_console.runs.store import FlagChange, Run
from vllm_console.text import UNKNOWN, clock, count, duration, percent, seconds
from vllm_launchers.units import three_digits
from vllm_launchers.vllm.flags.changes import change_text, flag_text

FACTOR = 9.0
"""From this change on (as a share), it is given as a factor: ``×10``."""
_NO_POINTS = "±0 pp"
_NEEDS_DATA = "needs data"
_WORDS = {
    ComparisonVerdict.BETTER: "Better",
    ComparisonVerdict.WORSE: "Worse",
    ComparisonVerdict.MIXED: "Mixed",
    ComparisonVerdict.NO_DIFFERENCE: "No significant difference",
    ComparisonVerdict.INCONCLUSIVE: "Inconclusive",
    ComparisonVerdict.NOT_COMPARABLE: "Not comparable",
    ComparisonVerdict.TOO_LITTLE: "Not enough data",
}


def verdict_text(found: Comparison) -> str:
    """The outcome and its details, or what is missing for a verdict."""
    if found.verdict is ComparisonVerdict.TOO_LITTLE:
        return f"{_WORDS[found.verdict]}: {_needed(found)}."
    return " ".join(filter(None, (plain_sentence(found), detail_text(found))))


def plain_sentence(found: Comparison) -> str:
    """The outcome without statistics: ``The change helped: TTFT mean fell from 1.9s to 1.1s.``"""
    verdict, changed = found.verdict, len(found.differences)
    change = "change" if changed == 1 else "changes"
    better, worse = (
        _largest(_for_headline([figure for figure in found.judged if figure.verdict is one], found))
        for one in (ComparisonVerdict.BETTER, ComparisonVerdict.WORSE)
    )
    if verdict is ComparisonVerdict.BETTER:
        helped = f"The {change} helped" if changed else "The later run was better"
        cost = f", while {_went(worse)}" if worse is not None and worse not in _missing(found)[:1] else ""
        return f"{helped}: {_went(better)}{_reservations(found)}{cost}."
    if verdict is ComparisonVerdict.WORSE:
        return f"{f'The {change} made it worse' if changed else 'The later run was worse'}: {_went(worse)}."
    if verdict is ComparisonVerdict.MIXED:
        return f"Some of it got better and some worse: {_went(better)}, but {_went(worse)}."
    if verdict is ComparisonVerdict.NO_DIFFERENCE:
        return (
            f"{f'The {change}' if changed else 'The later run'} made no measurable difference in these minutes"
            f"{_reservations(found)}."
        )
    if verdict is ComparisonVerdict.INCONCLUSIVE:
        subject = f"whether the {change} helped" if changed else "which run was better"
        return f"Inconclusive {subject}: {_went(_undecided(found)[0])}, which may be chance."
    if verdict is ComparisonVerdict.TOO_LITTLE:
        over = any(side.missing and side.run.ended_at is not None for side in (found.before, found.after))
        return "Too little was measured to compare these runs." if over else "It is too early to tell."
    why = {
        TrafficMatch.DIFFERENT: "their traffic differed",
        TrafficMatch.UNKNOWN: "the server does not report its requests",
    }.get(found.traffic, "their traffic differed enough to explain what changed")
    return f"These runs can't be compared: {why}."


def detail_text(found: Comparison) -> str:
    """What `plain_sentence` and the rows of figures omit, as a sentence; may be empty."""
    if found.verdict is ComparisonVerdict.NO_DIFFERENCE:
        text = _would_show(found) + _open_text(found)
    elif found.verdict is ComparisonVerdict.INCONCLUSIVE:
        first, *others = _undecided(found)
        rest = "".join(f", {_name_and_sides(one)} ({_interval(one)})" for one in others[:1])
        text = f"{first.name} ({_interval(first)}){rest}: the {_compared_of_both(found)} vary too much"
    elif found.verdict is ComparisonVerdict.NOT_COMPARABLE:
        text = _traffic_difference(found)
    else:
        better = _for_headline([one for one in found.judged if one.verdict is ComparisonVerdict.BETTER], found)
        gained = f"; {_moved(better)} is better" if found.verdict is ComparisonVerdict.WORSE and better else ""
        text = (gained + _open_text(found)).removeprefix("; ")
    return f"{text[0].upper()}{text[1:]}." if text else ""


def ceiling_text(found: Comparison) -> str:
    """The ceilings from the newest ramps of both runs: ``8.2 → 9.4 req/s``; empty without a ramp."""
    ramps = [newest_ramp(side.run.measurements) for side in (found.before, found.after)]
    if not any(ramps):
        return ""
    known = (ramp.ceiling_requests_per_second if ramp is not None else None for ramp in ramps)
    return f"{' → '.join(UNKNOWN if one is None else three_digits(one) for one in known)} req/s (by ramps)"


def energy_cost_text(found: Comparison, tariff: Tariff | None) -> str:
    """The energy cost of a million output tokens: ``0.11 → 0.087 EUR``; empty if unknown."""
    known = next((figure for figure in found.figures if figure.key == ENERGY[0]), None)
    if tariff is None or known is None:
        return ""
    before, after = (cost_text(tariff.per_million(one), tariff.currency) for one in (known.before, known.after))
    return f"{before} → {after} per million output tokens"


def _by_weight(figures: Sequence[ComparedFigure]) -> list[ComparedFigure]:
    """Sort figures that missed their objective before (the change was meant to improve them) or newly miss it first,
    then by change.
    """

    def weight(figure: ComparedFigure) -> tuple[bool, float]:
        return not (figure.missed or figure.newly_missed), -abs(figure.share(figure.change) or 0.0)

    return sorted(figures, key=weight)


def _largest(figures: Sequence[ComparedFigure]) -> ComparedFigure | None:
    return next(iter(_by_weight(figures)), None)


def _missing(found: Comparison) -> list[ComparedFigure]:
    """The figures that missed their objective before and did not become better."""
    return [figure for figure in found.judged if figure.missed and figure.verdict is not ComparisonVerdict.BETTER]


def _may_miss(found: Comparison) -> list[ComparedFigure]:
    """The inconclusive figures that met their objective before and seem to miss it now."""
    return [figure for figure in _undecided(found) if figure.meets == (True, False)]


def _reservations(found: Comparison) -> str:
    """``, but preemptions/req did not clearly improve (0.55 → 0.54)``: the first of `_missing` and of `_may_miss`."""
    parts = [
        f"{figure.name} {what} ({side_text(figure, after=False)} → {side_text(figure, after=True)})"
        for figures, what in (
            (_missing(found), "did not clearly improve"),
            (_may_miss(found), "may now miss its objective"),
        )
        for figure in figures[:1]
    ]
    return f", but {', and '.join(parts)}" if parts else ""


def _went(figure: ComparedFigure | None) -> str:
    """``TTFT mean fell from 1.9s to 1.1s``."""
    if figure is None or figure.change is None:
        return "nothing moved clearly"
    moved = "rose" if figure.change > 0 else "fell"
    return f"{figure.name} {moved} from {side_text(figure, after=False)} to {side_text(figure, after=True)}"


def short_verdict(verdict: ComparisonVerdict) -> str:
    """A verdict in one or two words, for a table."""
    short = {
        ComparisonVerdict.NO_DIFFERENCE: "no clear change",
        ComparisonVerdict.TOO_LITTLE: _NEEDS_DATA,
        ComparisonVerdict.NOT_COMPARABLE: "traffic differs",
    }
    return short.get(verdict, str(verdict))


def brief(found: Comparison) -> str:
    """The verdict and the largest change, in a few words: ``Better: TTFT p99 −41%``."""
    word = _WORDS[found.verdict]
    if found.verdict is ComparisonVerdict.INCONCLUSIVE:
        return f"{word}: {_name_and_sides(_undecided(found)[0])} may be noise"
    if found.verdict is ComparisonVerdict.NOT_COMPARABLE:
        why = {TrafficMatch.DIFFERENT: "traffic differs", TrafficMatch.ROUGHLY: "traffic may be the cause"}
        return ": ".join(filter(None, (word, why.get(found.traffic))))
    parts = []
    for verdict in (
        (ComparisonVerdict.BETTER, ComparisonVerdict.WORSE)
        if found.verdict is ComparisonVerdict.MIXED
        else (found.verdict,)
    ):
        figures = _for_headline([figure for figure in found.judged if figure.verdict is verdict], found)
        if figures and verdict is not ComparisonVerdict.NO_DIFFERENCE:
            most = _by_weight(figures)[0]
            parts.append(f"{most.name} {figure_change_text(replace(most, low=None, high=None))}")
    if found.verdict in (ComparisonVerdict.BETTER, ComparisonVerdict.NO_DIFFERENCE):
        parts += [f"{figure.name} still {side_text(figure, after=True)}" for figure in _missing(found)[:1]]
        parts += [f"{figure.name} may now miss its objective" for figure in _may_miss(found)[:1]]
    return f"{word}: {', '.join(parts)}" if parts else word


def _traffic_difference(found: Comparison) -> str:
    """The traffic differences that prevent a comparison; empty if not reported."""
    different, roughly = (
        [factor_text(factor) for factor in found.factors if factor.likeness is one and factor.key != "in_flight"]
        for one in (TrafficMatch.DIFFERENT, TrafficMatch.ROUGHLY)
    )
    if found.traffic is TrafficMatch.DIFFERENT and different:
        return f"traffic differs: {', '.join(different)}"
    if found.traffic is TrafficMatch.UNKNOWN:
        return ""
    moved = _moved([figure for figure in found.judged if figure.verdict is ComparisonVerdict.NOT_COMPARABLE])
    return f"{moved}, but the traffic may be the cause: {', '.join(roughly)}"


def _moved(figures: Sequence[ComparedFigure]) -> str:
    """The figures that moved most, at most two."""
    return ", ".join(f"{figure.name} {figure_change_text(figure)}" for figure in _by_weight(figures)[:2])


def _undecided(found: Comparison) -> list[ComparedFigure]:
    """The inconclusive figures, major ones first."""
    figures = [figure for figure in found.judged if figure.verdict is ComparisonVerdict.INCONCLUSIVE]
    return sorted(_by_weight(figures), key=lambda figure: not figure.major)


def _for_headline(figures: Sequence[ComparedFigure], found: Comparison) -> list[ComparedFigure]:
    """The figures that a headline may name: only major ones while another major one is inconclusive, unless the verdict
    rests on the others.
    """
    undecided = any(figure.major for figure in _undecided(found))
    named = [figure for figure in figures if figure.major or not undecided]
    rests = all(found.verdict in (figure.verdict, ComparisonVerdict.MIXED) for figure in figures)
    return named or (list(figures) if rests else [])


def _open_text(found: Comparison) -> str:
    """A note that a major figure is inconclusive, if the verdict rests on others."""
    major = [figure for figure in _undecided(found) if figure.major]
    return f"; {_name_and_sides(major[0])} is inconclusive" if major else ""


def _name_and_sides(figure: ComparedFigure) -> str:
    return f"{figure.name} {side_text(figure, after=False)} → {side_text(figure, after=True)}"


def _interval(figure: ComparedFigure) -> str:
    """``95% CI −90% to ×12``."""
    if figure.variable:
        return "too variable for an interval"
    if figure.unit == "per request":
        return f"95% CI {_plus_minus(figure.low)} to {_plus_minus(figure.high)}"
    low, high = (signed(figure.share(bound)) for bound in (figure.low, figure.high))
    return f"95% CI {low} to {high}"


def _would_show(found: Comparison) -> str:
    """The smallest detectable change, of the most sensitive figure and of the least sensitive one."""
    reaches = _reaches(found)
    minutes = _compared_of_both(found)
    if not reaches:
        return f"no figure changed over {minutes}"
    best, worst = min(reaches), max(reaches)
    least = f"{best[1]} changes below {percent(max(0.05, best[0]))}"
    most = percent(worst[0]) if worst[0] < 1 else "100%"
    return f"{minutes} can't resolve {least}, or {worst[1]} changes below {most}"


def _reaches(found: Comparison) -> list[tuple[float, str]]:
    """The smallest detectable rise, as a share, of each figure without a visible change."""
    return [
        (reach, figure.name)
        for figure in found.judged
        if figure.verdict is ComparisonVerdict.NO_DIFFERENCE
        and figure.high is not None
        and figure.change is not None
        and (reach := figure.share(figure.high - figure.change)) is not None
    ]


def _needed(found: Comparison) -> str:
    """How much traffic each run needs, and how much the short ones still lack."""
    short = [side for side in (found.before, found.after) if side.missing]
    if not short:
        return "the two runs report no metric in common"
    needed, warm_up = time_text(WARM_UP + FEWEST, short[-1]), _amount(WARM_UP, short[-1])
    parts = "; ".join(_short_of(side, side.run.name) for side in short)
    return f"each run needs {needed} of traffic (the first {warm_up} don't count): {parts}"


def _short_of(side: Side, name: str) -> str:
    """A run's missing traffic: ``chatbot@1 has 2 min and has ended``."""
    if not side.run.served:
        return f"{name} never served a request" + _cause(side.run)
    if side.run.ended_at is not None:
        return f"{name} has {_with_unit(WARM_UP + FEWEST - side.missing, side)} and has ended"
    return f"{name} needs {_with_unit(side.missing, side)} more"


def missing_text(side: Side) -> str:
    """How much more traffic a run needs: ``4 min``; with windows of less than a minute ``2m20s``."""
    return f"{math.ceil(side.minutes_missing)} min" if side.by_minute else _amount(side.missing, side)


def _with_unit(windows: int, side: Side) -> str:
    return f"{_amount(windows, side)} min" if side.by_minute else _amount(windows, side)


def _amount(windows: int, side: Side) -> str:
    """Total length of these windows: the number of minutes, else ``2m20s``, rounded to 5 s from half a minute on."""
    if side.by_minute:
        return str(windows)
    seconds = round(windows * side.seconds)
    return duration(round(seconds / 5) * 5 if seconds >= 30 else seconds)


def time_text(windows: int, side: Side) -> str:
    """Total length of ``windows`` windows: ``7 minutes``; if they are not minutes, ``2m20s``."""
    amount = _amount(windows, side)
    return f"{amount} {'minute' if windows == 1 else 'minutes'}" if side.by_minute else amount


def compared_text(side: Side) -> str:
    """How much of its traffic is compared: ``5 of 8 minutes``, ``1m40s of 2m40s``."""
    return f"{_amount(side.compared, side)} of {time_text(side.windows, side)}"


def _compared_of_both(found: Comparison) -> str:
    """How much of both runs is compared: ``10 + 5 minutes``."""
    before, after = found.before, found.after
    return f"{_amount(before.compared, before)} + {time_text(after.compared, after)}"


def notes(found: Comparison) -> tuple[str, ...]:
    """Caveats, one sentence each."""
    return tuple(filter(None, (
        _skipped_note(found.skipped),
        *(_end_note(side.run, when) for side, when in ((found.after, "after"), (found.before, "before"))),
        _changes_note(found),
        _objectives_note(found),
        "Requests in flight stayed the same, so clients seem to wait for answers: the request rate counts as a result."
        if found.closed_loop else "",
        _matched_note(found) if found.matched else "",
        _rough_note(found),
        _hits_note(found),
        _exact_note(found),
        "The engine is simulated: figures are estimates." if "simulated" in (found.before.run.engine,
                                                                          found.after.run.engine) else "",
    )))  # fmt: skip


def times_note(found: Comparison, now: float) -> str:
    """The times that the verdict covers: ``Compared: 12:03–12:10 before, 12:14–12:19 after.``"""
    ends = [(side.since, side.until) for side in (found.before, found.after)]
    if found.verdict is ComparisonVerdict.TOO_LITTLE or any(since is None or until is None for since, until in ends):
        return ""
    before, after = (f"{clock(since or now, now)}–{clock(until or now, since or now)}" for since, until in ends)
    later = " Later traffic is not included." if found.kept else ""
    if found.again is not None:
        longer = time_text(found.again, found.after)
        later = f" With {longer} after the change it is compared again."
    return f"Compared: {before} before, {after} after.{later}"


def _skipped_note(runs: Sequence[Run]) -> str:
    if not runs:
        return ""
    names = ", ".join(run.name for run in runs[:3]) + (", …" if len(runs) > 3 else "")
    return f"{names} {'was' if len(runs) == 1 else 'were'} skipped: too little traffic to compare with."


def _changes_note(found: Comparison) -> str:
    number = len(found.differences)
    if number > 1:
        names = ", ".join(change.flag for change in found.differences[:4]) + (", …" if number > 4 else "")
        return f"{number} settings changed ({names}): the comparison can't attribute the effect. Change one at a time."
    if number == 0:
        return "Both ran with the same flags: no flag explains a difference."
    return ""


def _cause(run: Run) -> str:
    return f" ({run.cause.replace('_', ' ')})" if run.cause else ""


def _end_note(run: Run, when: str) -> str:
    ended = run.ended
    if not ended or ended.get("requested"):
        return ""
    return f"The run {when} ended unexpectedly{_cause(run)}: {ended.get('reason') or 'reason unknown'}"


def _objectives_note(found: Comparison) -> str:
    broken: list[str] = []
    met: list[str] = []
    for figure in found.figures:
        meets = figure.meets
        sure = figure.low is not None and figure.high is not None and (figure.low > 0 or figure.high < 0)
        if meets is not None and meets[0] != meets[1] and sure:
            (met if meets[1] else broken).append(f"{figure.name} ≤ {value_text(figure.unit, figure.objective)}")
    parts = []
    for now, names in (("Now within", met), ("No longer within", broken)):
        if names:
            parts.append(f"{now} {'its objective' if len(names) == 1 else 'their objectives'}: {', '.join(names)}.")
    return " ".join(parts)


def _matched_note(found: Comparison) -> str:
    used = f"{compared_text(found.before)} before, {compared_text(found.after)} after"
    return f"Only times with similar traffic are compared: {used}."


def _rough_note(found: Comparison) -> str:
    if found.traffic is not TrafficMatch.ROUGHLY or found.verdict is ComparisonVerdict.NOT_COMPARABLE:
        return ""
    roughly = [
        factor for factor in found.factors if factor.likeness is TrafficMatch.ROUGHLY and factor.key != "in_flight"
    ]
    rough, unsure = (", ".join(factor_text(one) for one in roughly if one.noise is noise) for noise in (False, True))
    parts = [f"Traffic was only roughly similar: {rough}." if rough else ""]
    parts.append(f"Traffic may have differed: {unsure}, which may be noise." if unsure else "")
    return " ".join(filter(None, parts))


def _exact_note(found: Comparison) -> str:
    known = [figure for figure in found.figures if figure.key in QUANTILES and figure.change is not None]
    exact = [figure.name for figure in known if figure.exact]
    if not exact:
        return ""
    which = "All quantiles" if len(exact) == len(known) else f"{', '.join(exact)}"
    return f"{which}: exact, from the probe's records."


def _hits_note(found: Comparison) -> str:
    hits = found.hits_apart
    if hits is None or hits.change is None:
        return ""
    why = f"prompts may share {'more' if hits.change > 0 else 'less'} than before"
    if hits.change < 0 and found.after.compared < MOST_WINDOWS:
        why += ", or the cache was still filling after the restart"
    return f"Prefix hits went from {percent(hits.before)} to {percent(hits.after)}: {why}."


def factor_text(factor: Factor) -> str:
    """``requests 2.1/s → 3.4/s (+62%)``."""
    before, after = factor_sides(factor)
    change = f" ({signed(factor.change)})" if factor.change is not None else ""
    return f"{factor.name} {before} → {after}{change}"


def traffic_text(found: Comparison) -> str:
    """How similar the traffic was, or that a run needs more data."""
    early = found.verdict is ComparisonVerdict.TOO_LITTLE and found.traffic is TrafficMatch.UNKNOWN
    return _NEEDS_DATA if early else str(found.traffic)


def likeness_text(factor: Factor, *, early: bool = False) -> str:
    """How similar it was; for a figure with much scatter, whether the change may be noise.

    ``early`` is whether a run is too short to compare: unknown values are then not called "not reported".
    """
    if early and factor.likeness is TrafficMatch.UNKNOWN:
        return _NEEDS_DATA
    small = factor.change is None or abs(factor.change) <= ALIKE_WITHIN
    if not factor.noise or factor.likeness not in (TrafficMatch.ALIKE, TrafficMatch.ROUGHLY) or small:
        return str(factor.likeness)
    return "within the noise" if factor.likeness is TrafficMatch.ALIKE else "may be noise"


def factor_sides(factor: Factor) -> tuple[str, str]:
    """Its value before and after; an inexact length quantile is an estimate within a bucket: ``~850 tokens``.

    Above the last bucket it is only ``>20.0k tokens``.
    """
    before, after = map(partial(_side_of_factor, factor), (factor.before, factor.after), factor.open)
    return before, after


def _side_of_factor(factor: Factor, value: float | None, is_open: bool) -> str:
    text = amount_text(factor.unit, value)
    if not factor.key.endswith("p95") or value is None or factor.exact:
        return text
    return f"{'>' if is_open else '~'}{text}"


def figure_change_text(figure: ComparedFigure) -> str:
    """``−31% (−42 to −18%)``; in percentage points for shares, absolute if the figure was zero before."""
    if figure.change is None or figure.incomparable:
        return UNKNOWN
    if any(figure.bounded):
        # A bound replaced a value beyond it, so the real change is larger.
        return f"over {signed(figure.share(figure.change))}"
    if figure.variable:
        return f"{figure_change_text(replace(figure, variable=False))}, too variable"
    if figure.unit == "per request":
        return _more_per_request(figure)
    if figure.unit == "share":
        if figure.low is None or {_points(value) for value in (figure.low, figure.change, figure.high)} == {_NO_POINTS}:
            return _points(figure.change)
        return f"{_points(figure.change)} ({_points(figure.low).removesuffix(' pp')} to {_points(figure.high)})"
    share = figure.share(figure.change)
    if share is None:
        sign = "+" if figure.change > 0 else "−"
        return f"{sign}{value_text(figure.unit, abs(figure.change))}" if figure.change else "±0%"
    if figure.low is None:
        return signed(share)
    # Nonnegative values can fall by at most 100%, though the interval is symmetrical.
    least, most = (max(-1.0, figure.share(value) or 0.0) for value in (figure.low, figure.high))
    if least > 0 and most >= FACTOR:
        return f"{signed(share)} (×{_two_digits(1 + least)} to {signed(most)})"
    low, high = signed(least), signed(most)
    return f"{signed(share)} ({low.removesuffix('%') if most < FACTOR else low} to {high})"


def _more_per_request(figure: ComparedFigure) -> str:
    """``+0.12 (+0.08 to +0.17)``; ``±0`` if there were no preemptions."""
    change, low, high = (_plus_minus(value) for value in (figure.change, figure.low, figure.high))
    return change if figure.low is None or change == low == high else f"{change} ({low} to {high})"


def _plus_minus(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    rounded = round(value, 2 if abs(value) >= 0.1 else 3)
    return "±0" if rounded == 0 else f"{'+' if rounded > 0 else '−'}{abs(rounded):g}"


def side_text(figure: ComparedFigure, *, after: bool) -> str:
    """A figure before or after; a quantile only as precise as its bucket (``~180ms``, ``<300ms``)."""
    bucket = figure.buckets[after]
    return bucket.text if bucket is not None else value_text(figure.unit, figure.after if after else figure.before)


def signed(share: float | None) -> str:
    """A change as ``+12%`` or ``−31%``, from tenfold as ``×14``."""
    if share is None:
        return UNKNOWN
    if share >= FACTOR:
        return f"×{count(1 + share)}"
    rounded = round(share * 100)
    return "±0%" if rounded == 0 else f"{'+' if rounded > 0 else '−'}{abs(rounded)}%"


def _two_digits(value: float) -> str:
    return count(value) if value >= 10 else f"{value:.2g}"


def _points(share: float | None) -> str:
    if share is None:
        return UNKNOWN
    rounded = round(share * 100, 1 if abs(share) < 0.1 else None)
    return _NO_POINTS if rounded == 0 else f"{'+' if rounded > 0 else '−'}{abs(rounded):g} pp"


def value_text(unit: str, value: float | None) -> str:
    """A figure with its unit: ``24ms``, ``412/s``, ``91%``, ``3.2/min``."""
    if value is None:
        return UNKNOWN
    if unit == "s":
        return seconds(value)
    if unit == "J":
        return joules_text(value)
    if unit == "per request":
        return f"{value:.2g}"
    if unit == "share":
        return percent(value, 0 if value >= 0.1 or value == 0 else 1)
    return amount_text(unit, value)


def amount_text(unit: str, value: float | None) -> str:
    """A quantity with its unit: ``2.1/s``, ``850 tokens``."""
    if value is None:
        return UNKNOWN
    digits = ".1f" if unit.startswith("/") and value >= 1 else ".2g"
    number = f"{value:{digits}}" if value < 10 else count(value)
    return number + (unit if unit.startswith("/") else f" {unit}" if unit else "")


def setting_text(change: FlagChange) -> str:
    """``--max-num-seqs 256 → 64``, ``GPUs 0 → 0,1``."""
    if change.flag in ("model", "engine", "GPUs"):
        return f"{change.flag} {flag_text(change.before)} → {flag_text(change.after)}"
    return f"--{change_text(change.flag, change.before, change.after)}"


def objective_text(figure: ComparedFigure) -> str:
    """``objective 1.0s``, with ``!`` if it is missed afterwards; empty without one."""
    if figure.objective is None:
        return ""
    missed = figure.meets is not None and not figure.meets[1]
    return f"objective {value_text(figure.unit, figure.objective)}{' !' if missed else ''}"
