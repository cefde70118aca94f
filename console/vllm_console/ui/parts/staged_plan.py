"""Plans staged changes before a restart: do they fit, and what happens to the KV cache?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from rich.style import Style

from vllm_console.fleet.snapshot import ServerView
from vllm_console.text import count, plain, shortened
from vllm_console.ui.parts.staging import Staging
from vllm_console.ui.theme import BAD, DIM, OK, WARN
from vllm_console.ui.threads import begin_worker, in_thread
from vllm_launchers.errors import OperationError
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.plan.model import Plan
from vllm_launchers.vllm.flags.changes import Changes, Edits

if TYPE_CHECKING:
    from vllm_console.fleet.local import LocalFleet
    from vllm_console.ui.app import ConsoleApp

DEBOUNCE_SECONDS = 0.2

AGAIN_SECONDS = 300.0
"""Time between verdicts on changes that stay staged, since memory is taken and freed meanwhile."""

PLAN_SECONDS = 60.0
"""How long the plan of the running flags is compared with; a later difference may not be due to the staged changes."""

CHECKING = "checking whether it fits…"

_Running = tuple[int, str]
"""A server's generation and preset; a verdict is valid only for these."""


class PlanVerdict(msgspec.Struct, frozen=True):
    """The plan's verdict on a staged change. ``refused``: a restart with it would fail or is impossible.

    ``warning`` is the part of the message that warns, if any.
    """

    message: str
    style: Style
    refused: bool = False
    certain: bool = False
    """Whether the engine would certainly exit with these flags."""
    warning: str = ""

    @property
    def shorter(self) -> list[str]:
        """The message and ever shorter versions of it; the shortest keeps the refusal or warning."""
        if self.refused:
            return [*shortened(self.message), self.message.partition(":")[0]]
        return [self.message, *shortened(self.warning)] if self.warning else shortened(self.message)


class _Judged(msgspec.Struct):
    """The latest verdict on a server's staged changes, and when it was asked for (monotonic seconds)."""

    running: _Running
    staged: Edits
    verdict: PlanVerdict
    at: float


class StagedPlans:
    """Plans each server's staged changes and keeps the verdicts up to date; calls ``changed`` for each new one."""

    def __init__(self, console: ConsoleApp, staging: Staging, changed: Callable[[ServerView, Edits], None]) -> None:
        self._console, self._staging, self._changed = console, staging, changed
        self.by_server: dict[str, _Judged] = {}
        self.plans: dict[str, tuple[_Running, Plan, float]] = {}
        """The plan of the running flags, by server, and when it was made (monotonic seconds)."""

    def of(self, server: ServerView) -> PlanVerdict | None:
        """The verdict on a server's staged changes; None if there are none."""
        staged = self._staging.of(server.name)
        if not staged:
            return None
        known = self.by_server.get(server.name)
        if known is not None and (known.running, known.staged) == (_running(server), staged):
            return known.verdict
        return PlanVerdict(CHECKING, DIM)

    def judge_soon(self, name: str) -> None:
        """Plan a server's staged changes after the debounce time."""
        begin_worker(self._console, partial(self._judge, name), "verdict", f"verdict {name}")

    def drop(self, name: str) -> None:
        """Forget a removed server."""
        self.by_server.pop(name, None)
        self.plans.pop(name, None)

    def observe(self, servers: Sequence[ServerView]) -> None:
        """Plan again for servers with a new generation or an old verdict."""
        now = time.monotonic()
        for server in servers:
            known = self.by_server.get(server.name)
            if known is not None and known.running != _running(server):
                del self.by_server[server.name]
                self.judge_soon(server.name)
            elif known is not None and now - known.at >= AGAIN_SECONDS:
                known.at = now
                self.judge_soon(server.name)

    async def _judge(self, name: str) -> None:
        await asyncio.sleep(DEBOUNCE_SECONDS)
        server, staged = self._console.server(name), self._staging.of(name)
        if server is None or not staged:
            return
        running, at, known = _running(server), time.monotonic(), self.plans.get(name)
        if known is None or known[0] != running or at - known[2] >= PLAN_SECONDS:
            known = None
        try:
            call = partial(ask_verdict, self._console.fleet, name, Changes.of(staged), known[1] if known else None)
            before, found = await in_thread(call, "verdict")
            self.plans[name] = known or (running, before, at)
        except OperationError as error:
            why = plain(str(error).splitlines()[0] if str(error) else "can't be planned")
            found = PlanVerdict(why, WARN, refused=True)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: shown on the screen
            found = PlanVerdict(f"unknown whether it fits: {plain(str(error))}", DIM)
        self.by_server[name] = _Judged(running, staged, found, at)
        self._changed(server, staged)


def _running(server: ServerView) -> _Running:
    return server.generation, server.preset


def ask_verdict(fleet: LocalFleet, name: str, changes: Changes, now: Plan | None) -> tuple[Plan, PlanVerdict]:
    """Plan a server's restart with and without a change; blocks. ``now`` is the plan without it, if known.

    Raises:
        OperationError: the restart can't be planned.
    """
    before = now or fleet.plan_restart(name, Changes())
    return before, verdict(before, fleet.plan_restart(name, changes))


def verdict(before: Plan, after: Plan) -> PlanVerdict:
    """Whether the change fits, and the KV cache size in tokens before and after."""
    known = {(finding.code, finding.level) for finding in before.findings}
    new = [finding for finding in after.findings if (finding.code, finding.level) not in known]
    errors = [finding for finding in after.findings if finding.level is Level.ERROR]
    if errors:
        worst = (_of_level(new, Level.ERROR) or errors)[0]
        outcome = "will not start" if worst.surely else "unlikely to start"
        reason = plain(worst.message)
        reason = reason.partition(" will not start: ")[2] or reason
        return PlanVerdict(f"{outcome}: {reason}", BAD, refused=True, certain=worst.surely)
    tokens = _tokens(before, after)
    warned = _of_level(new, Level.WARNING)
    warning = _message(warned[0]) if warned else ""
    if after.memory is None:
        unknown = "unknown whether it fits: not enough model or GPU data"
        return PlanVerdict("; ".join(filter(None, (unknown, warning))), DIM, warning=warning)
    fits = "fits" if after.memory.source == "engine" else "fits (estimate)"
    message = "; ".join(filter(None, (fits, tokens, warning)))
    return PlanVerdict(message, WARN if warned else OK, warning=warning)


def _message(finding: PlanFinding) -> str:
    """The finding's message, without advice to undo the change being planned."""
    message = plain(finding.message)
    return message.partition(": set ")[0] if finding.code == "gpus_unused" else message


def _of_level(findings: list[PlanFinding], level: Level) -> list[PlanFinding]:
    return [finding for finding in findings if finding.level is level]


def _concurrency(before: Plan, after: Plan) -> str:
    """The change in concurrency of full-length requests; empty if it is small or unknown."""
    old, new = (plan.memory.max_concurrency if plan.memory is not None else None for plan in (before, after))
    if old is None or new is None or abs(new - old) < 0.05 * old:
        return ""
    return f", full-length concurrency {old:.0f} → {new:.0f}"


def _tokens(before: Plan, after: Plan) -> str:
    old = before.memory.kv_tokens if before.memory is not None else None
    new = after.memory.kv_tokens if after.memory is not None else None
    if new is None:
        return ""
    exact = after.memory is not None and after.memory.source == "engine"
    tokens = f"{'' if exact else 'about '}{count(new)} tokens"  # vLLM measures the rest at its start
    if old is None:
        return f"KV cache {tokens}"
    if abs(new - old) < 0.005 * max(old, 1):
        return f"KV cache stays at {tokens}{_concurrency(before, after)}"
    return f"KV cache {count(old)} → {tokens}"
