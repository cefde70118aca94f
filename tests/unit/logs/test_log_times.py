"""The log line at a given time."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from vllm_console.logs.file import LogFile
from vllm_console.logs.times import find_time, newest_stamp, not_after, parse_moment, stamp_of

NEWEST = datetime(2000, 11, 20, 10, 30)


def moment(text: str) -> str:
    return f"{parse_moment(text, NEWEST):%m-%d %H:%M:%S}"


@pytest.mark.parametrize(
    "text",
    [
        "INFO 11-20 10:03:57 [a.py:1] x",
        "(EngineCore pid=8) WARNING 11-20 10:03:57 [a.py:1] x",
        "(VllmWorker rank=0 pid=123) ERROR 11-20 10:03:57 [a.py:1] x",
        "(EngineCore_DP0 pid=8) (RayWorkerWrapper pid=9, ip=10.0.0.2) ERROR 11-20 10:03:57 [a.py:1] x",
        "2026-11-20 10:03:57,123 - INFO - x",
        "[2026-11-20T10:03:57.1] x",
        "W1120 10:03:57.123456 12 a.cpp:1] x",
    ],
)
def test_times_of_vllm_and_its_libraries_are_parsed(text: str) -> None:
    assert stamp_of(text) == datetime(2000, 11, 20, 10, 3, 57)


@pytest.mark.parametrize("text", ["x", "INFO:     127.0.0.1 - x", "INFO 13-45 10:03:57 x", "INFO 11-20 99:03:57 x"])
def test_line_without_a_time_has_none(text: str) -> None:
    assert stamp_of(text) is None


def test_typed_moments_are_parsed() -> None:
    assert moment("10:03") == "11-20 10:03:00"
    assert moment("11:00") == "11-19 11:00:00", "not after the end: the day before"
    assert moment(" 11-18  9:05:07 ") == "11-18 09:05:07"
    assert moment("-10m") == "11-20 10:20:00"
    assert moment("-2d") == "11-18 10:30:00"
    assert parse_moment("-999999d", NEWEST).year == 1999, "as far back as a log without years can say"
    for wrong in ("", "noon", "25:00", "13-40 10:00", "10"):
        with pytest.raises(ValueError, match="10:03"):
            parse_moment(wrong, NEWEST)


def test_first_line_at_a_time_is_found_in_a_long_log(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    rows = []
    for second in range(20_000):
        clock = f"{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}"
        rows += [f"INFO 11-20 {clock} [a.py:1] second {second}", "  a line without a time", "x" * (second % 90)]
    path.write_text("\n".join(rows) + "\n")
    log = LogFile(path)
    log.refresh()
    newest = newest_stamp(log)
    assert newest is not None
    for text, second in (("00:00", 0), ("01:00:01", 3601), ("05:33:19", 19_999), ("-100s", 19_899)):
        offset = find_time(log, parse_moment(text, newest), newest)
        assert offset is not None
        assert log.after(offset, 1)[0].text.endswith(f"second {second}")
    assert find_time(log, parse_moment("11-20 12:00", newest), newest) is None


def test_log_across_new_year_is_in_order(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    stamps = [f"12-31 23:{minute:02d}:00" for minute in range(60)] + [
        f"01-01 00:{minute:02d}:00" for minute in range(60)
    ]
    path.write_text("".join(f"INFO {stamp} [a.py:1] {'y' * 3000}\n" for stamp in stamps))
    log = LogFile(path)
    log.refresh()
    newest = newest_stamp(log)
    assert newest is not None
    for text, stamp in (("00:10", "01-01 00:10:00"), ("23:40", "12-31 23:40:00"), ("12-31 23:40", "12-31 23:40:00")):
        offset = find_time(log, parse_moment(text, newest), newest)
        assert offset is not None
        assert stamp in log.after(offset, 1)[0].text


def test_log_without_times_has_no_newest(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("no times here\n" * 50)
    log = LogFile(path)
    log.refresh()
    assert newest_stamp(log) is None


def test_moment_after_the_last_line_is_the_end_not_a_year_ago() -> None:
    newest = datetime(2000, 11, 19, 10, 0)
    for text in ("11-19 12:00", "11-22 03:10:00"):
        assert not_after(parse_moment(text, newest), newest) == newest
    assert not_after(parse_moment("11-18 12:00", newest), newest) == datetime(2000, 11, 18, 12, 0)
    assert not_after(parse_moment("12-31 12:00", datetime(2000, 1, 2)), datetime(2000, 1, 2)) == datetime(
        1999, 12, 31, 12
    )
