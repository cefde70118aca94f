"""Whether a plan may be started, and findings in words as commands print them."""

from __future__ import annotations

from vllm_console.fleet.api import UnfitError
from vllm_launchers.plan.checks.check import errors
from vllm_launchers.plan.findings import Finding
from vllm_launchers.plan.model import Changes, Plan
from vllm_launchers.plan.shell_words import line_word


def read_only_words(why: str) -> str:
    """The refusal of whatever would change something; ``why`` is what makes it read-only, or nothing."""
    told = f" ({why})" if why else ""
    return f"this console is read-only{told}: it shows everything and changes nothing"


def refuse_unfit(plan: Plan, *, force: bool) -> None:
    """A launch that would end in an error is not begun.

    Raises:
        UnfitError: the plan finds errors; with ``force`` only those that vLLM itself would surely end on.
    """
    found = errors(plan.findings)
    standing = tuple(one for one in found if one.surely) if force else found
    if not standing:
        return
    forceable = not any(one.surely for one in found)
    lines = [finding_words(one) for one in standing]
    head = "it would not start: "
    text = head + lines[0] if len(lines) == 1 else "\n".join([f"{head}{len(lines)} errors", *(f"  {s}" for s in lines)])
    hint = "\n  --force starts it all the same" if forceable and not force else ""
    raise UnfitError(text + hint, standing, forceable=forceable)


def finding_words(finding: Finding) -> str:
    """A finding in one line: its code, its sentence, and the change that mends it."""
    fix = f" (mend it with {fix_words(finding.fix)})" if finding.fix is not None else ""
    return f"{finding.message} [{finding.code}]{fix}"


def fix_words(fix: Changes) -> str:
    """A change of flags as it is given to a command: ``--set max-model-len=8192``."""
    words = [f"--set {line_word(f'{name}={_value(value)}')}" for name, value in fix.set.items()]
    return " ".join([*words, *(f"--unset {name}" for name in fix.unset)])


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
