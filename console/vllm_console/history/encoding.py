"""Samples as small blobs: constant parts are stored once, and numbers as differences.

A *base* is a complete sample: its shape (labels, bounds, names) and its numbers. It is stored once for many rows; a row
holds only the compressed differences between its numbers and the base's. All numbers are integers: bucket counts as
differences between neighbors, sums and usage in millionths (a microsecond), which is finer than any use needs.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import sub
from typing import Any

import msgspec

from vllm_console.metrics.sample import COUNTERS, GAUGES, EngineSample, Histogram, Responses, Sample

_SCALARS = (*GAUGES, *COUNTERS)
"""An engine's numbers in storage order: changing the order requires another `SCHEMA_VERSION`."""

_RESPONSES = ("ok", "refused", "failed", "unauthorized")
"""The server's own numbers, after those of its engines."""

_LIMIT = 4 * 1024 * 1024
_MILLION = 1_000_000
_LARGEST = 2**61  # differences of two such numbers still fit in 64 bits


class EncodingError(ValueError):
    """A stored blob is corrupt."""


class HistogramShape(msgspec.Struct, array_like=True, frozen=True):
    """Key and finite upper bounds of a histogram."""

    key: str
    bounds: tuple[float, ...]


class EngineShape(msgspec.Struct, array_like=True, frozen=True):
    """Label and histograms of an engine."""

    label: str
    histograms: tuple[HistogramShape, ...]


class Shape(msgspec.Struct, array_like=True, frozen=True):
    """Everything in a sample except its time and numbers."""

    engines: tuple[EngineShape, ...]
    kv_cache_tokens: int | None
    model_name: str | None
    prefix_caching: bool | None
    prefix_step: int | None

    def sample(self, at: float, engines: dict[str, EngineSample], rest: Sequence[int | None]) -> Sample:
        """Build a sample of this shape; ``rest`` holds the numbers after those of the engines."""
        known = (self.kv_cache_tokens, self.model_name, self.prefix_caching, self.prefix_step)
        return Sample(at, engines, *known, _responses(rest))


def _responses(numbers: Sequence[int | None]) -> Responses | None:
    found = {name: float(number) for name, number in zip(_RESPONSES, numbers, strict=False) if number is not None}
    return Responses(**found) if "ok" in found else None


def shape_of(sample: Sample) -> Shape:
    """The shape of a sample."""
    engines = tuple(
        EngineShape(label, tuple(HistogramShape(key, h.bounds[:-1]) for key, h in engine.histograms.items()))
        for label, engine in sample.engines.items()
    )
    return Shape(engines, sample.kv_cache_tokens, sample.model_name, sample.prefix_caching, sample.prefix_step)


Numbers = list[int | None]


class Base(msgspec.Struct, eq=False):
    """The reference of rows. ``id`` is its row id in the file, None until stored; ``rows`` counts its rows."""

    shape: Shape
    numbers: Numbers
    id: int | None = None
    rows: int = 0


def numbers_of(sample: Sample) -> Numbers:
    """A sample's numbers, in the order of its shape."""
    numbers: Numbers = []
    for engine in sample.engines.values():
        for name in _SCALARS:
            numbers.append(_whole(getattr(engine, name), _MILLION if name == "kv_cache_usage" else 1))
        for histogram in engine.histograms.values():
            numbers.append(_whole(histogram.sum, _MILLION))
            counts = histogram.counts
            inside = list(map(round, map(sub, counts, (0.0, *counts))))
            if inside and min(inside) >= -_LARGEST and max(inside) <= _LARGEST:
                numbers += inside
            else:
                numbers += [max(-_LARGEST, min(_LARGEST, number)) for number in inside]
    responses = sample.responses
    numbers += [_whole(getattr(responses, name)) if responses is not None else None for name in _RESPONSES]
    return numbers


def same_shape(one: Sample, other: Sample) -> bool:
    """Whether two samples surely have the same shape; samples of one server share their bounds objects."""
    about = (one.kv_cache_tokens, one.model_name, one.prefix_caching, one.prefix_step)
    if about != (other.kv_cache_tokens, other.model_name, other.prefix_caching, other.prefix_step):
        return False
    if list(one.engines) != list(other.engines):
        return False
    return all(
        list(first.histograms) == list(second.histograms)
        and all(map(_same_bounds, first.histograms.values(), second.histograms.values()))
        for first, second in zip(one.engines.values(), other.engines.values(), strict=True)
    )


def _same_bounds(one: Histogram, other: Histogram) -> bool:
    return one.bounds is other.bounds


def encode_base(base: Base) -> bytes:
    """Encode a base."""
    return zlib.compress(msgspec.msgpack.encode((base.shape, base.numbers)))


def decode_base(data: bytes) -> Base:
    """Decode the result of `encode_base`; raises `EncodingError`."""
    try:
        shape, numbers = msgspec.msgpack.decode(_unpacked(data), type=tuple[Shape, Numbers])
    except (zlib.error, msgspec.DecodeError, TypeError) as error:
        raise EncodingError("unreadable base") from error
    return Base(shape, numbers)


def encode_row(base: Base, numbers: Numbers) -> bytes:
    """Encode the numbers of a sample with the base's shape, as differences from the base."""
    row = [
        None if number is None else number - (known or 0) for number, known in zip(numbers, base.numbers, strict=True)
    ]
    return zlib.compress(msgspec.msgpack.encode(row))


def decode_row(base: Base, at: float, data: bytes) -> Sample:
    """Decode the result of `encode_row`; raises `EncodingError`."""
    try:
        row = msgspec.msgpack.decode(_unpacked(data), type=Numbers)
        numbers = [None if step is None else step + (known or 0) for step, known in zip(row, base.numbers, strict=True)]
        engines: dict[str, EngineSample] = {}
        place = 0
        for engine in base.shape.engines:
            engines[engine.label], place = _engine(engine, numbers, place)
    except (zlib.error, msgspec.DecodeError, IndexError, ValueError, TypeError) as error:
        raise EncodingError("unreadable row") from error
    return base.shape.sample(at, engines, numbers[place:])


def decode_scalars(base: Base, at: float, data: bytes) -> Sample:
    """Like `decode_row`, but without the histograms, the bulk of a row; raises `EncodingError`."""
    engines: dict[str, EngineSample] = {}
    try:
        row = msgspec.msgpack.decode(_unpacked(data), type=Numbers)
        place = 0
        for engine in base.shape.engines:
            steps = zip(row[place : place + len(_SCALARS)], base.numbers[place : place + len(_SCALARS)], strict=True)
            engines[engine.label] = EngineSample(**_scalars(step if step is None else step + (known or 0)
                                                            for step, known in steps))  # fmt: skip
            place += len(_SCALARS) + sum(len(histogram.bounds) + 2 for histogram in engine.histograms)
        steps = zip(row[place:], base.numbers[place:], strict=True)
        rest = [step if step is None else step + (known or 0) for step, known in steps]
    except (zlib.error, msgspec.DecodeError, ValueError, TypeError) as error:
        raise EncodingError("unreadable row") from error
    return base.shape.sample(at, engines, rest)


def _scalars(numbers: Iterable[int | None]) -> dict[str, Any]:
    return {
        name: number / _MILLION if name == "kv_cache_usage" else float(number)
        for name, number in zip(_SCALARS, numbers, strict=True)
        if number is not None
    }


def _unpacked(data: bytes) -> bytes:
    return zlib.decompressobj().decompress(data, _LIMIT)


def _engine(shape: EngineShape, numbers: Sequence[int | None], place: int) -> tuple[EngineSample, int]:
    """The engine whose numbers begin at ``place``, and where the next engine's begin. Raises IndexError."""
    scalars = _scalars(numbers[place : place + len(_SCALARS)])
    place += len(_SCALARS)
    histograms: dict[str, Histogram] = {}
    for histogram in shape.histograms:
        bounds = _all_bounds(histogram.bounds)
        total = (numbers[place] or 0) / _MILLION
        end = place + 1 + len(bounds)
        counts = tuple(accumulate([float(number or 0) for number in numbers[place + 1 : end]]))
        if end > len(numbers):
            raise IndexError("fewer numbers than the shape has places")
        histograms[histogram.key] = Histogram(bounds, counts, total)
        place = end
    return EngineSample(**scalars, histograms=histograms), place


@functools.lru_cache(maxsize=256)
def _all_bounds(finite: tuple[float, ...]) -> tuple[float, ...]:
    return (*finite, math.inf)  # one tuple shared by all rows


def _whole(value: float | None, scale: int = 1) -> int | None:
    return None if value is None else max(-_LARGEST, min(_LARGEST, round(value * scale)))
