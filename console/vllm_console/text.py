"""Text from outside made safe to show: no escape codes, no control characters, bounded in length."""

from __future__ import annotations

import re

_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI
    r"|\x1b\][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c|$)"  # OSC
    r"|\x1b[PX^_][^\x1b\x9c]*(?:\x1b\\|\x9c|$)"  # DCS, SOS, PM, APC
    r"|\x1b[ -/]*[0-~]?"
    r"|\x9b[0-?]*[ -/]*[@-~]"  # the same, written with one C1 character
    r"|\x9d[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c|$)"
    r"|[\x90\x98\x9e\x9f][^\x1b\x9c]*(?:\x1b\\|\x9c|$)"
)


def plain(text: str, limit: int = 2000) -> str:
    """Return ``text`` as one line that a terminal shows as it stands.

    Escape sequences and every character that is not to be seen (controls, bidirectional overrides, zero-width and tag
    characters, halves of surrogate pairs) are removed, other white space becomes spaces, and of a longer text the first
    ``limit`` characters are kept. Of what tqdm overwrote with ``\\r`` the last state is kept.
    """
    if text.isprintable() and len(text) <= limit:
        return text
    text = text[: limit * 8]
    text = _ESCAPES.sub("", text).rstrip("\r\n")
    if "\r" in text:
        text = text.rsplit("\r", 1)[1]
    text = text.replace("\t", "    ")
    if not text.isprintable():
        text = "".join(map(_seen, text))
    return text[:limit]


def _seen(character: str) -> str:
    """The character, a space for other white space, nothing for what is not to be seen."""
    if character.isprintable():
        return character
    return " " if character.isspace() else ""
