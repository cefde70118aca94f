"""What one look at a server's ``/metrics`` comes to, whatever its vLLM version calls things."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Histogram:
    """A Prometheus histogram: upper bounds in seconds or tokens (the last is +Inf) and cumulative counts."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    sum: float

    @property
    def count(self) -> float:
        """How many observations there are."""
        return self.counts[-1] if self.counts else 0.0


@dataclass(frozen=True, slots=True)
class EngineSample:
    """One engine (data-parallel rank) at one moment. None is 'not reported', never zero.

    Counters are totals since the engine started; ``kv_cache_usage`` is a share from 0 to 1; ``histograms`` is keyed
    by the names in `LATENCIES` and `LENGTHS`.
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
    histograms: Mapping[str, Histogram] = field(default_factory=dict)


GAUGES = ("requests_running", "requests_waiting", "kv_cache_usage")
"""Fields of `EngineSample` that go up and down."""

COUNTERS = (
    "preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "requests_finished_total",
)
"""Fields of `EngineSample` that only grow while the engine lives."""

LATENCIES = ("ttft", "itl", "e2e", "queue", "prefill", "decode")
"""Keys of latency histograms, in seconds."""

LENGTHS = ("prompt_tokens", "generation_tokens")
"""Keys of length histograms, in tokens."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a server: when (Unix seconds), each engine by its label, and the cache's size if it was told."""

    at: float
    engines: Mapping[str, EngineSample]
    kv_cache_tokens: int | None = None
    model_name: str | None = None


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A latency over a window: how many observations, their mean and estimated quantiles, in seconds."""

    count: float
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Window:
    """What happened between two looks, summed over engines. Rates per second; shares from 0 to 1.

    ``kv_cache_usage`` is the mean over engines now; ``kv_cache_usage_max`` the fullest engine.
    ``preemption_share`` is preemptions per request finished. ``latencies`` is keyed as in `LATENCIES`.
    None is 'not reported' or 'not enough data'.
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
    prompt_tokens_per_second: float | None = None
    generation_tokens_per_second: float | None = None
    requests_per_second: float | None = None
    latencies: Mapping[str, Quantiles] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Series:
    """Evenly spaced points for charts, oldest first; the last ends at ``end``. None where nothing was reported.

    ``values`` is keyed ``kv_cache_usage`` (maximum within the step), ``preemptions`` (count within the step),
    ``requests_running``, ``requests_waiting``, ``generation_tokens_per_second``, ``prompt_tokens_per_second``,
    ``requests_per_second``, ``ttft_p99`` and ``itl_p99`` (seconds).
    """

    end: float
    step: float
    values: Mapping[str, tuple[float | None, ...]]


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a start-up: name (``process``, ``config``, ``weights``, ``kv cache``, …) and duration in seconds.

    ``seconds`` is None while it runs; ``detail`` is a short figure (``61 %``, ``7.6 GiB``).
    """

    name: str
    started_at: float
    seconds: float | None = None
    detail: str = ""
