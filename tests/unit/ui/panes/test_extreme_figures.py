"""A broken or hostile server may report any number: it is drawn or omitted, and never crashes the console."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
from msgspec.structs import replace

from vllm_console.fleet.judge import Judge
from vllm_console.history.timeline import Timeline
from vllm_console.metrics.parse import parse_metrics
from vllm_console.runs.windows import Windows
from vllm_console.ui.panes.kv_cache import kv_cache_lines
from vllm_console.ui.panes.latency import latency_lines
from vllm_console.ui.panes.preemptions import preemption_lines
from vllm_console.ui.panes.sparks import spark_lines
from vllm_console.ui.panes.state import state_lines
from vllm_console.ui.panes.throughput import throughput_lines
from vllm_console.ui.parts.pane_layout import PANES
from vllm_console.ui.widgets.chart import ChartView

NOW = 1_790_000_000.0
TOTALS = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total",
    "generation_tokens_total", "num_preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total",
)  # fmt: skip
HISTOGRAMS = (
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_prompt_tokens", "request_generation_tokens",
)  # fmt: skip
POOLS = (
    ("5e-324", "1e-308", "1e308", "1.7e308", "-1", "-1e308", "0", "1", "1e15", "9007199254740993", "NaN", "+Inf"),
    ("5e-324", "0", "1"),
    ("1.7e308", "1e308", "0"),
    ("1e308",),
    ("5e-324",),
)


def page(pool: tuple[str, ...], chance: random.Random) -> str:
    lines = []
    for engine in ("0", "1"):
        labels = f'engine="{engine}",model_name="m"'
        lines += [f"vllm:{name}{{{labels}}} {chance.choice(pool)}" for name in TOTALS]
        lines.append(f'vllm:request_success_total{{{labels},finished_reason="stop"}} {chance.choice(pool)}')
        for name in HISTOGRAMS:
            buckets = ("0.1", "1", "10", "+Inf")
            lines += [f'vllm:{name}_bucket{{{labels},le="{end}"}} {chance.choice(pool)}' for end in buckets]
            lines += [f"vllm:{name}_{part}{{{labels}}} {chance.choice(pool)}" for part in ("sum", "count")]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("pool", POOLS)
def test_extreme_values_are_read_and_drawn_without_a_crash(pool: tuple[str, ...], fakes: ModuleType) -> None:
    chance = random.Random(7)
    timeline, windows, judge = Timeline(5.0, 181), Windows(10), Judge("chat")
    for second in range(0, 120, 3):
        sample = parse_metrics(page(pool, chance), NOW + second)
        timeline.append(sample, 1)
        windows.append(sample)
        judge.append(sample, 1)
        view = replace(
            fakes.chat(NOW), sample=sample, window=timeline.window(), series=timeline.series(NOW + second), judged=()
        )
        for lines in (kv_cache_lines, preemption_lines, latency_lines, throughput_lines):
            for log in (None, True, False):
                assert lines(view, NOW + second, 60, 8, ChartView(log=log))
        assert state_lines(view, NOW, 80, 20)
        assert spark_lines(view, PANES[:4], 100)
