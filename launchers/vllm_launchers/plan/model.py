"""A plan and its parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from vllm_launchers.addresses import TLS_FLAGS, base_url
from vllm_launchers.plan.findings import Level
from vllm_launchers.plan.flags import served_name
from vllm_launchers.plan.probe import ProbePlan
from vllm_launchers.vllm.engines import Engine
from vllm_launchers.vllm.flags.changes import Flags

if TYPE_CHECKING:
    from vllm_launchers.plan.alternatives import Alternative
    from vllm_launchers.plan.budget.budget import MemoryBudget
    from vllm_launchers.plan.choices.choice import Choice
    from vllm_launchers.plan.engine_verdict import EngineVerdict
    from vllm_launchers.plan.findings import PlanFinding
    from vllm_launchers.plan.nodes import NodesPlan
    from vllm_launchers.plan.pace import Paces
    from vllm_launchers.plan.placement import Placement


class Plan(msgspec.Struct, frozen=True):
    """A planned launch: everything that the keeper needs, and everything that a user sees before it runs.

    ``flags`` are the effective ones (without model, host, and port, which have their own fields); ``reasons`` says why
    each flag is set. ``secrets`` are only *names* of environment variables.
    """

    preset: str
    model: str
    engine: Engine
    host: str
    port: int
    argv: tuple[str, ...]
    flags: Flags
    reasons: Mapping[str, str]
    environment: Mapping[str, str]
    secrets: tuple[str, ...] = ()
    gpus: tuple[int, ...] = ()
    gpus_chosen: bool = False
    """Whether they were chosen automatically, not named by a user, so that a restart may choose others."""
    placement: str = ""
    """Why it gets these GPUs, in one line."""
    sets: tuple[Placement, ...] = ()
    """Candidate sets of GPUs, best first; empty if GPUs are unknown."""
    choices: tuple[Choice, ...] = ()
    """All flags that are set, each with reason, trade-off, and source."""
    memory: MemoryBudget | None = None
    """Its memory budget; None if too little is known about model or GPU, or as in ``unestimated``."""
    unestimated: str = ""
    """Why there is no memory budget, as a clause: flags that vLLM refuses or whose effect is unknown; else empty."""
    estimated: MemoryBudget | None = None
    """The memory estimate before the report of an earlier start corrected or replaced it."""
    paces: Paces | None = None
    """Its expected speed; None if too little is known about model or GPU."""
    alternatives: tuple[Alternative, ...] = ()
    """This plan and other ways to launch the model here; empty if there is only one way."""
    findings: tuple[PlanFinding, ...] = ()
    """Errors, warnings, and advice, worst first."""
    probe: ProbePlan = ProbePlan()
    """The variables that add the probe, or why there is none."""
    nodes: NodesPlan | None = None
    """The machines of a multi-node server; None for a single machine."""
    verdict: EngineVerdict | None = None
    """The engine's own verdict on the flags; None if it was not asked."""

    @property
    def tls(self) -> bool:
        """Whether the server will use TLS."""
        return any(self.flags.get(name) for name in TLS_FLAGS)

    @property
    def served_name(self) -> str:
        """The name that clients use for its model; the first one, if it has several."""
        return served_name(self.flags, self.model)

    @property
    def url(self) -> str:
        """Base URL of the server's API, as reached from this machine."""
        return base_url(self.host, self.port, tls=self.tls)


# -- whether its model fits its GPUs ----------------------------------------------------------------------------------


class MemoryFit(msgspec.Struct, frozen=True):
    """Whether a plan's model fits.

    ``fits`` is None if too little is known about model or GPU. ``error``: what would prevent the start, one sentence,
    or empty. ``kv_tokens``: size of the KV cache. ``gpus``: the GPUs it fits on; empty if it does not fit or uses none.
    ``incomplete``: which files a start would have to download first, or empty.
    """

    fits: bool | None = None
    error: str = ""
    kv_tokens: int | None = None
    gpus: tuple[int, ...] = ()
    incomplete: str = ""


def fit_of(plan: Plan) -> MemoryFit:
    """Summarize a plan's verdict on its model."""
    error = next((finding.message for finding in plan.findings if finding.level is Level.ERROR), "")
    incomplete = next((finding.message for finding in plan.findings if finding.code == "model_incomplete"), "")
    if plan.memory is None:
        return MemoryFit(None, error, incomplete=incomplete)
    if not plan.memory.fits:
        return MemoryFit(plan.memory.fits, error, incomplete=incomplete)
    return MemoryFit(True, error, plan.memory.kv_tokens, plan.gpus, incomplete)
