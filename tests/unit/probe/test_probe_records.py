"""The probe: what it records of vLLM's statistics, that it never disturbs vLLM, and how its files are read."""

from __future__ import annotations

import ast
import errno
import itertools
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from enum import IntEnum
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_console.history.probe_records import (
    EngineStep,
    FinishedRequest,
    FirstToken,
    Interval,
    ProbeReader,
    ProbeSpans,
    Resumed,
)
from vllm_launchers.probe.plugin import vllm_console_probe as plugin
from vllm_launchers.probe.plugin.vllm_console_probe import HEADER_BYTES, Probe, Recorder

NAME = "vllm_console_probe"


class FinishReason(IntEnum):
    """As in vLLM: an integer whose text is a word; 0 is the usual end."""

    STOP = 0
    LENGTH = 1

    def __str__(self) -> str:
        return self.name.lower()


def scheduler_stats(**more: object) -> SimpleNamespace:
    cache = SimpleNamespace(queries=120, hits=96)
    values = {"num_running_reqs": 3, "num_waiting_reqs": 2, "num_skipped_waiting_reqs": 1, "kv_cache_usage": 0.25}
    return SimpleNamespace(**{**values, "prefix_cache_stats": cache, "kv_cache_eviction_events": [], **more})


def finished(**more: object) -> SimpleNamespace:
    values: dict[str, object] = {
        "request_id": "cmpl-1", "num_prompt_tokens": 120, "num_generation_tokens": 40, "num_cached_tokens": 96,
        "queued_time": 0.1, "prefill_time": 0.2, "decode_time": 0.7, "e2e_latency": 1.1, "num_preemptions": 1,
        "finish_reason": FinishReason.STOP,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **more})


def iteration_stats(*requests: SimpleNamespace, **more: object) -> SimpleNamespace:
    values = {"num_prompt_tokens": 120, "num_generation_tokens": 3, "num_preempted_reqs": 1}
    intervals = {"inter_token_latencies_iter": [0.02, 0.01], "iteration_timestamp": time.time()}
    return SimpleNamespace(finished_requests=list(requests), **{**values, **intervals, **more})


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    made = Recorder(tmp_path / "probe", {"vllm": "0.32.0"})
    yield made
    made.close()


def written(recorder: Recorder, folder: Path) -> tuple[list[EngineStep], list[FinishedRequest]]:
    """The records in the folder once the recorder has ended."""
    recorder.close()
    reader = ProbeReader(folder)
    return reader.steps(), reader.requests()


def test_step_and_request_are_read_as_reported(recorder: Recorder, tmp_path: Path) -> None:
    before = time.time()
    Probe(recorder, 2).record(scheduler_stats(), iteration_stats(finished()))
    (step,), (request,) = written(recorder, tmp_path / "probe")

    assert before - 0.01 <= step.at <= time.time() + 0.01
    assert (step.engine, step.running, step.waiting, step.kv_usage) == (2, 3, 3, 0.25)
    assert (step.cache_queries, step.cache_hits) == (120, 96)
    assert (step.prompt_tokens, step.generation_tokens, step.preempted) == (120, 3, 1)
    assert step.intervals == 2
    assert step.shortest_interval == pytest.approx(0.01)
    assert step.longest_interval == pytest.approx(0.02)
    assert step.evictions is None, "vLLM reports them only with --kv-cache-metrics"
    assert step.context_tokens is None
    assert (request.id, request.engine, request.finish_reason) == ("cmpl-1", 2, "stop")
    assert (request.prompt_tokens, request.output_tokens, request.cached_tokens) == (120, 40, 96)
    assert (request.queue_seconds, request.prefill_seconds, request.decode_seconds) == (0.1, 0.2, 0.7)
    assert request.ttft_seconds == pytest.approx(0.4)
    assert request.preemptions == 1
    assert request.arrived_at == pytest.approx(before - 1.1, abs=0.05)


def test_prefill_step_has_no_tokens_and_detailed_one_has_chunks(recorder: Recorder, tmp_path: Path) -> None:
    details = SimpleNamespace(num_ctx_requests=1, num_ctx_tokens=64, num_generation_requests=2)
    Probe(recorder, evictions=True).record(
        scheduler_stats(iteration_details=details, kv_cache_eviction_events=[object(), object()]), None
    )
    ((step,), requests) = written(recorder, tmp_path / "probe")
    assert (step.prompt_tokens, step.generation_tokens, step.intervals) == (0, 0, 0)
    assert (step.shortest_interval, step.longest_interval) == (None, None)
    assert (step.context_requests, step.context_tokens, step.generation_requests) == (1, 64, 2)
    assert step.evictions == 2
    assert not requests


def test_tokens_still_cached_on_resume_are_recorded(recorder: Recorder, tmp_path: Path) -> None:
    cache = SimpleNamespace(queries=0, hits=0, preempted_requests=2, preempted_queries=300, preempted_hits=64)
    Probe(recorder, 1).record(scheduler_stats(prefix_cache_stats=cache), None)
    cache.preempted_requests = 0
    Probe(recorder).record(scheduler_stats(prefix_cache_stats=cache), None)
    Probe(recorder).record(scheduler_stats(), None)  # a release that does not report them
    recorder.close()
    (resumed,) = ProbeReader(tmp_path / "probe").resumed()
    assert resumed[1:5] == (1, 2, 300, 64)


def test_values_missing_in_a_release_are_unknown(recorder: Recorder, tmp_path: Path) -> None:
    """In an older or a later release, which has only the classes themselves."""
    Probe(recorder).record(SimpleNamespace(), SimpleNamespace(finished_requests=[SimpleNamespace()]))
    Probe(recorder).record(None, None)
    ((first, second), (request,)) = written(recorder, tmp_path / "probe")
    assert first[2:6] == (None, None, None, None)
    assert second.running is None
    assert (request.id, request.finish_reason) == ("", "")
    assert request.ttft_seconds is None
    assert request[4:12] == (None,) * 8


def test_request_that_ended_before_its_first_token(recorder: Recorder, tmp_path: Path) -> None:
    """vLLM then subtracts a time of the engine's clock from zero."""
    never = finished(num_generation_tokens=0, prefill_time=-81234.5, decode_time=0.0, finish_reason="abort")
    Probe(recorder).record(scheduler_stats(), iteration_stats(never))
    _, (request,) = written(recorder, tmp_path / "probe")
    assert request.prefill_seconds is None
    assert request.decode_seconds is None
    assert request.ttft_seconds is None
    assert request.e2e_seconds == 1.1


class Hostile:
    """Statistics that raise on every access."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)


@pytest.mark.parametrize(
    "statistics",
    [
        (Hostile(), Hostile()),
        (scheduler_stats(num_waiting_reqs="many"), iteration_stats()),
        (scheduler_stats(), iteration_stats(inter_token_latencies_iter=7)),
        (scheduler_stats(), iteration_stats(finished(request_id=17))),
        (scheduler_stats(), iteration_stats(finished(e2e_latency="soon"))),
    ],
)
def test_exceptions_never_reach_vllm_and_losses_are_counted(
    recorder: Recorder, tmp_path: Path, statistics: tuple[object, object]
) -> None:
    Probe(recorder).record(*statistics)
    assert recorder.dropped == 1
    Probe(recorder).record(scheduler_stats(), iteration_stats(finished()))
    steps, (request,) = written(recorder, tmp_path / "probe")
    assert steps[-1].dropped == request.dropped == 1


def test_invalid_values_lose_only_their_record(recorder: Recorder, tmp_path: Path) -> None:
    probe = Probe(recorder)
    probe.record(scheduler_stats(num_running_reqs=None), iteration_stats())
    probe.record(scheduler_stats(num_running_reqs=1 << 40), iteration_stats())
    probe.record(scheduler_stats(), iteration_stats(finished(request_id="ä" * 100)))
    (step,), (request,) = written(recorder, tmp_path / "probe")
    assert recorder.dropped == step.dropped == 2
    assert request.id == "ä" * 32


def test_full_queue_drops_and_counts(recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "MOST_WAITING", 5)
    monkeypatch.setattr(plugin, "FLUSH_SECONDS", 60.0)
    probe = Probe(recorder)
    for _ in range(9):
        probe.record(scheduler_stats(), None)
    assert recorder.dropped == 4
    steps, _ = written(recorder, tmp_path / "probe")
    assert len(steps) == 5
    assert steps[0].dropped == 4


@pytest.mark.parametrize("mask", [0, 0o777])
def test_files_and_folder_are_private(recorder: Recorder, tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        Probe(recorder).record(scheduler_stats(), iteration_stats(finished()))
        written(recorder, tmp_path / "probe")
    finally:
        os.umask(before)
    folder = tmp_path / "probe"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = list(folder.iterdir())
    assert len(files) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_header_identifies_the_writer(recorder: Recorder, tmp_path: Path) -> None:
    Probe(recorder).record(scheduler_stats(), iteration_stats())
    written(recorder, tmp_path / "probe")
    (path,) = (tmp_path / "probe").glob("steps-*.bin")
    header = json.loads(path.read_bytes()[:HEADER_BYTES])
    assert header.items() >= {"format": 1, "kind": "steps", "vllm": "0.32.0", "pid": os.getpid()}.items()
    assert header["wall"] - header["monotonic"] == pytest.approx(time.time() - time.monotonic(), abs=1.0)


# -- the ring ----------------------------------------------------------------------------------------------------------


def step_bytes(at: float, dropped: int = 0) -> bytes:
    return plugin.STEP.pack(at, 0, 1, 0, 0.5, *[-1] * 6, 0, -1.0, -1.0, -1, -1, -1, dropped)


def segments_in(folder: Path) -> plugin.Segments:
    return plugin.Segments(folder, "steps", {})


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three segments of ten records."""
    size = HEADER_BYTES + 10 * plugin.STEP.size
    monkeypatch.setattr(plugin, "SEGMENT_BYTES", size)
    monkeypatch.setattr(plugin, "KEPT", {"steps": 3 * size, "requests": size})


@pytest.mark.usefixtures("small")
def test_ring_is_bounded_and_keeps_the_newest(tmp_path: Path) -> None:
    segments = segments_in(tmp_path)
    for start in range(1, 100, 7):
        records = [step_bytes(float(at)) for at in range(start, start + 7)]
        assert segments.write(records) == 7
        assert len(list(tmp_path.iterdir())) <= 3
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 3 * plugin.SEGMENT_BYTES
    steps = ProbeReader(tmp_path).steps()
    assert 21 <= len(steps) <= 30
    gaps = {round(after.at - before.at) for before, after in itertools.pairwise(steps)}
    assert gaps == {1}, "the newest ones without a gap"


def test_default_ring_size_is_64_mib() -> None:
    assert sum(plugin.KEPT.values()) == 64 << 20


@pytest.mark.usefixtures("small")
def test_short_runs_do_not_displace_long_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "MOST_SEGMENTS", 6)
    monkeypatch.setattr(plugin, "KEPT", {"steps": 8 * plugin.SEGMENT_BYTES, "requests": 0})
    segments_in(tmp_path).write([step_bytes(float(at)) for at in range(1, 11)])
    for run in range(4):
        segments_in(tmp_path).write([step_bytes(20.0 + run)])
    assert len(ProbeReader(tmp_path).steps()) == 14
    for run in range(4):
        segments_in(tmp_path).write([step_bytes(30.0 + run)])
    assert len(list(tmp_path.iterdir())) == 6


@pytest.mark.usefixtures("small")
def test_reader_continues_across_new_and_deleted_segments(tmp_path: Path) -> None:
    segments, reader = segments_in(tmp_path), ProbeReader(tmp_path)
    assert reader.steps() == []
    seen = 0
    for at in range(1, 61):
        segments.write([step_bytes(float(at))])
        if not at % 6:
            seen += len(reader.steps())
    assert seen == 60
    assert reader.steps() == []


def test_all_kinds_are_read_together_once_each(recorder: Recorder, tmp_path: Path) -> None:
    reader, probe = ProbeReader(tmp_path / "probe"), Probe(recorder)
    assert reader.added() == ([], [], [], []), "the folder does not exist yet"
    several = {"inter_token_latencies_iter": [0.01, 0.02, 0.03], "time_to_first_tokens_iter": [0.3]}
    probe.record(scheduler_stats(), iteration_stats(finished(), **several))
    recorder.close()
    assert [len(found) for found in reader.added()] == [1, 3, 1, 1]
    assert [len(found) for found in reader.added()] == [0, 0, 0, 0]


def test_partial_record_is_skipped_until_complete(tmp_path: Path) -> None:
    segments, reader = segments_in(tmp_path), ProbeReader(tmp_path)
    segments.write([step_bytes(1.0)])
    (path,) = tmp_path.iterdir()
    torn = step_bytes(2.0)
    with path.open("ab") as file:
        file.write(torn[:20])
    assert len(reader.steps()) == 1
    with path.open("ab") as file:
        file.write(torn[20:])
    assert len(reader.steps()) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"\0" * 4096, b"x" * 4096,
        json.dumps({"format": 2, "record_bytes": 90, "wall": 1, "monotonic": 0}).encode().ljust(512) + b"1" * 900,
        json.dumps({"format": 1, "record_bytes": 1 << 40, "wall": 1, "monotonic": 0}).encode().ljust(512) + b"1" * 900,
        json.dumps({"format": 1, "record_bytes": 90, "wall": "x", "monotonic": 0}).encode().ljust(512) + b"1" * 900,
        json.dumps([1]).encode().ljust(512) + b"1" * 900,
    ],
)  # fmt: skip
def test_file_of_another_format_is_skipped(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "steps-00000000000000000001-1.bin").write_bytes(content)
    segments_in(tmp_path).write([step_bytes(1.0)])
    assert len(ProbeReader(tmp_path).steps()) == 1


def test_zeros_left_by_a_machine_crash_are_not_records(tmp_path: Path) -> None:
    segments_in(tmp_path).write([step_bytes(1.0)])
    (path,) = tmp_path.iterdir()
    with path.open("ab") as file:
        file.write(bytes(plugin.STEP.size * 3))
    assert len(ProbeReader(tmp_path).steps()) == 1


def test_records_of_a_later_writer_may_be_longer(tmp_path: Path) -> None:
    size = plugin.STEP.size + 8
    header = {"format": 1, "kind": "steps", "record_bytes": size, "wall": 1000.0, "monotonic": 0.0}
    records = b"".join(step_bytes(float(at)) + b"\1" * 8 for at in (1, 2))
    path = tmp_path / "steps-00000000000000000001-1.bin"
    path.write_bytes(json.dumps(header).encode().ljust(HEADER_BYTES) + records)
    assert [step.at for step in ProbeReader(tmp_path).steps()] == [1001.0, 1002.0]


def test_new_process_uses_a_new_segment(tmp_path: Path) -> None:
    for generation in (1, 2):
        recorder = Recorder(tmp_path, {})
        Probe(recorder, generation).record(scheduler_stats(), None)
        recorder.close()
    assert [step.engine for step in ProbeReader(tmp_path).steps()] == [1, 2]


def test_deleted_segment_is_replaced(tmp_path: Path) -> None:
    segments = segments_in(tmp_path)
    segments.write([step_bytes(1.0)])
    next(tmp_path.iterdir()).unlink()
    assert segments.write([step_bytes(2.0)]) == 1
    assert len(ProbeReader(tmp_path).steps()) == 1


def test_changed_clock_starts_a_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = segments_in(tmp_path)
    segments.write([step_bytes(time.monotonic())])
    real = time.time
    monkeypatch.setattr(plugin.time, "time", lambda: real() + 3600.0)
    segments.write([step_bytes(time.monotonic())])
    first, second = ProbeReader(tmp_path).steps()
    assert second.at - first.at == pytest.approx(3600.0, abs=1.0)


def test_full_disk_loses_records_and_the_segment_continues_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = segments_in(tmp_path)
    assert segments.write([step_bytes(1.0)]) == 1
    real = os.pwrite

    def little_room(file: int, data: bytes, at: int) -> int:
        return real(file, data[: plugin.STEP.size + 30], at)

    def no_room(file: int, data: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(plugin.os, "pwrite", little_room)
    assert segments.write([step_bytes(2.0), step_bytes(3.0)]) == 1
    monkeypatch.setattr(plugin.os, "pwrite", no_room)
    assert segments.write([step_bytes(4.0)]) == 0
    monkeypatch.setattr(plugin.os, "pwrite", real)
    assert segments.write([step_bytes(5.0)]) == 1
    offset = time.time() - time.monotonic()
    assert [round(step.at - offset) for step in ProbeReader(tmp_path).steps()] == [1, 2, 5]
    assert len(list(tmp_path.iterdir())) == 1


def test_segment_that_cannot_be_started_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(file: int, data: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    segments = segments_in(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(plugin.os, "pwrite", no_room)
        assert segments.write([step_bytes(1.0)]) == 0
        assert not list(tmp_path.iterdir())
    assert segments.write([step_bytes(1.0)]) == 0, "too early to try again"
    monkeypatch.setattr(plugin, "RETRY_SECONDS", 0.0)
    segments = segments_in(tmp_path)
    assert segments.write([step_bytes(1.0)]) == 1


def test_folder_that_cannot_be_created_only_loses_records(tmp_path: Path) -> None:
    (tmp_path / "probe").write_text("a file in its place")
    recorder = Recorder(tmp_path / "probe", {})
    Probe(recorder).record(scheduler_stats(), None)
    recorder.close()
    assert recorder.dropped == 1


def test_killed_writer_keeps_what_it_has_written(tmp_path: Path) -> None:
    program = (
        f"import sys, time; sys.path.insert(0, {str(Path(plugin.__file__).parent)!r})\n"
        f"import pathlib, {NAME} as p\n"
        f"r = p.Recorder(pathlib.Path({str(tmp_path)!r}), {{}})\n"
        "probe = p.Probe(r)\n"
        "while True: probe.record(None, None); time.sleep(0.001)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        reader = ProbeReader(tmp_path)
        while not (steps := reader.steps()):
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    assert len(ProbeReader(tmp_path).steps()) >= len(steps)


# -- as vLLM loads it --------------------------------------------------------------------------------------------------


class StatLoggerBase:
    """Replaces vLLM's own class."""

    def log(self) -> None:
        """Nothing."""


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """The plugin's class, found as vLLM finds it: by its entry point in a folder on the path."""
    monkeypatch.syspath_prepend(str(Path(plugin.__file__).parent))
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    loggers = ModuleType("vllm.v1.metrics.loggers")
    loggers.__dict__["StatLoggerBase"] = StatLoggerBase
    vllm = ModuleType("vllm")
    vllm.__dict__["__version__"] = "0.32.0"
    for module in (vllm, ModuleType("vllm.v1"), ModuleType("vllm.v1.metrics"), loggers):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def load() -> Any:
        (entry,) = [one for one in metadata.entry_points(group="vllm.stat_logger_plugins") if one.name == NAME]
        return entry.load()

    return load


def test_vllm_finds_the_class_by_its_entry_point(
    loaded: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(plugin.FOLDER, str(tmp_path / "probe"))
    found = loaded()
    assert issubclass(found, StatLoggerBase)
    config = SimpleNamespace(observability_config=SimpleNamespace(kv_cache_metrics=True))
    engines = [found(config, 0), found(vllm_config=config, engine_index=1)]
    engines[0].log_engine_initialized()
    engines[0].log()
    for number, logger in enumerate(engines):
        logger.record(scheduler_stats(), iteration_stats(), mm_cache_stats=None, engine_idx=number)
    engines[1].record(scheduler_stats(), iteration_stats(), None, 1, a_later_argument=True)
    sys.modules[NAME].recorder_for(str(tmp_path / "probe"), "").close()
    steps = ProbeReader(tmp_path / "probe").steps()
    assert [step.engine for step in steps] == [0, 1, 1]
    assert steps[0].evictions == 0
    assert len(list((tmp_path / "probe").iterdir())) == 1, "the engines of a process share its segments"


@pytest.mark.parametrize("arguments", [(), (None,), (Hostile(), Hostile()), ("config", [0, 1], "more")])
def test_constructor_accepts_any_arguments(
    loaded: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...]
) -> None:
    monkeypatch.setenv(plugin.FOLDER, str(tmp_path))
    loaded()(*arguments).record(None, None)
    loaded()(*arguments).record()
    sys.modules[NAME].recorder_for(str(tmp_path), "").close()


def test_nothing_is_recorded_without_a_folder(
    loaded: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(plugin.FOLDER, raising=False)
    monkeypatch.chdir(tmp_path)
    loaded()(None, 0).record(scheduler_stats(), iteration_stats())
    assert not sys.modules[NAME].__dict__["_recorders"]


def test_plugin_needs_only_the_standard_library() -> None:
    tree = ast.parse(Path(plugin.__file__).read_text(), feature_version=(3, 9))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


def test_reader_and_plugin_use_the_same_fields() -> None:
    records = {
        "steps": EngineStep, "intervals": Interval, "first_tokens": FirstToken, "requests": FinishedRequest,
        "resumed": Resumed,
    }  # fmt: skip
    read = {kind: len(layout.unpack(bytes(layout.size))) for kind, layout in plugin.LAYOUTS.items()}
    assert read == {kind: len(record._fields) for kind, record in records.items()}


# -- spans of time -----------------------------------------------------------------------------------------------------


@pytest.fixture
def an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """One step per second in many segments, with a first token every ten seconds; returns the time of the first
    step."""
    monkeypatch.setattr(plugin, "SEGMENT_BYTES", HEADER_BYTES + 50 * plugin.STEP.size)
    begin = time.monotonic()
    segments_in(tmp_path).write([step_bytes(begin + at) for at in range(3600)])
    tokens = [plugin.FIRST_TOKEN.pack(begin + at, 0, 0.5, 0) for at in range(0, 3600, 10)]
    plugin.Segments(tmp_path, "first_tokens", {}).write(tokens)
    return ProbeReader(tmp_path).steps()[0].at


def test_only_the_requested_span_is_read(tmp_path: Path, an_hour: float) -> None:
    reader = ProbeReader(tmp_path, an_hour + 1000.5, an_hour + 1060.5)
    assert [round(step.at - an_hour) for step in reader.steps()] == list(range(1001, 1061))
    assert len(reader.added().first_tokens) == 6
    assert reader.steps() == []
    assert reader.writers(an_hour + 1001, an_hour + 1060) == 1
    assert len(ProbeReader(tmp_path, most=20).steps()) == 20 * len(list(tmp_path.glob("steps-*")))


@pytest.mark.parametrize("most", [7, 100, 10_000])
def test_slices_of_a_span_follow_without_a_gap(tmp_path: Path, an_hour: float, most: int) -> None:
    spans, at, found = ProbeSpans(tmp_path), an_hour + 99.5, list[Any]()
    while rows := spans.after(at, an_hour + 500, most):
        found += rows
        at = rows[-1].at
    assert [row.at for row in found] == sorted(row.at for row in found)
    steps = [row for row in found if isinstance(row, EngineStep)]
    assert [round(step.at - an_hour) for step in steps] == list(range(100, 501))
    assert len(found) - len(steps) == 41
    assert spans.first_at() == pytest.approx(an_hour)


def test_slices_continue_as_records_are_added(tmp_path: Path) -> None:
    segments, spans, seen, at = segments_in(tmp_path), ProbeSpans(tmp_path), 0, 0.0
    begin = time.monotonic()
    for number in range(40):
        segments.write([step_bytes(begin + number)])
        rows = spans.after(at, time.time() + 100, 10)
        seen, at = seen + len(rows), rows[-1].at if rows else at
    assert seen == 40


@pytest.mark.parametrize(
    ("intervals", "recorded"),
    [
        ([0.02] * 5, {}),
        ([0.02, 0.5], {}),  # the step has both
        ([0.02, 0.02, 0.5, 0.02], {0.02: 3, 0.5: 1}),
        ([number / 64 for number in range(1, 40)], {}),  # too many
    ],
)
def test_different_intervals_are_recorded(
    recorder: Recorder, tmp_path: Path, intervals: list[float], recorded: dict[float, int]
) -> None:
    stats = iteration_stats(inter_token_latencies_iter=intervals, time_to_first_tokens_iter=[0.3, 0.4])
    Probe(recorder, 1).record(scheduler_stats(), stats)
    written(recorder, tmp_path / "probe")
    reader = ProbeReader(tmp_path / "probe")
    (step,), found, tokens, _ = reader.added()
    assert {round(one.seconds, 6): one.times for one in found} == recorded
    assert {(one.at, one.engine) for one in found} <= {(step.at, 1)}
    assert [one.seconds for one in tokens] == [0.3, 0.4]


def test_folder_of_a_removed_server_is_not_recreated(tmp_path: Path) -> None:
    server = tmp_path / "server"
    server.mkdir()
    segments = plugin.Segments(server / "probe", "steps", {})
    record = bytes(plugin.LAYOUTS["steps"].size)
    assert segments.write([record]) == 1
    shutil.rmtree(server)
    assert segments.write([record]) == 0
    assert not server.exists()
