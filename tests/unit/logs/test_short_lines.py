"""Lines as a narrow pane shows them."""

from __future__ import annotations

import pytest

from vllm_console.ui.widgets.log_view import short_line

STATISTICS = (
    "Engine {rank}: Avg prompt throughput: 1758.4 tokens/s, Avg generation throughput: 1100.0 tokens/s, "
    "Running: 40 reqs, Waiting: 13 reqs, GPU KV cache usage: 62.3%, Prefix cache hit rate: 12.0%"
)


@pytest.mark.parametrize("prefix", ["(APIServer pid=11331) ", ""])
def test_periodic_line_is_shortened_to_its_values(prefix):
    line = f"{prefix}INFO 11-22 18:01:43 [loggers.py:259] {STATISTICS}"
    figures = "prompt 1758 tok/s · gen 1100 tok/s · run 40 · wait 13 · KV 62%"
    assert short_line(line.format(rank="000")) == f"18:01:43 {figures}"
    assert short_line(line.format(rank="003")) == f"18:01:43 engine 3 · {figures}"


def test_statistics_of_vllm_0_8_are_parsed():
    line = (
        "INFO 04-02 10:00:01 [metrics.py:481] Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 8.1 "
        "tokens/s, Running: 1 reqs, Swapped: 0 reqs, Pending: 2 reqs, GPU KV cache usage: 0.1%, CPU KV cache usage: 0%."
    )
    assert short_line(line) == "10:00:01 prompt 0 tok/s · gen 8 tok/s · run 1 · wait 2 · KV 0%"


@pytest.mark.parametrize(
    ("line", "short"),
    [
        ("(APIServer pid=7) INFO:     Application startup complete.", "Application startup complete."),
        ("INFO 11-22 18:01:43 [core.py:5] Loading", "18:01:43 Loading"),
        ("(EngineCore_0 pid=9) WARNING 11-22 18:01:43 [a/b.py:5] Slow", "18:01:43 WARNING Slow"),
        ('(EngineCore_0 pid=9) ERROR 11-22 18:01:43 [core.py:700]   File "x.py"', '18:01:43 ERROR   File "x.py"'),
        ("200 OK ×14/s (143 in 10s)  POST /v1/completions", "200 OK ×14/s (143 in 10s)  POST /v1/completions"),
        ("    indented", "    indented"),
        ("", ""),
    ],
)
def test_prefix_of_a_message_is_removed(line, short):
    assert short_line(line) == short
