"""The lines around a screen: header, message, staged changes, footer."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
from rich.cells import cell_len
from rich.style import Style
from textual.strip import Strip

from vllm_console.fleet.markers import flag_change
from vllm_console.fleet.snapshot import FleetSnapshot, ServerView
from vllm_console.text import clock, duration, plain
from vllm_console.ui.actions import action_named, scoped
from vllm_console.ui.keymap import key_of
from vllm_console.ui.panes.gpus import format_host
from vllm_console.ui.parts.staged_plan import PlanVerdict
from vllm_console.ui.parts.staging import TUNED
from vllm_console.ui.parts.time_cursor import ShownTime
from vllm_console.ui.terminal.lines import clickable, line
from vllm_console.ui.theme import ACCENT, BAD, DIM, KEY, OK, PAST, SIMULATED, STRONG, WARN
from vllm_console.ui.widgets.draw import KeyHint, Part, fit, keys_line, paragraph, parts_length, wrapped
from vllm_launchers.keeper.records import State
from vllm_launchers.vllm.flags.changes import Edits, Flags, FlagValue, flag_text

_STAGE_ACTIONS = (
    (("adjust",), "adjust", "adjust"),
    *((tuple(key.id for key in tuned.keys), tuned.label, tuned.hint or tuned.short) for tuned in TUNED),
    (("previous_flags",), "revert", "revert"),
)
"""The staging actions as (action IDs, text, short text); IDs are one action, or one that lowers and one that raises."""

MOST_MESSAGE_LINES = 3
"""Longer messages are cut; the messages screen shows them in full."""


class Polling(msgspec.Struct, frozen=True):
    """How the console polls: interval in seconds, paused or not, and how long the current poll has been hanging.

    ``resuming``: no longer paused, but the data shown is still from the pause.
    """

    refresh: float
    paused: bool = False
    resuming: bool = False
    hanging: float | None = None
    read_only: bool = False
    demo: bool = False


def header_line(
    snapshot: FleetSnapshot | None,
    polling: Polling,
    width: int,
    shown: ShownTime,
    server: ServerView | None = None,
) -> Strip:
    """Program, host and the engine of the selected ``server``; at the right marks, chart range, and clock or moment
    shown.

    If the engine does not fit, a mark still shows that it is simulated. Other servers have a mark in the table.
    """
    left: list[Part] = [(" vllm-console", STRONG)]
    if snapshot:
        left.append((f" · {plain(snapshot.hostname)}", None))
        left += [(f" · {words}", None) for words in format_host(snapshot)]
        if server is not None and server.engine is not None:
            left.append((f" · {server.engine.label}", DIM))
    right = _marks(polling, shown)
    times = _time_parts(snapshot, polling, shown)
    if shown.replay and parts_length([*left[:1], *right, *times]) > width:
        times = _time_parts(snapshot, polling, shown, age=False)
    right += times
    fitting = _fitting(left, width - parts_length(right) - 1)  # a blank column: marks may have a background
    named = any("simulated" in part[0] for part in fitting)
    if server is not None and server.simulated and not named:
        marked: list[Part] = [(" simulated ", SIMULATED), *right]
        if parts_length(left[:1]) + parts_length(marked) <= width:
            right, fitting = marked, _fitting(left, width - parts_length(marked) - 1)
    return line(*fitting, " " * max(0, width - parts_length(fitting) - parts_length(right)), *right)


def _marks(polling: Polling, shown: ShownTime) -> list[Part]:
    marks: list[Part] = []
    if polling.demo:
        marks.append((" demo ", KEY))
    if polling.read_only:
        marks.append((" read-only ", WARN))
    if shown.replay:
        marks.append((" replay ", KEY))
    if polling.paused:
        marks.append((" paused ", WARN))
    elif polling.hanging is not None:
        marks.append((f" data {duration(polling.hanging)} old ", BAD))
    elif polling.resuming:
        marks.append((" resuming ", WARN))
    return marks


def _time_parts(snapshot: FleetSnapshot | None, polling: Polling, shown: ShownTime, *, age: bool = True) -> list[Part]:
    """``live · 15 min · 12:41:07``; for an earlier moment, that moment in color and the key that returns to live."""
    if snapshot is not None and shown.at is not None:
        ago = f" · {duration(max(0.0, snapshot.at - shown.at))} ago" if age else ""
        note = "" if shown.of_figures else " · figures are current"
        text = f" at {clock(shown.at, snapshot.at, seconds=True)}{ago} · {shown.range}{note} "
        back = f" {key_of('time_live')} {'leave' if shown.replay else 'live'} "
        return [(text, PAST), (back, clickable("screen.time_live", KEY))]
    old = polling.paused or polling.resuming or polling.hanging is not None
    live = "" if old else "live · " if polling.refresh == 1 else f"live every {polling.refresh:g}s · "
    now = clock(snapshot.at, snapshot.at, seconds=True) if snapshot else " " * 8
    return [(f" {live}{shown.range} · {now} ", DIM)]


def _fitting(parts: Sequence[Part], width: int) -> list[Part]:
    """The first parts that fit, at least one."""
    kept = list(parts)
    while len(kept) > 1 and parts_length(kept) > width:
        kept.pop()
    return kept


def message_lines(
    message: Part | None,
    server: ServerView | None,
    snapshot: FleetSnapshot | None,
    width: int,
    most: int = MOST_MESSAGE_LINES,
) -> list[Strip]:
    """The last message, or else what is wrong with the selected server or worth knowing; one to ``most`` lines.

    Longer text is cut and followed by the key that shows all of it.
    """
    text, style = _message(message, server, snapshot)
    rows = wrapped(plain(text), max(20, width - 2)) or ("",)
    if len(rows) <= most:
        return [line((f" {row}", style)) for row in rows]
    end = f"  {key_of('messages')} more"
    last = fit(" ".join(rows[most - 1 :]), max(1, width - 2 - len(end)))
    return [
        *(line((f" {row}", style)) for row in rows[: most - 1]),
        line((f" {last}", style), (end, clickable("screen.messages", KEY))),
    ]


def _message(
    message: Part | None, server: ServerView | None, snapshot: FleetSnapshot | None
) -> tuple[str, Style | None]:
    if message is not None:
        return (message, None) if isinstance(message, str) else message
    return next(iter(notices_of(server, snapshot)), ("", None))


def notices_of(server: ServerView | None, snapshot: FleetSnapshot | None) -> list[tuple[str, Style | None]]:
    """What is wrong with the selected server or anything else, and what is worth knowing; most severe first."""
    notices: list[tuple[str, Style | None]] = []
    # If a log line led to the diagnosis, the findings line already shows the reason.
    found = server is not None and server.diagnosis is not None and server.diagnosis.evidence
    if server and server.reason and not found and not (server.notice and server.state is State.STOPPED):
        ended = server.state is State.STOPPED  # as intended
        notices.append((f"{'' if ended else '! '}{server.name}: {server.reason}", DIM if ended else WARN))
    own = [(f"{server.name}: {server.notice}", WARN)] if server and server.notice else []
    shared = [(text, WARN) for text in snapshot.notices] if snapshot else []
    # Nothing can be done about a server that was started outside.
    notices += [*shared, *own] if server is not None and not server.recorded else [*own, *shared]
    if server and (load := server.load or server.load_result):
        notices.append((f"{server.name}: {load}", DIM))
    now = "now: " if server is not None and server.moment is not None and not server.replayed else ""
    return [(f"{now}{text}", style) for text, style in notices]


def shown_value(value: FlagValue | None) -> str:
    """A flag's value for display: on, off, unset, or the value itself."""
    return plain(flag_text(value, unset="unset"))


_SHORT_NAMES = {tuned.flag: tuned.short for tuned in TUNED}


def staged_line(
    flags: Flags, staged: Edits, width: int, *, revert: bool = True, fits: PlanVerdict | None = None
) -> Strip:
    """The staged changes and the keys for the next step; if nothing is staged, the keys that stage.

    ``revert``: previous flags exist to revert to. ``fits`` is the plan's verdict if it is not shown elsewhere.
    """
    if not staged:
        keys = [
            _stage_hint(ids, text if width >= 100 else short)
            for ids, text, short in _STAGE_ACTIONS
            if revert or ids != ("previous_flags",)
        ]
        return keys_line([("", "stage"), *keys], width)
    wide = width >= 100
    ends = [(f"{key_of('restart')} restart{' with these' if wide else ''}", "screen.restart")]
    drops = (("drop_last", "drop last"), ("clear", "drop all"))
    ends += [(f"{key_of(id)} {text}", f"screen.{id}") for id, text in drops] if wide else []
    length = sum(len(text) + 2 for text, _ in ends)
    texts = [f"  {text}" for text in ([fits.message] if fits.refused else fits.shorter)] if fits is not None else []
    room = width - length
    if fits is not None:  # bad news needs more room than good news
        room -= min(cell_len(texts[0]), room // 2 if fits.style is OK else room - 25)
    parts: list[Part] = [(" staged", STRONG)]
    used = 7
    for index, text in enumerate(_staged_texts(flags, staged, room - used)):
        rest = len(staged) - index
        if used + cell_len(text) > room - (5 if rest > 1 else 0):
            parts.append((f"  +{rest}", ACCENT))
            used += 3 + len(str(rest))
            break
        parts.append((text, ACCENT))
        used += cell_len(text)
    if fits is not None:
        left = width - length - used - 1
        text = fit(next((one for one in texts if cell_len(one) <= left), texts[-1]), left).rstrip()
        parts.append((text, fits.style))
        used += cell_len(text)
    keys_at_end = [part for text, action in ends for part in ("  ", (text, clickable(action, KEY)))]
    return line(*parts, " " * max(0, width - used - length - 1), *keys_at_end)


def _staged_texts(flags: Flags, staged: Edits, room: int) -> list[str]:
    """The staged changes, all in the longest form that fits, or else in the shortest."""
    forms = (
        [f"  {flag_change(flag, flags.get(flag), value)}" for flag, value in staged.items()],
        [f"  --{flag} {shown_value(value)}" for flag, value in staged.items()],
        [f"  {_SHORT_NAMES.get(flag, flag)} {shown_value(value)}" for flag, value in staged.items()],
    )
    return next((texts for texts in forms if sum(map(cell_len, texts)) <= room), forms[-1])


def _stage_hint(ids: Sequence[str], text: str) -> KeyHint:
    calls = (f"screen.{action_named(id).call}" for id in ids)
    return " ".join(map(key_of, ids)), text, "|".join(calls)


def footer(scope: str, width: int, without: Collection[str] = ()) -> Strip:
    """A screen's most important usable keys that fit, and always the way back (last in the registry) and help."""
    known = [action for action in scoped(scope) if action.short and action.id not in without]
    pairs = [(key_of(action.id), action.short, f"screen.{action.call}") for action in known]
    return keys_line(pairs[:-1], width, (pairs[-1], (key_of("help"), "help", "app.help")))


def note_lines(text: str, style: Style | None, width: int, most: int = 2) -> list[Strip]:
    """A message in up to ``most`` lines; one empty line if there is none."""
    return paragraph(text, width - 1, style, most=most) or [line()]


def now_lines(moment: float | None, now: float, width: int, more: str = "") -> list[Strip]:
    """A note that this screen shows the present although the operations screen shows an earlier moment; else empty."""
    if moment is None:
        return []
    text = f" now, not at {clock(moment, now, seconds=True)}{f': {more}' if more else ''} "
    return [line((fit(text, min(width, cell_len(text))), PAST)), line()]
