"""What the Grafana dashboard shows: rows of panels, each with its queries over vLLM's metrics. Pure.

At least every panel of the dashboards that vLLM itself ships, for vLLM 0.12 and later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_console.alerts.prometheus import FINISHED, GENERATED, ITL, PREEMPTIONS, RUNNING, TTFT, USAGE, WAITING
from vllm_console.telemetry.families import COUNTERS, HISTOGRAMS
from vllm_launchers.presets.model import Objectives

SELECT = '{model_name=~"$model_name",instance=~"$instance"}'
SERVER = "model_name, instance"
SERVER_LEGEND = "{{model_name}} {{instance}}"
RATE = "$__rate_interval"

PROMPTED = COUNTERS["prompt_tokens_total"][0]
LOOKED_UP, HITS = COUNTERS["prefix_cache_queries_total"][0], COUNTERS["prefix_cache_hits_total"][0]
E2E, QUEUE, PREFILL, DECODE, PROMPT_LENGTH, ANSWER_LENGTH = (
    HISTOGRAMS[key][0] for key in ("e2e", "queue", "prefill", "decode", "prompt_tokens", "generation_tokens")
)
TPOT = "vllm:request_time_per_output_token_seconds"
MOST_GENERATED = "vllm:request_max_num_generation_tokens"
STEP_TOKENS = "vllm:iteration_tokens_total"


@dataclass(frozen=True, slots=True)
class Query:
    """One query and what its lines are called."""

    expr: str
    legend: str
    heatmap: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. ``limit`` is an objective, drawn as a line, in the panel's ``unit``; ``width`` is of 24."""

    title: str
    queries: tuple[Query, ...]
    unit: str
    kind: str = "timeseries"
    limit: float | None = None
    width: int = 12
    most: float | None = None
    description: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A heading and the panels below it."""

    title: str
    panels: tuple[Panel, ...]


def rows(goals: Objectives) -> Sequence[Row]:
    """The whole dashboard, the most wanted first."""
    return (
        Row("Objectives", _objectives(goals)),
        Row("Latency", _latency(goals)),
        Row("Requests and tokens", _traffic()),
        Row("Lengths", _lengths()),
    )


def _objectives(goals: Objectives) -> tuple[Panel, ...]:
    share = f"{_rate_sum(PREEMPTIONS)} / {_rate_sum(FINISHED)}"
    return (
        _stat("TTFT p99", _quantile(0.99, TTFT, "$__range"), "s", goals.ttft_p99_seconds),
        _stat("ITL p99", _quantile(0.99, ITL, "$__range"), "s", goals.itl_p99_seconds),
        _stat("KV cache usage", f"max by ({SERVER}) ({USAGE}{SELECT})", "percentunit", goals.kv_cache_usage),
        _stat(
            "Requests preempted",
            f"{_sum('increase', PREEMPTIONS, '$__range')} / {_sum('increase', FINISHED, '$__range')}",
            "percentunit",
            goals.preemption_rate,
        ),
        Panel(
            "Cache Utilization",
            (Query(f"max by ({SERVER}) ({USAGE}{SELECT})", SERVER_LEGEND),),
            "percentunit",
            limit=goals.kv_cache_usage,
            most=1.0,
            description="How full the KV cache is, of the fullest engine.",
        ),
        Panel(
            "Preemptions",
            (Query(share, f"share of requests {SERVER_LEGEND}"),),
            "percentunit",
            limit=goals.preemption_rate,
            description="Requests that lost their place in the KV cache, per request that ended.",
        ),
    )


def _latency(goals: Objectives) -> tuple[Panel, ...]:
    return (
        _spread("Time To First Token Latency", TTFT, goals.ttft_p99_seconds),
        _spread("Inter Token Latency", ITL, goals.itl_p99_seconds),
        _spread("Time Per Output Token (TPOT)", TPOT),
        _spread("E2E Request Latency", E2E),
        Panel("Queue Time", (Query(_mean(QUEUE), f"mean {SERVER_LEGEND}"),), "s"),
        Panel(
            "Requests Prefill and Decode Time",
            (Query(_mean(PREFILL), f"prefill {SERVER_LEGEND}"), Query(_mean(DECODE), f"decode {SERVER_LEGEND}")),
            "s",
        ),
    )


def _traffic() -> tuple[Panel, ...]:
    return (
        Panel(
            "Scheduler State",
            (
                Query(f"sum by ({SERVER}) ({RUNNING}{SELECT})", f"running {SERVER_LEGEND}"),
                Query(f"sum by ({SERVER}) ({WAITING}{SELECT})", f"waiting {SERVER_LEGEND}"),
            ),
            "short",
        ),
        Panel(
            "Token Throughput",
            (
                Query(_rate_sum(PROMPTED), f"prompt {SERVER_LEGEND}"),
                Query(_rate_sum(GENERATED), f"generation {SERVER_LEGEND}"),
            ),
            "short",
            description="Tokens per second.",
        ),
        Panel("Successful Requests Over Time", (Query(_rate_sum(FINISHED), SERVER_LEGEND),), "reqps"),
        Panel(
            "Finish Reason",
            (Query(f"sum by (finished_reason) (increase({FINISHED}{SELECT}[{RATE}]))", "{{finished_reason}}"),),
            "short",
        ),
        Panel(
            "Prefix Cache Hit Rate",
            (Query(f"{_rate_sum(HITS)} / {_rate_sum(LOOKED_UP)}", SERVER_LEGEND),),
            "percentunit",
            most=1.0,
        ),
        Panel(
            "Engine Steps",
            (Query(_rate_sum(f"{STEP_TOKENS}_count"), SERVER_LEGEND),),
            "short",
            description="Iterations of the scheduler per second.",
        ),
    )


def _lengths() -> tuple[Panel, ...]:
    return (
        _heatmap("Request Prompt Length", PROMPT_LENGTH),
        _heatmap("Request Generation Length", ANSWER_LENGTH),
        _spread("Input Token Size", PROMPT_LENGTH, unit="short"),
        _spread("Output Token Size", ANSWER_LENGTH, unit="short"),
        Panel(
            "Max Generation Token in Sequence Group",
            (Query(_mean(MOST_GENERATED), SERVER_LEGEND),),
            "short",
            width=24,
        ),
    )


def _sum(function: str, family: str, span: str = RATE, by: str = SERVER) -> str:
    return f"sum by ({by}) ({function}({family}{SELECT}[{span}]))"


def _rate_sum(family: str) -> str:
    return _sum("rate", family)


def _mean(family: str) -> str:
    return f"{_rate_sum(f'{family}_sum')} / {_rate_sum(f'{family}_count')}"


def _quantile(q: float, family: str, span: str = RATE) -> str:
    return f"histogram_quantile({q:g}, {_sum('rate', f'{family}_bucket', span, f'{SERVER}, le')})"


def _spread(title: str, family: str, limit: float | None = None, unit: str = "s") -> Panel:
    """Quantiles and mean of a histogram."""
    quantiles = [Query(_quantile(q, family), f"p{q * 100:g} {SERVER_LEGEND}") for q in (0.99, 0.95, 0.9, 0.5)]
    return Panel(title, (*quantiles, Query(_mean(family), f"mean {SERVER_LEGEND}")), unit, limit=limit)


def _heatmap(title: str, family: str) -> Panel:
    query = Query(_sum("increase", f"{family}_bucket", by="le"), "{{le}}", heatmap=True)
    return Panel(title, (query,), "short", "heatmap")


def _stat(title: str, expr: str, unit: str, limit: float) -> Panel:
    return Panel(title, (Query(expr, SERVER_LEGEND),), unit, "stat", limit, width=6)
