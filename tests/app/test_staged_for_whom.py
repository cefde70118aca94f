"""Staged changes and the plan's verdict on them belong to one server and one generation, not to a name."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from vllm_launchers.keeper.records import State

ANOTHER = ({"preset": "batch"}, {"model": "Qwen/Qwen3-8B"}, {"generation": 1})
"""Differences that make it another server of the same name."""


@pytest.fixture
def world(fakes):
    """A fleet of one server in the state that ``now`` describes, or of none."""

    class World(fakes.FakeFleet):
        now = {}  # noqa: RUF012 - replaced by tests

        def snapshot(self, selected=None, *time):
            found = super().snapshot(selected, *time)
            return found if self.now is not None else replace(found, servers=())

    world = World(lambda at: replace(fakes.chat(at), **(world.now or {})))
    return world


async def judged(c):
    await c.press("left_square_bracket")
    await c.sees("fits (estimate); KV cache")


async def test_a_new_server_of_the_same_name_gets_none_of_the_staged_changes(console, world):
    async with console(fleet=world) as c:
        known = c.app.operations._identities["chat"]
        for other in ANOTHER:
            await judged(c)
            world.now = other
            await c.until(lambda: c.app.operations.staging.by_server == {}, f"staged changes go: {other}")
            await c.lacks("fits (estimate)")
            world.now = {}
            await c.until(lambda: c.app.operations._identities["chat"] == known, "the first one is back")
        await c.press("r", "y")
        await c.until(lambda: world.calls)
        assert world.calls[0][2].empty


async def test_nothing_is_kept_of_a_server_that_is_gone(console, world):
    async with console(fleet=world) as c:
        await judged(c)
        world.now = None
        await c.until(lambda: c.app.operations.staging.by_server == {})
        assert c.app.operations.staged_plans.by_server == c.app.operations.staged_plans.plans == {}


async def test_forgetting_drops_it_before_the_next_poll(console, world):
    world.now = {"state": State.STOPPED, "window": None}
    async with console(fleet=world) as c:
        await c.press("left_square_bracket", "space")
        assert c.app.operations.staging.by_server
        await c.press("x", "y")
        await c.until(lambda: c.app.operations.staging.by_server == {})


async def test_another_generation_is_judged_again(console, world):
    async with console(fleet=world) as c:
        await judged(c)
        planned = len(world.planned)
        world.now = {"generation": 4}
        await c.until(lambda: len(world.planned) == planned + 2, "what runs now, and what is staged")
        await c.sees("fits (estimate); KV cache")
        assert c.app.operations.staging.by_server["chat"]
