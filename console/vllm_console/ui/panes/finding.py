"""The finding of the selected server, in one line or two: what is wrong, the cure, and the key that stages it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from textual.strip import Strip

from vllm_console.diagnosis.document import change_words
from vllm_console.diagnosis.model import Measure, Severity
from vllm_console.fleet.model import ServerView
from vllm_console.format import duration
from vllm_console.text import plain
from vllm_console.ui.findings import SIGNS, Shown, change_text, findings_of, remedy_text, staged_cure
from vllm_console.ui.staging import Staged
from vllm_console.ui.theme import DIM, KEY, STRONG
from vllm_console.ui.verdict import Verdict
from vllm_console.ui.widgets.draw import Part, fit
from vllm_console.ui.widgets.lines import line

WIDE = 100
"""From this width on the keys are told in full."""


@dataclass(frozen=True, slots=True)
class Told:
    """What stands beside a server's findings: what is staged for it, and the plan's verdict once that is known."""

    staged: Staged = ()
    verdict: Verdict | None = None
    read_only: bool = False


def finding_height(server: ServerView | None, told: Told, roomy: bool) -> int:
    """How many lines it takes: none where nothing is found, one where all is well or room is scarce, else two."""
    if server is None:
        return 0
    found = findings_of(server)
    if not found:
        return int(told.verdict is not None)
    quiet = found[0].severity is Severity.GOOD and told.verdict is None
    return 2 if roomy and not quiet else 1


def finding_lines(server: ServerView, told: Told, now: float, width: int, height: int) -> list[Strip]:
    """One line or two."""
    found = findings_of(server)
    if not found:
        return [_verdict_line(server, told.verdict, width)] if told.verdict is not None else []
    top = found[0]
    name = fit(plain(server.name), min(cell_len(plain(server.name)), 20 if width >= WIDE else 12))
    if top.severity is Severity.GOOD and height < 2 and width >= WIDE:
        return [_symptom_line(top, name, now, width, _why_key(top, len(found) - 1))]
    if height < 2:
        if told.verdict is not None and told.staged:
            return [_verdict_line(server, told.verdict, width, _keys(server, top, told, len(found) - 1, short=True))]
        return [_short(server, top, name, told, now, width, len(found) - 1)]
    return [
        _symptom_line(top, name, now, width, _cure_key(server, top, told)),
        _cure_line(server, top, cell_len(name) + 5, told, width, len(found) - 1),
    ]


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


def _symptom_line(top: Shown, name: str, now: float, width: int, key: str) -> Strip:
    parts = heading(top, name, now)
    told = "" if top.severity is Severity.GOOD else top.symptom
    room = width - _length(parts) - len(key) - 6
    for measure in top.measures:
        text = measure_text(measure)
        if plain(measure.value) not in told and cell_len(told) + cell_len(text) + 3 <= room:
            told = f"{told.removesuffix('.')} · {text}" if told else text
    style = DIM if top.severity is Severity.GOOD else None
    return _with_key(parts + ([(f": {told}", style)] if told else []), key, width)


def _cure_line(server: ServerView, top: Shown, indent: int, told: Told, width: int, others: int) -> Strip:
    parts: list[Part] = [" " * indent]
    if told.verdict is not None and told.staged:
        parts += [(f"{told.verdict.sign} ", told.verdict.style), (told.verdict.words, told.verdict.style)]
    elif top.remedies:
        parts.append(remedy_text(server.flags, top.remedies[0]))
    elif top.severity is not Severity.GOOD:
        parts.append((top.cause, None))
    return _with_key(parts, _why_key(top, others), width)


def _why_key(top: Shown, others: int) -> str:
    return "" if top.severity is Severity.GOOD and not others else "i why" + (f", {others} more" if others else "")


def _short(server: ServerView, top: Shown, name: str, told: Told, now: float, width: int, others: int) -> Strip:
    parts = heading(top, name, now)
    keys = _keys(server, top, told, others, short=True)
    room = width - _length(parts) - len(keys) - 3
    if top.severity is Severity.GOOD:
        extra = " · ".join(measure_text(measure) for measure in top.measures[:1])
    elif top.cures:
        changes = top.cures[0].changes
        extra = change_text(server.flags, changes)
        if cell_len(extra) + 3 > room:
            extra = plain(change_words(changes))
    else:
        extra = top.symptom
    if extra and room > 8:
        parts.append(
            (f" · {fit(extra, min(room - 3, cell_len(extra)))}", DIM if top.severity is Severity.GOOD else None)
        )
    return _with_key(parts, keys, width)


def _verdict_line(server: ServerView, found: Verdict | None, width: int, keys: str = "") -> Strip:
    if found is None:
        return line()
    name = plain(server.name)
    parts: list[Part] = [
        (f" {found.sign} ", found.style),
        (f"{name}  ", STRONG),
        "staged: ",
        (found.words, found.style),
    ]
    return _with_key(parts, keys, width)


def _cure_key(server: ServerView, top: Shown, told: Told) -> str:
    cures = top.cures
    if not cures or told.read_only or not server.ours:
        return ""
    at = staged_cure(server, cures, told.staged)
    if at is None:
        return "f stage cure"
    return f"cure {at + 1} of {len(cures)}, f next" if len(cures) > 1 else "cure staged"


def _keys(server: ServerView, top: Shown, told: Told, others: int, *, short: bool) -> str:
    cure = _cure_key(server, top, told)
    if short:
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
