"""What a person does to the selected server: the fleet's verbs. The screen proper adds the view."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from vllm_console.fleet.api import FleetError, NoPlaceError, UnfitError
from vllm_console.fleet.model import Preset, ServerView, State
from vllm_console.ui import staging
from vllm_console.ui.panes.bars import flag_text
from vllm_console.ui.refusal import refusal_rows
from vllm_console.ui.screens.dialogs import Choose, Confirm
from vllm_console.ui.screens.staging_keys import StagingKeys
from vllm_console.ui.staging import Staged
from vllm_console.ui.theme import BAD, WARN
from vllm_console.ui.under_way import Verb
from vllm_console.ui.widgets.draw import Part
from vllm_launchers.plan.shell_words import line_of

T = TypeVar("T")

EDIT = "e edits the flags"
"""How flags are changed that stand in the way of a restart."""


class ServerVerbs(StagingKeys):
    """Actions that change a server. Every one asks the fleet in a thread; what it refuses is said in one sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: tuple[str, Confirm] | None = None
        """The server that a restart was asked about last, and the question."""

    def verdict_words(self, server: ServerView) -> Part:
        """What the plan says of what is staged for a server; empty where nothing is."""
        raise NotImplementedError

    def action_restart(self) -> None:
        """Restart with what is staged; asks first when requests are running, or it is starting as it is."""
        server = self._at_rest()
        if server is not None:
            self._ask_restart(server)

    def _ask_restart(self, server: ServerView) -> None:
        staged = self.staged.get(server.name, ())
        details = _lost(server, "a restart ends them") if server.state in (State.READY, State.UNRESPONSIVE) else []
        if server.state is State.STARTING and not staged and server.next_attempt_at is None:
            details = ["It is starting with these flags already: that would begin anew."]
        if details:
            details += [
                f"--{step.flag}  {flag_text(server.flags.get(step.flag))} → {flag_text(step.value)}" for step in staged
            ] or ["No flag changes."]
            details += [*filter(None, [staging.at_once(server, staged)]), *_still_open(server)]
            question, told = f"Restart {server.name}?", self.verdict_words(server)
            dialog = self._ask(question, details, "restart", lambda: self._restart(server, staged), told)
            self.asked = server.name, dialog
        else:
            self._restart(server, staged)

    def _restart(self, server: ServerView, staged: Staged, force: bool = False) -> None:
        fleet, name, port = self.console.fleet, server.name, server.port

        def done(view: ServerView) -> str:
            if self.staged.get(name) == staged:
                self._set_staged(name, ())
            number = view.generation + (view.state is State.STOPPING)  # the old one is still being stopped then
            moved = f" on port {view.port}: {port} is taken" if port not in (0, view.port) else ""
            return f"{name} restarts as generation {number}{moved}."

        self._do(
            server,
            Verb.RESTART,
            f"Restarting {name} …",
            lambda: fleet.restart(name, staging.changes_of(staged), force=force),
            done,
            lambda error: self._refused(server, error, "restart", EDIT, lambda: self._restart(server, staged, True)),
        )

    def _do(
        self,
        server: ServerView,
        verb: Verb,
        doing: str,
        call: Callable[[], T],
        done: Callable[[T], str],
        refused: Callable[[FleetError], bool] | None = None,
    ) -> None:
        """Run a verb on a server. ``refused`` tells of a plan that will not do; False leaves that to the app."""
        self.under_way.begin(server, verb)

        def taken(result: T) -> str:
            self.under_way.answered(server.name)
            return done(result)

        def failed(error: Exception) -> bool:
            self.under_way.drop(server.name)
            return refused is not None and isinstance(error, FleetError) and refused(error)

        self.console.act(doing, call, taken, failed)

    def _refused(self, server: ServerView, error: FleetError, what: str, mend: str, again: Callable[[], None]) -> bool:
        """Say why a server was not restarted or switched; where that may be gone over, ask."""
        if not isinstance(error, UnfitError | NoPlaceError):
            return False
        rows = refusal_rows(error, mend)
        told = f"{server.name} is not {what}ed: {rows[0]}"
        forceable = isinstance(error, UnfitError) and error.forceable
        if not self.on_top or (len(rows) == 1 and not forceable):
            self.console.say(told + (f" And {len(rows) - 1} more." if len(rows) > 1 else ""), BAD)
            return True
        self.console.say(f"{server.name} is not {what}ed.", BAD)
        head = f"{server.name} would {'hardly' if forceable else 'not'} start"
        details = [f"{number}. {row}" for number, row in enumerate(rows, 1)] if len(rows) > 1 else rows
        if forceable:
            self._ask(
                f"{head}. {what.capitalize()} it all the same?", details, f"{what} all the same", again, late=True
            )
        else:
            self.app.push_screen(Confirm(f"{head}.", details, yes=""))
        return True

    def action_stop(self) -> None:
        """Stop, after a yes."""
        server = self._at_rest(to_stop=True)
        if server is None:
            return
        if not server.state.alive:
            self.console.say(f"{server.name} is {server.state} already: x forgets it, r starts it again.", WARN)
            return
        details = _lost(server, "they are ended")
        fleet, name, doing = self.console.fleet, server.name, f"Stopping {server.name} …"

        def stop() -> None:
            self._do(server, Verb.STOP, doing, lambda: fleet.stop(name), lambda _: f"{name} is stopping.")

        self._ask(f"Stop {name}?", details, "stop", stop)

    def action_forget(self) -> None:
        """Remove a stopped server's record, log and history, after a yes."""
        server = self._at_rest()
        if server is None:
            return
        if server.state.alive:
            self.console.say(f"{server.name} is {server.state}: s stops it, then it can be forgotten.", WARN)
            return
        fleet, name = self.console.fleet, server.name

        def gone(_: None) -> str:
            self.drop_server(name)
            return f"{name} is gone."

        def forget() -> None:
            self._do(server, Verb.FORGET, f"Forgetting {name} …", lambda: fleet.forget(name), gone)

        self._ask(f"Forget {name}?", ["Its record, its log and its history are removed from the disk."], "forget",
                  forget)  # fmt: skip

    def _ask(
        self,
        question: str,
        details: list[str],
        yes: str,
        then: Callable[[], None],
        told: Part = "",
        *,
        late: bool = False,
    ) -> Confirm:
        def answered(answer: bool | None) -> None:
            if answer:
                then()

        dialog = Confirm(question, details, yes, late=late)
        dialog.tell(told)
        self.app.push_screen(dialog, answered)
        return dialog

    def action_switch_preset(self) -> None:
        """Hand the server's place to another preset, picked from a list."""
        server = self._at_rest()
        if server is None:
            return
        name, present = server.name, server.preset

        def listed(found: tuple[Sequence[Preset], object]) -> str:
            choices = [(preset.name, preset.title) for preset in found[0]]
            if self.on_top:
                question = f"Hand {name}'s name, GPUs and port to which preset?"
                self.app.push_screen(Choose(question, choices, present), picked)
            return ""

        def picked(preset: str | None) -> None:
            if preset is None:
                return
            details = [f"{name} ({present or 'no preset'}) is stopped first; then {preset} starts in its place."]
            details += [*_lost(server, "they end"), *_still_open(server)]
            self._ask(f"Switch {name} to {preset}?", details, "switch", lambda: self._switch(server, preset))

        self.console.act("", self.console.fleet.presets, listed, once=f"presets for {name}")

    def _switch(self, server: ServerView, preset: str, force: bool = False) -> None:
        fleet, name = self.console.fleet, server.name

        def done(_: ServerView) -> str:
            self.drop_server(name)
            return f"{name} makes room for {preset}."

        self._do(
            server,
            Verb.SWITCH,
            f"Switching {name} to {preset} …",
            lambda: fleet.switch(name, preset, force=force),
            done,
            lambda error: self._refused(
                server,
                error,
                "switch",
                f"n launches {preset} with other flags",
                lambda: self._switch(server, preset, True),
            ),
        )

    def action_toggle_load(self) -> None:
        """Send the preset's workload, or end it."""
        server = self._mine()
        if server is None:
            return
        fleet, name = self.console.fleet, server.name
        if server.load:
            self.console.act("", lambda: fleet.stop_load(name), lambda _: f"The load on {name} ends.")
        elif server.state is not State.READY:
            self.console.say(f"{name} is {server.state}: a load needs a server that is ready.", WARN)
        else:
            self.console.act(
                "", lambda: fleet.start_load(name), lambda _: f"Sending {name} its preset's workload for a minute."
            )

    def action_new_server(self) -> None:
        """Open the launch screen."""
        from vllm_console.ui.screens.launch import LaunchScreen

        server = self.selected
        initial = server.preset if server and server.ours and server.preset else None

        def launched(result: object) -> None:
            name = result if isinstance(result, str) else getattr(result, "name", None)
            if isinstance(name, str):
                self.select(name)
            self.console.look_now()

        self.app.push_screen(LaunchScreen(self.console.fleet, initial), launched)

    def action_copy_command(self) -> None:
        """Copy the server's command line by OSC 52."""
        server = self.selected
        if server is None or not server.argv:
            self.console.say("There is no command line to copy.", WARN)
            return
        self.app.copy_to_clipboard(line_of(server.argv))
        self.console.say(f"Copied the command line of {server.name}.")

    def action_remove_leftovers(self) -> None:
        """End and remove what servers that have ended left, after a yes."""
        from vllm_console.ui.screens.leftovers import remove_leftovers

        remove_leftovers(self.console)

    def action_claim_gpus(self) -> None:
        """Claim GPUs on the shared board, or take claims back."""
        from vllm_console.ui.screens.claims import claim_gpus

        claim_gpus(self.console)

    def action_describe_gpus(self) -> None:
        """Describe the machine's GPUs."""
        snapshot = self.console.snapshot
        if snapshot is None or snapshot.host is None or not snapshot.host.gpus:
            self.console.say((snapshot.host_problem if snapshot else "") or "No GPU is known of on this machine.", WARN)
            return
        from vllm_console.ui.screens.gpu_details import GpuDetailsScreen

        self.app.push_screen(GpuDetailsScreen(snapshot, lambda: self.console.snapshot))


def _lost(server: ServerView, then: str) -> list[str]:
    """How many requests run and wait, and what becomes of them; nothing where there are none."""
    window = server.window
    counts = (window.requests_running, window.requests_waiting) if window is not None else (0, 0)
    running, waiting = (round(count or 0) for count in counts)
    if running + waiting == 1:
        return [f"1 request {'is running' if running else 'waits'}; it is ended."]
    if running and waiting:
        return [f"{running + waiting} requests are open, {waiting} of them waiting; {then}."]
    told = f"{running} requests are running" if running else f"{waiting} requests wait" if waiting else ""
    return [f"{told}; {then}."] if told else []


def _still_open(server: ServerView) -> list[str]:
    """What others can do with it, said also before it is started again."""
    return [f"! {server.exposed}."] if server.exposed else []
