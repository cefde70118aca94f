"""Layout of the operations screen's panes: a grid, one large pane, side by side, or stacked.

It depends on the screen size and the user's choices, never on content, so that the grid stays put. Pure.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import lru_cache

import msgspec
from textual.geometry import Region, Size

from vllm_console.fleet.snapshot import FleetSnapshot, ServerView
from vllm_console.ui.widgets.draw import shares

PANES = ("kv-cache", "preemptions", "latency", "throughput", "log", "gpus", "requests", "steps")
"""Pane ids in the order of their numbers."""

METRICS, LOG, GPUS, REQUESTS, STEPS = PANES[:4], *PANES[4:]
STATE, WELCOME, SPARKS = "state", "welcome", "sparks"
"""Ids of views that replace panes: a server without metrics, no server, and panes reduced to one line each."""

COLUMN = 36
"""Minimum width of panes side by side."""

GRID_HEIGHT = 32
"""Minimum screen height for a grid of more than one row."""

TALL_HEIGHT = 40
"""Minimum screen height for all panes on a narrow screen."""

SMALLEST_PANE = 6
"""Minimum useful height of a pane."""

LARGE_ROWS, LONG_ROWS = 9, 16
"""Height a large pane keeps before others get a line: for a chart with figures, and for a list."""

GPU_ROWS = 34
"""Minimum height of the pane area for GPUs in the overview and tall layouts."""


class PaneLayout(StrEnum):
    """A layout of the panes."""

    AUTO = "auto"
    OVERVIEW = "overview"
    FOCUS = "focus"
    WIDE = "wide"
    TALL = "tall"


class LayoutInputs(msgspec.Struct, frozen=True):
    """What to lay out: whether there is a server, whether it has metrics, and how many rows GPUs would fill."""

    server: bool
    measured: bool
    gpu_rows: int = 0


class Arrangement(msgspec.Struct, frozen=True):
    """Regions by id within the pane area. ``large`` is the enlarged pane, if any."""

    layout: PaneLayout
    regions: Mapping[str, Region]
    large: str = ""

    @property
    def spark_panes(self) -> Sequence[str]:
        """The panes drawn as one line each."""
        rows = self.regions[SPARKS].height if SPARKS in self.regions else 0
        return [pane for pane in METRICS if pane != self.large][:rows]


def best_layout(screen: Size) -> PaneLayout:
    """The best layout for a screen size."""
    if screen.width >= 3 * COLUMN + 2:
        return PaneLayout.OVERVIEW if screen.height >= GRID_HEIGHT else PaneLayout.WIDE
    return PaneLayout.TALL if screen.height >= TALL_HEIGHT else PaneLayout.FOCUS


@lru_cache(maxsize=16)
def arrange(layout: PaneLayout, large: str, area: Size, shown: LayoutInputs) -> Arrangement:
    """Arrange the pane area. ``large`` is the pane zoomed by the user, empty if none."""
    whole = Region(0, 0, area.width, max(0, area.height))
    if large in (LOG, GPUS) and not (shown.measured and shown.server):
        return Arrangement(PaneLayout.FOCUS, {large: whole}, large)
    if not shown.server:
        return Arrangement(layout, _welcome(whole, shown))
    if not shown.measured:
        return Arrangement(layout, _state(whole))
    if large or layout is PaneLayout.FOCUS:
        return _focus(whole, large or PANES[0])
    if layout is PaneLayout.WIDE:
        panes = [pane for pane in PANES if pane != GPUS or shown.gpu_rows]
        count = max(1, min(area.width // COLUMN, len(panes)))
        return Arrangement(layout, dict(zip(panes, _columns(whole, count), strict=False)))
    if layout is PaneLayout.TALL:
        return Arrangement(layout, _tall(whole, shown))
    return Arrangement(PaneLayout.OVERVIEW, _overview(whole, shown))


def _focus(area: Region, large: str) -> Arrangement:
    others = sum(pane != large for pane in METRICS)
    kept = LARGE_ROWS if large in METRICS else LONG_ROWS
    rows = max(0, min(others, area.height - kept))
    regions = {large: area.shrink((0, 0, rows, 0))}
    if rows:
        regions[SPARKS] = Region(0, area.height - rows, area.width, rows)
    return Arrangement(PaneLayout.FOCUS, regions, large)


def _overview(area: Region, shown: LayoutInputs) -> dict[str, Region]:
    """Three panes, the GPUs if there is room, then throughput and the log; on small screens what fits."""
    if area.width >= 3 * COLUMN + 2 and area.height >= 2 * SMALLEST_PANE:
        gpus = min(shown.gpu_rows, area.height // 3) if area.height >= GPU_ROWS else 0
        top, middle, low = _rows(area, ((area.height - gpus + 1) // 2, gpus, (area.height - gpus) // 2))
        regions = dict(zip(PANES, _columns(top, 3), strict=False))
        first, _, last = _columns(low, 3)
        regions[PANES[3]] = first
        regions[LOG] = Region(first.right + 1, low.y, last.right - first.right - 1, low.height)
        return regions | ({GPUS: middle} if gpus else {})
    columns = max(1, min(2, area.width // COLUMN))
    count = max(1, min(-(-5 // columns), area.height // SMALLEST_PANE))
    rows = _rows(area, shares(area.height, count))
    return dict(zip(PANES, [region for row in rows for region in _columns(row, columns)], strict=False))


def _tall(area: Region, shown: LayoutInputs) -> dict[str, Region]:
    """Metric panes in pairs, then the log and the GPUs in full width."""
    if area.height < 3 * SMALLEST_PANE:
        return _overview(area, shown)
    gpus = min(shown.gpu_rows, area.height // 4) if area.height >= GPU_ROWS else 0
    pairs = -(-len(METRICS) // max(1, min(2, area.width // COLUMN)))
    rest = area.height - gpus
    row = max(SMALLEST_PANE, rest * 3 // (3 * pairs + 2))
    fitting = min(pairs, rest // row)
    log = rest - fitting * row
    rows = _rows(area, (*(row for _ in range(fitting)), log, gpus))
    columns = len(METRICS) // pairs
    regions = dict(zip(METRICS, [one for each in rows[:fitting] for one in _columns(each, columns)], strict=False))
    return regions | ({LOG: rows[-2]} if log >= 2 else {}) | ({GPUS: rows[-1]} if gpus else {})


def _state(area: Region) -> dict[str, Region]:
    """The progress of a start, or why a server is down, with the log below or next to it."""
    if area.height >= 20:
        upper, lower = _rows(area, shares(area.height, 2))
        return {STATE: upper, LOG: lower}
    if area.width >= 4 * COLUMN:
        left, right = _columns(area, 2)
        return {STATE: left, LOG: right}
    return {STATE: area}


def _welcome(area: Region, shown: LayoutInputs) -> dict[str, Region]:
    gpus = min(shown.gpu_rows, area.height // 2)
    upper, lower = _rows(area, (area.height - gpus, gpus))
    return {WELCOME: upper} | ({GPUS: lower} if gpus else {})


def _rows(area: Region, heights: Sequence[int]) -> list[Region]:
    return [Region(area.x, area.y + sum(heights[:at]), area.width, height) for at, height in enumerate(heights)]


def _columns(area: Region, count: int) -> list[Region]:
    """Regions side by side, separated by a blank column."""
    widths = shares(area.width - (count - 1), count)
    return [Region(area.x + sum(widths[:at]) + at, area.y, width, area.height) for at, width in enumerate(widths)]


class PaneChoice:
    """The user's choice of a layout and a zoomed pane."""

    def __init__(self, layout: str = PaneLayout.AUTO) -> None:
        self.layout = PaneLayout(layout)
        self.zoomed = ""

    def arrangement(self, screen: Size, area: Size, shown: LayoutInputs) -> Arrangement:
        """The arrangement for a screen of this size."""
        return arrange(self.on(screen), self.zoomed, area, shown)

    def on(self, screen: Size) -> PaneLayout:
        """The layout for a screen of this size, ignoring zoom."""
        return best_layout(screen) if self.layout is PaneLayout.AUTO else self.layout

    def zoom(self, number: int) -> None:
        """Zoom pane ``number`` (from 1); a second call restores the layout."""
        pane = PANES[number - 1]
        self.zoomed = "" if self.zoomed == pane else pane

    def step(self, by: int, present: str) -> None:
        """Zoom the next or previous pane. ``present`` is the pane that is large now, empty if none."""
        at = PANES.index(present) if present in PANES else (-1 if by > 0 else 0)
        self.zoomed = PANES[(at + by) % len(PANES)]

    def next_layout(self) -> None:
        """Switch to the next layout; while a pane is zoomed, just end the zoom."""
        if self.zoomed:
            self.zoomed = ""
            return
        every = list(PaneLayout)
        self.layout = every[(every.index(self.layout) + 1) % len(every)]


_LAST_PAGE = sys.maxsize
"""A page number beyond the last, shown as the last: how many pages another GPU has is unknown until it is drawn."""


class GpuHistoryChoice:
    """The user's choice of GPU charts; the first GPU of the selected server by default."""

    def __init__(self) -> None:
        self.shown = False
        self.page = 0
        self._gpu: int | None = None

    def toggle(self) -> None:
        """Toggle between charts and the live view."""
        self.shown = not self.shown
        self.page, self._gpu = 0, None

    def gpu(self, snapshot: FleetSnapshot | None, server: ServerView | None) -> int | None:
        """Index of the GPU to chart; None if charts are off."""
        if not self.shown or snapshot is None or snapshot.host is None:
            return None
        known = [gpu.index for gpu in snapshot.host.gpus]
        if self._gpu in known:
            return self._gpu
        of_server = [index for index in (snapshot.gpus_of(server) if server is not None else ()) if index in known]
        return next(iter((*of_server, *known)), None)

    def step(self, by: int, pages: int, snapshot: FleetSnapshot | None, server: ServerView | None) -> None:
        """Go to the next of ``pages`` pages of charts, then to the next GPU; backwards for -1."""
        present = self.gpu(snapshot, server)
        if present is None or snapshot is None or snapshot.host is None:
            return
        page = min(self.page, pages - 1) + by
        if 0 <= page < pages:
            self.page = page
            return
        known = [gpu.index for gpu in snapshot.host.gpus]
        self._gpu = known[(known.index(present) + by) % len(known)]
        self.page = 0 if by > 0 else _LAST_PAGE
