"""A late result opens nothing on top of a screen opened meanwhile, and nothing is requested twice at once."""

from __future__ import annotations

import threading

import pytest

from vllm_console.fleet.leftovers import Leftovers
from vllm_console.runs.compare import compare
from vllm_console.ui.screens.compare import CompareScreen
from vllm_launchers.host.shared_memory import LeftFile

LEFT = Leftovers((), (LeftFile("/dev/shm/psm_0a1b2c3d", 240 << 20, 7, "seen"),))


@pytest.fixture
def slow(fakes, made):
    """A fleet that returns the results that open a screen only once ``go`` is set."""
    go = threading.Event()

    class Slow(fakes.FakeFleet):
        def _later(self, verb, *given):
            self.calls.append((verb,))
            assert go.wait(20)
            return getattr(super(), verb)(*given)

        def compare(self, *given):
            return self._later("compare", *given)

        def presets(self):
            return self._later("presets")

        def find_leftovers(self):
            return self._later("find_leftovers")

        def board(self):
            return self._later("board")

    fleet = Slow(fakes.chat, fakes.coder)
    fleet.go, fleet.left = go, LEFT
    fleet.comparison = compare(*made.pair(made.minutes(1), made.minutes(2, slower=0.6), None))
    yield fleet
    go.set()


async def test_three_presses_open_one_comparison(console, slow):
    async with console(fleet=slow) as c:
        await c.press("c", "c", "c")
        slow.go.set()
        await c.until(lambda: isinstance(c.app.screen, CompareScreen))
        assert len(c.app.screen_stack) == 2
        assert slow.calls.count(("compare",)) == 1
        await c.press("escape")
        await c.press("c")
        await c.until(lambda: isinstance(c.app.screen, CompareScreen), "later it opens again")


async def test_the_comparison_has_its_screen_at_once_and_takes_the_keys(console, slow):
    async with console(fleet=slow) as c:
        await c.press("c")
        await c.sees("comparing…")
        await c.press("b")
        slow.go.set()
        await c.until(lambda: isinstance(c.app.screen, CompareScreen), "the comparison")
        assert "start_load" not in [call[0] for call in slow.calls], "the key was not for the main screen"
        assert len(c.app.screen_stack) == 2


async def test_a_comparison_that_nobody_waits_for_does_not_open(console, slow):
    async with console(fleet=slow) as c:
        await c.press("c")
        await c.sees("comparing…")
        await c.press("escape")
        slow.go.set()
        await c.until(lambda: not c.app._asking, "the answer")
        assert c.app.screen is c.app.operations


async def test_over_another_screen_nothing_opens(console, slow):
    said = []
    async with console(fleet=slow) as c:
        c.app.say = lambda text, *_, **__: said.append(text)
        await c.press("w", "X", "C", "c")
        await c.sees("comparing…")
        await c.until(lambda: {call[0] for call in slow.calls} == {"compare", "presets", "find_leftovers", "board"})
        await c.press("question_mark")
        top = c.app.screen
        slow.go.set()
        await c.until(lambda: not c.app._asking, "all answers")
        assert c.app.screen is top
        assert len(c.app.screen_stack) == 3
        await c.press("escape")
        await c.until(lambda: isinstance(c.app.screen, CompareScreen), "what was above is closed")
    assert "Leftovers: 1 file (240 MiB) in /dev/shm; X removes them." in said


async def test_help_opens_once_however_often_its_key_is_pressed(console):
    async with console() as c:
        await c.press("question_mark", "question_mark", "f1")
        assert len(c.app.screen_stack) == 2
