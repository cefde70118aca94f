"""Flags and variables of vLLM releases, from a built-in table: for planning a release that is not installed.

``releases.json`` lists the examined releases, one patch of each minor release. For each flag it has the changes as
``[index of the release, changed properties]``, with null for a removed flag; for each variable, the first release that
reads it and the first that no longer does. ``values`` has the accepted values of a variable, complete for each release
that changed them, and null from where any text is accepted. ``capabilities`` has the minimum compute capability of each
quantization method. The table has no help texts, and choices only where vLLM's parser has them. Bounds (``minimum``
etc.) are those of 0.32 and 0.33; earlier releases have only the few that always applied.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from vllm_launchers.vllm.flags.flag_table import FlagSpec, FlagTable, Limits, ValueKind, VariableKind, VariableSpec
from vllm_launchers.vllm.release_defaults import Release, parse_release

RELEASES: tuple[str, ...] = (
    "0.8.5", "0.9.2", "0.10.0", "0.10.1.1", "0.10.2", "0.11.0.post2", "0.11.2", "0.12.0", "0.13.0", "0.14.1",
    "0.15.1", "0.16.0", "0.17.1", "0.18.1", "0.19.1", "0.20.0", "0.20.2", "0.21.0", "0.22.1", "0.23.0",
    "0.24.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0",
)  # fmt: skip
"""Releases that the table was made from, oldest first. Its data for 0.8.5 and 0.9.2 is approximate."""

_READS_ALL_SINCE: Release = (0, 11, 1)
"""First release in which ``enable_envs_cache`` evaluates every variable when the engine starts."""
_ARCHITECTURES: tuple[tuple[Release, str], ...] = (
    ((0, 0, 0), "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90"),  # PyTorch 2.6.0 and 2.7
    ((0, 10, 2), "sm_70 sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"),  # 2.8.0 to 2.10.0
    ((0, 20, 0), "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"),  # 2.11.0 to 2.14.0, for CUDA 13
)
"""GPU architectures of the PyTorch that a release pins (``requirements/cuda.txt``), read from its wheel on PyPI."""

_CPU_BLOCKS: tuple[tuple[Release, int], ...] = (((0, 21, 0), 16), ((0, 29, 0), 32))
"""``get_supported_kernel_block_sizes`` of the CPU attention backend."""

_LISTS = ("choices", "words", "aliases")
_SWITCHES = ("negatable", "many", "nullable", "bare", "closed")


_NUMBERS: tuple[Release, ...] = tuple(numbers for text in RELEASES if (numbers := parse_release(text)))


def release_table(version: str | None) -> FlagTable | None:
    """The flags of a vLLM version, as far as known; None if it is not a version, or older than 0.8.5.

    They are those of the table's newest release that is not newer. If the table only has a later patch of the same
    minor release, that one, because flags change with minor releases (0.17.1 represents ``0.17.0``, rather than
    0.16.0). The result's ``version`` is that release, so that a caller can mention a difference.
    """
    wanted = parse_release(version or "")
    if wanted is None or wanted < _NUMBERS[0]:
        return None
    index = max(index for index, numbers in enumerate(_NUMBERS) if numbers <= wanted)
    if _NUMBERS[index][:2] != wanted[:2]:
        index = next((i for i, numbers in enumerate(_NUMBERS) if numbers[:2] == wanted[:2]), index)
    return _table(index)


@cache
def assumed_table() -> FlagTable:
    """The newest release's flags, for a vLLM whose own are unknown (`FlagTable.assumed`)."""
    return replace(_table(len(RELEASES) - 1), source="assumed")


def newest_first() -> Iterator[FlagTable]:
    """The flags of every recorded release."""
    return map(_table, reversed(range(len(RELEASES))))


def known_or_assumed(version: str | None) -> FlagTable:
    """The flags of a version, if it is one of the examined minor releases or between them, else assumed ones."""
    wanted = parse_release(version or "")
    newer = wanted is not None and wanted[:2] > _NUMBERS[-1][:2]
    return (None if newer else release_table(version)) or assumed_table()


def first_release(name: str) -> str | None:
    """The first release that has the flag of that name, or None."""
    history = _data()["flags"].get(name)
    return RELEASES[history[0][0]] if history else None


def releases_for(right: Callable[[Limits], bool]) -> tuple[str, str | None] | None:
    """First release whose limits satisfy ``right``, and the last if the newest does not; None if none does."""
    data = _data()
    fitting = [index for index in range(len(RELEASES)) if right(_limits(data, index))]
    if not fitting:
        return None
    return RELEASES[fitting[0]], (RELEASES[fitting[-1]] if fitting[-1] < len(RELEASES) - 1 else None)


def variable_releases(name: str) -> tuple[str, str | None] | None:
    """First release that reads a ``VLLM_*`` variable, and the last if later ones do not; None if it is unknown."""
    span = _data()["variables"].get(name)
    if span is None:
        return None
    return RELEASES[span[0]], (RELEASES[span[1] - 1] if len(span) > 1 else None)


@cache
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
    values = {
        name: _variable_spec(current)
        for name, history in data["values"].items()
        if (current := next((change for since, change in reversed(history) if since <= index), None)) is not None
    }
    reads_all = _NUMBERS[index] >= _READS_ALL_SINCE
    return FlagTable(RELEASES[index], "release", flags, variables, values, reads_all, _limits(data, index))


def _limits(data: dict[str, Any], index: int) -> Limits:
    found = {
        name: least
        for name, history in data["capabilities"].items()
        if (least := next((one for since, one in reversed(history) if since <= index), None)) is not None
    }
    architectures = next(words for since, words in reversed(_ARCHITECTURES) if since <= _NUMBERS[index])
    block = next((size for since, size in reversed(_CPU_BLOCKS) if since <= _NUMBERS[index]), None)
    return Limits(found, tuple(architectures.split()), block)


def _variable_spec(properties: dict[str, Any]) -> VariableSpec:
    return VariableSpec(
        **properties
        | {"kind": VariableKind(properties["kind"]), "choices": tuple(properties.get("choices", "").split())}
    )


def _properties(history: list[tuple[int, dict[str, Any] | None]], index: int) -> dict[str, Any] | None:
    """A flag's properties in one release: its first ones plus all changes up to then; None if it did not exist."""
    properties: dict[str, Any] | None = None
    for since, change in history:
        if since > index:
            break
        properties = None if change is None else {**(properties or {}), **change}
    return properties


def _spec(name: str, properties: dict[str, Any]) -> FlagSpec:
    known: dict[str, Any] = {key: value for key, value in properties.items() if value is not None}
    known |= {key: tuple(known[key].split()) for key in _LISTS if key in known}
    known |= {key: bool(known[key]) for key in _SWITCHES if key in known}
    return FlagSpec(name=name, **known | {"kind": ValueKind(known["kind"])})


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_bytes())
    return data
