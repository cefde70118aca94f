"""``vllm-console gpus --free N``: the best set of free GPUs, for scripts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from vllm_console.cli.fleet_access import settings_from
from vllm_console.cli.host_source import add_host, load_host
from vllm_console.cli.options import add_json
from vllm_console.cli.output import Document, fields, print_json
from vllm_console.fleet.verbs import FleetError, UsageError
from vllm_console.text import plain
from vllm_launchers.host.gpu.host import Host
from vllm_launchers.host.gpu.sharing import GpuShare, available_gib, format_share
from vllm_launchers.plan.placement import Placement

MOST_GPUS = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_json(parser)
    add_host(parser)
    parser.add_argument("--free", type=int, required=True, metavar="N", help="number of GPUs")
    parser.add_argument("--need-gib", type=float, metavar="G", help="GiB free on each GPU (default: idle GPUs)")
    parser.add_argument("--uuid", action="store_true", help="print UUIDs instead of indices")


def run(args: argparse.Namespace) -> int:
    """Print the value for ``CUDA_VISIBLE_DEVICES`` on standard output, and why on standard error."""
    from vllm_console.settings import gpu_shares
    from vllm_launchers.plan.placement import rank_placements

    if not 1 <= args.free <= MOST_GPUS:
        raise UsageError(f"--free {args.free}: expected 1 to {MOST_GPUS}")
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
        raise FleetError(plain("; ".join([ranking.problem, *untold])))
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
