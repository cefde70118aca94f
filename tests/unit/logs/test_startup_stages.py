"""Startup stages from logs of vLLM's releases."""

from __future__ import annotations

import json
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_console.logs.startup import StartupWatch, stages
from vllm_console.logs.startup_facts import Stage

BEGUN = datetime(2026, 5, 4, 11, 59, 55)


def log(*lines, begun=BEGUN, prefix=""):
    """Lines as ``(seconds after the start, message)``; a line without seconds is unchanged."""
    made = []
    for line in lines:
        if isinstance(line, str):
            made.append(line)
        else:
            at = begun + timedelta(seconds=line[0])
            made.append(f"{prefix}INFO {at:%m-%d %H:%M:%S} [file.py:12] {line[1]}")
    return made


GPU = (
    "Triton is installed, all is well",
    (5, "Automatically detected platform cuda."),
    (9, "vLLM API server version 0.33.0"),
    (10, "Resolved architecture: LlamaForCausalLM"),
    (16, "Initializing a V1 LLM engine (v0.33.0) with config: model='m'"),
    (20, "Starting to load model m..."),
    "Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:01<00:03,  1.10s/it]",
    "Loading safetensors checkpoint shards: 100% Completed | 4/4 [00:04<00:00,  1.10s/it]",
    (32, "Loading weights took 11.20 seconds"),
    (33, "Model loading took 14.9890 GiB memory and 12.123456 seconds"),
    (34, "Using cache directory: /x for vLLM's torch.compile"),
    (54, "torch.compile took 20.01 s in total"),
    (56, "Initial profiling/warmup run took 1.20 s"),
    (58, "Available KV cache memory: 18.83 GiB"),
    (58, "GPU KV cache size: 176,240 tokens, Maximum concurrency for 8,192 tokens per request: 21.51x"),
    (60, "some other line"),
    "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  46%|####6     | 31/67 [00:02<00:02, 13.1it/s]",
    (70, "Graph capturing finished in 10 secs, took 0.54 GiB"),
    (75, "init engine (profile, create kv cache, warmup model) took 40.10 s (compilation: 20.00 s)"),
    (77, "Starting vLLM server on http://0.0.0.0:8000"),
    "INFO:     Application startup complete.",
)


def seen(lines, begun=BEGUN, **state):
    state = {"now": begun.timestamp() + 1000, "ready_at": None, "ended": False, **state}
    return [(s.name, s.seconds, s.detail) for s in stages(lines, begun.timestamp(), **state)]


WHOLE = [
    ("process", 0.0, ""),
    ("imports", 9.0, ""),
    ("config", 11.0, ""),
    ("weights", 14.0, "15.0 GiB"),
    ("compile", 20.8, ""),
    ("memory profile", 3.2, ""),
    ("kv cache", 2.0, "176,240 tokens"),
    ("graphs", 10.0, "0.5 GiB"),
    ("warm-up", 7.0, ""),
    ("server", 1.5, ""),
]


def rounded(found):
    return [(name, None if seconds is None else round(seconds, 2), detail) for name, seconds, detail in found]


@pytest.mark.parametrize("prefix", ["", "(EngineCore pid=7) ", "\x1b[0;36m(APIServer pid=9)\x1b[0;0m "])
def test_complete_start_on_a_gpu(prefix):
    found = rounded(seen(log(*GPU, prefix=prefix), ready_at=BEGUN.timestamp() + 78.5))
    assert found == WHOLE


H200 = (
    (36, "Initializing a V1 LLM engine (v0.26.0) with config: model='/models/8b'"),
    (39, "Loading model from scratch..."),
    "Loading safetensors checkpoint shards: 100% Completed | 5/5 [00:02<00:00,  2.23it/s]",
    (41, "Loading weights took 2.24 seconds"),
    (42, "Model loading took 15.0 GiB and 4.108185 seconds"),
    (48, "Using cache directory: /x for vLLM's torch.compile"),
    (48, "Dynamo bytecode transform time: 5.39 s"),
    (56, "Compiling a graph for compile range (1, 4096) takes 7.72 s"),
    (59, "torch.compile took 17.14 s in total"),
    (60, "Initial profiling/warmup run took 0.30 s"),
    (61, "Available KV cache memory: 112.35 GiB"),
    (61, "GPU KV cache size: 920,336 tokens"),
    "Capturing CUDA graphs (FULL): 100%|##########| 35/35 [00:01<00:00, 33.2it/s]",
    (65, "Graph capturing finished in 3 secs, took 0.59 GiB"),
    (77, "init engine (profile, create kv cache, warmup model) took 34.57 s (compilation: 17.14 s)"),
)
"""Log of vLLM 0.26.0 on an H200, without its other lines."""


def test_compile_stage_includes_its_tracing():
    took = {name: seconds for name, seconds, _ in rounded(seen(log(*H200)))}
    assert took["compile"] == pytest.approx(17.1, abs=0.2)


def test_last_stage_runs_until_the_end_is_known():
    lines = log(*GPU[:8])
    assert seen(lines)[-1] == ("weights", None, "100%")
    assert seen(log(*GPU[:9]), ended=True)[-1] == ("weights", 12.0, "100%")


def test_progress_is_shown_during_a_stage():
    assert seen(log(*GPU[:7]))[-1] == ("weights", None, "25%")
    assert seen(log(*GPU[:17]))[-1] == ("graphs", None, "46%")


def test_messages_of_the_cpu_build():
    lines = log(
        (6, "Using max model len 2048"),
        (12, "Starting to load model tiny..."),
        (13, "Warming up model for the compilation..."),
        (33, "Warming up done."),
        (33, "Explicitly set (1.0/10.21) GiB for KV cache on node 0."),
        (34, "CPU KV cache size: 2,097,152 tokens, Maximum concurrency for 2,048 tokens per request: 1024.00x"),
    )
    assert seen(lines) == [
        ("process", 6.0, ""),
        ("config", 6.0, ""),
        ("weights", 1.0, ""),
        ("compile", 20.0, ""),
        ("kv cache", None, "2,097,152 tokens"),
    ]


def test_messages_of_old_versions():
    lines = [
        "INFO 05-04 12:00:00 [__init__.py:239] Automatically detected platform cuda.",
        "INFO 05-04 12:00:05 [api_server.py:1043] vLLM API server version 0.8.5",
        "INFO 05-04 12:00:15 [gpu_model_runner.py:1329] Starting to load model m...",
        "INFO 05-04 12:00:25 [gpu_model_runner.py:1347] Model loading took 7.1557 GiB and 9.123 seconds",
        "INFO 05-04 12:00:30 [worker.py:287] Memory profiling takes 4.00 seconds",
        "INFO 05-04 12:00:31 [executor_base.py:112] # cuda blocks: 1234, # CPU blocks: 512",
        "Capturing CUDA graph shapes:  50%|#####     | 12/24 [00:02<00:02, 5.1it/s]",
    ]
    assert [(s.name, s.detail) for s in stages(lines, BEGUN.timestamp(), BEGUN.timestamp() + 99, None, False)] == [
        ("process", ""),
        ("imports", ""),
        ("config", ""),
        ("weights", "7.2 GiB"),
        ("memory profile", ""),
        ("kv cache", ""),
        ("graphs", "50%"),
    ]


def test_mention_of_a_stage_is_not_the_stage():
    lines = log(
        (8, "Resolved architecture: LlamaForCausalLM"),
        (9, "Enforce eager set, disabling torch.compile, CUDAGraphs, and JIT kernel warmup."),
        (15, "Starting to load model m..."),
    )
    assert [name for name, _, _ in seen(lines)] == ["process", "config", "weights"]


def test_repeated_worker_messages_do_not_go_back():
    lines = log(
        (8, "Resolved architecture: LlamaForCausalLM"),
        (15, "Starting to load model m..."),
        (16, "Automatically detected platform cuda."),
        (17, "Resolved architecture: Draft"),
        (20, "torch.compile took 3.00 s in total"),
        (21, "Model loading took 7.0 GiB memory and 5.1 seconds"),
    )
    assert seen(lines) == [
        ("process", 8.0, ""),
        ("config", 7.0, ""),
        ("weights", 5.0, "7.0 GiB"),
        ("compile", None, ""),
    ]


def test_start_across_new_year():
    begun = datetime(2026, 12, 31, 23, 59, 50)
    lines = log((5, "Using max model len 5"), (20, "Starting to load model m..."), begun=begun)
    found = stages(lines, begun.timestamp(), begun.timestamp() + 60, None, False)
    assert found == (
        Stage("process", begun.timestamp(), 5.0),
        Stage("config", begun.timestamp() + 5, 15.0),
        Stage("weights", begun.timestamp() + 20),
    )


@pytest.mark.parametrize("hours", [-9, -1, 2, 5.75])
def test_log_in_another_time_zone(hours):
    shifted = BEGUN + timedelta(hours=hours)
    lines = log((5, "Using max model len 5"), (20, "Starting to load model m..."), begun=shifted)
    assert seen(lines) == [("process", 5.0, ""), ("config", 15.0, ""), ("weights", None, "")]


def test_impossible_dates_and_clocks_ahead_are_handled():
    lines = [
        "INFO 02-30 12:00:00 [x.py:1] Using max model len 5",
        "INFO 99-99 99:99:99 [x.py:1] Starting to load model m...",
    ]
    assert seen(lines) == [("process", 0.0, ""), ("config", 0.0, ""), ("weights", None, "")]
    ahead = stages(log((5, "Using max model len 5"), (900, "Starting to load model m...")), BEGUN.timestamp(),
                   BEGUN.timestamp() + 10, None, False)  # fmt: skip
    assert [stage.started_at - BEGUN.timestamp() for stage in ahead] == [0.0, 5.0, 10.0]


@pytest.mark.parametrize("size", [1, 7, 64, 100_000])
def test_feeding_pieces_equals_feeding_lines(size):
    data = "\n".join(log(*GPU)).replace("Loading safe", "\rLoading safe").encode() + b"\n"
    watch = StartupWatch(BEGUN.timestamp())
    for start in range(0, len(data), size):
        watch.feed(data[start : start + size])
    found = watch.stages(BEGUN.timestamp() + 1000, BEGUN.timestamp() + 78.5)
    assert rounded([(s.name, s.seconds, s.detail) for s in found]) == WHOLE
    assert watch.complete


def test_progress_bar_without_a_newline_counts():
    watch = StartupWatch(BEGUN.timestamp())
    watch.feed("\n".join(log(*GPU[:6])).encode() + b"\n")
    for percent in (10, 20, 30):
        watch.feed(f"\rLoading safetensors checkpoint shards:  {percent}% Completed | 1/4".encode())
        assert watch.stages(BEGUN.timestamp() + 99)[-1].detail == f"{percent}%"


def test_nothing_is_read_after_the_start():
    watch = StartupWatch(BEGUN.timestamp())
    watch.feed("\n".join(log(*GPU)).encode() + b"\n")
    before = watch.stages(BEGUN.timestamp() + 1000)
    watch.feed(b"INFO 05-04 13:00:00 [x.py:1] Capturing CUDA graphs: 99%|\n" * 10)
    assert watch.stages(BEGUN.timestamp() + 1000) == before


def test_empty_log_is_the_process_stage():
    assert stages([], 10.0, 12.0, None, False) == (Stage("process", 10.0),)
    assert stages([], 10.0, 12.0, None, True) == (Stage("process", 10.0, 0.0),)


@given(st.lists(st.binary(max_size=200), max_size=20))
def test_any_bytes_are_handled(pieces):
    watch = StartupWatch(1000.0)
    for piece in pieces:
        watch.feed(piece)
    assert watch.stages(2000.0)[0].name == "process"


def test_endless_line_uses_bounded_memory():
    watch = StartupWatch(1000.0)
    for _ in range(100):
        watch.feed(b"x" * 50_000)
    assert len(watch._tail) <= 64 * 1024


def watch_until(*lines):
    watch = StartupWatch(BEGUN.timestamp())
    for line in log(*lines):
        watch.line(line)
    return watch


def stages_at(watch, seconds):
    return [(s.name, s.seconds, s.detail) for s in watch.stages(BEGUN.timestamp() + seconds)]


def test_download_reported_afterwards_is_a_stage():
    lines = (*GPU[1:6], (140, "Time spent downloading weights for m: 119.500000 seconds"), *GPU[6:])
    found = rounded(seen(log(*lines), ready_at=BEGUN.timestamp() + 178.5))
    assert [name for name, *_ in found[2:5]] == ["config", "download", "weights"]
    assert found[3] == ("download", 120.0, "")


def test_cached_weights_are_not_a_download():
    lines = (*GPU[1:6], (20, "Time spent downloading weights for m: 0.120000 seconds"), *GPU[6:])
    assert "download" not in [name for name, *_ in seen(log(*lines))]


def test_growing_cache_is_a_download_while_the_log_is_silent():
    watch = watch_until(*GPU[1:6])
    watch.downloaded(BEGUN.timestamp() + 25, "1.2 GiB")
    assert stages_at(watch, 26)[-1] == ("download", None, "1.2 GiB")
    watch.downloaded(BEGUN.timestamp() + 60, "3.4 GiB")
    assert stages_at(watch, 61)[-1] == ("download", None, "3.4 GiB")
    for line in log(*GPU[6:8]):
        watch.line(line)
    assert [name for name, *_ in stages_at(watch, 90)][-2:] == ["download", "weights"]


def test_cache_growing_for_another_process_is_not_a_download():
    watch = watch_until(*GPU[1:8])
    watch.downloaded(BEGUN.timestamp() + 40, "9.9 GiB")
    assert "download" not in [name for name, *_ in stages_at(watch, 41)]
    watch = watch_until(*GPU[1:12])
    watch.downloaded(BEGUN.timestamp() + 80, "9.9 GiB")
    assert "download" not in [name for name, *_ in stages_at(watch, 81)]


def carried(prefix="", json_records=False):
    """The same startup as logged through a container runtime, systemd or a JSON formatter."""
    made, last = [], 0
    for line in GPU:
        last = line[0] if isinstance(line, tuple) else last
        at = BEGUN + timedelta(seconds=last)
        text = line if isinstance(line, str) else f"(EngineCore pid=7) INFO {at:%m-%d %H:%M:%S} [file.py:12] {line[1]}"
        if json_records and isinstance(line, tuple):
            record = {"asctime": f"{at:%Y-%m-%d %H:%M:%S},120", "levelname": "INFO", "processName": "EngineCore"}
            text = json.dumps({**record, "message": line[1]})
        made.append(at.strftime(prefix) + text)
    return made


@pytest.mark.parametrize("json_records", [False, True])
@pytest.mark.parametrize(
    "prefix",
    ["", "vllm-1  | ", "%Y-%m-%dT%H:%M:%S.123456789Z ", "[pod/vllm-0/server] ", "%b %d %H:%M:%S box vllm[80]: "],
)
def test_log_collector_prefix_does_not_change_the_stages(prefix, json_records):
    names = [(name, detail) for name, _, detail in seen(log(*GPU))]
    found = seen(carried(prefix, json_records))
    assert [(name, detail) for name, _, detail in found] == names
    if not prefix:  # with other collectors, continuation lines have a time as well
        assert found == seen(log(*GPU))


def test_first_request_is_the_last_stage():
    """The log says that the server is up, but its keeper still waits for a completion."""
    watch = StartupWatch(BEGUN.timestamp())
    for line in log((5, "Automatically detected platform cuda."), (60, "Application startup complete.")):
        watch.line(line)
    assert watch.complete
    at = BEGUN.timestamp() + 62
    watch.first_request(at)
    *_, server, first = watch.stages(now=at + 8)
    assert (server.name, server.seconds) == ("server", 2.0)
    assert (first.name, first.started_at, first.seconds) == ("first request", at, None)
    assert watch.stages(now=at + 9, ready_at=at + 9)[-1].seconds == 9.0
