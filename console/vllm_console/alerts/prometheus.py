"""Objectives as Prometheus alerting rules over vLLM's own metrics (vLLM 0.12 and later). Pure."""

from __future__ import annotations

import json
import re
import unicodedata
from dataclasses import dataclass
from typing import Any

from vllm_console.diagnosis.conditions.cache import MOST_PREEMPTIONS
from vllm_console.diagnosis.conditions.queue import LEAST_WAITING
from vllm_console.format import percent, seconds
from vllm_console.telemetry.families import COUNTERS, GAUGES, HISTOGRAMS
from vllm_console.text import plain
from vllm_launchers.presets.model import Objectives

WHERE = "{{ $labels.model_name }} on {{ $labels.instance }}"
BY = "job, instance, model_name"
"""One alert for each server, its data-parallel engines taken together."""

RUNNING, WAITING, USAGE = (GAUGES[key][0] for key in ("requests_running", "requests_waiting", "kv_cache_usage"))
PREEMPTIONS, FINISHED = (COUNTERS[key][0] for key in ("preemptions_total", "requests_finished_total"))
GENERATED = COUNTERS["generation_tokens_total"][0]
TTFT, ITL = (HISTOGRAMS[key][0] for key in ("ttft", "itl"))

_MATCHER = r'[A-Za-z_][A-Za-z0-9_]*\s*(?:=~|!~|!=|=)\s*"(?:[^"\\\n]|\\.)*"'
_MATCHERS = re.compile(rf"\s*{_MATCHER}(?:\s*,\s*{_MATCHER})*\s*")


class MatchError(ValueError):
    """Words that are no label matchers of PromQL; the text is one sentence."""


@dataclass(frozen=True, slots=True)
class Target:
    """What rules and dashboards are about. ``name`` is a server's or a preset's, empty for every vLLM server.

    ``match`` are label matchers as between the braces of PromQL, empty for all series; ``source`` says where the
    objectives come from.
    """

    objectives: Objectives
    source: str
    name: str = ""
    match: str = ""

    @property
    def braces(self) -> str:
        """The matchers as a selector has them."""
        return f"{{{self.match}}}" if self.match else ""


def checked_match(text: str) -> str:
    """Label matchers as a person wrote them.

    Raises:
        MatchError: they are none.
    """
    if not _MATCHERS.fullmatch(text) or not text.isprintable():
        raise MatchError(f'{text[:60]!r} is no list of label matchers such as job="vllm",instance=~"gpubox:.*"')
    return text.strip()


def model_match(model: str) -> str:
    """The matcher of one served model."""
    named = {"\\": "\\\\", '"': '\\"', "\n": "\\n"}
    escaped = "".join(named.get(c) or (c if _is_seen(c) else _go_escape(c)) for c in model)
    return f'model_name="{escaped}"'


def _is_seen(character: str) -> bool:
    """Whether it may stand as it is; accents are spelt out, since a heap of them would cover the lines around."""
    return character.isprintable() and unicodedata.category(character) not in ("Mn", "Me")


def _go_escape(character: str) -> str:
    """As strings of PromQL, which are Go's, write it; half of a character is none there."""
    code = 0xFFFD if "\ud800" <= character <= "\udfff" else ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


@dataclass(frozen=True, slots=True)
class Rule:
    """One alerting rule; ``hold`` is how long its expression must hold."""

    alert: str
    expr: str
    hold: str
    severity: str
    summary: str
    description: str


def rules(target: Target) -> tuple[Rule, ...]:
    """A rule for each objective, and for a queue that grows and an engine that is gone or hangs."""
    return (*_objectives(target), *_engine(target))


def _objectives(target: Target) -> tuple[Rule, ...]:
    goals, source = target.objectives, target.source
    share = "{{ $value | humanizePercentage }}"
    return (
        Rule(
            "VllmKvCachePressure",
            f"max by ({BY}) (avg_over_time({USAGE}{target.braces}[1m])) > {goals.kv_cache_usage:g}",
            "5m",
            "warning",
            f"KV cache pressure: {WHERE}",
            f"{share} of the KV cache is used; the limit is {percent(goals.kv_cache_usage, 1)} ({source}).",
        ),
        Rule(
            "VllmPreempting",
            _preempting(target),
            "5m",
            "critical",
            f"Requests are preempted: {WHERE}",
            f"More than {percent(goals.preemption_rate, 1)} of the requests ({source}), or more than"
            f" {MOST_PREEMPTIONS:.0f} a minute, lose their place in the KV cache and are computed again.",
        ),
        _slow(target, "VllmSlowFirstToken", "TTFT", TTFT, goals.ttft_p99_seconds),
        _slow(target, "VllmSlowTokens", "ITL", ITL, goals.itl_p99_seconds),
    )


def _engine(target: Target) -> tuple[Rule, ...]:
    return (
        Rule(
            "VllmQueueGrows",
            f"sum by ({BY}) (min_over_time({WAITING}{target.braces}[5m])) >= {LEAST_WAITING:g}\n"
            f"  and sum by ({BY}) (deriv({WAITING}{target.braces}[10m])) > 0",
            "5m",
            "warning",
            f"The queue grows: {WHERE}",
            "{{ $value | humanize }} requests or more have waited for five minutes, and they become more: requests"
            " come faster than they are served.",
        ),
        Rule(
            "VllmDown",
            f"up == 0 and on (job, instance) (max_over_time({RUNNING}{target.braces}[1d]) >= 0)",
            "1m",
            "critical",
            "vLLM is down: {{ $labels.instance }}",
            "Its metrics cannot be read any more: it has ended, does not answer, or cannot be reached.",
        ),
        Rule(
            "VllmHung",
            f"sum by ({BY}) (min_over_time({RUNNING}{target.braces}[2m])) > 0\n"
            f"  and sum by ({BY}) (increase({GENERATED}{target.braces}[2m])) == 0",
            "1m",
            "critical",
            f"vLLM hangs: {WHERE}",
            "{{ $value | humanize }} requests run, and no token has come for two minutes.",
        ),
    )


def _preempting(target: Target) -> str:
    preempted = f"sum by ({BY}) (rate({PREEMPTIONS}{target.braces}[5m]))"
    finished = f"sum by ({BY}) (rate({FINISHED}{target.braces}[5m]))"
    share = f"{preempted} / {finished} > {target.objectives.preemption_rate:g}"
    return f"{share}\n  or 60 * {preempted} > {MOST_PREEMPTIONS:g}"


def _slow(target: Target, alert: str, name: str, family: str, limit: float) -> Rule:
    expr = f"histogram_quantile(0.99, sum by ({BY}, le) (rate({family}_bucket{target.braces}[5m]))) > {limit:g}"
    return Rule(
        alert,
        expr,
        "5m",
        "warning",
        f"{name} p99 is too long: {{{{ $labels.model_name }}}} on {{{{ $labels.instance }}}}",
        f"{name} p99 is {{{{ $value | humanizeDuration }}}}; the limit is {seconds(limit)} ({target.source}).",
    )


def rules_document(target: Target) -> dict[str, Any]:
    """The rules as a Prometheus rule file has them: one group."""
    group = f"vllm-console {target.name}".strip()
    return {"groups": [{"name": group, "rules": [_rule_document(rule) for rule in rules(target)]}]}


def _rule_document(rule: Rule) -> dict[str, Any]:
    return {
        "alert": rule.alert,
        "expr": rule.expr,
        "for": rule.hold,
        "labels": {"severity": rule.severity},
        "annotations": {"summary": rule.summary, "description": rule.description},
    }


def rules_yaml(target: Target) -> str:
    """The rule file as YAML, with a heading that says what it is about."""
    (group,) = rules_document(target)["groups"]
    series = target.match or "every vLLM server that is scraped; --match narrows them down"
    lines = [
        f"# Limits: {_one_line(target.source)}. Series: {_one_line(series)}. For vLLM 0.12 and later.",
        "groups:",
        f"  - name: {_quoted(group['name'])}",
        "    rules:",
    ]
    for rule in group["rules"]:
        lines += [f"      - alert: {rule['alert']}", "        expr: |-"]
        lines += [f"          {line}" for line in rule["expr"].split("\n")]
        lines += [f"        for: {rule['for']}"]
        for key in ("labels", "annotations"):
            lines.append(f"        {key}:")
            lines += [f"          {name}: {_quoted(value)}" for name, value in rule[key].items()]
    return "\n".join(lines) + "\n"


def _one_line(text: str) -> str:
    return plain(" ".join(text.split()))


def _quoted(text: str) -> str:
    """A YAML scalar in double quotes, of ASCII only. JSON's strings are YAML's but for what lies beyond ``\\uffff``."""
    return f'"{"".join(map(_yaml_character, text))}"'


def _yaml_character(character: str) -> str:
    if "\ud800" <= character <= "\udfff":
        return "\\ufffd"
    return json.dumps(character)[1:-1] if character < "\U00010000" else f"\\U{ord(character):08x}"
