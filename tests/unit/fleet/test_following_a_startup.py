"""Startup progress in a console: the log, the model's cache, an earlier start, and silence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from vllm_console.fleet.startup_progress import (
    DOWNLOAD_BYTES,
    StartupProgress,
    earlier_times,
    remember_times,
    times_store,
)
from vllm_launchers import values
from vllm_launchers.keeper.records import Generation, LaunchSpec, ServerRecord, State
from vllm_launchers.launch.details import Details, pack
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.modelfacts.read import stored_bytes

BEGUN = 1_767_271_267.0
ENGINE = Engine(EngineKind.VLLM, ("vllm",), "0.33.0", "cuda", "/opt/vllm")
LOG = """\
Triton is installed
Resolved architecture: LlamaForCausalLM
Starting to load model m...
"""


def details(**more):
    return Details(preset="chatbot", model="meta/Llama", engine=ENGINE, gpu_kind="L40S", **more)


def record(of: Details, **more) -> ServerRecord:
    generation = Generation(1, LaunchSpec(("vllm",), "127.0.0.1", 8000, details=pack(of)), BEGUN)
    made = ServerRecord("chat", State.STARTING, BEGUN, BEGUN, (values.replace(generation, **more),))
    return values.replace(made, state=State.READY) if more.get("ready_at") else made


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "server.log"
    path.write_text(LOG)
    os.utime(path, (BEGUN, BEGUN))
    return path


@pytest.fixture
def blobs(tmp_path) -> Path:
    folder = tmp_path / "hub" / "models--meta--Llama" / "blobs"
    folder.mkdir(parents=True)
    return folder


def cached(tmp_path, **more):
    return details(environment={"HF_HUB_CACHE": str(tmp_path / "hub")}, **more)


def grow(blobs: Path, megabytes: int) -> None:
    with (blobs / "aa.incomplete").open("wb") as file:
        file.write(b"\1" * (megabytes << 20))


def names(found):
    return [stage.name for stage in found[0]]


def test_growing_cache_is_a_download_with_bytes_and_rate(tmp_path, log, blobs):
    of = cached(tmp_path)
    progress = StartupProgress(log, record(of), of, {})
    assert "download" not in names(progress.update(record(of), BEGUN + 5))
    grow(blobs, 4)
    assert "download" not in names(progress.update(record(of), BEGUN + 6)), "a tokenizer is not a download"
    grow(blobs, 24)
    stages, _ = progress.update(record(of), BEGUN + 9)
    assert stages[-1].name == "download"
    assert stages[-1].detail == "24 MiB, 6 MiB/s"


def test_download_is_compared_with_the_planned_weights(tmp_path, log, blobs):
    of = cached(tmp_path, predicted={"weights_gib": 0.05}, flags={"tensor-parallel-size": 2})
    progress = StartupProgress(log, record(of), of, {})
    progress.update(record(of), BEGUN + 5)
    grow(blobs, 51)
    stages, _ = progress.update(record(of), BEGUN + 8)
    assert stages[-1].detail.startswith("51 MiB of about 102 MiB, ")
    assert stages[-1].detail.endswith(" 50%")


def test_local_model_is_not_sought_in_the_cache(tmp_path, log):
    of = replace(cached(tmp_path), model=str(tmp_path))
    progress = StartupProgress(log, record(of), of, {})
    assert names(progress.update(record(of), BEGUN + 5))[-1] == "weights"


def test_silence_longer_than_usual_for_the_stage_is_reported(log):
    of = details()
    progress = StartupProgress(log, record(of), of, {})
    assert progress.update(record(of), BEGUN + 100)[1].quiet_seconds is None
    assert progress.update(record(of), BEGUN + 200)[1].quiet_seconds == 200
    os.utime(log, (BEGUN + 190, BEGUN + 190))
    assert progress.update(record(of), BEGUN + 201)[1].quiet_seconds is None


def test_growing_cache_counts_as_activity(tmp_path, log, blobs):
    of = cached(tmp_path)
    progress = StartupProgress(log, record(of), of, {})
    progress.update(record(of), BEGUN + 5)
    grow(blobs, (DOWNLOAD_BYTES >> 20) + 1)
    assert progress.update(record(of), BEGUN + 500)[1].quiet_seconds is None
    assert progress.update(record(of), BEGUN + 570)[1].quiet_seconds == 70


def test_progress_never_decreases(log):
    of = details()
    progress = StartupProgress(log, record(of), of, {"process": 5.0, "imports": 5.0, "config": 10.0, "weights": 80.0})
    first = progress.update(record(of), BEGUN + 60)[1].progress
    assert first is not None
    with log.open("a") as file:
        file.write("Loading safetensors checkpoint shards:   1% Completed | 1/99 [00:01<00:03,  1.10s/it]\n")
    second = progress.update(record(of), BEGUN + 61)[1].progress
    assert second is not None
    assert second.share >= first.share > 0.5


def test_memory_reported_by_the_engine_is_parsed(log):
    of = details()
    progress = StartupProgress(log, record(of), of, {})
    with log.open("a") as file:
        file.write("Model loading took 14.9890 GiB memory and 12.1 seconds\nGPU KV cache size: 176,240 tokens\n")
    report = progress.update(record(of), BEGUN + 5)[1].report
    assert (report.weights_gib, report.kv_tokens) == (14.989, 176_240)


def test_startup_progress_uses_the_previous_start(tmp_path, log):
    of = details(flags={"max-num-seqs": 64})
    over = record(of, ready_at=BEGUN + 60)
    assert remember_times(times_store(tmp_path), tmp_path, over)
    kept = earlier_times(tmp_path, of)
    assert set(kept) == {"process", "imports", "config", "weights"}
    assert sum(kept.values()) == pytest.approx(60)
    assert earlier_times(tmp_path, details(flags={"max-num-seqs": 32})) == kept, "other flags: the nearest start"
    assert earlier_times(tmp_path, replace(of, model="another")) == {}
    assert earlier_times(tmp_path, replace(of, engine=replace(ENGINE, version="0.8.0"))) == {}


def test_prepared_start_includes_its_preparation(tmp_path, log):
    """The next start may have to import vLLM itself."""
    of = details()
    assert remember_times(times_store(tmp_path), tmp_path, record(of, ready_at=BEGUN + 60))
    plain = earlier_times(tmp_path, of)
    log.write_text("prepared in 8.5 s\n" + log.read_text())
    assert remember_times(times_store(tmp_path), tmp_path, record(of, ready_at=BEGUN + 60))
    kept = earlier_times(tmp_path, of)
    assert kept["imports"] == pytest.approx(plain["imports"] + 8.5)
    assert sum(kept.values()) == pytest.approx(68.5)


def test_start_without_a_log_is_not_kept(tmp_path):
    assert not remember_times(times_store(tmp_path), tmp_path, record(details(), ready_at=BEGUN + 60))


def test_nothing_is_read_once_ready(log):
    of = details()
    progress = StartupProgress(log, record(of), of, {})
    done = progress.update(record(of, ready_at=BEGUN + 50), BEGUN + 60)
    log.unlink()
    assert progress.update(record(of, ready_at=BEGUN + 50), BEGUN + 70) == done
    assert done[1].progress is None


def test_stored_bytes_of_an_uncached_model_are_unknown(tmp_path, blobs):
    assert stored_bytes("no/model", tmp_path / "hub") is None
    assert stored_bytes("meta/Llama", tmp_path / "hub") == 0
    grow(blobs, 1)
    (blobs / "done").write_bytes(b"\1" * (1 << 20))
    assert stored_bytes("meta/Llama", tmp_path / "hub") == 2 << 20


def test_memory_of_a_limited_cache_is_not_the_available_memory(log):
    reported = "Available KV cache memory: 43.48 GiB\nGPU KV cache size: 1,280 tokens\n"
    log.write_text(LOG + reported)
    for flags, expected in (({}, 43.48), ({"num-gpu-blocks-override": 40}, None)):
        of = details(flags=flags)
        report = StartupProgress(log, record(of), of, {}).update(record(of), BEGUN + 5)[1].report
        assert (report.kv_gib, report.kv_tokens) == (expected, 1280)
