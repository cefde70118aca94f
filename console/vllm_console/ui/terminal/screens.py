"""Screens that are laid out for the terminal as it is now.

Textual 8.2 tells a screen of each layout's size by a `Resize` to itself, and lays out again for the size in it. Where
a second size is in the screen's queue by then, each of the two makes a layout for the other one outdated: they
alternate for as long as other messages come between them, and the screen stays half drawn. A busy machine gets there
when a terminal is resized twice.
"""

from __future__ import annotations

from typing import TypeVar

from textual import events
from textual.screen import ModalScreen, Screen

Result = TypeVar("Result")


class TerminalScreen(Screen[Result]):
    """A screen that takes no notice of a size that is not the terminal's any more; that of the present one follows."""

    @property
    def is_mounted(self) -> bool:
        """Whether it has its widgets. Textual's own stays true while they are removed with it, and afterwards; what a
        thread found out may come then."""
        return super().is_mounted and not self._pruning

    def close_with(self, result: Result | None = None) -> None:
        """Close it with its result. Screens above it, such as questions, are closed first, without a result.

        Does nothing for one that is already closed. Textual's `dismiss` alone would close whichever screen is on top,
        and raise an exception the second time.
        """
        app = self.app
        if self not in app.screen_stack:
            return
        while app.screen is not self:
            app.pop_screen()
        self.dismiss(result)

    def _on_resize(self, event: events.Resize) -> None:  # type: ignore[override]
        """Leave out Textual's own handler, which comes next, for an outdated size."""
        if event.size != self.app.size:
            event.stop()
            event.prevent_default()


class TerminalModal(ModalScreen[Result], TerminalScreen[Result]):
    """The same for a dialog. Textual takes styles from the first class alone."""
