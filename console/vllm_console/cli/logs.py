"""``vllm-console logs NAME``: print or follow a server's log."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from vllm_console.cli.common import add_json, open_fleet, print_json
from vllm_console.fleet.api import NotFoundError, RefusedError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's words."""
    parser.add_argument("name")
    parser.add_argument("-n", "--lines", type=int, default=100, help="how many of the last lines (default 100)")
    parser.add_argument("-f", "--follow", action="store_true", help="go on as the log grows, until ctrl+c")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the end of it."""
    from vllm_console.logs.file import LogFile
    from vllm_launchers.secrets import redact

    server = open_fleet(args).snapshot().server(args.name)
    if server is None:
        raise NotFoundError(f"no server is called '{args.name}'; see 'vllm-console list'")
    if not server.log_path:
        raise RefusedError(f"{args.name} was not started by vllm-console, so its log is not known here")
    log = LogFile(Path(server.log_path), clean=redact)
    lines = log.tail(max(args.lines, 0))
    if args.json:
        print_json({"name": server.name, "log": server.log_path, "lines": [line.text for line in lines]})
        return 0
    for line in lines:
        # A line that is still being written comes again, whole, when it is followed.
        if line.complete or not args.follow:
            print(line.text)
    while args.follow:
        for line in log.poll():
            print(line.text, flush=True)
        time.sleep(0.25)
    return 0
