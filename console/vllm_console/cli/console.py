"""``vllm-console`` without a command: the console itself."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from vllm_console.cli.common import open_fleet, settings
from vllm_console.config import Config
from vllm_console.fleet.api import Fleet, UsageError

if TYPE_CHECKING:
    from vllm_console.alerts.notifier import Notifier


def run(args: argparse.Namespace) -> int:
    """Open the console on this person's servers."""
    config = settings(args)
    if not sys.stdin.isatty() or not sys.stdout.isatty():
        raise UsageError("the console needs a terminal; for scripts there are commands, see 'vllm-console --help'")
    return show(open_fleet(args, config, charts=True), config, args)


def show(fleet: Fleet, config: Config, args: argparse.Namespace, *, demo: bool = False) -> int:
    """Run the app until it is quit; says afterwards what goes on without it."""
    from vllm_console.crash import in_threads
    from vllm_console.ui.app import ConsoleApp

    notifier = None if demo else _notifier(config, args, read_only=fleet.read_only)
    app = ConsoleApp(
        fleet,
        refresh=args.refresh or config.refresh_seconds,
        read_only=fleet.read_only,
        ascii=args.ascii or config.ascii,
        demo=demo,
        keys=config.keys,
        notifier=notifier,
    )
    told: list[str] = []
    in_threads(sys.argv[1:], args.state, told)
    try:
        app.run()
    finally:
        if notifier is not None:
            notifier.close()
        fleet.close()
    for sentence in told:
        print(f"vllm-console: {sentence}", file=sys.stderr)
    if app.crash is not None:
        raise app.crash
    if not demo and (farewell := app.farewell()):
        print(farewell)
    return app.return_code or 0


def _notifier(config: Config, args: argparse.Namespace, *, read_only: bool) -> Notifier:
    from vllm_console.alerts.notifier import Notifier
    from vllm_launchers.keeper.client import default_root

    return Notifier(args.state or default_root(), config.alerts, environ=os.environ, read_only=read_only)
