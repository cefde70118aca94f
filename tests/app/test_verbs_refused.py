"""A refused restart or switch says why, and what to do in the console, and can be forced."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from vllm_console.ui.parts.server_verbs import refusal_rows
from vllm_launchers.launch.errors import NoPlaceError
from vllm_launchers.launch.place import AUTO, GpuRequest, find_place, find_place_again
from vllm_launchers.launch.refusal import refuse_unfit
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.vllm.flags.changes import Changes

SHORTER = Changes({"max-model-len": 8192}, ("swap-space",))
SURE = PlanFinding("context_over_model", Level.ERROR, "max-model-len 131072 is over the model's 8192", SHORTER)
ESTIMATE = PlanFinding("kv_too_small", Level.ERROR, "the KV cache holds no request of full length", surely=False)


@pytest.fixture
def fleet(fakes):
    class Fleet(fakes.FakeFleet):
        errors = ()

        def _refuse(self, call, force):
            refuse_unfit(replace(self.plan_restart("old", Changes()), findings=self.errors), force=force)
            self._did(*call)
            return self._view("old")

        def restart(self, name, changes, options):
            return self._refuse(("restart", name, options.force), options.force)

        def switch(self, name, preset, options):
            return self._refuse(("switch", name, preset, options.force), options.force)

    return Fleet(fakes.stopped)


async def test_one_error_is_reported_with_its_fix_in_the_consoles_words(console, fleet):
    fleet.errors = (SURE,)
    async with console(fleet=fleet) as c:
        await c.press("r")
        await c.sees("old was not restarted: max-model-len 131072 is over the model's 8192. Fix:")
        fix = "--max-model-len 8192, no --swap-space (e edits the flags)."
        await c.until(lambda: fix in " ".join(c.text.split()), "the fix")
        await c.lacks("--set")
        await c.lacks("--force")


async def test_several_errors_are_all_reported_and_nothing_is_done(console, fleet):
    fleet.errors = (SURE, ESTIMATE)
    async with console(fleet=fleet, size=(80, 24)) as c:
        await c.press("r")
        await c.sees("old will not start.")
        await c.sees("1. max-model-len 131072")
        await c.sees("2. the KV cache holds no request of full length.")
        await c.press("y")
        await c.until(lambda: c.app.screen is c.app.operations)
        assert fleet.calls == []


async def test_what_rests_on_an_estimate_may_be_gone_over(console, fleet):
    fleet.errors = (ESTIMATE,)
    async with console(fleet=fleet) as c:
        await c.press("r")
        await c.sees("old is unlikely to start. Restart anyway?")
        await c.press("n")
        assert fleet.calls == []
        await c.press("r")
        await c.sees("anyway?")
        await c.press("enter")  # the question appeared unprompted, so enter may have been meant for something else
        assert fleet.calls == []
        await c.press("y")
        await c.until(lambda: fleet.calls)
        assert fleet.calls == [("restart", "old", True)]


async def test_a_switch_that_is_unlikely_to_start_can_be_forced(console, fleet):
    fleet.errors = (ESTIMATE,)
    async with console(fleet=fleet) as c:
        await c.press("w", "j", "enter", "y")
        await c.sees("old is unlikely to start. Switch anyway?")
        await c.press("y")
        await c.until(lambda: fleet.calls)
        assert [(*call[:2], call[3]) for call in fleet.calls] == [("switch", "old", True)]


async def test_an_answer_over_another_screen_is_reported_and_asks_nothing(console, fleet):
    fleet.errors = (SURE, ESTIMATE)
    said = []
    async with console(fleet=fleet) as c:
        await c.press("question_mark")
        top = c.app.screen
        c.app.say = lambda text, *_, **__: said.append(text)
        c.app.operations.verbs.restart(c.app.operations.selected)
        await c.until(lambda: said[-1].endswith("(+1 more)"))
        assert c.app.screen is top


def test_no_word_for_commands_reaches_the_console(fakes):
    wanted = GpuRequest({"tensor-parallel-size": 2}, fakes.VLLM)
    calls = (lambda: find_place_again(wanted, None, (0,), chosen=False), lambda: find_place(wanted, None, AUTO, ()))
    for call, what in zip(calls, ("needs 2 GPUs but has GPU 0", "no GPUs can be chosen"), strict=True):
        with pytest.raises(NoPlaceError, match="--gpus") as error:
            call()
        (row,) = refusal_rows(error.value, "e")
        assert row.startswith(what)
        assert "--gpus" not in row
        assert row.endswith("s stops it, then n launches it under this name on other GPUs.")
    assert refusal_rows(NoPlaceError("no GPUs available: all are full"), "e") == ["no GPUs available: all are full."]


async def test_a_node_of_several_is_not_restarted_alone(console, fakes):
    def node(at):
        return replace(fakes.chat(at), node="node 1 of 2, headless", port=0)

    async with console(node) as c:
        foot = c.text.splitlines()[-1]
        assert "r restart" not in foot
        assert "a adjust" not in c.text
        for key in ("r", "w", "a", "e", "t", "z", "f", "left_square_bracket"):
            await c.press(key)
            await c.sees("node 1 of 2, headless: a node can't be restarted")
            await c.press("escape")
            await c.lacks("a node can't be restarted")
        assert c.app.screen is c.app.operations
        await c.press("s")
        await c.sees("node 1 of 2, headless: the other nodes end with it.")


async def test_a_node_that_failed_is_not_offered_to_be_started_alone(console, fakes):
    async with console(lambda at: replace(fakes.broken(at), node="node 1 of 2, headless", port=0)) as c:
        await c.sees("l log   x remove")
        assert "r start" not in c.text
