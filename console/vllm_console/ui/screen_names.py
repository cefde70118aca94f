"""The screens of which screenshots can be taken. Has no imports because command line parsing uses it, too."""

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
"""Screen name → Textual action that opens it."""
