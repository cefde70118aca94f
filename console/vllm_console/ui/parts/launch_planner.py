"""Plans a launch while it is edited; changes are debounced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from textual.dom import DOMNode
from textual.timer import Timer

from vllm_console.ui.parts.flag_catalog import FlagCatalog
from vllm_console.ui.parts.launch_draft import LaunchDraft
from vllm_console.ui.threads import answer_for, begin_worker, failure, woken
from vllm_launchers.errors import OperationError
from vllm_launchers.launch.errors import NoPlaceError
from vllm_launchers.launch.request import LaunchRequest
from vllm_launchers.plan.engine_verdict import EngineAnswer, EngineVerdict, with_verdict
from vllm_launchers.plan.findings import PlanFinding
from vllm_launchers.plan.model import Plan
from vllm_launchers.vllm.flags.changes import Changes, Flags
from vllm_launchers.vllm.flags.flag_table import FlagTable

if TYPE_CHECKING:
    from vllm_console.fleet.local import LocalFleet

DEBOUNCE_SECONDS = 0.12
"""Debounce time before a change is planned."""

JUDGE_SECONDS = 1.0
"""Debounce time before the engine checks a plan's flags, which needs a separate process."""

REDRAW_SECONDS = 1.0
"""How often to update that process's memory usage on screen."""


class PlanOutcome(msgspec.Struct, frozen=True):
    """The result of planning: a plan, or a sentence that says why there is none; neither while planning.

    ``fix`` is a change of flags with which there is a plan that fits, ``flags`` the values that it changes.
    """

    plan: Plan | None = None
    error: str = ""
    fix: Changes | None = None
    flags: Flags = msgspec.field(default_factory=dict)

    @property
    def findings(self) -> tuple[PlanFinding, ...]:
        """Problems of the plan, worst first."""
        return self.plan.findings if self.plan is not None else ()


class LaunchPlanner:
    """Owns the draft of a launch and keeps its plan up to date.

    ``screen`` runs timers and workers. ``invalidated`` is called when the draft has changed, ``planned`` when its plan
    is ready, ``redraw`` when there is news about the engine's verdict.
    """

    def __init__(
        self,
        screen: DOMNode,
        fleet: LocalFleet,
        invalidated: Callable[[], None],
        planned: Callable[[], None],
        redraw: Callable[[], None],
    ) -> None:
        self._screen, self._fleet = screen, fleet
        self._invalidated, self._planned, self._redraw = invalidated, planned, redraw
        self.draft: LaunchDraft | None = None
        self.outcome = PlanOutcome()
        self.fresh = False
        """Whether the outcome belongs to the current draft."""
        self.catalog = FlagCatalog()
        self._due = asyncio.Event()
        """Ends the debounce time of the pending planning."""
        self._asked: Hashable = None
        """Identifies the start that is prepared or about to be; None if there is none."""
        self._redrawing: Timer | None = None
        """Updates the memory usage of that process."""

    def plan_soon(self, tried: LaunchDraft | None = None) -> None:
        """Plan the draft, or ``tried``, after the debounce time. Until then, the previous plan is shown."""
        self.fresh = False
        self._due = asyncio.Event()
        begin_worker(self._screen, partial(self._plan, tried, self._due), "plan", "plan")
        self._invalidated()

    def plan_now(self) -> None:
        """Run a pending planning now."""
        self._due.set()

    async def _plan(self, tried: LaunchDraft | None, due: asyncio.Event) -> None:
        await woken(due, DEBOUNCE_SECONDS)
        if self.draft is None:
            return
        request = (tried or self.draft).request()
        try:
            call = partial(self._ask, request, self.catalog.table, self.outcome.plan)
            plan, table, name = await answer_for(self._screen, call, "plan")
            self.outcome = PlanOutcome(self.draft.planned(plan, name))
            if table is not self.catalog.table:
                self.catalog = FlagCatalog(table)
        except OperationError as error:
            self.outcome = _refusal(self.draft, error)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: shown on the screen
            self.outcome = PlanOutcome(error=f"planning failed: {error}")
        self.fresh = True
        self._judge_soon(request)
        self._planned()

    def _ask(self, request: LaunchRequest, table: FlagTable, before: Plan | None) -> tuple[Plan, FlagTable, str]:
        """The plan, its engine's flags (reread until they come from the installation), and the server's name."""
        plan = self._fleet.plan(request)
        known = table.source == "installation"
        if not known or before is None or before.engine != plan.engine:
            table = self._fleet.flags(plan.engine)
        return plan, table, self._fleet.launch_name(request)

    # -- preparing the launch --------------------------------------------------------------------------------------

    @property
    def asking(self) -> str:
        """Status of the engine's verdict and of the prepared process; empty without one."""
        plan = self.outcome.plan
        if self._asked is None or plan is None:
            return ""
        memory = self._fleet.engine_check.memory_mib
        if plan.verdict is not None:
            return f"prepared, {memory:,} MiB" if memory is not None else ""
        return f"asking {plan.engine.label} about these flags…{f' {memory:,} MiB' if memory is not None else ''}"

    def stop_judging(self) -> None:
        """End the prepared process because the plan changed."""
        if self._asked is not None:
            self.hand_over()
            self._fleet.engine_check.close()

    def hand_over(self) -> None:
        """Forget the prepared process, which the launch takes over or ends."""
        self._asked = None
        if self._redrawing is not None:
            self._redrawing.stop()
            self._redrawing = None

    def _judge_soon(self, request: LaunchRequest) -> None:
        """Ask the engine about the plan after a delay, unless that is pointless or already in progress."""
        plan = self.outcome.plan
        wanted = None
        if plan is not None and self._fleet.judge_launches:
            useless = plan.verdict is not None and plan.verdict.answer is not EngineAnswer.ACCEPTED
            wanted = _start_of(plan, request.name) if not useless else None
        if wanted is not None and wanted == self._asked:
            return
        self.stop_judging()
        if wanted is not None:
            self._asked = wanted
            begin_worker(self._screen, partial(self._judge, request, wanted), "judge", "judge")

    async def _judge(self, request: LaunchRequest, asked: Hashable) -> None:
        await asyncio.sleep(JUDGE_SECONDS)
        if self._asked != asked:
            return  # the draft was launched meanwhile
        self._redrawing = self._screen.set_interval(REDRAW_SECONDS, self._redraw)
        try:
            judged = await answer_for(self._screen, partial(self._fleet.judged_plan, request), "judge")
            same = judged is not None and _start_of(judged, request.name) == asked
            verdict = judged.verdict if judged is not None and same else None
        except Exception as error:  # noqa: BLE001 - the thread's boundary: shown on the screen
            verdict = EngineVerdict(EngineAnswer.UNKNOWN, failure(error, "unexpected error").partition("\n")[0])
        if self._asked != asked:
            return  # superseded by another request
        if verdict is None or verdict.answer is not EngineAnswer.ACCEPTED:
            self.stop_judging()
        if verdict is not None and self.outcome.plan is not None:
            self.outcome = PlanOutcome(with_verdict(self.outcome.plan, verdict))
        self._redraw()


def _refusal(draft: LaunchDraft, error: OperationError) -> PlanOutcome:
    text, fix = draft.refused(error), error.fix if isinstance(error, NoPlaceError) else None
    values = {name: draft.value(name) for name in fix.set} if fix is not None else {}
    return PlanOutcome(error=text, fix=fix, flags={name: value for name, value in values.items() if value is not None})


def _start_of(plan: Plan, name: str | None) -> Hashable:
    """Everything that a prepared process depends on."""
    return plan.engine, plan.argv, tuple(sorted(plan.environment.items())), name
