"""``vllm-console logs NAME``: print or follow a server's log."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.options import add_json, count_from
from vllm_console.cli.output import print_json
from vllm_launchers.errors import RefusedError, UsageError
from vllm_launchers.secrets import redact


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name")
    parser.add_argument("-n", "--lines", type=count_from, default=100, help="number of lines (default 100)")
    parser.add_argument("-f", "--follow", action="store_true", help="follow the log until ctrl+c")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the end of the log, and follow it if requested."""
    from vllm_console.logs.file import LogFile

    if args.follow and args.json:
        raise UsageError("--follow prints lines as they come, and can't be combined with --json")
    server = open_fleet(args).snapshot().named(args.name)
    if not server.log_path:
        why = (
            "is attached: its log is on its own machine"
            if server.attached
            else "was not started by vllm-console: no log available"
        )
        raise RefusedError(f"{args.name} {why}")
    log = LogFile(Path(server.log_path), clean=redact)
    lines = log.tail(max(args.lines, 0))
    if args.json:
        print_json({"name": server.name, "log": server.log_path, "lines": [line.text for line in lines]})
        return 0
    for line in lines:
        # When following, an unfinished line will be printed again once it is complete.
        if line.complete or not args.follow:
            print(line.text, flush=args.follow)
    while args.follow:
        for line in log.poll():
            print(line.text, flush=True)
        time.sleep(0.25)
    return 0
