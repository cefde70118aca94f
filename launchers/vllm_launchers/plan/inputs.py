"""Inputs of a plan besides the user's request. The caller gathers them, so that planning itself is pure."""

from __future__ import annotations

import msgspec

from vllm_launchers.host.environment import HostEnvironment
from vllm_launchers.host.gpu.host import Host
from vllm_launchers.host.gpu.sharing import GpuShare
from vllm_launchers.plan.budget.budget import EngineReport
from vllm_launchers.vllm.flags.flag_table import FlagTable
from vllm_launchers.vllm.flags.releases import assumed_table
from vllm_launchers.vllm.modelfacts.facts import ModelFacts
from vllm_launchers.vllm.ray_cluster import RayCluster


class EarlierReport(msgspec.Struct, frozen=True):
    """The memory report of an earlier start of this model on this GPU model, and the estimate for it."""

    report: EngineReport
    predicted_weights_gib: float | None = None
    predicted_kv_gib: float | None = None
    predicted_kv_tokens: int | None = None

    @property
    def tokens_per_gib(self) -> float | None:
        """Ratio of reported to predicted tokens per GiB of KV cache; None if unknown."""
        report = self.report
        if not (report.kv_tokens and report.kv_gib and self.predicted_kv_tokens and self.predicted_kv_gib):
            return None
        ratio = report.kv_tokens / report.kv_gib * self.predicted_kv_gib / self.predicted_kv_tokens
        return ratio if ratio > 0 else None


class PlanInputs(msgspec.Struct, frozen=True):
    """Everything that a plan depends on besides the request. ``host`` is None if GPUs are not read."""

    facts: ModelFacts | None = None
    flags: FlagTable = msgspec.field(default_factory=assumed_table)
    host: Host | None = None
    shares: tuple[GpuShare, ...] = ()
    environment: HostEnvironment = msgspec.field(default_factory=HostEnvironment)
    draft: ModelFacts | None = None
    """Facts about the draft model, if the flags name a known one."""
    model_problem: str = ""
    """Why there is no such model, in one sentence; empty if it may exist."""
    ray: RayCluster | None = None
    """The Ray cluster that runs the workers; None without Ray, or if it can't be queried."""
    limited_from: Host | None = None
    """The host with the GPUs that ``CUDA_VISIBLE_DEVICES`` hides from an automatic choice; None if it hides none."""

    @property
    def machine(self) -> Host | None:
        """The host with all of its GPUs, also hidden ones."""
        return self.limited_from or self.host
