"""GPU history in a console: that of the recorders, or its own if no recorder writes."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from vllm_console.fleet import chart_history
from vllm_console.fleet.gpu_charts import GpuCharts, history_path
from vllm_console.fleet.gpus import occupied
from vllm_console.history.gpu_history import GPU_HISTORY, GpuHistoryReader, GpuHistoryWriter
from vllm_console.history.gpu_samples import GPU_SAMPLES
from vllm_console.history.time_view import CHART_RANGES, TimeView
from vllm_launchers.host.gpu.document import read_host
from vllm_launchers.host.gpu.host import Gpu, Host
from vllm_launchers.private import open_file

NOW = 1_790_000_000.0
NAMED = {one.name: one for one in CHART_RANGES}
GPU = Gpu(0, uuid="GPU-a", utilization=50.0, power_w=100.0, power_limit_w=300.0)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chart_history, "WAIT_SECONDS", 10.0)


@pytest.fixture
def charts(tmp_path: Path) -> Iterator[GpuCharts]:
    """Two hours of one GPU: busy except for the last ten minutes."""
    writer = GpuHistoryWriter(tmp_path / GPU_HISTORY)
    for second in range(-7200, 0, 5):
        busy = second < -600
        seen = replace(GPU, utilization=90.0 if busy else 0.0, power_w=310.0 if second == -3600 else 100.0)
        writer.append(Host(gpus=(seen,)), NOW + second)
    writer.close()
    charts = GpuCharts(tmp_path)
    yield charts
    charts.close()


def column(charts: GpuCharts, figure: str, view: TimeView, now: float = NOW) -> list[float]:
    return [value for value in charts.chart(GPU, now, view).series.values[figure] if value is not None]


@pytest.mark.parametrize("name", ["5m", "15m", "1h", "6h", "24h", "all"])
def test_every_range_shows_what_it_covers(charts: GpuCharts, name: str) -> None:
    view = TimeView(NAMED[name])
    use = column(charts, "utilization", view)
    reach = min(NAMED[name].seconds, 7200.0)
    busy = max(0.0, reach - 600) / reach
    assert sum(use) / len(use) == pytest.approx(90 * busy, abs=8)
    assert (max(column(charts, "power_w", view)) == 310.0) is (reach > 3600)
    series = charts.chart(GPU, NOW, view).series
    assert series.recorded_from == pytest.approx(NOW - 7200, abs=60)
    assert not series.loading


def test_earlier_end_shows_that_time_and_closes_the_file(charts: GpuCharts, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[GpuHistoryReader] = []
    close = GpuHistoryReader.close
    monkeypatch.setattr(GpuHistoryReader, "close", lambda self: (closed.append(self), close(self)))
    view = TimeView(NAMED["15m"], end=NOW - 3000)
    assert set(column(charts, "utilization", view)) == {90.0}
    assert len(closed) == 1, "a file that was read completely is not kept open"


def test_late_rows_are_added(charts: GpuCharts, tmp_path: Path) -> None:
    view = TimeView(NAMED["5m"])
    assert column(charts, "utilization", view)[-1] == 0.0
    charts.chart(GPU, NOW + 6, view)  # a row of five seconds ago is not written yet
    writer = GpuHistoryWriter(tmp_path / GPU_HISTORY)
    for second in (1, 6):
        writer.append(Host(gpus=(replace(GPU, utilization=77.0),)), NOW + second)
    writer.close()
    assert column(charts, "utilization", view, NOW + 9)[-2:] == [77.0, 77.0]


def test_console_records_only_without_a_recorder(tmp_path: Path) -> None:
    host, path = Host(gpus=(GPU,)), tmp_path / GPU_HISTORY
    read_only = GpuCharts(tmp_path, write=False)
    read_only.record(host, NOW)
    assert not path.exists()
    console = GpuCharts(tmp_path)
    recorder = open_file(tmp_path / (GPU_SAMPLES + ".lock"), os.O_RDWR)
    fcntl.flock(recorder, fcntl.LOCK_EX)
    console.record(host, NOW)
    assert not path.exists(), "a recorder does"
    os.close(recorder)
    console.record(replace(host, problem="driver not answering"), NOW)
    assert not path.exists(), "old samples are not recorded"
    console.record(host, NOW)
    assert column(console, "utilization", TimeView(), NOW + 1) == [50.0]
    recorder = open_file(tmp_path / (GPU_SAMPLES + ".lock"), os.O_RDWR)
    fcntl.flock(recorder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(recorder)
    console.close()


def test_file_system_without_locks_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    console = GpuCharts(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", flock)
        console.record(Host(gpus=(GPU,)), NOW)
    assert console.trouble.startswith("GPU history is lost: ")
    assert console.trouble.endswith("gpu-samples.jsonl.lock can't be locked: No locks available")
    console.record(Host(gpus=(GPU,)), NOW)
    assert console.trouble == ""


def test_no_trouble_is_reported_before_the_first_server(tmp_path: Path) -> None:
    console = GpuCharts(tmp_path / "none yet")
    console.record(Host(gpus=(GPU,)), NOW)
    assert console.trouble == ""
    console.close()
    console.close()


def test_recorded_host_has_its_own_history(tmp_path: Path) -> None:
    host = read_host(Path("4xa6000"))
    console = GpuCharts(tmp_path, host)
    console.record(host, NOW)
    chart = console.chart(host.gpus[1], NOW + 1, TimeView())
    assert chart.card.power_limit_w == 300
    assert chart.card.temperature_slowdown_c == 95
    assert [value for value in chart.series.values["temperature_c"] if value is not None] == [34.0]
    assert history_path(tmp_path, host).name == "gpu-history.gpubox.sqlite"
    assert not (tmp_path / GPU_HISTORY).exists()
    console.close()


def test_missing_history_is_ok_and_a_foreign_file_is_reported(tmp_path: Path) -> None:
    console = GpuCharts(tmp_path)
    assert console.chart(GPU, NOW, TimeView()).problem == ""
    (tmp_path / GPU_HISTORY).write_bytes(b"something else " * 100)
    assert "damaged" in console.chart(GPU, NOW, TimeView()).problem
    console.close()


def test_simulated_tensor_parallelism_uses_the_links_of_its_gpus(fakes: Any) -> None:
    host = read_host(Path("4xa6000"))
    server = replace(
        fakes.coder(NOW), gpus=(2, 3), model="meta-llama/Llama-3.1-8B-Instruct", flags={"tensor-parallel-size": 2}
    )
    tokens = server.window.generation_tokens_per_second + server.window.prompt_tokens_per_second
    seen = occupied(host, [server])
    expected = tokens * 4 * 32 * 4096 / 1e9
    assert seen.gpus[2].nvlink_sent_gbs == pytest.approx(expected, rel=0.05)
    assert sum(link.sent_gbs or 0.0 for link in seen.gpus[3].nvlinks) == pytest.approx(expected, rel=0.05)
    assert seen.gpus[1].nvlink_sent_gbs is None, "its traffic is unknown"
    alone = occupied(host, [replace(server, gpus=(1,), flags={})])
    assert alone.gpus[1].nvlink_sent_gbs == 0.0
