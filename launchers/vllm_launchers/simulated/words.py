"""A tokenizer of a few lines: text to token ids and generated tokens to text, the same in both directions.

About four characters a token in English prose, as common tokenizers have it. What the simulated model writes
tokenizes back to the tokens it generated, so that a conversation's next turn finds its past in the prefix cache.
"""

from __future__ import annotations

import re
import zlib

VOCABULARY = 128_000

_PIECE = re.compile(r"<\|\w+\|>| ?[^\W\d_]{1,6}| ?\d{1,3}|\s+| ?[^\w\s]|_", re.UNICODE)

_WORD_LIST = """
the a one this each every some any that same other first last next long short small large new old
token cache block batch prompt model layer weight server queue stream memory kernel tensor engine graph
reads writes keeps moves holds waits takes gives sends finds checks counts marks sorts fills frees
and then while until before after under over with into from near for by as if when but so
fast slow full free busy idle ready plain steady warm cold even odd clear sound whole half single double
"""

WORDS: tuple[str, ...] = tuple(f" {word}" for word in _WORD_LIST.split())
"""What the simulated model writes, a token each; the first of an answer comes without its space."""


def tokenize(text: str) -> list[int]:
    """Split ``text`` into pieces and give each a token id below :data:`VOCABULARY`."""
    return [zlib.crc32(piece.encode()) % VOCABULARY for piece in _PIECE.findall(text)]


def _word_index(seed: int, position: int) -> int:
    return ((seed + position * 2_654_435_761) >> 7) % len(WORDS)


_WORD_TOKENS: tuple[int, ...] = tuple(tokenize(word)[0] for word in WORDS)
_FIRST_TOKENS: tuple[int, ...] = tuple(tokenize(word[1:])[0] for word in WORDS)


def output_token(seed: int, position: int) -> int:
    """The token id that a request of ``seed`` generates at ``position``."""
    return (_WORD_TOKENS if position else _FIRST_TOKENS)[_word_index(seed, position)]


def output_text(seed: int, start: int, end: int) -> str:
    """The text of the tokens generated at positions ``start`` to ``end``, ``end`` excluded."""
    text = "".join(WORDS[_word_index(seed, position)] for position in range(start, end))
    return text if start else text[1:]
