"""``vllm-console watch``: report findings of all servers while no console is open, e.g. under a service manager."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_console.cli.fleet_access import open_fleet, settings_from, state_of
from vllm_console.cli.options import add_json
from vllm_console.cli.waiting import ending_signals
from vllm_console.text import error_sentence, plain

if TYPE_CHECKING:
    from vllm_console.alerts.findings import Alert
    from vllm_console.alerts.notifier import Notifier
    from vllm_console.fleet.local import LocalFleet

POLL_SECONDS = 5.0
"""Findings are judged in steps of ten seconds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Print findings as they begin and end, and report them as configured in [alerts] of config.toml, until "
        "interrupted. It changes no server. With --read-only it prints and alerts the terminal only. Run it as a user "
        "service to get alerts while no console is open."
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Watch until a signal ends it."""
    from vllm_console.alerts.notifier import Notifier

    config = settings_from(args)
    ended = threading.Event()
    for number in ending_signals():
        signal.signal(number, lambda *_: ended.set())
    terminal = sys.stderr.isatty()
    fleet = open_fleet(args, config, interactive=True, observe=False)
    notifier = Notifier(
        state_of(args),
        config.alerts,
        environ=os.environ,
        write=_to_terminal if terminal else None,
        read_only=fleet.read_only,
    )
    try:
        _watch(fleet, notifier, ended, as_json=args.json)
    finally:
        notifier.close()
        fleet.close()
    return 0


def _watch(fleet: LocalFleet, notifier: Notifier, ended: threading.Event, *, as_json: bool) -> None:
    reported = ""
    while True:
        alerts: Sequence[Alert] = ()
        try:
            alerts = notifier.update(fleet.snapshot())
            trouble = notifier.trouble
        except Exception as error:  # noqa: BLE001 - the poll's boundary: reported, and tried again
            trouble = error_sentence(error)
        for alert in alerts:
            print(_line(alert, as_json=as_json), flush=True)
        if trouble != reported:
            at = time.strftime("%Y-%m-%d %H:%M:%S")
            news = plain(trouble) if trouble else f"no longer: {plain(reported)}"
            print(f"vllm-console: {at} {news}", file=sys.stderr, flush=True)
        reported = trouble
        if ended.wait(POLL_SECONDS):
            return


def _line(alert: Alert, *, as_json: bool) -> str:
    if as_json:
        from vllm_console.alerts.findings import document

        return json.dumps(document(alert))
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(alert.at))
    return plain(f"{at} {alert.finding.finding.severity:<8} {alert.sentence}")


def _to_terminal(data: bytes) -> None:
    sys.stderr.flush()
    os.write(sys.stderr.fileno(), data)
