"""Before and after: whether the change of flags helped, the verdict first."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.strip import Strip

from vllm_console.telemetry.compare import SMALLEST_CHANGE
from vllm_console.telemetry.compare_words import (
    amount_words,
    change_words,
    goal_words,
    setting_words,
    signed,
    value_words,
    window_words,
)
from vllm_console.telemetry.comparison import Comparison, Factor, Figure, Likeness, Verdict
from vllm_console.text import plain
from vllm_console.ui.screens.reading import ReadingScreen
from vllm_console.ui.theme import ACCENT, BAD, DIM, KEY, OK, STRONG, WARN
from vllm_console.ui.threads import answer_for
from vllm_console.ui.widgets.draw import fit
from vllm_console.ui.widgets.lines import line

VERDICT_STYLES = {Verdict.BETTER: OK, Verdict.WORSE: BAD, Verdict.MIXED: WARN, Verdict.NOT_COMPARABLE: WARN}
_LIKENESS = {Likeness.ROUGHLY: WARN, Likeness.DIFFERENT: BAD}
_NAME, _VALUE, _CHANGE, _WORDS = 16, 11, 27, 24

AGAIN_SECONDS = 10.0
"""How often it is compared anew while the screen is open: a run goes on and gives more minutes."""

MOST_CHANGES = 5
"""Lines for what was changed."""

BAR_WIDTH = 100
"""From this width on each change is drawn too."""


class CompareScreen(ReadingScreen):
    """Shows a comparison, and goes on comparing by ``again``, which blocks. ``z`` goes back to the flags before."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("z", "go_back", "Back to the flags before", show=False)]

    def __init__(
        self,
        found: Comparison,
        go_back: Callable[[], None] | None = None,
        again: Callable[[], Comparison | None] | None = None,
    ) -> None:
        super().__init__()
        self.found, self._go_back, self._again = found, go_back, again
        back = (("z", "restart with the flags before"),) if go_back is not None else ()
        self.KEYS = (("esc", "back"), ("j k", "scroll"), *back)

    def on_mount(self) -> None:
        """Go on comparing while it is open."""
        if self._again is not None:
            self.set_interval(AGAIN_SECONDS, self._compare_again)

    def title_text(self) -> str:
        """The title."""
        before, after = self.found.before.run, self.found.after.run
        simulated = " · simulated" if after.engine == "simulated" else ""
        pair = f"{before.name} → {after.name}" if before.server != after.server else f"{after.server}: before and after"
        return plain(f"{pair}{simulated}")

    def content(self, width: int) -> Sequence[Strip]:
        """The lines."""
        return compare_lines(self.found, width, may_go_back=self._go_back is not None)

    def action_go_back(self) -> None:
        """Close, and restart with the flags of the run before."""
        if self._go_back is not None:
            self.dismiss(None)
            self._go_back()

    def _compare_again(self) -> None:
        self.run_worker(self._ask(), name="compare again", exclusive=True)

    async def _ask(self) -> None:
        if self._again is None:
            return
        try:
            found = await answer_for(self, self._again, "compare again")
        except Exception:  # noqa: BLE001 - the thread's boundary: what stands here stays, and it is tried again
            return
        if found is not None and (found.before.run.id, found.after.run.id) == self._runs:
            self.found = found
            self.draw(self.app.size.width)

    @property
    def _runs(self) -> tuple[int, int]:
        return self.found.before.run.id, self.found.after.run.id


def compare_lines(found: Comparison, width: int, *, may_go_back: bool = False) -> list[Strip]:
    """The verdict with what to bear in mind, what was changed, the figures it rests on, the traffic, all the others."""
    lines = [line((f" {row}", VERDICT_STYLES.get(found.verdict, STRONG))) for row in _wrapped(found.sentence, width)]
    for note in found.notes:
        rows = _wrapped(note, width - 2)
        lines += [line(" · " if index == 0 else "   ", (row, None)) for index, row in enumerate(rows)]
    lines += _changed(found, width, may_go_back)
    draw = partial(_figure, width=width, reach=_reach(found.judged), settled=found.verdict is not Verdict.TOO_LITTLE)
    lines += [_heading(found, width), *map(draw, found.judged)]
    lines.append(line((" Traffic: ", STRONG), (str(found.traffic), _LIKENESS.get(found.traffic, STRONG))))
    lines += [_factor(factor, width) for factor in found.factors]
    if others := [figure for figure in found.figures if figure.verdict is None]:
        lines.append(line((" Measured besides", STRONG)))
        lines += map(draw, others)
    return [*lines, *(line((f"  {row}", DIM)) for row in _wrapped(_basis(found), width - 2))]


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(plain(text), max(20, width - 2), break_on_hyphens=False) or [""]


def _changed(found: Comparison, width: int, may_go_back: bool) -> list[Strip]:
    """What was changed, a line each, and at the right of the first the way back."""
    key = "z goes back" if may_go_back else ""
    room = width - 10 - len(key) - (2 if key else 0)
    told = [plain(setting_words(change)) for change in found.differences] or ["nothing"]
    if len(told) > MOST_CHANGES:
        told[MOST_CHANGES - 1 :] = [f"… and {len(told) - MOST_CHANGES + 1} more"]
    rows = [fit(text, room) for text in told]
    return [
        line((" changed  " if not at else " " * 10, DIM), (row, ACCENT), (f"  {key}" if not at and key else "", KEY))
        for at, row in enumerate(rows)
    ]


def _heading(found: Comparison, width: int) -> Strip:
    sides = "".join(fit(_side(found, after=after), _VALUE, ">") for after in (False, True))
    change = "change" if found.verdict is Verdict.TOO_LITTLE else "change (95% sure between)"
    room = _drawn(width)
    axis = f"{fit('less', room // 2 - 1, '>')}   more" if room and change != "change" else ""
    return line((f"{fit('', _NAME + 2)}{sides}  {fit(change, _CHANGE + (_WORDS if axis else 0))}{axis}".rstrip(), DIM))


def _drawn(width: int) -> int:
    """How many cells a change is drawn in."""
    return max(0, width - 2 - _NAME - 2 * _VALUE - 2 - _CHANGE - _WORDS) if width >= BAR_WIDTH else 0


def _basis(found: Comparison) -> str:
    """Over what the figures are taken, and how sure they are."""
    compared = ", ".join(
        f"{side.compared} of {side.windows} {window_words(side)} {when}"
        for side, when in ((found.before, "before"), (found.after, "after"))
    )
    sure = "" if found.verdict is Verdict.TOO_LITTLE else " The 95% are for all judged figures together."
    return f"Medians over {compared}; the rest is warm-up, or unlike.{sure}"


def _side(found: Comparison, *, after: bool) -> str:
    run = (found.after if after else found.before).run
    return ("after" if after else "before") + f" @{run.generation}"


def _figure(figure: Figure, width: int, reach: float, settled: bool) -> Strip:
    before, after = (fit(value_words(figure.unit, value), _VALUE, ">") for value in (figure.before, figure.after))
    judged = figure.verdict is not None
    words = " ".join(filter(None, (_short(figure.verdict), goal_words(figure) if width > 90 else "")))
    drawn = _bar(figure, reach, _drawn(width)) if judged else ""
    room = max(0, width - 2 - _NAME - 2 * _VALUE - 2 - _CHANGE)
    style = VERDICT_STYLES.get(figure.verdict, None if settled else DIM) if figure.verdict is not None else DIM
    if figure.verdict is Verdict.NOT_COMPARABLE:
        style = DIM
    return line(
        (fit(f"  {figure.name}", _NAME + 2), None if judged else DIM),
        (before, None if judged else DIM),
        (after, STRONG if judged else DIM),
        ("  " + fit(change_words(figure), _CHANGE), style),
        (fit(words, _WORDS) + drawn if drawn else fit(words, room).rstrip(), style),
    )


def _reach(figures: Sequence[Figure]) -> float:
    """How far what is drawn reaches to either side, as a share: as far as needed, a doubling at most."""
    bounds = [abs(figure.share(bound) or 0.0) for figure in figures for bound in (figure.low, figure.high)]
    return min(1.0, max([SMALLEST_CHANGE, *bounds]))


def _bar(figure: Figure, reach: float, room: int) -> str:
    """A change with its bounds on a line from ``-reach`` to ``reach`` (shares) with zero in its middle."""
    shares = [share for bound in (figure.low, figure.change, figure.high) if (share := figure.share(bound)) is not None]
    half = (room - 1) // 2
    if figure.unit == "share" or len(shares) < 3 or half < 4:
        return ""
    low, middle, high = (round(half * max(-1.0, min(1.0, share / reach))) + half for share in shares)
    cells = ["─" if low <= at <= high else " " for at in range(2 * half + 1)]
    cells[half] = "│"
    if shares[0] < -reach:
        cells[0] = "←"
    if shares[2] > reach:
        cells[-1] = "→"
    cells[middle] = "●"
    return "".join(cells)


def _short(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    short = {
        Verdict.NO_DIFFERENCE: "none seen",
        Verdict.TOO_LITTLE: "too few",
        Verdict.NOT_COMPARABLE: "unlike",
    }
    return short.get(verdict, str(verdict))


def _factor(factor: Factor, width: int) -> Strip:
    before, after = (fit(amount_words(factor.unit, value), 14, ">") for value in (factor.before, factor.after))
    text = f"  {signed(factor.change):<7}{factor.likeness}"
    # How many are in flight is mostly the server's doing.
    style = DIM if factor.key == "in_flight" else _LIKENESS.get(factor.likeness, DIM)
    return line(
        (fit(f"  {factor.name}", 22), None),
        (before, None),
        (after, STRONG),
        (fit(text, max(0, width - _NAME - 34)).rstrip(), style),
    )
