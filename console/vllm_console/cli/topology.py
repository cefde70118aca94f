"""``vllm-console topology``: how the GPUs are wired."""

from __future__ import annotations

import argparse
import shutil

from vllm_console.cli.common import add_json, print_json
from vllm_console.cli.host_source import add_host, load_host
from vllm_console.text import plain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's words."""
    add_json(parser)
    add_host(parser)
    parser.add_argument("--width", type=int, metavar="COLUMNS", help="columns to draw in (default: the terminal's)")


def run(args: argparse.Namespace) -> int:
    """Draw the matrix, its legend, and what is wrong with links."""
    from vllm_console.host_words import islands_words, links_words
    from vllm_launchers.machine.gpu.concerns import concerns
    from vllm_launchers.machine.gpu.document import encode_host
    from vllm_launchers.machine.gpu.matrix import legend, row_text, topology_rows

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
    if islands := islands_words(host):
        print("NVLink islands: " + "  ".join(islands))
    if ports := links_words(host):
        print(f"NVLinks: {ports}")
    for text in concerns(host):
        print(plain(f"! {text}"))
    return 0
