"""What a plan may know besides what a person asked for; gathered by the fleet, so that planning itself stays pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_launchers.machine.flags.model import FlagTable
from vllm_launchers.machine.gpu.host import Host
from vllm_launchers.machine.gpu.sharing import Share
from vllm_launchers.machine.modelfacts.model import ModelFacts
from vllm_launchers.plan.budget.model import EngineReport


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The machine beside its GPUs, at one moment. None is 'not known', and what is not known is not complained of.

    ``port_holder`` says who has the port (``pid 4711, anna``), empty for a free one. ``starting`` are names of servers
    of ours that are on their way up this second. ``open_files`` is the soft limit (``ulimit -n``). Sizes in GiB.
    """

    port_holder: str = ""
    starting: tuple[str, ...] = ()
    open_files: int | None = None
    shm_free_gib: float | None = None
    memory_free_gib: float | None = None
    model_disk: str = ""
    """The folder that a download would go to."""
    model_disk_free_gib: float | None = None
    has_hub_token: bool | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """What the server inherits, without secrets."""


@dataclass(frozen=True, slots=True)
class Learned:
    """What an earlier start of this model on this kind of GPU reported, and what had been predicted for it then."""

    report: EngineReport
    predicted_weights_gib: float | None = None
    predicted_overhead_gib: float | None = None
    predicted_kv_gib: float | None = None


@dataclass(frozen=True, slots=True)
class Knowledge:
    """All that is known of one launch's surroundings. ``host`` is None where GPUs are not looked at."""

    facts: ModelFacts | None = None
    flags: FlagTable | None = None
    host: Host | None = None
    shares: tuple[Share, ...] = ()
    surroundings: Surroundings = field(default_factory=Surroundings)
    learned: Learned | None = None
