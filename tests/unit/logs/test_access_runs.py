"""Runs of access lines as one row each: their number, their time span, and the requests."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_console.logs.access import Folding, fold, parse_access_line
from vllm_console.logs.file import Line, LogLevel, log_level_of

OK = '(APIServer pid=7) INFO:     127.0.0.1:5000 - "POST /v1/completions HTTP/1.1" 200 OK'
METRICS = 'INFO:     127.0.0.1:5001 - "GET /metrics?x=1 HTTP/1.1" 200 OK'
BAD = 'INFO:     127.0.0.1:5000 - "POST /v1/completions HTTP/1.1" 400 Bad Request'


def stats(clock: str) -> str:
    return f"(APIServer pid=7) INFO 11-20 {clock} [loggers.py:257] Engine 000: Avg prompt throughput"


def lines(*texts: str) -> list[Line]:
    return [Line(10 * at, 10 * at + 10, text, log_level_of(text)) for at, text in enumerate(texts)]


def folded(texts: Sequence[str], *, whole: bool = True) -> list[str]:
    return [line.text for line in fold(lines(*texts), whole=whole)]


def test_access_line_has_a_status_and_a_request() -> None:
    found = parse_access_line(METRICS)
    assert found is not None
    assert (found.status, found.request) == ("200 OK", "GET /metrics")
    assert parse_access_line(stats("10:00:00")) is None


def test_run_between_two_times_has_a_rate_and_its_window() -> None:
    texts = [stats("10:00:00"), *[OK] * 120, *[METRICS] * 20, stats("10:00:10")]
    assert folded(texts) == [
        texts[0],
        "200 OK ×14/s (140 in 10s)  POST /v1/completions 120, GET /metrics 20",
        texts[-1],
    ]


def test_ongoing_run_has_a_count_and_a_start_but_no_rate() -> None:
    assert folded([stats("10:00:00"), OK, OK])[1:] == ["200 OK ×2 since 10:00:00  POST /v1/completions"]
    assert folded([OK, OK]) == ["200 OK ×2  POST /v1/completions"], "without times nothing is guessed"


def test_time_may_be_some_lines_above_or_below() -> None:
    texts = [stats("10:00:00"), "INFO:     Application startup complete.", *[OK] * 30, "a line", stats("10:00:10")]
    assert folded(texts)[2] == "200 OK ×3/s (30 in 10s)  POST /v1/completions"
    assert folded(texts[:5])[2] == "200 OK ×3 since 10:00:00  POST /v1/completions"


def test_less_than_one_a_second_is_a_count() -> None:
    assert "×3 in 10s  " in folded([stats("10:00:00"), *[OK] * 3, stats("10:00:10")])[1]


def test_each_status_has_a_row_and_single_lines_stay() -> None:
    shown = fold(lines(OK, BAD, OK, BAD, METRICS), whole=True)
    assert [line.text.split("  ")[0] for line in shown] == ["400 Bad Request ×2", "200 OK ×3"]
    assert [line.level for line in shown] == [LogLevel.WARNING, LogLevel.INFO]
    assert folded([OK, BAD]) == [OK, BAD]


def test_run_with_an_unread_beginning_is_at_least_its_count() -> None:
    assert folded([OK] * 1200, whole=False) == ["200 OK ×1,200+  POST /v1/completions"]


def test_other_lines_separate_runs() -> None:
    texts = [OK, OK, "hello", OK, OK, OK]
    assert folded(texts) == ["200 OK ×2  POST /v1/completions", "hello", "200 OK ×3  POST /v1/completions"]


def test_only_a_few_request_kinds_are_named() -> None:
    texts = [OK.replace("completions", f"thing{n}") for n in range(6)]
    assert folded(texts)[0].endswith(", 3 more")


def test_incremental_folding_equals_folding_at_once() -> None:
    texts = [
        *[OK] * 3, stats("10:00:00"), OK, "without a time", *[METRICS] * 2, BAD, stats("10:00:10"), "no time", OK, OK,
        stats("10:00:20"), stats("10:00:30"), OK, "hello", BAD, OK, stats("10:00:40"),
    ]  # fmt: skip
    found = lines(*texts)
    for whole in (True, False):
        folding = Folding()
        for first in (0, 2, 5):
            for count in range(first + 1, len(found) + 1):
                window = found[first:count]
                assert folding.fold(window, 0, whole=whole) == fold(window, whole=whole)


def test_folding_a_moving_window_equals_folding_at_once() -> None:
    found = lines(*[
        [OK, BAD, METRICS, "no time", stats(f"10:00:{number % 60:02}")][number * number % 5] for number in range(120)
    ])  # fmt: skip
    folding = Folding()
    for end in range(1, len(found) + 1):
        window = found[max(0, end - 23) : end]
        assert folding.fold(window, 0, whole=end <= 23) == fold(window, whole=end <= 23)
    up = found[:40]
    assert folding.fold(up, 0, whole=True) == fold(up, whole=True)


def test_changed_file_is_folded_again() -> None:
    folding = Folding()
    one, other = [OK, OK, stats("10:00:00")], [BAD, BAD, stats("10:00:00")]
    assert folding.fold(lines(*one), 0, whole=True)[0].text.startswith("200 OK ×2")
    assert folding.fold(lines(*other), 1, whole=True)[0].text.startswith("400 Bad Request ×2")
