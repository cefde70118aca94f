"""Where a reader stands in a log: at an earlier moment nothing later is shown, whatever is left out or resized."""

from __future__ import annotations

import pytest

from vllm_console.logs.file import LogFile, LogLevel
from vllm_console.ui.widgets.log_pager import LogPage, LogPager


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "server.log"
    path.write_text("".join(f"INFO 11-22 03:{minute}:00 [a.py:1] minute {minute}\n" for minute in range(10, 20)))
    return path


def minutes(page: LogPage) -> list[int]:
    return [int(line.text.split()[-1]) for line in page.lines]


@pytest.mark.parametrize("folds", [False, True])
@pytest.mark.parametrize("rows", [2, 5, 24])
def test_a_moment_shows_the_lines_up_to_it_also_where_more_would_fit(log, rows, folds):
    pager = LogPager(LogFile(log), rows, folds=folds)
    shown = [10, 11, 12][-rows:]
    assert minutes(pager.show_moment("11-22 03:12:30")) == shown
    assert minutes(pager.poll()) == shown
    for leave_out in (pager.set_hides_access, pager.set_only_matches):
        assert minutes(leave_out(True)) == shown
        assert minutes(leave_out(False)) == shown
    assert minutes(pager.set_filter(LogLevel.ERROR)) == []
    assert minutes(pager.set_filter(None)) == shown
    assert minutes(pager.resize(24)) == [10, 11, 12]
    assert minutes(pager.show_moment("11-22 03:09:00")) == []
    assert minutes(pager.show_moment("11-22 03:40:00")) == list(range(10, 20))
    assert pager.end().following


@pytest.fixture
def long_lines(tmp_path):
    """Lines of one, two, three, one, … rows of 40 cells."""
    path = tmp_path / "server.log"
    path.write_text("".join(f"{'x' * 40 * (number % 3)} line {number}\n" for number in range(100)))
    return LogFile(path)


def rows_of(page: LogPage, rows: int) -> list[tuple[int, int]]:
    """The rows on the screen: each its line's number, and which row of the line it is."""
    found = [(int(line.text.split()[-1]), row) for line in page.lines for row in range(-(-len(line.text) // 40))]
    return found[-rows:] if page.from_end else found[:rows]


def test_wrapped_lines_scroll_up_without_a_jump_and_every_row_is_seen(long_lines):
    pager = LogPager(long_lines, 10, wrap=40)
    before = rows_of(pager.poll(), 10)
    assert before[-1] == (99, 0)
    assert rows_of(pager.hold(), 10) == before, "what stands still is what was followed"
    while before[0] != (0, 0):
        after = rows_of(pager.scroll(-1), 10)
        assert after[0] < before[0] <= after[-1], "a row at least comes, and the row that was the first is still there"
        before = after
    seen = set(before)
    while not pager.page().following:
        after = rows_of(pager.scroll(9), 10)
        assert after[0] <= before[-1], "a page down leaves nothing out"
        before, seen = after, seen | set(after)
    assert len({line for line, _ in seen}) == 100
    assert len(seen) == sum(1 + number % 3 for number in range(100))


def test_a_moment_stays_at_the_bottom_when_lines_wrap_and_the_screen_gets_smaller(log):
    pager = LogPager(LogFile(log), 8)
    assert minutes(pager.show_moment("11-22 03:17:30")) == list(range(10, 18))
    page = pager.resize(3)
    assert minutes(page) == [15, 16, 17]
    page = pager.resize(3, wrap=20)
    assert (minutes(page)[-1], page.from_end) == (17, True)
