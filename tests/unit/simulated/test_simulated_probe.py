"""The simulated engine's records add up to what it did, like vLLM's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from vllm_console.history.probe_records import ProbeReader
from vllm_launchers.engine_model.scheduler import Request
from vllm_launchers.probe.plugin.vllm_console_probe import FOLDER, Probe, Recorder
from vllm_launchers.simulated.engine import SimulatedEngine, probe_of


async def test_steps_and_requests_add_up(lab: Any, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, {})
    core = lab("--max-model-len 4096 --max-num-batched-tokens 2048 --max-num-seqs 2 --enable-chunked-prefill").core
    engine = SimulatedEngine(core, None, speed=100, probe=Probe(recorder))
    running = asyncio.create_task(engine.run())
    for number, prompt in enumerate((99, 2999, 399)):
        engine.submit(Request(f"0_cmpl-{number}-0-0a1b2c3d", [number, *range(prompt)], 20, 20), asyncio.Event())
    async with asyncio.timeout(20):
        await engine.drained()
    running.cancel()
    recorder.close()
    reader = ProbeReader(tmp_path)
    steps, requests = reader.steps(), reader.requests()
    assert {request.id for request in requests} == {"cmpl-0-0", "cmpl-1-0", "cmpl-2-0"}
    assert {request.finish_reason for request in requests} == {"length"}
    assert sum(step.generation_tokens or 0 for step in steps) == 60
    assert sum(step.prompt_tokens or 0 for step in steps) == 100 + 3000 + 400
    assert sum(step.intervals for step in steps) == 57
    assert max(step.running or 0 for step in steps) == 2
    assert max(step.waiting or 0 for step in steps) == 1
    assert all(value is not None and value >= 0 for request in requests for value in request[7:12])


def test_no_probe_without_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    assert probe_of(0) is None
