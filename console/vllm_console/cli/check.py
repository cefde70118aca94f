"""``vllm-console check NAME``: whether a server keeps its objectives, for cron and CI."""

from __future__ import annotations

import argparse
import sys

from vllm_console.cli.common import add_json, complain, open_fleet, print_json
from vllm_console.fleet.api import FleetError, NotFoundError, RefusedError, UsageError
from vllm_console.text import plain

WINDOW_SECONDS = 300.0
LONGEST_SECONDS = 30 * 86_400.0
"""History goes back a month."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's words."""
    parser.description = (
        "Exit code 0 when every objective of the server's preset held over the window, 1 when one was broken or the "
        "server does not serve, with a sentence for each on standard error."
    )
    parser.add_argument("name")
    parser.add_argument(
        "--window", type=float, default=WINDOW_SECONDS, metavar="SECONDS", help="look back this far (default 300)"
    )
    parser.add_argument(
        "--allow-idle", action="store_true", help="a server that nobody asked for anything is well (else it is not)"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Judge it."""
    from vllm_console.alerts.check import look, report_document

    if not 1.0 <= args.window <= LONGEST_SECONDS:
        raise UsageError(f"--window: expected seconds from 1 to {LONGEST_SECONDS:.0f} (30 days), not {args.window:g}")
    fleet = open_fleet(args)
    snapshot = fleet.snapshot(args.name)
    server = snapshot.server(args.name)
    if server is None:
        broken = next((notice for notice in snapshot.notices if f"/{args.name}/" in notice), None)
        if broken:
            raise FleetError(broken)
        raise NotFoundError(f"no server is called '{args.name}'; see 'vllm-console list'")
    if not server.ours:
        raise RefusedError(f"{args.name} was not started by vllm-console: nothing was recorded of it to judge it by")
    report = look(server, snapshot.at, args.window, allow_idle=args.allow_idle)
    if args.json:
        print_json(report_document(report))
    else:
        for one in report.objectives:
            mark = {True: "ok", False: "broken", None: "–"}[one.ok]
            print(f"{mark:<7} {plain(one.sentence)}")
    for problem in report.problems:
        print(f"vllm-console: {plain(problem)}", file=sys.stderr)
    # Cron often looks where no console is open: its look keeps the ledger up to date.
    if trouble := fleet.judge_past(args.name):
        complain(trouble)
    return 0 if report.ok else 1
