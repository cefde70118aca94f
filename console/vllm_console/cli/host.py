"""``vllm-console host``: this machine's GPUs, who holds them, and what is wrong with them."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_console.cli.host_source import add_host, host_from_matrix, load_host
from vllm_console.cli.options import add_json
from vllm_console.cli.output import print_json
from vllm_console.fleet.verbs import UsageError
from vllm_console.text import plain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_json(parser)
    add_host(parser)
    parser.add_argument(
        "--from-topo", type=Path, metavar="FILE", help="print the host document of a saved 'nvidia-smi topo -m'"
    )
    parser.add_argument("--history", metavar="RANGE", help="show what the GPUs did: 5m, 15m, 1h, 6h, 24h, 7d or all")
    parser.add_argument("--gpu", metavar="NAME", help="with --from-topo: GPU model, e.g. H100")


def run(args: argparse.Namespace) -> int:
    """Show it, or print the host document."""
    from vllm_console.host_text import describe
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
    if args.json:
        print_json(encode_host(host))
    else:
        print("\n".join(plain(line) for line in describe(host)))
    return 0


def _show_history(args: argparse.Namespace) -> int:
    from vllm_console.cli import gpu_history
    from vllm_console.cli.host_source import recorded_host

    charts = gpu_history.read_charts(args, gpu_history.range_named(args.history), recorded_host(args))
    if args.json:
        print_json(gpu_history.document(charts))
    else:
        print("\n".join(gpu_history.lines(charts)))
    return 0
