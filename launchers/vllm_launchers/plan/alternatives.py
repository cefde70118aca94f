"""Compares other ways to launch the same model on the same machine: memory, speed, and trade-off. Pure.

Alternatives differ in layout (tensor, pipeline, data, and expert parallel, number of GPUs), in KV cache dtype, and in
checkpoint, if a quantized one is known. Each has the flag change that turns the plan into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec
from msgspec.structs import replace

from vllm_launchers.plan.attention import is_fp8
from vllm_launchers.plan.budget.budget import GpuShape, MemoryBudget
from vllm_launchers.plan.budget.memory_flags import cache_dtype
from vllm_launchers.plan.choices.choice import PARALLEL_FLAGS, ChoiceInputs
from vllm_launchers.plan.choices.layout import (
    LONG_AT_ONCE,
    NEARLY,
    Option,
    Search,
    all_layouts,
    best,
    cache_verdict,
    few,
    fixed_layout,
    format_layout,
    is_mixture,
    whole_experts,
)
from vllm_launchers.plan.choices.pool import Layout, Pool
from vllm_launchers.plan.flags import DATA, EXPERTS, KV_DTYPE, PIPELINE, QUANTIZATION, TENSOR
from vllm_launchers.plan.pace import Paces
from vllm_launchers.plan.proposals import Target, newly_refused
from vllm_launchers.units import counted
from vllm_launchers.vllm.flags.changes import Changes, Flags, FlagValue
from vllm_launchers.vllm.flags.releases import known_or_assumed
from vllm_launchers.vllm.modelfacts.facts import ModelFacts, expert_split_problem
from vllm_launchers.vllm.modelfacts.known import sibling_facts

MOST_ROWS = 9
"""One per digit key."""

MUCH_SLOWER = 0.9

BudgetOf = Callable[[ModelFacts, Flags], MemoryBudget | None]
"""The memory budget of a model with these flags."""


class Alternative(msgspec.Struct, frozen=True):
    """One way to launch the model. None means unknown.

    Sizes are per GPU, for the GPU with the least free memory; tokens and requests are totals over all replicas.
    ``model`` is set for another checkpoint. ``concurrent_requests`` counts requests of the workload's p95 length.
    ``changes``, together with ``model``, turn the plan into this alternative.
    """

    layout: Layout
    expert_parallel: bool
    kv_cache_dtype: str
    quantization: str | None
    """Online quantization of 16-bit weights; None if they are loaded unchanged."""
    model: str | None
    weights_gib: float
    kv_gib: float
    kv_tokens: int | None
    concurrent_requests: float | None
    fits: bool
    """Whether the weights and one request of maximum length fit."""
    serves: bool
    """Whether the KV cache holds the planned traffic."""
    paces: Paces | None
    tradeoff: str
    reason: str
    """Why it was chosen, or why not."""
    chosen: bool
    changes: Changes
    near: bool = True
    """Whether GPUs that exchange data at every layer are connected by NVLink or a single PCIe switch."""

    @property
    def throughput(self) -> float:
        """Tokens per second with the maximum number of requests; 0 if unknown."""
        return self.paces.throughput if self.paces is not None else 0.0

    @property
    def label(self) -> str:
        """Short description of the layout and other differences: ``TP 2 × DP 2, experts whole``."""
        parts = [format_layout(self.layout)]
        parts += ["experts whole"] if self.expert_parallel else []
        if self.quantization:
            parts.append("FP8 weights" if is_fp8(self.quantization) else f"{self.quantization} weights")
        parts += ["FP8 KV cache"] if is_fp8(self.kv_cache_dtype) else []
        return ", ".join(parts + ([self.model.rpartition("/")[2]] if self.model else []))


class _Row(msgspec.Struct, frozen=True):
    """An alternative before formatting; ``facts`` are those of its checkpoint."""

    option: Option
    facts: ModelFacts
    sibling: bool = False


def alternatives_of(
    inputs: ChoiceInputs, flags: Flags, pool: Pool | None, budget_of: BudgetOf, chosen_reason: str = ""
) -> tuple[Alternative, ...]:
    """The launch with ``flags``, followed by a few alternatives on GPUs of ``pool`` that fit.

    Empty if too little is known about model or GPUs, or if there is only one GPU and only one way.
    """
    facts = inputs.facts
    if pool is None or facts is None or inputs.build == "cpu":
        return ()
    base = {name: value for name, value in flags.items() if name not in _VARIED}
    current = {name: flags[name] for name in (EXPERTS, KV_DTYPE, QUANTIZATION) if name in flags}
    wanted = LONG_AT_ONCE * inputs.workload.concurrency
    search = Search(inputs, base, pool)
    chosen = search.option(fixed_layout(flags), {EXPERTS: False, **current})
    if chosen.budget is None:
        return ()
    formats = {name: value for name, value in current.items() if name != EXPERTS}
    if is_fp8(formats.get(KV_DTYPE)) and cache_verdict(inputs, flags, pool).works is False:
        del formats[KV_DTYPE]  # vLLM rejects it: no alternative has it
    rows = [_Row(chosen, facts), *_others(inputs, search, pool, chosen, formats, wanted)]
    rows += _formats(inputs, search, pool, flags, chosen)
    rows += _siblings(inputs, base, formats, pool, budget_of, wanted)
    distinct: list[Alternative] = []
    table = known_or_assumed(".".join(map(str, inputs.release or ())))
    gpu = GpuShape(pool.name, pool.memory_gib)
    for row in rows:
        made = _alternative(inputs, flags, pool, row, chosen, wanted, chosen_reason)
        if newly_refused(Target(table, row.facts, gpu, release=inputs.release), flags, made.changes):
            continue  # a flag of the plan requires the plan's own sizes
        if not any((made.layout, made.label) == (one.layout, one.label) for one in distinct):
            distinct.append(made)
    return tuple(distinct[:MOST_ROWS])


_VARIED = (*PARALLEL_FLAGS, EXPERTS, KV_DTYPE, QUANTIZATION)


def _others(
    inputs: ChoiceInputs, search: Search, pool: Pool, chosen: Option, formats: Flags, wanted: float
) -> Iterator[_Row]:
    """Other layouts: each kind on the same number of GPUs, then the best one on other numbers of GPUs."""
    facts = inputs.facts
    if facts is None:
        return
    totals = {1 << power for power in range(pool.size.bit_length())} | {pool.size, chosen.layout.total}
    layouts = [one for one in all_layouts(facts, pool.size, search.flags, inputs.release) if one.total in totals]
    options = [option for one in layouts if (option := _first_fitting(search, one, facts, formats)) is not None]
    alike = [one for one in options if one.layout.total == chosen.layout.total and one.layout != chosen.layout]
    for kind in sorted({_kind(one.layout) for one in alike}):
        if (found := best([one for one in alike if _kind(one.layout) == kind], wanted)) is not None:
            yield _Row(found, facts)
    for total in sorted(totals - {chosen.layout.total}):
        there = [one for one in options if one.layout.total == total and one.near]
        if (found := best(there, wanted)) is not None:
            yield _Row(found, facts)


def _first_fitting(search: Search, layout: Layout, facts: ModelFacts, formats: Flags) -> Option | None:
    """The layout with unchanged weights if they fit, else with online quantization."""
    own = {name: value for name, value in formats.items() if name != QUANTIZATION or facts.quantization is not None}
    for chosen in (own, formats):
        if (found := search.option(layout, chosen)).fits:
            return found
    return None


def _kind(layout: Layout) -> int:
    """Tensor, pipeline or data parallel only, or several of them, in the order in which they are offered."""
    sizes = (layout.tensor, layout.pipeline, layout.data)
    return sizes.index(layout.total) if layout.total in sizes else len(sizes)


def _formats(inputs: ChoiceInputs, search: Search, pool: Pool, flags: Flags, chosen: Option) -> Iterator[_Row]:
    """The same layout with another KV cache dtype, or with expert parallelism toggled, if there is a KV cache."""
    facts = inputs.facts
    if facts is None or chosen.budget is None or not chosen.budget.cached:
        return
    kept = {name: value for name, value in chosen.formats.items() if name != KV_DTYPE}
    tried: list[Flags] = []
    if is_fp8(flags.get(KV_DTYPE)):
        tried.append(kept)
    elif cache_verdict(inputs, flags, pool).works:
        tried.append({**kept, KV_DTYPE: "fp8"})
    ranks = chosen.layout.tensor * chosen.layout.data
    if is_mixture(facts) and ranks > 1:
        whole = chosen.formats.get(EXPERTS) is True
        if not whole or not expert_split_problem(facts, ranks):
            tried.append({**chosen.formats, EXPERTS: not whole})
    for formats in tried:
        if (option := search.option(chosen.layout, formats)).fits:
            yield _Row(option, facts)


def _siblings(
    inputs: ChoiceInputs, base: Flags, formats: Flags, pool: Pool, budget_of: BudgetOf, wanted: float
) -> Iterator[_Row]:
    """Quantized checkpoints, each with its own best layout."""
    if inputs.facts is None:
        return
    kept = {name: value for name, value in formats.items() if name == KV_DTYPE}
    for facts in sibling_facts(inputs.facts):
        search = Search(replace(inputs, facts=facts, budget=partial(budget_of, facts)), base, pool)
        every = all_layouts(facts, pool.size, base, inputs.release)
        layouts = [one for one in every if one.total & (one.total - 1) == 0]
        layouts = [one for one in layouts if pool.holds(one, together=is_mixture(facts))]
        options = [search.option(one, kept) for one in sorted(layouts, key=lambda one: (one.total, one.pipeline))]
        found = best(options if pool.exact else few(options, wanted), wanted)
        if found is not None:
            yield _Row(found, facts, sibling=True)


def _alternative(
    inputs: ChoiceInputs, flags: Flags, pool: Pool, row: _Row, chosen: Option, wanted: float, chosen_reason: str
) -> Alternative:
    option, budget = row.option, row.option.budget
    assert budget is not None  # rows are options that fit, plus the chosen one: all have a budget
    this = option is chosen
    copies = option.layout.data
    return Alternative(
        layout=option.layout,
        expert_parallel=option.formats.get(EXPERTS) is True,
        kv_cache_dtype=cache_dtype(row.facts, option.formats, inputs.release),
        quantization=str(method) if (method := option.formats.get(QUANTIZATION)) is not None else None,
        model=row.facts.model if row.sibling else None,
        weights_gib=budget.weights_gib,
        kv_gib=max(0.0, budget.kv_gib),
        kv_tokens=None if budget.kv_tokens is None else budget.kv_tokens * copies,
        concurrent_requests=option.held,
        fits=option.fits,
        serves=option.serves(wanted),
        paces=option.paces,
        tradeoff=_tradeoff(pool, row, chosen),
        reason=chosen_reason if this else _why_not(inputs, row, chosen, wanted),
        chosen=this,
        changes=Changes() if this else _changes(inputs, flags, row),
        near=option.near,
    )


def _changes(inputs: ChoiceInputs, flags: Flags, row: _Row) -> Changes:
    """The flags of a row: all of its sizes and formats, so that none of them is chosen automatically."""
    layout, formats = row.option.layout, row.option.formats
    wanted: dict[str, FlagValue | None] = {
        TENSOR: layout.tensor,
        PIPELINE: layout.pipeline if layout.pipeline > 1 else None,
        DATA: layout.data if layout.data > 1 else None,
        KV_DTYPE: formats.get(KV_DTYPE, "auto" if KV_DTYPE in flags else None),
        QUANTIZATION: formats.get(QUANTIZATION),
        EXPERTS: _experts(inputs, flags, row),
    }
    given = {name: value for name, value in wanted.items() if value is not None}
    return Changes(given, tuple(name for name, value in wanted.items() if value is None and name in flags))


def _experts(inputs: ChoiceInputs, flags: Flags, row: _Row) -> bool | None:
    """The value for ``enable-expert-parallel``; None if the layout implies it."""
    if row.option.formats.get(EXPERTS) is True:
        return True
    return False if whole_experts(row.facts, row.option.layout, flags, inputs.release) else None


def _tradeoff(pool: Pool, row: _Row, chosen: Option) -> str:
    option, layout = row.option, row.option.layout
    found: list[str] = []
    if row.sibling:
        found.append("another checkpoint: compare its outputs")
    if is_fp8(option.formats.get(KV_DTYPE)) and not is_fp8(chosen.formats.get(KV_DTYPE)):
        found.append("outputs can differ slightly")
    if layout.tensor > 1 and not option.near:
        found.append(f"two all-reduces per layer over {pool.far_link or 'unknown links'}")
    elif layout.tensor > 1:
        found.append(f"two all-reduces per layer over {pool.link}")
    if layout.pipeline > 1:
        found.append("a single stream gets no faster, and stages idle while few requests run")
    if layout.data > 1 and is_mixture(row.facts):
        found.append("each step waits for the GPU with the most work")
    elif layout.data > 1:
        found.append("each replica holds all weights and has its own prefix cache")
    if layout.total == 1:
        found.append("one GPU does all the work")
    text = "; ".join(found)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _why_not(inputs: ChoiceInputs, row: _Row, chosen: Option, wanted: float) -> str:
    """Why it was not chosen: the first reason that applies."""
    option = row.option
    if row.sibling or (is_fp8(option.formats.get(KV_DTYPE)) and not is_fp8(chosen.formats.get(KV_DTYPE))):
        return "Not chosen automatically."
    more = option.layout.total - chosen.layout.total
    if not option.serves(NEARLY * wanted) and chosen.serves(wanted):
        return f"Holds about {int(option.held or 0):,} of {counted(inputs.workload.concurrency, 'request')}."
    if more > 0:
        return f"Takes {counted(more, 'more GPU')} that others could use."
    if not option.near:
        return f"Not chosen automatically over shared, slow links{_against(option, chosen)}."
    if more == 0 and (slower := _slower(option, chosen)):
        return slower
    if (option.held or 0.0) < (chosen.held or 0.0):
        return f"Holds about {counted(int(option.held or 0), 'request')}; the chosen layout {int(chosen.held or 0):,}."
    return "No better for this traffic."


def _against(option: Option, chosen: Option) -> str:
    """The expected speed of both; empty if unknown."""
    one, other = option.throughput, chosen.throughput
    return f": about {one:,.0f} tokens/s; the chosen layout {other:,.0f}" if one and other else ""


def _slower(option: Option, chosen: Option) -> str:
    """A phrase for fewer tokens per second, or a slower single stream if these are similar."""
    one, other = option.paces, chosen.paces
    if one is None or other is None or one.full is None or other.full is None:
        return ""
    if one.full.tokens_per_second < MUCH_SLOWER * other.full.tokens_per_second:
        slow, fast = one.full.tokens_per_second, other.full.tokens_per_second
        return f"About {slow:,.0f} tokens/s; the chosen layout {fast:,.0f}."
    if one.one is not None and other.one is not None and one.one.tpot_seconds > other.one.tpot_seconds:
        each, plan = one.one.tpot_seconds * 1e3, other.one.tpot_seconds * 1e3
        return f"A single stream takes {each:.0f} ms per token, {plan:.0f} in the chosen layout."
    return ""


def thrift(alternatives: Sequence[Alternative]) -> Alternative | None:
    """An alternative on more GPUs that holds all traffic with unchanged weights; None if the plan itself does."""
    chosen = next((one for one in alternatives if one.chosen), None)
    if chosen is None or (chosen.serves and chosen.quantization is None):
        return None
    more = [
        one
        for one in alternatives
        if one.serves and one.near and one.layout.total > chosen.layout.total
        and one.model is None and one.quantization is None and one.kv_cache_dtype == chosen.kv_cache_dtype
    ]  # fmt: skip
    return min(more, key=lambda one: one.layout.total, default=None)
