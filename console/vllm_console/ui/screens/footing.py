"""What stands at the foot of a screen: what was said, and the line of keys, from the registry."""

from __future__ import annotations

import textwrap

from rich.style import Style
from textual.strip import Strip

from vllm_console.ui.actions import key_label, scoped
from vllm_console.ui.widgets.draw import keys_line
from vllm_console.ui.widgets.lines import line

_LABELS = {"delete": "del", "pagedown": "pgdn", "pageup": "pgup"}


def footer(scope: str, width: int) -> Strip:
    """The most needed keys of a screen; the way back, which the registry names last, and help are always there."""
    pairs = [
        (_LABELS.get(action.keys[0], key_label(action.keys[0])), action.short)
        for action in scoped(scope)
        if action.footer
    ]
    return keys_line(pairs[:-1], width, (pairs[-1], ("?", "help")))


def note_lines(text: str, style: Style | None, width: int) -> list[Strip]:
    """What was said, over two lines where it takes them; one that is empty while there is nothing."""
    rows = textwrap.wrap(text, max(10, width - 2), max_lines=2, placeholder=" …")
    return [line((f" {row}", style)) for row in rows] or [line()]
