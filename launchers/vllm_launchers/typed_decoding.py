"""Thread-safe first use of types in msgspec's decoding.

msgspec 0.21 builds a struct's description when it first decodes into it, and stores that on the class before it is
complete. A second thread that decodes into the same struct meanwhile reads it and crashes the process. So descriptions
are built here, one at a time; afterwards they are only read.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_lock = threading.Lock()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """The JSON decoder of a type, created once."""
    found = _decoders.get(kind)
    if found is None:
        with _lock:
            found = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    return found


def decode_json(data: bytes | str, kind: type[T]) -> T:
    """`msgspec.json.decode` into a type.

    Raises:
        msgspec.DecodeError: it is not JSON, or not of this type.
    """
    return json_decoder(kind).decode(data)


def convert(value: Any, kind: type[T]) -> T:
    """`msgspec.convert` of plain data into a type.

    Raises:
        msgspec.ValidationError: it is not of this type.
    """
    json_decoder(kind)
    return msgspec.convert(value, kind)
