"""A plan over several machines: what each of them runs, its memory, and the network between them. Pure."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from vllm_launchers.plan.budget.budget import GpuBudget
from vllm_launchers.plan.build import command_of
from vllm_launchers.plan.choices.layout import fixed_layout
from vllm_launchers.plan.choices.nodes import NODE_FLAGS, SENT_PER_STAGE, NodesRequest, flags_of_node
from vllm_launchers.plan.choices.pool import Layout
from vllm_launchers.plan.model import Plan
from vllm_launchers.presets.model import Workload
from vllm_launchers.vllm.flags.changes import Flags
from vllm_launchers.vllm.modelfacts.facts import ModelFacts

SENDING = 0.1
"""Maximum share of the time for sending between nodes."""
ACTIVATION_BYTES = 2
"""Bytes per element of an activation (16 bits)."""
REDUCTIONS = 2
"""All-reduces per layer of tensor parallelism: after attention and after the MLP."""


class NodePlan(msgspec.Struct, frozen=True):
    """One machine's part of the server. ``memory``: one entry per GPU; empty if unknown."""

    rank: int
    headless: bool
    argv: tuple[str, ...]
    flags: Flags
    memory: tuple[GpuBudget, ...] = ()


class Network(msgspec.Struct, frozen=True):
    """Estimated traffic from one node to another; None means unknown.

    ``needed_gbits``: bandwidth in one direction, in Gbit/s, at which sending takes a tenth of the time at full load.
    ``given_gbits``: the available bandwidth, if it was given. ``formula``: how the estimates are computed.
    """

    bytes_per_token: float
    tokens_per_second: float | None
    """Prompt and output tokens per second at full load."""
    needed_gbits: float | None
    given_gbits: float | None
    formula: str


class NodesPlan(msgspec.Struct, frozen=True):
    """A launch over equal machines. ``gpus_each`` is per machine; ``layout`` is over all of them.

    ``master_addr`` is empty if it was not given; commands then contain a placeholder.
    """

    gpus_each: int
    layout: Layout
    master_addr: str
    master_port: int
    nodes: tuple[NodePlan, ...]
    network: Network | None = None
    fits_one: bool | None = None
    """Whether the model would fit on one of the machines, by the same estimate; None if unknown."""

    @property
    def across(self) -> str:
        """What crosses the network: ``tensor`` or ``pipeline`` parallelism."""
        return "tensor" if self.layout.tensor > self.gpus_each else "pipeline"


def nodes_plan(
    plan: Plan, request: NodesRequest, facts: ModelFacts | None, workload: Workload, *, fits_one: bool | None
) -> NodesPlan:
    """The parts of all machines, from the plan of one of them."""
    layout = fixed_layout(plan.flags)
    each = layout.total // request.count
    shared = {name: value for name, value in plan.flags.items() if name not in NODE_FLAGS}
    parts: list[NodePlan] = []
    for rank in range(request.count):
        flags = {**shared, **flags_of_node(request, rank)}
        argv = command_of(plan.engine, plan.model, plan.host, plan.port, flags)
        parts.append(NodePlan(rank, rank > 0, argv, flags, _memory(plan, each, rank)))
    return NodesPlan(
        each, layout, request.master_addr, request.master_port, tuple(parts),
        _network(plan, request, layout, each, facts, workload), fits_one,
    )  # fmt: skip


def _memory(plan: Plan, each: int, rank: int) -> tuple[GpuBudget, ...]:
    """The GPUs of a node, numbered like those of this machine: vLLM numbers ranks node by node, stage by stage."""
    found = plan.memory.per_gpu if plan.memory is not None else ()
    own = found[rank * each : (rank + 1) * each]
    return tuple(replace(gpu, index=found[at].index) for at, gpu in enumerate(own))


def _network(
    plan: Plan, request: NodesRequest, layout: Layout, each: int, facts: ModelFacts | None, workload: Workload
) -> Network | None:
    hidden = facts.hidden_size if facts is not None else None
    if facts is None or not hidden:
        return None
    if layout.tensor > each:
        sent = REDUCTIONS * len(facts.layers) * 2 * (layout.tensor - 1) / layout.tensor * hidden * ACTIVATION_BYTES
        formula = (
            f"{REDUCTIONS} all-reduces in each of {len(facts.layers)} layers × 2 × "
            f"{layout.tensor - 1}/{layout.tensor} × {hidden:,} (hidden size) × {ACTIVATION_BYTES} bytes"
        )
        return Network(sent, None, None, request.network_gbits, formula) if facts.layers else None
    sent = float(SENT_PER_STAGE * hidden * ACTIVATION_BYTES)
    formula = f"{SENT_PER_STAGE} tensors × {hidden:,} (hidden size) × {ACTIVATION_BYTES} bytes"
    full = plan.paces.full if plan.paces is not None else None
    if full is None:
        return Network(sent, None, None, request.network_gbits, formula)
    prompts = workload.input_tokens_p95 * (1 - workload.prefix_reuse) / max(1, workload.output_tokens_p95)
    rate = full.tokens_per_second * (1 + prompts)
    formula += f" per token; × tokens/s of prompts and answers × 8 bits / {SENDING:.0%} of the time"
    return Network(sent, rate, rate * sent * 8 / 1e9 / SENDING, request.network_gbits, formula)
