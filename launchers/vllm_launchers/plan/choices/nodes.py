"""A launch over several equal machines with vLLM's own multi-node flags: the request, its flags and its layout. Pure.

Tensor parallelism, which exchanges data twice per layer, stays within a node. Pipeline stages cross nodes, because they
send only the activations of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from vllm_launchers.engine_model.gpu_models import Interconnect
from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.plan.choices.choice import PARALLEL_FLAGS, Choice, ChoiceInputs, Source
from vllm_launchers.plan.choices.layout import LayoutFit
from vllm_launchers.plan.choices.pool import Pool
from vllm_launchers.plan.findings import PlanError
from vllm_launchers.plan.flags import BACKEND, DATA, PIPELINE, TENSOR
from vllm_launchers.presets.model import Preset
from vllm_launchers.units import counted
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.changes import Changes, Flags, FlagValue, whole_number
from vllm_launchers.vllm.flags.flag_table import FlagTable
from vllm_launchers.vllm.flags.releases import first_release
from vllm_launchers.vllm.modelfacts.facts import ModelFacts

NODES, RANK, HEADLESS = "nnodes", "node-rank", "headless"
MASTER_ADDR, MASTER_PORT = "master-addr", "master-port"
NODE_FLAGS = (NODES, RANK, MASTER_ADDR, MASTER_PORT, HEADLESS)

DEFAULT_PORT = 29501
"""vLLM's default ``master-port``."""
UNKNOWN_ADDRESS = "ADDRESS_OF_NODE_0"
"""Placeholder in commands for an address that was not given."""

UNLIMITED = Interconnect(math.inf, 0.0)
"""A network that never makes a stage wait."""
SENT_PER_STAGE = 2
"""Tensors that a stage sends to the next: hidden states and residual (``IntermediateTensors`` of vLLM's models)."""


class NodesRequest(msgspec.Struct, frozen=True):
    """``count`` equal machines; this is number ``rank``. ``master_addr`` is node 0's address, empty if unknown.

    ``network_gbits`` is the bandwidth between two nodes in Gbit/s, in one direction; None if unknown.
    """

    count: int
    rank: int = 0
    master_addr: str = ""
    master_port: int = DEFAULT_PORT
    network_gbits: float | None = None

    @property
    def link(self) -> Interconnect:
        """The network as a link between pipeline stages. Timing sends one tensor per stage, so bandwidth is divided."""
        if self.network_gbits is None:
            return UNLIMITED
        return Interconnect(self.network_gbits * 1e9 / 8 / SENT_PER_STAGE, 0.0)


def flags_of_node(nodes: NodesRequest, rank: int) -> dict[str, FlagValue]:
    """The multi-node flags of one node. Only node 0 serves HTTP."""
    flags: dict[str, FlagValue] = {
        NODES: nodes.count,
        RANK: rank,
        MASTER_ADDR: nodes.master_addr or UNKNOWN_ADDRESS,
        MASTER_PORT: nodes.master_port,
    }
    return flags | ({HEADLESS: True} if rank else {})


_REASONS = {
    NODES: "The model is spread over this many machines.",
    RANK: "Each node has its own number; node 0 serves requests.",
    MASTER_ADDR: "The address of node 0, reachable from all nodes.",
    MASTER_PORT: "The rendezvous port of node 0.",
    HEADLESS: "Only node 0 serves HTTP.",
}


def node_choices(nodes: NodesRequest) -> Iterator[Choice]:
    """The multi-node flags of this node."""
    for name, value in flags_of_node(nodes, nodes.rank).items():
        yield Choice(name, value, _REASONS[name], Source.YOU if name == NODES else Source.CONSOLE)


def layout_over_nodes(inputs: ChoiceInputs, found: LayoutFit, pool: Pool) -> Iterator[Choice]:
    """Tensor and pipeline parallelism, as found."""
    layout, count = found.layout, inputs.nodes
    local = layout.total // count
    node = f"{counted(local, 'GPU')} of each of {count} nodes"
    why = f"Weights and KV cache over {node}"
    if not found.fits:
        why = f"Even {node} have no room for the weights and one request of full length: closest fit"
    if layout.tensor > 1:
        inside = f"{layout.tensor} GPUs share each layer" + (" within a node" if layout.tensor <= local else "")
        link = f", connected by {pool.link}" if pool.link and layout.tensor <= local else ""
        yield Choice(TENSOR, layout.tensor, f"{why}: {inside}{link}.", Source.MACHINE)
    else:
        yield Choice(TENSOR, None, f"{why}: each layer is whole on one GPU.", Source.MACHINE)
    if layout.pipeline > 1:
        each = counted(layout.pipeline // count, "pipeline stage") if layout.pipeline >= count else "a part"
        reason = f"{why}: {each} on each node, so that only activations cross the network, once per step."
        tradeoff = "A single stream gets no faster, and stages idle while few requests run."
        yield Choice(PIPELINE, layout.pipeline, reason, Source.MACHINE, tradeoff)


def layout_on_cpu(inputs: ChoiceInputs) -> Choice:
    """The CPU build has one rank per node. With pipeline stages the first request fails (measured on 0.32.0)."""
    reason = f"{inputs.nodes} nodes share each layer: with pipeline stages a CPU build's first request fails."
    return Choice(TENSOR, inputs.nodes, reason, Source.MACHINE, "Every layer exchanges data over the network.")


MOST_NODES = 64
_ADDRESS = lazy_pattern(r"[A-Za-z0-9][A-Za-z0-9.-]*|[0-9a-fA-F:]*:[0-9a-fA-F:.]*")


def check_nodes(nodes: NodesRequest, engine: Engine, preset: Preset, changes: Changes, table: FlagTable) -> None:
    """Check that a launch can be planned over several machines.

    Raises:
        PlanError: a number or address is invalid, the vLLM has no multi-node flags, or flags contradict the request.
    """
    _check_numbers(nodes)
    if engine.kind is EngineKind.SIMULATED:
        raise PlanError(
            "--nodes: the simulated engine runs on one machine; to plan only, name a release with --vllm-version"
        )
    if table.assumed:
        raise PlanError("--nodes: the flags of this vLLM are unknown; name its release with --vllm-version")
    if NODES not in table.flags:
        since = f", which came with {first}" if (first := first_release(NODES)) else ""
        name = f"vLLM {engine.public_version}"
        raise PlanError(f"{name} can't run on several nodes without Ray: it has no --{NODES}{since}")
    backend = changes.set.get(BACKEND, preset.flags[BACKEND].value if BACKEND in preset.flags else None)
    if backend == "ray":
        raise PlanError(
            f"--nodes starts vLLM on each machine itself; on a Ray cluster, use --{BACKEND} ray instead of --nodes"
        )
    given = {*preset.flags, *changes.set} - set(changes.unset)
    if both := sorted(given.intersection(NODE_FLAGS)):
        raise PlanError(f"--{both[0]} follows from --nodes: leave it out")
    if any(name == DATA or name.startswith("data-parallel-") for name in given):
        raise PlanError("--nodes plans one replica of the model over all nodes: leave out --data-parallel-…")


def _check_numbers(nodes: NodesRequest) -> None:
    if not 2 <= nodes.count <= MOST_NODES:
        raise PlanError(f"--nodes {nodes.count}: expected 2 to {MOST_NODES} machines")
    if not 0 <= nodes.rank < nodes.count:
        raise PlanError(f"--node-rank {nodes.rank}: {nodes.count} nodes are numbered 0 to {nodes.count - 1}")
    if nodes.master_addr and not _ADDRESS.fullmatch(nodes.master_addr):
        raise PlanError("--master-addr: expected a host name or an IP address of node 0")
    if not 1 <= nodes.master_port <= 65535:
        raise PlanError(f"--master-port {nodes.master_port}: expected a port between 1 and 65535")
    if nodes.network_gbits is not None and not 0 < nodes.network_gbits < math.inf:
        raise PlanError("--network: expected Gbit/s between two nodes, such as 100")


def check_layout(nodes: NodesRequest, flags: Flags, facts: ModelFacts | None, unestimated: str = "") -> None:
    """Check that the machines can share the sizes evenly. ``unestimated`` as in `Plan`.

    Raises:
        PlanError: they cannot, or no sizes could be chosen.
    """
    total = math.prod(whole_number(flags, name) for name in PARALLEL_FLAGS)
    if total == 1 and facts is not None and 0 < len(facts.layers) < nodes.count:
        raise PlanError(f"--nodes {nodes.count}: {facts.model} has {len(facts.layers)} layers, fewer than nodes")
    if total == 1 and unestimated:
        raise PlanError(f"--nodes {nodes.count}: no layout was chosen, because {unestimated}")
    if total == 1:
        raise PlanError(
            f"--nodes {nodes.count}: too little is known about the model or the GPUs to choose a layout; specify "
            f"it, such as --set tensor-parallel-size=8 --set pipeline-parallel-size={nodes.count} (see --hub and "
            "--host, too)"
        )
    if total % nodes.count:
        raise PlanError(
            f"--nodes {nodes.count}: {total} GPUs (tensor × pipeline parallel) are not divisible by the number of nodes"
        )
