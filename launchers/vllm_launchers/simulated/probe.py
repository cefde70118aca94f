"""What the simulated engine tells the probe: vLLM's statistics under vLLM's names, through the same plugin."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from vllm_launchers.engine_model.core import Core, StepReport
from vllm_launchers.engine_model.scheduler import Request
from vllm_launchers.probe.plugin.vllm_console_probe import FOLDER, Probe, recorder_for
from vllm_launchers.simulated.metrics import request_values
from vllm_launchers.simulated.settings import SIMULATED_VERSION


@dataclass(slots=True)
class _PrefixCacheStats:
    queries: int
    hits: int
    preempted_requests: int
    preempted_queries: int
    preempted_hits: int


@dataclass(slots=True)
class _SchedulerStats:
    num_running_reqs: int
    num_waiting_reqs: int
    kv_cache_usage: float
    prefix_cache_stats: _PrefixCacheStats


@dataclass(slots=True)
class _FinishedRequestStats:
    finish_reason: str
    request_id: str
    e2e_latency: float
    num_prompt_tokens: int
    num_preemptions: int
    num_generation_tokens: int
    queued_time: float
    prefill_time: float
    decode_time: float
    num_cached_tokens: int


@dataclass(slots=True)
class _IterationStats:
    num_prompt_tokens: int
    num_generation_tokens: int
    num_preempted_reqs: int
    time_to_first_tokens_iter: list[float]
    inter_token_latencies_iter: list[float]
    finished_requests: list[_FinishedRequestStats]
    iteration_timestamp: float = field(default_factory=time.time)


def probe_of(rank: int) -> Probe | None:
    """The probe of one data-parallel rank; None if the server was started without."""
    folder = os.environ.get(FOLDER)
    return Probe(recorder_for(folder, SIMULATED_VERSION), rank) if folder else None


def record_step(probe: Probe, core: Core, report: StepReport) -> None:
    """Record an iteration and the requests that it ended."""
    scheduler = core.scheduler
    resumed = (report.resumed, report.resumed_queries, report.resumed_hits)
    cache = _PrefixCacheStats(report.cache_queries, report.cache_hits, *resumed)
    stats = _SchedulerStats(len(scheduler.running), len(scheduler.waiting), scheduler.pool.usage, cache)
    if not report.advanced and not report.preempted:
        probe.record(stats, None)  # prefill alone has no output
        return
    prompts = sum(request.prompt_length for request in report.prefilled)
    requests = [_finished(request) for request in report.finished]
    tokens, latencies = len(report.advanced), (report.ttfts, report.itls)
    probe.record(stats, _IterationStats(prompts, tokens, report.preempted, *latencies, requests))


def _finished(request: Request) -> _FinishedRequestStats:
    # An iteration can begin a moment before the request came that is in it: the engine makes up for late timers.
    values = {name: max(0.0, value) for name, value in request_values(request).items()}
    return _FinishedRequestStats(
        finish_reason=str(request.finished or ""),
        request_id=request.id.partition("_")[2].rpartition("-")[0],  # as the client was told it
        e2e_latency=values["e2e_request_latency_seconds"],
        num_prompt_tokens=request.prompt_length,
        num_preemptions=request.preemptions,
        num_generation_tokens=request.generated,
        queued_time=values["request_queue_time_seconds"],
        prefill_time=values["request_prefill_time_seconds"],
        decode_time=values["request_decode_time_seconds"],
        num_cached_tokens=request.cached or 0,
    )
