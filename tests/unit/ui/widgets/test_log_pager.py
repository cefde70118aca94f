"""The position in a log: at an earlier moment nothing later is shown, whatever is hidden or resized."""

from __future__ import annotations

import pytest

from vllm_console.logs.file import LogFile, LogLevel
from vllm_console.ui.widgets.log_pager import FOLDED_BYTES, AccessLines, LogPage, LogPager


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "server.log"
    path.write_text("".join(f"INFO 11-22 03:{minute}:00 [a.py:1] minute {minute}\n" for minute in range(10, 20)))
    return path


def minutes(page: LogPage) -> list[int]:
    return [int(line.text.split()[-1]) for line in page.lines]


@pytest.mark.parametrize("access", [AccessLines.EACH, AccessLines.FOLDED])
@pytest.mark.parametrize("rows", [2, 5, 24])
def test_moment_shows_only_the_lines_up_to_it(log, rows, access):
    pager = LogPager(LogFile(log), rows, access=access)
    shown = [10, 11, 12][-rows:]
    assert minutes(pager.show_moment("11-22 03:12:30")) == shown
    assert minutes(pager.poll()) == shown
    assert minutes(pager.set_access(AccessLines.HIDDEN)) == shown
    assert minutes(pager.set_access(access)) == shown
    for only in (True, False):
        assert minutes(pager.set_only_matches(only)) == shown
    assert minutes(pager.set_filter(LogLevel.ERROR)) == []
    assert minutes(pager.set_filter(None)) == shown
    assert minutes(pager.resize(24)) == [10, 11, 12]
    assert minutes(pager.show_moment("11-22 03:09:00")) == []
    assert minutes(pager.show_moment("11-22 03:40:00")) == list(range(10, 20))
    assert pager.end().following


@pytest.fixture
def long_lines(tmp_path):
    """Lines that take one, two, three, one, … rows of 40 cells."""
    path = tmp_path / "server.log"
    path.write_text("".join(f"{'x' * 40 * (number % 3)} line {number}\n" for number in range(100)))
    return LogFile(path)


def rows_of(page: LogPage, rows: int) -> list[tuple[int, int]]:
    """The rows on the screen: the number of the line, and which row of the line it is."""
    found = [(int(line.text.split()[-1]), row) for line in page.lines for row in range(-(-len(line.text) // 40))]
    return found[-rows:] if page.from_end else found[:rows]


def test_wrapped_lines_scroll_without_a_jump(long_lines):
    pager = LogPager(long_lines, 10, wrap=40)
    before = rows_of(pager.poll(), 10)
    assert before[-1] == (99, 0)
    assert rows_of(pager.hold(), 10) == before, "holding shows the same lines as following"
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


def test_moment_stays_at_the_bottom_after_wrapping_and_resizing(log):
    pager = LogPager(LogFile(log), 8)
    assert minutes(pager.show_moment("11-22 03:17:30")) == list(range(10, 18))
    page = pager.resize(3)
    assert minutes(page) == [15, 16, 17]
    page = pager.resize(3, wrap=20)
    assert (minutes(page)[-1], page.from_end) == (17, True)


@pytest.mark.parametrize("wrap", [0, 20])
def test_match_in_view_stays_in_view_on_a_smaller_screen(log, wrap):
    pager = LogPager(LogFile(log), 10)
    pager.find("minute 18")
    assert pager.page().match is not None
    for rows in (6, 2, 1):
        page = pager.resize(rows, wrap)
        assert 18 in minutes(page)[-rows if page.from_end else None :][:rows]
    pager.home()
    assert minutes(pager.resize(2, wrap))[0] == 10, "a match that was scrolled away does not come back"


def busy_log(folder, runs: int, requests: int) -> LogFile:
    """A line every ten seconds, each followed by ``requests`` access lines."""
    path = folder / "server.log"
    access = 'INFO:     127.0.0.1:5000 - "POST /v1/completions HTTP/1.1" 200 OK\n'
    stamps = (f"11-22 03:{second // 60:02}:{second % 60:02}" for second in range(0, 10 * runs, 10))
    path.write_text("".join(f"INFO {stamp} [a.py:1] tick\n" + access * requests for stamp in stamps))
    return LogFile(path)


def rows_shown(page: LogPage) -> list[str]:
    return [line.text for line in page.lines]


@pytest.mark.parametrize("requests", [3, 150])
def test_folded_access_lines_stay_folded_while_scrolling(tmp_path, requests):
    pager = LogPager(busy_log(tmp_path, 100, requests), 10, access=AccessLines.FOLDED)
    before = rows_shown(pager.poll())
    end = before
    assert before[-1].startswith(f"200 OK ×{requests} since")
    assert rows_shown(pager.hold()) == before
    ticks = 0
    while not before[0].endswith("03:00:00 [a.py:1] tick"):
        page = pager.scroll(-1)
        while page.busy:
            page = pager.step()
        assert rows_shown(page)[1:] == before[:-1], "one row comes above, and one goes below"
        before = rows_shown(page)
        ticks += before[0].endswith("tick")
    assert ticks == 100 - 5
    while not pager.page().following:
        page = pager.scroll(7)
        while page.busy:
            page = pager.step()
    assert rows_shown(page) == end


def test_run_longer_than_the_kept_lines_can_be_scrolled_over(tmp_path):
    pager = LogPager(busy_log(tmp_path, 3, 15_000), 10, access=AccessLines.FOLDED)
    for _ in range(5):
        page = pager.scroll(-1)
        while page.busy:
            page = pager.step()
    assert rows_shown(page)[0].endswith("03:00:00 [a.py:1] tick")
    while not page.following:
        page = pager.scroll(5)
        while page.busy:
            page = pager.step()
    assert rows_shown(page)[-1].startswith("200 OK ×")


def test_search_in_a_folded_page_unfolds_matches(tmp_path):
    pager = LogPager(busy_log(tmp_path, 100, 10), 10, access=AccessLines.FOLDED)
    page = pager.scroll(-20)
    bottom = max(text for text in rows_shown(page) if text.endswith("tick"))
    page = pager.find("tick")
    assert next(line.text for line in page.lines if line.offset == page.match) == bottom
    assert any("HTTP/1.1" in text for text in rows_shown(page)), "a match may be among them"
    assert not any("HTTP/1.1" in text for text in rows_shown(pager.find("")))


def test_page_is_full_after_a_search_in_folded_lines_and_on_a_larger_screen(tmp_path):
    pager = LogPager(busy_log(tmp_path, 100, 10), 10, access=AccessLines.FOLDED)
    pager.find("03:08:20")
    page = pager.find("")
    assert not page.following
    assert any("03:08:20" in text for text in rows_shown(page)), "the match stays in view"
    assert len(page.lines) == 10
    larger = pager.resize(30)
    assert len(larger.lines) == 30
    assert rows_shown(larger)[:10] == rows_shown(page)


def test_page_at_the_end_of_the_log_is_filled_from_above_after_a_search(tmp_path):
    pager = LogPager(busy_log(tmp_path, 100, 10), 10, access=AccessLines.FOLDED)
    pager.find("03:16:30")
    page = pager.find("")
    assert not page.following
    assert len(page.lines) == 10
    assert rows_shown(page)[-1].startswith("200 OK ×10 since")


def test_filling_a_page_of_long_folds_reads_a_bounded_amount(tmp_path, monkeypatch):
    log = busy_log(tmp_path, 10, 15_000)
    pager = LogPager(log, 24, access=AccessLines.FOLDED)
    pager.find("03:00:50")
    page = pager.page()
    while page.busy:
        page = pager.step()
    read = 0

    def counted(method):
        def lines(*args):
            nonlocal read
            found = method(*args)
            read += sum(line.end - line.offset for line in found)
            return found

        return lines

    monkeypatch.setattr(log, "before", counted(log.before))
    monkeypatch.setattr(log, "after", counted(log.after))
    page = pager.find("")
    while page.busy:
        page = pager.step()
    assert any(text.endswith("03:00:50 [a.py:1] tick") for text in rows_shown(page))
    assert 0 < read < 3 * FOLDED_BYTES
    for rows in (40, 50, 60):
        pager.resize(rows)
    assert read < 3 * FOLDED_BYTES, "there is no room for more lines"
