from __future__ import annotations

import asyncio
from typing import Any

from vllm_launchers.engine_model.scheduler import Request
from vllm_launchers.simulated.engine import SimulatedEngine
from vllm_launchers.simulated.server import stats_line


async def test_stats_line_reports_activity_and_stops_when_idle(lab: Any) -> None:
    engine = SimulatedEngine(lab("--max-model-len 4096").core, None, speed=100)
    assert stats_line(0, engine, 10.0) == ""
    running = asyncio.create_task(engine.run())
    engine.submit(Request("a", list(range(200)), 50, 50), asyncio.Event())
    async with asyncio.timeout(20):
        await engine.drained()
    running.cancel()
    assert stats_line(0, engine, 10.0) == (
        "Engine 000: Avg prompt throughput: 20.0 tokens/s, Avg generation throughput: 5.0 tokens/s, "
        "Running: 0 reqs, Waiting: 0 reqs, GPU KV cache usage: 0.0%, Prefix cache hit rate: 0.0%"
    )
    assert "Avg generation throughput: 0.0 tokens/s" in stats_line(0, engine, 10.0)
    assert stats_line(0, engine, 10.0) == ""
