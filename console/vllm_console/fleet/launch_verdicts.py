"""The engine's own verdict on the launch that is being planned: the newest one, kept for its flags."""

from __future__ import annotations

from collections.abc import Hashable

from msgspec.structs import replace

from vllm_console.fleet.failure import diagnosed
from vllm_launchers.launch.engine_verdict import EngineVerdicts
from vllm_launchers.launch.resolve import LaunchPlan
from vllm_launchers.plan.model import EngineKind, Plan
from vllm_launchers.plan.verdict import Answer, Verdict, question, with_verdict


class LaunchVerdicts:
    """Asks for verdicts and applies them to plans with the same flags."""

    def __init__(self) -> None:
        self._asked = EngineVerdicts()
        self._newest: tuple[Hashable, Verdict] | None = None

    @property
    def memory_mib(self) -> int | None:
        """The memory of the process that is at work; None if none is, or not known yet."""
        return self._asked.memory_mib

    def ask(self, launch: LaunchPlan, *, elsewhere: bool) -> bool:
        """Ask the engine about a plan, for a recorded host if ``elsewhere``; False if another question came first."""
        if elsewhere and launch.plan.engine.kind is EngineKind.VLLM:
            verdict: Verdict | None = Verdict(Answer.UNKNOWN, "the plan is for a recorded host")
        else:
            verdict = self._asked.ask(launch)
        if verdict is None:
            return False
        if verdict.answer is Answer.REFUSED:
            fixes = diagnosed(verdict.message.splitlines(), None, launch.details).fixes
            fix = next((one.changes for one in fixes if not one.changes.empty), None)
            verdict = replace(verdict, fix=fix)
        self._newest = question(launch.plan), verdict
        return True

    def judged(self, plan: Plan) -> Plan:
        """The plan with the newest verdict, if that is about the same flags."""
        newest = self._newest
        return with_verdict(plan, newest[1]) if newest is not None and newest[0] == question(plan) else plan

    def close(self) -> None:
        """End what is at work."""
        self._asked.end()
