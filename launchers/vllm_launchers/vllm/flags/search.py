"""Finds flags by typed text: part of a name, a word of the help, a typo. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import SequenceMatcher, get_close_matches

from vllm_launchers.vllm.flags.flag_table import FlagSpec, FlagTable

_CLOSEST = 3
_CLOSE = 0.72


def search(table: FlagTable, text: str) -> list[FlagSpec]:
    """Flags that match all words of ``text``, best first; all flags by name if it is empty.

    Names that begin with the text come first, then names that contain every word, aliases and choices, and help texts.
    If nothing matches, similar names are returned.
    """
    words = [word.lower().replace("_", "-") for word in text.split()]
    words = [word.lstrip("-") or word for word in words]
    if not words:
        return sorted(table.flags.values(), key=lambda spec: spec.name)
    ranked = [(rank, spec.name, spec) for spec in table.flags.values() if (rank := _rank(spec, words)) is not None]
    if not ranked:
        return [table.flags[name] for name in _alike(table, "-".join(words))]
    return [spec for _, _, spec in sorted(ranked, key=lambda entry: entry[:2])]


def closest(table: FlagTable, name: str) -> tuple[str, ...]:
    """Names that a wrong flag name was most likely meant for, best first; at most three.

    ``name`` is as typed, without leading dashes: ``max_num_seq``. Flags that begin with it come first.
    """
    plain = name.lstrip("-").replace("_", "-").partition(".")[0].lower()
    if plain.startswith("no-"):
        plain = plain[3:]
    begun = sorted((known for known in table.flags if plain and known.startswith(plain)), key=len)
    return tuple(dict.fromkeys((*begun[:_CLOSEST], *_alike(table, plain))))[:_CLOSEST]


def resolve_flag_name(table: FlagTable, name: str) -> tuple[FlagSpec | None, tuple[str, ...]]:
    """The flag that argparse resolves a name to, or else the options that it is a prefix of.

    Long options may be abbreviated to a unique prefix. Aliases count too, and ``_`` equals ``-``.
    """
    plain = name.replace("_", "-")
    if (spec := table.get(plain)) is not None:
        return spec, ()
    found: dict[str, FlagSpec] = {}
    for option, spec in _options(table):
        if option == plain:
            return spec, ()
        if option.startswith(plain):
            found[option] = spec
    if len(found) == 1:
        return next(iter(found.values())), ()
    return None, tuple(sorted(found))


def _options(table: FlagTable) -> Iterator[tuple[str, FlagSpec]]:
    """Every long option, without dashes, and its flag."""
    for name, spec in table.flags.items():
        yield name, spec
        if spec.negatable:
            yield f"no-{name}", spec
        if spec.opposite:
            yield spec.opposite, spec
        for alias in spec.aliases:
            if alias.startswith("--"):
                yield alias[2:].replace("_", "-"), spec


def _rank(spec: FlagSpec, words: list[str]) -> int | None:
    """How well a flag matches, 0 is best; None if not all words match."""
    name, whole = spec.name, "-".join(words)
    if name == whole or f"-{whole}" in spec.aliases or f"--{whole}" in spec.aliases:
        return 0
    if name.startswith(whole):
        return 1
    if all(word in name.split("-") for word in words):
        return 2
    if all(word in name for word in words):
        return 3
    near = " ".join((name, spec.group.lower(), *spec.aliases, *spec.choices, *spec.words)).lower().replace("_", "-")
    if all(word in near for word in words):
        return 4
    far = f"{near} {spec.help.lower().replace('_', '-')}"
    if all(re.search(rf"\b{re.escape(word)}", far) or word in near for word in words):
        return 5
    return 6 if all(word in far for word in words) else None


def _alike(table: FlagTable, plain: str) -> list[str]:
    """Names similar to a wrong one: misspelled, or with words reordered, added or left out."""
    close = get_close_matches(plain, table.flags, n=_CLOSEST, cutoff=_CLOSE)
    wanted = set(plain.split("-"))
    if len(wanted) > 1:
        kin = (name for name in table.flags if wanted <= set(name.split("-")) or set(name.split("-")) <= wanted)
        ordered = sorted(kin, key=lambda name: -SequenceMatcher(None, plain, name).ratio())
        close += [name for name in ordered[:_CLOSEST] if "-" in name]
    return list(dict.fromkeys(close))[:_CLOSEST]
