"""Charts of one GPU in the GPUs pane over the visible range, with limits as lines. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec
from rich.cells import cell_len
from textual.strip import Strip

from vllm_console.fleet.gpu_charts import GpuChart
from vllm_console.fleet.markers import Marker
from vllm_console.fleet.snapshot import FleetSnapshot
from vllm_console.history.gpu_history import Card, LinkEnd, known_figures
from vllm_console.metrics.sample import Series
from vllm_console.text import UNKNOWN, plain
from vllm_console.ui.keymap import key_of
from vllm_console.ui.terminal.lines import clickable, line
from vllm_console.ui.theme import ACCENT, BAD, DIM, KEY, SECOND, SIMULATED, STRONG, WARN
from vllm_console.ui.widgets.chart import PLAIN, ChartView, Curve, axis_above, chart_of, mean, value_at
from vllm_console.ui.widgets.draw import Part, fit, parts_length, rule, shares, side_by_side, whole_clauses

COLUMN = 36
"""Minimum width of a chart next to another."""

ROWS = 5
"""Minimum height of a chart with its title."""

MOST_COLUMNS = 3


_ARROWS = {"sent": "↑", "recv": "↓"}
"""Short curve names for narrow chart headings."""


class GpuHistoryView(msgspec.Struct, frozen=True):
    """Which charts to show, and how: the page, the cursor, and the server's markers."""

    page: int = 0
    charts: ChartView = PLAIN
    markers: tuple[Marker, ...] = ()


class Plot(msgspec.Struct, frozen=True):
    """One chart: name and unit, curves, and if known the end of its axis and the limit to draw."""

    title: str
    curves: tuple[Curve, ...]
    label: Callable[[float], str]
    hi: float | None = None
    limit: float | None = None
    limit_name: str = ""
    area: bool = False


def _whole(value: float) -> str:
    return f"{value:.0f}"


def _percent(value: float) -> str:
    return f"{value:.0f}%"


def _gbs(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _mean(key: str, name: str = "", second: bool = False) -> Curve:
    return Curve(key, name, SECOND if second else ACCENT, mean)


def _plots(card: Card) -> list[Plot]:
    """All charts that a GPU can have, most important first."""
    power, slowdown = card.power_limit_w, card.temperature_slowdown_c
    return [
        Plot("utilization", (_mean("utilization", "GPU"), _mean("memory_utilization", "mem", second=True)), _percent,
             hi=100.0),
        Plot("memory GiB", (Curve("used_gib"),), _whole, hi=card.memory_gib, area=True),
        Plot("power W", (Curve("power_w"),), _whole, limit=power, limit_name="limit"),
        Plot("temperature °C", (Curve("temperature_c"),), _whole, limit=slowdown, limit_name="slowdown"),
        Plot("clocks MHz", (_mean("clock_mhz", "SM"), _mean("memory_clock_mhz", "mem", second=True)), _whole),
        _traffic("PCIe GB/s", "pcie_sent_gbs", "pcie_received_gbs"),
        _traffic("NVLink GB/s", "nvlink_sent_gbs", "nvlink_received_gbs"),
        *(_traffic(f"link {link.number}{_end(link)} GB/s", link.key("sent_gbs"), link.key("received_gbs"))
          for link in card.links),
    ]  # fmt: skip


def _traffic(title: str, sent: str, received: str) -> Plot:
    return Plot(title, (_mean(sent, "sent"), _mean(received, "recv", second=True)), _gbs)


def _end(link: LinkEnd) -> str:
    if link.remote is not None:
        return f" → GPU {link.remote}"
    return " → switch" if link.switch else ""


def _end_of_axis(plot: Plot, values: Mapping[str, Sequence[float | None]], height: int) -> float | None:
    """The end of the axis of a chart of ``height`` rows, above the limit and all values; None if any end will do."""
    if plot.limit is None:
        return plot.hi
    known = [value for curve in plot.curves for value in values.get(curve.key, ()) if value is not None]
    return _round_up(max(axis_above(plot.limit, height), *known, 1.0))


def _round_up(value: float) -> float:
    """Round up to two digits, the second being 0 or 5: 130, 350, 410 become 150, 350, 450."""
    step = 10.0 ** (math.floor(math.log10(value)) - 1) * 5
    return math.ceil(value / step) * step


def plots_of(chart: GpuChart) -> list[Plot]:
    """The charts of a GPU for which figures exist; while it is being read, those that every GPU has."""
    known = known_figures(chart.series.values)
    if not known:
        return _plots(chart.card)[:4]
    return [
        msgspec.structs.replace(plot, curves=curves)
        for plot in _plots(chart.card)
        if (curves := tuple(curve for curve in plot.curves if curve.key in known))
    ]


def _fitting(count: int, width: int, room: int) -> tuple[int, int]:
    """Columns and rows of charts, at most ``count``."""
    columns = max(1, min(MOST_COLUMNS, width // COLUMN, count))
    return columns, max(1, min(room // ROWS, math.ceil(count / columns)))


def page_count(chart: GpuChart, width: int, height: int) -> int:
    """The number of pages of this size for the charts of a GPU."""
    count = len(plots_of(chart))
    columns, rows = _fitting(count, width, height - 1)
    return math.ceil(count / (columns * rows))


def gpu_chart_lines(snapshot: FleetSnapshot, view: GpuHistoryView, width: int, height: int) -> list[Strip]:
    """The title and the GPU's charts that fit, each with its current figure and limit."""
    chart = snapshot.gpu_chart
    if chart is None:
        return [_title(snapshot, "", width), line((" loading", DIM))][:height]
    plots = plots_of(chart)
    columns, rows = _fitting(len(plots), width, height - 1)
    pages = math.ceil(len(plots) / (columns * rows))
    page = min(view.page, pages - 1)
    shown = plots[page * columns * rows : (page + 1) * columns * rows]
    lines = [_title(snapshot, f"{page + 1}/{pages}" if pages > 1 else "", width)]
    if chart.problem:
        lines.append(line((fit(f" {plain(chart.problem)}", width), WARN)))
    if note := _mig_note(snapshot, chart):
        lines.append(line((fit(f" {note}", width).rstrip(), DIM)))
    rows = math.ceil(len(shown) / columns)
    cell = (width - columns + 1) // columns
    for row, tall in enumerate(shares(height - len(lines), rows)):
        cells = [_chart(plot, chart, view, cell, tall) for plot in shown[row * columns : (row + 1) * columns]]
        lines += side_by_side(cells, cell, tall)
    return lines[:height]


def _mig_note(snapshot: FleetSnapshot, chart: GpuChart) -> str:
    """What is charted for a GPU in MIG mode. The driver reports no utilization then, and only memory per slice."""
    gpu = snapshot.host.gpu(chart.card.index) if snapshot.host is not None else None
    if gpu is None or not gpu.mig_mode:
        return ""
    slices = [
        f"{plain(part.profile or UNKNOWN)} {part.memory_gib - part.free_gib:.1f} of {part.memory_gib:.1f} GiB"
        for part in gpu.mig
        if part.memory_gib is not None and part.free_gib is not None
    ]
    used = f"; its slices use {', '.join(slices)} now" if slices else ""
    return f"MIG mode: the whole card, without utilization, which the driver does not report{used}"


def _title(snapshot: FleetSnapshot, page: str, width: int) -> Strip:
    chart = snapshot.gpu_chart
    card = chart.card if chart is not None else None
    name = plain(card.name or "").removeprefix("NVIDIA ") if card is not None else ""
    words = f"GPUs · GPU {card.index} {name}".rstrip() if card is not None else "GPUs"
    marks: list[Part] = [("recorded host", SIMULATED), (" · ", DIM)] if snapshot.host_recorded else []
    marks += [(f"{page} ", DIM)] if page else []
    marks += [(key_of("gpu_charts_next"), clickable("screen.gpu_charts(1)", KEY)), (" next ", DIM)]
    marks += [(key_of("gpu_history"), clickable("screen.gpu_history", KEY)), (" now", DIM)]
    return rule(words, width, marks, style=clickable("screen.pane(6)", STRONG), key=key_of("pane_6"))


def _chart(plot: Plot, chart: GpuChart, view: GpuHistoryView, width: int, height: int) -> list[Strip]:
    title = _heading(plot, chart.series, view.charts.cursor, width)
    strips = chart_of(
        chart.series,
        plot.curves,
        width,
        height - 1,
        plot.label,
        hi=_end_of_axis(plot, chart.series.values, height - 1),
        objective=plot.limit,
        area=plot.area,
        view=ChartView(cursor=view.charts.cursor),
        markers=view.markers,
    )
    return [title, *strips]


def _heading(plot: Plot, series: Series, cursor: float | None, width: int) -> Strip:
    """The chart's name, its figures at the cursor or now, and its limit."""
    values = [value_at(series, curve.key, cursor) for curve in plot.curves]
    parts: list[Part] = [(f" {plot.title} ", DIM)]
    over = plot.limit is not None and any(value is not None and value > plot.limit for value in values)
    shown = [UNKNOWN if value is None else plot.label(value) for value in values]
    text = " · ".join(f"{curve.name} {figure}".strip() for curve, figure in zip(plot.curves, shown, strict=True))
    if cell_len(f" {plot.title} {text}") > width:
        short = (_ARROWS.get(curve.name, f"{curve.name} ") for curve in plot.curves)
        text = " ".join(f"{name}{figure}" for name, figure in zip(short, shown, strict=True))
    parts.append((f"{text} !", BAD) if over else text)
    if plot.limit is not None:
        limit = f" {plot.limit_name} {plot.label(plot.limit)}"
        parts += [(limit, DIM)] if parts_length(parts) + cell_len(limit) <= width else []
    return whole_clauses(line(*parts), width)
