"""Predicts which keys and values vLLM's pydantic classes reject in a JSON flag whose keys are known. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import TypeVar

from vllm_launchers.vllm.flags.bounds import out_of_bounds
from vllm_launchers.vllm.flags.changes import FlagValue, Number, human_int
from vllm_launchers.vllm.flags.flag_table import FlagSpec, ValueKind
from vllm_launchers.vllm.flags.wording import either, expected, listed, shown

T = TypeVar("T")

_NEAR = 0.6
_SWITCH_WORDS = frozenset(["true", "t", "yes", "y", "on", "1", "false", "f", "no", "n", "off", "0"])
_HYPHENS = "speculative-config"
"""The only JSON flag in whose keys vLLM accepts ``-`` for ``_``."""
_TAKEN = {
    ValueKind.BOOL: "true or false",
    ValueKind.TEXT: "text",
    ValueKind.JSON: "an object",
    ValueKind.JSON_LIST: "a list",
}


def nested_problem(spec: FlagSpec, document: Mapping[str, object]) -> str | None:
    """Why vLLM would reject an object for a JSON flag, in one sentence, or None."""
    return _object_problem(f"--{spec.name}", spec.parts, with_plain_keys(spec.name, document))


def with_plain_keys(name: str, document: Mapping[str, T]) -> Mapping[str, T]:
    """A JSON flag's object as vLLM reads it: with ``_`` for ``-`` in its keys, if vLLM allows that."""
    return {key.replace("-", "_"): value for key, value in document.items()} if name == _HYPHENS else document


def key_problem(spec: FlagSpec, path: str, value: FlagValue) -> str | None:
    """Like `nested_problem`, for a key that is set on its own; ``path`` is what follows the flag and the dot."""
    *outer, last = path.removesuffix("+").split(".")
    document: object = value.split(",") if path.endswith("+") and isinstance(value, str) else decoded(value)
    for key in (last, *reversed(outer)):
        document = {key: document}
    assert isinstance(document, dict)
    return nested_problem(spec, document)


def part_at(spec: FlagSpec, path: str) -> FlagSpec | None:
    """The specification of the key at a path (``pass_config.fuse_norm_quant``), if known."""
    found: FlagSpec | None = spec
    for key in path.removesuffix("+").split("."):
        found = next((part for part in found.parts if part.name == key), None) if found is not None else None
    return found


def decoded(value: FlagValue) -> object:
    """The value as vLLM's parser reads it after ``--flag.key``."""
    if not isinstance(value, str):
        return value
    try:
        document: object = json.loads(value)
    except (ValueError, RecursionError):
        number = human_int(value)
        return value if number is None else number
    return document


def _object_problem(name: str, parts: Sequence[FlagSpec], document: Mapping[str, object]) -> str | None:
    if not parts:
        return None
    known = {part.name: part for part in parts}
    for key, value in document.items():
        part = known.get(key)
        sentence = _unknown_key(name, key, list(known)) if part is None else _value_problem(name, part, value)
        if sentence is not None:
            return sentence
    return None


def _unknown_key(name: str, key: str, known: list[str]) -> str:
    close = get_close_matches(key, known, n=2, cutoff=_NEAR)
    if close:
        return f"{name} has no key {shown(key)} (it has {listed(known)}); did you mean {either(close)}?"
    return f"{name} has no key {shown(key)}; it has {listed(known)}"


def _value_problem(owner: str, part: FlagSpec, value: object) -> str | None:
    name = f"{owner}.{part.name}"
    if value is None:
        anything = part.kind is ValueKind.OTHER and not (part.choices or part.closed)
        return None if part.nullable or anything else f"{name} takes {_taken(part)}, not null"
    if part.choices or part.closed:
        return (
            None if _chosen(part, value) else f"{name} takes {_taken(part)}, not {_written(value)}{_hint(part, value)}"
        )
    wrong = f"{name} takes {_taken(part)}, not {_written(value)}"
    match part.kind:
        case ValueKind.BOOL:
            return None if _switch(value) else wrong
        case ValueKind.INT | ValueKind.FLOAT:
            number = _number(part.kind, value)
            outside = out_of_bounds(part, number, str(value)) if number is not None else None
            return wrong if number is None else f"{name} {outside}" if outside else None
        case ValueKind.TEXT:
            return None if isinstance(value, str) else wrong
        case ValueKind.JSON_LIST:
            return None if isinstance(value, list) else wrong
        case ValueKind.JSON:
            return _object_problem(name, part.parts, value) if isinstance(value, dict) else wrong
    return None


def _taken(part: FlagSpec) -> str:
    if part.closed:
        return either(part.words)
    return expected(part) if part.choices else _TAKEN.get(part.kind) or expected(part)


def _written(value: object) -> str:
    return shown(value) if isinstance(value, str) else shown(json.dumps(value)).strip("'")


def _hint(part: FlagSpec, value: object) -> str:
    options = {option.lower(): option for option in (part.words if part.closed else part.choices)}
    close = get_close_matches(str(value).lower(), options, n=1, cutoff=_NEAR) if isinstance(value, str) else []
    return f"; did you mean {options[close[0]]}?" if close else ""


def _chosen(part: FlagSpec, value: object) -> bool:
    """Whether a value is one of the choices. An enum member may be given by number too, if the numbers are known."""
    if part.closed and isinstance(value, str):
        return value.lower() in {word.lower() for word in part.words}
    if part.kind is ValueKind.INT or (part.closed and part.choices):
        number = _number(ValueKind.INT, value) if not isinstance(value, str) else None
        return number is not None and str(number) in part.choices
    if not isinstance(value, str):
        return part.kind is ValueKind.OTHER
    return (value.lower().replace("-", "_") if part.kind is ValueKind.OTHER else value) in part.choices


def _switch(value: object) -> bool:
    if isinstance(value, str):
        return value.lower() in _SWITCH_WORDS
    return isinstance(value, (bool, int, float)) and value in (0, 1)


def _number(kind: ValueKind, value: object) -> Number | None:
    """The number that pydantic reads from a value, or None."""
    if not isinstance(value, (bool, int, float, str)):
        return None
    try:
        number = float(value)
        if kind is ValueKind.FLOAT:
            return number
        if isinstance(value, (bool, int)):
            return int(value)
        return int(number) if number.is_integer() else None
    except (ValueError, OverflowError):
        return None
