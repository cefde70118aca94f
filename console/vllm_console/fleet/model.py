"""What the console knows of all servers at one moment: immutable, ready to be drawn or printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_console.telemetry.model import Sample, Series, Stage, Window
from vllm_launchers.addresses import base_url
from vllm_launchers.keeper.records import Exit, State
from vllm_launchers.plan.model import Changes, Engine, Flags
from vllm_launchers.presets.model import FlagValue, Objectives, Preset, Workload

if TYPE_CHECKING:
    from vllm_console.diagnosis.model import Condition, Diagnosis
    from vllm_console.telemetry.progress import Startup

    # Not needed to look at servers, and a good part of a command's start-up time.
    from vllm_launchers.machine.gpu.host import Host
    from vllm_launchers.machine.gpu.sharing import Share


@dataclass(frozen=True, slots=True)
class ServerView:
    """One server. ``ours`` is False for a server that this person's keepers did not start: shown, never touched."""

    name: str
    state: State
    state_since: float
    ours: bool = True
    owner: str = ""
    preset: str = ""
    model: str = ""
    engine: Engine | None = None
    host: str = "127.0.0.1"
    port: int = 0
    tls: bool = False
    pid: int | None = None
    gpus: tuple[int, ...] = ()
    argv: tuple[str, ...] = ()
    flags: Flags = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    previous_flags: Flags | None = None
    generation: int = 1
    attempt: int = 0
    reason: str = ""
    """Why it is in this state, in one sentence; for a failed server with the line from its log that shows it."""
    diagnosis: Diagnosis | None = None
    """For a failed server: the named cause, what shows it, and what would mend it."""
    conditions: tuple[Condition, ...] = ()
    """What is the matter with it while it runs, the gravest first; `healthy` alone where nothing is."""
    notice: str = ""
    """What a person should know besides: adopted by a new keeper, open to others without an API key, …"""
    exposed: str = ""
    """Why others can use it: where it listens without an API key; it stands in ``notice`` too. Else empty."""
    exit: Exit | None = None
    next_attempt_at: float | None = None
    downtime_seconds: float | None = None
    workload: Workload | None = None
    objectives: Objectives | None = None
    stages: tuple[Stage, ...] = ()
    startup: Startup | None = None
    """How far its way up is, its silence where that is too long, and what the engine said of its memory."""
    log_path: str = ""
    sample: Sample | None = None
    """The newest look at its metrics; its age is ``snapshot.at - sample.at``."""
    window: Window | None = None
    """The last minute."""
    series: Series | None = None
    """The last quarter of an hour; only for the selected server."""
    load: str = ""
    """What load this console is sending to it, in a few words; empty when none."""

    @property
    def simulated(self) -> bool:
        """Whether the engine is simulated, which every place that shows it must say."""
        return self.engine is not None and self.engine.kind == "simulated"

    @property
    def url(self) -> str:
        """Base URL of its API, as this machine reaches it."""
        return base_url(self.host, self.port, tls=self.tls)


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """Every server at one moment (Unix seconds), sorted by name, ours first."""

    at: float
    hostname: str
    servers: tuple[ServerView, ...] = ()
    notices: tuple[str, ...] = ()
    """What went wrong while looking (an unreadable record, …), one sentence each."""
    host: Host | None = None
    """The machine with its GPUs; None where GPUs are not looked at or cannot be."""
    host_problem: str = ""
    """Why no GPU is shown, or why what is shown is not fresh, in one sentence."""
    host_recorded: bool = False
    """Whether the host is a recorded one, in place of this machine."""
    gpu_shares: tuple[Share, ...] = ()
    """The most of each GPU that this person's servers may hold."""

    def server(self, name: str | None) -> ServerView | None:
        """The server of that name, or None."""
        return next((server for server in self.servers if server.name == name), None)


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """What a person asks to launch; what is left out is chosen. ``engine``: ``auto``, ``vllm`` or ``simulated``."""

    preset: str
    model: str | None = None
    engine: str = "auto"
    vllm: str | None = None
    name: str | None = None
    host: str | None = None
    port: int | None = None
    changes: Changes = field(default_factory=Changes)
    environment: Mapping[str, str] = field(default_factory=dict)
    restart: str = "never"
    gpus: tuple[int, ...] = ()
    place: str = ""
    """``auto``: the best set of GPUs; ``offered``: that where GPUs are known, else none; a MIG slice's UUID. When it
    is empty ``gpus`` are taken as they stand."""
    workload: Workload | None = None
    """Traffic to plan for in place of the preset's, such as what a running server has seen."""
    force: bool = False
    """Start in spite of errors that rest on an estimate or on what may pass; never of those that vLLM ends on."""
    vllm_version: str | None = None
    """Plan for this release, which need not be installed; such a plan can be shown and not started."""
    from_hub: bool = False
    """Ask the Hugging Face hub for facts of the model that are not on this machine."""


__all__ = [
    "Changes",
    "Engine",
    "Exit",
    "FlagValue",
    "Flags",
    "FleetSnapshot",
    "LaunchRequest",
    "Objectives",
    "Preset",
    "Sample",
    "Series",
    "ServerView",
    "Stage",
    "State",
    "Window",
    "Workload",
]
