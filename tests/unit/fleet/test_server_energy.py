"""A server's energy in `status`: from recorders' data, only of its current process and its own GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from vllm_console.cli.servers import describe_server
from vllm_console.fleet.gpus import recent_energy
from vllm_console.fleet.snapshot import ServerView
from vllm_console.history.energy import Energy, Tariff
from vllm_console.history.gpu_samples import GPU_SAMPLES
from vllm_console.history.store import HISTORY, HistoryWriter
from vllm_console.metrics.sample import EngineSample, Sample
from vllm_launchers.keeper import folders
from vllm_launchers.keeper.records import Generation, LaunchSpec, ProcessIdentity, ServerRecord, State
from vllm_launchers.launch.details import Details, pack

NOW, PID = 1_700_000_000.0, 4100


def record(pid: int = PID, state: State = State.READY) -> ServerRecord:
    spec = LaunchSpec(("vllm",), "127.0.0.1", 1, details=pack(Details(gpus=(0,))))
    generation = Generation(2, spec, NOW - 400, ready_at=NOW - 300)
    process = ProcessIdentity(pid, 1, "boot")
    return ServerRecord("chat", state, NOW - 300, NOW - 9000, (generation,), server=process)


@pytest.fixture
def measured(tmp_path: Path) -> Callable[..., Energy | None]:
    """``measured(record, gpus, until)``: ten minutes at 360 W, 40 tokens per second since generation 2 started."""
    folder = folders.server_folder(tmp_path, "chat")
    folder.mkdir(parents=True)
    writer = HistoryWriter(folder / HISTORY)
    for second in range(-600, 1):
        counted = (second + 400) * 40.0 if second > -400 else 9e9
        engine = EngineSample(generation_tokens_total=counted, prompt_tokens_total=counted)
        writer.append(Sample(NOW + second, {"0": engine}), 2 if second > -400 else 1)
    writer.close()

    def measured(server: ServerRecord, gpus: tuple[int, ...] = (0,), until: float = 0.0, **facts: Any) -> Energy | None:
        gpu = {"index": 0, "used_by": [{"pid": PID}]}
        lines = [
            {"at": NOW + second, "gpus": [{**gpu, "energy_mj": (second + 900) * 360_000, **facts}]}
            for second in range(-598, 1, 5)
            if second <= until
        ]
        (tmp_path / GPU_SAMPLES).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return recent_energy(tmp_path, server, gpus, NOW)

    return measured


def test_energy_covers_the_time_since_ready(measured: Callable[..., Energy | None]) -> None:
    found = measured(record())
    assert found is not None
    assert NOW - 300 <= found.since <= NOW - 290
    assert found.per_output_token == pytest.approx(9.0)
    assert found.per_token == pytest.approx(4.5)
    view = ServerView(name="chat", state=State.READY, state_since=NOW - 300)
    described = describe_server(view, NOW, replace(found, tariff=Tariff(0.5, "CHF")))
    lines = [line for line in described if "J per" in line or "CHF" in line]
    assert lines[0].startswith("  energy      9 J per output token, 4.5 J per token: GPU 0 in the last 4m")
    assert lines[1].strip() == "1.25 CHF per million output tokens, 0.625 CHF with prompts"
    assert not [line for line in describe_server(view, NOW) if "energy" in line]


def test_energy_of_another_process_gpu_or_time_is_not_shown(measured: Callable[..., Energy | None]) -> None:
    assert measured(record(pid=4200)) is None, "an earlier process held the GPU"
    assert measured(record(state=State.STOPPED)) is None
    assert measured(record(), gpus=(0, 1)) is None
    assert measured(record(), until=-60) is None, "no samples are taken"
    assert measured(record(), energy_mj=None) is None
    assert measured(record(), used_by=[{"pid": PID}, {"pid": 7}]) is None
