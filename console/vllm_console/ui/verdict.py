"""What the plan says of a staged change beside what runs now: does it fit, and what becomes of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from rich.style import Style

from vllm_console.fleet.api import Fleet
from vllm_console.fleet.model import Changes
from vllm_console.format import count
from vllm_console.text import plain
from vllm_console.ui.theme import BAD, DIM, OK, WARN
from vllm_launchers.plan.findings import Finding, Level
from vllm_launchers.plan.model import Plan


@dataclass(frozen=True, slots=True)
class Verdict:
    """``sign`` and ``words`` for people."""

    sign: str
    words: str
    style: Style


def ask_verdict(fleet: Fleet, name: str, changes: Changes, now: Plan | None) -> tuple[Plan, Verdict]:
    """Plan a server's restart with and without a change; blocks. ``now`` is the plan without it where it is known.

    Raises:
        FleetError: it cannot be planned.
    """
    before = now or fleet.plan_restart(name, Changes())
    return before, verdict(before, fleet.plan_restart(name, changes))


def verdict(before: Plan, after: Plan) -> Verdict:
    """Whether the change fits, and how many tokens the KV cache has before and after."""
    known = {(finding.code, finding.level) for finding in before.findings}
    new = [finding for finding in after.findings if (finding.code, finding.level) not in known]
    errors = [finding for finding in after.findings if finding.level is Level.ERROR]
    if errors:
        worst = (_of_level(new, Level.ERROR) or errors)[0]
        held = "would not start" if worst.surely else "would hardly start"
        return Verdict("✗", f"{held}: {plain(worst.message)}", BAD)
    tokens = _tokens(before, after)
    warned = _of_level(new, Level.WARNING)
    told = f"; {_message(warned[0])}" if warned else ""
    if after.memory is None:
        return Verdict("–", f"not known whether it fits: too little is known of the model or the GPU{told}", DIM)
    fits = "fits" if after.memory.source == "engine" else "fits by estimate"
    return Verdict("!" if warned else "✓", "; ".join(filter(None, (fits, tokens))) + told, WARN if warned else OK)


def _message(finding: Finding) -> str:
    """What is wrong; not how to undo the change that is judged."""
    message = plain(finding.message)
    return message.partition(": set ")[0] if finding.code == "gpus_unused" else message


def _of_level(findings: list[Finding], level: Level) -> list[Finding]:
    return [finding for finding in findings if finding.level is level]


def _at_once(before: Plan, after: Plan) -> str:
    """How many requests of the full length fit at once, where that becomes another number."""
    old, new = (plan.memory.max_concurrency if plan.memory is not None else None for plan in (before, after))
    if old is None or new is None or abs(new - old) < 0.05 * old:
        return ""
    return f", full-length requests at once {old:.0f} → {new:.0f}"


def _tokens(before: Plan, after: Plan) -> str:
    old = before.memory.kv_tokens if before.memory is not None else None
    new = after.memory.kv_tokens if after.memory is not None else None
    if new is None:
        return ""
    if old is None:
        return f"KV cache {count(new)} tokens"
    if abs(new - old) < 0.005 * max(old, 1):
        return f"KV cache stays at {count(new)} tokens{_at_once(before, after)}"
    return f"KV cache {count(old)} → {count(new)} tokens"
