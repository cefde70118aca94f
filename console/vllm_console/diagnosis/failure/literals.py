"""A fast prefilter for many regular expressions: which of them a text can match at all. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from vllm_launchers.patterns import lazy_pattern

SHORTEST = 3
"""Minimum characters of a literal worth searching for."""

MOST_KNOWN = 4096
"""Number of texts whose results are cached: a log with many exceptions repeats them."""

EVERYWHERE = ("error", "exception")
"""Words in nearly every tested line; other literals are preferred."""

_TOKEN = lazy_pattern(
    r"(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])|\\(?P<quoted>[^\w\s])|(?P<kind>\\\w|[.^$])"
    r"|(?P<repeat>[?*+]\??|\{\d+,?\d*\})|(?P<open>\()|(?P<close>\))|(?P<bar>\|)|(?P<plain>[\s\S])"
)


def stretches(pattern: str) -> tuple[str, ...] | None:
    """For each alternative of an expression, the longest literal that all its matches contain, in lower case.

    None if an alternative has none that is long enough. Only text outside brackets is considered.
    """
    found: list[str] = []
    for alternative in _alternatives(pattern):
        longest = max(alternative, key=_worth)
        if len(longest) < SHORTEST:
            return None
        found.append(longest.lower())
    return tuple(found)


def _worth(fixed_text: str) -> tuple[bool, int]:
    """How well a literal distinguishes matching texts from others."""
    return len(fixed_text) >= SHORTEST and fixed_text.lower().strip(" :") not in EVERYWHERE, len(fixed_text)


def _alternatives(pattern: str) -> Iterator[list[str]]:
    fixed_text, done, depth = "", [""], 0
    for token in _TOKEN.finditer(pattern):
        text = token["plain"] or token["quoted"]
        if token["open"] or token["close"]:
            depth += 1 if token["open"] else -1
        elif depth:
            continue
        elif text:
            fixed_text += text
            continue
        elif (token["repeat"] or "").startswith(("?", "*", "{")):
            fixed_text = fixed_text[:-1]  # a repeated item may be absent
        done.append(fixed_text)
        fixed_text = ""
        if token["bar"] and not depth:
            yield done
            done = [""]
    yield [*done, fixed_text]


class FirstMatches:
    """Groups of case-insensitive expressions: finds the first of each group that matches a text, without trying most of
    them.

    Nearly all texts match none, which a single search for all required literals establishes.
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
        roots = [
            word for word in self._by_word if not any(word.startswith(one) for one in self._by_word if one != word)
        ]
        self._under = {root: [word for word in self._by_word if word.startswith(root)] for root in roots}
        self._words_at = re.compile(f"(?=({_any_of(roots)}))")
        self._known: dict[str, tuple[int | None, ...]] = {}
        self._nothing: tuple[int | None, ...] = (None,) * len(groups)

    def of(self, text: str) -> tuple[int | None, ...]:
        """For each group, the index of its first expression found in the text, or None."""
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
        roots = set(self._words_at.findall(low))
        if not roots and not self._always:
            return self._nothing
        worth = set(self._always)
        for root in roots:
            for word in self._under.get(root, ()):
                if word == root or word in low:
                    worth.update(self._by_word[word])
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
    """An expression that finds any of the words in one pass, with common prefixes merged.

    A word that begins with another one is omitted, since the shorter one matches there too.
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


# -- names of flags in vLLM's messages --------------------------------------------------------------------------------


_WORD = lazy_pattern(r"--(?P<dashed>[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*)|`?\b(?P<plain>[a-z][a-z0-9]*(?:_[a-z0-9]+)+)\b")


def flags_in(text: str) -> Iterator[str]:
    """Names of flags that a message mentions, without leading dashes: ``--max-num-seqs``, ``max_num_seqs``.

    Input appended by pydantic is ignored: it lists all settings, whether at fault or not.
    """
    from vllm_launchers.vllm.flags.releases import RELEASES, release_table

    tables = [table for version in (RELEASES[0], RELEASES[-1]) if (table := release_table(version)) is not None]
    for found in _WORD.finditer(text.partition("[type=")[0]):
        name = (found["dashed"] or found["plain"]).replace("_", "-")
        if any(name in table.flags for table in tables):
            yield name


def names_a_flag(text: str) -> bool:
    """Whether a message mentions a flag."""
    return next(flags_in(text), None) is not None
