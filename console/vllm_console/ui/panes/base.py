"""Code shared by all panes: each receives a server from the snapshot and draws it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual import events, on
from textual.strip import Strip

from vllm_console.fleet.snapshot import STALE_SECONDS, ServerView
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

Draw = Callable[[ServerView, float, int, int, ChartView], Sequence[Strip]]
"""Pure function that draws a pane: (server, Unix time in seconds, width, height, chart view) to lines, the title first.
"""


class ChartedView(FramedView):
    """A view with charts; the mouse moves the time cursor."""

    async def on_click(self, event: events.Click) -> None:
        """Move the time cursor to a click in a chart."""
        place = place_at(self.lines, event.x, event.y)
        if place is not None:
            event.stop()
            await self.run_action(f"screen.time_at({place:.4f})")

    @on(events.MouseScrollUp)
    @on(events.MouseScrollDown)
    @on(events.MouseScrollLeft)
    @on(events.MouseScrollRight)
    async def wheel(self, event: events.MouseEvent) -> None:
        """Move the time cursor with the wheel over a chart (up goes back, as in a log); with ctrl, change the range."""
        if place_at(self.lines, event.x, event.y) is None:
            return
        event.stop()
        by = wheel_step(event)
        await self.run_action(f"screen.step_range({by})" if event.ctrl else f"screen.time({by})")


class Pane(ChartedView):
    """A part of the screen that shows the selected server as lines. ``number`` is its key, if any."""

    DEFAULT_CSS = "Pane { height: 1fr; width: 1fr; }"

    def __init__(self, draw: Draw, *, id: str, number: int = 0) -> None:
        super().__init__(id=id)
        self._draw, self._number = draw, number
        self._shown: tuple[ServerView, float, ChartView] | None = None
        self._title = (BLANK, BLANK)
        """The title as drawn, without and with its click action."""

    def show_server(self, server: ServerView, now: float, view: ChartView = PLAIN) -> None:
        """Show this server as of ``now`` (Unix seconds). A hidden pane only stores it."""
        self._shown = (server, now, view)
        if self.outer_size.width and self.is_on_screen:
            self._show(server, now, view, *self.room)

    def on_resize(self, event: events.Resize) -> None:
        """Redraw for the new size."""
        if self._shown and event.size.width:
            self._show(*self._shown, *self.room)

    def _show(self, server: ServerView, now: float, view: ChartView, width: int, height: int) -> None:
        """Draw the lines. A click on the title enlarges the pane; another click restores the layout."""
        lines = list(self._draw(server, now, width, height, view))
        if lines and self._number:
            if lines[0] is not self._title[0]:
                self._title = lines[0], clickable_line(lines[0], f"screen.pane({self._number})")
            lines[0] = self._title[1]
        self.show_lines(lines)

    def on_show(self) -> None:
        """Draw what arrived while the pane was hidden."""
        if self._shown:
            self.show_server(*self._shown)


def title_line(number: int, name: str, width: int, right: Sequence[Part] = (), *shorter: Sequence[Part]) -> Strip:
    """A pane's title, with its key. The table and the header name the server and say if it is simulated.

    Where ``right`` does not fit, the first of ``shorter`` that fits takes its place, as in `rule`.
    """
    return rule(name, width, right, *shorter, key=key_of(f"pane_{number}"))


def age_note(server: ServerView, now: float) -> tuple[Part, ...]:
    """The age of the numbers if they are stale or missing. For an earlier moment the header shows it."""
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
    """Why a server's charts have no points; returns ``otherwise`` if only some charts have none."""
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
    """The period that the figures of a window cover: the last minute, or the minute before the selected moment."""
    return f"minute to {clock(server.moment, now)}" if server.moment is not None else "last minute"


def rate_note(server: ServerView, now: float) -> str:
    """The period of a pane's rates: as `window_note`; once the load has ended they are zero, not a mean."""
    return "load ended" if past_load(server) else window_note(server, now)


def nothing_recorded(server: ServerView, width: int) -> list[Strip]:
    """One sentence on why a server's requests and steps are not recorded, and how to change that."""
    if server.probe is not None and server.probe.problem:
        text = f"{server.probe.problem}."
    elif server.remote_ours:
        text = f"The records of {server.name} are on its machine: vllm-console requests {server.name}"
    elif not server.ours:
        text = f"{server.name} was not started here: only your own servers have the probe that records this."
    else:
        text = "loading"
    return [line(), *paragraph(text, width - 1)]


def past_load(server: ServerView) -> bool:
    """Whether the latencies are from a load that has ended, or of a server that failed.

    They are drawn dim, since no current request has them.
    """
    return server.last_window is not None or (server.window is not None and load_ended(server.window))


def over(value: float | None, objective: float | None) -> bool:
    """Whether a reported value misses its objective."""
    return value is not None and objective is not None and value > objective


def usage_missed(server: ServerView, shown: float | None = None) -> bool:
    """Whether the KV cache objective is missed and the ``shown`` usage (default: the current one) exceeds it too.

    Only sustained usage misses the objective, so a finding may be open while the usage shown is within it.
    """
    usage = server.window.kv_cache_usage if shown is None and server.window is not None else shown
    limits = [one.limit for one in server.judged if one.name == "kv_cache_usage"]
    if not limits and server.objectives is not None:
        limits = [server.objectives.kv_cache_usage]
    return over(usage, limits[0] if limits else 0.0) and server.missed("kv_cache_usage")


def preemptions_missed(server: ServerView) -> bool:
    """Whether the preemption objective is missed and there are preemptions in the window shown.

    A finding stays open for a while after the last one; zero is not marked.
    """
    return server.window is not None and bool(server.window.preemptions_per_minute) and server.missed("preemption_rate")


def marked(text: str, missed: bool) -> Part:
    """A figure, with an exclamation mark if it misses its objective. An unknown figure has no mark."""
    return (f"{text} !", BAD) if missed and text != UNKNOWN else text


def format_waiting(window: Window | None) -> str:
    """``12 queued, longest ≥ 12s``: requests not yet counted in queue time or TTFT. Empty if none are waiting."""
    if window is None or not window.requests_waiting:
        return ""
    number = f"{count(window.requests_waiting)} queued"
    wait = longest_wait(window)
    return f"{number}, longest ≥ {duration(wait)}" if wait is not None else number


def longest_wait(window: Window) -> float | None:
    """Minimum wait of the longest-waiting request in seconds; None if below 1 s or the median queue time."""
    wait, queue = window.longest_wait, window.latencies.get("queue")
    usual = queue.p50.value or queue.p50.above if queue is not None and queue.p50 is not None else None
    return wait if wait is not None and wait >= max(1.0, usual or 0.0) else None


def latencies_of(window: Window | None, latency: str) -> Quantiles | None:
    """A latency's quantiles in a window, or None."""
    return window.latencies.get(latency) if window else None
