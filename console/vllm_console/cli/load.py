"""``vllm-console load SERVER``: send a workload and measure it at the client."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from vllm_console.cli.load_target import add_shape, find_target, shaped, warn_of_tuner
from vllm_console.cli.options import DAY, add_json, count_from, duration_type, number_type, share_from
from vllm_console.cli.output import complain, show
from vllm_console.cli.progress import ProgressLine
from vllm_console.load.spans import noted
from vllm_console.text import duration, plain
from vllm_launchers.errors import OperationError, UsageError
from vllm_launchers.units import counted

if TYPE_CHECKING:
    from vllm_console.fleet.local import LocalFleet
    from vllm_console.load.run import LoadProgress
    from vllm_console.load.shape import RecordedTraffic

MOST_SECONDS = DAY
"""A load ends after a day."""

MOST_RATE = 10_000
"""In requests per second."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("server", help="a server's name, or a URL such as http://127.0.0.1:8000")
    parser.add_argument(
        "--rate",
        type=number_type(0, MOST_RATE, f"more than 0, at most {MOST_RATE:,}", above=True),
        metavar="R",
        help="open loop: requests per second (default 1, unless --concurrency)",
    )
    parser.add_argument(
        "--concurrency", type=count_from, metavar="N",
        help="closed loop: keep N requests in flight; with --rate: cap of N "
        "(default: four times the preset's, at least 64)",
    )  # fmt: skip
    many = parser.add_mutually_exclusive_group()
    many.add_argument(
        "--duration",
        type=duration_type(0, MOST_SECONDS),
        default=30.0,
        metavar="DURATION",
        help="how long to send requests, such as 90s, 20m or 1h (default 30s); not with --requests",
    )
    many.add_argument("--requests", type=count_from, metavar="N", help="send N requests in total; not with --duration")
    add_shape(parser)
    parser.add_argument(
        "--from-requests", metavar="RUN",
        help="replay the recorded requests of a run, NAME@RUN or NAME for its newest: same arrivals and lengths, "
             "synthetic tokens",
    )  # fmt: skip
    parser.add_argument(
        "--speed",
        type=number_type(0.01, 1000, "a factor from 0.01 to 1000"),
        default=1.0,
        metavar="X",
        help="with --from-requests: X times as fast (default 1)",
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument(
        "--max-failed", type=share_from, default=0.01, metavar="SHARE",
        help="exit code 1 above this failed share: 0.05 or 5%% (default 1%%)",
    )  # fmt: skip
    parser.add_argument("--remote", action="store_true", help="allow another user's server, or another machine")
    add_json(parser)


def _recorded(args: argparse.Namespace, fleet: LocalFleet) -> RecordedTraffic | None:
    """The recorded requests that ``--from-requests`` names.

    Raises:
        UsageError: it is combined with another shape.
        OperationError: none were recorded.
    """
    if args.from_requests is None:
        if args.speed != 1.0:
            raise UsageError("--speed belongs to --from-requests")
        return None
    others = (args.rate, args.requests, args.preset, args.input_tokens, args.input_p95, args.output_tokens,
              args.output_p95, args.prefix_reuse)  # fmt: skip
    if any(one is not None for one in others):
        raise UsageError("--from-requests sets arrivals and lengths; it can only be combined with --concurrency")
    from vllm_console.load.shape import RecordedTraffic, served_requests

    found = served_requests(fleet.probes.requests_of(args.from_requests))
    if not found:
        raise OperationError(f"no finished request of {args.from_requests} is recorded")
    return RecordedTraffic(found, speed=args.speed, seed=args.seed)


def run(args: argparse.Namespace) -> int:
    """Send the load and print the report; exit code 1 if nothing was answered, or more failed than allowed.

    If it is interrupted, print the report so far; exit code 130.
    """
    rate = args.rate if args.rate is not None or args.concurrency else 1.0
    from vllm_console.load.run import run_load_sync
    from vllm_console.load.shape import Exact

    target = find_target(args, "--remote", others_allowed=args.remote, remote_allowed=args.remote)
    warn_of_tuner(target, "this load")
    workload, recorded = shaped(args, target.workload), _recorded(args, target.fleet)
    if recorded is not None:
        args.requests, rate = len(recorded.due), None
    most = args.concurrency or max(4 * workload.concurrency, 64)
    with (
        ProgressLine(silent=args.json, first=_sent_text(args, rate, most)) as line,
        noted(target.folder, rate, MOST_SECONDS if args.requests else args.duration),
    ):
        report = run_load_sync(
            target.url,
            None,
            workload,
            rate,
            MOST_SECONDS if args.requests else args.duration,
            requests=args.requests,
            recorded=recorded,
            exact=Exact(args.input_tokens, args.output_tokens),
            access=target.access,
            max_in_flight=most,
            seed=args.seed,
            allow_remote=args.remote,
            lookup=target.lookup,
            on_progress=lambda progress: line.show(_progress_text(progress), progress.elapsed),
        )
    show(args, report.document, lambda: [report.summary()])
    if report.failed:
        complain(f"{report.failed:,} of {counted(report.sent, 'request')} failed: {report.failure}")
    if report.stopped:
        return 130
    return 0 if report.completed and report.failed_share <= args.max_failed else 1


def _progress_text(progress: LoadProgress) -> str:
    """``10s: 20 sent, 3 under way, 17 answered``."""
    counts = f"{progress.sent:,} sent, {progress.in_flight:,} in flight, {progress.completed:,} answered"
    failed = f", {progress.failed} failed" if progress.failed else ""
    late = ""
    if progress.held_back:
        late = f", {progress.held_back:,} sent late: at most {progress.max_in_flight:,} in flight"
    return f"{duration(progress.elapsed)}: {counts}{failed}{late}"


def _sent_text(args: argparse.Namespace, rate: float | None, most: int) -> str:
    """What is sent and for how long: ``sending to chatbot: 30s at 2 req/s, at most 64 in flight``."""
    amount = duration(args.duration)
    if args.requests:
        kind = "recorded request" if args.from_requests is not None else "request"
        amount = counted(args.requests, kind)
    pace = f" at {rate:g} req/s" if rate is not None else ""
    return f"sending to {plain(args.server)}: {amount}{pace}, at most {most:,} in flight"
