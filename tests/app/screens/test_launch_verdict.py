"""vLLM's own verdict on the launch screen: requested while the user reads the plan, once the flags are stable."""

from __future__ import annotations

import threading

import pytest
from msgspec.structs import replace

from vllm_console.ui.parts import launch_planner
from vllm_console.ui.screens.launch import LaunchScreen
from vllm_launchers.plan.engine_verdict import EngineAnswer, EngineVerdict, with_verdict
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.vllm.flags.changes import Changes

SIZE = (120, 40)
LEARNED = PlanFinding("flag_unknown", Level.ERROR, "vLLM 0.33.0 has no --new-flag", Changes(unset=("new-flag",)))


@pytest.fixture
def fleet(fakes, monkeypatch):
    monkeypatch.setattr(launch_planner, "JUDGE_SECONDS", 0.05)
    monkeypatch.setattr(launch_planner, "REDRAW_SECONDS", 0.05)

    class Fleet(fakes.FakeFleet):
        """Gives a verdict once ``answer`` is set, unless it is stopped before."""

        verdict = EngineVerdict(EngineAnswer.ACCEPTED, version="0.33.0")

        def __init__(self):
            super().__init__()
            self.judge_launches = True
            self.answer = threading.Event()
            self.stopped = threading.Event()
            self.asked = []
            self.at_work = self.most = 0

        def judged_plan(self, request):
            self.stopped.clear()
            self.asked.append(request)
            self.at_work += 1
            self.most = max(self.most, self.at_work)
            while not (self.stopped.wait(0.005) or self.answer.is_set()):
                pass
            self.at_work -= 1
            return with_verdict(self.plan(request), self.verdict) if self.answer.is_set() else None

        def stop_judging(self):
            super().stop_judging()
            self.stopped.set()

    fleet = Fleet()
    yield fleet
    fleet.answer.set()


@pytest.fixture
def screen(host, fleet):
    return host(lambda: LaunchScreen(fleet))


def starts(fleet):
    return [call for call in fleet.calls if call[0] == "start"]


async def test_its_memory_is_shown_until_it_accepts(screen, fleet, wait_until):
    fleet.findings = (LEARNED,)
    fleet.engine_check.memory_mib = 1234
    async with screen.run_test(size=SIZE) as pilot:
        await wait_until(pilot, lambda: "asking vLLM 0.33.0 cuda about these flags… 1,234 MiB" in screen.text())
        assert "has no --new-flag" in screen.text()
        fleet.answer.set()
        await wait_until(pilot, lambda: "✓ ready to launch · vLLM 0.33.0 accepts these flags" in screen.text())
        assert "has no --new-flag" not in screen.text(), "vLLM's verdict replaces the learned one"
        assert "asking" not in screen.text()


async def test_a_refusal_is_a_finding_that_stops_a_launch(screen, fleet, wait_until):
    fleet.verdict = EngineVerdict(EngineAnswer.REFUSED, "unrecognized arguments: --new-flag", "0.33.0")
    fleet.findings = (LEARNED,)
    fleet.answer.set()
    async with screen.run_test(size=SIZE) as pilot:
        await wait_until(pilot, lambda: "vllm_refuses: vLLM 0.33.0 refuses: unrecognized arguments" in screen.text())
        assert "flag_unknown" not in screen.text()
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: "again launches anyway: vLLM 0.33.0 refuses" in screen.text())
        assert not starts(fleet)


async def test_an_engine_that_cannot_be_asked_is_reported_beside_the_findings(screen, fleet, wait_until):
    fleet.verdict = EngineVerdict(EngineAnswer.UNKNOWN, "the model is not on this machine")
    fleet.findings = (replace(LEARNED, level=Level.WARNING),)
    fleet.answer.set()
    async with screen.run_test(size=SIZE) as pilot:
        said = "vLLM 0.33.0 cuda can't be asked about these flags: the model is not on this machine"
        await wait_until(pilot, lambda: said in " ".join(screen.text().replace("│", " ").split()))
        assert "has no --new-flag" in screen.text()


async def test_changed_flags_end_the_question_and_only_the_last_are_asked_about(screen, fleet, wait_until):
    async with screen.run_test(size=SIZE) as pilot:
        await wait_until(pilot, lambda: fleet.at_work)
        planner = screen.screen.planner
        for value in (3, 31, 317):
            planner.draft.edits.put("max-num-seqs", value)
            planner.plan_soon()
        await wait_until(pilot, lambda: len(fleet.asked) == 2, "asked again")
        fleet.answer.set()
        await wait_until(pilot, lambda: "accepts these flags" in screen.text())
    assert [request.changes.set for request in fleet.asked] == [{}, {"max-num-seqs": 317}]
    assert fleet.most == 1


async def test_another_port_is_the_same_question(screen, fleet, wait_until):
    async with screen.run_test(size=SIZE) as pilot:
        await wait_until(pilot, lambda: fleet.at_work)
        planner = screen.screen.planner
        planner.draft.put("port", "8123")
        planner.plan_soon()
        await wait_until(pilot, lambda: planner.fresh)
        fleet.answer.set()
        await wait_until(pilot, lambda: "accepts these flags" in screen.text())
    assert len(fleet.asked) == 1


@pytest.mark.parametrize("key", ["escape", "ctrl+s"], ids=["left", "launched"])
async def test_judging_ends_with_the_screen(screen, fleet, wait_until, key):
    async with screen.run_test(size=SIZE) as pilot:
        await wait_until(pilot, lambda: fleet.at_work)
        await pilot.press(key)
        await wait_until(pilot, lambda: screen.results)
        await wait_until(pilot, lambda: not fleet.at_work)


async def test_nothing_is_asked_where_it_is_off(screen, fleet, wait_until):
    fleet.judge_launches = False
    async with screen.run_test(size=SIZE) as pilot:
        await wait_until(pilot, lambda: "ready to launch" in screen.text())
        assert not screen.screen.planner.asking
    assert not fleet.asked
