"""Flags and variables of released vLLMs, from the project's own table: for a plan of a release that is not installed.

``releases.json`` lists the releases that were looked at, one patch of each minor release. Per flag it has what changed
since when, as ``[index of the release, changed properties]``, null for a flag that is gone; per variable the first
release that reads it and the first that no longer does. The table has no help texts, and knows choices only where
vLLM's parser has them. Bounds (``minimum`` and the like) are those of 0.32 and 0.33; of earlier releases only the few
that always held.
"""

from __future__ import annotations

import json
import re
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from vllm_launchers.machine.flags.model import FlagSpec, FlagTable, ValueKind

__all__ = [
    "NEWEST",
    "OLDEST",
    "RELEASES",
    "Release",
    "UnknownReleaseError",
    "first_release",
    "last_release",
    "nearest_release",
    "parse_release",
    "release_table",
    "variable_releases",
]

Release = tuple[int, int, int]
"""Major, minor and patch number."""

RELEASES: tuple[str, ...] = (
    "0.8.5", "0.9.2", "0.10.0", "0.10.1.1", "0.10.2", "0.11.0.post2", "0.11.2", "0.12.0", "0.13.0", "0.14.1",
    "0.15.1", "0.16.0", "0.17.1", "0.18.1", "0.19.1", "0.20.0", "0.20.2", "0.21.0", "0.22.1", "0.23.0",
    "0.24.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0",
)  # fmt: skip
"""The releases that the table was made from, the oldest first. What it says of 0.8.5 and 0.9.2 is approximate."""

_VERSION = re.compile(r"v?(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?(?:[.+\-a-z][a-zA-Z0-9.+_-]*)?", re.ASCII)
_LISTS = ("choices", "words", "aliases")
_SWITCHES = ("negatable", "many", "nullable", "bare", "closed")


class UnknownReleaseError(Exception):
    """A vLLM that the table does not reach back to, or no version at all; the text is one clear sentence."""


def parse_release(version: str) -> Release | None:
    """The numbers of a version, or None: ``0.32.0+cpu`` and ``v0.32`` are ``(0, 32, 0)``."""
    found = _VERSION.fullmatch(version.strip())
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else None


_NUMBERS: tuple[Release, ...] = tuple(numbers for text in RELEASES if (numbers := parse_release(text)))
OLDEST: Release = _NUMBERS[0]
NEWEST: Release = _NUMBERS[-1]


def nearest_release(version: str) -> str:
    """Which release of the table speaks for ``version``.

    The newest one that is not newer. Where of the same minor release only a later patch was looked at, that one: flags
    come and go with minor releases (``0.17.0`` is spoken for by 0.17.1, not by 0.16.0). For a vLLM newer than the
    table its newest, which callers should say.

    Raises:
        UnknownReleaseError: it is no version, or older than 0.8.5.
    """
    wanted = parse_release(version)
    if wanted is None:
        raise UnknownReleaseError(f"'{version[:40]}' is no version of vLLM; write it as in {RELEASES[-1]}")
    if wanted < OLDEST:
        raise UnknownReleaseError(f"vLLM {version} is older than what is known here; the oldest is {RELEASES[0]}")
    not_newer = [index for index, numbers in enumerate(_NUMBERS) if numbers <= wanted]
    index = not_newer[-1]
    if _NUMBERS[index][:2] != wanted[:2]:
        index = next((i for i, numbers in enumerate(_NUMBERS) if numbers[:2] == wanted[:2]), index)
    return RELEASES[index]


def release_table(version: str) -> FlagTable:
    """The flags of a vLLM of that version, as far as the table knows: those of :func:`nearest_release`.

    The table's own ``version`` is that release's, so that a caller can say where the two differ.

    Raises:
        UnknownReleaseError: it is no version, or older than 0.8.5.
    """
    return _table(RELEASES.index(nearest_release(version)))


def first_release(name: str) -> str | None:
    """The first release that has the flag of that name, or None where none has."""
    history = _data()["flags"].get(name)
    return RELEASES[history[0][0]] if history else None


def last_release(name: str) -> str | None:
    """The last release that had a flag which is gone by now; None for one that is there, or never was."""
    history = _data()["flags"].get(name)
    return RELEASES[history[-1][0] - 1] if history and history[-1][1] is None else None


def variable_releases(name: str) -> tuple[str, str | None] | None:
    """First release that reads a ``VLLM_*`` variable, and the last where later ones do not; None for an unknown one."""
    span = _data()["variables"].get(name)
    if span is None:
        return None
    return RELEASES[span[0]], (RELEASES[span[1] - 1] if len(span) > 1 else None)


@lru_cache(maxsize=4)
def _table(index: int) -> FlagTable:
    data = _data()
    flags: dict[str, FlagSpec] = {}
    for name, history in data["flags"].items():
        properties = _properties(history, index)
        if properties is not None:
            flags[name] = _spec(name, properties)
    variables = frozenset(
        name for name, span in data["variables"].items() if span[0] <= index and (len(span) == 1 or index < span[1])
    )
    return FlagTable(version=RELEASES[index], source="release", flags=flags, variables=variables)


def _properties(history: list[tuple[int, dict[str, Any] | None]], index: int) -> dict[str, Any] | None:
    """What a flag was in one release: its first properties with all changes up to then; None where it was not."""
    properties: dict[str, Any] | None = None
    for since, change in history:
        if since > index:
            break
        properties = None if change is None else {**(properties or {}), **change}
    return properties


def _spec(name: str, properties: dict[str, Any]) -> FlagSpec:
    said: dict[str, Any] = {key: value for key, value in properties.items() if value is not None}
    said |= {key: tuple(said[key].split()) for key in _LISTS if key in said}
    said |= {key: bool(said[key]) for key in _SWITCHES if key in said}
    return FlagSpec(name=name, **said | {"kind": ValueKind(said["kind"])})


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_bytes())
    return data
