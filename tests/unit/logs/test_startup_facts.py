"""What made a startup fast or slow, as logged by vLLM's releases."""

from __future__ import annotations

import pytest

from vllm_console.logs.startup import watched
from vllm_console.logs.startup_facts import StartupFacts


def facts(*lines: str, process: str = "EngineCore pid=7") -> StartupFacts:
    """The facts from lines logged one second apart."""
    made = [f"({process}) INFO 05-04 12:00:{second:02} [x.py:1] {text}" for second, text in enumerate(lines)]
    return watched(made, 0.0).facts.facts


GRAPH = "Compiling a graph for compile range (1, 8192) takes 21.40 s"
LOADED = "[backbone] Directly load the compiled graph(s) for compile range (1, 8192) from the cache, took 0.202 s"
AOT = "[backbone] Directly load AOT compilation from path /x/model"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((GRAPH,), "new"),
        (("Compiling a graph for general shape takes 12.00 s",), "new"),
        (("[backbone] saved AOT compiled function to /x",), "new"),
        (("Directly load the compiled graph(s) for dynamic shape from the cache, took 3.1 s",), "hit"),
        ((LOADED, "[backbone] saved AOT compiled function to /x"), "hit"),
        ((AOT,), "hit"),
        ((AOT, GRAPH), "partly"),
        (("vLLM's torch.compile cache is disabled.", GRAPH), "disabled"),
        (
            (
                "[backbone] Compiling model again due to a load failure from /x, reason: no such attribute",
                GRAPH,
                "[backbone] saved AOT compiled function to /x",
            ),
            "failed",
        ),
        (("Loading weights took 1.00 seconds",), ""),
    ],
)
def test_compile_cache_hit_is_detected(lines: tuple[str, ...], expected: str) -> None:
    assert facts(*lines).compile_cache == expected


def test_times_of_model_parts_add_up_and_the_slowest_worker_counts() -> None:
    own = facts(
        "[backbone] torch.compile took 3.00 s in total",
        "[eagle_head] torch.compile took 1.50 s in total",
        "Loading weights took 11.20 seconds",
    )
    assert (own.compile_seconds, own.weights_seconds) == (4.5, 11.2)
    lines = [f"(Worker_TP{rank} pid={rank}) torch.compile takes {2 + rank}.00 s in total" for rank in (0, 1)]
    assert watched(lines, 0.0).facts.facts.compile_seconds == 3.0


def test_memory_profiling_time_after_the_warm_up_run() -> None:
    measured = facts("Initial profiling/warmup run took 1.20 s", "x", "x", "Available KV cache memory: 18.83 GiB")
    assert (measured.kv_measure_seconds, measured.kv_pinned) == (3.0, "")
    assert facts("Available KV cache memory: 18.83 GiB").kv_measure_seconds is None


def test_fixed_cache_size_and_its_source_are_detected() -> None:
    skipped = (
        "Initial free memory 78.66 GiB, reserved 54.33 GiB memory for KV Cache as specified by kv_cache_memory_bytes "
        "config and skipped memory profiling. This does not respect the gpu_memory_utilization config."
    )
    own = facts("Initial profiling/warmup run took 1.20 s", skipped)
    assert (own.kv_pinned, own.kv_measure_seconds) == ("flag", 1.0)
    plan = "Applying persisted startup plan (fingerprint 1a): kv_cache_memory_bytes=9 (0.00 GiB), recorded"
    assert facts(plan, skipped).kv_pinned == "plan"


def test_preparation_before_the_server_is_counted() -> None:
    lines = ["weights read ahead: 3.20 of 15.00 GiB, 11.80 GiB were cached", "prepared in 8.4 s"]
    found = watched(lines, 0.0).facts.facts
    assert (found.prepared_seconds, found.read_ahead_gib, found.weights_gib) == (8.4, 3.2, 15.0)
