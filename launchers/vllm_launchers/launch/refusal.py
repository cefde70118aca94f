"""Refuses plans with errors, and formats findings for commands."""

from __future__ import annotations

from vllm_launchers.launch.errors import UnfitError
from vllm_launchers.plan.checks.check import errors
from vllm_launchers.plan.command_line import line_word
from vllm_launchers.plan.findings import PlanFinding
from vllm_launchers.plan.model import Plan
from vllm_launchers.vllm.flags.changes import Changes, value_word


def refuse_unfit(plan: Plan, *, force: bool) -> None:
    """Refuse a launch that would fail.

    Raises:
        UnfitError: the plan has errors; with ``force``, errors that vLLM would certainly exit with.
    """
    found = errors(plan.findings)
    standing = tuple(one for one in found if one.surely) if force else found
    if not standing:
        return
    forceable = not any(one.surely for one in found)
    lines = [plan_finding_text(one) for one in standing]
    text = f"plan error: {lines[0]}" if len(lines) == 1 else "\n".join(["plan errors:", *(f"  {s}" for s in lines)])
    hint = "\n  --force starts it anyway" if forceable and not force else ""
    raise UnfitError(text + hint, standing, forceable=forceable)


def plan_finding_text(finding: PlanFinding) -> str:
    """A finding in one line: message, code, and the change that fixes it."""

    fix = f" (fix: {fix_options(finding.fix)})" if finding.fix is not None else ""
    return f"{finding.message} [{finding.code}]{fix}"


def fix_options(fix: Changes) -> str:
    """A change of flags as command-line options: ``--set max-model-len=8192``."""
    words = [f"--set {line_word(f'{name}={value_word(value)}')}" for name, value in fix.set.items()]
    return " ".join([*words, *(f"--unset {name}" for name in fix.unset)])
