"""Screenshots of an ended ramp."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_console.fleet.background_commands import RampView
from vllm_console.runs.measurement import RAMP, Measurement
from vllm_console.ui.screens.ramp import RampScreen

LIMITS = {"ttft_p99_seconds": 1.0, "itl_p99_seconds": 0.1}
SENTENCE = "The objectives hold up to 9.4 req/s; at 11.3 req/s, TTFT p99 was 1.6s (limit 1s)."


def step(rate, ttft, itl, waiting=0):
    return {
        "rate": rate, "sent": round(60 * rate), "completed": round(58 * rate), "failed": 0,
        "ttft_seconds": {"p99": ttft}, "itl_seconds": {"p99": itl}, "e2e_seconds": {"p99": 3.0},
        "tokens_per_second": 150 * rate, "kv_cache_usage": 0.04 * rate, "preemptions": 0, "waiting": waiting,
        "attained": 0.999 if ttft < 1 else 0.93, "ok": ttft < 1,
    }  # fmt: skip


STEPS = (step(2.0, 0.21, 0.022), step(4.0, 0.24, 0.027), step(8.0, 0.55, 0.041, 2), step(16.0, 9.1, 0.092, 140),
         step(11.3, 1.6, 0.061, 21), step(9.51, 0.94, 0.048, 7))  # fmt: skip


def ended():
    result = Measurement(RAMP, 0.0, STEPS, 9.4, 9.2, "ttft_p99_seconds", SENTENCE, LIMITS)
    view = RampView(STEPS, LIMITS, running=False, result=result)
    return RampScreen(
        SimpleNamespace(fleet=SimpleNamespace(ramps=SimpleNamespace(view=lambda _: view))), "chat", "chat"
    )


def test_a_ramp_that_has_ended(snap_compare, alone):
    assert snap_compare(alone(ended), terminal_size=(120, 40))


@pytest.mark.parametrize("size", [(60, 15), (80, 24), (200, 60), (200, 20)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_a_ramp_at_other_sizes(snap_compare, alone, size):
    assert snap_compare(alone(ended), terminal_size=size)
