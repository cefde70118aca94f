"""Remedies where memory of the GPU was short. Figures are taken from vLLM's own message where it has them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from vllm_console.diagnosis.case import Case
from vllm_console.diagnosis.model import Remedy
from vllm_console.diagnosis.words import FP8_CACHE_PRICE
from vllm_launchers.plan.model import Changes
from vllm_launchers.presets.model import FlagValue

HIGHEST_UTILIZATION = 0.95
LOWEST_UTILIZATION = 0.3
"""Below this share of a GPU nothing useful runs: another GPU is the better answer."""

BLOCK = 16

SMALLEST_STEP = 1024
"""Tokens of one step, of prefill, below which prompts take too long."""

_FIGURE = r"\d{1,9}(?:\.\d{1,9})?"
_ESTIMATE = re.compile(r"estimated maximum model length is (\d{1,12})\b")
_NEEDED = re.compile(
    rf"seq(?:uence)? len \((?P<length>\d{{1,12}})\), \(?(?P<need>{_FIGURE}) Gi?B KV cache is needed, "
    rf"which is larger than the available KV cache memory \((?P<have>{_FIGURE}) Gi?B\)"
)
_STORED = re.compile(r"max(?:imum)? seq(?:uence)? len \(\d+\) is larger than .*KV cache \((?P<tokens>\d{1,12})\)")
_ASKED = re.compile(
    rf"Tried to allocate (?P<asked>{_FIGURE}) (?P<unit>[KMG])iB.* total capacity of (?P<total>{_FIGURE}) GiB"
    rf".* which (?P<free>{_FIGURE}) (?P<free_unit>[KMG]iB|bytes) is free"
)
_GIB: Mapping[str, float] = {"K": 1 / (1 << 20), "M": 1 / 1024, "G": 1.0, "b": 1 / (1 << 30)}
_FREE = re.compile(rf"\((?P<free>{_FIGURE})/(?P<total>{_FIGURE}) GiB\)")


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
    if fitting is not None and not str(case.flags.get("kv-cache-dtype", "auto")).startswith("fp8"):
        found.append(_fp8_kv(case))
    found += _more_utilization(case)
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


def _fp8_kv(case: Case) -> Remedy:
    why = "A KV cache in FP8 holds twice the tokens of one in 16 bits"
    told = _NEEDED.search(case.text)
    if told:
        enough = float(told["need"]) <= 2 * float(told["have"])
        why += f": {'enough' if enough else 'still not enough'} for {int(told['length']):,}"
    return Remedy(change("kv-cache-dtype", "fp8"), f"{why}.", FP8_CACHE_PRICE)


def _smaller_steps(case: Case) -> list[Remedy]:
    """Activations grow with the tokens of one step."""
    tokens = case.batched_tokens
    less = max(SMALLEST_STEP, tokens // 2) if tokens else SMALLEST_STEP
    if (tokens is not None and less >= tokens) or case.flags.get("enable-chunked-prefill") is False:
        return []
    was = f" instead of {tokens:,}" if tokens else ""
    why = f"A step of {less:,} tokens{was} needs less memory for activations."
    return [Remedy(change("max-num-batched-tokens", less), why, "Long prompts take more steps: TTFT grows.")]


def _fewer_sequences(case: Case, for_what: str) -> list[Remedy]:
    """Half of those that were set; 128 where the default counts, which is 256 or more."""
    known = int(case.number("max-num-seqs", 0))
    fewer = known // 2 if known else 128
    if fewer < 1:
        return []
    why = f"{fewer} sequences at once{f' instead of {known}' if known else ''} need less memory for {for_what}."
    return [Remedy(change("max-num-seqs", fewer), why, "Throughput under full load is lower.")]


def _less_utilization(case: Case, margin: float, why: str) -> list[Remedy]:
    """Lower by what was asked for and not free, where the log says so, and in any case by the margin."""
    missing = 0.0
    if (told := _ASKED.search(case.text)) and float(told["total"]) > 0:
        asked = float(told["asked"]) * _GIB[told["unit"]]
        missing = (asked - float(told["free"]) * _GIB[told["free_unit"][0]]) / float(told["total"])
    lower = math.floor((case.utilization - max(margin, missing + 0.01)) * 100 + 1e-6) / 100
    if lower < LOWEST_UTILIZATION:
        return []
    words = f"vLLM takes {lower:g} of the GPU instead of {case.utilization:g}{why}"
    return [Remedy(change("gpu-memory-utilization", lower), words, "The KV cache gets smaller.")]


def _spread(case: Case) -> list[Remedy]:
    size = int(case.number("tensor-parallel-size", 1))
    why = f"Over {size * 2} GPUs each holds half as much of the weights as now."
    price = f"It takes {size * 2} GPUs, best joined by NVLink."
    smaller = "" if case.quantized else ", or the same one as AWQ, GPTQ or FP8"
    return [
        Remedy(change("tensor-parallel-size", size * 2), why, price),
        Remedy(Changes(), f"Take a smaller model{smaller}.", "Quality may be a little lower."),
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
    found = _spread(case)
    if not case.quantized:
        found.insert(
            1,
            Remedy(
                change("quantization", "fp8"),
                "Weights in FP8 take half the memory of 16 bits.",
                "They are converted at every start, and need an Ada, Hopper or newer GPU to be fast.",
            ),
        )
    # How much is missing stands in no log: the start ended at the first part that found no room.
    why = "With --cpu-offload-gb a part of the weights stays in main memory: 'vllm-console plan' shows what is missing."
    found.append(Remedy(Changes(), why, "Every step reads them over PCIe: much slower."))
    return tuple(found)


def oom_at_run_time(case: Case) -> tuple[Remedy, ...]:
    """Activations found no room beside the weights, or beside weights and KV cache."""
    if case.kv_taken or case.served:
        found = _less_utilization(case, 0.05, ", which leaves room for activations.")
        return (*found, *_smaller_steps(case), *_fewer_sequences(case, "activations and sampling"))
    # Before the KV cache takes its share, a lower one frees nothing.
    return (*_smaller_steps(case), *_fewer_sequences(case, "activations and sampling"), *_spread(case))


def oom_at_graph_capture(case: Case) -> tuple[Remedy, ...]:
    """CUDA graphs found no room after the KV cache was taken."""
    found = _less_utilization(case, 0.04, ": the graphs get what is left.")
    found += _fewer_sequences(case, "CUDA graphs: the largest is for that many")
    if case.flags.get("enforce-eager") is not True:
        why = "Without CUDA graphs their memory is not needed."
        found.append(Remedy(change("enforce-eager", True), why, "Each step is slower, most of all with few requests."))
    return tuple(found)
