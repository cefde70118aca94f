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
