"""Fixes where vLLM's own configuration check names two flags, or a flag and the model, that contradict each other."""

from __future__ import annotations

import math
import re

from vllm_console.diagnosis.failure.case import Case
from vllm_console.diagnosis.finding import Fix
from vllm_launchers.plan.model import Changes
from vllm_launchers.vllm.release_defaults import NEWEST, online_fp8

_STEP = re.compile(
    r"(?:block_size|max_tokens_per_mm_item) \((?P<least>\d{1,9})\) (?:must be <=|is larger than) max_num_batched_tokens"
)
_STATES = re.compile(r"max_num_seqs \(\d+\) exceeds available Mamba cache blocks \((?P<most>\d{1,9})\)")
_LONG = re.compile(
    r"long_prefill_token_threshold \(\d+\) cannot be greater than the max_model_len \((?P<most>\d{1,12})\)"
)
_SHARDS = re.compile(r"tp_size=(?P<size>\d{1,4}) must be divisible by dcp_size=(?P<shards>\d{1,4})")
_RANKS = re.compile(r"data_parallel_size_local \(\d+\) must be <= data_parallel_size \((?P<most>\d{1,4})\)")
_AHEAD = re.compile(r"async scheduling is (?:currently )?(?:only|not) supported", re.IGNORECASE)
_CHUNKS = re.compile(r"Chunked prefill is required")
_ONLINE = re.compile(r"`fp8` quantization method no longer supports online")


def conflicting_flags(case: Case) -> tuple[Fix, ...]:
    """The value that the message itself allows, or the flag left out."""
    text = case.text
    if found := _STEP.search(text):
        least = int(found["least"])
        what = "a KV cache block" if "block_size" in found[0] else "the largest image or video"
        why = f"A step must hold {what}: {least:,} tokens for this model."
        return (Fix(Changes({"max-num-batched-tokens": least}), why, "Steps need more memory for activations."),)
    if (found := _STATES.search(text)) and int(found["most"]) > 0:
        return _fewer_states(int(found["most"]))
    if found := _LONG.search(text):
        why = f"It must not exceed max-model-len, {int(found['most']):,} tokens."
        return (Fix(Changes({"long-prefill-token-threshold": int(found["most"])}), why),)
    if found := _SHARDS.search(text):
        size, shards = int(found["size"]), int(found["shards"])
        why = f"It must divide tensor-parallel-size, {size}."
        return (Fix(Changes({"decode-context-parallel-size": math.gcd(size, shards)}), why),)
    if found := _RANKS.search(text):
        why = f"It must not exceed data-parallel-size, {found['most']}."
        return (Fix(Changes({"data-parallel-size-local": int(found["most"])}), why),)
    if _ONLINE.search(text):
        why = "This is what the method is called that converts weights while they are loaded."
        return (Fix(Changes({"quantization": online_fp8(NEWEST)}), why),)
    return _left_out(case)


def _fewer_states(most: int) -> tuple[Fix, ...]:
    why = f"Each running sequence keeps a state of this model's linear layers, and memory holds {most:,}."
    return (Fix(Changes({"max-num-seqs": most}), why, "More requests queue under full load."),)


def _left_out(case: Case) -> tuple[Fix, ...]:
    """The flag that vLLM decides by itself if it is not set."""
    for pattern, name in ((_AHEAD, "async-scheduling"), (_CHUNKS, "enable-chunked-prefill")):
        if pattern.search(case.text) and name in case.flags:
            return (Fix(Changes(unset=(name,)), f"Without --{name} vLLM decides by the other settings."),)
    return ()
