"""What the probes of the demo's servers recorded in the minutes before it is opened: steps and finished requests.

`tests/tools/record_demo.py` makes them, in the same virtual time as the rest of the recording. They are kept apart from
it, since they are larger, and are written while the servers start.
"""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from vllm_launchers.private import open_file
from vllm_launchers.probe.environment import PROBE
from vllm_launchers.probe.plugin.vllm_console_probe import FORMAT, HEADER_BYTES, LAYOUTS, SEGMENT_BYTES

FILE = Path(__file__).with_suffix(".xz")

RecordedProbe = Mapping[str, bytes]
"""The records of one run by their kind, `transposed`. Their times are in seconds, and 0 is the end of the recording."""


def read() -> Mapping[str, Sequence[RecordedProbe]]:
    """The records of each run of each server, oldest first."""
    return msgspec.msgpack.decode(lzma.decompress(FILE.read_bytes()), type=dict[str, list[dict[str, bytes]]])


def save(servers: Mapping[str, Sequence[RecordedProbe]]) -> None:
    """Write the records that are shipped."""
    FILE.write_bytes(lzma.compress(msgspec.msgpack.encode(servers), preset=9))


def enter(runs: Sequence[RecordedProbe], folder: Path, now: float) -> None:
    """Write segments as a probe would have, which ends at ``now`` (Unix seconds), to a server's ``folder``."""
    place = folder / PROBE
    place.mkdir(mode=0o700, exist_ok=True)
    for number, run in enumerate(runs):
        for kind, columns in run.items():
            size = LAYOUTS[kind].size
            records = rows(columns, size)
            room = (SEGMENT_BYTES - HEADER_BYTES) // size * size
            for part, start in enumerate(range(0, len(records), room)):
                # The names of segments are in the order of time: before those of the server that goes on.
                path = place / f"{kind}-{number:010d}{part:010d}-{os.getpid()}.bin"
                with os.fdopen(open_file(path, os.O_WRONLY | os.O_TRUNC), "wb") as file:
                    file.write(_header(kind, now) + records[start : start + room])


def _header(kind: str, now: float) -> bytes:
    """That of a process whose clock was at 0 at ``now``."""
    header = {
        "format": FORMAT, "kind": kind, "record_bytes": LAYOUTS[kind].size, "pid": os.getpid(), "wall": now,
        "monotonic": 0.0,
    }  # fmt: skip
    return json.dumps(header).encode().ljust(HEADER_BYTES - 1) + b"\n"


def transposed(records: bytes, size: int) -> bytes:
    """The first byte of each record, then the second one of each, and so on: they can be compressed far better."""
    return b"".join(records[place::size] for place in range(size))


def rows(columns: bytes, size: int) -> bytes:
    """The records again."""
    count = len(columns) // size
    records = bytearray(len(columns))
    for place in range(size):
        records[place::size] = columns[place * count : (place + 1) * count]
    return bytes(records)
