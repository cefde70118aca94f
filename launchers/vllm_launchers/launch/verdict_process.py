"""Asks the installed engine for its verdict on a plan's flags, in a process that can then become the server.

That process belongs to the server's future keeper (`keeper.prepared_launch`). If the plan is launched unchanged, the
process continues as the server.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from vllm_launchers.keeper.prepared_launch import FirstStart, PreparedLaunch
from vllm_launchers.launch.launch_plan import LaunchPlan
from vllm_launchers.plan.engine_verdict import EngineAnswer, EngineVerdict
from vllm_launchers.prepared.command import prepared_command
from vllm_launchers.procfs import resident_mib
from vllm_launchers.secrets import redact
from vllm_launchers.vllm.engines import EngineKind

LONGEST_SECONDS = 300.0
"""As for a prepared restart: importing vLLM from a cold network file system takes minutes."""


class EngineVerdicts:
    """Prepares one launch at a time. `ask` blocks and needs a thread of its own; the other methods return at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prepared: PreparedLaunch | None = None
        self.unused = ""
        """Why the last launch did not use the prepared process; empty if it did, or if there was none."""

    @property
    def pid(self) -> int | None:
        """The prepared process; None if there is none, or if its pid is not known yet."""
        prepared = self._prepared
        return prepared.pid if prepared is not None and not prepared.over else None

    @property
    def memory_mib(self) -> int | None:
        """Memory of the prepared process in MiB."""
        pid = self.pid
        return resident_mib(pid) if pid is not None else None

    def ask(self, launch: LaunchPlan, folder: Path) -> EngineVerdict | None:
        """The engine's verdict on a plan; None if `close`, a launch, or another call of `ask` came first.

        ``folder`` is the server's future folder. After a positive verdict, the process waits to be launched.
        """
        if why := _why_not(launch):
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
    argv = prepared_command(launch.plan.argv, {**os.environ, **launch.plan.environment})
    return FirstStart(folder.absolute(), argv, launch.spec(), launch.secrets)


def _why_not(launch: LaunchPlan) -> str:
    """Why the engine can't be asked about this plan; empty if it can."""
    if launch.plan.engine.kind is EngineKind.SIMULATED:
        return ""
    if not launch.plan.engine.path:
        return "it is not installed here"
    if not launch.model_here:
        return "the model is not on this machine"
    return ""


def _verdict(message: Mapping[str, Any], prepared: PreparedLaunch) -> EngineVerdict:
    """The verdict that a message says; without one its process has ended, or took too long."""
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
