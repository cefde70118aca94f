"""A table as lines: a header, columns as wide as needed, and a last column that takes the rest and wraps. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.style import Style
from textual.strip import Strip

from vllm_console.text import plain
from vllm_console.ui.terminal.lines import line
from vllm_console.ui.theme import DIM, STRONG
from vllm_console.ui.widgets.draw import fit, wrapped

GAP = 2
"""Cells between columns; 1 if the last column would be too narrow otherwise."""

LEAST_LAST = 20
"""Preferred minimum cells of the last column."""

LEAST_BESIDE = 8
"""Minimum cells of the last column; if it has fewer, it moves below its row."""

BELOW = 5
"""Indent of what is placed below its row."""


Value = str | tuple[str, Style | None]


def section(title: str, lines: Sequence[Strip]) -> list[Strip]:
    """Lines below a title; empty if there are no lines."""
    return [line((f" {title}", STRONG)), *lines] if lines else []


def sections(parts: Iterable[Sequence[Strip]]) -> list[Strip]:
    """The parts that have lines, separated by blank lines."""
    return [strip for part in parts if part for strip in (line(), *part)][1:]


def facts(rows: Sequence[tuple[str, Value]], width: int) -> list[Strip]:
    """A table of names and values, without a header."""
    return table(("", ""), [((name, DIM), value) for name, value in rows], width)[1:]


def table(columns: Sequence[str], rows: Sequence[Sequence[Value]], width: int) -> list[Strip]:
    """The column headings and the rows; empty without rows.

    Columns whose heading begins with ``>`` are right-aligned, as for figures.
    """
    if not rows:
        return []
    texts = [[_parts(value)[0] for value in row] for row in rows]
    titles, sides = [one.removeprefix(">") for one in columns], [">" if one[:1] == ">" else "<" for one in columns]
    widths = [max(len(title), *(cell_len(row[at]) for row in texts)) for at, title in enumerate(titles[:-1])]
    gap = GAP if 1 + sum(widths) + GAP * len(widths) + LEAST_LAST <= width else 1
    indent = 1 + sum(widths) + gap * len(widths)
    below = width - indent < LEAST_BESIDE
    heads = [fit(title, room, side) for title, room, side in zip(titles, widths, sides, strict=False)]
    last = "" if below else titles[-1]
    lines = [line((" " + (" " * gap).join([*heads, last]), DIM)).crop(0, width)]
    for row in rows:
        cells: list[Value] = [" "]
        for side, room, value in zip(sides, widths, row, strict=False):
            text, style = _parts(value)
            cells += [(fit(text, room, side), style), " " * gap]
        lines += _with_last(cells, row[-1], BELOW if below else indent, width, below=below)
    return lines


def _with_last(cells: Sequence[Value], value: Value, indent: int, width: int, *, below: bool) -> list[Strip]:
    """A row with its last cell, wrapped over as many lines as needed."""
    text, style = _parts(value)
    rows = wrapped(text, max(LEAST_BESIDE, width - indent))
    first = [line(*cells).crop(0, width)] if below else [line(*cells, (rows[0] if rows else "", style))]
    rest = rows if below else rows[1:]
    return [strip.crop(0, width) for strip in (*first, *(line(" " * indent, (row, style)) for row in rest))]


def _parts(value: Value) -> tuple[str, Style | None]:
    return (plain(value), None) if isinstance(value, str) else (plain(value[0]), value[1])
