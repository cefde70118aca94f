"""Context, requests at once and tokens per step, from the traffic. Pure."""

from __future__ import annotations

import math

from vllm_launchers.plan.budget.model import MemoryBudget
from vllm_launchers.plan.choices.machine_fit import held_at_p95
from vllm_launchers.plan.choices.model import Choice, Source
from vllm_launchers.plan.choices.situation import (
    BATCHED,
    CHUNKED,
    DATA,
    LENGTH,
    SEQUENCES,
    SPECULATION,
    Situation,
    whole,
)
from vllm_launchers.plan.flags import token_count
from vllm_launchers.plan.model import Flags

HEADROOM = 2
"""Requests that may run for each that is in flight as a rule: bursts do not wait at once."""

COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Usual values of ``max-num-seqs``; CUDA graphs are captured for most of them, so that no batch is padded far."""

SMALL_STEP, LARGE_STEP, LARGEST_STEP = 2048, 8192, 16384
LONG_PROMPT = 32_768
LARGE_GPU_GIB = 70
"""From here on vLLM's own step is 8,192 tokens (A100 excepted), below it 2,048 (``EngineArgs.get_batch_defaults``)."""


def context(situation: Situation) -> Choice:
    """``max-model-len``: p95 prompt plus p95 answer, rounded up by an eighth at most, and never above the model's."""
    work, tokens = situation.workload, situation.request_tokens
    length = rounded_up(tokens)
    parts = f"{work.input_tokens_p95:,} prompt + {work.output_tokens_p95:,} answer tokens at p95"
    limit = situation.facts.max_context if situation.facts is not None else None
    if limit is None or length <= limit:
        rest = f"; the model could do {limit:,}" if limit is not None and limit > length else ""
        return Choice(
            LENGTH,
            length,
            f"{parts}, rounded up{rest}.",
            Source.WORKLOAD,
            "Longer requests are refused.",
        )
    price = "Longer requests are refused."
    if tokens > limit:
        price = f"{parts} do not fit: longer requests are refused, so split them or take another model."
    return Choice(LENGTH, limit, f"All that the model can do; the traffic asks for {tokens:,}.", Source.MODEL, price)


def rounded_up(tokens: int) -> int:
    """A length rounded up to a power of two's multiple: an eighth more at most, 256 tokens at least."""
    step = max(256, _power_of_two(math.ceil(tokens / 8)))
    return math.ceil(tokens / step) * step


def sequences(situation: Situation, flags: Flags, budget: MemoryBudget | None) -> Choice:
    """``max-num-seqs`` of each copy: twice what is in flight, and no more than its KV cache holds at p95."""
    copies = whole(flags, DATA)
    asked = math.ceil(situation.workload.concurrency / copies)
    wanted = next((count for count in COUNTS if count >= asked * HEADROOM), COUNTS[-1])
    batched = token_count(flags.get(BATCHED))
    if batched is not None:
        wanted = min(wanted, batched)
    in_flight = f"{situation.workload.concurrency:,} requests in flight" + (
        f" on {copies} copies" if copies > 1 else ""
    )
    held = held_at_p95(budget)
    if held is None or held >= wanted:
        reason = f"{in_flight}, with headroom for bursts: more than that wait instead of slowing all."
        return Choice(SEQUENCES, wanted, reason, Source.WORKLOAD)
    most = max(1, math.floor(held))
    most = most - most % 8 if most >= 16 else most
    waiting = asked - most
    price = f"About {waiting:,} of {asked:,} wait in the queue." if waiting > 0 else "Bursts wait in the queue."
    reason = f"The KV cache holds about {held:,.0f} requests of p95 length: more would be preempted and begun again."
    return Choice(SEQUENCES, most, reason, Source.MACHINE, price)


def batched_tokens(situation: Situation, flags: Flags, memory_gib: float | None, gpu_name: str = "") -> Choice:
    """``max-num-batched-tokens``: enough for the traffic's steady mix of prompts and answers, in even steps."""
    work = situation.workload
    count = whole(flags, SEQUENCES)
    length = token_count(flags.get(LENGTH)) or situation.request_tokens
    if flags.get(CHUNKED) is False:
        return Choice(
            BATCHED,
            max(length, count),
            f"Without chunked prefill a whole prompt of up to {length:,} tokens must fit into one step.",
            Source.WORKLOAD,
            "A long prompt stalls every running stream until it is read.",
        )
    wanted = max(2 * steady_step(situation, flags), SMALL_STEP)
    reason = "Keeps up with this mix of prompts and answers in small, even steps."
    if situation.facts is not None and situation.facts.multimodal:
        wanted, reason = max(wanted, LARGE_STEP), "Room for a whole image in one step, which vLLM asks for."
    if SPECULATION in flags:
        wanted, reason = max(wanted, LARGE_STEP), "Guessed tokens take room in each step too: vLLM advises 8,192."
    elif work.input_tokens_p95 >= LONG_PROMPT:
        wanted = max(wanted, LARGE_STEP)
        reason = f"Big steps read long prompts sooner: {math.ceil(work.input_tokens_p95 / wanted)} for one at p95."
    elif memory_gib is not None and memory_gib >= LARGE_GPU_GIB and "A100" not in gpu_name:
        wanted, reason = (
            max(wanted, LARGE_STEP),
            "A GPU of this size does a large step as quickly as others a small one.",
        )
    size = min(_power_of_two(wanted), LARGEST_STEP)
    # vLLM: at least a token for each sequence; more than all of them at full length is never used.
    size = max(count, min(size, count * length))
    price = f"A prompt that is read delays running streams by at most one step of {size:,} tokens."
    return Choice(BATCHED, size, reason, Source.WORKLOAD, price)


def keeps_up(situation: Situation, flags: Flags, tokens: int) -> bool:
    """Whether steps of so many tokens do for this traffic and are what vLLM takes: then they need not change."""
    least = max(2 * steady_step(situation, flags), whole(flags, SEQUENCES))
    if flags.get(CHUNKED) is False:
        least = max(least, token_count(flags.get(LENGTH)) or situation.request_tokens)
    if situation.workload.input_tokens_p95 >= LONG_PROMPT or SPECULATION in flags:
        least = max(least, LARGE_STEP)
    return least <= tokens <= LARGEST_STEP


def steady_step(situation: Situation, flags: Flags) -> int:
    """Tokens per step in the long run: each running request's next one, and the new prompts' share beside it.

    While ``n`` requests each gain a token, prompts come in at ``n · input / output``, less what is reused.
    """
    work = situation.workload
    running = math.ceil(work.concurrency / whole(flags, DATA))
    running = min(running, whole(flags, SEQUENCES, running))
    prompts = work.input_tokens_p95 * (1 - work.prefix_reuse) / work.output_tokens_p95
    return math.ceil(running * (1 + prompts))


def _power_of_two(number: int) -> int:
    """The least power of two that is no smaller."""
    return 1 << max(0, number - 1).bit_length()
