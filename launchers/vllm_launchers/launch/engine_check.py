"""Asks the installed engine to check a plan's flags, in a process that can then become the server.

That process belongs to the server's future keeper (`keeper.prepared_launch`). If the plan is launched unchanged, the
process continues as the server.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from vllm_launchers.procfs import resident_mib
from vllm_launchers.secrets import redact
from vllm_launchers.vllm.engines import EngineKind

if TYPE_CHECKING:  # 12 ms at run time; every command has an EngineCheck, and few use it
    from vllm_launchers.keeper.prepared_launch import FirstStart, PreparedLaunch
    from vllm_launchers.launch.launch_plan import LaunchPlan
    from vllm_launchers.plan.engine_verdict import EngineVerdict
    from vllm_launchers.plan.model import Plan

LONGEST_SECONDS = 300.0
"""As for a prepared restart: importing vLLM from a cold network file system takes minutes."""


class EngineCheck:
    """Checks one plan at a time, and applies the newest verdict to plans with the same flags.

    `ask` blocks and needs a thread of its own; the other methods return at once.
    """

    def __init__(self, refuse_read_only: Callable[[], None]) -> None:
        self._refuse_read_only = refuse_read_only
        self._lock = threading.Lock()
        self._prepared: PreparedLaunch | None = None
        self._newest: tuple[Hashable, EngineVerdict] | None = None
        self.unused = ""
        """Why the last launch did not use the prepared process; empty if it did, or if there was none."""

    @property
    def pids(self) -> tuple[int, ...]:
        """The pid of the prepared process; empty if there is none, or if it is not known yet."""
        prepared = self._prepared
        pid = prepared.pid if prepared is not None and not prepared.over else None
        return (pid,) if pid is not None else ()

    @property
    def memory_mib(self) -> int | None:
        """Memory of the prepared process in MiB; None if there is none or it is unknown."""
        return next(map(resident_mib, self.pids), None)

    def ask(self, launch: LaunchPlan, folder: Path, *, elsewhere: bool = False) -> EngineVerdict | None:
        """The engine's verdict on a plan; None if `close`, a launch, or another call of `ask` came first.

        ``folder`` is the server's future folder; ``elsewhere``: the plan is for a recorded host. After a positive
        verdict, the process waits to be launched.

        Raises:
            RefusedError: this console is read-only.
        """
        self._refuse_read_only()
        from vllm_launchers.keeper.prepared_launch import PreparedLaunch
        from vllm_launchers.plan.engine_verdict import EngineAnswer, EngineVerdict

        if why := _why_not(launch, elsewhere=elsewhere):
            return EngineVerdict(EngineAnswer.UNKNOWN, why)
        start = _start(launch, folder)
        if not start.argv:
            return EngineVerdict(EngineAnswer.UNKNOWN, "its command may do more than run vLLM")
        try:
            with self._lock:
                self._end()
                prepared = self._prepared = PreparedLaunch(start)
        except OSError as error:
            return EngineVerdict(EngineAnswer.UNKNOWN, f"its process could not be started: {error.strerror}")
        message = prepared.wait(LONGEST_SECONDS, "judged", "refused", "unprepared")
        with self._lock:
            if self._prepared is not prepared:
                return None
            verdict = _verdict(message, prepared)
            if verdict.answer is not EngineAnswer.ACCEPTED:
                self._end()
        return replace(verdict, message=redact(verdict.message, tuple(launch.secrets.values())))

    def keep(self, plan: Plan, verdict: EngineVerdict) -> None:
        """Apply this verdict to all plans with the same flags from now on."""
        from vllm_launchers.plan.engine_verdict import question

        self._newest = question(plan), verdict

    def with_verdict(self, plan: Plan) -> Plan:
        """The plan with the newest verdict, if that is about the same flags."""
        newest = self._newest
        if newest is None:
            return plan
        from vllm_launchers.plan.engine_verdict import question, with_verdict

        return with_verdict(plan, newest[1]) if newest[0] == question(plan) else plan

    def take(self, launch: LaunchPlan, folder: Path) -> PreparedLaunch | None:
        """What was prepared, for the launch of this plan; None, and it is ended, if that is another start by now."""
        with self._lock:
            prepared, self._prepared = self._prepared, None
        self.unused = ""
        if prepared is None:
            return None
        self.unused = prepared.start.difference(_start(launch, folder)) or ("" if prepared.usable else "it has ended")
        if not self.unused:
            return prepared
        prepared.end()
        return None

    def close(self) -> None:
        """End what is prepared: nobody waits for it any more."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._prepared is not None:
            self._prepared.end()
            self._prepared = None


def _start(launch: LaunchPlan, folder: Path) -> FirstStart:
    from vllm_launchers.keeper.prepared_launch import FirstStart
    from vllm_launchers.prepared.command import prepared_command

    argv = prepared_command(launch.plan.argv, {**os.environ, **launch.plan.environment})
    return FirstStart(folder.absolute(), argv, launch.spec(), launch.secrets)


def _why_not(launch: LaunchPlan, *, elsewhere: bool) -> str:
    """Why the engine can't be asked about this plan; empty if it can."""
    if launch.plan.engine.kind is EngineKind.SIMULATED:
        return ""
    if elsewhere:
        return "the plan is for a recorded host"
    if not launch.plan.engine.path:
        return "it is not installed here"
    if not launch.model_here:
        return "the model is not on this machine"
    return ""


def _verdict(message: Mapping[str, Any], prepared: PreparedLaunch) -> EngineVerdict:
    """The verdict that a message says; without one its process has ended, or took too long."""
    from vllm_launchers.plan.engine_verdict import EngineAnswer, EngineVerdict

    text, version = str(message.get("message") or ""), prepared.version
    match message.get("step"):
        case "judged":
            return EngineVerdict(EngineAnswer.ACCEPTED, "", version, parser_only=message.get("config_checked") is False)
        case "refused":
            return EngineVerdict(EngineAnswer.REFUSED, text, version)
        case "unprepared":
            return EngineVerdict(EngineAnswer.UNKNOWN, text, version)
    late = f"it took more than {LONGEST_SECONDS:g}s"
    return EngineVerdict(
        EngineAnswer.UNKNOWN, "its process ended before it answered" if prepared.over else late, version
    )
