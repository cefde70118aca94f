"""A late result opens nothing on top of a screen opened meanwhile, and nothing is requested twice at once.

What is typed before a late screen opens is for that screen.
"""

from __future__ import annotations

import threading

import pytest
from textual.events import Key, Paste

from vllm_console.fleet.adapters import Adapters
from vllm_console.fleet.background_commands import RampView
from vllm_console.fleet.leftovers import Leftovers
from vllm_console.runs.compare import compare
from vllm_console.ui.parts import late_screens
from vllm_console.ui.screens.claims import ClaimDialog
from vllm_console.ui.screens.compare import CompareScreen
from vllm_console.ui.screens.help import HelpScreen
from vllm_launchers.errors import OperationError
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

        def adapters(self, *given):
            return self._later("adapters", *given)

        def start_ramp(self, *given):
            return self._later("start_ramp", *given)

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


async def test_the_comparison_takes_the_keys_typed_before_it_is_there(console, slow):
    async with console(fleet=slow) as c:
        await c.press("c", "question_mark")
        slow.go.set()
        await c.until(lambda: isinstance(c.app.screen, HelpScreen), "the second key")
        assert isinstance(c.app.screen_stack[1], CompareScreen), "it was not for the main screen"


async def test_over_another_screen_nothing_opens(console, slow):
    said = []
    async with console(fleet=slow) as c:
        c.app.say = lambda text, *_, **__: said.append(text)
        for action in ("switch_preset", "remove_leftovers", "claim_gpus", "compare"):
            await c.app.run_action(f"screen.{action}", c.app.operations)  # with the mouse: keys are kept meanwhile
        await c.until(lambda: {call[0] for call in slow.calls} == {"compare", "presets", "find_leftovers", "board"})
        c.app.action_help()
        top = c.app.screen
        slow.go.set()
        await c.until(lambda: not c.app._asking, "all answers")
        assert c.app.screen is top
        assert len(c.app.screen_stack) == 2
    assert "Leftovers: 1 file (240 MiB) in /dev/shm; X removes them." in said


async def test_help_opens_once_however_often_its_key_is_pressed(console):
    async with console() as c:
        await c.press("question_mark", "question_mark", "f1")
        assert len(c.app.screen_stack) == 2


def burst(app, *keys):
    """Send all keys before any is handled, as over a slow connection."""
    for key in keys:
        app.post_message(Key(key, " " if key == "space" else key if len(key) == 1 else None))


def verbs(fleet):
    return [call[0] for call in fleet.calls]


async def test_what_follows_the_key_is_for_its_dialog(console, slow):
    async with console(fleet=slow) as c:
        burst(c.app, "C", *"release", "space", "2", "3", "backspace")
        await c.until(lambda: "board" in verbs(slow))
        await c.press("enter")
        assert set(verbs(slow)) == {"board"}, "no key was for the main screen"
        slow.go.set()
        await c.until(lambda: ("release", (2,)) in slow.calls)
        assert "restart" not in verbs(slow)


async def test_a_command_opens_its_dialog_the_same_way(console, slow):
    async with console(fleet=slow) as c:
        burst(c.app, "colon", *"claim", "enter", *"release", "enter")
        await c.until(lambda: "board" in verbs(slow))
        slow.go.set()
        await c.until(lambda: ("release", ()) in slow.calls)
        assert "restart" not in verbs(slow)


async def test_pasted_text_is_for_the_dialog_too(console, slow):
    slow.lora = Adapters("chat", True, True, 2, 4, 16, ())
    async with console(fleet=slow) as c:
        burst(c.app, "F")
        c.app.post_message(Paste("tales /adapters/tales"))
        burst(c.app, "2", "enter")
        await c.until(lambda: "adapters" in verbs(slow))
        slow.go.set()
        await c.until(lambda: ("load_adapter", "chat", "tales", "/adapters/tales2") in slow.calls)


async def test_a_late_ramp_takes_the_key_that_leaves_it(console, slow):
    slow.ramp_views["chat"] = RampView(running=False)
    async with console(fleet=slow) as c:
        burst(c.app, "B", "q")
        await c.until(lambda: "start_ramp" in verbs(slow))
        assert c.app.operations.on_top
        slow.ramp_views["chat"] = RampView()
        slow.go.set()
        await c.until(lambda: "cancel_ramp" in verbs(slow), "q left the ramp")
        assert c.app.is_running


async def test_escape_gives_up_a_late_screen_and_its_keys(console, slow):
    async with console(fleet=slow) as c:
        c.app.operations.staging.put("chat", {"max-num-seqs": 64})
        await c.press("C", "r", "escape")
        assert c.app.operations.staging.of("chat"), "escape meant the dialog"
        await c.press("j")
        assert c.app.operations.selected_name == "coder"
        slow.go.set()
        await c.until(lambda: not c.app._asking, "the answer")
        await c.pilot.pause()
        assert c.app.operations.on_top
        assert set(verbs(slow)) == {"board"}


async def test_the_key_works_again_while_the_first_answer_is_awaited(console, slow):
    async with console(fleet=slow) as c:
        await c.press("C", "x", "escape", "C", *"release", "enter")
        slow.go.set()
        await c.until(lambda: ("release", ()) in slow.calls)


async def test_a_ramp_that_was_given_up_is_named_and_shown_by_its_key(console, slow):
    async with console(fleet=slow) as c:
        await c.press("B", "escape")
        slow.ramp_views["chat"] = RampView()
        slow.go.set()
        await c.sees("A ramp runs on chat: B shows it.")
        await c.press("B")
        await c.sees("chat: ramp to the highest rate")
        assert verbs(slow).count("start_ramp") == 2, "the fake counts a late call twice; there was no second one"


@pytest.mark.parametrize("problem", [None, OperationError("no answer")])
async def test_if_no_screen_opens_its_keys_do_nothing(console, slow, problem):
    slow.left = Leftovers()
    slow.error = problem
    async with console(fleet=slow) as c:
        burst(c.app, "X", "j")
        await c.until(lambda: "find_leftovers" in verbs(slow))
        await c.press("r")
        slow.go.set()
        await c.sees("no answer" if problem else "No leftovers of ended servers.")
        assert c.app.operations.selected_name == "chat"
        assert "restart" not in verbs(slow)
        await c.press("j")
        assert c.app.operations.selected_name == "coder"


async def test_a_screen_that_does_not_open_can_be_given_up(console, slow, monkeypatch):
    monkeypatch.setattr(late_screens, "REMIND_SECONDS", 0.01)
    async with console(fleet=slow) as c:
        await c.press("C")
        await c.sees(late_screens.WAITING)
        await c.press("escape")
        await c.lacks(late_screens.WAITING)


async def test_the_console_can_be_left_while_a_screen_is_awaited(console, slow):
    async with console(fleet=slow) as c:
        await c.press("C", "q")
        assert c.app._exit is False
        await c.press("ctrl+q")
        assert c.app._exit


async def test_keys_are_for_a_screen_that_was_opened_with_the_mouse_meanwhile(console, slow):
    async with console(fleet=slow) as c:
        await c.press("C", "r")
        c.app.action_help()
        await c.press("q")
        await c.until(lambda: c.app.operations.on_top, "help is closed")
        slow.go.set()
        await c.until(lambda: not c.app._asking, "the answer")
        await c.pilot.pause()
        assert not isinstance(c.app.screen, ClaimDialog)
        assert set(verbs(slow)) == {"board"}
