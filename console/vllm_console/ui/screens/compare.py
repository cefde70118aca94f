"""The comparison screen: whether a flag change helped, then the figures. Any two runs of a server can be chosen."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, ClassVar

import msgspec
from msgspec.structs import replace
from rich.cells import cell_len
from textual.binding import BindingType
from textual.strip import Strip

from vllm_console.runs.compare import (
    FEWEST,
    SHARES,
    SMALLEST_CHANGE,
    SMALLEST_SHARE,
    WARM_UP,
    ComparedFigure,
    Comparison,
    ComparisonVerdict,
    Factor,
    TrafficMatch,
)
from vllm_console.runs.store import Run
from vllm_console.runs.text import (
    ceiling_text,
    compared_text,
    detail_text,
    energy_cost_text,
    factor_sides,
    figure_change_text,
    likeness_text,
    notes,
    objective_text,
    plain_sentence,
    setting_text,
    short_verdict,
    side_text,
    signed,
    times_note,
    traffic_text,
    verdict_text,
)
from vllm_console.text import clock, plain
from vllm_console.ui.actions import bindings
from vllm_console.ui.keymap import key_of
from vllm_console.ui.panes.change import VERDICT_STYLES
from vllm_console.ui.panes.distributions import distribution_lines
from vllm_console.ui.screens.dialogs import choose
from vllm_console.ui.terminal.lines import line
from vllm_console.ui.theme import ACCENT, BAD, DIM, KEY, STRONG, WARN
from vllm_console.ui.threads import answer_for, begin_worker
from vllm_console.ui.widgets.draw import KeyHint, fit, paragraph
from vllm_console.ui.widgets.reader import ReaderScreen, TextReader, scroll_hint
from vllm_launchers.errors import OperationError

if TYPE_CHECKING:
    from vllm_console.fleet.local import LocalFleet
    from vllm_console.history.energy import Tariff
    from vllm_console.ui.app import ConsoleApp

_LIKENESS = {TrafficMatch.ROUGHLY: WARN, TrafficMatch.DIFFERENT: BAD}

AGAIN_SECONDS = 10.0
"""How often to repeat the comparison while the screen is open, since a run in progress adds data."""

MOST_CHANGES = 5
"""Maximum number of lines for changes."""

WIDE = 100
"""Minimum width to show the objective of each figure."""

NARROW = 69
"""Below this width, columns are only as wide as most figures need, or the verdict would be cut."""

LONGEST_BAR = 41
LEAST_BAR = 9
"""Minimum width of a bar in cells."""


class CompareScreen(ReaderScreen):
    """Shows a comparison and keeps it up to date; other recorded runs can be chosen.

    ``revert_to`` returns a callback that restarts with a run's flags; None if that is not allowed or changes nothing.
    """

    SCOPE = "compare"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("compare")]

    def __init__(
        self, found: Comparison, revert_to: Callable[[Run], Callable[[], None] | None], console: ConsoleApp
    ) -> None:
        super().__init__(TextReader(self._title, self._lines, self._hints))
        self.found, self._revert_to, self._fleet = found, revert_to, console.fleet
        self._late_screens = console.late_screens
        self._predicted: Sequence[str] = ()
        """The predicted effect of the change next to the measured one."""
        self._choosable: Sequence[bool] = (False, False)
        """Whether another run can be chosen as "before", and as "after"."""

    def on_mount(self) -> None:
        """Repeat the comparison, which may be some minutes old, at once and while the screen is visible."""
        self._repeat()
        self.set_interval(AGAIN_SECONDS, lambda: self._repeat() if self.uncovered else None)

    def _repeat(self) -> None:
        """Compare again, and look up the prediction and other runs."""
        begin_worker(self, self._compare_again, "compare again", "again")

    @property
    def _revert(self) -> Callable[[], None] | None:
        return self._revert_to(self.found.before.run)

    def _lines(self, width: int) -> list[Strip]:
        revertible, tariff = self._revert is not None, self._fleet.tariff
        return compare_lines(self.found, width, may_revert=revertible, predicted=self._predicted, tariff=tariff)

    def _hints(self) -> Sequence[KeyHint]:
        hints = [scroll_hint()]
        before, after = self._choosable
        if before and after:
            keys = f"{key_of('compare_before')} {key_of('compare_after')}"
            hints.append((keys, "choose runs", "screen.compare_before|screen.compare_after"))
        elif before or after:
            id = "compare_before" if before else "compare_after"
            hints.append((key_of(id), f"choose the run {'before' if before else 'after'}", f"screen.{id}"))
        if self._revert is not None:
            hints.append((key_of("compare_revert"), "revert and restart", "screen.compare_revert"))
        return hints

    def _title(self) -> str:
        before, after = self.found.before.run, self.found.after.run
        mark = " sim" if after.engine == "simulated" else ""
        if before.server != after.server:
            return plain(f"{before.name} → {after.name}{mark}")
        return plain(f"{after.server}{mark}: before @{before.generation}, after @{after.generation}")

    def action_compare_revert(self) -> None:
        """Close and restart with the flags of the "before" run."""
        if (revert := self._revert) is not None:
            self.close_with()
            revert()

    def action_compare_before(self) -> None:
        """Choose the "before" run."""
        self._choose(after=False)

    def action_compare_after(self) -> None:
        """Choose the "after" run."""
        self._choose(after=True)

    def _choose(self, *, after: bool) -> None:
        before, present = self.found.before.run, self.found.after.run
        here, other = (present, before) if after else (before, present)

        def show(found: tuple[Sequence[Run], object]) -> str:
            runs = run_names([run for run in found[0] if run.id != other.id])
            if len(runs) < 2:
                self._warn(f"{here.server} has no other run to compare with.")
                return ""
            choices = [(name, run_text(run)) for name, run in runs.items()]
            at = next((name for name, run in runs.items() if run.id == here.id), None)
            question = f"Compare {other.name} with which {'later' if after else 'earlier'} run?"

            def compare(name: str) -> None:
                pair = (other.id, runs[name].id) if after else (runs[name].id, other.id)
                begin_worker(self, partial(self._compare, pair), "compare", "runs")

            choose(self.app, question, choices, compare, at)
            return ""

        call = partial(self._fleet.history.runs, here.server)
        self._late_screens.open("", call, show, once=f"runs to compare with {other.name}")

    async def _compare(self, pair: tuple[int, int]) -> None:
        try:
            self.found, self._predicted = await answer_for(self, partial(_compared, self._fleet, pair), "compare")
        except OperationError as error:
            self._warn(error)
            return
        self._reader.redraw()
        self._reader.action_edge(-1)
        await self._look_up_runs()

    async def _look_up_runs(self) -> None:
        """Offer the keys for choosing runs if there are other runs."""
        shown = self.found.before.run, self.found.after.run
        try:
            choosable = await answer_for(self, partial(_choosable, self._fleet, *shown), "other runs")
        except OperationError:
            return  # pressing the keys reports the error
        self._choosable = choosable
        self._reader.redraw()

    def _warn(self, problem: object) -> None:
        self.notify(plain(str(problem)), severity="warning", markup=False)

    async def _compare_again(self) -> None:
        shown = self._pair
        try:
            found, predicted = await answer_for(self, partial(_compared, self._fleet, shown), "compare again")
        except Exception:  # noqa: BLE001 - the thread's boundary: keep the last result and retry
            return
        if shown == self._pair:
            self.found, self._predicted = replace(found, skipped=self.found.skipped), predicted
            self._reader.redraw()
        await self._look_up_runs()

    @property
    def _pair(self) -> tuple[int, int]:
        return self.found.before.run.id, self.found.after.run.id


def _choosable(fleet: LocalFleet, before: Run, after: Run) -> Sequence[bool]:
    """For each of the two runs, whether its server has a third run to compare instead."""
    shown = {before.id, after.id}
    return [fleet.history.has_others(one.server, shown) for one in (before, after)]


def _compared(fleet: LocalFleet, pair: tuple[int, int]) -> tuple[Comparison, Sequence[str]]:
    found = fleet.history.compare_again(*pair)
    return found, _prediction_lines(fleet, found)


def _prediction_lines(fleet: LocalFleet, found: Comparison) -> Sequence[str]:
    """The prediction for the change between two runs, and its outcome."""
    from vllm_console.prediction.score import outcome_lines

    kept = fleet.history.outcome(found)
    judged = found.verdict is not ComparisonVerdict.TOO_LITTLE
    return outcome_lines(kept, judged=judged) if kept is not None else ()


def nothing_screen(server: str, reason: str) -> ReaderScreen:
    """A screen that explains why nothing can be compared yet and how to get a comparison."""
    name, why = plain(server), plain(reason)
    return ReaderScreen(TextReader(lambda: f"{name}: before and after", lambda width: nothing_lines(name, why, width)))


def nothing_lines(server: str, reason: str, width: int) -> list[Strip]:
    """Why nothing can be compared yet, and the steps to a comparison."""
    text = reason.removesuffix(".")  # starts with a name, so no capitalization
    needed = (
        f"A comparison needs two runs of {server} with the same traffic, each with {WARM_UP + FEWEST} minutes of it "
        f"(the first {WARM_UP} after a start don't count). A run lasts from one start to the next."
    )
    stage, keys = f"{key_of('edit_flags')} or {key_of('adjust')}", key_of("restart")
    steps = (
        f"{stage} stages a flag change, ideally only one",
        f"{keys} restarts with it: a new run begins",
        f"send both runs the same traffic: your clients, or the preset's workload with {key_of('toggle_load')}",
        f"{key_of('compare')} shows whether the change helped",
    )
    lines = [*paragraph(f"{text}.", width - 1, STRONG), line(), *paragraph(needed, width - 1), line()]
    for number, step in enumerate(steps, 1):
        lines += paragraph(step, width - 1, indent="    ", first=[(f" {number}  ", DIM)])
    return lines


def run_names(runs: Sequence[Run]) -> Mapping[str, Run]:
    """Map unique names to runs; a server that was removed and launched again numbers its runs from 1 again."""
    named: dict[str, Run] = {}
    for run in runs:
        named[run.name if run.name not in named else f"{run.name} ({run.id})"] = run
    return named


def run_text(run: Run) -> str:
    """One line about a run: start, amount of traffic, changes."""
    minutes = f"{run.windows * run.window_seconds / 60:.0f} min of traffic" if run.windows else "no traffic"
    changes = ", ".join(setting_text(change) for change in run.changed)
    change = changes or ("first run" if run.before is None else "same flags as before")
    return f"{clock(run.started_at, time.time())} · {minutes} · {change}"


def compare_lines(
    found: Comparison,
    width: int,
    *,
    may_revert: bool = False,
    predicted: Sequence[str] = (),
    tariff: Tariff | None = None,
) -> list[Strip]:
    """The verdict, notes, changes, judged figures with their intervals, latency distributions, ``predicted`` lines,
    traffic, and all other figures."""
    style = VERDICT_STYLES.get(found.verdict, STRONG)
    if found.verdict is ComparisonVerdict.TOO_LITTLE:
        lines = paragraph(verdict_text(found), width - 1, style)
    else:
        lines = [*paragraph(plain_sentence(found), width - 1, style), *paragraph(detail_text(found), width - 1)]
    for note in filter(None, (times_note(found, time.time()), *notes(found))):
        lines += paragraph(note, width - 1, indent="   ", first=[" · "])
    lines += _changed(found, width, may_revert)
    predictions = [line((fit(f"  {plain(row)}", width), WARN if "! outside" in row else None)) for row in predicted]
    predictions = [line((" Predicted", STRONG)), *predictions] if predictions else []
    if found.empty:
        return [*lines, *predictions]
    columns, settled = _columns(width, found.judged), found.verdict is not ComparisonVerdict.TOO_LITTLE
    draw = partial(_figure, columns=columns, reach=_reach(found.judged), settled=settled)
    lines += [_heading(found, columns), *chain.from_iterable(map(draw, found.judged))]
    if found.verdict is not ComparisonVerdict.TOO_LITTLE:
        lines += distribution_lines(found.figures, width)
    lines += predictions
    if ceilings := ceiling_text(found):
        lines.append(line((" Ceiling: ", STRONG), ceilings))
    lines.append(line((" Traffic: ", STRONG), (traffic_text(found), _LIKENESS.get(found.traffic, STRONG))))
    lines += [_factor(factor, columns, early=not settled) for factor in found.factors]
    if others := [figure for figure in found.figures if figure.verdict is None]:
        lines.append(line((" Also measured", STRONG)))
        lines += chain.from_iterable(map(draw, others))
    if cost := energy_cost_text(found, tariff):
        lines.append(line((" Energy: ", STRONG), plain(cost)))
    return [*lines, *paragraph(_basis(found), width - 2, DIM, "  ")]


def _changed(found: Comparison, width: int, may_revert: bool) -> list[Strip]:
    """The changes, one per line; the first also names the key that reverts."""
    key = f"{key_of('compare_revert')} reverts" if may_revert else ""
    room = width - 10 - len(key) - (2 if key else 0)
    changes = [plain(setting_text(change)) for change in found.differences] or ["nothing"]
    if len(changes) > MOST_CHANGES:
        changes[MOST_CHANGES - 1 :] = [f"… and {len(changes) - MOST_CHANGES + 1} more"]
    rows = [fit(text, room) for text in changes]
    return [
        line((" changed  " if not at else " " * 10, DIM), (row, ACCENT), (f"  {key}" if not at and key else "", KEY))
        for at, row in enumerate(rows)
    ]


_VERDICT = 16
"""Width of a figure's verdict in cells."""


class _Columns(msgspec.Struct, frozen=True):
    """Column widths in cells; ``name`` includes the indentation.

    From `WIDE` on, the bar comes before the change, and objectives are shown; below, it comes before the verdict.
    """

    width: int
    wide: bool
    name: int
    value: int
    change: int
    words: int

    @property
    def bar(self) -> int:
        free = self.width - self.before - self.change - self.words - (2 if self.wide else 1)
        return max(0, min(free, LONGEST_BAR)) if self.wide else free if free >= LEAST_BAR else 0

    @property
    def before(self) -> int:
        """Total width of the columns to the left of the change and the bar."""
        return self.name + 2 * self.value + 2


def _columns(width: int, judged: Sequence[ComparedFigure]) -> _Columns:
    if width >= WIDE:
        return _Columns(width, wide=True, name=20, value=14, change=24, words=_VERDICT + 10)
    if width < NARROW:
        return _Columns(width, wide=False, name=16, value=8, change=19, words=6)
    longest = max((len(short_verdict(one.verdict)) for one in judged if one.verdict is not None), default=0)
    words = max(12, longest)
    return _Columns(width, wide=False, name=16, value=8, change=34 - words, words=words)


def _heading(found: Comparison, columns: _Columns) -> Strip:
    names = [_side(found, after=after) if columns.wide else ("after" if after else "before") for after in (False, True)]
    sides = "".join(fit(name, columns.value, ">") for name in names)
    judged = found.verdict is not ComparisonVerdict.TOO_LITTLE
    change = fit(f"change{' (95% CI)' if judged else ''}", columns.change)
    axis = fit(_axis(_reach(found.judged), columns.bar) if judged else "", columns.bar)
    tail = f"{axis}  {change}{fit('verdict', _VERDICT)}objective" if columns.wide and judged else change + axis
    return line((f"{fit('', columns.name)}{sides}  {tail}".rstrip(), DIM)).crop(0, columns.width)


def _axis(reach: float, room: int) -> str:
    """The scale of the bars: its ends and zero, or, if these don't fit, which side is which."""
    first, last = signed(-reach), signed(reach)
    half = (room - 1) // 2
    if half < max(len(first), len(last)) + 2:
        return "less   more" if room > LEAST_BAR + 3 else "less more"
    return f"{first:<{half}}0{last:>{half}}"


def _basis(found: Comparison) -> str:
    """What data the figures are based on, and the confidence."""
    compared = f"{compared_text(found.before)} before, {compared_text(found.after)} after"
    sure = (
        "" if found.verdict is ComparisonVerdict.TOO_LITTLE else " The 95% CIs are simultaneous for all judged figures."
    )
    later = found.kept or found.again is not None
    rest = "warm-up, different traffic or later traffic" if later else "warm-up or different traffic"
    return f"Medians over {compared}; the rest is {rest}.{sure}"


def _side(found: Comparison, *, after: bool) -> str:
    run = (found.after if after else found.before).run
    return ("after" if after else "before") + f" @{run.generation}"


def _figure(figure: ComparedFigure, columns: _Columns, reach: float, settled: bool) -> list[Strip]:
    """One line per figure, plus one for the verdict if it does not fit."""
    before, after = (fit(side_text(figure, after=after), columns.value, ">") for after in (False, True))
    judged = figure.verdict is not None
    verdict = short_verdict(figure.verdict) if figure.verdict is not None else ""
    drawn = fit(_bar(figure, reach, columns.bar) if judged else "", columns.bar)
    style = VERDICT_STYLES.get(figure.verdict, None if settled else DIM) if figure.verdict is not None else DIM
    if figure.verdict is ComparisonVerdict.NOT_COMPARABLE:
        style = DIM
    change, room, below = figure_change_text(figure), columns.change, ""
    whole = columns.width - columns.before - 1
    if not columns.wide and (cell_len(change) > room or room + columns.bar + cell_len(verdict) > whole):
        drawn, room = "", whole - cell_len(verdict)  # drop the bar to keep the figures
        if cell_len(change) > room:
            verdict, below, room = "", verdict, whole
    change = fit(change, room)
    objective = objective_text(figure).removeprefix("objective ")
    tail = f"{drawn}  {change}{fit(verdict, _VERDICT)}" if columns.wide else f"{change}{drawn} {verdict}"
    indent = 2 if columns.wide else 1
    row = line(
        (fit(f"{' ' * indent}{figure.name}", columns.name), None if judged else DIM),
        (before, None if judged else DIM),
        (after, STRONG if judged else DIM),
        ("  " + tail, style),
        (objective if columns.wide else "", DIM),
    )
    rows = [row, line((" " * columns.before + below, style))] if below else [row]
    return [one.crop(0, columns.width) for one in rows]


def _reach(figures: Sequence[ComparedFigure]) -> float:
    """Range of the bars as a share: as large as needed, at most a doubling."""
    bounds = [abs(figure.share(bound) or 0.0) for figure in figures for bound in (figure.low, figure.high)]
    return min(1.0, max([SMALLEST_CHANGE, *bounds]))


def _bar(figure: ComparedFigure, reach: float, room: int) -> str:
    """A change and its interval as a bar from ``-reach`` to ``reach`` (shares), with zero in the middle.

    Changes in percentage points, whose baseline may have been zero, have their own scale.
    """
    bounds = [bound for bound in (figure.low, figure.change, figure.high) if bound is not None]
    if any(figure.bounded) or len(bounds) < 3 or room < LEAST_BAR:
        return ""
    if figure.unit in SHARES:
        reach = max(SMALLEST_SHARE, *map(abs, bounds))
    else:
        bounds = [share for bound in bounds if (share := figure.share(bound)) is not None]
        if len(bounds) < 3:
            return ""
    half = (room - 1) // 2
    low, middle, high = (round(half * max(-1.0, min(1.0, bound / reach))) + half for bound in bounds)
    cells = ["─" if low <= at <= high else " " for at in range(2 * half + 1)]
    cells[half] = "│"
    if bounds[0] < -reach:
        cells[0] = "←"
    if bounds[2] > reach:
        cells[-1] = "→"
    cells[middle] = "●"
    return "".join(cells)


def _factor(factor: Factor, columns: _Columns, *, early: bool) -> Strip:
    name, room = (columns.name, columns.value) if columns.wide else (22, 14)
    before, after = (fit(text, room, ">") for text in factor_sides(factor))
    text = f"  {signed(factor.change):<7}{likeness_text(factor, early=early)}"

    # The number of requests in flight mostly depends on the server, not on the clients.
    style = DIM if factor.key == "in_flight" else _LIKENESS.get(factor.likeness, DIM)
    return line(
        (fit(f"  {factor.name}", name), None),
        (before, None),
        (after, STRONG),
        (text.rstrip(), style),
    ).crop(0, columns.width)
