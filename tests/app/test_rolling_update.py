"""A rolling update by its key: a second server, the comparison of responses, the offer to stop the old one."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from vllm_console.fleet.rolling import AnswerComparison
from vllm_console.ui.screens import dialogs
from vllm_launchers.keeper.records import State
from vllm_launchers.launch.errors import NoPlaceError
from vllm_launchers.vllm.flags.changes import Changes


@pytest.fixture
def fleet(fakes):
    """One ready server; once started, ``chat-2`` is in the state ``second``."""

    class Fleet(fakes.FakeFleet):
        compared = AnswerComparison(4, ("The capital of France is",))

        def __init__(self):
            self.second = None
            self.state = State.READY
            super().__init__(lambda at: replace(fakes.chat(at), findings=(), state=self.state), self.new)

        def new(self, at):
            state = self.second or State.STOPPED
            return replace(fakes.chat(at), name="chat-2", port=8099, findings=(), state=state, generation=self.number)

        @property
        def number(self):
            return 1 if self.second is None else 2

        def start_beside(self, name, changes, options):
            self._did("start_beside", name, changes)
            self.second = State.STARTING
            return self.new(self.at)

        def compare_answers(self, old, new):
            self._did("compare_answers", old, new)
            return self.compared

    return Fleet()


async def test_the_old_server_is_stopped_only_after_a_yes(console, fleet):
    async with console(fleet=fleet) as c:
        await c.press("U")
        await c.sees("Start a second chat next to it?")
        await c.sees("chat on port 8000, GPU 0 keeps serving until you stop it.")
        await c.sees("The second one starts on another port, on GPUs with room.")
        await c.press("y")
        await c.sees("chat-2 is starting at http://127.0.0.1:8099; chat keeps serving.")
        assert fleet.calls == [("start_beside", "chat", Changes())]
        fleet.second = State.READY
        await c.sees("chat-2 is ready. Stop chat?")
        await c.sees("Different answers to 1 of 4 golden prompts")
        await c.sees("'The capital of France is'")
        await c.press("y")
        await c.until(lambda: ("stop", "chat") in fleet.calls)
    assert fleet.calls.count(("compare_answers", "chat", "chat-2")) == 1


async def test_a_key_typed_as_the_question_appears_stops_nothing(console, fleet, monkeypatch):
    async with console(fleet=fleet) as c:
        await c.press("U", "y")
        await c.sees("chat keeps serving.")
        monkeypatch.setattr(dialogs, "UNREAD_SECONDS", 3600.0)
        fleet.second = State.READY
        await c.sees("chat-2 is ready. Stop chat?")
        await c.press("y", "enter")
        await c.sees("chat-2 is ready. Stop chat?")
        assert "stop" not in [call[0] for call in fleet.calls]
        monkeypatch.setattr(dialogs, "UNREAD_SECONDS", 0.0)
        await c.press("y")
        await c.until(lambda: ("stop", "chat") in fleet.calls)


async def test_it_does_not_ask_while_a_filter_is_typed(console, fleet):
    async with console(fleet=fleet) as c:
        await c.press("U", "y")
        await c.sees("chat keeps serving.")
        await c.press("slash", "c")
        fleet.second = State.READY
        await c.until(lambda: any("chat-2 is ready at" in one.text for one in c.app.messages.history))
        await c.press("h", "y")
        assert c.app.screen is c.app.operations
        assert c.app.operations.filter_text == "chy"
        assert "stop" not in [call[0] for call in fleet.calls]


async def test_one_that_fails_is_not_compared(console, fleet):
    async with console(fleet=fleet) as c:
        await c.press("U", "y")
        await c.sees("chat keeps serving.")
        fleet.second = State.FAILED
        await c.until(lambda: c.app.snapshot.server("chat-2").state is State.FAILED)
        await c.until(lambda: not c.app.operations.verbs.rolling._started)
        fleet.second = State.READY
        await c.until(lambda: c.app.snapshot.server("chat-2").state is State.READY)
    assert fleet.calls == [("start_beside", "chat", Changes())]


async def test_no_room_is_reported_in_a_sentence(console, fleet):
    fleet.error = NoPlaceError("no room for a second server beside chat: GPU 0 has 0.6 GiB")
    async with console(fleet=fleet) as c:
        await c.press("U", "y")
        await c.sees("A second chat was not started: no room for a second server beside chat: GPU 0 has 0.6 GiB")


async def test_a_rolling_update_begins_with_a_ready_server(console, fleet):
    fleet.state = State.STARTING
    async with console(fleet=fleet) as c:
        await c.press("U")
        await c.sees("chat is starting: a rolling update needs a server that is ready.")
    assert fleet.calls == []
