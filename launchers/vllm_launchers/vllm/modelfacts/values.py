"""Reads values from untrusted files: anything with the wrong type or an absurd size counts as missing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_launchers.vllm.modelfacts.facts import ModelFactsError

Config = Mapping[str, Any]

MOST_BYTES = 16 * 2**20
"""Far larger than any ``config.json``; DeepSeek-V3's index of 91,000 weights has 9 MB."""
LARGEST_NUMBER = 2**50
MOST_TEXT = 200
NO = ("", "0", "false", "no", "off")
"""Values with which the hub tools' environment variables are off."""


def number(config: Config, *names: str) -> int | None:
    """Return the first of these entries that is a whole number above zero."""
    for name in names:
        value = config.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST_NUMBER:
            return value
    return None


def factor(config: Config, *names: str) -> float | None:
    """Return the first of these entries that is a finite number above zero."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= LARGEST_NUMBER:
            return float(value)
    return None


def text(config: Config, *names: str) -> str | None:
    """Return the first of these entries that is a non-empty text."""
    for name in names:
        value = config.get(name)
        if isinstance(value, str) and 0 < len(value) <= MOST_TEXT:
            return value
    return None


def mapping(config: Config, *names: str) -> Config:
    """Return the first of these entries that is a non-empty object, else an empty one."""
    for name in names:
        value = config.get(name)
        if isinstance(value, dict) and value:
            return value
    return {}


def texts(config: Config, *names: str) -> tuple[str, ...]:
    """Return the first of these entries that is a list of texts."""
    for name in names:
        value = config.get(name)
        if isinstance(value, list) and value and all(isinstance(entry, str) for entry in value):
            return tuple(value)
    return ()


def whole_numbers(config: Config, *names: str) -> tuple[int, ...]:
    """Return the first of these entries that is a list of whole numbers."""
    for name in names:
        value = config.get(name)
        if (
            isinstance(value, list)
            and value
            and all(type(entry) is int and abs(entry) <= LARGEST_NUMBER for entry in value)
        ):
            return tuple(value)
    return ()


def objects(value: object) -> Iterator[Config]:
    """Yield the objects in a list, or in an object's values."""
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    yield from (entry for entry in entries if isinstance(entry, dict))


def read_json(path: Path) -> Config:
    """Read a file with a JSON object.

    Raises :class:`ModelFactsError` if it cannot be read, is not a JSON object or is far too long, and
    :class:`FileNotFoundError` if it does not exist.
    """
    try:
        if not path.is_file():  # a pipe or device would never end
            raise FileNotFoundError(path)
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ModelFactsError(f"{path} can't be read: {error.strerror}") from error
    return parse_json(data, str(path))


def parse_json(data: bytes, where: str) -> Config:
    """Parse a JSON object. Raises :class:`ModelFactsError`, which names ``where``."""
    if len(data) > MOST_BYTES:
        raise ModelFactsError(f"{where} is longer than {MOST_BYTES >> 20} MiB: no model's settings; fetch it again")
    if data.startswith(b"version https://git-lfs"):
        raise ModelFactsError(f"{where} is only a git-lfs pointer; fetch the file itself with 'git lfs pull'")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelFactsError(f"{where} is not valid JSON; was its download cut off? Fetch it again") from error
    if not isinstance(content, dict):
        raise ModelFactsError(f"{where} holds no JSON object; fetch it again")
    return content
