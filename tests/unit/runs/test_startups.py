"""Startups side by side, and what each measure saved."""

from __future__ import annotations

from typing import Any

from vllm_console.runs.document import run_document
from vllm_console.runs.startup import last_start_seconds, saved, startup_lines
from vllm_console.runs.store import Run


def run(generation: int, stages: dict[str, float], flags: dict[str, Any] | None = None, **startup: Any) -> Run:
    began = 1000.0 * generation
    return Run(
        key=f"chat@{generation}", server="chat", generation=generation, id=generation, started_at=began, model="m",
        version="0.33.0", ready_at=began + sum(stages.values()), flags=flags or {}, startup=startup,
        stages=tuple((name, took, "") for name, took in stages.items()),
    )  # fmt: skip


COLD = {"process": 1.0, "imports": 9.0, "config": 5.0, "weights": 20.0, "compile": 30.0, "kv cache": 3.0}
WARM = {"process": 0.0, "config": 1.0, "weights": 8.0, "compile": 2.0, "kv cache": 1.0}

FIRST = run(1, COLD, compile_cache="new", compile_seconds=29.0, weights_seconds=19.0, kv_measure_seconds=4.0)
SECOND = run(
    2, WARM, {"kv-cache-memory-bytes": 9}, compile_cache="hit", compile_seconds=2.0, weights_seconds=7.0,
    kv_pinned="flag", kv_measure_seconds=0.0, prepared_seconds=8.0, read_ahead_gib=3.0,
)  # fmt: skip


def savings(one: Run, *earlier: Run) -> dict[str, float]:
    return {each.measure: each.seconds for each in saved(one, earlier)}


def test_each_saving_is_measured_against_the_newest_start_without_it() -> None:
    third = run(3, WARM, compile_cache="hit", compile_seconds=3.0)
    assert savings(SECOND, FIRST) == {
        "prepared restart": 14.0,
        "weights read ahead": 12.0,
        "compile cache": 27.0,
        "fixed KV cache size": 4.0,
    }
    assert savings(third, SECOND, FIRST) == {"compile cache": 26.0}
    assert saved(third, [SECOND, FIRST])[0].sentence == "compile cache: 26s less than chat@1"


def test_restart_time_includes_its_preparation() -> None:
    """On an H100, preparation took 38 s, followed by 23 s of downtime."""
    prepared = run(3, {"process": 0.0, "config": 2.0, "weights": 21.0}, prepared_seconds=38.0)
    failed = Run(**{**{name: getattr(prepared, name) for name in prepared.__struct_fields__}, "ready_at": None})
    assert last_start_seconds([failed, prepared, FIRST]) == 61.0
    assert last_start_seconds([FIRST]) == sum(COLD.values())
    assert last_start_seconds([failed]) is None


def test_unknown_or_different_starts_have_no_savings() -> None:
    assert savings(SECOND) == {}
    assert savings(SECOND, run(1, {})) == {}
    other = Run(**{**{name: getattr(FIRST, name) for name in FIRST.__struct_fields__}, "model": "other"})
    assert savings(SECOND, other) == {}
    failed = Run(**{**{name: getattr(FIRST, name) for name in FIRST.__struct_fields__}, "ready_at": None})
    assert savings(SECOND, failed) == {}


def test_two_savings_on_weights_are_not_distinguished() -> None:
    fast = run(3, WARM, {"load-format": "runai_streamer"}, weights_seconds=5.0, read_ahead_gib=3.0)
    assert savings(fast, SECOND, FIRST) == {"weights read ahead and load format": 14.0}


def test_cached_weights_were_not_read_ahead() -> None:
    assert savings(run(2, WARM, weights_seconds=7.0, read_ahead_gib=0.0), FIRST) == {}


def test_startup_stages_are_side_by_side_newest_last() -> None:
    lines = startup_lines([SECOND, FIRST], 80)
    assert lines[0].split() == ["@1", "@2"]
    rows = {line[:16].strip(): line[16:].split() for line in lines[1:]}
    assert rows["imports"] == ["9.0s", "–"]
    assert rows["until ready"] == ["1m08s", "12s"]
    assert rows["compile cache"] == ["compiled", "hit"]
    assert rows["KV cache size"] == ["measured", "fixed"]
    assert "@2  compile cache: 27s less than chat@1" in lines
    assert all(len(line) <= 80 for line in startup_lines([SECOND, FIRST] * 10, 80))
    assert startup_lines([run(1, {})], 80) == []


def test_document_names_the_compared_run() -> None:
    document = run_document(SECOND, [SECOND, FIRST])
    assert document["startup"]["compile_cache"] == "hit"
    assert {"measure": "compile cache", "seconds": 27.0, "before": 1} in document["startup_saved"]
    assert run_document(FIRST, [SECOND, FIRST])["startup_saved"] == []
