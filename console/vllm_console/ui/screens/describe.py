"""Everything about one server: command line, flags with the reason for each, generations, paths."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import ClassVar

from rich.cells import cell_len
from textual.binding import Binding, BindingType
from textual.strip import Strip

from vllm_console.fleet.model import Flags, ServerView
from vllm_console.format import UNKNOWN, count, duration
from vllm_console.text import plain
from vllm_console.ui.panes.bars import flag_text
from vllm_console.ui.panes.state import memory_lines, stage_lines
from vllm_console.ui.screens.reading import ReadingScreen
from vllm_console.ui.theme import ACCENT, DIM, SIMULATED, STRONG, WARN
from vllm_console.ui.widgets.draw import fit
from vllm_console.ui.widgets.lines import line
from vllm_launchers.plan.model import same_value
from vllm_launchers.plan.shell_words import line_of, line_word


class DescribeScreen(ReadingScreen):
    """Describes one server as it was when the screen was opened. ``y`` copies its command line."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("y", "copy", "Copy the command line", show=False)]
    KEYS = (("esc", "back"), ("j k", "scroll"), ("y", "copy the command line"))

    def __init__(self, server: ServerView, now: float) -> None:
        super().__init__()
        self._server, self._now = server, now

    def title_text(self) -> str:
        """The title."""
        return plain(self._server.name) + (" · simulated" if self._server.simulated else "")

    def content(self, width: int) -> Sequence[Strip]:
        """The lines."""
        return describe_lines(self._server, self._now, width)

    def action_copy(self) -> None:
        """Copy the command line by OSC 52."""
        self.app.copy_to_clipboard(line_of(self._server.argv))
        self.notify("Command line copied.", markup=False, timeout=2)


def describe_lines(server: ServerView, now: float, width: int) -> list[Strip]:
    """Facts, command, flags with reasons, start-up, changes since the previous generation."""
    lines = [_fact(name, value, width) for name, value in facts(server, now).items() if value]
    if server.reason:
        lines += _wrapped("why", server.reason, width, warn=True)
    if server.notice:
        lines += _wrapped("note", server.notice, width, warn=True)
    if server.argv:
        lines += [_head("Command"), *_command(server.argv, width)]
    if server.flags:
        lines += [_head("Flags"), *_flags(server, width)]
    if server.previous_flags is not None:
        lines += [_head("Changed since the previous generation"), *_changed(server.previous_flags, server, width)]
    if server.stages:
        lines += [_head("Start-up"), *stage_lines(server.stages, now, width)]
        lines += memory_lines(server.startup, width)
    if server.workload:
        lines += [_head("Made for"), line(fit("  " + _workload(server), width).rstrip())]
    return lines


def facts(server: ServerView, now: float) -> Mapping[str, str]:
    """What there is to say of a server, by name; empty where nothing is known."""
    engine = server.engine
    return {
        "state": f"{server.state} for {duration(now - server.state_since)}",
        "owner": "" if server.ours else f"{server.owner or 'someone else'} (shown, never touched)",
        "preset": server.preset,
        "model": server.model,
        "engine": f"{engine.label}  {engine.path}" if engine else "",
        "address": server.url if server.port else "",
        "GPUs": ", ".join(map(str, server.gpus)),
        "pid": str(server.pid) if server.pid is not None else "",
        "generation": str(server.generation),
        "attempt": str(server.attempt) if server.attempt else "",
        "downtime": f"{server.downtime_seconds:.1f} s at the last restart" if server.downtime_seconds else "",
        "last exit": server.exit.reason if server.exit else "",
        "log": server.log_path,
    }


def _fact(name: str, value: str, width: int) -> Strip:
    style = SIMULATED if name == "engine" and value.startswith("simulated") else None
    return line((fit(f"  {name}", 14), DIM), (fit(plain(value), max(10, width - 14)).rstrip(), style))


def _wrapped(name: str, text: str, width: int, warn: bool = False) -> list[Strip]:
    rows = textwrap.wrap(plain(text), max(20, width - 14))
    return [line((fit(f"  {name}" if index == 0 else "", 14), DIM), (row, WARN if warn else None))
            for index, row in enumerate(rows)]  # fmt: skip


def _head(text: str) -> Strip:
    return line((f" {text}", STRONG))


def _command(argv: Sequence[str], width: int) -> list[Strip]:
    """The command over several lines, broken before flags, as it could be pasted."""
    rows, row = [], ""
    for word in argv:
        quoted = line_word(word)
        if row and (cell_len(row) + cell_len(quoted) + 5 > width or word.startswith("--")):
            rows.append(row + " \\")
            row = "    "
        row += quoted if row.strip() == "" else f" {quoted}"
    rows.append(row)
    return [line("  " + row) for row in rows]


def _flags(server: ServerView, width: int) -> list[Strip]:
    names = max(len(flag) for flag in server.flags) + 4
    values = min(24, max(len(flag_text(value)) for value in server.flags.values()) + 2)
    lines = []
    for flag, value in server.flags.items():
        why = textwrap.wrap(plain(server.reasons.get(flag, "")), max(20, width - names - values - 4)) or [""]
        lines.append(
            line(fit(plain(f"  --{flag}"), names + 2), (fit(plain(flag_text(value)), values), ACCENT), (why[0], DIM))
        )
        lines += [line(" " * (names + 2 + values), (rest, DIM)) for rest in why[1:]]
    return lines


def _changed(before: Flags, server: ServerView, width: int) -> list[Strip]:
    after = server.flags
    lines = []
    for flag in sorted({*before, *after}):
        old, new = before.get(flag), after.get(flag)
        if not same_value(old, new):
            text = f"  --{flag}  {flag_text(old)} → {flag_text(new)}"
            lines.append(line(fit(text, width).rstrip()))
    return lines or [line(("  nothing", DIM))]


def _workload(server: ServerView) -> str:
    load = server.workload
    if load is None:
        return UNKNOWN
    return (
        f"p95 {count(load.input_tokens_p95)} tokens in, {count(load.output_tokens_p95)} out, "
        f"{load.prefix_reuse * 100:.0f} % of prompts shared, {load.concurrency} requests at once"
    )
