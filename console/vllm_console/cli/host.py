"""``vllm-console host``, ``topology`` and ``gpus --free N``: this machine's GPUs.

Shows what uses them, their history and their links, and for scripts the best set of free GPUs.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean

from vllm_console.cli.fleet_access import settings_from, state_of
from vllm_console.cli.host_source import add_host, host_from_matrix, load_host, recorded_host
from vllm_console.cli.options import add_json, count_from
from vllm_console.cli.output import Document, fields, print_json, show
from vllm_console.fleet.gpu_charts import GpuChart, GpuCharts, cards, history_path
from vllm_console.history.gpu_history import FIGURES
from vllm_console.history.time_view import CHART_RANGES, ChartRange, TimeView
from vllm_console.text import UNKNOWN, plain
from vllm_launchers.errors import OperationError, UsageError
from vllm_launchers.host.gpu.host import Host
from vllm_launchers.host.gpu.sharing import GpuShare, available_gib, format_share
from vllm_launchers.host.gpu.topology import legend, row_text, topology_rows
from vllm_launchers.plan.placement import Placement, rank_placements


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_json(parser)
    add_host(parser)
    parser.add_argument(
        "--from-topo", type=Path, metavar="FILE", help="print the host document of a saved 'nvidia-smi topo -m'"
    )
    parser.add_argument("--history", metavar="RANGE", help="show the GPUs' history: 5m, 15m, 1h, 6h, 24h, 7d or all")
    parser.add_argument("--gpu", metavar="NAME", help="with --from-topo: GPU model, e.g. H100")


def run(args: argparse.Namespace) -> int:
    """Show the host, or print its document."""
    from vllm_console.host_text import describe_host
    from vllm_launchers.host.gpu.document import encode_host

    if args.gpu is not None and args.from_topo is None:
        raise UsageError("--gpu requires --from-topo FILE")
    if args.from_topo is not None:
        if args.host is not None:
            raise UsageError("--host and --from-topo can't be combined")
        if args.history is not None:
            raise UsageError("--history and --from-topo can't be combined")
        print_json(encode_host(host_from_matrix(args.from_topo, args.gpu)))
        return 0
    if args.history is not None:
        return _show_history(args)
    host = load_host(args)
    show(args, lambda: encode_host(host), lambda: (plain(line) for line in describe_host(host)))
    return 0


def _show_history(args: argparse.Namespace) -> int:
    charts = read_charts(args, range_named(args.history), recorded_host(args))
    show(args, lambda: history_document(charts), lambda: gpu_history_lines(charts))
    return 0


def add_topology_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_json(parser)
    add_host(parser)
    parser.add_argument(
        "--width", type=count_from, metavar="COLUMNS", help="width in columns (default: the terminal's)"
    )


def run_topology(args: argparse.Namespace) -> int:
    """Draw the matrix, its legend, and link problems."""
    from vllm_console.host_text import format_islands, format_links
    from vllm_launchers.host.gpu.document import encode_host
    from vllm_launchers.host.gpu.hardware_warnings import hardware_warnings

    host = load_host(args)
    if args.json:
        document = encode_host(host)
        print_json({key: document[key] for key in ("hostname", "links", "islands", "problem")})
        return 0
    if host.problem:
        print(plain(host.problem))
    width = args.width or shutil.get_terminal_size((80, 24)).columns
    for row in topology_rows(host, width):
        print(plain(row_text(row)))
    if words := legend(host):
        print("\n" + " · ".join(words))
    if islands := format_islands(host):
        print("NVLink islands: " + "  ".join(islands))
    if ports := format_links(host):
        print(f"NVLinks: {ports}")
    for text in hardware_warnings(host):
        print(plain(f"! {text}"))
    return 0


POLL_SECONDS = 0.05

_FIGURE_TITLES = {
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
    """A chart range by name: ``1h``, ``15m``, also ``15 min``. Raises UsageError if there is no such range."""
    wanted = name.replace(" ", "").removesuffix("in")
    for one in CHART_RANGES:
        if one.name == wanted:
            return one
    known = ", ".join(one.name for one in CHART_RANGES)
    raise UsageError(f"--history {name}: unknown range; use one of {known}")


def read_charts(args: argparse.Namespace, span: ChartRange, recorded: Host | None) -> list[GpuChart]:
    """What was recorded for each GPU over a range.

    Raises:
        OperationError: nothing was recorded, or it cannot be read.
    """
    state = state_of(args)
    path = history_path(state, recorded)
    charts = []
    with closing(GpuCharts(state, recorded, write=False)) as source:
        now = time.time()
        for card in cards(path):
            while (chart := source.read(card, now, TimeView(span, now))).series.loading:
                time.sleep(POLL_SECONDS)
            if chart.problem:
                raise OperationError(chart.problem)
            charts.append(chart)
    if not charts:
        raise OperationError(
            f"{path}: no GPU history yet; it is recorded while a server runs on a GPU or a console is open"
        )
    return charts


def history_document(charts: Sequence[GpuChart]) -> Document:
    """The history as JSON."""
    return {"gpus": [_gpu_document(chart) for chart in charts]}


def _gpu_document(chart: GpuChart) -> Document:
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
        "values": {name: list(column) for name, column in known.items() if name in _FIGURE_TITLES},
        "nvlinks": links,
    }


def gpu_history_lines(charts: Sequence[GpuChart]) -> list[str]:
    """The history as text: the mean and maximum of each figure, and the limits."""
    found = []
    for chart in charts:
        card = chart.card
        found += ["", f"GPU {card.index} ({plain(card.name)})" if card.name else f"GPU {card.index}"]
        rows = [row for figure in FIGURES if (row := _figure_line(chart, figure.name))]
        found += [f"  {'':<22}{'MEAN':>9}{'HIGHEST':>9}{'LIMIT':>9}", *rows] if rows else ["  nothing recorded"]
    return found[1:]


def _figure_line(chart: GpuChart, name: str) -> str:
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
    mean, highest = f"{fmean(known):.{digits}f}", f"{max(known):.{digits}f}"
    return f"  {_FIGURE_TITLES[name]:<22}{mean:>9}{highest:>9}{shown if name in limits else '':>9}"


MOST_FREE = 1024


def add_gpus_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_json(parser)
    add_host(parser)
    parser.add_argument("--free", type=int, required=True, metavar="N", help="number of GPUs")
    parser.add_argument("--need-gib", type=float, metavar="G", help="GiB free on each GPU (default: idle GPUs)")
    parser.add_argument("--uuid", action="store_true", help="print UUIDs instead of indices")


def run_gpus(args: argparse.Namespace) -> int:
    """Print the value for ``CUDA_VISIBLE_DEVICES`` to standard output, and the reason to standard error."""
    from vllm_console.settings import gpu_shares

    if not 1 <= args.free <= MOST_FREE:
        raise UsageError(f"--free {args.free}: expected 1 to {MOST_FREE}")
    if args.need_gib is not None and not 0 <= args.need_gib < 1e6:
        raise UsageError(f"--need-gib {args.need_gib}: expected GiB, from 0")
    host = load_host(args)
    shares = gpu_shares(settings_from(args))
    ranking = rank_placements(host, args.free, need_gib=args.need_gib, shares=shares)
    best = ranking.best
    limits = [words for gpu in host.gpus if (words := format_share(gpu, shares))]
    if args.json:
        sets = [_document(found) for found in ranking.placements]
        print_json({"problem": ranking.problem or None, "shares": _shares(host, shares), "sets": sets})
        return 0 if best else 1
    if best is None:
        untold = [words for words in limits if words not in ranking.problem]
        raise OperationError(plain("; ".join([ranking.problem, *untold])))
    print(plain(best.visible_devices(by_uuid=args.uuid)))
    print(plain(best.reason), file=sys.stderr)
    for index, uuid in zip(best.gpus, best.uuids, strict=True):
        print(f"  GPU {index}  {plain(uuid or 'no UUID known')}", file=sys.stderr)
    for warning in best.warnings:
        print(plain(f"! {warning}"), file=sys.stderr)
    for words in limits:
        if words not in best.warnings:
            print(plain(f"  {words}"), file=sys.stderr)
    if len({gpu.name for gpu in host.gpus}) > 1 and not (args.uuid or best.mig):
        print("! GPUs differ: also set CUDA_DEVICE_ORDER=PCI_BUS_ID, or use --uuid", file=sys.stderr)
    return 0


def _shares(host: Host, shares: Iterable[GpuShare]) -> list[Document]:
    found = [(share, gpu) for share in shares if (gpu := host.gpu(share.gpu)) is not None]
    return [{"gpu": gpu.index, "limit_gib": share.limit(gpu), "left_gib": available_gib(gpu, [share])}
            for share, gpu in found]  # fmt: skip


def _document(found: Placement) -> Document:
    document = fields(found, "gpus uuids fits free_gib bandwidth_gbs reason warnings")
    return {**document, "cuda_visible_devices": found.visible_devices()}
