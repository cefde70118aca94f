"""How a model is laid out: over how many GPUs, and with which parallelism. Pure.

Layouts are compared by how much of the traffic they hold and how fast they would serve it. No more GPUs are used than a
good part of the traffic needs. Among those layouts, one that holds all of it wins over one that does not, then the one
with the most tokens per second, and of those within a tenth the one with the fastest single stream. If speed is
unknown, layouts are tried in the order of `_order`. Number formats are the checkpoint's own: weights are converted to
FP8 at load time only if they do not fit otherwise, and an FP8 KV cache must be requested by a user or preset.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from vllm_launchers.plan.attention import Fp8Cache, fp8_cache_support, is_fp8
from vllm_launchers.plan.budget.budget import MemoryBudget
from vllm_launchers.plan.choices.choice import PARALLEL_FLAGS, Choice, ChoiceInputs, Source
from vllm_launchers.plan.choices.pool import Layout, Pool
from vllm_launchers.plan.flags import (
    BLOCKS,
    BYTES,
    DATA,
    DECODE_CONTEXT,
    EXPERTS,
    KV_DTYPE,
    LORA,
    PIPELINE,
    QUANTIZATION,
    TENSOR,
)
from vllm_launchers.plan.model_conditions import adapter_problem
from vllm_launchers.plan.pace import Paces, timing_of
from vllm_launchers.units import counted
from vllm_launchers.vllm.flags.changes import Flags, FlagValue, whole_number
from vllm_launchers.vllm.modelfacts.facts import ModelFacts, expert_split_problem, split_problem
from vllm_launchers.vllm.release_defaults import ONLINE_FP8_SINCE, Release, online_fp8

LONG_AT_ONCE = 0.75
"""At most this share of the requests in flight have p95 length at once; the KV cache is sized for these."""

UNASKED = 0.25
"""The share of those that must fit on automatically chosen GPUs. More GPUs are used only if a user gives them."""

HEAVY = 0.4
"""Weights above this share of a GPU's memory are better split over two GPUs than duplicated."""

FP8_WEIGHTS = 8.9
"""Lowest compute capability that multiplies weights in FP8."""

CLOSE = 0.9
"""Layouts with at least this share of the highest throughput count as equally fast, and latency decides."""

NEARLY = 0.9
"""If a layout holds all that the KV cache is sized for, layouts that hold at least this share of it compete with it."""

SAVES = 0.95
"""If speed is unknown, a layout loses to a later one only if it holds less than this share of what that one holds."""

THIN = 256
"""Experts with fewer columns than this per GPU are kept whole, because narrow products leave a GPU idle."""

KEPT_WHOLE = ("bitsandbytes", "gguf")
"""Quantization methods whose experts vLLM does not distribute."""


class Option(msgspec.Struct, frozen=True):
    """One way to lay out the model. ``formats`` are number formats and the distribution of experts, as flags.

    ``budget`` is for one copy, ``paces`` for all copies together; None if too little is known. ``near``: GPUs that
    exchange data at every layer are connected by NVLink or one PCIe switch.
    """

    layout: Layout
    formats: Flags
    budget: MemoryBudget | None
    paces: Paces | None
    near: bool = True

    @property
    def fits(self) -> bool:
        """Whether weights and one request fit."""
        return self.budget is not None and self.budget.fits

    @property
    def held(self) -> float | None:
        """Requests of p95 length that all copies together hold; None if unknown."""
        each = held_at_p95(self.budget)
        return None if each is None else each * self.layout.data

    def serves(self, wanted: float) -> bool:
        """Whether it holds this many requests; assumed if unknown."""
        return self.fits and (self.held is None or self.held >= wanted)

    @property
    def throughput(self) -> float:
        """Tokens per second with all requests at once; 0 if unknown."""
        return self.paces.throughput if self.paces is not None else 0.0

    @property
    def flags(self) -> dict[str, FlagValue]:
        """Sizes and formats as flags."""
        return {**self.formats, **sizes(self.layout)}


class LayoutFit(msgspec.Struct, frozen=True):
    """The search result. ``fits``: weights and one request fit. ``serves``: the traffic fits too.

    ``formats`` are its number formats, as flags. ``budget`` is for one copy. ``fixed``: a user or preset set a size.
    ``single`` is one GPU alone; ``rival`` is the best other layout on the same number of GPUs.
    """

    layout: Layout
    formats: Flags
    budget: MemoryBudget | None
    fits: bool
    serves: bool
    fixed: bool = False
    chosen: Option | None = None
    single: Option | None = None
    rival: Option | None = None


def fit_layout(inputs: ChoiceInputs, flags: Flags, pool: Pool, settled: Collection[str]) -> LayoutFit | None:
    """Find the layout and formats for the other flags; None if too little is known about model or GPU.

    ``settled`` names the flags that are already decided: set in ``flags``, or unset.
    """
    alone = inputs.budget(flags)
    if alone is None:
        return None
    if (unlimited := _fit_unlimited(inputs, flags, pool, settled)) is not None:
        return unlimited
    fixed = any(name in settled for name in PARALLEL_FLAGS)
    layouts = list(_layouts(inputs, flags, pool, alone.weights_gib))
    if fixed:
        layouts = _set_over_nodes(inputs, fixed_layout(flags), pool, settled)
    wanted = LONG_AT_ONCE * inputs.workload.concurrency
    for weights in ({}, *_online_fp8(inputs, flags, pool, settled)):
        search = Search(inputs, flags, pool, settled)
        tried = [search.option(layout, weights) for layout in layouts]
        options = tried if pool.exact or fixed else few(tried, wanted)
        chosen = best(options, wanted)
        if chosen is not None:
            single = search.option(Layout(), weights)
            rival = best([one for one in options if one.layout != chosen.layout], wanted)
            return LayoutFit(
                chosen.layout, chosen.formats, chosen.budget, fits=True, serves=chosen.serves(wanted), fixed=fixed,
                chosen=chosen, single=single, rival=rival,
            )  # fmt: skip
    if whole_number(flags, BYTES, 0):  # on any layout: the fault of this size, not of too few GPUs
        others = {name: value for name, value in flags.items() if name != BYTES}
        fit = fit_layout(inputs, others, pool, settled)
        if fit is not None and fit.fits:
            option = Search(inputs, flags, pool, settled).option(fit.layout, fit.formats)
            return replace(fit, budget=option.budget, serves=False, chosen=option, rival=None)
    largest = max(layouts, key=lambda layout: (layout.replica, layout.tensor), default=Layout())
    largest = largest if fixed or pool.exact else Layout(largest.tensor, largest.pipeline)
    found = Search(inputs, flags, pool, settled).option(largest, {})
    return LayoutFit(largest, found.formats, found.budget, fits=False, serves=False, fixed=fixed)


def _fit_unlimited(inputs: ChoiceInputs, flags: Flags, pool: Pool, settled: Collection[str]) -> LayoutFit | None:
    """The layout for as many blocks as fit, if fewer are set: on more GPUs, these would hold no more tokens."""
    if not whole_number(flags, BLOCKS, 0):
        return None
    found = fit_layout(inputs, {name: value for name, value in flags.items() if name != BLOCKS}, pool, settled)
    if found is None or not found.fits or found.budget is None:
        return None
    option = Search(inputs, flags, pool, settled).option(found.layout, found.formats)
    if option.budget is None or option.budget.kv_gib > found.budget.kv_gib:
        return None
    serves = option.serves(LONG_AT_ONCE * inputs.workload.concurrency)
    return replace(found, budget=option.budget, serves=serves, chosen=option, rival=None)


def sizes(layout: Layout) -> dict[str, FlagValue]:
    """A layout as flags; sizes of 1 are vLLM's defaults and omitted."""
    named = ((TENSOR, layout.tensor), (PIPELINE, layout.pipeline), (DATA, layout.data))
    return {name: size for name, size in named if size > 1}


class Search:
    """Evaluates layouts and formats; computes each budget only once."""

    def __init__(self, inputs: ChoiceInputs, flags: Flags, pool: Pool, settled: Collection[str] = ()) -> None:
        self.inputs = inputs
        self.flags = {name: value for name, value in flags.items() if name not in PARALLEL_FLAGS}
        self.pool = pool
        self.experts_settled = EXPERTS in settled
        self._budgets: dict[tuple[Layout, str], MemoryBudget | None] = {}

    def option(self, layout: Layout, formats: Flags) -> Option:
        """Evaluate a layout, with experts distributed as vLLM allows."""
        facts, pool = self.inputs.facts, self.pool
        open_ = not self.experts_settled and EXPERTS not in formats
        if open_ and whole_experts(facts, layout, self.flags, self.inputs.release):
            formats = {**formats, EXPERTS: True}
        budget = self._budget(layout, formats)
        width = layout.tensor * layout.data if is_mixture(facts) else layout.tensor
        near = width == 1 or pool.holds(layout, together=is_mixture(facts)) or any(len(g) >= width for g in pool.groups)
        return Option(layout, formats, budget, self._paces(layout, formats, budget), near)

    def _budget(self, layout: Layout, formats: Flags) -> MemoryBudget | None:
        # Copies of a dense model are equal and independent; those of a mixture share its experts.
        asked = layout if is_mixture(self.inputs.facts) else Layout(layout.tensor, layout.pipeline)
        key = asked, str(sorted(formats.items()))
        if key not in self._budgets:
            self._budgets[key] = self.inputs.budget({**self.flags, **formats, **sizes(asked)})
        return self._budgets[key]

    def _paces(self, layout: Layout, formats: Flags, budget: MemoryBudget | None) -> Paces | None:
        inputs, pool = self.inputs, self.pool
        if inputs.facts is None or budget is None or not budget.fits:
            return None
        width = layout.tensor * layout.data if is_mixture(inputs.facts) else layout.tensor
        timing = timing_of(
            inputs.facts,
            {**self.flags, **formats, **sizes(layout)},
            budget,
            pool.name,
            inputs.release,
            tensor_link=pool.joining(width),
            stage_link=pool.joining(layout.replica) if inputs.nodes == 1 else inputs.network,
        )
        if timing is None:
            return None
        held = held_at_p95(budget)
        return timing.paces(inputs.workload, None if held is None else held * layout.data)


def few(options: Sequence[Option], wanted: float) -> Sequence[Option]:
    """Keep layouts on no more GPUs than a good part of the traffic needs: others need GPUs, and queueing is fine."""
    for total in sorted({one.layout.total for one in options}):
        alike = [one for one in options if one.layout.total == total]
        if any(one.fits and (one.held is None or one.held >= UNASKED * wanted) for one in alike):
            return alike
    return options


def best(options: Sequence[Option], wanted: float) -> Option | None:
    """The best of these options, given in order of preference; None if none fits."""
    fitting = [one for one in options if one.fits]
    good = (
        [one for one in fitting if one.serves(NEARLY * wanted)] if any(o.serves(wanted) for o in fitting) else fitting
    )
    if not good:
        return None
    if all(one.paces is not None and one.paces.full is not None for one in good):
        most = max(one.throughput for one in good)
        return min((one for one in good if one.throughput >= CLOSE * most), key=_single_stream)
    if serving := [one for one in good if one.serves(wanted)]:
        return serving[0]
    found = good[0]
    for one in good[1:]:
        if (found.held or 0.0) < SAVES * (one.held or 0.0):
            found = one
    return found


def _single_stream(option: Option) -> float:
    one = option.paces.one if option.paces is not None else None
    # Rounded to a tenth of a millisecond, so that equal layouts keep their order.
    return round(one.tpot_seconds, 4) if one is not None else float("inf")


def held_at_p95(budget: MemoryBudget | None) -> float | None:
    """Requests of p95 length that one copy's KV cache holds; None if unknown or if none fits.

    No request is longer than ``max-model-len``, so that length counts if the p95 is longer.
    """
    if budget is None or not budget.fits:
        return None
    known = [held for held in (budget.concurrency_p95, budget.max_concurrency) if held is not None]
    return max(known, default=None) if budget.concurrency_p95 is not None else None


def is_mixture(facts: ModelFacts | None) -> bool:
    """Whether the model is a mixture of experts."""
    return facts is not None and facts.experts is not None and facts.experts > 1


def whole_experts(facts: ModelFacts | None, layout: Layout, flags: Flags, release: Release | None) -> bool:
    """Whether experts are better kept whole, and vLLM allows it with the other flags.

    That is if attention is replicated, or if splitting them is impossible or too fine.
    """
    ranks = layout.tensor * layout.data
    if facts is None or not is_mixture(facts) or ranks == 1:
        return False
    if adapter_problem(facts, flags, release, tensor=layout.tensor, data=layout.data):
        return False
    if facts.quantization is not None and facts.quantization.method in KEPT_WHOLE:
        return False
    width = facts.expert_intermediate_size or facts.intermediate_size
    thin = width is not None and width // ranks < THIN
    return layout.data > 1 or thin or bool(expert_split_problem(facts, ranks))


def fixed_layout(flags: Flags) -> Layout:
    """The layout that is set, or one GPU."""
    return Layout(whole_number(flags, TENSOR), whole_number(flags, PIPELINE), whole_number(flags, DATA))


def _layouts(inputs: ChoiceInputs, flags: Flags, pool: Pool, weights_gib: float) -> Iterator[Layout]:
    """Every layout that the model and the GPUs allow, in order of preference: fewer GPUs first.

    Uses one GPU, a power of two, or all. If the KV cache is to be split over several GPUs, layers are split over a
    multiple of that, even over slow links if necessary.
    """
    facts = inputs.facts
    heavy = pool.memory_gib is not None and weights_gib > HEAVY * pool.memory_gib
    every = all_layouts(facts, pool.size, flags, inputs.release)
    even = [one for one in every if _even(one.total) or one.total == pool.size]
    near = [one for one in even if pool.holds(one, together=is_mixture(facts))]
    shards = whole_number(flags, DECODE_CONTEXT)
    sharded = ([one for one in some if one.tensor % shards == 0] for some in (near, even))
    found = next(filter(None, sharded), near)
    if inputs.nodes > 1:
        found = list(_over_nodes(facts, found, inputs.nodes))
    yield from sorted(found, key=_order(heavy))


def _over_nodes(facts: ModelFacts | None, found: Sequence[Layout], nodes: int) -> Iterator[Layout]:
    """Spread one copy over several machines; each has as many pipeline stages as one of these layouts."""
    for one in found:
        stages = one.pipeline * nodes
        if one.data == 1 and (facts is None or not facts.layers or stages <= len(facts.layers)):
            yield Layout(one.tensor, stages)


def _set_over_nodes(inputs: ChoiceInputs, layout: Layout, pool: Pool, settled: Collection[str]) -> list[Layout]:
    """The layout that is set. A tensor-parallel size alone applies to each machine, if one holds it."""
    if inputs.nodes > 1 and PIPELINE not in settled and layout.tensor <= pool.size:
        return [Layout(layout.tensor, inputs.nodes, layout.data)]
    return [layout]


def _order(heavy: bool) -> Callable[[Layout], tuple[int, int, int]]:
    """Fewer GPUs first; among equal ones pipeline stages last, since they do not speed up a single stream.

    With heavy weights, split layers come before copies: a second copy would take memory that the KV cache needs.
    """
    return lambda one: (one.total, one.pipeline, -one.tensor if heavy else -one.data)


def _even(total: int) -> bool:
    return total & (total - 1) == 0


def all_layouts(facts: ModelFacts | None, most: int, flags: Flags, release: Release | None) -> Iterator[Layout]:
    """Every layout over at most this many GPUs that vLLM accepts for the model with the other flags."""
    deepest = min(most, len(facts.layers) if facts is not None and facts.layers else most)
    for tensor in range(1, most + 1):
        if facts is not None and split_problem(facts, tensor):
            continue
        for pipeline in range(1, deepest + 1):
            for data in range(1, most // (tensor * pipeline) + 1):
                layout = Layout(tensor, pipeline, data)
                if _experts_allow(facts, layout, flags, release):
                    yield layout


def _experts_allow(facts: ModelFacts | None, layout: Layout, flags: Flags, release: Release | None) -> bool:
    """Whether experts divide evenly over the GPUs, and copies that share them have no pipeline stages."""
    if facts is None or not is_mixture(facts):
        return True
    if layout.data > 1 and layout.pipeline > 1:
        return False
    ranks = layout.tensor * layout.data
    if not whole_experts(facts, layout, flags, release):
        return not expert_split_problem(facts, ranks)
    return (facts.experts or 1) % ranks == 0


def _online_fp8(inputs: ChoiceInputs, flags: Flags, pool: Pool, settled: Collection[str]) -> list[dict[str, FlagValue]]:
    """Convert 16-bit weights to FP8 at load time, if the GPU multiplies in FP8 and the checkpoint is not quantized."""
    facts, release = inputs.facts, inputs.release
    possible = (
        QUANTIZATION not in settled
        and facts is not None
        and facts.quantization is None
        and facts.dtype in ("bfloat16", "float16")
        and flags.get("dtype") not in ("float32", "float")
        and (pool.capability or 0.0) >= FP8_WEIGHTS
        and (release is None or release >= ONLINE_FP8_SINCE)
    )
    return [{QUANTIZATION: online_fp8(release)}] if possible else []


# -- the choices of layout and number formats, with reasons and trade-offs. Pure --------------------------------------


def layout_choices(inputs: ChoiceInputs, found: LayoutFit, pool: Pool) -> Iterator[Choice]:
    """Tensor, pipeline and data parallelism, as found."""
    layout = found.layout
    why = _why_more(inputs, found, pool)
    speed = _against_rival(found)
    if layout.tensor > 1:
        heads = inputs.facts.heads if inputs.facts is not None else None
        each = f" ({heads // layout.tensor} of {heads} heads each)" if heads else ""
        reason = f"{why}: {layout.tensor} GPUs, connected by {_joined(pool, found)}, share each layer{each}.{speed}"
        yield Choice(
            TENSOR, layout.tensor, reason if found.fits else why, Source.MACHINE, _tensor_tradeoff(pool, found)
        )
    else:
        yield Choice(TENSOR, None, _why_not_cut(inputs, found, pool, why), Source.MACHINE)
    if layout.pipeline > 1:
        near = "" if layout.tensor > 1 else f" {_no_cut(inputs, found, pool)}"
        reason = f"{why}.{near} {layout.pipeline} pipeline stages.{speed}"
        tradeoff = "A single stream gets no faster, and stages idle while few requests run."
        yield Choice(PIPELINE, layout.pipeline, reason if found.fits else why, Source.MACHINE, tradeoff)
    if layout.data > 1:
        yield _copies(inputs, found, pool)


def _why_more(inputs: ChoiceInputs, found: LayoutFit, pool: Pool) -> str:
    layout = found.layout
    size = "" if pool.memory_gib is None else f" of {pool.memory_gib:.0f} GiB"
    if not found.fits:
        free = "free GPUs" if pool.all_free and not pool.exact else "GPUs"
        short = f"Even {layout.replica} {free} have" if layout.replica > 1 else f"One GPU{size} has"
        return f"{short} no room for the weights and one request of full length: closest fit."
    if pool.exact:
        return f"All of its {counted(pool.size, 'GPU')} {'is' if pool.size == 1 else 'are'} used"
    single = found.single
    if single is not None and single.fits:
        held = single.held
        number = f"about {int(held):,}" if held is not None else "only some"
        return f"One GPU{size} holds {number} of {counted(inputs.workload.concurrency, 'request')}"
    return f"Weights and KV cache need more than one GPU{size}"


def _why_not_cut(inputs: ChoiceInputs, found: LayoutFit, pool: Pool, why: str) -> str:
    if not found.fits:
        return why
    layout = found.layout
    if layout.total == 1:
        held = found.chosen.held if found.chosen is not None else None
        flight = inputs.workload.concurrency
        room = ""
        if held is not None:
            share = f"about {int(held):,} of" if held < flight else "all" if flight > 1 else "the"
            room = f", with KV cache for {share} {counted(flight, 'request')}"
        return f"The model fits on one GPU{room}{': the rest stay free' if pool.size > 1 else ''}."
    if layout.data > 1 and is_mixture(inputs.facts):
        return (
            f"Attention is small compared with the experts: each of {layout.data} GPUs holds all of it and its "
            "own KV cache."
        )
    if layout.replica == 1:
        return f"A replica of the model fits on one GPU.{_against_rival(found)}"
    return _no_cut(inputs, found, pool)


def _no_cut(inputs: ChoiceInputs, found: LayoutFit, pool: Pool) -> str:
    near = max((len(group) for group in pool.groups), default=1)
    if near > 1 and near < pool.size:
        return f"Only {near} of them are close ({pool.link})."
    if near == 1 and pool.size > 1:
        return "No two of these GPUs are connected by NVLink or one PCIe switch."
    if found.rival is not None and found.rival.layout.tensor > 1:
        return f"Tensor parallelism would exchange data over {pool.link} at each layer."
    heads = inputs.facts.heads if inputs.facts is not None else None
    return f"{heads} heads can't be split over these GPUs." if heads else "The layers can't be split."


def _joined(pool: Pool, found: LayoutFit) -> str:
    near = any(len(group) >= found.layout.tensor for group in pool.groups)
    return pool.link if near else pool.far_link or "unknown links"


def _tensor_tradeoff(pool: Pool, found: LayoutFit) -> str:
    link = _joined(pool, found)
    if link == "NVLink":
        return "Two short all-reduces in every layer."
    return f"Two all-reduces in every layer over {link} cost some speed."


def _against_rival(found: LayoutFit) -> str:
    """Estimated speed of the layout, and of the next best one on the same number of GPUs; empty if unknown."""
    one, other = _speed(found.chosen), _speed(found.rival)
    if not one:
        return ""
    rival = f"; {format_layout(found.rival.layout)} {other}" if found.rival is not None and other else ""
    return f" Estimated: {one}{rival}."


def _speed(option: Option | None) -> str:
    full = option.paces.full if option is not None and option.paces is not None else None
    if full is None:
        return ""
    return f"{full.tokens_per_second:,.0f} tokens/s with {counted(full.concurrency, 'request')}"


def format_layout(layout: Layout) -> str:
    """A layout in short form: ``TP 2``, ``TP 2 × PP 2``, ``one GPU``."""
    parts = (("TP", layout.tensor), ("PP", layout.pipeline), ("DP", layout.data))
    return " × ".join(f"{name} {size}" for name, size in parts if size > 1) or "one GPU"


def _copies(inputs: ChoiceInputs, found: LayoutFit, pool: Pool) -> Choice:
    layout = found.layout
    held = held_at_p95(found.budget)
    one = "one GPU" if layout.replica == 1 else f"{layout.replica} GPUs"
    number = f"about {counted(int(held), 'request')}" if held is not None else "few requests"
    concurrency = inputs.workload.concurrency
    flight = f"{concurrency:,} {'is' if concurrency == 1 else 'are'} in flight"
    if is_mixture(inputs.facts):
        reason = (
            f"{_why_more(inputs, found, pool)}: the experts are spread over {layout.total}, and each KV cache "
            f"holds {number} of p95 length of the {concurrency:,} in flight.{_against_rival(found)}"
        )
        tradeoff = "Each step waits for the slowest GPU; each has its own prefix cache."
    else:
        reason = f"A replica on {one} holds {number} of p95 length and {flight}: {layout.data} replicas."
        if pool.exact:
            reason = f"All of its {pool.size} GPUs are used, and a replica needs {one}: {layout.data} replicas."
        tradeoff = "Each replica holds all weights and has its own prefix cache."
    if not found.serves:
        tradeoff = f"{tradeoff} Some requests will still queue."
    return Choice(DATA, layout.data, reason, Source.MACHINE, tradeoff)


def expert_choice(inputs: ChoiceInputs, flags: Flags) -> Choice | None:
    """Expert parallelism for a mixture of experts over several GPUs; None if it does not apply."""
    facts = inputs.facts
    layout = fixed_layout(flags)
    spread = layout.tensor * layout.data
    if facts is None or not is_mixture(facts) or spread == 1:
        return None
    if facts.quantization is not None and facts.quantization.method in KEPT_WHOLE:
        return None
    width = facts.expert_intermediate_size or facts.intermediate_size
    if not whole_experts(facts, layout, flags, inputs.release):
        columns = f"{width // spread:,} of {width:,} columns" if width else "a part"
        reason = f"Each GPU holds {columns} of every expert, so the load is even."
        if problem := adapter_problem(facts, flags, inputs.release, tensor=layout.tensor, data=layout.data):
            reason = f"{reason} vLLM can't keep experts whole with --{LORA} {problem}."
        return Choice(EXPERTS, None, reason, Source.MODEL)
    each = -(-(facts.experts or 1) // spread)
    reason = f"{facts.experts} experts are spread whole over {spread} GPUs, {each} on each"
    if layout.data == 1 and width and width % spread == 0 and width // spread < THIN:
        reason = (
            f"{reason}: sharded over {spread}, each would have {width // spread} columns, too few to use a GPU "
            "efficiently"
        )
    tradeoff = "The GPU with the busiest experts makes the others wait."
    return Choice(EXPERTS, True, f"{reason}.", Source.MODEL, tradeoff)


def quantization_choice(
    inputs: ChoiceInputs, found: LayoutFit | None, pool: Pool | None, flags: Flags
) -> Choice | None:
    """Keep the checkpoint's own format; convert to FP8 at load time only if nothing else fits."""
    facts = inputs.facts
    if found is not None and (online := found.formats.get(QUANTIZATION)) is not None:
        return Choice(
            QUANTIZATION,
            online,
            "The 16-bit weights do not fit otherwise: converting them to FP8 while loading halves their size.",
            Source.MACHINE,
            "Slightly lower quality and a slower start; an FP8 or 4-bit checkpoint loads sooner.",
        )
    if facts is None or (facts.quantization is None and facts.dtype is None):
        return None
    if facts.quantization is None:
        small = pool is None or found is None or _fits_in_fp8(inputs, found, pool, flags)
        return Choice(QUANTIZATION, None, _plain(facts, pool if small else None), Source.MODEL)
    quantization = facts.quantization
    name = quantization.method.upper() if len(quantization.method) <= 5 else quantization.method
    bits = f", {quantization.bits}-bit" if quantization.bits and "8" not in name and "4" not in name else ""
    reason = f"The checkpoint is {name}{bits}: vLLM detects it and picks the fastest kernel."
    return Choice(QUANTIZATION, None, reason, Source.MODEL)


def _fits_in_fp8(inputs: ChoiceInputs, found: LayoutFit, pool: Pool, flags: Flags) -> bool:
    """Whether a checkpoint with FP8 weights would fit in the layout; True if unknown."""
    if found.fits:
        return True
    budget = Search(inputs, flags, pool).option(found.layout, {**found.formats, QUANTIZATION: online_fp8()}).budget
    return budget is None or budget.fits


def _plain(facts: ModelFacts, pool: Pool | None) -> str:
    text = f"The checkpoint is {facts.dtype} and not quantized: an AWQ or GPTQ flag would fail startup."
    if pool is not None and pool.memory_gib is not None and (pool.capability or 0.0) >= FP8_WEIGHTS:
        return f"{text} An FP8 checkpoint of it would be faster here."
    return text


def kv_choice(inputs: ChoiceInputs, found: LayoutFit, pool: Pool, flags: Flags) -> Choice | None:
    """Keep the KV cache in the model's own format, and mention the effect of FP8. None if it does not apply."""
    held = found.chosen.held if found.chosen is not None else held_at_p95(found.budget)
    if held is None:
        return None
    if found.serves:
        reason = (
            f"In the model's own format, the cache holds about {counted(int(held), 'request')} of p95 length. That is "
            "enough, so FP8 is not needed."
        )
        return Choice(KV_DTYPE, None, reason, Source.MACHINE)
    verdict = cache_verdict(inputs, flags, pool)
    where = f"here ({verdict.why})" if verdict.anywhere else "on this GPU"
    reason = f"The cache holds about {int(held):,} of {counted(inputs.workload.concurrency, 'request')} of p95 length."
    if verdict.works is False:
        reason = f"{reason} FP8 would hold twice as many, but vLLM can refuse an FP8 cache {where}."
    elif verdict.works:
        reason = (
            f"{reason} FP8 would hold about twice as many, but outputs can differ slightly, so that is your choice."
        )
    return Choice(KV_DTYPE, None, reason, Source.MACHINE)


def cache_verdict(inputs: ChoiceInputs, flags: Flags, pool: Pool | None) -> Fp8Cache:
    """Whether vLLM can keep the KV cache in FP8 on these GPUs."""
    mla = inputs.facts is not None and inputs.facts.mla
    able = pool.capability if pool is not None else None
    return fp8_cache_support(flags, inputs.environment, inputs.release, able, mla=mla)


def own_format(inputs: ChoiceInputs, flags: Flags, pool: Pool | None) -> Choice | None:
    """A replacement for a preset's FP8 cache that vLLM would reject; None if it would not."""
    if not is_fp8(flags.get(KV_DTYPE)) or (verdict := cache_verdict(inputs, flags, pool)).works is not False:
        return None
    name = pool.name.removeprefix("NVIDIA ") if pool is not None and pool.name else "this GPU"
    where = f"here ({verdict.why})" if verdict.anywhere else f"on {name}"
    reason = f"The preset sets an FP8 KV cache, which vLLM can refuse {where}: keeping the model's own format."
    return Choice(KV_DTYPE, None, reason, Source.MACHINE, "Half as many tokens fit.")
