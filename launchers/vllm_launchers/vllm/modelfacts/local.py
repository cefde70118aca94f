"""The models on this machine: in the Hugging Face cache, and in folders named by the user. Read-only and bounded.

Nothing here uses the network. Only a model's config, the index or header of its weights, and file sizes are read.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from vllm_launchers.host.hub_folders import cache_folder
from vllm_launchers.vllm.model_folder import CONFIGS
from vllm_launchers.vllm.modelfacts.facts import ModelFacts, ModelFactsError
from vllm_launchers.vllm.modelfacts.read import find_cached, model_facts, stored_bytes
from vllm_launchers.vllm.modelfacts.weights import broken_file

MOST_MODELS = 300
"""Maximum number of models read, over all folders."""

MOST_ENTRIES = 5_000
"""Maximum number of names in a folder, and of files of a model."""

MOST_FOLDERS = 2_000
"""Maximum number of folders searched below a named one."""

DEPTH = 2
"""How deep below a named folder to search for models: ``folder/org/name``."""

_CACHED = "models--"


class LocalModel(msgspec.Struct, frozen=True):
    """A model on this machine. ``model`` is the argument of ``vllm serve``: a hub id, or a path.

    ``place`` is ``cache`` or ``folder``. ``disk_bytes`` is the size of its files; None if there are too many to count.
    If ``facts`` is None, ``problem`` is a sentence that says why; a problem in addition to facts is an unfinished
    download.
    """

    model: str
    place: str
    folder: str
    disk_bytes: int | None = None
    facts: ModelFacts | None = None
    problem: str = ""


class LocalModels(msgspec.Struct, frozen=True):
    """The models found, by name, and one sentence for each folder that could not be read or contains too much."""

    models: tuple[LocalModel, ...] = ()
    problems: tuple[str, ...] = ()


def local_models(folders: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> LocalModels:
    """Find the models in the cache that ``environ`` (default: this process's) sets, and in these folders."""
    environ = os.environ if environ is None else environ
    problems: list[str] = []
    found: dict[str, LocalModel] = {}
    cache = cache_folder(environ)
    for name, place, path in _places(cache, folders, problems):
        if name in found:
            continue
        if len(found) >= MOST_MODELS:
            problems.append(f"more than {MOST_MODELS} models: the others are not listed")
            break
        found[name] = _model(name, place, path, cache, environ)
    ordered = sorted(found.values(), key=lambda one: (one.facts is None, one.model.lower()))
    return LocalModels(tuple(ordered), tuple(dict.fromkeys(problems)))


def _places(cache: Path, folders: Sequence[str], problems: list[str]) -> Iterator[tuple[str, str, Path]]:
    """Each model's name, kind of place and folder."""
    if os.path.isdir(cache):  # noqa: PTH112 - unlike Path.is_dir, it never raises
        for entry in _entries(cache, problems):
            if entry.name.startswith(_CACHED):
                yield entry.name.removeprefix(_CACHED).replace("--", "/"), "cache", entry
    for name in folders:
        folder = Path(os.path.expanduser(name))  # noqa: PTH111 - unlike Path.expanduser, it ignores unknown users
        if not os.path.isdir(folder):  # noqa: PTH112
            problems.append(f"models: {folder} is not a folder")
            continue
        for path in _in_folder(folder, problems):
            yield str(path), "folder", path


def _in_folder(top: Path, problems: list[str]) -> Iterator[Path]:
    """Yield a folder that is a model, or else the models in it: folders with a config, ``.gguf`` files, hub caches."""
    waiting, visited = deque([(top, DEPTH)]), 0
    seen: set[str] = set()  # a link may lead to a folder above it
    while waiting:
        if visited == MOST_FOLDERS:
            problems.append(f"{top}: more than {MOST_FOLDERS:,} folders, the others are not searched")
            return
        folder, depth = waiting.popleft()
        if (real := os.path.realpath(folder)) in seen:
            continue
        seen.add(real)
        visited += 1
        entries = _entries(folder, problems)
        if {entry.name for entry in entries}.intersection(CONFIGS):
            yield folder
            continue
        yield from (entry for entry in entries if entry.suffix == ".gguf" and os.path.isfile(entry))  # noqa: PTH113
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.name.startswith(_CACHED):
                held = find_cached(entry.name.removeprefix(_CACHED).replace("--", "/"), folder)
                if held is not None and any(os.path.isfile(held.snapshot / name) for name in CONFIGS):  # noqa: PTH113
                    yield held.snapshot
            elif depth and os.path.isdir(entry):  # noqa: PTH112
                waiting.append((entry, depth - 1))


def _entries(folder: Path, problems: list[str]) -> list[Path]:
    entries: list[Path] = []
    try:
        for entry in folder.iterdir():
            if len(entries) >= MOST_ENTRIES:
                problems.append(f"{folder}: more than {MOST_ENTRIES:,} entries, the others are not read")
                break
            entries.append(entry)
    except OSError as error:
        problems.append(f"{folder} can't be read: {os.strerror(error.errno or 0)}")
    return sorted(entries)


def _model(name: str, place: str, path: Path, cache: Path, environ: Mapping[str, str]) -> LocalModel:
    size = stored_bytes(name, cache) if place == "cache" else _stored(path)
    found = LocalModel(name, place, str(path), size)
    try:
        # List the Hugging Face cache even where a server would use ModelScope.
        facts = model_facts(name, environ={key: environ[key] for key in environ if key != "VLLM_USE_MODELSCOPE"})
    except ModelFactsError as error:
        return msgspec.structs.replace(found, problem=str(error))
    if facts.source not in ("cache", "folder"):
        problem = "no config.json in the cache: vLLM would download it"
        held = find_cached(name, cache) if place == "cache" else None
        if held is not None and any(entry.suffix == ".gguf" for entry in _entries(held.snapshot, [])):
            problem = (
                "has GGUF files alone, which vLLM reads since 0.24 only with vllm-gguf-plugin; name the path of one"
            )
        return msgspec.structs.replace(found, problem=problem)
    try:
        broken = broken_file(Path(facts.folder)) if facts.folder and path.is_dir() else ""
    except (ModelFactsError, OSError):  # already reported as unreadable
        broken = ""
    if broken:
        return msgspec.structs.replace(found, problem=f"{broken} is not a safetensors file; fetch it again")
    missing = len(facts.files_missing)
    problem = f"{missing} weight file{'' if missing == 1 else 's'} missing: its download is not finished"
    return msgspec.structs.replace(found, facts=facts, problem=problem if missing else "")


def _stored(path: Path) -> int | None:
    """Bytes of a file, or of the files in a folder and one level below; None if there are too many."""
    total = count = 0
    try:
        if path.is_file():
            return path.stat().st_size
        for folder, below, names in os.walk(path):
            if Path(folder) != path:
                below.clear()
            count += len(names)
            if count > MOST_ENTRIES:
                return None
            for name in names:
                status = (Path(folder) / name).stat()
                total += min(status.st_size, status.st_blocks * 512)
    except OSError:
        return None
    return total
