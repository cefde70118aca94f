"""The launch screen on a recorded host whose GPUs other servers nearly fill."""

from __future__ import annotations

import pytest

from fakes.crowded_host import crowded_host
from vllm_console.fleet.local import LocalFleet
from vllm_console.ui.screens.launch import LaunchScreen
from vllm_launchers.launch import planner

TALL, SMALL = (160, 50), (80, 24)
UTILIZATION = "gpu-memory-utilization"


@pytest.fixture
def screen(host, tmp_path, monkeypatch):
    """On two GPUs of 24 GiB, 2.3 GiB are free on the first and 16.4 on the second."""
    monkeypatch.setattr(planner, "find_engines", lambda _paths: [])
    held = {0: (("editor", 21.1),), 1: (("docs", 7.2),)}
    recorded = crowded_host(tmp_path / "host.json", "2xrtx3090", held)
    fleet = LocalFleet(tmp_path, observe=False, host_file=recorded, interactive=True)
    yield host(lambda: LaunchScreen(fleet, "chatbot"))
    fleet.close()


async def planned(pilot, wait_until):
    await wait_until(pilot, lambda: pilot.app.screen.planner.fresh, "a plan")
    await pilot.pause()


def row(app):
    """The row of the utilization in the settings."""
    return next(line for line in app.text().splitlines() if f"{UTILIZATION} " in line and "→" not in line)


async def test_fix_of_a_launch_without_a_place_is_shown_applied_and_undone(screen, wait_until):
    async with screen.run_test(size=TALL) as pilot:
        await wait_until(pilot, lambda: "can't be launched" in screen.text())
        await screen.sees("would fit with --gpu-memory-utilization 0.67")
        await screen.sees("f fix: gpu-memory-utilization 0.92 → 0.67")
        await pilot.press("tab", "f")
        await planned(pilot, wait_until)
        assert screen.screen.planner.outcome.plan.gpus == (1,)
        await screen.sees("gpu-memory-utilization 0.92 → 0.67")
        assert screen.screen.current == UTILIZATION
        assert "0.67" in row(screen)
        await pilot.press("l")
        await screen.sees("No other layouts to compare.")
        await pilot.press("u")
        await planned(pilot, wait_until)
        assert screen.screen.planner.outcome.plan is None
        assert "0.92" in row(screen)
        assert "0.67" not in row(screen)
        assert "set by you" not in screen.text()


async def test_small_screen_shows_the_fix_below_the_settings(screen, wait_until):
    async with screen.run_test(size=SMALL) as pilot:
        await wait_until(pilot, lambda: "can't be launched" in screen.text())
        await pilot.press("tab")
        await screen.sees("f fix: gpu-memory-utilization 0.92 → 0.67")
