"""A Grafana dashboard over vLLM's metrics, with the objectives drawn as thresholds. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from vllm_console.alerts.prometheus import (
    FINISHED,
    GENERATED,
    ITL,
    PREEMPTIONS,
    PROMPTED,
    RUNNING,
    TTFT,
    USAGE,
    WAITING,
    AlertTarget,
)
from vllm_console.metrics.parse import COUNTER_FAMILIES, FIRST_BUCKETS, HISTOGRAM_FAMILIES
from vllm_console.text import seconds
from vllm_launchers.presets.model import Objectives

SELECT = '{model_name=~"$model_name",instance=~"$instance"}'
SERVER = "model_name, instance"
SERVER_LEGEND = "{{model_name}} {{instance}}"
RATE = "$__rate_interval"

LOOKED_UP, HITS = COUNTER_FAMILIES["prefix_cache_queries_total"][0], COUNTER_FAMILIES["prefix_cache_hits_total"][0]
E2E, QUEUE, PREFILL, DECODE, PROMPT_LENGTH, ANSWER_LENGTH = (
    HISTOGRAM_FAMILIES[key][0] for key in ("e2e", "queue", "prefill", "decode", "prompt_tokens", "generation_tokens")
)
TPOT = "vllm:request_time_per_output_token_seconds"
MOST_GENERATED = "vllm:request_max_num_generation_tokens"
STEP_TOKENS = "vllm:iteration_tokens_total"

_ENDS = {HISTOGRAM_FAMILIES[key][0]: end for key, end in FIRST_BUCKETS.items()} | {TPOT: FIRST_BUCKETS["itl"]}
"""The end of each latency's first bucket, by family."""


class Query(msgspec.Struct, frozen=True):
    """One query and its legend."""

    expr: str
    legend: str
    heatmap: bool = False


class Panel(msgspec.Struct, frozen=True):
    """One panel. ``limit`` is an objective in the panel's ``unit``, drawn as a line; ``width`` is out of 24."""

    title: str
    queries: tuple[Query, ...]
    unit: str
    kind: str = "timeseries"
    limit: float | None = None
    width: int = 12
    most: float | None = None
    description: str = ""


class PanelRow(msgspec.Struct, frozen=True):
    """A row title and the panels below it."""

    title: str
    panels: tuple[Panel, ...]


def dashboard_rows(objectives: Objectives) -> Sequence[PanelRow]:
    """The whole dashboard, the most important panels first."""
    return (
        PanelRow("Objectives", _objectives(objectives)),
        PanelRow("Latency", _latency(objectives)),
        PanelRow("Requests and tokens", _traffic()),
        PanelRow("Lengths", _lengths()),
    )


def _objectives(objectives: Objectives) -> tuple[Panel, ...]:
    share = f"{_rate_sum(PREEMPTIONS)} / {_rate_sum(FINISHED)}"
    return (
        _stat("TTFT p99", _quantile(0.99, TTFT, "$__range"), "s", objectives.ttft_p99_seconds),
        _stat("ITL p99", _quantile(0.99, ITL, "$__range"), "s", objectives.itl_p99_seconds),
        _stat("KV cache usage", f"max by ({SERVER}) ({USAGE}{SELECT})", "percentunit", objectives.kv_cache_usage),
        _stat(
            "Preemptions per request",
            f"{_sum('increase', PREEMPTIONS, '$__range')} / {_sum('increase', FINISHED, '$__range')}",
            "short",
            objectives.preemption_rate,
        ),
        Panel(
            "Cache Utilization",
            (Query(f"max by ({SERVER}) ({USAGE}{SELECT})", SERVER_LEGEND),),
            "percentunit",
            limit=objectives.kv_cache_usage,
            most=1.0,
            description="KV cache usage of the fullest engine.",
        ),
        Panel(
            "Preemptions",
            (Query(share, f"per request {SERVER_LEGEND}"),),
            "short",
            limit=objectives.preemption_rate,
            description="Preemptions per finished request: evicted from the KV cache and recomputed.",
        ),
    )


def _latency(objectives: Objectives) -> tuple[Panel, ...]:
    return (
        _spread("Time To First Token Latency", TTFT, objectives.ttft_p99_seconds),
        _spread("Inter Token Latency", ITL, objectives.itl_p99_seconds),
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
            "Max Generation Token in Sequence Group", (Query(_mean(MOST_GENERATED), SERVER_LEGEND),), "short", width=24
        ),
    )


def _sum(function: str, family: str, span: str = RATE, by: str = SERVER) -> str:
    return f"sum by ({by}) ({function}({family}{SELECT}[{span}]))"


def _rate_sum(family: str) -> str:
    return _sum("rate", family)


def _mean(family: str) -> str:
    return f"{_rate_sum(f'{family}_sum')} / {_rate_sum(f'{family}_count')}"


def _quantile(q: float, family: str, span: str = RATE) -> str:
    """A quantile; latencies are clamped to the end of the first bucket, in which only an upper bound is known."""
    found = f"histogram_quantile({q:g}, {_sum('rate', f'{family}_bucket', span, f'{SERVER}, le')})"
    return f"clamp_min({found}, {_ENDS[family]:g})" if family in _ENDS else found


def _spread(title: str, family: str, limit: float | None = None, unit: str = "s") -> Panel:
    quantiles = [Query(_quantile(q, family), f"p{q * 100:g} {SERVER_LEGEND}") for q in (0.99, 0.95, 0.9, 0.5)]
    values = (
        f"A quantile at {seconds(_ENDS[family])} is at most that: below it only the mean is known."
        if family in _ENDS
        else ""
    )
    queries = (*quantiles, Query(_mean(family), f"mean {SERVER_LEGEND}"))
    return Panel(title, queries, unit, limit=limit, description=values)


def _heatmap(title: str, family: str) -> Panel:
    query = Query(_sum("increase", f"{family}_bucket", by="le"), "{{le}}", heatmap=True)
    return Panel(title, (query,), "short", "heatmap")


def _stat(title: str, expr: str, unit: str, limit: float) -> Panel:
    return Panel(title, (Query(expr, SERVER_LEGEND),), unit, "stat", limit, width=6)


Json = dict[str, Any]

SCHEMA_VERSION = 39
"""Schema of Grafana 10.4; newer versions migrate it."""

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
LONGEST_UID = 40
COLUMNS = 24
HEIGHTS = {"stat": 4, "timeseries": 8, "heatmap": 8}


def dashboard(target: AlertTarget) -> Json:
    """The dashboard for import into Grafana; the same target has the same ``uid``, so importing it again updates it."""
    return {
        "uid": _uid(target.name),
        "title": f"vLLM {target.name}".strip(),
        "description": f"Limits: {target.source}. For vLLM 0.12 and later. Made by vllm-console.",
        "tags": ["vllm"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": _variables(target)},
        "panels": _panels(dashboard_rows(target.objectives)),
    }


def _uid(name: str) -> str:
    """A stable id of characters that Grafana accepts; a hash distinguishes names with other characters."""
    whole = f"vllm-console-{name}" if name else "vllm-console"
    slug = re.sub(r"[^A-Za-z0-9_-]", "-", whole)
    if slug == whole and len(whole) <= LONGEST_UID:
        return whole
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{slug[: LONGEST_UID - 9]}-{digest}"


def _variables(target: AlertTarget) -> list[Json]:
    return [
        {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            "refresh": 1,
            "multi": False,
            "includeAll": False,
            "hide": 0,
        },
        _choice("model_name", "Model", f"label_values({RUNNING}{target.braces}, model_name)"),
        _choice(
            "instance", "Instance", f'label_values({RUNNING}{{{_joined(target)}model_name=~"$model_name"}}, instance)'
        ),
    ]


def _joined(target: AlertTarget) -> str:
    return f"{target.match}," if target.match else ""


def _choice(name: str, label: str, query: str) -> Json:
    """A variable with multiple choice, listed by the data source."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": f"Variable-{name}"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "current": {"text": ["All"], "value": ["$__all"]},
        "options": [],
        "hide": 0,
    }


def _panels(all_rows: Sequence[PanelRow]) -> list[Json]:
    panels: list[Json] = []
    top = 0
    for row in all_rows:
        place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "gridPos": place,
                "collapsed": False,
                "panels": [],
            }
        )
        top, left, height = top + 1, 0, 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                top, left, height = top + height, 0, 0
            place = {"x": left, "y": top, "w": panel.width, "h": HEIGHTS[panel.kind]}
            panels.append(_panel(panel, len(panels) + 1, place))
            left, height = left + panel.width, max(height, HEIGHTS[panel.kind])
        top += height
    return panels


def _panel(panel: Panel, number: int, place: Json) -> Json:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel),
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": DATASOURCE,
                "editorMode": "code",
                "expr": query.expr,
                "legendFormat": query.legend,
                "format": "heatmap" if query.heatmap else "time_series",
                "instant": panel.kind == "stat",
                "range": panel.kind != "stat",
            }
            for at, query in enumerate(panel.queries)
        ],
    }


def _defaults(panel: Panel) -> Json:
    if panel.kind == "heatmap":
        return {"custom": {"scaleDistribution": {"type": "linear"}}}
    steps: list[Json] = [{"color": "green", "value": None}]
    if panel.limit is not None:
        steps.append({"color": "red", "value": panel.limit})
    defaults: Json = {
        "unit": panel.unit,
        "min": 0,
        "color": {"mode": "thresholds" if panel.kind == "stat" else "palette-classic"},
        "thresholds": {"mode": "absolute", "steps": steps},
    }
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.kind == "timeseries":
        drawn = "line" if panel.limit is not None else "off"
        defaults["custom"] = {"lineWidth": 1, "fillOpacity": 10, "showPoints": "never", "spanNulls": False,
                              "thresholdsStyle": {"mode": drawn}}  # fmt: skip
    return defaults


def _options(panel: Panel) -> Json:
    if panel.kind == "stat":
        return {
            "colorMode": "value",
            "graphMode": "none",
            "justifyMode": "auto",
            "textMode": "auto",
            "orientation": "auto",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        }
    if panel.kind == "heatmap":
        return {
            "calculate": False,
            "cellGap": 1,
            "color": {"mode": "scheme", "scheme": "Spectral", "steps": 64, "reverse": False},
            "yAxis": {"axisPlacement": "left", "unit": "none"},
            "legend": {"show": True},
            "tooltip": {"mode": "single", "yHistogram": False},
        }
    return {
        "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["mean", "max"], "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
