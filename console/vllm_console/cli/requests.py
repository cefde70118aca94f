"""``vllm-console requests NAME``: a server's finished requests with the time in each stage; also steps and prefixes."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

from msgspec.structs import asdict

from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.options import add_json, count_from
from vllm_console.cli.output import Document, complain, fields, print_json, table_lines
from vllm_console.history.prefix_use import PrefixUse, StillCached
from vllm_console.history.probe_records import EngineStep, FinishedRequest
from vllm_console.history.time_view import moment_from
from vllm_console.metrics.quantile import exact_quantile
from vllm_console.text import UNKNOWN, clock, count, percent, plain, seconds
from vllm_launchers.errors import UsageError
from vllm_launchers.units import counted

DEFAULT_LAST = 20
DEFAULT_STEPS = 1000
"""Steps read without ``--last``, about twenty seconds."""

QUANTILES = (0.5, 0.9, 0.99)
LONGEST_ID = 30
_STAGES = ("queue_seconds", "prefill_seconds", "decode_seconds", "ttft_seconds", "e2e_seconds")
_REQUEST_COLUMNS = (
    ("ENDED", 16), ("PROMPT", 8), ("CACHED", 8), ("OUTPUT", 8), ("QUEUE", 8), ("PREFILL", 9), ("DECODE", 8),
    ("TTFT", 8), ("E2E", 8), ("PREEMPT", 9), ("REASON", 8), ("ID", 0),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "List finished requests of a server's current or last run, the last ended first. The probe records them, "
        "without any text; requests of clients that disconnected are missing."
    )
    parser.add_argument("name")
    parser.add_argument(
        "--last", type=count_from, metavar="N",
        help=f"at most N (default: {DEFAULT_LAST}; with --json all, or {DEFAULT_STEPS} steps)",
    )  # fmt: skip
    parser.add_argument(
        "--since", metavar="TIME", help='only those that ended after this time, of any run, e.g. "03:10"'
    )
    view = parser.add_mutually_exclusive_group()
    view.add_argument("--slowest", action="store_true", help="sort by end-to-end time, slowest first")
    view.add_argument("--steps", action="store_true", help="engine steps instead: batches, tokens, step times")
    view.add_argument("--prefixes", action="store_true", help="prefix cache hits instead, by prompt length")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the requests, steps or prefixes."""
    if args.steps:
        return _steps(args)
    if args.prefixes:
        return _prefixes(args)
    now = time.time()
    found = open_fleet(args).probes.requests(args.name, _moment(args.since, now))
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
        complain(f"note: the probe dropped {counted(lost, 'record')} of steps and requests, which are missing here")
    return 0


def _steps(args: argparse.Namespace) -> int:
    now = time.time()
    found = open_fleet(args).probes.steps(args.name, _moment(args.since, now), max(args.last or 0, DEFAULT_STEPS))
    shown = found[::-1][: args.last or (len(found) if args.json else DEFAULT_LAST)]
    if args.json:
        print_json([step_document(step) for step in shown])
    elif found:
        print("\n".join(engine_step_lines(found, shown, now)))
    else:
        print(f"No step of {plain(args.name)} is recorded yet.")
    return 0


def _prefixes(args: argparse.Namespace) -> int:
    if args.last is not None:
        raise UsageError("--prefixes is about all requests: give --since instead of --last")
    use = open_fleet(args).probes.cached_prefixes(args.name, _moment(args.since, time.time()))
    if args.json:
        print_json(prefixes_document(use))
    elif use.requests:
        print("\n".join(prefixes_lines(use)))
    else:
        print(f"No finished request of {plain(args.name)} with known cached tokens is recorded yet.")
    return 0


def _moment(text: str | None, now: float) -> float | None:
    """Parse ``--since`` into Unix seconds. Raises UsageError."""
    if text is None:
        return None
    try:
        return moment_from(text, now)
    except ValueError as error:
        raise UsageError(f"--since {text}: {error}") from error


def _document(request: FinishedRequest) -> Document:
    """One request; times in seconds, null for what is unknown or was not reached."""
    tokens, stages = "prompt_tokens output_tokens cached_tokens", "queue_seconds prefill_seconds decode_seconds"
    return fields(
        request, f"id arrived_at finished_at {tokens} {stages} ttft_seconds e2e_seconds preemptions finish_reason"
    )


def _lines(found: Sequence[FinishedRequest], shown: Sequence[FinishedRequest], now: float, order: str) -> list[str]:
    """Quantiles over all ``found`` requests, and a line per ``shown`` one."""
    first = clock(min(request.finished_at for request in found), now, seconds=True)
    lines = [f"{counted(len(found), 'finished request')} recorded since {first}; exact quantiles of these:", ""]
    stages = [(name, [value for one in found if (value := getattr(one, name)) is not None]) for name in _STAGES]
    lines += _quantile_lines(
        10, [(name.removesuffix("_seconds").replace("ttft", "TTFT"), values, seconds) for name, values in stages]
    )
    lines += ["", *table_lines(_REQUEST_COLUMNS, [_cells(request, now) for request in shown])]
    if len(shown) < len(found):
        lines.append(f"the {len(shown):,} {order}; --last N shows more")
    return lines


def _quantile_lines(width: int, rows: Sequence[tuple[str, list[float], Callable[[float], str]]]) -> list[str]:
    """Exact quantiles of each row's values, with a heading. Rows without values are left out."""
    lines = [f"  {'':<{width}}" + "".join(f"{f'p{q * 100:g}':>9}" for q in QUANTILES) + f"{'MAX':>9}"]
    for name, values, text in rows:
        if values:
            cells = [*(exact_quantile(values, q) for q in QUANTILES), max(values)]
            lines.append(f"  {name:<{width}}" + "".join(f"{text(one):>9}" for one in cells))
    return lines


def _cells(request: FinishedRequest, now: float) -> tuple[str, ...]:
    return (
        clock(request.finished_at, now, seconds=True),
        count(request.prompt_tokens),
        count(request.cached_tokens),
        count(request.output_tokens),
        *(seconds(getattr(request, name)) for name in _STAGES),
        count(request.preemptions),
        plain(request.finish_reason) or UNKNOWN,
        plain(request.id, LONGEST_ID) or UNKNOWN,
    )


_STEP_COLUMNS = (("AT", 16), ("RUN", 6), ("WAIT", 6), ("KV CACHE", 10), ("PROMPT", 8), ("DECODE", 8), ("STEP TIME", 11),
            ("PREEMPT", 9), ("LOOKED UP", 11), ("CACHED", 0))  # fmt: skip


def step_document(step: EngineStep) -> Document:
    """One step; null for what vLLM does not report, and for the intervals of a step without any."""
    return {
        "at": step.at,
        "engine": step.engine,
        "requests_running": step.running,
        "requests_waiting": step.waiting,
        "kv_cache_usage": step.kv_usage,
        "prompt_tokens": step.prompt_tokens,
        "generation_tokens": step.generation_tokens,
        "prefill_requests": step.context_requests,
        "prefill_tokens": step.context_tokens,
        "decode_requests": step.generation_requests,
        "intervals": step.intervals,
        "shortest_interval_seconds": step.shortest_interval,
        "longest_interval_seconds": step.longest_interval,
        "preemptions": step.preempted,
        "prefix_cache_queries": step.cache_queries,
        "prefix_cache_hits": step.cache_hits,
        "evicted_blocks_sampled": step.evictions,
    }


def engine_step_lines(found: Sequence[EngineStep], shown: Sequence[EngineStep], now: float) -> list[str]:
    """Quantiles over all ``found`` steps, and a line per ``shown`` one."""
    first = clock(found[0].at, now, seconds=True)
    lines = [f"{counted(len(found), 'step')} since {first}; exact quantiles of these:", ""]
    took = [step.shortest_interval for step in found if step.shortest_interval is not None]
    batches = [float(step.running) for step in found if step.running is not None]
    lines += _quantile_lines(12, [("step time", took, seconds), ("running", batches, count)])
    lines += ["", *table_lines(_STEP_COLUMNS, [_step_cells(step, now) for step in shown])]
    if len(shown) < len(found):
        lines.append(f"the {len(shown):,} newest; --last N shows more")
    return lines


def _step_cells(step: EngineStep, now: float) -> tuple[str, ...]:
    return (
        clock(step.at, now, seconds=True),
        count(step.running),
        count(step.waiting),
        percent(step.kv_usage),
        count(step.prompt_tokens if step.context_tokens is None else step.context_tokens),
        count(step.generation_tokens),
        seconds(step.shortest_interval),
        count(step.preempted),
        count(step.cache_queries),
        count(step.cache_hits),
    )


_PREFIX_COLUMNS = (
    ("PROMPT TOKENS", 16),
    ("REQUESTS", 10),
    ("WITH HITS", 11),
    ("TOKENS", 12),
    ("CACHED", 12),
    ("HIT RATE", 10),
)


def prefixes_document(use: PrefixUse) -> Document:
    """Prefix cache use as JSON values."""
    classes = [{**asdict(one), "hit_rate": one.hit_rate} for one in use.classes]
    return {
        "requests": use.requests,
        "requests_with_hits": use.hits,
        "requests_unknown": use.unknown,
        "prompt_tokens": use.prompt_tokens,
        "cached_tokens": use.cached_tokens,
        "hit_rate": use.hit_rate,
        "by_prompt_tokens": [
            {"from": one.pop("least"), "to": one.pop("most"), "requests_with_hits": one.pop("hits"), **one}
            for one in classes
        ],
        "resumed": asdict(use.resumed) if use.resumed is not None else None,
    }


def prefixes_lines(use: PrefixUse) -> list[str]:
    """A line per prompt length class, and what resumed requests still found cached."""
    lines = [f"{percent(use.hit_rate)} of the prompt tokens of {_requests(use.requests)} were cached:", ""]
    rows = [
        (f"{count(one.least)}-{count(one.most)}", count(one.requests), count(one.hits), count(one.prompt_tokens),
         count(one.cached_tokens), percent(one.hit_rate))
        for one in use.classes
    ]  # fmt: skip
    lines += table_lines(_PREFIX_COLUMNS, rows)
    lines.append("")
    if use.unknown:
        lines.append(f"{count(use.unknown)} more ended before their first token, or their cached tokens are unknown")
    lines.append(f"resumed after a preemption: {resumed_text(use.resumed)}")
    return lines


def _requests(number: int) -> str:
    return f"{count(number)} {'request' if number == 1 else 'requests'}"


def resumed_text(resumed: StillCached | None) -> str:
    """What resumed requests still found in the cache."""
    if resumed is None:
        return "none known"
    found = f"{count(resumed.cached_tokens)} of {count(resumed.tokens)} tokens"
    return f"{_requests(resumed.requests)} found {found} still cached"
