"""Where the panes of the operations screen stand: all in a grid, one large, side by side, or stacked.

Places depend on the size of the screen and on what the user chose, never on what is drawn, so the grid stays put. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import lru_cache

import msgspec
from textual.geometry import Region, Size

from vllm_console.fleet.snapshot import FleetSnapshot, ServerView
from vllm_console.ui.widgets.draw import shares

PANES = ("kv-cache", "preemptions", "latency", "throughput", "log", "gpus", "requests", "steps")
"""The panes' ids, in the order of their numbers."""

METRICS, LOG, GPUS, REQUESTS, STEPS = PANES[:4], *PANES[4:]
STATE, WELCOME, SPARKS = "state", "welcome", "sparks"
"""Shown in place of panes: a server that is not measured, no server; and panes that are drawn as one line."""

COLUMN = 36
"""The least width of a pane beside another."""

GRID_HEIGHT = 32
"""Minimum height of the screen for a grid of more than one row."""

TALL_HEIGHT = 40
"""Minimum height for all panes on a narrow screen."""

SMALLEST_PANE = 6
"""Rows below which a pane has nothing to say."""

LARGE_ROWS, LONG_ROWS = 9, 16
"""Rows that a large pane keeps before others get a line: a chart with its figures; a list."""

GPU_ROWS = 34
"""Minimum rows for GPUs in the overview."""


class PaneLayout(StrEnum):
    """How panes are laid out."""

    AUTO = "auto"
    OVERVIEW = "overview"
    FOCUS = "focus"
    WIDE = "wide"
    TALL = "tall"


class LayoutInputs(msgspec.Struct, frozen=True):
    """What there is to lay out: a server or none, whether it is measured, and how many rows its GPUs would fill."""

    server: bool
    measured: bool
    gpu_rows: int = 0


class Arrangement(msgspec.Struct, frozen=True):
    """Where everything is: regions by id, in the area of the panes. ``large`` is the pane that was given most."""

    layout: PaneLayout
    regions: Mapping[str, Region]
    large: str = ""

    @property
    def spark_panes(self) -> Sequence[str]:
        """The panes that are drawn as one line each."""
        rows = self.regions[SPARKS].height if SPARKS in self.regions else 0
        return [pane for pane in METRICS if pane != self.large][:rows]


def best_layout(screen: Size) -> PaneLayout:
    """The layout that suits a screen best."""
    if screen.width >= 3 * COLUMN + 2:
        return PaneLayout.OVERVIEW if screen.height >= GRID_HEIGHT else PaneLayout.WIDE
    return PaneLayout.TALL if screen.height >= TALL_HEIGHT else PaneLayout.FOCUS


@lru_cache(maxsize=16)
def arrange(layout: PaneLayout, large: str, area: Size, shown: LayoutInputs) -> Arrangement:
    """The arrangement of an area of panes. ``large`` is the pane that the user zoomed, empty if none."""
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
    """Three panes above, requests and the log below, GPUs between where there is room; else as many as fit."""
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
    """Panes in pairs, then the log and the GPUs over the whole width."""
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
    """How a start goes, or why a server is down, with the log below or beside it."""
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
    """Regions below each other."""
    return [Region(area.x, area.y + sum(heights[:at]), area.width, height) for at, height in enumerate(heights)]


def _columns(area: Region, count: int) -> list[Region]:
    """Regions beside each other, a blank column between them."""
    widths = shares(area.width - (count - 1), count)
    return [Region(area.x + sum(widths[:at]) + at, area.y, width, area.height) for at, width in enumerate(widths)]


class PaneChoice:
    """What the user chose: a layout, and a pane to see large."""

    def __init__(self, layout: str = PaneLayout.AUTO) -> None:
        self.layout = PaneLayout(layout)
        self.zoomed = ""
        """The pane that is large in place of the layout; empty if none."""

    def arrangement(self, screen: Size, area: Size, shown: LayoutInputs) -> Arrangement:
        """Where everything is on a screen of this size."""
        return arrange(self.on(screen), self.zoomed, area, shown)

    def on(self, screen: Size) -> PaneLayout:
        """The layout on a screen of this size, as long as nothing is zoomed."""
        return best_layout(screen) if self.layout is PaneLayout.AUTO else self.layout

    def zoom(self, number: int) -> None:
        """Show pane ``number`` (from 1) large; once more: the layout again."""
        pane = PANES[number - 1]
        self.zoomed = "" if self.zoomed == pane else pane

    def step(self, by: int, present: str) -> None:
        """Show the next or previous pane large. ``present`` is the one that is large now, empty if none."""
        at = PANES.index(present) if present in PANES else (-1 if by > 0 else 0)
        self.zoomed = PANES[(at + by) % len(PANES)]

    def next_layout(self) -> None:
        """The next layout; while a pane is zoomed, the present one."""
        if self.zoomed:
            self.zoomed = ""
            return
        every = list(PaneLayout)
        self.layout = every[(every.index(self.layout) + 1) % len(every)]


class GpuHistoryChoice:
    """What the user chose. Until one steps to another GPU, it is the first one of the selected server."""

    def __init__(self) -> None:
        self.shown = False
        self.page = 0
        self._gpu: int | None = None

    def toggle(self) -> None:
        """Charts, or the GPUs as they are now."""
        self.shown = not self.shown
        self.page, self._gpu = 0, None

    def gpu(self, snapshot: FleetSnapshot | None, server: ServerView | None) -> int | None:
        """The index of the GPU whose charts are wanted; None where none are."""
        if not self.shown or snapshot is None or snapshot.host is None:
            return None
        known = [gpu.index for gpu in snapshot.host.gpus]
        if self._gpu in known:
            return self._gpu
        of_server = [index for index in (server.gpus if server is not None else ()) if index in known]
        return next(iter((*of_server, *known)), None)

    def step(self, by: int, pages: int, snapshot: FleetSnapshot | None, server: ServerView | None) -> None:
        """The next page of charts, of ``pages``; behind the last one, the next GPU. Back for -1."""
        present = self.gpu(snapshot, server)
        if present is None or snapshot is None or snapshot.host is None:
            return
        page = min(self.page, pages - 1) + by
        if 0 <= page < pages:
            self.page = page
            return
        known = [gpu.index for gpu in snapshot.host.gpus]
        self._gpu = known[(known.index(present) + by) % len(known)]
        self.page = 0
