"""Resolves flags and environment: vLLM 0.33's defaults, and its refusals with its own messages."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from vllm_launchers.engine_model.gpu_models import DEFAULT_GPU, GpuModel, batch_defaults, find_gpu
from vllm_launchers.engine_model.roofline import Geometry
from vllm_launchers.engine_model.scheduler import SchedulerLimits
from vllm_launchers.units import GIB
from vllm_launchers.vllm.modelfacts.facts import (
    LayerKind,
    ModelFacts,
    ModelFactsError,
    Quantization,
    parameters_in,
    split_quantization,
)
from vllm_launchers.vllm.modelfacts.known import known_facts
from vllm_launchers.vllm.modelfacts.read import facts_of_files
from vllm_launchers.vllm.release_defaults import SIMULATED_RELEASE, SIMULATED_VERSION


class ModelNotFoundError(Exception):
    """The model is neither known nor a local folder, and its name does not contain its size."""


_LLAMA = "LlamaForCausalLM"


def resolve_model(name: str) -> Geometry:
    """Find a model's geometry by hub id or folder.

    A folder is read; a known name is looked up, regardless of its publisher; for an unknown hub id whose name contains
    a size, a Llama's proportions are scaled to that size. Raises `ModelNotFoundError`, with vLLM's message if there is
    one.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _from_folder(name, folder)
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or not re.fullmatch(r"[\w.\-]+/[\w.\-]+", name):
        raise ModelNotFoundError(
            f"Repo id must be in the form 'repo_name' or 'namespace/repo_name': {name!r}. "
            "Use `repo_type` argument if needed."
        )
    facts = known_facts(name)
    if facts is not None:
        return _from_facts(facts)
    base, quantization = split_quantization(name)
    size = parameters_in(base)
    if size is None:
        raise ModelNotFoundError(
            f"The simulated engine does not know the model {name!r}, and its name contains no size such as '-7B'. "
            "Give a folder with a config.json, or a well-known model."
        )
    return replace(
        _interpolated(name, size, quantization), note=f"geometry interpolated from the {size / 1e9:g}B in the name"
    )


def quantized_in_flight(model: Geometry) -> Geometry:
    """A 16-bit ``model`` as vLLM holds it when it quantizes the layers to FP8 while loading."""
    embeddings = 2 * model.vocabulary * model.hidden
    return replace(model, quantization="fp8", weight_bytes=(model.weight_bytes + embeddings) / 2)


def _from_folder(name: str, folder: Path) -> Geometry:
    path = folder / "config.json"
    if not path.is_file():
        raise ModelNotFoundError(
            f"Invalid repository ID or local directory specified: {name!r}. There is no config.json in it."
        )
    try:
        facts = facts_of_files(name, folder)
    except ModelFactsError as error:
        raise ModelNotFoundError(f"{path} is not a decoder's configuration: {error}") from error
    if not (facts.layers and facts.heads and facts.hidden_size):
        raise ModelNotFoundError(f"{path} is not a decoder's configuration: it has no layers, heads or hidden size")
    geometry = _from_facts(facts)
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    return replace(geometry, weight_bytes=float(sum(sizes)) or geometry.weight_bytes)


def _from_facts(facts: ModelFacts) -> Geometry:
    """The geometry of a model whose layers, heads and hidden size are known. Embeddings are not quantized."""
    layers, heads, hidden = len(facts.layers), facts.heads or 1, facts.hidden_size or 1
    kv_heads, head_dim = facts.kv_heads or heads, facts.head_dim or hidden // heads
    intermediate, vocabulary = facts.intermediate_size or 4 * hidden, facts.vocabulary or 32000
    experts, picked = facts.experts or 0, facts.experts_per_token or 0
    width = facts.expert_intermediate_size or intermediate
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    each = 3.0 * hidden * (width if experts else intermediate)
    linear = layers * (attention + each * (experts or 1))
    parameters = float(facts.parameters or facts.counted or linear + 2 * vocabulary * hidden)
    linear = min(linear, parameters)
    bits = _bits(facts.quantization)
    weight_bytes = linear * bits / 8 + (parameters - linear) * 2
    return Geometry(
        name=facts.model,
        architecture=facts.architecture or _LLAMA,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        intermediate=intermediate,
        vocabulary=vocabulary,
        max_len=facts.max_context or 2048,
        parameters=parameters,
        active=parameters - layers * each * (experts - picked if experts else 0),
        weight_bytes=weight_bytes,
        quantization=facts.quantization.method if facts.quantization is not None else None,
        experts=experts,
        experts_per_token=picked,
        expert_share=layers * each * experts * bits / 8 / weight_bytes,
        kv_bytes_16=2.0 * layers * ((facts.kv_lora_rank or 0) + (facts.qk_rope_head_dim or 0)) if facts.mla else None,
    )


def _bits(quantization: Quantization | None) -> float:
    """Bits per weight, including the scales that 4-bit formats store per group."""
    if quantization is None:
        return 16.0
    bits = quantization.bits or 4
    return bits + (0.25 if bits <= 4 else 0.0)


def _interpolated(name: str, size: float, quantization: Quantization | None) -> Geometry:
    """A Llama-like shape with about ``size`` parameters: layers and width grow with its cube root."""
    ratio = (size / 8.03e9) ** (1 / 3)
    heads = max(4, round(32 * ratio / 4) * 4)
    hidden = heads * 128
    kv_heads = 8 if heads % 8 == 0 else 4
    layers = max(4, round(32 * ratio))
    vocabulary, tables = (128256, 2) if size >= 2e9 else (32000, 1)
    attention = hidden * 128 * (2 * heads + 2 * kv_heads)
    left = (size - vocabulary * hidden * tables) / layers - attention
    intermediate = max(hidden, round(left / (3 * hidden)))
    return _from_facts(
        ModelFacts(
            name,
            layers=(LayerKind.FULL,) * layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=128,
            hidden_size=hidden,
            intermediate_size=intermediate,
            vocabulary=vocabulary,
            max_context=32768,
            parameters=round(layers * (attention + 3 * hidden * intermediate) + vocabulary * hidden * tables),
            quantization=quantization,
        )
    )


REPORTED_VERSION = f"{SIMULATED_VERSION}+simulated"
"""The version that ``/version`` reports, which can't be mistaken for a real vLLM's."""
DEFAULT_BLOCK_SIZE = 16
DEFAULT_STARTUP_SECONDS = 4.0


class ValidationError(ValueError):
    """A configuration that vLLM's pydantic models reject."""


# A traceback ends in the class's full name, which log readers look for: both classes have the names of the real ones.
ValidationError.__module__ = "pydantic_core._pydantic_core"


class HFValidationError(ValueError):
    """A model name that is not a repository id."""


HFValidationError.__module__ = "huggingface_hub.errors"


def validation_error(config: str, message: str) -> ValidationError:
    """Build a `ValidationError` with pydantic's message format."""
    return ValidationError(
        f"1 validation error for {config}\n  Value error, {message} [type=value_error, "
        "input_value=ArgsKwargs((), {...}), input_type=ArgsKwargs]\n"
        "    For further information visit https://errors.pydantic.dev/2.14/v/value_error"
    )


class Simulated(msgspec.Struct, frozen=True):
    """The simulation's own environment: ``SIMULATED_GPU``, ``SIMULATED_STARTUP_SECONDS``, ``SIMULATED_SPEED``,
    ``SIMULATED_HOST_GIB`` and ``SIMULATED_TOTALS``."""

    gpu: GpuModel
    startup_seconds: float
    speed: float
    host_bytes: int | None = None
    """Host memory for the weights of a sleeping server; None means enough."""
    totals: Path | None = None
    """A file with a body of ``/metrics`` whose totals are continued, as if it had been serving before."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Simulated:
        """Read the variables. Raises ValueError naming the invalid one."""
        return cls(
            gpu=find_gpu(environment.get("SIMULATED_GPU") or DEFAULT_GPU),
            startup_seconds=_number(environment, "SIMULATED_STARTUP_SECONDS", DEFAULT_STARTUP_SECONDS, 0.0),
            speed=_number(environment, "SIMULATED_SPEED", 1.0, 1e-3),
            host_bytes=int(_number(environment, "SIMULATED_HOST_GIB", 0.0, 0.0) * GIB) or None,
            totals=Path(environment["SIMULATED_TOTALS"]) if environment.get("SIMULATED_TOTALS") else None,
        )


def _number(environment: Mapping[str, str], name: str, default: float, least: float) -> float:
    text = environment.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name} must be a number, not {text!r}") from None
    if not least <= value < 1e6:
        raise ValueError(f"{name} must be at least {least:g}, not {text!r}")
    return value


class EngineSettings(msgspec.Struct, frozen=True):
    """All engine settings. ``limits``: the scheduler's. Sizes in bytes; ``kv_element_bytes`` is 1 or 2."""

    model: Geometry
    gpu: GpuModel
    limits: SchedulerLimits
    served_names: tuple[str, ...]
    utilization: float
    prefix_caching: bool
    kv_cache_dtype: str
    kv_element_bytes: int
    kv_cache_bytes: int | None
    blocks_override: int | None
    quantization: str | None
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    eager: bool
    fit_length: bool
    """``--max-model-len auto``: reduce the context length until it fits."""


def resolve_settings(args: argparse.Namespace, simulated: Simulated) -> EngineSettings:
    """Resolve the flags. Raises `ValidationError` or `HFValidationError` like vLLM, before any engine is started."""
    _check_ranges(args)
    try:
        model = resolve_model(args.model)
    except ModelNotFoundError as error:
        raise HFValidationError(str(error)) from None
    quantization = _quantization(args.quantization, model)
    if quantization != model.quantization:
        model = quantized_in_flight(model)
    if model.heads % args.tensor_parallel_size:
        raise validation_error(
            "VllmConfig",
            f"Total number of attention heads ({model.heads}) must be divisible by tensor parallel size "
            f"({args.tensor_parallel_size}).",
        )
    return EngineSettings(
        model=model,
        gpu=simulated.gpu,
        limits=_limits(args, model, simulated.gpu),
        served_names=tuple(args.served_model_name or [args.model]),
        utilization=args.gpu_memory_utilization,
        prefix_caching=args.enable_prefix_caching is not False,
        kv_cache_dtype=args.kv_cache_dtype,
        kv_element_bytes=1 if args.kv_cache_dtype.startswith(("fp8", "int8")) else 2,
        kv_cache_bytes=args.kv_cache_memory_bytes,
        blocks_override=args.num_gpu_blocks_override,
        quantization=quantization,
        tensor_parallel=args.tensor_parallel_size,
        pipeline_parallel=args.pipeline_parallel_size,
        data_parallel=args.data_parallel_size,
        eager=bool(args.enforce_eager),
        fit_length=args.max_model_len == -1,
    )


def _check_ranges(args: argparse.Namespace) -> None:
    utilization = args.gpu_memory_utilization
    if not 0 < utilization <= 1:
        wanted = "less than or equal to 1" if utilization > 1 else "greater than 0"
        raise _out_of_range("CacheConfig", "gpu_memory_utilization", utilization, wanted)
    for config, names in _POSITIVE.items():
        for name in names:
            value = getattr(args, name)
            if value is not None and value < 1:
                raise _out_of_range(config, name, value, "greater than or equal to 1")
    size = args.block_size
    if size is not None and size % 16:
        raise validation_error(
            "VllmConfig", f"No valid attention backend found: block_size ({size}) must be a multiple of 16."
        )


_POSITIVE = {
    "CacheConfig": ("block_size", "num_gpu_blocks_override", "kv_cache_memory_bytes"),
    "SchedulerConfig": ("max_num_seqs", "max_num_batched_tokens"),
    "ParallelConfig": ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
}


def _out_of_range(config: str, field: str, value: float, wanted: str) -> ValidationError:
    kind = "_".join(word for word in wanted.split()[:-1] if word not in ("or", "to"))  # greater_than_equal
    return ValidationError(
        f"1 validation error for {config}\n{field}\n  Input should be {wanted} [type={kind}, input_value={value!r}, "
        f"input_type={type(value).__name__}]\n    For further information visit "
        f"https://errors.pydantic.dev/2.14/v/{kind}"
    )


_ALIASES = {"awq": ("awq", "awq_marlin", "auto_awq"), "gptq": ("gptq", "gptq_marlin", "auto_gptq")}
_IN_FLIGHT = ("fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel")


def _quantization(asked: str | None, model: Geometry) -> str | None:
    """The method in use. A flag for an unquantized checkpoint is rejected, except FP8: vLLM quantizes to that."""
    if asked is None:
        return model.quantization
    if model.quantization is None:
        if asked in _IN_FLIGHT:
            return "fp8"
        raise validation_error("ModelConfig", f"Cannot find the config file for {asked}")
    if asked in _ALIASES.get(model.quantization, (model.quantization,)):
        return model.quantization
    raise validation_error(
        "ModelConfig",
        f"Quantization method specified in the model config ({model.quantization}) does not match the quantization "
        f"method specified in the `quantization` argument ({asked}).",
    )


def _limits(args: argparse.Namespace, model: Geometry, gpu: GpuModel) -> SchedulerLimits:
    length = _max_model_len(args.max_model_len, model)
    chunked = args.enable_chunked_prefill is not False
    tokens, seqs = args.max_num_batched_tokens, args.max_num_seqs
    default_seqs, default_tokens = batch_defaults(gpu.name, gpu.usable_gib, SIMULATED_RELEASE)
    if tokens is None:
        tokens = default_tokens
        if not chunked:
            tokens = max(tokens, length)
        if seqs is not None:
            tokens = max(seqs, min(tokens, seqs * length))
    if seqs is None:
        seqs = min(default_seqs, tokens)
    if tokens < length and not chunked:
        raise validation_error(
            "SchedulerConfig",
            f"max_num_batched_tokens ({tokens}) is smaller than max_model_len ({length}). This effectively limits the "
            "maximum sequence length to max_num_batched_tokens and makes vLLM reject longer sequences. Please increase "
            "max_num_batched_tokens or decrease max_model_len.",
        )
    if tokens < seqs:
        raise validation_error(
            "SchedulerConfig",
            f"max_num_batched_tokens ({tokens}) must be greater than or equal to max_num_seqs ({seqs}).",
        )
    return SchedulerLimits(seqs, tokens, length, args.block_size or DEFAULT_BLOCK_SIZE, chunked)


def _max_model_len(asked: int | None, model: Geometry) -> int:
    if asked is None or asked == -1:
        return model.max_len
    if asked < 1:
        raise _out_of_range("ModelConfig", "max_model_len", asked, "greater than or equal to -1")
    if asked > model.max_len and os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") != "1":
        raise validation_error(
            "ModelConfig",
            f"User-specified max_model_len ({asked}) is greater than the derived max_model_len "
            f"(max_position_embeddings={model.max_len} or model_max_length=None in model's config.json). To allow "
            "overriding this maximum, set the env var VLLM_ALLOW_LONG_MAX_MODEL_LEN=1. VLLM_ALLOW_LONG_MAX_MODEL_LEN "
            "must be used with extreme caution. If the model uses relative position encoding (RoPE), positions "
            "exceeding derived_max_model_len lead to nan. If the model uses absolute position encoding, positions "
            "exceeding derived_max_model_len will cause a CUDA array out-of-bounds error.",
        )
    return asked
