"""Remedies for a running server, each offered only where this model and GPU can do it, with its price.

Ranked by impact: quantization, FP8 KV cache, prefix caching, chunked prefill, then limits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from vllm_console.diagnosis.conditions.rolling import MINUTE, observed, p99
from vllm_console.diagnosis.conditions.rule import Situation
from vllm_console.diagnosis.model import Remedy
from vllm_console.diagnosis.words import FP8_CACHE_PRICE
from vllm_console.format import seconds
from vllm_console.telemetry.frames import Frame, merged, total
from vllm_console.telemetry.model import Histogram
from vllm_launchers.plan.flags import token_count
from vllm_launchers.plan.model import Changes
from vllm_launchers.presets.model import FlagValue

AMPERE, ADA, HOPPER = (8, 0), (8, 9), (9, 0)
WORTH_CACHING = 0.35
"""From this share of repeated prompt tokens on, prefix caching pays."""

UTILIZATION_STEP = 0.03
PEAKS_GIB = 0.5
"""What stays free besides, for peaks."""

HIGHEST_UTILIZATION = 0.95
MOST_KEPT = 0.9
"""Of the sequences that run: with more nothing would change."""

SAFETY = 2.5
"""Standard deviations of what all of them hold together that the cache has room for."""

FEWEST_ENDED = 20
"""Requests whose lengths say something of those to come."""

BLOCKS, BYTES = "num-gpu-blocks-override", "kv-cache-memory-bytes"
"""Flags that make the KV cache of one size, whatever memory there is."""

WORTH_FREEING = 1.1
"""So many times its present size the KV cache must become without them, to be worth a restart."""

AT_THE_LIMIT = 0.95
"""Share of ``max-num-seqs`` from which on the limit is what holds the others back."""

WORTH_MORE = 1.1
"""With less than a tenth of room left, memory is what holds the others back, whatever the limit of sequences."""

FULL_STEPS = 8
"""Sequences go by steps of eight, as the sizes that CUDA graphs are captured for do."""


def setting(name: str, value: FlagValue, why: str, price: str = "") -> Remedy:
    """A remedy that sets one flag."""
    return Remedy(Changes({name: value}), why, price)


def elsewhere(situation: Situation) -> Remedy:
    """What helps where no flag does: less to do for this server."""
    where = "machine" if situation.build == "cpu" else "GPU"
    return Remedy(Changes(), f"Start a second server on another {where}, or send fewer requests at once.")


def more_cache(situation: Situation) -> list[Remedy]:
    """Everything that lets the KV cache hold more tokens, or need fewer, the strongest first."""
    by_blocks, by_bytes = (token_count(situation.flags.get(name)) is not None for name in (BLOCKS, BYTES))
    offered = (
        free_size(situation),
        None if by_blocks or by_bytes else quantize(situation),
        None if by_blocks else fp8_cache(situation),
        share_prefixes(situation),
        more_memory(situation),
    )
    return [remedy for remedy in offered if remedy is not None]


def free_size(situation: Situation) -> Remedy | None:
    """The KV cache as large as memory allows, where a flag makes it smaller and nobody else holds that memory."""
    names = tuple(name for name in (BLOCKS, BYTES) if name in situation.flags)
    now, free = situation.cache_gib, situation.cache_free_gib
    if not names or now is None or free is None or free < WORTH_FREEING * now:
        return None
    for gpu in situation.moments[-1].gpus if situation.moments else ():
        spare = situation.spare_gib.get(gpu.index)
        if spare is None or spare < free - now + PEAKS_GIB:
            return None
    flags = " and ".join(f"--{name}" for name in names)
    why = f"{flags} keeps the KV cache at {now:.1f} GiB; memory has room for {free:.1f} GiB."
    return Remedy(Changes(unset=names), why, "The KV cache then takes all that gpu-memory-utilization allows.")


FOR_ROOM = "Weights in FP8 take half the memory; the KV cache gets the rest."
FOR_SPEED = "Weights in FP8 are read and computed in about half the time."


def quantize(situation: Situation, why: str = FOR_ROOM) -> Remedy | None:
    """Weights in FP8, where they are not quantized and the GPU computes in FP8."""
    capability = situation.compute_capability
    if situation.quantized is not False or capability is None or capability < ADA:
        return None
    if "quantization" in situation.flags:
        return None
    price = "Quality may be a little lower, and the weights are converted at every start."
    return setting("quantization", "fp8", why, price)


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
    return setting("kv-cache-dtype", "fp8", why, FP8_CACHE_PRICE)


def share_prefixes(situation: Situation) -> Remedy | None:
    """Prefix caching, where it is off and prompts begin alike."""
    reuse, source = situation.reuse
    if situation.flags.get("enable-prefix-caching") is not False or reuse <= WORTH_CACHING:
        return None
    why = f"{reuse:.0%} of a prompt repeats ({source}): it is then computed and kept once."
    return setting("enable-prefix-caching", True, why, "Next to none.")


def more_memory(situation: Situation) -> Remedy | None:
    """A little more of the GPU; never what other tenants hold or what is reserved for them."""
    present = situation.flags.get("gpu-memory-utilization")
    if not situation.moments or not isinstance(present, float) or {BLOCKS, BYTES} & situation.flags.keys():
        return None
    more = round(min(HIGHEST_UTILIZATION, present + UTILIZATION_STEP), 2)
    if more <= present:
        return None
    for gpu in situation.moments[-1].gpus:
        spare = situation.spare_gib.get(gpu.index)
        if spare is None or gpu.memory_gib is None or spare < (more - present) * gpu.memory_gib + PEAKS_GIB:
            return None
    why = f"{more - present:.0%} more of the GPU, which nobody holds, goes to the KV cache."
    return setting("gpu-memory-utilization", more, why, "Less room for activations of long prompts.")


def more_sequences(situation: Situation) -> Remedy | None:
    """As many as the cache has room for, up to four times; a limit of tokens per step must not be less."""
    limit, last = situation.max_num_seqs, situation.last(MINUTE)
    usage = max((frame.usage_max or 0.0 for frame in last), default=0.0)
    fitting = int(limit * min(4.0, situation.goals.kv_cache_usage / max(usage, 0.01)))
    wanted = max(limit + 1, fitting // FULL_STEPS * FULL_STEPS)
    if fitting < WORTH_MORE * limit or wanted > situation.max_num_batched_tokens:
        return None
    why = f"{wanted} sequences of the present length fit into the KV cache{situation.each}."
    price = "Each stream gets slower (ITL), and the cache fuller."
    itl = p99(observed(last, "itl")[-1])
    goal = situation.goals.itl_p99_seconds
    if itl is not None and itl > 0.8 * goal:
        price = f"ITL p99 is {seconds(itl)} already, of {seconds(goal)}, and gets slower."
    return setting("max-num-seqs", wanted, why, price)


def fewer_sequences(situation: Situation, factor: float) -> Remedy | None:
    """As many sequences as fit with the tokens that each comes to hold, or ``factor`` of the fewest that run."""
    limit, goal, last = situation.max_num_seqs, situation.goals.kv_cache_usage, situation.last(MINUTE)
    engines = situation.engines
    running = max((frame.running_max or 0.0 for frame in last), default=0.0) / engines
    # Many run only while they are short; the fewest at a frame's end are nearest to what fits once they are long.
    counts = (count / engines for frame in last if (count := frame.grown.requests_running))
    fewest = min(counts, default=running or limit)
    wanted = min(fewest, limit) * factor
    cache, each = situation.cache_tokens, held_tokens(situation.frames)
    if cache is not None and each is not None:
        # Never more than run now: what runs now is too much.
        wanted = min(_fitting(cache, goal, *each), max(wanted, MOST_KEPT * min(running or limit, limit)))
    fitting = max(1, int(wanted) // FULL_STEPS * FULL_STEPS if wanted > FULL_STEPS else int(wanted))
    if fitting >= limit:
        fitting = limit // 2
    if fitting < 1:
        return None
    at_once = f"at once{situation.each}"
    why = f"{fitting} sequences {at_once} instead of {limit} fit into the KV cache at their usual length."
    return setting("max-num-seqs", fitting, why, "Others wait longer: TTFT grows when more than that come at once.")


def _fitting(cache: float, goal: float, mean: float, deviation: float) -> float:
    """How many sequences stay within the goal on average, and within the cache when many happen to be long at once."""
    rest = SAFETY * deviation
    root = (math.sqrt(rest * rest + 4 * mean * cache) - rest) / (2 * mean)
    return min(goal * cache / mean, root * root)


def held_tokens(frames: Sequence[Frame]) -> tuple[float, float] | None:
    """Tokens that a running sequence holds: mean and standard deviation over the sequences met at any moment.

    It holds its prompt, and what of its answer is there by then. Long answers run longer and so are met more often:
    E[n²]/2E[n] is the mean, E[n³]/3E[n] the mean square. Shared prefixes are held once for all, and left out.
    """
    prompt, answer = merged(frames, "prompt_tokens"), merged(frames, "generation_tokens")
    if prompt is None or answer is None or min(prompt.count, answer.count) < FEWEST_ENDED:
        return None
    looked_up = total(frames, "prefix_cache_queries_total")
    shared = (total(frames, "prefix_cache_hits_total") or 0.0) / looked_up if looked_up else 0.0
    first, second, third = (_moment(answer, power) for power in (1, 2, 3))
    if first <= 0:
        return None
    scale = answer.sum / answer.count / first  # sums are exact, buckets are not
    grown = scale * max(first / 2, second / first / 2)
    spread = max(0.0, scale * scale * third / first / 3 - grown * grown)
    return (1 - shared) * prompt.sum / prompt.count + grown, math.sqrt(spread)


def _moment(histogram: Histogram, power: int) -> float:
    """The mean of a power of what was observed, each taken to lie in the middle of its bucket."""
    found = before = below = 0.0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=True):
        middle = (before + bound) / 2 if math.isfinite(bound) else before
        found += (count - below) * middle**power
        before, below = bound, count
    return found / histogram.count


def chunked(situation: Situation) -> Remedy | None:
    """Chunked prefill, where it is off."""
    if situation.flags.get("enable-chunked-prefill") is not False:
        return None
    why = "Long prompts are computed in pieces, between the tokens of the others."
    return setting("enable-chunked-prefill", True, why, "TTFT of long prompts grows a little.")


def present(remedies: Iterable[Remedy | None]) -> tuple[Remedy, ...]:
    """Those that there are."""
    return tuple(remedy for remedy in remedies if remedy is not None)
