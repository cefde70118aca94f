"""Fixes that the vLLM in question accepts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from vllm_console.diagnosis.finding import Fix
from vllm_launchers.plan.model import Flags
from vllm_launchers.vllm.flags.flag_table import FlagTable


def accepted(fixes: Sequence[Fix], flags: Flags, version: str | None) -> tuple[Fix, ...]:
    """The fixes after which this vLLM rejects no more of the server's flags than now; all of an unknown vLLM."""
    if not any(fix.changes.set or fix.changes.unset for fix in fixes):
        return tuple(fixes)
    table = _table(version) if version else None
    if table is None:
        return tuple(fixes)
    from vllm_launchers.vllm.flags.check_value import newly_refused

    return tuple(fix for fix in fixes if fix.changes.empty or not newly_refused(table, flags, fix.changes))


@lru_cache(maxsize=8)
def _table(version: str) -> FlagTable | None:
    from vllm_launchers.vllm.flags.releases import UnknownReleaseError, release_table

    try:
        return release_table(version)
    except UnknownReleaseError:
        return None
