"""Fixes for GPU memory shortages. Figures come from vLLM's own message if it has them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import msgspec

from vllm_console.diagnosis.failure.case import Case
from vllm_console.diagnosis.finding import Cause, Fix
from vllm_console.text import percent
from vllm_launchers.engine_model.gpu_models import find_model
from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.plan.attention import is_fp8
from vllm_launchers.plan.budget.budget import HIGHEST_UTILIZATION
from vllm_launchers.plan.budget.memory_flags import (
    LARGEST_MM_ITEM,
    least_step,
    needs_unknown_items_whole,
    refuses_float16,
)
from vllm_launchers.plan.flags import TENSOR
from vllm_launchers.vllm.flags.changes import Changes, FlagValue
from vllm_launchers.vllm.release_defaults import ONLINE_FP8_SINCE, online_fp8

LOWEST_UTILIZATION = 0.3
"""Below this fraction of a GPU, nothing useful runs: use another GPU instead."""

FP8_WEIGHTS_FROM = 7.5
"""Compute capability below which no kernel reads FP8 weights (Marlin does, without computing in FP8)."""

WEIGHTS_SHARE = 0.85
"""Fraction of a GPU's memory for weights; the rest is for activations and at least a small KV cache."""

MOST_SUGGESTED_GPUS = 64

_REFUSE_SEGMENTS = frozenset(
    {"enable-sleep-mode", "enable-cumem-allocator", "kv-transfer-config", "kv-offloading-size"}
)
"""With one of these flags, some releases don't start with expandable segments, or turn them off."""

BLOCK = 16

SMALLEST_STEP = 1024
"""Minimum tokens per prefill step; below this, prompts take too long."""

_FIGURE = r"\d{1,9}(?:\.\d{1,9})?"
_ESTIMATE = lazy_pattern(r"estimated maximum model length is (\d{1,12})\b")
_NEEDED = lazy_pattern(
    rf"seq(?:uence)? len \((?P<length>\d{{1,12}})\), \(?(?P<need>{_FIGURE}) Gi?B KV cache is needed, "
    rf"which is larger than the available KV cache memory \((?P<have>{_FIGURE}) Gi?B\)"
)
_STORED = lazy_pattern(
    r"max(?:imum)? seq(?:uence)? len \((?P<length>\d{1,12})\) is larger than .*KV cache \((?P<tokens>\d{1,12})\)"
)
_ASKED = lazy_pattern(
    rf"Tried to allocate (?P<asked>{_FIGURE}) (?P<unit>[KMG])iB.* total capacity of (?P<total>{_FIGURE}) GiB"
    rf".* which (?P<free>{_FIGURE}) (?P<free_unit>[KMG]iB|bytes) is free"
)
_GIB: Mapping[str, float] = {"K": 1 / (1 << 20), "M": 1 / 1024, "G": 1.0, "b": 1 / (1 << 30)}
_CAPACITY = lazy_pattern(rf"total capacity of (?P<gib>{_FIGURE}) GiB")
_IN_USE = lazy_pattern(
    rf"total capacity of (?P<total>{_FIGURE}) GiB.*? which (?P<free>{_FIGURE}) (?P<free_unit>[KMG]iB|bytes) is free"
)
_HOLDER = lazy_pattern(rf"\bProcess (?P<pid>\d{{1,10}}) has (?P<held>{_FIGURE}) (?P<unit>[KMG]iB|bytes) memory in use")
_THIS_PROCESS = lazy_pattern(rf"\bthis process has (?P<held>{_FIGURE}) (?P<unit>[KMG]iB|bytes) memory in use")
_FRAGMENTED = lazy_pattern(
    rf"Tried to allocate (?P<asked>{_FIGURE}) (?P<unit>[KMG])iB.*[ ,]"
    rf"(?P<left>{_FIGURE}) (?P<left_unit>[KMG])iB is reserved by PyTorch but unallocated"
    r"(?:.*try setting (?P<name>PYTORCH_\w{0,9}ALLOC_CONF)=expandable_segments:True)?"
)
_FREE = lazy_pattern(rf"\((?P<free>{_FIGURE})/(?P<total>{_FIGURE}) GiB\)")


ANOTHER_GPU = "choose a GPU with more free memory, or end what holds it ('vllm-console host' shows it)."

_CPU_CACHE = (
    "Give the KV cache a size that fits, such as 4 GiB, with --env VLLM_CPU_KVCACHE_SPACE=4: then no fraction of "
    "main memory has to be free. Or free main memory."
)
LEAST_HELD_SHARE = 0.05
"""Fraction of a GPU's memory below which other processes are ignored: a desktop's share is not why a server fails."""

UNTOLD_GIB = 1.0
"""How much a process may hold beyond what it is listed with."""

ROOM_SHARE = 0.05
"""Fraction of a GPU's memory to leave for activations, which vLLM does not fully measure."""

NOT_ENOUGH = "not enough alone"

LARGEST_GPU_GIB = 288.0
"""For an unknown GPU: more memory than any GPU has."""


class HeldByOthers(msgspec.Struct, frozen=True):
    """GPU memory of other processes, from PyTorch's message. ``sure``: none of them can be the server's own.

    ``pids`` are those that the message lists; it lists none of other containers and none that only draw.
    """

    pids: tuple[str, ...]
    gib: float
    total_gib: float
    sure: bool

    @property
    def sentence(self) -> str:
        """Who holds how much, without a period."""
        pids, many = ", ".join(self.pids), len(self.pids) > 1
        if not pids:
            who = "Other processes hold"
        elif self.sure:
            who = f"Other processes ({pids}) hold" if many else f"Another process ({pids}) holds"
        else:
            who = f"Processes {pids} hold" if many else f"Process {pids} holds"
        return f"{who} {self.gib:.1f} of the GPU's {self.total_gib:.1f} GiB"


def held_by_others(text: str) -> HeldByOthers | None:
    """GPU memory held by others, if an out-of-memory message shows that it is a significant amount.

    The failing process is listed as "this process", or by PID if it cannot identify itself (in a container). In the
    first case, others hold what is neither free nor its own, also where the message does not list them.
    """
    found, holders = _IN_USE.search(text), list(_HOLDER.finditer(text))
    if found is None or float(found["total"]) <= 0:
        return None
    total, own = float(found["total"]), _THIS_PROCESS.search(text)
    used = total - float(found["free"]) * _GIB[found["free_unit"][0]]
    held = sum(map(_held_gib, holders))
    if own is None:
        if len(holders) == 1 and used - held < UNTOLD_GIB:
            return None
    elif (rest := used - _held_gib(own)) > held + UNTOLD_GIB:
        holders, held = [], rest
    if not LEAST_HELD_SHARE * total <= held <= total:
        return None
    return HeldByOthers(tuple(one["pid"] for one in holders), held, total, own is not None)


def _exceeds_gpu(text: str) -> bool:
    """Whether one allocation was larger than the whole GPU, so that no free memory is enough."""
    found = _ASKED.search(text)
    return found is not None and float(found["asked"]) * _GIB[found["unit"]] > float(found["total"])


def _held_gib(found: re.Match[str]) -> float:
    return float(found["held"]) * _GIB[found["unit"][0]]


def freed_by_others(case: Case) -> tuple[Fix, ...]:
    """Advice to use another GPU, if others hold much of this one."""
    held = held_by_others(case.text)
    if held is None or _exceeds_gpu(case.text):
        return ()
    condition = "" if held.sure else "unless it is this server's own, "
    return (Fix(Changes(), f"{held.sentence}: {condition}{ANOTHER_GPU}"),)


def change(name: str, value: FlagValue) -> Changes:
    """Changes that set one flag."""
    return Changes({name: value})


def kv_cache_too_small(case: Case) -> tuple[Fix, ...]:
    """Fixes for a KV cache too small for one request of ``max-model-len``."""
    found: list[Fix] = []
    fitting = _fitting_length(case)
    if fitting is not None:
        was = f" instead of {case.max_model_len:,}" if case.max_model_len else ""
        tradeoff = f"Requests above {fitting:,} tokens (prompt + output) are rejected."
        found.append(Fix(change("max-model-len", fitting), f"{fitting:,} tokens{was} is what fits.", tradeoff))
    if "num-gpu-blocks-override" in case.flags:
        why = "Without it the KV cache gets all memory that vLLM may use."
        return (*found, Fix(Changes(unset=("num-gpu-blocks-override",)), why))
    if fitting is not None:
        found += _fp8_kv(case)
    found += _more_utilization(case)
    if fitting is None:
        found += _smaller_steps(case)
        found += _spread(case)
    return tuple(found)


def _fitting_length(case: Case) -> int | None:
    """The longest context that fits: vLLM's own estimate, else in proportion to the available memory."""
    if found := _ESTIMATE.search(case.text):
        length = int(found[1])
    elif found := _STORED.search(case.text):
        length = int(found["tokens"])
    elif (found := _NEEDED.search(case.text)) and float(found["need"]) > 0:
        length = int(int(found["length"]) * float(found["have"]) / float(found["need"]))
    else:
        return None
    whole = length // BLOCK * BLOCK
    return whole if whole > 0 else None


def _wanted_length(case: Case) -> int | None:
    """The context that did not fit: from the flag, else from vLLM's message."""
    found = _STORED.search(case.text)
    return case.max_model_len or (int(found["length"]) if found is not None else None)


def _more_utilization(case: Case) -> list[Fix]:
    if "kv-cache-memory-bytes" in case.flags or case.utilization >= HIGHEST_UTILIZATION:
        return []
    more = min(HIGHEST_UTILIZATION, round(case.utilization + 0.05, 2))
    share = more - case.utilization
    why = f"{percent(share)} more of the GPU's memory for the KV cache{_not_enough_with(case, share)}."
    tradeoff = "That memory must be free, and less is left for what vLLM does not measure."
    return [Fix(change("gpu-memory-utilization", more), why, tradeoff)]


def _not_enough_with(case: Case, share: float) -> str:
    """A remark that ``share`` of the GPU is less than what is missing; empty if it may be enough."""
    found = _NEEDED.search(case.text)
    if found is None:
        return ""
    model = find_model(case.gpu) if case.gpu else None
    more = share * (model.usable_gib if model is not None else LARGEST_GPU_GIB)
    missing = float(found["need"]) - float(found["have"])
    return f": {NOT_ENOUGH} for {int(found['length']):,}" if missing > more else ""


def _fp8_kv(case: Case) -> list[Fix]:
    """An FP8 KV cache, unless it is already in use or known to be rejected by this vLLM on this GPU."""
    verdict = case.fp8_cache
    if is_fp8(case.flags.get("kv-cache-dtype")) or verdict.works is False:
        return []
    tradeoff = "Output can differ slightly."
    if verdict.works is None:
        tradeoff = (
            "Needs a GPU of compute capability 8.9 or newer (Ada, Hopper, Blackwell); output can differ slightly."
        )
    why = "An FP8 KV cache holds twice the tokens of a 16-bit one"
    found, fitting = _NEEDED.search(case.text), _fitting_length(case)
    if found:
        enough = float(found["need"]) <= 2 * float(found["have"])
        why += f": {'enough' if enough else NOT_ENOUGH} for {int(found['length']):,}"
    elif fitting is not None and (length := _wanted_length(case)) and 2 * fitting < length:
        why += f": {NOT_ENOUGH} for {length:,}"
    return [Fix(change("kv-cache-dtype", "fp8"), f"{why}.", tradeoff)]


def _smaller_steps(case: Case) -> list[Fix]:
    """Reduce activations, which grow with the tokens per step."""
    tokens = case.batched_tokens
    item = LARGEST_MM_ITEM if case.whole_mm_items else 0
    least = least_step(case.flags, case.release, sequences=int(case.number("max-num-seqs", 0)), mm_item=item)
    less = max(SMALLEST_STEP, least, tokens // 2 if tokens else 0)
    if (tokens is not None and less >= tokens) or case.flags.get("enable-chunked-prefill") is False:
        return []
    if needs_unknown_items_whole(case.facts, case.flags):
        return []
    was = f" instead of {tokens:,}" if tokens else ""
    why = f"A step of {less:,} tokens{was} needs less memory for activations."
    return [Fix(change("max-num-batched-tokens", less), why, "Long prompts take more steps: TTFT rises.")]


def _fewer_sequences(case: Case, for_what: str) -> list[Fix]:
    """Half of the configured value; 128 for the default, which is 256 or more."""
    known = int(case.number("max-num-seqs", 0))
    fewer = known // 2 if known else 128
    if fewer < 1:
        return []
    why = f"{fewer} sequences at once{f' instead of {known}' if known else ''} need less memory for {for_what}."
    return [Fix(change("max-num-seqs", fewer), why, "Lower throughput under full load.")]


def _less_utilization(case: Case, margin: float, why: str) -> list[Fix]:
    """Lower it by what was requested but not free, if the log shows that, and at least by ``margin``.

    With a fixed KV cache size, a lower value has no effect: remove the fixed size instead.
    """
    if "kv-cache-memory-bytes" in case.flags:
        words = "vLLM then measures what is free now instead of taking a fixed size for the KV cache."
        return [Fix(Changes(unset=("kv-cache-memory-bytes",)), words, "A smaller KV cache, and a slower start.")]
    missing = 0.0
    if (found := _ASKED.search(case.text)) and float(found["total"]) > 0:
        asked = float(found["asked"]) * _GIB[found["unit"]]
        missing = (asked - float(found["free"]) * _GIB[found["free_unit"][0]]) / float(found["total"])
    lower = math.floor((case.utilization - max(margin, missing + 0.01)) * 100 + 1e-6) / 100
    if lower < LOWEST_UTILIZATION:
        return []
    words = f"vLLM uses {lower:g} of the GPU instead of {case.utilization:g}{why}"
    return [Fix(change("gpu-memory-utilization", lower), words, "Smaller KV cache.")]


def _spread(case: Case) -> list[Fix]:
    size = int(case.number("tensor-parallel-size", 1))
    wanted, why = size * 2, f"With {size * 2} GPUs each holds half as much of the weights."
    found = _CAPACITY.search(case.text)
    if case.checkpoint_gib and found and float(found["gib"]) > 0:
        while wanted < MOST_SUGGESTED_GPUS and case.checkpoint_gib / wanted > WEIGHTS_SHARE * float(found["gib"]):
            wanted *= 2
        part = case.checkpoint_gib / wanted
        why = f"With {wanted} GPUs each holds {part:.1f} of the weights' {case.checkpoint_gib:.1f} GiB."
    tradeoff = f"Needs {wanted} GPUs, ideally linked by NVLink."
    smaller = "" if case.quantized else ", or the same one as AWQ, GPTQ or FP8"
    return [
        Fix(change("tensor-parallel-size", wanted), why, tradeoff),
        Fix(Changes(), f"Use a smaller model{smaller}.", "Slightly lower quality."),
    ]


def free_memory_below_utilization(case: Case) -> tuple[Fix, ...]:
    """Others hold memory that ``gpu-memory-utilization`` requests, on a GPU or, for the CPU build, of main memory."""
    on_cpu = "Available memory on node" in case.text
    elsewhere = Fix(Changes(), _CPU_CACHE if on_cpu else f"{ANOTHER_GPU[0].upper()}{ANOTHER_GPU[1:]}")
    found = _FREE.search(case.text)
    if found is None or float(found["total"]) <= 0 or "memory for kv" in case.text:  # free after the weights
        return (elsewhere,)
    free, total = float(found["free"]), float(found["total"])
    # Rounded down, with half a percent of slack: vLLM compares with what is free at that moment, to the byte.
    fitting = math.floor(free / total * 100 - 0.5) / 100
    if fitting < LOWEST_UTILIZATION:
        return (elsewhere,)
    why = f"{free:g} of {total:g} GiB free; {fitting:g} asks for {fitting * total:.1f} GiB."
    tradeoff = "Smaller KV cache, by what the others hold."
    lower = Fix(change("gpu-memory-utilization", fitting), why, tradeoff)
    return (elsewhere, lower) if on_cpu else (lower, elsewhere)


def weights_do_not_fit(case: Case) -> tuple[Fix, ...]:
    """The model is larger than the GPU."""
    found = _spread(case)
    if _fits_in_fp8(case):
        method = online_fp8(case.release)
        found.insert(
            1,
            Fix(
                change("quantization", method),
                "FP8 weights take half the memory of 16-bit ones.",
                "Converted at every start; fast only on Ada, Hopper or newer GPUs.",
            ),
        )
    # The log does not show how much is missing: the start ended at the first allocation that failed.
    why = "--cpu-offload-gb keeps part of the weights in main memory; 'vllm-console plan' shows how much is missing."
    found.append(Fix(Changes(), why, "Much slower: every step reads them over PCIe."))
    return tuple(found)


def _fits_in_fp8(case: Case) -> bool:
    """Whether FP8 weights may help: not quantized yet, and small enough if the size is known.

    The GPU must support them with the model's dtype, and the release convert them while they are loaded.
    """
    if case.quantized or (case.capability is not None and case.capability < FP8_WEIGHTS_FROM):
        return False
    if case.release is not None and case.release < ONLINE_FP8_SINCE:
        return False
    if case.facts is not None and refuses_float16(case.facts, case.release) and case.shape and case.shape.before_ampere:
        return False  # it runs in FP32, which vLLM refuses with FP8 weights
    found = _CAPACITY.search(case.text)
    if not case.checkpoint_gib or found is None:
        return True
    part = case.checkpoint_gib / max(1.0, case.number("tensor-parallel-size", 1))
    return part / 2 <= WEIGHTS_SHARE * float(found["gib"])


def oom_at_run_time(case: Case) -> tuple[Fix, ...]:
    """Activations did not fit beside the weights, or beside weights and KV cache."""
    fewer = _fewer_sequences(case, "activations and sampling")
    unfragmented = _expandable_segments(case)
    if case.kv_taken or case.served or "warming up sampler" in case.text:
        found = _beside_others(case) or _less_utilization(case, ROOM_SHARE, ", which leaves room for activations.")
        return (*unfragmented, *found, *_smaller_steps(case), *fewer)
    # Before the KV cache is allocated, a lower limit frees nothing.
    unplaced = Cause.OOM_GRAPH_CAPTURE in case.failure.also
    condition = " It helps only if the KV cache was already allocated."
    found = (_beside_others(case, condition) or _less_for_itself(case, condition)) if unplaced else []
    return (*unfragmented, *found, *_smaller_steps(case), *fewer, *_spread(case))


def oom_at_graph_capture(case: Case) -> tuple[Fix, ...]:
    """CUDA graphs did not fit after the KV cache was allocated."""
    found = _expandable_segments(case)
    found += _beside_others(case) or _less_utilization(case, 0.04, ": the graphs get what is left.")
    found += _fewer_sequences(case, "CUDA graphs: the largest is for that many")
    if case.flags.get("enforce-eager") is not True:
        why = "Without CUDA graphs their memory is not needed."
        found.append(Fix(change("enforce-eager", True), why, "Each step is slower, most of all with few requests."))
    return tuple(found)


def _beside_others(case: Case, condition: str = "") -> list[Fix]:
    """Lower it to what other processes leave, if these are known to hold too much for the present value."""
    held = held_by_others(case.text)
    if held is None or not held.sure or "kv-cache-memory-bytes" in case.flags or _exceeds_gpu(case.text):
        return []
    total, room = held.total_gib, held.total_gib - held.gib
    fitting = math.floor((room / total - ROOM_SHARE) * 100) / 100
    if not LOWEST_UTILIZATION <= fitting < case.utilization:
        return []
    why = f"Others leave {room:.1f} of {total:.1f} GiB; {fitting:g} asks for {fitting * total:.1f} GiB.{condition}"
    return [Fix(change("gpu-memory-utilization", fitting), why, "Smaller KV cache, by what the others hold.")]


def _less_for_itself(case: Case, condition: str) -> list[Fix]:
    """A lower value, in words, if the message shows that this process itself fills the GPU."""
    if _THIS_PROCESS.search(case.text) is None or held_by_others(case.text) is not None or _exceeds_gpu(case.text):
        return []
    if "kv-cache-memory-bytes" in case.flags:
        return []
    why = f"Lower --gpu-memory-utilization: less memory for the KV cache, more for activations and graphs.{condition}"
    return [Fix(Changes(), why, "Smaller KV cache.")]


def _expandable_segments(case: Case) -> list[Fix]:
    """PyTorch's expandable segments, if what it reserves without using it would have been enough.

    Custom all-reduce shares its buffers between processes, which such memory does not allow.
    """
    found = _FRAGMENTED.search(case.text)
    if found is None or "expandable_segments" in " ".join(case.environment.values()):
        return []
    refusing = (value for name, value in case.flags.items() if name.partition(".")[0] in _REFUSE_SEGMENTS)
    if any(refusing) or case.number(TENSOR, 1) > 1:
        return []
    left = float(found["left"]) * _GIB[found["left_unit"]]
    if left < float(found["asked"]) * _GIB[found["unit"]]:
        return []
    name = found["name"] or "PYTORCH_CUDA_ALLOC_CONF"
    why = (
        f"Fragmentation: PyTorch reserves {found['left']} {found['left_unit']}iB without using it, but no piece of "
        f"{found['asked']} {found['unit']}iB. --env {name}=expandable_segments:True lets it join the pieces."
    )
    unless = "" if case.flags else "Not with sleep mode, a KV connector, KV offloading or tensor parallelism."
    return [Fix(Changes(), why, unless)]
