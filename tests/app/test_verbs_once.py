"""An action applies to the intended server, and once, however often the key is pressed."""

from __future__ import annotations

import threading

import pytest
from msgspec.structs import replace

from vllm_console.runs.compare import compare
from vllm_console.ui.parts.server_verbs import RunningVerb, VerbsInProgress
from vllm_console.ui.screens.compare import CompareScreen
from vllm_console.ui.theme import BAD
from vllm_launchers.errors import OperationError
from vllm_launchers.keeper.records import State
from vllm_launchers.vllm.flags.changes import Changes


@pytest.fixture
def fleet(fakes):
    """One server in the state that ``now`` describes; restarts wait for ``go``."""

    class Fleet(fakes.FakeFleet):
        def __init__(self, **now):
            self.now, self.go = now, threading.Event()
            super().__init__(lambda at: replace(fakes.stopped(at), name="chat", **{"generation": 3, **self.now}))

        def restart(self, name, changes, options):
            assert self.go.wait(20)
            return super().restart(name, changes, options)

    return Fleet()


async def test_a_second_restart_is_not_begun_until_the_first_is_seen(console, fleet):
    async with console(fleet=fleet) as c:
        await c.press("r", "r")
        await c.sees("chat is being restarted.")
        fleet.go.set()
        await c.sees("is restarting as run 4")
        looks = fleet.looks
        await c.until(lambda: fleet.looks > looks + 1, "looks that still show the old generation")
        for key in ("r", "s", "w", "x", "z"):
            c.app.messages_seen()
            await c.press(key)
            await c.sees("chat is being restarted.")
            assert c.app.screen is c.app.operations, key
        fleet.now = {"state": State.STOPPING, "state_since": fleet.at}
        await c.until(lambda: c.app.operations.selected.state is State.STOPPING)
        c.app.messages_seen()
        await c.press("r")
        await c.sees("chat is being restarted.")
        await c.press("s")
        await c.sees("Stop chat?")
        await c.press("n")
        fleet.now = {"generation": 4, "state_since": fleet.at}
        await c.until(lambda: c.app.operations.selected.generation == 4)
        assert fleet.calls == [("restart", "chat", Changes())]
        await c.press("r")
        await c.until(lambda: len(fleet.calls) == 2, "it can be restarted again")


async def test_a_restart_of_what_starts_anyway_asks(console, fakes):
    """The new generation may be running before a second press: restarting again would lose the way back."""
    async with console(fakes.docs) as c:
        await c.press("r")
        await c.sees("Already starting with these flags; restarting starts over.")
        await c.press("n", "v", "r")
        await c.until(lambda: c.fleet.calls)
        assert c.fleet.calls == [("restart", "docs", Changes(set={"kv-cache-dtype": "fp8"}))]


async def test_what_was_refused_can_be_tried_again(console, fleet):
    fleet.go.set()
    fleet.error = OperationError("port 8004 is taken")
    async with console(fleet=fleet) as c:
        await c.press("r")
        await c.sees("port 8004 is taken")
        await c.press("r")
        await c.until(lambda: len(fleet.calls) == 2)


def test_a_verb_is_under_way_until_a_poll_shows_more(fakes):
    chat = fakes.chat(0.0)
    stopping = replace(chat, state=State.STOPPING, state_since=1.0)
    held = VerbsInProgress()
    held.begin(chat, RunningVerb.STOP)
    held.observe([stopping])
    assert held.on(chat) is RunningVerb.STOP, "not answered yet: another one had it stopped"
    held.accept("chat")
    held.observe([chat])
    assert held.on(chat) is RunningVerb.STOP
    held.observe([stopping])
    assert held.on(stopping) is None
    held.begin(chat, RunningVerb.SWITCH)
    assert held.on(stopping, to_stop=True) is RunningVerb.SWITCH
    held.accept("chat")
    held.observe([stopping])
    assert held.on(stopping) is RunningVerb.SWITCH
    assert held.on(stopping, to_stop=True) is None, "a stop goes before what is to start"
    held.observe([replace(stopping, state=State.STOPPED)])
    assert held.on(chat) is None
    held.begin(chat, RunningVerb.REMOVE)
    held.accept("chat")
    held.observe([])
    assert held.on(chat) is None


@pytest.fixture
def compared(fakes, made):
    """A fleet of chat and coder, with a comparison of chat's last two runs."""
    fleet = fakes.FakeFleet(fakes.chat, fakes.coder)
    flags = dict(fakes.CHAT_FLAGS)
    one, other = made.pair(made.minutes(1), made.minutes(2, slower=1.6), flags)
    before = made.run(2, {**flags, "max-num-seqs": 512}, model=fakes.chat(fakes.NOW).model)
    fleet.comparison = compare(replace(one, run=before), other)
    return fleet


async def to_the_comparison(c):
    await c.press("slash", *"ready", "enter", "c")
    await c.until(lambda: isinstance(c.app.screen, CompareScreen), "the comparison")


async def test_the_way_back_restarts_the_server_compared_and_not_the_one_selected_by_now(console, compared, fakes):
    async with console(fleet=compared) as c:
        await to_the_comparison(c)
        compared.makers[0] = lambda at: replace(fakes.chat(at), state=State.FAILED, state_since=at)
        await c.until(lambda: c.app.snapshot.server("chat").state is State.FAILED, "the filter hides it")
        await c.press("z")
        await c.until(lambda: "restart" in [call[0] for call in compared.calls])
        assert compared.calls[-1] == ("restart", "chat", Changes({"max-num-seqs": 512}))


async def test_what_arrives_after_the_end_updates_no_question(console, fakes):
    async with console(fakes.chat) as c:
        await c.press("r")
        await c.sees("Restart chat?")
    c.app.operations.verbs.observe([fakes.chat(fakes.NOW)])


@pytest.mark.parametrize("key", ["n", "y"])
async def test_the_way_back_asks_before_it_replaces_what_is_staged(console, compared, fakes, key):
    compared.makers[0] = lambda at: replace(fakes.chat(at), window=fakes.window_at(at, 0.0))
    staged = {"max-num-batched-tokens": 4096, "kv-cache-dtype": "fp8"}
    async with console(fleet=compared) as c:
        c.app.operations.staging.put("chat", staged)
        await to_the_comparison(c)
        await c.press("z")
        await c.sees("Restart chat?")
        await c.sees("Replaces 2 staged changes: --max-num-batched-tokens unset → 4096, --kv-cache-dtype unset → fp8.")
        await c.sees("--max-num-seqs 256 → 512")
        await c.press(key)
        await c.until(lambda: c.app.operations.on_top)
        if key == "n":
            assert c.app.operations.staging.of("chat") == staged
            assert {call[0] for call in compared.calls} <= {"compare", "compare_again"}
        else:
            await c.until(lambda: ("restart", "chat", Changes({"max-num-seqs": 512})) in compared.calls)
            await c.until(lambda: not c.app.operations.staging.of("chat"))


async def test_the_way_back_of_a_server_that_is_gone_reports_it(console, compared):
    async with console(fleet=compared) as c:
        await to_the_comparison(c)
        del compared.makers[0]
        await c.until(lambda: c.app.snapshot.server("chat") is None)
        await c.press("z")
        await c.sees("chat is gone.")
        assert "restart" not in [call[0] for call in compared.calls]
        assert c.app.operations.staging.by_server == {}


async def test_an_error_is_out_of_date_once_the_next_verb_is_accepted(console, fleet):
    """For the same server only: an error of another one stays visible."""
    fleet.go.set()
    async with console(fleet=fleet) as c:
        c.app.say("chat was not switched.", BAD)
        await c.sees("chat was not switched.")
        await c.press("r")
        await c.sees("is restarting as run 4")
        assert not c.app.messages.unseen_error
        c.app.say("coder has failed.", BAD, "coder")
        c.app.messages.accepted("chat")
        assert c.app.messages.unseen_error


async def test_a_restart_on_another_machine_that_was_refused_there_later_blocks_nothing(console, fakes):
    """The outcome of a prepared restart on another machine is unknown here; its server continues unchanged."""
    fleet = fakes.FakeFleet(
        lambda at: replace(fakes.chat(at), name="box/chat", ours=False, remote="box", remote_ours=True)
    )
    async with console(fleet=fleet) as c:
        await c.press("r")
        await c.sees("Restart box/chat?")
        await c.press("y")
        await c.until(lambda: fleet.calls == [("restart", "box/chat", Changes())])
        await c.sees("box/chat is restarting.")
        await c.press("r")
        await c.sees("Restart box/chat?")
        await c.press("n", "s")
        await c.sees("Stop box/chat?")
