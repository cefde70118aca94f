"""``vllm-console host``: this machine's GPUs, who holds them, and what is wrong with them."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_console.cli.common import add_json, print_json
from vllm_console.cli.host_source import add_host, host_from_matrix, load_host
from vllm_console.fleet.api import UsageError
from vllm_console.text import plain


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
    from vllm_console.host_words import describe
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
