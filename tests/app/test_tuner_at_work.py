"""A running tuner: shown above the panes, its restarts are its own, and keys that change the server warn."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from vllm_launchers.vllm.flags.changes import Changes

WARNING = "! A tuner is running (trial 2 of 4: max-num-seqs 256 → 128, max-num-batched-tokens 2048 → 8192): if you"


@pytest.fixture
def fleet(fakes):
    """One server; a tuner runs on it while ``tuning``, and clients send requests while ``busy``."""

    class Fleet(fakes.FakeFleet):
        def __init__(self):
            self.tuning, self.busy = True, True
            super().__init__(self.server)

        def server(self, at):
            server = fakes.tuned(at)
            if not self.busy:
                idle = {"requests_running": 0.0, "requests_waiting": 0.0, "requests_per_second": 0.0}
                server = replace(server, window=replace(server.window, **idle))
            return server if self.tuning else replace(server, tuner=None)

    return Fleet()


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (60, 15)])
async def test_tuner_is_shown_while_it_runs(console, fleet, size):
    async with console(fleet=fleet, size=size) as c:
        await c.sees("± chat  tuner 2/4: measuring")
        await c.sees("tuning 2/4")
        fleet.tuning = False
        await c.lacks("tuner 2/4")
        await c.lacks("tuning")


@pytest.mark.parametrize(
    ("size", "text"), [((80, 24), "preempting (tuner): 7.2% (limit 2.0%)"), ((120, 40), "(a tuner is running): 18")]
)
async def test_a_finding_says_that_a_tuner_is_at_work(console, fleet, size, text):
    async with console(fleet=fleet, size=size) as c:
        await c.sees(text)
        await c.press("i")
        await c.sees("A tuner is running (pid 4711): this may be due to its load.")
        await c.press("escape")
        fleet.tuning = False
        await c.lacks(text)


def test_a_finding_says_that_a_load_test_runs_unless_load_is_not_why(fakes):
    server = replace(fakes.pressed(fakes.NOW), load_test=12)
    assert server.load_behind("preempting") == ("a load test is running", 12)
    assert server.load_behind("pcie_narrow") is None
    assert replace(server, moment=fakes.NOW - 600).load_behind("preempting") is None


@pytest.mark.parametrize("busy", [True, False])
async def test_a_restart_warns_of_a_tuner_at_work(console, fleet, busy):
    fleet.busy = busy
    async with console(fleet=fleet, size=(160, 40)) as c:
        await c.press("r")
        await c.sees("Restart chat?")
        await c.sees(WARNING)
        await c.sees("Ctrl+c in its terminal (pid 4711) ends it with the original flags.")
        fleet.tuning = False
        await c.lacks("A tuner is running")
        await c.press("y")
        await c.until(lambda: fleet.calls == [("restart", "chat", Changes())])


async def test_a_stop_warns_of_a_tuner_at_work(console, fleet):
    async with console(fleet=fleet, size=(160, 40)) as c:
        await c.press("s")
        await c.sees("Stop chat?")
        await c.sees(WARNING)
        await c.press("n")
        await c.lacks("Stop chat?")
        assert fleet.calls == []


async def test_a_load_beside_a_tuner_asks_first(console, fleet):
    async with console(fleet=fleet) as c:
        await c.press("b")
        await c.sees("A tuner is measuring chat. Send a load anyway?")
        await c.press("n")
        await c.lacks("anyway?")
        assert fleet.calls == []
