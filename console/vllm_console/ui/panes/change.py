"""Whether the newest change of flags helped, in one line below what is found of a server."""

from __future__ import annotations

import math

from rich.cells import cell_len
from rich.style import Style
from textual.strip import Strip

from vllm_console.telemetry.compare_words import brief, setting_words
from vllm_console.telemetry.comparison import Comparison, Verdict
from vllm_console.text import plain
from vllm_console.ui.theme import BAD, DIM, KEY, OK, STRONG, WARN
from vllm_console.ui.widgets.draw import fit
from vllm_console.ui.widgets.lines import line

_SIGNS: dict[Verdict, tuple[str, Style]] = {
    Verdict.BETTER: ("✓", OK),
    Verdict.WORSE: ("✗", BAD),
    Verdict.MIXED: ("!", WARN),
    Verdict.NO_DIFFERENCE: ("=", STRONG),
    Verdict.NOT_COMPARABLE: ("–", WARN),
    Verdict.TOO_LITTLE: ("·", DIM),
}


def worth_telling(found: Comparison) -> bool:
    """Whether there is, or will be, something to say: flags were changed, and the run before has enough minutes."""
    return bool(found.differences) and not (found.verdict is Verdict.TOO_LITTLE and found.before.missing)


def change_line(found: Comparison, name_width: int, width: int) -> Strip:
    """The verdict on a server's newest change, or when it can be told, and the key that tells all."""
    run = found.after.run
    sign, style = _SIGNS[found.verdict]
    number = f"generation {run.generation}: "
    told, key = brief(found), "c compares"
    if found.verdict is Verdict.TOO_LITTLE:
        minutes = math.ceil(found.after.minutes_missing)
        told, key = f"c says whether it helped in about {minutes} min of traffic", ""
    room = width - name_width - 5 - (len(key) + 3 if key else 1)
    text = plain(number + told)
    changed = f" ({_changed(found)})"
    parts = [(fit(text, min(cell_len(text), room)), style if found.verdict is not Verdict.NO_DIFFERENCE else None)]
    if cell_len(text) + cell_len(changed) <= room:
        parts.append((changed, DIM))
    used = sum(cell_len(part) for part, _ in parts)
    name = fit(plain(run.server), name_width)
    return line((f" {sign} ", style), (f"{name}  ", STRONG), *parts, " " * (room - used + 2), (key, KEY))


def _changed(found: Comparison) -> str:
    if len(found.differences) == 1:
        return plain(setting_words(found.differences[0]))
    return f"{len(found.differences)} changes at once"
