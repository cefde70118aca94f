"""``vllm-console restart NAME``: restart a server, optionally with changed flags."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.launch_arguments import pairs_from
from vllm_console.cli.options import (
    add_changes,
    add_json,
    add_probe,
    add_restart_method,
    add_warm_up,
    changes_from,
    seconds_from,
)
from vllm_console.cli.output import complain, warn_of_plan
from vllm_console.cli.waiting import did_not_happen, report_server, settled, wait_for_restart, wait_until
from vllm_console.fleet.snapshot import Changes, Flags, ServerView, State
from vllm_console.fleet.verbs import UsageError
from vllm_launchers.launch.request import RestartOptions

if TYPE_CHECKING:
    from vllm_console.fleet.local import LocalFleet


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
        help="environment variable of the server, in later runs too",
    )
    parser.add_argument("--port", type=int, metavar="P", help="move it to another port")
    parser.add_argument("--force", action="store_true", help="restart despite errors that are estimates or may pass")
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
    parser.add_argument("--timeout", type=seconds_from, default=1800, metavar="S", help="timeout in seconds")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Restart it; returns when the new generation has started, with ``--wait`` when it is ready."""
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
        from vllm_console.cli.rolling import run_rolling

        return run_rolling(fleet, args, _changes(args, before), options)
    if args.stop_old is not None:
        raise UsageError("--stop-old and --keep-old belong to --rolling")
    server = _switched(fleet, args, options) if args.preset else _restarted(fleet, args, before, options)
    generation = before.generation if before else 0
    server, asked_at = wait_for_restart(fleet, before, server, quiet=args.json, timeout=args.timeout)
    if did_not_happen(server, asked_at):
        return _report_refusal(args, server, asked_at)
    if server.generation <= generation:
        report_server(args, server, wanted=None)
        complain(f"{args.name} was stopped meanwhile and not restarted")
        return 1
    if args.wait:
        server = wait_until(fleet, args.name, settled, quiet=args.json, timeout=args.timeout)
    code = report_server(args, server, wanted=State.READY if args.wait else None)
    if server.rollback and args.json:
        complain(server.rollback)
    return 1 if server.rollback else code


def _restarted(
    fleet: LocalFleet, args: argparse.Namespace, before: ServerView | None, options: RestartOptions
) -> ServerView:
    """Restart the server with the requested change of flags."""
    changes = _changes(args, before)
    server = fleet.restart(args.name, changes, options, warn_of_plan)
    if before is not None and not args.previous:
        say_several(before.flags, changes)
    return server


def _report_refusal(args: argparse.Namespace, server: ServerView, asked_at: float | None) -> int:
    """Print the server, which still serves, and why it was not restarted."""
    report_server(args, server, wanted=None)
    restart = server.restart
    if restart is None or restart.asked_at != asked_at:
        complain("another restart was requested meanwhile, and replaced this one")
        return 1
    complain(restart.sentence)
    if restart.diagnosis is not None:
        from vllm_console.diagnosis.finding import fix_lines

        for line in (line for fix in restart.diagnosis.fixes[:3] for line in fix_lines(fix)):
            complain(f"  {line}")
    return 1


def _changes(args: argparse.Namespace, before: ServerView | None) -> Changes:
    """The requested change of flags.

    Raises:
        UsageError: ``--previous`` is combined with other changes.
        FleetError: there are no previous flags.
    """
    from vllm_console.fleet.verbs import FleetError, flag_difference

    changes = changes_from(args)
    if not args.previous:
        return changes
    if not changes.empty:
        raise UsageError("--previous can't be combined with --set, --unset or --preset")
    if before is None:
        return changes
    if before.previous_flags is None:
        raise FleetError(f"{args.name} has no previous run to revert to")
    return flag_difference(before.flags, before.previous_flags)


def _switched(fleet: LocalFleet, args: argparse.Namespace, options: RestartOptions) -> ServerView:
    """Switch the server to another preset. Raises UsageError for options that can't be combined with ``--preset``."""
    if args.previous:
        raise UsageError("--previous can't be combined with --set, --unset or --preset")
    if not changes_from(args).empty:
        raise UsageError("--preset can't be combined with --set or --unset; change flags afterwards")
    return fleet.switch(args.name, args.preset, options, warn_of_plan)


def say_several(flags: Flags, changes: Changes) -> None:
    """Warn on standard error that the effects of several simultaneous changes can't be told apart."""
    from vllm_launchers.plan.model import same_value

    changed = [flag for flag, value in changes.set.items() if not same_value(flags.get(flag), value)]
    changed += [flag for flag in changes.unset if flag in flags]
    if len(changed) > 1:
        complain(f"note: {len(changed)} changes at once ({', '.join(changed)}): 'compare' can't attribute the effect")
