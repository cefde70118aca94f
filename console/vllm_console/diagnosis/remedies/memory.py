"""Remedies where memory of the GPU was short. Figures are taken from vLLM's own message where it has them."""

from __future__ import annotations

import math
import re

from vllm_console.diagnosis.case import Case
from vllm_console.diagnosis.model import Remedy
from vllm_launchers.plan.model import Changes
from vllm_launchers.presets.model import FlagValue

HIGHEST_UTILIZATION = 0.95
LOWEST_UTILIZATION = 0.3
"""Below this share of a GPU nothing useful runs: another GPU is the better answer."""

BLOCK = 16

_ESTIMATE = re.compile(r"estimated maximum model length is (\d+)")
_NEEDED = re.compile(
    r"seq(?:uence)? len \((?P<length>\d+)\), \((?P<need>[\d.]+) GiB KV cache is needed, "
    r"which is larger than the available KV cache memory \((?P<have>[\d.]+) GiB\)"
)
_STORED = re.compile(r"max(?:imum)? seq(?:uence)? len \(\d+\) is larger than .*KV cache \((?P<tokens>\d+)\)")
_FREE = re.compile(r"\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\)")


def change(name: str, value: FlagValue) -> Changes:
    """One flag set."""
    return Changes({name: value})


def kv_cache_too_small(case: Case) -> tuple[Remedy, ...]:
    """One request of ``max-model-len`` needs more than the KV cache has."""
    found: list[Remedy] = []
    fitting = _fitting_length(case)
    if fitting is not None:
        was = f" instead of {case.max_model_len:,}" if case.max_model_len else ""
        price = f"Requests of more than {fitting:,} tokens, prompt and answer together, are refused."
        found.append(Remedy(change("max-model-len", fitting), f"{fitting:,} tokens{was} is what fits.", price))
    if "num-gpu-blocks-override" in case.flags:
        why = "Without it the KV cache gets all the memory that vLLM may take."
        return (*found, Remedy(Changes(unset=("num-gpu-blocks-override",)), why))
    found += _more_utilization(case)
    if fitting is not None and not str(case.flags.get("kv-cache-dtype", "auto")).startswith("fp8"):
        found.append(_fp8_kv())
    if fitting is None:
        found += _smaller_steps(case)
        found += _spread(case)
    return tuple(found)


def _fitting_length(case: Case) -> int | None:
    """The longest context that fits: vLLM's own estimate, else in proportion to the memory that there is."""
    if told := _ESTIMATE.search(case.text):
        length = int(told[1])
    elif told := _STORED.search(case.text):
        length = int(told["tokens"])
    elif (told := _NEEDED.search(case.text)) and float(told["need"]) > 0:
        length = int(int(told["length"]) * float(told["have"]) / float(told["need"]))
    else:
        return None
    whole = length // BLOCK * BLOCK
    return whole if whole > 0 else None


def _more_utilization(case: Case) -> list[Remedy]:
    if "kv-cache-memory-bytes" in case.flags or case.utilization >= HIGHEST_UTILIZATION:
        return []
    more = min(HIGHEST_UTILIZATION, round(case.utilization + 0.05, 2))
    why = f"{more - case.utilization:.0%} more of the GPU's memory goes to the KV cache."
    price = "It must be free: nobody else can use that part, and long prompts have less room for activations."
    return [Remedy(change("gpu-memory-utilization", more), why, price)]


def _fp8_kv() -> Remedy:
    why = "A KV cache in FP8 holds twice the tokens of one in 16 bits."
    price = "Native from Ada and Hopper on (not on Ampere); answers can differ a little."
    return Remedy(change("kv-cache-dtype", "fp8"), why, price)


def _smaller_steps(case: Case) -> list[Remedy]:
    """Activations grow with the tokens of one step."""
    tokens = int(case.number("max-num-batched-tokens", 8192))
    less = max(1024, tokens // 2)
    if less >= tokens or case.flags.get("enable-chunked-prefill") is False:
        return []
    why = f"A step of {less:,} tokens instead of {tokens:,} needs less memory for activations."
    return [Remedy(change("max-num-batched-tokens", less), why, "Long prompts take more steps: TTFT grows.")]


def _spread(case: Case) -> list[Remedy]:
    size = int(case.number("tensor-parallel-size", 1))
    why = f"Over {size * 2} GPUs each holds half as much of the weights as now."
    price = f"It takes {size * 2} GPUs, best joined by NVLink."
    return [
        Remedy(change("tensor-parallel-size", size * 2), why, price),
        Remedy(
            Changes(), "Take a smaller model, or the same one as AWQ, GPTQ or FP8.", "Quality may be a little lower."
        ),
    ]


def free_memory_below_utilization(case: Case) -> tuple[Remedy, ...]:
    """Others hold what ``gpu-memory-utilization`` asks for."""
    elsewhere = Remedy(
        Changes(),
        "Choose a GPU with more free memory, or wait until its holder lets go ('vllm-console gpus' shows who).",
    )
    told = _FREE.search(case.text)
    if told is None or float(told["total"]) <= 0:
        return (elsewhere,)
    free, total = float(told["free"]), float(told["total"])
    # Rounded down and one step below: vLLM compares against what is free at that moment, to the byte.
    fitting = math.floor(free / total * 100 - 0.5) / 100
    if fitting < LOWEST_UTILIZATION:
        return (elsewhere,)
    why = f"{free:g} of {total:g} GiB are free; {fitting:g} asks for {fitting * total:.1f} GiB."
    price = "The KV cache gets smaller by what the others hold."
    return (Remedy(change("gpu-memory-utilization", fitting), why, price), elsewhere)


def weights_do_not_fit(case: Case) -> tuple[Remedy, ...]:
    """The model is larger than the GPU."""
    quantized = "quantization" in case.flags
    found = _spread(case)
    if not quantized:
        found.insert(
            1,
            Remedy(
                change("quantization", "fp8"),
                "Weights in FP8 take half the memory of 16 bits.",
                "They are converted at every start, and need an Ada, Hopper or newer GPU to be fast.",
            ),
        )
    why = "A part of the weights stays in main memory."
    found.append(Remedy(change("cpu-offload-gb", 8), why, "Every step reads them over PCIe: much slower."))
    return tuple(found)


def oom_at_run_time(case: Case) -> tuple[Remedy, ...]:
    """Activations found no room beside weights and KV cache."""
    lower = round(max(LOWEST_UTILIZATION, case.utilization - 0.05), 2)
    why = f"vLLM takes {lower:g} of the GPU instead of {case.utilization:g}, which leaves room for activations."
    found = [Remedy(change("gpu-memory-utilization", lower), why, "The KV cache gets smaller.")]
    found += _smaller_steps(case)
    sequences = int(case.number("max-num-seqs", 256))
    if sequences > 1:
        why = (
            f"{sequences // 2} sequences at once instead of {sequences} need less memory for activations and sampling."
        )
        found.append(Remedy(change("max-num-seqs", sequences // 2), why, "Throughput under full load is lower."))
    return tuple(found)


def oom_at_graph_capture(case: Case) -> tuple[Remedy, ...]:
    """CUDA graphs found no room after the KV cache was taken."""
    lower = round(max(LOWEST_UTILIZATION, case.utilization - 0.04), 2)
    why = f"vLLM plans with {lower:g} of the GPU instead of {case.utilization:g}: the graphs get what is left."
    found = [Remedy(change("gpu-memory-utilization", lower), why, "The KV cache gets smaller.")]
    sequences = int(case.number("max-num-seqs", 256))
    if sequences > 8:
        why = f"Graphs are captured for up to {sequences // 2} sequences instead of {sequences}."
        found.append(Remedy(change("max-num-seqs", sequences // 2), why, "Throughput under full load is lower."))
    if case.flags.get("enforce-eager") is not True:
        why = "Without CUDA graphs their memory is not needed."
        found.append(Remedy(change("enforce-eager", True), why, "Each step is slower, most of all with few requests."))
    return tuple(found)
