"""The selected server's finding: what is wrong, the fix and the key that stages it; otherwise the latest event."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import msgspec
from rich.style import Style
from textual.strip import Strip

from vllm_console.diagnosis.finding import SECOND_SERVER, WINDOW, Measure, Severity
from vllm_console.fleet.snapshot import TESTS, TUNES, ServerView, StateThen
from vllm_console.text import duration, plain, shortened, size
from vllm_console.ui.findings import (
    SIGNS,
    ServerFinding,
    being_applied,
    findings_of,
    fix_texts,
    staged_fix,
    unjudged,
    with_effect,
    with_tradeoff,
)
from vllm_console.ui.keymap import key_of
from vllm_console.ui.parts.staged_plan import PlanVerdict
from vllm_console.ui.terminal.lines import cells, clickable, line
from vllm_console.ui.theme import ACCENT, BAD, DIM, KEY, STRONG, WARN
from vllm_console.ui.widgets.draw import Part, fit, paragraph, parts_length, wrapped
from vllm_launchers.keeper.records import SleepStep, State
from vllm_launchers.vllm.flags.changes import Edits

WIDE = 100
"""Minimum width for the keys' full names."""

MOST_LINES = 3
"""Maximum lines of findings, on a large screen."""

Hint = tuple[str, str]
"""A key with its label, and its action."""


def finding_rows(height: int) -> int:
    """The number of rows reserved for findings on a screen of this height."""
    return 1 if height < 20 else 2 if height < 32 else MOST_LINES


def event_line(server: ServerView, event: tuple[float, str] | None, now: float, width: int) -> Strip:
    """The latest event of a server without findings; otherwise its state and since when."""
    if server.moment is not None:
        text = f"{plain(server.name)}  {_then(server.then, server.moment)}"
    elif event is not None:
        text = f"{since_text(event[0], now).removeprefix('since ')}  {plain(event[1])}"
    else:
        running = ", running" if server.since_start else ""
        text = f"{plain(server.name)}  {server.state_text}{running} {since_text(server.state_since, now)}"
    return line((fit(f" · {text}", width).rstrip(), DIM))


def preparing(server: ServerView) -> bool:
    """Whether a restart is being prepared or it is about to sleep, while it still serves."""
    restarting = server.restart is not None and server.restart.under_way and server.state is State.READY
    return restarting or draining(server)


def cancelable(server: ServerView, read_only: bool) -> bool:
    """Whether `preparing` can be ended from this console."""
    return preparing(server) and server.ours and not read_only


def draining(server: ServerView) -> bool:
    """Whether it will sleep once its requests have finished."""
    return server.sleep is not None and server.sleep.step is SleepStep.DRAINING


def restart_line(server: ServerView, now: float, width: int, read_only: bool) -> Strip:
    """The progress of preparing a restart, or that it is about to sleep, and the key that cancels it."""
    if server.sleep is not None and draining(server):
        facts = [f"{server.sleep.sentence} · {duration(max(0.0, now - server.sleep.since))}"]
    elif (restart := server.restart) is not None:
        facts = [
            f"restart: {restart.doing} {duration(max(0.0, now - restart.asked_at))}",
            ", ".join(restart.changes),
            "keeps serving",
            f"+{size(restart.memory_mib * 2**20)} RAM" if restart.memory_mib is not None else "",
        ]
    else:
        return line()
    text = plain(" · ".join(filter(None, facts)))
    parts: list[Part] = [(" ↻ ", ACCENT), (f"{plain(server.name)}  ", STRONG), text]
    hints = [(f"{key_of('clear')} cancel", "clear")] if cancelable(server, read_only) else []
    return _with_keys(parts, hints, width)


def _then(then: StateThen, moment: float) -> str:
    """What is known about a server's state at an earlier moment."""
    if then.state is None:
        return "was not launched yet" if then.before else "its state then is not known"
    since = since_text(then.since, moment) if then.since is not None else ""
    return f"{then.state} {since}, run {then.generation}"


def unjudged_line(server: ServerView, text: str, width: int) -> Strip:
    """A figure above its objective that has no finding yet."""
    return line((" · ", WARN), (f"{plain(server.name)}  ", STRONG), (fit(text, width).rstrip(), WARN)).crop(0, width)


class StagedState(msgspec.Struct, frozen=True):
    """What is staged for a server, and the plan's verdict on it."""

    staged: Edits = {}
    verdict: PlanVerdict | None = None
    read_only: bool = False
    effect: str = ""
    """Short predicted effect of what is staged or else of the best fix on the top finding; empty if unknown."""


def finding_lines(
    server: ServerView, state: StagedState, now: float, width: int, most: int = MOST_LINES
) -> list[Strip]:
    """The top finding in up to ``most`` lines; empty without findings and staged changes."""
    found = findings_of(server)
    staged = state.verdict if state.staged else None
    early = unjudged(server)
    if early:
        return [unjudged_line(server, early, width), *_verdict_lines(server, staged, width, most - 1)]
    if not found and server.attached is not None and server.state is State.UNRESPONSIVE:
        return _unreachable_lines(server, now, width, most)
    if not found:
        return _verdict_lines(server, staged, width, most)
    top, others = found[0], len(found) - 1
    name = fit(plain(server.name), min(cells(plain(server.name)), 20 if width >= WIDE else 12))
    wide = width >= WIDE
    parts = finding_heading(top, name, now, wide=wide)
    if top.severity is Severity.GOOD:
        good = _good_line(top, parts, width, _findings_hint(top, others, wide=True))
        return [good, *_verdict_lines(server, staged, width, most - 1)]
    indent = cells(name) + 5 if wide else 3
    fix, why = _fix_hint(server, top, state, wide=wide), _findings_hint(top, others, wide=wide)
    above, below = (fix, why) if wide else ([*fix, *why], [])
    room = _room(width, above)
    style = staged.style if staged is not None else None
    texts = _fix_texts(server, top, state.effect) if staged is None else _verdict_texts(server, top, state, staged)
    rows = _rows(_fitting(texts, indent, width, below, most - 1), style, indent, width, below, most - 1)
    if symptom := _symptom(top, room - parts_length(parts) - 2):
        parts = [*parts, f": {symptom}"]
    elif spare := max(0, most - 1 - len(rows)):
        rows = [*_rows(top.symptom, None, indent, width, (), spare), *rows]
    else:
        parts = next((one for one in _headings(top, parts) if parts_length(one) <= room), parts)
    return [_with_keys(parts, above, width), *rows][:most]


def _unreachable_lines(server: ServerView, now: float, width: int, most: int) -> list[Strip]:
    """Since when and why an endpoint or a machine is unreachable."""
    text = f"{server.state_text} {since_text(server.state_since, now)}: {server.reason}"
    return _named_lines(server, "!", text, BAD, width, most)


def _verdict_texts(server: ServerView, top: ServerFinding, state: StagedState, verdict: PlanVerdict) -> list[str]:
    """The verdict on the staged changes, most detailed first.

    If they are a fix of this finding, the predicted effect and the trade-off follow.
    """
    text, at = f"staged: {verdict.message}", staged_fix(server, top.flag_fixes, state.staged)
    if at is None:
        return [text]
    fix = top.flag_fixes[at]
    return [one for head in with_effect(text, " · ", state.effect) for one in with_tradeoff(head, fix.tradeoff)]


def _verdict_lines(server: ServerView, verdict: PlanVerdict | None, width: int, most: int) -> list[Strip]:
    """The verdict on the staged changes if there is no finding above it."""
    if verdict is None:
        return []
    return _named_lines(server, "·", f"staged: {verdict.message}", verdict.style, width, most)


def _named_lines(server: ServerView, sign: str, text: str, style: Style, width: int, most: int) -> list[Strip]:
    name = f"{plain(server.name)}  "
    indent = " " * (cells(name) + 3)
    return paragraph(text, width - 1, style, indent, first=[(f" {sign} ", style), (name, STRONG)], most=most)[:most]


def _symptom(top: ServerFinding, room: int) -> str:
    """The symptom with as many of its figures as fit; empty if the symptom itself does not fit."""
    figures = [measure_text(one) for one in top.measures if plain(one.value) not in top.symptom]
    return _as_many(top.symptom, figures, room) if cells(top.symptom) <= room else ""


def _as_many(text: str, more: Iterable[str], room: int) -> str:
    """A text followed by those of ``more`` that fit, separated by dots."""
    for one in more:
        longer = f"{text.removesuffix('.')} · {one}" if text else one
        text = longer if cells(longer) <= room else text
    return text


def _headings(top: ServerFinding, parts: Sequence[Part]) -> list[list[Part]]:
    """The heading with a figure and its limit, for a symptom that does not fit; from long to short.

    Shorter ones lack the figure's name, since when it is so, the limit, and what loads the server.
    """
    title, more = parts[:_NAMED], parts[_NAMED:]
    load = more[top.since is not None :]
    limited = [one for one in top.measures if one.limit]
    beyond = [one for one in limited if not one.within]
    clear = [one for one in beyond if not plain(one.value).replace(".", "").replace(",", "").isdecimal()]
    figures = [*map(measure_text, beyond or limited), *(f"{plain(one.value)}{_limit(one)}" for one in clear)]
    values = [plain(one.value) for one in clear]
    forms = [(more, figures), (load, figures), (load, values), ([], figures), ([], values)]
    return [[*title, *rest, f": {text}"] for rest, texts in forms for text in texts]


def _fix_texts(server: ServerView, top: ServerFinding, effect: str = "") -> list[str]:
    """What the key would stage with its predicted effect, most detailed first; else the best advice, or the cause."""
    offered = top.flag_fixes or top.fixes
    return fix_texts(server.flags, offered[0], effect if top.flag_fixes else "") if offered else shortened(top.cause)


def _rows(text: str, style: Style | None, indent: int, width: int, hints: Sequence[Hint], most: int) -> list[Strip]:
    """A text in at most ``most`` lines. Keys are at the right of the first one and keep their columns free."""
    if most <= 0:
        return []
    rows = wrapped(plain(text), _row_width(indent, width, hints), most) or ("",)
    return [_with_keys([" " * indent, (row, style)], hints if not at else (), width) for at, row in enumerate(rows)]


def _row_width(indent: int, width: int, hints: Sequence[Hint]) -> int:
    return max(20, _room(width, hints) - indent)


def _fitting(texts: Sequence[str], indent: int, width: int, hints: Sequence[Hint], most: int) -> str:
    """The first text that fits into ``most`` lines, else the last (shortest) one."""
    room = _row_width(indent, width, hints)
    short = (text for text in texts if len(wrapped(plain(text), room)) <= most)
    return next(short, texts[-1] if texts else "")


def since_text(since: float, now: float) -> str:
    """Since when: a time of day, or a duration if it is more than a day."""
    if now - since > 86_400:
        return f"for {duration(now - since)}"
    return time.strftime("since %H:%M", time.localtime(since))


def measure_text(measure: Measure) -> str:
    """``KV cache usage 91% (limit 85%)``."""
    return f"{plain(measure.name)} {plain(measure.value)}{_limit(measure)}"


def _limit(measure: Measure) -> str:
    """`` (limit 85%)``, or ``, limit 85%`` after a figure that ends with a parenthesis; empty without a limit."""
    if not measure.limit:
        return ""
    text = f"limit {plain(measure.limit)}"
    return f", {text}" if measure.value.endswith(")") else f" ({text})"


LOADS = {TUNES: "tuner", TESTS: "load test"}
"""Short names of our own loads on a server."""

_NAMED = 3
"""Number of leading parts of a heading: sign, server, title."""


def finding_heading(found: ServerFinding, name: str, now: float, *, wide: bool) -> list[Part]:
    """Sign, server, title, since when, and which load of ours is on the server (its short name unless ``wide``)."""
    sign, style = SIGNS[found.severity]
    quiet = found.severity is Severity.GOOD
    parts: list[Part] = [(f" {sign} ", style), (f"{name}  ", None if quiet else STRONG)]
    parts.append((found.title, DIM if quiet else style))
    if found.since is not None:
        parts.append((f" {since_text(found.since, now)}", DIM if quiet else None))
    if found.load is not None:
        parts.append((f" ({found.load[0] if wide else LOADS[found.load[0]]})", ACCENT))
    return parts


def _good_line(top: ServerFinding, parts: Sequence[Part], width: int, hints: Sequence[Hint]) -> Strip:
    lead = f", {WINDOW}: "
    figures = _as_many("", map(measure_text, top.measures), _room(width, hints) - parts_length(parts) - len(lead))
    return _with_keys([*parts, (lead + figures, DIM)] if figures else parts, hints, width)


def _findings_hint(top: ServerFinding, others: int, *, wide: bool) -> list[Hint]:
    if top.severity is Severity.GOOD and not others:
        return []
    more = (f", {others} more" if wide else f" +{others}") if others else ""
    return [(f"{key_of('findings')} findings{more}", "findings")]


def _fix_hint(server: ServerView, top: ServerFinding, state: StagedState, *, wide: bool) -> list[Hint]:
    """The key for the next step toward a fix; if there is room, also what is already staged."""
    fixes = top.flag_fixes
    if state.read_only or not server.ours or server.moment is not None:
        return []
    if not fixes:
        another = any(fix.why.startswith(SECOND_SERVER) for fix in top.fixes)
        return [(f"{key_of('new_server')} {'new server' if wide else 'new'}", "new_server")] if another else []
    at, key = staged_fix(server, fixes, state.staged), key_of("stage_fix")
    if at is None and being_applied(server, fixes):
        return []
    if at is None:
        return [(f"{key} {'stage fix' if wide else 'fix'}", "stage_fix")]
    if len(fixes) == 1:
        return [("fix staged", "stage_fix")] if wide else []
    return [(f"fix {at + 1}/{len(fixes)}, {key} next" if wide else f"{key} next", "stage_fix")]


def _length(hints: Sequence[Hint]) -> int:
    return sum(len(text) + 2 for text, _ in hints) - 2 if hints else 0


def _room(width: int, hints: Sequence[Hint]) -> int:
    """The cells left of the keys."""
    return width - (_length(hints) + 3 if hints else 1)


def _with_keys(parts: Sequence[Part], hints: Sequence[Hint], width: int) -> Strip:
    """The parts, cut to make room for the clickable keys at the right if those fit."""
    hints = hints if _length(hints) + 3 <= width else ()
    room = _room(width, hints)
    kept: list[Part] = []
    for part in parts:
        text, style = (part, None) if isinstance(part, str) else part
        kept.append((fit(text, min(room, cells(text))), style))
        room -= min(room, cells(text))
    keys = [part for text, action in hints for part in ("  ", (text, clickable(f"screen.{action}", KEY)))]
    return line(*kept, " " * (room + 1), *([" ", *keys[1:]] if keys else []))
