"""Remedies for a running server, each offered only where this model and GPU can do it, with its price.

Ranked by impact: quantization, FP8 KV cache, prefix caching, chunked prefill, then limits.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm_console.diagnosis.conditions.rule import Situation
from vllm_console.diagnosis.model import Remedy
from vllm_launchers.plan.model import Changes
from vllm_launchers.presets.model import FlagValue

AMPERE, ADA, HOPPER = (8, 0), (8, 9), (9, 0)
WORTH_CACHING = 0.35
"""From this share of repeated prompt tokens on, prefix caching pays."""

UTILIZATION_STEP = 0.03
HIGHEST_UTILIZATION = 0.95
FULL_STEPS = 8
"""Sequences go by steps of eight, as the sizes that CUDA graphs are captured for do."""


def setting(name: str, value: FlagValue, why: str, price: str = "") -> Remedy:
    """A remedy that sets one flag."""
    return Remedy(Changes({name: value}), why, price)


def more_cache(situation: Situation) -> list[Remedy]:
    """Everything that lets the KV cache hold more tokens, or need fewer, the strongest first."""
    offered = (quantize(situation), fp8_cache(situation), share_prefixes(situation), more_memory(situation))
    return [remedy for remedy in offered if remedy is not None]


def quantize(situation: Situation) -> Remedy | None:
    """Weights in FP8, where they are not quantized and the GPU computes in FP8."""
    capability = situation.compute_capability
    if situation.quantized is not False or capability is None or capability < ADA:
        return None
    if "quantization" in situation.flags:
        return None
    price = "Quality may be a little lower, and the weights are converted at every start."
    return setting("quantization", "fp8", "Weights in FP8 take half the memory; the KV cache gets the rest.", price)


def fp8_cache(situation: Situation) -> Remedy | None:
    """A KV cache in FP8, which holds twice the tokens."""
    capability = situation.compute_capability
    if str(situation.flags.get("kv-cache-dtype", "auto")) not in ("auto", "bfloat16", "float16", "half"):
        return None
    if situation.build == "cpu" or capability is None or capability < AMPERE:
        return None
    why = "In FP8 the KV cache holds twice the tokens."
    if capability >= HOPPER:
        return setting("kv-cache-dtype", "fp8", why, "Native on this GPU; answers can differ a little.")
    return setting("kv-cache-dtype", "fp8", why, "Attention is slower on this GPU (native from Hopper on).")


def share_prefixes(situation: Situation) -> Remedy | None:
    """Prefix caching, where it is off and prompts begin alike."""
    workload = situation.workload
    if situation.flags.get("enable-prefix-caching") is not False:
        return None
    if workload is None or workload.prefix_reuse <= WORTH_CACHING:
        return None
    why = f"{workload.prefix_reuse:.0%} of a prompt repeats by its preset: it is then computed and kept once."
    return setting("enable-prefix-caching", True, why, "Next to none.")


def more_memory(situation: Situation) -> Remedy | None:
    """A little more of the GPU; never what other tenants hold or what is reserved for them."""
    present = situation.flags.get("gpu-memory-utilization")
    if not situation.moments or not isinstance(present, float) or "kv-cache-memory-bytes" in situation.flags:
        return None
    more = round(min(HIGHEST_UTILIZATION, present + UTILIZATION_STEP), 2)
    if more <= present:
        return None
    for gpu in situation.moments[-1].gpus:
        if gpu.free_gib is None or gpu.memory_gib is None:
            return None
        left = gpu.free_gib - (more - present) * gpu.memory_gib
        if left < situation.reserve_gib.get(gpu.index, 0.0) + 0.5:
            return None
    why = f"{more - present:.0%} more of the GPU, which nobody holds, goes to the KV cache."
    return setting("gpu-memory-utilization", more, why, "Less room for activations of long prompts.")


def fewer_sequences(situation: Situation, factor: float) -> Remedy | None:
    """``factor`` of the sequences that run now, as a limit."""
    running = max((frame.running_max or 0.0 for frame in situation.last(6)), default=0.0)
    limit = situation.max_num_seqs
    wanted = int(min(running or limit, limit) * factor)
    wanted = max(1, wanted // FULL_STEPS * FULL_STEPS if wanted > FULL_STEPS else wanted)
    if wanted >= limit:
        wanted = limit // 2
    if wanted < 1:
        return None
    why = f"{wanted} sequences at once instead of {limit} fit into the KV cache at their present length."
    return setting("max-num-seqs", wanted, why, "Others wait longer: TTFT grows when more than that come at once.")


def chunked(situation: Situation) -> Remedy | None:
    """Chunked prefill, where it is off."""
    if situation.flags.get("enable-chunked-prefill") is not False:
        return None
    why = "Long prompts are computed in pieces, between the tokens of the others."
    return setting("enable-chunked-prefill", True, why, "TTFT of long prompts grows a little.")


def present(remedies: Iterable[Remedy | None]) -> tuple[Remedy, ...]:
    """Those that there are."""
    return tuple(remedy for remedy in remedies if remedy is not None)
