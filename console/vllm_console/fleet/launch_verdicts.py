"""The engine's verdicts on planned launches, and the process that accepted the flags and waits to be launched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:
    from vllm_launchers.keeper.prepared_launch import PreparedLaunch
    from vllm_launchers.launch.launch_plan import LaunchPlan
    from vllm_launchers.launch.verdict_process import EngineVerdicts
    from vllm_launchers.plan.engine_verdict import EngineVerdict
    from vllm_launchers.plan.model import Plan


class LaunchVerdicts:
    """Asks vLLM for verdicts on plans, one at a time, and applies the newest one to plans with the same flags.

    `request` blocks and needs a thread of its own; the others return at once.
    """

    def __init__(self, refuse_read_only: Callable[[], None]) -> None:
        self._refuse_read_only = refuse_read_only
        self._lock = threading.Lock()
        self._engine: EngineVerdicts | None = None
        """None until the first request: most commands and consoles ask for no verdict."""
        self._newest: tuple[Hashable, EngineVerdict] | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """The pid of the process that checks flags or waits to be launched, if any."""
        pid = self._engine.pid if self._engine is not None else None
        return (pid,) if pid is not None else ()

    @property
    def memory_mib(self) -> int | None:
        """Memory of that process; None if there is none or it is unknown."""
        return self._engine.memory_mib if self._engine is not None else None

    @property
    def unused(self) -> str:
        """Why the last launch did not use the prepared process; empty if it did, or there was none."""
        return self._engine.unused if self._engine is not None else ""

    def request(self, launch: LaunchPlan, folder: Path, *, elsewhere: bool = False) -> bool:
        """Ask the engine about a plan (for a recorded host if ``elsewhere``); False if replaced by another request.

        ``folder`` is the server's future folder.

        Raises:
            RefusedError: this console is read-only.
        """
        self._refuse_read_only()
        from vllm_console.fleet.failure import diagnosed
        from vllm_launchers.launch.verdict_process import EngineVerdicts
        from vllm_launchers.plan.engine_verdict import EngineAnswer, EngineVerdict, question
        from vllm_launchers.vllm.engines import EngineKind

        with self._lock:
            self._engine = self._engine or EngineVerdicts()
        if elsewhere and launch.plan.engine.kind is EngineKind.VLLM:
            verdict: EngineVerdict | None = EngineVerdict(EngineAnswer.UNKNOWN, "the plan is for a recorded host")
        else:
            verdict = self._engine.ask(launch, folder)
        if verdict is None:
            return False
        if verdict.answer is EngineAnswer.REFUSED:
            fixes = diagnosed(verdict.message.splitlines(), None, launch.details).fixes
            fix = next((one.changes for one in fixes if not one.changes.empty), None)
            verdict = replace(verdict, fix=fix)
        self._newest = question(launch.plan), verdict
        return True

    def judged(self, plan: Plan) -> Plan:
        """The plan with the newest verdict, if that is about the same flags."""
        newest = self._newest
        if newest is None:
            return plan
        from vllm_launchers.plan.engine_verdict import question, with_verdict

        return with_verdict(plan, newest[1]) if newest[0] == question(plan) else plan

    def take(self, launch: LaunchPlan, folder: Path) -> PreparedLaunch | None:
        """The process prepared for the launch of this plan; None, and it is ended, if it is for another start."""
        return self._engine.take(launch, folder) if self._engine is not None else None

    def close(self) -> None:
        """End the process that checks flags or waits to be launched."""
        if self._engine is not None:
            self._engine.close()
