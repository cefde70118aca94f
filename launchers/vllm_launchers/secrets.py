"""Which names and texts are secrets, and how to hide them. Standard library only: every room may use it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache

HIDDEN = "•••"
"""Stands where a secret was."""

SECRET_FLAGS: Mapping[str, str] = {"api-key": "VLLM_API_KEY", "hf-token": "HF_TOKEN"}
"""Flags of vLLM whose value is a secret, and the environment variable that does the same.

Every user of a machine can read every command line, but only root and oneself an environment.
"""

SERVER_SECRETS: frozenset[str] = frozenset(
    {
        "VLLM_API_KEY",
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "HUGGINGFACEHUB_API_TOKEN",
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "S3_ACCESS_KEY_ID",
        "S3_SECRET_ACCESS_KEY",
    }
)
"""Secrets that a server may need, taken over from the environment in which it is launched."""

_SECRET_WORDS = r"(?:API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)"
_SECRET_NAME = re.compile(rf"(?:^|_){_SECRET_WORDS}(?:_|$)", re.IGNORECASE)
_NOT_SECRET = re.compile(r"_(?:PATH|FILE|DIR|FOLDER)$|(?:^|_)DISABLE_", re.IGNORECASE)
_TEXTS = r"""(?x)
      (?P<flag>--(?:api[-_]key|hf[-_]token)(?:[=\s]\s*|['"],\s*['"])['"]?)(?P<flag_value>[^\s'",]+)
    | (?P<field>\b(?:api_keys?|hf_token|authorization)['"]?\s*[:=]\s*(?:\[\s*)?['"])(?P<field_value>[^'"\]]+)
    | (?P<name>\b[A-Z][A-Z0-9_]*=['"]?)(?=[^\s'"])
    | (?P<bearer>\b[Bb]earer\s+)(?P<bearer_value>[A-Za-z0-9._~+/=-]{6,})
    | (?P<bare>\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_-]{16,})
    """
_NAMED_VALUE = re.compile(r"[^\s'\"]+")
_MARKS = ("hf_", "sk-", "api-key", "api_key", "hf-token", "earer", "authorization")
_MARKS_OF_NAMES = ("KEY", "TOKEN", "SECRET", "PASSW", "CREDENTIAL")
"""A quick look first: nearly all lines of a log hold none of these."""


@cache
def _texts() -> re.Pattern[str]:
    return re.compile(_TEXTS)  # takes a millisecond, which most commands need not spend


def is_secret_name(name: str) -> bool:
    """Whether an environment variable of that name holds a secret (``HF_TOKEN``, but not ``HF_TOKEN_PATH``)."""
    return bool(_SECRET_NAME.search(name)) and not _NOT_SECRET.search(name)


def redact(text: str, values: Collection[str] = ()) -> str:
    """``text`` with every secret in it hidden: values of secret flags and variables, and what looks like a key.

    ``values`` are secrets known to the caller, hidden wherever they stand.
    """
    for value in sorted(values, key=len, reverse=True):
        if len(value) >= 4:  # hiding "1" everywhere would spoil the text and give the secret away
            text = text.replace(value, HIDDEN)
    return _hide(text) if _may_hold_a_secret(text) else text


def _may_hold_a_secret(text: str) -> bool:
    return any(mark in text for mark in _MARKS) or ("=" in text and any(mark in text for mark in _MARKS_OF_NAMES))


def _hide(text: str) -> str:
    shown: list[str] = []
    at = 0
    while match := _texts().search(text, at):
        kind = match.lastgroup or ""
        prefix = match[kind.removesuffix("_value")]
        shown.append(text[at : match.start()])
        at = match.end()
        if kind == "bare":
            shown.append(HIDDEN)
        elif kind != "name":
            shown.append(prefix + HIDDEN)
        elif is_secret_name(prefix.partition("=")[0]) and (value := _NAMED_VALUE.match(text, at)):
            shown.append(prefix + HIDDEN)
            at = value.end()
        else:
            shown.append(prefix)  # not a secret's name, but its value may hold a secret after all: NOTE=hf_…
    return "".join(shown) + text[at:]


def redact_argv(argv: Sequence[str]) -> tuple[str, ...]:
    """A command line with every secret in it hidden, word by word."""
    shown: list[str] = []
    hide_next = False
    for word in argv:
        flag, equals, _ = word.partition("=")
        secret = flag.startswith("--") and flag.lstrip("-").replace("_", "-") in SECRET_FLAGS
        if hide_next and not word.startswith("--"):
            shown.append(HIDDEN)  # --api-key takes several keys
            continue
        shown.append(f"{flag}={HIDDEN}" if secret and equals else redact(word))
        hide_next = secret and not equals
    return tuple(shown)


def redact_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment with the value of every secret hidden."""
    return {name: HIDDEN if is_secret_name(name) else redact(value) for name, value in environment.items()}
