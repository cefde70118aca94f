"""Why a restart or a switch was refused, in words that one can follow in the console."""

from __future__ import annotations

from vllm_console.fleet.api import FleetError, NoPlaceError, UnfitError
from vllm_console.fleet.model import Changes
from vllm_console.text import plain
from vllm_console.ui.panes.bars import flag_text
from vllm_launchers.plan.findings import Finding

_FOR_COMMANDS = (": stop it and start it under", ". Leave --gpus")
"""Where a sentence about GPUs begins to say what to type as a command."""


def refusal_rows(error: FleetError, mend: str) -> list[str]:
    """A row per thing that stands in the way, the first the gravest. ``mend``: how flags are changed."""
    if isinstance(error, UnfitError) and error.findings:
        return [_finding(finding, mend) for finding in error.findings]
    text = plain(str(error).strip().partition("\n")[0])
    for words in _FOR_COMMANDS if isinstance(error, NoPlaceError) else ():
        if words in text:
            text = f"{text.partition(words)[0]}. s stops it, then n launches it under this name on other GPUs"
    return [text.removesuffix(".") + "."]


def _finding(finding: Finding, mend: str) -> str:
    message = plain(finding.message).removesuffix(".")
    return f"{message}. {_fix(finding.fix)} ({mend})." if finding.fix is not None else f"{message}."


def _fix(fix: Changes) -> str:
    """``What mends it: --max-model-len 8192, no --swap-space``."""
    words = [f"--{plain(name)} {flag_text(value)}" for name, value in fix.set.items()]
    return "What mends it: " + ", ".join([*words, *(f"no --{plain(name)}" for name in fix.unset)])
