"""The content of ``/metrics``: vLLM 0.33's families, labels and buckets, filled from iteration reports."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from vllm_launchers.engine_model.core import Core, StepReport
from vllm_launchers.engine_model.scheduler import FinishReason, Request
from vllm_launchers.simulated.memory import MemoryPlan
from vllm_launchers.simulated.settings import EngineSettings

LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
           1920.0, 7680.0)  # fmt: skip
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
               80.0, 160.0, 640.0, 2560.0)  # fmt: skip
BETWEEN_TOKENS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
                  80.0)  # fmt: skip
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
CHOICES = (1, 2, 5, 10, 20)

_LABELS = ("model_name", "engine")
_FINISHED = ("stop", "length", "abort", "error", "repetition")
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
_TIERS = ("device", "host", "p2p", "disk", "external_unspecified")

_COUNTERS: Mapping[str, str] = {
    "prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens found in the prefix cache.",
    "external_prefix_cache_queries": "Tokens looked up in another instance's prefix cache.",
    "external_prefix_cache_hits": "Tokens found in another instance's prefix cache.",
    "mm_cache_queries": "Items looked up in the multi-modal cache.",
    "mm_cache_hits": "Items found in the multi-modal cache.",
    "num_preemptions": "Preemptions so far.",
    "prompt_tokens": "Prompt tokens processed.",
    "prompt_tokens_cached": "Prompt tokens that came from a cache.",
    "generation_tokens": "Tokens generated.",
    "estimated_flops_per_gpu": "Estimated floating point operations per GPU.",
    "estimated_read_bytes_per_gpu": "Estimated bytes read from memory per GPU.",
    "estimated_write_bytes_per_gpu": "Estimated bytes written to memory per GPU.",
}
_GAUGES: Mapping[str, str] = {
    "num_requests_running": "Requests in the batch.",
    "num_requests_waiting": "Requests waiting to be scheduled.",
    "kv_cache_usage_perc": "Share of the KV cache in use; 1 is all of it.",
}


def tokens_buckets(max_model_len: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, … up to the context length, as in vLLM."""
    buckets: list[int] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale > max_model_len:
                return tuple(buckets)
            buckets.append(step * scale)
        scale *= 10


def _histograms(max_model_len: int) -> Mapping[str, tuple[str, Sequence[float]]]:
    lengths = tokens_buckets(max_model_len)
    return {
        "request_prompt_tokens": ("Prompt tokens per request.", lengths),
        "request_generation_tokens": ("Generated tokens per request.", lengths),
        "iteration_tokens_total": ("Tokens per engine step.", ITERATION_TOKENS),
        "request_max_num_generation_tokens": ("Tokens of the longest of a request's choices.", lengths),
        "request_params_n": ("The request parameter n.", CHOICES),
        "request_params_max_tokens": ("The request parameter max_tokens.", lengths),
        "time_to_first_token_seconds": ("Time to the first token.", FIRST_TOKEN),
        "request_time_per_output_token_seconds": ("A request's mean time per output token.", BETWEEN_TOKENS),
        "e2e_request_latency_seconds": ("Time from a request's arrival to its end.", LATENCY),
        "request_queue_time_seconds": ("Time spent waiting.", LATENCY),
        "request_inference_time_seconds": ("Time spent running.", LATENCY),
        "request_prefill_time_seconds": ("Time spent in prefill.", LATENCY),
        "request_decode_time_seconds": ("Time spent in decode.", LATENCY),
        "request_num_preemptions": ("How often a request was preempted.", PREEMPTIONS),
        "request_prefill_kv_computed_tokens": ("Prompt tokens computed, cached ones left out.", lengths),
    }


class Metrics:
    """The registry of one server. If ``statistics`` is false it has no ``vllm:*`` families, as with
    ``--disable-log-stats``.

    ``totals``: a body of ``/metrics`` whose counts are added to all of vLLM's counters and histograms.
    """

    def __init__(
        self, settings: EngineSettings, plan: MemoryPlan, *, statistics: bool = True, totals: str = ""
    ) -> None:
        self.registry = CollectorRegistry()
        self._rendered = _CountedOn(self.registry, totals) if totals else self.registry
        GCCollector(self.registry)
        PlatformCollector(self.registry)
        ProcessCollector(registry=self.registry)
        self._responses = Counter(
            "http_requests",
            "Total number of requests by method, status and handler.",
            ("handler", "method", "status"),
            registry=self.registry,
        )
        self.engines: tuple[EngineMetrics, ...] = ()
        self._adapters: Gauge | None = None
        if statistics:
            families = _Families(self.registry, plan.max_model_len)
            name = settings.served_names[0]
            ranks = range(settings.data_parallel)
            self.engines = tuple(EngineMetrics(families, name, str(rank)) for rank in ranks)
            _cache_info(self.registry, settings, plan)
            rejections = Counter(
                "vllm:admission_rejections",
                "Requests turned away by a queue limit.",
                ("model_name", "reason"),
                registry=self.registry,
            )
            for reason in ("max_num_queued_reqs", "max_num_queued_tokens"):
                rejections.labels(name, reason)

    def answered(self, handler: str, method: str, status: int) -> None:
        """Count an HTTP request to a route (``none``: unknown)."""
        self._responses.labels(handler, method, f"{status // 100}xx").inc()

    def adapters(self, names: str, most: int, now: float) -> None:
        """Record the LoRA adapters that have requests ``now`` (Unix seconds); up to ``most`` may be in one batch."""
        if not self.engines:
            return
        if self._adapters is None:
            labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
            text = "Running stats on lora requests."
            self._adapters = Gauge("vllm:lora_requests_info", text, labels, registry=self.registry)
        self._adapters.labels(str(most), names, names).set(now)

    def render(self) -> bytes:
        """The body of ``/metrics`` in Prometheus text format."""
        return generate_latest(self._rendered)


_TOTALS = ("counter", "histogram")


class _CountedOn(CollectorRegistry):
    """A registry whose totals began earlier: the earlier counts are added when it is collected."""

    def __init__(self, registry: CollectorRegistry, body: str) -> None:
        super().__init__()
        self._registry = registry
        self._before = {
            _series(sample): sample.value
            for family in text_string_to_metric_families(body)
            if family.type in _TOTALS
            for sample in family.samples
            if not sample.name.endswith("_created")  # a time, not a total
        }

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            if family.type in _TOTALS and family.name.startswith("vllm:"):
                family.samples = [
                    sample._replace(value=sample.value + self._before.get(_series(sample), 0.0))
                    for sample in family.samples
                ]
            yield family


def _series(sample: Sample) -> tuple[str, frozenset[tuple[str, str]]]:
    return sample.name, frozenset(sample.labels.items())


class _IntervalCounts:
    def __init__(self) -> None:
        self.by_bucket = [0] * (len(BETWEEN_TOKENS) + 1)
        self.seconds = 0.0

    def add(self, itls: Sequence[float]) -> None:
        """Count one iteration's inter-token latencies, most of which are equal."""
        for seconds, count in Counts(itls).items():
            self.by_bucket[bisect_left(BETWEEN_TOKENS, seconds)] += count
            self.seconds += count * seconds


class _Intervals(Collector):
    """The inter-token latency histogram. The client library's observes values one by one, which for a large batch takes
    longer than the engine model itself."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._made = time.time()
        self._series: dict[tuple[str, ...], _IntervalCounts] = {}
        registry.register(self)

    def labels(self, *values: str) -> _IntervalCounts:
        return self._series.setdefault(values, _IntervalCounts())

    def collect(self) -> Iterator[Metric]:
        """The histogram in the format of `prometheus_client.Histogram`."""
        name = "vllm:inter_token_latency_seconds"
        family = HistogramMetricFamily(name, "Time between two tokens.", labels=_LABELS)
        for values, one in self._series.items():
            counts = accumulate(map(float, one.by_bucket))
            buckets = zip(map(floatToGoString, (*BETWEEN_TOKENS, math.inf)), counts, strict=True)
            family.add_metric(values, list(buckets), one.seconds)
            family.add_sample(f"{name}_created", dict(zip(_LABELS, values, strict=True)), self._made)
        yield family


class _Families:
    def __init__(self, registry: CollectorRegistry, max_model_len: int) -> None:
        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(f"vllm:{name}", text, (*_LABELS, *more), registry=registry)

        def gauge(name: str, text: str, *more: str) -> Gauge:
            return Gauge(f"vllm:{name}", text, (*_LABELS, *more), registry=registry)

        self.counters = {name: counter(name, text) for name, text in _COUNTERS.items()}
        self.gauges = {name: gauge(name, text) for name, text in _GAUGES.items()}
        self.waiting = gauge("num_requests_waiting_by_reason", "Waiting requests by reason.", "reason")
        self.sleep = gauge("engine_sleep_state", "Whether the engine sleeps, and how.", "sleep_state")
        self.sources = counter("prompt_tokens_by_source", "Prompt tokens by where they came from.", "source")
        self.tiers = counter("prompt_tokens_cached_by_source", "Cached prompt tokens by cache tier.", "source")
        self.success = counter("request_success", "Requests ended, by reason.", "finished_reason")
        self.histograms = {
            name: Histogram(f"vllm:{name}", text, _LABELS, buckets=buckets, registry=registry)
            for name, (text, buckets) in _histograms(max_model_len).items()
        }
        self.intervals = _Intervals(registry)


class EngineMetrics:
    """The series of one data-parallel rank."""

    def __init__(self, families: _Families, model: str, engine: str) -> None:
        labels = (model, engine)
        self._counters = {name: family.labels(*labels) for name, family in families.counters.items()}
        self._gauges = {name: family.labels(*labels) for name, family in families.gauges.items()}
        self._histograms = {name: family.labels(*labels) for name, family in families.histograms.items()}
        self._intervals = families.intervals.labels(*labels)
        self._sources = {name: families.sources.labels(*labels, name) for name in _SOURCES}
        self._tiers = {name: families.tiers.labels(*labels, name) for name in _TIERS}
        self._success = {name: families.success.labels(*labels, name) for name in _FINISHED}
        self._waiting = families.waiting.labels(*labels, "capacity")
        families.waiting.labels(*labels, "deferred")
        self._sleep = [families.sleep.labels(*labels, state) for state in ("awake", "weights_offloaded", "discard_all")]
        self.slept(None)

    def state(self, core: Core) -> None:
        """Set the gauges."""
        waiting = len(core.scheduler.waiting)
        self._gauges["num_requests_running"].set(len(core.scheduler.running))
        self._gauges["num_requests_waiting"].set(waiting)
        self._waiting.set(waiting)
        self._gauges["kv_cache_usage_perc"].set(core.scheduler.pool.usage)

    def slept(self, level: int | None) -> None:
        """Set the sleep state; None means awake. Level 0 sets none of the gauges, as in vLLM."""
        for gauge, shown in zip(self._sleep, (None, 1, 2), strict=True):
            gauge.set(1.0 if level == shown else 0.0)

    def step(self, report: StepReport) -> None:
        """Count one iteration."""
        counters, histograms = self._counters, self._histograms
        counters["generation_tokens"].inc(len(report.advanced))
        if report.batch.preempted:
            counters["num_preemptions"].inc(report.batch.preempted)
        if report.batch.cache_queries:
            counters["prefix_cache_queries"].inc(report.batch.cache_queries)
            counters["prefix_cache_hits"].inc(report.batch.cache_hits)
            self._tiers["device"].inc(report.batch.cache_hits)
        for request in report.prefilled:
            cached = request.cached or 0
            counters["prompt_tokens"].inc(request.prompt_length)
            counters["prompt_tokens_cached"].inc(cached)
            self._sources["local_compute"].inc(request.prompt_length - cached)
            self._sources["local_cache_hit"].inc(cached)
        if report.advanced:
            # As in vLLM, a prompt's uncached tokens all count when its first token arrives.
            computed = sum(request.prompt_length - (request.cached or 0) for request in report.prefilled)
            histograms["iteration_tokens_total"].observe(computed + len(report.advanced))
        for seconds in report.ttfts:
            histograms["time_to_first_token_seconds"].observe(seconds)
        self._intervals.add(report.itls)
        for request in report.finished:
            self._finished(request)

    def aborted(self) -> None:
        """Count a request that the engine aborted."""
        self._success[FinishReason.ABORT].inc()

    def _finished(self, request: Request) -> None:
        observed = request_values(request)
        for name, value in observed.items():
            self._histograms[name].observe(value)
        parent = request.parent
        if parent is None:
            self._params(1, request.generated)
        else:
            parent.left -= 1
            parent.most_generated = max(parent.most_generated, request.generated)
            if not parent.left:
                self._params(parent.n, parent.most_generated)
        if request.finished is not None:
            self._success[request.finished].inc()

    def _params(self, n: int, most_generated: int) -> None:
        """Count a request once the last of its choices has ended."""
        self._histograms["request_params_n"].observe(n)
        self._histograms["request_max_num_generation_tokens"].observe(most_generated)


def request_values(request: Request) -> dict[str, float]:
    """The values that a finished request adds to each per-request histogram, in seconds or tokens."""
    first, last = request.first_token_at or 0.0, request.last_token_at or 0.0
    scheduled = request.scheduled_at or 0.0
    decode = last - first
    return {
        "request_prompt_tokens": request.prompt_length,
        "request_generation_tokens": request.generated,
        "request_params_max_tokens": request.max_tokens,
        "request_time_per_output_token_seconds": decode / max(1, request.generated - 1),
        "e2e_request_latency_seconds": last - request.arrival,
        "request_queue_time_seconds": scheduled - request.arrival,
        "request_inference_time_seconds": last - scheduled,
        "request_prefill_time_seconds": first - scheduled,
        "request_decode_time_seconds": decode,
        "request_num_preemptions": request.preemptions,
        "request_prefill_kv_computed_tokens": request.prompt_length - (request.cached or 0),
    }


def _cache_info(registry: CollectorRegistry, settings: EngineSettings, plan: MemoryPlan) -> None:
    ranks = settings.data_parallel
    values: dict[str, Any] = {
        "block_size": plan.block_size,
        "cache_dtype": settings.kv_cache_dtype,
        "enable_prefix_caching": settings.prefix_caching,
        "gpu_memory_utilization": settings.utilization,
        "is_attention_free": False,
        "kv_cache_max_concurrency": round(plan.concurrency, 2),
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
        "kv_cache_size_tokens": plan.tokens,  # of one engine, as vLLM reports it; blocks are the total
        "num_cpu_blocks": None,
        "num_gpu_blocks": plan.blocks * ranks,
        "num_gpu_blocks_override": settings.blocks_override,
        "prefix_caching_hash_algo": "sha256",
        "sliding_window": None,
    }
    names = ("engine", *values)
    gauge = Gauge("vllm:cache_config_info", "The cache's configuration.", names, registry=registry)
    for rank in range(ranks):
        gauge.labels(str(rank), *(str(value) for value in values.values())).set(1)
