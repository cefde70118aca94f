"""Whether a launch can hold its planned traffic: concurrent requests, and their length. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from vllm_launchers.plan.alternatives import Alternative, thrift
from vllm_launchers.plan.attention import is_fp8
from vllm_launchers.plan.checks.context import longest_supported
from vllm_launchers.plan.checks.request import fixed_size, ranks, spread, way_without_flags, without_fixed_size
from vllm_launchers.plan.choices.choice import BudgetFor, fits_with, in_eights
from vllm_launchers.plan.choices.layout import LONG_AT_ONCE, UNASKED, format_layout, held_at_p95
from vllm_launchers.plan.choices.lengths import rounded_up
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.plan.flags import BLOCKS, DATA, KV_DTYPE, LENGTH, SEQUENCES, token_count
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.presets.model import Workload
from vllm_launchers.units import counted
from vllm_launchers.vllm.flags.changes import Changes, whole_number

NOTED = 0.5
"""Room for a smaller share of the planned requests than this is reported. Few requests are that long."""

WORTH_TRYING = 1.5
"""Speedup over the plan's tokens per second that makes slow links worth a try."""

FAR_ABOVE = 4
"""Ratio of the model's length to the traffic's from which a limit is worthwhile."""


def workload_findings(plan: Plan, inputs: PlanInputs, workload: Workload, budget: BudgetFor) -> Iterator[PlanFinding]:
    """Too little room for the requests in flight, and a context too short or needlessly long for them."""
    yield from _held(plan, inputs, workload, budget)
    yield from _far(plan)
    yield from _length(plan, inputs, workload, budget)


def _held(plan: Plan, inputs: PlanInputs, workload: Workload, budget: BudgetFor) -> Iterator[PlanFinding]:
    held = held_at_p95(plan.memory)
    if held is None:
        return
    copies, flight = whole_number(plan.flags, DATA), workload.concurrency
    held, wanted = held * copies, LONG_AT_ONCE * flight
    more = thrift(plan.alternatives)
    if held >= NOTED * wanted:
        if more is not None and held >= wanted:
            text = f"weights are quantized while loading to use few GPUs; {_more_gpus(more)}"
            yield PlanFinding("gpus_left_idle", Level.ADVICE, text, more.changes)
        return
    known = f"the KV cache holds about {int(held):,} of {counted(flight, 'request')} of p95 length"
    limit = token_count(plan.flags.get(SEQUENCES))
    fix = more.changes if more is not None else None
    fitting = _sequences_held(held / copies, workload)
    if limit is not None and limit > fitting:
        if plan.memory is not None and plan.memory.most_sequences is not None:
            fitting = min(fitting, plan.memory.most_sequences)
        fitting = in_eights(fitting)
        fix = Changes(set={SEQUENCES: fitting})
        known = (
            f"the KV cache holds about {fitting * copies:,} of {counted(flight, 'request')}, or {int(held):,} if "
            "all have p95 length and are about to finish (a running request holds its prompt and on average half "
            f"of its output); --{SEQUENCES} {limit} admits more, which may be preempted"
        )
    elif limit is not None and limit * copies > held:
        known = f"{known} at once; if that many are that long, some are preempted"
    else:
        known = f"{known}; the rest queue"
    if _limited_by_blocks(plan, budget):
        ways, fix = iter([f"--{BLOCKS} {plan.flags[BLOCKS]} limits it: unset it"]), Changes(unset=(BLOCKS,))
    else:
        ways = _ways_out(plan, inputs, held, more)
    text = ". ".join([known, *ways])
    level = Level.WARNING if held < UNASKED * wanted else Level.ADVICE
    yield PlanFinding("workload_not_held", level, text, fix)


def _limited_by_blocks(plan: Plan, budget: BudgetFor) -> bool:
    """Whether more requests would fit if the number of KV cache blocks were left to vLLM."""
    if BLOCKS not in plan.flags:
        return False
    now, free = plan.memory, budget({name: value for name, value in plan.flags.items() if name != BLOCKS})
    return now is not None and free is not None and (held_at_p95(free) or 0.0) > (held_at_p95(now) or 0.0)


def _sequences_held(held: float, workload: Workload) -> int:
    """How many requests may run in a copy that holds ``held`` requests of p95 length at once.

    All of them at full length is the worst case. A running request holds its prompt and on average half of its output,
    and at most `LONG_AT_ONCE` of them have p95 length.
    """
    prompt, answer = workload.input_tokens_p95, workload.output_tokens_p95
    return max(1, math.floor(held / LONG_AT_ONCE * (prompt + answer) / (prompt + answer / 2)))


def _far(plan: Plan) -> Iterator[PlanFinding]:
    """Tensor parallelism over slow links, which is never chosen automatically, if it is predicted to be much faster."""
    if not plan.alternatives or not plan.alternatives[0].near or not plan.alternatives[0].throughput:
        return
    chosen = plan.alternatives[0]
    alike = [one for one in plan.alternatives if not one.near and one.layout.total == chosen.layout.total]
    fastest = max(alike, key=lambda one: one.throughput, default=None)
    if fastest is not None and fastest.throughput >= WORTH_TRYING * chosen.throughput:
        text = (
            f"{fastest.label} is predicted at about {fastest.throughput:,.0f} tokens/s, the plan's {chosen.label} at "
            f"{chosen.throughput:,.0f}, although its GPUs are not connected by NVLink or one PCIe switch: worth a try "
            "if nothing else uses these links"
        )
        yield PlanFinding("tensor_parallel_faster", Level.ADVICE, text, fastest.changes)


def _more_gpus(more: Alternative) -> str:
    held = "all" if more.concurrent_requests is None else f"about {int(more.concurrent_requests or 0):,}"
    return f"{more.layout.total} GPUs ({format_layout(more.layout)}) would hold {held} with the model's own weights"


def _ways_out(plan: Plan, inputs: PlanInputs, held: float, more: Alternative | None) -> Iterator[str]:
    """Alternatives that hold more, the first of each kind: more GPUs, an FP8 cache, another checkpoint."""
    if more is not None:
        yield f"Few GPUs are used, leaving the rest to others: {_more_gpus(more)}"
    better = [one for one in plan.alternatives if (one.concurrent_requests or 0.0) > held and not one.chosen]
    eight = next((one for one in better if one.model is None and is_fp8(one.kv_cache_dtype)), None)
    if eight is not None:
        yield f"--{KV_DTYPE} fp8 would hold {int(eight.concurrent_requests or 0):,} (outputs can differ slightly)"
    smaller = next((one for one in better if one.model is not None), None)
    if smaller is not None:
        gpus = counted(smaller.layout.total, "GPU")
        yield f"{smaller.model} would hold {int(smaller.concurrent_requests or 0):,} on {gpus}"
    if more is None and eight is None and smaller is None:
        spare = inputs.machine is None or spread(plan.flags) or ranks(plan.flags) < len(inputs.machine.gpus)
        where = "with more GPUs" if spare else "on more machines"
        yield f"More would fit {where}, or with a smaller or quantized model"


def _longer(plan: Plan, inputs: PlanInputs, length: int, budget: BudgetFor) -> tuple[Changes | None, str]:
    """The changes with which requests of this length fit, and if none are known, why not."""
    longer = {LENGTH: length}
    fits = fits_with(budget, {**plan.flags, **longer})
    if fits is not False:
        return (Changes(set=longer) if fits else None), ""
    rest, fixed = without_fixed_size(plan), fixed_size(plan)
    if rest is not None and fits_with(budget, {**rest, **longer}):
        flags = " ".join(f"--{name} {plan.flags[name]}" for name in fixed)
        return Changes(set=longer, unset=fixed), f"; {length:,} fit without {flags}"
    way = way_without_flags(plan, inputs, budget, {**plan.flags, **longer})
    return None, f"; {length:,} do not fit either: {way}"


def _length(plan: Plan, inputs: PlanInputs, workload: Workload, budget: BudgetFor) -> Iterator[PlanFinding]:
    wanted = workload.input_tokens_p95 + workload.output_tokens_p95
    most = longest_supported(plan, inputs)
    if most is None and inputs.facts is not None:
        most = inputs.facts.longest_context(plan.engine.release)
    asked = token_count(plan.flags.get(LENGTH))
    if asked is not None and asked < wanted:
        fitting = rounded_up(wanted) if most is None else min(rounded_up(wanted), most)
        fix, why = None, ""
        if most is not None and most < wanted:
            why = f", and the model supports at most {most:,}: split long requests or use another model"
        else:
            fix, why = _longer(plan, inputs, fitting, budget)
        text = (
            f"--{LENGTH} {asked:,} is below the p95 request length ({wanted:,} tokens): longer ones are rejected{why}"
        )
        yield PlanFinding("context_below_traffic", Level.WARNING, text, fix)
    if plan.flags.get(LENGTH) is None and most is not None and most >= FAR_ABOVE * wanted:
        length = rounded_up(wanted)
        text = (
            f"without --{LENGTH} requests can be as long as the model supports, {most:,} tokens (p95: {wanted:,}): "
            "one such request can take as much KV cache as many"
        )
        yield PlanFinding("context_not_limited", Level.ADVICE, text, Changes(set={LENGTH: length}))
