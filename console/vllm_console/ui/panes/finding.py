"""The finding of the selected server, in as few lines as it takes: what is wrong, the cure, the key that stages it."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.style import Style
from textual.strip import Strip

from vllm_console.diagnosis.model import Measure, Severity
from vllm_console.fleet.model import ServerView
from vllm_console.format import duration
from vllm_console.text import plain
from vllm_console.ui.findings import SIGNS, Shown, findings_of, remedy_text, staged_cure
from vllm_console.ui.staging import Staged
from vllm_console.ui.theme import DIM, KEY, STRONG
from vllm_console.ui.verdict import Verdict
from vllm_console.ui.widgets.draw import Part, fit
from vllm_console.ui.widgets.lines import line

WIDE = 100
"""From this width on the keys are told in full."""

MOST_LINES = 5
"""On a screen of 24 lines."""


@dataclass(frozen=True, slots=True)
class Told:
    """What stands beside a server's findings: what is staged for it, and the plan's verdict once that is known."""

    staged: Staged = ()
    verdict: Verdict | None = None
    read_only: bool = False


def finding_lines(server: ServerView | None, told: Told, now: float, width: int, most: int = MOST_LINES) -> list[Strip]:
    """What is found of a server, in as many lines as it takes to be read, up to ``most``; none where nothing is."""
    if server is None:
        return []
    found = findings_of(server)
    staged = told.verdict if told.staged else None
    if not found:
        return _told_lines(server, staged, width, most)
    top, others = found[0], len(found) - 1
    name = fit(plain(server.name), min(cell_len(plain(server.name)), 20 if width >= WIDE else 12))
    parts = heading(top, name, now)
    if top.severity is Severity.GOOD:
        told_lines = _told_lines(server, staged, width, most - 1)
        return [_good_line(top, parts, width, _why_key(top, others)), *told_lines]
    indent = cell_len(name) + 5 if width >= WIDE else 3
    cure, why = _cure_key(server, top, told), _why_key(top, others)
    keys = ("", _short_keys(cure, top, others)) if width < WIDE else (why, cure)
    symptom = _one_line(top, parts, width, keys[1])
    lines = [_with_key([*parts, f": {symptom}"] if symptom else parts, keys[1], width)]
    if staged is not None:
        below = _rows(f"{staged.sign} {staged.words}", staged.style, indent, width, keys[0])
    else:
        below = _rows(_cure_text(server, top), None, indent, width, keys[0])
    room = most - len(lines) - len(below)
    if not symptom and room > 0:
        lines += _rows(top.symptom, None, indent, width, "")[:room]
    return [*lines, *below][:most]


def _told_lines(server: ServerView, verdict: Verdict | None, width: int, most: int) -> list[Strip]:
    """The verdict on what is staged, where no finding stands above it."""
    if verdict is None:
        return []
    told = _rows(f"staged: {verdict.words}", verdict.style, cell_len(plain(server.name)) + 5, width, "")[:most]
    first = line((f" {verdict.sign} ", verdict.style), (f"{plain(server.name)}  ", STRONG))
    return [Strip.join([first, told[0].crop(first.cell_length)]), *told[1:]] if told else []


def _one_line(top: Shown, parts: Sequence[Part], width: int, key: str) -> str:
    """The symptom, with as many of its figures as fit behind the heading; empty where it does not fit itself."""
    told = top.symptom
    room = width - _length(parts) - len(key) - 6
    if cell_len(told) > room:
        return ""
    for measure in top.measures:
        text = measure_text(measure)
        if plain(measure.value) not in told and cell_len(told) + cell_len(text) + 3 <= room:
            told = f"{told.removesuffix('.')} · {text}" if told else text
    return told


def _cure_text(server: ServerView, top: Shown) -> str:
    """What the key would stage; where no flag mends it, the best advice, or the cause."""
    offered = top.cures or top.remedies
    return remedy_text(server.flags, offered[0]) if offered else top.cause


def _rows(text: str, style: Style | None, indent: int, width: int, key: str) -> list[Strip]:
    """A text over as many lines as it takes; the key stands at the right of the first, and keeps its columns free."""
    room = max(20, width - indent - (len(key) + 3 if key else 1))
    rows = textwrap.wrap(plain(text), room, break_on_hyphens=False) or [""]
    return [_with_key([" " * indent, (row, style)], key if not at else "", width) for at, row in enumerate(rows)]


def clock(since: float, now: float) -> str:
    """Since when: a time of day, or how long when that is more than a day."""
    if now - since > 86_400:
        return f"for {duration(now - since)}"
    return time.strftime("since %H:%M", time.localtime(since))


def measure_text(measure: Measure) -> str:
    """``KV cache usage 91% (limit 85%)``."""
    limit = f" (limit {plain(measure.limit)})" if measure.limit else ""
    return f"{plain(measure.name)} {plain(measure.value)}{limit}"


def heading(found: Shown, name: str, now: float) -> list[Part]:
    """Sign, server, what it is and since when."""
    sign, style = SIGNS[found.severity]
    quiet = found.severity is Severity.GOOD
    parts: list[Part] = [(f" {sign} ", style), (f"{name}  ", None if quiet else STRONG)]
    parts.append((found.title, DIM if quiet else style))
    if found.since is not None:
        parts.append((f" {clock(found.since, now)}", DIM if quiet else None))
    return parts


def _good_line(top: Shown, parts: list[Part], width: int, key: str) -> Strip:
    told = ""
    room = width - _length(parts) - len(key) - 6
    for measure in top.measures:
        text = measure_text(measure)
        if cell_len(told) + cell_len(text) + 3 <= room:
            told = f"{told} · {text}" if told else text
    return _with_key(parts + ([(f": {told}", DIM)] if told else []), key, width)


def _why_key(top: Shown, others: int) -> str:
    return "" if top.severity is Severity.GOOD and not others else "i why" + (f", {others} more" if others else "")


def _cure_key(server: ServerView, top: Shown, told: Told) -> str:
    cures = top.cures
    if not cures or told.read_only or not server.ours:
        return ""
    at = staged_cure(server, cures, told.staged)
    if at is None:
        return "f stage cure"
    return f"cure {at + 1} of {len(cures)}, f next" if len(cures) > 1 else "cure staged"


def _short_keys(cure: str, top: Shown, others: int) -> str:
    """The keys where width is scarce."""
    cure = {"f stage cure": "f cure", "cure staged": ""}.get(cure, "f next" if cure else "")
    why = "" if top.severity is Severity.GOOD and not others else f"i why{f' +{others}' if others else ''}"
    return "  ".join(filter(None, (cure, why)))


def _length(parts: Sequence[Part]) -> int:
    return sum(cell_len(part if isinstance(part, str) else part[0]) for part in parts)


def _with_key(parts: list[Part], key: str, width: int) -> Strip:
    """The parts cut to what the key leaves, and the key at the right."""
    room = width - (len(key) + 3 if key else 1)
    kept: list[Part] = []
    for part in parts:
        text, style = (part, None) if isinstance(part, str) else part
        if cell_len(text) > room:
            kept.append((fit(text, room), style))
            room = 0
            break
        kept.append((text, style))
        room -= cell_len(text)
    return line(*kept, " " * (room + 1), *([(f" {key}", KEY)] if key else []))
