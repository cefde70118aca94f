"""A quick look before many regular expressions: which of them a text can match at all. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

SHORTEST = 3
"""Characters of a stretch that is worth looking for."""

MOST_KNOWN = 4096
"""So many texts' answers are kept: a log of many exceptions repeats them."""

_TOKEN = re.compile(
    r"(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])|\\(?P<quoted>[^\w\s])|(?P<kind>\\\w|[.^$])"
    r"|(?P<repeat>[?*+]\??|\{\d+,?\d*\})|(?P<open>\()|(?P<close>\))|(?P<bar>\|)|(?P<plain>[\s\S])"
)


def stretches(pattern: str) -> tuple[str, ...] | None:
    """For each alternative of an expression the longest text that stands in all its matches, in lower case.

    None if an alternative has none that is long enough. Only what stands outside of brackets is looked at.
    """
    found: list[str] = []
    for alternative in _alternatives(pattern):
        longest = max(alternative, key=len)
        if len(longest) < SHORTEST:
            return None
        found.append(longest.lower())
    return tuple(found)


def _alternatives(pattern: str) -> Iterator[list[str]]:
    stretch, done, depth = "", [""], 0
    for token in _TOKEN.finditer(pattern):
        text = token["plain"] or token["quoted"]
        if token["open"] or token["close"]:
            depth += 1 if token["open"] else -1
        elif depth:
            continue
        elif text:
            stretch += text
            continue
        elif (token["repeat"] or "").startswith(("?", "*", "{")):
            stretch = stretch[:-1]  # what is repeated may be missing
        done.append(stretch)
        stretch = ""
        if token["bar"] and not depth:
            yield done
            done = [""]
    yield [*done, stretch]


class FirstMatch:
    """Several expressions that ignore case: finds the first that a text matches without trying most of them."""

    def __init__(self, patterns: Sequence[re.Pattern[str]]) -> None:
        self._patterns = tuple(patterns)
        self._always: set[int] = set()
        self._by_word: dict[str, set[int]] = {}
        for index, pattern in enumerate(self._patterns):
            words = stretches(pattern.pattern)
            if words is None:
                self._always.add(index)
            for word in words or ():
                self._by_word.setdefault(word, set()).add(index)
        self._words = tuple(self._by_word)
        self._known: dict[str, int | None] = {}

    def index(self, text: str) -> int | None:
        """The place of the first expression that is found in the text, or None."""
        if text in self._known:
            return self._known[text]
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        found = self._known[text] = self._look(text)
        return found

    def _look(self, text: str) -> int | None:
        low = text.lower()
        words = [word for word in self._words if word in low]
        if not words and not self._always:
            return None
        worth = self._always.union(*(self._by_word[word] for word in words))
        return next((index for index in sorted(worth) if self._patterns[index].search(text)), None)
