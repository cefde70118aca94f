"""The log screen: following, paused, searching, filtering, copying."""

from __future__ import annotations

import threading
import time

import pytest

from vllm_console.ui.screens.log import LogScreen
from vllm_console.ui.widgets.entry import Entry
from vllm_console.ui.widgets.log_view import LogView


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "server.log"
    path.write_text("".join(f"INFO 11-20 10:00:00 [a.py:1] line {n}\n" for n in range(500)))
    return path


def append(path, text):
    with path.open("a") as file:
        file.write(text)


async def test_opens_at_the_end_and_follows(host, wait_until, log):
    app = host(lambda: LogScreen("chat", log))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "line 499" in app.text())
        await app.sees("Log · chat")
        await app.sees("following")
        append(log, "INFO 11-20 10:00:00 [a.py:1] fresh\n")
        await wait_until(pilot, lambda: "fresh" in app.text())
        await app.lacks("line 460")


async def test_until_it_is_read_it_is_not_said_to_be_empty(host, wait_until, log, monkeypatch):
    """Reading takes a second on a busy machine."""
    go, read = threading.Event(), LogView._read
    monkeypatch.setattr(LogView, "_read", lambda *args: go.wait(60) and read(*args))
    app = host(lambda: LogScreen("chat", log))
    async with app.run_test(size=(80, 24)) as pilot:
        try:
            await wait_until(pilot, lambda: "reading…" in app.text())
            await app.lacks("log is empty")
        finally:
            go.set()
        await wait_until(pilot, lambda: "line 499" in app.text() and "reading…" not in app.text())


async def test_while_a_past_moment_is_shown_it_opens_there_and_stands_still(host, wait_until, log):
    append(log, "".join(f"INFO 11-20 10:{n:02}:00 [a.py:1] later {n}\n" for n in range(1, 60)))
    at = time.mktime((2026, 11, 20, 10, 30, 0, 0, 0, -1))
    app = host(lambda: LogScreen("chat", log, at=at))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "later 30\n" in app.text())
        await app.lacks("later 31\n")
        await app.sees("paused")


async def test_text_stands_still_under_a_reader_who_scrolled_up(host, wait_until, log):
    app = host(lambda: LogScreen("chat", log))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "line 499" in app.text())
        await pilot.press("up", "up", "up")
        await wait_until(pilot, lambda: "paused" in app.text() and "line 499" not in app.text())
        before = app.text().splitlines()[1:20]
        append(log, "one\ntwo\nthree\n")
        await wait_until(pilot, lambda: "paused · 3 new" in app.text())
        await wait_until(pilot, lambda: app.text().splitlines()[1:20] == before)
        await pilot.press("f")
        await wait_until(pilot, lambda: "following" in app.text() and "three" in app.text())


async def test_keys_reach_both_ends_and_scrolling_down_to_the_end_follows_again(host, wait_until, log):
    app = host(lambda: LogScreen("chat", log))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "line 499" in app.text())
        await pilot.press("home")
        await wait_until(pilot, lambda: "line 0\n" in app.text())
        await pilot.press("pagedown")
        await wait_until(pilot, lambda: "line 0\n" not in app.text() and "line 20\n" in app.text())
        await pilot.press("end")
        await wait_until(pilot, lambda: "following" in app.text())
        await pilot.press("pageup")
        await wait_until(pilot, lambda: "paused" in app.text())
        await pilot.press("pagedown", "pagedown")
        await wait_until(pilot, lambda: "following" in app.text() and "line 499" in app.text())


async def test_search_goes_up_with_n_and_down_with_shift_n(host, wait_until, log):
    text = log.read_text().replace("line 100\n", "needle A\n").replace("line 300\n", "Needle B\n")
    log.write_text(text)
    app = host(lambda: LogScreen("chat", log))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "line 499" in app.text())
        await pilot.press("slash", *"needle", "enter")
        await wait_until(pilot, lambda: "Needle B" in app.text() and "line 299" in app.text())
        await pilot.press("n")
        await wait_until(pilot, lambda: "needle A" in app.text())
        await pilot.press("n")
        await wait_until(pilot, lambda: "no more matches above" in app.text())
        await pilot.press("N")
        await wait_until(pilot, lambda: "Needle B" in app.text())
        await pilot.press("escape")
        await wait_until(pilot, lambda: not app.screen._view.page.wanted)
        assert isinstance(app.screen, LogScreen), "the first escape ends the search"
        await pilot.press("escape")
        await wait_until(pilot, lambda: app.results == [None])


async def test_arrow_keys_scroll_while_a_search_is_typed(host, wait_until, log):
    app = host(lambda: LogScreen("chat", log))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "line 499" in app.text())
        await pilot.press("slash", "a", "up", "up", "down")
        await wait_until(pilot, lambda: "line 498" in app.text() and "line 499" not in app.text())
        await pilot.press("b", "enter")
        await wait_until(pilot, lambda: app.screen._view.page.wanted == "ab")


async def test_a_match_beyond_the_edge_is_scrolled_to(host, wait_until, log):
    append(log, f"{'a' * 90} first {'b' * 400}\n{'c' * 300} needle {'d' * 300}\nfirst {'e' * 200} needle\n")
    app = host(lambda: LogScreen("chat", log))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "eee" in app.text())
        await pilot.press("slash", *"needle", "enter")
        await wait_until(pilot, lambda: "e needle" in app.text())
        await pilot.press("n")
        await wait_until(pilot, lambda: "c needle d" in app.text())
        await pilot.press("left", "left", "left", "left", "left")
        await app.lacks("c needle d")
        await pilot.press("slash", "enter")  # the same text again
        await wait_until(pilot, lambda: "e needle" in app.text())
        await pilot.press("w")
        await wait_until(pilot, lambda: "wrapped" in app.text())
        await pilot.press("w")
        await wait_until(pilot, lambda: "wrapped" not in app.text() and "e needle" in app.text())
        await pilot.press("slash", *["backspace"] * 6, *"first", "enter")
        await wait_until(pilot, lambda: "first eee" in app.text(), "it goes back to the left")
        await pilot.press("n")
        await wait_until(pilot, lambda: "a first b" in app.text())
        await pilot.press("escape")
        await wait_until(pilot, lambda: "search:" not in app.text() and "line 499" in app.text())


async def test_a_match_among_wrapped_lines_that_have_no_room_is_shown(host, wait_until, log):
    append(log, "needle\n" + "".join(f"{'x' * 300} end {n}\n" for n in range(12)))
    app = host(lambda: LogScreen("chat", log))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "xxx" in app.text())
        await pilot.press("w")
        await wait_until(pilot, lambda: "end 11" in app.text())
        await pilot.press("slash", *"needle", "enter")
        await wait_until(pilot, lambda: "needle\n" in app.text() and "line 499" in app.text())


async def test_search_for_what_is_not_there_reports_it(host, wait_until, log):
    app = host(lambda: LogScreen("chat", log))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "line 499" in app.text())
        await pilot.press("slash", "left_square_bracket", *"nowhere", "enter")
        await wait_until(pilot, lambda: "no matches above" in app.text())
        await app.sees("line 499")


async def test_filter_shows_warnings_and_whole_tracebacks(host, wait_until, log):
    append(log, "WARNING 11-20 10:00:00 [a.py:1] careful\nTraceback (most recent call last):\n"
                '  File "a.py", line 1\n    boom()\nValueError: no\nINFO 11-20 10:00:00 [a.py:1] later\n')  # fmt: skip
    app = host(lambda: LogScreen("chat", log))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "later" in app.text())
        await pilot.press("v")
        await wait_until(pilot, lambda: "warnings and errors only" in app.text() and "later" not in app.text())
        await app.sees("careful")
        await pilot.press("v")
        await wait_until(pilot, lambda: "careful" not in app.text())
        await app.sees("boom()")
        await app.sees("ValueError: no")
        append(log, "ERROR 11-20 10:00:00 [a.py:1] worse\nINFO 11-20 10:00:00 [a.py:1] chatter\n")
        await wait_until(pilot, lambda: "worse" in app.text())
        await app.lacks("chatter")
        await pilot.press("v")
        await wait_until(pilot, lambda: "later" in app.text())


async def test_long_lines_are_wrapped_or_reached_sideways(host, wait_until, log):
    append(log, "x" * 100 + "the far end\n")
    app = host(lambda: LogScreen("chat", log))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "xxx" in app.text())
        await app.lacks("the far end")
        await pilot.press("right", "right", "right")
        await wait_until(pilot, lambda: "the far end" in app.text())
        await pilot.press("left", "left", "left", "w")
        await wait_until(pilot, lambda: "wrapped" in app.text() and "the far end" in app.text())


async def test_only_a_line_whose_match_is_beyond_the_right_edge_is_scrolled_for_it(host, wait_until, log):
    append(log, "before it\n" + "x" * 100 + "the far end\nafter it\n")
    app = host(lambda: LogScreen("chat", log))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "xxx" in app.text())
        await pilot.press("slash", *"far", "enter")
        await wait_until(pilot, lambda: "the far end" in app.text())
        assert "before it" in app.text()
        assert "after it" in app.text()


async def test_a_search_keeps_shortened_lines_short_if_they_show_the_match(host, wait_until, log):
    statistics = "Avg prompt throughput: 1758.4 tokens/s, Avg generation throughput: 1100.0 tokens/s, Running: 40 reqs"
    rest = "Waiting: 13 reqs, GPU KV cache usage: 62.3%, Prefix cache hit rate: 12.0%"
    append(log, f"(APIServer pid=22292) INFO 11-20 10:00:00 [loggers.py:259] Engine 000: {statistics}, {rest}\n")
    app = host(lambda: LogScreen("chat", log))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "KV 62%" in app.text())
        await pilot.press("slash", *"KV", "enter")
        await wait_until(pilot, lambda: "match 1 of 1" in app.text() or "1 match" in app.text())
        assert "run 40 · wait 13 · KV 62%" in app.text()


@pytest.mark.parametrize("width", [80, 100, 120, 200])
async def test_the_kv_cache_usage_of_the_statistics_is_in_sight(host, wait_until, log, width):
    figures = "Avg prompt throughput: 1758.4 tokens/s, Avg generation throughput: 1100.0 tokens/s, Running: 40 reqs"
    rest = "Waiting: 13 reqs, GPU KV cache usage: 62.3%, Prefix cache hit rate: 12.0%"
    append(log, f"(APIServer pid=22292) INFO 11-20 10:00:00 [loggers.py:259] Engine 000: {figures}, {rest}\n")
    app = host(lambda: LogScreen("chat", log))
    async with app.run_test(size=(width, 24)) as pilot:
        await wait_until(pilot, lambda: "run 40 · wait 13 · KV 62%" in app.text())
        await pilot.press("w")
        await wait_until(pilot, lambda: "[loggers.py:259]" in app.text())


async def test_copies_the_selected_line_or_all_shown(host, wait_until, log):
    app = host(lambda: LogScreen("chat", log))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "line 499" in app.text())
        view = app.screen.query_one(LogView)
        await wait_until(pilot, lambda: len(view.page.lines) == 21)  # once it was read for the screen's final size
        await pilot.press("y")
        assert app.clipboard.splitlines()[-1].endswith("line 499")
        assert len(app.clipboard.splitlines()) == 21
        await pilot.press("shift+up")
        await wait_until(pilot, lambda: "paused" in app.text())
        await pilot.press("shift+up", "y")
        assert app.clipboard.endswith("line 498")


async def test_a_log_that_is_not_there_yet_is_reported_and_then_shown(host, wait_until, tmp_path):
    app = host(lambda: LogScreen("chat", tmp_path / "later.log"))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "log is empty" in app.text())
        (tmp_path / "later.log").write_text("hello\n")
        await wait_until(pilot, lambda: "hello" in app.text())


async def test_markup_escape_codes_and_secrets_in_a_log_are_shown_as_plain_text(host, wait_until, log):
    append(
        log, "[bold red]not markup[/] \x1b[31mred\x1b[0m\x1b]0;title\x07 \x00 token hf_abcdefghijklmnopqrstuvwxyz0123\n"
    )
    app = host(lambda: LogScreen("chat", log))
    async with app.run_test(size=(100, 24)) as pilot:
        await wait_until(pilot, lambda: "not markup" in app.text())
        await app.sees("[bold red]not markup[/] red")
        await app.lacks("hf_abcdefghijk")


async def test_a_log_that_is_emptied_and_one_that_is_rotated_are_followed(host, wait_until, log):
    app = host(lambda: LogScreen("chat", log))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "line 499" in app.text())
        log.rename(log.with_name("server.log.1"))
        log.write_text("after rotation\n")
        await wait_until(pilot, lambda: "after rotation" in app.text())
        await app.sees("line 499")
        log.write_text("x\n")
        await wait_until(pilot, lambda: "after rotation" not in app.text() and "x\n" in app.text())


async def test_a_flood_leaves_keys_working_and_shows_the_end(host, wait_until, log):
    app = host(lambda: LogScreen("chat", log))
    stop = threading.Event()
    written = [0]

    def flood():
        with log.open("a") as file:
            while not stop.wait(0.02):
                file.writelines(f"INFO 11-20 10:00:00 [a.py:1] flood {written[0] + n}\n" for n in range(1000))
                file.flush()
                written[0] += 1000

    thread = threading.Thread(target=flood)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "line 499" in app.text())
        thread.start()
        try:
            await wait_until(pilot, lambda: written[0] > 20_000 and "flood" in app.text())
            await pilot.press("up")
            await wait_until(pilot, lambda: "paused" in app.text())
            await wait_until(pilot, lambda: app.screen._view.page.new_lines > 1000)
            await pilot.press("f")
            await wait_until(pilot, lambda: "following" in app.text())
        finally:
            stop.set()
            thread.join()
        await wait_until(pilot, lambda: f"flood {written[0] - 1}\n" in app.text())


async def test_matches_are_counted_and_the_present_one_has_its_number(host, wait_until, log):
    text = log.read_text().replace("line 100\n", "needle A\n").replace("line 300\n", "Needle B\n")
    log.write_text(text)
    app = host(lambda: LogScreen("chat", log))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "line 499" in app.text())
        await pilot.press("slash", *"needle", "enter")
        await wait_until(pilot, lambda: "match 2 of 2 ·" in app.text() and "Needle B" in app.text())
        await pilot.press("n")
        await wait_until(pilot, lambda: "match 1 of 2 ·" in app.text())
        append(log, "needle C\n")
        await wait_until(pilot, lambda: "match 1 of 3 ·" in app.text())
        await pilot.press("escape")
        await wait_until(pilot, lambda: "match 1 of 3" not in app.text())


async def test_only_matching_lines_are_shown_and_new_ones_follow(host, wait_until, log):
    text = log.read_text().replace("line 100\n", "needle A\n").replace("line 300\n", "Needle B\n")
    log.write_text(text)
    app = host(lambda: LogScreen("chat", log))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "line 499" in app.text())
        await pilot.press("m", *"needle", "enter")
        await wait_until(pilot, lambda: "only matches ·" in app.text() and "needle A" in app.text())
        await wait_until(pilot, lambda: "2 matches" in app.text())
        await wait_until(pilot, lambda: not any(" line" in row for row in app.text().splitlines()[1:20]))
        append(log, "hay\nneedle C\n")
        await wait_until(pilot, lambda: "needle C" in app.text())
        await app.lacks("hay")
        await pilot.press("m")
        await wait_until(pilot, lambda: "hay" in app.text() and "line 499" in app.text())
        await pilot.press("n")
        await wait_until(pilot, lambda: "match 3 of 3" in app.text())
        await pilot.press("n", "m")
        await wait_until(pilot, lambda: "only matches ·" in app.text() and "needle A" in app.text())
        await app.sees("needle C")
        await pilot.press("escape")
        await wait_until(pilot, lambda: "only matches ·" not in app.text() and "line 101" in app.text())


async def test_matches_far_apart_are_found_without_showing_what_lies_between(host, wait_until, log):
    log.write_text("needle A\n" + "hay hay hay hay hay hay hay\n" * 400_000 + "needle B\n")
    app = host(lambda: LogScreen("chat", log))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "needle B" in app.text())
        await pilot.press("m", *"needle", "enter")
        await wait_until(pilot, lambda: "needle A" in app.text() and "needle B" in app.text())
        await pilot.press("home")
        await wait_until(pilot, lambda: "paused" in app.text() and "needle A" in app.text())
        await pilot.press("down", "down")
        await wait_until(pilot, lambda: "following" in app.text())


async def test_a_time_is_gone_to(host, wait_until, log):
    log.write_text("".join(f"INFO 11-20 10:{n // 60:02d}:{n % 60:02d} [a.py:1] line {n}\n" for n in range(1000)))
    app = host(lambda: LogScreen("chat", log))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "line 999" in app.text())
        await pilot.press("t", *"10:05", "enter")
        await wait_until(pilot, lambda: "from 11-20 10:05:00 on" in app.text())
        await wait_until(pilot, lambda: app.text().splitlines()[1].endswith("line 300"))
        await app.sees("paused")
        await pilot.press("t", *"11-21 10:00", "enter")
        await wait_until(pilot, lambda: "the newest line is of 11-20 10:16:39" in app.text())
        await wait_until(pilot, lambda: app.text().splitlines()[1].endswith("line 300"), "it stays where it was")


async def test_what_is_not_a_time_is_reported_and_stays_to_be_corrected(host, wait_until, log):
    log.write_text("a line without a time\n")  # it is no time, whatever the log contains
    app = host(lambda: LogScreen("chat", log))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "a line without" in app.text())
        await pilot.press("t", *"yesterday ünï", "enter")
        await app.sees("'yesterday ünï' is not a time: type 10:03, 11-20 10:03, or -10m\n")
        assert app.screen.query_one(Entry).value == "yesterday ünï"
        await app.sees("enter go")
        await pilot.press("backspace")
        await app.lacks("is not a time")
        await pilot.press("enter")
        await app.sees("'yesterday ün' is not a time")
        await pilot.press("escape")
        await app.lacks("is not a time")
        await pilot.press("t", *"10:05", "enter")
        await app.sees("no line near the end names a time")
        await app.lacks("enter go")


async def test_access_lines_are_folded_or_hidden_but_for_failures_or_each_is_shown(host, wait_until, log):
    access = 'INFO:     127.0.0.1:5000 - "POST /v1/completions HTTP/1.1" '
    append(log, f"{access}200 OK\n" * 3000 + f"{access}500 Internal Server Error\n")
    app = host(lambda: LogScreen("chat", log))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "200 OK ×" in app.text())
        await pilot.press("a")
        await wait_until(pilot, lambda: "access lines hidden" in app.text() and "line 499" in app.text())
        await app.lacks("200 OK")
        await app.sees("500 Internal")  # a failure is not noise
        await pilot.press("pageup")
        await wait_until(pilot, lambda: "paused" in app.text() and "line 470" in app.text())
        append(log, f"{access}200 OK\n")
        await pilot.press("a", "f")
        await wait_until(pilot, lambda: app.text().count('HTTP/1.1" 200 OK') > 10 and "each access" in app.text())
        await pilot.press("a")
        await wait_until(pilot, lambda: "200 OK ×" in app.text() and "access line" not in app.text())


async def test_a_narrow_screen_leaves_out_what_stands_before_a_message_until_lines_are_wrapped(host, wait_until, log):
    append(log, f"(APIServer pid=123) INFO 11-20 10:00:07 [serving_chat.py:1870] {'x ' * 40}end\n")
    app = host(lambda: LogScreen("chat", log))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "10:00:07 x x" in app.text())
        assert "serving_chat.py" not in app.text()
        (row,) = [row for row in app.text().splitlines() if "10:00:07" in row]
        assert row.endswith("›"), "it goes on"
        assert "→ scroll" in app.text()
        assert "w wrap" in app.text()
        await pilot.press("right")
        await wait_until(pilot, lambda: "x end" in app.text() and "‹" in app.text())
        await pilot.press("left", "w")
        await wait_until(pilot, lambda: "serving_chat.py:1870" in app.text() and "x end" in app.text())


@pytest.mark.parametrize("size", [(80, 24), (160, 24), (200, 60)])
async def test_at_any_width_lines_begin_with_time_and_message(host, wait_until, log, size):
    append(log, "(APIServer pid=7) INFO 11-20 10:00:01 [a.py:1] short\n")
    app = host(lambda: LogScreen("chat", log))
    async with app.run_test(size=size) as pilot:
        await wait_until(pilot, lambda: "10:00:01 short" in app.text())
        assert "pid=7" not in app.text()
        await pilot.press("w")
        await app.sees("(APIServer pid=7) INFO 11-20 10:00:01 [a.py:1] short")


async def test_the_footer_shows_the_keys_that_hold_while_something_is_typed(host, wait_until, log):
    app = host(lambda: LogScreen("chat", log))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "line 499" in app.text())
        await pilot.press("t")
        await app.sees(" enter go  esc cancel")
        await app.lacks("w wrap")
        await pilot.press("escape", "slash")
        await app.sees(" enter search  esc cancel")
        await pilot.press("escape")
        await app.sees("w wrap")


async def test_wrapped_lines_scroll_without_a_jump(host, wait_until, log):
    log.write_text("".join(f"{'x' * 200} line {n}.\n" for n in range(100)))
    app = host(lambda: LogScreen("chat", log))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "following" in app.text())
        await pilot.press("w")
        await app.sees("line 99.")
        await app.sees("line 93.")
        await pilot.press("up")
        await app.sees("paused")
        await app.lacks("line 99.")
        await app.sees("line 98.")
        await app.sees("line 92.")
        await pilot.press("pageup")
        await app.sees("line 92.")
        await app.sees("line 86.")
        await pilot.press("pagedown", "pagedown")
        await app.sees("following")
        await app.sees("line 99.")


async def test_a_search_shows_lines_as_they_are(host, wait_until, log):
    append(log, "(APIServer pid=123) INFO 11-20 10:00:07 [serving_chat.py:1870] hello\n")
    app = host(lambda: LogScreen("chat", log))
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "10:00:07 hello" in app.text())
        await pilot.press("slash", *"serving", "enter")
        await wait_until(pilot, lambda: "[serving_chat.py:1870] hello" in app.text())
