"""Finds the line in a dead server's log that shows why it died. Pure.

The last line seldom does: the engine's own exception stands 25 to 180 lines above it, repeated by the processes that
waited for the engine. So every line that could show a cause is ranked:

1. lines that name a cause by themselves (`causes.RULES`), else
2. the first exception that is not another's aftermath, else
3. lines that say that something died, else
4. other exceptions and error records.

Among equals the earliest counts, because those who wait fail after the one that they wait for. A log may hold several
starts, and hours of service with errors of single requests: only the last start, and after it served only its end, is
looked at first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from vllm_console.diagnosis.causes import (
    AFTERMATH,
    DEATHS,
    OUT_OF_MEMORY,
    OUT_OF_MEMORY_ELSEWHERE,
    OUT_OF_MEMORY_PLACES,
    RULES,
    Cause,
    Rule,
)
from vllm_console.diagnosis.loglines import LogLine, parse_lines

SIGKILL_CODES = (-9, 137)

BEHIND = {
    Cause.KV_CACHE_TOO_SMALL: Cause.WEIGHTS_DO_NOT_FIT,
    Cause.OOM_RUNTIME: Cause.WEIGHTS_DO_NOT_FIT,
    Cause.OOM_GRAPH_CAPTURE: Cause.WEIGHTS_DO_NOT_FIT,
}
"""What may lie behind a cause: a model that is too large for the GPU is often found out later than at its weights."""

_EXCEPTION = re.compile(
    r"(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Timeout|NotFound|Failure)(?:\(\w+\))?)"
    r"(?:: (?P<text>.*))?$"
)
_CHAIN = re.compile(r"The above exception was the direct cause|During handling of the above exception")
_START = re.compile(r"non-default args: |vLLM (?:API )?server version ")
_SERVES = "Application startup complete"
_DYING = re.compile(
    r"EngineCore encountered a fatal error|EngineDeadError|WorkerProc hit an exception|died unexpectedly"
    r"|output_handler failed|Watchdog caught|Engine loop is (?:dead|not running)"
)
_CODE = re.compile(r"\s|File \"|Traceback |raise |return |[\^~]+$|$")
_FIELD = re.compile(r"[a-z][a-z0-9_]*")
_PYDANTIC = re.compile(r"\d+ validation errors? for (?P<model>\w+)")


class _Rank(IntEnum):
    ERROR_RECORD = 0
    AFTERMATH = 1
    DEATH = 2
    EXCEPTION = 3
    NAMED = 4


@dataclass(frozen=True, slots=True)
class FailureLine:
    """The line that shows why a server died: its number from 1, what it says (plain text), and what that means.

    ``explanation`` is one sentence, or None for what is not known; ``cause`` is `Cause.OTHER` then. ``confidence`` is
    from 0 to 1, by how much the line says; ``also`` are other causes that are named in the same part of the log.
    """

    number: int
    text: str
    cause: Cause
    explanation: str | None
    confidence: float = 0.0
    also: tuple[Cause, ...] = ()


@dataclass(frozen=True, slots=True)
class _Candidate:
    index: int
    rank: _Rank
    rule: Rule | None = None


def failure_line(lines: Sequence[str], exit_code: int | None = None) -> FailureLine | None:
    """The line that shows why the process that wrote this log died, or None if none does.

    ``exit_code`` is as Python gives it (negative: the signal), None if unknown. A process that was killed by SIGKILL
    did not write why, so that only a line which names a cause by itself counts then.
    """
    parsed = list(parse_lines(lines))
    candidates = _candidates(parsed)
    if exit_code in SIGKILL_CODES:
        candidates = [candidate for candidate in candidates if candidate.rank is _Rank.NAMED]
    best = _best(parsed, candidates)
    if best is None:
        return None
    line = parsed[best.index]
    cause, explanation = (best.rule.cause, best.rule.explanation) if best.rule else (Cause.OTHER, None)
    field = _pydantic_field(parsed, best.index)
    text = field + line.message.strip()
    served = any(_SERVES in before.message for before in parsed[: best.index])
    also = _also(candidates, best, cause, served)
    return FailureLine(line.number, text, cause, explanation, _confidence(best, cause), also)


def _confidence(best: _Candidate, cause: Cause) -> float:
    """By what was found: a line that names its cause is nearly sure, a death without a word is not."""
    if cause is Cause.OTHER:
        return 0.3
    return {_Rank.NAMED: 0.95, _Rank.DEATH: 0.6}.get(best.rank, 0.5)


def _also(candidates: list[_Candidate], best: _Candidate, cause: Cause, served: bool) -> tuple[Cause, ...]:
    """Other causes that lines after it name, and what usually lies behind this one at a start."""
    named = [one.rule.cause for one in candidates if one.rank is _Rank.NAMED and one.rule and one.index >= best.index]
    behind = [BEHIND[cause]] if cause in BEHIND and not served else []
    return tuple(dict.fromkeys(other for other in (*behind, *named) if other not in (cause, Cause.OTHER)))


def _best(parsed: list[LogLine], candidates: list[_Candidate]) -> _Candidate | None:
    """The candidate of highest rank, the earliest of several, in the part of the log that matters most."""
    for start in _windows(parsed):
        window = [candidate for candidate in candidates if candidate.index >= start]
        best = max(window, key=lambda candidate: (candidate.rank, -candidate.index), default=None)
        if best is not None and (best.rank >= _Rank.EXCEPTION or start == 0):
            return best
    return None


def _windows(parsed: list[LogLine]) -> list[int]:
    """Where to begin to look: where it began to die after it served, where it was started last, the whole log."""
    start = serves = 0
    for index, line in enumerate(parsed):
        if _START.search(line.message):
            start = index
        elif _SERVES in line.message:
            serves = index
    windows = [start, 0]
    if serves > start:
        dying = next((index for index in range(serves, len(parsed)) if _DYING.search(parsed[index].message)), None)
        windows = [serves if dying is None else dying, serves, *windows]
    return windows


def _candidates(parsed: list[LogLine]) -> list[_Candidate]:
    found = []
    for index, line in enumerate(parsed):
        if line.harmless or _CODE.match(line.message):
            continue
        exception = _EXCEPTION.match(line.message)
        candidate = _exception(parsed, index, exception) if exception else _record(line, index)
        if candidate is not None:
            found.append(candidate)
    return found


def _record(line: LogLine, index: int) -> _Candidate | None:
    """A line that is no exception: it counts if it names a cause, says that something died, or is an error record."""
    if rule := _matching(RULES, line.message):
        return _Candidate(index, _Rank.NAMED, rule)
    if OUT_OF_MEMORY.search(line.message):
        return _Candidate(index, _Rank.NAMED, OUT_OF_MEMORY_ELSEWHERE)
    if rule := _matching(DEATHS, line.message):
        return _Candidate(index, _Rank.DEATH, rule)
    if line.level in ("ERROR", "CRITICAL") and not AFTERMATH.search(line.message):
        return _Candidate(index, _Rank.ERROR_RECORD)
    return None


def _exception(parsed: list[LogLine], index: int, exception: re.Match[str]) -> _Candidate | None:
    """The line that ends a traceback."""
    line = parsed[index]
    above = _traceback_above(parsed, index)
    if _ignored(parsed, above):
        return None
    if _PYDANTIC.search(exception["text"] or "") and (told := _told_by_pydantic(parsed, index)) is not None:
        message = parsed[told].message
        return _Candidate(told, _Rank.NAMED, _matching(RULES, message) or _invalid_value(message))
    if OUT_OF_MEMORY.search(line.message):
        return _Candidate(index, _Rank.NAMED, _out_of_memory(parsed, above, index))
    if rule := _matching(RULES, line.message):
        return _Candidate(index, _Rank.NAMED, rule)
    death = _matching(DEATHS, line.message)
    if AFTERMATH.search(line.message):
        return _Candidate(index, _Rank.DEATH if death else _Rank.AFTERMATH, death)
    if _wrapped_by_another(parsed, index):
        return _Candidate(index, _Rank.AFTERMATH)
    return _Candidate(index, _Rank.EXCEPTION, death)


def _matching(rules: Sequence[Rule], message: str) -> Rule | None:
    return next((rule for rule in rules if rule.pattern.search(message)), None)


def _traceback_above(parsed: list[LogLine], index: int) -> int:
    """Where the traceback that ends at ``index`` begins, as far as this log shows it."""
    process = parsed[index].process
    first = index
    for above in range(index - 1, -1, -1):
        line = parsed[above]
        if line.process != process:
            continue  # processes write between each other's lines
        if not _CODE.match(line.message):
            break
        first = above
        if line.message.startswith("Traceback "):
            break
    return first


def _ignored(parsed: list[LogLine], first: int) -> bool:
    """Whether Python says in front of the traceback that the exception has no effect."""
    return any("Exception ignored in" in parsed[above].message for above in range(max(0, first - 2), first))


def _wrapped_by_another(parsed: list[LogLine], index: int) -> bool:
    """Whether another exception was raised in its place, which then says more."""
    process = parsed[index].process
    following = [line for line in parsed[index + 1 : index + 40] if line.process == process and line.message.strip()]
    return bool(following) and _CHAIN.search(following[0].message) is not None


def _out_of_memory(parsed: list[LogLine], first: int, index: int) -> Rule:
    """What running out of memory means, by where it happened."""
    process = parsed[index].process
    frames = "\n".join(line.message for line in parsed[first:index] if line.process == process)
    return next((rule for place, rule in OUT_OF_MEMORY_PLACES if place.search(frames)), OUT_OF_MEMORY_ELSEWHERE)


def _told_by_pydantic(parsed: list[LogLine], index: int) -> int | None:
    """The line under a ValidationError that says what is wrong."""
    for below in range(index + 1, min(index + 8, len(parsed))):
        message = parsed[below].message.lstrip()
        if message.startswith("Value error,") or "[type=" in message:
            return below
    return None


def _pydantic_field(parsed: list[LogLine], index: int) -> str:
    """The flag that a line of a ValidationError is about, as ``--flag: ``: pydantic names it in the line above only."""
    if "[type=" not in parsed[index].message or index == 0:
        return ""
    field = parsed[index - 1].message.strip()
    return f"--{field.replace('_', '-')}: " if _FIELD.fullmatch(field) else ""


def _invalid_value(message: str) -> Rule:
    return Rule(re.compile(re.escape(message)), Cause.INVALID_FLAG_VALUE, "vLLM does not take this value for the flag.")
