"""Before and after: whether the change of flags helped, the verdict first."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.style import Style
from textual.binding import Binding, BindingType
from textual.strip import Strip

from vllm_console.telemetry.compare_words import (
    amount_words,
    change_words,
    goal_words,
    setting_words,
    signed,
    value_words,
)
from vllm_console.telemetry.comparison import Comparison, Factor, Figure, Likeness, Verdict
from vllm_console.text import plain
from vllm_console.ui.screens.reading import ReadingScreen
from vllm_console.ui.theme import ACCENT, BAD, DIM, OK, STRONG, WARN
from vllm_console.ui.widgets.draw import fit
from vllm_console.ui.widgets.lines import line

_STYLES = {Verdict.BETTER: OK, Verdict.WORSE: BAD, Verdict.MIXED: WARN, Verdict.NOT_COMPARABLE: WARN}
_LIKENESS = {Likeness.ROUGHLY: WARN, Likeness.DIFFERENT: BAD}
_NAME, _VALUE = 16, 11


class CompareScreen(ReadingScreen):
    """Shows a comparison as it was when the screen was opened. ``z`` goes back to the flags before, where it may."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("z", "go_back", "Back to the flags before", show=False)]

    def __init__(self, found: Comparison, go_back: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._found, self._go_back = found, go_back
        back = (("z", "back to the flags before"),) if go_back is not None else ()
        self.KEYS = (("esc", "back"), ("j k", "scroll"), *back)

    def title_text(self) -> str:
        """The title."""
        simulated = " · simulated" if self._found.after.run.engine == "simulated" else ""
        return plain(f"{self._found.after.run.server}: before and after{simulated}")

    def content(self, width: int) -> Sequence[Strip]:
        """The lines."""
        return compare_lines(self._found, width)

    def action_go_back(self) -> None:
        """Close, and restart with the flags of the run before."""
        if self._go_back is not None:
            self.dismiss(None)
            self._go_back()


def compare_lines(found: Comparison, width: int) -> list[Strip]:
    """The verdict with what to bear in mind, what was changed, the traffic in a line, then every figure."""
    lines = [line((f" {row}", _STYLES.get(found.verdict, STRONG))) for row in _wrapped(found.sentence, width)]
    for note in found.notes:
        rows = _wrapped(note, width - 2)
        lines += [line(" · " if index == 0 else "   ", (row, None)) for index, row in enumerate(rows)]
    lines += [line(("  changed ", DIM), (row, ACCENT)) for row in _changed(found, width - 10)]
    lines.append(line(("  traffic ", DIM), (str(found.traffic), _LIKENESS.get(found.traffic)), *_traffic(found, width)))
    names = (
        f"  {fit('', _NAME)}{fit(_side(found, after=False), _VALUE, '>')}{fit(_side(found, after=True), _VALUE, '>')}"
    )
    lines.append(line((fit(f"{names}  change, with its uncertainty", width).rstrip(), DIM)))
    lines += [_figure(figure, width) for figure in found.figures]
    lines.append(line((" Traffic", STRONG)))
    lines += [_factor(factor, width) for factor in found.factors]
    compared = ", ".join(
        f"{side.compared} of {side.windows} minutes {when}" if 50 < side.seconds < 70 else
        f"{side.compared} of {side.windows} windows {when}"
        for side, when in ((found.before, "before"), (found.after, "after"))
    )  # fmt: skip
    lines.append(line((fit(f"  medians over {compared}; the rest is warm-up, or unlike", width).rstrip(), DIM)))
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(plain(text), max(20, width - 2)) or [""]


def _changed(found: Comparison, width: int) -> list[str]:
    return [fit(plain(setting_words(change)), width).rstrip() for change in found.differences] or ["nothing"]


def _traffic(found: Comparison, width: int) -> list[tuple[str, Style | None]]:
    """The load in a few words, as far as there is room."""
    parts, room = [], width - 12 - len(str(found.traffic))
    for factor in found.factors:
        if factor.key in ("requests_per_second", "prompt_length_mean", "answer_length_mean"):
            before, after = amount_words("", factor.before), amount_words(factor.unit, factor.after)
            parts.append(f"{factor.name} {before} → {after}")
    text = f" · {' · '.join(parts)}"
    return [(fit(text, min(len(text), room)), DIM)]


def _side(found: Comparison, *, after: bool) -> str:
    run = (found.after if after else found.before).run
    return ("after" if after else "before") + f" @{run.generation}"


def _figure(figure: Figure, width: int) -> Strip:
    before, after = (fit(value_words(figure.unit, value), _VALUE, ">") for value in (figure.before, figure.after))
    judged = figure.verdict is not None
    change = fit(change_words(figure), 25)
    words = " ".join(filter(None, (_short(figure.verdict), goal_words(figure) if width > 90 else "")))
    room = max(0, width - 2 - _NAME - 2 * _VALUE - 2 - 25)
    style = _STYLES.get(figure.verdict) if figure.verdict is not None else DIM
    return line(
        (fit(f"  {figure.name}", _NAME + 2), None if judged else DIM),
        (before, None if judged else DIM),
        (after, STRONG if judged else DIM),
        ("  " + change, style),
        (fit(words, room).rstrip(), style),
    )


def _short(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    short = {
        Verdict.NO_DIFFERENCE: "none seen",
        Verdict.TOO_LITTLE: "too little",
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
