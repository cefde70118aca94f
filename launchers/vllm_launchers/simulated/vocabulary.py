"""The simulated model's tokenizer and output: text to token ids and back, generated tokens, log probabilities.

A token has about four characters in English prose, as with common tokenizers. The simulated model's output tokenizes
back to the tokens it generated, so that a conversation's next turn finds its past in the prefix cache.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Sequence
from functools import lru_cache

import msgspec

from vllm_launchers.patterns import lazy_pattern

VOCABULARY = 128_000
"""Number of token ids. A model with a smaller vocabulary has them modulo its size."""
LONGEST_PIECE = 16
"""Maximum characters of one token."""

_PIECE = lazy_pattern(r"<\|\w{1,12}\|>| ?[^\W\d_]{1,6}| ?\d{1,3}|\s{1,16}| ?[^\w\s]|_", re.UNICODE)
_RESERVED = lazy_pattern(r"<\|(\d{1,6})\|>")

_WORD_LIST = """
the a one this each every some any that same other first last next long short small large new old
token cache block batch prompt model layer weight server queue stream memory kernel tensor engine graph
reads writes keeps moves holds waits takes gives sends finds checks counts marks sorts fills frees
and then while until before after under over with into from near for by as if when but so
fast slow full free busy idle ready plain steady warm cold even odd clear sound whole half single double
"""

WORDS: tuple[str, ...] = tuple(f" {word}" for word in _WORD_LIST.split())
"""The simulated model's output words, one token each; an answer's first word has no leading space."""


class Vocabulary:
    """A tokenizer with ``size`` ids. It remembers the pieces it has seen, to convert their ids back to text.

    A piece's id is its hash, or the next free one; once all are taken, pieces share ids.
    """

    def __init__(self, size: int = VOCABULARY) -> None:
        self.size = min(size, VOCABULARY)
        self._pieces: dict[int, str] = {}
        self._ids: dict[str, int] = {}
        for word in WORDS:
            for piece in (word, word[1:]):
                self._pieces[_hash(piece, self.size)] = piece
                self._ids[piece] = _hash(piece, self.size)

    def encode(self, text: str) -> list[int]:
        """Split ``text`` into pieces and convert each to a token id below ``size``."""
        known = self._ids
        return [known[piece] if piece in known else self._learn(piece) for piece in _PIECE.findall(text)]

    def decode(self, token: int) -> str:
        """The text of one token; an unused id is a reserved token, ``<|ID|>``; an id out of range is empty."""
        if token in self._pieces:
            return self._pieces[token]
        return f"<|{token}|>" if token < self.size else ""

    def text(self, tokens: Iterable[int]) -> str:
        """The text of several tokens."""
        return "".join(self.decode(token) for token in tokens)

    def output_token(self, seed: int, position: int) -> int:
        """The token id that a request with ``seed`` generates at ``position``."""
        return output_token(seed, position) % self.size

    def _learn(self, piece: str) -> int:
        reserved = _RESERVED.fullmatch(piece)
        if reserved is not None and int(reserved[1]) < self.size and int(reserved[1]) not in self._pieces:
            return int(reserved[1])
        token = _hash(piece, self.size)
        if len(self._pieces) >= self.size:
            return token
        while token in self._pieces:
            token = (token + 1) % self.size
        self._pieces[token], self._ids[piece] = piece, token
        return token


def _hash(piece: str, size: int) -> int:
    return zlib.crc32(piece.encode()) % VOCABULARY % size


def tokenize(text: str) -> list[int]:
    """The token ids of ``text`` in the full vocabulary."""
    return _FULL.encode(text)


def _word_index(seed: int, position: int) -> int:
    return ((seed + position * 2_654_435_761) >> 7) % len(WORDS)


_FULL = Vocabulary()
_WORD_TOKENS: tuple[int, ...] = tuple(tokenize(word)[0] for word in WORDS)
_FIRST_TOKENS: tuple[int, ...] = tuple(tokenize(word[1:])[0] for word in WORDS)


def output_token(seed: int, position: int) -> int:
    """The token id, in the full vocabulary, that a request with ``seed`` generates at ``position``."""
    return (_WORD_TOKENS if position else _FIRST_TOKENS)[_word_index(seed, position)]


def output_text(seed: int, start: int, end: int) -> str:
    """The text of the tokens generated at positions ``start`` to ``end`` (exclusive)."""
    text = "".join(WORDS[_word_index(seed, position)] for position in range(start, end))
    return text if start else text[1:]


@lru_cache(maxsize=4096)
def _log_probability(seed: int, rank: int) -> float:
    """A made-up distribution that falls with rank and differs slightly by position; its sum is below 1."""
    share = 0.35 + 0.5 * (zlib.crc32(f"{seed}".encode()) % 1000) / 1000
    return math.log(share) + (rank - 1) * math.log(1 - share)


class Ranked(msgspec.Struct, frozen=True):
    """A candidate token at a position, its log probability, and its rank among all (1: most likely)."""

    token: int
    log_probability: float
    rank: int


def ranked_tokens(seed: int, position: int, token: int, count: int, *, greedy: bool = False) -> list[Ranked]:
    """``token``, the actual one, then the ``count`` most likely others. The distribution is made up.

    A greedy choice is the most likely token; otherwise about one in four is the second or third.
    """
    place = (seed + position * 40_503) % 4096
    own = 1 if greedy or place % 4 else 2 + place // 4 % 2
    ranked = [Ranked(token, _log_probability(place, own), own)]
    used, step = {token}, 0
    for rank in range(1, count + 1):
        if rank == own:
            continue
        other = token
        while other in used:
            other = _WORD_TOKENS[_word_index(seed + 977, position + step)]
            step += 1
        used.add(other)
        ranked.append(Ranked(other, _log_probability(place, rank), rank))
    return ranked


def find_stop(pieces: Sequence[str], stops: Sequence[str], least: int) -> tuple[int, str, int] | None:
    """Find the first of ``stops`` to be completed in the text of ``pieces``: number of tokens, stop, and its position.

    As in vLLM, the first ``least`` tokens are not searched. If several stops end in one token's text, the one completed
    first counts; ties go to the first in the list.
    """
    text, searched = "", 0
    for index, piece in enumerate(pieces):
        text += piece
        if index < least:
            searched = len(text)
            continue
        found = [(text.find(stop, max(0, searched - len(stop) + 1)), stop) for stop in stops]
        ends = [(begin + len(stop), place) for place, (begin, stop) in enumerate(found) if begin >= 0]
        if ends:
            begin, stop = found[min(ends)[1]]
            return index + 1, stop, begin
        searched = len(text)
    return None
