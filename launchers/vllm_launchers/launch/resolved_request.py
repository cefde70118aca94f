"""A launch request after everything that it names has been looked up: the input of planning."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from vllm_launchers.keeper.records import RestartPolicy
from vllm_launchers.launch.place import GpuFinder
from vllm_launchers.plan.build import PlanRequest
from vllm_launchers.plan.choices.nodes import NodesRequest
from vllm_launchers.plan.findings import PlanFinding
from vllm_launchers.plan.probe import ProbeWish
from vllm_launchers.presets.model import Workload


class ResolvedRequest(PlanRequest, frozen=True):
    """A request whose preset, engine, model, port, and so on have been looked up.

    ``workload``: measured traffic to use instead of the preset's. ``sources`` is set for a restart: flags other than
    ``changes`` stay as they are. Without a ``gpu_finder``, or on a MIG slice, the server keeps its ``gpus``. ``found``:
    problems that are known before planning.
    """

    gpus: tuple[int, ...] = ()
    workload: Workload | None = None
    sources: Mapping[str, str] | None = None
    gpu_finder: GpuFinder | None = None
    found: tuple[PlanFinding, ...] = ()
    restart: RestartPolicy = msgspec.field(default_factory=RestartPolicy)
    warm_up: bool = True
    probe: ProbeWish = "auto"
    probe_asked: bool | None = None
    """An option that overrides ``probe``."""
    standby_of: str = ""
    beside: str = ""
    """The server next to which a rolling update starts this one."""
    nodes: NodesRequest | None = None
    """The machines of a multi-node server; None: this machine alone."""
    recorded_host: str | None = None
    """Name of the recorded host that it is planned for; None for this machine."""
    gpus_unnamed: bool = False
    """Whether nobody chooses its GPUs, so that vLLM takes the first visible ones."""
