"""A machine and its GPUs as text: the output of the ``host`` command and of the console's GPU screen."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from vllm_console.text import UNKNOWN, duration, figure, gib, temperature
from vllm_launchers.host.gpu.hardware_warnings import ERROR_NAMES, hardware_warnings
from vllm_launchers.host.gpu.host import Gpu, Holder, Host, NvLink
from vllm_launchers.host.gpu.topology import nvlinks_in, spans

WIDTH = 100
"""Columns after which link lists are wrapped."""


def describe_host(host: Host) -> Iterator[str]:
    """The host, line by line: the machine, each GPU with its links and processes, and problems.

    Problems come last, because users see the end of a command's output.
    """
    facts = [host.hostname or "a host", *_named("driver", host.driver), *_named("CUDA", host.cuda)]
    yield " · ".join(facts)
    threads = f", {host.cpu_cores} threads" if host.cpu_cores else ""
    busy = f", {host.cpu_percent:.0f}% busy" if host.cpu_percent is not None else ""
    yield f"  CPU     {host.cpu or UNKNOWN}{threads}{busy}"
    yield f"  memory  {gib(host.memory_free_gib)} free of {gib(host.memory_gib)}{_swap(host)}"
    if host.problem:
        yield f"  GPUs    {host.problem}"
    for gpu in host.gpus:
        yield ""
        yield from format_gpu(gpu, host.at)
    if wrong := [f"! {text}" for text in hardware_warnings(host)]:
        yield from ("", *wrong)


def format_gpu(gpu: Gpu, at: float | None) -> Iterator[str]:
    """One GPU; ``at`` (Unix seconds) is the time of the sample."""
    facts = [*_named("compute", gpu.compute_capability), *_named("NUMA node", gpu.numa_node)]
    yield " · ".join([gpu.label, *_named("", gpu.architecture), *facts])
    if where := [*_named("", gpu.uuid), *_named("", gpu.pci_bus_id), *_named("CPUs", gpu.cpu_affinity)]:
        yield "  " + "  ".join(where)
    for claim in gpu.claims:
        yield f"  board   {claim.words}"
    if gpu.lost:
        yield f"  lost    {gpu.lost}"
        return
    yield (
        f"  memory  {gib(gpu.free_gib)} free of {gib(gpu.memory_gib)}   "
        f"util {figure(gpu.utilization, 0, '%')}, mem-bandwidth {figure(gpu.memory_utilization, 0, '%')}"
    )
    yield (
        f"  power   {figure(gpu.power_w)} of {figure(gpu.power_limit_w)} W   "
        f"{temperature(gpu.temperature_c)}{_slowdown(gpu)}   "
        f"{figure(gpu.clock_mhz)} of {figure(gpu.clock_max_mhz)} MHz"
        + (f"   {', '.join(gpu.throttle)}" if gpu.throttle else "")
    )
    yield (
        f"  PCIe    generation {figure(gpu.pcie_generation)} of {figure(gpu.pcie_generation_max)}, "
        f"×{figure(gpu.pcie_width)} of ×{figure(gpu.pcie_width_max)}, {figure(gpu.pcie_replays)} replays"
        f"{_pcie_traffic(gpu)}"
    )
    if health := _health(gpu):
        yield f"  health  {health}"
    if gpu.nvlinks:
        yield f"  NVLink  {_nvlinks(gpu)}"
        yield from _ports(gpu)
    for part in gpu.mig:
        free = f"{gib(part.free_gib)} free of {gib(part.memory_gib)}"
        yield f"  MIG     {part.profile or UNKNOWN:<10} {free}  {part.uuid}"
    for holder in gpu.holders:
        yield f"  held    {_holder(holder, at)}"


def format_links(host: Host) -> str:
    """The NVLinks of all GPUs in a few words: ``4 of 4 up on 0-3, no errors``; empty if there are none."""
    alike: dict[str, list[int]] = {}
    for gpu in host.gpus:
        if gpu.nvlinks:
            up = sum(1 for link in gpu.nvlinks if link.active)
            alike.setdefault(f"{up} of {len(gpu.nvlinks)} up", []).append(gpu.index)
    words = [f"{text} on {spans(indices)}" for text, indices in alike.items()]
    links = [link for gpu in host.gpus for link in gpu.nvlinks]
    if any(link.errors for link in links):
        total = sum(sum(link.errors.values()) for link in links)
        words.append(f"{total} errors" if total else "no errors")
    return ", ".join(words)


def format_islands(host: Host) -> list[str]:
    """The groups of GPUs joined by NVLink, with the bandwidth of their slowest linked pair: ``0,1 (112 GB/s)``."""
    words = []
    for island in host.islands:
        links = [link for link in host.links if {link.a, link.b} <= set(island) and nvlinks_in(link.kind)]
        rates = [link.bandwidth_gbs for link in links if link.bandwidth_gbs is not None]
        if len(island) > 1:
            words.append(spans(island) + (f" ({int(min(rates))} GB/s)" if rates else ""))
    return words


def who(holder: Holder) -> str:
    """The owner of a process: one of our servers, a user, or unknown."""
    return f"{holder.server} (yours)" if holder.server else holder.user or "an unknown process"


def _holder(holder: Holder, at: float | None) -> str:
    age = f" for {duration(at - holder.started_at)}" if at is not None and holder.started_at is not None else ""
    size = f"{holder.gib:.1f} GiB" if holder.gib is not None else "memory"
    return f"{size} by {who(holder)}{age}, pid {holder.pid}" + (f": {holder.command}" if holder.command else "")


def _slowdown(gpu: Gpu) -> str:
    return "" if gpu.temperature_slowdown_c is None else f" (slowdown at {temperature(gpu.temperature_slowdown_c)})"


def _pcie_traffic(gpu: Gpu) -> str:
    if gpu.pcie_sent_gbs is None and gpu.pcie_received_gbs is None:
        return ""
    return f", ↑{figure(gpu.pcie_sent_gbs, 1)} ↓{figure(gpu.pcie_received_gbs, 1)} GB/s"


def _health(gpu: Gpu) -> str:
    """Memory errors, the newest Xid and persistence mode, as far as reported."""
    parts = []
    if gpu.ecc is not None:
        counts = f", {figure(gpu.ecc_corrected)} corrected and {figure(gpu.ecc_uncorrected)} uncorrectable errors"
        parts.append(f"ECC on{counts}" if gpu.ecc else "ECC off")
    if gpu.xid is not None:
        parts.append(f"Xid {gpu.xid}")
    if gpu.persistence is not None:
        parts.append(f"persistence mode {'on' if gpu.persistence else 'off'}")
    return ", ".join(parts)


def _nvlinks(gpu: Gpu) -> str:
    up = [link for link in gpu.nvlinks if link.active]
    version = next((link.version for link in gpu.nvlinks if link.version), None)
    ends = sorted({link.remote for link in up if link.remote is not None})
    where = ["by NVSwitch"] if any(link.switch for link in up) else []
    where += [f"to GPU {','.join(map(str, ends))}"] if ends else []
    words = [f"{len(up)} of {len(gpu.nvlinks)} up", *(["version " + version] if version else []), *where]
    if gpu.nvlink_sent_gbs is not None or gpu.nvlink_received_gbs is not None:
        words.append(f"↑{figure(gpu.nvlink_sent_gbs, 1)} ↓{figure(gpu.nvlink_received_gbs, 1)} GB/s")
    return " ".join(words)


def _ports(gpu: Gpu) -> Iterator[str]:
    """The links worth mentioning: with traffic or errors, or down."""
    for row in textwrap.wrap(ports_text(gpu), WIDTH - 10, break_long_words=False, break_on_hyphens=False):
        yield f"          {row}"


def ports_text(gpu: Gpu) -> str:
    """The links worth mentioning: ``0 ↑1.5 ↓1.2 · 2 down``."""
    return " · ".join(f"{link.number} {words}" for link in gpu.nvlinks if (words := _port(link)))


def _port(link: NvLink) -> str:
    if link.active is False:
        return "down"
    words = [f"{number} {ERROR_NAMES.get(name, name)}" for name, number in link.errors.items() if number]
    if link.sent_gbs or link.received_gbs:
        words.insert(0, f"↑{figure(link.sent_gbs, 1)} ↓{figure(link.received_gbs, 1)}")
    return ", ".join(words)


def _named(name: str, value: object) -> list[str]:
    return [f"{name} {value}".strip()] if value is not None else []


def _swap(host: Host) -> str:
    if not host.swap_gib:
        return ""
    return f", swap {gib(host.swap_used_gib)} used of {gib(host.swap_gib)}"
