"""The launch screen's planning: every change is planned once it has stood for a moment, and launched after a look."""

from __future__ import annotations

from functools import partial

from rich.style import Style
from textual.screen import Screen
from textual.timer import Timer

from vllm_console.fleet.api import Fleet, FleetError
from vllm_console.fleet.model import LaunchRequest, ServerView
from vllm_console.text import plain
from vllm_console.ui.flag_book import FlagBook
from vllm_console.ui.launch_draft import LaunchDraft
from vllm_console.ui.screens.launch_lines import Outcome
from vllm_console.ui.screens.launch_plan_lines import command_text, fix_words
from vllm_console.ui.theme import BAD, WARN
from vllm_console.ui.threads import answer_for
from vllm_launchers.machine.flags.model import FlagTable
from vllm_launchers.plan.findings import Finding, Level
from vllm_launchers.plan.model import Plan

DEBOUNCE_SECONDS = 0.12
"""How long a choice must stand before it is planned."""

LAUNCH, LEAVE = "launch", "leave"
"""What one more press of the same key does, after a warning."""


class LaunchPlanning(Screen[ServerView | None]):
    """Keeps the outcome of the choices up to date, and launches it. What it shows, and its keys, are the screen's."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        self._fleet = fleet
        self._draft: LaunchDraft | None = None
        self._outcome = Outcome()
        self._fresh = False
        """Whether the outcome is that of what stands now."""
        self._book = FlagBook()
        self._selected = 0
        """Which finding is looked at."""
        self._said: tuple[str, Style | None] = ("", None)
        self._launching = self._launch_next = False
        self._armed = ""
        self._timer: Timer | None = None

    def redraw(self) -> None:
        """Draw all of it anew."""
        raise NotImplementedError

    @property
    def typing(self) -> bool:
        """Whether a value is being typed."""
        raise NotImplementedError

    def _say(self, text: str, style: Style | None = None) -> None:
        self._said = (plain(text), style)

    # -- planning --------------------------------------------------------------------------------------------------

    def plan_soon(self, draft: LaunchDraft | None = None) -> None:
        """Plan what stands now, or ``draft``, once it has stood for a moment. Until then the plan before is shown."""
        self._fresh, self._armed, self._launch_next = False, "", False
        self._stop_timer()
        self._timer = self.set_timer(DEBOUNCE_SECONDS, partial(self._start_planning, draft))
        self.redraw()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.stop()
            self._timer = None

    def _start_planning(self, draft: LaunchDraft | None = None) -> None:
        self._stop_timer()
        chosen = draft or self._draft
        if chosen is not None:
            self.run_worker(self._plan(chosen.request()), name="plan", exclusive=True, group="plan")

    async def _plan(self, request: LaunchRequest) -> None:
        assert self._draft is not None
        try:
            plan, table = await answer_for(
                self, partial(self._look, request, self._book.table, self._outcome.plan), "plan"
            )
            self._outcome = Outcome(self._draft.planned(plan))
            if table is not self._book.table:
                self._book = FlagBook(table)
        except FleetError as error:
            self._outcome = Outcome(error=self._draft.refused(error))
        except Exception as error:  # noqa: BLE001 - the thread's boundary: said on the screen
            self._outcome = Outcome(error=f"this could not be planned: {error}")
        self._fresh = True
        self._selected = min(self._selected, max(0, len(self._outcome.findings) - 1))
        if self._launch_next:
            self._launch_planned()
        self.redraw()

    def _look(
        self, request: LaunchRequest, table: FlagTable | None, before: Plan | None
    ) -> tuple[Plan, FlagTable | None]:
        """The plan, and the flags of its engine: asked for again until they are known from the installation itself."""
        plan = self._fleet.plan(request)
        known = table is not None and table.source == "installation"
        if not known or before is None or before.engine != plan.engine:
            table = self._fleet.flags(plan.engine)
        return plan, table

    # -- launching -------------------------------------------------------------------------------------------------

    def action_launch_start(self) -> None:
        """Launch what is shown; what is not planned yet is planned first."""
        if self._draft is None or self._launching:
            return
        if self.typing:
            self._say("First take the value with enter, or leave it with esc.", WARN)
        elif self._fresh:
            self._launch_planned()
        else:
            self._launch_next = True
            self._say("checking it first …")
            if self._timer is not None:
                self._start_planning()
        self.redraw()

    def _launch_planned(self) -> None:
        """Launch the plan: not over an error; over a warning, and an error that may be wrong, when asked twice."""
        self._launch_next = False
        if self._outcome.error:
            self._say(f"Not launched: {self._outcome.error}", BAD)
            return
        errors = [finding for finding in self._outcome.findings if finding.level is Level.ERROR]
        warnings = [finding for finding in self._outcome.findings if finding.level is Level.WARNING]
        if sure := next((finding for finding in errors if finding.surely), None):
            self._select(sure)
            self._say(f"Not launched: {sure.message}", BAD)
        elif (found := [*errors, *warnings]) and self._armed != LAUNCH:
            self._armed = LAUNCH
            self._select(found[0])
            self._say(f"ctrl+s again launches all the same: {found[0].message}", BAD if errors else WARN)
        elif self._draft is not None:
            self._launching = True
            self._say("launching …")
            self.run_worker(self._start(self._draft.request(force=bool(errors))), name="start", group="start")

    def _select(self, finding: Finding) -> None:
        self._selected = self._outcome.findings.index(finding)

    async def _start(self, request: LaunchRequest) -> None:
        try:
            server = await answer_for(self, partial(self._fleet.start, request), "start")
        except FleetError as error:
            self._say(f"Not launched: {str(error).partition(chr(10))[0]}", BAD)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: said on the screen
            self._say(f"Not launched, that went wrong: {error}", BAD)
        else:
            self.dismiss(server)
            return
        self._launching = False
        self.plan_soon()  # what was in its way may be seen now

    # -- mending ---------------------------------------------------------------------------------------------------

    def action_launch_fix(self) -> None:
        """Make the change that mends the selected finding; where it has none, the first that has one."""
        findings, plan, draft = self._outcome.findings, self._outcome.plan, self._draft
        if draft is None or plan is None or self.typing:
            return
        if not self._fresh:
            self._say("One moment: this is being worked out.", WARN)
        elif not findings:
            self._say("There is nothing to mend.")
        else:
            at = min(self._selected, len(findings) - 1)
            found = next((one for one in (findings[at], *findings) if one.fix is not None), None)
            if found is None or found.fix is None:
                self._say("No change of flags mends this.", WARN)
            else:
                self._say(f"{found.code}: {fix_words(found.fix, plan.flags)}")
                draft.apply(found.fix)
                self.fixed(next(iter([*found.fix.set, *found.fix.unset]), ""))
                self._selected = 0
                self.plan_soon()
                return
        self.redraw()

    def fixed(self, name: str) -> None:
        """A flag was changed to mend something: the cursor may go there."""

    def action_launch_copy(self) -> None:
        """Copy the command line by OSC 52."""
        if self._outcome.plan is None:
            self._say("There is no command line to copy yet.", WARN)
        else:
            self.app.copy_to_clipboard(command_text(self._outcome.plan))
            self._say("Copied the command line.")
        self.redraw()
