"""A user's requests: to launch a server, and to start one again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from vllm_launchers.presets.model import Workload
from vllm_launchers.vllm.flags.changes import Changes

if TYPE_CHECKING:
    from vllm_launchers.plan.choices.nodes import NodesRequest  # 16 ms at run time, in every command


class LaunchRequest(msgspec.Struct, frozen=True):
    """A user's launch request; what is left out is chosen. ``engine``: ``auto``, ``vllm`` or ``simulated``."""

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
    """``auto``: the best set of GPUs; ``offered``: the same if GPUs are known, else none; ``none``: no GPU, also on a
    recorded host; a MIG slice's UUID. If empty, ``gpus`` are used as given."""
    workload: Workload | None = None
    """Traffic to plan for instead of the preset's, such as a running server's."""
    standby_of: str = ""
    """The server on whose GPUs it starts while that sleeps; one of the two serves at a time."""
    force: bool = False
    """Start despite errors that rest on an estimate or may pass; never those that vLLM ends on."""
    vllm_version: str | None = None
    """Plan for this release, which need not be installed; such a plan can be shown but not started."""
    from_hub: bool = False
    """Query the Hugging Face hub for facts of a model that is not on this machine."""
    warm_up: bool | None = None
    """Whether the keeper sends a warm-up request before the server is ready; None: as configured."""
    probe: bool | None = None
    """Whether it gets the probe, with any release that takes it; None: as configured."""
    nodes: NodesRequest | None = None
    """The equal machines that it is spread over, of which this is one; None: this machine alone."""


class RestartOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a server is started again: restarted, switched to another preset, or started next to itself.

    None keeps the server's port, and what is configured for the rest.
    """

    force: bool = False
    """Restart despite errors that rest on an estimate or may pass; never those that vLLM ends on."""
    port: int | None = None
    warm_up: bool | None = None
    """Whether the keeper sends a warm-up request before the server is ready."""
    probe: bool | None = None
    """Whether it gets the probe; None: as when it was started."""
    prepare: bool | None = None
    """Whether the next generation's process loads its code and judges its flags while the server serves, where that is
    possible."""
    environment: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Environment variables that are added to, or replace, those that it was started with."""
    rollback: bool | None = None
    """Whether the flags before it return if it fails before it is ready."""


AS_CONFIGURED = RestartOptions()
