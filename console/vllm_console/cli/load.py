"""``vllm-console load SERVER``: send a workload, measure it at the client."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.options import add_json, count_from
from vllm_console.cli.output import complain, print_json
from vllm_console.fleet.snapshot import State, Workload
from vllm_console.fleet.verbs import FleetError, NotFoundError, RefusedError, UsageError
from vllm_console.text import duration, plain

if TYPE_CHECKING:
    from vllm_console.fleet.verbs import Fleet
    from vllm_console.load.client import Lookup
    from vllm_console.load.run import LoadProgress

MOST_SECONDS = 86_400
"""A load ends after a day."""

WIPE = "\r\x1b[K"
"""Returns to the beginning of the line and clears it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("server", help="a server's name, or a URL such as http://127.0.0.1:8000")
    parser.add_argument(
        "--rate", type=float, metavar="R", help="open loop: requests per second (default 1, unless --concurrency)"
    )
    parser.add_argument(
        "--concurrency", type=count_from, metavar="N",
        help="closed loop: keep N requests in flight; with --rate: cap of N",
    )  # fmt: skip
    many = parser.add_mutually_exclusive_group()
    many.add_argument(
        "--duration",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds of arrivals (default 30); not with --requests",
    )
    many.add_argument("--requests", type=count_from, metavar="N", help="send N requests in total; not with --duration")
    parser.add_argument("--preset", help="use this preset's workload")
    prompt, output = parser.add_mutually_exclusive_group(), parser.add_mutually_exclusive_group()
    prompt.add_argument("--input-tokens", type=count_from, metavar="N", help="every prompt has exactly N tokens")
    prompt.add_argument("--input-p95", type=count_from, metavar="N", help="95th percentile of prompt tokens")
    output.add_argument("--output-tokens", type=count_from, metavar="N", help="every answer has exactly N tokens")
    output.add_argument("--output-p95", type=count_from, metavar="N", help="95th percentile of output tokens")
    parser.add_argument(
        "--prefix-reuse", type=_share, metavar="SHARE", help="share of each prompt that is a common prefix"
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument(
        "--max-failed", type=_share, default=0.01, metavar="SHARE",
        help="exit code 1 above this failed share: 0.05 or 5%% (default 1%%)",
    )  # fmt: skip
    parser.add_argument("--remote", action="store_true", help="allow another user's server, or another machine")
    add_json(parser)


def _share(text: str) -> float:
    """A share from 0 to 1, also as a percentage."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"'{plain(text, 40)}' must be a share from 0 to 1 (or 0% to 100%)")
    return share


def run(args: argparse.Namespace) -> int:
    """Send the load and print the report; exit code 1 if nothing was answered, or more failed than allowed."""
    rate = args.rate if args.rate is not None or args.concurrency else 1.0
    if (rate is not None and not 0 < rate <= 10_000) or not 0 < args.duration <= MOST_SECONDS:
        raise UsageError("--rate must lie in (0, 10000] requests per second, --duration in (0, 86400] seconds")
    from vllm_console.load.client import LoadError
    from vllm_console.load.run import run_load_sync
    from vllm_console.load.shape import Exact
    from vllm_console.load.spans import noted

    url, workload, lookup, folder = _target(args)
    seen = sys.stderr.isatty() and not args.json
    try:
        with noted(folder, rate, MOST_SECONDS if args.requests else args.duration):
            report = run_load_sync(
                url,
                None,
                workload,
                rate,
                MOST_SECONDS if args.requests else args.duration,
                requests=args.requests,
                exact=Exact(args.input_tokens, args.output_tokens),
                api_key=os.environ.get("VLLM_API_KEY"),
                max_in_flight=args.concurrency or max(4 * workload.concurrency, 64),
                seed=args.seed,
                allow_remote=args.remote,
                lookup=lookup,
                on_progress=_tell if seen else None,
            )
    except LoadError as error:
        raise FleetError(str(error)) from error
    finally:
        if seen and _waited_for():
            print(WIPE, end="", file=sys.stderr, flush=True)
    if args.json:
        print_json(report.document())
    else:
        print(report.summary())
    if report.failed:
        complain(f"{report.failed} of {report.sent} requests failed: {report.failure}")
    return 0 if report.completed and report.failed_share <= args.max_failed else 1


def _waited_for() -> bool:
    """Whether somebody waits at the terminal for this: in the background its line would go over other programs."""
    try:
        return os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    except (OSError, ValueError):  # no terminal, or not the one that controls this process
        return False


def _tell(progress: LoadProgress) -> None:
    """Overwrite one line again and again, on a terminal where this runs in the foreground."""
    if not _waited_for():
        return
    counts = f"{progress.sent:,} sent, {progress.in_flight:,} under way, {progress.completed:,} answered"
    failed = f", {progress.failed} failed" if progress.failed else ""
    print(f"{WIPE}{duration(progress.elapsed)}: {counts}{failed}", end="", file=sys.stderr, flush=True)


def _refuse_others(fleet: Fleet, url: str, *, remote: bool) -> None:
    """Refuse another user's server on this machine; one that this user started by hand may be measured.

    Raises:
        RefusedError: the port belongs to another user's server, and ``remote`` is not set.
    """
    from vllm_launchers.addresses import is_loopback
    from vllm_launchers.host.ports import user_name

    with contextlib.suppress(ValueError):  # the client reports an invalid URL
        parts = urlsplit(url)
        if remote or not is_loopback(parts.hostname or ""):
            return
        for server in fleet.snapshot().servers:
            if server.port == parts.port and not server.ours and server.owner not in (None, user_name(os.getuid())):
                raise RefusedError(f"{plain(url)} is a server of {server.owner}: not sending load; --remote allows it")


def _target(args: argparse.Namespace) -> tuple[str, Workload, Lookup | None, Path | None]:
    """Where to send, what (the server's preset unless overridden), and our own server's listener and folder."""
    fleet = open_fleet(args)
    workload: Workload | None = None
    url, lookup, folder = args.server, None, None
    if url.startswith(("http://", "https://")):
        _refuse_others(fleet, url, remote=args.remote)
    else:
        server = fleet.snapshot().server(args.server)
        if server is None:
            raise NotFoundError(f"no server is called '{args.server}'; see 'vllm-console list', or give a URL")
        if not server.ours:
            owner = server.owner or "another user"
            raise RefusedError(f"{server.name} was started by {owner} outside this console: not sending load")
        if server.state not in (State.READY, State.UNRESPONSIVE):
            raise FleetError(f"{server.name} is {server.state}, not ready. {server.reason or 'Try again when it is.'}")
        url, workload, lookup = server.url, server.workload, partial(fleet.listener, server.name)
        folder = Path(server.log_path).parent if server.log_path else None
    if args.preset or workload is None:
        wanted = args.preset or "chatbot"
        chosen = next((preset for preset in fleet.presets()[0] if preset.name == wanted), None)
        if chosen is None:
            raise NotFoundError(f"no preset is called '{wanted}'; see 'vllm-console presets'")
        workload = chosen.workload
    wanted_shape = Workload(
        input_tokens_p95=args.input_p95 or workload.input_tokens_p95,
        output_tokens_p95=args.output_p95 or workload.output_tokens_p95,
        prefix_reuse=workload.prefix_reuse if args.prefix_reuse is None else args.prefix_reuse,
        concurrency=args.concurrency or workload.concurrency,
    )
    return url, wanted_shape, lookup, folder
