"""All keys, from the registry."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from textual.strip import Strip

from vllm_console.ui.actions import grouped
from vllm_console.ui.screens.reading import ReadingScreen
from vllm_console.ui.theme import DIM, KEY, STRONG
from vllm_console.ui.widgets.draw import beside, fit
from vllm_console.ui.widgets.lines import BLANK, line

# Width of the keys, in cells.
_KEYS = 10

_MARKS = (
    ("!", "misses the preset's objective"),
    ("–", "not reported"),
    ("sim", "a simulated engine: no GPU, no model"),
    ("by NAME", "a server of someone else: shown, never touched"),
)


class HelpScreen(ReadingScreen):
    """Every key with what it does; in two columns where there is room."""

    def __init__(self, read_only: bool = False) -> None:
        super().__init__()
        self._read_only = read_only

    def title_text(self) -> str:
        """The title."""
        return "Help: keys" + (" (read-only: keys that change something are off)" if self._read_only else "")

    def content(self, width: int) -> Sequence[Strip]:
        """The lines."""
        return help_lines(width, self._read_only)


def help_lines(width: int, read_only: bool) -> list[Strip]:
    """Groups of keys, and what the marks mean."""
    column = width if width < 110 else width // 2
    blocks = [
        _block(title, [(action.label, action.title) for action in group], column)
        for title, group in grouped(read_only).items()
    ]
    blocks.append(_block("Marks", _MARKS, column))
    if column == width:
        return [strip for block in blocks for strip in block]
    left: list[Strip] = []
    right: list[Strip] = []
    for block in blocks:
        (left if len(left) <= len(right) else right).extend(block)
    rows = max(len(left), len(right))
    left += [BLANK] * (rows - len(left))
    right += [BLANK] * (rows - len(right))
    return [beside(a, column, b) for a, b in zip(left, right, strict=True)]


def _block(title: str, entries: Sequence[tuple[str, str]], width: int) -> list[Strip]:
    lines = [line((f" {title}", STRONG))]
    for keys, text in entries:
        # Keys that need more than their column have a line of their own.
        head, rows = keys, textwrap.wrap(text, width - _KEYS - 5, break_on_hyphens=False)
        if len(keys) > _KEYS:
            lines.append(line("  ", (keys, KEY)))
            head = ""
        for row in rows:
            lines.append(line("  ", (fit(head, _KEYS), KEY), " ", (row, None)))
            head = ""
    return [*lines, line((" ", DIM))]
