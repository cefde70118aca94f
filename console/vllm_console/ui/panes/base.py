"""What all panes have in common: they are given a server as the snapshot has it, and draw that."""

from __future__ import annotations

from collections.abc import Sequence

from textual import events
from textual.strip import Strip

from vllm_console.fleet.model import ServerView
from vllm_console.format import duration
from vllm_console.telemetry.model import Quantiles, Window
from vllm_console.ui.theme import BAD, DIM, WARN
from vllm_console.ui.widgets.draw import Part
from vllm_console.ui.widgets.lines import LineView

STALE_SECONDS = 5.0
"""Numbers older than this are shown with their age."""


class Pane(LineView):
    """A part of the screen that shows the selected server. Subclasses turn a server into lines in `draw`."""

    DEFAULT_CSS = "Pane { height: 1fr; width: 1fr; }"

    _given: tuple[ServerView, float] | None = None

    def give(self, server: ServerView, now: float) -> None:
        """Show this server as it was at ``now`` (Unix seconds); a hidden pane only remembers it."""
        self._given = (server, now)
        if self.is_on_screen and self.size.width:
            self.show(self.draw(server, now, *self.size))

    def draw(self, server: ServerView, now: float, width: int, height: int) -> Sequence[Strip]:
        """The lines for a server, from the pane's title on. Pure."""
        raise NotImplementedError

    def on_resize(self, event: events.Resize) -> None:
        """Draw for the new size."""
        if self._given and event.size.width:
            self.show(self.draw(*self._given, *event.size))

    def on_show(self) -> None:
        """Draw what came while the pane was hidden."""
        if self._given:
            self.give(*self._given)


def title_of(number: int, name: str, server: ServerView) -> str:
    """A pane's title; a simulated server is marked as such."""
    return f"{number} {name} · simulated" if server.simulated else f"{number} {name}"


def age_note(server: ServerView, now: float) -> tuple[Part, ...]:
    """How old the numbers are, when they are stale or there are none."""
    if server.sample is None:
        return (("no metrics", DIM),)
    age = now - server.sample.at
    return ((f"{duration(age)} old", WARN),) if age > STALE_SECONDS else ()


def over(value: float | None, goal: float | None) -> bool:
    """Whether a reported value misses its goal."""
    return value is not None and goal is not None and value > goal


def marked(text: str, missed: bool) -> Part:
    """A figure, with an exclamation mark when it misses its goal."""
    return (f"{text} !", BAD) if missed else text


def quantile(window: Window | None, latency: str) -> Quantiles | None:
    """A latency's quantiles in a window, or None."""
    return window.latencies.get(latency) if window else None
