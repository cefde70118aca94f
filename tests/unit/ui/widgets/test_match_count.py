"""How many lines match a search, and the index of the current one."""

from __future__ import annotations

from pathlib import Path

from vllm_console.logs.file import LogFile
from vllm_console.ui.widgets.log_pager import MatchCount


def test_matches_are_counted_in_steps_and_follow_the_log(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("".join(f"{'needle' if n % 1000 == 0 else 'hay'} {n} {'x' * 200}\n" for n in range(20_000)))
    log = LogFile(path)
    log.refresh()
    count = MatchCount(log, "needle", lambda _: True)
    steps = 0
    while not count.done:
        count.step()
        steps += 1
    assert steps > 1
    assert count.total == 20
    assert count.number_of(0) == 1
    assert count.number_of(log.search("needle 19000", log.start).line.offset) == 20  # type: ignore[union-attr]
    assert count.number_of(1) is None
    with path.open("a") as file:
        file.write("a needle\nan unfinished needle")
    log.refresh()
    while not count.done:
        count.step()
    assert count.total == 21, "the unfinished line is counted once it is finished"
    with path.open("a") as file:
        file.write(" and its end\n")
    log.refresh()
    while not count.done:
        count.step()
    assert count.total == 22


def test_only_lines_that_pass_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("a needle\nb needle\n")
    log = LogFile(path)
    log.refresh()
    count = MatchCount(log, "needle", lambda line: line.text.startswith("b"))
    while not count.done:
        count.step()
    assert count.total == 1
