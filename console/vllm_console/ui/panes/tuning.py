"""The lines of the tuning bar: the common flags with their values, and what the plan says of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from textual.strip import Strip

from vllm_console.fleet.snapshot import Flags, ServerView
from vllm_console.ui.keymap import key_of
from vllm_console.ui.panes.bars import flag_text
from vllm_console.ui.parts import staging
from vllm_console.ui.parts.staging import Staged, Tuned
from vllm_console.ui.parts.verdict import PlanVerdict
from vllm_console.ui.terminal.lines import clickable, line
from vllm_console.ui.theme import ACCENT, CURSOR, DIM, KEY
from vllm_console.ui.widgets.draw import Part, fit

_WIDE = 100
_KEYS = ((("tuning_left", "tuning_right"), "flag"), (("tuning_up", "tuning_down"), "value"),
         (("tuning_keep",), "keep"), (("tuning_leave",), "leave"))  # fmt: skip
"""Actions of the bar, and what they do in a word."""


def tuning_lines(
    server: ServerView, staged: Staged, verdict: PlanVerdict | None, at: int, note: str, width: int
) -> list[Strip]:
    """The flags, the one under the cursor in reverse and changed ones marked; then the verdict, a note and the keys."""
    after = staging.staged_flags(server.flags, staged)
    changed = {step.flag for step in staged}
    parts: list[Part] = []
    for number, tuned in enumerate(staging.TUNED):
        mark = "*" if tuned.flag in changed else " "
        label = tuned.label if width >= _WIDE else tuned.short
        style = CURSOR if number == at else (ACCENT if tuned.flag in changed else None)
        text = f" {label} {_value(tuned, after)}{mark}"
        parts.append((text, clickable(f"focused.choose({number})", style)))
    keys: list[Part] = []
    for ids, text in _KEYS:
        names = [key_of(id) for id in ids]
        hint = f"{('' if all(len(name) == 1 for name in names) else ' ').join(names)} {text}"
        keys += [" ", (hint, clickable(f"focused.{ids[0]}", KEY) if len(ids) == 1 else KEY)]
    room = width - _length(keys) - 1
    if verdict is None:
        verdict_part: Part = (fit(f" {note or 'nothing staged: as it runs now'}", room), DIM)
    else:
        more = f" · {note}" if note else ""
        verdict_part = (fit(f" {verdict.sign} {verdict.message}{more}", room), verdict.style)
    while len(parts) > 1 and _length(parts[: at + 1]) > width:  # the one under the cursor is always in sight
        parts, at = parts[1:], at - 1
    first, second = line(*parts), line(verdict_part, *keys)
    return [strip if strip.cell_length <= width else strip.crop(0, width) for strip in (first, second)]


def _length(parts: Sequence[Part]) -> int:
    return sum(cell_len(part if isinstance(part, str) else part[0]) for part in parts)


def _value(tuned: Tuned, flags: Flags) -> str:
    value = flags.get(tuned.flag, staging.DEFAULTS.get(tuned.flag))
    return flag_text(value)
