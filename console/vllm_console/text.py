"""Text from outside made safe to show: no escape codes, no control characters, bounded in length."""

from __future__ import annotations

import re
import unicodedata

_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI
    r"|\x1b\][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c|$)"  # OSC
    r"|\x1b[PX^_][^\x1b\x9c]*(?:\x1b\\|\x9c|$)"  # DCS, SOS, PM, APC
    r"|\x1b[ -/]*[0-~]?"
    r"|\x9b[0-?]*[ -/]*[@-~]"  # the same, written with one C1 character
    r"|\x9d[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c|$)"
    r"|[\x90\x98\x9e\x9f][^\x1b\x9c]*(?:\x1b\\|\x9c|$)"
)

_FIRST_MARK = "\u0300"
"""No character before this one is drawn onto the one in front of it."""

MOST_MARKS = 4
"""Marks on one letter: no language has more, and a heap of them is drawn over the lines above and below."""


def plain(text: str, limit: int = 2000) -> str:
    """Return ``text`` as one line that a terminal shows as it stands.

    Escape sequences and every character that is not to be seen (controls, bidirectional overrides, zero-width and tag
    characters, halves of surrogate pairs) are removed, other white space becomes spaces, of accents on one letter the
    first few are kept, and of a longer text the first ``limit`` characters.
    """
    if text.isprintable() and len(text) <= limit and (text.isascii() or max(text) < _FIRST_MARK):
        return text
    text = text[: limit * 8]
    text = _ESCAPES.sub("", text).rstrip("\r\n").replace("\t", "    ")
    if not text.isprintable():
        text = "".join(map(_seen, text))
    if not text.isascii():
        text = _with_few_marks(text)
    return text[:limit]


def redrawn(line: str) -> str:
    """Of a log's line that was drawn over itself with ``\\r`` (tqdm's bars) what stands there in the end.

    For lines of logs only: a name that could take away what stands in front of it would speak in our place.
    """
    return line.rstrip("\r\n").rpartition("\r")[2]


def _seen(character: str) -> str:
    """The character, a space for other white space, nothing for what is not to be seen."""
    if character.isprintable():
        return character
    return " " if character.isspace() else ""


def _with_few_marks(text: str) -> str:
    """The text without the marks (accents, signs drawn onto a letter) that are too many on theirs."""
    kept, marks = [], 0
    for character in text:
        is_mark = character >= _FIRST_MARK and unicodedata.category(character) in ("Mn", "Me")
        marks = marks + 1 if is_mark else 0
        if marks <= MOST_MARKS:
            kept.append(character)
    return "".join(kept)
