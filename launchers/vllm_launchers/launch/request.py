"""What a user requests: the launch of a server, or a restart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from vllm_launchers.presets.model import Workload
from vllm_launchers.vllm.flags.changes import Changes

if TYPE_CHECKING:
    from vllm_launchers.plan.choices.nodes import NodesRequest  # 16 ms at run time, in every command


class LaunchRequest(msgspec.Struct, frozen=True):
    """A launch request; what it leaves out is chosen automatically. ``engine``: ``auto``, ``vllm``, ``simulated``."""

    preset: str
    model: str | None = None
    engine: str = "auto"
    vllm: str | None = None
    name: str | None = None
    host: str | None = None
    port: int | None = None
    changes: Changes = msgspec.field(default_factory=Changes)
    environment: Mapping[str, str] = msgspec.field(default_factory=dict)
    restart: str = "never"
    gpus: tuple[int, ...] = ()
    place: str = ""
    """``auto``: the best set of GPUs. ``offered``: the same, but none if no GPUs are known. ``none``: no GPU, even on a
    recorded host. Otherwise the UUID of a MIG slice. If empty, ``gpus`` are used as given."""
    workload: Workload | None = None
    """Traffic to plan for instead of the preset's, e.g. measured on a running server."""
    standby_of: str = ""
    """The server whose GPUs it shares: it starts while that one sleeps, and only one of them serves at a time."""
    beyond_shares: bool = False
    """Plan also on GPUs of which this user has too small a share; only to show such a plan, never to start it."""
    force: bool = False
    """Start despite errors that are estimates or may be temporary, but not if vLLM would certainly exit."""
    vllm_version: str | None = None
    """Plan for this release, installed or not; such a plan can be shown but not started."""
    from_hub: bool = False
    """Query the Hugging Face hub for facts about a model that is not on this machine."""
    warm_up: bool | None = None
    """Whether the keeper sends a warm-up request before the server is ready; None: as configured."""
    probe: bool | None = None
    """Whether it gets the probe, with any release that supports it; None: as configured."""
    nodes: NodesRequest | None = None
    """The machines of a multi-node server, of which this is one; None: this machine alone."""


class RestartOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options for a restart, a switch to another preset, or a rolling update.

    None keeps the server's port; for the other options it means: as configured.
    """

    force: bool = False
    """As in `LaunchRequest`."""
    port: int | None = None
    warm_up: bool | None = None
    """Whether the keeper sends a warm-up request before the server is ready."""
    probe: bool | None = None
    """Whether it gets the probe; None: as before."""
    prepare: bool | None = None
    """Whether the next generation imports its code and checks its flags while the server still serves, if possible."""
    environment: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Environment variables to add or replace."""
    rollback: bool | None = None
    """Whether to return to the previous flags if it fails before it is ready."""


AS_CONFIGURED = RestartOptions()
