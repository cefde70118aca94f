"""A server's engine steps, as ``requests --steps`` prints them."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_console.cli.output import Document
from vllm_console.history.probe_records import Step
from vllm_console.metrics.quantile import exact_quantile
from vllm_console.text import clock, count, percent, seconds

QUANTILES = (0.5, 0.9, 0.99)
_COLUMNS = (("AT", 16), ("RUN", 6), ("WAIT", 6), ("KV CACHE", 10), ("PROMPT", 8), ("DECODE", 8), ("STEP TIME", 11),
            ("PREEMPT", 9), ("LOOKED UP", 11), ("CACHED", 0))  # fmt: skip


def step_document(step: Step) -> Document:
    """One step; null for what vLLM does not report, and for the intervals of a step that ended none."""
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


def step_lines(found: Sequence[Step], shown: Sequence[Step], now: float) -> list[str]:
    """Quantiles over all that were read, and a line for each that is shown."""
    first = clock(found[0].at, now, seconds=True)
    lines = [f"{len(found):,} steps since {first}; exact quantiles of these:", ""]
    lines.append(f"  {'':<12}" + "".join(f"{f'p{q * 100:g}':>9}" for q in QUANTILES) + f"{'MAX':>9}")
    took = [step.shortest_interval for step in found if step.shortest_interval is not None]
    batches = [float(step.running) for step in found if step.running is not None]
    for name, values, text in (("step time", took, seconds), ("running", batches, count)):
        if values:
            cells = [*(exact_quantile(values, q) for q in QUANTILES), max(values)]
            lines.append(f"  {name:<12}" + "".join(f"{text(one):>9}" for one in cells))
    lines += ["", "".join(f"{title:<{width}}" for title, width in _COLUMNS)]
    for step in shown:
        cells_shown = zip(_cells(step, now), _COLUMNS, strict=True)
        lines.append("".join(f"{cell:<{width}}" for cell, (_, width) in cells_shown).rstrip())
    if len(shown) < len(found):
        lines.append(f"the {len(shown):,} newest; --last N shows more")
    return lines


def _cells(step: Step, now: float) -> tuple[str, ...]:
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
