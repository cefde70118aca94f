"""Whether a plan's model fits its GPUs: a summary of the plan. Pure."""

from __future__ import annotations

import msgspec

from vllm_launchers.plan.findings import Level
from vllm_launchers.plan.model import Plan


class Fit(msgspec.Struct, frozen=True):
    """``fits`` is None if the plan knows too little about model or GPU. ``error`` is what blocks a start, in one
    sentence; empty if nothing does. ``kv_tokens`` is what the KV cache would hold.
    """

    fits: bool | None = None
    error: str = ""
    kv_tokens: int | None = None


def fit_of(plan: Plan) -> Fit:
    """Summarize a plan's verdict on its model."""
    error = next((finding.message for finding in plan.findings if finding.level is Level.ERROR), "")
    if plan.memory is None:
        return Fit(None, error)
    return Fit(plan.memory.fits, error, plan.memory.kv_tokens if plan.memory.fits else None)
