"""The weight files that vLLM would load from a folder: their size, and whether they are complete."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from vllm_launchers.vllm.modelfacts.facts import ModelFactsError
from vllm_launchers.vllm.modelfacts.values import MOST_BYTES, mapping, number, objects, parse_json, whole_numbers

MOST_FILES = 20_000
_POINTER = b"version https://git-lfs"
_POINTER_BYTES = 1024
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Kinds of weight files, by precedence."""
_INDEX = "model.safetensors.index.json"
_CONSOLIDATED = "consolidated.safetensors.index.json"
_SMALL_INDEX = 2**18
_MOST_HEADER = 2**20
_PLAIN = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes per weight of unquantized types, by their safetensors names."""


class WeightFiles(msgspec.Struct, frozen=True):
    """Weight files: ``total`` bytes when complete (None if unknown), bytes ``present``, and names of ``missing`` files.

    ``parameters`` and ``dtype`` come from the header of a single file, if its weights are not quantized. A file shorter
    than its own header states counts as missing.
    """

    total: int | None = None
    present: int = 0
    missing: tuple[str, ...] = ()
    parameters: int | None = None
    dtype: str | None = None
    size_from: str = ""
    """The index that ``total`` is from, if files are missing."""


class Index(msgspec.Struct, frozen=True):
    """The content of a safetensors index: its files' names and the bytes of all weights."""

    files: tuple[str, ...] = ()
    total: int | None = None


class _Files(msgspec.Struct):
    """Sizes of a folder's files by name; git-lfs pointers separately, with the sizes that they state."""

    sizes: dict[str, int] = msgspec.field(default_factory=dict)
    pointers: dict[str, int] = msgspec.field(default_factory=dict)


def weights_in(folder: Path) -> WeightFiles:
    """Find the weight files that vLLM would load from a folder.

    Mistral's ``consolidated*.safetensors`` take precedence over the shards beside them, safetensors over ``.bin`` and
    ``.pt``. Files missing from the index, subfolders and training states do not count. Raises :class:`ModelFactsError`
    if the folder or its index cannot be read.
    """
    files = _look(folder)
    chosen = weight_files([*files.sizes, *files.pointers])
    name = _CONSOLIDATED if any(map(_is_consolidated, chosen)) else _INDEX
    index = _index_of(folder, files, name)
    if index.files:
        summed = _summed(files, list(index.files), index.total)
        return replace(summed, size_from=name) if summed.missing and index.total is not None else summed
    if not chosen:
        return WeightFiles()
    weights = _summed(files, chosen, None)
    if not chosen[0].endswith(".safetensors"):
        return weights
    return _with_header(weights, folder / chosen[0]) if len(chosen) == 1 else _with_count(weights, files)


def weight_files(names: Iterable[str]) -> list[str]:
    """Return the files of a folder that vLLM would load, in order; an index takes precedence."""
    names = sorted(name for name in names if "/" not in name and not name.endswith(_NOT_WEIGHTS))
    if consolidated := [name for name in names if _is_consolidated(name)]:
        return consolidated
    for ending in _ENDINGS:
        if chosen := [name for name in names if name.endswith(ending) and not name.startswith("adapter_")]:
            return chosen
    return []


def broken_file(folder: Path) -> str:
    """The name of the first ``.safetensors`` file that does not begin with a plausible header, or an empty text."""
    files = _look(folder)
    for name in weight_files(files.sizes):
        if not name.endswith(".safetensors"):
            break
        with (folder / name).open("rb") as file:
            begin = file.read(9)
        if not 2 <= int.from_bytes(begin[:8], "little") <= files.sizes[name] - 8 or begin[8:] != b"{":
            return name
    return ""


def _is_consolidated(name: str) -> bool:
    return name.startswith("consolidated") and name.endswith(".safetensors")


def _look(folder: Path) -> _Files:
    files = _Files()
    try:
        with os.scandir(folder) as entries:
            for number_of, entry in enumerate(entries):
                if number_of >= MOST_FILES:
                    break
                _note(files, entry)
    except OSError as error:
        raise ModelFactsError(f"{folder} can't be read: {error.strerror}") from error
    return files


def _note(files: _Files, entry: os.DirEntry[str]) -> None:
    try:
        status = entry.stat()
        if not stat.S_ISREG(status.st_mode):
            return
        if status.st_size < _POINTER_BYTES and not entry.name.endswith(".json"):
            promised = _promised(Path(entry.path))
            if promised is not None:
                files.pointers[entry.name] = promised
                return
    except OSError:  # a dangling link, or a link loop
        return
    files.sizes[entry.name] = status.st_size


def _promised(path: Path) -> int | None:
    """Size of the file that a git-lfs pointer stands for, 0 if it is not stated; None for other files."""
    with path.open("rb") as file:
        content = file.read(_POINTER_BYTES)
    if not content.startswith(_POINTER):
        return None
    found = re.search(rb"^size (\d{1,18})$", content, re.MULTILINE)
    return int(found[1]) if found else 0


def _index_of(folder: Path, files: _Files, name: str) -> Index:
    if name in files.pointers:
        raise ModelFactsError(f"{folder / name} is only a git-lfs pointer; fetch the files with 'git lfs pull'")
    if name not in files.sizes:
        return Index()
    try:
        with (folder / name).open("rb") as file:
            data = file.read(_SMALL_INDEX)
            if files.sizes[name] > len(data) and (whole := _all_there(data, files)):
                return whole
            return parse_index(data + file.read(MOST_BYTES + 1 - len(data)), str(folder / name))
    except OSError as error:
        raise ModelFactsError(f"{folder / name} can't be read: {error.strerror}") from error


def _all_there(beginning: bytes, files: _Files) -> Index | None:
    """File names from the beginning of a long index: each has the file count. None unless all files exist."""
    found = re.search(rb'"([\w.-]{1,100}-)\d{5}-of-(\d{5})\.safetensors"', beginning)
    if found is None:
        return None
    start, count = found[1].decode(), int(found[2])
    names = [f"{start}{one:05d}-of-{count:05d}.safetensors" for one in range(1, min(count, MOST_FILES) + 1)]
    return Index(tuple(names)) if names and all(name in files.sizes for name in names) else None


def parse_index(data: bytes, where: str) -> Index:
    """Parse a safetensors index. Raises :class:`ModelFactsError`, which names ``where``.

    A long one is only searched for file names, which takes half the time.
    """
    if _SMALL_INDEX < len(data) <= MOST_BYTES:
        found = re.search(rb'"total_size"\s*:\s*(\d{1,18})\b', data)
        parts = data.split(b'.safetensors"')[:-1]
        names = {part[part.rfind(b'"') + 1 :] for part in parts}
        files = {name.decode("utf-8", "replace") + ".safetensors" for name in names}
        return Index(_inside(files), int(found[1]) if found else None)
    content = parse_json(data, where)
    values = mapping(content, "weight_map").values()
    total = number(mapping(content, "metadata"), "total_size")
    return Index(_inside({name for name in values if isinstance(name, str)}), total)


def _inside(names: set[str]) -> tuple[str, ...]:
    """Names of files in the folder itself, up to a limit."""
    return tuple(sorted(name for name in names if "/" not in name and len(name) < 256))[:MOST_FILES]


def _summed(files: _Files, names: list[str], total: int | None) -> WeightFiles:
    missing = tuple(name for name in names if name not in files.sizes)
    present = sum(files.sizes.get(name, 0) for name in names)
    if not missing:
        return WeightFiles(present, present)
    promised = [files.pointers.get(name, 0) for name in missing]
    if total is None and all(promised):
        total = present + sum(promised)
    return WeightFiles(max(total, present) if total is not None else None, present, missing)


def _with_count(weights: WeightFiles, files: _Files) -> WeightFiles:
    """Without an index, names such as ``model-00002-of-00004.safetensors`` still show how many there must be."""
    name = re.compile(r"(.+-)(\d{5})-of-(\d{5})\.safetensors")
    found = [match for one in files.sizes if (match := name.fullmatch(one))]
    if not found:
        return weights
    start, count = found[0][1], min(int(found[0][3]), MOST_FILES)
    names = {f"{start}{number_of:05d}-of-{count:05d}.safetensors" for number_of in range(1, count + 1)}
    absent = tuple(sorted({*weights.missing, *(names - set(files.sizes))}))
    return weights if not absent else WeightFiles(None, weights.present, absent)


def _with_header(weights: WeightFiles, path: Path) -> WeightFiles:
    """Read a single file's header: its number of parameters, their type, and whether the file is complete."""
    if weights.missing:
        return weights
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= _MOST_HEADER:
                return weights
            content = json.loads(file.read(length))
    except (OSError, ValueError, RecursionError):
        return weights
    if not isinstance(content, dict):
        return weights
    tensors = [entry for entry in objects(content) if "dtype" in entry]
    end = max((max(whole_numbers(entry, "data_offsets"), default=0) for entry in tensors), default=0)
    whole = 8 + length + end
    if end and whole > weights.present:  # truncated
        return WeightFiles(whole, weights.present, (path.name,))
    return _counted(weights, tensors)


def _counted(weights: WeightFiles, tensors: list[Mapping[str, object]]) -> WeightFiles:
    kinds = {entry.get("dtype") for entry in tensors}
    if not tensors or not all(isinstance(kind, str) and kind in _PLAIN for kind in kinds):
        return weights
    total = 0
    for entry in tensors:
        offsets = whole_numbers(entry, "data_offsets")
        if len(offsets) != 2 or offsets[1] < offsets[0]:
            return weights
        total += (offsets[1] - offsets[0]) // _PLAIN[str(entry["dtype"])]
    names = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    dtype = names[str(next(iter(kinds)))] if len(kinds) == 1 else None
    return WeightFiles(weights.total, weights.present, weights.missing, total or None, dtype)
