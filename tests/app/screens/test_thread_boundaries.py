"""An exception in a thread is shown on the screen that started it, and the program continues."""

from __future__ import annotations

import pytest

from vllm_console.ui.screens.flags import FlagsScreen
from vllm_console.ui.screens.launch import LaunchScreen


@pytest.fixture
def failing(fakes):
    class Failing(fakes.FakeFleet):
        def flags(self, engine=None):
            raise OSError(28, "No space left on device")

        def presets(self):
            raise OSError(5, "Input/output error")

    return Failing(fakes.chat)


async def test_the_flags_screen_says_that_flags_cannot_be_read(host, wait_until, fakes, failing):
    app = host(lambda: FlagsScreen(fakes.chat(fakes.NOW), {}, failing))
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: "No space left on device" in app.text())
        await pilot.press("j", "escape")
        await wait_until(pilot, lambda: app.results)
    assert app.results == [None]


async def test_the_launch_screen_says_that_presets_cannot_be_read(host, wait_until, failing):
    app = host(lambda: LaunchScreen(failing))
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: "Input/output error" in app.text())
        await pilot.press("escape")
        await wait_until(pilot, lambda: app.results)
    assert app.results == [None]
