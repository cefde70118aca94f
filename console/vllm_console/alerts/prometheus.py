"""Objectives as Prometheus alerting rules over vLLM's own metrics (vLLM 0.12 and later). Pure."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

import msgspec

from vllm_console.diagnosis.finding import MOST_PREEMPTIONS
from vllm_console.diagnosis.live.queue import LEAST_WAITING
from vllm_console.metrics.parse import COUNTER_FAMILIES, FIRST_BUCKETS, GAUGE_FAMILIES, HISTOGRAM_FAMILIES
from vllm_console.text import percent, plain, seconds
from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.plan.export.quoting import comment, yaml_document
from vllm_launchers.presets.model import Objectives

WHERE = "{{ $labels.model_name }} on {{ $labels.instance }}"
BY = "job, instance, model_name"
"""One alert per server, with its data-parallel engines combined."""

RUNNING, WAITING, USAGE = (GAUGE_FAMILIES[key][0] for key in ("requests_running", "requests_waiting", "kv_cache_usage"))
PREEMPTIONS, FINISHED = (COUNTER_FAMILIES[key][0] for key in ("preemptions_total", "requests_finished_total"))
PROMPTED, GENERATED = (COUNTER_FAMILIES[key][0] for key in ("prompt_tokens_total", "generation_tokens_total"))
TTFT, ITL = (HISTOGRAM_FAMILIES[key][0] for key in ("ttft", "itl"))

_MATCHER = r'[A-Za-z_][A-Za-z0-9_]*\s*(?:=~|!~|!=|=)\s*"(?:[^"\\\n]|\\.)*"'
_MATCHERS = lazy_pattern(rf"\s*{_MATCHER}(?:\s*,\s*{_MATCHER})*\s*")


class MatchError(ValueError):
    """Not valid PromQL label matchers; the message is one sentence."""


class AlertTarget(msgspec.Struct, frozen=True):
    """The target of rules and dashboards. ``name`` is a server's or a preset's, empty for all vLLM servers.

    ``match`` holds label matchers in PromQL syntax, without braces, empty for all series; ``source`` says where the
    objectives come from.
    """

    objectives: Objectives
    source: str
    name: str = ""
    match: str = ""

    @property
    def braces(self) -> str:
        """The matchers as a selector."""
        return f"{{{self.match}}}" if self.match else ""


def checked_match(text: str) -> str:
    """Parse label matchers as typed by a user. Raises MatchError if the text is not valid."""
    if not _MATCHERS.fullmatch(text) or not text.isprintable():
        raise MatchError(f'{text[:60]!r} is not a list of label matchers such as job="vllm",instance=~"gpubox:.*"')
    return text.strip()


def model_match(model: str) -> str:
    """The matcher for one served model."""
    named = {"\\": "\\\\", '"': '\\"', "\n": "\\n"}
    escaped = "".join(named.get(c) or (c if _is_seen(c) else _go_escape(c)) for c in model)
    return f'model_name="{escaped}"'


def _is_seen(character: str) -> bool:
    """Whether a character can stay unescaped; accents are escaped, since stacked ones would cover nearby lines."""
    return character.isprintable() and unicodedata.category(character) not in ("Mn", "Me")


def _go_escape(character: str) -> str:
    """Text as a PromQL (Go) string literal; lone surrogates are not valid there."""
    code = 0xFFFD if "\ud800" <= character <= "\udfff" else ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class AlertingRule(msgspec.Struct, frozen=True):
    """One alerting rule; ``hold`` is how long its expression must be true."""

    alert: str
    expr: str
    hold: str
    severity: str
    summary: str
    description: str


def rules(target: AlertTarget) -> tuple[AlertingRule, ...]:
    """A rule for each objective, and for a growing queue and an engine that is down or hangs."""
    return (*_objectives(target), *_engine(target))


def _objectives(target: AlertTarget) -> tuple[AlertingRule, ...]:
    objectives, source = target.objectives, target.source
    share = "{{ $value | humanizePercentage }}"
    return (
        AlertingRule(
            "VllmKvCachePressure",
            f"max by ({BY}) (avg_over_time({USAGE}{target.braces}[1m])) > {objectives.kv_cache_usage:g}",
            "5m",
            "warning",
            f"KV cache pressure: {WHERE}",
            f"{share} of the KV cache is used; the objective is {percent(objectives.kv_cache_usage, 1)} ({source}).",
        ),
        AlertingRule(
            "VllmPreempting",
            _preempting(target),
            "5m",
            "critical",
            f"Requests are preempted: {WHERE}",
            f"More than {objectives.preemption_rate:g} preemptions per request ({source}), or more than"
            f" {MOST_PREEMPTIONS:.0f} a minute: requests are evicted from the KV cache and recomputed.",
        ),
        _slow(target, "VllmSlowFirstToken", "ttft", objectives.ttft_p99_seconds),
        _slow(target, "VllmSlowTokens", "itl", objectives.itl_p99_seconds),
    )


def _engine(target: AlertTarget) -> tuple[AlertingRule, ...]:
    return (
        AlertingRule(
            "VllmQueueGrows",
            f"sum by ({BY}) (min_over_time({WAITING}{target.braces}[5m])) >= {LEAST_WAITING:g}\n"
            f"  and sum by ({BY}) (deriv({WAITING}{target.braces}[10m])) > 0",
            "5m",
            "warning",
            f"The queue grows: {WHERE}",
            "{{ $value | humanize }} requests or more have waited for five minutes, and the queue grows: requests "
            "arrive faster than they are served.",
        ),
        AlertingRule(
            "VllmDown",
            f"up == 0 and on (job, instance) (max_over_time({RUNNING}{target.braces}[1d]) >= 0)",
            "1m",
            "critical",
            "vLLM is down: {{ $labels.instance }}",
            "Its metrics can no longer be read: it has ended, does not respond, or can't be reached.",
        ),
        AlertingRule(
            "VllmHung",
            _hung(target),
            "1m",
            "critical",
            f"vLLM hangs: {WHERE}",
            "{{ $value | humanize }} requests run on engines without progress for two minutes: no token, no prompt "
            "processed, no KV cache block allocated or freed.",
        ),
    )


def _hung(target: AlertTarget) -> str:
    """Requests that run on engines without progress, as in `Frame.still`: a long prefill allocates KV cache."""
    return (
        f"sum by ({BY}) (\n"
        f"  min_over_time({RUNNING}{target.braces}[2m]) > 0\n"
        f"  and increase({GENERATED}{target.braces}[2m]) == 0\n"
        f"  and increase({PROMPTED}{target.braces}[2m]) == 0\n"
        f"  and changes({USAGE}{target.braces}[2m]) == 0\n"
        ")"
    )


def _preempting(target: AlertTarget) -> str:
    """Preemptions as in `preemptions_per_request`: per finished request, or per running one if those are more."""
    preempted = f"sum by ({BY}) (increase({PREEMPTIONS}{target.braces}[5m]))"
    finished = f"sum by ({BY}) (increase({FINISHED}{target.braces}[5m]))"
    running = f"sum by ({BY}) ({RUNNING}{target.braces})"
    share = f"{preempted} / ({finished} >= {running} or {running} > 0) > {target.objectives.preemption_rate:g}"
    return f"{share}\n  or 60 * sum by ({BY}) (rate({PREEMPTIONS}{target.braces}[5m])) > {MOST_PREEMPTIONS:g}"


def _slow(target: AlertTarget, alert: str, key: str, limit: float) -> AlertingRule:
    name, family = key.upper(), HISTOGRAM_FAMILIES[key][0]
    # In the first bucket, histogram_quantile interpolates from zero; such a value must not raise an alert.
    judged = max(limit, FIRST_BUCKETS[key])
    expr = f"histogram_quantile(0.99, sum by ({BY}, le) (rate({family}_bucket{target.braces}[5m]))) > {judged:g}"
    return AlertingRule(
        alert,
        expr,
        "5m",
        "warning",
        f"{name} p99 is above its objective: {{{{ $labels.model_name }}}} on {{{{ $labels.instance }}}}",
        f"{name} p99 is {{{{ $value | humanizeDuration }}}}; the objective is {seconds(limit)} ({target.source}).",
    )


def rules_document(target: AlertTarget) -> dict[str, Any]:
    """The rules as a Prometheus rule file: one group."""
    group = f"vllm-console {target.name}".strip()
    return {"groups": [{"name": group, "rules": [_rule_document(rule) for rule in rules(target)]}]}


def _rule_document(rule: AlertingRule) -> dict[str, Any]:
    return {
        "alert": rule.alert,
        "expr": rule.expr,
        "for": rule.hold,
        "labels": {"severity": rule.severity},
        "annotations": {"summary": rule.summary, "description": rule.description},
    }


def rules_yaml(target: AlertTarget, scrape: Scrape | None = None) -> str:
    """The rule file as YAML, with a header that describes it and how to have the series scraped.

    Without the ``# ``, the header's lines from ``scrape_configs:`` on are that section of ``prometheus.yml``; in the
    rule file itself Prometheus would reject them.
    """
    series = target.match or "every vLLM server that is scraped; --match narrows them down"
    header = comment(
        f"Limits: {_one_line(target.source)}. Series: {_one_line(series)}. For vLLM 0.12 and later.",
        "",
        "Prometheus finds the servers with this in its prometheus.yml (or: vllm-console export scrape); add a target",
        "for each server, as seen from where Prometheus runs:",
        scrape_yaml(scrape or Scrape()).rstrip(),
    )
    return header + yaml_document(rules_document(target))


def _one_line(text: str) -> str:
    return plain(" ".join(text.split()))


# -- what Prometheus needs to scrape vLLM -----------------------------------------------------------------------------


EXAMPLE = "localhost:8000"
"""Placeholder for an unknown server."""

JOB = "vllm"
_INTERVAL = "15s"
"""Gives four samples in one minute, the shortest window in the rules."""
_JOB = lazy_pattern(r'(?:^|,)\s*job\s*=\s*"((?:[^"\\]|\\.)*)"')


class Scrape(msgspec.Struct, frozen=True):
    """One scrape job. ``target`` is host and port; ``job`` is the name that matchers such as ``job="vllm"`` select."""

    target: str = EXAMPLE
    job: str = JOB
    tls: bool = False


def job_of(match: str) -> str:
    """The job name selected by label matchers; ``vllm`` if they select none."""
    found = _JOB.search(match)
    try:
        return str(json.loads(f'"{found[1]}"')) or JOB if found is not None else JOB
    except ValueError:
        return JOB


def scrape_document(scrape: Scrape) -> dict[str, Any]:
    """The scrape section of Prometheus's configuration. vLLM needs no key for ``/metrics``."""
    job: dict[str, Any] = {"job_name": scrape.job, "metrics_path": "/metrics", "scrape_interval": _INTERVAL}
    if scrape.tls:
        job["scheme"] = "https"
    return {"scrape_configs": [{**job, "static_configs": [{"targets": [scrape.target]}]}]}


def scrape_yaml(scrape: Scrape) -> str:
    """The section as YAML, for ``prometheus.yml`` or a file listed in its ``scrape_config_files``."""
    return yaml_document(scrape_document(scrape))
