"""Command lines to show and copy: quoted without terminal escapes, and without secrets. Pure.

A quoted escape code still affects the terminal that shows the command, or the one that it is pasted into.
"""

from __future__ import annotations

import shlex
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby

from vllm_launchers.plan.model import Plan
from vllm_launchers.secrets import SERVER_SECRETS, holds_secret, is_secret_name, redact_argv, redact_environment

MOST_MARKS = 4
"""Maximum accents on one letter; stacked ones would be drawn over nearby lines."""


def line_word(word: str) -> str:
    """A word on one printable line: ``$'…'`` where needed, which bash, zsh, ksh and POSIX 2024 know."""
    shown = _shown_in(word)
    if all(map(shown, word)) and word.isprintable():
        return shlex.quote(word)
    return f"$'{''.join(c if c.isprintable() and shown(c) and c not in _ESCAPED else _octal(c) for c in word)}'"


def line_of(words: Iterable[str]) -> str:
    """A command on one printable line."""
    return " ".join(map(line_word, words))


def assignments(environment: Mapping[str, str]) -> list[str]:
    """Variables as written before a command in a shell."""
    return [f"{name}={line_word(value)}" for name, value in environment.items()]


def script_word(word: str) -> str:
    """A word for a script of any POSIX shell: in quotes, with terminal escapes through ``printf``."""
    shown = _shown_in(word)
    if all(map(shown, word)):
        return shlex.quote(word)
    pieces = ((seen, "".join(piece)) for seen, piece in groupby(word, shown))
    return "".join(
        shlex.quote(piece) if seen else f"\"$(printf '{''.join(map(_octal, piece))}')\"" for seen, piece in pieces
    )


def script_line(words: Iterable[str]) -> str:
    """Words for a script of any POSIX shell."""
    return " ".join(map(script_word, words))


_ESCAPED = "\\'"


def _shown_in(word: str) -> Callable[[str], bool]:
    """The parts of a word that may stay: visible characters and line ends; no stacked accents."""
    heaped = not word.isascii() and any(marks and len(list(run)) > MOST_MARKS for marks, run in groupby(word, _is_mark))
    return lambda one: (one.isprintable() or one in "\n\t") and not (heaped and _is_mark(one))


def _is_mark(character: str) -> bool:
    return unicodedata.category(character) in ("Mn", "Me")


def _octal(character: str) -> str:
    """Its bytes as three octal digits each, which a following digit cannot change."""
    raw = 0xDC80 <= ord(character) <= 0xDCFF
    return "".join(f"\\{byte:03o}" for byte in character.encode(errors="surrogateescape" if raw else "surrogatepass"))


def split_secrets(environment: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """What may be stored and shown, and what may not: secrets by name, and a URL with a password."""
    plain = {name: value for name, value in environment.items() if not is_secret_name(name) and not holds_secret(value)}
    return plain, {name: value for name, value in environment.items() if name not in plain}


def inherited_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """The secrets of the current environment that a server may need; empty ones count as unset."""
    return {name: environ[name] for name in sorted(SERVER_SECRETS) if environ.get(name)}


def command_line(plan: Plan) -> str:
    """The plan as a shell command to show and copy: it runs unchanged, and contains no secret.

    A secret variable is written ``NAME="$NAME"``, to be expanded where it is exported.
    """
    secrets = [f'{name}="${name}"' for name in plan.secrets if name not in plan.environment]
    return " ".join([*assignments(redact_environment(plan.environment)), *secrets, line_of(redact_argv(plan.argv))])
