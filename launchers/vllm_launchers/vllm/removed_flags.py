"""Flags, values and variables that vLLM has removed: since when, and what to use instead.

``since`` is exact to the minor release: it comes from vLLM's source, of which one patch of each minor release was read.
Renames and moves into another flag's keys are those that vLLM made itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.vllm.flags.changes import Changes, Flags, FlagValue, json_object
from vllm_launchers.vllm.flags.several_words import several_words
from vllm_launchers.vllm.release_defaults import Release

FlagCarry = Callable[[Flags], Changes | None]
VariableCarry = Callable[[str, Flags], Changes | None]

_WHOLE = lazy_pattern(r"[0-9]{1,18}")

SPECULATIVE_KEYS: Mapping[str, str] = {
    "speculative-model": "model",
    "num-speculative-tokens": "num_speculative_tokens",
    "speculative-model-quantization": "quantization",
    "speculative-draft-tensor-parallel-size": "draft_tensor_parallel_size",
    "speculative-max-model-len": "max_model_len",
    "ngram-prompt-lookup-max": "prompt_lookup_max",
    "ngram-prompt-lookup-min": "prompt_lookup_min",
}
"""Flags of speculative decoding before 0.8, and their keys in ``speculative-config``."""

EPLB_KEYS: Mapping[str, str] = {
    "num-redundant-experts": "num_redundant_experts",
    "eplb-window-size": "window_size",
    "eplb-step-interval": "step_interval",
    "eplb-log-balancedness": "log_balancedness",
}

STRUCTURED_KEYS: Mapping[str, str] = {
    "guided-decoding-backend": "backend",
    "guided-decoding-disable-any-whitespace": "disable_any_whitespace",
    "guided-decoding-disable-additional-properties": "disable_additional_properties",
}
STRUCTURED_FLAGS = (*STRUCTURED_KEYS, "guided-decoding-disable-fallback")

_POOLING = ("embed", "embedding", "classify", "score", "reward")


def drop(*names: str) -> FlagCarry:
    """Unset the flags: vLLM now always does what they did, or they no longer have an effect."""

    def carry(flags: Flags) -> Changes | None:
        return Changes(unset=_present(names, flags))

    return carry


def lost(flags: Flags) -> Changes | None:  # noqa: ARG001 - one of the carries
    """No automatic change: the effect must be expressed differently."""
    return None


def rename(old: str, new: str) -> FlagCarry:
    """Set the same value under another name."""

    def carry(flags: Flags) -> Changes | None:
        return _moved({new: flags[old]}, (old,), flags)

    return carry


def becomes(old: str, new: str, value: FlagValue) -> FlagCarry:
    """A switch that is now a value of another flag; if it was off, it is just unset."""

    def carry(flags: Flags) -> Changes | None:
        return _moved({new: value} if flags[old] is True else {}, (old,), flags)

    return carry


def into_json(keys: Mapping[str, str], target: str) -> FlagCarry:
    """Several flags that are now keys of one JSON flag; keys that are already set there stay."""

    def carry(flags: Flags) -> Changes | None:
        given = {key: flags[name] for name, key in keys.items() if name in flags}
        return _merged(target, given, keys, flags)

    return carry


def speculative(flags: Flags) -> Changes | None:
    """``--speculative-model M --num-speculative-tokens N`` as ``--speculative-config``; None without both."""
    if "speculative-config" in flags:
        return Changes(unset=_present(SPECULATIVE_KEYS, flags))
    given: dict[str, Any] = {key: flags[name] for name, key in SPECULATIVE_KEYS.items() if name in flags}
    if "model" not in given or "num_speculative_tokens" not in given:
        return None
    if given["model"] == "[ngram]":
        given = {"method": "ngram"} | {key: value for key, value in given.items() if key != "model"}
    return _merged("speculative-config", given, SPECULATIVE_KEYS, flags)


def structured(flags: Flags) -> Changes | None:
    """The ``guided-decoding-*`` flags as ``--structured-outputs-config``."""
    given = {key: flags[name] for name, key in STRUCTURED_KEYS.items() if name in flags}
    backend = given.get("backend")
    if isinstance(backend, str):
        given["backend"] = backend.partition(":")[0]  # drop a suffix that was once allowed: xgrammar:no-fallback
    return _merged("structured-outputs-config", given, STRUCTURED_FLAGS, flags)


def swap_space(flags: Flags) -> Changes | None:
    """Convert GiB of swap space per GPU to total GiB for KV blocks offloaded from the GPUs."""
    size = flags["swap-space"]
    if isinstance(size, bool) or not isinstance(size, int | float) or size <= 0:
        return Changes(unset=("swap-space",))
    ways = flags.get("tensor-parallel-size", 1)
    total = size * ways if isinstance(ways, int) and not isinstance(ways, bool) else size
    return _moved({"kv-offloading-size": total}, ("swap-space",), flags)


def log_requests(flags: Flags) -> Changes | None:
    """Request logging is now off by default: unset the flag, or replace it by the opposite one to keep logging."""
    wanted: dict[str, FlagValue] = {"enable-log-requests": True} if flags["disable-log-requests"] is False else {}
    return _moved(wanted, ("disable-log-requests",), flags)


def task(flags: Flags) -> Changes | None:
    """``--task`` as ``--runner``; vLLM detects the pooling type itself."""
    task_name = flags["task"]
    if task_name in _POOLING:
        return _moved({"runner": "pooling"}, ("task",), flags)
    return _moved({"runner": task_name} if task_name in ("generate", "draft") else {}, ("task",), flags)


def graph_sizes(flags: Flags) -> Changes | None:
    """Several sizes stay a list; a single one was the largest size."""
    several = several_words("cuda-graph-sizes", flags["cuda-graph-sizes"])
    if len(several) > 1:
        return rename("cuda-graph-sizes", "cudagraph-capture-sizes")(flags)
    largest = int(several[0]) if several and _WHOLE.fullmatch(several[0]) else flags["cuda-graph-sizes"]
    return _moved({"max-cudagraph-capture-size": largest}, ("cuda-graph-sizes",), flags)


def backend_flag(value: str, flags: Flags) -> Changes | None:
    """``VLLM_ATTENTION_BACKEND`` as a flag, without the suffixes that distinguished V0 from V1."""
    name = value.strip().upper()
    for ending in ("_VLLM_V1", "_V1"):
        name = name.removesuffix(ending)
    gone = not name or name in ("XFORMERS", "ROCM_FLASH", "DUAL_CHUNK_FLASH_ATTN")
    return None if gone else _set("attention-backend", name, flags)


def variable_to_flag(name: str) -> VariableCarry:
    """A variable that is now a flag with the same value."""

    def carry(value: str, flags: Flags) -> Changes | None:
        text = value.strip()
        return _set(name, int(text) if _WHOLE.fullmatch(text) else text, flags) if text else None

    return carry


def variable_to_json(target: str, key: str, *, switch: bool = False, besides: Mapping[str, Any] = {}) -> VariableCarry:
    """A variable that is now a key of a JSON flag."""

    def carry(value: str, flags: Flags) -> Changes | None:
        text = value.strip()
        if not text:
            return None
        inner: Any = int(text) if _WHOLE.fullmatch(text) else text
        if switch:
            inner = text.lower() in ("1", "true")
        return _merged(target, {**besides, key: inner}, (), flags)

    return carry


def _present(names: Iterable[str], flags: Flags) -> tuple[str, ...]:
    return tuple(name for name in names if name in flags)


def _set(name: str, value: FlagValue, flags: Flags) -> Changes | None:
    """Set a flag, unless it is already set."""
    return None if name in flags else Changes(set={name: value})


def _moved(wanted: Flags, old: Iterable[str], flags: Flags) -> Changes:
    """Unset ``old`` and set the replacement; a new flag that is already set stays unchanged."""
    return Changes(set={name: value for name, value in wanted.items() if name not in flags}, unset=_present(old, flags))


def _merged(target: str, given: Mapping[str, Any], old: Iterable[str], flags: Flags) -> Changes | None:
    """Merge ``given`` into a JSON flag, whose own keys win; None if it is not an object or is set key by key."""
    if not given:
        return Changes(unset=_present(old, flags))
    held = json_object(flags[target]) if target in flags else {}
    if held is None or any(name.startswith(f"{target}.") for name in flags):
        return None
    return Changes(set={target: json.dumps({**given, **held})}, unset=_present(old, flags))


NEVER: Release = (0, 0, 0)
"""``since`` of something that no release from 0.8.5 on has."""


class RemovalKind(StrEnum):
    """How a vLLM reacts to something that it no longer supports."""

    REFUSED = "refused"
    """It exits at once."""
    IGNORED = "ignored"
    """It silently ignores it."""
    WARNED = "warned"
    """It ignores it and logs a warning."""


class RemovedFlag(msgspec.Struct, frozen=True):
    """A removed flag that guides still mention. ``since`` is the first release that rejects it, to the minor release.

    ``ignored_since`` is the first release that accepts but ignores it, if earlier. ``instead`` is the fix, as a clause.
    ``carry`` returns the change to the new spelling, given all flags that are set; None if the meaning does not carry
    over. ``carries_since`` is the first release in which that may replace the flag alone, if newer than ``since``.
    """

    name: str
    since: Release
    instead: str
    carry: Callable[[Flags], Changes | None]
    ignored_since: Release | None = None
    carries_since: Release | None = None

    def changes(self, flags: Flags, release: Release | None) -> Changes | None:
        """The change to the new spelling, or only without the old one in a release that needs more than that.

        An unknown release counts as the newest.
        """
        if release is not None and self.carries_since is not None and release < self.carries_since:
            return Changes(unset=(self.name,))
        return self.carry(flags)

    def fate(self, release: Release) -> RemovalKind | None:
        """A release's reaction to it; None if it still works."""
        if release >= self.since:
            return RemovalKind.REFUSED
        return RemovalKind.IGNORED if self.ignored_since is not None and release >= self.ignored_since else None


class RemovedVariable(msgspec.Struct, frozen=True):
    """An environment variable that vLLM no longer reads. ``since`` is the first release that does not."""

    name: str
    since: Release
    instead: str
    carry: Callable[[str, Flags], Changes | None] | None = None
    """Returns an equivalent change of flags, given the variable's value and the flags that are set."""

    def fate(self, release: Release) -> RemovalKind | None:
        """A release's reaction to it; None if it still works."""
        return unread_fate(release) if release >= self.since else None


class RemovedValue(msgspec.Struct, frozen=True):
    """A value that a flag no longer accepts."""

    flag: str
    value: str
    since: Release
    instead: str
    new_value: str | None = None
    """The value's current name."""
    plugin: str = ""
    """A package that makes vLLM accept the value again, if installed in its environment."""

    def dropped(self, release: Release | None, plugins: Collection[str]) -> bool:
        """Whether a release with these plugins no longer accepts it."""
        return release is not None and release >= self.since and self.plugin not in plugins


_WARNS_SINCE: Release = (0, 17, 0)


def unread_fate(release: Release) -> RemovalKind:
    """How a release reacts to a ``VLLM_*`` variable that it does not read; since 0.17 it logs a warning."""
    return RemovalKind.WARNED if release >= _WARNS_SINCE else RemovalKind.IGNORED


_UNUSED = "remove it"
_V1 = "remove it: the V1 engine has no equivalent"


def _gone(since: Release, names: str, instead: str) -> list[RemovedFlag]:
    return [RemovedFlag(name, since, instead, drop(name)) for name in names.split()]


def _lost(since: Release, names: str, instead: str) -> list[RemovedFlag]:
    """Flags whose effect would be lost by unsetting them."""
    return [RemovedFlag(name, since, instead, lost) for name in names.split()]


_FLAGS: tuple[RemovedFlag, ...] = (
    # Speculative decoding: one JSON flag since 0.8
    *(
        RemovedFlag(name, NEVER, "write --speculative-config "
                    '\'{"model": …, "num_speculative_tokens": …}\'', speculative)
        for name in SPECULATIVE_KEYS
    ),
    *_gone(NEVER, "speculative-disable-by-batch-size speculative-disable-mqa-scorer spec-decoding-acceptance-method "
           "typical-acceptance-sampler-posterior-threshold typical-acceptance-sampler-posterior-alpha "
           "disable-logprobs-during-spec-decoding", _UNUSED),
    # Scheduling and memory
    *_gone((0, 11, 0), "preemption-mode", "remove it: preempted requests are always recomputed"),
    *_gone((0, 11, 0), "scheduler-delay-factor", _V1),
    *_gone((0, 10, 1), "num-scheduler-steps multi-step-stream-outputs", _V1),
    *_gone((0, 10, 0), "use-v2-block-manager", _V1),
    *_gone((0, 12, 0), "num-lookahead-slots", _V1),
    *_gone((0, 27, 0), "max-num-partial-prefills max-long-partial-prefills",
           "remove it, or bound long prompts with --long-prefill-token-threshold"),
    RemovedFlag("swap-space", (0, 18, 0), "remove it; the nearest is --kv-offloading-size, GiB of "
                "main memory for evicted KV blocks", swap_space,
                ignored_since=(0, 11, 0), carries_since=(0, 21, 0)),
    *_gone((0, 28, 0), "calculate-kv-scales", "remove it: scales of an FP8 KV cache come from the checkpoint"),
    *_gone((0, 31, 0), "enable-mamba-fine-grained-prefix-cache", _UNUSED),
    # Execution
    *_gone((0, 11, 0), "disable-async-output-proc", "remove it; --async-scheduling replaces it"),
    *_gone((0, 11, 0), "max-seq-len-to-capture",
           "remove it: CUDA graphs are sized by batch now, with --max-cudagraph-capture-size"),
    *_gone(NEVER, "max-context-len-to-capture",
           "remove it: CUDA graphs are sized by batch now, with --max-cudagraph-capture-size"),
    RemovedFlag("cuda-graph-sizes", (0, 13, 0), "use --cudagraph-capture-sizes, or for a single number, the "
                "largest, --max-cudagraph-capture-size",
                graph_sizes),
    *_gone((0, 28, 0), "override-attention-dtype", _UNUSED),
    *_gone((0, 30, 0), "enable-bf16x3-router-gemm", _UNUSED),
    *_gone((0, 10, 0), "device", "remove it: the installed build decides the device"),
    *_lost((0, 10, 2), "override-neuron-config", "Neuron is a plugin with settings of its own"),
    *_gone(NEVER, "worker-use-ray", "remove it: the GPUs of one machine need no Ray; a Ray cluster is used with "
           "--distributed-executor-backend ray"),
    *_gone(NEVER, "engine-use-ray", _UNUSED),
    *(
        RemovedFlag(name, (0, 12, 0), f"use the key {key} of --eplb-config", into_json(EPLB_KEYS, "eplb-config"))
        for name, key in EPLB_KEYS.items()
    ),
    # Structured answers, tools, thinking
    *(
        RemovedFlag(name, (0, 11, 0), "use --structured-outputs-config, such as "
                    '\'{"backend": "xgrammar"}\'', structured)
        for name in STRUCTURED_KEYS
    ),
    RemovedFlag("guided-decoding-disable-fallback", (0, 11, 0), "remove it: there is no fallback anymore",
                structured),
    *_gone((0, 10, 0), "enable-reasoning", "remove it: --reasoning-parser alone is enough"),
    *_gone((0, 10, 0), "expand-tools-even-if-tool-choice-none",
           "remove it; --exclude-tools-when-tool-choice-none is the opposite"),
    *_lost((0, 17, 0), "logits-processor-pattern", "--logits-processors loads processors at the start"),
    # Model
    RemovedFlag("task", (0, 13, 0), "use --runner (generate, pooling) and --convert", task),
    *_lost((0, 11, 1), "rope-scaling rope-theta",
           "write it into --hf-overrides, such as '{\"rope_parameters\": {\"rope_theta\": …, \"factor\": …}}'"),
    RemovedFlag("override-pooler-config", (0, 12, 0), "use --pooler-config",
                rename("override-pooler-config", "pooler-config")),
    *_gone((0, 18, 0), "use-gpu-for-pooling-score", _UNUSED),
    *_lost(NEVER, "gguf-file", "releases before 0.24 took the GGUF file itself as the model"),
    *_lost((0, 10, 0), "qlora-adapter-name-or-path", "adapters are loaded with --lora-modules"),
    *_gone(NEVER, "quantization-param-path kv-cache-scales-path",
           "remove it: scales of an FP8 KV cache come from the checkpoint"),
    *_gone((0, 10, 0), "tokenizer-pool-size tokenizer-pool-type tokenizer-pool-extra-config", _UNUSED),
    # LoRA and prompt adapters
    *_gone((0, 12, 0), "lora-extra-vocab-size", "remove it: adapters can no longer add tokens"),
    *_gone((0, 10, 0), "long-lora-scaling-factors", _UNUSED),
    *_gone((0, 11, 1), "enable-lora-bias", _UNUSED),
    *_gone((0, 10, 2), "enable-prompt-adapter", "remove it: prompt adapters were removed"),
    *_lost((0, 10, 0), "prompt-adapters max-prompt-adapters max-prompt-adapter-token",
           "remove it: prompt adapters were removed"),
    # Images
    RemovedFlag("disable-mm-preprocessor-cache", (0, 13, 0), "write --mm-processor-cache-gb 0",
                becomes("disable-mm-preprocessor-cache", "mm-processor-cache-gb", 0)),
    RemovedFlag("enable-multimodal-encoder-data-parallel", (0, 13, 0), "write --mm-encoder-tp-mode data",
                becomes("enable-multimodal-encoder-data-parallel", "mm-encoder-tp-mode", "data")),
    *_gone(NEVER, "image-input-type image-token-id image-input-shape image-feature-size", _UNUSED),
    # Server
    RemovedFlag("disable-log-requests", (0, 17, 0), "remove it: requests are not logged unless "
                "--enable-log-requests is set", log_requests),
    *_gone((0, 19, 0), "disable-frontend-multiprocessing",
           "remove it; VLLM_ENABLE_V1_MULTIPROCESSING=0 keeps the engine in one process"),
)  # fmt: skip

REMOVED_FLAGS: Mapping[str, RemovedFlag] = {flag.name: flag for flag in _FLAGS}
"""By name."""


_OTHER_CHECKPOINT = "use a checkpoint with another quantization"


def _quantization(
    since: Release, names: str, instead: str = _OTHER_CHECKPOINT, new: str | None = None, plugin: str = ""
) -> list[RemovedValue]:
    return [RemovedValue("quantization", name, since, instead, new, plugin) for name in names.split()]


GGUF_PLUGIN, BNB_PLUGIN = "vllm-gguf-plugin", "vllm-bnb-plugin"

REMOVED_VALUES: tuple[RemovedValue, ...] = (
    *_quantization(NEVER, "squeezellm"),
    *_quantization((0, 10, 1), "aqlm"),
    *_quantization((0, 10, 2), "marlin", "gptq_marlin does the same", "gptq_marlin"),
    *_quantization((0, 9, 0), "nvfp4", "use modelopt_fp4", "modelopt_fp4"),
    *_quantization((0, 10, 2), "qqq neuron_quant"),
    *_quantization((0, 14, 0), "tpu_int8"),
    *_quantization((0, 15, 0), "deepspeedfp hqq rtn"),
    *_quantization((0, 15, 0), "auto-round", "use inc", "inc"),
    *_quantization((0, 16, 0), "bitblas gptq_bitblas gptq_marlin_24 ipex"),
    *_quantization((0, 19, 0), "ptpc_fp8"),
    *_quantization((0, 20, 0), "petit_nvfp4"),
    *_quantization((0, 24, 0), "gguf", "use a safetensors checkpoint of the model, such as an AWQ one",
                   plugin=GGUF_PLUGIN),
    *_quantization((0, 28, 0), "bitsandbytes",
                   "use a quantized checkpoint such as an AWQ one, or --quantization fp8 for a plain one",
                   plugin=BNB_PLUGIN),
    RemovedValue("load-format", "gguf", (0, 24, 0), "use a safetensors checkpoint of the model", plugin=GGUF_PLUGIN),
    RemovedValue("load-format", "bitsandbytes", (0, 28, 0), "use a quantized checkpoint such as an AWQ one",
                 plugin=BNB_PLUGIN),
    RemovedValue("tokenizer-mode", "slow", (0, 31, 0), "remove it: there are only fast tokenizers"),
)  # fmt: skip
"""Removed since 0.8.5, plus older ones that guides mention."""

_BY_VALUE = {(value.flag, value.value): value for value in REMOVED_VALUES}


def removed_value(flag: str, value: object) -> RemovedValue | None:
    """The entry for a value that a flag once accepted, or None."""
    return _BY_VALUE.get((flag, str(value)))


def _now_flag(since: Release, name: str, flag: str) -> RemovedVariable:
    return RemovedVariable(name, since, f"use --{flag}", variable_to_flag(flag))


def _now_key(since: Release, name: str, flag: str, key: str, *, switch: bool = True) -> RemovedVariable:
    moved = variable_to_json(flag, key, switch=switch)
    return RemovedVariable(name, since, f"use the key {key} of --{flag}", moved)


def _unread(since: Release, name: str, instead: str = _UNUSED) -> RemovedVariable:
    return RemovedVariable(name, since, instead)


_VARIABLES: tuple[RemovedVariable, ...] = (
    RemovedVariable("VLLM_ATTENTION_BACKEND", (0, 15, 0), "use --attention-backend",
                    backend_flag),
    _unread((0, 11, 1), "VLLM_USE_V1", "remove it: there is only V1"),
    _unread(NEVER, "VLLM_LOG_LEVEL", "use VLLM_LOGGING_LEVEL"),
    _now_key((0, 15, 0), "VLLM_FLASH_ATTN_VERSION", "attention-config", "flash_attn_version", switch=False),
    _now_key((0, 15, 0), "VLLM_USE_TRTLLM_ATTENTION", "attention-config", "use_trtllm_attention"),
    _now_key((0, 15, 0), "VLLM_FLASHINFER_DISABLE_Q_QUANTIZATION", "attention-config",
         "disable_flashinfer_q_quantization"),
    _now_key((0, 15, 0), "VLLM_FLASH_ATTN_MAX_NUM_SPLITS_FOR_CUDA_GRAPH", "attention-config",
         "flash_attn_max_num_splits_for_cuda_graph", switch=False),
    _unread((0, 15, 0), "VLLM_V1_USE_PREFILL_DECODE_ATTENTION", "choose a kernel with --attention-backend"),
    _unread((0, 11, 1), "VLLM_USE_TRITON_FLASH_ATTN", "choose a kernel with --attention-backend"),
    _unread((0, 11, 1), "VLLM_USE_AITER_UNIFIED_ATTENTION", "choose a kernel with --attention-backend"),
    _now_flag((0, 16, 0), "VLLM_ALL2ALL_BACKEND", "all2all-backend"),
    RemovedVariable(
        "VLLM_TORCH_PROFILER_DIR", (0, 16, 0), "use the key torch_profiler_dir of --profiler-config",
        variable_to_json("profiler-config", "torch_profiler_dir", besides={"profiler": "torch"}),
    ),
    _now_flag((0, 13, 0), "VLLM_MM_INPUT_CACHE_GIB", "mm-processor-cache-gb"),
    _now_flag((0, 30, 0), "VLLM_MM_HASHER_ALGORITHM", "mm-hasher-algorithm"),
    _now_flag((0, 30, 0), "VLLM_PREFIX_CACHE_RETENTION_INTERVAL", "prefix-cache-retention-interval"),
    RemovedVariable(
        "VLLM_DISABLE_NCCL_FOR_DP_SYNCHRONIZATION", (0, 11, 1), "use --disable-nccl-for-dp-synchronization",
        lambda value, flags: _set("disable-nccl-for-dp-synchronization", value.strip().lower() in ("1", "true"), flags),
    ),
    *(
        _unread((0, 24, 0), name, "choose the kernels with --moe-backend")
        for name in ("VLLM_USE_FLASHINFER_MOE_FP4", "VLLM_USE_FLASHINFER_MOE_FP8", "VLLM_USE_FLASHINFER_MOE_FP16",
                     "VLLM_FLASHINFER_MOE_BACKEND", "VLLM_MXFP4_USE_MARLIN", "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16",
                     "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8", "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS")
    ),
    *(
        _unread((0, 24, 0), name, "choose the kernels with --linear-backend")
        for name in ("VLLM_NVFP4_GEMM_BACKEND", "VLLM_USE_FBGEMM", "VLLM_USE_NVFP4_CT_EMULATIONS")
    ),
    _unread((0, 11, 1), "VLLM_USE_RAY_SPMD_WORKER"),
    _unread((0, 11, 1), "VLLM_USE_RAY_COMPILED_DAG"),
    _unread((0, 23, 0), "VLLM_RPC_TIMEOUT"),
    _unread((0, 32, 0), "VLLM_ENGINE_ITERATION_TIMEOUT_S"),
    _unread((0, 18, 0), "VLLM_SLEEP_WHEN_IDLE"),
)  # fmt: skip

REMOVED_VARIABLES: Mapping[str, RemovedVariable] = {variable.name: variable for variable in _VARIABLES}
"""By name. Other removed variables are in the table of releases, without a replacement."""

MISREAD_VARIABLES: Mapping[str, str] = {
    "VLLM_PORT": "it is not the API's port (that is --port), but the first of vLLM's internal ports"
}
"""Variables that are read, but do not mean what their names suggest."""
