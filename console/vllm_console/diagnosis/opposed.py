"""Changes that would make an open finding worse, and fixes that do. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from vllm_console.diagnosis.finding import Finding, Fix, Severity, title_of_code
from vllm_launchers.plan.flags import BATCHED, SEQUENCES, token_count
from vllm_launchers.vllm.flags.changes import Flags, FlagValue

UP, DOWN = 1, -1

_WORSE_BY: Mapping[str, Mapping[str, int]] = {
    "prefill_contention": {BATCHED: UP},
    "slow_tokens": {BATCHED: UP, SEQUENCES: UP},
    "slow_first_token": {BATCHED: DOWN},
    "kv_cache_pressure": {SEQUENCES: UP},
    "preempting": {SEQUENCES: UP},
    "oversubscribed_memory": {SEQUENCES: UP},
    "oversubscribed_sequences": {SEQUENCES: DOWN},
}
"""By finding code, the direction in which changing a flag makes it worse, even if none of its fixes does."""


def opposed(findings: Sequence[Finding], present: Flags, wanted: Flags) -> Mapping[str, Finding]:
    """The flags whose ``wanted`` value would make an open finding worse, with that finding.

    It would if a fix moves the flag in the opposite direction. ``present`` are the current flags, including vLLM's own
    values for unset ones as far as known. Notes are ignored.
    """
    severe = [one for one in findings if one.severity in (Severity.CRITICAL, Severity.WARNING)]
    return {
        flag: finding
        for flag, value in wanted.items()
        if (finding := next((one for one in severe if _worsens(one, flag, present.get(flag), value)), None)) is not None
    }


def with_conflicts(findings: Sequence[Finding], present: Flags) -> tuple[Finding, ...]:
    """The findings, where each fix that would make another of them worse says so in its trade-off.

    ``findings`` are all open ones, in the order in which they are shown; ``present`` as for `opposed`.
    """
    return tuple(
        replace(one, fixes=tuple(_with_conflict(fix, findings[:at], findings[at + 1 :], present) for fix in one.fixes))
        for at, one in enumerate(findings)
    )


def _with_conflict(fix: Fix, above: Sequence[Finding], below: Sequence[Finding], present: Flags) -> Fix:
    wanted = {flag: value for flag, value in fix.changes.set.items() if flag in present}
    others = {one.code: one for one in opposed((*above, *below), present, wanted).values()}
    said = [
        f"Works against the finding '{title_of_code(code)}'{', which is ranked higher' if other in above else ''}."
        for code, other in others.items()
    ]
    return replace(fix, tradeoff=" ".join(filter(None, (fix.tradeoff, *said)))) if said else fix


def _worsens(finding: Finding, flag: str, present: FlagValue | None, wanted: FlagValue) -> bool:
    worse = {_WORSE_BY.get(finding.code, {}).get(flag)}
    worse |= {
        -way
        for fix in finding.fixes
        if flag in fix.changes.set and (way := _direction(present, fix.changes.set[flag])) is not None
    }
    way = _direction(present, wanted)
    # From an unknown value, any change may be in the wrong direction.
    return bool(worse - {None}) if way is None else way in worse


def _direction(present: FlagValue | None, value: FlagValue) -> int | None:
    """Whether a number increases or a switch is turned on; None without an order or a known present value."""
    one, other = _number(present), _number(value)
    if one is None or other is None or one == other:
        return None
    return UP if other > one else DOWN


def _number(value: FlagValue | None) -> float | None:
    if isinstance(value, bool | float):
        return float(value)
    return token_count(value)
