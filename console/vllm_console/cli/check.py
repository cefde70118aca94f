"""``vllm-console check``: whether a server meets its objectives, or a launch may begin; for cron and CI."""

from __future__ import annotations

import argparse
import os
import sys

from vllm_console.cli.before_launch import check_launch
from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.launch_arguments import add_engine
from vllm_console.cli.options import add_changes, add_json
from vllm_console.cli.output import complain, print_json
from vllm_console.fleet.verbs import FleetError, NotFoundError, RefusedError, UsageError
from vllm_console.text import duration, plain

LOCAL = "http://127.0.0.1:9090"
"""Where Prometheus listens unless told otherwise."""

WINDOW_SECONDS = 300.0
LONGEST_SECONDS = 30 * 86_400.0
"""History goes back a month."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Exit code 0 if the server met every objective of its preset over the window, 1 if it missed one or is not "
        "ready; each miss is printed on standard error, too. With --before-launch PRESET it goes through what "
        "operators check before a launch instead: exit code 0 if every item is ok."
    )
    parser.add_argument("name", nargs="?")
    parser.add_argument("--before-launch", metavar="PRESET", help="check a launch of this preset; nothing is started")
    parser.add_argument("--model", metavar="MODEL", help="with --before-launch: replace the preset's model")
    add_engine(parser, "with --before-launch: ")
    parser.add_argument("--port", type=int, metavar="PORT", help="with --before-launch: port to bind (default 8000)")
    parser.add_argument(
        "--prometheus", default=LOCAL, metavar="URL",
        help=f"with --before-launch: the Prometheus that shall scrape it (default {LOCAL})",
    )  # fmt: skip
    add_changes(parser)
    parser.add_argument(
        "--window",
        type=float,
        default=WINDOW_SECONDS,
        metavar="SECONDS",
        help="window to judge, in seconds (default 300)",
    )
    parser.add_argument("--allow-idle", action="store_true", help="pass if the server had no requests (default: fail)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Judge it."""
    if (args.name is None) == (args.before_launch is None):
        raise UsageError("give a server's name or --before-launch PRESET, not both")
    return _judge(args) if args.before_launch is None else check_launch(args)


def _judge(args: argparse.Namespace) -> int:
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
    if not server.recorded:
        raise RefusedError(f"{args.name} was not started by vllm-console: no recorded history to judge")
    report = look(server, snapshot.at, args.window, allow_idle=args.allow_idle)
    if args.json:
        print_json(report_document(report))
    else:
        print(f"over the last {duration(report.window_seconds)}:")
        for one in report.objectives:
            mark = {True: "ok", False: "broken", None: "–"}[one.ok]
            print(f"{mark:<7} {plain(one.sentence)}")
    shown = {f"{report.name}: {one.sentence}" for one in report.objectives} if _one_place() and not args.json else set()
    for problem in report.problems:
        if problem not in shown:
            print(f"vllm-console: {plain(problem)}", file=sys.stderr)
    # Cron often runs where no console is open: record the findings that no console saw.
    if trouble := fleet.judge_past(args.name):
        complain(trouble)
    return 0 if report.ok else 1


def _one_place() -> bool:
    """Whether standard output and standard error lead to the same place, such as a terminal: each line is read once."""
    try:
        sys.stdout.flush()
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError):
        return False
