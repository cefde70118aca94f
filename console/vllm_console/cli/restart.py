"""``vllm-console restart NAME``: restart a server, optionally with changed flags."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.options import (
    add_changes,
    add_json,
    add_probe,
    add_restart_method,
    add_warm_up,
    changes_from,
    pairs_from,
    timeout_from,
)
from vllm_console.cli.output import Document, ask, complain, print_json, warn_of_plan
from vllm_console.cli.servers import server_document
from vllm_console.cli.waiting import (
    did_not_happen,
    is_settled,
    not_ready,
    report_server,
    wait_for_restart,
    wait_until,
    warn_of_tuner,
)
from vllm_console.fleet.snapshot import ServerView
from vllm_console.text import plain
from vllm_launchers.errors import OperationError, UsageError
from vllm_launchers.keeper.records import State
from vllm_launchers.launch.request import RestartOptions
from vllm_launchers.vllm.flags.changes import Changes, Flags, unapplied

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_console.fleet.local import LocalFleet
    from vllm_console.fleet.rolling import AnswerComparison
    from vllm_launchers.plan.model import Plan

REPLACED = "another restart was requested meanwhile, and replaced this one"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name")
    add_changes(parser)
    parser.add_argument("--previous", action="store_true", help="revert to the previous run's flags")
    parser.add_argument("--preset", help="switch to this preset (keeps name, GPUs, port)")
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="K=V",
        help="environment variable of the server, kept in later runs",
    )
    parser.add_argument("--port", type=int, metavar="P", help="move it to another port")
    parser.add_argument("--force", action="store_true", help="restart despite errors that are estimates or temporary")
    add_warm_up(parser)
    add_probe(parser)
    add_restart_method(parser)
    parser.add_argument("--rolling", action="store_true", help="start the new run next to the old one, on another port")
    old = parser.add_mutually_exclusive_group()
    old.add_argument(
        "--stop-old", action="store_true", default=None, help="with --rolling: stop the old server afterwards"
    )
    old.add_argument(
        "--keep-old", dest="stop_old", action="store_false",
        help="with --rolling: keep the old server (default: ask; without a terminal, keep)",
    )  # fmt: skip
    parser.add_argument("--wait", action="store_true", help="wait until it is ready again or has failed")
    parser.add_argument(
        "--timeout", type=timeout_from, default=1800, metavar="DURATION", help="how long to wait (default 30m)"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Restart the server. Returns when the new generation has started, or with ``--wait`` when it is ready."""
    fleet = open_fleet(args)
    before = fleet.snapshot().server(args.name)
    options = RestartOptions(
        force=args.force,
        port=args.port,
        environment=pairs_from(args.env),
        warm_up=args.warm_up,
        probe=args.probe,
        prepare=args.prepare,
        rollback=args.rollback,
    )
    if args.rolling:
        return run_rolling(fleet, args, _changes(args, before), options)
    if args.stop_old is not None:
        raise UsageError("--stop-old and --keep-old belong to --rolling")
    warn_of_tuner(before)
    wanted: list[Flags] = []

    def planned(plan: Plan) -> None:
        wanted.append(plan.flags)
        warn_of_plan(plan)

    if args.preset:
        server = _switched(fleet, args, options, planned)
    else:
        server = _restarted(fleet, args, before, options, planned)
    generation = before.generation if before else 0
    server, asked_at = wait_for_restart(fleet, before, server, quiet=args.json, timeout=args.timeout)
    if did_not_happen(server, asked_at):
        return _report_refusal(args, server, asked_at)
    if server.generation <= generation:
        report_server(args, server, wanted=None)
        complain(f"{args.name} was stopped meanwhile and not restarted")
        return 1
    if args.wait:
        server = wait_until(fleet, args.name, is_settled, quiet=args.json, timeout=args.timeout)
    return _report_run(args, server, wanted)


def _report_run(args: argparse.Namespace, server: ServerView, wanted: list[Flags]) -> int:
    """Print the server; exit code 1 if it does not run with the last of the ``wanted`` flags."""
    code = report_server(args, server, wanted=State.READY if args.wait else None)
    if server.rollback:
        if args.json:
            complain(server.rollback)
        return 1
    # Another restart may have replaced this one while the server stopped, or after its run had begun.
    if wanted and dict(server.flags) != dict(wanted[-1]):
        complain(REPLACED)
        return 1
    return code


def _restarted(
    fleet: LocalFleet,
    args: argparse.Namespace,
    before: ServerView | None,
    options: RestartOptions,
    planned: Callable[[Plan], None],
) -> ServerView:
    changes = _changes(args, before)
    server = fleet.restart(args.name, changes, options, planned)
    if before is not None and not args.previous:
        say_several(before.flags, changes)
    return server


def _report_refusal(args: argparse.Namespace, server: ServerView, asked_at: float | None) -> int:
    """Print the server, which still serves, and why it was not restarted."""
    report_server(args, server, wanted=None)
    restart = server.restart
    if restart is None or restart.asked_at != asked_at:
        complain(REPLACED)
        return 1
    complain(restart.sentence)
    if restart.diagnosis is not None:
        from vllm_console.diagnosis.finding import fix_lines

        for line in (line for fix in restart.diagnosis.fixes[:3] for line in fix_lines(fix)):
            complain(f"  {line}")
    return 1


def _changes(args: argparse.Namespace, before: ServerView | None) -> Changes:
    """The requested flag change.

    Raises:
        UsageError: ``--previous`` is combined with other changes.
        OperationError: there are no previous flags.
    """
    from vllm_console.fleet.types import flag_difference

    changes = changes_from(args)
    if not args.previous:
        return changes
    if not changes.empty:
        raise UsageError("--previous can't be combined with --set, --unset or --preset")
    if before is None:
        return changes
    if before.previous_flags is None:
        raise OperationError(f"{args.name} has no previous run to revert to")
    return flag_difference(before.flags, before.previous_flags)


def _switched(
    fleet: LocalFleet, args: argparse.Namespace, options: RestartOptions, planned: Callable[[Plan], None]
) -> ServerView:
    """Switch the server to another preset. Raises UsageError for options that can't be combined with ``--preset``."""
    if args.previous:
        raise UsageError("--previous can't be combined with --set, --unset or --preset")
    if not changes_from(args).empty:
        raise UsageError("--preset can't be combined with --set or --unset; change flags afterwards")
    return fleet.switch(args.name, args.preset, options, planned)


def say_several(flags: Flags, changes: Changes) -> None:
    """Warn on standard error that the effects of simultaneous changes can't be separated."""
    changed = unapplied(flags, changes.edits)
    if len(changed) > 1:
        complain(f"note: {len(changed)} changes at once ({', '.join(changed)}): 'compare' can't attribute the effect")


def run_rolling(fleet: LocalFleet, args: argparse.Namespace, changes: Changes, options: RestartOptions) -> int:
    """Start the new server next to the old one, wait until it is ready, compare answers, and stop the old one if
    wanted.

    Raises:
        UsageError: an option that rolling updates do not support.
        OperationError: there is no room; nothing was started.
    """
    if args.preset:
        raise UsageError("--rolling keeps the preset: start another preset with 'vllm-console start'")
    new = fleet.start_beside(args.name, changes, options)
    if not args.json:
        gpus = f" on GPU {','.join(map(str, new.gpus))}" if new.gpus else ""
        print(f"{new.name} starts at {new.url}{gpus}; {args.name} keeps serving", flush=True)
    try:
        new = wait_until(fleet, new.name, is_settled, quiet=args.json, timeout=args.timeout)
        compared = _compared(fleet, args, new) if new.state is State.READY else None
    except KeyboardInterrupt:
        complain(
            f"{new.name} keeps running at {new.url} and {args.name} was not changed: 'vllm-console stop' ends either"
        )
        raise
    stopped = compared is not None and _stop_wanted(args) and _stopped(fleet, args)
    if args.json:
        old = fleet.snapshot().server(args.name)
        print_json(_document(old, new, compared, stopped=stopped))
    if new.state is not State.READY:
        complain(f"{not_ready(new)}: {new.reason}; {args.name} keeps serving")
    return 0 if compared is not None else 1


def _compared(fleet: LocalFleet, args: argparse.Namespace, new: ServerView) -> AnswerComparison | None:
    """Compare the answers of both; None, with the reason on stderr, if they can't be compared."""
    if not args.json:
        print(f"{new.name} is ready at {new.url}", flush=True)
    try:
        compared = fleet.compare_answers(args.name, new.name)
    except OperationError as error:
        complain(f"{error}; {who_serves(fleet, args.name, new)}")
        return None
    if not args.json:
        print(compared.sentence)
        for prompt in compared.different:
            print(f"  {plain(repr(prompt))}")
    return compared


def who_serves(fleet: LocalFleet, name: str, new: ServerView) -> str:
    """Which of the two is serving now."""
    snapshot = fleet.snapshot()
    old, now = snapshot.server(name), snapshot.server(new.name) or new
    if old is not None and old.state is State.READY:
        return f"{name} keeps serving"
    return f"{new.name} is {now.state} at {now.url}"


def _stop_wanted(args: argparse.Namespace) -> bool:
    """Whether to stop the old server: as given by the options, or else by the user's answer; otherwise no."""
    if args.stop_old is not None:
        return bool(args.stop_old)
    if args.json:
        return False
    if ask(f"Stop {args.name}? Move its clients to the new address first."):
        return True
    print(f"{args.name} keeps serving; 'vllm-console stop {args.name}' stops it")
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
