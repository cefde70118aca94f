"""Command lines to show and copy, without secrets and without terminal escapes. Pure.

Quoting alone is not enough: a quoted escape code still affects the terminal that shows the command or that it is pasted
into.
"""

from __future__ import annotations

import shlex
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby

from vllm_launchers.plan.model import Plan
from vllm_launchers.secrets import SERVER_SECRETS, holds_secret, is_secret_name, redact_argv, redact_environment

MOST_MARKS = 4
"""Maximum number of combining accents on one letter; more would be drawn over neighboring lines."""


def line_word(word: str) -> str:
    """Quote a word as printable text, with ``$'…'`` where needed (bash, zsh, ksh, and POSIX 2024 support it)."""
    shown = _shown_in(word)
    if all(map(shown, word)) and word.isprintable():
        return shlex.quote(word)
    return f"$'{''.join(c if c.isprintable() and shown(c) and c not in _ESCAPED else _octal(c) for c in word)}'"


def line_of(words: Iterable[str]) -> str:
    """Quote a command on one printable line."""
    return " ".join(map(line_word, words))


def assignments(environment: Mapping[str, str]) -> list[str]:
    """Variables as written before a shell command."""
    return [f"{name}={line_word(value)}" for name, value in environment.items()]


def script_word(word: str) -> str:
    """Quote a word for any POSIX shell; control characters are written with ``printf``."""
    shown = _shown_in(word)
    if all(map(shown, word)):
        return shlex.quote(word)
    pieces = ((seen, "".join(piece)) for seen, piece in groupby(word, shown))
    return "".join(
        shlex.quote(piece) if seen else f"\"$(printf '{''.join(map(_octal, piece))}')\"" for seen, piece in pieces
    )


def script_line(words: Iterable[str]) -> str:
    """Quote words for any POSIX shell."""
    return " ".join(map(script_word, words))


_ESCAPED = "\\'"


def _shown_in(word: str) -> Callable[[str], bool]:
    """A predicate for the characters of a word that may stay: visible ones and line ends, but no stacked accents."""
    heaped = not word.isascii() and any(marks and len(list(run)) > MOST_MARKS for marks, run in groupby(word, _is_mark))
    return lambda one: (one.isprintable() or one in "\n\t") and not (heaped and _is_mark(one))


def _is_mark(character: str) -> bool:
    return unicodedata.category(character) in ("Mn", "Me")


def _octal(character: str) -> str:
    """Its bytes as octal escapes of three digits, so that a following digit is not read as part of them."""
    raw = 0xDC80 <= ord(character) <= 0xDCFF
    return "".join(f"\\{byte:03o}" for byte in character.encode(errors="surrogateescape" if raw else "surrogatepass"))


def split_secrets(environment: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Split variables into those that may be stored and shown and secrets: by name, or a URL with a password."""
    plain = {name: value for name, value in environment.items() if not is_secret_name(name) and not holds_secret(value)}
    return plain, {name: value for name, value in environment.items() if name not in plain}


def inherited_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """The secrets in the current environment that a server may need; empty ones count as unset."""
    return {name: environ[name] for name in sorted(SERVER_SECRETS) if environ.get(name)}


def command_line(plan: Plan) -> str:
    """The plan as a shell command to show and copy. It runs unchanged and contains no secret.

    A secret variable is written as ``NAME="$NAME"``, which the shell expands.
    """
    secrets = [f'{name}="${name}"' for name in plan.secrets if name not in plan.environment]
    return " ".join([*assignments(redact_environment(plan.environment)), *secrets, line_of(redact_argv(plan.argv))])
