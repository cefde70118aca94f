"""The console polls in a thread: slow, failing and paused polls leave it usable."""

from __future__ import annotations

import pytest

import vllm_console.ui.app as app_module
from vllm_console.ui.app import ConsoleApp


async def test_a_hanging_poll_shows_its_age_and_keys_still_work(console, monkeypatch):
    monkeypatch.setattr(app_module, "LATE_SECONDS", 0.05)
    async with console() as c:
        c.fleet.open.clear()
        await c.sees("s old  ")
        await c.press("j")
        await c.sees("▸ coder")
        looks = c.fleet.looks
        c.fleet.open.set()
        await c.until(lambda: "s old  " not in c.text)
        await c.until(lambda: c.fleet.looks > looks)


async def test_the_first_picture_has_the_charts_of_the_first_server(fakes, monkeypatch):
    fleet, drawn, display = fakes.FakeFleet(*fakes.EVERY_STATE), [], ConsoleApp._display

    def draw(self, screen, renderable):
        drawn.append((fleet.looks, self.snapshot and self.snapshot.servers[0].series))
        display(self, screen, renderable)

    monkeypatch.setattr(ConsoleApp, "_display", draw)
    monkeypatch.setattr(app_module, "FIRST_SECONDS", 60)
    async with ConsoleApp(fleet, refresh=60).run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        looks, series = drawn[0]
        assert (looks, fleet.looks) == (1, 1)
        assert series is not None


async def test_a_first_snapshot_that_hangs_keeps_the_screen_empty_only(fakes):
    fleet = fakes.FakeFleet(fakes.chat)
    fleet.open.clear()
    app = ConsoleApp(fleet, refresh=60)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("f1")
        assert app.screen is not app.operations
        await pilot.press("escape")
        assert (app.snapshot, fleet.looks) == (None, 0)
        fleet.open.set()
        while app.operations.selected is None:
            await pilot.pause()
        assert fleet.looks == 1


async def test_never_two_polls_at_once(console, fakes):
    class Counting(fakes.FakeFleet):
        now = most = 0

        def snapshot(self, selected=None, *time):
            self.now += 1
            self.most = max(self.most, self.now)
            try:
                return super().snapshot(selected, *time)
            finally:
                self.now -= 1

    fleet = Counting(fakes.chat)
    async with console(fleet=fleet) as c:
        fleet.open.clear()
        for _ in range(5):
            await c.press("j", "minus", "plus")
        fleet.open.set()
        await c.until(lambda: fleet.looks > 3)
        assert fleet.most == 1


async def test_a_failing_poll_is_reported_and_repeated(console, fakes):
    fleet = fakes.FakeFleet(fakes.chat)
    fleet.look_error = OSError("the state folder is gone")
    async with console(fleet=fleet) as c:
        await c.sees("Could not read the servers: the state folder is gone")
        fleet.look_error = None
        await c.sees("▸ chat")


async def test_while_polls_fail_the_header_says_how_old_the_data_is(console, fakes):
    fleet = fakes.FakeFleet(fakes.chat)
    async with console(fleet=fleet) as c:
        await c.sees("live")
        fleet.look_error = OSError("the state folder is gone")
        await c.sees(" old ")
        assert "live" not in c.text.splitlines()[0]
        fleet.look_error = None
        await c.sees("live")


async def test_the_selected_servers_charts_are_polled(console):
    async with console() as c:
        await c.press("j")
        await c.until(lambda: c.app.snapshot.server("coder").series is not None)
        assert c.app.snapshot.server("chat").series is None


async def test_pause_stops_polling(console):
    async with console() as c:
        await c.press("space")
        await c.sees("paused")
        looks = c.fleet.looks
        await c.press("1", "2", "tab", "slash", "escape")
        assert c.fleet.looks <= looks + 1
        looks = c.fleet.looks
        await c.press("space")
        await c.until(lambda: c.fleet.looks > looks)


async def test_plus_and_minus_change_the_rate(console):
    async with console(refresh=1.0) as c:
        await c.press("plus")
        await c.sees("0.5s")
        await c.press("minus", "minus")
        await c.sees("2s")


def test_a_wrong_key_in_settings_is_refused_with_a_sentence(fakes):
    with pytest.raises(ValueError, match="no action named 'restrat'; did you mean 'restart'"):
        ConsoleApp(fakes.FakeFleet(), keys={"restrat": "R"})
    with pytest.raises(ValueError, match="'s' is assigned to both"):
        ConsoleApp(fakes.FakeFleet(), keys={"restart": "s"})


async def test_a_key_of_ones_own(console):
    async with console(keys={"stop": "S"}) as c:
        await c.press("s")
        assert c.app.screen is c.app.operations
        await c.press("S")
        await c.sees("Stop chat?")
