"""Small questions: yes or no, and one of a list."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.strip import Strip

from vllm_console.text import plain
from vllm_console.ui.theme import ACCENT, DIM, KEY, STRONG
from vllm_console.ui.widgets.draw import Part, fit
from vllm_console.ui.widgets.lines import LineView, line


class Confirm(ModalScreen[bool]):
    """Asks before something that hurts. ``y`` or enter does it, ``n`` or escape does not.

    With an empty ``yes`` it only tells, and there is nothing to do. One that comes ``late``, some time after its key,
    may open under an enter that is meant for something else: it takes none for a yes.
    """

    CSS_PATH = "dialogs.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes", show=False),
        Binding("enter", "enter", "Yes", show=False),
        Binding("n,escape,q", "answer(False)", "No", show=False),
    ]

    def __init__(self, question: str, details: Sequence[str] = (), yes: str = "yes", *, late: bool = False) -> None:
        super().__init__()
        self._late = late
        self._question, self._details, self._yes = plain(question), [plain(text) for text in details], yes
        self._told: Part = ""

    def compose(self) -> ComposeResult:
        """A box with the question."""
        yield Vertical(LineView(id="question"), id="dialog")

    def on_mount(self) -> None:
        """Show the question."""
        self.query_one("#dialog").set_class(getattr(self.app, "ascii", False), "-ascii")
        self._draw()

    def on_resize(self) -> None:
        """Wrap for the new size."""
        if self.is_mounted:
            self._draw()

    def tell(self, told: Part) -> None:
        """What is to be known besides, in place of what was told before; it may come while the question stands."""
        self._told = told
        if self.is_mounted:
            self._draw()

    def _draw(self) -> None:
        width = max(20, int(0.9 * self.app.size.width) - 8)
        text, style = (self._told, None) if isinstance(self._told, str) else self._told
        question = [line((row, STRONG)) for row in _wrapped(self._question, width)]
        told = [line((row, style)) for row in _wrapped(plain(text), width)]
        # Nine tenths of the screen, less the border; the keys and two blank lines are always there.
        room = int(0.9 * self.app.size.height) - 2 - len(question) - len(told) - 3
        rows = [*_at_most([row for detail in self._details for row in _wrapped(detail, width)], room), *told]
        keys = (
            line(("y", KEY), f" {self._yes}   ", ("n", KEY), " leave it") if self._yes else line(("esc", KEY), " back")
        )
        self.query_one(LineView).show([*question, line(), *rows, *([line()] if rows else []), keys])

    def action_answer(self, answer: bool) -> None:
        """Close with the answer."""
        self.dismiss(answer and bool(self._yes))

    def action_enter(self) -> None:
        """Yes, or where there is nothing to do, close."""
        if not (self._late and self._yes):
            self.action_answer(True)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)


def _at_most(rows: Sequence[str], room: int) -> list[Strip]:
    """The rows, or as many as there is room for, and how many more there are."""
    kept = max(0, room - 1) if len(rows) > room else len(rows)
    return [*map(line, rows[:kept]), *([line((f"… {len(rows) - kept} more lines", DIM))] if kept < len(rows) else [])]


class Choose(ModalScreen[str | None]):
    """Picks one of a list of (name, explanation); dismisses with the name, or None."""

    CSS_PATH = "dialogs.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", "Next", show=False),
        Binding("up,k", "move(-1)", "Previous", show=False),
        Binding("enter", "take", "Choose", show=False),
        Binding("escape,q", "leave", "Leave", show=False),
    ]

    def __init__(self, question: str, choices: Sequence[tuple[str, str]], at: str | None = None) -> None:
        super().__init__()
        self._question = plain(question)
        self._choices = list(choices)
        self._index = next((i for i, (name, _) in enumerate(self._choices) if name == at), 0)

    def compose(self) -> ComposeResult:
        """A box with the list."""
        yield Vertical(LineView(id="question"), id="dialog")

    def on_mount(self) -> None:
        """Show the list."""
        self.query_one("#dialog").set_class(getattr(self.app, "ascii", False), "-ascii")
        self._draw()

    def _draw(self) -> None:
        width = max((len(name) for name, _ in self._choices), default=0) + 2
        rows = max(3, self.app.size.height - 12)
        top = max(0, self._index - rows + 1)
        lines = [line((self._question, STRONG)), line()]
        for index, (name, explanation) in enumerate(self._choices[top : top + rows], top):
            here = index == self._index
            lines.append(
                line(
                    ("▸ " if here else "  ", ACCENT),
                    (fit(plain(name), width), STRONG if here else None),
                    (fit(plain(explanation), max(10, min(70, self.app.size.width - 14) - width)).rstrip(), DIM),
                )
            )
        lines += [line(), line(("enter", KEY), " choose   ", ("esc", KEY), " leave it")]
        self.query_one(LineView).show(lines)

    def action_move(self, by: int) -> None:
        """Move the cursor, round the ends."""
        if self._choices:
            self._index = (self._index + by) % len(self._choices)
            self._draw()

    def action_take(self) -> None:
        """Close with what is under the cursor."""
        self.dismiss(self._choices[self._index][0] if self._choices else None)

    def action_leave(self) -> None:
        """Close without a choice."""
        self.dismiss(None)

    def on_resize(self) -> None:
        """Draw for the new size."""
        if self.is_mounted:
            self._draw()
