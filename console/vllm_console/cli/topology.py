"""``vllm-console topology``: how the GPUs are connected."""

from __future__ import annotations

import argparse
import shutil

from vllm_console.cli.host_source import add_host, load_host
from vllm_console.cli.options import add_json, count_from
from vllm_console.cli.output import print_json
from vllm_console.text import plain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_json(parser)
    add_host(parser)
    parser.add_argument(
        "--width", type=count_from, metavar="COLUMNS", help="width in columns (default: the terminal's)"
    )


def run(args: argparse.Namespace) -> int:
    """Draw the matrix, its legend, and problems with links."""
    from vllm_console.host_text import format_islands, format_links
    from vllm_launchers.host.gpu.document import encode_host
    from vllm_launchers.host.gpu.hardware_warnings import hardware_warnings
    from vllm_launchers.host.gpu.topology import legend, row_text, topology_rows

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
