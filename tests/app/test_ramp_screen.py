"""The ramp by its key: its screen follows it, leaving asks first, and it does not start where it is not allowed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from vllm_console.fleet.background_commands import RampView
from vllm_console.load.ramp import RampProgress
from vllm_console.runs.measurement import RAMP, Measurement
from vllm_console.ui.screens import ramp
from vllm_launchers.keeper.records import State

LIMITS = {"ttft_p99_seconds": 1.0, "itl_p99_seconds": 0.1}
SENTENCE = "The objectives hold up to 6 req/s; at 8 req/s, TTFT p99 was 2.4s (limit 1s)."


def step(rate, ttft, itl, ok=True):
    return {
        "rate": rate, "sent": 90, "completed": 80, "failed": 0, "ttft_seconds": {"p99": ttft},
        "itl_seconds": {"p99": itl}, "e2e_seconds": {"p99": 3.0}, "tokens_per_second": 1234.0, "kv_cache_usage": 0.4,
        "preemptions": 0, "waiting": 3, "attained": 0.998, "ok": ok,
    }  # fmt: skip


STEPS = (step(2.0, 0.2, 0.02), step(4.0, 0.4, 0.03), step(8.0, 2.4, 0.07, ok=False))
RUNNING = RampView(STEPS[:1], LIMITS, RampProgress(4.0, True, 72.0, 11))
DONE = RampView(STEPS, LIMITS, running=False, result=Measurement(
    RAMP, 0.0, STEPS, 6.0, 5.9, "ttft_p99_seconds", SENTENCE, LIMITS,
))  # fmt: skip


@pytest.fixture
def fleet(fakes):
    """One ready server with a running ramp once it was started."""

    class Fleet(fakes.FakeFleet):
        begins = RUNNING

        def start_ramp(self, name, *, others_allowed=False):
            super().start_ramp(name, others_allowed=others_allowed)
            self.ramp_views[name] = RUNNING if others_allowed else self.begins

        def cancel_ramp(self, name):
            super().cancel_ramp(name)
            self.ramp_views[name] = replace(DONE, canceled=True)

    return Fleet(lambda at: replace(fakes.chat(at), findings=()))


async def test_steps_appear_as_they_finish_and_at_the_end_the_sentence(console, fleet):
    async with console(fleet=fleet) as c:
        await c.press("B")
        await c.sees("Now warming up at 4.0 req/s, 11 in flight; 1m12s of 10m00s")
        await c.sees("200ms")
        await c.lacks("2.4s")
        fleet.ramp_views["chat"] = DONE
        await c.sees(SENTENCE)
        await c.sees("2.4s")
        await c.sees("┊ the ceiling, 6 req/s")
        await c.press("escape")
        await c.until(lambda: c.app.operations.on_top)
        assert fleet.calls == [("start_ramp", "chat")]


async def test_it_is_drawn_only_if_it_has_changed_and_is_visible(console, fleet, monkeypatch):
    monkeypatch.setattr(ramp, "REDRAW_SECONDS", 1e6)
    async with console(fleet=fleet) as c:
        await c.press("B")
        await c.until(lambda: isinstance(c.app.screen, ramp.RampScreen), "its screen")
        screen, drawn = c.app.screen, []
        screen._follow()
        monkeypatch.setattr(screen._reader, "redraw", lambda: drawn.append(screen._view))
        screen._follow()
        assert drawn == [], "it has not changed"
        await c.press("question_mark")
        await c.until(lambda: c.app.screen is not screen, "the help")
        fleet.ramp_views["chat"] = DONE
        screen._follow()
        assert drawn == [], "the help covers it"
        await c.press("escape")
        await c.until(lambda: c.app.screen is screen, "back")
        screen._follow()
        screen._follow()
        assert drawn == [DONE]


async def test_leaving_one_that_runs_asks_then_it_shows_what_it_has(console, fleet):
    async with console(fleet=fleet) as c:
        await c.press("B")
        await c.sees("Now warming up")
        await c.press("escape")
        await c.sees("End the ramp on chat?")
        await c.press("n")
        await c.sees("Now warming up")
        assert fleet.calls == [("start_ramp", "chat")]
        await c.press("escape")
        await c.sees("End the ramp on chat?")
        await c.press("y")
        await c.sees(SENTENCE)
        assert fleet.calls[-1] == ("cancel_ramp", "chat")


async def test_one_that_does_not_end_can_be_left_and_seen_again(console, fleet):
    async with console(fleet=fleet) as c:
        await c.press("B")
        await c.sees("Now warming up")
        fleet.ramp_views["chat"] = replace(RUNNING, canceled=True)
        await c.sees("Ending…")
        await c.press("escape")
        await c.until(lambda: c.app.operations.on_top)
        await c.press("B")
        await c.sees("Ending…")
        assert fleet.calls == [("start_ramp", "chat")]


async def test_one_that_has_not_begun_is_left_without_a_question(console, fleet):
    fleet.begins = RampView()
    async with console(fleet=fleet) as c:
        await c.press("B")
        await c.sees("Checking whether other clients use the server")
        await c.press("escape")
        await c.until(lambda: c.app.operations.on_top)
        await c.until(lambda: fleet.calls[-1] == ("cancel_ramp", "chat"))


@pytest.mark.parametrize("key", ["y", "n"])
async def test_a_server_that_serves_others_is_measured_only_after_a_yes(console, fleet, key):
    fleet.begins = RampView(running=False, others="chat has 3 requests in progress")
    async with console(fleet=fleet) as c:
        await c.press("B")
        await c.sees("chat has 3 requests in progress. Measure anyway?")
        await c.press(key)
        if key == "y":
            await c.sees("Now warming up")
            assert fleet.calls[-1] == ("start_ramp", "chat", "others")
        else:
            await c.until(lambda: c.app.operations.on_top)
            assert fleet.calls == [("start_ramp", "chat")]


@pytest.mark.parametrize("key", ["y", "escape"])
async def test_one_question_at_a_time(console, fleet, key):
    """While the question whether to end the ramp is open, it turns out that the server has other clients."""
    async with console(fleet=fleet) as c:
        await c.press("B")
        await c.sees("Now warming up")
        ramp = c.app.screen
        await c.press("escape")
        await c.sees("End the ramp on chat?")
        question = c.app.screen
        fleet.ramp_views["chat"] = RampView(running=False, others="chat has 3 requests in progress")
        ramp._follow()
        await c.pilot.pause()
        assert c.app.screen is question
        await c.press(key)
        if key == "escape":
            await c.sees("Measure anyway?")
            await c.press("escape")
        await c.until(lambda: c.app.operations.on_top)
        await c.press("escape", "escape")
        assert fleet.calls == [("start_ramp", "chat")]


async def test_a_screen_closes_once_and_with_what_is_above_it(console, fleet):
    async with console(fleet=fleet) as c:
        await c.press("B")
        await c.sees("Now warming up")
        ramp = c.app.screen
        await c.press("escape")
        await c.sees("End the ramp on chat?")
        question = c.app.screen
        ramp.close_with()
        assert c.app.operations.on_top
        ramp.close_with()
        question.close_with(True)
        await c.pilot.pause()
        assert c.app.operations.on_top


@pytest.mark.parametrize(
    ("change", "why"),
    [({"state": State.STARTING}, "a ramp needs a ready server"), ({"ours": False, "owner": "anna"}, "started by anna")],
)
async def test_what_is_not_ready_or_not_ours_is_not_measured(console, fakes, change, why):
    async with console(lambda at: replace(fakes.chat(at), **change)) as c:
        await c.press("B")
        await c.sees(why)
        assert c.fleet.calls == []


async def test_read_only_has_no_ramp(console, fakes):
    async with console(fakes.chat, read_only=True) as c:
        await c.press("B")
        await c.pilot.pause()
        assert c.app.operations.on_top
        assert c.fleet.calls == []
