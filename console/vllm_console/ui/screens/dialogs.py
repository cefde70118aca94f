"""Small questions: yes or no, one of a list, and a line to type."""

from __future__ import annotations

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
from vllm_console.ui.terminal.lines import LineView, clickable, line, wheel_step
from vllm_console.ui.terminal.screens import TerminalModal
from vllm_console.ui.theme import ACCENT, BAD, DIM, KEY, STRONG
from vllm_console.ui.widgets.draw import Part, fit, paragraph
from vllm_launchers.errors import UsageError

Answer = TypeVar("Answer")


class DialogAnswer(NamedTuple):
    """A third answer to a question: its key, what it does in a word, and what is called."""

    key: str
    text: str
    then: Callable[[], object]


class Dialog(TerminalModal[Answer]):
    """A box with lines, drawn anew for each size of the screen."""

    CSS_PATH = "dialogs.tcss"

    def compose(self) -> ComposeResult:
        """The box."""
        yield Vertical(LineView(id="question"), id="dialog")

    def on_mount(self) -> None:
        """Show the lines."""
        self.query_one("#dialog").set_class(getattr(self.app, "ascii", False), "-ascii")
        self.query_one("#question", LineView).show(self.lines())

    def on_resize(self) -> None:
        """Draw for the new size."""
        self.redraw()

    def redraw(self) -> None:
        """Draw what there is to say now."""
        if self.is_mounted:
            self.query_one("#question", LineView).show(self.lines())

    @abstractmethod
    def lines(self) -> list[Strip]:
        """What the box holds."""

    @property
    def room(self) -> int:
        """Cells that a line may take."""
        return max(20, int(0.9 * self.app.size.width) - 8)

    def action_leave(self) -> None:
        """Close without an answer."""
        self.close_with()


class Confirm(Dialog[bool]):
    """Asks before a destructive action. ``y`` or enter confirms, ``n``, ``q`` or escape cancels; ``other`` is done
    instead.

    With an empty ``yes`` it only informs. A ``late`` one, some time after its key, may open under an enter that is
    meant for something else: it does not take enter for a yes.
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

    def set_note(self, note: Part) -> None:
        """Show a note below the details, in place of the one before; it may arrive while the question is open."""
        self._note = note
        self.redraw()

    def set_details(self, details: Sequence[str]) -> None:
        """Show other details: they may change while the question is open."""
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
        """Close with the answer."""
        self.close_with(answer and bool(self._yes))

    def on_key(self, event: events.Key) -> None:
        """The key of the third answer."""
        if self._other is not None and event.key == self._other.key:
            event.stop()
            self.action_other()

    def action_other(self) -> None:
        """Close, and do what the third answer says."""
        if self._other is not None:
            self.close_with(False)
            self._other.then()

    def action_enter(self) -> None:
        """Yes, or where there is nothing to do, close."""
        if not (self._late and self._yes):
            self.action_answer(True)


def _leaving_key() -> str:
    """The key that closes what only informs: escape, if it does."""
    keys = keys_of(action_named("question_no"))
    return key_label("escape" if "escape" in keys else keys[0])


def answer_parts(key: str, text: str, action: str) -> list[Part]:
    """An answer of a dialog: its key and what it does, both to be clicked."""
    return [(key, clickable(action, KEY)), (f" {text}", clickable(action)), "   "]


def _at_most(rows: Sequence[Strip], room: int) -> list[Strip]:
    """The rows, or as many as there is room for, and how many more there are."""
    kept = max(0, room - 1) if len(rows) > room else len(rows)
    return [*rows[:kept], *([line((f"… {len(rows) - kept} more lines", DIM))] if kept < len(rows) else [])]


class Choose(Dialog[str]):
    """Picks one of a list of (name, explanation); dismisses with the name, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [*bindings("list")]

    def __init__(self, question: str, choices: Sequence[tuple[str, str]], at: str | None = None) -> None:
        super().__init__()
        self._question = plain(question)
        self._choices = list(choices)
        self._index = next((i for i, (name, _) in enumerate(self._choices) if name == at), 0)

    def lines(self) -> list[Strip]:
        """The question, as much of the list as fits, and the keys."""
        width = max((len(name) for name, _ in self._choices), default=0) + 2
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
        """Move the cursor, round the ends."""
        if self._choices:
            self._index = (self._index + by) % len(self._choices)
            self.redraw()

    def action_edge(self, to: int) -> None:
        """The first or the last one."""
        if self._choices:
            self._index = 0 if to < 0 else len(self._choices) - 1
            self.redraw()

    def action_choose(self, index: int) -> None:
        """Close with the one that was clicked."""
        self._index = index
        self.action_take()

    @on(events.MouseScrollUp)
    @on(events.MouseScrollDown)
    def _wheel(self, event: events.MouseEvent) -> None:
        event.stop()
        self.action_move(wheel_step(event))

    def action_take(self) -> None:
        """Close with what is under the cursor."""
        self.close_with(self._choices[self._index][0] if self._choices else None)


def choose(
    app: App[Any],
    question: str,
    choices: Sequence[tuple[str, str]],
    then: Callable[[str], object],
    at: str | None = None,
) -> None:
    """Have one of a list of (name, explanation) chosen; ``then`` is called with its name, if one is."""

    def chosen(name: str | None) -> None:
        if name is not None:
            then(name)

    app.push_screen(Choose(question, choices, at), chosen)


class LineDialog(Dialog[None]):
    """Shows lines and takes one that is typed. It stays open, with what was typed, until that is done or it is left.

    ``content`` gives the lines for so many cells and rows. ``take`` gets what is typed: it raises `UsageError` for a
    line that can't be understood, and calls `done` or `refuse` once it is known what came of it. ``enter`` says what a
    line does, ``placeholder`` what may be typed.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "Leave", show=False)]

    def __init__(self, name: str, enter: str, placeholder: str, content: Callable[[int, int], list[Strip]]) -> None:
        super().__init__()
        self._typed = Input(id=name, compact=True, placeholder=placeholder)
        self._enter, self._content = enter, content
        self._note: tuple[str, Style] = ("", DIM)
        """What is wrong with what was typed, or that it is being done."""
        self._busy = False

    @abstractmethod
    def take(self, text: str) -> str:
        """Begin to do what is typed, and return what is being done.

        Raises:
            UsageError: it can't be understood.
        """

    def compose(self) -> ComposeResult:
        """A box with the lines and one to type into."""
        with Vertical(id="dialog"):
            yield LineView(id="question")
            with Horizontal(id="typed"):
                yield LineView(id="prompt")
                yield self._typed
            yield LineView(id="answers")

    def on_mount(self) -> None:
        """Take what is typed. (Textual has the lines shown as well: it calls every class's handler.)"""
        self.query_one("#prompt", LineView).show([line(("▸ ", KEY))])
        self._show_answers()
        self.set_focus(self._typed)  # at once: keys typed next are for it

    def redraw(self) -> None:
        """Draw the lines, what is wrong, and the keys."""
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
        """As much as fits."""
        # Nine tenths of the screen, without the border, the line to type into, what is wrong with it, and the keys.
        return self._content(self._width, int(0.9 * self.app.size.height) - 6)

    async def action_take(self) -> None:
        """As enter does in the line."""
        await self._typed.action_submit()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Take the line, if it can be understood."""
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
        """What was wrong is about what was typed before."""
        if not self._busy and self._note[0]:
            self._show(("", DIM))

    def refuse(self, error: Exception) -> bool:
        """Show why it was not done; whether anybody sees that."""
        self._busy = False
        self._show((str(error).partition("\n")[0], BAD))
        return self in self.app.screen_stack

    def done(self) -> None:
        """It is done: close."""
        self.close_with()

    def _show(self, note: tuple[str, Style]) -> None:
        self._note = note
        self.redraw()
