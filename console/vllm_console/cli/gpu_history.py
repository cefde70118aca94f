"""What ``vllm-console host --history RANGE`` prints: what each GPU did, as a table or with every point as JSON."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import closing
from statistics import fmean

from vllm_console.cli.output import Document, fields
from vllm_console.fleet.gpu_charts import GpuChart, GpuCharts, cards, history_path
from vllm_console.fleet.verbs import FleetError, UsageError
from vllm_console.history.gpu_history import FIGURES
from vllm_console.history.time_view import CHART_RANGES, ChartRange, TimeView
from vllm_console.text import UNKNOWN, plain
from vllm_launchers.host.gpu.host import Host
from vllm_launchers.keeper import client

POLL_SECONDS = 0.05

_NAMES = {
    "utilization": "utilization %",
    "memory_utilization": "memory bandwidth %",
    "used_gib": "memory GiB",
    "temperature_c": "temperature °C",
    "power_w": "power W",
    "clock_mhz": "SM clock MHz",
    "memory_clock_mhz": "memory clock MHz",
    "pcie_sent_gbs": "PCIe sent GB/s",
    "pcie_received_gbs": "PCIe received GB/s",
    "nvlink_sent_gbs": "NVLink sent GB/s",
    "nvlink_received_gbs": "NVLink received GB/s",
}


def range_named(name: str) -> ChartRange:
    """A range of the charts by its name: ``1h``, ``15m``, also ``15 min``.

    Raises:
        UsageError: there is none of that name.
    """
    wanted = name.replace(" ", "").removesuffix("in")
    for one in CHART_RANGES:
        if one.name == wanted:
            return one
    known = ", ".join(one.name for one in CHART_RANGES)
    raise UsageError(f"--history {name}: there is no such range; give one of {known}")


def read_charts(args: argparse.Namespace, span: ChartRange, recorded: Host | None) -> list[GpuChart]:
    """What was recorded of each GPU over the range asked for.

    Raises:
        FleetError: nothing was recorded, or it cannot be read.
    """
    state = args.state or client.default_root()
    path = history_path(state, recorded)
    charts = []
    with closing(GpuCharts(state, recorded, write=False)) as source:
        now = time.time()
        for card in cards(path):
            while (chart := source.read(card, now, TimeView(span, now))).series.loading:
                time.sleep(POLL_SECONDS)
            if chart.problem:
                raise FleetError(chart.problem)
            charts.append(chart)
    if not charts:
        raise FleetError(f"{path}: no GPU was recorded yet; a server on a GPU, or an open console, records them")
    return charts


def document(charts: Sequence[GpuChart]) -> Document:
    """The history as JSON."""
    return {"gpus": [_gpu(chart) for chart in charts]}


def _gpu(chart: GpuChart) -> Document:
    card, series = chart.card, chart.series
    known = {name: column for name, column in series.values.items() if any(value is not None for value in column)}
    links = [
        {
            **fields(link, "number remote switch"),
            **{name: list(known[key]) for name in ("sent_gbs", "received_gbs") if (key := link.key(name)) in known},
        }
        for link in card.links
    ]
    return {
        **fields(card, "index uuid name memory_gib power_limit_w temperature_slowdown_c"),
        **fields(series, "start end step recorded_from"),
        "values": {name: list(column) for name, column in known.items() if name in _NAMES},
        "nvlinks": links,
    }


def lines(charts: Sequence[GpuChart]) -> list[str]:
    """The history in words: the mean and the highest of each figure, and the limits."""
    found = []
    for chart in charts:
        card = chart.card
        found += ["", f"GPU {card.index} ({plain(card.name)})" if card.name else f"GPU {card.index}"]
        rows = [row for figure in FIGURES if (row := _row(chart, figure.name))]
        found += [f"  {'':<22}{'MEAN':>9}{'HIGHEST':>9}{'LIMIT':>9}", *rows] if rows else ["  nothing recorded"]
    return found[1:]


def _row(chart: GpuChart, name: str) -> str:
    known = [value for value in chart.series.values.get(name, ()) if value is not None]
    if not known:
        return ""
    limits = {
        "used_gib": chart.card.memory_gib,
        "power_w": chart.card.power_limit_w,
        "temperature_c": chart.card.temperature_slowdown_c,
    }
    digits = 2 if name.endswith("_gbs") else 0
    limit = limits.get(name)
    shown = UNKNOWN if limit is None else f"{limit:.0f}"
    return (
        f"  {_NAMES[name]:<22}{fmean(known):>9.{digits}f}{max(known):>9.{digits}f}{shown if name in limits else '':>9}"
    )
