"""What does not fit is cut with a mark, and the keys of a question stay visible."""

from __future__ import annotations

import pytest
from textual.strip import Strip

from vllm_console.ui.screens.dialogs import Choose, Confirm
from vllm_console.ui.screens.findings import findings_page
from vllm_console.ui.terminal.lines import line
from vllm_console.ui.widgets.draw import cut_rows


@pytest.mark.parametrize("size", [(80, 24), (80, 16), (50, 12)])
async def test_a_question_keeps_its_keys_and_the_verdict(host, wait_until, size):
    def make():
        dialog = Confirm("Restart chat?", [f"--a-flag-of-some-length-{n}  1 → 2" for n in range(30)], "restart")
        dialog.set_note("fits (estimate)")
        return dialog

    app = host(make)
    async with app.run_test(size=size) as pilot:
        await wait_until(pilot, lambda: "Restart chat?" in app.text())
        text = app.text()
        assert "y restart   n cancel" in text
        assert "fits (estimate)" in text
        shown = text.count("--a-flag")
        assert shown
        assert f"… {30 - shown} more lines" in text


async def test_what_fits_is_shown_whole(host, wait_until):
    app = host(lambda: Confirm("Stop chat?", ["64 requests are running; they are ended."], "stop"))
    async with app.run_test(size=(80, 16)) as pilot:
        await wait_until(pilot, lambda: "y stop" in app.text())
        await app.sees("64 requests")
        await app.lacks("more")


async def test_names_of_wide_characters_are_shown_whole_in_a_list(host, wait_until):
    app = host(lambda: Choose("Which preset?", [("長文の要約", "long documents"), ("chat", "short")]))
    async with app.run_test(size=(80, 16)) as pilot:
        await wait_until(pilot, lambda: "長文の要約  long documents" in app.text())


async def test_what_only_reports_has_nothing_to_do(host, wait_until):
    app = host(lambda: Confirm("chat will not start.", ["1. no room"], ""))
    async with app.run_test(size=(80, 16)) as pilot:
        await wait_until(pilot, lambda: "esc back" in app.text())
        await pilot.press("y")
        await wait_until(pilot, lambda: app.results)
    assert app.results == [False]


async def test_what_is_found_out_after_the_answer_is_left_out(host, wait_until):
    app = host(lambda: Confirm("Restart chat?", ["No flag changes."], "restart"))
    async with app.run_test(size=(80, 16)) as pilot:
        await wait_until(pilot, lambda: "y restart" in app.text())
        dialog = app.screen
        await pilot.press("n")
        await wait_until(pilot, lambda: app.screen is not dialog)
        dialog.set_details(["1 request is in flight."])
        dialog.set_note("fits (estimate)")
    assert app.results == [False]


@pytest.mark.parametrize("maker", ["coder", "stopped"])
def test_why_nothing_is_found_is_wrapped(fakes, maker):
    lines = findings_page(getattr(fakes, maker)(fakes.NOW), fakes.NOW, 60, 0, lambda *_: "").lines
    assert all(strip.cell_length <= 60 for strip in lines)
    text = " ".join(" ".join(strip.text for strip in lines).split())
    assert text.endswith(("traffic yet.", "l shows its log."))


def test_rows_that_are_left_out_leave_a_mark():
    rows = [line(f" row {number} " + "x" * 80) for number in range(5)]
    kept = cut_rows([strip.crop(0, 79) for strip in rows], 3, 80)
    assert len(kept) == 3
    assert kept[-1].text.endswith(" …")
    assert all(strip.cell_length <= 80 for strip in kept)
    assert cut_rows(rows[:3], 3, 80) == rows[:3]
    assert cut_rows([Strip([])], 3, 80) == [Strip([])]
