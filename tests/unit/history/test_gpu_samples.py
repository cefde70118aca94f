"""GPU samples of the recorders: one of them samples for all, and the others read its file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from vllm_console.history.gpu_history import GPU_HISTORY, last_cards
from vllm_console.history.gpu_samples import GPU_SAMPLES, GpuSampleStore, read_gpu_samples
from vllm_launchers.host.gpu.host import Gpu, Holder, Host, Link

TAKES_TURNS = """
import json, sys, time
from pathlib import Path
from vllm_console.history import gpu_samples
from vllm_console.history.gpu_samples import GpuSampleStore, read_gpu_samples
gpu_samples.STEP_SECONDS = 0.02
path = Path(sys.argv[1])
first, second = GpuSampleStore(path), GpuSampleStore(path)
def until(count, *looks):
    end = time.monotonic() + 60
    while len(read_gpu_samples(path, 0.0)) < count and time.monotonic() < end:
        for one in looks:
            one.record()
        time.sleep(0.01)
    return len(read_gpu_samples(path, 0.0))
counts = [until(3, first, second)]
looked = [first._watch is not None, second._watch is not None]
first.close()
counts.append(until(counts[0] + 2, second))
host = read_gpu_samples(path, 0.0)[-1]
gpu = host.gpus[0]
print(json.dumps([looked, counts, [gpu.name, gpu.free_gib, gpu.pcie_width], [h.pid for h in gpu.holders],
                  [[link.a, link.b, link.kind] for link in host.links]]))
"""


class Watching:
    """Replaces the monitor and returns these hosts."""

    def __init__(self, *hosts: Host) -> None:
        self.hosts = list(hosts)

    def start(self) -> None:
        """Nothing to start."""

    def latest(self) -> Host:
        return self.hosts.pop(0) if len(self.hosts) > 1 else self.hosts[0]

    def close(self) -> None:
        """Nothing to end."""


@pytest.fixture
def sample_writer(tmp_path: Path, monkeypatch: Any) -> Callable[..., GpuSampleStore]:
    """``sample_writer(host, …)`` is a writer whose driver returns these hosts in turn."""

    def sample_writer(*hosts: Host) -> GpuSampleStore:
        monkeypatch.setattr("vllm_launchers.host.gpu.host.has_driver", lambda: True)
        monkeypatch.setattr("vllm_launchers.host.gpu.monitor.GpuMonitor", lambda **_: Watching(*hosts))
        return GpuSampleStore(tmp_path / GPU_SAMPLES)

    return sample_writer


def host(at: float, **facts: Any) -> Host:
    return Host(at=at, gpus=(Gpu(index=0, name="NVIDIA L40S", memory_gib=45.0, **facts),), links=(Link(0, 1, "SYS"),))


def test_one_process_samples_and_another_takes_over(
    make_stub: Callable[[Host], Any], recorded: Callable[[str], Host], tmp_path: Path
) -> None:
    seen = recorded("4xa6000")
    stub = make_stub(seen)
    sampled, (before, after), facts, pids, links = stub.run(TAKES_TURNS, str(tmp_path / GPU_SAMPLES))
    assert sampled == [True, False]
    assert before >= 3
    assert after >= before + 2
    assert facts == [seen.gpus[0].name, pytest.approx(seen.gpus[0].free_gib, abs=0.01), seen.gpus[0].pcie_width]
    assert pids == [holder.pid for holder in seen.gpus[0].holders]
    assert [0, 2, "SYS"] in links
    assert (tmp_path / GPU_SAMPLES).stat().st_mode & 0o777 == 0o600
    recorded_cards = last_cards(tmp_path / GPU_HISTORY)
    assert [card.uuid for card in recorded_cards] == [gpu.uuid for gpu in seen.gpus], "their history is kept, too"
    assert {card.temperature_slowdown_c for card in recorded_cards} == {95}


def test_samples_are_restored_without_secrets(sample_writer: Callable[..., GpuSampleStore], tmp_path: Path) -> None:
    holder = Holder(9, "anna", 1.5, command="train --hf-token hf_abcdefghijklmnopqrstuvwxyz0123456789", ancestors=(8,))
    seen = host(100.0, free_gib=4.0, throttle=("power limit",), pcie_width=4, pcie_width_max=16, used_by=(holder,))
    sample_writer(seen).record()
    (found,) = read_gpu_samples(tmp_path / GPU_SAMPLES, 0.0)
    command = found.gpus[0].holders[0].command
    assert found == replace(
        seen, gpus=(replace(seen.gpus[0], used_by=(replace(holder, command=command),)),)
    )  # fmt: skip
    assert command is not None
    assert "hf_abc" not in command


def test_each_sample_is_written_once_and_none_of_a_hung_driver(
    sample_writer: Callable[..., GpuSampleStore], tmp_path: Path
) -> None:
    hung = replace(host(102.0), problem="driver not answering since 12:00:00")
    writer = sample_writer(Host(at=99.0), host(100.0), host(100.0), hung, host(105.0))
    for _ in range(6):
        writer.record()
    assert [one.at for one in read_gpu_samples(tmp_path / GPU_SAMPLES, 0.0)] == [100.0, 105.0]
    assert [one.at for one in read_gpu_samples(tmp_path / GPU_SAMPLES, 100.0)] == [105.0]


def test_old_and_damaged_samples_are_removed(sample_writer: Callable[..., GpuSampleStore], tmp_path: Path) -> None:
    path = tmp_path / GPU_SAMPLES
    path.write_bytes(b'{"at":1.0,"gpus":[]}\n{"at":9990.0,"gpus":[{"ind\n\xff\xfe\n')
    sample_writer(host(10_000.0)).record()
    assert [one.at for one in read_gpu_samples(path, 0.0)] == [10_000.0]
    assert b'"at":1.0,' not in path.read_bytes()


def test_newest_samples_of_a_file_that_is_too_large_are_kept(
    sample_writer: Callable[..., GpuSampleStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / GPU_SAMPLES
    path.write_text("".join(f'{{"at":{at}.0,"gpus":[]}}\n' for at in range(9000, 9900)))
    monkeypatch.setattr("vllm_console.history.gpu_samples.MOST_BYTES", 5000)
    sample_writer(host(10_000.0)).record()
    found = [one.at for one in read_gpu_samples(path, 0.0)]
    assert found[-1] == 10_000.0
    assert found[:-1] == [float(at) for at in range(9900 - len(found) + 1, 9900)]
    assert path.stat().st_size <= 5000


def test_unwritable_folder_is_reported_and_retried(
    sample_writer: Callable[..., GpuSampleStore], tmp_path: Path
) -> None:
    path = tmp_path / GPU_SAMPLES
    path.mkdir()
    writer = sample_writer(host(100.0), host(105.0))
    writer.record()
    assert "are lost" in writer.trouble
    path.rmdir()
    writer.record()
    assert writer.trouble == ""
    assert [one.at for one in read_gpu_samples(path, 0.0)] == [105.0]


def test_nothing_is_kept_without_a_driver(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("vllm_launchers.host.gpu.host.has_driver", lambda: False)
    writer = GpuSampleStore(tmp_path / GPU_SAMPLES)
    for _ in range(3):
        writer.record()
    assert not (tmp_path / GPU_SAMPLES).exists()
    assert read_gpu_samples(tmp_path / GPU_SAMPLES, 0.0) == []
    assert not (tmp_path / GPU_HISTORY).exists()
    assert writer.trouble == ""
    writer.close()
