"""Free GPU memory, and whether weights and KV cache fit in it. Pure.

Errors here are based on an estimate, or on memory that others hold at the moment: ``--force`` may override them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from vllm_launchers.host.gpu.host import Gpu
from vllm_launchers.host.gpu.sharing import available_gib, format_share, is_held_by_others
from vllm_launchers.plan.budget.budget import (
    CONTEXT_GIB,
    HIGHEST_UTILIZATION,
    MemoryBudget,
    cuda_gib,
    needed_gib,
    share_within,
)
from vllm_launchers.plan.budget.memory_flags import whole
from vllm_launchers.plan.checks.context import longest_supported
from vllm_launchers.plan.checks.request import (
    default_sequences,
    fewer_sequences,
    fixed_size,
    fp8_cache_of,
    gpus_of,
    local_ranks,
    most_gpus,
    on_slice,
    ranks,
    simulated,
    spread,
    utilization,
    way_without_flags,
    without_fixed_size,
)
from vllm_launchers.plan.choices.choice import BudgetFor, fits_with, in_eights
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.plan.flags import (
    BLOCKS,
    DATA,
    KV_DTYPE,
    LENGTH,
    OFFLOAD,
    PIPELINE,
    SEQUENCES,
    TENSOR,
    TRANSFER,
    UTILIZATION,
    token_count,
)
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.plan.placement import SLACK_GIB, UUID_SINCE, format_held, format_needs, takes_uuids
from vllm_launchers.plan.tensor_sizes import tensor_problem
from vllm_launchers.presets.model import Workload
from vllm_launchers.units import GIB
from vllm_launchers.vllm.flags.changes import Changes, Flags, apply_changes, whole_number
from vllm_launchers.vllm.flags.speculation import speculates
from vllm_launchers.vllm.release_defaults import NEWEST

TOO_LITTLE = frozenset({"memory_held", "weights_do_not_fit", "kv_cache_too_large", "kv_too_small"})
"""Codes of the findings with which a launch does not fit into the memory of its GPUs."""

LEAST_UTILIZATION = 0.3
LARGER_SHARES = (0.9, 0.92, HIGHEST_UTILIZATION)
STEP = 256
SHORTEST = 1024
MOST_TENSOR = 16


def memory_findings(plan: Plan, inputs: PlanInputs, workload: Workload, budget: BudgetFor) -> Iterator[PlanFinding]:
    """Memory in use, weights that do not fit, a KV cache too small for one request."""
    gpus = gpus_of(plan, inputs)
    yield from _unusable(plan, gpus)
    yield from _claimed(gpus)
    share = _free_share(gpus, inputs)
    for gpu in gpus:
        yield from _held(plan, inputs, gpu, share, budget)
    if plan.memory is not None:
        yield from _room(plan, inputs, plan.memory, workload, budget)
        yield from _offloaded(plan, inputs, budget)


def _claimed(gpus: tuple[Gpu, ...]) -> Iterator[PlanFinding]:
    """GPUs claimed by other users on the shared board; claims are advisory."""
    for gpu in gpus:
        if gpu.claimed:
            yield PlanFinding(
                "gpu_claimed", Level.WARNING, f"GPU {gpu.index} is {gpu.claimed}; ask first or choose another"
            )


def _unusable(plan: Plan, gpus: tuple[Gpu, ...]) -> Iterator[PlanFinding]:
    for gpu in gpus:
        if gpu.lost:
            text = f"{gpu.label} does not respond ({gpu.lost}); choose another or reset it"
            yield PlanFinding("gpu_lost", Level.ERROR, text, surely=False)
        elif gpu.mig_mode and gpu.index in plan.gpus and not on_slice(plan):
            text = f"{gpu.label} is in MIG mode and can't be used as a whole; choose one of its slices"
            yield PlanFinding("gpu_in_mig_mode", Level.ERROR, text, surely=False)
    if on_slice(plan) and not takes_uuids(plan.engine.release):
        since = ".".join(map(str, UUID_SINCE[:2]))
        version = plan.engine.public_version
        text = f"vLLM {version} may not start on a MIG slice: it needs {since} or later"
        if version is None:
            text = f"a MIG slice needs vLLM {since} or later, and the version of this vLLM is unknown"
        yield PlanFinding("mig_unsupported", Level.WARNING, text)


def _free_share(gpus: tuple[Gpu, ...], inputs: PlanInputs) -> float:
    """The share of memory that is free on all of these GPUs, rounded down; GPUs of unknown memory do not count."""
    found = [share_within(gpu, available_gib(gpu, inputs.shares)) for gpu in gpus if not gpu.lost]
    shares = [share for share in found if share is not None]
    return min(HIGHEST_UTILIZATION, math.floor(min(shares, default=0.0) * 100) / 100)


def _held(plan: Plan, inputs: PlanInputs, gpu: Gpu, fitting: float, budget: BudgetFor) -> Iterator[PlanFinding]:
    """vLLM refuses to start unless its whole share is free on each GPU at startup. ``fitting`` is a share that fits."""
    free, total, needed = available_gib(gpu, inputs.shares), cuda_gib(gpu), needed_gib(gpu, utilization(plan))
    who = format_held(gpu) or f"GPU {gpu.index}"
    if free is None or total is None or needed is None or gpu.lost:
        return
    if free + SLACK_GIB >= needed:
        if is_held_by_others(gpu):
            yield PlanFinding(
                "gpu_shared", Level.ADVICE, f"{who}: any memory they allocate later is not available to this server"
            )
        return
    less = {UTILIZATION: fitting}
    fits = fitting >= LEAST_UTILIZATION and fits_with(budget, {**plan.flags, **less})
    fix = Changes(set=less) if fits else None
    limits = "; ".join(filter(None, (format_held(gpu), format_share(gpu, inputs.shares))))
    text = (
        f"{limits or who}: {free:.1f} GiB available, {needed - free:.1f} GiB less than "
        f"--{UTILIZATION} {utilization(plan):g} ({format_needs([needed])}: its share of {total:.1f} GiB usable, and "
        f"{CONTEXT_GIB:.1f} for CUDA itself), so vLLM will not start"
    )
    yield PlanFinding("memory_held", Level.ERROR, text, fix, surely=False)


def _offloaded(plan: Plan, inputs: PlanInputs, budget: BudgetFor) -> Iterator[PlanFinding]:
    """Weights in main memory, which the GPUs read over PCIe in each step."""
    if OFFLOAD not in plan.flags or simulated(plan):
        return
    left = budget(plan.flags)
    all_weights = budget({name: value for name, value in plan.flags.items() if name != OFFLOAD})
    each = all_weights.weights_gib - left.weights_gib if left is not None and all_weights is not None else 0.0
    if each <= 0:
        return
    read = "up to that much" if inputs.facts is not None and inputs.facts.experts else "them"
    text = (
        f"--{OFFLOAD} keeps about {each:.1f} GiB of each GPU's weights in main memory, and each step reads {read} over "
        "PCIe, which is slower than GPU memory; the speed is not estimated"
    )
    yield PlanFinding("weights_offloaded", Level.WARNING, text)
    total = inputs.host.memory_gib if inputs.host is not None else None
    needed = each * local_ranks(plan.flags)
    if total is not None and needed > total and not spread(plan.flags):
        text = f"--{OFFLOAD} needs about {needed:.1f} GiB of main memory, and the machine has {total:.1f} GiB in all"
        yield PlanFinding("offload_over_memory", Level.WARNING, text)


def _room(
    plan: Plan, inputs: PlanInputs, memory: MemoryBudget, workload: Workload, budget: BudgetFor
) -> Iterator[PlanFinding]:
    if memory.lacks_memory:
        rest = memory.overhead_gib + memory.graphs_gib
        room = max(0.0, memory.kv_gib + memory.weights_gib + rest)
        way = _larger_share(plan, budget) or _fewer(plan, inputs, budget) or _more_gpus(plan, inputs, budget)
        text = (
            f"weights ({memory.weights_gib:.1f} GiB per GPU) and activations ({rest:.1f} GiB) exceed "
            f"what --{UTILIZATION} {utilization(plan):g} allows ({room:.1f} GiB) by {-memory.kv_gib:.1f} GiB"
        ) + ("" if way is not None else f"; {way_without_flags(plan, inputs, budget)}")
        yield PlanFinding("weights_do_not_fit", Level.ERROR, text, way, surely=False)
        return
    if memory.fixed and (found := _beyond(plan, inputs, memory, budget)) is not None:
        yield found
        return
    if memory.fits:
        yield from _states(plan, inputs, memory)
        return
    asked = f"{memory.max_model_len:,} tokens" if memory.max_model_len else "the full context"
    has = f"{memory.kv_tokens:,} tokens" if memory.kv_tokens is not None else f"{memory.kv_gib:.1f} GiB"
    fix, words = _smaller(plan, inputs, memory, workload, budget)
    text = f"the KV cache holds {has}, not enough for one request of {asked}{words}"
    yield PlanFinding("kv_too_small", Level.ERROR, text, fix, surely=False)


_LATENT_GRAPHS_SINCE = (0, 22, 0)
"""First release that captures graphs of whole steps with Triton's backend for latent attention (MLA)."""


def _states(plan: Plan, inputs: PlanInputs, memory: MemoryBudget) -> Iterator[PlanFinding]:
    """More sequences than blocks, of which each sequence of a model with linear layers needs one for its state."""
    given, most = token_count(plan.flags.get(SEQUENCES)), memory.most_sequences
    asked = given or default_sequences(plan, inputs)
    if most is None or asked is None or asked <= most:
        return
    # With these, vLLM may capture no graphs of whole steps, and then accepts the number.
    facts = inputs.facts
    drafts = speculates(plan.flags) or (facts is not None and facts.own_draft)
    latent = facts is not None and facts.mla and (plan.engine.release or NEWEST) < _LATENT_GRAPHS_SINCE
    unsure = drafts or latent or any(name.partition(".")[0] == TRANSFER for name in plan.flags)
    what = f"--{SEQUENCES} {asked}" if given else f"its own default of {asked} sequences (--{SEQUENCES})"
    text = (
        f"vLLM {'may' if unsure else 'will'} refuse {what}: each sequence needs a KV cache block for its Mamba or "
        f"linear-attention state, and about {most:,} blocks fit"
    )
    fix = Changes(set={SEQUENCES: in_eights(most)})
    yield PlanFinding("states_too_few", Level.WARNING if unsure else Level.ERROR, text, fix, surely=False)


def _beyond(plan: Plan, inputs: PlanInputs, memory: MemoryBudget, budget: BudgetFor) -> PlanFinding | None:
    """A KV cache of a fixed size, in blocks or bytes, that does not fit with the rest."""
    # Blocks take different amounts on GPUs with different stages. The GPU that must give up the largest part decides.
    gpu = min(memory.per_gpu, key=lambda one: one.free_gib / max(one.kv_gib, SLACK_GIB), default=None)
    if gpu is None or gpu.free_gib + SLACK_GIB >= 0:
        return None
    rest = gpu.overhead_gib + gpu.graphs_gib
    held = f", of which others hold {gpu.others_gib:.1f}" if gpu.others_gib >= SLACK_GIB else ""
    name = fixed_size(plan)[0]
    text = (
        f"--{name} {plan.flags[name]} is {gpu.kv_gib:.1f} GiB per GPU; weights need {gpu.weights_gib:.1f} and "
        f"activations {rest:.1f}, the GPU has {gpu.total_gib:.1f} usable{held}: {-gpu.free_gib:.1f} GiB short"
    )
    most = math.floor((gpu.kv_gib + gpu.free_gib) * 10) / 10
    size = int(whole(plan.flags, BLOCKS, 0) * most / gpu.kv_gib if name == BLOCKS else most * GIB)
    smaller = {name: size}
    fix = Changes(set=smaller) if size > 0 and fits_with(budget, {**plan.flags, **smaller}) else None
    if fix is not None:
        way = f"{most:.1f} GiB would fit"
    else:
        way = "use GPUs with more free memory" if held else way_without_flags(plan, inputs, budget)
    return PlanFinding("kv_cache_too_large", Level.ERROR, f"{text}; {way}", fix, surely=False)


def _smaller(
    plan: Plan, inputs: PlanInputs, memory: MemoryBudget, workload: Workload, budget: BudgetFor
) -> tuple[Changes | None, str]:
    """The least costly fix: a shorter context while requests still fit, then an FP8 cache, then more GPUs."""
    if (rest := without_fixed_size(plan)) is not None and fits_with(budget, rest):
        fixed = fixed_size(plan)
        return Changes(unset=fixed), f"; {_set(plan, fixed)} limits it, and without it fits"
    wanted = workload.input_tokens_p95 + workload.output_tokens_p95
    longest = longest_context(plan.flags, memory, budget, longest_supported(plan, inputs))
    if longest is not None and longest >= min(wanted, memory.max_model_len or wanted):
        return Changes(set={LENGTH: longest}), f"; {longest:,} would fit"
    eight = {KV_DTYPE: "fp8"}
    offered = KV_DTYPE not in plan.flags and fp8_cache_of(plan, inputs).works is True
    if offered and fits_with(budget, {**plan.flags, **eight}):
        return Changes(set=eight), f"; it fits with --{KV_DTYPE} fp8 (outputs can differ slightly)"
    if (more := _more_gpus(plan, inputs, budget)) is not None:
        return more, ""
    if longest is not None and longest >= SHORTEST:
        return Changes(set={LENGTH: longest}), f"; {longest:,} would fit, but requests need {wanted:,}"
    return None, f"; {way_without_flags(plan, inputs, budget)}"


def _set(plan: Plan, names: tuple[str, ...]) -> str:
    return " ".join(f"--{name} {plan.flags[name]}" for name in names)


def longest_context(flags: Flags, memory: MemoryBudget, budget: BudgetFor, supported: int | None = None) -> int | None:
    """The largest ``max-model-len`` for one request: what is supported, or less in steps of 256; None if none fits."""
    most = memory.max_model_len
    if most is not None and supported is not None and supported < most:
        if fits_with(budget, {**flags, LENGTH: supported}):
            return supported
        most = supported
    if most is None or memory.lacks_memory:
        return None
    low, high = 0, (most - 1) // STEP
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits_with(budget, {**flags, LENGTH: middle * STEP}) else (low, middle - 1)
    if memory.kv_tokens is not None and 0 < low * STEP - memory.kv_tokens < STEP:
        low -= 1  # both are estimates, and an earlier start may have corrected one block's worth
    return low * STEP or None


def _larger_share(plan: Plan, budget: BudgetFor) -> Changes | None:
    for share in LARGER_SHARES:
        more = {UTILIZATION: share}
        if share > utilization(plan) and fits_with(budget, {**plan.flags, **more}):
            return Changes(set=more)
    return None


def _fewer(plan: Plan, inputs: PlanInputs, budget: BudgetFor) -> Changes | None:
    """vLLM's default number of sequences, if it fits with them; each takes memory in every step."""
    fewer = fewer_sequences(plan, inputs)
    return fewer if fewer is not None and fits_with(budget, apply_changes(plan.flags, fewer)) else None


def _more_gpus(plan: Plan, inputs: PlanInputs, budget: BudgetFor) -> Changes | None:
    """The next larger tensor-parallel size with which it fits on the GPUs that were named.

    If none were named, on as many GPUs as have room for that share now.
    """
    if inputs.facts is None or inputs.host is None or "nnodes" in plan.flags or on_slice(plan):
        return None
    free = [gpu for gpu in inputs.host.gpus if not gpu.mig_mode and not gpu.lost and _has_room(plan, inputs, gpu)]
    there = most_gpus(plan, inputs) or max(len(free), len(plan.gpus))
    others = ranks(plan.flags) // whole_number(plan.flags, TENSOR)
    for size in range(whole_number(plan.flags, TENSOR) + 1, min(there, MOST_TENSOR) + 1):
        drop = tuple(name for name in (PIPELINE, DATA) if name in plan.flags) if size * others > there else ()
        more = Changes(set={TENSOR: size}, unset=drop)
        flags = apply_changes(plan.flags, more)
        if not tensor_problem(inputs.facts, flags) and fits_with(budget, flags):
            return more
    return None


def _has_room(plan: Plan, inputs: PlanInputs, gpu: Gpu) -> bool:
    free, needed = available_gib(gpu, inputs.shares), needed_gib(gpu, utilization(plan))
    return free is not None and needed is not None and free + SLACK_GIB >= needed
