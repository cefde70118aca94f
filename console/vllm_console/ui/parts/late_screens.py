"""Screens that open once a query is answered, and what is typed for them meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from textual import events
from textual.screen import Screen

from vllm_console.ui.actions import action_named
from vllm_console.ui.keymap import keys_of

if TYPE_CHECKING:
    from vllm_console.ui.app import ConsoleApp

T = TypeVar("T")

REMIND_SECONDS = 1.0
"""How long a screen may take to open before a message says how to give it up."""

WAITING = "Waiting for an answer: esc gives up."


class _Opening:
    """A screen that opens over ``over`` with the answer of the query ``once``.

    ``mounting``: it is open, but can't take keys yet.
    """

    def __init__(self, once: str, over: Screen[Any]) -> None:
        self.once, self.over, self.mounting = once, over, False
        self.typed: list[events.Key | events.Paste] = []


class LateScreens:
    """Opens screens that need an answer first. What is typed until they open is for them, not for the screen below."""

    def __init__(self, console: ConsoleApp) -> None:
        self._console = console
        self._opening: _Opening | None = None

    def open(
        self,
        doing: str,
        call: Callable[[], T],
        show: Callable[[T], str],
        *,
        once: str,
        about: str = "",
        missed: Callable[[T], str] = lambda _: "",
    ) -> None:
        """Run a query as the app's `act` does. ``show`` opens the screen, or returns why there is none.

        ``missed`` returns the message if the screen was given up, or another one was opened meanwhile.
        """
        opening = self._opening = _Opening(once, self._console.screen)

        def done(result: T) -> str:
            if not self._awaits(once):
                return missed(result)
            message = show(result)
            self._opened()
            return message

        def failed(_: Exception) -> bool:
            if self._awaits(once):
                self._end()
            return False

        def remind() -> None:
            if self._opening is opening and opening.over is self._console.operations:
                self._console.show_message(WAITING)
            elif self._opening is opening:
                self._console.notify(WAITING, markup=False)  # the screen hides the message line

        self._console.act(doing, call, done, failed, about=about, once=once)
        self._console.set_timer(REMIND_SECONDS, remind)

    def keeps(self, event: events.Key | events.Paste) -> bool:
        """Keep what is typed, if a screen is about to open. Escape gives that screen up, and ctrl+q quits."""
        opening = self._opening
        if opening is None or not self._awaits(opening.once):
            return False
        if isinstance(event, events.Key) and not opening.mounting:
            if event.key == "escape":
                self._end()
                return True
            if not event.is_printable and event.key in keys_of(action_named("quit")):
                return False
        opening.typed.append(event)
        return True

    def _awaits(self, once: str) -> bool:
        """Whether a screen opens with the answer of this query: not if another one was opened with the mouse."""
        opening = self._opening
        if opening is None or opening.once != once:
            return False
        if not opening.mounting and self._console.screen is not opening.over:
            self._end()
            return False
        return True

    def _opened(self) -> None:
        """The screen was opened, unless there is nothing to show: nobody wants what was typed for it then."""
        opening = self._opening
        if opening is None or self._console.screen is opening.over:
            self._end()
        else:
            opening.mounting = True
            self._console.call_next(self._type_into, opening)  # runs after the mounting, which was queued before

    async def _type_into(self, opening: _Opening) -> None:
        """Pass what was typed to the screen, which is mounted now."""
        if self._opening is opening:
            self._end()
            for event in opening.typed:
                await self._console.on_event(event)

    def _end(self) -> None:
        self._opening = None
        self._console.answered(WAITING)
