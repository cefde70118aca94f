"""Claiming GPUs on the shared board, and taking claims back: a small dialog."""

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

from vllm_console.fleet.api import UsageError
from vllm_console.fleet.board import gpus_from_words, until_from
from vllm_console.text import plain
from vllm_console.ui.theme import BAD, DIM, KEY, STRONG
from vllm_console.ui.widgets.lines import LineView, line
from vllm_launchers.machine.board.model import Board, claim_words, gpus_text

if TYPE_CHECKING:
    from vllm_console.ui.app import ConsoleApp

MOST_SHOWN = 8


class ClaimDialog(ModalScreen[str | None]):
    """Shows what is claimed and takes one line, ``GPUS TILL WHY``, or ``release GPUS``; dismisses with it, or None."""

    CSS_PATH = "dialogs.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "Leave", show=False)]

    def __init__(self, board: Board) -> None:
        super().__init__()
        self._board = board

    def compose(self) -> ComposeResult:
        """A box with the claims and a line to type into."""
        yield Vertical(LineView(id="question"), Input(id="claim", compact=True), id="dialog")

    def on_mount(self) -> None:
        """Show what is claimed."""
        self.query_one("#dialog").set_class(getattr(self.app, "ascii", False), "-ascii")
        self._draw("")
        self.query_one(Input).focus()

    def _draw(self, wrong: str) -> None:
        claims = self._board.claims[:MOST_SHOWN]
        told = [
            f"{gpus_text(one.gpus)} {claim_words(one, self._board.at, mine=one.uid == os.getuid())}" for one in claims
        ]
        if left := len(self._board.claims) - len(claims):
            told.append(f"and {left} more: vllm-console board")
        width = max(40, min(76, self.app.size.width - 14))
        self.query_one(LineView).show(
            [
                line(("Claim GPUs on the shared board", STRONG)),
                *(line(plain(text)[:width]) for text in told or ["No GPU is claimed."]),
                *(line((plain(text)[:width], DIM)) for text in self._board.notices[:2]),
                line(),
                line("GPUs, till when, why:   ", ("2,3 18:00 training", KEY)),
                line("take yours back:        ", ("release 2", KEY), "  or  ", ("release", KEY)),
                line((plain(wrong)[:width], BAD)),
            ]
        )

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Take the line, if it can be understood."""
        try:
            _parse(event.value, time.time())
        except UsageError as error:
            self._draw(str(error))
        else:
            self.dismiss(event.value)

    def action_leave(self) -> None:
        """Close without a word."""
        self.dismiss(None)


def _parse(text: str, now: float) -> tuple[Sequence[int], float | None, str]:
    """GPUs, until when (None: take back), and why.

    Raises:
        UsageError: it says none of it.
    """
    words = text.split()
    if words[:1] == ["release"]:
        return gpus_from_words(words[1:]) if words[1:] else (), None, ""
    if len(words) < 2:
        raise UsageError("type GPUs and till when, such as 2 18:00")
    return gpus_from_words(words[:1]), until_from(words[1], now), " ".join(words[2:])


def claim_gpus(console: ConsoleApp) -> None:
    """Ask what to claim or to take back, and do it."""
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
            console.act("", lambda: fleet.release(gpus), lambda _: "Your claims are taken back.")
        else:
            console.act("", _claiming(console, gpus, until, why), lambda _: f"{gpus_text(gpus)} is claimed by you.")

    console.act("", fleet.board, ask, once="board")


def _claiming(console: ConsoleApp, gpus: Sequence[int], until: float, why: str) -> Callable[[], Board]:
    return lambda: console.fleet.claim(gpus, until, why)
