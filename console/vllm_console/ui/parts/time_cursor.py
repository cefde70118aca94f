"""The time shown on screen: the range of the charts, and a cursor into the past."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from vllm_console.fleet.markers import Marker, MarkerKind
from vllm_console.history.time_view import CHART_RANGES, DEFAULT_RANGE, ChartRange, TimeView, range_for
from vllm_console.text import clock, plain, round_duration
from vllm_console.ui.theme import WARN
from vllm_console.ui.widgets.chart import ChartView

if TYPE_CHECKING:
    from vllm_console.fleet.snapshot import ServerView
    from vllm_console.fleet.types import Replay
    from vllm_console.metrics.sample import Series
    from vllm_console.ui.app import ConsoleApp

STEPS = 60

SEEN_SECONDS = 40.0
"""Maximum delay until a finding is detected, which takes three bad windows of 10 s out of four."""


class ShownTime(msgspec.Struct, frozen=True):
    """What the header shows: the range, and the moment shown if it is not now."""

    range: str = DEFAULT_RANGE.name
    at: float | None = None
    of_figures: bool = True
    """Whether the figures, not just the charts, are from that moment."""
    replay: bool = False
    """Whether the moment belongs to a replayed run."""


WHOLE_RUN = "whole run"


def whole_run(replay: Replay) -> ChartRange:
    """A range that covers a run from start to end."""
    seconds = replay.ended_at - replay.started_at
    step = range_for(CHART_RANGES[-1], seconds).step
    # One extra step: charts end with a whole step, and the start must be visible.
    return ChartRange(WHOLE_RUN, (-int(-seconds // step) + 1) * step, step)


def _place(marker: Marker, now: float) -> float:
    """Where the cursor goes for a marker: for a finding, to when it was detected, not when it began."""
    seen = SEEN_SECONDS if marker.kind is MarkerKind.FINDING else 0.0
    return max(marker.at, min(marker.at + seen, now - 1.0))


class TimeCursor:
    """The time that this console shows. ``changed`` is called after each change, to redraw and to load data."""

    def __init__(
        self, console: ConsoleApp, changed: Callable[[], None], at: float | None = None, replay: Replay | None = None
    ) -> None:
        self._console, self._changed = console, changed
        self.replay: Replay | None = None
        self._range = DEFAULT_RANGE
        self._at = at
        self._end = min(time.time(), at + DEFAULT_RANGE.seconds / 2) if at is not None else None
        self._log: bool | None = None
        """The user's choice of a logarithmic scale; None for automatic."""
        self._marker_message = ""
        if replay is not None:
            self._enter(replay)

    @property
    def view(self) -> TimeView:
        """What to request from the next snapshot."""
        return TimeView(self._range, self._end, self._at, run=self.replay.run if self.replay is not None else None)

    @property
    def charts(self) -> ChartView:
        """How charts are drawn."""
        return ChartView(self._log, self._at)

    def shown(self, server: ServerView | None) -> ShownTime:
        """What the header should show."""
        series = self._series(server)
        loading = series is not None and series.loading
        name = self._range.name
        if loading:
            name += ", loading"
        elif series is not None and self._end is None and self._range.name != "all" and series.recorded_from:
            recorded = time.time() - series.recorded_from
            name += f" ({round_duration(recorded)} recorded)" if 60 <= recorded < self._range.seconds / 2 else ""
        # A recorded server's past figures are loaded soon; a server without figures shows no current ones.
        of_figures = loading or server is None or server.moment is not None or server.recorded or server.window is None
        return ShownTime(name, self._at, of_figures, self.replay is not None)

    def go(self, at: float) -> None:
        """Show a moment (Unix seconds), in the middle of the charts if possible."""
        self._at = at
        self._end = at + self._range.seconds / 2
        snapshot = self._console.snapshot
        if self.replay is not None:
            self._end = min(max(self._end, self.replay.started_at + self._range.seconds), self.replay.ended_at)
        elif snapshot is not None and self._end > snapshot.at:
            self._end = snapshot.at
        self._changed()

    def start_replay(self, replay: Replay) -> None:
        """Show an ended run, with charts covering all of it."""
        self._leave_marker()
        self._enter(replay)
        self._changed()

    def _enter(self, replay: Replay) -> None:
        self.replay = replay
        self._range = whole_run(replay)
        self._at, self._end = replay.at, replay.ended_at

    def live(self) -> None:
        """Return to live; ends a replay."""
        self._at = self._end = None
        if self.replay is not None:
            self.replay, self._range = None, DEFAULT_RANGE
        self._leave_marker()
        self._changed()

    def toggle_log(self, shown: bool) -> None:
        """Toggle the latency scale. ``shown`` is the automatic choice: whether it is logarithmic now."""
        self._log = not (shown if self._log is None else self._log)
        self._changed()

    def choose(self, wanted: str) -> None:
        """Choose a range by name; the cursor stays. No range is longer than a replayed run."""
        ranges = self._ranges
        self._set_range(next((one for one in ranges if one.name == wanted), ranges[-1]))

    def step_range(self, by: int) -> None:
        """Choose the next longer range, or the next shorter one for -1."""
        ranges = self._ranges
        place = ranges.index(self._range) + by
        if 0 <= place < len(ranges):
            self._set_range(ranges[place])

    @property
    def _ranges(self) -> Sequence[ChartRange]:
        if self.replay is None:
            return CHART_RANGES
        whole = whole_run(self.replay)
        return [*(one for one in CHART_RANGES if one.seconds < whole.seconds), whole]

    def _set_range(self, wanted: ChartRange) -> None:
        self._range = wanted
        if self._at is not None:
            self.go(self._at)
        else:
            self._changed()

    def move(self, server: ServerView | None, steps: int = 0, pages: int = 0) -> None:
        """Move the cursor by steps or by chart widths; back if negative."""
        series = self._series(server)
        if series is None:
            return
        length = series.end - series.start
        step = max(series.step, length / STEPS)
        here = self._at if self._at is not None else min(series.end, self._now(series))
        at = here + steps * step + pages * length
        self._move_to(server, series, at, pages * length)

    def first(self, server: ServerView | None) -> None:
        """Move the cursor to the beginning of the charts."""
        series = self._series(server)
        if series is not None:
            self._move_to(server, series, series.start + max(series.step, (series.end - series.start) / STEPS), 0.0)

    def go_to_place(self, server: ServerView | None, place: float) -> None:
        """Move the cursor to a position in the charts, from 0 (left) to 1."""
        series = self._series(server)
        if series is not None:
            self._move_to(server, series, series.start + place * (series.end - series.start), 0.0)

    def to_marker(self, server: ServerView | None, by: int) -> None:
        """Move the cursor to the previous or next marker."""
        snapshot = self._console.snapshot
        if server is None or snapshot is None:
            return
        here = self._at if self._at is not None else snapshot.at
        places = sorted((_place(one, snapshot.at), number) for number, one in enumerate(server.markers))
        before = [place for place in places if place[0] < here - 0.5]
        after = [place for place in places if place[0] > here + 0.5]
        found = before[-1] if by < 0 and before else after[0] if by > 0 and after else None
        if found is None:
            self._console.show_message("No earlier marker." if by < 0 else "No later marker.", WARN)
            return
        at, number = found
        series = self._series(server)
        if series is not None and series.start <= at < series.end:
            self._end = self._end if self._end is not None else min(series.end, snapshot.at)
            self._at = at
            self._changed()
        else:
            self.go(at)
        self._describe(server.markers[number])

    def _series(self, server: ServerView | None) -> Series | None:
        """The visible series: those of a GPU, which may reach further back, or the server's own."""
        own = server.series if server is not None else None
        snapshot = self._console.snapshot
        chart = snapshot.gpu_chart if snapshot is not None else None
        if chart is None:
            return own
        begins = [one.recorded_from for one in (own, chart.series) if one is not None and one.recorded_from is not None]
        return replace(chart.series, recorded_from=min(begins, default=None))

    def _move_to(self, server: ServerView | None, series: Series, at: float, shift: float) -> None:
        now = self._now(series)
        if at >= now:
            if self.replay is None:
                self.live()
                return
            at = now
        if series.recorded_from is not None:
            at = max(at, series.recorded_from)
        length = series.end - series.start
        end = min(now, (self._end if self._end is not None else series.end) + shift)
        if not end - length <= at <= end:
            end = min(now, at + length / 2)
        if self.replay is not None:
            end = max(end, min(now, self.replay.started_at + self._range.seconds))
        else:
            at = min(at, end - series.step)
        self._at, self._end = at, end
        self._leave_marker()
        self._changed()
        markers = server.markers if server is not None else ()
        nearest = min(markers, key=lambda marker: abs(marker.at - at), default=None)
        if nearest is not None and abs(nearest.at - at) <= max(series.step, length / STEPS) / 2:
            self._describe(nearest)

    def _now(self, series: Series) -> float:
        if self.replay is not None:
            return self.replay.ended_at
        snapshot = self._console.snapshot
        return snapshot.at if snapshot is not None else series.end

    def _describe(self, marker: Marker) -> None:
        snapshot = self._console.snapshot
        when = clock(marker.at, snapshot.at if snapshot is not None else marker.at, seconds=True)
        self._marker_message = f"{marker.label} {when}  {plain(marker.text)}"
        self._console.show_message(self._marker_message)

    def _leave_marker(self) -> None:
        """Remove the message about the marker that the cursor has left."""
        shown = self._console.messages.shown
        if self._marker_message and shown is not None and shown.text == self._marker_message:
            self._console.messages.expire()
        self._marker_message = ""
