"""A plan's inputs besides the user's request; gathered by the caller, so that planning itself stays pure."""

from __future__ import annotations

import msgspec

from vllm_launchers.host.environment import HostEnvironment
from vllm_launchers.host.gpu.host import Host
from vllm_launchers.host.gpu.sharing import GpuShare
from vllm_launchers.plan.budget.budget import EngineReport
from vllm_launchers.vllm.flags.flag_table import FlagTable
from vllm_launchers.vllm.modelfacts.facts import ModelFacts
from vllm_launchers.vllm.ray_cluster import RayCluster


class EarlierReport(msgspec.Struct, frozen=True):
    """The report of an earlier start of this model on this kind of GPU, and the prediction for it."""

    report: EngineReport
    predicted_weights_gib: float | None = None
    predicted_kv_gib: float | None = None
    predicted_kv_tokens: int | None = None

    @property
    def tokens_per_gib(self) -> float | None:
        """The ratio of reported to predicted tokens per GiB of KV cache; None if unknown."""
        report = self.report
        if not (report.kv_tokens and report.kv_gib and self.predicted_kv_tokens and self.predicted_kv_gib):
            return None
        ratio = report.kv_tokens / report.kv_gib * self.predicted_kv_gib / self.predicted_kv_tokens
        return ratio if ratio > 0 else None


class PlanInputs(msgspec.Struct, frozen=True):
    """The environment of one launch. ``host`` is None if GPUs are not read."""

    facts: ModelFacts | None = None
    flags: FlagTable | None = None
    host: Host | None = None
    shares: tuple[GpuShare, ...] = ()
    environment: HostEnvironment = msgspec.field(default_factory=HostEnvironment)
    learned: EarlierReport | None = None
    draft: ModelFacts | None = None
    """The speculative model for this one, if the flags name a known one."""
    model_problem: str = ""
    """Why there is no such model, in one sentence; empty if there may be one."""
    ray: RayCluster | None = None
    """The Ray cluster that runs its workers; None without Ray, or if that can't be asked."""
