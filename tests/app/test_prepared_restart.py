"""A restart that is prepared while the server serves: shown, canceled by a key, rejected, rolled back."""

from __future__ import annotations

from functools import partial

import pytest
from msgspec.structs import replace

from vllm_console.fleet.snapshot import PreparedRestart
from vllm_launchers.keeper.records import PreparationStep, State
from vllm_launchers.vllm.flags.changes import Changes


@pytest.fixture
def fleet(fakes):
    """One ready server in the state that ``now`` describes."""

    class Fleet(fakes.FakeFleet):
        def __init__(self):
            self.now = {}
            super().__init__(lambda at: replace(fakes.chat(at), findings=(), **{"state": State.READY, **self.now}))

        def restart(self, name, changes, options):
            super().restart(name, changes, options)
            self.now = {"restart": prepared(self.at, PreparationStep.IMPORTING)}
            return self._view(name)

        def cancel_restart(self, name):
            super().cancel_restart(name)
            self.now = {"restart": prepared(self.at, PreparationStep.CANCELED, "canceled")}
            return self._view(name)

    return Fleet()


def prepared(at, step, message="", **more):
    return PreparedRestart(at, step, at, ("max-num-seqs 256 → 128",), message, **more)


async def test_the_progress_of_the_preparation_is_shown_and_escape_cancels_it(console, fleet):
    async with console(fleet=fleet) as c:
        await c.press("r", "y")
        await c.sees("Preparing to restart chat.")
        await c.sees("loading vLLM")
        await c.sees("max-num-seqs 256 → 128 · keeps serving")
        await c.until(lambda: c.text.count("keeps serving") == 1, "it says so once")
        fleet.now = {"restart": prepared(fleet.at, PreparationStep.CHECKING, memory_mib=1234)}
        await c.sees("vLLM is checking the flags")
        await c.sees("+1.2 GiB RAM")
        await c.press("escape")
        await c.sees("restart canceled")
        assert fleet.calls == [("restart", "chat", Changes()), ("cancel_restart", "chat")]


@pytest.mark.parametrize("other", [{"read_only": True}, {"ours": False, "remote": "box"}], ids=["read-only", "remote"])
async def test_escape_cancels_no_restart_that_may_not_be_canceled_from_here(console, fleet, other):
    """It was offered and then refused, so that the key did nothing else while a restart was prepared."""
    fleet.read_only = other.get("read_only", False)
    seen = {key: value for key, value in other.items() if key != "read_only"}
    fleet.now = {"restart": prepared(fleet.at, PreparationStep.CHECKING), **seen}
    async with console(fleet=fleet, read_only=fleet.read_only) as c:
        await c.sees("vLLM is checking the flags")
        assert "esc cancel" not in c.text
        await c.press("slash", *"chat", "enter")
        await c.sees("filter")
        await c.press("escape")
        await c.until(lambda: not c.app.operations._filter)
        assert ("cancel_restart", "chat") not in fleet.calls


async def test_the_changes_of_a_canceled_restart_are_staged_again(console, fleet):
    async with console(fleet=fleet) as c:
        await c.press("left_square_bracket")
        staged = c.app.operations.staging.of("chat")
        assert staged
        await c.press("r", "y")
        await c.sees("loading vLLM")
        assert not c.app.operations.staging.of("chat")
        await c.press("escape")
        await c.until(lambda: c.app.operations.staging.of("chat") == staged)


async def test_changes_that_another_restart_replaced_are_staged_again(console, fleet):
    async with console(fleet=fleet) as c:
        await c.press("left_square_bracket")
        staged = c.app.operations.staging.of("chat")
        await c.press("r", "y")
        await c.sees("loading vLLM")
        run = c.app.operations.selected.generation
        fleet.now = {"generation": run + 1, "flags": {"max-num-seqs": 9}}
        await c.sees("chat was restarted by someone else: your changes are not in effect; they have been staged again.")
        assert c.app.operations.staging.of("chat") == staged


async def test_own_restart_is_not_taken_for_somebody_elses(console, fleet):
    async with console(fleet=fleet) as c:
        await c.press("left_square_bracket")
        staged = c.app.operations.staging.of("chat")
        await c.press("r", "y")
        await c.sees("loading vLLM")
        run = c.app.operations.selected.generation
        flags = {**c.app.operations.selected.flags, **staged}
        fleet.now = {"generation": run + 1, "flags": flags}
        await c.until(lambda: c.app.operations.selected.generation == run + 1)
        await c.lacks("somebody else")
        assert not c.app.operations.staging.of("chat")


async def test_every_verb_but_a_stop_waits_for_the_preparation(console, fleet):
    async with console(fleet=fleet) as c:
        await c.press("r", "y")
        await c.sees("loading vLLM")
        await c.press("r")
        await c.sees("chat is being restarted.")
        await c.press("s")
        await c.sees("Stop chat?")


async def test_a_refusal_is_announced_with_its_message_and_the_next_restart_may_begin(console, fleet):
    async with console(fleet=fleet) as c:
        await c.press("r", "y")
        await c.sees("loading vLLM")
        fleet.now = {"restart": prepared(fleet.at, PreparationStep.REFUSED, "max_num_seqs: Input should be 1 or more")}
        await c.sees("restart refused: max_num_seqs: Input should be 1 or more")
        await c.press("escape")
        await c.press("r", "y")
        await c.until(lambda: len(fleet.calls) == 2, "it can be restarted again")


async def test_the_changes_of_a_refused_restart_are_not_staged_by_a_later_run(console, fleet):
    async with console(fleet=fleet) as c:
        await c.press("left_square_bracket")
        await c.press("r", "y")
        await c.sees("loading vLLM")
        run = c.app.operations.selected.generation
        fleet.now = {"restart": prepared(fleet.at, PreparationStep.REFUSED, "max_num_seqs: Input should be 1 or more")}
        await c.sees("restart refused")
        fleet.now = {"generation": run + 1}
        await c.until(lambda: c.app.operations.selected.generation == run + 1)
        await c.lacks("somebody else")
        assert not c.app.operations.staging.of("chat")


async def test_a_restart_without_preparation_takes_the_place_of_a_prepared_one(console, fleet, fakes):
    async with console(fleet=fleet) as c:
        await c.press("left_square_bracket")
        await c.press("r", "y")
        await c.sees("loading vLLM")
        run = c.app.operations.selected.generation
        fleet.now = {
            "state": State.STOPPED,
            "restart": prepared(fleet.at, PreparationStep.CANCELED, "a stop was requested"),
        }
        await c.until(lambda: c.app.operations.selected.state is State.STOPPED)
        fleet.restart = partial(fakes.FakeFleet.restart, fleet)
        await c.press("escape", "r")
        await c.sees(f"chat is restarting as run {run + 1}")
        fleet.now = {"generation": run + 1}
        await c.until(lambda: c.app.operations.selected.generation == run + 1)
        await c.lacks("somebody else")
        assert not c.app.operations.staging.of("chat")


async def test_a_rollback_is_announced(console, fleet):
    async with console(fleet=fleet) as c:
        await c.until(lambda: c.app.operations.selected is not None)
        fleet.now = {
            "generation": 5,
            "rollback": "run 4 failed, back to run 3's flags: no memory",
        }
        await c.sees("back to run 3's flags: no memory")
