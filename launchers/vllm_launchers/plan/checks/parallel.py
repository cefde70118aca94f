"""How a model is split: over how many GPUs, along which lines, over which links. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_launchers.machine.gpu.host import Gpu, Host, connected
from vllm_launchers.machine.gpu.links import Level, level_of, pcie_groups
from vllm_launchers.machine.gpu.matrix import spans
from vllm_launchers.machine.modelfacts.model import ModelFacts
from vllm_launchers.plan.checks.asked import PIPELINE, TENSOR, gpus_of, ranks, simulated, size_of, spread
from vllm_launchers.plan.findings import Finding
from vllm_launchers.plan.findings import Level as Weight
from vllm_launchers.plan.knowledge import Knowledge
from vllm_launchers.plan.model import Changes, Plan
from vllm_launchers.plan.placement import set_level
from vllm_launchers.plan.placement_words import crossing

MOST_TENSOR = 64


def parallel_findings(plan: Plan, knowledge: Knowledge) -> Iterator[Finding]:
    """Sizes against the model, against the GPUs, and against the links between them."""
    if knowledge.facts is not None and not simulated(plan):
        yield from _split(plan, knowledge.facts)
    yield from _count(plan, knowledge)
    yield from _links(plan, knowledge)


def split_problem(facts: ModelFacts, tensor: int) -> str:
    """Why a model cannot be split over so many GPUs, in a few words; empty where it can, or where that is not known.

    vLLM splits attention by heads (``ModelConfig.verify_with_parallel_config``) and, of a quantized layer whose rows
    are split, whole groups or blocks only (``awq.py``, ``gptq.py``, ``fp8.py``).
    """
    heads, kv_heads = facts.heads, facts.kv_heads
    if heads and heads % tensor:
        return f"its {heads} attention heads cannot be dealt evenly to {tensor} GPUs"
    if kv_heads and not facts.mla and (tensor % kv_heads if tensor > kv_heads else kv_heads % tensor):
        return f"its {kv_heads} KV heads cannot be dealt evenly to {tensor} GPUs"
    stored, inner = facts.quantization, facts.intermediate_size
    if stored is None or not inner or facts.experts or tensor == 1:
        return ""
    group = stored.group_size if stored.group_size and stored.group_size > 0 else None
    unit = stored.block[1] if stored.block else group if stored.method in _GROUPED else None
    if unit and (inner % tensor or (inner // tensor) % unit):
        kind = "blocks" if stored.block else "groups"
        return f"its quantization {kind} of {unit} do not divide {inner} / {tensor} columns"
    return ""


_GROUPED = frozenset({"awq", "awq_marlin", "gptq", "gptq_marlin"})


def divisors(facts: ModelFacts, most: int) -> list[int]:
    """The tensor-parallel sizes up to ``most`` that a model can be split into."""
    return [size for size in range(1, most + 1) if not split_problem(facts, size)]


def _split(plan: Plan, facts: ModelFacts) -> Iterator[Finding]:
    tensor, pipeline = size_of(plan.flags, TENSOR), size_of(plan.flags, PIPELINE)
    if tensor > 1 and (problem := split_problem(facts, tensor)):
        fitting = divisors(facts, min(tensor, MOST_TENSOR))
        said = ", ".join(map(str, fitting[-3:]))
        text = f"--{TENSOR} {tensor}: {problem}; {said} would do"
        sure = facts.source != "table"
        yield Finding("tp_not_divisor", Weight.ERROR, text, Changes(set={TENSOR: fitting[-1]}), surely=sure)
    if facts.layers and pipeline > len(facts.layers):
        text = f"--{PIPELINE} {pipeline} is more than the {len(facts.layers)} layers of {facts.model}"
        yield Finding("pp_over_layers", Weight.ERROR, text, Changes(unset=(PIPELINE,)))


def _count(plan: Plan, knowledge: Knowledge) -> Iterator[Finding]:
    """Ranks against GPUs: those that were chosen, else all that there are."""
    wanted = ranks(plan.flags)
    there = len(plan.gpus) or (len(knowledge.host.gpus) if knowledge.host is not None else 0)
    if not there or plan.engine.build == "cpu":
        return
    if wanted > there:
        what = f"was given {there}" if plan.gpus else f"there {'is' if there == 1 else 'are'} {there} here"
        sure = not spread(plan.flags)
        text = f"it wants {wanted} GPUs (tensor × pipeline × data parallel) and {what}"
        fix = Changes(set={TENSOR: there}) if size_of(plan.flags, TENSOR) == wanted else None
        if fix is not None and knowledge.facts is not None:
            fix = Changes(set={TENSOR: divisors(knowledge.facts, there)[-1]})
        yield Finding("gpus_too_few", Weight.ERROR if sure else Weight.ADVICE, text, fix)
    elif len(plan.gpus) > wanted:
        text = (
            f"it was given {len(plan.gpus)} GPUs and will use {wanted}: "
            f"set tensor-parallel-size={len(plan.gpus)}, or give it fewer"
        )
        yield Finding("gpus_unused", Weight.WARNING, text, Changes(set={TENSOR: len(plan.gpus)}))


def _links(plan: Plan, knowledge: Knowledge) -> Iterator[Finding]:
    """Only the ranks of one tensor-parallel group exchange data at every layer: each group is judged by itself."""
    gpus, host = gpus_of(plan, knowledge), knowledge.host
    if len({gpu.name for gpu in gpus if gpu.name}) > 1:
        text = "the GPUs differ: the slowest sets the pace, the smallest sets the memory"
        yield Finding("gpus_differ", Weight.WARNING, text)
    size = size_of(plan.flags, TENSOR)
    if host is None or size < 2 or len(gpus) < size:
        return
    for start in range(0, len(gpus) - size + 1, size):
        yield from _group(plan, host, gpus[start : start + size])


def _group(plan: Plan, host: Host, gpus: tuple[Gpu, ...]) -> Iterator[Finding]:
    indices = [gpu.index for gpu in gpus]

    def level(a: int, b: int) -> Level:
        link = host.link(a, b)
        if link is not None:
            return level_of(link.kind)
        return Level.NVLINK if any(a in island and b in island for island in host.islands) else Level.UNKNOWN

    found = set_level(level, indices)
    if found is None or found <= Level.PXB:
        return
    pairs = [(a, b) for a in indices for b in indices if a < b]
    nvlink = connected(indices, [pair for pair in pairs if level(*pair) is Level.NVLINK])
    groups = pcie_groups(indices, host.links) if len(nvlink) == len(indices) else nvlink
    if found < Level.SYS:
        text = (
            f"tensor parallelism over {spans(sorted(indices))} goes over PCIe ({found.words}) at every layer: NVLink "
            "is ten times as fast; use no more GPUs than the model needs"
        )
        yield Finding("tp_over_pcie", Weight.ADVICE, text)
        return
    fix = None
    if len({len(group) for group in groups}) == 1 and len(groups) > 1 and size_of(plan.flags, PIPELINE) == 1:
        fix = Changes(set={TENSOR: len(groups[0]), PIPELINE: len(groups)})
    text = crossing(indices, groups, found)
    yield Finding("tp_over_pcie", Weight.WARNING if found is Level.SYS else Weight.ADVICE, text, fix)
