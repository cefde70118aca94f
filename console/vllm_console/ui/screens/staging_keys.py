"""Staging changes of the selected server's flags: what single keys change, the way back, and all flags at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_console.fleet.api import flag_difference
from vllm_console.fleet.model import Changes, ServerView
from vllm_console.ui import staging
from vllm_console.ui.actions import changing
from vllm_console.ui.staging import Staged
from vllm_console.ui.theme import WARN
from vllm_console.ui.traffic import Seen, seen_by
from vllm_console.ui.under_way import UnderWay
from vllm_console.ui.widgets.repaint import TightScreen

if TYPE_CHECKING:
    from vllm_console.ui.app import ConsoleApp


class StagingKeys(TightScreen):
    """Keeps what is staged, by server's name, for as long as that name is the same server's."""

    def __init__(self) -> None:
        super().__init__()
        self.staged: dict[str, Staged] = {}
        """By server's name, what is staged for it."""
        self.under_way = UnderWay()
        self._known: dict[str, tuple[str, str, int]] = {}
        """By name, the preset, model and generation that the last look showed."""

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

    def select(self, name: str) -> None:
        """Move the cursor to a server, as soon as it is there."""
        raise NotImplementedError

    @property
    def on_top(self) -> bool:
        """Whether nothing covers this screen: what an answer would open goes over no other screen."""
        return self.app.screen is self

    def check_action(self, action: str, _parameters: tuple[object, ...]) -> bool | None:
        """Read-only takes away what changes something."""
        return not (self.console.read_only and changing(action))

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

    def _at_rest(self, *, to_stop: bool = False) -> ServerView | None:
        """The selected server if it may be touched and nothing is being done to it; says why not."""
        server = self._mine()
        return server if server is not None and self._is_at_rest(server, to_stop=to_stop) else None

    def _is_at_rest(self, server: ServerView, *, to_stop: bool = False) -> bool:
        verb = self.under_way.on(server, to_stop=to_stop)
        if verb is not None:
            self.console.say(f"{server.name} is being {verb}.", WARN)
        return verb is None

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

    def drop_server(self, name: str) -> None:
        """Drop what is kept of a server that is gone: who bears the name next is another one."""
        if name in self.staged:
            self._set_staged(name, ())

    def take_look(self, servers: Sequence[ServerView]) -> None:
        """Drop what a look shows to be over: all of a server that is gone, and what is staged and stands already.

        A name with another preset or model, or a lower generation, is another server's now.
        """
        self.under_way.seen(servers)
        before, self._known = self._known, {one.name: (one.preset, one.model, one.generation) for one in servers}
        for name, (preset, model, generation) in before.items():
            now = self._known.get(name)
            if now is None or now[:2] != (preset, model) or now[2] < generation:
                self.drop_server(name)
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
        server = self._at_rest()
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
        fleet, name = self.console.fleet, server.name

        def done(seen: Seen) -> str:
            if not seen.choices:
                return f"{name}: {seen.sentence}"
            if not self.on_top:
                return f"It is known what the traffic of {name} asks for: t shows it."
            self._edit_flags(server, seen)
            return ""

        doing = f"Looking at the traffic of {name} …"
        self.console.act(doing, lambda: seen_by(fleet, name), done, once=f"traffic {name}")
