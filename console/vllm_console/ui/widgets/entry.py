"""The input line at the bottom of a screen: a value, a flag's name, a search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.suggester import SuggestFromList
from textual.widgets import Input

from vllm_console.ui.widgets.draw import KeyHint


class Entry(Input):
    """An input that is only shown while something is typed. ``purpose`` says what for; None while it is hidden.

    ↑ and ↓ cycle through the choices; without choices they are sent to the screen as `Entry.Stepped`. Tab completes;
    without a suggestion it is sent to the screen as `Entry.Completing`.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "step(1)", show=False),
        Binding("up", "step(-1)", show=False),
        Binding("tab", "complete", show=False),
    ]

    class Stepped(Message):
        """↑ or ↓ was pressed without choices to cycle through; ``step`` is -1 or 1."""

        def __init__(self, step: int) -> None:
            super().__init__()
            self.step = step

    class Completing(Message):
        """Tab was pressed without a suggestion."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id, compact=True)
        self.purpose: str | None = None
        self._choices: Sequence[str] = ()

    def on_mount(self) -> None:
        """Hide it until it is needed."""
        self.display = False

    def open(
        self, purpose: str, text: str = "", choices: Sequence[str] = (), *, cycled: bool = True, placeholder: str = ""
    ) -> None:
        """Show the input, starting with ``text``. ``choices`` complete it; ↑ and ↓ cycle through them if ``cycled``."""
        self.purpose = purpose
        self._choices = choices if cycled else ()
        self.offer(choices)
        self.placeholder = placeholder
        self.display = True
        self.put(text)
        self.screen.set_focus(self)  # immediately, so that the next keys go to it

    def offer(self, choices: Sequence[str]) -> None:
        """Use these to complete the text."""
        self.suggester = SuggestFromList(choices, case_sensitive=False) if choices else None

    def put(self, text: str) -> None:
        """Set the text and move the cursor to its end."""
        self.value = text
        self.cursor_position = len(text)

    def shut(self) -> None:
        """Hide it."""
        self.purpose = None
        self.display = False
        self.screen.set_focus(None)

    def keys(
        self, back: KeyHint, enter: str = "accept", *, chooses: bool = False, completes: bool = False
    ) -> list[KeyHint]:
        """The keys that work while something is typed, ``back`` last; the screen's own keys do nothing then.

        ``chooses`` and ``completes``: the screen handles ↑ and ↓, and tab.
        """
        hints: list[KeyHint] = [("enter", enter, "focused.submit")]
        if chooses or self._choices:
            hints.append(("↑ ↓", "choose", "focused.step(-1)|focused.step(1)"))
        if completes or self.suggester is not None:
            hints.append(("tab", "complete", "focused.complete"))
        return [*hints, back]

    def _on_paste(self, event: events.Paste) -> None:
        """Join pasted lines into one, e.g. indented JSON. `Input` would drop all but the first."""
        event.prevent_default()
        event.stop()
        lines = event.text.splitlines()
        line = " ".join(filter(None, map(str.strip, lines))) if len(lines) > 1 else event.text.rstrip("\r\n")
        self.replace(line, *sorted(self.selection))

    def action_step(self, step: int) -> None:
        """Select the next or previous choice, or the first or last one if the text is none of them."""
        if not self._choices:
            self.post_message(self.Stepped(step))
        elif self.value in self._choices:
            self.put(self._choices[(self._choices.index(self.value) + step) % len(self._choices)])
        else:
            self.put(self._choices[0 if step > 0 else -1])

    def action_complete(self) -> None:
        """Accept the suggestion. Without one, send `Completing`: the screen's own keys are inactive meanwhile."""
        if self._suggestion:
            self.action_end()
            self.action_cursor_right()
        else:
            self.post_message(self.Completing())
