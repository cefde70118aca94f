"""Replaces a plan's findings about flags by the engine's own verdict. Pure."""

from __future__ import annotations

import re
from collections.abc import Hashable
from enum import StrEnum

import msgspec
from msgspec.structs import replace

from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.plan.findings import Level, PlanFinding, by_weight
from vllm_launchers.plan.model import Plan
from vllm_launchers.vllm.engines import EngineKind
from vllm_launchers.vllm.flags.changes import Changes

REFUSED = "vllm_refuses"
"""Code of the finding with vLLM's message."""

PARSED = frozenset({"flag_unknown", "flag_dead", "flag_too_new"})
"""Findings that vLLM's argument parser decides."""
CHECKED = PARSED | {"flag_value", "batch_too_small", "context_over_model", "quantization_mismatch", "tp_not_divisor"}
"""Findings that the parser or ``create_engine_config`` decides."""

MOST_CHARACTERS = 600
"""Maximum number of characters of vLLM's message in a finding."""

_FLAG = lazy_pattern(r"--([a-z0-9][a-z0-9._-]*)")


class EngineAnswer(StrEnum):
    """The engine's verdict on the flags; `UNKNOWN` if it can't be asked."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    UNKNOWN = "unknown"


class EngineVerdict(msgspec.Struct, frozen=True):
    """The engine's verdict on the flags of a plan.

    ``message``: the engine's reason for refusing them, or why it can't be asked. ``version``: the version of the vLLM
    that was asked; empty if unknown. ``parser_only``: the configuration was not checked. ``fix``: the change that the
    message suggests, if any.
    """

    answer: EngineAnswer
    message: str = ""
    version: str = ""
    parser_only: bool = False
    fix: Changes | None = None


def question(plan: Plan) -> Hashable:
    """What a verdict depends on: equal for plans that differ only in name, address, or reasons."""
    flags = tuple(sorted((name, repr(value)) for name, value in plan.flags.items()))
    return plan.engine, plan.model, flags, tuple(sorted(plan.environment.items()))


def with_verdict(plan: Plan, verdict: EngineVerdict) -> Plan:
    """The plan with the engine's verdict in place of findings about the same flags."""
    found = [one for one in plan.findings if one.code != REFUSED]
    match verdict.answer:
        case EngineAnswer.ACCEPTED:
            wrong = PARSED if verdict.parser_only else CHECKED
            kept = [one for one in found if not (one.code in wrong and _certain_error(one))]
        case EngineAnswer.REFUSED:
            # vLLM stops at its first error, so flags that its message does not mention may still be wrong.
            same = [one for one in found if one.code in CHECKED and _speaks_of(verdict.message, one)]
            fix = next((one.fix for one in same if one.fix is not None), verdict.fix)
            # Not certain: the cause may be temporary, such as a network problem or a missing file.
            refused = PlanFinding(REFUSED, Level.ERROR, format_verdict(plan, verdict), fix, surely=False)
            kept = [refused, *(one for one in found if one not in same)]
        case EngineAnswer.UNKNOWN:
            kept = found
    return replace(plan, findings=by_weight(kept), verdict=verdict)


def _certain_error(finding: PlanFinding) -> bool:
    return finding.level is Level.ERROR and finding.surely


def _speaks_of(message: str, finding: PlanFinding) -> bool:
    """Whether vLLM's message names a flag that a finding is about."""
    if finding.level is not Level.ERROR:
        return False
    fix = finding.fix or Changes()
    names = {*_FLAG.findall(finding.message), *fix.set, *fix.unset}
    words = re.findall(r"[a-z0-9-]+", message.lower().replace("_", "-"))
    return any(name.partition(".")[0] in (word.lstrip("-") for word in words) for name in names)


def format_verdict(plan: Plan, verdict: EngineVerdict) -> str:
    """The verdict as one sentence."""
    real = plan.engine.kind is EngineKind.VLLM
    name = f"vLLM {verdict.version.partition('+')[0]}" if real and verdict.version else plan.engine.label
    match verdict.answer:
        case EngineAnswer.ACCEPTED if verdict.parser_only:
            return f"{name}'s parser accepts these flags; without the GPU it can't check more"
        case EngineAnswer.ACCEPTED:
            return f"{name} accepts these flags"
        case EngineAnswer.REFUSED:
            text = "; ".join(line.strip() for line in verdict.message.splitlines() if line.strip())
            return f"{name} refuses: {text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + '…'}"
        case EngineAnswer.UNKNOWN:
            return f"{name} can't be asked about these flags: {verdict.message}"
