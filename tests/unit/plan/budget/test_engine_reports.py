"""What vLLM's log reports about memory, for all of its releases, and estimate and report side by side."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from vllm_console.logs.startup import StartupWatch
from vllm_launchers.plan.budget.budget import EngineReport, GpuBudget, MemoryBudget
from vllm_launchers.plan.budget.engine_report import (
    ReportReader,
    as_reported,
    blocks_without_override,
    budget_figures,
    learned_from,
    read_report,
    report_figures,
)

PREFIX = "(EngineCore pid=71) INFO 11-20 09:56:26 [worker.py:1] "

OLD_ENGINE = """
INFO 04-11 10:00:00 [model_runner.py:1110] Loading model weights took 14.99 GB
INFO 04-11 10:00:09 [worker.py:267] model weights take 14.99GiB; non_torch_memory takes 0.14GiB; PyTorch activation \
peak memory takes 1.19GiB; the rest of the memory reserved for KV Cache is 54.94GiB.
INFO 04-11 10:00:09 [executor_base.py:111] # cuda blocks: 27873, # CPU blocks: 2048
INFO 04-11 10:00:09 [executor_base.py:116] Maximum concurrency for 8192 tokens per request: 54.44x
INFO 04-11 10:00:30 [model_runner.py:1570] Graph capturing finished in 14 secs, took 0.22 GiB
"""
SEPARATE_LINES = """
(EngineCore_0 pid=9) INFO 09-20 10:00:00 [gpu_model_runner.py:2392] Model loading took 7.5552 GiB and 2.107343 seconds
(EngineCore_0 pid=9) INFO 09-20 10:00:09 [gpu_worker.py:298] Available KV cache memory: 58.05 GiB
(EngineCore_0 pid=9) INFO 09-20 10:00:09 [kv_cache_utils.py:864] GPU KV cache size: 422,672 tokens
(EngineCore_0 pid=9) INFO 09-20 10:00:09 [kv_cache_utils.py:868] Maximum concurrency for 40,960 tokens per request: \
10.32x
(EngineCore_0 pid=9) INFO 09-20 10:00:19 [gpu_model_runner.py:3118] Graph capturing finished in 6 secs, took 0.54 GiB
"""
MERGED_LINE = f"""
{PREFIX}Model loading took 15.0 GiB memory and 5.100000 seconds
{PREFIX}Estimated CUDA graph memory: 0.71 GiB total
{PREFIX}Available KV cache memory: 18.83 GiB
{PREFIX}Auto-fit max_model_len: reduced from 131072 to 40960 to fit in available KV cache memory (18.83 GiB GPU)
{PREFIX}GPU KV cache size: 176,240 tokens, Maximum concurrency for 8,192 tokens per request: 21.51x
{PREFIX}Graph capturing finished in 12 secs, took 0.54 GiB
"""


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (OLD_ENGINE, EngineReport(14.99, 54.94, 27873 * 16, 54.44, 0.22, 8192)),
        (SEPARATE_LINES, EngineReport(7.5552, 58.05, 422672, 10.32, 0.54, 40960)),
        (MERGED_LINE, EngineReport(15.0, 18.83, 176240, 21.51, 0.54, 8192)),
        ("nothing of the kind\n\n", EngineReport()),
    ],
)
def test_logs_of_several_releases(log: str, expected: EngineReport) -> None:
    assert read_report(log.splitlines()) == expected


@pytest.mark.parametrize(
    ("line", "figure", "value"),
    [
        ("Estimated CUDA graph memory: 0.71 GiB total", "graphs_gib", 0.71),
        ("Available KV cache memory: -1.25 GiB", "kv_gib", -1.25),
        ("Explicitly set (4.0/15.6) GiB for KV cache on node 0.", "kv_gib", 4.0),
        ("Auto set (9.1/15.6) GiB for KV cache on node 0, with 14.0 GiB requested", "kv_gib", 9.1),
        ("Initial free memory 78.6 GiB, reserved 20.0 GiB memory for KV Cache as specified by", "kv_gib", 20.0),
        ("CPU KV cache size: 65,536 tokens", "kv_tokens", 65536),
        ("Auto-fit max_model_len: full model context length 8192 fits in available KV", "max_model_len", 8192),
    ],
)
def test_single_lines(line: str, figure: str, value: float) -> None:
    assert getattr(read_report([PREFIX + line]), figure) == value


def test_startup_watch_reads_the_report() -> None:
    watch = StartupWatch(started_at=1_700_000_000.0)
    watch.feed(MERGED_LINE.encode())
    assert watch.memory.report == read_report(MERGED_LINE.splitlines())


def test_gpu_with_the_least_memory_counts() -> None:
    reader = ReportReader()
    assert reader.report == EngineReport()
    for rank, (weights, room) in enumerate(((3.74, 62.5), (3.80, 62.1), (3.70, 62.9))):
        reader.line(f"(Worker_TP{rank} pid=9) INFO Model loading took {weights} GiB memory and 3.0 seconds")
        reader.line(f"(Worker_TP{rank} pid=9) INFO Available KV cache memory: {room} GiB")
    assert (reader.report.weights_gib, reader.report.kv_gib) == (3.8, 62.1)


def test_second_start_in_a_log_resets_the_report() -> None:
    second = ["INFO vLLM API server version 0.33.0", f"{PREFIX}Available KV cache memory: 2.0 GiB"]
    assert read_report([*MERGED_LINE.splitlines(), *second]) == EngineReport(kv_gib=2.0)


@given(st.text())
def test_any_line_is_handled(text: str) -> None:
    read_report([text, f"Available KV cache memory: {text} GiB", f"Model loading took 1.2.3{text} GiB"])


BUDGET = MemoryBudget(
    weights_gib=15.0,
    overhead_gib=1.5,
    graphs_gib=0.5,
    kv_gib=20.0,
    kv_bytes_per_token=131072,
    kv_tokens=163840,
    max_model_len=8192,
    max_concurrency=20.0,
    per_gpu=(GpuBudget(0, 40.0, 15.0, 1.5, 0.5, 20.0, 0.4), GpuBudget(1, 40.0, 15.0, 1.5, 0.5, 20.0)),
)


def test_reported_values_replace_the_estimate() -> None:
    reported = as_reported(BUDGET, EngineReport(15.5, 18.0, 147456, 18.0, 0.7, 8192))
    assert reported.source == "engine"
    assert (reported.weights_gib, reported.kv_gib, reported.kv_tokens, reported.max_concurrency) == (
        15.5,
        18.0,
        147456,
        18.0,
    )
    before, after = BUDGET.per_gpu[0], reported.per_gpu[0]
    assert (after.weights_gib, after.kv_gib, after.graphs_gib) == pytest.approx((15.5, 18.0, 0.7))
    # Parts that the engine did not report are the rest of the same memory.
    assert after.free_gib == pytest.approx(before.free_gib)
    assert after.overhead_gib == pytest.approx(1.5 + 2.0 - 0.5 - 0.2)


def test_reported_tokens_correct_the_number_of_blocks() -> None:
    limited = replace(BUDGET, most_sequences=200)
    assert as_reported(limited, EngineReport(kv_tokens=147456)).most_sequences == 180
    assert as_reported(limited, EngineReport(15.5, 18.0)).most_sequences == 200


def test_block_override_that_started_fits() -> None:
    tight = replace(BUDGET.per_gpu[0], kv_gib=BUDGET.per_gpu[0].kv_gib + 200)
    budget = replace(BUDGET, fixed=True, per_gpu=(tight,))
    assert not budget.fits
    assert as_reported(budget, EngineReport(15.5, 18.0), limited=True).fits


def test_empty_report_keeps_the_estimate() -> None:
    assert as_reported(BUDGET, EngineReport()) == BUDGET


def test_stored_values_round_trip() -> None:
    report = EngineReport(15.5, 18.0, 147456, 18.0, None, 8192)
    learned = learned_from(report_figures(report), budget_figures(BUDGET))
    assert learned.report == report
    assert (learned.predicted_weights_gib, learned.predicted_kv_gib) == (15.0, 20.0)
    assert learned_from({}, {}).report == EngineReport()


SUGGESTED = "Actual usage is 1 GiB. Replace gpu_memory_utilization config with `--kv-cache-memory={}`{} to fit into "
SUGGESTED += "requested memory, or `--kv-cache-memory=99999999999`{} to fully utilize gpu memory."


def test_suggested_kv_cache_size_is_the_smallest_of_all_workers() -> None:
    old = SUGGESTED.format(58333988249, "", "")
    assert read_report([old]).kv_pin_bytes == 58333988249
    new = [SUGGESTED.format(size, " (13.52 GiB)", " (93.13 GiB)") for size in (14514713805, 14514713804)]
    report = read_report([f"(Worker_TP{rank} pid=9) {text}" for rank, text in enumerate(new)])
    assert report.kv_pin_bytes == 14514713804
    assert learned_from(report_figures(report), {}).report.kv_pin_bytes == 14514713804


def test_blocks_without_the_override_are_those_of_the_engine_with_the_fewest() -> None:
    line = "(EngineCore pid=26030) INFO 11-20 10:01:38 [kv_cache_utils.py:2619] Overriding num_gpu_blocks={} with {}"
    lines = [line.format(blocks, "num_gpu_blocks_override=160") for blocks in (65536, 32768)]
    assert blocks_without_override(lines) == 32768 / 160
    assert blocks_without_override(["INFO GPU KV cache size: 5,120 tokens"]) is None
