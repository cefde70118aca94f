"""How well a text matches what was typed: as it stands, by its words, or letter by letter. Pure."""

from __future__ import annotations

from enum import IntEnum

import msgspec


class Kind(IntEnum):
    """How a text matches, the best first."""

    WHOLE = 0
    PREFIX = 1
    WORD = 2
    """It begins at a word."""
    PART = 3
    LETTERS = 4
    """The letters stand in this order, with others between them."""


class Match(msgspec.Struct, frozen=True, order=True):
    """How a text matches: the kind, over how many characters, and from which one on; the least is the best."""

    kind: Kind
    span: int
    start: int


def match(typed: str, text: str, *, letters: bool = True) -> Match | None:
    """How ``text`` matches; None where it does not. Case counts as little as spaces between letters do.

    ``letters``: whether letters may have others between them, which finds too much in a long text.
    """
    wanted, here = " ".join(typed.casefold().split()), text.casefold()
    if not wanted:
        return Match(Kind.PREFIX, 0, 0)
    at = here.find(wanted)
    if at == 0:
        return Match(Kind.WHOLE if len(wanted) == len(here) else Kind.PREFIX, len(wanted), 0)
    while at > 0:
        if not here[at - 1].isalnum():
            return Match(Kind.WORD, len(wanted), at)
        if (after := here.find(wanted, at + 1)) < 0:
            return Match(Kind.PART, len(wanted), at)
        at = after
    return _by_letters(wanted.replace(" ", ""), here) if letters else None


def _by_letters(wanted: str, text: str) -> Match | None:
    """The shortest stretch of the text that holds the letters in their order."""
    best: Match | None = None
    start = text.find(wanted[0])
    while start >= 0:
        at = start
        for letter in wanted[1:]:
            at = text.find(letter, at + 1)
            if at < 0:
                return best
        found = Match(Kind.LETTERS, at + 1 - start, start)
        best = found if best is None or found < best else best
        start = text.find(wanted[0], start + 1)
    return best
