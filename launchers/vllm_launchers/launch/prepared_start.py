"""How the start of a plan is prepared while another generation serves."""

from __future__ import annotations

import os
import sys

from vllm_launchers.plan.model import EngineKind, Plan
from vllm_launchers.prepared.command import prepared_command

SIMULATED = ("-m", "vllm_launchers.simulated.prepared")


def prepared_argv(plan: Plan) -> tuple[str, ...]:
    """The words that start this plan's server in two steps; empty if its engine can't be started so."""
    if plan.engine.kind is EngineKind.SIMULATED:
        return (sys.executable, *SIMULATED, *plan.argv[len(plan.engine.command) :])
    return prepared_command(plan.argv, {**os.environ, **plan.environment}) or ()
