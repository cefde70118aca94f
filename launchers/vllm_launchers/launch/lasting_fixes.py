"""Drops fixes that would not work: a fix is kept if the plan made with it has no new error and no longer the error it
fixes. Pure.

Checks find a fix for the layout and GPUs of the current plan, but the next plan may choose others. Ways out of a launch
without a place are kept if the plan made with them has one and fits there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from msgspec.structs import replace

from vllm_launchers.errors import OperationError
from vllm_launchers.launch.errors import NoPlaceError, WayOut
from vllm_launchers.plan.checks.check import errors
from vllm_launchers.plan.checks.memory import TOO_LITTLE
from vllm_launchers.plan.choices.choice import PARALLEL_FLAGS, Source
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.plan.flags import QUANTIZATION, TENSOR, normalize_setting
from vllm_launchers.plan.model import Plan
from vllm_launchers.vllm.flags.changes import Changes, FlagValue

PlanAgain = Callable[[Changes], Plan]
"""Plans the same request with a fix applied."""

PlanTried = Callable[[WayOut], Plan]
"""Plans the same request as if a way out had been taken."""

_LAYOUT = (*PARALLEL_FLAGS, QUANTIZATION)


def with_lasting_fixes(plan: Plan, again: PlanAgain) -> Plan:
    """The plan with only the fixes that work. A fix that works only with the plan's layout also sets that layout."""
    return replace(plan, findings=tuple(_checked(one, plan, again) for one in plan.findings))


def with_lasting_way(error: NoPlaceError, tried: PlanTried) -> NoPlaceError:
    """The error with only the first way out that works, if any does."""
    first = next((way for way in error.ways if _leads_out(way, tried)), None)
    return NoPlaceError(error.problem, error.sets, (first,) if first is not None else ())


def _leads_out(way: WayOut, tried: PlanTried) -> bool:
    if way.fix is None and not way.stop:
        return True  # it is only advice
    try:
        after = tried(way)
    except OperationError:
        return False
    return not any(one.code in TOO_LITTLE for one in after.findings)


def with_fix(changes: Changes, fix: Changes) -> Changes:
    """The changes of a request with a fix applied."""
    given = dict(normalize_setting(name, value) for name, value in changes.set.items())
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
    except OperationError:  # no plan is possible with it, e.g. because it needs more GPUs than are available
        return False
    now, then = (Counter(one.code for one in errors(made.findings)) for made in (plan, after))
    return then <= now and (finding.level is not Level.ERROR or then[finding.code] < now[finding.code])


def _with_layout(fix: Changes, plan: Plan) -> Changes:
    """The fix plus those parts of the plan's layout that were chosen automatically, so that they stay as they are."""

    chosen = {choice.flag: choice.value for choice in plan.choices if choice.source is Source.MACHINE}
    kept: dict[str, FlagValue] = {TENSOR: 1} if TENSOR in chosen else {}
    kept |= {name: value for name in _LAYOUT if (value := chosen.get(name)) is not None}
    more = {name: value for name, value in kept.items() if name not in fix.set and name not in fix.unset}
    return Changes({**fix.set, **more}, fix.unset)
