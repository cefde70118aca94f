"""Quoting for shells, systemd units and YAML, and names that other tools allow. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeGuard
from unicodedata import combining

from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.plan.findings import PlanError


class ExportError(PlanError):
    """A plan that cannot be expressed in the requested form; the message is one clear sentence."""


Yaml = str | int | float | bool | Sequence["Yaml"] | Mapping[str, "Yaml"]
"""Values that :func:`yaml_document` writes."""

_PLAIN = lazy_pattern(r"(?:--)?[A-Za-z/](?:[A-Za-z0-9_./@+=-]|:(?=[A-Za-z0-9_./@+-]))*", re.ASCII)
_YAML_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
_INTEGER = lazy_pattern(r"0|-?[1-9][0-9]{0,17}")
_DECIMAL = lazy_pattern(r"-?[0-9]{1,9}\.[0-9]{1,9}")
_SYSTEMD_PLAIN = lazy_pattern(r"[A-Za-z0-9_@+=:,./-]+", re.ASCII)
_NOT_IN_LABEL = lazy_pattern(r"[^a-z0-9]+")


def checked(text: str, what: str) -> str:
    """Return ``text`` if it can be stored in a UTF-8 file.

    Raises:
        ExportError: it cannot (a path of raw bytes), or contains a NUL byte.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ExportError(f"{what} contains bytes that are not UTF-8, which a text file can't contain") from None
    if "\0" in text:
        raise ExportError(f"{what} contains a zero byte")
    return text


def label(name: str) -> str:
    """A name for units, services and objects: ``vllm-``, lower-case letters, digits, dashes; at most 50 characters."""
    slug = _NOT_IN_LABEL.sub("-", name.lower()).strip("-")
    whole = slug if slug == "vllm" or slug.startswith("vllm-") else f"vllm-{slug}"
    return whole[:50].strip("-")


def comment(*lines: str) -> str:
    """Comment lines for YAML, systemd and shells."""
    return "".join(f"# {line}".rstrip() + "\n" for text in lines for line in text.split("\n"))


def systemd_word(word: str, *, program: bool = False) -> str:
    """An argument of ``ExecStart=``: quoted, with ``%`` and ``$`` doubled (``$`` not in the program's own path)."""
    return _systemd(word if program else word.replace("$", "$$"))


def systemd_assignment(name: str, value: str) -> str:
    """The value of ``Environment=``."""
    return _systemd(f"{name}={value}")


def _systemd(text: str) -> str:
    if _SYSTEMD_PLAIN.fullmatch(text):
        return text
    named = {"\\": "\\\\", '"': '\\"', "%": "%%", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    escaped = "".join(named.get(c) or (c if c.isprintable() else _systemd_escape(c)) for c in text)
    return f'"{escaped}"'


def _systemd_escape(character: str) -> str:
    code = ord(character)
    if 0xD800 <= code <= 0xDFFF:
        return character  # not valid text: `checked` rejects the whole
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def yaml_number_or_text(word: str) -> str:
    """An argument that a reader converts back with ``str()``: a number if nothing is lost, else text."""
    if _INTEGER.fullmatch(word) or (_DECIMAL.fullmatch(word) and str(float(word)) == word):
        return word
    return yaml_text(word)


def yaml_text(text: str) -> str:
    """A YAML scalar that is read back as exactly this text: plain if that is safe, else quoted.

    Only lone surrogates, which YAML does not have, are replaced.
    """
    if _PLAIN.fullmatch(text) and text.lower() not in _YAML_WORDS:
        return text
    if '"' in text and all(map(_in_yaml, text)):
        return "'" + text.replace("'", "''") + "'"  # JSON stays readable
    named = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return '"' + "".join(named.get(c) or (c if _in_yaml(c) else _yaml_escape(c)) for c in text) + '"'


def _in_yaml(character: str) -> bool:
    """Whether a character needs no escape: printable ASCII, and others that neither end a line nor combine with the one
    before."""
    return " " <= character <= "~" or (character >= "\xa0" and character.isprintable() and not combining(character))


def _yaml_escape(character: str) -> str:
    code = 0xFFFD if "\ud800" <= character <= "\udfff" else ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def yaml_document(value: Mapping[str, Yaml]) -> str:
    """Nested values as YAML in block style."""
    return "".join(f"{line}\n" for line in _lines(value))


def _lines(value: Yaml) -> list[str]:
    lines: list[str] = []
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if _is_block(inner):
                lines += [f"{yaml_text(key)}: |-", *(f"  {line}" for line in inner.split("\n"))]
            elif _is_scalar(inner):
                lines.append(f"{yaml_text(key)}: {_scalar(inner)}")
            else:
                lines += [f"{yaml_text(key)}:", *(f"  {line}" for line in _lines(inner))]
    elif isinstance(value, Sequence):
        for inner in value:
            first, *rest = [_scalar(inner)] if _is_scalar(inner) else _lines(inner)
            lines += [f"- {first}", *(f"  {line}" for line in rest)]
    return lines


def _is_block(value: Yaml) -> TypeGuard[str]:
    """Whether a value is text of several lines that needs no escape."""
    if not isinstance(value, str) or "\n" not in value or value != value.strip():
        return False
    return all(map(_in_yaml, value.replace("\n", "")))


def _is_scalar(value: Yaml) -> bool:
    return isinstance(value, str) or not isinstance(value, Mapping | Sequence) or not value


def _scalar(value: Yaml) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str):
        return yaml_text(value)
    return "{}" if isinstance(value, Mapping) else "[]"
