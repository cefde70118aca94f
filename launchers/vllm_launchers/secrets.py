"""Which names and texts are secrets, and how to redact them. Standard library only: every package may use it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import AnyStr

from vllm_launchers.patterns import lazy_pattern

HIDDEN = "•••"
"""Replaces a secret."""

API_KEY = "VLLM_API_KEY"
"""Environment variable with the API key that vLLM requires from its clients."""

SECRET_FLAGS: Mapping[str, str] = {"api-key": API_KEY, "hf-token": "HF_TOKEN"}
"""vLLM flags whose value is a secret, and the equivalent environment variable.

Every user of a machine can read every command line, but only the owner and root can read an environment.
"""

SERVER_SECRETS: frozenset[str] = frozenset(
    {
        API_KEY,
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
"""Secrets that a server may need, inherited from the environment of its launch."""

_SECRET_WORDS = r"(?:(?:API|AUTH)?_?KEY|TOKEN|SECRET|PASSPHRASE|CREDENTIALS?|AUTHORIZATION)"
_LAST_WORDS = r"(?:PASS|PAT|AUTH|AUTH_CONFIG|JWT|BEARER|CREDS|COOKIES?)"
"""Short words that mean a secret only at the end of a name: not in ``SSH_AUTH_SOCK``."""
_SECRET_NAME = rf"(?i)(?:^|_){_SECRET_WORDS}(?:_|$)|PASSWORD|PASSWD|(?:^|_){_LAST_WORDS}$|^PGPASS$|_PWD$"
_NOT_SECRET = r"(?i)_(?:PATH|FILE|DIR|FOLDER)$|(?:^|_)DISABLE_"
_KEYWORDS = (
    r"(?:api[-_]?keys?|(?:secret|private|access|account|encryption)[-_]?(?:access[-_]?)?key(?:[-_]id)?"
    r"|(?:hf|hub|auth|access|api|session|bearer|refresh|security)[-_]?token"
    r"|password|passwd|passphrase|secret)"
)
"""Names of JSON or YAML keys, or flags, with secret values; ``token`` alone has other meanings here."""
_SECRET_FLAG = lazy_pattern(rf"(?:^|[-_.])(?:{_KEYWORDS}|(?<!allow[-_])credentials?)(?:[-_.]|$)", re.IGNORECASE)
_QUOTED = r"""(?:'(?:\\.|[^'\\])*(?:'|$)|"(?:\\.|[^"\\])*(?:"|$)|\\"[^"\\]*(?:\\"|$))"""
_TEXTS = lazy_pattern(
    rf"""(?xi)
      (?P<flag>(?<!-)--(?!-)[a-z0-9_.-]{{0,40}}{_KEYWORDS}(?:[=\s]\s*|['"],\s*['"])['"]?)(?P<flag_value>[^\s'",]+)
    | (?P<field>(?:(?:{_KEYWORDS}|(?-i:_KEY|_TOKEN))\\?['"]?|['"]credentials?\\?['"])\s*[:=]\s*)
      (?P<field_value>(?:\[\s*)?{_QUOTED}(?:\s*,\s*{_QUOTED}(?!\s*:))*|(?!(?:none|null|true|false)\b)[^\s'",;&()\[\]{{}}<>\\]+)
    | (?P<header>\b(?:authorization|cookie)\\?['"]?\s*[:=]\s*\\?['"]?(?:(?:bearer|basic|token)\s+)?)
      (?P<header_value>[^\s'"\\]+)
    | (?P<name>(?-i:\b[A-Z][A-Z0-9_]*)=['"]?)(?=[^\s'"])
    | (?P<bearer>\b(?:bearer|basic)\s+)(?P<bearer_value>[a-z0-9._~+/=-]{{6,}})
    | (?P<url>://)(?P<url_value>[^\s/'"?#\\]+(?=@))
    | (?P<query>[?&](?:token|key|sig|signature|x-amz-signature)=)(?P<query_value>[^&\s'"\\]+)
    | (?P<bare>(?-i:\bhf_[A-Za-z0-9]{{16,}}|\b(?:sk|nvapi|glpat|xox[abp])-[A-Za-z0-9_-]{{16,}}
      |\bAKIA[A-Z0-9]{{16}}\b|\bgh[opusr]_[A-Za-z0-9]{{30,}}|\bgithub_pat_[A-Za-z0-9_]{{30,}}))
    """
)
_NAMED_VALUE = r"[^\s'\"]+"
_MARKS = (
    *("api_key", "api-key", "apikey", "access_key", "access-key", "accesskey", "private", "account", "encryption"),
    *(f"_{word}{sign}" for word in ("key", "token") for sign in ("=", ":", "'", '"', " ", "\\")),
    *(f"{word}{sign}token" for word in ("hf", "hub", "auth", "access", "api", "session") for sign in ("", "-", "_")),
    *("bearer", "refreshtoken", "refresh-token", "refresh_token", "security", "passw", "passphrase", "secret"),
    *("'credential", '"credential', "?token=", "&token=", "?key=", "&key=", "sig=", "signature="),
    *("basic ", "authorization", "cookie"),
    *("hf_", "sk-", "nvapi-", "glpat-", "xox", "akia", "gho_", "ghp_", "ghr_", "ghs_", "ghu_", "github_pat_"),
)
_MARKS_OF_NAMES = ("KEY", "TOKEN", "SECRET", "PASS", "CRED", "AUTH", "_PWD", "PAT=", "JWT", "BEARER", "COOKIE")
"""Nearly all log lines contain none of these."""


def is_secret_flag(name: str) -> bool:
    """Whether a flag, or a key of a JSON flag (``kv-transfer-config.password``), holds a secret."""
    return bool(_SECRET_FLAG.search(name))


def holds_secret(text: str) -> bool:
    """Whether a text contains something that looks like a secret: a key in JSON, a password in a URL."""
    return redact(text) != text


def is_secret_name(name: str) -> bool:
    """Whether an environment variable holds a secret, judging by its name (``HF_TOKEN``, but not ``HF_TOKEN_PATH``)."""
    return bool(re.search(_SECRET_NAME, name)) and not re.search(_NOT_SECRET, name)


def redact(text: str, values: Collection[str] = ()) -> str:
    """Redact every secret in a text: values of secret flags and variables, and anything that looks like a key.

    ``values``: known secrets, redacted wherever they appear.
    """
    # Redacting "1" everywhere would spoil the text and reveal the secret.
    text = redact_values(text, [value for value in values if len(value) >= 4], HIDDEN)
    return _hide(text) if may_hold_secret(text) else text


def redact_values(text: AnyStr, values: Iterable[AnyStr], mark: AnyStr) -> AnyStr:
    """Replace known secrets by ``mark``; those that overlap are replaced together."""
    spans = sorted((at, at + len(one)) for one in values if one in text for at in _occurrences(text, one))
    shown, end = text[:0], 0
    for begin, past in spans:
        if begin >= end:
            shown += text[end:begin] + mark
        end = max(end, past)
    return shown + text[end:]


def _occurrences(text: AnyStr, value: AnyStr) -> Iterator[int]:
    """Where a value begins, also within an earlier occurrence of itself."""
    at = text.find(value)
    while at >= 0:
        yield at
        at = text.find(value, at + 1)


def may_hold_secret(text: str) -> bool:
    """A fast check before `redact`: whether a text may contain or name a secret."""
    if "=" in text and any(map(text.__contains__, _MARKS_OF_NAMES)):
        return True
    text = text.lower()
    return any(map(text.__contains__, _MARKS)) or ("://" in text and "@" in text)


def _hide(text: str) -> str:
    shown: list[str] = []
    at = 0
    while match := _TEXTS.search(text, at):
        kind = (match.lastgroup or "").removesuffix("_value")
        shown.append(text[at : match.start()])
        at = match.end()
        if kind == "bare":
            shown.append(HIDDEN)
        elif kind == "field":
            shown.append(match[kind] + _hide_quoted(match["field_value"]))
        elif kind != "name":
            shown.append(match[kind] + HIDDEN)
        elif is_secret_name(match[kind].partition("=")[0]) and (value := re.compile(_NAMED_VALUE).match(text, at)):
            shown.append(match[kind] + HIDDEN)
            at = value.end()
        else:
            shown.append(match[kind])  # not a secret's name, but its value may still hold a secret: NOTE=hf_…
    return "".join(shown) + text[at:]


def _hide_quoted(value: str) -> str:
    """Redact a value, or several in quotes; the quotes stay."""
    if not re.search(_QUOTED, value):
        return HIDDEN
    return re.sub(_QUOTED, lambda found: _between_quotes(found[0]), value)


def _between_quotes(text: str) -> str:
    quote = text[:2] if text.startswith("\\") else text[:1]
    inner = text[len(quote) :]
    return quote + (HIDDEN if inner not in ("", quote) else "") + (quote if inner.endswith(quote) else "")


def redact_argv(argv: Sequence[str]) -> tuple[str, ...]:
    """Redact every secret in a command line, argument by argument."""
    shown: list[str] = []
    hide_next = False
    for word in argv:
        flag, equals, _ = word.partition("=")
        secret = flag.startswith("--") and is_secret_flag(flag)
        if hide_next and not word.startswith("--"):
            shown.append(HIDDEN)  # --api-key takes several keys
            continue
        shown.append(f"{flag}={HIDDEN}" if secret and equals else redact(word))
        hide_next = secret and not equals
    return tuple(shown)


def redact_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Redact the values of all secrets in an environment."""
    return {name: HIDDEN if is_secret_name(name) else redact(value) for name, value in environment.items()}
