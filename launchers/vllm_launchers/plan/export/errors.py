"""Why a plan cannot be written in some form."""

from __future__ import annotations

from vllm_launchers.plan.errors import PlanError


class ExportError(PlanError):
    """A plan that cannot be said in the form asked for; the text is one clear sentence."""
