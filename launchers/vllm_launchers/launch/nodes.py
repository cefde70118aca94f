"""What must hold of a request for several machines before it is planned."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from vllm_launchers.plan.choices.inputs import PARALLEL_FLAGS, Choice
from vllm_launchers.plan.choices.nodes import NODE_FLAGS, NODES, NodesRequest
from vllm_launchers.plan.findings import PlanError
from vllm_launchers.plan.flags import BACKEND, DATA
from vllm_launchers.plan.model import Changes, Engine, EngineKind
from vllm_launchers.presets.model import Preset
from vllm_launchers.vllm.flags.changes import whole_number
from vllm_launchers.vllm.flags.flag_table import FlagTable
from vllm_launchers.vllm.flags.releases import first_release
from vllm_launchers.vllm.modelfacts.facts import ModelFacts

MOST_NODES = 64
_ADDRESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*|[0-9a-fA-F:]*:[0-9a-fA-F:.]*")


def check_nodes(nodes: NodesRequest, engine: Engine, preset: Preset, changes: Changes, table: FlagTable | None) -> None:
    """Refuse what can't be planned over several machines.

    Raises:
        PlanError: a number or address is invalid, the vLLM has no multi-node flags, or flags say otherwise.
    """
    _check_numbers(nodes)
    if engine.kind is EngineKind.SIMULATED:
        raise PlanError("--nodes: the simulated engine runs on one machine; for a plan name a release: --vllm-version")
    if table is None:
        raise PlanError("--nodes: the flags of this vLLM are not known; name its release with --vllm-version")
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
        raise PlanError("--nodes plans one copy of the model over all nodes: leave out --data-parallel-…")


def _check_numbers(nodes: NodesRequest) -> None:
    if not 2 <= nodes.count <= MOST_NODES:
        raise PlanError(f"--nodes {nodes.count}: expected 2 to {MOST_NODES} machines")
    if not 0 <= nodes.rank < nodes.count:
        raise PlanError(f"--node-rank {nodes.rank}: {nodes.count} nodes are numbered 0 to {nodes.count - 1}")
    if nodes.master_addr and not _ADDRESS.fullmatch(nodes.master_addr):
        raise PlanError("--master-addr: expected a host name or an IP address of node 0")
    if not 1 <= nodes.master_port <= 65535:
        raise PlanError(f"--master-port {nodes.master_port}: a port lies between 1 and 65535")
    if nodes.network_gbits is not None and not 0 < nodes.network_gbits < math.inf:
        raise PlanError("--network: expected Gbit/s between two nodes, such as 100")


def check_layout(nodes: NodesRequest, choices: Sequence[Choice], facts: ModelFacts | None) -> None:
    """Refuse sizes that the machines cannot share evenly.

    Raises:
        PlanError: they cannot, or none could be chosen.
    """
    flags = {choice.flag: choice.value for choice in choices if choice.value is not None}
    total = math.prod(whole_number(flags, name) for name in PARALLEL_FLAGS)
    if total == 1 and facts is not None and 0 < len(facts.layers) < nodes.count:
        raise PlanError(f"--nodes {nodes.count}: {facts.model} has {len(facts.layers)} layers, fewer than nodes")
    if total == 1:
        raise PlanError(
            f"--nodes {nodes.count}: too little is known of the model or the GPUs to choose a layout; give it, such as "
            f"--set tensor-parallel-size=8 --set pipeline-parallel-size={nodes.count} (see --hub and --host, too)"
        )
    if total % nodes.count:
        raise PlanError(
            f"--nodes {nodes.count}: {total} GPUs (tensor × pipeline parallel) cannot be dealt evenly to them"
        )
