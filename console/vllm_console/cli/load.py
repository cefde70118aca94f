"""``vllm-console load SERVER``: send a workload, measure it at the client."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from vllm_console.cli.common import add_json, complain, open_fleet, print_json
from vllm_console.fleet.api import FleetError, NotFoundError, RefusedError, UsageError
from vllm_console.fleet.model import State, Workload
from vllm_console.text import plain

if TYPE_CHECKING:
    from vllm_console.fleet.api import Fleet
    from vllm_console.load.run import LoadProgress

WIPE = "\r\x1b[K"
"""Back to the beginning of the line, and nothing on it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's words."""
    parser.add_argument("server", help="a server's name, or a URL such as http://127.0.0.1:8000")
    parser.add_argument("--rate", type=float, default=1.0, metavar="R", help="requests per second (default 1)")
    parser.add_argument("--duration", type=float, default=30.0, metavar="S", help="seconds of arrivals (default 30)")
    parser.add_argument("--preset", help="take the workload's shape from this preset")
    parser.add_argument("--input-tokens", type=int, metavar="N", help="95th percentile of prompt tokens")
    parser.add_argument("--output-tokens", type=int, metavar="N", help="95th percentile of output tokens")
    parser.add_argument("--prefix-reuse", type=float, metavar="SHARE", help="share of a prompt that others have too")
    parser.add_argument("--concurrency", type=int, metavar="N", help="requests in flight at most")
    parser.add_argument("--seed", type=int, default=0, help="the same seed sends the same requests (default 0)")
    parser.add_argument("--remote", action="store_true", help="allow a server of others, or on another machine")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Send it and print what was measured; exit code 1 when nothing was answered."""
    if not 0 < args.rate <= 10_000 or not 0 < args.duration <= 86_400:
        raise UsageError("--rate must lie in (0, 10000] requests per second, --duration in (0, 86400] seconds")
    from vllm_console.load.client import LoadError
    from vllm_console.load.run import run_load_sync

    url, workload, own = _target(args)
    cap = args.concurrency or max(4 * workload.concurrency, 64)
    seen = sys.stderr.isatty() and not args.json
    try:
        report = run_load_sync(
            url,
            None,
            workload,
            args.rate,
            args.duration,
            api_key=os.environ.get("VLLM_API_KEY"),
            max_in_flight=cap,
            seed=args.seed,
            allow_remote=args.remote,
            own=own,
            on_progress=_tell if seen else None,
        )
    except LoadError as error:
        raise FleetError(str(error)) from error
    finally:
        if seen:
            print(WIPE, end="", file=sys.stderr, flush=True)
    if args.json:
        print_json(report.document())
    else:
        print(report.summary())
    if report.failed:
        complain(f"{report.failed} of {report.sent} requests failed: {report.failure}")
    return 0 if report.completed else 1


def _tell(progress: LoadProgress) -> None:
    """One line that is written over and over, for whoever waits at a terminal."""
    counts = f"{progress.sent} sent, {progress.in_flight} under way, {progress.completed} answered"
    failed = f", {progress.failed} failed" if progress.failed else ""
    print(f"{WIPE}{progress.elapsed:.0f} s: {counts}{failed}", end="", file=sys.stderr, flush=True)


def _refuse_others(fleet: Fleet, url: str, *, remote: bool) -> None:
    """Refuse another person's server on this machine; one that this person started by hand may be measured.

    Raises:
        RefusedError: the port is that of another person's server, and ``remote`` does not ask for it.
    """
    from vllm_launchers.addresses import is_loopback
    from vllm_launchers.machine.ports import user_name

    with contextlib.suppress(ValueError):  # what is no URL is said by whoever is to ask it
        parts = urlsplit(url)
        if remote or not is_loopback(parts.hostname or ""):
            return
        for server in fleet.snapshot().servers:
            if server.port == parts.port and not server.ours and server.owner not in (None, user_name(os.getuid())):
                raise RefusedError(
                    f"{plain(url)} is a server of {server.owner}: it is sent no load; --remote says that it may be"
                )


def _target(args: argparse.Namespace) -> tuple[str, Workload, bool]:
    """Where to send, what (from the server's preset unless said otherwise), and whether that is a server of ours."""
    fleet = open_fleet(args)
    workload: Workload | None = None
    url, own = args.server, False
    if url.startswith(("http://", "https://")):
        _refuse_others(fleet, url, remote=args.remote)
    else:
        server = fleet.snapshot().server(args.server)
        if server is None:
            raise NotFoundError(f"no server is called '{args.server}'; see 'vllm-console list', or give a URL")
        if not server.ours:
            owner = server.owner or "somebody else"
            raise RefusedError(f"{server.name} was started by {owner}, not by vllm-console: it is sent no load")
        if server.state not in (State.READY, State.UNRESPONSIVE):
            raise FleetError(f"{server.name} is {server.state}, so it takes no requests; {server.reason or 'wait'}")
        url, workload, own = server.url, server.workload, True
    if args.preset or workload is None:
        wanted = args.preset or "chatbot"
        chosen = next((preset for preset in fleet.presets()[0] if preset.name == wanted), None)
        if chosen is None:
            raise NotFoundError(f"no preset is called '{wanted}'; see 'vllm-console presets'")
        workload = chosen.workload
    wanted_shape = Workload(
        input_tokens_p95=args.input_tokens or workload.input_tokens_p95,
        output_tokens_p95=args.output_tokens or workload.output_tokens_p95,
        prefix_reuse=workload.prefix_reuse if args.prefix_reuse is None else args.prefix_reuse,
        concurrency=args.concurrency or workload.concurrency,
    )
    return url, wanted_shape, own
