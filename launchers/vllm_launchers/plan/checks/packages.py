"""Packages that vLLM needs for a feature and does not bring. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_launchers.plan.checks.request import variables
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.vllm.flags.changes import Changes


def package_findings(
    plan: Plan, inputs: PlanInputs, package: str, why: str, fix: Changes | None = None, *, surely: bool = True
) -> Iterator[PlanFinding]:
    """Report a package that vLLM's environment lacks; a folder in ``PYTHONPATH`` may have it.

    ``why`` says what needs it: ``the method suffix needs the package arctic-inference``.
    """
    if package not in plan.engine.lacks:
        return
    if variables(plan, inputs).get("PYTHONPATH"):
        text = (
            f"{why}, which is not installed alongside vLLM: unless a folder in PYTHONPATH has it, vLLM will not start "
            f"(pip install {package})"
        )
        yield PlanFinding("package_missing", Level.WARNING, text)
        return
    text = f"vLLM will not start: {why}, which is not installed alongside it (pip install {package})"
    yield PlanFinding("package_missing", Level.ERROR, text, fix, surely=surely)
