"""No window is too small to be drawn: it shows less, and nothing crashes."""

from __future__ import annotations

import pytest

from vllm_console.ui.screens.findings import findings_page


@pytest.mark.parametrize("width", [1, 9, 17])
@pytest.mark.parametrize("key", ["question_mark", "e", "i", "d", "n", "C", "l", "c", "a", "v", "M", "ctrl+p"])
async def test_every_screen_is_drawn_in_a_narrow_window(console, fakes, key, width):
    async with console(*fakes.EVERY_STATE, size=(width, 12)) as c:
        await c.press(key)
        await c.pilot.pause()
        await c.press("down")
        await c.pilot.resize_terminal(width + 2, 6)
        await c.pilot.pause()
        assert c.app.crash is None


async def test_in_a_window_of_8_rows_presets_can_be_chosen(console, fakes):
    async with console(fakes.chat, size=(30, 8)) as c:
        await c.press("n")
        await c.sees("chatbot")
        await c.pilot.resize_terminal(80, 24)
        await c.sees("sized for")


def test_the_figures_of_a_finding_fit_in_any_width(fakes):
    for width in range(1, 120):
        page = findings_page(fakes.pressed(fakes.NOW), fakes.NOW, width, 0, lambda *_: "", stages=True)
        assert page.lines, width
