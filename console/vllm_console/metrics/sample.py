"""One scrape of a server's ``/metrics``, independent of its vLLM version's metric names."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from vllm_console.metrics.quantile import Quantiles


class Histogram(msgspec.Struct, frozen=True):
    """A Prometheus histogram: upper bounds in seconds or tokens (the last is +Inf) and cumulative counts."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    sum: float

    @property
    def count(self) -> float:
        """How many observations there are."""
        return self.counts[-1] if self.counts else 0.0


class EngineSample(msgspec.Struct, frozen=True):
    """One engine (data-parallel rank) at one moment. None means not reported, never zero.

    Counters are totals since the engine started; ``kv_cache_usage`` is a fraction from 0 to 1; ``histograms`` is keyed
    by the names in `LATENCIES` and `LENGTHS`, `MAX_TOKENS_PARAM` and `ACCEPTED`. The history stores numbers in the
    order of the fields.
    """

    requests_running: float | None = None
    requests_waiting: float | None = None
    kv_cache_usage: float | None = None
    preemptions_total: float | None = None
    prefix_cache_queries_total: float | None = None
    prefix_cache_hits_total: float | None = None
    prompt_tokens_total: float | None = None
    generation_tokens_total: float | None = None
    requests_finished_total: float | None = None
    histograms: Mapping[str, Histogram] = msgspec.field(default_factory=dict)


COUNTERS = tuple(name for name in EngineSample.__struct_fields__ if name.endswith("_total"))
"""Counter fields of `EngineSample`: they only grow while the engine lives."""

GAUGES = tuple(name for name in EngineSample.__struct_fields__ if name not in (*COUNTERS, "histograms"))
"""Gauge fields of `EngineSample`."""

LATENCIES = ("ttft", "itl", "e2e", "queue", "prefill", "decode")
"""Keys of latency histograms, in seconds."""

LENGTHS = ("prompt_tokens", "generation_tokens")
"""Keys of length histograms, in tokens."""

MAX_TOKENS_PARAM = "max_tokens"
"""Key of the histogram of requested output lengths. vLLM counts a request without ``max_tokens`` with what its prompt
leaves of the context."""

ACCEPTED = "accepted_tokens"
"""Key of the histogram of accepted draft tokens. Its bounds are 0, 1, … up to the maximum draft length minus one."""


class Responses(msgspec.Struct, frozen=True):
    """Responses of the API server to requests that make the model compute, by HTTP status class.

    ``ok`` is 2xx, ``refused`` 4xx, ``failed`` 5xx. ``unauthorized`` (401) is counted from the log's access lines, since
    vLLM's metrics omit it; None if nobody reads the log. In a sample these are totals, in a window what it added.
    """

    ok: float = 0.0
    refused: float = 0.0
    failed: float = 0.0
    unauthorized: float | None = None

    @property
    def all_refused(self) -> float:
        """Refused requests, as far as known."""
        return self.refused + (self.unauthorized or 0.0)

    @property
    def total(self) -> float:
        """All answered requests, as far as known."""
        return self.ok + self.all_refused + self.failed


class Sample(msgspec.Struct, frozen=True):
    """One scrape of a server: when (Unix seconds), each engine by its label, and the cache as far as reported.

    ``responses`` is None until the first request is counted. ``prefix_caching`` is whether prefix caching is on, as
    vLLM configured itself. ``prefix_step`` is its granularity: no shorter prefix is found.
    """

    at: float
    engines: Mapping[str, EngineSample]
    kv_cache_tokens: int | None = None
    model_name: str | None = None
    prefix_caching: bool | None = None
    prefix_step: int | None = None
    responses: Responses | None = None


class Speculation(msgspec.Struct, frozen=True):
    """Results of speculative decoding.

    ``acceptance_length`` is the mean number of tokens per verified draft: one plus the accepted ones (as in vLLM's
    log). ``by_position`` is the fraction of drafts of which the first token was accepted, the first two, and so on.
    """

    drafts_per_second: float
    acceptance_length: float
    by_position: tuple[float, ...]


class Window(msgspec.Struct, frozen=True):
    """What happened between two samples, summed over engines. Rates are per second; shares are from 0 to 1.

    ``kv_cache_usage`` is the mean over engines now, ``kv_cache_usage_max`` that of the fullest engine.
    ``preemption_share`` is preemptions per finished request, or per request running at the end if those are more; it
    can exceed 1. ``latencies`` is keyed as in `LATENCIES`; TTFT counts requests at their first token, the others except
    ITL when requests end, so none includes a request that still waits. ``longest_wait`` is a lower bound, in seconds,
    of the longest wait in the queue (see `waiting`). ``prefix_caching`` and ``prefix_step`` are those of the later
    sample. ``speculation`` is None without drafts. None means not reported or not enough data.
    """

    start: float
    end: float
    requests_running: float | None = None
    requests_waiting: float | None = None
    kv_cache_usage: float | None = None
    kv_cache_usage_max: float | None = None
    kv_cache_tokens: int | None = None
    preemptions_per_minute: float | None = None
    preemption_share: float | None = None
    prefix_hit_rate: float | None = None
    prefix_caching: bool | None = None
    prefix_step: int | None = None
    prompt_tokens_per_second: float | None = None
    generation_tokens_per_second: float | None = None
    requests_per_second: float | None = None
    longest_wait: float | None = None
    speculation: Speculation | None = None
    responses: Responses | None = None
    latencies: Mapping[str, Quantiles] = msgspec.field(default_factory=dict)


class Series(msgspec.Struct, frozen=True, eq=False):
    """Evenly spaced points for charts, oldest first; the last ends at ``end``. None means not reported.

    Compared by identity, so that charts can be cached without comparing their points.

    ``values`` is keyed ``kv_cache_usage`` (maximum within the step), ``preemptions`` (count within the step),
    ``requests_running``, ``requests_waiting``, ``generation_tokens_per_second``, ``prompt_tokens_per_second``,
    ``requests_per_second``, ``ttft_p50``, ``ttft_p99``, ``itl_p50`` and ``itl_p99`` (seconds; a point only known to lie
    beyond one end of its bucket has that end, and ``ttft_p99_bound`` or ``itl_p99_bound`` is 1) and
    ``acceptance_length`` (see `Speculation`).
    """

    end: float
    step: float
    values: Mapping[str, tuple[float | None, ...]]
    as_of: float | None = None
    """Set for the last points of a server that no longer reports: when that was (Unix seconds)."""
    recorded_from: float | None = None
    """When the oldest stored sample was taken (Unix seconds); None if unknown."""
    loading: bool = False
    """Whether part of it is still being read."""

    @property
    def start(self) -> float:
        """When the first point begins (Unix seconds)."""
        return self.end - self.step * max((len(values) for values in self.values.values()), default=0)
