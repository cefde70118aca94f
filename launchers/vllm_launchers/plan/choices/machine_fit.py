"""How a model is laid on the GPUs: over how many, and in which number formats. Pure.

The smallest number of GPUs that holds the weights and the traffic's KV cache wins; on it the checkpoint's own formats
before FP8. Pipeline stages only where the weights fit in no other way. Where nothing holds the traffic, what holds most
of it wins; where nothing holds the weights, the largest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from vllm_launchers.machine.modelfacts.model import ModelFacts
from vllm_launchers.plan.budget.estimate import estimate
from vllm_launchers.plan.budget.gpus import GpuShape
from vllm_launchers.plan.budget.model import MemoryBudget
from vllm_launchers.plan.checks.parallel import split_problem
from vllm_launchers.plan.choices.pool import Layout, Pool
from vllm_launchers.plan.choices.situation import (
    DATA,
    KV_DTYPE,
    PARALLEL_FLAGS,
    PIPELINE,
    QUANTIZATION,
    TENSOR,
    BudgetFor,
    Situation,
    whole,
)
from vllm_launchers.plan.model import Flags, FlagValue

LONG_AT_ONCE = 0.75
"""Of the requests in flight so many have p95 length at once, at most: the KV cache is made for these."""

UNASKED = 0.25
"""Of those so many must find room on GPUs that nobody named; more GPUs are taken only where a person gives them."""

HEAVY = 0.4
"""Weights that take more than this share of a GPU are better cut over two than held twice."""

FP8_KV_NATIVE, FP8_WEIGHTS, FP8_KV_AT_ALL = 9.0, 8.9, 8.0
"""Compute capabilities from which attention reads an FP8 cache as it is, weights multiply in FP8, and a cache in FP8 is
converted in each step instead."""

ONLINE_FP8_SINCE = (0, 15, 0)
"""Before it, vLLM loaded all 16-bit weights before it made them FP8, so that the peak did not shrink."""

SAVES = 0.95
"""A layout must hold so much less than another to lose to it although it takes fewer GPUs."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What was found. ``fits`` is whether weights and one request have room, ``serves`` whether the traffic has too.

    ``formats`` are the number formats that it takes, as flags. ``budget`` is one copy's. ``fixed`` is whether a
    person or preset set a size.
    """

    layout: Layout
    formats: Flags
    budget: MemoryBudget | None
    fits: bool
    serves: bool
    fixed: bool = False


def fit(situation: Situation, flags: Flags, pool: Pool, settled: Collection[str]) -> Fit | None:
    """The layout and formats for what else is set; None where too little is known of model or GPU.

    ``settled`` names the flags that are decided, by ``flags`` or by being left out.
    """
    ask = budget_for(situation, pool)
    alone = ask(flags) if ask is not None else None
    if ask is None or alone is None:
        return None
    fixed = any(name in settled for name in PARALLEL_FLAGS)
    layouts = _fixed(flags) if fixed else list(_layouts(situation, pool, alone.weights_gib))
    kv_open = KV_DTYPE not in settled
    for weights in ({}, *_online_fp8(situation, pool, settled)):
        # The checkpoint's own formats, and FP8 where the GPU reads it as it is; then FP8 where it is converted.
        native: list[Flags] = [
            weights,
            *([{**weights, KV_DTYPE: "fp8"}] if kv_open and _native(situation, pool) else []),
        ]
        slow: list[Flags] = [{**weights, KV_DTYPE: "fp8"}] if kv_open and _converted(situation, pool) else []
        search = _Search(situation, flags, ask, layouts, fixed)
        search.keep_shallow([*native, *slow])
        if not pool.exact and not fixed:
            search.keep_few([*native, *slow])
        if found := search.serving(native) or search.serving(slow) or search.fullest([*native, *slow]):
            return found
    largest = max(layouts, key=lambda layout: (layout.replica, layout.tensor), default=Layout())
    largest = largest if fixed or pool.exact else Layout(largest.tensor, largest.pipeline)
    return Fit(largest, {}, ask({**flags, **sizes(largest)}), fits=False, serves=False, fixed=fixed)


def sizes(layout: Layout) -> dict[str, FlagValue]:
    """A layout as flags; sizes of 1 are vLLM's defaults and left out."""
    named = ((TENSOR, layout.tensor), (PIPELINE, layout.pipeline), (DATA, layout.data))
    return {name: size for name, size in named if size > 1}


class _Search:
    """Tries layouts in formats, and asks for each budget once."""

    def __init__(
        self, situation: Situation, flags: Flags, ask: BudgetFor, layouts: Sequence[Layout], fixed: bool
    ) -> None:
        self.wanted = LONG_AT_ONCE * situation.workload.concurrency
        self.flags = flags
        self.ask = ask
        self.layouts = layouts
        self.fixed = fixed
        self.mixture = is_mixture(situation.facts)
        self._budgets: dict[tuple[Layout, str], MemoryBudget | None] = {}

    def keep_shallow(self, formats: Sequence[Flags]) -> None:
        """Leave out layouts with more stages than the weights ask for: traffic is served by cuts and copies instead."""
        for depth in sorted({layout.pipeline for layout in self.layouts}):
            layouts = [layout for layout in self.layouts if layout.pipeline == depth]
            if any(self._try(layout, chosen).fits for layout in layouts for chosen in formats):
                self.layouts = layouts
                return

    def keep_few(self, formats: Sequence[Flags]) -> None:
        """Take no more GPUs than a good part of the traffic asks for: others want some too, and waiting is no harm."""
        for total in sorted({layout.total for layout in self.layouts}):
            layouts = [layout for layout in self.layouts if layout.total == total]
            tried = [self._try(layout, chosen) for layout in layouts for chosen in formats]
            if any(found.serves or (found.fits and _held(found) >= UNASKED * self.wanted) for found in tried):
                self.layouts = layouts
                return

    def serving(self, formats: Sequence[Flags]) -> Fit | None:
        """The first layout that holds the traffic, in the first of the formats that makes it so."""
        tries = ((layout, chosen) for layout in self.layouts for chosen in formats)
        found = (self._try(layout, chosen) for layout, chosen in tries)
        return next((fit for fit in found if fit.serves), None)

    def fullest(self, formats: Sequence[Flags]) -> Fit | None:
        """The layout that holds most of the traffic, though not all; of nearly equal ones the first."""
        best: Fit | None = None
        for layout in self.layouts:
            for chosen in formats:
                found = self._try(layout, chosen)
                if found.fits and (best is None or _held(best) < SAVES * _held(found)):
                    best = found
        return best

    def _try(self, layout: Layout, formats: Flags) -> Fit:
        # Copies of a dense model are alike and independent; those of a mixture share its experts.
        asked = layout if self.mixture else Layout(layout.tensor, layout.pipeline)
        key = asked, str(formats)
        if key not in self._budgets:
            self._budgets[key] = self.ask({**self.flags, **formats, **sizes(asked)})
        budget = self._budgets[key]
        fits = budget is not None and budget.fits
        held = held_at_p95(budget)
        serves = fits and (held is None or held * layout.data >= self.wanted)
        return Fit(layout, formats, budget, fits, serves, self.fixed)


def held_at_p95(budget: MemoryBudget | None) -> float | None:
    """Requests of p95 length that one copy's KV cache holds; None where that is not known, or none has room.

    A request is never longer than ``max-model-len``, so that those of full length count where the p95 is longer.
    """
    if budget is None or not budget.fits:
        return None
    known = [held for held in (budget.concurrency_p95, budget.max_concurrency) if held is not None]
    return max(known, default=None) if budget.concurrency_p95 is not None else None


def _held(fit: Fit) -> float:
    return (held_at_p95(fit.budget) or 0.0) * fit.layout.data


def budget_for(situation: Situation, pool: Pool) -> BudgetFor | None:
    """The budget that was given, else an estimate for GPUs of this kind; None where too little is known."""
    facts = situation.facts
    if situation.budget is not None:
        return situation.budget
    if facts is None or pool.memory_gib is None:
        return None
    gpu = GpuShape(pool.name, pool.memory_gib)

    def budget(flags: Flags, /) -> MemoryBudget | None:
        return estimate(
            facts, flags, [gpu], release=situation.release, workload=situation.workload, build=situation.build
        )

    return budget


def is_mixture(facts: ModelFacts | None) -> bool:
    """Whether the model is a mixture of experts."""
    return facts is not None and facts.experts is not None and facts.experts > 1


def _fixed(flags: Flags) -> list[Layout]:
    return [Layout(whole(flags, TENSOR), whole(flags, PIPELINE), whole(flags, DATA))]


def _layouts(situation: Situation, pool: Pool, weights_gib: float) -> Iterator[Layout]:
    """Every layout that the model and the GPUs allow, the one to prefer first.

    Fewer GPUs first; among equal ones stages last, since they do not make one stream faster. Cut layers before copies
    where the weights are heavy: a second copy would spend on weights what the KV cache needs.
    """
    facts = situation.facts
    heavy = pool.memory_gib is not None and weights_gib > HEAVY * pool.memory_gib
    most = pool.size
    deepest = min(most, len(facts.layers) if facts is not None and facts.layers else most)
    found = [
        layout
        for tensor in range(1, most + 1)
        if facts is None or not split_problem(facts, tensor)
        for pipeline in range(1, deepest + 1)
        for data in range(1, most // (tensor * pipeline) + 1)
        if pool.holds(layout := Layout(tensor, pipeline, data), together=is_mixture(facts))
    ]
    yield from sorted(found, key=lambda one: (one.total, one.pipeline, -one.tensor if heavy else -one.data))


def _online_fp8(situation: Situation, pool: Pool, settled: Collection[str]) -> list[dict[str, FlagValue]]:
    """FP8 made of 16-bit weights at the start, where the GPU multiplies in FP8 and the checkpoint is not quantized."""
    facts, release = situation.facts, situation.release
    possible = (
        QUANTIZATION not in settled
        and facts is not None
        and facts.quantization is None
        and facts.dtype in ("bfloat16", "float16")
        and (pool.capability or 0.0) >= FP8_WEIGHTS
        and (release is None or release >= ONLINE_FP8_SINCE)
    )
    return [{QUANTIZATION: "fp8"}] if possible else []


def _native(situation: Situation, pool: Pool) -> bool:
    return (pool.capability or 0.0) >= FP8_KV_NATIVE and situation.facts is not None


def _converted(situation: Situation, pool: Pool) -> bool:
    # MLA's kernels for an FP8 cache begin with Hopper.
    mla = situation.facts is not None and situation.facts.mla
    return FP8_KV_AT_ALL <= (pool.capability or 0.0) < FP8_KV_NATIVE and not mla
