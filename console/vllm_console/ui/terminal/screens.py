"""Screens that ignore outdated terminal sizes.

Textual 8.2 notifies a screen of each layout's size with a `Resize` to itself, and lays out again for the size in it. If
a second size is already in the screen's queue, each of the two makes a layout for the other outdated: they alternate as
long as other messages come between them, and the screen stays half drawn. This happens on a busy machine when a
terminal is resized twice.
"""

from __future__ import annotations

from typing import TypeVar

from textual import events
from textual.screen import ModalScreen, Screen

Result = TypeVar("Result")


class TerminalScreen(Screen[Result]):
    """A screen that ignores sizes other than the terminal's current one, which follows."""

    @property
    def is_mounted(self) -> bool:
        """Whether it has its widgets.

        Textual's own property stays true while they are removed and afterwards, when the result of a thread may still
        arrive.
        """
        return super().is_mounted and not self._pruning

    @property
    def uncovered(self) -> bool:
        """Whether it is visible: on top, or below dialogs only.

        Textual's `is_current` is also true below a screen with the terminal's own background.
        """
        stack = self.app.screen_stack
        return self in stack and all(isinstance(above, ModalScreen) for above in stack[stack.index(self) + 1 :])

    def close_with(self, result: Result | None = None) -> None:
        """Close this screen with a result. Screens above it, such as questions, are closed first, without a result.

        Does nothing if it is already closed. Textual's `dismiss` alone would close whichever screen is on top, and
        raise the second time.
        """
        app = self.app
        if self not in app.screen_stack:
            return
        while app.screen is not self:
            app.pop_screen()
        self.dismiss(result)

    def _on_resize(self, event: events.Resize) -> None:  # type: ignore[override]
        """Skip Textual's own handler, which comes next, for an outdated size."""
        if event.size != self.app.size:
            event.stop()
            event.prevent_default()


class TerminalModal(ModalScreen[Result], TerminalScreen[Result]):
    """The same for a dialog. Textual takes styles only from the first base class."""
