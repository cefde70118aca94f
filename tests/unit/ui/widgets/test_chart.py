"""Charts: what is in each cell, and on which scale, with which clock times and marks."""

from __future__ import annotations

import re

import pytest
from rich.style import Style
from textual.strip import Strip

from vllm_console.fleet.markers import Marker, MarkerKind
from vllm_console.metrics.sample import Series
from vllm_console.text import count, percent, seconds
from vllm_console.ui.terminal.lines import cells_of
from vllm_console.ui.theme import ACCENT, BAD, DIM, SECOND, to_ascii
from vllm_console.ui.widgets.chart import ChartView, Curve, Scale, braille, chart_of, column_of, place_at, tick_times
from vllm_console.ui.widgets.draw import side_by_side

END = 1_767_271_200.0
"""2026-01-01 12:40:00 UTC."""
USAGE = Curve("kv_cache_usage")
LATENCY = (Curve("ttft_p50", "p50", DIM), Curve("ttft_p99", "p99"))


@pytest.fixture(autouse=True)
def _utc(monkeypatch):
    import time

    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def made(points: int = 180, step: float = 5.0, **values: object) -> Series:
    return Series(
        END, step, {key: value if isinstance(value, tuple) else (value,) * points for key, value in values.items()}
    )


def texts(strips: list[Strip]) -> list[str]:
    return [strip.text.rstrip() for strip in strips]


def drawn(values: tuple[float | None, ...], rows: int = 1, *, area: bool = True) -> list[str]:
    dots = braille(Scale(0.0, 1.0, rows).levels(values), rows, area=area)
    return ["".join(chr(0x2800 + bits) for bits in row) for row in dots]


def test_area_has_a_fixed_scale():
    assert drawn((0.0, 1.0)) == ["⣸"]
    assert drawn((0.5, 0.5), 2) == ["⣀", "⣿"]
    assert drawn((9.0, 9.0)) == ["⣿"]


def test_unknown_is_blank_and_zero_is_not():
    assert drawn((None, None, 0.0, 0.0)) == ["⠀⣀"]


def test_line_connects_jumps_and_breaks_at_gaps():
    assert drawn((0.0, 1.0, 1.0, 0.0), area=False) == ["⡸⢱"]
    assert drawn((0.0, None, 1.0, 1.0), area=False) == ["⡀⠉"]


def test_values_have_rows():
    scale = Scale(0.0, 1.0, 10)
    assert [scale.row(value) for value in (1.0, 0.0, 2.0, None)] == [0, 9, None, None]


def test_only_the_upper_edge_above_the_objective_is_red():
    values = (0.3,) * 90 + (0.99,) * 90
    strips = chart_of(made(kv_cache_usage=values), (USAGE,), 40, 11, percent, hi=1.0, objective=0.5, area=True)
    low, high = ([dict([cells_of(strip)[at]]) for strip in strips[:9]] for at in (8, 38))
    assert [row for row, cell in enumerate(high) if BAD in cell.values()] == [0]
    assert not any(BAD in cell.values() for cell in low)


@pytest.mark.parametrize("height", [4, 5, 9, 20])
def test_full_area_reaches_its_tick_and_not_above(height):
    strips = chart_of(made(kv_cache_usage=1.0), (USAGE,), 40, height, percent, hi=1.0, area=True)
    assert strips[0].text.startswith(" 100%┤")
    assert strips[0].text.rstrip()[-1] == "⣤", "the lower half of the cell: the tick is in its middle"


def test_peak_is_red_if_the_objective_is_in_the_top_row():
    values = tuple(0.99 if number >= 90 else 0.92 for number in range(180))
    strips = chart_of(made(kv_cache_usage=values), (USAGE,), 40, 5, percent, hi=1.0, objective=0.94, area=True)
    assert "94%┤" in strips[0].text
    styles = [style for text, style in cells_of(strips[0]) if text >= "⠁"]
    assert BAD in styles, "by its value, though no row is above the objective's"
    assert BAD not in styles[: len(styles) // 2 - 1]


def test_names_in_a_chart_follow_the_order_of_values():
    low, high = (0.1,) * 180, (0.9,) * 179 + (0.11,)
    rows = texts(chart_of(made(ttft_p50=low, ttft_p99=high), LATENCY, 60, 6, seconds))
    names = [row[-3:] for row in rows if row.endswith(("p50", "p99"))]
    assert names == ["p99", "p50"]


def test_line_name_has_the_lines_color():
    both = made(run=1.0, wait=3.0)
    lines = chart_of(both, (Curve("run", "run"), Curve("wait", "wait", SECOND)), 60, 8, count)
    styles = {segment.text.strip(): segment.style for strip in lines for segment in strip}
    assert (styles["run"], styles["wait"]) == (ACCENT, SECOND)


def test_cursor_time_replaces_the_point_size():
    view = ChartView(cursor=END - 895)
    *_, below = texts(chart_of(made(kv_cache_usage=0.5), (USAGE,), 66, 12, percent, hi=1.0, area=True, view=view))
    assert "every" not in below
    assert below.strip().startswith("12:25:05 ")


def test_main_line_wins_in_a_shared_cell():
    both = made(run=0.0, wait=0.0)
    for curves in ((Curve("run"), Curve("wait", style=SECOND)), (Curve("wait", style=SECOND), Curve("run"))):
        lines = chart_of(both, curves, 40, 4, count)
        styles = {
            segment.style for strip in lines for segment in strip if any(ord(one) > 0x2800 for one in segment.text)
        }
        assert styles == {ACCENT}


def test_log_scale_shows_an_objective_and_a_far_higher_peak():
    series = made(ttft_p50=0.2, ttft_p99=(0.8,) * 170 + (40.0,) * 10)
    log = texts(chart_of(series, LATENCY, 60, 11, seconds, objective=1.0, view=ChartView(log=True)))
    assert any(row.startswith(" 1.0s┤") for row in log[2:7]), log
    assert log[0].startswith("  40s┤")
    assert any(row.startswith("  10s┤") for row in log)
    linear = texts(chart_of(series, LATENCY, 60, 11, seconds, objective=1.0))
    assert linear[-4].startswith(" 1.0s┤"), "close to zero, yet above its row"


def test_no_label_stands_twice_on_the_value_axis():
    """A log scale that begins at an objective of 1 s: ``1.0s`` was at its line and at the time axis."""
    series = made(ttft_p50=1.2, ttft_p99=16.0)
    for objective in (1.0, None):
        rows = texts(chart_of(series, LATENCY, 60, 11, seconds, objective=objective, view=ChartView(log=True)))
        labels = [
            label for row in rows if (label := row.partition("┤")[0].partition("┼")[0].strip()) and len(label) < 8
        ]
        assert "1.0s" in labels
        assert len(labels) == len(set(labels)), labels


@pytest.mark.parametrize("height", [3, 4, 5, 6, 8, 9, 11, 20])
@pytest.mark.parametrize("objective", [0.001, 1.0, 30.0])
@pytest.mark.parametrize("area", [True, False])
def test_zero_is_never_in_the_row_of_the_objective(height, objective, area):
    values = (0.0,) * 170 + (40.0,) * 10
    strips = chart_of(
        made(preemptions=values), (Curve("preemptions"),), 60, height, str, objective=objective, area=area
    )
    rows = [strip.text for strip in strips]
    plot = [row for row in rows if row[5] == "┤"]
    (limit,) = (at for at, row in enumerate(plot) if row.startswith(f"{objective:>5}┤"))
    assert "┄" in plot[limit]
    zero = next(at for at, row in enumerate(plot) if "\u2801" <= row[6] <= "\u28ff")
    assert zero == len(plot) - 1 > limit


def test_objective_close_to_zero_has_its_own_row():
    scale = Scale(0.0, 100.0, 6, limit=1.0)
    assert [scale.row(value) for value in (0.0, 0.9, 1.0, 1.1, 100.0)] == [5, 5, 4, 4, 0]


@pytest.mark.parametrize("value", [5e-324, 1e-300, 1e308, float("inf")])
@pytest.mark.parametrize("log", [True, False])
def test_any_number_can_be_drawn(value, log):
    series = Series(end=1000.0, step=5.0, values={"x": (None, 1.0, value)})
    curves = (Curve("x", scale=1000.0),)
    assert len(chart_of(series, curves, 40, 8, count, view=ChartView(log=log))) == 8


def test_time_axis_has_clock_times_and_the_point_size():
    *_, axis, below = texts(chart_of(made(kv_cache_usage=0.5), (USAGE,), 66, 12, percent, hi=1.0, area=True))
    assert axis.startswith("   0%┼")
    assert below.split() == ["every", "5s", "12:28", "12:30", "12:32", "12:34", "12:36", "12:38"]
    for text in ("12:30", "12:36"):
        assert axis[below.index(text) + 2] == "┬"


@pytest.mark.parametrize("width", [40, 41, 47, 53, 66, 100])
def test_clock_times_are_centered_below_their_ticks(width):
    for later in range(0, 120, 7):
        series = Series(end=END + later, step=5.0, values={"kv_cache_usage": (0.5,) * 180})
        *_, axis, below = texts(chart_of(series, (USAGE,), width, 12, percent, hi=1.0, area=True))
        labels = list(re.finditer(r"\d\d:\d\d", below))
        ticks = [at for at, text in enumerate(axis) if text == "┬"]
        assert len(labels) == len(ticks) > 0
        for label, tick in zip(labels, ticks, strict=True):
            start = min(max(6, tick - 2), width - 5)
            assert label.start() == start


def test_low_chart_has_its_clock_times_in_the_axis():
    axis = texts(chart_of(made(kv_cache_usage=0.5), (USAGE,), 66, 5, percent, hi=1.0))[-1]
    assert "┬12:30─" in axis
    assert not re.search(r"\d┬", axis), "no time is left of its tick"


def test_midnight_shows_its_date_and_a_minute_shows_seconds():
    midnight = END - 45_600
    assert (midnight, "Jan 01") in tick_times(END - 86_400, END, 120)
    assert tick_times(END - 60, END, 120)[:2] == [(END - 60, "12:39:00"), (END - 50, "12:39:10")]


def test_crash_mark_takes_precedence_on_the_axis():
    markers = (
        Marker(END - 450, MarkerKind.START, "r3", ""),
        Marker(END - 100, MarkerKind.FINDING, "!", ""),
        Marker(END - 99, MarkerKind.CRASH, "✗", ""),
        Marker(END - 9000, MarkerKind.START, "r2", ""),
    )
    rows = texts(chart_of(made(kv_cache_usage=0.1), (USAGE,), 66, 12, percent, hi=1.0, markers=markers))
    axis = rows[-2]
    assert "r3" in axis
    assert "✗" in axis
    assert "!" not in axis
    assert "r2" not in axis, "it lies before the range"
    place = axis.index("r3") + 1
    assert rows[2][place] == "┊"


def test_cursor_is_reversed_and_shows_its_time():
    view = ChartView(cursor=END - 450)
    strips = chart_of(made(kv_cache_usage=0.5), (USAGE,), 66, 12, percent, hi=1.0, view=view)
    assert "12:32:30" in strips[-1].text
    columns = {
        index for strip in strips[:9] for index, (_, style) in enumerate(cells_of(strip)) if style and style.reverse
    }
    assert len(columns) == 1
    assert columns == {6 + (column_of(made(kv_cache_usage=0.5), 180, 120, END - 450) or 0) // 2}


def test_mark_is_visible_under_the_cursor():
    marker = (Marker(END - 450, MarkerKind.START, "r3", ""),)
    view = ChartView(cursor=END - 450)
    rows = texts(chart_of(made(kv_cache_usage=0.5), (USAGE,), 66, 12, percent, hi=1.0, view=view, markers=marker))
    assert "r3" in rows[-2]
    assert "12:32:30" in rows[-1]


def test_counts_have_whole_ticks():
    rows = texts(chart_of(made(requests_running=1.2), (Curve("requests_running"),), 40, 12, count, whole=True))
    labels = [row.split("┤")[0].strip() for row in rows if "┤" in row]
    assert [text for text in labels if text] == ["2", "1"]


@pytest.mark.parametrize("width", [12, 30, 38, 78, 190])
@pytest.mark.parametrize("height", [2, 3, 5, 8, 20])
def test_chart_has_the_given_size(width, height):
    markers = (Marker(END - 1, MarkerKind.START, "r12", ""), Marker(END - 899, MarkerKind.STOP, "s", ""))
    view = ChartView(cursor=END - 2)
    series = made(ttft_p50=0.2, ttft_p99=3.0)
    strips = chart_of(series, LATENCY, width, height, seconds, objective=1.0, view=view, markers=markers)
    assert len(strips) == height
    assert all(strip.cell_length <= width for strip in strips)
    assert all(to_ascii(strip.text).isascii() and "?" not in to_ascii(strip.text) for strip in strips)


def test_nothing_reported_differs_from_not_read_yet():
    nothing = chart_of(made(kv_cache_usage=None), (USAGE,), 40, 8, percent)
    assert "nothing recorded in this period" in "".join(texts(nothing))
    waiting = chart_of(made(kv_cache_usage=None), (USAGE,), 40, 8, percent, empty="waiting for it to be ready")
    assert "waiting for it to be ready" in "".join(texts(waiting))
    assert "loading" in "".join(texts(chart_of(None, (USAGE,), 40, 8, percent)))


def test_lines_differ_without_styles():
    """Without colors, names and order distinguish them."""
    series = made(ttft_p50=0.1, ttft_p99=0.9)
    strips = chart_of(series, LATENCY, 60, 6, seconds)
    plain = [Strip([segment._replace(style=Style()) for segment in strip]) for strip in strips]
    assert texts(plain)[0].endswith("p99")


def test_only_chart_cells_have_a_place_in_time():
    chart = chart_of(made(kv_cache_usage=0.5), (USAGE,), 46, 8, percent)
    pair = side_by_side((chart, chart), 46, 8)
    assert place_at(pair, 6, 0) == pytest.approx(0.0125)
    assert place_at(pair, 45, 3) == pytest.approx(0.9875)
    assert place_at(pair, 47 + 6 + 20, 3) == pytest.approx(0.5125)
    assert [place_at(pair, x, 2) for x in (0, 5, 46, 52, 93)] == [None] * 5
    assert place_at(pair, 20, 7) is None, "the row of clock times"
    assert place_at(pair, 20, 99) is None
