"""A comparison in words: the verdict, what to bear in mind, and each figure as people read it. Pure."""

from __future__ import annotations

import math
from dataclasses import replace

from vllm_console.format import UNKNOWN, count, percent, seconds
from vllm_console.telemetry.comparison import Comparison, Factor, Figure, Likeness, Side, Verdict
from vllm_console.telemetry.ledger import FlagChange, Run

_HITS_APART = 0.2
_NO_POINTS = "±0 pp"
_WORDS = {
    Verdict.BETTER: "Better",
    Verdict.WORSE: "Worse",
    Verdict.MIXED: "Mixed",
    Verdict.NO_DIFFERENCE: "No difference seen",
    Verdict.NOT_COMPARABLE: "Not comparable",
    Verdict.TOO_LITTLE: "Too little data",
}


def sentence(found: Comparison) -> str:
    """The verdict with what it rests on."""
    return f"{_WORDS[found.verdict]}: {_because(found)}."


def brief(found: Comparison) -> str:
    """The verdict and what moved most, in a few words: ``Better: TTFT p99 −41%``."""
    said = _WORDS[found.verdict]
    if found.verdict is Verdict.NO_DIFFERENCE and too_noisy(found):
        return f"{said}: less than a doubling would not show"
    if found.verdict is Verdict.NOT_COMPARABLE:
        why = {Likeness.DIFFERENT: "the traffic was not alike", Likeness.ROUGHLY: "the traffic may be why"}
        return ": ".join(filter(None, (said, why.get(found.traffic))))
    parts = []
    for verdict in (Verdict.BETTER, Verdict.WORSE) if found.verdict is Verdict.MIXED else (found.verdict,):
        figures = [figure for figure in found.judged if figure.verdict is verdict]
        if figures and verdict is not Verdict.NO_DIFFERENCE:
            most = max(figures, key=lambda figure: abs(figure.share(figure.change) or 0.0))
            parts.append(f"{most.name} {change_words(replace(most, low=None, high=None))}")
    return f"{said}: {', '.join(parts)}" if parts else said


def _because(found: Comparison) -> str:
    better = [figure for figure in found.judged if figure.verdict is Verdict.BETTER]
    worse = [figure for figure in found.judged if figure.verdict is Verdict.WORSE]
    if found.verdict is Verdict.BETTER:
        return _moved(better) + (f"; but {_moved(worse)} is worse" if worse else "")
    if found.verdict is Verdict.WORSE:
        return _moved(worse) + (f"; but {_moved(better)} is better" if better else "")
    if found.verdict is Verdict.MIXED:
        return f"{_moved(better)} is better; {_moved(worse)} is worse"
    if found.verdict is Verdict.NO_DIFFERENCE:
        return _would_show(found)
    if found.verdict is Verdict.TOO_LITTLE:
        return _needed(found)
    apart = [factor for factor in found.factors if factor.likeness is Likeness.DIFFERENT and factor.key != "in_flight"]
    if found.traffic is Likeness.DIFFERENT and apart:
        return "the traffic was not alike: " + ", ".join(factor_words(factor) for factor in apart)
    if found.traffic is Likeness.UNKNOWN:
        return "the server does not report its traffic"
    roughly = [factor for factor in found.factors if factor.likeness is Likeness.ROUGHLY and factor.key != "in_flight"]
    moved = _moved([figure for figure in found.judged if figure.verdict is Verdict.NOT_COMPARABLE])
    return f"{moved}, but the traffic may be why: " + ", ".join(factor_words(factor) for factor in roughly)


def _moved(figures: list[Figure]) -> str:
    """The figures that moved most, two at most."""
    ordered = sorted(figures, key=lambda figure: -abs(figure.share(figure.change) or 0.0))
    return ", ".join(f"{figure.name} {change_words(figure)}" for figure in ordered[:2])


def _would_show(found: Comparison) -> str:
    """The smallest change that would have been seen, of the figure that shows changes best and of the worst one."""
    reaches = _reaches(found)
    minutes = f"{found.before.compared} + {found.after.compared} {window_words(found.after)}"
    if not reaches:
        return f"nothing moved in {minutes}"
    if too_noisy(found):
        return f"but minutes differ so much among each other that less than a doubling would not show in {minutes}"
    best, worst = min(reaches), max(reaches)
    least = f"a change of {best[1]} below {percent(max(0.05, best[0]))}"
    most = percent(worst[0]) if worst[0] < 1 else "a doubling"
    return f"{least}, or of {worst[1]} below {most}, would not show in {minutes}"


def too_noisy(found: Comparison) -> bool:
    """Whether none but huge changes would have been seen."""
    reaches = _reaches(found)
    return bool(reaches) and min(reaches)[0] >= 1


def _reaches(found: Comparison) -> list[tuple[float, str]]:
    """From which rise on, as a share, it would show, of each figure in which nothing was seen."""
    return [
        (reach, figure.name)
        for figure in found.judged
        if figure.verdict is Verdict.NO_DIFFERENCE
        and figure.high is not None
        and figure.change is not None
        and (reach := figure.share(figure.high - figure.change)) is not None
    ]


def _needed(found: Comparison) -> str:
    parts = [_short_of(side, when) for side, when in ((found.before, "before"), (found.after, "after")) if side.missing]
    return "; ".join(parts) if parts else "the two runs report no figure in common"


def _short_of(side: Side, when: str) -> str:
    enough = side.compared + side.missing
    much = f"{side.compared} of {enough} {window_words(side)} with traffic {when} (run {side.run.name})"
    if not side.run.served:
        return f"run {side.run.name} never served" + (f" ({side.run.cause})" if side.run.cause else "")
    if side.run.ended_at is not None:
        return f"{much}, which has ended: take another run"
    more = math.ceil(side.minutes_missing)
    return f"{much}: about {more} more minute{'s' if more != 1 else ''} needed, the first two after a start left out"


def notes(found: Comparison, *, waiting: bool, matched: bool) -> tuple[str, ...]:
    """What to bear in mind, one sentence each."""
    return tuple(filter(None, (
        *(_end_note(side.run, when) for side, when in ((found.after, "after"), (found.before, "before"))),
        _changes_note(found),
        _goals_note(found),
        "As many requests were in flight, so clients seem to wait for answers: the rate counts as a result."
        if waiting else "",
        _matched_note(found) if matched else "",
        _rough_note(found),
        _hits_note(found),
        "Figures of a simulated engine are estimates." if "simulated" in (found.before.run.engine,
                                                                          found.after.run.engine) else "",
    )))  # fmt: skip


def window_words(side: Side) -> str:
    """What its windows are called: minutes, where they are as long."""
    return "minutes" if 50 <= side.seconds <= 70 else "windows"


def _changes_note(found: Comparison) -> str:
    number = len(found.differences)
    if number > 1:
        names = ", ".join(change.flag for change in found.differences[:4]) + (", …" if number > 4 else "")
        return f"{number} things were changed ({names}): the comparison cannot tell them apart. Change one at a time."
    if number == 0:
        return "Both ran with the same flags: what differs is not a flag's doing."
    return ""


def _end_note(run: Run, when: str) -> str:
    ended = run.ended
    if not ended or ended.get("requested"):
        return ""
    cause = f" ({run.cause})" if run.cause else ""
    return f"The run {when} ended by itself{cause}: {ended.get('reason') or 'its reason is not known'}"


def _goals_note(found: Comparison) -> str:
    broken: list[str] = []
    met: list[str] = []
    for figure in found.figures:
        meets = figure.meets
        sure = figure.low is not None and figure.high is not None and (figure.low > 0 or figure.high < 0)
        if meets is not None and meets[0] != meets[1] and sure:
            (met if meets[1] else broken).append(f"{figure.name} ({value_words(figure.unit, figure.goal)})")
    parts = []
    if met:
        parts.append(f"Now met: {', '.join(met)}.")
    if broken:
        parts.append(f"No longer met: {', '.join(broken)}.")
    return " ".join(parts)


def _matched_note(found: Comparison) -> str:
    used = (
        f"{side.compared} of {side.windows} {when}" for side, when in ((found.before, "before"), (found.after, "after"))
    )
    return f"Only {window_words(found.after)} with traffic that was alike are compared: {', '.join(used)}."


def _rough_note(found: Comparison) -> str:
    if found.traffic is not Likeness.ROUGHLY or found.verdict is Verdict.NOT_COMPARABLE:
        return ""
    apart = [factor for factor in found.factors if factor.likeness is Likeness.ROUGHLY and factor.key != "in_flight"]
    return f"The traffic was only roughly alike: {', '.join(map(factor_words, apart))}."


def _hits_note(found: Comparison) -> str:
    hits = next((figure for figure in found.figures if figure.key == "hit_rate"), None)
    if hits is None or hits.change is None or abs(hits.change) < _HITS_APART:
        return ""
    if any(change.flag == "enable-prefix-caching" for change in found.differences):
        return ""
    return (
        f"Prefix hits went from {percent(hits.before)} to {percent(hits.after)}: the prompts may have shared more or"
        " less than before."
    )


def factor_words(factor: Factor) -> str:
    """``requests 2.1/s → 3.4/s (+62 %)``."""
    before, after = (amount_words(factor.unit, value) for value in (factor.before, factor.after))
    change = f" ({signed(factor.change)})" if factor.change is not None else ""
    return f"{factor.name} {before} → {after}{change}"


def change_words(figure: Figure) -> str:
    """``−31 % (−42 to −18 %)``; in percentage points where a share is told, or where it was nothing before."""
    if figure.change is None:
        return UNKNOWN
    if figure.unit == "share":
        if figure.low is None or {_points(value) for value in (figure.low, figure.change, figure.high)} == {_NO_POINTS}:
            return _points(figure.change)
        return f"{_points(figure.change)} ({_points(figure.low).removesuffix(' pp')} to {_points(figure.high)})"
    share = figure.share(figure.change)
    if share is None:
        sign = "+" if figure.change > 0 else "−"
        return f"{sign}{value_words(figure.unit, abs(figure.change))}" if figure.change else "±0%"
    if figure.low is None:
        return signed(share)
    low, high = signed(figure.share(figure.low)), signed(figure.share(figure.high))
    return f"{signed(share)} ({low.removesuffix('%')} to {high})"


def signed(share: float | None) -> str:
    """A change as ``+12%`` or ``−31%``, from tenfold on as ``×14``."""
    if share is None:
        return UNKNOWN
    if share >= 9:
        return f"×{count(1 + share)}"
    rounded = round(share * 100)
    return "±0%" if rounded == 0 else f"{'+' if rounded > 0 else '−'}{abs(rounded)}%"


def _points(share: float | None) -> str:
    if share is None:
        return UNKNOWN
    rounded = round(share * 100, 1 if abs(share) < 0.1 else None)
    return _NO_POINTS if rounded == 0 else f"{'+' if rounded > 0 else '−'}{abs(rounded):g} pp"


def value_words(unit: str, value: float | None) -> str:
    """A figure with its unit: ``24ms``, ``412/s``, ``91%``, ``3.2/min``."""
    if value is None:
        return UNKNOWN
    if unit == "s":
        return seconds(value)
    if unit == "share":
        return percent(value, 0 if value >= 0.1 or value == 0 else 1)
    return amount_words(unit, value)


def amount_words(unit: str, value: float | None) -> str:
    """A number of things with its unit: ``2.1/s``, ``850 tokens``."""
    if value is None:
        return UNKNOWN
    number = f"{value:.2g}" if value < 10 else count(value)
    return number + (unit if unit.startswith("/") else f" {unit}" if unit else "")


def setting_words(change: FlagChange) -> str:
    """``--max-num-seqs 256 → 64``; what was not set is ``–``."""
    name = change.flag if change.flag in ("model", "engine", "GPUs") else f"--{change.flag}"
    return f"{name} {_setting(change.before)} → {_setting(change.after)}"


def _setting(value: object) -> str:
    if value is None:
        return UNKNOWN
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def goal_words(figure: Figure) -> str:
    """``goal 1.0s`` with whether it is met afterwards; empty without an objective."""
    if figure.goal is None:
        return ""
    meets = figure.meets
    return f"goal {value_words(figure.unit, figure.goal)}" + (" !" if meets is not None and not meets[1] else "")
