"""Charts over any range: read once in a thread, then updated with new rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import to_builtins

from vllm_console.fleet import chart_history
from vllm_console.fleet.chart_history import ChartHistory, server_source
from vllm_console.history.store import TIERS, HistoryReader, HistoryWriter
from vllm_console.history.time_view import CHART_RANGES
from vllm_console.metrics.sample import EngineSample, Sample

START = 1_790_000_000.0
NAMED = {one.name: one for one in CHART_RANGES}


def sample(second: float, usage: float = 0.1) -> Sample:
    return Sample(START + second, {"0": EngineSample(kv_cache_usage=usage, generation_tokens_total=second * 10.0)})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two hours of history, a sample every two seconds, with a peak of one second."""
    path = tmp_path / "history.sqlite"
    writer = HistoryWriter(path)
    for second in range(0, 7200, 2):
        writer.append(sample(second, 0.95 if second == 1000 else 0.1))
    writer.close()
    return path


@pytest.fixture
def charts(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChartHistory]:
    monkeypatch.setattr(chart_history, "WAIT_SECONDS", 10.0)
    charts = ChartHistory(server_source(path))
    yield charts
    charts.close()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The tables that were read, by seconds per row."""
    found: list[float] = []
    read: Callable[..., object] = HistoryReader.read

    def noted(self: HistoryReader, part: object, *more: object) -> object:
        found.append(part.tier.step)  # type: ignore[attr-defined]
        return read(self, part, *more)

    monkeypatch.setattr(HistoryReader, "read", noted)
    return found


def test_range_has_peaks_and_rates_at_any_resolution(charts: ChartHistory) -> None:
    for name in ("1h", "6h", "24h", "all"):
        series = charts.series(NAMED[name], START + 7200)
        values = series.values["generation_tokens_per_second"]
        known = [value for value in values if value is not None]
        assert known, name
        assert known[1:-1] == pytest.approx([10.0] * len(known[1:-1]))
        assert not series.loading
        if name != "1h":
            assert max(value for value in series.values["kv_cache_usage"] if value is not None) == 0.95


def test_one_and_six_hours_have_as_many_points_as_recorded(charts: ChartHistory) -> None:
    hour = charts.series(NAMED["1h"], START + 7200).values["kv_cache_usage"]
    assert None not in hour[1:]
    six = charts.series(NAMED["6h"], START + 7200).values["kv_cache_usage"]
    assert sum(value is not None for value in six) in (60, 61)


def test_coarse_ranges_are_read_from_coarse_tables(charts: ChartHistory, reads: list[float]) -> None:
    charts.series(NAMED["7d"], START + 7200)
    assert {TIERS[2].step} <= set(reads) <= {TIERS[0].step, TIERS[2].step}


def test_only_new_rows_are_read_and_rarely(charts: ChartHistory, path: Path, reads: list[float]) -> None:
    charts.series(NAMED["6h"], START + 7200)
    reads.clear()
    for second in range(29):
        charts.series(NAMED["6h"], START + 7200 + second)
    assert reads == [], "a quarter of a point's time has not passed"
    writer = HistoryWriter(path)
    for second in range(7200, 7320):
        writer.append(sample(second, 0.7))
    writer.close()
    series = charts.series(NAMED["6h"], START + 7319)
    assert series.values["kv_cache_usage"][-1] == 0.7
    assert 0 < len(reads) < 6


def test_clock_set_back_does_not_stop_a_chart(charts: ChartHistory, path: Path) -> None:
    charts.series(NAMED["6h"], START + 7200)
    assert charts.recorded_from(START + 7200) is not None
    writer = HistoryWriter(path)
    for second in range(3600, 3900):
        writer.append(sample(second, 0.7))
    writer.close()
    series = charts.series(NAMED["6h"], START + 3900)
    assert series.end == pytest.approx(START + 3900, abs=series.step)
    assert series.values["kv_cache_usage"][-2] == 0.7


def test_range_with_an_earlier_end_stays_unchanged(charts: ChartHistory, reads: list[float]) -> None:
    end = START + 3600
    series = charts.series(NAMED["15m"], START + 7200, end)
    assert end <= series.end <= end + 5
    assert series.values["generation_tokens_per_second"][60] == pytest.approx(10.0)
    reads.clear()
    assert to_builtins(charts.series(NAMED["15m"], START + 7201, end)) == to_builtins(series)
    assert reads == []


def test_unread_range_is_loading(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chart_history, "WAIT_SECONDS", 0.0)
    monkeypatch.setattr(chart_history, "REST_PER_WORK", 1e6)
    charts = ChartHistory(server_source(path))
    assert charts.series(NAMED["1h"], START + 7200).loading
    charts.close()


def test_recorded_from_is_known(charts: ChartHistory, tmp_path: Path) -> None:
    assert charts.recorded_from(START + 7200) == pytest.approx(START, abs=60)
    nothing = ChartHistory(server_source(tmp_path / "none.sqlite"))
    assert nothing.recorded_from(START) is None
    assert nothing.series(NAMED["1h"], START).values["kv_cache_usage"] == (None,) * 180
    nothing.close()


def test_unrecorded_time_is_a_gap_in_coarse_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "history.sqlite"
    writer = HistoryWriter(path)
    for second in (*range(0, 7200, 20), *range(21_600, 28_800, 20)):
        writer.append(sample(second))
    writer.close()
    monkeypatch.setattr(chart_history, "WAIT_SECONDS", 10.0)
    charts = ChartHistory(server_source(path))
    values = charts.series(NAMED["24h"], START + 28_800).values["generation_tokens_per_second"]
    known = [index for index, value in enumerate(values) if value is not None]
    assert known[-1] - known[0] - len(known) + 1 >= 28, "four hours of points of eight minutes"
    assert [values[index] for index in known[1:-1]] == pytest.approx([10.0] * (len(known) - 2))
    charts.close()
