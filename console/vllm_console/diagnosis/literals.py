"""A quick look before many regular expressions: which of them a text can match at all. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

SHORTEST = 3
"""Characters of a stretch that is worth looking for."""

MOST_KNOWN = 4096
"""So many texts' answers are kept: a log of many exceptions repeats them."""

EVERYWHERE = ("error", "exception")
"""Words of nearly every line that is looked at; another one is taken where there is one."""

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
        longest = max(alternative, key=_worth)
        if len(longest) < SHORTEST:
            return None
        found.append(longest.lower())
    return tuple(found)


def _worth(stretch: str) -> tuple[bool, int]:
    """How well a text tells those that match from others."""
    return len(stretch) >= SHORTEST and stretch.lower().strip(" :") not in EVERYWHERE, len(stretch)


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


class FirstMatches:
    """Groups of expressions that ignore case: finds the first of each that a text matches, without trying most of them.

    Nearly all texts match none, which is found out by one search for all the words that stand in their matches.
    """

    def __init__(self, *groups: Sequence[re.Pattern[str]]) -> None:
        self._groups = groups
        self._by_word: dict[str, list[tuple[int, int]]] = {}
        self._always: list[tuple[int, int]] = []
        for place, pattern in self._patterns():
            words = stretches(pattern.pattern)
            for word in words or ():
                self._by_word.setdefault(word, []).append(place)
            if words is None:
                self._always.append(place)
        self._any_word = re.compile(_any_of(self._by_word))
        self._known: dict[str, tuple[int | None, ...]] = {}
        self._nothing: tuple[int | None, ...] = (None,) * len(groups)

    def of(self, text: str) -> tuple[int | None, ...]:
        """For each group the place of its first expression that is found in the text, or None."""
        found = self._known.get(text)
        if found is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            found = self._known[text] = self._look(text)
        return found

    def any_in(self, text: str) -> bool:
        """Whether the text matches an expression of any group."""
        return self.of(text) != self._nothing

    def _look(self, text: str) -> tuple[int | None, ...]:
        low = text.lower()
        if self._any_word.search(low) is None and not self._always:
            return self._nothing
        worth = set(self._always)
        for word, places in self._by_word.items():
            if word in low:
                worth.update(places)
        found = list(self._nothing)
        for group, index in sorted(worth):
            if found[group] is None and self._groups[group][index].search(text):
                found[group] = index
        return tuple(found)

    def _patterns(self) -> Iterator[tuple[tuple[int, int], re.Pattern[str]]]:
        for group, patterns in enumerate(self._groups):
            for index, pattern in enumerate(patterns):
                yield (group, index), pattern


def _any_of(words: Iterable[str]) -> str:
    """An expression that finds any of the words in one go: shared beginnings stand in it once.

    A word that begins with another one is left out, since the other one is found there too.
    """
    tree: dict[str, dict[str, Any] | None] = {}
    for word in sorted(words):
        here = tree
        for character in word[:-1]:
            below = here.setdefault(character, {})
            if below is None:
                break
            here = below
        else:
            here[word[-1]] = None
    return _written(tree) or "(?!)"


def _written(tree: dict[str, dict[str, Any] | None]) -> str:
    branches = [re.escape(character) + (_written(below) if below else "") for character, below in tree.items()]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})" if branches else ""
