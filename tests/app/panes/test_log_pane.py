"""The log pane: when following, runs of access lines are one row each; an earlier moment has its own log."""

from __future__ import annotations

import time

from msgspec.structs import replace

ACCESS = '(APIServer pid=7) INFO:     127.0.0.1:5000 - "POST /v1/completions HTTP/1.1" 200 OK\n'


def record(clock, text):
    return f"(APIServer pid=7) INFO 11-20 {clock} [a.py:1] {text}\n"


async def test_a_run_of_access_lines_is_one_row_also_while_scrolled_up(console, fakes, tmp_path):
    path = tmp_path / "server.log"
    earlier = "".join(record("09:59:00", f"line {number}.") for number in range(40))
    path.write_text(earlier + record("10:00:00", "before") + ACCESS * 300 + record("10:00:10", "after"))
    server = fakes.chat(fakes.NOW)

    def logged(_at):
        return replace(server, log_path=str(path))

    async with console(logged, size=(80, 24)) as c:
        await c.press("5")
        await c.sees("200 OK ×30/s (300 in 10s)  POST /v1/completions")
        await c.sees("before")
        await c.sees("after")
        with path.open("a") as file:
            file.write(ACCESS * 3)
        await c.sees("200 OK ×3 since 10:00:10")
        c.app.operations._log._view.scroll_rows(-1)
        await c.sees("paused")
        await c.sees("200 OK ×30/s (300 in 10s)  POST /v1/completions")
        await c.sees(" 10:00:00 before")
        await c.lacks("HTTP/1.1")


async def test_the_log_goes_on_while_a_question_is_open(console, fakes, tmp_path):
    path = tmp_path / "server.log"
    path.write_text(record("10:00:00", "before the question"))
    server = fakes.chat(fakes.NOW)
    async with console(lambda _at: replace(server, log_path=str(path))) as c:
        await c.press("5")
        await c.sees("before the question")
        await c.press("r")
        await c.sees("Restart chat?")
        with path.open("a") as file:
            file.write(record("10:00:01", "written meanwhile"))
        view = c.app.operations._log._view
        await c.until(lambda: any("written meanwhile" in strip.text for strip in view.lines), "the new line")
        assert "Restart chat?" in c.text


async def test_the_state_of_a_paused_log_covers_no_line(console, fakes, tmp_path):
    path = tmp_path / "server.log"
    path.write_text("".join(record("10:00:00", f"line {number:02} " + "." * 90 + " end") for number in range(60)))
    server = fakes.chat(fakes.NOW)
    async with console(lambda _at: replace(server, log_path=str(path)), size=(120, 24)) as c:
        await c.press("5")
        await c.sees("line 59")
        c.app.operations._log._view.toggle_hold()
        await c.sees("paused")
        lines = [row for row in c.text.splitlines() if " line " in row]
        assert len(lines) > 3
        assert all(row.rstrip("│ ").endswith(" end") for row in lines)
        assert "paused" not in "".join(lines)


async def test_a_read_that_comes_back_late_undoes_nothing(console, fakes, tmp_path):
    path = tmp_path / "server.log"
    path.write_text("".join(record("10:00:00", f"line {number}.") for number in range(100)))
    server = fakes.chat(fakes.NOW)

    def logged(_at):
        return replace(server, log_path=str(path))

    async with console(logged, size=(80, 24)) as c:
        await c.press("5")
        await c.sees("line 99.")
        view = c.app.operations._log._view
        view.reader()
        late = view._read_ahead
        view.scroll_rows(-40)
        await c.sees("paused")
        view._read_ahead = late
        view.show_read()
        assert not view.page.following
        await c.sees("paused")
        other = tmp_path / "other.log"
        other.write_text(record("10:00:00", "of another server"))
        view.reader()
        late = view._read_ahead
        view.open(other)
        await c.sees("of another server")
        view._read_ahead = late
        view.show_read()
        await c.sees("of another server")


async def test_a_read_for_the_server_before_leaves_what_is_shown_of_this_one(console, fakes, tmp_path):
    """A hanging snapshot reads the log that it was requested for, although another server has been selected
    meanwhile."""
    path, other = tmp_path / "server.log", tmp_path / "other.log"
    path.write_text(record("10:00:00", "of the first"))
    other.write_text("".join(record("10:00:00", f"other {number}.") for number in range(100)))
    server = fakes.chat(fakes.NOW)
    async with console(lambda _at: replace(server, log_path=str(path)), size=(80, 24)) as c:
        await c.press("5")
        await c.sees("of the first")
        view = c.app.operations._log._view
        late = view.reader
        view.open(other)
        await c.sees("other 99.")
        view.go_home()
        await c.sees("other 0.")
        late()
        view.reader()
        view.show_read()
        assert not view.page.following
        await c.sees("other 0.")


async def test_a_console_that_opens_at_a_moment_shows_the_log_up_to_it(console, fakes, tmp_path):
    at = fakes.NOW - 60
    path = tmp_path / "server.log"
    stamps = [(second, time.strftime("%m-%d %H:%M:%S", time.localtime(at + second))) for second in range(-40, 40)]
    path.write_text("".join(f"INFO {stamp} [a.py:1] line {second:+d}.\n" for second, stamp in stamps))
    server = fakes.chat(fakes.NOW)

    def logged(_at):
        return replace(server, log_path=str(path))

    async with console(logged, size=(80, 24), at=at) as c:
        await c.press("5")
        await c.sees("up to the moment shown")
        await c.sees("line +0.")
        await c.sees("line -5.")
        await c.lacks("line +1.")  # later lines are not shown
        await c.press("end")
        await c.sees("line +39.")


async def test_access_lines_are_folded_at_an_earlier_moment_too(console, fakes, tmp_path):
    """The fleet's clock stands at 12:41:07 UTC of January 1."""
    path = tmp_path / "server.log"
    lines = (f"INFO 01-01 12:{minute:02}:30 [a.py:1] minute {minute} is over\n" for minute in range(60))
    path.write_text("".join(line + ACCESS * 60 for line in lines))

    async with console(lambda at: replace(fakes.chat(at), log_path=str(path)), size=(80, 24)) as c:
        await c.press("5")
        await c.sees("minute 59 is over")
        await c.until(lambda: c.app.operations.selected.series is not None)
        await c.press("left", "left", "left", "left")
        await c.sees("12:39:30 minute 39 is over")
        await c.lacks("minute 40 is over")
        counts = ("200 OK ×60 in 1m00s", "200 OK ×1/s (60 in 1m00s)")
        await c.until(lambda: any(text in c.text for text in counts), "requests are counted")
        c.app.operations._log._view.scroll_rows(-2)
        await c.lacks("minute 39 is over")
        await c.sees("12:38:30 minute 38 is over")
        await c.lacks("HTTP/1.1")
