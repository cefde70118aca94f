"""Everything about the machine's GPUs: clocks, slots, every link, every process."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from rich.style import Style
from textual.strip import Strip

from vllm_console.fleet.model import FleetSnapshot
from vllm_console.host_words import describe
from vllm_console.text import plain
from vllm_console.ui.panes.gpu_lines import colours_of
from vllm_console.ui.screens.reading import ReadingScreen
from vllm_console.ui.theme import BAD, DIM, STRONG, WARN
from vllm_console.ui.widgets.lines import line

INDENT = 12


REDRAW_SECONDS = 1.0


class GpuDetailsScreen(ReadingScreen):
    """Describes the machine, and goes on doing so: ``latest`` gives the newest snapshot."""

    def __init__(self, snapshot: FleetSnapshot, latest: Callable[[], FleetSnapshot | None]) -> None:
        super().__init__()
        self._snapshot, self._latest = snapshot, latest

    def on_mount(self) -> None:
        """Show everything, and what changes."""
        super().on_mount()
        self.set_interval(REDRAW_SECONDS, self._redraw)

    def _redraw(self) -> None:
        newest = self._latest()
        if newest is not None and newest is not self._snapshot:
            self._snapshot = newest
            self.draw(self.app.size.width)

    def title_text(self) -> str:
        """The title."""
        return "GPUs" + (" · recorded host" if self._snapshot.host_recorded else "")

    def content(self, width: int) -> Sequence[Strip]:
        """The lines."""
        return details_lines(self._snapshot, width)


def details_lines(snapshot: FleetSnapshot, width: int) -> list[Strip]:
    """The machine's description, wrapped, our servers' processes in their colours."""
    if snapshot.host is None:
        return [line((f" {snapshot.host_problem or 'no GPU is known of yet'}", DIM))]
    colours = {f" by {name} (yours)": style for name, style in colours_of(snapshot).items()}
    lines = []
    for text in describe(snapshot.host, wrong_first=True):
        style = _style(text, colours)
        rows = textwrap.wrap(plain(text), max(30, width - 1), subsequent_indent=" " * INDENT) or [""]
        lines += [line((f" {row}", style)) for row in rows]
    return lines


def _style(text: str, colours: dict[str, Style]) -> Style | None:
    """Headings strong, what is wrong marked, a server's process in its colour."""
    if text.startswith("!"):
        return WARN
    if text.startswith("  lost"):
        return BAD
    if text and not text.startswith(" "):
        return STRONG
    if text.startswith("  board") and not (text.endswith(" by you") or " by you:" in text):
        return WARN
    if text.startswith("  held"):
        return next((style for mark, style in colours.items() if mark in text), None)
    return None
