"""Servers as text: a table of all, a description of one."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_console.fleet.model import ServerView
from vllm_console.format import UNKNOWN, count, duration, percent, seconds
from vllm_console.telemetry.model import Quantiles
from vllm_console.text import plain
from vllm_launchers.plan.shell_words import line_of

COLUMNS = (
    ("NAME", 14),
    ("PRESET", 16),
    ("STATE", 20),
    ("ENGINE", 22),
    ("PORT", 6),
    ("KV", 5),
    ("RUN", 5),
    ("WAIT", 5),
    ("PREEMPT/min", 12),
    ("TTFT99", 8),
    ("ITL99", 8),
    ("TOK/S", 7),
)


def table(servers: Sequence[ServerView], now: float) -> list[str]:
    """One line per server under a heading, each reason in a line of its own below."""
    lines = ["".join(f"{title:<{width}}" for title, width in COLUMNS).rstrip()]
    for server in servers:
        cells = [plain(cell) for cell in _cells(server, now)]
        lines.append("".join(f"{cell:<{width}}" for cell, (_, width) in zip(cells, COLUMNS, strict=True)).rstrip())
        if server.reason and not server.state.alive:
            lines.append(f"  {plain(server.reason)}")
        if server.notice:
            lines.append(f"  {plain(server.notice)}")
    return lines


def _cells(server: ServerView, now: float) -> tuple[str, ...]:
    window = server.window
    latencies = window.latencies if window else {}
    return (
        server.name,
        server.preset or (f"by {server.owner}" if server.owner else UNKNOWN),
        f"{server.state} {duration(now - server.state_since)}" if server.state_since else str(server.state),
        server.engine.label if server.engine else UNKNOWN,
        str(server.port or UNKNOWN),
        percent(window.kv_cache_usage if window else None),
        count(window.requests_running if window else None),
        count(window.requests_waiting if window else None),
        count(window.preemptions_per_minute if window else None),
        seconds(_p99(latencies.get("ttft"))),
        seconds(_p99(latencies.get("itl"))),
        count(window.generation_tokens_per_second if window else None),
    )


def _p99(quantiles: Quantiles | None) -> float | None:
    return quantiles.p99 if quantiles else None


def describe(server: ServerView, now: float) -> list[str]:
    """One server in full, for people."""
    lines = [
        f"{server.name}  {server.state} for {duration(now - server.state_since)}"
        + ("  (simulated: no GPU is used)" if server.simulated else ""),
    ]
    if server.reason:
        lines.append(f"  reason      {server.reason}")
    if server.notice:
        lines.append(f"  note        {server.notice}")
    facts = {
        "owner": server.owner if not server.ours else "",
        "preset": server.preset,
        "model": server.model,
        "engine": server.engine.label if server.engine else "",
        "address": server.url if server.port else "",
        "pid": str(server.pid or ""),
        "GPUs": ",".join(map(str, server.gpus)),
        "generation": str(server.generation),
        "log": server.log_path,
    }
    lines += [f"  {title:<11} {value}" for title, value in facts.items() if value]
    if server.argv:
        lines.append(f"  command     {line_of(server.argv)}")
    if server.stages:
        lines.append("  start-up    " + "  ".join(f"{s.name} {seconds(s.seconds)}" for s in server.stages))
    if server.downtime_seconds is not None:
        lines.append(f"  downtime    {duration(server.downtime_seconds)} at the last restart")
    lines += _describe_window(server)
    lines += _describe_conditions(server, now)
    return [plain(line) for line in lines]


def _describe_conditions(server: ServerView, now: float) -> list[str]:
    if not server.conditions:
        return []
    from vllm_console.diagnosis.document import condition_lines

    lines = [""]
    for condition in server.conditions:
        lines += [f"  {line}" for line in condition_lines(condition, f"for {duration(now - condition.since)}")]
    return lines


def _describe_window(server: ServerView) -> list[str]:
    window = server.window
    if window is None:
        return []
    lines = [
        f"  KV cache    {percent(window.kv_cache_usage)} of {count(window.kv_cache_tokens)} tokens, "
        f"prefix hits {percent(window.prefix_hit_rate)}",
        f"  requests    {count(window.requests_running)} running, {count(window.requests_waiting)} waiting, "
        f"{count(window.preemptions_per_minute)} preemptions/min",
        f"  tokens/s    {count(window.generation_tokens_per_second)} out, {count(window.prompt_tokens_per_second)} in",
    ]
    for name, value in window.latencies.items():
        lines.append(f"  {name:<11} p50 {seconds(value.p50)}  p90 {seconds(value.p90)}  p99 {seconds(value.p99)}")
    return lines
