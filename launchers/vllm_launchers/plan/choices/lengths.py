"""Context length, concurrent requests and tokens per step, from the traffic. Pure."""

from __future__ import annotations

import math

from vllm_launchers.plan.budget.budget import MemoryBudget
from vllm_launchers.plan.budget.memory_flags import (
    caches_states,
    is_encoder,
    least_step,
    max_tokens_per_mm_item,
    whole_prompts,
)
from vllm_launchers.plan.choices.choice import Choice, ChoiceInputs, Source, in_eights
from vllm_launchers.plan.choices.layout import held_at_p95
from vllm_launchers.plan.flags import BATCHED, CHUNKED, DATA, LENGTH, PREFIX, SEQUENCES, token_count
from vllm_launchers.plan.model_conditions import broken_by_cached_states
from vllm_launchers.units import counted
from vllm_launchers.vllm.flags.changes import Flags, FlagValue, whole_number
from vllm_launchers.vllm.flags.speculation import sequence_tokens, speculates
from vllm_launchers.vllm.modelfacts.facts import LayerKind
from vllm_launchers.vllm.release_defaults import NEWEST, can_cache_linear_prefixes

HEADROOM = 2
"""Ratio of ``max-num-seqs`` to the usual number of requests in flight, so that bursts do not queue at once."""

LENGTH_HEADROOM = 1.25
"""Minimum ratio of ``max-model-len`` to the longest request seen."""

LONGER_REJECTED = "Longer requests are rejected."

MAX_TOKENS_REJECTED = "Requests that are longer, or whose max_tokens asks for more, are rejected."
"""The cost of a shorter context, unless the ``max_tokens`` of all requests is known to be less. Up to 0.31, prompt and
``max_tokens`` must fit together."""

COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Usual values of ``max-num-seqs``. CUDA graphs are captured for most of them, so batches are padded little."""

SMALL_STEP, LARGE_STEP, LARGEST_STEP = 2048, 8192, 16384
LONG_PROMPT = 32_768
LARGE_GPU_GIB = 70
"""GPU memory from which vLLM's default step is 8,192 tokens rather than 2,048 (``get_batch_defaults``); not on A100."""


def context(inputs: ChoiceInputs) -> Choice:
    """``max-model-len``: p95 prompt plus p95 output, rounded up by at most a quarter, up to the model's maximum."""
    work, tokens = inputs.workload, inputs.request_tokens
    length = rounded_up(tokens)
    parts = f"{work.input_tokens_p95:,} prompt + {work.output_tokens_p95:,} answer tokens at p95"
    limit = _supported(inputs)
    if limit is None or length <= limit:
        rest = f"; the model supports {limit:,}" if limit is not None and limit > length else ""
        return Choice(LENGTH, length, f"{parts}, rounded up{rest}.", Source.WORKLOAD, LONGER_REJECTED)
    tradeoff = LONGER_REJECTED
    if tokens > limit:
        tradeoff = f"{parts} do not fit: longer requests are rejected, so split them or use another model."
    return Choice(LENGTH, limit, f"The model's maximum; the traffic needs {tokens:,}.", Source.MODEL, tradeoff)


def shorter_context(inputs: ChoiceInputs, longest: float, present: FlagValue | None) -> Choice:
    """``max-model-len`` of a running server: `fitting_context` for its ``longest`` request, if that is less than now.

    It is never raised: vLLM rejects longer requests, so all that are seen fit. ``present`` is the flag's value, if set.
    """
    limit = token_count(present) if present is not None else _supported(inputs)
    if limit is None or longest >= limit or (length := fitting_context(longest)) >= limit:
        return Choice(LENGTH, None, "Requests may be as long as it allows.", Source.WORKLOAD)
    reason = (
        f"No request took, or is known to ask for, more than {longest:,.0f} tokens, prompt and answer; this leaves 25% "
        "headroom."
    )
    return Choice(LENGTH, length, reason, Source.WORKLOAD, MAX_TOKENS_REJECTED)


def fitting_context(longest: float) -> int:
    """The context for traffic whose longest request was seen: a quarter more, since longer ones may follow."""
    return rounded_up(math.ceil(LENGTH_HEADROOM * longest))


def _supported(inputs: ChoiceInputs) -> int | None:
    return inputs.facts.longest_context(inputs.release) if inputs.facts is not None else None


def _longest_allowed(inputs: ChoiceInputs, flags: Flags) -> int:
    """The longest request that vLLM accepts; that of the traffic if it is not known."""
    return token_count(flags.get(LENGTH)) or _supported(inputs) or inputs.request_tokens


def rounded_up(tokens: int) -> int:
    """A length rounded up to a multiple of a power of two: at most a quarter more, at least 256 tokens."""
    step = max(256, _power_of_two(math.ceil(tokens / 8)))
    return math.ceil(tokens / step) * step


def sequences(inputs: ChoiceInputs, flags: Flags, budget: MemoryBudget | None) -> Choice:
    """``max-num-seqs`` of each copy: twice the requests in flight, but no more than its KV cache has room for.

    For a server with a history, that room was observed, and as many may run as were observed to run well. Otherwise it
    is the worst case: requests of p95 length, all at full length at once.
    """
    copies, seen = whole_number(flags, DATA), inputs.seen
    asked = math.ceil(inputs.workload.concurrency / copies)
    least = max(asked * HEADROOM, seen.ran if seen is not None else 0)
    wanted = next((count for count in COUNTS if count >= least), max(COUNTS[-1], seen.ran if seen is not None else 0))
    batched = token_count(flags.get(BATCHED))
    each = sequence_tokens(flags, inputs.release)
    capped = batched is not None and batched < wanted * each
    if batched is not None:
        wanted = min(wanted, max(1, batched // each))
    in_flight = f"{counted(inputs.workload.concurrency, 'request')} in flight" + (
        f" on {copies} replicas" if copies > 1 else ""
    )
    states = budget.most_sequences if budget is not None else None
    if states is not None and seen is not None:
        states = max(states, seen.ran)  # an estimate, and so many were observed to run
    startable = wanted if states is None else min(wanted, states)
    held = float(seen.fitting) if seen is not None else held_at_p95(budget)
    if held is None or held >= startable:
        if startable < wanted:
            return within_states(startable)
        reason = f"{in_flight}, with headroom for bursts; requests beyond that queue instead of slowing all."
        if capped:
            reason = f"vLLM allows at most as many sequences as tokens per step: {batched:,} ({in_flight})."
            if each > 1:
                reason = f"A step of {batched:,} tokens holds no more sequences with their drafts ({in_flight})."
        return Choice(SEQUENCES, wanted, reason, Source.WORKLOAD)
    most = max(1, math.floor(held))
    most = in_eights(most) if seen is None else most
    waiting = asked - most
    tradeoff = f"About {waiting:,} of {asked:,} queue." if waiting > 0 else "Bursts queue."
    number = counted(int(held), "request")
    reason = f"The KV cache holds about {number} at once if all have p95 length, a worst case."
    if seen is not None:
        reason = f"As observed: {seen.reason}"
    return Choice(SEQUENCES, most, reason, Source.MACHINE, tradeoff)


def within_states(most: int) -> Choice:
    """``max-num-seqs`` if the number of blocks, which each sequence takes one of for its state, limits it."""
    reason = (
        f"vLLM starts with at most as many sequences as the KV cache has blocks, about {most:,} here: each takes one "
        "for its Mamba or linear-attention state."
    )
    return Choice(SEQUENCES, max(1, in_eights(most)), reason, Source.MACHINE, "Bursts queue.")


def batched_tokens(inputs: ChoiceInputs, flags: Flags, memory_gib: float | None, gpu_name: str = "") -> Choice:
    """``max-num-batched-tokens``: enough for the traffic's steady mix of prompts and outputs, in even steps."""
    work = inputs.workload
    count = whole_number(flags, SEQUENCES)
    length = _longest_allowed(inputs, flags)
    mm_item = max_tokens_per_mm_item(inputs.facts, flags)
    least = least_step(flags, inputs.release, facts=inputs.facts, sequences=count, context=length, mm_item=mm_item)
    if whole_prompts(inputs.facts, flags, inputs.release):
        return Choice(
            BATCHED,
            least,
            f"Without chunked prefill a whole prompt of up to {length:,} tokens must fit in one step.",
            Source.WORKLOAD,
            "A long prompt stalls every running stream until its prefill ends.",
        )
    wanted = max(2 * steady_step(inputs, flags), SMALL_STEP)
    reason = "Keeps up with this mix of prompts and answers in small, even steps."
    if inputs.facts is not None and inputs.facts.multimodal:
        wanted, reason = max(wanted, LARGE_STEP), "Room for a whole image in one step, as vLLM requires."
    if speculates(flags):
        wanted, reason = (
            max(wanted, LARGE_STEP),
            "Speculative tokens also take room in each step: vLLM recommends 8,192.",
        )
    elif work.input_tokens_p95 >= LONG_PROMPT:
        wanted = max(wanted, LARGE_STEP)
        steps = math.ceil(work.input_tokens_p95 / wanted)
        reason = f"Large steps prefill long prompts sooner: {steps} for one at p95."
    elif memory_gib is not None and memory_gib >= LARGE_GPU_GIB and "A100" not in gpu_name:
        wanted, reason = (max(wanted, LARGE_STEP), "A GPU of this size handles large steps quickly.")
    size = min(_power_of_two(wanted), LARGEST_STEP)
    size = max(least, min(size, count * length))  # more than all sequences at full length is never used
    tradeoff = f"A prefill delays running streams by at most one step of {size:,} tokens."
    return Choice(BATCHED, size, reason, Source.WORKLOAD, tradeoff)


def keeps_up(inputs: ChoiceInputs, flags: Flags, tokens: int) -> bool:
    """Whether steps of this many tokens suffice for the traffic and are valid in vLLM, and so need no change."""
    length = _longest_allowed(inputs, flags)
    mm_item, count = max_tokens_per_mm_item(inputs.facts, flags), whole_number(flags, SEQUENCES)
    least = least_step(flags, inputs.release, facts=inputs.facts, sequences=count, context=length, mm_item=mm_item)
    least = max(least, 2 * steady_step(inputs, flags))
    if inputs.workload.input_tokens_p95 >= LONG_PROMPT or speculates(flags):
        least = max(least, LARGE_STEP)
    return least <= tokens <= LARGEST_STEP


def steady_step(inputs: ChoiceInputs, flags: Flags) -> int:
    """Steady-state tokens per step: one for each running request, plus a share of the new prompts.

    While ``n`` requests each gain a token, prompts arrive at ``n · input / output``, less the reused part.
    """
    work = inputs.workload
    running = math.ceil(work.concurrency / whole_number(flags, DATA))
    running = min(running, whole_number(flags, SEQUENCES, running))
    prompts = work.input_tokens_p95 * (1 - work.prefix_reuse) / work.output_tokens_p95
    return math.ceil(running * (1 + prompts))


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << max(0, number - 1).bit_length()


# -- prefix caching and chunked prefill, from the traffic. Pure -------------------------------------------------------


REUSED = 0.35
"""Share of reused prompt tokens above which prefix caching is worth enabling."""

UNIQUE = 0.1
"""Share of reused prompt tokens up to which prompts count as unique."""

SHORT_PROMPT = 512
IDLE_REQUESTS = 2
"""With prompts of up to `SHORT_PROMPT` tokens and this many requests in flight, chunked prefill has no effect."""


def prefix_caching(inputs: ChoiceInputs, flags: Flags) -> Choice:
    """On if prompts share prefixes, off if they are unique, else vLLM's default."""
    reuse = inputs.workload.prefix_reuse
    share = f"{reuse:.0%} of prompt tokens repeat"
    facts, release = inputs.facts, inputs.release or NEWEST
    linear = facts is not None and LayerKind.LINEAR in facts.layers
    if linear and not can_cache_linear_prefixes(release, drafts=False):
        reason = f"{share}, but this release of vLLM can't cache prefixes of linear-attention layers."
        return Choice(PREFIX, None, reason, Source.MODEL)
    if reuse <= UNIQUE:
        return Choice(
            PREFIX,
            False,
            f"Prompts are unique ({share}): nothing to share.",
            Source.WORKLOAD,
            "Almost none; turn it on for repeated questions about the same text.",
        )
    on = facts is None or not linear or caches_states(facts, flags, release)
    if facts is not None and any(broken_by_cached_states(facts, {**flags, PREFIX: True}, release)):
        reason = f"{share}, but vLLM can't cache prefixes of linear-attention layers with the other flags."
        return Choice(PREFIX, False if on else None, reason, Source.MODEL)
    if reuse > REUSED:
        tradeoff = "Almost none where prompts differ."
        if linear:
            tradeoff = "New in vLLM for linear-attention layers: watch the hit rate."
        return Choice(PREFIX, True, f"{share}: computed once and shared.", Source.WORKLOAD, tradeoff)
    default = "on" if on else "off for linear-attention layers"
    reason = f"{share}: inconclusive, so vLLM's default ({default}) stays."
    return Choice(PREFIX, None, reason, Source.WORKLOAD)


def chunked_prefill(inputs: ChoiceInputs) -> Choice:
    """On, except for short prompts on an idle GPU, where it is left to vLLM.

    It is never turned off: vLLM warns that a generative model may then crash, and older releases ignore the setting.
    """
    if inputs.facts is not None and is_encoder(inputs.facts):
        return Choice(CHUNKED, None, "vLLM does not chunk the prompts of an encoder.", Source.MODEL)
    work = inputs.workload
    if work.input_tokens_p95 <= SHORT_PROMPT and work.concurrency <= IDLE_REQUESTS:
        reason = (
            f"Prompts of {work.input_tokens_p95:,} tokens fit in one step and few requests queue: nothing to chunk."
        )
        return Choice(CHUNKED, None, reason, Source.WORKLOAD)
    return Choice(
        CHUNKED,
        True,
        f"Prompts of up to {work.input_tokens_p95:,} tokens are prefilled in chunks between decode steps, "
        "so no stream stalls.",
        Source.WORKLOAD,
        "Slightly higher TTFT for long prompts under load.",
    )
