"""Text from outside made safe to show: no escape codes, no control characters, bounded in length."""

from __future__ import annotations

import re

_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\|$)"  # OSC
    r"|\x1b[PX^_][^\x1b]*(?:\x1b\\|$)"  # DCS, SOS, PM, APC
    r"|\x1b[ -/]*[0-~]?"
    r"|\x9b[0-?]*[ -/]*[@-~]"
)
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")


def plain(text: str, limit: int = 2000) -> str:
    """Return ``text`` as one line that a terminal shows as it stands.

    Escape sequences and control characters (also bidirectional overrides) are removed, tabs become spaces, and of
    a longer text the first ``limit`` characters are kept. Of what tqdm overwrote with ``\\r`` the last state is kept.
    """
    if text.isprintable() and len(text) <= limit:
        return text
    text = text[: limit * 8]
    text = _ESCAPES.sub("", text).rstrip("\r\n")
    if "\r" in text:
        text = text.rsplit("\r", 1)[1]
    return _CONTROL.sub("", text.replace("\t", "    "))[:limit]
