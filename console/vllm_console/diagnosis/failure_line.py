"""Finds the line in a dead server's log that shows why it died. Pure.

The last line seldom does: the engine's own exception stands 25 to 180 lines above it, repeated by the processes that
waited for the engine. So every line that could show a cause is ranked:

1. exceptions, and lines of no log record, that name a cause by themselves (`rules.RULES`), else
2. error records that do, which may be complaints that it lived on with, else
3. the first exception that is not another's aftermath, else
4. lines that say that something died, else
5. other exceptions and error records.

Among equals the earliest counts, because those who wait fail after the one that they wait for. An interruption ends
the story: it is the cause unless something failed before it, and what comes after it does not count. A log may hold
several starts: the last one is looked at first. One that served had errors of single requests, which killed nobody:
only how it ended is looked at, and if it did not end, nothing failed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from vllm_console.diagnosis import tracebacks
from vllm_console.diagnosis.causes import Cause, Rule
from vllm_console.diagnosis.literals import FirstMatches
from vllm_console.diagnosis.rules import (
    AFTERMATH,
    CONFIG_PLACES,
    DEATHS,
    ENDS_A_SERVER,
    INTERNAL_ADDRESS,
    NOT_THE_TOKENIZER,
    OUT_OF_MEMORY,
    OUT_OF_MEMORY_ELSEWHERE,
    OUT_OF_MEMORY_PLACES,
    OUT_OF_MEMORY_STAGES,
    REFUSED,
    RULES,
    TOKENIZER_PLACE,
    TOKENIZER_PLACES,
)
from vllm_console.diagnosis.words import names_a_flag
from vllm_console.telemetry.loglines import LogLine, parse_lines

SIGKILL_CODES = (-9, 137)

BEHIND = {
    Cause.KV_CACHE_TOO_SMALL: Cause.WEIGHTS_DO_NOT_FIT,
    Cause.OOM_RUNTIME: Cause.WEIGHTS_DO_NOT_FIT,
    Cause.OOM_GRAPH_CAPTURE: Cause.WEIGHTS_DO_NOT_FIT,
}
"""What may lie behind a cause: a model that is too large for the GPU is often found out later than at its weights."""

BEFORE_DEATH = 150
"""Lines before the first word of a served engine's death in which its own exception may stand."""

_STARTS = ("non-default args: ", "vLLM API server version ", "vLLM server version ")
SERVES = re.compile(r"Application startup complete|Avg prompt throughput: |\"(?:GET|POST) /\S* HTTP/\d[.\d]*\" \d{3}")
_DYING = re.compile(
    r"EngineCore encountered a fatal error|EngineDeadError|WorkerProc hit an exception|died unexpectedly"
    r"|output_handler failed|Watchdog caught|watchdog thread terminated"
    r"|Engine loop (?:has|is) (?:died|dead|not running)|Segfault encountered|Fatal Python error|terminate called after"
)
_ENGINE = re.compile(r"EngineCore|Worker|VllmWorker|RayWorker")
_PYDANTIC = re.compile(r"\d+ validation errors? for (?P<model>\w+)")
_NO_FAULT_OF_FLAGS = re.compile(r"Import|Module|OSError|Connection|HTTP|Runtime|Attribute")


_WORDS = FirstMatches([rule.pattern for rule in RULES], [rule.pattern for rule in DEATHS], [OUT_OF_MEMORY], [AFTERMATH])
_QUOTES = re.compile(r"Worker failed with error ['\"](?!['\"])\S")
"""A process that waited repeats what the other one said: as good as that one's own word, where it is missing."""


class _Rank(IntEnum):
    ERROR_RECORD = 0
    AFTERMATH = 1
    DEATH = 2
    EXCEPTION = 3
    NAMED_IN_A_RECORD = 4
    NAMED = 5


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

    @property
    def cause(self) -> Cause:
        return self.rule.cause if self.rule else Cause.OTHER


def failure_line(lines: Sequence[str], exit_code: int | None = None) -> FailureLine | None:
    """As :func:`failure_in`, from the lines as they were written."""
    return failure_in(list(parse_lines(lines)), exit_code)


def failure_in(parsed: Sequence[LogLine], exit_code: int | None = None) -> FailureLine | None:
    """The line that shows why the process that wrote this log died, or None if none does.

    ``exit_code`` is as Python gives it (negative: the signal), None if unknown. A process that was killed by SIGKILL
    did not write why, so that only a line which names a cause by itself counts then.
    """
    start, serves = _last_start(parsed)
    if serves is None:
        window, best = _of_a_start(parsed, start, exit_code)
    else:
        window, best = _of_a_service(parsed, serves, exit_code)
    if best is None:
        return None
    line = parsed[best.index]
    text = tracebacks.pydantic_field(parsed, best.index) + line.message.strip()
    explanation = best.rule.explanation if best.rule else None
    also = _also(window, best, serves is not None)
    return FailureLine(line.number, text, best.cause, explanation, _confidence(best), also)


def _confidence(best: _Candidate) -> float:
    """By what was found: a line that names its cause is nearly sure, a death without a word is not."""
    if best.rule is None or best.cause is Cause.OTHER:
        return 0.3
    return round(best.rule.confidence * (0.8 if best.rank is _Rank.NAMED_IN_A_RECORD else 1.0), 2)


def _also(window: Iterable[_Candidate], best: _Candidate, served: bool) -> tuple[Cause, ...]:
    """Other causes that lines after it name, and what usually lies behind this one at a start."""
    named = [one.cause for one in window if one.rank >= _Rank.NAMED_IN_A_RECORD and one.index >= best.index]
    behind = [BEHIND[best.cause]] if best.cause in BEHIND and not served else []
    alike = best.rule.also if best.rule else ()
    return tuple(dict.fromkeys(other for other in (*alike, *behind, *named) if other not in (best.cause, Cause.OTHER)))


def _last_start(parsed: Sequence[LogLine]) -> tuple[int, int | None]:
    """Where it was started last, and where it served then, if it did."""
    start = 0
    serves: int | None = None
    for index, line in enumerate(parsed):
        message = line.message
        if any(words in message for words in _STARTS):
            start, serves = index, None
        elif serves is None and _says_that_it_serves(message):
            serves = index
    return start, serves


def _says_that_it_serves(message: str) -> bool:
    """Looks for words first: every line of a log is asked."""
    seen = "HTTP/" in message or "startup complete" in message or "Avg prompt" in message
    return seen and SERVES.search(message) is not None


def _of_a_start(
    parsed: Sequence[LogLine], start: int, exit_code: int | None
) -> tuple[list[_Candidate], _Candidate | None]:
    """What ended a start, looked for in the last one first: an earlier one may say why the last says nothing."""
    for first in dict.fromkeys((start, 0)):
        window = list(_candidates(parsed, first))
        best = _best(window, exit_code)
        if best is not None and (best.rank >= _Rank.EXCEPTION or first == 0):
            return window, best
    return [], None


def _of_a_service(
    parsed: Sequence[LogLine], serves: int, exit_code: int | None
) -> tuple[list[_Candidate], _Candidate | None]:
    """What ended a server that had served; nothing, as far as the log tells, if nobody speaks of an end."""
    dying = next((index for index in range(serves, len(parsed)) if _DYING.search(parsed[index].message)), None)
    if dying is None:
        window = [one for one in _candidates(parsed, serves) if one.rank is _Rank.DEATH or one.cause in ENDS_A_SERVER]
        return window, _best(window, exit_code)
    named = bool(parsed[dying].process)
    window = [one for one in _candidates(parsed, dying) if not _of_a_request(parsed, one, named)]
    best = _best(window, exit_code)
    if best is None or best.rank < _Rank.EXCEPTION:
        before = _candidates(parsed, max(serves, dying - BEFORE_DEATH), dying)
        earlier = _best([one for one in before if _killed(parsed, one)], exit_code)
        best = earlier if earlier is not None and earlier.rank >= _Rank.EXCEPTION else best
    return window, best


def _of_a_request(parsed: Sequence[LogLine], one: _Candidate, named: bool) -> bool:
    """Whether it is what a request's handler makes of a dead engine. ``named``: this log says who writes."""
    process = parsed[one.index].process
    by_handler = process.startswith("APIServer") or (named and not process)
    return by_handler and one.rank >= _Rank.EXCEPTION and one.cause not in ENDS_A_SERVER


def _killed(parsed: Sequence[LogLine], one: _Candidate) -> bool:
    """Whether what stands before the first word of death may have brought it about: the engine's own, or fatal."""
    return one.cause in ENDS_A_SERVER or _ENGINE.match(parsed[one.index].process) is not None


def _best(window: Sequence[_Candidate], exit_code: int | None) -> _Candidate | None:
    """The candidate of highest rank, the earliest of several."""
    if exit_code in SIGKILL_CODES:
        window = [one for one in window if one.rank >= _Rank.NAMED_IN_A_RECORD]
    stopped = next((at for at, one in enumerate(window) if one.cause is Cause.INTERRUPTED), None)
    if stopped is not None:
        before = [one for one in window[:stopped] if one.rank >= _Rank.EXCEPTION]
        window = before or [window[stopped]]
    best = max(window, key=lambda one: (one.rank, -one.index), default=None)
    if best is None or best.rank is not _Rank.NAMED:
        return best
    told = (one for one in window if one.rank is _Rank.NAMED_IN_A_RECORD and one.cause is best.cause)
    first = next(told, best)  # vLLM may have said it in its own words before
    return best if first.index > best.index else _Candidate(first.index, best.rank, first.rule)


def _candidates(parsed: Sequence[LogLine], first: int, end: int | None = None) -> Iterable[_Candidate]:
    """What could show a cause. Of exceptions that say nothing, one of each process will do: the first one counts."""
    told: set[str] = set()
    for index in range(first, len(parsed) if end is None else end):
        line = parsed[index]
        if line.harmless or tracebacks.CODE.match(line.message):
            continue
        exception = tracebacks.EXCEPTION.match(line.message)
        mute = exception is not None and _says_nothing(line.message)
        if mute and line.process in told:
            continue
        candidate = _exception(parsed, index, exception) if exception else _record(parsed, index)
        if candidate is None:
            continue
        if mute and candidate.rank is _Rank.EXCEPTION:
            told.add(line.process)
        yield candidate


def _record(parsed: Sequence[LogLine], index: int) -> _Candidate | None:
    """A line that is no exception: it counts if it names a cause, says that something died, or is an error record."""
    line = parsed[index]
    if rule := _named(line):
        rank = _Rank.NAMED_IN_A_RECORD if line.level else _Rank.NAMED
        return _behind_nccl(parsed, index, rule, rank)
    if _out_of_memory_in(line.message):
        return _Candidate(index, _Rank.NAMED_IN_A_RECORD, _out_of_memory(parsed, index, index))
    if rule := _death(line.message):
        return _Candidate(index, _Rank.DEATH, rule)
    if line.level in ("ERROR", "CRITICAL") and not _is_aftermath(line.message):
        return _Candidate(index, _Rank.ERROR_RECORD)
    return None


def _exception(parsed: Sequence[LogLine], index: int, exception: re.Match[str]) -> _Candidate | None:
    """The line that ends a traceback."""
    line = parsed[index]
    above = tracebacks.traceback_above(parsed, index)
    if tracebacks.is_ignored(parsed, above):
        return None
    if _PYDANTIC.search(exception["text"] or "") and (told := tracebacks.told_by_pydantic(parsed, index)) is not None:
        return _Candidate(told, _Rank.NAMED, _refused(parsed, told))
    if rule := _named(line):
        return _behind_nccl(parsed, index, rule, _Rank.NAMED)
    if _out_of_memory_in(line.message):
        return _Candidate(index, _Rank.NAMED, _out_of_memory(parsed, above, index))
    death = _death(line.message)
    if _QUOTES.search(line.message):
        return _Candidate(index, _Rank.EXCEPTION)
    if _is_aftermath(line.message):
        return _Candidate(index, _Rank.DEATH if death else _Rank.AFTERMATH, death)
    if tracebacks.is_wrapped(parsed, index):
        return _Candidate(index, _Rank.AFTERMATH)
    return _Candidate(index, _Rank.EXCEPTION, death or _by_place(parsed, above, index, exception["type"]))


def _behind_nccl(parsed: Sequence[LogLine], index: int, rule: Rule, rank: _Rank) -> _Candidate:
    """NCCL is where a fault of something else shows first: the lines under its message say what it was."""
    process = parsed[index].process
    last = min(index + 8, len(parsed)) if rule.cause is Cause.NCCL else index
    for below in range(index + 1, last):
        line = parsed[below]
        if line.process != process:
            continue
        if line.message.startswith("Traceback ") or tracebacks.ends_another(line.message):
            break
        behind = _rule(line.message)
        if behind is None and _out_of_memory_in(line.message):
            behind = OUT_OF_MEMORY_ELSEWHERE
        if behind is not None and behind.cause is not Cause.NCCL:
            return _Candidate(below, rank, behind)
    return _Candidate(index, rank, rule)


def _rule(message: str) -> Rule | None:
    found = _WORDS.of(message)[0]
    return None if found is None else RULES[found]


def _death(message: str) -> Rule | None:
    found = _WORDS.of(message)[1]
    return None if found is None else DEATHS[found]


def _says_nothing(message: str) -> bool:
    """Whether it is none of those that have a meaning here by their words."""
    return not _WORDS.any_in(message) and "validation error" not in message


def _out_of_memory_in(message: str) -> bool:
    return _WORDS.of(message)[2] is not None


def _is_aftermath(message: str) -> bool:
    return _WORDS.of(message)[3] is not None


def _named(line: LogLine) -> Rule | None:
    """The rule that the line meets; the server's port is the API server's, whatever the words."""
    rule = _rule(line.message)
    inside = rule is not None and rule.cause is Cause.PORT_IN_USE and _ENGINE.match(line.process)
    return INTERNAL_ADDRESS if inside else rule


def _refused(parsed: Sequence[LogLine], told: int) -> Rule | None:
    """What pydantic's line means: a value of the wrong type or size, or what vLLM's own check says."""
    message = parsed[told].message
    if rule := _rule(message):
        return rule
    own = message.lstrip().startswith(("Value error,", "Assertion failed,"))
    if own and not names_a_flag(message):
        return None
    return _invalid_value(message, 0.75 if own else 0.95)


def _by_place(parsed: Sequence[LogLine], above: int, index: int, kind: str) -> Rule | None:
    """What an exception that names no cause means where it was raised."""
    places = tracebacks.functions(parsed, above, index)
    if any(TOKENIZER_PLACES.fullmatch(place) for place in places) and not NOT_THE_TOKENIZER.search(kind):
        return TOKENIZER_PLACE
    checked = any(CONFIG_PLACES.fullmatch(place) for place in places)
    if checked and not _NO_FAULT_OF_FLAGS.search(kind) and names_a_flag(parsed[index].message):
        return _invalid_value(parsed[index].message, 0.7)
    return None


def _out_of_memory(parsed: Sequence[LogLine], first: int, index: int) -> Rule:
    """What running out of memory means, by where it happened: its functions, else how far the start had come."""
    places = tracebacks.functions(parsed, first, index)
    for pattern, rule in OUT_OF_MEMORY_PLACES:
        if any(pattern.fullmatch(place) for place in places):
            return rule
    if not places:
        for above in range(index - 1, max(-1, index - tracebacks.LONGEST), -1):
            message = parsed[above].message
            stage = next((rule for pattern, rule in OUT_OF_MEMORY_STAGES if pattern.search(message)), None)
            if stage is not None or SERVES.search(message):
                return stage or OUT_OF_MEMORY_ELSEWHERE
    return OUT_OF_MEMORY_ELSEWHERE


def _invalid_value(message: str, confidence: float) -> Rule:
    return Rule(re.compile(re.escape(message)), Cause.INVALID_FLAG_VALUE, REFUSED, confidence)
