"""How the flag editor's lines look. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from textual.strip import Strip

from vllm_console.fleet.model import ServerView
from vllm_console.text import plain
from vllm_console.ui.flag_book import FlagBook
from vllm_console.ui.flag_edits import FlagEdits
from vllm_console.ui.theme import ACCENT, CURSOR, DIM, STRONG, WARN
from vllm_console.ui.widgets.draw import Part, fit
from vllm_console.ui.widgets.lines import line
from vllm_launchers.plan.choices.model import Choice
from vllm_launchers.plan.common_flags import flag_text

WIDE = 110
"""From this width on meanings stand in the table."""


def heading(width: int) -> Strip:
    """Titles of the columns."""
    return line((_columns(("", "FLAG", "NOW", "STAGED", "VLLM'S DEFAULT", "MEANING"), width), DIM))


def flag_row(name: str, server: ServerView, edits: FlagEdits, book: FlagBook, width: int, under_cursor: bool) -> Strip:
    """A flag: what it is now, what it is to become, vLLM's default, and what it means."""
    flag, changed, value = book.facts(name), edits.changed(name), edits.value(name)
    staged = ("left out" if value is None else flag_text(value)) if changed else ""
    meaning = flag.meaning if flag else plain(server.reasons.get(name, ""))
    now = flag_text(server.flags.get(name))
    default = flag.default if flag else "–"
    text = _columns(("*" if changed else "", plain(name), plain(now), plain(staged), default, meaning), width)
    if under_cursor:
        return line((text, CURSOR))
    return line((text, ACCENT if changed else STRONG if name in server.flags else None))


def _columns(texts: tuple[str, str, str, str, str, str], width: int) -> str:
    mark, name, now, staged, default, meaning = texts
    wide = width >= WIDE
    first, each = (34, 15) if wide else (30, (width - 32 - 2) // 3 - 1)
    text = f" {mark or ' '}{fit(name, first)} {fit(now, each)} {fit(staged, each)} {fit(default, each)}"
    return fit(f"{text} {meaning}" if wide else text, width)


def about_lines(
    name: str, server: ServerView, book: FlagBook, proposed: Choice | None, seen: str, width: int
) -> list[Strip]:
    """What a flag is and takes, why it is set or is to change (by what was ``seen``), and vLLM's own help."""
    flag, reason = book.facts(name), server.reasons.get(name)
    parts: list[Part] = []
    if proposed is not None:
        parts.append((f"{proposed.source}: {proposed.reason}", ACCENT))
        parts += [(f"costs: {proposed.price}", WARN)] if proposed.price else []
        parts.append((f"seen: {seen}", DIM))
    if flag is None:
        parts.append((book.unknown(name) if name not in server.flags else "", WARN))
    else:
        parts.append(f"{name}: {flag.meaning}." if flag.meaning else name)
        if flag.deprecated:
            parts.append((f"deprecated: {flag.deprecated}", WARN))
        parts.append((f"takes {flag.takes}", DIM))
    if reason:
        parts.append((f"set because {reason}", DIM))
    if flag is not None and flag.help and flag.help.rstrip(".") != flag.meaning:
        parts.append((f"vLLM's help: {flag.help}", DIM))
    strips = []
    for part in parts:
        text, style = (part, None) if isinstance(part, str) else part
        strips += [line((f" {row}", style)) for row in textwrap.wrap(plain(text), width - 2)]
    return strips


def cut_rows(rows: Sequence[Strip], most: int, width: int) -> list[Strip]:
    """The first rows; the last one kept ends with `` …`` where more would follow."""
    if len(rows) <= most:
        return list(rows)
    last = rows[most - 1]
    return [*rows[: most - 1], Strip.join([last.crop(0, min(last.cell_length, width - 3)), line((" …", DIM))])]
