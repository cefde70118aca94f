"""A dialog that claims and releases GPUs on the shared board."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from textual.strip import Strip

from vllm_console.fleet.board import parse_gpu_indices, until_from
from vllm_console.text import plain
from vllm_console.ui.screens.dialogs import LineDialog
from vllm_console.ui.terminal.lines import line
from vllm_console.ui.theme import DIM, KEY, STRONG
from vllm_console.ui.widgets.draw import fit
from vllm_launchers.errors import UsageError
from vllm_launchers.host.board import Board, format_claim
from vllm_launchers.host.gpu.host import gpus_text

if TYPE_CHECKING:
    from vllm_console.ui.app import ConsoleApp

MOST_SHOWN = 8


class ClaimDialog(LineDialog):
    """Shows the claims and reads one line: ``GPUS UNTIL WHY`` or ``release GPUS``."""

    def __init__(self, console: ConsoleApp, board: Board) -> None:
        super().__init__("claim", "claim or release", "GPUs, until when, why; or release", partial(_claim_lines, board))
        self._main = console

    def take(self, text: str) -> str:
        """Claim or release."""
        console, fleet = self._main, self._main.fleet
        gpus, until, why = _parse(text, time.time())

        def done(said: str) -> str:
            self.done()
            return said

        if until is None:
            console.act("", lambda: fleet.claims.release(gpus), lambda _: done("Released your claims."), self.refuse)
            return "releasing…"
        claimed = f"{gpus_text(gpus)} claimed by you."
        console.act("", partial(fleet.claims.claim, gpus, until, why), lambda _: done(claimed), self.refuse)
        return "claiming…"


def _claim_lines(board: Board, width: int, rows: int) -> list[Strip]:
    notices = board.notices[:2]
    shown = board.claims[: max(1, min(MOST_SHOWN, rows - 5 - len(notices)))]
    claims = [f"{gpus_text(one.gpus)} {format_claim(one, board.at, mine=one.uid == os.getuid())}" for one in shown]
    if left := len(board.claims) - len(shown):
        claims.append(f"and {left} more: vllm-console board")
    return [
        line(("Claim GPUs on the shared board", STRONG)),
        *(line(fit(plain(text), width).rstrip()) for text in claims or ["No GPUs claimed."]),
        *(line((fit(plain(text), width).rstrip(), DIM)) for text in notices),
        line(),
        line("GPUs, until when, why:  ", ("2,3 18:00 training", KEY)),
        line("release yours:          ", ("release 2", KEY), "  or  ", ("release", KEY)),
    ]


def _parse(text: str, now: float) -> tuple[Sequence[int], float | None, str]:
    """Parse GPUs, end time (None: release) and reason.

    Raises:
        UsageError: the text can't be parsed.
    """
    words = text.split()
    if words[:1] == ["release"]:
        return parse_gpu_indices(words[1:]) if words[1:] else (), None, ""
    if len(words) < 2:
        raise UsageError("type GPUs and until when, for example: 2 18:00")
    return parse_gpu_indices(words[:1]), until_from(words[1], now), " ".join(words[2:])


def claim_gpus(console: ConsoleApp) -> None:
    """Open the claim dialog."""

    def ask(board: Board) -> str:
        console.push_screen(ClaimDialog(console, board))
        return ""

    console.late_screens.open("", console.fleet.claims.board, ask, once="board")
