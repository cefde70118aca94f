"""Host documents as JSON: written for scripts and for planning elsewhere, read with full validation."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from vllm_launchers.host.gpu.host import Gpu, Host, HostError, Link, with_claims
from vllm_launchers.host.gpu.topology import LinkLevel, bandwidth, islands_of, level_of
from vllm_launchers.typed_decoding import decode_json

MOST_BYTES = 8 * 1024 * 1024
MOST_GPUS = 64
MOST_HOLDERS = 4096
MOST_TEXT = 4096
_BIG = 1e9
_MOST_COUNTED = 2**64

RECORDED = Path(__file__).parent / "hosts"
"""Hosts shipped with the program."""


def recorded_hosts() -> dict[str, Path]:
    """The shipped hosts, by name."""
    return {path.stem: path for path in sorted(RECORDED.glob("*.json"))}


def encode_host(host: Host) -> dict[str, Any]:
    """The document as plain values for ``json.dump``."""
    document: dict[str, Any] = msgspec.to_builtins(host)
    return document


def read_host(path: Path) -> Host:
    """Read a host document; also accepts the bare name of a shipped host (``8xh100``).

    Raises:
        HostError: it cannot be read, is not a host document, or has impossible values; one sentence with the path.
    """
    try:
        if not path.exists() and str(path) in (known := recorded_hosts()):
            path = known[str(path)]
        if not path.is_file():
            what = "is no file" if path.exists() else "there is no such file"
            raise HostError(f"{path}: {what}; recorded hosts: {', '.join(recorded_hosts())}")
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise HostError(f"{path}: cannot be read: {os.strerror(error.errno or 0)}") from error
    except ValueError as error:
        raise HostError("the host file's name holds a null character") from error
    try:
        return decode_host(data)
    except HostError as error:
        raise HostError(f"{path}: {error}") from error


def decode_host(data: bytes) -> Host:
    """Read a host document.

    Unknown keys are ignored; missing bandwidths and islands are derived from the links.

    Raises:
        HostError: it is not a host document; one sentence that names the key.
    """
    if len(data) > MOST_BYTES:
        raise HostError(f"larger than {MOST_BYTES // 1024 // 1024} MiB; that is no host document")
    try:
        host = decode_json(data, Host)
    except msgspec.ValidationError as error:
        raise HostError(f"is no host document: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HostError(f"is not JSON: {str(error)[:200]}") from error
    host = with_claims(host, {})  # claims recorded in it have expired
    for problem in _problems(host):
        raise HostError(problem)
    return _complete(host)


def _problems(host: Host) -> Iterator[str]:
    """Impossible values in a document, one sentence each."""
    if len(host.gpus) > MOST_GPUS:
        yield f"names {len(host.gpus)} GPUs; more than {MOST_GPUS} in one machine are not read"
        return
    yield from _bad_values(host, "")
    indices = [gpu.index for gpu in host.gpus]
    if len(set(indices)) != len(indices) or any(not 0 <= index < 10_000 for index in indices):
        yield "gpus: every GPU needs an index of its own, from 0"
    for gpu in host.gpus:
        if len(gpu.holders) > MOST_HOLDERS:
            yield f"gpus[{gpu.index}].used_by: names more than {MOST_HOLDERS} processes"
        if gpu.memory_gib is not None and gpu.free_gib is not None and gpu.free_gib > gpu.memory_gib * 1.001:
            yield f"gpus[{gpu.index}].free_gib: {gpu.free_gib} is more than all its memory, {gpu.memory_gib}"
    seen = set()
    for link in host.links:
        pair = frozenset((link.a, link.b))
        if link.a == link.b or not pair <= set(indices):
            yield f"links: {link.a} to {link.b} does not join two GPUs of the document"
        if pair in seen:
            yield f"links: {link.a} to {link.b} is listed twice"
        seen.add(pair)
    members = [index for island in host.islands for index in island]
    if len(set(members)) != len(members) or not set(members) <= set(indices):
        yield "islands: every GPU belongs to one island, and islands hold GPUs of the document only"


def _bad_values(value: Any, where: str) -> Iterator[str]:  # noqa: C901 (one branch per check)
    """Numbers that are negative, not finite or absurd, and overlong texts, anywhere in the document."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        # Only a float is tested for being finite: an integer may be too large for a float.
        if value < -1 or (isinstance(value, float) and not 0 <= value < math.inf):
            yield f"{where}: {str(value)[:20]} is out of range; expected a number from 0"
        elif value > (_MOST_COUNTED if where.endswith(_COUNTERS) else _BIG):
            yield f"{where}: {str(value)[:20]} is out of range"
    elif isinstance(value, str):
        if len(value) > MOST_TEXT:
            yield f"{where}: is longer than {MOST_TEXT} characters"
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _bad_values(item, f"{where}[{index}]")
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _bad_values(item, f"{where}.{name[:40]}")
    elif value is not None and not isinstance(value, bool):
        for name in value.__struct_fields__:
            yield from _bad_values(getattr(value, name), f"{where}.{name}".lstrip("."))


_COUNTERS = ("_kib", "_mj", "at", "replays", "ecc_corrected", "ecc_uncorrected", "crc", "replay", "recovery")
"""Keys of numbers bounded only like a counter: counters and times."""


def _complete(host: Host) -> Host:
    """Derive missing values: free memory, bandwidths, islands."""
    gpus = tuple(map(_with_memory, host.gpus))
    known = {gpu.index: gpu for gpu in gpus}
    links = tuple(_with_bandwidth(link, known) for link in host.links)
    indices = sorted(known)
    islands = tuple(tuple(sorted(island)) for island in host.islands) or islands_of(indices, links)
    alone = set(indices) - {index for island in islands for index in island}
    return replace(host, gpus=gpus, links=links, islands=islands + tuple((index,) for index in sorted(alone)))


def _with_memory(gpu: Gpu) -> Gpu:
    total, free, used = gpu.memory_gib, gpu.free_gib, gpu.used_gib
    if total is not None and free is None and used is not None:
        free = round(max(0.0, total - used), 3)
    if total is not None and used is None and free is not None:
        used = round(max(0.0, total - free), 3)
    return replace(gpu, free_gib=free, used_gib=used)


def _with_bandwidth(link: Link, gpus: dict[int, Gpu]) -> Link:
    if level_of(link.kind) is LinkLevel.UNKNOWN or link.bandwidth_gbs is not None:
        return link
    return replace(link, bandwidth_gbs=bandwidth(link.kind, gpus[link.a], gpus[link.b]))
