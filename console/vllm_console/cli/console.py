"""``vllm-console`` without a command, and ``vllm-console replay RUN``: the console, live or on a past run."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_console.cli.fleet_access import open_fleet, settings_from, state_of
from vllm_console.cli.options import text_from
from vllm_console.cli.picture_options import write_picture
from vllm_console.fleet.types import Replay
from vllm_console.settings import Config, Settings
from vllm_console.text import plain
from vllm_launchers.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from vllm_console.alerts.notifier import Notifier
    from vllm_console.chat.conversation import ChatOptions
    from vllm_console.fleet.local import LocalFleet
    from vllm_console.ui.terminal.cast import Cast


DUMB = ("dumb", "unknown")
"""Values of ``TERM`` for terminals that cannot draw."""


def run(args: argparse.Namespace) -> int:
    """Open the console on this user's servers."""
    return open_on(args, lambda fleet: _replay_of(fleet, args))


def open_on(
    args: argparse.Namespace, wanted: Callable[[LocalFleet], Replay | None], *, chat: ChatOptions | None = None
) -> int:
    """Open the console, or save a picture of it; on the run that ``wanted`` returns, if any.

    With ``chat``, open a chat with the server ``args.server``.
    """
    config = settings_from(args)
    with contextlib.closing(open_fleet(args, config, interactive=True, remote=True)) as fleet:
        replay = wanted(fleet)
        if args.picture is not None:
            return write_picture(fleet, args, replay=replay)
        need_screen("the console needs a terminal; for scripts use a command, see 'vllm-console --help'")
        server = args.server or ""
        return show(fleet, config, args, to_demo=_open_demo, server=server, replay=replay, chat=chat)


def _replay_of(fleet: LocalFleet, args: argparse.Namespace) -> Replay | None:
    """The run that shows ``--server`` at ``--at``, if that server was removed.

    Raises:
        NotFoundError: there is no such server.
    """
    if not args.server:
        return None
    if args.at is not None and (replay := fleet.replays.removed_at(args.server, args.at)) is not None:
        return replay
    if fleet.snapshot().server(args.server) is None:
        name = plain(args.server)
        raise NotFoundError(
            f"no server is called '{name}'; see 'vllm-console list'. If it was removed, 'vllm-console replay {name}' "
            "shows its newest run"
        )
    return None


def need_screen(otherwise: str) -> None:
    """Check that there is something to draw on: a terminal, or a driver named by ``TEXTUAL_DRIVER``.

    Rich assumes a fixed size for a dumb terminal, and layout would never finish.

    Raises:
        UsageError: there is no terminal (with the message ``otherwise``), or it cannot draw.
    """
    if os.environ.get("TEXTUAL_DRIVER"):
        return
    if not sys.stdin.isatty() or not sys.stdout.isatty():
        raise UsageError(otherwise)
    if (name := os.environ.get("TERM", "")).lower() in DUMB:
        raise UsageError(
            f"TERM={name}: the console needs a terminal with cursor positioning; commands such as 'vllm-console "
            "list' work without one"
        )


def _open_demo() -> int:
    """Continue as the demo with the options of this command line, which had no command."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "vllm_console", *sys.argv[1:], "demo"])


def keys_problem(config: Config) -> str:
    """What is wrong with the keys that a config file assigns, with the file; empty if nothing is."""
    from vllm_console.ui.keymap import KeysError, chosen_keys

    try:
        chosen_keys(config.keymap, config.keys)
    except KeysError as error:
        source = config.sources.get("keys", "") if isinstance(config, Settings) else ""
        return f"{source}: {error}" if source else str(error)
    return ""


def show(
    fleet: LocalFleet,
    config: Config,
    args: argparse.Namespace,
    *,
    demo: bool = False,
    cast: Cast | None = None,
    hints: Path | None = None,
    to_demo: Callable[[], int] | None = None,
    server: str = "",
    replay: Replay | None = None,
    chat: ChatOptions | None = None,
) -> int:
    """Run the app until it quits, then print what keeps running.

    ``cast`` records the output; ``hints``, ``server``, ``replay`` and ``chat`` are passed to `ConsoleApp`; ``to_demo``
    is called if the user left for the demo.
    """
    from vllm_console.crash_report import in_threads
    from vllm_console.ui.app import ConsoleApp

    if problem := keys_problem(config):
        raise UsageError(problem)
    notifier = None if demo else _notifier(config, args, read_only=fleet.read_only)
    app = ConsoleApp(
        fleet,
        refresh=args.refresh or config.refresh_seconds,
        read_only=fleet.read_only,
        ascii=args.ascii or config.ascii,
        demo=demo,
        keymap=config.keymap,
        keys=config.keys,
        notifier=notifier,
        layout=config.layout,
        theme=config.theme,
        columns=config.columns,
        at=args.at,
        state=None if demo else state_of(args),
        cast=cast,
        hints=hints,
        pictures=(Path.cwd(), state_of(args)),
        server=server,
        replay=replay,
        chat=chat,
    )
    messages: list[str] = []
    in_threads(sys.argv[1:], args.state, messages, demo=demo)
    try:
        app.run()
    finally:
        app.leave_signals()
        if notifier is not None:
            notifier.close()
        fleet.close()
    for sentence in messages:
        print(f"vllm-console: {sentence}", file=sys.stderr)
    if app.crash is not None:
        raise app.crash
    if app.demo_wanted and to_demo is not None:
        return to_demo()
    if not demo and (farewell := app.farewell()):
        print(farewell)
    return app.return_code or 0


def _notifier(config: Config, args: argparse.Namespace, *, read_only: bool) -> Notifier:
    from vllm_console.alerts.notifier import Notifier

    return Notifier(state_of(args), config.alerts, environ=os.environ, read_only=read_only)


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run", type=text_from, help="run id, NAME@RUN, or NAME (its newest run, or that of --at TIME)")


def run_replay(args: argparse.Namespace) -> int:
    """Open the console, or save a picture of it."""
    return open_on(args, lambda fleet: fleet.replays.find(args.run, args.at))
