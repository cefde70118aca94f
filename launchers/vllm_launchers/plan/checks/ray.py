"""Workers on a Ray cluster: whether Ray is there, reachable, of the same version, and has the GPUs. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from vllm_launchers.plan.checks.request import on_ray, ranks
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.plan.flags import BACKEND, DATA, PIPELINE, TENSOR
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.plan.tensor_sizes import tensor_sizes
from vllm_launchers.units import counted
from vllm_launchers.vllm.flags.changes import Changes, whole_number
from vllm_launchers.vllm.ray_cluster import ADDRESS, RayCluster

WAITS = "vLLM would wait 30 minutes for them and then fail"
"""vLLM's ``PG_WAIT_TIMEOUT`` (``vllm/v1/executor/ray_utils.py``)."""


def ray_findings(plan: Plan, inputs: PlanInputs) -> Iterator[PlanFinding]:
    """What Ray reports, and what vLLM would refuse."""
    if not on_ray(plan.engine, plan.flags):
        return
    if plan.engine.build == "cpu":
        text = f"--{BACKEND} ray: vLLM refuses Ray on the CPU ('current platform cpu does not support ray')"
        yield PlanFinding("ray_on_cpu", Level.ERROR, text, Changes(unset=(BACKEND,)), surely=False)
    cluster = inputs.ray
    if cluster is None:
        return
    if cluster.missing:
        where = f"this vLLM's environment ({plan.engine.path})"
        text = f"Ray is not installed in {where}: {cluster.missing}; pip install ray there"
        yield PlanFinding("ray_missing", Level.ERROR, text)
    elif cluster.problem:
        text = f"no Ray cluster answers{_at(cluster)}: {cluster.problem}; start it, or set {ADDRESS}"
        yield PlanFinding("ray_unreachable", Level.ERROR, text, surely=False)
    elif not cluster.address:
        why = f"no Ray cluster runs on this machine, and {ADDRESS} is not set"
        if cluster.local:
            why = f"{ADDRESS} is 'local'"
        text = f"{why}: vLLM would start Ray on this machine alone; without Ray, workers start faster"
        yield PlanFinding("ray_not_running", Level.WARNING, text, Changes(unset=(BACKEND,)))
    else:
        yield from _versions(cluster)
        yield from _nodes(plan, inputs, cluster)


def _at(cluster: RayCluster) -> str:
    return f" at {cluster.address}" if cluster.address else ""


def _versions(cluster: RayCluster) -> Iterator[PlanFinding]:
    """Ray rejects a driver with another version (``check_version_info`` of ``ray/_private/utils.py``)."""
    theirs = (cluster.versions.get("ray_version"), cluster.versions.get("python_version"))
    if None not in theirs and theirs != (cluster.ray, cluster.python):
        text = (
            f"the Ray cluster{_at(cluster)} runs Ray {theirs[0]} on Python {theirs[1]}, this vLLM has Ray "
            f"{cluster.ray} on Python {cluster.python}: Ray refuses that; install the same versions"
        )
        yield PlanFinding("ray_version_differs", Level.ERROR, text, surely=False)


def _nodes(plan: Plan, inputs: PlanInputs, cluster: RayCluster) -> Iterator[PlanFinding]:
    needed, there, free = ranks(plan.flags), cluster.gpus, cluster.free
    holders = [node for node in cluster.nodes if node.gpus >= 1]
    each = ", ".join(" ".join((node.address, f"{node.gpus:g}", *node.kinds)) for node in holders)
    found = f"the Ray cluster{_at(cluster)} has {counted(there, 'GPU')}" + (f" ({each})" if each else "")
    if not any(node.here for node in cluster.nodes):
        text = f"this machine is not a node of the Ray cluster{_at(cluster)}: run ray start --address here first"
        yield PlanFinding("ray_not_here", Level.ERROR, text, surely=False)
    if needed > there:
        sizes = tensor_sizes(inputs.facts, plan.flags, there) if whole_number(plan.flags, TENSOR) == needed else []
        fix = Changes(set={TENSOR: sizes[-1]}) if sizes else None
        text = f"it needs {counted(needed, 'GPU')} (tensor × pipeline × data parallel), and {found}: {WAITS}"
        yield PlanFinding("ray_gpus_too_few", Level.ERROR, text, fix, surely=False)
        return
    if free is not None and free < needed:
        text = f"{found}, of which {free} are free and {needed} are needed: {WAITS} unless other jobs end"
        yield PlanFinding("ray_gpus_busy", Level.WARNING, text)
    else:
        known = "" if free is None else f", {free} free"
        text = f"{found}{known}; Ray chooses which to use, and does not report their memory"
        yield PlanFinding("ray_cluster", Level.ADVICE, text + _memory(inputs, len(holders)))
    tensor, largest = whole_number(plan.flags, TENSOR), max((int(node.gpus) for node in holders), default=0)
    if largest and tensor > largest and whole_number(plan.flags, DATA) == 1:
        stages = whole_number(plan.flags, PIPELINE)
        fix = Changes(set={TENSOR: largest, PIPELINE: stages * tensor // largest}) if tensor % largest == 0 else None
        text = (
            f"tensor parallelism over {tensor} GPUs crosses {math.ceil(tensor / largest)} nodes twice per layer: no "
            f"node has more than {largest}; with pipeline stages only activations cross the network"
        )
        yield PlanFinding("ray_tp_over_nodes", Level.WARNING, text, fix)


def _memory(inputs: PlanInputs, nodes: int) -> str:
    if inputs.host is None or not inputs.host.gpus:
        return ""
    return ": the estimate is for this machine's GPUs" + (", on each node" if nodes > 1 else "")
