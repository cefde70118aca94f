"""From a finding to its cure: one key stages it, the plan judges it, another key tells everything about it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from textual.timer import Timer

from vllm_console.diagnosis.model import Remedy
from vllm_console.fleet.api import FleetError
from vllm_console.fleet.model import ServerView
from vllm_console.text import plain
from vllm_console.ui import staging
from vllm_console.ui.findings import findings_of, staged_cure, steps_of
from vllm_console.ui.panes.finding import Told
from vllm_console.ui.screens.operations_panes import PaneChoice
from vllm_console.ui.staging import Staged
from vllm_console.ui.theme import DIM, WARN
from vllm_console.ui.threads import in_thread
from vllm_console.ui.verdict import Verdict, ask_verdict
from vllm_console.ui.widgets.draw import Part
from vllm_launchers.plan.model import Plan

DEBOUNCE_SECONDS = 0.2
"""How long what is staged must stand before it is planned."""


_Ground = tuple[int, str]
"""A server's generation and preset: what is known of one is not true of the next."""


class Cures(PaneChoice):
    """Stages remedies, and keeps the plan's verdict on what is staged up to date."""

    def __init__(self) -> None:
        super().__init__()
        self._verdicts: dict[str, tuple[_Ground, Staged, Verdict]] = {}
        """By server, the newest verdict and what it is on."""
        self._plans: dict[str, tuple[_Ground, Plan]] = {}
        """By server, the plan of what runs."""
        self._judging: dict[str, Timer] = {}
        """By server, what waits until its staged changes have stood for a moment."""

    def told(self, server: ServerView) -> Told:
        """What stands beside the server's findings."""
        staged = self.staged.get(server.name, ())
        known = self._verdicts.get(server.name)
        verdict = known[2] if staged and known is not None and known[:2] == (_ground(server), staged) else None
        if staged and verdict is None:
            verdict = Verdict("·", "checking whether it fits …", DIM)
        return Told(staged, verdict, self.console.read_only)

    def verdict_words(self, server: ServerView) -> Part:
        """What the plan says of what is staged for a server, as the question before a restart shows it."""
        found = self.told(server).verdict
        return (f"{found.sign} {found.words}", found.style) if found is not None else ""

    # -- staging a cure --------------------------------------------------------------------------------------------

    def action_stage_cure(self) -> None:
        """Stage the best remedy of the top finding; once more, the next one."""
        server = self._mine()
        if server is None:
            return
        found = findings_of(server)
        cures = found[0].cures if found else ()
        if not cures:
            self.console.say(_nothing_to_stage(server), WARN)
            return
        at = staged_cure(server, cures, self.staged.get(server.name, ()))
        if at is not None and len(cures) == 1:
            self.console.say("That is the only cure: r restarts with it, esc drops it.")
            return
        self.stage_remedy(server, cures[0 if at is None else (at + 1) % len(cures)])

    def stage_remedy(self, server: ServerView, remedy: Remedy) -> None:
        """Stage a remedy in place of what is staged: one change at a time can be judged afterwards."""
        steps = steps_of(server.flags, remedy)
        if not steps:
            self.console.say(f"{server.name} has that already.", WARN)
            return
        before = self.staged.get(server.name, ())
        found = findings_of(server)
        cures = found[0].cures if found else ()
        dropped = bool(before) and staged_cure(server, cures, before) is None
        self._set_staged(server.name, steps)
        price = f" Price: {plain(remedy.price)}" if remedy.price else ""
        instead = " in place of what was staged before" if dropped else ""
        self.console.say(f"Staged{instead}: {plain(remedy.why)}{price}")

    def action_why(self) -> None:
        """Tell everything about what is found of the selected server."""
        server, snapshot = self.selected, self.console.snapshot
        if server is None or snapshot is None:
            self.console.say("No server is selected: n launches one.", WARN)
            return
        from vllm_console.ui.screens.why import WhyScreen

        may_stage = server.ours and not self.console.read_only
        stage = partial(self._take, server.name) if may_stage else None
        self.app.push_screen(WhyScreen(server, snapshot.at, stage))

    def _take(self, name: str, remedy: Remedy) -> None:
        server = self.console.snapshot.server(name) if self.console.snapshot else None
        if server is not None:
            self.stage_remedy(server, remedy)

    # -- the plan's verdict ----------------------------------------------------------------------------------------

    def _set_staged(self, name: str, staged: Staged) -> None:
        super()._set_staged(name, staged)
        if name in self._judging:
            self._judging.pop(name).stop()
        if staged:
            self._judging[name] = self.set_timer(DEBOUNCE_SECONDS, partial(self._judge, name))

    def drop_server(self, name: str) -> None:
        """Drop what is known of it."""
        super().drop_server(name)
        self._verdicts.pop(name, None)
        self._plans.pop(name, None)

    def take_look(self, servers: Sequence[ServerView]) -> None:
        """What is staged is judged anew for another generation."""
        super().take_look(servers)
        for server in servers:
            known = self._verdicts.get(server.name)
            if known is not None and known[0] != _ground(server):
                del self._verdicts[server.name]
                self._set_staged(server.name, self.staged.get(server.name, ()))

    def _judge(self, name: str) -> None:
        self._judging.pop(name, None)
        server = self.console.snapshot.server(name) if self.console.snapshot else None
        staged = self.staged.get(name, ())
        if server is not None and staged:
            self.run_worker(self._ask_plan(server, staged), name="verdict", exclusive=True, group=f"verdict {name}")

    async def _ask_plan(self, server: ServerView, staged: Staged) -> None:
        """Judge in a thread; an answer on what is no longer staged is kept but not shown."""
        ground, known = _ground(server), self._plans.get(server.name)
        now = known[1] if known is not None and known[0] == ground else None
        call = partial(ask_verdict, self.console.fleet, server.name, staging.changes_of(staged), now)
        try:
            before, verdict = await in_thread(call, "verdict")
            self._plans[server.name] = (ground, before)
        except FleetError as error:
            verdict = Verdict("✗", plain(str(error).splitlines()[0] if str(error) else "it cannot be planned"), WARN)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: said on the screen
            verdict = Verdict("–", f"not known whether it fits: {plain(str(error))}", DIM)
        self._verdicts[server.name] = (ground, staged, verdict)
        self.redraw()
        name, dialog = self.asked or ("", None)
        if dialog is self.app.screen and name == server.name and self.staged.get(name) == staged:
            dialog.tell(self.verdict_words(server))


def _ground(server: ServerView) -> _Ground:
    return server.generation, server.preset


def _nothing_to_stage(server: ServerView) -> str:
    found = findings_of(server)
    if found and found[0].remedies:
        return plain(found[0].remedies[0].why)
    if found and found[0].severity != "good":
        return f"No change of flags is known to mend this: {found[0].title}."
    return f"Nothing is found that {server.name} would have to be cured of."
