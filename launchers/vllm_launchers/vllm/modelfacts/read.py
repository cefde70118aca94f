"""A model's facts without the network: from its folder, the Hugging Face cache, or else a table and its name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from vllm_launchers.host.hub_folders import cache_folder, model_folder
from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.vllm.model_folder import REMOTE, config_from_params, model_folder_problem
from vllm_launchers.vllm.modelfacts.config import facts_from_config
from vllm_launchers.vllm.modelfacts.encoder import largest_picture, with_pixels
from vllm_launchers.vllm.modelfacts.facts import (
    BYTES,
    ModelFacts,
    ModelFactsError,
    Quantization,
    parameters_in,
    split_quantization,
)
from vllm_launchers.vllm.modelfacts.known import known_facts
from vllm_launchers.vllm.modelfacts.values import NO, Config, read_json
from vllm_launchers.vllm.modelfacts.weights import WeightFiles, weights_in

NO_WEIGHTS = "*.safetensors"
"""Reported as missing if there are neither weight files nor an index."""


def model_facts(
    model: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> ModelFacts:
    """Return a model's facts from this machine, without the network.

    ``model`` is the argument of ``vllm serve``: a folder, a ``.gguf`` file, a hub id. ``download_dir`` is vLLM's flag:
    weights are looked up there, the config in the cache. ``environ`` is the server's environment (default: this
    process's), which locates the cache. ``source`` of the result is ``folder``, ``cache``, or ``table`` for a table of
    known models or the name alone.

    Raises :class:`ModelFactsError` if a folder is not a model's or its files are invalid.
    """
    environ = os.environ if environ is None else environ
    if REMOTE.match(model):
        words = ("its config and files, which lie at a remote address",)
        return replace(from_name(model), missing=words, bytes_to_download=None)
    path = Path(model)
    try:
        if path.is_absolute() and path.is_file() and path.suffix == ".gguf":
            return _from_gguf(model, path)
        if path.is_absolute() and any((path / name).is_file() for name in ("config.json", "params.json")):
            return _from_folder(model, path)
    except (OSError, ValueError) as error:
        raise ModelFactsError(f"model {model}: can't be read: {error}") from error
    if problem := _problem(model):
        raise ModelFactsError(problem)
    if environ.get("VLLM_USE_MODELSCOPE", "").lower() not in NO:
        facts = from_name(model)
        return replace(facts, missing=(*facts.missing, "its files: ModelScope's cache is not read"))
    return _from_cache(model, revision, download_dir, environ) or from_name(model)


def from_name(model: str) -> ModelFacts:
    """Return the facts of a model not on this machine: a known one's published shape, or what its name contains."""
    known = known_facts(model)
    if known is not None:
        words = (*known.missing, "its files (not cached locally: using built-in architecture data)")
        return replace(known, missing=words, bytes_to_download=estimated_bytes(known))
    name, quantization = split_quantization(model)
    parameters = parameters_in(name)
    missing = ["its config (not cached locally)"]
    if parameters is None:
        missing.append("its size (not part of the name)")
    facts = ModelFacts(model, source="table", parameters=parameters, quantization=quantization, missing=tuple(missing))
    return replace(facts, bytes_to_download=estimated_bytes(facts))


def estimated_bytes(facts: ModelFacts) -> int | None:
    """Bytes of a model's weight files, else parameters × precision; None if neither is known."""
    if facts.weight_bytes is not None or facts.parameters is None:
        return facts.weight_bytes
    bits = facts.quantization.bits if facts.quantization else 8 * BYTES.get(facts.dtype or "", 2)
    return facts.parameters * (bits or 8) // 8


def _problem(model: str) -> str | None:
    try:
        return model_folder_problem(model)
    except ValueError:  # a null byte
        return f"model {model!r}: is not a name that a file or a model can have"


_GGUF = b"GGUF"
_OF_TOKENIZER = lazy_pattern(r"(?i)token|vocab|tekken|merges|spiece|bpe|\.(?:model|tiktoken|gguf)$")


def _from_gguf(model: str, path: Path) -> ModelFacts:
    try:
        with path.open("rb") as file:
            begin = file.read(len(_GGUF))
    except OSError as error:
        raise ModelFactsError(f"{path} can't be read: {error.strerror}") from error
    if begin != _GGUF:
        raise ModelFactsError(f"{path} is not a GGUF file: it does not begin with 'GGUF'; fetch it again")
    facts = from_name(path.stem)
    return replace(
        facts,
        model=model,
        source="folder",
        folder=str(path.parent),
        quantization=Quantization("gguf"),
        weight_bytes=path.stat().st_size,
        bytes_to_download=0,
    )


def _from_folder(model: str, folder: Path) -> ModelFacts:
    facts = _with_weights(facts_of_files(model, folder), weights_in(folder))
    return replace(facts, source="folder", folder=str(folder), tokenizer_missing=_lacks_tokenizer(folder))


def _lacks_tokenizer(folder: Path) -> bool:
    """Whether no file can be a tokenizer's: ``tokenizer.json``, ``vocab.txt``, ``tekken.json``, ``spiece.model``, …"""
    with os.scandir(folder) as entries:
        return not any(_OF_TOKENIZER.search(entry.name) for entry in entries)


def _from_cache(
    model: str, revision: str | None, download_dir: str | None, environ: Mapping[str, str]
) -> ModelFacts | None:
    cache = cache_folder(environ)
    places = [Path(download_dir), cache] if download_dir else [cache]
    found = [cached for place in places if (cached := find_cached(model, place, revision))]
    configured = next((one for one in reversed(found) if _has_config(one.snapshot)), None)
    if configured is None:
        return None
    facts = facts_of_files(model, configured.snapshot)
    held = find_cached(model, places[0], revision)
    weights = weights_in(held.snapshot) if held else WeightFiles(missing=(NO_WEIGHTS,))
    facts = _with_weights(facts, weights)
    return replace(
        facts,
        source="cache",
        folder=str((held or configured).snapshot),
        bytes_to_download=_to_download(facts, weights, held),
    )


def _has_config(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", "params.json"))


def _to_download(facts: ModelFacts, weights: WeightFiles, held: CachedRevision | None) -> int | None:
    if not facts.files_missing:
        return 0
    total = estimated_bytes(facts)
    return None if total is None else max(0, total - weights.present - (held.unfinished if held else 0))


def facts_of_files(model: str, folder: Path) -> ModelFacts:
    """Read a folder's config, Mistral's or Hugging Face's. Raises :class:`ModelFactsError`."""
    try:
        config: Config = read_json(folder / "config.json")
    except FileNotFoundError:
        try:
            config = config_from_params(read_json(folder / "params.json"))
        except FileNotFoundError as error:
            raise ModelFactsError(f"model {model}: {folder} holds no config.json; fetch it again") from error
    try:
        quant_config = read_json(folder / "hf_quant_config.json")
    except FileNotFoundError:
        quant_config = None
    facts = facts_from_config(model, config, quant_config)
    if facts.encoder is None or not facts.encoder.token_pixels:
        return facts
    try:
        pixels = largest_picture(read_json(folder / "preprocessor_config.json"))
    except (FileNotFoundError, ModelFactsError):
        return facts
    return replace(facts, encoder=with_pixels(facts.encoder, pixels))


def _with_weights(facts: ModelFacts, weights: WeightFiles) -> ModelFacts:
    missing = weights.missing or (() if weights.present else (NO_WEIGHTS,))
    facts = replace(
        facts,
        weight_bytes=weights.total,
        files_missing=missing,
        bytes_to_download=0 if not missing else None,
        dtype=facts.dtype or weights.dtype,
        parameters=weights.parameters,
        size_from=weights.size_from,
    )
    return with_parameters(facts)


def with_parameters(facts: ModelFacts) -> ModelFacts:
    """Fill in the number of parameters: from the bytes of unquantized weights, else the config, else the name."""
    words = list(facts.missing)
    parameters = facts.parameters
    if parameters is None and facts.weight_bytes and facts.quantization is None and facts.dtype in BYTES:
        parameters = facts.weight_bytes // BYTES[facts.dtype]
    if facts.weight_bytes is None:
        whence = ""
        if parameters is None and facts.counted is not None:
            parameters, whence = facts.counted, ", counted from its config"
        if parameters is None and (parameters := from_name(facts.model).parameters) is not None:
            whence = ", taken from the name"
        words.append(f"size of the weights{whence}")
    if facts.dtype:
        words = [word for word in words if word != "number format"]
    return replace(facts, parameters=parameters, missing=tuple(words))


# -- models in the Hugging Face cache ---------------------------------------------------------------------------------


_COMMIT = lazy_pattern(r"[0-9a-f]{40}")
_REVISION = lazy_pattern(r"[\w.-]+(?:/[\w.-]+)*")
_MOST_REF = 200
_MOST_BLOBS = 20_000


class CachedRevision(msgspec.Struct, frozen=True):
    """One revision in the cache: the folder with its files, and bytes of unfinished downloads."""

    snapshot: Path
    unfinished: int = 0


def find_cached(model: str, cache: Path, revision: str | None = None) -> CachedRevision | None:
    """Find a model's revision (a branch, a tag or a commit; default ``main``), or None if it is missing."""
    folder = model_folder(cache, model)
    commit = _commit(folder, revision or "main")
    if commit is None:
        return None
    snapshot = folder / "snapshots" / commit
    try:
        if not snapshot.is_dir():
            return None
    except OSError:
        return None
    return CachedRevision(snapshot, sum(_unfinished(folder / "blobs")))


def stored_bytes(model: str, cache: Path) -> int | None:
    """Bytes of a model in the cache, including unfinished downloads; None if there are none."""
    blobs = model_folder(cache, model) / "blobs"
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
    return (size for name, size in _blobs(blobs) if name.endswith(".incomplete"))


def _blobs(blobs: Path) -> Iterator[tuple[str, int]]:
    """Files and their space on disk, which may be less than their length: some downloads reserve that first."""
    try:
        for count, entry in enumerate(blobs.iterdir()):
            if count >= _MOST_BLOBS:
                return
            status = entry.stat()
            yield entry.name, min(status.st_size, status.st_blocks * 512)
    except OSError:
        return
