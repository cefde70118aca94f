"""How a model is split: over how many GPUs and machines, in which dimension, over which links. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import TypeGuard

from vllm_launchers.engine_model.gpu_models import find_model
from vllm_launchers.host.gpu.host import Gpu, Host
from vllm_launchers.host.gpu.topology import LinkLevel, near_groups, pair_level, spans
from vllm_launchers.plan.checks.architectures import is_dense
from vllm_launchers.plan.checks.request import (
    gpus_of,
    local_ranks,
    most_gpus,
    on_slice,
    simulated,
    spread,
    way_without_flags,
)
from vllm_launchers.plan.choices.choice import BudgetFor
from vllm_launchers.plan.choices.nodes import NODE_FLAGS
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.plan.flags import DATA, DECODE_CONTEXT, EXPERTS, LORA, PIPELINE, TENSOR, VISIBLE
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.plan.model_conditions import adapter_problem
from vllm_launchers.plan.nodes import NodesPlan
from vllm_launchers.plan.placement import crossing, set_level
from vllm_launchers.plan.tensor_sizes import tensor_sizes
from vllm_launchers.units import counted, three_digits
from vllm_launchers.vllm.flags.changes import Changes, whole_number
from vllm_launchers.vllm.flags.check_value import MICROBATCHED
from vllm_launchers.vllm.flags.wording import either
from vllm_launchers.vllm.modelfacts.facts import (
    ModelFacts,
    decode_context_problem,
    expert_split_problem,
    split_problem,
)
from vllm_launchers.vllm.release_defaults import Release

MOST_TENSOR = 64
RANK, BALANCED_OUTSIDE = "data-parallel-rank", "data-parallel-external-lb"

_OVERLAP = "enable-dbo"


def parallel_findings(plan: Plan, inputs: PlanInputs, budget: BudgetFor) -> Iterator[PlanFinding]:
    """Check sizes against the model, the GPUs, and the links between them."""
    if inputs.facts is not None:
        yield from _split(plan, inputs.facts)
    yield from _overlap(plan)
    yield from _count(plan, inputs, budget)
    yield from _links(plan, inputs)


_RULES_SINCE = (0, 13, 0)
"""First release in which the rules of overlapping batches and decode context parallelism were seen."""

_NIXL_REFUSED_BEFORE, _NIXL_SINCE = (0, 21, 0), (0, 24, 0)
"""Releases that were seen: 0.20 refuses to overlap batches with ``nixl_ep``, 0.24 is able to."""

_RANKS_SINCE = (0, 24, 0)
"""First release seen to refuse external data-parallel ranks of models without experts; 0.20 does not."""


def _rules_known(release: Release | None) -> TypeGuard[Release]:
    return release is not None and release >= _RULES_SINCE


def _overlap(plan: Plan) -> Iterator[PlanFinding]:
    """Dual-batch overlap without a suitable backend; the CPU build turns it off itself."""
    release = plan.engine.release
    if plan.flags.get(_OVERLAP) is not True or plan.engine.build != "cuda" or not _rules_known(release):
        return
    able = MICROBATCHED if release >= _NIXL_SINCE else MICROBATCHED[:2]
    if (backend := plan.flags.get("all2all-backend")) not in able:
        text = f"vLLM will refuse --{_OVERLAP} without --all2all-backend {either(able)}"
        sure = backend not in MICROBATCHED or release < _NIXL_REFUSED_BEFORE
        yield PlanFinding("flag_value", Level.ERROR, text, Changes(unset=(_OVERLAP,)), surely=sure)


def _split(plan: Plan, facts: ModelFacts) -> Iterator[PlanFinding]:
    tensor, pipeline = whole_number(plan.flags, TENSOR), whole_number(plan.flags, PIPELINE)
    if tensor > 1 and (problem := split_problem(facts, tensor)):
        fitting = tensor_sizes(facts, plan.flags, min(tensor, MOST_TENSOR))
        would = f"; {', '.join(map(str, fitting[-3:]))} would work" if fitting else ""
        text = f"--{TENSOR} {tensor}: {problem}{would}"
        yield PlanFinding("tp_not_divisor", Level.ERROR, text, _largest(fitting), surely=facts.certain)
    shards = whole_number(plan.flags, DECODE_CONTEXT)
    if _rules_known(plan.engine.release) and (problem := decode_context_problem(facts, tensor, shards)):
        text = f"--{DECODE_CONTEXT} {shards} for {facts.model}: it {problem}; vLLM will refuse it"
        yield PlanFinding("flag_value", Level.ERROR, text, Changes(unset=(DECODE_CONTEXT,)), surely=facts.certain)
    spread = tensor * whole_number(plan.flags, DATA)
    if plan.flags.get(EXPERTS) is not True and (problem := expert_split_problem(facts, spread)):
        way = f"with --{EXPERTS} each GPU holds whole experts"
        data = whole_number(plan.flags, DATA)
        why_not = adapter_problem(facts, plan.flags, plan.engine.release, tensor=tensor, data=data)
        if why_not:
            way = f"--{EXPERTS} would keep them whole, but does not work with --{LORA} {why_not}"
        text = f"{spread} GPUs share each expert: {problem}; {way}"
        fix = None if why_not else Changes(set={EXPERTS: True})
        yield PlanFinding("experts_not_divisible", Level.ERROR, text, fix, surely=False)
    if plan.flags.get(EXPERTS) is True and is_dense(facts):
        text = f"--{EXPERTS}: {facts.model} has no experts to distribute; vLLM will refuse it"
        yield PlanFinding("no_experts", Level.ERROR, text, Changes(unset=(EXPERTS,)), surely=facts.certain)
    external = plan.flags.get(RANK) is not None or plan.flags.get(BALANCED_OUTSIDE) is True
    if external and whole_number(plan.flags, DATA) > 1 and is_dense(facts):
        given = tuple(sorted(name for name in plan.flags if name.startswith("data-parallel-")))
        text = (
            f"--{RANK if RANK in plan.flags else BALANCED_OUTSIDE}: vLLM 0.24 and later refuse data-parallel ranks "
            f"behind a balancer of your own for models without experts, such as {facts.model}; start independent "
            "servers"
        )
        release = plan.engine.release
        level = Level.ERROR if release is not None and release >= _RANKS_SINCE else Level.WARNING
        yield PlanFinding("external_ranks_of_dense", level, text, Changes(unset=given), surely=facts.certain)
    if facts.layers and pipeline > len(facts.layers):
        text = f"--{PIPELINE} {pipeline} is more than the {len(facts.layers)} layers of {facts.model}"
        yield PlanFinding("pp_over_layers", Level.ERROR, text, Changes(unset=(PIPELINE,)))


def _largest(sizes: list[int]) -> Changes | None:
    return Changes(set={TENSOR: sizes[-1]}) if sizes else None


def _count(plan: Plan, inputs: PlanInputs, budget: BudgetFor) -> Iterator[PlanFinding]:
    """Compare the number of ranks with the chosen GPUs, or else with all available ones."""
    wanted = local_ranks(plan.flags)
    here, named = len(inputs.host.gpus) if inputs.host is not None else 0, most_gpus(plan, inputs)
    there = 1 if on_slice(plan) else len(plan.gpus) or (min(here, named) if here and named else named or here)
    if not there or plan.engine.build == "cpu" or inputs.ray is not None:
        return
    if wanted > there:
        what = f"there {'is' if there == 1 else 'are'} {there} here"
        if on_slice(plan):
            what = "a process sees only one MIG slice"
        elif plan.gpus:
            what = f"was given {there}"
        elif named == there:
            what = f"{VISIBLE} names {there}"
        sure = "nnodes" in plan.flags or not spread(plan.flags)
        each = " of each node" if "nnodes" in plan.flags else ""
        text = f"it needs {counted(wanted, 'GPU')}{each} (tensor × pipeline × data parallel) and {what}"
        alone = whole_number(plan.flags, TENSOR) == wanted and not each
        sizes = tensor_sizes(inputs.facts, plan.flags, there) if alone else []
        fix = _largest([size for size in sizes if _has_room(plan, size, budget)])
        if sizes and fix is None:
            text = f"{text}; over {there} it does not fit: {way_without_flags(plan, inputs, budget)}"
        yield PlanFinding("gpus_too_few", Level.ERROR if sure else Level.ADVICE, text, fix)
    elif len(plan.gpus) > wanted:
        yield _unused(plan, inputs, wanted)


def _has_room(plan: Plan, size: int, budget: BudgetFor) -> bool:
    """Whether it fits with this tensor-parallel size; True if unknown."""
    found = budget({**plan.flags, TENSOR: size})
    return found is None or found.fits


def _unused(plan: Plan, inputs: PlanInputs, wanted: int) -> PlanFinding:
    """GPUs without a rank, and the tensor-parallel size that uses all of them, if the model can be split that way."""
    count, tensor = len(plan.gpus), whole_number(plan.flags, TENSOR)
    size, rest = divmod(count, max(1, wanted // tensor))
    fits = not rest and "nnodes" not in plan.flags and size in tensor_sizes(inputs.facts, plan.flags, size)
    way = f"set {TENSOR}={size} or assign fewer" if fits else "assign fewer"
    text = f"{count} GPUs assigned, {wanted} used: {way}"
    return PlanFinding("gpus_unused", Level.WARNING, text, Changes(set={TENSOR: size}) if fits else None)


def _links(plan: Plan, inputs: PlanInputs) -> Iterator[PlanFinding]:
    """Check each tensor-parallel group: only its ranks exchange data at every layer."""
    gpus, host = gpus_of(plan, inputs), inputs.host
    if len({gpu.name for gpu in gpus if gpu.name}) > 1:
        text = "mixed GPUs: the slowest limits speed, the smallest limits memory"
        yield PlanFinding("gpus_differ", Level.WARNING, text)
    size = whole_number(plan.flags, TENSOR)
    if host is None or size < 2 or len(gpus) < size:
        return
    for start in range(0, len(gpus) - size + 1, size):
        yield from _group(plan, host, gpus[start : start + size])


def _fastest_all_the_same(plan: Plan) -> str:
    """Expected speed of a plan over slow links and of the best one over near links; empty unless the plan is faster."""
    alike = [one for one in plan.alternatives if one.model is None and one.throughput]
    if len(alike) < 2 or not alike[0].chosen:
        return ""
    chosen, *others = alike
    rest = [one for one in others if one.layout.total == chosen.layout.total and one.near]
    second = max(rest, key=lambda one: one.throughput, default=None)
    if second is None or second.throughput >= chosen.throughput:
        return ""
    return (
        f"about {chosen.throughput:,.0f} tokens/s are predicted even so, compared with {second.throughput:,.0f} for "
        f"{second.label}"
    )


def _against_nvlink(host: Host, gpus: tuple[Gpu, ...]) -> str:
    """Bandwidth of the slowest pair, and of NVLink between such GPUs; empty if unknown."""
    links = [host.link(a.index, b.index) for a, b in combinations(gpus, 2)]
    rates = [link.bandwidth_gbs if link is not None else None for link in links]
    known = [rate for rate in rates if rate is not None]
    if not known or len(known) < len(rates):
        return ""
    slowest = f", at {int(min(known))} GB/s"
    kinds = {gpu.name for gpu in gpus}
    model = find_model(gpus[0].name) if len(kinds) == 1 and gpus[0].name else None
    if model is None:
        return slowest
    if not model.nvlink:
        return f"{slowest} (no NVLink on this GPU model)"
    nvlink = 2 * model.nvlink / 1e9
    times = nvlink / min(known)
    return f"{slowest}: NVLink, available for these GPUs, carries {int(nvlink)} GB/s, {times:.1f}× that"


def _group(plan: Plan, host: Host, gpus: tuple[Gpu, ...]) -> Iterator[PlanFinding]:
    indices = [gpu.index for gpu in gpus]

    def level(a: int, b: int) -> LinkLevel:
        return pair_level(host, a, b, host.link(a, b))

    found = set_level(level, indices)
    if found is None or found <= LinkLevel.PXB:
        return
    groups = near_groups(indices, level, host.links)
    if found < LinkLevel.SYS:
        text = (
            f"tensor parallelism over {spans(sorted(indices))} uses PCIe ({found.words}) at every layer"
            f"{_against_nvlink(host, gpus)}; use no more GPUs than the model needs"
        )
        yield PlanFinding("tp_over_pcie", Level.ADVICE, text)
        return
    fix = None
    if len({len(group) for group in groups}) == 1 and len(groups) > 1 and whole_number(plan.flags, PIPELINE) == 1:
        fix = Changes(set={TENSOR: len(groups[0]), PIPELINE: len(groups)})
    text = crossing(indices, groups, found)
    if faster := _fastest_all_the_same(plan):
        way = "crosses the CPU interconnect" if found is LinkLevel.SYS else "uses unknown links"
        text = f"tensor parallelism over {spans(sorted(indices))} {way} at every layer; {faster}"
        yield PlanFinding("tp_over_pcie", Level.ADVICE, text)
        return
    yield PlanFinding("tp_over_pcie", Level.WARNING if found is LinkLevel.SYS else Level.ADVICE, text, fix)


def node_findings(plan: Plan, inputs: PlanInputs, budget: BudgetFor) -> Iterator[PlanFinding]:
    """Check pipeline stages on a CPU, then launches on several machines."""
    stages, tensor = whole_number(plan.flags, PIPELINE), whole_number(plan.flags, TENSOR)
    if plan.engine.build == "cpu" and stages > 1 and not simulated(plan):
        text = (
            f"--{PIPELINE} {stages} on the CPU build: in a test with vLLM 0.32.0, /health answered but every "
            f"request failed; use --{TENSOR}"
        )
        sizes = tensor_sizes(inputs.facts, plan.flags, stages * tensor)
        fix = Changes(set={TENSOR: sizes[-1]}, unset=(PIPELINE,)) if sizes else None
        yield PlanFinding("pp_on_cpu", Level.WARNING, text, fix)
    if plan.nodes is not None:
        yield from _across(plan, plan.nodes)
        yield from _experts(plan, plan.nodes, inputs, budget)


def _across(plan: Plan, nodes: NodesPlan) -> Iterator[PlanFinding]:
    count = len(nodes.nodes)
    if nodes.fits_one:
        text = (
            f"by the same estimate, it fits on one of these machines: {count} servers, one on each, behind a router "
            "need no network between them and fail independently"
        )
        yield PlanFinding("nodes_not_needed", Level.ADVICE, text)
    if nodes.across == "tensor" and plan.engine.build != "cpu":
        fix = Changes(set={TENSOR: nodes.gpus_each, PIPELINE: count}) if nodes.layout.pipeline == 1 else None
        text = (
            f"tensor parallelism over {nodes.layout.tensor} GPUs crosses the network twice per layer; without NVLink "
            "or InfiniBand between the machines pipeline stages are faster"
        )
        yield PlanFinding("tp_over_nodes", Level.WARNING, text, fix)
    needed, given = (nodes.network.needed_gbits, nodes.network.given_gbits) if nodes.network else (None, None)
    if needed is not None and given is not None and given < needed:
        text = (
            f"at full load, network transfers would take over 10% of the time; you specified {given:g} Gbit/s, but "
            f"about {three_digits(needed)} is needed"
        )
        yield PlanFinding("network_slow", Level.WARNING, text)
    yield PlanFinding("nodes_open", Level.ADVICE, _open(nodes))


def _experts(plan: Plan, nodes: NodesPlan, inputs: PlanInputs, budget: BudgetFor) -> Iterator[PlanFinding]:
    """For a mixture of experts, suggest data parallelism over the nodes: a copy of the attention on each GPU."""
    facts, memory, ranks = inputs.facts, plan.memory, nodes.gpus_each * len(nodes.nodes)
    if facts is None or memory is None or (facts.experts or 0) < ranks or (facts.experts or 0) % ranks:
        return
    kept = {name: value for name, value in plan.flags.items() if name not in (*NODE_FLAGS, TENSOR, PIPELINE, EXPERTS)}
    other = budget({**kept, DATA: ranks, EXPERTS: True})
    if other is None or not other.fits or not other.max_concurrency or not memory.max_concurrency:
        return
    held = other.max_concurrency * ranks
    if held <= memory.max_concurrency:
        return
    text = (
        f"data parallelism with experts over all {ranks} GPUs would hold about {held:,.0f} requests of full length "
        f"instead of {memory.max_concurrency:,.0f}, and needs InfiniBand between the machines: --{DATA} {ranks} "
        f"--{DATA}-local {nodes.gpus_each} --data-parallel-address ADDRESS --data-parallel-rpc-port PORT --{EXPERTS}, "
        "on the others also --headless and --data-parallel-start-rank, all without the multi-node flags here (source: "
        "vLLM's documentation, Expert Parallel Deployment)"
    )
    yield PlanFinding("experts_over_nodes", Level.ADVICE, text)


def _open(nodes: NodesPlan) -> str:
    return (
        f"nodes communicate without encryption or a password, on port {nodes.master_port} of every address of node "
        "0 and on random ports: connect them by a private network (source: vLLM's documentation, Security)"
    )
