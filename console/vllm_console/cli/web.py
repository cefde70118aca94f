"""``vllm-console web``: the console in a browser on this machine."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import signal
import socket
import time
from typing import TYPE_CHECKING

from vllm_console.cli.fleet_access import read_only_by, settings_from
from vllm_console.cli.waiting import ending_signals
from vllm_launchers.errors import OperationError, UsageError

if TYPE_CHECKING:
    from vllm_console.web.server import ConsoleServer

NEEDED = ("aiohttp", "textual_serve")
"""Packages that the ``web`` extra installs."""

ADDRESS = "127.0.0.1"
"""The only address that is ever bound."""

MOST_PORT = 65_535


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Serve the console to one browser on this machine, until ctrl+c. The printed link works once. "
        "Read-only, unless --allow-changes is given."
    )
    parser.add_argument("--allow-changes", action="store_true", help="let the page start, change and stop your servers")
    parser.add_argument("--port", type=int, default=0, metavar="PORT", help="port on 127.0.0.1 (default: a free one)")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends it."""
    config = settings_from(args)
    _check(args)
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise OperationError(
            f"'vllm-console web' needs {' and '.join(missing)}, which this installation does not have: "
            "run pip install 'vllm-console[web]'"
        )
    from vllm_console.web.server import ConsoleServer

    why = read_only_by(args, config) or ("" if args.allow_changes else "--allow-changes lets it change servers")
    with _listen(args.port) as listening:
        server = ConsoleServer(_options(args))
        port = listening.getsockname()[1]
        explanation = _explanation(server.access.link(port), port, why)
        asyncio.run(_serve(server, listening, explanation))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Report immediately what each console would report.

    Raises:
        UsageError: the options contradict each other, or a value is invalid.
    """
    if args.allow_changes and args.read_only:
        raise UsageError("--read-only and --allow-changes contradict each other: give one of them")
    if not 0 <= args.port <= MOST_PORT:
        raise UsageError(f"--port {args.port}: expected a port from 1 to {MOST_PORT}")


def _listen(port: int) -> socket.socket:
    """A socket on loopback, the only address that is ever bound. Raises OperationError if the port can't be bound."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just released is available
        listening.bind((ADDRESS, port))
    except OSError as error:
        listening.close()
        why = error.strerror or str(error)
        raise OperationError(
            f"can't listen on {ADDRESS}:{port}: {why}; choose another --port, or leave it out"
        ) from error
    return listening


def _options(args: argparse.Namespace) -> list[str]:
    """The options of each console, from this command line."""
    from vllm_console.fleet.background_commands import child_options

    given = {
        "--refresh": args.refresh,
        "--at": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(args.at)) if args.at is not None else None,
    }
    words = [*child_options(args.state, args.config, args.host_file)]
    words += [f"{name}={value}" for name, value in given.items() if value is not None]
    words += ["--ascii"] if args.ascii else []
    return words if args.allow_changes else [*words, "--read-only"]


def _explanation(link: str, port: int, read_only: str) -> str:
    lines = [
        "The console is served to one browser at",
        f"  {link}",
        "The link works once. The browser that opens it keeps access by a cookie until this command ends.",
        f"Read-only ({read_only})." if read_only else "The page can start, change and stop your servers.",
    ]
    if "SSH_CONNECTION" in os.environ:
        lines.append(f"From your own machine, first: ssh -L {port}:{ADDRESS}:{port} {socket.gethostname()}")
    return "\n".join([*lines, "ctrl+c ends it; servers keep running."])


async def _serve(server: ConsoleServer, listening: socket.socket, explanation: str) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, *ending_signals()):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await server.serve(listening, lambda: print(explanation, flush=True), ended)
