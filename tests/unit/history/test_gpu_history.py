"""GPU history: writing, joining and reading rows, with several writers."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from vllm_console.history import gpu_history
from vllm_console.history.gpu_history import (
    FIVES,
    GPU_HISTORY,
    MINUTES,
    Card,
    GpuEntry,
    GpuHistoryReader,
    GpuHistoryWriter,
    GpuTimeline,
    card_of,
    last_cards,
)
from vllm_console.history.store import HistoryMissingError, HistoryUnusableError, Stretch
from vllm_launchers.host.gpu.host import Gpu, Host, NvLink

START = 1_790_000_040.0

LINKS = (NvLink(0, remote=1, sent_gbs=1.25, received_gbs=0.5), NvLink(1, active=False))
BUSY = Gpu(
    0, uuid="GPU-a", name="NVIDIA L40S", memory_gib=45.0, used_gib=30.5, utilization=90.0, power_w=250.4,
    power_limit_w=350.0, temperature_c=61.0, temperature_slowdown_c=92.0, clock_mhz=2100, nvlinks=LINKS,
    nvlink_sent_gbs=1.25,
)  # fmt: skip
OTHER = Gpu(1, uuid="GPU-b", utilization=5.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / GPU_HISTORY


def host(*gpus: Gpu) -> Host:
    return Host(gpus=gpus)


def rows(path: Path, of: Gpu, tier: gpu_history.Tier = FIVES) -> list[GpuEntry]:
    reader = GpuHistoryReader(path, card_of(of))
    try:
        return reader.read(Stretch(tier, 0.0, 1e12), 100_000)
    finally:
        reader.close()


def known(entry: GpuEntry) -> dict[str, float]:
    return {name: value for name, value in zip(entry.card.keys, entry.values, strict=True) if value is not None}


def test_values_are_restored_and_unreported_ones_stay_unknown(path: Path) -> None:
    writer = GpuHistoryWriter(path)
    writer.append(host(BUSY, OTHER), START)
    writer.close()
    (entry,) = rows(path, BUSY)
    assert entry.card == Card(0, "GPU-a", "NVIDIA L40S", 45.0, 350, 92, entry.card.links)
    assert [(link.number, link.remote) for link in entry.card.links] == [(0, 1), (1, None)]
    assert known(entry) == {
        "used_gib": 30.5, "utilization": 90.0, "power_w": 250.4, "temperature_c": 61.0, "clock_mhz": 2100.0,
        "nvlink_sent_gbs": 1.25, "link0_sent_gbs": 1.25, "link0_received_gbs": 0.5,
    }  # fmt: skip
    (other,) = rows(path, OTHER)
    assert known(other) == {"utilization": 5.0}
    assert path.stat().st_mode & 0o777 == 0o600


def test_minute_rows_hold_means_and_peaks(path: Path) -> None:
    writer = GpuHistoryWriter(path)
    for number in range(13):
        peak = number == 5
        gpu = replace(BUSY, utilization=100.0 if peak else 40.0, power_w=349.0 if peak else 100.0, clock_mhz=None)
        writer.append(host(gpu), START + 5 * number)
    writer.close()
    (minute,) = rows(path, BUSY, MINUTES)
    figures = known(minute)
    assert figures["utilization"] == 45.0
    assert figures["power_w"] == 349.0
    assert "clock_mhz" not in figures
    assert minute.at == START + 55


def test_next_writer_continues_after_the_last(path: Path) -> None:
    first, second = GpuHistoryWriter(path), GpuHistoryWriter(path)
    for number in range(12):
        (first if number < 6 else second).append(host(BUSY), START + 5 * number)
    second.append(host(BUSY), START + 56.0)
    first.append(host(BUSY), START + 57.0)
    assert len(rows(path, BUSY)) == 12, "a step is written once, by any writer"
    first.append(host(BUSY), START + 60.0)
    assert len(rows(path, BUSY, MINUTES)) == 1
    first.close()
    second.close()


def test_clock_set_back_loses_nothing_and_replaces_repeated_times(path: Path) -> None:
    writer = GpuHistoryWriter(path)
    for number in range(120):  # ten minutes
        writer.append(host(replace(BUSY, utilization=10.0)), START + 5 * number)
    for number in range(96, 110):  # the clock was set back by two minutes
        writer.append(host(replace(BUSY, utilization=90.0)), START + 5 * number)
    writer.close()
    found = [known(entry)["utilization"] for entry in rows(path, BUSY)]
    assert found == [10.0] * 96 + [90.0] * 14 + [10.0] * 10
    minutes = [known(entry)["utilization"] for entry in rows(path, BUSY, MINUTES)]
    assert minutes == [10.0] * 8 + [90.0]


def test_late_writer_deletes_no_rows_of_another(path: Path) -> None:
    early, late = GpuHistoryWriter(path), GpuHistoryWriter(path)
    for number in range(13):
        early.append(host(BUSY), START + 5 * number)
    late.append(host(BUSY), START + 57)
    early.close()
    late.close()
    assert len(rows(path, BUSY)) == 13
    assert len(rows(path, BUSY, MINUTES)) == 1


def test_rows_from_a_clock_wrong_by_over_a_day_are_deleted(path: Path) -> None:
    writer = GpuHistoryWriter(path)
    for at in (START, START + 5, START + 7200, START + 90_000, START + 10):
        writer.append(host(BUSY), at)
    writer.append(host(BUSY), START + 15)
    writer.close()
    assert [entry.at for entry in rows(path, BUSY)] == [START, START + 5, START + 10, START + 15, START + 7200]
    assert max(entry.at for entry in rows(path, BUSY, MINUTES)) <= START + 7200


def test_gpu_history_stays_small(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_history, "TIERS", (FIVES._replace(rows=20), MINUTES._replace(rows=5)))
    monkeypatch.setattr(gpu_history, "_PRUNE_EVERY", 1)
    writer = GpuHistoryWriter(path)
    for number in range(120):
        writer.append(host(replace(BUSY, power_limit_w=301.0 if number < 24 else 300.0)), START + 5 * number)
    writer.close()
    assert len(rows(path, BUSY)) == 20
    assert len(rows(path, BUSY, MINUTES)) <= 5
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT count(*) FROM machines").fetchone() == (1,), "limits of rows that are gone go"
    connection.close()


def test_gpu_is_identified_by_its_uuid(path: Path) -> None:
    writer = GpuHistoryWriter(path)
    writer.append(host(BUSY, OTHER), START)
    writer.append(host(replace(OTHER, index=0), replace(BUSY, index=1)), START + 5)
    writer.append(host(replace(OTHER, index=0)), START + 10)
    writer.close()
    assert [known(entry)["utilization"] for entry in rows(path, BUSY)] == [90.0, 90.0]
    assert [known(entry)["utilization"] for entry in rows(path, OTHER)] == [5.0, 5.0, 5.0]
    assert [card.uuid for card in last_cards(path)] == ["GPU-b"]


def test_damaged_file_is_moved_aside_and_a_newer_one_is_not_read(path: Path) -> None:
    path.write_bytes(b"no database at all, " * 400)
    writer = GpuHistoryWriter(path)
    writer.append(host(BUSY), START)
    assert writer.trouble == ""
    assert "moved to gpu-history.sqlite.broken" in writer.notice
    assert len(rows(path, BUSY)) == 1
    writer.close()
    other = path.with_name("other.sqlite")
    connection = sqlite3.connect(other)
    connection.execute("CREATE TABLE mine (a)")
    connection.close()
    with pytest.raises(HistoryUnusableError):
        rows(other, BUSY)
    with pytest.raises(HistoryMissingError):
        rows(path.with_name("none.sqlite"), BUSY)


def test_damaged_row_hides_no_others(path: Path) -> None:
    writer = GpuHistoryWriter(path)
    for number in range(4):
        writer.append(host(BUSY), START + 5 * number)
    connection = sqlite3.connect(path)
    connection.execute("UPDATE fives SET data = x'c1ff' WHERE sequence = (SELECT min(sequence) + 1 FROM fives)")
    connection.commit()
    connection.close()
    writer.append(host(BUSY), START + 60)
    assert writer.trouble == ""
    assert len(rows(path, BUSY)) == 4
    assert known(rows(path, BUSY, MINUTES)[0])["utilization"] == 90.0
    writer.close()


def test_write_failure_is_reported_and_the_next_row_retried(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    writer = GpuHistoryWriter(folder / GPU_HISTORY)
    writer.append(host(BUSY), START)
    assert "GPU history is lost" in writer.trouble
    folder.mkdir()
    writer.append(host(BUSY), START + 1)
    assert writer.trouble == ""
    assert len(rows(folder / GPU_HISTORY, BUSY)) == 1
    writer.close()


@pytest.fixture
def entry() -> Callable[..., GpuEntry]:
    card = card_of(Gpu(0))

    def entry(at: float, seconds: float = 5.0, **figures: Any) -> GpuEntry:
        return GpuEntry(START + at, seconds, card, tuple(figures.get(name) for name in card.keys))

    return entry


def test_points_have_time_weighted_means_and_peaks(entry: Callable[..., GpuEntry]) -> None:
    timeline = GpuTimeline(120.0, 3)
    timeline.append(entry(60, 60.0, utilization=40.0, power_w=100.0))
    for number in range(13, 24):
        timeline.append(entry(5 * number, utilization=100.0, power_w=300.0 if number == 20 else 90.0))
    values = timeline.series(START + 119).values
    assert values["utilization"][-1] == pytest.approx((40 * 60 + 100 * 55) / 115)
    assert values["power_w"] == (None, None, 300.0)
    assert values["temperature_c"] == (None, None, None)


def test_drifting_rows_leave_no_gaps_but_pauses_do(entry: Callable[..., GpuEntry]) -> None:
    timeline = GpuTimeline(5.0, 60)
    at = 0.0
    while at < 150:
        timeline.append(entry(at, utilization=50.0))
        at += 5.6
    timeline.append(entry(240, utilization=70.0))
    column = timeline.series(START + 240).values["utilization"]
    first, last = column.index(50.0), len(column) - 1 - column[::-1].index(50.0)
    assert None not in column[first : last + 1]
    assert set(column[last + 1 :]) == {None, 70.0}
