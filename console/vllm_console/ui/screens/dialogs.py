"""Dialogs: confirmation, choice from a list, and a line of input."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

from rich.style import Style
from textual import events, on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.strip import Strip
from textual.widgets import Input

from vllm_console.text import plain
from vllm_console.ui.actions import action_named, bindings
from vllm_console.ui.keymap import key_label, key_of, keys_of
from vllm_console.ui.terminal.lines import LineView, cells, clickable, line, wheel_step
from vllm_console.ui.terminal.screens import TerminalModal
from vllm_console.ui.theme import ACCENT, BAD, DIM, KEY, STRONG
from vllm_console.ui.widgets.draw import Part, fit, paragraph
from vllm_launchers.errors import UsageError

Answer = TypeVar("Answer")

PAGE = 10
"""Number of lines by which a page key moves the cursor in a list."""

UNREAD_SECONDS = 1.0
"""How long after a late question has appeared a key may still be meant for something else."""


class DialogAnswer(NamedTuple):
    """A third answer to a confirmation: its key, its label, and the callback."""

    key: str
    text: str
    then: Callable[[], object]


class Dialog(TerminalModal[Answer]):
    """A box of lines, redrawn when the screen size changes."""

    CSS_PATH = "dialogs.tcss"

    def compose(self) -> ComposeResult:
        """Yield the box."""
        yield Vertical(LineView(id="question"), id="dialog")

    def on_mount(self) -> None:
        """Show the lines."""
        self.query_one("#question", LineView).show(self.lines())

    def on_resize(self) -> None:
        """Draw for the new size."""
        self.redraw()

    def redraw(self) -> None:
        """Draw the current lines."""
        if self.is_mounted:
            self.query_one("#question", LineView).show(self.lines())

    @abstractmethod
    def lines(self) -> list[Strip]:
        """Return the content of the box."""

    @property
    def room(self) -> int:
        """Maximum width of a line in cells."""
        return max(20, int(0.9 * self.app.size.width) - 8)

    def action_leave(self) -> None:
        """Close without an answer."""
        self.close_with()


class Confirm(Dialog[bool]):
    """Asks for confirmation. ``y`` or enter confirms; ``n``, ``q`` or escape cancels; ``other`` is a third answer.

    With an empty ``yes`` it only informs. A ``late`` dialog opens some time after its key, perhaps while something is
    typed: enter does not confirm it, and other keys only once there was time to read it.
    """

    BINDINGS: ClassVar[list[BindingType]] = [*bindings("question")]

    def __init__(
        self,
        question: str,
        details: Sequence[str] = (),
        yes: str = "yes",
        *,
        late: bool = False,
        other: DialogAnswer | None = None,
    ) -> None:
        super().__init__()
        self._late, self._other = late, other
        self._question, self._details, self._yes = plain(question), [plain(text) for text in details], yes
        self._note: Part = ""
        self._shown_at = time.monotonic()

    def on_mount(self) -> None:
        """Note when it appeared. (Textual also calls the handler of the base class, which shows the lines.)"""
        self._shown_at = time.monotonic()

    @property
    def _unread(self) -> bool:
        return self._late and time.monotonic() - self._shown_at < UNREAD_SECONDS

    def set_note(self, note: Part) -> None:
        """Set the note below the details; it may change while the dialog is open."""
        self._note = note
        self.redraw()

    def set_details(self, details: Sequence[str]) -> None:
        """Set the details; they may change while the dialog is open."""
        self._details = [plain(text) for text in details]
        self.redraw()

    def lines(self) -> list[Strip]:
        """The question, its details and note, and the answers."""
        width = self.room
        text, style = (self._note, None) if isinstance(self._note, str) else self._note
        question = paragraph(self._question, width, STRONG, "")
        note = paragraph(text, width, style, "")
        # Nine tenths of the screen minus the border; the keys and two blank lines are always shown.
        room = int(0.9 * self.app.size.height) - 2 - len(question) - len(note) - 3
        details = [row for detail in self._details for row in paragraph(detail, width, indent="")]
        rows = [*_at_most(details, room), *note]
        yes, no = key_of("question_yes"), key_of("question_no")
        answers = [(_leaving_key(), "back", "answer(False)")]
        if self._yes:
            other = [(self._other.key, self._other.text, "other")] if self._other is not None else []
            answers = [(yes, self._yes, "answer(True)"), *other, (no, "cancel", "answer(False)")]
        keys = line(*[part for key, text, action in answers for part in answer_parts(key, text, f"screen.{action}")])
        return [*question, line(), *rows, *([line()] if rows else []), keys]

    def action_answer(self, answer: bool) -> None:
        """Close with the answer; a yes to a question that can't have been read yet is ignored."""
        if not (answer and self._unread):
            self.close_with(answer and bool(self._yes))

    def on_key(self, event: events.Key) -> None:
        """Handle the key of the third answer."""
        if self._other is not None and event.key == self._other.key:
            event.stop()
            self.action_other()

    def action_other(self) -> None:
        """Close with the third answer."""
        if self._other is not None and not self._unread:
            self.close_with(False)
            self._other.then()

    def action_enter(self) -> None:
        """Confirm, unless the dialog is late; close if it only informs."""
        if not (self._late and self._yes):
            self.action_answer(True)


def _leaving_key() -> str:
    """The key shown for closing an informational dialog: escape, if it closes it."""
    keys = keys_of(action_named("question_no"))
    return key_label("escape" if "escape" in keys else keys[0])


def answer_parts(key: str, text: str, action: str) -> list[Part]:
    """An answer of a dialog: key and label, both clickable."""
    return [(key, clickable(action, KEY)), (f" {text}", clickable(action)), "   "]


def _at_most(rows: Sequence[Strip], room: int) -> list[Strip]:
    """As many rows as fit; if some are cut, the last one says how many."""
    kept = max(0, room - 1) if len(rows) > room else len(rows)
    return [*rows[:kept], *([line((f"… {len(rows) - kept} more lines", DIM))] if kept < len(rows) else [])]


class Choose(Dialog[str]):
    """Lets the user choose from a list of (name, explanation); dismisses with the name, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [*bindings("list")]

    def __init__(self, question: str, choices: Sequence[tuple[str, str]], at: str | None = None) -> None:
        super().__init__()
        self._question = plain(question)
        self._choices = list(choices)
        self._index = next((i for i, (name, _) in enumerate(self._choices) if name == at), 0)

    def lines(self) -> list[Strip]:
        """The question, the visible part of the list, and the keys."""
        width = max((cells(plain(name)) for name, _ in self._choices), default=0) + 2
        room = self.room
        question = paragraph(self._question, room, STRONG, "")
        rows = max(3, self.app.size.height - 11 - len(question))
        top = max(0, self._index - rows + 1)
        lines = [*question, line()]
        for index, (name, explanation) in enumerate(self._choices[top : top + rows], top):
            here = index == self._index
            action = f"screen.choose({index})"
            lines.append(
                line(
                    ("▸ " if here else "  ", clickable(action, ACCENT)),
                    (fit(plain(name), width), clickable(action, STRONG if here else None)),
                    (
                        fit(plain(explanation), max(10, room - width)).rstrip(),
                        clickable(action, DIM),
                    ),
                )
            )
        hidden = max(0, len(self._choices) - rows)
        keys = [
            *answer_parts(key_of("list_take"), "choose", "screen.take"),
            *answer_parts(key_of("list_leave"), "cancel", "screen.leave"),
        ]
        return [*lines, line((f"  {hidden} more ↑↓" if hidden else "", DIM)), line(*keys)]

    def action_move(self, by: int) -> None:
        """Move the cursor, wrapping around at the ends."""
        if self._choices:
            self._index = (self._index + by) % len(self._choices)
            self.redraw()

    def action_page(self, by: int) -> None:
        """Move the cursor by pages."""
        if self._choices:
            self._index = min(max(0, self._index + by * PAGE), len(self._choices) - 1)
            self.redraw()

    def action_edge(self, to: int) -> None:
        """Select the first (-1) or last choice."""
        if self._choices:
            self._index = 0 if to < 0 else len(self._choices) - 1
            self.redraw()

    def action_choose(self, index: int) -> None:
        """Close with the clicked choice."""
        self._index = index
        self.action_take()

    @on(events.MouseScrollUp)
    @on(events.MouseScrollDown)
    def _wheel(self, event: events.MouseEvent) -> None:
        event.stop()
        self.action_move(wheel_step(event))

    def action_take(self) -> None:
        """Close with the selected choice."""
        self.close_with(self._choices[self._index][0] if self._choices else None)


def choose(
    app: App[Any],
    question: str,
    choices: Sequence[tuple[str, str]],
    then: Callable[[str], object],
    at: str | None = None,
) -> None:
    """Let the user choose from a list of (name, explanation); ``then`` is called with the chosen name."""

    def chosen(name: str | None) -> None:
        if name is not None:
            then(name)

    app.push_screen(Choose(question, choices, at), chosen)


class LineDialog(Dialog[None]):
    """Shows lines and reads one. Stays open, keeping the input, until the line has been carried out or the user leaves.

    ``content`` returns the lines for a width and height in cells. ``take`` gets the input: it raises `UsageError` if it
    can't be parsed, and calls `done` or `refuse` when the outcome is known. ``enter`` labels the key, ``placeholder``
    the input.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "Leave", show=False)]

    def __init__(self, name: str, enter: str, placeholder: str, content: Callable[[int, int], list[Strip]]) -> None:
        super().__init__()
        self._typed = Input(id=name, compact=True, placeholder=placeholder)
        self._enter, self._content = enter, content
        self._note: tuple[str, Style] = ("", DIM)
        """An error about the input, or what is being done."""
        self._busy = False

    @abstractmethod
    def take(self, text: str) -> str:
        """Start carrying out the input, and return a progress message.

        Raises:
            UsageError: the input can't be parsed.
        """

    def compose(self) -> ComposeResult:
        """Yield a box with the lines and an input."""
        with Vertical(id="dialog"):
            yield LineView(id="question")
            with Horizontal(id="typed"):
                yield LineView(id="prompt")
                yield self._typed
            yield LineView(id="answers")

    def on_mount(self) -> None:
        """Focus the input. (Textual also calls the handlers of base classes, which show the lines.)"""
        self.query_one("#prompt", LineView).show([line(("▸ ", KEY))])
        self._show_answers()
        self.set_focus(self._typed)  # right away: the next keys belong to it

    def redraw(self) -> None:
        """Draw the lines, the note, and the keys."""
        super().redraw()
        if self.is_mounted:
            self._show_answers()

    def _show_answers(self) -> None:
        keys = [*answer_parts("enter", self._enter, "screen.take"), *answer_parts("esc", "cancel", "screen.leave")]
        text, style = self._note
        rows = paragraph(text, self._width, style, "", most=2) or [line()]
        self.query_one("#answers", LineView).show([*rows, line(*keys)])

    @property
    def _width(self) -> int:
        return max(40, min(76, self.app.size.width - 14))

    def lines(self) -> list[Strip]:
        """The content that fits."""
        # Nine tenths of the screen minus the border, the input, the note and the keys.
        return self._content(self._width, int(0.9 * self.app.size.height) - 6)

    async def action_take(self) -> None:
        """Submit the input, like enter."""
        await self._typed.action_submit()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Carry out the line if it can be parsed."""
        event.stop()
        if self._busy:
            return
        try:
            doing = self.take(event.value)
        except UsageError as error:
            self.refuse(error)
        else:
            self._busy = True
            self._show((doing, DIM))

    def on_input_changed(self) -> None:
        """Clear an error about earlier input."""
        if not self._busy and self._note[0]:
            self._show(("", DIM))

    def refuse(self, error: Exception) -> bool:
        """Show why it failed. Returns whether the dialog is still open to show it."""
        self._busy = False
        self._show((str(error).partition("\n")[0], BAD))
        return self in self.app.screen_stack

    def done(self) -> None:
        """Close the dialog after success."""
        self.close_with()

    def _show(self, note: tuple[str, Style]) -> None:
        self._note = note
        self.redraw()
