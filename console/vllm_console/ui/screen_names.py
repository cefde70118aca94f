"""The screens that a picture can show, by name. Without imports: command lines know the names too."""

from __future__ import annotations

SCREENS = {
    "overview": "",
    "findings": "screen.findings",
    "compare": "screen.compare",
    "describe": "screen.describe",
    "log": "screen.open_log",
    "flags": "screen.edit_flags",
    "gpus": "screen.describe_gpus",
    "launch": "screen.new_server",
    "messages": "screen.messages",
    "help": "app.help",
}
"""What opens each of them, as an action of Textual's."""
