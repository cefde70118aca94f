"""The line of keys at the foot of a screen, from the registry."""

from __future__ import annotations

from textual.strip import Strip

from vllm_console.ui.actions import key_label, scoped
from vllm_console.ui.widgets.draw import keys_line

_LABELS = {"delete": "del", "pagedown": "pgdn", "pageup": "pgup"}


def footer(scope: str, width: int) -> Strip:
    """The most needed keys of a screen; the way back, which the registry names last, and help are always there."""
    pairs = [
        (_LABELS.get(action.keys[0], key_label(action.keys[0])), action.short)
        for action in scoped(scope)
        if action.footer
    ]
    return keys_line(pairs[:-1], width, (pairs[-1], ("?", "help")))
