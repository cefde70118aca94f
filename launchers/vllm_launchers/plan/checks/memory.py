"""What of a GPU's memory is free, and whether weights and KV cache find room in it. Pure.

Errors here rest on an estimate, or on what others hold at this moment: ``--force`` may go over them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from vllm_launchers.machine.gpu.host import Gpu
from vllm_launchers.machine.gpu.sharing import available_gib, is_held_by_others, share_words
from vllm_launchers.plan.budget.model import MemoryBudget
from vllm_launchers.plan.checks.asked import (
    DATA,
    KV_DTYPE,
    LENGTH,
    PIPELINE,
    TENSOR,
    UTILIZATION,
    gpus_of,
    ranks,
    size_of,
    utilization,
)
from vllm_launchers.plan.checks.parallel import divisors
from vllm_launchers.plan.choices.situation import BudgetFor
from vllm_launchers.plan.findings import Finding, Level
from vllm_launchers.plan.knowledge import Knowledge
from vllm_launchers.plan.model import Changes, Flags, Plan
from vllm_launchers.plan.placement import UUID_SINCE, takes_uuids
from vllm_launchers.plan.placement_words import held_words
from vllm_launchers.presets.model import Workload

SLACK_GIB = 0.05
"""What is free is compared no closer than the driver reports it."""

LEAST_UTILIZATION = 0.3
LARGER_SHARES = (0.9, 0.92, 0.95)
STEP = 256
SHORTEST = 1024
MOST_TENSOR = 16


def memory_findings(
    plan: Plan, knowledge: Knowledge, workload: Workload | None, budget: BudgetFor | None
) -> Iterator[Finding]:
    """Memory that is held now, weights that do not fit, a KV cache too small for one request."""
    gpus = gpus_of(plan, knowledge)
    yield from _unusable(plan, gpus)
    yield from _claimed(gpus)
    for gpu in gpus:
        yield from _held(plan, knowledge, gpu, budget)
    if plan.memory is not None:
        yield from _room(plan, knowledge, plan.memory, workload, budget)


def _claimed(gpus: tuple[Gpu, ...]) -> Iterator[Finding]:
    """GPUs that somebody else has claimed on the shared board: a word, which nothing but a person keeps."""
    for gpu in gpus:
        if gpu.claimed:
            yield Finding("gpu_claimed", Level.WARNING, f"GPU {gpu.index} is {gpu.claimed}; ask first, or take another")


def _unusable(plan: Plan, gpus: tuple[Gpu, ...]) -> Iterator[Finding]:
    for gpu in gpus:
        if gpu.lost:
            text = f"{gpu.label} answers no more ({gpu.lost}); choose another, or reset it"
            yield Finding("gpu_lost", Level.ERROR, text, surely=False)
        elif gpu.mig_mode and gpu.index in plan.gpus and not _on_slice(plan):
            text = f"{gpu.label} is in MIG mode and cannot be used whole; choose one of its slices"
            yield Finding("gpu_in_mig_mode", Level.ERROR, text, surely=False)
    if _on_slice(plan) and not takes_uuids(plan.engine.release):
        since = ".".join(map(str, UUID_SINCE[:2]))
        text = f"vLLM {plan.engine.version or 'of this age'} may not start on a MIG slice; {since} does"
        yield Finding("mig_unsupported", Level.WARNING, text)


def _on_slice(plan: Plan) -> bool:
    return plan.environment.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-")


def _held(plan: Plan, knowledge: Knowledge, gpu: Gpu, budget: BudgetFor | None) -> Iterator[Finding]:
    """vLLM refuses to start unless its whole share is free at that moment."""
    free, total = available_gib(gpu, knowledge.shares), gpu.memory_gib
    who = held_words(gpu) or f"GPU {gpu.index}"
    limit = share_words(gpu, knowledge.shares)
    if free is None or total is None or gpu.lost:
        return
    needed = utilization(plan) * total
    if free + SLACK_GIB >= needed:
        if is_held_by_others(gpu):
            yield Finding("gpu_shared", Level.ADVICE, f"{who}: what they take later is missing to this server")
        return
    fitting = math.floor(free / total * 100) / 100
    less = budget({**plan.flags, UTILIZATION: fitting}) if budget is not None and fitting >= LEAST_UTILIZATION else None
    fix = Changes(set={UTILIZATION: fitting}) if less is not None and less.fits else None
    why = f"; {limit}" if limit else ""
    text = (
        f"{who}{why}: {free:.1f} of {total:.1f} GiB can be had now and --{UTILIZATION} {utilization(plan):g} asks for "
        f"{needed:.1f}, so vLLM will not start"
    )
    yield Finding("memory_held", Level.ERROR, text, fix, surely=False)


def _room(
    plan: Plan, knowledge: Knowledge, memory: MemoryBudget, workload: Workload | None, budget: BudgetFor | None
) -> Iterator[Finding]:
    if memory.kv_gib <= 0:
        rest = memory.overhead_gib + memory.graphs_gib
        room = max(0.0, memory.kv_gib + memory.weights_gib + rest)
        way = _larger_share(plan, budget) or _more_gpus(plan, knowledge, budget)
        text = (
            f"weights take {memory.weights_gib:.1f} GiB of each GPU and computing {rest:.1f}, of {room:.1f} that may "
            f"be taken: {-memory.kv_gib:.1f} GiB are missing"
        ) + ("" if way is not None else "; take a quantized or a smaller model, or more GPUs")
        yield Finding("weights_do_not_fit", Level.ERROR, text, way, surely=False)
        return
    if memory.fits:
        return
    asked = f"{memory.max_model_len:,} tokens" if memory.max_model_len else "the full context"
    has = f"{memory.kv_tokens:,} tokens" if memory.kv_tokens is not None else f"{memory.kv_gib:.1f} GiB"
    fix, words = _smaller(plan, knowledge, memory, workload, budget)
    text = f"the KV cache holds {has}, too little for one request of {asked}{words}"
    yield Finding("kv_too_small", Level.ERROR, text, fix, surely=False)


def _smaller(
    plan: Plan, knowledge: Knowledge, memory: MemoryBudget, workload: Workload | None, budget: BudgetFor | None
) -> tuple[Changes | None, str]:
    """The least painful way out: a shorter context while requests still fit, then an FP8 cache, then more GPUs."""
    wanted = workload.input_tokens_p95 + workload.output_tokens_p95 if workload is not None else SHORTEST
    longest = longest_context(plan.flags, memory, budget)
    if longest is not None and longest >= min(wanted, memory.max_model_len or wanted):
        return Changes(set={LENGTH: longest}), f"; {longest:,} would fit"
    if budget is not None:
        eight = {KV_DTYPE: "fp8"}
        if KV_DTYPE not in plan.flags and (found := budget({**plan.flags, **eight})) is not None and found.fits:
            return Changes(set=eight), f"; it fits with --{KV_DTYPE} fp8"
        if (more := _more_gpus(plan, knowledge, budget)) is not None:
            return more, ""
    if longest is not None and longest >= SHORTEST:
        return Changes(set={LENGTH: longest}), f"; {longest:,} would fit, less than the {wanted:,} that requests need"
    return None, "; take more GPUs or a smaller model"


def longest_context(flags: Flags, memory: MemoryBudget, budget: BudgetFor | None) -> int | None:
    """The largest ``max-model-len``, in steps of 256, of which one request fits; None where none does."""
    most = memory.max_model_len
    if most is None or memory.kv_gib <= 0:
        return None
    if budget is None:
        if memory.kv_tokens is None:
            return None
        return memory.kv_tokens // STEP * STEP or None
    low, high = 0, (most - 1) // STEP
    while low < high:
        middle = (low + high + 1) // 2
        found = budget({**flags, LENGTH: middle * STEP})
        low, high = (middle, high) if found is not None and found.fits else (low, middle - 1)
    return low * STEP or None


def _larger_share(plan: Plan, budget: BudgetFor | None) -> Changes | None:
    """A larger share of the same GPU with which it fits."""
    if budget is None:
        return None
    for share in LARGER_SHARES:
        more = {UTILIZATION: share}
        if share > utilization(plan) and (found := budget({**plan.flags, **more})) is not None and found.fits:
            return Changes(set=more)
    return None


def _more_gpus(plan: Plan, knowledge: Knowledge, budget: BudgetFor | None) -> Changes | None:
    """The next larger tensor-parallel size with which it fits, on as many GPUs as could give that share now."""
    if budget is None or knowledge.facts is None or knowledge.host is None:
        return None
    free = [gpu for gpu in knowledge.host.gpus if not gpu.mig_mode and not gpu.lost and _has_room(plan, knowledge, gpu)]
    there = max(len(free), len(plan.gpus))
    others = ranks(plan.flags) // size_of(plan.flags, TENSOR)
    for size in divisors(knowledge.facts, min(there, MOST_TENSOR)):
        if size <= size_of(plan.flags, TENSOR):
            continue
        flags = {**plan.flags, TENSOR: size}
        drop = tuple(name for name in (PIPELINE, DATA) if name in flags) if size * others > there else ()
        found = budget({name: value for name, value in flags.items() if name not in drop})
        if found is not None and found.fits:
            return Changes(set={TENSOR: size}, unset=drop)
    return None


def _has_room(plan: Plan, knowledge: Knowledge, gpu: Gpu) -> bool:
    free, total = available_gib(gpu, knowledge.shares), gpu.memory_gib
    return free is not None and total is not None and free + SLACK_GIB >= utilization(plan) * total
