"""The line at a screen's foot that something is typed into: a value, a flag's name, a search."""

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
    """An input that stands on the screen only while something is typed; ``purpose`` says what, None while it is away.

    ↑ and ↓ go through the choices; where there are none they are the screen's, as `Entry.Stepped`. Tab completes; where
    nothing is suggested it is the screen's, as `Entry.Completing`.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "step(1)", show=False),
        Binding("up", "step(-1)", show=False),
        Binding("tab", "complete", show=False),
    ]

    class Stepped(Message):
        """↑ or ↓ was pressed where there are no choices to go through; ``step`` is -1 or 1."""

        def __init__(self, step: int) -> None:
            super().__init__()
            self.step = step

    class Completing(Message):
        """Tab was pressed where nothing is suggested behind the text."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id, compact=True)
        self.purpose: str | None = None
        self._choices: Sequence[str] = ()

    def on_mount(self) -> None:
        """It stays away until it is needed."""
        self.display = False

    def open(
        self, purpose: str, text: str = "", choices: Sequence[str] = (), *, cycled: bool = True, placeholder: str = ""
    ) -> None:
        """Let something be typed, beginning with ``text``. ``choices`` complete it, and are gone through by ↑ and ↓."""
        self.purpose = purpose
        self._choices = choices if cycled else ()
        self.offer(choices)
        self.placeholder = placeholder
        self.display = True
        self.put(text)
        self.screen.set_focus(self)  # at once: keys typed next are for it

    def offer(self, choices: Sequence[str]) -> None:
        """Complete what is typed with these."""
        self.suggester = SuggestFromList(choices, case_sensitive=False) if choices else None

    def put(self, text: str) -> None:
        """Let ``text`` stand there, the cursor behind it."""
        self.value = text
        self.cursor_position = len(text)

    def shut(self) -> None:
        """Away with it."""
        self.purpose = None
        self.display = False
        self.screen.set_focus(None)

    def keys(
        self, back: KeyHint, enter: str = "accept", *, chooses: bool = False, completes: bool = False
    ) -> list[KeyHint]:
        """The keys that do something while something is typed, ``back`` the last; the screen's own do nothing then.

        ``chooses`` and ``completes``: the screen has something for ↑, ↓ and for tab.
        """
        hints: list[KeyHint] = [("enter", enter, "focused.submit")]
        if chooses or self._choices:
            hints.append(("↑ ↓", "choose", "focused.step(-1)|focused.step(1)"))
        if completes or self.suggester is not None:
            hints.append(("tab", "complete", "focused.complete"))
        return [*hints, back]

    def _on_paste(self, event: events.Paste) -> None:
        """Several lines become one, such as indented JSON: `Input` would drop all but the first."""
        event.prevent_default()
        event.stop()
        lines = event.text.splitlines()
        line = " ".join(filter(None, map(str.strip, lines))) if len(lines) > 1 else event.text.rstrip("\r\n")
        self.replace(line, *sorted(self.selection))

    def action_step(self, step: int) -> None:
        """The next or previous choice; the first when none stands there yet."""
        if not self._choices:
            self.post_message(self.Stepped(step))
        elif self.value in self._choices:
            self.put(self._choices[(self._choices.index(self.value) + step) % len(self._choices)])
        else:
            self.put(self._choices[0 if step > 0 else -1])

    def action_complete(self) -> None:
        """Take what is suggested behind the text; without that, say so: it is no key of the screen's meanwhile."""
        if self._suggestion:
            self.action_end()
            self.action_cursor_right()
        else:
            self.post_message(self.Completing())
