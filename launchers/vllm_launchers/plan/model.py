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
    """A launch, resolved: everything the keeper needs and everything a user is shown before it runs.

    ``flags`` are the effective ones (without model, host and port, which have their own fields); ``reasons`` says, per
    flag, why it is set. ``secrets`` are only *names* of environment variables.
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
    """Whether these were selected for it, not named by a user: then it may get others later."""
    placement: str = ""
    """Why it gets these GPUs, in one line."""
    sets: tuple[Placement, ...] = ()
    """The candidate sets of GPUs, best first; empty if GPUs are unknown."""
    choices: tuple[Choice, ...] = ()
    """Every flag that is set, with reason, trade-off and source."""
    memory: MemoryBudget | None = None
    """Its memory budget; None if too little is known about model or GPU."""
    estimated: MemoryBudget | None = None
    """The estimate before an earlier start's report corrected or replaced it."""
    paces: Paces | None = None
    """Its expected speed; None if too little is known about model or GPU."""
    alternatives: tuple[Alternative, ...] = ()
    """It and other ways to launch the model here, itself first; empty if there is only one way."""
    findings: tuple[PlanFinding, ...] = ()
    """What blocks it, will hurt it or could be better, worst first."""
    probe: ProbePlan = ProbePlan()
    """The variables that add the probe, or why it has none."""
    nodes: NodesPlan | None = None
    """The machines that it is spread over; None for one."""
    verdict: EngineVerdict | None = None
    """The engine's own verdict on the flags; None if it was not asked."""

    @property
    def tls(self) -> bool:
        """Whether the server will use TLS."""
        return any(self.flags.get(name) for name in TLS_FLAGS)

    @property
    def served_name(self) -> str:
        """The name by which clients ask for its model; the first one, if it has several."""
        return served_name(self.flags, self.model)

    @property
    def url(self) -> str:
        """Base URL of the server's API, as this machine will reach it."""
        return base_url(self.host, self.port, tls=self.tls)


# -- whether its model fits its GPUs ----------------------------------------------------------------------------------


class MemoryFit(msgspec.Struct, frozen=True):
    """``fits`` is None if the plan knows too little about model or GPU. ``error`` is what blocks a start, in one
    sentence; empty if nothing does. ``kv_tokens`` is what the KV cache would hold. ``gpus`` are those it fits on; empty
    if it does not, or the plan uses none. ``incomplete`` says which of its files a start would have to download first;
    empty if none.
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
