"""What clients measured of a run: kept with it, listed, and drawn over each other."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fakes import made_runs
from vllm_console.cli.runs_text import comparison_lines, ramp_step_lines, run_lines
from vllm_console.runs import store as run_store
from vllm_console.runs.compare import compare
from vllm_console.runs.document import comparison_document
from vllm_console.runs.measurement import Measurement, RampCurve, plot
from vllm_console.runs.store import RunHead, RunName, RunStore
from vllm_console.runs.text import ceiling_text


def ramp(at=1000.0, ceiling=8.0, slower=1.0):
    steps = tuple(
        {"rate": rate, "sent": 100, "completed": 90, "failed": 0, "ttft_seconds": {"p99": ttft * slower},
         "itl_seconds": {"p99": 0.03}, "e2e_seconds": {}, "tokens_per_second": 100.0 * rate, "kv_cache_usage": 0.5,
         "preemptions": 0, "waiting": 0, "attained": 1.0 if rate <= ceiling else 0.8, "ok": rate <= ceiling}
        for rate, ttft in ((2.0, 0.2), (4.0, 0.25), (8.0, 0.5), (16.0, 4.0))
    )  # fmt: skip
    limits = {"ttft_p99_seconds": 1.0, "itl_p99_seconds": 0.1}
    return Measurement("ramp", at, steps, ceiling, ceiling, "ttft_p99_seconds", "It holds.", limits)


@pytest.fixture
def store(tmp_path):
    return RunStore(tmp_path / "runs.sqlite")


def test_ramp_is_stored_with_its_run_and_listed(store):
    store.enter([RunHead("chat-1", "chat", 1, 500.0, preset="chatbot", flags={"max-num-seqs": 8})])
    store.add_measurement(RunName("chat-1", "chat", 1), ramp())
    (run,) = store.runs("chat")
    assert run.measurements == (ramp(),)
    assert any("ceiling 8 req/s, limited by TTFT p99" in line for line in run_lines([run], 2000.0))


@pytest.mark.parametrize(
    ("limited_by", "ending"),
    [("itl_p99_seconds", "the objectives held at no rate, limited by ITL p99"), (None, "ceiling not reached")],
)
def test_missing_ceiling_is_explained(store, limited_by, ending):
    store.enter([RunHead("chat-1", "chat", 1, 500.0, preset="chatbot")])
    found = replace(ramp(), ceiling_requests_per_second=None, goodput=None, limited_by=limited_by)
    store.add_measurement(RunName("chat-1", "chat", 1), found)
    (line,) = (line for line in run_lines(store.runs("chat"), 2000.0) if "ramp " in line)
    assert line.endswith(ending)


def test_run_keeps_the_newest_measurements(store, monkeypatch):
    monkeypatch.setattr(run_store, "MOST_MEASUREMENTS", 2)
    name = RunName("chat-1", "chat", 1)
    for at in (3.0, 1.0, 2.0):
        store.add_measurement(name, ramp(at))
    assert [one.at for one in store.runs("chat")[0].measurements] == [2.0, 3.0]


def test_comparison_draws_both_curves():
    sides = made_runs.pair(made_runs.minutes(1), made_runs.minutes(2))
    ramps = ramp(slower=2.0), ramp()
    before, after = (
        replace(side, run=replace(side.run, measurements=(one,))) for side, one in zip(sides, ramps, strict=True)
    )
    found = compare(before, after)
    text = "\n".join(comparison_lines(found))
    assert "o before ramp: ceiling 8 req/s" in text
    assert "* after  ramp: ceiling 8 req/s" in text
    assert max(len(line) for line in text.splitlines()[-9:]) < 80
    assert comparison_document(found)["after"]["ceiling_requests_per_second"] == 8.0


def test_ceilings_above_a_thousand_are_written_in_full():
    sides = made_runs.pair(made_runs.minutes(1), made_runs.minutes(2))
    before, after = (replace(side, run=replace(side.run, measurements=(ramp(ceiling=1250.0),))) for side in sides)
    assert ceiling_text(compare(before, after)) == "1,250 → 1,250 req/s (by ramps)"


def test_plot_marks_points_limit_and_ceiling():
    lines = plot("TTFT p99", [RampCurve("*", [(1.0, 0.1), (10.0, 10.0)], 10.0**0.5)], 1.0)
    assert lines[1].rstrip().endswith("*"), "top right"
    assert lines[-2][7] == "*", "bottom left"
    assert {line[7 + 13] for line in lines[2:-1]} | {line[7 + 14] for line in lines[2:-1]} >= {"|"}
    assert any("- - -" in line for line in lines[2:-2])


@pytest.mark.parametrize("points", [[], [(1.0, 0.1)], [(1.0, 0.1), (1.0, 0.1)]])
def test_plot_needs_a_point(points):
    assert bool(plot("TTFT p99", [RampCurve("*", points)], None)) is bool(points)


def test_steps_fit_80_columns():
    lines = ramp_step_lines(ramp())
    assert all(len(line) <= 80 for line in lines)
    assert lines[-1].endswith("!")
    assert not lines[-2].endswith("!")
