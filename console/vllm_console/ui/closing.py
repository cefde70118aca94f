"""Closing a screen: once, whatever is above it."""

from __future__ import annotations

from typing import TypeVar

from textual.screen import Screen

Result = TypeVar("Result")


def close_screen(screen: Screen[Result], result: Result | None = None) -> None:
    """Close a screen with its result. Screens above it, such as questions, are closed first, without a result.

    Does nothing for a screen that is already closed. `Screen.dismiss` alone would close whichever screen is on top,
    and raise an exception the second time.
    """
    app = screen.app
    if screen not in app.screen_stack:
        return
    while app.screen is not screen:
        app.pop_screen()
    screen.dismiss(result)
