"""The request and step panes as text: their rows, where time is spent, and why they may be empty."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from textual.strip import Strip

from vllm_console.fleet.probe import ORDERS, ProbeView
from vllm_console.history.prefix_use import LengthClass, PrefixUse, StillCached
from vllm_console.history.probe_records import FinishedRequest
from vllm_console.metrics.quantile import Quantile
from vllm_console.metrics.sample import Responses
from vllm_console.ui.panes.kv_cache import kv_cache_lines
from vllm_console.ui.panes.latency import latency_lines
from vllm_console.ui.panes.requests import PREFIXES, VIEWS, order_after, requests_lines
from vllm_console.ui.panes.servers import columns_for, row
from vllm_console.ui.panes.steps import step_lines
from vllm_console.ui.theme import ACCENT, BAD, to_ascii
from vllm_console.ui.widgets.chart import PLAIN, ChartView
from vllm_console.ui.widgets.scatter import scatter

SIZES = [(20, 4), (60, 6), (80, 14), (120, 30), (200, 10), (200, 50)]


def text(strips: object) -> str:
    return "\n".join(strip.text.rstrip() for strip in strips)


@pytest.fixture
def recorded(fakes):
    """A server with its probe's records."""
    return replace(fakes.chat(fakes.NOW), probe=fakes.probe_at(fakes.NOW), series=fakes.series_at(fakes.NOW, 1.0))


@pytest.mark.parametrize("draw", [requests_lines, step_lines])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_probe_panes_fit_any_size(fakes, recorded, draw, width, height):
    for server in (recorded, replace(recorded, probe=None), replace(recorded, probe=ProbeView(problem="none " * 30))):
        lines = draw(server, fakes.NOW, width, height, ChartView(log=True))
        assert len(lines) <= height
        assert all(strip.cell_length <= width for strip in lines), text(lines)


def rows_of(server, now, order):
    lines = text(requests_lines(server, now, 100, 14, ChartView(order=order))).splitlines()
    return lines[0], lines[4:]


def test_refused_requests_come_first_in_little_space(fakes, recorded):
    window = replace(recorded.window, responses=Responses(6.0, refused=2.0))
    server = replace(recorded, window=window)
    wide = text(requests_lines(server, fakes.NOW, 140, 14)).splitlines()[1]
    assert "finished" in wide
    assert wide.endswith(" · 2 of 8 requests refused (4xx) in the last minute")
    narrow = text(requests_lines(server, fakes.NOW, 60, 14)).splitlines()[1]
    assert narrow == " 2 of 8 requests refused (4xx) in the last minute"


def test_requests_are_listed_in_the_requested_order(fakes, recorded):
    title, rows = rows_of(recorded, fakes.NOW, "slowest")
    assert "slowest · last 15m" in title
    e2e = [row.split()[4] for row in rows]
    assert e2e == [f"{float(one[:-1]):.0f}s" for one in e2e]
    assert e2e == sorted(e2e, key=lambda one: -float(one[:-1]))
    assert all(" abort" in row for row in rows_of(recorded, fakes.NOW, "aborted")[1])
    ended = [row.split()[0] for row in rows_of(recorded, fakes.NOW, "newest")[1]]
    assert ended == sorted(ended, reverse=True), "the column is what they are ordered by"
    title, rows = rows_of(recorded, fakes.NOW, "preempted")
    assert {row.split()[-3] for row in rows} <= {"1", "2"}
    assert [order_after(order) for order in VIEWS] == [*VIEWS[1:], VIEWS[0]]
    assert VIEWS[:4] == ORDERS


def test_reason_for_an_empty_list_is_shown_in_full(fakes, recorded):
    none = replace(recorded.probe.requests, listed=((),) * len(ORDERS))
    server = replace(recorded, probe=replace(recorded.probe, requests=none))
    lines = requests_lines(server, fakes.NOW, 118, 24, replace(PLAIN, order="aborted"))
    shown = " ".join("".join(strip.text[:70] for strip in lines).split())
    assert "None aborted. Requests cut off by a stop, a restart or their client are not recorded." in shown


def test_requests_of_a_failed_server_show_until_when(fakes, recorded):
    ended = replace(recorded, series=replace(fakes.series_at(fakes.NOW, 0.9), as_of=fakes.NOW - 200))
    assert "last 15m to 12:" in text(requests_lines(ended, fakes.NOW, 100, 20)[:1])


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_hits_are_shown_by_prompt_length(fakes, recorded, width, height):
    use = PrefixUse(
        (LengthClass(1, 127, 10, 0, 900, 0, 0), LengthClass(1024, 2047, 40, 30, 60_000, 45_000, 1152)),
        0,
        StillCached(3, 400, 100),
    )
    seen = replace(recorded.probe.requests, prefixes=use)
    window = replace(recorded.window, prefix_caching=True, prefix_step=1152)
    server = replace(recorded, probe=replace(recorded.probe, requests=seen), window=window)
    lines = requests_lines(server, fakes.NOW, width, height, ChartView(order=PREFIXES))
    assert len(lines) <= height
    assert all(strip.cell_length <= width for strip in lines)
    if width >= 80 and height >= 10:
        assert "1,024-2,047           40     30    45.0k   75%" in text(lines)
        assert "74% of 60.9k prompt tokens cached · granularity 1,152" in text(lines)
        assert "3 resumed after preemption: 25% still cached, 300 recomputed" in text(lines)
    off = replace(server, window=replace(window, prefix_caching=False))
    lines = requests_lines(off, fakes.NOW, width, height, ChartView(order=PREFIXES))
    assert height < 5 or "Prefix caching is off." in text(lines)
    assert width < 60 or "prefix caching off" in text(kv_cache_lines(off, fakes.NOW, width, 10))


def test_bar_parts_differ_without_colors_and_in_ascii(fakes, recorded):
    one = FinishedRequest("r", fakes.NOW - 20, fakes.NOW, 0, 900, 80, 0, 5.0, 5.0, 5.0, 20.0, 0, "stop", 0)
    seen = replace(recorded.probe.requests, listed=((one,),) * 4, counts=(1, 1, 0, 0), count=1)
    lines = text(requests_lines(replace(recorded, probe=replace(recorded.probe, requests=seen)), fakes.NOW, 80, 6))
    legend, bar = lines.splitlines()[2], lines.splitlines()[4]
    marks = [legend[legend.index(name) - 2] for name in ("queue", "prefill", "decode", "other")]
    assert all(mark * 4 in bar for mark in marks)
    assert len(set(map(to_ascii, marks))) == 4


def test_running_and_finished_requests_are_counted(fakes, recorded):
    line = text(requests_lines(recorded, fakes.NOW, 120, 20)).splitlines()[1]
    assert line.startswith(" 62 running · 12 waiting now · 240 finished: 27 preempted, 4 aborted")
    crashed = replace(recorded, last_window=recorded.window)
    assert text(requests_lines(crashed, fakes.NOW, 120, 20)).splitlines()[1].startswith(" 240 finished: ")
    old = replace(recorded.probe, last=recorded.probe.last._replace(at=fakes.NOW - 60))
    assert " waiting at " in text(requests_lines(replace(recorded, probe=old), fakes.NOW, 120, 20))


@pytest.mark.parametrize("draw", [requests_lines, step_lines])
def test_missing_records_have_a_reason(fakes, draw):
    chat = fakes.chat(fakes.NOW)
    why = "chat has no probe, so its requests are not recorded: --no-probe was given"
    assert why in text(draw(replace(chat, probe=ProbeView(problem=why)), fakes.NOW, 120, 10))
    assert "not started here" in text(draw(fakes.observed(fakes.NOW), fakes.NOW, 120, 10))


def test_steps_show_their_values_at_the_cursor(fakes, recorded):
    now = text(step_lines(recorded, fakes.NOW, 150, 12))
    assert "tokens per step" in now
    assert "p99 30ms" in now
    assert "latest 5s" in now
    burst = fakes.NOW - 5 * (180 - 106)
    then = text(step_lines(recorded, fakes.NOW, 150, 12, ChartView(cursor=burst)))
    assert "p99 210ms" in then
    assert "latest" not in then
    assert "enlarge the pane for more" in text(step_lines(recorded, fakes.NOW, 60, 6))
    assert "enlarge the window for more" in text(step_lines(recorded, fakes.NOW, 60, 6, ChartView(large=True)))


def test_step_charts_show_since_when_steps_are_recorded(fakes, recorded):
    assert "no steps recorded" not in text(step_lines(recorded, fakes.NOW, 150, 12))
    steps = recorded.probe.steps
    late = {key: (None,) * 150 + values[150:] for key, values in steps.values.items()}
    late = replace(recorded.probe, steps=replace(steps, values=late))
    assert "no steps recorded before 12:38" in text(step_lines(replace(recorded, probe=late), fakes.NOW, 150, 12))


def test_exact_latencies_are_marked_in_pane_and_table(fakes, recorded):
    def exact(one):
        parts = {name: Quantile(0.5, 0.5, 0.5) for name in ("p50", "p90", "p99")}
        return replace(one, exact=True, **parts)

    window = recorded.window
    some = replace(window, latencies={**window.latencies, "ttft": exact(window.latencies["ttft"])})
    every = replace(window, latencies={key: exact(one) for key, one in window.latencies.items()})
    partly = text(latency_lines(replace(recorded, window=some), fakes.NOW, 80, 30))
    assert " exact: TTFT\n" in partly
    assert "last minute, exact" not in partly
    assert "last minute, exact" in text(latency_lines(replace(recorded, window=every), fakes.NOW, 80, 30))
    assert "exact" not in text(latency_lines(recorded, fakes.NOW, 80, 30))
    server = replace(recorded, window=some)
    cells: Strip = row(server, columns_for([server], 200), fakes.NOW, 200, False)
    assert "500ms" in cells.text
    points = (1.0,) * 90 + (None,) * 90
    series = replace(recorded.series, values={**recorded.series.values, "ttft_exact": points})
    assert "TTFT p50, p99, partly exact" in text(latency_lines(replace(recorded, series=series), fakes.NOW, 80, 30))


def test_scatter_plot_has_its_points_in_place():
    lines = scatter([(0.0, 0.0), (100.0, 1.0)], 26, 6, "{:.0f}".format, "{:.1f}".format)
    assert len(lines) == 6
    assert lines[0].text == "  1.0┤" + " " * 19 + "⠈"
    assert lines[4].text[6] == "⡀"
    assert lines[5].text.endswith("─100")
    assert "nothing recorded yet" in text(scatter([], 40, 6, str, str))
    assert scatter([(1.0, 1.0)], 8, 2, str, str) == []


def test_few_points_take_a_cell_each_colored_by_the_limit():
    lines = scatter([(1.0, 0.1), (10.0, 2.0)], 30, 8, str, str, log=True, limit=1.0, few=True)
    colors = [one.style.color for drawn in lines for one in drawn if "●" in one.text and one.style is not None]
    assert colors == [BAD.color, ACCENT.color]
