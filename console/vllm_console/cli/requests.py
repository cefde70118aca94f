"""``vllm-console requests NAME``: each finished request of a server, with the time that it spent in each stage; or its
engine steps, or what the prefix cache did.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.options import add_json, count_from
from vllm_console.cli.output import Document, complain, fields, print_json
from vllm_console.cli.prefixes_text import prefixes_document, prefixes_lines
from vllm_console.cli.steps_text import step_document, step_lines
from vllm_console.fleet.verbs import UsageError
from vllm_console.history.probe_records import FinishedRequest
from vllm_console.history.time_view import moment_from
from vllm_console.metrics.quantile import exact_quantile
from vllm_console.text import UNKNOWN, clock, count, plain, seconds

DEFAULT_LAST = 20
DEFAULT_STEPS = 1000
"""Steps that are read without ``--last``: some twenty seconds of them."""

QUANTILES = (0.5, 0.9, 0.99)
LONGEST_ID = 30
_STAGES = ("queue_seconds", "prefill_seconds", "decode_seconds", "ttft_seconds", "e2e_seconds")
_COLUMNS = (
    ("ARRIVED", 16), ("PROMPT", 8), ("CACHED", 8), ("OUTPUT", 8), ("QUEUE", 8), ("PREFILL", 9), ("DECODE", 8),
    ("TTFT", 8), ("E2E", 8), ("PREEMPT", 9), ("END", 8), ("ID", 0),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "List the requests that a server has finished in its present or last run, the newest first. They are recorded "
        "by the probe, without any text; requests whose clients disconnected are missing."
    )
    parser.add_argument("name")
    parser.add_argument(
        "--last", type=count_from, metavar="N",
        help=f"at most so many (default: {DEFAULT_LAST}; with --json all that are kept, or {DEFAULT_STEPS} steps)",
    )  # fmt: skip
    parser.add_argument("--since", metavar="TIME", help='those that ended since then, of any run, e.g. "03:10"')
    view = parser.add_mutually_exclusive_group()
    view.add_argument("--slowest", action="store_true", help="the slowest first, by their whole time")
    view.add_argument("--steps", action="store_true", help="the engine's steps instead: batches, tokens, step times")
    view.add_argument(
        "--prefixes", action="store_true", help="what the prefix cache did for them, by the length of their prompts"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print them."""
    if args.steps:
        return _steps(args)
    if args.prefixes:
        return _prefixes(args)
    now = time.time()
    found = open_fleet(args).requests(args.name, _moment(args.since, now))
    order = sorted(found, key=lambda one: one.e2e_seconds or 0.0) if args.slowest else found
    last = args.last or (len(found) if args.json else DEFAULT_LAST)
    shown = order[::-1][:last]
    if args.json:
        print_json([_document(request) for request in shown])
    elif found:
        print("\n".join(_lines(found, shown, now, "slowest" if args.slowest else "newest")))
    else:
        print(f"No finished request of {plain(args.name)} is recorded yet.")
    if lost := found[-1].dropped if found else 0:
        complain(f"note: its process lost {lost:,} records of steps and requests: they are missing here")
    return 0


def _steps(args: argparse.Namespace) -> int:
    now = time.time()
    found = open_fleet(args).steps(args.name, _moment(args.since, now), max(args.last or 0, DEFAULT_STEPS))
    shown = found[::-1][: args.last or (len(found) if args.json else DEFAULT_LAST)]
    if args.json:
        print_json([step_document(step) for step in shown])
    elif found:
        print("\n".join(step_lines(found, shown, now)))
    else:
        print(f"No step of {plain(args.name)} is recorded yet.")
    return 0


def _prefixes(args: argparse.Namespace) -> int:
    if args.last is not None:
        raise UsageError("--prefixes is about all requests: give --since instead of --last")
    use = open_fleet(args).cached_prefixes(args.name, _moment(args.since, time.time()))
    if args.json:
        print_json(prefixes_document(use))
    elif use.requests:
        print("\n".join(prefixes_lines(use)))
    else:
        print(f"No finished request of {plain(args.name)} with known cached tokens is recorded yet.")
    return 0


def _moment(text: str | None, now: float) -> float | None:
    """``--since`` as Unix seconds. Raises UsageError."""
    if text is None:
        return None
    try:
        return moment_from(text, now)
    except ValueError as error:
        raise UsageError(f"--since {text}: {error}") from error


def _document(request: FinishedRequest) -> Document:
    """One request; times in seconds, null for what is unknown or was not reached."""
    tokens, stages = "prompt_tokens output_tokens cached_tokens", "queue_seconds prefill_seconds decode_seconds"
    return fields(request, f"id arrived_at {tokens} {stages} ttft_seconds e2e_seconds preemptions finish_reason")


def _lines(found: Sequence[FinishedRequest], shown: Sequence[FinishedRequest], now: float, order: str) -> list[str]:
    """Quantiles over all that were found, and a line for each that is shown."""
    first = clock(min(request.arrived_at for request in found), now, seconds=True)
    lines = [f"{len(found):,} finished requests are recorded since {first}; exact quantiles of these:", ""]
    lines.append(f"  {'':<10}" + "".join(f"{f'p{q * 100:g}':>9}" for q in QUANTILES) + f"{'MAX':>9}")
    for name in _STAGES:
        values = [value for request in found if (value := getattr(request, name)) is not None]
        if values:
            cells = [*(exact_quantile(values, q) for q in QUANTILES), max(values)]
            lines.append(f"  {name.removesuffix('_seconds'):<10}" + "".join(f"{seconds(one):>9}" for one in cells))
    lines += ["", "".join(f"{title:<{width}}" for title, width in _COLUMNS)]
    for request in shown:
        cells_shown = zip(_cells(request, now), _COLUMNS, strict=True)
        lines.append("".join(f"{cell:<{width}}" for cell, (_, width) in cells_shown).rstrip())
    if len(shown) < len(found):
        lines.append(f"the {len(shown):,} {order}; --last N shows more")
    return lines


def _cells(request: FinishedRequest, now: float) -> tuple[str, ...]:
    return (
        clock(request.arrived_at, now, seconds=True),
        count(request.prompt_tokens),
        count(request.cached_tokens),
        count(request.output_tokens),
        *(seconds(getattr(request, name)) for name in _STAGES),
        count(request.preemptions),
        plain(request.finish_reason) or UNKNOWN,
        plain(request.id, LONGEST_ID) or UNKNOWN,
    )
