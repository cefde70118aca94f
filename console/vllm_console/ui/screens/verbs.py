"""What a person does to the selected server: staging flags and the fleet's verbs. The screen proper adds the view."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm_console.fleet.api import flag_difference
from vllm_console.fleet.model import Changes, Preset, ServerView, State
from vllm_console.ui import staging
from vllm_console.ui.actions import changing
from vllm_console.ui.panes.bars import flag_text
from vllm_console.ui.screens.dialogs import Choose, Confirm
from vllm_console.ui.staging import Staged
from vllm_console.ui.theme import WARN
from vllm_console.ui.traffic import Seen, seen_by
from vllm_console.ui.widgets.draw import Part
from vllm_console.ui.widgets.repaint import TightScreen
from vllm_launchers.plan.shell_words import line_of

if TYPE_CHECKING:
    from vllm_console.ui.app import ConsoleApp


class ServerVerbs(TightScreen):
    """Actions that change a server. Every one asks the fleet in a thread; what it refuses is said in one sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.staged: dict[str, Staged] = {}
        """By server's name, what is staged for it."""
        self.asked: tuple[str, Confirm] | None = None
        """The server that a restart was asked about last, and the question."""

    @property
    def console(self) -> ConsoleApp:
        """The app."""
        from vllm_console.ui.app import ConsoleApp

        assert isinstance(self.app, ConsoleApp)
        return self.app

    @property
    def selected(self) -> ServerView | None:
        """The server under the cursor."""
        raise NotImplementedError

    def redraw(self) -> None:
        """Draw anew what depends on the staged changes."""
        raise NotImplementedError

    def verdict_words(self, server: ServerView) -> Part:
        """What the plan says of what is staged for a server; empty where nothing is."""
        raise NotImplementedError

    def select(self, name: str) -> None:
        """Move the cursor to a server, as soon as it is there."""
        raise NotImplementedError

    def check_action(self, action: str, _parameters: tuple[object, ...]) -> bool | None:
        """Read-only takes away what changes something."""
        return not (self.console.read_only and changing(action))

    # -- staging ---------------------------------------------------------------------------------------------------

    def _mine(self) -> ServerView | None:
        """The selected server if it may be touched; says why not."""
        server = self.selected
        if server is None:
            self.console.say("No server is selected: n launches one.", WARN)
        elif not server.ours:
            self.console.say(f"{server.name} belongs to {server.owner or 'someone else'}: shown, never touched.", WARN)
        else:
            return server
        return None

    def _stage(self, action: str) -> None:
        server = self._mine()
        if server is None:
            return
        staged = self.staged.get(server.name, ())
        step = staging.STEPS[action](server, staging.staged_flags(server.flags, staged))
        self._set_staged(server.name, staging.stage(server.flags, staged, step))
        self._nudge(server, step.note + "." if step.note else "")

    def _nudge(self, server: ServerView, said: str = "") -> None:
        """Say something of what was just staged, and that several changes cannot be judged one by one."""
        if said := " ".join(filter(None, (said, staging.at_once(server, self.staged.get(server.name, ()))))):
            self.console.say(said)

    def _set_staged(self, name: str, staged: Staged) -> None:
        if staged:
            self.staged[name] = staged
        else:
            self.staged.pop(name, None)
        self.redraw()

    def _drop_done(self, servers: Sequence[ServerView]) -> None:
        """Drop what is staged and stands already: another console restarted with it."""
        for server in servers:
            staged = self.staged.get(server.name, ())
            left = tuple(step for step in staged if not staging.stands(server.flags, step))
            if left != staged:
                self._set_staged(server.name, left)

    def action_halve_sequences(self) -> None:
        """Stage half as many sequences."""
        self._stage("halve_sequences")

    def action_double_sequences(self) -> None:
        """Stage twice as many sequences."""
        self._stage("double_sequences")

    def action_halve_context(self) -> None:
        """Stage half the context."""
        self._stage("halve_context")

    def action_double_context(self) -> None:
        """Stage twice the context."""
        self._stage("double_context")

    def action_lower_utilization(self) -> None:
        """Stage 0.02 less GPU memory."""
        self._stage("lower_utilization")

    def action_raise_utilization(self) -> None:
        """Stage 0.02 more GPU memory."""
        self._stage("raise_utilization")

    def action_toggle_prefix_caching(self) -> None:
        """Stage prefix caching on or off."""
        self._stage("toggle_prefix_caching")

    def action_toggle_chunked_prefill(self) -> None:
        """Stage chunked prefill on or off."""
        self._stage("toggle_chunked_prefill")

    def action_cycle_kv_dtype(self) -> None:
        """Stage another type of KV cache."""
        self._stage("cycle_kv_dtype")

    def action_previous_flags(self) -> None:
        """Stage the way back to the previous generation's flags."""
        server = self._mine()
        if server is None:
            return
        if server.previous_flags is None:
            self.console.say(f"{server.name} has no earlier generation to go back to.", WARN)
            return
        back = staging.staged_of(flag_difference(server.flags, server.previous_flags))
        self._set_staged(server.name, back)
        self.console.say(
            "Staged the flags of the previous generation: r restarts with them."
            if back
            else "The previous generation ran with the same flags."
        )

    def action_drop_last(self) -> None:
        """Drop the change staged last."""
        server = self.selected
        if server and server.name in self.staged:
            self._set_staged(server.name, self.staged[server.name][:-1])

    def action_edit_flags(self) -> None:
        """Open all flags."""
        server = self._mine()
        if server is not None:
            self._edit_flags(server)

    def _edit_flags(self, server: ServerView, seen: Seen | None = None) -> None:
        from vllm_console.ui.screens.flags import FlagsScreen

        name = server.name

        def take(changes: Changes | None) -> None:
            if changes is not None:
                self._set_staged(name, staging.staged_of(changes))
                self._nudge(server)

        staged = staging.changes_of(self.staged.get(name, ()))
        self.app.push_screen(FlagsScreen(server, staged, self.console.fleet, seen), take)

    def action_stage_traffic(self) -> None:
        """Open the flags with those changed that the measured traffic asks for; say so when there was too little."""
        server = self._mine()
        if server is None:
            return
        fleet = self.console.fleet

        def done(seen: Seen) -> str:
            if seen.choices:
                self._edit_flags(server, seen)
                return ""
            return f"{server.name}: {seen.sentence}"

        self.console.act(f"Looking at the traffic of {server.name} …", lambda: seen_by(fleet, server.name), done)

    # -- verbs -----------------------------------------------------------------------------------------------------

    def action_restart(self) -> None:
        """Restart with what is staged; asks first when requests are running."""
        server = self._mine()
        if server is None:
            return
        staged = self.staged.get(server.name, ())
        details = _lost(server, "a restart ends them")
        if server.state in (State.READY, State.UNRESPONSIVE) and details:
            details += [
                f"--{step.flag}  {flag_text(server.flags.get(step.flag))} → {flag_text(step.value)}" for step in staged
            ] or ["No flag changes."]
            details += [*filter(None, [staging.at_once(server, staged)]), *_still_open(server)]
            question, told = f"Restart {server.name}?", self.verdict_words(server)
            dialog = self._ask(question, details, "restart", lambda: self._restart(server.name, staged), told)
            self.asked = server.name, dialog
        else:
            self._restart(server.name, staged)

    def _restart(self, name: str, staged: Staged) -> None:
        def done(view: ServerView) -> str:
            if self.staged.get(name) == staged:
                self._set_staged(name, ())
            number = view.generation + (view.state is State.STOPPING)  # the old one is still being stopped then
            moved = (
                f" on port {view.port}: {before.port} is taken" if before and before.port not in (0, view.port) else ""
            )
            return f"{name} restarts as generation {number}{moved}."

        fleet, before = self.console.fleet, self.selected
        self.console.act(f"Restarting {name} …", lambda: fleet.restart(name, staging.changes_of(staged)), done)

    def action_stop(self) -> None:
        """Stop, after a yes."""
        server = self._mine()
        if server is None:
            return
        if not server.state.alive:
            self.console.say(f"{server.name} is {server.state} already: x forgets it, r starts it again.", WARN)
            return
        details = _lost(server, "they are ended")
        fleet, name = self.console.fleet, server.name
        self._ask(
            f"Stop {name}?",
            details,
            "stop",
            lambda: self.console.act(f"Stopping {name} …", lambda: fleet.stop(name), lambda _: f"{name} is stopping."),
        )

    def action_forget(self) -> None:
        """Remove a stopped server's record, log and history, after a yes."""
        server = self._mine()
        if server is None:
            return
        if server.state.alive:
            self.console.say(f"{server.name} is {server.state}: s stops it, then it can be forgotten.", WARN)
            return
        fleet, name = self.console.fleet, server.name
        self._ask(
            f"Forget {name}?",
            ["Its record, its log and its history are removed from the disk."],
            "forget",
            lambda: self.console.act(f"Forgetting {name} …", lambda: fleet.forget(name), lambda _: f"{name} is gone."),
        )

    def _ask(self, question: str, details: list[str], yes: str, then: Callable[[], None], told: Part = "") -> Confirm:
        def answered(answer: bool | None) -> None:
            if answer:
                then()

        dialog = Confirm(question, details, yes)
        dialog.tell(told)
        self.app.push_screen(dialog, answered)
        return dialog

    def action_switch_preset(self) -> None:
        """Hand the server's place to another preset, picked from a list."""
        server = self._mine()
        if server is None:
            return
        fleet, name, present = self.console.fleet, server.name, server.preset

        def listed(found: tuple[Sequence[Preset], object]) -> str:
            choices = [(preset.name, preset.title) for preset in found[0]]
            self.app.push_screen(
                Choose(f"Hand {name}'s name, GPUs and port to which preset?", choices, present), picked
            )
            return ""

        def picked(preset: str | None) -> None:
            if preset is None:
                return
            details = [f"{name} ({present or 'no preset'}) is stopped first; then {preset} starts in its place."]
            details += [*_lost(server, "they end"), *_still_open(server)]
            self._ask(f"Switch {name} to {preset}?", details, "switch", lambda: switch(preset))

        def switch(preset: str) -> None:
            self.console.act(
                f"Switching {name} to {preset} …",
                lambda: fleet.switch(name, preset),
                lambda _: f"{name} makes room for {preset}.",
            )

        self.console.act("", fleet.presets, listed)

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
