"""Models in the Hugging Face cache, found without its library and without the network."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_COMMIT = re.compile(r"[0-9a-f]{40}")
_REVISION = re.compile(r"[\w.-]+(?:/[\w.-]+)*")
_MOST_REF = 200
_MOST_BLOBS = 20_000


@dataclass(frozen=True, slots=True)
class Cached:
    """One revision in the cache: the folder with its files, and bytes of downloads that are not finished."""

    snapshot: Path
    unfinished: int = 0


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Where Hugging Face's tools keep models under these variables."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if value := environ.get(name):
            return _expanded(value, environ)
    if value := environ.get("HF_HOME"):
        return _expanded(value, environ) / "hub"
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return _expanded(base, environ) / "huggingface" / "hub"


def _expanded(value: str, environ: Mapping[str, str]) -> Path:
    """A folder as these variables write it; a person's home is theirs, not this process's."""
    home = environ.get("HOME")
    value = re.sub(r"\$\{?(\w+)\}?", lambda found: environ.get(found[1], found[0]), value)
    if home and (value == "~" or value.startswith("~/")):
        return Path(home + value[1:])
    try:
        return Path(value).expanduser()
    except RuntimeError:
        return Path(value)


def find_cached(model: str, cache: Path, revision: str | None = None) -> Cached | None:
    """Find a model's revision (a branch, a tag or a commit; ``main`` by default), or None when it is not there."""
    folder = cache / ("models--" + model.replace("/", "--"))
    commit = _commit(folder, revision or "main")
    if commit is None:
        return None
    snapshot = folder / "snapshots" / commit
    try:
        if not snapshot.is_dir():
            return None
    except OSError:
        return None
    return Cached(snapshot, sum(_unfinished(folder / "blobs")))


def stored_bytes(model: str, cache: Path) -> int | None:
    """What the cache holds of a model, unfinished downloads included; None where it holds nothing of it."""
    blobs = cache / ("models--" + model.replace("/", "--")) / "blobs"
    try:
        return sum(size for _, size in _blobs(blobs)) if blobs.is_dir() else None
    except OSError:
        return None


def _commit(folder: Path, revision: str) -> str | None:
    if not _REVISION.fullmatch(revision) or ".." in revision.split("/"):
        return None
    if _COMMIT.fullmatch(revision):
        return revision
    ref = folder / "refs" / revision
    try:
        if not ref.is_file():
            return None
        with ref.open("rb") as file:
            commit = file.read(_MOST_REF).decode("ascii", "replace").strip()
    except OSError:
        return None
    return commit if _COMMIT.fullmatch(commit) else None


def _unfinished(blobs: Path) -> Iterator[int]:
    """Sizes of what downloads have written so far."""
    return (size for name, size in _blobs(blobs) if name.endswith(".incomplete"))


def _blobs(blobs: Path) -> Iterator[tuple[str, int]]:
    """Files and their sizes as the disk holds them: some downloads reserve the whole length first."""
    try:
        for count, entry in enumerate(blobs.iterdir()):
            if count >= _MOST_BLOBS:
                return
            status = entry.stat()
            yield entry.name, min(status.st_size, status.st_blocks * 512)
    except OSError:
        return
