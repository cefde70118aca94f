"""``vllm-console host``: this machine's GPUs, who holds them, and what is wrong with them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from vllm_console.cli.common import add_json, print_json
from vllm_console.cli.host_source import add_host, host_from_matrix, load_host
from vllm_console.fleet.api import UsageError
from vllm_console.format import UNKNOWN, duration
from vllm_console.text import plain
from vllm_launchers.machine.gpu.host import Gpu, Holder, Host


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's words."""
    add_json(parser)
    add_host(parser)
    parser.add_argument(
        "--from-topo", type=Path, metavar="FILE", help="print the document that a saved 'nvidia-smi topo -m' makes"
    )
    parser.add_argument("--gpu", metavar="NAME", help="with --from-topo: the model of its GPUs, e.g. H100")


def run(args: argparse.Namespace) -> int:
    """Show it, or print its document."""
    from vllm_launchers.machine.gpu.document import encode_host

    if args.gpu is not None and args.from_topo is None:
        raise UsageError("--gpu says which GPUs a saved matrix has; it goes with --from-topo FILE")
    if args.from_topo is not None:
        if args.host is not None:
            raise UsageError("--host and --from-topo both name a host; leave one of them out")
        print_json(encode_host(host_from_matrix(args.from_topo, args.gpu)))
        return 0
    host = load_host(args)
    if args.json:
        print_json(encode_host(host))
    else:
        print("\n".join(plain(line) for line in describe(host)))
    return 0


def describe(host: Host) -> Iterator[str]:
    """The host for people."""
    from vllm_launchers.machine.gpu.concerns import concerns

    facts = [host.hostname or "a host", *_named("driver", host.driver), *_named("CUDA", host.cuda)]
    yield " · ".join(facts)
    cores = f", {host.cpu_cores} cores" if host.cpu_cores else ""
    busy = f", {host.cpu_percent:.0f}% busy" if host.cpu_percent is not None else ""
    yield f"  CPU     {host.cpu or UNKNOWN}{cores}{busy}"
    yield f"  memory  {_gib(host.memory_free_gib)} free of {_gib(host.memory_gib)}{_swap(host)}"
    if host.problem:
        yield f"  GPUs    {host.problem}"
    for gpu in host.gpus:
        yield ""
        yield from _gpu_lines(gpu, host.at)
    found = concerns(host)
    if found:
        yield ""
    yield from (f"! {text}" for text in found)


def _gpu_lines(gpu: Gpu, at: float | None) -> Iterator[str]:
    facts = [*_named("compute", gpu.compute_capability), *_named("NUMA node", gpu.numa_node)]
    yield " · ".join([gpu.label, *_named("", gpu.architecture), *facts])
    if gpu.uuid:
        yield f"  {gpu.uuid}" + (f"  {gpu.pci_bus_id}" if gpu.pci_bus_id else "")
    if gpu.lost:
        return
    yield (
        f"  memory  {_gib(gpu.free_gib)} free of {_gib(gpu.memory_gib)}   used {_percent(gpu.utilization)}, "
        f"its memory {_percent(gpu.memory_utilization)}"
    )
    yield (
        f"  power   {_whole(gpu.power_w)} of {_whole(gpu.power_limit_w)} W   {_whole(gpu.temperature_c)} °C   "
        f"{_whole(gpu.clock_mhz)} of {_whole(gpu.clock_max_mhz)} MHz"
        + (f"   {', '.join(gpu.throttle)}" if gpu.throttle else "")
    )
    yield (
        f"  PCIe    generation {_whole(gpu.pcie_generation)} of {_whole(gpu.pcie_generation_max)}, "
        f"×{_whole(gpu.pcie_width)} of ×{_whole(gpu.pcie_width_max)}, {_whole(gpu.pcie_replays)} replays"
    )
    if gpu.nvlinks:
        yield f"  NVLink  {_nvlinks(gpu)}"
    for part in gpu.mig:
        free = f"{_gib(part.free_gib)} free of {_gib(part.memory_gib)}"
        yield f"  MIG     {part.profile or UNKNOWN:<10} {free}  {part.uuid}"
    for holder in gpu.holders:
        yield f"  held    {_holder(holder, at)}"


def _holder(holder: Holder, at: float | None) -> str:
    whose = f"{holder.server} (yours)" if holder.server else holder.user or "a process not seen from here"
    age = f" for {duration(at - holder.started_at)}" if at is not None and holder.started_at is not None else ""
    size = f"{holder.gib:.1f} GiB" if holder.gib is not None else "memory"
    return f"{size} by {whose}{age}, pid {holder.pid}" + (f": {holder.command}" if holder.command else "")


def _nvlinks(gpu: Gpu) -> str:
    up = [link for link in gpu.nvlinks if link.active]
    version = next((link.version for link in gpu.nvlinks if link.version), None)
    ends = sorted({link.remote for link in up if link.remote is not None})
    where = ["by NVSwitch"] if any(link.switch for link in up) else []
    where += [f"to GPU {','.join(map(str, ends))}"] if ends else []
    return " ".join([f"{len(up)} of {len(gpu.nvlinks)} up", *(["version " + version] if version else []), *where])


def _named(name: str, value: object) -> list[str]:
    return [f"{name} {value}".strip()] if value is not None else []


def _swap(host: Host) -> str:
    if not host.swap_gib:
        return ""
    return f", swap {_gib(host.swap_used_gib)} used of {_gib(host.swap_gib)}"


def _gib(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1f} GiB"


def _percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f}%"


def _whole(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f}"
