"""Whether the newest flag change helped: one line below a server's finding."""

from __future__ import annotations

from rich.cells import cell_len
from rich.style import Style
from textual.strip import Strip

from vllm_console.runs.compare import Comparison, ComparisonVerdict, Side
from vllm_console.runs.text import brief, missing_text, setting_text
from vllm_console.text import clock, plain
from vllm_console.ui.keymap import key_of
from vllm_console.ui.terminal.lines import clickable, line
from vllm_console.ui.theme import BAD, DIM, KEY, OK, STRONG, WARN
from vllm_console.ui.widgets.draw import fit

SIGN = "Δ"
"""Marks a verdict on a change, which is spelled out; other signs mark findings."""

VERDICT_STYLES: dict[ComparisonVerdict, Style] = {
    ComparisonVerdict.BETTER: OK,
    ComparisonVerdict.WORSE: BAD,
    ComparisonVerdict.MIXED: WARN,
    ComparisonVerdict.INCONCLUSIVE: WARN,
    ComparisonVerdict.NOT_COMPARABLE: WARN,
}
_STYLES = {**VERDICT_STYLES, ComparisonVerdict.NO_DIFFERENCE: STRONG, ComparisonVerdict.TOO_LITTLE: DIM}


def worth_reporting(found: Comparison) -> bool:
    """Whether there is or will be something to report: flags changed, and the previous run has enough minutes."""
    return bool(found.differences) and not (found.verdict is ComparisonVerdict.TOO_LITTLE and found.before.missing)


def change_line(found: Comparison, name_width: int, width: int) -> Strip:
    """The verdict on a server's newest change (or when there can be one) and the compare key.

    A verdict names the run it compares with and its time, because a finding next to it is about now.
    """
    run = found.after.run
    style = _STYLES[found.verdict]
    number = f"run {run.generation}"
    message, key = brief(found), f"{key_of('compare')} compares"
    if found.verdict is ComparisonVerdict.TOO_LITTLE:
        message, key = f"too early to tell: needs {missing_text(found.after)} more traffic", ""
    room = width - name_width - 5 - (len(key) + 3 if key else 1)
    plainly = found.verdict in (ComparisonVerdict.BETTER, ComparisonVerdict.WORSE)
    text = plain(f"{number}: {message}")
    if plainly:
        verdict, _, what = message.partition(":")
        against = f"than run {found.before.run.generation}:{what}"
        at, verdict = _compared_at(found.after), verdict.lower()
        forms = [f"{number} was {verdict} {at} {against}", f"was {verdict} {at} {against}"] if at else []
        forms += [f"{number} {verdict} {against}", f"{verdict} {against}"]
        text = plain(next((form for form in forms if cell_len(form) <= room), forms[-1]))
    changed = f" ({_changed(found)})"
    parts = [
        (fit(text, min(cell_len(text), room)), style if found.verdict is not ComparisonVerdict.NO_DIFFERENCE else None)
    ]
    if cell_len(text) + cell_len(changed) <= room:
        parts.append((changed, DIM))
    used = sum(cell_len(part) for part, _ in parts)
    name = fit(plain(run.server), name_width)
    return line(
        (f" {SIGN} ", style),
        (f"{name}  ", STRONG),
        *parts,
        " " * (room - used + 2),
        (key, clickable("screen.compare", KEY)),
    )


def _compared_at(side: Side) -> str:
    """When the compared traffic was: ``at 07:22–07:24``; empty if unknown."""
    if side.since is None or side.until is None:
        return ""
    return f"at {clock(side.since, side.until)}–{clock(side.until, side.until)}"


def _changed(found: Comparison) -> str:
    if len(found.differences) == 1:
        return plain(setting_text(found.differences[0]))
    return f"{len(found.differences)} changes combined"
