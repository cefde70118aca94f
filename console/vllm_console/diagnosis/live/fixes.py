"""Fixes for a running server: each only if model and GPU support it, with its trade-off and earlier runs that used it.

Ranked by impact: quantization, FP8 KV cache, prefix caching, chunked prefill, then limits.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vllm_console.diagnosis.finding import SECOND_SERVER, Finding, Fix, title_of_code
from vllm_console.diagnosis.live.frame_sums import MINUTE, mean, observed, surely_slow
from vllm_console.diagnosis.live.rule import HELD_SHARE, Evidence
from vllm_console.history.frames import merged
from vllm_console.history.workload import seen_room
from vllm_console.text import percent, round_duration, seconds
from vllm_launchers.host.gpu.host import gpus_text
from vllm_launchers.host.gpu.sharing import holdings
from vllm_launchers.plan import attention
from vllm_launchers.plan.budget.budget import HIGHEST_UTILIZATION
from vllm_launchers.plan.budget.memory_flags import accepted_utilization
from vllm_launchers.plan.flags import BLOCKS, BYTES, CHUNKED, PREFIX, WHOLE_ITEMS, token_count
from vllm_launchers.units import counted
from vllm_launchers.vllm.flags.changes import Changes, Flags, FlagValue, apply_changes, same_value, whole_number
from vllm_launchers.vllm.flags.speculation import sequence_tokens, speculates
from vllm_launchers.vllm.release_defaults import can_cache_linear_prefixes, online_fp8

if TYPE_CHECKING:
    from vllm_console.runs.store import PastRun

ADA = (8, 9)
WORTH_CACHING = 0.1
"""Fraction of repeated prompt tokens from which prefix caching gains over 3% throughput (`docs/guides.md`)."""

LEAST_SHARE = 0.02
"""Minimum increase of ``gpu-memory-utilization`` that is worth a restart."""

PEAKS_GIB = 0.5
"""Additional memory to leave free, for peaks."""

MOST_KEPT = 0.9
"""Maximum fraction of the running sequences, and of the limit, for a new limit: above that, hardly anything changes."""

FEWEST_ENDED = 20
"""Minimum number of finished requests before what running ones hold is representative."""

WORTH_FREEING = 1.1
"""Minimum factor by which the KV cache must grow without these flags to be worth a restart."""

AT_THE_LIMIT = 0.95
"""Fraction of ``max-num-seqs`` from which the limit is what makes requests wait."""

WORTH_MORE = 1.1
"""Minimum factor for raising a limit; less changes next to nothing."""

WAIT_LONGER = "More requests queue, so TTFT can rise."

PROMPT_TOKENS = 128
"""Minimum tokens per step for prompts, beside the tokens of a full batch."""

FULL_STEPS = 8
"""Round sequences to multiples of eight, like the batch sizes for which CUDA graphs are captured."""


def setting(name: str, value: FlagValue, why: str, tradeoff: str = "") -> Fix:
    """A fix that sets one flag."""
    return Fix(Changes({name: value}), why, tradeoff)


def another_place(evidence: Evidence) -> str:
    """Where a second server could run: as many free GPUs as this one has, by number; empty if there are none here."""
    if evidence.build == "cpu":
        return ""
    if evidence.free_gpus is None:
        return "on another GPU"
    chosen = evidence.free_gpus[: max(1, evidence.gpus)]
    return f"on {gpus_text(chosen)}" if len(chosen) == max(1, evidence.gpus) else ""


def _no_place(evidence: Evidence) -> str:
    if evidence.build == "cpu":
        return ""
    if evidence.free_gpus:
        return f": only {gpus_text(evidence.free_gpus)} is free here, and this one has {evidence.gpus} GPUs"
    return ": no GPU like its own is free here"


def reduce_load(evidence: Evidence) -> Fix:
    """What helps if no flag does: less load on this server."""
    if place := another_place(evidence):
        return Fix(Changes(), f"{SECOND_SERVER} {place}, or send fewer concurrent requests.")
    why = f"Send fewer concurrent requests, or start a second server on another machine{_no_place(evidence)}."
    return Fix(Changes(), why)


def more_capacity(evidence: Evidence) -> Fix:
    """What helps if demand exceeds what this hardware can serve, and no flag changes that."""
    smaller = "smaller" if evidence.quantized or evidence.build == "cpu" else "smaller or quantized"
    if place := another_place(evidence):
        ways = f"{place}, split the model over more GPUs, serve a {smaller} model, or send fewer requests"
        return Fix(Changes(), f"{SECOND_SERVER} {ways}.")
    why = f"Serve a {smaller} model, send fewer requests, or start a second server on another machine"
    return Fix(Changes(), f"{why}{_no_place(evidence)}.")


def more_cache(evidence: Evidence) -> list[Fix]:
    """All fixes that let the KV cache hold more tokens, or need fewer, most effective first."""
    by_blocks, by_bytes = (token_count(evidence.flags.get(name)) is not None for name in (BLOCKS, BYTES))
    memory, growth = more_memory(evidence)
    doubled = growth >= 2.0
    offered = (
        free_size(evidence),
        memory if doubled else None,  # as much as an FP8 KV cache gains, with the same output
        None if by_blocks or by_bytes else quantize(evidence),
        None if by_blocks else fp8_cache_fix(evidence),
        share_prefixes(evidence),
        None if doubled else memory,
    )
    return [fix for fix in offered if fix is not None]


def free_size(evidence: Evidence) -> Fix | None:
    """Let the KV cache use all available memory, if a flag makes it smaller and nobody else holds that memory."""
    if evidence.build == "cpu":
        return _free_blocks(evidence)
    names = tuple(name for name in (BLOCKS, BYTES) if name in evidence.flags)
    now, free = evidence.cache_gib, evidence.cache_free_gib
    if not names or now is None or free is None or free < WORTH_FREEING * now:
        return None
    for gpu in evidence.moments[-1].gpus if evidence.moments else ():
        spare = evidence.spare_gib.get(gpu.index)
        if spare is None or gpu.mig_mode or spare < free - now + PEAKS_GIB:
            return None
    flags = " and ".join(f"--{name}" for name in names)
    why = f"{flags} limits the KV cache to {now:.1f} GiB; {free:.1f} GiB would fit."
    return Fix(Changes(unset=names), why, "The KV cache then takes all memory that gpu-memory-utilization allows.")


def _free_blocks(evidence: Evidence) -> Fix | None:
    """The same for a CPU build, whose memory is not estimated: it logs how many blocks it had memory for."""
    factor, tokens = evidence.blocks_without_override, evidence.cache_tokens
    if BLOCKS not in evidence.flags or factor is None or tokens is None or factor < WORTH_FREEING:
        return None
    why = f"--{BLOCKS} limits the KV cache to {tokens:,} tokens; {factor * tokens:,.0f} would fit, by vLLM's log."
    return Fix(Changes(unset=(BLOCKS,)), why, "The KV cache then takes all memory that is set aside for it.")


FOR_ROOM = "FP8 weights take half the memory; the KV cache gets the rest."
FOR_SPEED = "FP8 weights take about half the time per step."


def quantize(evidence: Evidence, why: str = FOR_ROOM) -> Fix | None:
    """FP8 weights, if the weights are not quantized and the GPU computes in FP8."""
    capability = evidence.compute_capability
    if evidence.quantized is not False or capability is None or capability < ADA:
        return None
    if "quantization" in evidence.flags:
        return None
    tradeoff = "Slightly lower quality; weights are converted at every start."
    return setting("quantization", online_fp8(evidence.release), why, tradeoff)


def fp8_cache_fix(evidence: Evidence) -> Fix | None:
    """An FP8 KV cache, which holds twice the tokens, if vLLM supports it here."""
    asked = str(evidence.flags.get("kv-cache-dtype", "auto"))
    if asked not in ("auto", "bfloat16", "float16") or (asked == "auto" and evidence.own_fp8_cache):
        return None
    numbers = evidence.compute_capability
    if evidence.build == "cpu" or numbers is None or evidence.attention_free:
        return None
    able = float(f"{numbers[0]}.{numbers[1]}")
    verdict = attention.fp8_cache_support(
        evidence.flags, evidence.environment, evidence.release, able, mla=evidence.mla
    )
    if not verdict.works:
        return None
    tradeoff = f"Output can differ slightly; {verdict.why}." if verdict.why else "Output can differ slightly."
    return setting("kv-cache-dtype", "fp8", "An FP8 KV cache holds twice the tokens.", tradeoff)


def can_cache_prefixes(evidence: Evidence) -> bool:
    """Whether vLLM caches this model's prefixes if a flag requests it, as far as its release is known."""
    if evidence.attention_free or (evidence.mla and evidence.build == "cpu"):
        return False
    if not evidence.linear_layers:
        return True
    flags, release = evidence.flags, evidence.release
    if flags.get(CHUNKED) is False or flags.get(WHOLE_ITEMS) is True or _cuts_states(evidence):
        return False  # vLLM rejects that
    return release is None or can_cache_linear_prefixes(release, drafts=speculates(flags))


SHORT_CHUNKS_SINCE = (0, 27, 0)
"""First release that caches states even if ``long-prefill-token-threshold`` is less than a block."""


def _cuts_states(evidence: Evidence) -> bool:
    """Whether long prompts are computed in chunks that may be too short for a cached state."""
    threshold = whole_number(evidence.flags, "long-prefill-token-threshold", 0)
    if not threshold or (evidence.release is not None and evidence.release >= SHORT_CHUNKS_SINCE):
        return False
    block = evidence.frames[-1].prefix_step if evidence.frames else None
    return block is None or threshold < block


def share_prefixes(evidence: Evidence) -> Fix | None:
    """Prefix caching, if it is off, prompts share prefixes, and vLLM would not turn it off again for this model."""
    reuse, source = evidence.reuse
    if not can_cache_prefixes(evidence):
        return None
    if evidence.flags.get(PREFIX) is not False or reuse <= WORTH_CACHING:
        return None
    why = f"{percent(reuse)} of each prompt repeats ({source}): computed and stored once."
    if evidence.linear_layers:
        return Fix(cached_states(evidence), why, "Blocks become large, so only long prefixes are found.")
    return setting(PREFIX, True, why, "Almost none.")


def cached_states(evidence: Evidence) -> Changes:
    """Turn on prefix caching for linear layers, with steps that hold a block (see `Evidence.state_block`)."""
    block = evidence.frames[-1].prefix_step if evidence.frames else None
    least = -(-(block or 0) // 256) * 256
    more: dict[str, FlagValue] = {"max-num-batched-tokens": least} if evidence.max_num_batched_tokens < least else {}
    return Changes({PREFIX: True, **more})


def more_memory(evidence: Evidence) -> tuple[Fix | None, float]:
    """What is free of the GPU, but never what other tenants hold or what is reserved for them; and how many times
    larger the KV cache becomes, 1 if its present size is unknown.
    """
    if (found := _free_share(evidence)) is None:
        return None, 1.0
    share, gained, left = found
    growth = 1.0 + gained / evidence.cache_gib if evidence.cache_gib else 1.0
    each = " of each GPU" if len(evidence.moments[-1].gpus) > 1 else ""
    why = f"The KV cache gets {gained:.1f} GiB more{each}, which is free now."
    return setting("gpu-memory-utilization", share, why, f"{left:.1f} GiB{each} are left for other processes."), growth


def _free_share(evidence: Evidence) -> tuple[float, float, float] | None:
    """The largest ``gpu-memory-utilization``, and the GiB per GPU that it adds and leaves; None if it is set already.

    vLLM refuses to start unless its whole share is free, and a server may hold less than its share until its first
    large batch: the new share is counted from what it holds, if that is less.
    """
    if evidence.build == "cpu" or not evidence.flags_known or not evidence.moments:
        return None
    if {BLOCKS, BYTES} & evidence.flags.keys():
        return None
    present, share, sizes = accepted_utilization(evidence.flags, evidence.release), HIGHEST_UTILIZATION, []
    for gpu in evidence.moments[-1].gpus:
        spare, total = evidence.spare_gib.get(gpu.index), gpu.memory_gib
        held = holdings(gpu).ours.get(evidence.server) or gpu.used_gib  # in a container, processes may be invisible
        if spare is None or not held or not total or gpu.mig_mode:  # a share of a slice is another one of the GPU
            return None
        share = min(share, math.floor(100 * (min(held / total, present) + (spare - PEAKS_GIB) / total)) / 100)
        sizes.append((total, spare))
    more = share - present
    if more < LEAST_SHARE:
        return None
    return share, min(more * total for total, _ in sizes), min(spare - more * total for total, spare in sizes)


def fitting_sequences(evidence: Evidence, growth: float = 1.0) -> int:
    """How many sequences the KV cache of each engine, ``growth`` times as large, has room for, up to four times the
    present limit.

    At most what `seen_room` reports, the basis of `fewer_sequences`; otherwise the two fixes would undo each other.
    """
    limit, last, objective = evidence.max_num_seqs, evidence.last(MINUTE), evidence.objectives.kv_cache_usage
    usage = max((frame.usage_max or 0.0 for frame in last), default=0.0)
    fitting = int(limit * min(4.0, growth * objective / max(usage, 0.01)))
    if _enough_ended(evidence) and (room := seen_room(evidence.frames, objective)) is not None:
        fitting = min(fitting, int(growth * max(room.fitting, room.ran)))
    states = startable_sequences(evidence, growth)
    return fitting if states is None else min(fitting, states)


def startable_sequences(evidence: Evidence, growth: float = 1.0) -> int | None:
    """The largest ``max-num-seqs`` with which vLLM surely starts again with a KV cache ``growth`` times as large.

    None if no linear layer needs a block for the state of each. The next start may measure a little less memory.
    """
    if evidence.most_sequences is None:
        return None
    # The present number may be more than estimated: it did start.
    return int(HELD_SHARE * growth * max(evidence.most_sequences, evidence.max_num_seqs))


def no_more_sequences(evidence: Evidence) -> str:
    """Why a higher sequence limit would not help, to follow a sentence about the limit; empty if it would."""
    fitting = fitting_sequences(evidence)
    if fitting >= max(evidence.max_num_seqs + 1, WORTH_MORE * evidence.max_num_seqs):
        return ""
    held = max(fitting, evidence.max_num_seqs)
    room = f"The KV cache holds about {held} of these within its objective"
    if fitting == startable_sequences(evidence):
        room = f"vLLM starts with about {held} at most, since the KV cache needs a block for the state of each"
    if (free := free_size(evidence)) is not None:
        flags = " and ".join(f"--{name}" for name in free.changes.unset)
        return f" {room}, because {flags} limits it."
    alone = " alone" if more_sequences(evidence) is not None else ""
    return f" {room}, so a higher limit{alone} would not help."


SLOW_STEPS = 0.8
"""From this fraction of the ITL p99 objective on, a mean shows that steps are slow in general, not just some."""


def slow_steps(evidence: Evidence) -> float | None:
    """Mean ITL (seconds) if steps are too slow for more sequences and p99 is surely above its objective, else None."""
    objective, minute = evidence.objectives.itl_p99_seconds, observed(evidence.last(MINUTE), "itl")[-1]
    itl = mean(minute)
    if minute is None or itl is None or itl < SLOW_STEPS * objective or not surely_slow(minute, objective):
        return None
    return itl


def queue_delays(evidence: Evidence) -> bool:
    """Whether TTFT p99 is surely above its objective, and more of it is spent in the queue than in prefill."""
    last = evidence.last(MINUTE)
    minute = observed(last, "ttft")[-1]
    queue, prefill = (mean(merged(last, key)) or 0.0 for key in ("queue", "prefill"))
    return minute is not None and queue > prefill and surely_slow(minute, evidence.objectives.ttft_p99_seconds)


def more_sequences(evidence: Evidence) -> Fix | None:
    """As many as the KV cache has room for (`fitting_sequences`), if needed with a change that makes it larger; None if
    that exceeds the tokens per step.
    """
    if (more := _more_sequences(evidence)) is not None:
        return more
    for larger, growth in _larger_caches(evidence):
        if (more := _more_sequences(evidence, growth)) is not None:
            changes = Changes({**larger.changes.set, **more.changes.set}, larger.changes.unset)
            return Fix(changes, f"{larger.why} {more.why}", f"{larger.tradeoff} {more.tradeoff}")
    return None


def _larger_caches(evidence: Evidence) -> Iterator[tuple[Fix, float]]:
    """The changes that make the KV cache larger and leave the weights as they are, and how many times larger."""
    now = evidence.cache_gib
    if (fix := free_size(evidence)) is not None:
        free = (evidence.cache_free_gib or 0.0) / now if now else 1.0
        yield fix, evidence.blocks_without_override or 1.0 if evidence.build == "cpu" else free
    elif not {BLOCKS, BYTES} & evidence.flags.keys():
        memory, larger = more_memory(evidence)
        if memory is not None:
            yield memory, larger
        # States of linear layers stay as large, so fewer than twice the sequences fit.
        if not evidence.linear_layers and (fix := fp8_cache_fix(evidence)) is not None:
            yield fix, 2.0


def _more_sequences(evidence: Evidence, growth: float = 1.0) -> Fix | None:
    limit, each = evidence.max_num_seqs, sequence_tokens(evidence.flags, evidence.release)
    fitting, least = fitting_sequences(evidence, growth), max(limit + 1, WORTH_MORE * limit)
    # A step needs room for prompts in addition to a full batch's own tokens.
    in_step = (evidence.max_num_batched_tokens - PROMPT_TOKENS) // each
    wanted = stepped if (stepped := _stepped(min(fitting, in_step))) >= least else min(fitting, in_step)
    if wanted < least:
        return None
    then = " then" if growth > 1 else ""
    why = f"{wanted} sequences of the current length{then} fit into the KV cache{evidence.each}."
    if fitting == startable_sequences(evidence, growth):
        why = f"The KV cache{then} has a block for the state of each of {wanted} sequences{evidence.each}."
    if in_step < fitting:
        why = f"{wanted} sequences{then} fit into the KV cache{evidence.each} and leave room for prompts in a step."
    tradeoff = "Slower streams (ITL) and a fuller KV cache."
    itl, itl_goal = evidence.latency("itl").p99, evidence.objectives.itl_p99_seconds
    if itl is not None and itl.within(0.8 * itl_goal) is False:
        tradeoff = f"ITL p99 is already {itl.text} (objective {seconds(itl_goal)}) and gets slower."
    return setting("max-num-seqs", wanted, why, tradeoff)


def fewer_sequences(evidence: Evidence, factor: float) -> Fix | None:
    """As many sequences as the KV cache has held (`seen_room`); until enough requests have ended, ``factor`` times the
    minimum that ran while it was too full. The reason names the source of the number.
    """
    limit, objective, engines = evidence.max_num_seqs, evidence.objectives.kv_cache_usage, evidence.engines
    last = evidence.last(MINUTE)
    # A count shows what fits only while the cache was too full; many run only while they are short.
    full = [frame for frame in last if (frame.usage_max or 0.0) > objective or frame.grown.preemptions_total]
    counts = [count / engines for frame in full if (count := frame.grown.requests_running)]
    if not counts:
        return None
    fewest, most = min(*counts, limit), min(limit, max((frame.running_max or 0.0) / engines for frame in full))
    room = seen_room(evidence.frames, objective) if _enough_ended(evidence) else None
    if room is not None:
        fitting, why = float(room.fitting), room.reason
        # Never below what ran well; otherwise never above what runs now, which is already too much.
        if fitting > (kept := max(float(room.ran), fewest * factor, MOST_KEPT * (most or limit))):
            fitting, why = kept, f"the KV cache was too full with {most or limit:.0f}."
    else:
        fitting = fewest * factor
        why = f"the KV cache was too full with {fewest:.0f}, and each still grows."
    wanted = int(fitting) if room is not None and fitting == room.fitting else max(1, _stepped(fitting))
    if wanted > MOST_KEPT * limit:
        return None
    why = f"Run at most {counted(wanted, 'sequence')}{evidence.each}: {why}"
    return setting("max-num-seqs", wanted, why, WAIT_LONGER)


def shorter_steps(evidence: Evidence) -> Fix | None:
    """Half of the running sequences, so that a step computes less."""
    last, limit = evidence.last(MINUTE), evidence.max_num_seqs
    running = min(limit, max((frame.running_max or 0.0 for frame in last), default=0.0) / evidence.engines)
    wanted = _stepped(running / 2)
    if not 1 <= wanted < limit:
        return None
    step = counted(wanted, "sequence")
    why = f"A step of {step}{evidence.each}, about half of the {running:.0f} running{evidence.past}, takes less time."
    return setting("max-num-seqs", wanted, why, WAIT_LONGER)


def _stepped(count: float) -> int:
    return int(count) // FULL_STEPS * FULL_STEPS if count > FULL_STEPS else int(count)


def _enough_ended(evidence: Evidence) -> bool:
    answers = merged(evidence.frames, "generation_tokens")
    return answers is not None and answers.count >= FEWEST_ENDED


def chunked(evidence: Evidence) -> Fix | None:
    """Chunked prefill, if it is off."""
    if evidence.flags.get("enable-chunked-prefill") is not False:
        return None
    why = "Long prompts are prefilled in chunks between decode steps."
    return setting("enable-chunked-prefill", True, why, "TTFT of long prompts rises slightly.")


def present(fixes: Iterable[Fix | None]) -> tuple[Fix, ...]:
    """The fixes that are not None."""
    return tuple(fix for fix in fixes if fix is not None)


LEAST_SECONDS = 120.0
"""Findings that held for less in an earlier run say nothing about its flags."""


def with_experience(finding: Finding, flags: Flags, earlier: Sequence[PastRun], codes: Collection[str]) -> Finding:
    """Add to each fix's trade-off which findings an earlier run with the fix's flags had; such fixes come last.

    ``earlier`` is newest first. ``codes`` are the findings that count: those about what requests experience.
    """
    known = [(fix, _experience(fix.changes, flags, earlier, codes)) for fix in finding.fixes]
    if not any(sentence for _, sentence in known):
        return finding
    known.sort(key=lambda one: bool(one[1]))
    return replace(finding, fixes=tuple(_with_tradeoff(fix, sentence) for fix, sentence in known))


def _with_tradeoff(fix: Fix, sentence: str) -> Fix:
    return replace(fix, tradeoff=f"{fix.tradeoff} {sentence}".strip()) if sentence else fix


def _experience(changes: Changes, flags: Flags, earlier: Sequence[PastRun], codes: Collection[str]) -> str:
    """One sentence about the newest earlier run with exactly the flags after ``changes``; empty if nothing is known."""
    if changes.empty:
        return ""
    after = apply_changes(flags, changes)
    run = next((run for run in earlier if _same(run.flags, after)), None)
    if run is None:
        return ""
    held: dict[str, float] = defaultdict(float)
    for code, since, until in run.findings:
        if code in codes:
            held[code] += until - since
    longest = sorted(((length, code) for code, length in held.items() if length >= LEAST_SECONDS), reverse=True)
    found = " and ".join(f"{title_of_code(code)} for {round_duration(length)}" for length, code in longest[:2])
    return f"Run {run.generation} used these flags and had: {found}." if found else ""


def _same(one: Flags, other: Flags) -> bool:
    return one.keys() == other.keys() and all(same_value(one[name], other[name]) for name in one)
