"""Prometheus rules and the Grafana dashboard: valid, based on vLLM's current metrics, with the objectives as limits."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from vllm_console.alerts.grafana import dashboard, dashboard_rows
from vllm_console.alerts.prometheus import (
    AlertTarget,
    MatchError,
    Scrape,
    checked_match,
    job_of,
    model_match,
    rules,
    rules_yaml,
    scrape_document,
    scrape_yaml,
)
from vllm_console.cli.export import served_model
from vllm_console.fleet.snapshot import ServerView
from vllm_console.metrics import parse
from vllm_console.metrics.sample import Sample
from vllm_launchers.keeper.records import State
from vllm_launchers.presets.model import Objectives

OBJECTIVES = Objectives(ttft_p99_seconds=1.5, itl_p99_seconds=0.08, kv_cache_usage=0.85, preemption_rate=0.02)
ALL = AlertTarget(OBJECTIVES, "our default")
CHAT = AlertTarget(OBJECTIVES, "objectives of preset chatbot", "chat", 'model_name="Qwen/Qwen3-8B"')

PRESENT = {
    *(names[0] for names in (parse.GAUGE_FAMILIES | parse.COUNTER_FAMILIES | parse.HISTOGRAM_FAMILIES).values()),
    "vllm:request_time_per_output_token_seconds",
    "vllm:request_max_num_generation_tokens",
    "vllm:iteration_tokens_total",
}
"""Metrics that vLLM 0.12 and all later releases export."""

RULE_FILE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["groups"],
    "properties": {
        "groups": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["name", "rules"],
                "properties": {
                    "name": {"type": "string", "minLength": 1},
                    "rules": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "additionalProperties": False,
                            "required": ["alert", "expr", "for", "labels", "annotations"],
                            "properties": {
                                "alert": {"type": "string", "pattern": "^[A-Z][A-Za-z]+$"},
                                "expr": {"type": "string", "minLength": 1},
                                "for": {"type": "string", "pattern": "^[0-9]+[smh]$"},
                                "labels": {"type": "object", "additionalProperties": {"type": "string"}},
                                "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
                            },
                        },
                    },
                },
            },
        }
    },
}

VLLMS_OWN = {
    "E2E Request Latency", "Token Throughput", "Inter Token Latency", "Time Per Output Token (TPOT)", "Scheduler State",
    "Time To First Token Latency", "Cache Utilization", "Request Prompt Length", "Request Generation Length",
    "Finish Reason", "Queue Time", "Requests Prefill and Decode Time", "Max Generation Token in Sequence Group",
}  # fmt: skip
"""Panels of the dashboard shipped with vLLM."""


def families_in(expr: str) -> set[str]:
    names = re.findall(r"vllm:[a-z0-9_]+", expr)
    return {name if name in PRESENT else re.sub(r"_(?:bucket|sum|count)$", "", name) for name in names}


def balanced(expr: str) -> bool:
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', expr)
    closing = {")": "(", "}": "{", "]": "["}
    still_open: list[str] = []
    for letter in bare:
        if letter in "({[":
            still_open.append(letter)
        elif letter in closing and (not still_open or still_open.pop() != closing[letter]):
            return False
    return not still_open


def rule(name: str, target: AlertTarget = ALL) -> str:
    return next(one.expr for one in rules(target) if one.alert == name)


@pytest.mark.parametrize("target", [ALL, CHAT])
def test_rule_file_is_valid_and_matches_the_rules(target: AlertTarget) -> None:
    document = yaml.safe_load(rules_yaml(target))
    jsonschema.validate(document, RULE_FILE)
    written = document["groups"][0]["rules"]
    assert [(one["alert"], one["expr"], one["for"]) for one in written] == [
        (one.alert, one.expr, one.hold) for one in rules(target)
    ]
    assert {one["labels"]["severity"] for one in written} == {"warning", "critical"}


def test_each_objective_and_failure_has_a_rule() -> None:
    assert [one.alert for one in rules(ALL)] == [
        "VllmKvCachePressure", "VllmPreempting", "VllmSlowFirstToken", "VllmSlowTokens", "VllmQueueGrows", "VllmDown",
        "VllmHung",
    ]  # fmt: skip
    assert rule("VllmKvCachePressure").endswith("> 0.85")
    assert "> 0.02\n  or 60 * " in rule("VllmPreempting")
    assert rule("VllmSlowFirstToken").endswith("> 1.5")
    assert rule("VllmSlowTokens").endswith("> 0.08")
    assert "objectives of preset chatbot" in next(one for one in rules(CHAT)).description


@pytest.mark.parametrize("one", rules(CHAT), ids=lambda one: one.alert)
def test_rules_query_existing_families_with_the_model_selector(one: Any) -> None:
    assert balanced(one.expr)
    assert families_in(one.expr) <= PRESENT
    selectors = re.findall(r"vllm:[a-z0-9_]+(\{[^}]*\})?", one.expr)
    assert selectors
    assert set(selectors) == {'{model_name="Qwen/Qwen3-8B"}'}


@pytest.mark.parametrize(
    "text", ['job="vllm"', 'job="vllm", instance=~"gpubox:.*"', 'a!="b",c!~"d\\"e"', ' job = "x" ']
)
def test_label_matchers_are_accepted(text: str) -> None:
    assert checked_match(text) == text.strip()


@pytest.mark.parametrize("text", ["", "job=vllm", 'job="x"} or up{a="b"', 'job="x', "job", 'job="a\nb"', '1a="b"'])
def test_invalid_label_matchers_are_refused(text: str) -> None:
    with pytest.raises(MatchError):
        checked_match(text)


def test_model_name_is_escaped_in_its_matcher() -> None:
    assert model_match('a"b\\c') == 'model_name="a\\"b\\\\c"'
    assert checked_match(model_match('evil"} or vector(1) #'))


def test_a_hang_is_a_lack_of_all_progress_on_one_engine() -> None:
    """Pooling requests count no generated tokens, and a long prefill only allocates KV cache."""
    hung = rule("VllmHung")
    assert {"vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:kv_cache_usage_perc"} < families_in(hung)
    assert hung.count("sum by") == 1, "what one engine generates does not hide that another hangs"


RULE_TESTS = """
rule_files: [rules.yml]
evaluation_interval: 30s
tests:
  - interval: 30s
    input_series:
      - {{series: 'vllm:kv_cache_usage_perc{{{labels},engine="0"}}', values: '0.5x10 0.95x50'}}
      - {{series: 'vllm:kv_cache_usage_perc{{{labels},engine="1"}}', values: '0.1x60'}}
      - {{series: 'vllm:kv_cache_usage_perc{{{labels},engine="2"}}', values: '0.1x40 0.1+0.005x20'}}
      - {{series: 'vllm:num_preemptions_total{{{labels}}}', values: '0x20 0+1x40'}}
      - {{series: 'vllm:request_success_total{{{labels},finished_reason="stop"}}', values: '0+15x60'}}
      - {{series: 'vllm:num_requests_running{{{labels},engine="0"}}', values: '2x60 stale'}}
      - {{series: 'vllm:num_requests_running{{{labels},engine="1"}}', values: '3x60 stale'}}
      - {{series: 'vllm:num_requests_running{{{labels},engine="2"}}', values: '4x60 stale'}}
      - {{series: 'vllm:num_requests_waiting{{{labels}}}', values: '0x20 1+2x40'}}
      - {{series: 'vllm:generation_tokens_total{{{labels},engine="0"}}', values: '0+500x40 20000x20'}}
      - {{series: 'vllm:generation_tokens_total{{{labels},engine="1"}}', values: '0x60'}}
      - {{series: 'vllm:generation_tokens_total{{{labels},engine="2"}}', values: '0x60'}}
      - {{series: 'vllm:prompt_tokens_total{{{labels},engine="0"}}', values: '0+900x40 36000x20'}}
      - {{series: 'vllm:prompt_tokens_total{{{labels},engine="1"}}', values: '0+900x60'}}
      - {{series: 'vllm:prompt_tokens_total{{{labels},engine="2"}}', values: '0+900x40 36000x20'}}
      - {{series: 'vllm:time_to_first_token_seconds_bucket{{{labels},le="1.0"}}', values: '0+10x60'}}
      - {{series: 'vllm:time_to_first_token_seconds_bucket{{{labels},le="2.5"}}', values: '0+10x20 210+20x40'}}
      - {{series: 'vllm:time_to_first_token_seconds_bucket{{{labels},le="+Inf"}}', values: '0+10x20 210+20x40'}}
      - {{series: 'vllm:inter_token_latency_seconds_bucket{{{labels},le="0.05"}}', values: '0+10x60'}}
      - {{series: 'vllm:inter_token_latency_seconds_bucket{{{labels},le="+Inf"}}', values: '0+10x60'}}
      - {{series: 'up{{job="vllm",instance="gpubox:8000"}}', values: '1x60 0x30'}}
      - {{series: 'up{{job="node",instance="gpubox:9100"}}', values: '0x90'}}
"""

LABELS = 'job="vllm",instance="gpubox:8000",model_name="Qwen/Qwen3-8B"'

# Before the problem no rule fires; then each rule does after its time.
EXPECTED = {
    "VllmKvCachePressure": ("4m", "20m"),
    "VllmPreempting": ("9m", "28m"),
    "VllmSlowFirstToken": ("9m", "28m"),
    "VllmSlowTokens": ("28m", None),
    "VllmQueueGrows": ("9m", "28m"),
    "VllmHung": ("19m", "29m"),
    "VllmDown": ("29m", "35m"),
}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize("target", [ALL, CHAT])
def test_promtool_accepts_the_rules_and_they_fire_as_expected(target: AlertTarget, tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(rules_yaml(target))
    checked = subprocess.run(
        ["promtool", "check", "rules", "rules.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    parsed = yaml.safe_load(RULE_TESTS.format(labels=LABELS))
    parsed["tests"][0]["promql_expr_test"] = [
        {
            "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}})',
            "eval_time": at,
            "exp_samples": [{"labels": "{}", "value": 1}] if firing else [],
        }
        for name, (before, after) in EXPECTED.items()
        for firing, at in ((False, before), (True, after))
        if at is not None
    ]
    (hung,) = (one for one in rules(target) if one.alert == "VllmHung")
    stuck = {"expr": hung.expr, "eval_time": "29m", "exp_samples": [{"labels": f"{{{LABELS}}}", "value": 2}]}
    parsed["tests"][0]["promql_expr_test"].append(stuck)
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(parsed))
    done = subprocess.run(
        ["promtool", "test", "rules", "tests.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# -- Grafana -----------------------------------------------------------------------------------------------------------


def panels(target: AlertTarget = ALL) -> list[dict[str, Any]]:
    return [panel for panel in dashboard(target)["panels"] if panel["type"] != "row"]


def test_dashboard_has_at_least_vllms_own_panels() -> None:
    titles = [panel["title"] for panel in panels()]
    assert set(titles) >= VLLMS_OWN
    assert len(titles) == len(set(titles))


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_panels_query_existing_families_with_the_chosen_series(panel: dict[str, Any]) -> None:
    assert panel["datasource"]["uid"] == "${datasource}"
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) >= 1
    for target in panel["targets"]:
        assert balanced(target["expr"])
        assert families_in(target["expr"])
        assert families_in(target["expr"]) <= PRESENT
        for selector in re.findall(r"vllm:[a-z0-9_]+(\{[^}]*\})?", target["expr"]):
            assert selector == '{model_name=~"$model_name",instance=~"$instance"}'


def test_panels_have_unique_ids_and_do_not_overlap() -> None:
    every = dashboard(ALL)["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    taken: set[tuple[int, int]] = set()
    for panel in every:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        taken |= cells


def test_objectives_are_drawn_as_thresholds() -> None:
    limits = {
        panel["title"]: [step["value"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]][1:]
        for panel in panels()
        if panel["type"] != "heatmap"
    }
    assert limits["Time To First Token Latency"] == [1.5]
    assert limits["Inter Token Latency"] == [0.08]
    assert limits["Cache Utilization"] == [0.85]
    assert limits["Preemptions"] == [0.02]
    assert limits["Token Throughput"] == []
    drawn = next(panel for panel in panels() if panel["title"] == "Cache Utilization")
    assert drawn["fieldConfig"]["defaults"]["custom"]["thresholdsStyle"] == {"mode": "line"}


def test_data_source_model_and_instance_are_variables() -> None:
    variables = {one["name"]: one for one in dashboard(CHAT)["templating"]["list"]}
    assert list(variables) == ["datasource", "model_name", "instance"]
    assert variables["datasource"]["type"] == "datasource"
    assert 'model_name="Qwen/Qwen3-8B"' in variables["model_name"]["definition"]
    assert variables["instance"]["includeAll"]


def test_uid_is_stable_short_and_unique() -> None:
    names = ["", "chat", "chat-2", "a b", "a.b", "x" * 80, "x" * 81]
    uids = [dashboard(AlertTarget(OBJECTIVES, "", name))["uid"] for name in names]
    assert uids[:2] == ["vllm-console", "vllm-console-chat"]
    assert len(set(uids)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,40}", uid) for uid in uids)


SCRAPES = [
    Scrape(),
    Scrape("gpubox:8001", "inference", tls=True),
    Scrape("[::1]:8000", 'odd "job": é\\'),
    Scrape(job="beyond the basic plane: \U0001f600"),
]


@pytest.mark.parametrize("scrape", SCRAPES)
def test_scrape_section_is_valid_for_prometheus(scrape: Scrape) -> None:
    document = yaml.safe_load(scrape_yaml(scrape))
    assert document == scrape_document(scrape)
    (job,) = document["scrape_configs"]
    assert job["job_name"] == scrape.job
    assert job["static_configs"] == [{"targets": [scrape.target]}]
    assert job["metrics_path"] == "/metrics"
    assert job.get("scheme", "http") == ("https" if scrape.tls else "http")
    assert set(job) <= {"job_name", "metrics_path", "scrape_interval", "scheme", "static_configs"}


@pytest.mark.parametrize("scrape", SCRAPES)
def test_rules_include_their_scrape_section_as_a_comment(scrape: Scrape) -> None:
    text = rules_yaml(CHAT, scrape)
    assert "scrape_configs" not in yaml.safe_load(text)
    lines = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("#")]
    section = "\n".join(lines[lines.index("scrape_configs:") :])
    assert yaml.safe_load(section) == scrape_document(scrape)


@pytest.mark.parametrize(
    ("match", "job"),
    [("", "vllm"), ('model_name="x"', "vllm"), ('job="llm"', "llm"), ('model_name="x", job = "a b"', "a b"),
     ('job=~"a.*"', "vllm"), ('myjob="x"', "vllm"), ('job=""', "vllm")],
)  # fmt: skip
def test_scrape_job_matches_the_rules_selector(match: str, job: str) -> None:
    assert job_of(match) == job


def test_alerts_use_no_quantile_interpolated_from_zero() -> None:
    """In the first bucket, which ends at 10 ms for ITL, histogram_quantile invents values."""
    strict = Objectives(ttft_p99_seconds=0.0005, itl_p99_seconds=0.004, kv_cache_usage=0.85, preemption_rate=0.02)
    target = AlertTarget(strict, "test")
    assert rule("VllmSlowTokens", target).endswith("> 0.01")
    assert rule("VllmSlowFirstToken", target).endswith("> 0.001")


def test_dashboard_clamps_latencies_to_the_first_bucket() -> None:
    panels = {panel.title: panel for row in dashboard_rows(OBJECTIVES) for panel in row.panels}
    e2e = panels["E2E Request Latency"]
    quantiles = [query.expr for query in e2e.queries if "histogram_quantile" in query.expr]
    assert quantiles
    assert all(expr.startswith("clamp_min(histogram_quantile(") and expr.endswith(", 0.3)") for expr in quantiles)
    assert "at most that" in e2e.description
    assert not any("clamp_min" in query.expr for query in panels["Input Token Size"].queries)
    assert panels["Preemptions per request"].unit == "short"


@pytest.mark.parametrize(
    ("flags", "reported", "expected"),
    [
        ({}, None, "/models/tiny"),
        ({"served-model-name": "tiny"}, None, "tiny"),
        ({"served-model-name": "my model"}, None, "my model"),  # one argument, so one name
        ({"served-model-name": '["tiny", "other"]'}, None, "tiny"),
        ({"served-model-name": "tiny"}, "as reported", "as reported"),
    ],
)
def test_series_are_selected_by_the_served_model_name(flags: dict[str, str], reported: str | None, expected: str):
    sample = None if reported is None else Sample(0.0, {}, model_name=reported)
    server = ServerView("chat", State.STOPPED, 0.0, model="/models/tiny", flags=flags, sample=sample)
    assert model_match(served_model(server)) == f'model_name="{expected}"'
