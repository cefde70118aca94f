"""Records to JSON and back. The shapes in `records` are the schema; what is missing or wrong is named by its path."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from vllm_launchers.keeper.errors import NewerRecordError, RecordError
from vllm_launchers.keeper.records import RECORD_VERSION, ServerRecord

MOST_SECONDS = 6e10
"""Every float in a record is a time (Unix seconds, so up to the year 3871) or a span; no date comes of a larger one."""

Shape = TypeVar("Shape")


def dumps(record: ServerRecord) -> bytes:
    """The bytes of ``record.json``: readable JSON in ASCII, one trailing newline.

    In ASCII, because a path may hold any bytes: what of them is not UTF-8 comes back as it was.
    """
    return json.dumps(to_plain(record), indent=1).encode() + b"\n"


def loads(data: bytes) -> ServerRecord:
    """Read ``record.json``. Raises `RecordError` with a sentence that names the wrong place."""
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"is not JSON: {error}") from error
    return record_of(raw)


def record_of(raw: Any) -> ServerRecord:
    """A record from plain JSON, of a file or of a keeper's answer. Raises `RecordError`."""
    version = raw.get("version") if isinstance(raw, dict) else None
    if isinstance(version, int) and version > RECORD_VERSION:
        raise NewerRecordError(
            f"was written by a newer vllm-console (record version {version}, this one reads up to {RECORD_VERSION}); "
            "update vllm-console"
        )
    record = from_plain(ServerRecord, raw)
    if not record.generations:
        raise RecordError("has no generations")
    return record


def to_plain(value: Any) -> Any:
    """Dataclasses, mappings, tuples and enums as what JSON knows."""
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def from_plain(kind: type[Shape], raw: Any, where: str = "") -> Shape:
    """Check and build a dataclass of ``records`` from plain JSON; fields it does not know are passed over."""
    if not isinstance(raw, dict):
        raise RecordError(f"expected an object at {where or 'the top'}, found {_found(raw)}")
    values: dict[str, Any] = {}
    for name, (annotation, required) in _schema(cast(type, kind)).items():
        if name in raw:
            values[name] = _decode(annotation, raw[name], f"{where}.{name}" if where else name)
        elif required:
            raise RecordError(f"lacks {where + '.' if where else ''}{name}")
    return kind(**values)


@cache
def _schema(kind: type) -> dict[str, tuple[Any, bool]]:
    """Per field its type and whether it must be there."""
    hints = get_type_hints(kind)
    return {
        field.name: (hints[field.name], field.default is MISSING and field.default_factory is MISSING)
        for field in fields(kind)
    }


def _decode(kind: Any, raw: Any, where: str) -> Any:
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        if raw is None:
            return None
        kind = next(part for part in get_args(kind) if part is not type(None))
        origin = get_origin(kind)
    if kind is Any:
        return raw
    if origin is tuple:
        item_kind = get_args(kind)[0]
        return tuple(_decode(item_kind, item, f"{where}[{i}]") for i, item in enumerate(_expect(list, raw, where)))
    if origin is not None:
        item_kind = get_args(kind)[1]
        return {key: _decode(item_kind, item, f"{where}.{key}") for key, item in _expect(dict, raw, where).items()}
    if is_dataclass(kind):
        return from_plain(cast(type, kind), raw, where)
    if issubclass(kind, Enum):
        try:
            return kind(raw)
        except ValueError as error:
            known = ", ".join(str(member.value) for member in kind)
            raise RecordError(f"{where} is {repr(raw)[:80]}, expected one of {known}") from error
    if kind is float and isinstance(raw, int | float) and not isinstance(raw, bool):
        if not abs(raw) <= MOST_SECONDS:  # nor is NaN
            raise RecordError(f"expected seconds at {where}, found a number beyond all bounds")
        return float(raw)
    return _expect(kind, raw, where)


def _expect(kind: type[Shape], raw: Any, where: str) -> Shape:
    if not isinstance(raw, kind) or (isinstance(raw, bool) and kind is not bool):
        raise RecordError(f"expected {kind.__name__} at {where}, found {_found(raw)}")
    return raw


def _found(raw: Any) -> str:
    return "nothing" if raw is None else type(raw).__name__
