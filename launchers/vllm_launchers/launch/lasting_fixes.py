"""Fixes that hold: the plan made with one has no new error, and an error that it is for no more. Pure.

A fix is found for the layout and the GPUs of the present plan. The next plan may choose others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from msgspec.structs import replace

from vllm_launchers.errors import OperationError
from vllm_launchers.plan.checks.check import errors
from vllm_launchers.plan.choices.choice import PARALLEL_FLAGS, Source
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.plan.flags import QUANTIZATION, TENSOR, normalise_setting
from vllm_launchers.plan.model import Plan
from vllm_launchers.vllm.flags.changes import Changes, FlagValue

PlanAgain = Callable[[Changes], Plan]
"""The plan of the same request with a fix."""

_LAYOUT = (*PARALLEL_FLAGS, QUANTIZATION)


def with_lasting_fixes(plan: Plan, again: PlanAgain) -> Plan:
    """The plan with only those fixes that hold, if need be together with its layout."""
    return replace(plan, findings=tuple(_checked(one, plan, again) for one in plan.findings))


def with_fix(changes: Changes, fix: Changes) -> Changes:
    """What a request changes once a fix is applied to it."""
    given = dict(normalise_setting(name, value) for name, value in changes.set.items())
    kept = {name: value for name, value in {**given, **fix.set}.items() if name not in fix.unset}
    return Changes(kept, tuple(dict.fromkeys((*changes.unset, *fix.unset))))


def _checked(finding: PlanFinding, plan: Plan, again: PlanAgain) -> PlanFinding:
    if finding.fix is None:
        return finding
    for fix in (finding.fix, _with_layout(finding.fix, plan)):
        if _holds(finding, fix, plan, again):
            return replace(finding, fix=fix)
    return replace(finding, fix=None)


def _holds(finding: PlanFinding, fix: Changes, plan: Plan, again: PlanAgain) -> bool:
    try:
        after = again(fix)
    except OperationError:  # no plan can be made with it: it takes more GPUs than there are for it
        return False
    now, then = (Counter(one.code for one in errors(made.findings)) for made in (plan, after))
    return then <= now and (finding.level is not Level.ERROR or then[finding.code] < now[finding.code])


def _with_layout(fix: Changes, plan: Plan) -> Changes:
    """The fix with the layout that it was found for, as far as the machine decided that, so that it stays."""
    chosen = {choice.flag: choice.value for choice in plan.choices if choice.source is Source.MACHINE}
    kept: dict[str, FlagValue] = {TENSOR: 1} if TENSOR in chosen else {}
    kept |= {name: value for name in _LAYOUT if (value := chosen.get(name)) is not None}
    more = {name: value for name, value in kept.items() if name not in fix.set and name not in fix.unset}
    return Changes({**fix.set, **more}, fix.unset)
