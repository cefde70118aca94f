"""Memory reports of server starts, stored per model and GPU to improve the next estimate.

One JSON file, private to this user (mode 0600) and always replaced as a whole. A lock file beside it serializes
writers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec.structs import asdict

from vllm_launchers.private import locked, open_regular, own_folder, replace_file
from vllm_launchers.typed_decoding import decode_json
from vllm_launchers.vllm.flags.speculation import SPECULATION_FLAGS

VERSION = 1
MOST_ENTRIES = 200
MOST_BYTES = 2**20
LOCK_TIMEOUT_SECONDS = 2.0
"""How long to wait for another writer."""
_MOST_TEXT = 500
_MOST_FIGURES = 16

_NOT_OF_MEMORY = frozenset(
    {"host", "port", "served-model-name", "api-key", "root-path", "seed", "chat-template", "tool-call-parser"}
    | {"enable-auto-tool-choice", "reasoning-parser", "generation-config", "override-generation-config"}
    | {"disable-log-stats", "enable-log-requests", "disable-uvicorn-access-log", "uvicorn-log-level"}
    | {"disable-access-log-for-endpoints", "shutdown-timeout", "ssl-keyfile", "ssl-certfile"}
)
_OF_SHARES = (
    *("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size", "enable-expert-parallel"),
    *("quantization", "dtype", "cpu-offload-gb", "enable-lora", "kv-cache-memory-bytes", *SPECULATION_FLAGS),
)
"""Flags, with their JSON keys, that must be equal for a report to apply to another start."""


class StoredReport(msgspec.Struct, frozen=True):
    """One start, with figures by name. ``at`` is in Unix seconds."""

    model: str
    gpu: str
    engine: str
    flags: str
    shares: str
    at: float
    reported: Mapping[str, float]
    predicted: Mapping[str, float]


class _Version(msgspec.Struct):
    version: int


class _File(msgspec.Struct):
    entries: list[StoredReport]


def remembered(
    model: str,
    gpu: str,
    engine: str,
    flags: Mapping[str, object],
    *,
    reported: Mapping[str, float],
    predicted: Mapping[str, float],
    at: float | None = None,
) -> StoredReport:
    """Create a start's entry. ``at`` is in Unix seconds (None: now); ``predicted`` is the uncorrected estimate."""
    return StoredReport(
        model=model[:_MOST_TEXT],
        gpu=gpu[:_MOST_TEXT],
        engine=engine[:_MOST_TEXT],
        flags=flags_digest(flags),
        shares=_shares(flags),
        at=time.time() if at is None else at,
        reported=_figures(reported),
        predicted=_figures(predicted),
    )


def flags_digest(flags: Mapping[str, object]) -> str:
    """A short hash that is equal for flags with the same effect on memory; the flags themselves are not stored."""
    return _digest({name: value for name, value in flags.items() if name not in _NOT_OF_MEMORY})


class StartupReportStore:
    """The recorded starts. Reading never fails.

    A damaged file is moved aside (``….damaged``). A file of a newer program is left unchanged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._newer = False

    def remember(self, entry: StoredReport) -> bool:
        """Store a start, replacing an earlier one with the same model, GPU, engine and flags; return whether it was."""
        if not entry.reported:
            return False
        try:
            with self._locked():
                kept = [known for known in self._entries() if _key(known) != _key(entry)]
                if self._newer:
                    return False
                self._write([*kept, entry][-MOST_ENTRIES:])
        except OSError:
            return False
        return True

    def find(
        self, model: str, gpu: str, engine: str, flags: Mapping[str, object], also: Iterable[StoredReport] = ()
    ) -> StoredReport | None:
        """The most relevant start: preferably with the same flags, then with the same engine, then the newest.

        Only starts of this model on this kind of GPU count, with the same parallelism and precision. ``also`` are
        additional starts, which need not be stored. None if there are none.
        """
        digest, shares = flags_digest(flags), _shares(flags)
        known_all = [*self.entries(), *also]
        fitting = [known for known in known_all if (known.model, known.gpu, known.shares) == (model, gpu, shares)]
        return max(fitting, key=lambda known: (known.flags == digest, known.engine == engine, known.at), default=None)

    def entries(self) -> list[StoredReport]:
        """All starts, oldest first."""
        try:
            return self._entries()
        except OSError:
            return []

    def _entries(self) -> list[StoredReport]:
        """Raises OSError if the file exists but cannot be read, so that it is not overwritten."""
        self._newer = False
        try:
            with open_regular(self.path) as file:
                data = file.read(MOST_BYTES + 1)
        except FileNotFoundError:
            return []
        try:
            if len(data) > MOST_BYTES:
                raise ValueError("it is too long")
            if decode_json(data, _Version).version > VERSION:
                self._newer = True
                return []
            return decode_json(data, _File).entries
        except (msgspec.MsgspecError, ValueError, RecursionError):
            with contextlib.suppress(OSError):
                self.path.replace(self.path.with_name(f"{self.path.name}.damaged"))
            return []

    def _write(self, entries: list[StoredReport]) -> None:
        document = {"version": VERSION, "entries": [asdict(entry) for entry in entries]}
        replace_file(self.path, json.dumps(document, separators=(",", ":")).encode())

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        own_folder(self.path.parent)
        with locked(self.path.with_name(f"{self.path.name}.lock"), LOCK_TIMEOUT_SECONDS):
            yield


def _key(entry: StoredReport) -> tuple[str, str, str, str]:
    return entry.model, entry.gpu, entry.engine, entry.flags


def _shares(flags: Mapping[str, object]) -> str:
    given = [name for name in flags if name.partition(".")[0] in _OF_SHARES]
    return _digest({name: flags[name] for name in given if flags[name] not in (None, 1, False, "auto")})


def _digest(flags: Mapping[str, object]) -> str:
    text = json.dumps(sorted((name, repr(value)) for name, value in flags.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _figures(figures: Mapping[str, float]) -> dict[str, float]:
    known = {name: float(value) for name, value in figures.items() if math.isfinite(value)}
    return dict(list(known.items())[:_MOST_FIGURES])
