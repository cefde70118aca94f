"""The flags that decide over memory, with vLLM's defaults filled in for its release and the GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_launchers.machine.modelfacts.model import ModelFacts
from vllm_launchers.plan.budget.gpus import GpuShape
from vllm_launchers.plan.flags import token_count
from vllm_launchers.plan.model import Flags

Release = tuple[int, int, int]

NEWEST: Release = (0, 33, 0)
"""Taken where the release is not known."""

_DRAFT_LAYERS = {
    "ngram": 0,
    "ngram_gpu": 0,
    "suffix": 0,
    "medusa": 0,
    "mlp_speculator": 0,
    "eagle": 1,
    "eagle3": 1,
    "dflash": 5,
}
"""Attention layers that a draft adds; of most that are published where the method does not say it."""
_NO_DRAFT_MODEL = frozenset({"ngram", "ngram_gpu", "suffix"})
_OWN_LAYERS = re.compile(r"(?:.*_)?mtp")
_WHOLE_ITEM = {"gemma4": 2496}
"""Tokens of the largest picture or film, which these models must get in one step."""
_MOST = 2**50


@dataclass(frozen=True, slots=True)
class Settings:
    """What a launch sets or vLLM takes by itself. Sizes in tokens and numbers of GPUs.

    ``max_model_len`` is None for a model whose context is not known; ``fit_length`` says that vLLM looks for the
    longest that fits (``auto``). ``capture_sizes`` is how many batch sizes get a CUDA graph, 0 without graphs.
    ``draft_layers`` are attention layers that speculative decoding adds, ``draft_tokens`` what it guesses at once.
    """

    release: Release
    tensor: int
    pipeline: int
    data: int
    decode_context: int
    utilization: float
    max_num_seqs: int
    max_batched: int
    in_flight: int
    """Tokens that may be scheduled and not yet settled: what a bounded window holds besides itself."""
    block_size: int
    max_model_len: int | None
    fit_length: bool
    kv_dtype: str
    dtype: str
    draft_layers: int
    draft_tokens: int
    lora_ranks: int
    """Ranks of all LoRA adapters that one batch may use, added up; 0 without LoRA."""
    capture_sizes: int
    graphs_in_share: bool
    """Whether CUDA graphs come out of the share that ``gpu-memory-utilization`` grants (0.21 and later)."""
    hybrid_cache: bool
    keep_states: bool
    """Whether states of linear layers are also kept for the prefix cache (``mamba-cache-mode align``)."""
    states_per_block: bool
    """Whether such a state is kept at each block (``all``)."""
    pooling: bool
    encoder: bool
    """Whether vLLM tries out a vision or audio encoder, if the model has one, at its largest input."""

    @property
    def gpus_per_engine(self) -> int:
        """How many GPUs one copy of the model takes."""
        return self.tensor * self.pipeline


def read_settings(
    facts: ModelFacts,
    flags: Flags,
    release: Release | None,
    environment: Mapping[str, str],
    gpu: GpuShape | None,
    assumed: list[str],
) -> Settings:
    """Fill in what is not set. ``gpu`` is one of those it gets, or None for the CPU.

    What had to be assumed is added to ``assumed``, a sentence each.
    """
    if release is None:
        release = NEWEST
        assumed.append(f"the vLLM release is not known: defaults of {NEWEST[0]}.{NEWEST[1]} are taken")
    seqs, batched = batch_sizes(facts, flags, release, gpu)
    length, fit = _length(facts, flags, assumed)
    pipeline = whole(flags, "pipeline-parallel-size", 1)
    draft_layers, draft_tokens = _draft(flags, assumed)
    kept = _prefix_caching(flags, release)
    mode = flags.get("mamba-cache-mode", "none")
    return Settings(
        release=release,
        tensor=whole(flags, "tensor-parallel-size", 1),
        pipeline=pipeline,
        data=whole(flags, "data-parallel-size", 1),
        decode_context=whole(flags, "decode-context-parallel-size", 1),
        utilization=_share(flags, 0.92 if release >= (0, 20, 0) else 0.9),
        max_num_seqs=seqs,
        max_batched=batched,
        in_flight=batched * _batches_in_flight(flags, release, pipeline, gpu is None),
        block_size=whole(flags, "block-size", 16 if gpu is not None else 128),
        max_model_len=length,
        fit_length=fit,
        kv_dtype=_kv_dtype(facts, flags),
        dtype=_dtype(facts, flags),
        draft_layers=draft_layers,
        draft_tokens=draft_tokens,
        lora_ranks=_lora_ranks(flags),
        capture_sizes=0 if gpu is None else _capture_sizes(flags, seqs, draft_tokens),
        graphs_in_share=_graphs_in_share(release, environment),
        hybrid_cache=release >= (0, 9, 2) and flags.get("disable-hybrid-kv-cache-manager") is not True,
        keep_states=kept and mode != "all",
        states_per_block=kept and mode == "all",
        pooling=flags.get("runner") == "pooling" or flags.get("task") in ("embed", "classify", "score", "reward"),
        encoder=_encoder_is_tried(flags),
    )


_NO_ENCODER = ("skip-mm-profiling", "language-model-only")


def _lora_ranks(flags: Flags) -> int:
    return whole(flags, "max-loras", 1) * whole(flags, "max-lora-rank", 16) if flags.get("enable-lora") is True else 0


def _encoder_is_tried(flags: Flags) -> bool:
    limits = [decimal(value) for value in json_flag(flags, "limit-mm-per-prompt").values()]
    return not (any(flags.get(name) is True for name in _NO_ENCODER) or (limits and not any(limits)))


def whole(flags: Flags, name: str, default: int) -> int:
    """A flag's whole number above zero, or the default where it has none (a wrong value is another's to name)."""
    count = token_count(flags.get(name))
    return min(count, _MOST) if count is not None and count > 0 else default


def decimal(value: object) -> float | None:
    """A number, also where it is written as text; None for all else."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 2**63:
        return None
    return float(value)


def _share(flags: Flags, default: float) -> float:
    share = decimal(flags.get("gpu-memory-utilization"))
    return share if share is not None and 0 < share <= 1 else default


def batch_sizes(facts: ModelFacts, flags: Flags, release: Release, gpu: GpuShape | None) -> tuple[int, int]:
    """``max-num-seqs`` and ``max-num-batched-tokens`` of a server, from vLLM's ``EngineArgs.get_batch_defaults``.

    They go by the GPU's size: 1024 and 8192 from 70 GiB on, A100 excepted; 256 and 2048 below, and where NVML does not
    tell the size.
    """
    size = 0.0 if gpu is None or gpu.unified else gpu.total_gib or 0.0
    if gpu is None:
        world = whole(flags, "tensor-parallel-size", 1) * whole(flags, "pipeline-parallel-size", 1)
        defaults = 128 * world, 2048 * world
    elif size >= 160 and release >= (0, 28, 0):
        defaults = 1024, 16384
    else:
        defaults = (1024, 8192) if size >= 70 and "a100" not in gpu.name.lower() else (256, 2048)
    doubled = 2 if flags.get("performance-mode") == "throughput" else 1
    seqs = whole(flags, "max-num-seqs", defaults[0] * doubled)
    if (batched := whole(flags, "max-num-batched-tokens", 0)) > 0:
        return seqs, batched
    batched = max(defaults[1] * doubled, _WHOLE_ITEM.get(facts.model_type or "", 0) if facts.multimodal else 0)
    length = token_count(flags.get("max-model-len")) or facts.max_context
    if length is None:
        return seqs, batched
    if flags.get("enable-chunked-prefill") is False:
        batched = max(batched, length)
    return seqs, max(1, min(batched, seqs * length))


def _batches_in_flight(flags: Flags, release: Release, pipeline: int, on_cpu: bool) -> int:
    """Steps that may be under way at once; a window's blocks are kept for all of them since 0.26."""
    if release < (0, 26, 0):
        return 1
    overlap = flags.get("async-scheduling") is not False and not on_cpu and pipeline == 1
    return 2 if overlap else pipeline


def _length(facts: ModelFacts, flags: Flags, assumed: list[str]) -> tuple[int | None, bool]:
    value = flags.get("max-model-len")
    length = token_count(value)
    fit = length is None and value in ("auto", "-1")
    if length is None:
        length = facts.max_context
        if length is None:
            assumed.append("the model's context length is not known: set max-model-len to see the concurrency")
    if length is not None and flags.get("disable-sliding-window") is True and facts.window:
        length = min(length, facts.window)
    return length, fit


def _dtype(facts: ModelFacts, flags: Flags) -> str:
    """The number format of activations: the flag's, else the checkpoint's; vLLM runs float32 checkpoints in 16 bits."""
    value = str(flags.get("dtype", "auto"))
    if value != "auto":
        return {"half": "float16", "float": "float32"}.get(value, value)
    return facts.dtype if facts.dtype in ("bfloat16", "float16") else "bfloat16"


def _kv_dtype(facts: ModelFacts, flags: Flags) -> str:
    value = str(flags.get("kv-cache-dtype", "auto"))
    return (facts.kv_cache_quantization or "auto") if value == "auto" else value


def _prefix_caching(flags: Flags, release: Release) -> bool:
    """Whether prefixes of models with linear layers are cached: when asked for, by default since 0.28."""
    wanted = flags.get("enable-prefix-caching")
    return wanted if isinstance(wanted, bool) else release >= (0, 28, 0)


def _draft(flags: Flags, assumed: list[str]) -> tuple[int, int]:
    """Attention layers and guessed tokens of speculative decoding."""
    config = json_flag(flags, "speculative-config")
    method = str(config.get("method", flags.get("spec-method", "")) or "")
    tokens = config.get("num_speculative_tokens", flags.get("spec-tokens", 0))
    tokens = tokens if isinstance(tokens, int) and 0 <= tokens <= 1000 else 0
    if not config and not method:
        return 0, 0
    if _OWN_LAYERS.fullmatch(method):
        return 1, tokens
    layers = _DRAFT_LAYERS.get(method)
    if method not in _NO_DRAFT_MODEL:
        count = "its KV cache neither" if layers is None else f"its KV cache is, with {layers} layer(s)"
        assumed.append(f"the draft model's weights are not counted; {count}")
    return layers or 0, tokens


def json_flag(flags: Flags, name: str) -> Mapping[str, object]:
    """A JSON flag's keys, whether it is given whole or key by key (``name.key``); empty for what is no object."""
    found: dict[str, object] = {}
    value = flags.get(name)
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            document = json.loads(value)
        except (ValueError, RecursionError):
            document = None
        if isinstance(document, dict):
            found.update(document)
    prefix = f"{name}."
    found.update({key[len(prefix) :].replace("-", "_"): flags[key] for key in flags if key.startswith(prefix)})
    return found


def _capture_sizes(flags: Flags, seqs: int, draft_tokens: int) -> int:
    """How many batch sizes get a graph: 1, 2, 4, each 8 up to 256 and each 16 up to twice ``max-num-seqs`` or 512."""
    config = json_flag(flags, "compilation-config")
    level = decimal(flags.get("optimization-level", config.get("level", config.get("mode"))))
    mode = str(config.get("cudagraph_mode", "")).upper()
    if flags.get("enforce-eager") is True or mode == "NONE" or level == 0 or config.get("use_cudagraph") is False:
        return 0
    sizes = config.get("cudagraph_capture_sizes")
    if isinstance(sizes, list):
        return len(sizes)
    most = decimal(flags.get("max-cudagraph-capture-size", config.get("max_cudagraph_capture_size")))
    largest = int(most) if most is not None and most >= 0 else min(2 * seqs * (1 + draft_tokens), 512)
    largest = min(largest, 8192)
    return sum(largest >= n for n in (1, 2, 4)) + min(largest, 256) // 8 + max(0, largest - 256) // 16


def _graphs_in_share(release: Release, environment: Mapping[str, str]) -> bool:
    wanted = environment.get("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", "")
    if release >= (0, 18, 1) and wanted in ("0", "1"):
        return wanted == "1"
    return release >= (0, 21, 0)
