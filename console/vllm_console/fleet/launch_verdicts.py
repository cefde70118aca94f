"""The launch that is being planned: prepared, with the engine's own verdict, the newest one kept for its flags."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path

from msgspec.structs import replace

from vllm_console.fleet.failure import diagnosed
from vllm_launchers.keeper.prepared_launch import PreparedLaunch
from vllm_launchers.launch.engine_verdict import EngineVerdicts
from vllm_launchers.launch.resolve import LaunchPlan
from vllm_launchers.plan.model import EngineKind, Plan
from vllm_launchers.plan.verdict import Answer, Verdict, question, with_verdict


class LaunchVerdicts:
    """Prepares launches, asks for verdicts and applies them to plans with the same flags."""

    def __init__(self) -> None:
        self._asked = EngineVerdicts()
        self._newest: tuple[Hashable, Verdict] | None = None

    @property
    def pid(self) -> int | None:
        """The process that is prepared; None if there is none, or it is not known yet."""
        return self._asked.pid

    @property
    def memory_mib(self) -> int | None:
        """Its memory."""
        return self._asked.memory_mib

    @property
    def unused(self) -> str:
        """Why the last launch did not use what was prepared; empty if it did, or nothing was."""
        return self._asked.unused

    def ask(self, launch: LaunchPlan, folder: Path, *, elsewhere: bool) -> bool:
        """Ask the engine about a plan, for a recorded host if ``elsewhere``; False if another question came first."""
        if elsewhere and launch.plan.engine.kind is EngineKind.VLLM:
            verdict: Verdict | None = Verdict(Answer.UNKNOWN, "the plan is for a recorded host")
        else:
            verdict = self._asked.ask(launch, folder)
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

    def take(self, launch: LaunchPlan, folder: Path) -> PreparedLaunch | None:
        """What was prepared, for this launch; None if that is another one by now."""
        return self._asked.take(launch, folder)

    def close(self) -> None:
        """End what is prepared."""
        self._asked.end()
