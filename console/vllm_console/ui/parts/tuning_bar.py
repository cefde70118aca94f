"""The tuning bar: changes the most common flags with the arrow keys and shows the plan's verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.cells import cell_len
from textual import events, on
from textual.binding import BindingType
from textual.strip import Strip

from vllm_console.fleet.snapshot import ServerView
from vllm_console.text import shortened
from vllm_console.ui.actions import bindings
from vllm_console.ui.keymap import key_of
from vllm_console.ui.panes.bars import shown_value
from vllm_console.ui.parts import staging
from vllm_console.ui.parts.staged_plan import PlanVerdict
from vllm_console.ui.parts.staging import Staging, TuningKey
from vllm_console.ui.terminal.lines import LineView, clickable, line, wheel_step
from vllm_console.ui.theme import ACCENT, CURSOR, DIM, KEY
from vllm_console.ui.widgets.draw import Part, fit, parts_length
from vllm_launchers.vllm.flags.changes import Edits

_WIDE = 100
_KEYS = ((("tuning_left", "tuning_right"), "flag"), (("tuning_up", "tuning_down"), "value"),
         (("tuning_keep",), "keep"), (("tuning_leave",), "leave"))  # fmt: skip


class TuningBar(LineView, can_focus=True):
    """Stages changes for one server while it is open. It has its own keys; calls ``changed`` to redraw.

    ``say`` shows a message.
    """

    BINDINGS: ClassVar[list[BindingType]] = [*bindings("tuning")]

    def __init__(self, staging: Staging, changed: Callable[[], None], say: Callable[[str], None], *, id: str) -> None:
        super().__init__(id=id)
        self._staging, self._changed, self._say = staging, changed, say
        self._server: ServerView | None = None
        self._before: Edits = {}
        self._at = 0
        self._note = ""
        self._generation = 0

    @property
    def server_name(self) -> str:
        """The server being tuned; empty while the bar is closed."""
        return self._server.name if self._server is not None else ""

    def open(self, server: ServerView) -> None:
        """Open with a server's staged changes, and take the focus."""
        self._server, self._before, self._note = server, self._staging.of(server.name), ""
        self._generation = server.generation
        self.display = True
        self.screen.set_focus(self)  # right away: the next keys belong to it
        self._changed()

    def close(self) -> None:
        """Close, keeping what is staged now."""
        self._server = None
        self.display = False
        self.screen.set_focus(None)
        self._changed()

    def draw(self, server: ServerView, verdict: PlanVerdict | None, width: int) -> None:
        """Draw the newest snapshot of the tuned server; ignores other servers."""
        if server.name != self.server_name:
            return
        self._server = server
        self.show(tuning_lines(server, self._staging.of(server.name), verdict, self._at, self._note, width))

    # -- keys and mouse --------------------------------------------------------------------------------------------

    def action_move(self, by: int) -> None:
        """Select the next or previous flag."""
        self.action_choose((self._at + by) % len(staging.TUNED))

    def action_choose(self, at: int) -> None:
        """Select a flag by index."""
        if self._server is not None:
            self._at, self._note = at, ""
            self._changed()

    def action_step(self, by: int) -> None:
        """Raise the flag's value, lower it for -1, or toggle it."""
        keys = staging.TUNED[self._at].keys
        self._step(keys[-1] if by > 0 else keys[0])

    def action_tuning_keep(self) -> None:
        """Keep the staged changes and close."""
        self.close()

    def action_tuning_leave(self) -> None:
        """Close and restore what was staged before, unless the server was restarted meanwhile."""
        name, before = self.server_name, self._before
        restarted = self._server is not None and self._server.generation != self._generation
        self.close()
        if name and not restarted and self._staging.of(name) != before:
            self._staging.put(name, before)
            self._say("The changes made here were dropped.")

    @on(events.MouseScrollUp)
    @on(events.MouseScrollDown)
    def _wheel(self, event: events.MouseEvent) -> None:
        event.stop()
        self.action_step(-wheel_step(event))

    def _step(self, key: TuningKey) -> None:
        server = self._server
        if server is None:
            return
        staged = self._staging.of(server.name)
        step = key.step(server, self._staging.flags_of(server))
        problem = staging.refused(server, step)
        staged = staged if problem else staging.stage(server.flags, staged, step)
        self._note = problem or step.note or staging.combined_warning(server, staged)
        self._staging.put(server.name, staged)


def tuning_lines(
    server: ServerView, staged: Edits, verdict: PlanVerdict | None, at: int, note: str, width: int
) -> list[Strip]:
    """The flags, the selected one reversed and changed ones marked; then the verdict, a note and the keys."""
    after = staging.staged_flags(server.flags, staged)
    parts: list[Part] = []
    for number, tuned in enumerate(staging.TUNED):
        mark = "*" if tuned.flag in staged else " "
        label = tuned.label if width >= _WIDE else tuned.short
        style = CURSOR if number == at else (ACCENT if tuned.flag in staged else None)
        text = f" {label} {shown_value(after.get(tuned.flag, staging.default_value(server, tuned.flag)))}{mark}"
        parts.append((text, clickable(f"focused.choose({number})", style)))
    keys: list[Part] = []
    for ids, text in _KEYS:
        names = [key_of(id) for id in ids]
        hint = f"{('' if all(len(name) == 1 for name in names) else ' ').join(names)} {text}"
        keys += [" ", (hint, clickable(f"focused.{ids[0]}", KEY) if len(ids) == 1 else KEY)]
    room = width - parts_length(keys) - 1
    style = verdict.style if verdict is not None else DIM
    verdict_part = (fit(f" {_fitting(verdict, note, room - 1)}", room), style)
    while len(parts) > 1 and parts_length(parts[: at + 1]) > width:  # keep the selected flag visible
        parts, at = parts[1:], at - 1
    first, second = line(*parts), line(verdict_part, *keys)
    return [strip if strip.cell_length <= width else strip.crop(0, width) for strip in (first, second)]


def _fitting(verdict: PlanVerdict | None, note: str, room: int) -> str:
    """As many clauses of the verdict and the note as fit; a refusal or warning comes first.

    The finding's lines show the verdict, too.
    """
    notes = [*shortened(note), note.partition(":")[0], ""] if note else [""]
    if verdict is None:
        texts = notes if note else ["nothing staged"]
    elif verdict.refused or verdict.warning:
        texts = [" · ".join(filter(None, (said, one))) for said in verdict.shorter for one in notes]
    else:
        texts = [" · ".join(filter(None, (said, one))) for one in notes for said in verdict.shorter]
    return next((text for text in texts if cell_len(text) <= room), texts[-1])
