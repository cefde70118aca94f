"""Claiming GPUs on the shared board, and releasing them: a small dialog."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input

from vllm_console.fleet.board import parse_gpu_indices, until_from
from vllm_console.fleet.verbs import UsageError
from vllm_console.text import plain
from vllm_console.ui.closing import close_screen
from vllm_console.ui.screens.dialogs import answer_parts
from vllm_console.ui.terminal.lines import LineView, line
from vllm_console.ui.theme import BAD, DIM, KEY, STRONG
from vllm_console.ui.widgets.draw import fit
from vllm_launchers.host.board import Board, format_claim, gpus_text

if TYPE_CHECKING:
    from vllm_console.ui.app import ConsoleApp

MOST_SHOWN = 8

ALWAYS_SHOWN = 9
"""Rows of the dialog besides claims and notices, one of them for how many claims are left out."""


class ClaimDialog(ModalScreen[str | None]):
    """Shows what is claimed and takes one line, ``GPUS UNTIL WHY``, or ``release GPUS``; dismisses with it, or None."""

    CSS_PATH = "dialogs.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "Leave", show=False)]

    def __init__(self, board: Board) -> None:
        super().__init__()
        self._board = board

    def compose(self) -> ComposeResult:
        """A box with the claims and a line to type into."""
        yield Vertical(LineView(id="question"), Input(id="claim", compact=True), LineView(id="answers"), id="dialog")

    def on_mount(self) -> None:
        """Show what is claimed."""
        self.query_one("#dialog").set_class(getattr(self.app, "ascii", False), "-ascii")
        self._draw("")
        self.set_focus(self.query_one(Input))  # at once: keys typed next are for it

    def _draw(self, wrong: str) -> None:
        notices = self._board.notices[:2]
        # Nine tenths of the screen minus the border, and minus what is always shown.
        room = int(0.9 * self.app.size.height) - 2 - ALWAYS_SHOWN - len(notices)
        claims = self._board.claims[: max(1, min(MOST_SHOWN, room))]
        rows = [
            f"{gpus_text(one.gpus)} {format_claim(one, self._board.at, mine=one.uid == os.getuid())}" for one in claims
        ]
        if left := len(self._board.claims) - len(claims):
            rows.append(f"and {left} more: vllm-console board")
        width = max(40, min(76, self.app.size.width - 14))
        self.query_one("#question", LineView).show(
            [
                line(("Claim GPUs on the shared board", STRONG)),
                *(line(fit(plain(text), width).rstrip()) for text in rows or ["No GPUs claimed."]),
                *(line((fit(plain(text), width).rstrip(), DIM)) for text in notices),
                line(),
                line("GPUs, until when, why:  ", ("2,3 18:00 training", KEY)),
                line("release yours:          ", ("release 2", KEY), "  or  ", ("release", KEY)),
                line((fit(plain(wrong), width).rstrip(), BAD)),
            ]
        )
        answers = [
            *answer_parts("enter", "claim or release", "screen.take"),
            *answer_parts("esc", "cancel", "screen.leave"),
        ]
        self.query_one("#answers", LineView).show([line(), line(*answers)])

    def on_resize(self) -> None:
        """Show as much as fits now."""
        if self.is_mounted:
            self._draw("")

    async def action_take(self) -> None:
        """As enter does in the line."""
        await self.query_one(Input).action_submit()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Take the line, if it can be understood."""
        try:
            _parse(event.value, time.time())
        except UsageError as error:
            self._draw(str(error))
        else:
            close_screen(self, event.value)

    def action_leave(self) -> None:
        """Close without a change."""
        close_screen(self)


def _parse(text: str, now: float) -> tuple[Sequence[int], float | None, str]:
    """GPUs, until when (None: release), and why.

    Raises:
        UsageError: it can't be understood.
    """
    words = text.split()
    if words[:1] == ["release"]:
        return parse_gpu_indices(words[1:]) if words[1:] else (), None, ""
    if len(words) < 2:
        raise UsageError("type GPUs and until when, for example: 2 18:00")
    return parse_gpu_indices(words[:1]), until_from(words[1], now), " ".join(words[2:])


def claim_gpus(console: ConsoleApp) -> None:
    """Ask what to claim or release, and do it."""
    fleet = console.fleet

    def ask(board: Board) -> str:
        if console.operations.on_top:
            console.push_screen(ClaimDialog(board), typed)
        return ""

    def typed(text: str | None) -> None:
        if text is None:
            return
        gpus, until, why = _parse(text, time.time())
        if until is None:
            console.act("", lambda: fleet.release(gpus), lambda _: "Released your claims.")
        else:
            console.act("", _claiming(console, gpus, until, why), lambda _: f"{gpus_text(gpus)} claimed by you.")

    console.act("", fleet.board, ask, once="board")


def _claiming(console: ConsoleApp, gpus: Sequence[int], until: float, why: str) -> Callable[[], Board]:
    return lambda: console.fleet.claim(gpus, until, why)
