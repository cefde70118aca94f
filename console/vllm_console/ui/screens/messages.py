"""The messages screen: all messages since the console was opened, newest first."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.style import Style
from textual.strip import Strip

from vllm_console.ui.parts.messages import Message
from vllm_console.ui.terminal.lines import line
from vllm_console.ui.theme import DIM
from vllm_console.ui.widgets.draw import paragraph
from vllm_console.ui.widgets.reader import ReaderScreen, TextReader

_TIME = 11

_NONE_YET = (
    "No messages yet. Your actions and server events appear here: starts, stops, crashes, findings that begin and end."
)


def messages_screen(
    history: Callable[[], Sequence[Message]], notices: Callable[[], Sequence[tuple[str, Style | None]]]
) -> ReaderScreen:
    """Create the screen; ``history`` returns messages and events, oldest first.

    ``notices`` returns current notices with their styles, shown above them.
    """
    return ReaderScreen(
        TextReader(
            lambda: "Messages since the console was opened, newest first",
            lambda width: [*notice_lines(notices(), width), *history_lines(history(), width)],
        )
    )


def notice_lines(notices: Sequence[tuple[str, Style | None]], width: int) -> list[Strip]:
    """Current notices, wrapped; empty if there are none."""
    lines: list[Strip] = []
    for text, style in notices:
        lines += paragraph(text, width, style, " " * _TIME, first=[(f" {'now':8}  ", DIM)])
    return [*lines, line()] if lines else []


def history_lines(history: Sequence[Message], width: int) -> list[Strip]:
    """Each message with its time of day, wrapped."""
    lines: list[Strip] = []
    for message in reversed(history):
        when = time.strftime("%H:%M:%S", time.localtime(message.at))
        text = message.text + (f" (×{message.times})" if message.times > 1 else "")
        lines += paragraph(text, width, message.style, " " * _TIME, first=[(f" {when}  ", DIM)])
    return lines or [line(), *paragraph(_NONE_YET, width - 1, DIM)]
