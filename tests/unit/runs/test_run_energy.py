"""Energy in the minutes of a run and in comparisons, and nothing if it is unknown."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from vllm_console.cli.runs_text import comparison_lines
from vllm_console.history.energy import FIGURES, Tariff
from vllm_console.history.gpu_samples import GPU_SAMPLES
from vllm_console.metrics.sample import EngineSample, Sample
from vllm_console.recorder import WindowRecorder
from vllm_console.runs.compare import compare
from vllm_console.runs.document import comparison_document
from vllm_console.runs.store import RunName, RunStore
from vllm_console.runs.windows import with_figures

PID = 4100
TARIFF = Tariff(0.30, "EUR")


def gpu_lines(watts: float, others: tuple[int, ...] = ()) -> str:
    """Lines of a machine's sampler while a server's GPU uses that much power."""
    pids = [{"pid": pid} for pid in (PID, *others)]
    return "".join(
        json.dumps({"at": at, "gpus": [{"index": 0, "energy_mj": round(at * watts * 1000), "used_by": pids}]}) + "\n"
        for at in (1000.0 + 5 * step for step in range(40))
    )


@pytest.mark.parametrize(("others", "known"), [((), True), ((77,), False)])
def test_recorder_stores_the_energy_of_each_minute(tmp_path: Any, others: tuple[int, ...], known: bool) -> None:
    path = tmp_path / "runs.sqlite"
    (tmp_path / GPU_SAMPLES).write_text(gpu_lines(300.0, others))
    log = WindowRecorder(path, RunName("chat-1", "chat", 1), gpus=(tmp_path / GPU_SAMPLES, PID))
    for second in range(130):
        engine = EngineSample(
            requests_running=1.0,
            requests_finished_total=second / 2,
            generation_tokens_total=60.0 * second,
            prompt_tokens_total=240.0 * second,
        )
        log.append(Sample(1001.5 + second, {"0": engine}))
    log.flush()
    windows = RunStore(path).windows(RunStore(path).runs()[0].id)
    assert len(windows) == 2
    for window in windows:
        found = {name: window.figures[name] for name in FIGURES if name in window.figures}
        assert found == (pytest.approx(dict(zip(FIGURES, (5.0, 1.0, 600.0), strict=True))) if known else {})


def test_clock_set_back_does_not_accumulate_data(tmp_path: Any) -> None:
    log = WindowRecorder(tmp_path / "runs.sqlite", RunName("chat-1", "chat", 1), gpus=(tmp_path / GPU_SAMPLES, PID))
    for second in (*range(1_000_000, 1_000_100), *range(1000)):
        log.append(Sample(1000.0 + second, {"0": EngineSample(generation_tokens_total=0.0)}))
    assert len(log._totals) < 200


def powered(windows: list[Any], joules: float) -> list[Any]:
    more = dict(zip(FIGURES, (joules, joules / 4, joules * 200), strict=True))
    return [with_figures(window, more) for window in windows]


def test_comparison_has_energy_rows_and_costs(made: Any) -> None:
    before, after = made.pair(powered(made.minutes(1), 12.0), powered(made.minutes(2), 6.0))
    found = compare(before, after)
    rows = {figure.key: figure for figure in found.figures if figure.key in FIGURES}
    assert list(rows) == list(FIGURES)
    assert (rows[FIGURES[0]].before, rows[FIGURES[0]].after, rows[FIGURES[0]].verdict) == (12.0, 6.0, None)
    assert rows[FIGURES[0]].low is not None
    text = "\n".join(comparison_lines(found, TARIFF))
    for part in (
        "J/token out",
        "12 J",
        "6 J",
        "−50%",
        "J/request",
        "2.4 kJ",
        "1 EUR → 0.5 EUR per million output tokens",
    ):
        assert part in text
    cost = comparison_document(found, TARIFF)["energy_cost"]
    assert cost["before"]["cost_per_million_output_tokens"] == pytest.approx(1.0)
    assert cost["after"]["cost_per_million_tokens"] == pytest.approx(0.125)
    assert cost["currency"] == "EUR"
    assert comparison_document(found)["energy_cost"] is None


def test_unknown_energy_has_no_row(made: Any) -> None:
    before, after = made.pair(made.minutes(1), made.minutes(2))
    found = compare(before, after)
    assert not {figure.key for figure in found.figures} & set(FIGURES)
    assert comparison_document(found, TARIFF)["energy_cost"] is None
    assert "EUR" not in "\n".join(comparison_lines(found, TARIFF))
    half = compare(before, replace(after, windows=powered(list(after.windows), 6.0)))
    assert "– → 0.5 EUR" in "\n".join(comparison_lines(half, TARIFF))
