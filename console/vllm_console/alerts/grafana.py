"""A Grafana dashboard over vLLM's metrics, with the objectives drawn as limits. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

from vllm_console.alerts.panels import Panel, Row, rows
from vllm_console.alerts.prometheus import RUNNING, Target

Json = dict[str, Any]

SCHEMA_VERSION = 39
"""Grafana 10.4 and later; newer ones migrate it."""

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
LONGEST_UID = 40
COLUMNS = 24
HEIGHTS = {"stat": 4, "timeseries": 8, "heatmap": 8}


def dashboard(target: Target) -> Json:
    """The dashboard as Grafana imports it; the same target gives the same ``uid``, so that importing it renews it."""
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
        "panels": _panels(rows(target.objectives)),
    }


def _uid(name: str) -> str:
    """Stable, and of the characters that Grafana takes; a name that has others is told apart by its hash."""
    whole = f"vllm-console-{name}" if name else "vllm-console"
    slug = re.sub(r"[^A-Za-z0-9_-]", "-", whole)
    if slug == whole and len(whole) <= LONGEST_UID:
        return whole
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{slug[: LONGEST_UID - 9]}-{digest}"


def _variables(target: Target) -> list[Json]:
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


def _joined(target: Target) -> str:
    return f"{target.match}," if target.match else ""


def _choice(name: str, label: str, query: str) -> Json:
    """Several of them, or all, as the data source knows them."""
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


def _panels(all_rows: Sequence[Row]) -> list[Json]:
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
