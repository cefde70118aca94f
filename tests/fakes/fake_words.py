"""Command-line parsing without argparse, whose import takes longer than starting Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace


def arguments(defaults: Mapping[str, object], words: Iterable[str]) -> SimpleNamespace:
    """The options by name, with the types of their defaults; options that are False by default take no value."""
    given, rest = dict(defaults), iter(words)
    for word in rest:
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        kind = type(defaults[name])
        given[name] = True if kind is bool else kind(value if equals else next(rest))
    return SimpleNamespace(**given)
