"""A launch over several machines: layouts that are slow or fail there, and what operators must know. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_launchers.plan.checks.request import DATA, EXPERTS, PIPELINE, TENSOR, simulated
from vllm_launchers.plan.choices.inputs import BudgetFor
from vllm_launchers.plan.choices.nodes import NODE_FLAGS
from vllm_launchers.plan.findings import Finding, Level
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.plan.nodes import NodesPlan
from vllm_launchers.vllm.flags.changes import Changes, whole_number


def node_findings(plan: Plan, inputs: PlanInputs, budget: BudgetFor | None) -> Iterator[Finding]:
    """Pipeline stages on a CPU, then what concerns several machines."""
    stages, tensor = whole_number(plan.flags, PIPELINE), whole_number(plan.flags, TENSOR)
    if plan.engine.build == "cpu" and stages > 1 and not simulated(plan):
        text = (
            f"--{PIPELINE} {stages} on the CPU build: measured with vLLM 0.32.0, /health answers and every request "
            f"fails; use --{TENSOR}"
        )
        fix = Changes(set={TENSOR: stages * tensor}, unset=(PIPELINE,))
        yield Finding("pp_on_cpu", Level.WARNING, text, fix)
    if plan.nodes is not None:
        yield from _across(plan, plan.nodes)
        yield from _experts(plan, plan.nodes, inputs, budget)


def _across(plan: Plan, nodes: NodesPlan) -> Iterator[Finding]:
    count = len(nodes.nodes)
    if nodes.fits_one:
        text = (
            f"by the same estimate it fits on one of these machines: {count} servers, one on each, behind a router "
            "need no network between them and survive each other"
        )
        yield Finding("nodes_not_needed", Level.ADVICE, text)
    if nodes.across == "tensor" and plan.engine.build != "cpu":
        fix = Changes(set={TENSOR: nodes.gpus_each, PIPELINE: count}) if nodes.layout.pipeline == 1 else None
        text = (
            f"tensor parallelism over {nodes.layout.tensor} GPUs crosses the network twice per layer; without NVLink "
            "or InfiniBand between the machines pipeline stages are faster"
        )
        yield Finding("tp_over_nodes", Level.WARNING, text, fix)
    needed, given = (nodes.network.needed_gbits, nodes.network.given_gbits) if nodes.network else (None, None)
    if needed is not None and given is not None and given < needed:
        text = (
            f"at full load sending would take more than a tenth of the time: {given:g} Gbit/s are given, about "
            f"{needed:.3g} needed"
        )
        yield Finding("network_slow", Level.WARNING, text)
    yield Finding("nodes_open", Level.ADVICE, _open(nodes))


def _experts(plan: Plan, nodes: NodesPlan, inputs: PlanInputs, budget: BudgetFor | None) -> Iterator[Finding]:
    """For a mixture of experts, vLLM's other way over nodes: a copy of the attention on each GPU."""
    facts, memory, ranks = inputs.facts, plan.memory, nodes.gpus_each * len(nodes.nodes)
    if (
        facts is None
        or budget is None
        or memory is None
        or (facts.experts or 0) < ranks
        or (facts.experts or 0) % ranks
    ):
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
    yield Finding("experts_over_nodes", Level.ADVICE, text)


def _open(nodes: NodesPlan) -> str:
    return (
        f"nodes talk to each other without encryption or a password, on port {nodes.master_port} of every address of "
        "node 0 and on random ports: join them by a private network (source: vLLM's documentation, Security)"
    )
