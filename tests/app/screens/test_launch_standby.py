"""The launch screen's choice of a server for which to be the standby."""

from __future__ import annotations

from msgspec.structs import replace

from vllm_console.fleet.snapshot import ServerView
from vllm_console.fleet.standby import possible_partners
from vllm_console.ui.screens.launch import LaunchScreen
from vllm_launchers.keeper.records import State
from vllm_launchers.launch.request import LaunchRequest

TALL = (160, 50)
TO_STANDBY = ("tab", "down", "down", "down", "down", "down")


def planning(fakes):
    """A fleet that keeps the requests that it plans."""

    class Fleet(fakes.FakeFleet):
        def __init__(self) -> None:
            super().__init__()
            self.requests = []

        def plan(self, request: LaunchRequest):
            self.requests.append(request)
            return super().plan(request)

    return Fleet()


async def test_space_takes_the_next_server_and_the_launch_names_it(host, wait_until, fakes):
    fleet = planning(fakes)
    app = host(lambda: LaunchScreen(fleet, partners=["chat", "coder"]))
    async with app.run_test(size=TALL) as pilot:
        await wait_until(pilot, lambda: "standby of" in app.text())
        await pilot.press(*TO_STANDBY)
        await wait_until(pilot, lambda: "next server with sleep mode" in app.text())
        await pilot.press("space", "space")
        await wait_until(pilot, lambda: fleet.requests and fleet.requests[-1].standby_of == "coder")
        assert not fleet.requests[-1].gpus
        assert not fleet.requests[-1].place
        await pilot.press("space")
        await wait_until(pilot, lambda: not fleet.requests[-1].standby_of and fleet.requests[-1].place == "offered")


async def test_where_no_server_can_sleep_there_is_no_such_field(host, wait_until, fakes):
    app = host(lambda: LaunchScreen(fakes.FakeFleet()))
    async with app.run_test(size=TALL) as pilot:
        await wait_until(pilot, lambda: "first free" in app.text() or "port" in app.text())
        await app.lacks("standby of")


def test_only_ones_own_servers_that_run_with_sleep_mode_and_alone_are_offered():
    sleeps = ServerView("a", State.READY, 0.0, flags={"enable-sleep-mode": True})
    servers = [
        sleeps,
        replace(sleeps, name="b", state=State.ASLEEP),
        replace(sleeps, name="c", flags={}),
        replace(sleeps, name="d", flags={"enable-sleep-mode": False}),
        replace(sleeps, name="e", partner="f"),
        replace(sleeps, name="g", ours=False),
        replace(sleeps, name="h", state=State.STOPPED),
        replace(sleeps, name="i", elsewhere="on other, another machine"),
    ]
    assert possible_partners(servers) == ["a", "b"]
