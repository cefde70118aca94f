"""The lines that are always there: header, message, staged changes, footer."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.style import Style
from textual.strip import Strip

from vllm_console.fleet.model import Flags, FlagValue, FleetSnapshot, ServerView, State
from vllm_console.format import duration
from vllm_console.text import plain
from vllm_console.ui.actions import key_label, scoped
from vllm_console.ui.panes.gpus import host_words
from vllm_console.ui.staging import Staged
from vllm_console.ui.theme import ACCENT, BAD, DIM, KEY, STRONG, WARN
from vllm_console.ui.widgets.draw import Part, fit, keys_line
from vllm_console.ui.widgets.lines import line
from vllm_launchers.plan import common_flags

STAGE_KEYS = (
    ("[ ]", "sequences"), ("{ }", "context"), ("< >", "GPU memory"), ("p", "prefix cache"),
    ("P", "chunked prefill"), ("v", "KV dtype"), ("z", "go back"),
)  # fmt: skip
SHORT_STAGE_KEYS = (
    ("[ ]", "seqs"), ("{ }", "context"), ("< >", "memory"), ("p", "prefix"), ("P", "chunks"), ("v", "fp8"),
    ("z", "back"),
)  # fmt: skip

MOST_MESSAGE_LINES = 3
"""What is longer is told elsewhere too: why a server failed, by ``i``."""


@dataclass(frozen=True, slots=True)
class Looking:
    """How the console looks at servers: every how many seconds, paused or not, and how long the present look hangs."""

    refresh: float
    paused: bool = False
    hanging: float | None = None
    read_only: bool = False
    demo: bool = False


def header_line(snapshot: FleetSnapshot | None, looking: Looking, width: int) -> Strip:
    """Program, host, engines; at the right the marks, the refresh rate and the clock."""
    left: list[Part] = [(" vllm-console", STRONG)]
    if snapshot:
        left.append((f" · {plain(snapshot.hostname)}", None))
        left += [(f" · {words}", None) for words in host_words(snapshot)]
        left += [(f" · {label}", DIM) for label in _engines(snapshot.servers)]
    right: list[Part] = []
    if looking.demo:
        right.append((" demo ", KEY))
    if looking.read_only:
        right.append((" read-only ", WARN))
    if looking.paused:
        right.append((" paused ", WARN))
    elif looking.hanging is not None:
        right.append((f" last look {duration(looking.hanging)} ago ", BAD))
    clock = time.strftime("%H:%M", time.localtime(snapshot.at)) if snapshot else "     "
    right.append((f" {looking.refresh:g} s  {clock} ", DIM))
    return _both_ends(left, right, width)


def _engines(servers: Sequence[ServerView]) -> list[str]:
    return list(dict.fromkeys(server.engine.label for server in servers if server.engine))[:3]


def _both_ends(left: list[Part], right: list[Part], width: int) -> Strip:
    def length(parts: list[Part]) -> int:
        return sum(cell_len(part if isinstance(part, str) else part[0]) for part in parts)

    while len(left) > 1 and length(left) + length(right) > width:
        left.pop()
    return line(*left, " " * max(0, width - length(left) - length(right)), *right)


def message_lines(
    message: Part | None, server: ServerView | None, snapshot: FleetSnapshot | None, width: int
) -> list[Strip]:
    """What was just said; else what is wrong with the selected server, or to be known of it. One line or more."""
    text, style = _message(message, server, snapshot)
    rows = textwrap.wrap(plain(text), max(20, width - 2), break_on_hyphens=False) or [""]
    if len(rows) > MOST_MESSAGE_LINES:
        rows[MOST_MESSAGE_LINES - 1] = fit(" ".join(rows[MOST_MESSAGE_LINES - 1 :]), width - 2)
    return [line((f" {row}", style)) for row in rows[:MOST_MESSAGE_LINES]]


def _message(
    message: Part | None, server: ServerView | None, snapshot: FleetSnapshot | None
) -> tuple[str, Style | None]:
    if message is not None:
        return (message, None) if isinstance(message, str) else message
    # A diagnosis that rests on a line of the log is the reason, and the line of findings says it.
    found = server is not None and server.diagnosis is not None and server.diagnosis.evidence
    if server and server.reason and not found and not (server.notice and server.state is State.STOPPED):
        return f"! {server.name}: {server.reason}", WARN
    if server and server.notice:
        return f"{server.name}: {server.notice}", WARN
    if snapshot and snapshot.notices:
        return snapshot.notices[0], WARN
    if server and server.load:
        return f"{server.name}: {server.load}", DIM
    return "", None


def flag_text(value: FlagValue | None) -> str:
    """A flag's value for people: on, off, unset, or what it is."""
    return plain(common_flags.flag_text(value, unset="unset"))


def staged_line(flags: Flags, staged: Staged, width: int) -> Strip:
    """The staged difference, and which keys go on from there; with nothing staged, the keys that stage."""
    if not staged:
        return keys_line([("", "stage"), *(STAGE_KEYS if width >= 100 else SHORT_STAGE_KEYS)], width)
    end = "r restart" if width < 100 else "r restart with these  backspace drop last  esc drop all"
    room = width - len(end) - 2
    parts: list[Part] = [(" staged", STRONG)]
    used = 7
    for index, step in enumerate(staged):
        text = f"  --{step.flag} {flag_text(flags.get(step.flag))} → {flag_text(step.value)}"
        rest = len(staged) - index
        if used + cell_len(text) > room - (5 if rest > 1 else 0):
            parts.append((f"  +{rest}", ACCENT))
            used += 3 + len(str(rest))
            break
        parts.append((text, ACCENT))
        used += cell_len(text)
    return line(*parts, " " * max(1, width - used - len(end) - 1), (end, KEY))


def footer_line(read_only: bool, width: int) -> Strip:
    """The footer from the registry; help and quit are always there."""
    pairs = [(key_label(action.keys[0]), action.short) for action in scoped("operations", read_only) if action.footer]
    tail = [(key_label(action.keys[0]), action.short) for action in scoped("app", read_only) if action.footer]
    return keys_line(pairs, width, tail)
