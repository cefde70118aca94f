"""What is known of a model on this machine: its folder, the Hugging Face cache, or else a table and its name.

Nothing here asks the network.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from vllm_launchers.machine.modelfacts.cache import Cached, cache_folder, find_cached
from vllm_launchers.machine.modelfacts.config import facts_from_config
from vllm_launchers.machine.modelfacts.known import known_facts
from vllm_launchers.machine.modelfacts.mistral import config_from_params
from vllm_launchers.machine.modelfacts.model import ModelFacts, ModelFactsError
from vllm_launchers.machine.modelfacts.names import parameters_in, split_name
from vllm_launchers.machine.modelfacts.state import BYTES
from vllm_launchers.machine.modelfacts.values import Config, read_json
from vllm_launchers.machine.modelfacts.weights import Weights, weights_in
from vllm_launchers.machine.models import REMOTE, model_folder_problem

NO_WEIGHTS = "*.safetensors"
"""What is named as missing where no weight file is there and no index tells their names."""
_NO = ("", "0", "false", "no", "off")


def model_facts(
    model: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> ModelFacts:
    """Return what this machine knows of a model, without the network.

    ``model`` is what ``vllm serve`` is given: a folder, a ``.gguf`` file, a hub id. ``download_dir`` is vLLM's flag:
    weights are looked for there, the config in the cache. ``environ`` is the server's environment (by default this
    process's), which says where the cache is. ``source`` of the answer is ``folder``, ``cache``, or ``table``, when it
    rests on a table of known models or on the name alone.

    Raises :class:`ModelFactsError` when a folder is no model's or its files cannot be understood.
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
        raise ModelFactsError(f"model {model}: cannot be read: {error}") from error
    if problem := _problem(model):
        raise ModelFactsError(problem)
    if environ.get("VLLM_USE_MODELSCOPE", "").lower() not in _NO:
        facts = from_name(model)
        return replace(facts, missing=(*facts.missing, "its files: ModelScope's cache is not read"))
    return _from_cache(model, revision, download_dir, environ) or from_name(model)


def from_name(model: str) -> ModelFacts:
    """Return what can be said of a model that is not here: a known one's published shape, or what its name tells."""
    known = known_facts(model)
    if known is not None:
        words = (*known.missing, "its files, which are not here: the shape is a known model's")
        return replace(known, missing=words, bytes_to_download=estimated_bytes(known))
    name, quantization = split_name(model)
    parameters = parameters_in(name)
    missing = ["its config, which is not here"]
    if parameters is None:
        missing.append("its size, which the name does not tell")
    facts = ModelFacts(model, source="table", parameters=parameters, quantization=quantization, missing=tuple(missing))
    return replace(facts, bytes_to_download=estimated_bytes(facts))


def estimated_bytes(facts: ModelFacts) -> int | None:
    """Bytes of a model's weight files: as they are known, else parameters × precision; None where neither is known."""
    if facts.weight_bytes is not None or facts.parameters is None:
        return facts.weight_bytes
    bits = facts.quantization.bits if facts.quantization else 8 * BYTES.get(facts.dtype or "", 2)
    return facts.parameters * (bits or 8) // 8


def _problem(model: str) -> str | None:
    try:
        return model_folder_problem(model)
    except ValueError:  # a zero byte
        return f"model {model!r}: is no name that a file or a model can have"


def _from_gguf(model: str, path: Path) -> ModelFacts:
    facts = from_name(path.stem)
    return replace(
        facts,
        model=model,
        source="folder",
        folder=str(path.parent),
        weight_bytes=path.stat().st_size,
        bytes_to_download=0,
    )


def _from_folder(model: str, folder: Path) -> ModelFacts:
    facts = _with_weights(facts_of_files(model, folder), weights_in(folder))
    return replace(facts, source="folder", folder=str(folder))


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
    weights = weights_in(held.snapshot) if held else Weights(missing=(NO_WEIGHTS,))
    facts = _with_weights(facts, weights)
    return replace(
        facts,
        source="cache",
        folder=str((held or configured).snapshot),
        bytes_to_download=_to_download(facts, weights, held),
    )


def _has_config(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", "params.json"))


def _to_download(facts: ModelFacts, weights: Weights, held: Cached | None) -> int | None:
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
    return facts_from_config(model, config, quant_config)


def _with_weights(facts: ModelFacts, weights: Weights) -> ModelFacts:
    missing = weights.missing or (() if weights.present else (NO_WEIGHTS,))
    facts = replace(
        facts,
        weight_bytes=weights.total,
        files_missing=missing,
        bytes_to_download=0 if not missing else None,
        dtype=facts.dtype or weights.dtype,
        parameters=weights.parameters,
    )
    return with_parameters(facts)


def with_parameters(facts: ModelFacts) -> ModelFacts:
    """Fill in the number of parameters: by the bytes of unquantized weights, else by what the name tells."""
    words = list(facts.missing)
    parameters = facts.parameters
    if parameters is None and facts.weight_bytes and facts.quantization is None and facts.dtype in BYTES:
        parameters = facts.weight_bytes // BYTES[facts.dtype]
    if facts.weight_bytes is None:
        known = from_name(facts.model)
        parameters = parameters or known.parameters
        words.append("size of the weights" + (", taken from the name" if parameters else ""))
    if facts.dtype:
        words = [word for word in words if word != "number format"]
    return replace(facts, parameters=parameters, missing=tuple(words))
