"""``vllm-console restart NAME``: the same server again, with changed flags if any are given."""

from __future__ import annotations

import argparse

from vllm_console.cli.common import (
    add_changes,
    add_json,
    changes_from,
    complain,
    open_fleet,
    report,
    settled,
    wait_until,
)
from vllm_console.fleet.model import Changes, Flags, ServerView, State


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's words."""
    parser.add_argument("name")
    add_changes(parser)
    parser.add_argument("--previous", action="store_true", help="go back to the previous generation's flags")
    parser.add_argument("--preset", help="hand its place (name, GPUs, port) to this preset")
    parser.add_argument("--force", action="store_true", help="restart in spite of errors that may be wrong or may pass")
    parser.add_argument("--wait", action="store_true", help="return when it is ready again, or has failed")
    parser.add_argument("--timeout", type=float, default=1800, metavar="S", help="how long to wait at most")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Restart it; returns when the new generation is under way, with ``--wait`` when it is ready."""
    from vllm_console.fleet.api import FleetError, UsageError, flag_difference

    fleet = open_fleet(args)
    changes = changes_from(args)
    before = fleet.snapshot().server(args.name)
    if args.previous:
        if not changes.empty or args.preset:
            raise UsageError("--previous takes the previous flags as they were; leave --set, --unset and --preset out")
        if before is not None and before.previous_flags is None:
            raise FleetError(f"{args.name} has no previous generation to go back to")
        if before is not None and before.previous_flags is not None:
            changes = flag_difference(before.flags, before.previous_flags)
    if args.preset:
        if not changes.empty:
            raise UsageError("--preset brings its own flags; change them afterwards with --set")
        server = fleet.switch(args.name, args.preset, force=args.force)
    else:
        server = fleet.restart(args.name, changes, force=args.force)
        if before is not None and not args.previous:
            say_several(before.flags, changes)
    generation = before.generation if before else 0

    def begun(server: ServerView) -> bool:
        return server.generation > generation and server.state is not State.STOPPING

    server = wait_until(fleet, args.name, begun, quiet=args.json, timeout=args.timeout)
    if args.wait:
        server = wait_until(fleet, args.name, settled, quiet=args.json, timeout=args.timeout)
    return report(args, server, wanted=State.READY if args.wait else None)


def say_several(flags: Flags, changes: Changes) -> None:
    """Say on standard error that several changes at once cannot be judged one by one."""
    from vllm_launchers.plan.model import same_value

    changed = [flag for flag, value in changes.set.items() if not same_value(flags.get(flag), value)]
    changed += [flag for flag in changes.unset if flag in flags]
    if len(changed) > 1:
        complain(f"note: {len(changed)} changes at once ({', '.join(changed)}): 'compare' will not tell them apart")
