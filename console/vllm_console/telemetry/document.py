"""The JSON contract of ``vllm-console metrics``: one sample as a document for scripts."""

from __future__ import annotations

from typing import Any

from vllm_console.telemetry.model import COUNTERS, GAUGES, LATENCIES, EngineSample, Histogram, Sample
from vllm_console.telemetry.window import combine, in_order, quantiles

_FIGURES = tuple(name for name in (*GAUGES, *COUNTERS) if name != "requests_finished_total")
"""What of a sample stands in the document under its own name."""


def metrics_document(sample: Sample) -> dict[str, Any]:
    """A sample as JSON values: counters and latencies since the start, gauges as they are; null is 'not reported'.

    Running, waiting and counters are added over engines, KV usage (0 to 1) is their mean, latencies (seconds) come
    from the added histograms. ``engines`` maps each engine's label to the same keys without ``engines``; there
    ``kv_cache_tokens`` is an even share of the sum, for a sample keeps no other (and vLLM told no other before 0.24).
    """
    engines = in_order(sample.engines)
    tokens = sample.kv_cache_tokens
    share = tokens // len(engines) if tokens is not None and engines else None
    document = _document(combine(engines.values()), tokens)
    document["engines"] = {label: _document(engine, share) for label, engine in engines.items()}
    return document


def _document(engine: EngineSample, kv_cache_tokens: int | None) -> dict[str, Any]:
    document: dict[str, Any] = {name: _plain_number(getattr(engine, name)) for name in _FIGURES}
    document["kv_cache_tokens"] = kv_cache_tokens
    for key in LATENCIES:
        document[f"{key}_seconds"] = _latency(engine.histograms.get(key))
    return document


def _latency(histogram: Histogram | None) -> dict[str, Any] | None:
    if histogram is None:
        return None
    figures = quantiles(histogram)
    return {
        "count": _plain_number(histogram.count),
        "sum": histogram.sum,
        "p50": figures.p50,
        "p90": figures.p90,
        "p99": figures.p99,
    }


def _plain_number(value: float | None) -> int | float | None:
    """Counts without a fraction as integers, as a person would write them."""
    return int(value) if value is not None and value.is_integer() else value
