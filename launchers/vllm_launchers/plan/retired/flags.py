"""The flags that guides still name and vLLM no longer knows.

``since`` comes from vLLM's own source, one patch of each minor release, so it is right to the minor release. Renames
and what became a key of another flag are vLLM's own; the rest is left out.
"""

from __future__ import annotations

from collections.abc import Mapping

from vllm_launchers.plan.retired import carry
from vllm_launchers.plan.retired.model import NEVER, Release, RetiredFlag

_UNUSED = "leave it out"
_V1 = "leave it out: the engine of today (V1) has nothing of the kind"


def _gone(since: Release, names: str, instead: str) -> list[RetiredFlag]:
    """Flags without a successor."""
    return [RetiredFlag(name, since, instead, carry.drop(name)) for name in names.split()]


def _lost(since: Release, names: str, instead: str) -> list[RetiredFlag]:
    """Flags that did something which leaving them out would lose."""
    return [RetiredFlag(name, since, instead, carry.lost) for name in names.split()]


def _into(since: Release, keys: Mapping[str, str], target: str) -> list[RetiredFlag]:
    """Flags that became keys of a JSON flag."""
    moved = carry.into_json(keys, target)
    return [RetiredFlag(name, since, f"it is the key {key} of --{target} now", moved) for name, key in keys.items()]


def _renamed(since: Release, old: str, new: str) -> RetiredFlag:
    return RetiredFlag(old, since, f"it is called --{new} now", carry.rename(old, new))


_TABLE: tuple[RetiredFlag, ...] = (
    # Speculative decoding: one JSON flag since 0.8
    *(
        RetiredFlag(name, NEVER, "write --speculative-config "
                    '\'{"model": …, "num_speculative_tokens": …}\'', carry.speculative)
        for name in carry.SPECULATIVE_KEYS
    ),
    *_gone(NEVER, "speculative-disable-by-batch-size speculative-disable-mqa-scorer spec-decoding-acceptance-method "
           "typical-acceptance-sampler-posterior-threshold typical-acceptance-sampler-posterior-alpha "
           "disable-logprobs-during-spec-decoding", _UNUSED),
    # Scheduling and memory
    *_gone((0, 11, 0), "preemption-mode", "leave it out: preempted requests are always recomputed"),
    *_gone((0, 11, 0), "scheduler-delay-factor", _V1),
    *_gone((0, 10, 1), "num-scheduler-steps multi-step-stream-outputs", _V1),
    *_gone((0, 10, 0), "use-v2-block-manager", _V1),
    *_gone((0, 12, 0), "num-lookahead-slots", _V1),
    *_gone((0, 27, 0), "max-num-partial-prefills max-long-partial-prefills",
           "leave it out, or bound long prompts with --long-prefill-token-threshold"),
    RetiredFlag("swap-space", (0, 18, 0), "leave it out; the nearest is --kv-offloading-size, GiB of "
                "main memory for evicted KV blocks", carry.swap_space,
                ignored_since=(0, 11, 0)),
    *_gone((0, 28, 0), "calculate-kv-scales", "leave it out: scales of an FP8 KV cache come from the checkpoint"),
    *_gone((0, 31, 0), "enable-mamba-fine-grained-prefix-cache", _UNUSED),
    # Execution
    *_gone((0, 11, 0), "disable-async-output-proc", "leave it out; --async-scheduling is its successor's switch"),
    *_gone((0, 11, 0), "max-seq-len-to-capture",
           "leave it out: CUDA graphs are sized by batch now, with --max-cudagraph-capture-size"),
    *_gone(NEVER, "max-context-len-to-capture",
           "leave it out: CUDA graphs are sized by batch now, with --max-cudagraph-capture-size"),
    RetiredFlag("cuda-graph-sizes", (0, 13, 0), "it is called --cudagraph-capture-sizes now; a single number, the "
                "largest, is --max-cudagraph-capture-size",
                carry.rename("cuda-graph-sizes", "max-cudagraph-capture-size")),
    *_gone((0, 28, 0), "override-attention-dtype", _UNUSED),
    *_gone((0, 30, 0), "enable-bf16x3-router-gemm", _UNUSED),
    *_gone((0, 10, 0), "device", "leave it out: the installed build decides the device"),
    *_lost((0, 10, 2), "override-neuron-config", "Neuron is a plugin with settings of its own"),
    RetiredFlag("worker-use-ray", NEVER, "write --distributed-executor-backend ray",
                carry.becomes("worker-use-ray", "distributed-executor-backend", "ray")),
    *_gone(NEVER, "engine-use-ray", _UNUSED),
    *_into((0, 12, 0), carry.EPLB_KEYS, "eplb-config"),
    # Structured answers, tools, thinking
    *(
        RetiredFlag(name, (0, 11, 0), "it is --structured-outputs-config now, such as "
                    '\'{"backend": "xgrammar"}\'', carry.structured)
        for name in carry.STRUCTURED_KEYS
    ),
    RetiredFlag("guided-decoding-disable-fallback", (0, 11, 0), "leave it out: there is no fallback any more",
                carry.structured),
    *_gone((0, 10, 0), "enable-reasoning", "leave it out: --reasoning-parser alone is enough"),
    *_gone((0, 10, 0), "expand-tools-even-if-tool-choice-none",
           "leave it out; --exclude-tools-when-tool-choice-none is the opposite"),
    *_lost((0, 17, 0), "logits-processor-pattern", "--logits-processors loads processors at the start"),
    # Model
    RetiredFlag("task", (0, 13, 0), "it is --runner (generate, pooling) and --convert now", carry.task),
    *_lost((0, 11, 1), "rope-scaling rope-theta",
           "write it into --hf-overrides, such as '{\"rope_parameters\": {\"rope_theta\": …, \"factor\": …}}'"),
    _renamed((0, 12, 0), "override-pooler-config", "pooler-config"),
    *_gone((0, 18, 0), "use-gpu-for-pooling-score", _UNUSED),
    *_lost(NEVER, "gguf-file", "releases before 0.24 took the GGUF file itself as the model"),
    *_lost((0, 10, 0), "qlora-adapter-name-or-path", "adapters are loaded with --lora-modules"),
    *_gone(NEVER, "quantization-param-path kv-cache-scales-path",
           "leave it out: scales of an FP8 KV cache come from the checkpoint"),
    *_gone((0, 10, 0), "tokenizer-pool-size tokenizer-pool-type tokenizer-pool-extra-config", _UNUSED),
    # LoRA and prompt adapters
    *_gone((0, 12, 0), "lora-extra-vocab-size", "leave it out: adapters cannot add tokens any more"),
    *_gone((0, 10, 0), "long-lora-scaling-factors", _UNUSED),
    *_gone((0, 11, 1), "enable-lora-bias", _UNUSED),
    *_gone((0, 10, 2), "enable-prompt-adapter", "leave it out: prompt adapters are gone"),
    *_lost((0, 10, 0), "prompt-adapters max-prompt-adapters max-prompt-adapter-token",
           "leave it out: prompt adapters are gone"),
    # Images
    RetiredFlag("disable-mm-preprocessor-cache", (0, 13, 0), "write --mm-processor-cache-gb 0", carry.no_mm_cache),
    RetiredFlag("enable-multimodal-encoder-data-parallel", (0, 13, 0), "write --mm-encoder-tp-mode data",
                carry.becomes("enable-multimodal-encoder-data-parallel", "mm-encoder-tp-mode", "data")),
    *_gone(NEVER, "image-input-type image-token-id image-input-shape image-feature-size", _UNUSED),
    # Server
    RetiredFlag("disable-log-requests", (0, 17, 0), "leave it out: requests are not logged unless "
                "--enable-log-requests is set", carry.log_requests),
    *_gone((0, 19, 0), "disable-frontend-multiprocessing",
           "leave it out; VLLM_ENABLE_V1_MULTIPROCESSING=0 keeps the engine in one process"),
)  # fmt: skip

RETIRED_FLAGS: Mapping[str, RetiredFlag] = {flag.name: flag for flag in _TABLE}
"""By name."""
