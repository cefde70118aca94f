from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from textual.app import App
from textual.filter import LineFilter
from textual.pilot import Pilot
from textual.screen import Screen

from vllm_console.ui.theme import CONSOLE_THEME, AsciiFilter


class Host(App[None]):
    """Shows one screen, and keeps its result."""

    CSS = "Screen { background: ansi_default; color: ansi_default; }"
    ascii = False

    def __init__(self, make: Callable[[], Screen[Any]]) -> None:
        super().__init__(ansi_color=True)
        self.animation_level = "none"
        self.register_theme(CONSOLE_THEME)
        self.theme = CONSOLE_THEME.name
        self._make = make
        self.results: list[object] = []

    def on_mount(self) -> None:
        self.push_screen(self._make(), self.results.append)

    def get_line_filters(self) -> Sequence[LineFilter]:
        return [*super().get_line_filters(), *((AsciiFilter(),) if self.ascii else ())]

    def text(self) -> str:
        strips = self.screen._compositor.render_strips()
        return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)

    async def sees(self, text: str) -> None:
        await until(Pilot(self), lambda: text in self.text(), f"{text!r} on the screen")

    async def lacks(self, text: str) -> None:
        await until(Pilot(self), lambda: text not in self.text(), f"{text!r} not on the screen")


async def until(pilot: Pilot[None], condition: Callable[[], object], what: str = "") -> None:
    """Wait for a condition up to three minutes, because machines may be busy."""
    deadline = time.monotonic() + 180
    while not condition():
        if time.monotonic() > deadline:
            screen = pilot.app.text() if isinstance(pilot.app, Host) else ""
            raise AssertionError(f"never true: {what or condition}\n{screen}")
        await pilot.pause()
        await asyncio.sleep(0.01)


@pytest.fixture
def host() -> type[Host]:
    return Host


@pytest.fixture
def wait_until() -> Callable[..., Any]:
    return until
