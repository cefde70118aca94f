"""After a restart with changed flags: a line that says whether it helped, as soon as that can be said."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rich.cells import cell_len
from textual.strip import Strip

from vllm_console.fleet.api import flag_difference
from vllm_console.fleet.model import Flags, ServerView, State
from vllm_console.text import plain
from vllm_console.ui import staging
from vllm_console.ui.screens.operations_cures import Cures
from vllm_console.ui.theme import WARN
from vllm_console.ui.threads import in_thread

if TYPE_CHECKING:
    from vllm_console.telemetry.comparison import Comparison

TURN_SECONDS = 2.0
"""How often it is seen to whether something is to be asked."""

ASK_SECONDS, ASK_AGAIN_SECONDS = 15.0, 120.0
"""How often a comparison is asked for: while there is too little to say, and afterwards."""

STANDS_SECONDS = 3600.0
"""How long a verdict stands that nobody looks into."""

DAY_SECONDS = 86_400.0
"""What was changed longer ago is no news."""


@dataclass(slots=True)
class _Change:
    """What is known of a server's newest generation: the comparison, when (Unix seconds) it was asked for and since
    when there is a verdict. ``done``: it was seen, or there is nothing to say.
    """

    generation: int
    found: Comparison | None = None
    asked_at: float = float("-inf")
    told_at: float | None = None
    done: bool = False


class ChangeTold(Cures):
    """Compares the selected server's run with the one before while that is news, and opens the comparison."""

    def __init__(self) -> None:
        super().__init__()
        self._changes: dict[str, _Change] = {}
        """By server."""

    def on_mount(self) -> None:
        """Look from time to time."""
        self.set_interval(TURN_SECONDS, self._turn)

    def drop_server(self, name: str) -> None:
        """Drop what its change did."""
        super().drop_server(name)
        self._changes.pop(name, None)

    def change_lines(self, server: ServerView, now: float, width: int, room: int) -> list[Strip]:
        """The line, where there is something to say and room for it."""
        change = self._changes.get(server.name)
        if change is None or change.found is None or change.done or change.generation != server.generation or room < 1:
            return []
        if server.state is not State.READY or (change.told_at and now - change.told_at > STANDS_SECONDS):
            return []
        from vllm_console.ui.panes.change import change_line

        return [change_line(change.found, min(cell_len(plain(server.name)), 20 if width >= 100 else 12), width)]

    def _turn(self) -> None:
        """Ask about the selected server when it is time."""
        server, snapshot = self.selected, self.console.snapshot
        if server is None or snapshot is None or self.console.looking.paused:
            return
        if not server.ours or server.state is not State.READY or server.generation < 2:
            return
        change = self._changes.get(server.name)
        if change is None or change.generation != server.generation:
            change = self._changes[server.name] = _Change(server.generation)
        every = ASK_SECONDS if change.told_at is None else ASK_AGAIN_SECONDS
        news = snapshot.at - server.state_since < DAY_SECONDS
        if news and not change.done and snapshot.at - change.asked_at >= every:
            change.asked_at = snapshot.at
            self.run_worker(self._ask_change(server.name, change), name="change", group=f"change {server.name}")

    async def _ask_change(self, name: str, change: _Change) -> None:
        from vllm_console.ui.panes.change import worth_telling

        try:
            found = await in_thread(partial(self.console.fleet.last_change, name), "compare")
        except Exception:  # noqa: BLE001 - the thread's boundary: c says what is wrong, and it is tried again
            return
        if found is None or found.after.run.generation != change.generation:
            return  # the ledger may not know the new run yet
        if not worth_telling(found):
            change.done = True
            return
        from vllm_console.telemetry.comparison import Verdict

        change.found = found
        if found.verdict is not Verdict.TOO_LITTLE and change.told_at is None:
            change.told_at = change.asked_at
        self.redraw()

    def action_compare(self) -> None:
        """Set the selected server's run beside the one before; from there one key goes back to the flags before."""
        server = self.selected
        if server is None or not server.ours:
            self.console.say("Only runs of your own servers can be compared.", WARN)
            return
        fleet, name = self.console.fleet, server.name

        def done(found: Comparison) -> str:
            from vllm_console.ui.screens.compare import CompareScreen

            if not self.on_top:
                return f"The comparison of {name} is ready: c shows it."
            before = found.before.run
            changed = not flag_difference(server.flags, before.flags).empty
            may = changed and not self.console.read_only and before.model == server.model
            again = partial(fleet.last_change, name)
            screen = CompareScreen(found, partial(self._go_back, name, before.flags) if may else None, again)
            self.app.push_screen(screen, lambda _: self._seen(name, screen.found))
            return ""

        doing = f"Comparing {name} with its run before …"
        self.console.act(doing, lambda: fleet.compare(name), done, once=f"compare {name}")

    def _go_back(self, name: str, flags: Flags) -> None:
        """Restart that server, and no other that is selected meanwhile, with the flags of an earlier run."""
        server = self.console.snapshot.server(name) if self.console.snapshot else None
        if server is None or not server.ours:
            self.console.say(f"{name} is gone.", WARN)
        elif self._is_at_rest(server):
            self._set_staged(name, staging.staged_of(flag_difference(server.flags, flags)))
            self.select(name)
            self._ask_restart(server)

    def _seen(self, name: str, found: Comparison) -> None:
        """What was looked into needs no line any more."""
        from vllm_console.telemetry.comparison import Verdict

        change = self._changes.get(name)
        if change is not None and change.generation == found.after.run.generation:
            change.done = found.verdict is not Verdict.TOO_LITTLE
