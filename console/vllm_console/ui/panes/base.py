"""What all panes share: they receive a server from the snapshot and draw it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual import events, on
from textual.strip import Strip

from vllm_console.fleet.snapshot import ServerView
from vllm_console.metrics.quantile import Quantiles
from vllm_console.metrics.sample import Window
from vllm_console.metrics.window import load_ended
from vllm_console.text import UNKNOWN, clock, count, duration
from vllm_console.ui.keymap import key_of
from vllm_console.ui.terminal.lines import BLANK, clickable_line, line, wheel_step
from vllm_console.ui.theme import BAD, DIM, WARN
from vllm_console.ui.widgets.chart import NOTHING, PLAIN, ChartView, place_at
from vllm_console.ui.widgets.draw import Part, paragraph, rule
from vllm_console.ui.widgets.framed import FramedView
from vllm_launchers.keeper.records import State

STALE_SECONDS = 5.0
"""Numbers older than this are shown with their age."""


Draw = Callable[[ServerView, float, int, int, ChartView], Sequence[Strip]]
"""From a server, the time (Unix seconds), width, height and how charts are drawn to a pane's lines, its title first.
Pure."""


class ChartedView(FramedView):
    """A view with charts, in which the mouse moves through time."""

    async def on_click(self, event: events.Click) -> None:
        """A click into a chart moves the cursor in time there."""
        place = place_at(self.lines, event.x, event.y)
        if place is not None:
            event.stop()
            await self.run_action(f"screen.time_at({place:.4f})")

    @on(events.MouseScrollUp)
    @on(events.MouseScrollDown)
    @on(events.MouseScrollLeft)
    @on(events.MouseScrollRight)
    async def wheel(self, event: events.MouseEvent) -> None:
        """The wheel over a chart moves the cursor in time, up is back as in a log; with ctrl it changes the range."""
        if place_at(self.lines, event.x, event.y) is None:
            return
        event.stop()
        by = wheel_step(event)
        await self.run_action(f"screen.step_range({by})" if event.ctrl else f"screen.time({by})")


class Pane(ChartedView):
    """A part of the screen that shows the selected server as lines. ``number`` is its key, if it has one."""

    DEFAULT_CSS = "Pane { height: 1fr; width: 1fr; }"

    def __init__(self, draw: Draw, *, id: str, number: int = 0) -> None:
        super().__init__(id=id)
        self._draw, self._number = draw, number
        self._shown: tuple[ServerView, float, ChartView] | None = None
        self._title = (BLANK, BLANK)
        """The title as it was drawn, and the same with its action."""

    def show_server(self, server: ServerView, now: float, view: ChartView = PLAIN) -> None:
        """Show this server as it was at ``now`` (Unix seconds); a hidden pane only remembers it."""
        self._shown = (server, now, view)
        if self.outer_size.width and self.is_on_screen:
            self._show(server, now, view, *self.room)

    def on_resize(self, event: events.Resize) -> None:
        """Draw for the new size."""
        if self._shown and event.size.width:
            self._show(*self._shown, *self.room)

    def _show(self, server: ServerView, now: float, view: ChartView, width: int, height: int) -> None:
        """Draw it; a click on the title shows the pane large, and once more: the layout."""
        lines = list(self._draw(server, now, width, height, view))
        if lines and self._number:
            if lines[0] is not self._title[0]:
                self._title = lines[0], clickable_line(lines[0], f"screen.pane({self._number})")
            lines[0] = self._title[1]
        self.show_lines(lines)

    def on_show(self) -> None:
        """Draw what came while the pane was hidden."""
        if self._shown:
            self.show_server(*self._shown)


def title_line(number: int, name: str, width: int, right: Sequence[Part] = (), *shorter: Sequence[Part]) -> Strip:
    """A pane's title, its key first. The table and the header say which server it shows, and that it is simulated.

    As in `rule`, the first that fits of what is ``shorter`` stands at the right where ``right`` has no room.
    """
    return rule(name, width, right, *shorter, key=key_of(f"pane_{number}"))


def age_note(server: ServerView, now: float) -> tuple[Part, ...]:
    """How old the numbers are, when they are stale or there are none; the header says it of an earlier moment."""
    if server.moment is not None:
        return ((f"nothing recorded at {clock(server.moment, now)}", WARN),) if server.window is None else ()
    if server.headless:
        return (("node 0 has the metrics", DIM),)
    if server.sample is None:
        last = server.series.as_of if server.series is not None else None
        return ((f"as of {clock(last, now)}" if last is not None else "no metrics", DIM),)
    age = now - server.sample.at
    return ((f"{duration(age)} old", WARN),) if age > STALE_SECONDS else ()


def why_empty(server: ServerView, otherwise: str = "not reported") -> str:
    """What its charts without a point wait for, or why they stay empty; ``otherwise`` where others have points."""
    series = server.series
    if series is not None and any(value is not None for values in series.values.values() for value in values):
        return otherwise
    if server.moment is not None or not server.state.alive:
        return NOTHING
    if server.headless:
        return "node 0 has the metrics"
    return _AWAITED.get(server.state, "waiting for the first metrics")


_AWAITED = {
    State.STARTING: "waiting for it to be ready",
    State.UNRESPONSIVE: "waiting for an answer",
    State.ASLEEP: "asleep",
    State.STOPPING: "stopping",
}


def window_note(server: ServerView, now: float) -> str:
    """What the figures of a window are over: the last minute, or the one before the moment that is shown."""
    return f"minute to {clock(server.moment, now)}" if server.moment is not None else "last minute"


def nothing_recorded(server: ServerView, width: int) -> list[Strip]:
    """In one sentence why nothing is recorded of a server's requests and steps, and how to change that."""
    if server.probe is not None and server.probe.problem:
        text = f"{server.probe.problem}."
    elif server.remote_ours:
        text = f"What is recorded of {server.name} is there: vllm-console requests {server.name}"
    elif not server.ours:
        text = f"{server.name} was not started here: only servers of your own have the probe that records this."
    else:
        text = "loading"
    return [line(), *paragraph(text, width - 1)]


def past_load(server: ServerView) -> bool:
    """Whether its latencies are of a load that has ended: they are drawn dim, since no request has them now."""
    return server.window is not None and load_ended(server.window)


def over(value: float | None, objective: float | None) -> bool:
    """Whether a reported value misses its objective."""
    return value is not None and objective is not None and value > objective


def usage_missed(server: ServerView, shown: float | None = None) -> bool:
    """Whether the KV cache's objective is missed, and by the figure that is ``shown`` too: the present one without it.

    It is missed by usage that lasts, so a finding may be open while the figure that is shown is within the objective.
    """
    usage = server.window.kv_cache_usage if shown is None and server.window is not None else shown
    limits = [one.limit for one in server.judged if one.name == "kv_cache_usage"]
    if not limits and server.objectives is not None:
        limits = [server.objectives.kv_cache_usage]
    return over(usage, limits[0] if limits else 0.0) and server.missed("kv_cache_usage")


def marked(text: str, missed: bool) -> Part:
    """A figure, with an exclamation mark when it misses its objective; without a figure there is none."""
    return (f"{text} !", BAD) if missed and text != UNKNOWN else text


def format_waiting(window: Window | None) -> str:
    """``12 queued, longest ≥ 12s``: requests not in queue time or TTFT yet; empty where none waits."""
    if window is None or not window.requests_waiting:
        return ""
    number = f"{count(window.requests_waiting)} queued"
    wait = longest_wait(window)
    return f"{number}, longest ≥ {duration(wait)}" if wait is not None else number


def longest_wait(window: Window) -> float | None:
    """How many seconds a waiting request has waited at least; None where that says less than the queue times do."""
    wait, queue = window.longest_wait, window.latencies.get("queue")
    usual = queue.p50.value or queue.p50.above if queue is not None and queue.p50 is not None else None
    return wait if wait is not None and wait >= max(1.0, usual or 0.0) else None


def latencies_of(window: Window | None, latency: str) -> Quantiles | None:
    """A latency's quantiles in a window, or None."""
    return window.latencies.get(latency) if window else None
