"""Two sizes on their way to a screen at the same time: it is only laid out for the newest one, and settles."""

from __future__ import annotations

from typing import Any

import pytest
from textual import events
from textual.geometry import Size

MOST = 50
NOW, BEFORE = Size(120, 40), Size(80, 24)


def resize(size: Size) -> events.Resize:
    return events.Resize(size, size)


@pytest.mark.parametrize("key", ["", "question_mark", "s"], ids=["main screen", "a screen above it", "a dialog"])
async def test_an_outdated_size_lays_nothing_out(
    console: Any, fakes: Any, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with console(fakes.chat, size=NOW) as c:
        if key:
            await c.press(key)
        screens = list(c.app.screen_stack)
        laid_out: list[Size] = []
        for screen in screens:
            whole = screen._refresh_layout

            def layout(size: Size | None = None, scroll: bool = False, whole: Any = whole) -> None:
                if size is not None:
                    laid_out.append(size)
                if len(laid_out) < MOST:  # otherwise two alternating sizes would never end
                    whole(size, scroll)

            monkeypatch.setattr(screen, "_refresh_layout", layout)
        for screen in screens:
            for size in (BEFORE, NOW, BEFORE, NOW):
                screen.post_message(resize(size))
                screen.call_later(lambda: None)  # Textual merges consecutive resize events
        await c.pilot.pause()
        assert set(laid_out) == {NOW}
        assert {screen.size for screen in screens} == {NOW}


async def test_the_size_of_the_terminal_is_taken(console: Any, fakes: Any) -> None:
    async with console(fakes.chat, size=BEFORE) as c:
        for size in (NOW, BEFORE, NOW):
            await c.pilot.resize_terminal(*size)
        await c.sees("╮")
        assert c.app.screen.size == NOW
