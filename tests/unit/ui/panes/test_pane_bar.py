"""The bar of panes, and panes drawn as one line."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from vllm_console.diagnosis.finding import Finding, Severity
from vllm_console.diagnosis.live.findings import RULES
from vllm_console.metrics.sample import Series
from vllm_console.ui.panes import pane_bar as bar
from vllm_console.ui.panes.sparks import SPARKS, spark_cells, spark_lines
from vllm_console.ui.theme import ACCENT, DIM, to_ascii


def found(code, severity=Severity.WARNING):
    return Finding(code, severity, 0.0, "", "")


def test_panes_with_a_problem_are_marked(fakes):
    pressed = fakes.pressed(fakes.NOW)
    problems = bar.problem_panes(pressed, None)
    assert problems == {bar.KV_CACHE, bar.PREEMPTIONS, bar.LATENCY}
    whole, short = (bar.pane_bar((1,), 0, problems, "focus", width).text for width in (120, 80))
    names = " 1 KV! 2 Preempt! 3 Latency! 4 Throughput  5 Log  6 GPUs  7 Requests  8 Steps"
    assert whole.startswith(names)
    assert whole.rstrip().endswith("L focus")
    assert short.rstrip() == names, "no name is shortened on a screen of 80 columns"
    needed = bar.pane_bar((1,), 1, problems, "back · chat", 80, needed=True).text
    assert needed.startswith(" 1 KV! 2 Pre! 3 Latency! 4 Thr  5 Log  6 GPUs  7 Req  8 Steps"), "room for the layout"
    assert needed.rstrip().endswith("L back · chat")
    narrow = bar.pane_bar((6,), 6, problems, "back · chat", 60, needed=True).text
    assert narrow.startswith(" 1 ! 2 ! 3 ! 4   5   6 GPUs  7   8  "), "only the enlarged pane keeps its name"
    assert narrow.rstrip().endswith("L back · chat")
    assert bar.problem_panes(fakes.calm(fakes.NOW), None) == frozenset()
    assert bar.problem_panes(fakes.broken(fakes.NOW), None) == {bar.LOG}


def test_note_marks_no_pane(fakes):
    calm = fakes.coder(fakes.NOW)
    assert bar.problem_panes(replace(calm, findings=(found("gpu_throttled", Severity.NOTE),)), None) == frozenset()
    assert bar.problem_panes(replace(calm, findings=(found("gpu_throttled"),)), None) == {bar.GPUS}


def test_placed_findings_exist():
    assert set(bar.FINDING_PANES) <= {rule.code for rule in RULES}


@pytest.mark.parametrize("width", [10, 30, 60, 80, 200])
def test_pane_bar_fits_any_width(width):
    assert bar.pane_bar((1, 2), 2, (1, 2, 3, 4, 5, 6), "auto: overview", width).cell_length <= width


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_each_pane_has_a_line_with_value_and_span(fakes, width):
    server = replace(fakes.chat(fakes.NOW), series=fakes.series_at(fakes.NOW, 1.0))
    lines = spark_lines(server, list(SPARKS), width)
    assert len(lines) == len(SPARKS)
    if width >= 60:
        assert all(strip.cell_length <= width for strip in lines)
        assert "99% used !" in lines[0].text
        assert lines[0].text.rstrip().endswith("15m")


def test_figures_of_a_failed_server_are_dim_and_miss_no_objective(fakes):
    window = fakes.window_at(fakes.NOW, 0.99)
    failed = replace(fakes.chat(fakes.NOW), window=window, last_window=window)
    for strip in spark_lines(failed, list(SPARKS), 80):
        figure = next(part for part in strip if re.search(r"used|/min|p99|tok/s", part.text))
        assert figure.style == DIM
        assert "!" not in figure.text


def test_unknown_is_a_dash_and_a_blank(fakes):
    server = replace(fakes.chat(fakes.NOW), window=None, series=None)
    text = spark_lines(server, ["kv-cache"], 80)[0].text
    assert "–" in text
    assert "▁" not in text


def drawn(*arguments):
    return "".join(text for text, _ in spark_cells(*arguments))


def test_each_cell_is_highlighted_by_its_own_value(fakes):
    server = fakes.judged(fakes.chat(fakes.NOW))
    values = tuple(0.3 if number < 90 else 0.95 for number in range(180))
    series = Series(end=fakes.NOW, step=5.0, values={"kv_cache_usage": values})
    (strip,) = spark_lines(replace(server, series=series), ["kv-cache"], 80)
    low = "".join(part.text for part in strip if "▃" in part.text and part.style == ACCENT + DIM)
    high = "".join(part.text for part in strip if "█" in part.text and part.style == ACCENT)
    assert set(low) == {"▃"}
    assert set(high) == {"█"}
    assert abs(len(low) - len(high)) <= 2


def test_sparkline_is_to_scale_and_moves_by_whole_cells():
    series = Series(end=100.0, step=5.0, values={"one": (0.0, 0.5, 1.0, None)})
    assert drawn(series, "one", 6, 1.0) == "  ▁▅█ "
    points = tuple(float(number) for number in range(40))
    first = drawn(Series(end=200.0, step=5.0, values={"one": points}), "one", 10, 40.0)
    later = drawn(
        Series(end=200.0 + 5 * 4, step=5.0, values={"one": (*points[4:], 39.0, 39.0, 39.0, 39.0)}), "one", 10, 40.0
    )
    assert len(first) == len(later) == 10
    assert first[1:].strip() == later[:9].strip() or first[2:9] == later[1:8]


def test_bars_differ_in_ascii_too():
    assert len(set(to_ascii("▁▂▃▄▅▆▇█"))) == 8


def test_sparkline_fills_its_width(fakes):
    series = fakes.series_at(fakes.NOW, 1.0)
    for width in (20, 60, 74, 100, 180):
        text = drawn(series, "requests_running", width, None)
        assert len(text) == width
        assert " " not in text
