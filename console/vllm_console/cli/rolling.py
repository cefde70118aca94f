"""``vllm-console restart NAME --rolling``: the new generation next to the old one, then the choice to stop that."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from vllm_console.cli.output import Document, complain, print_json
from vllm_console.cli.server_table import server_document
from vllm_console.cli.waiting import settled, wait_until
from vllm_console.fleet.snapshot import Changes, ServerView, State
from vllm_console.fleet.verbs import FleetError, UsageError
from vllm_console.text import plain
from vllm_launchers.launch.request import RestartOptions

if TYPE_CHECKING:
    from vllm_console.fleet.local import LocalFleet
    from vllm_console.fleet.rolling import AnswerComparison


def run_rolling(fleet: LocalFleet, args: argparse.Namespace, changes: Changes, options: RestartOptions) -> int:
    """Start it beside the old one, wait until it is ready, compare answers, stop the old one if that is wanted.

    Raises:
        UsageError: an option that a rolling update does not have.
        FleetError: there is no room; nothing was started.
    """
    if args.preset:
        raise UsageError("--rolling keeps the preset: start another preset with 'vllm-console start'")
    new = fleet.start_beside(args.name, changes, options)
    if not args.json:
        gpus = f" on GPU {','.join(map(str, new.gpus))}" if new.gpus else ""
        print(f"{new.name} starts at {new.url}{gpus}; {args.name} goes on serving", flush=True)
    try:
        new = wait_until(fleet, new.name, settled, quiet=args.json, timeout=args.timeout)
        compared = _compared(fleet, args, new) if new.state is State.READY else None
    except KeyboardInterrupt:
        complain(f"{new.name} goes on at {new.url} and {args.name} was not touched: 'vllm-console stop' ends either")
        raise
    stopped = compared is not None and _stop_wanted(args) and _stopped(fleet, args)
    if args.json:
        old = fleet.snapshot().server(args.name)
        print_json(_document(old, new, compared, stopped=stopped))
    if new.state is not State.READY:
        complain(f"{new.name} is {new.state}: {new.reason}; {args.name} was not touched")
    return 0 if compared is not None else 1


def _compared(fleet: LocalFleet, args: argparse.Namespace, new: ServerView) -> AnswerComparison | None:
    """How the answers of both compare; None, with the reason on stderr, if they can't be had."""
    if not args.json:
        print(f"{new.name} is ready at {new.url}", flush=True)
    try:
        compared = fleet.compare_answers(args.name, new.name)
    except FleetError as error:
        complain(f"{error}; {who_serves(fleet, args.name, new)}")
        return None
    if not args.json:
        print(compared.sentence)
        for prompt in compared.different:
            print(f"  {plain(repr(prompt))}")
    return compared


def who_serves(fleet: LocalFleet, name: str, new: ServerView) -> str:
    """Which of the two serve now."""
    snapshot = fleet.snapshot()
    old, now = snapshot.server(name), snapshot.server(new.name) or new
    if old is not None and old.state is State.READY:
        return f"{name} goes on serving"
    return f"{new.name} is {now.state} at {now.url}"


def _stop_wanted(args: argparse.Namespace) -> bool:
    """Whether the old server is to be stopped: as the options say, else as answered, else not."""
    if args.stop_old is not None:
        return bool(args.stop_old)
    if args.json:
        return False
    if sys.stdin.isatty() and sys.stdout.isatty():
        print(f"Stop {args.name}? Its clients must use the new address by then. [y/N] ", end="", flush=True)
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return True
    print(f"{args.name} goes on serving; 'vllm-console stop {args.name}' stops it")
    return False


def _stopped(fleet: LocalFleet, args: argparse.Namespace) -> bool:
    fleet.stop(args.name)
    old = wait_until(fleet, args.name, lambda server: not server.state.alive, quiet=args.json, timeout=args.timeout)
    if not args.json:
        print(f"{args.name}: {old.state}")
    return True


def _document(old: ServerView | None, new: ServerView, compared: AnswerComparison | None, *, stopped: bool) -> Document:
    """The rolling update as ``restart --rolling --json`` prints it (a contract)."""
    answers = {"compared": compared.compared, "different": list(compared.different)} if compared is not None else None
    return {
        "old": server_document(old) if old is not None else None,
        "new": server_document(new),
        "url": new.url,
        "answers": answers,
        "old_stopped": stopped,
    }
