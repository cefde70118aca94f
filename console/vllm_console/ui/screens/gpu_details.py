"""Tables about the machine's GPUs: load and power, health, every link, every process."""

from __future__ import annotations

from collections.abc import Callable

from textual.strip import Strip

from vllm_console.fleet.snapshot import FleetSnapshot
from vllm_console.host_text import ports_text
from vllm_console.text import UNKNOWN, figure, temperature
from vllm_console.ui.keymap import key_of
from vllm_console.ui.panes.bars import now_lines
from vllm_console.ui.panes.gpu_lines import colors_of, process_count, process_lines
from vllm_console.ui.terminal.lines import line
from vllm_console.ui.theme import BAD, DIM, WARN
from vllm_console.ui.widgets.draw import paragraph
from vllm_console.ui.widgets.reader import ReaderScreen, TextReader
from vllm_console.ui.widgets.table import Value, facts, section, sections, table
from vllm_launchers.host.gpu.hardware_warnings import HOT, IDLE, hardware_warnings
from vllm_launchers.host.gpu.host import Gpu, Host
from vllm_launchers.host.gpu.topology import links_summary

REDRAW_SECONDS = 1.0


class GpuDetailsScreen(ReaderScreen):
    """Describes the machine's GPUs and stays up to date: ``latest`` returns the newest snapshot.

    ``moment`` (Unix seconds) is the earlier moment that the operations screen shows, if any.
    """

    def __init__(
        self, snapshot: FleetSnapshot, latest: Callable[[], FleetSnapshot | None], moment: float | None = None
    ) -> None:
        super().__init__(
            TextReader(
                lambda: "GPUs" + (" · recorded host" if self._snapshot.host_recorded else ""),
                lambda width: [
                    *now_lines(moment, self._snapshot.at, width, f"the charts ({key_of('gpu_history')}) reach back"),
                    *details_lines(self._snapshot, width),
                ],
            )
        )
        self._snapshot, self._latest = snapshot, latest

    def on_mount(self) -> None:
        """Start the periodic redraw."""
        self.set_interval(REDRAW_SECONDS, self._redraw)

    def _redraw(self) -> None:
        newest = self._latest()
        if newest is not None and newest is not self._snapshot:
            self._snapshot = newest
            self._reader.redraw()


def details_lines(snapshot: FleetSnapshot, width: int) -> list[Strip]:
    """The machine, hardware warnings, and tables about its GPUs; values that are not reported are dashes."""
    host = snapshot.host
    if host is None:
        return [line((f" {snapshot.host_problem or 'no GPU found yet'}", DIM))]
    wrong = [row for text in hardware_warnings(host) for row in paragraph(f"! {text}", width, WARN)]
    parts = [
        _machine(host, width),
        wrong,
        _load(host, width),
        _kinds(host, width),
        _processes(snapshot, host, width),
        _claims(host, width),
        _links(host, width),
        _pcie(host, width),
        _health(host, width),
        _slices(host, width),
        _identifiers(host, width),
    ]
    return sections(parts)


def _machine(host: Host, width: int) -> list[Strip]:
    threads = f", {host.cpu_cores} threads" if host.cpu_cores else ""
    busy = f", {host.cpu_percent:.0f}% busy" if host.cpu_percent is not None else ""
    rows: list[tuple[str, Value]] = [
        ("host", host.hostname or UNKNOWN),
        ("driver", f"{host.driver or UNKNOWN}, CUDA {host.cuda or UNKNOWN}"),
        ("CPU", f"{host.cpu or UNKNOWN}{threads}{busy}"),
        ("memory", f"{figure(host.memory_free_gib, 1)} free of {figure(host.memory_gib, 1)} GiB{_swap(host)}"),
    ]
    rows += [("problem", (host.problem, WARN))] if host.problem else []
    return facts(rows, width)


def _swap(host: Host) -> str:
    return f", swap {figure(host.swap_used_gib, 1)} used of {figure(host.swap_gib, 1)} GiB" if host.swap_gib else ""


def _load(host: Host, width: int) -> list[Strip]:
    columns = (
        ">GPU", ">FREE GiB", ">OF", ">UTIL",
        ">MEM BW", ">TEMP", ">POWER W", ">CLOCK MHz",
        "THROTTLED BY",
    )  # fmt: skip
    return section("Memory, load and power", table(columns, [_load_row(gpu) for gpu in host.gpus], width))


def _load_row(gpu: Gpu) -> list[Value]:
    if gpu.lost:
        return [str(gpu.index), *[UNKNOWN] * 7, (f"lost: {gpu.lost}", BAD)]
    hot = WARN if set(HOT) & set(gpu.throttle or ()) else None
    reasons = UNKNOWN if gpu.throttle is None else ", ".join(gpu.throttle) or "nothing"
    return [
        str(gpu.index),
        figure(gpu.free_gib, 1),
        figure(gpu.memory_gib, 1),
        figure(gpu.utilization, 0, "%"),
        figure(gpu.memory_utilization, 0, "%"),
        (temperature(gpu.temperature_c), hot),
        f"{figure(gpu.power_w)} of {figure(gpu.power_limit_w)}",
        f"{figure(gpu.clock_mhz)} of {figure(gpu.clock_max_mhz)}",
        (reasons, WARN if set(gpu.throttle or ()) - {IDLE} else DIM),
    ]


def _kinds(host: Host, width: int) -> list[Strip]:
    columns = (">GPU", "NAME", "ARCHITECTURE", "COMPUTE", ">NUMA",
               "CPUS")  # fmt: skip
    rows = [
        [str(gpu.index), gpu.name or UNKNOWN, gpu.architecture or UNKNOWN, gpu.compute_capability or UNKNOWN,
         figure(gpu.numa_node), gpu.cpu_affinity or UNKNOWN]
        for gpu in host.gpus
    ]  # fmt: skip
    return section("Models", table(columns, rows, width))


def _processes(snapshot: FleetSnapshot, host: Host, width: int) -> list[Strip]:
    listed = process_lines(host, snapshot.at, width, process_count(host) + 2, colors_of(snapshot))
    return section("Processes", listed)


def _claims(host: Host, width: int) -> list[Strip]:
    rows: list[list[Value]] = [
        [str(gpu.index), (claim.words, None if claim.mine else WARN)] for gpu in host.gpus for claim in gpu.claims
    ]
    return section("Claims on the board", table((">GPU", "CLAIM"), rows, width))


def _links(host: Host, width: int) -> list[Strip]:
    lines = paragraph(links_summary(host) or "", width)
    rows: list[list[Value]] = [_links_row(gpu) for gpu in host.gpus if gpu.nvlinks]
    columns = (
        ">GPU", "NVLINKS UP", "VERSION", "TO", ">↑ GB/s",
        ">↓ GB/s", "SINGLE LINKS",
    )  # fmt: skip
    lines += table(columns, rows, width)
    return section("Links", lines)


def _links_row(gpu: Gpu) -> list[Value]:
    up = [link for link in gpu.nvlinks if link.active]
    ends = sorted({link.remote for link in up if link.remote is not None})
    where = ["NVSwitch"] if any(link.switch for link in up) else []
    where += [f"GPU {','.join(map(str, ends))}"] if ends else []
    return [
        str(gpu.index),
        (f"{len(up)} of {len(gpu.nvlinks)}", None if len(up) == len(gpu.nvlinks) else WARN),
        next((link.version for link in gpu.nvlinks if link.version), None) or UNKNOWN,
        ", ".join(where) or UNKNOWN,
        figure(gpu.nvlink_sent_gbs, 1),
        figure(gpu.nvlink_received_gbs, 1),
        ports_text(gpu),
    ]


def _pcie(host: Host, width: int) -> list[Strip]:
    columns = (">GPU", "GENERATION", "LANES", ">REPLAYS", "BUS")
    rows = [
        [str(gpu.index), f"{figure(gpu.pcie_generation)} of {figure(gpu.pcie_generation_max)}",
         f"×{figure(gpu.pcie_width)} of ×{figure(gpu.pcie_width_max)}", figure(gpu.pcie_replays),
         gpu.pci_bus_id or UNKNOWN]
        for gpu in host.gpus
    ]  # fmt: skip
    return section("PCIe", table(columns, rows, width))


def _health(host: Host, width: int) -> list[Strip]:
    """Memory errors, newest Xid and persistence mode; empty if no GPU reports any of them."""
    reported = [gpu for gpu in host.gpus if (gpu.ecc, gpu.xid, gpu.persistence) != (None, None, None)]
    columns = (
        ">GPU", "ECC", ">CORRECTED", ">UNCORRECTABLE",
        ">NEWEST XID", "PERSISTENCE",
    )  # fmt: skip
    rows: list[list[Value]] = [
        [str(gpu.index), _on_off(gpu.ecc), figure(gpu.ecc_corrected),
         (figure(gpu.ecc_uncorrected), BAD if gpu.ecc_uncorrected else None),
         (figure(gpu.xid), WARN if gpu.xid is not None else None), _on_off(gpu.persistence)]
        for gpu in reported
    ]  # fmt: skip
    return section("Health", table(columns, rows, width))


def _slices(host: Host, width: int) -> list[Strip]:
    columns = (">GPU", "PROFILE", ">FREE GiB", ">OF", "UUID")
    rows = [
        [str(gpu.index), part.profile or UNKNOWN, figure(part.free_gib, 1), figure(part.memory_gib, 1), part.uuid]
        for gpu in host.gpus
        for part in gpu.mig
    ]
    return section("MIG slices", table(columns, rows, width))


def _identifiers(host: Host, width: int) -> list[Strip]:
    rows = [[str(gpu.index), gpu.uuid] for gpu in host.gpus if gpu.uuid]
    return section("UUIDs", table((">GPU", "UUID"), rows, width))


def _on_off(value: bool | None) -> str:
    return UNKNOWN if value is None else "on" if value else "off"
