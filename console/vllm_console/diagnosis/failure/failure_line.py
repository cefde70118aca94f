"""Find the line in a dead server's log that shows why it died. Pure.

It is seldom the last line: the engine's own exception is 25 to 180 lines above it, repeated by the processes that
waited for the engine. So every candidate line is ranked:

1. exceptions, and lines outside log records, that name a cause by themselves (`rules.RULES`), else
2. error records that do, which may be complaints that the server survived, else
3. the first exception that is not the aftermath of another, else
4. lines that report that something died, else
5. other exceptions and error records.

Among equals the earliest counts, because waiting processes fail after the one they wait for. An interruption ends the
log: it is the cause unless something failed before it, and nothing after it counts. If a log holds several starts, the
last one is examined first. In a server that served, errors of single requests ended nothing, so only its end is
examined. If it did not end, nothing failed, unless it rejects requests because of how it was started. A log that begins
while the server runs is recognized by lines that only a running server writes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import IntEnum

import msgspec
from msgspec.structs import replace

from vllm_console.diagnosis.failure.literals import FirstMatches, names_a_flag
from vllm_console.diagnosis.failure.rules import (
    AFTERMATH,
    CONFIG_PLACES,
    DAMAGED_WEIGHTS,
    DEATHS,
    ENDS_A_SERVER,
    GRAPHS_TOO_LARGE,
    INTERNAL_ADDRESS,
    MODEL_RUNS,
    NODES,
    NOT_THE_TOKENIZER,
    OUT_OF_MEMORY,
    OUT_OF_MEMORY_ELSEWHERE,
    OUT_OF_MEMORY_INSIDE,
    OUT_OF_MEMORY_PLACES,
    OUT_OF_MEMORY_STAGES,
    OUT_OF_MEMORY_UNPLACED,
    OWN_STOPS,
    PLACES,
    REFUSED,
    REFUSED_REQUESTS,
    RULES,
    STOPPED,
    STOPS,
    TOKENIZER_PLACE,
    TOKENIZER_PLACES,
    WEIGHTS_TOO_LARGE,
    FailureVerdict,
    Topic,
)
from vllm_console.diagnosis.finding import Cause
from vllm_console.logs.vllm_lines import LogLine
from vllm_launchers.keeper.files import NODE_MARK, NODES_JOINED
from vllm_launchers.patterns import lazy_pattern

SIGKILL_CODES = (-9, 137)

BEHIND = {
    Cause.KV_CACHE_TOO_SMALL: Cause.WEIGHTS_DO_NOT_FIT,
    Cause.OOM_RUNTIME: Cause.WEIGHTS_DO_NOT_FIT,
    Cause.OOM_GRAPH_CAPTURE: Cause.WEIGHTS_DO_NOT_FIT,
}
"""Possible underlying causes: a model too large for the GPU often fails only after its weights are loaded."""

MOST_ALIKE = 32
"""Maximum number of out-of-memory lines examined per process; where the first ones occurred is what counts."""

LINES_OF_AN_ERROR, MOST_PYDANTIC_LINES = 8, 32
"""For a ValidationError: maximum lines between consecutive errors, and maximum lines read."""

BEFORE_DEATH = 150
"""Maximum distance in lines of the engine's own exception before the first report of a serving engine's death."""

_START_FAILED = lazy_pattern(r"EngineCore failed to start|[Ee]ngine (?:core )?(?:initialization|process) failed")
_STARTS = (f"{NODE_MARK}{NODES_JOINED}", "non-default args: ", "vLLM API server version ", "vLLM server version ")
SERVES = lazy_pattern(
    r"Application startup complete|Avg prompt throughput: |\"(?:GET|POST) /\S* HTTP/\d[.\d]*\" [1-4]\d\d"
)
_DYING_WORDS = (
    r"EngineCore encountered a fatal error|EngineDeadError|WorkerProc hit an exception|died unexpectedly"
    r"|output_handler failed|Watchdog caught|watchdog thread terminated|Engine background task failed"
    r"|Engine loop (?:has|is) (?:died|dead|not running)|Segfault encountered|Fatal Python error|terminate called after"
    r"|has failed, terminating server|is already dead, terminating|Background loop has errored already"
    r"|Worker \w+ pid \d+ died, exit code"
)
_DYING = lazy_pattern(_DYING_WORDS)
_ENDINGS = FirstMatches([_DYING], [lazy_pattern(OWN_STOPS)], [lazy_pattern(STOPS)])
_DIED_SERVING = lazy_pattern(
    r"EngineCore encountered a fatal error|output_handler failed|Engine background task failed|EngineGenerateError"
    r"|Error in (?:chat )?completion stream generator|Background loop has errored already"
)
"""Lines that an engine writes only after it has served: if one comes first, the log begins mid-run."""
_ENGINE = lazy_pattern(r"EngineCore|Worker|VllmWorker|RayWorker")
_PYDANTIC = lazy_pattern(r"\d+ validation errors? for (?P<model>\w+)")
_KV_TAKEN = lazy_pattern(r"KV cache size: |# (?:GPU|cuda) blocks: ")
_NO_FAULT_OF_FLAGS = lazy_pattern(r"Import|Module|OSError|Connection|HTTP|Runtime|Attribute")


_WORDS = FirstMatches([rule.pattern for rule in RULES], [rule.pattern for rule in DEATHS], [OUT_OF_MEMORY], [AFTERMATH])
_REFUSALS = FirstMatches([rule.pattern for rule in REFUSED_REQUESTS])
_ALL_REFUSED = lazy_pattern(r"\"POST /v1/(?:chat/)?(?:completions|responses)\S* HTTP/\d[.\d]*\" (?P<status>\d{3})")
_WARNED = {
    Topic.LIBRARY_SYMBOL: lazy_pattern(r"undefined symbol: "),
    Topic.KERNEL_CRASH: lazy_pattern(r"illegal memory access|device-side assert|unspecified launch failure"),
}
_REFUSES = FailureVerdict(
    Cause.OTHER,
    "The server runs, but rejects its requests (400); the response to the client says why.",
    0.3,
)
_SILENT = FailureVerdict(
    Cause.ENGINE_DIED,
    "The engine's process ended without an error message: it was killed, often by the kernel's out-of-memory killer, "
    "or crashed outside of Python.",
    0.5,
)
_QUOTES = lazy_pattern(r"Worker failed with error ['\"](?!['\"])\S")
"""A waiting process repeats the other one's message, which is as good as the original if that is missing."""


class _Rank(IntEnum):
    ERROR_RECORD = 0
    AFTERMATH = 1
    DEATH = 2
    EXCEPTION = 3
    NAMED_IN_A_RECORD = 4
    NAMED = 5


class FailureLine(msgspec.Struct, frozen=True):
    """The line that shows why a server died: its number from 1, its plain text, and its meaning.

    ``explanation`` is one sentence, or None if unknown; ``cause`` is then `Cause.OTHER`. ``confidence`` is from 0 to 1,
    by how specific the line is; ``also`` holds other causes named in the same part of the log. ``topic`` distinguishes
    failures of the same cause that have different fixes.
    """

    number: int
    text: str
    cause: Cause
    explanation: str | None
    confidence: float = 0.0
    also: tuple[Cause, ...] = ()
    topic: Topic = Topic.NONE


class _Candidate(msgspec.Struct, frozen=True):
    index: int
    rank: _Rank
    rule: FailureVerdict | None = None

    @property
    def cause(self) -> Cause:
        return self.rule.cause if self.rule else Cause.OTHER

    @property
    def topic(self) -> Topic:
        return self.rule.topic if self.rule else Topic.NONE


def failure_in(parsed: Sequence[LogLine], exit_code: int | None = None) -> FailureLine | None:
    """The line that shows why the process that wrote this log died, or None if none does.

    ``exit_code`` is Python's (negative: the signal), None if unknown. A process killed by SIGKILL could not log the
    reason, so then only a line that names a cause by itself counts.
    """
    start, serves, begun = _last_start(parsed)
    if (other := _other_node(parsed, start)) is not None:
        return other
    if serves is None:
        window, best = _of_a_start(parsed, start, exit_code)
    else:
        window, best = _of_a_service(parsed, serves, exit_code)
        if best is None and not begun:
            window, best = _of_a_start(parsed, 0, exit_code)
    if best is None:
        return None
    best = _first_warning(parsed, best)
    line = parsed[best.index]
    text = pydantic_field(parsed, best.index) + whole_message(parsed, best.index)
    explanation = best.rule.explanation if best.rule else None
    also = _also(window, best, serves is not None)
    return FailureLine(line.number, text, best.cause, explanation or None, _confidence(best), also, best.topic)


def _other_node(parsed: Sequence[LogLine], start: int) -> FailureLine | None:
    """What a keeper logged about other nodes or Ray in the last start: it knows why the server ended."""
    for line in reversed(parsed[start:]):
        if line.message.startswith(NODE_MARK):
            rule = next((one for one in NODES if one.pattern.search(line.message)), None)
            if rule is not None:
                text = line.message.strip()
                return FailureLine(line.number, text, rule.cause, rule.explanation, rule.confidence, (), rule.topic)
    return None


def _confidence(best: _Candidate) -> float:
    """Confidence by kind of line: a line that names its cause is nearly certain, a death without a reason is not."""
    if best.rule is None or (best.cause is Cause.OTHER and best.topic is Topic.NONE):
        return 0.3
    return round(best.rule.confidence * (0.8 if best.rank is _Rank.NAMED_IN_A_RECORD else 1.0), 2)


def _first_warning(parsed: Sequence[LogLine], best: _Candidate) -> _Candidate:
    """An earlier line that shows the same problem, logged only as a warning.

    vLLM warns when its compiled module cannot be loaded and fails when it first needs it; torch warns of a crashed
    kernel when it frees what the kernel used.
    """
    if best.topic not in _WARNED or best.rank is _Rank.NAMED_IN_A_RECORD:
        return best
    shows = _WARNED[best.topic]
    for index in range(max(0, best.index - MOST_TRACEBACK_LINES), best.index):
        line = parsed[index]
        if line.level == "WARNING" and shows.search(line.message):
            return _Candidate(index, best.rank, best.rule)
    return best


def _also(window: Iterable[_Candidate], best: _Candidate, served: bool) -> tuple[Cause, ...]:
    """Other causes named by later lines, and what usually underlies this one at a start."""
    named = [one.cause for one in window if one.rank >= _Rank.NAMED_IN_A_RECORD and one.index >= best.index]
    behind = [BEHIND[best.cause]] if best.cause in BEHIND and not served else []
    alike = best.rule.also if best.rule else ()
    return tuple(dict.fromkeys(other for other in (*alike, *behind, *named) if other not in (best.cause, Cause.OTHER)))


def _last_start(parsed: Sequence[LogLine]) -> tuple[int, int | None, bool]:
    """Where the last start begins, where it began to serve (if it did), and whether the log shows the start or the
    service.

    A log without a start begins with the service if it shows the kind of engine death that only a service has, or if
    something died before the first sign of a service.
    """
    start = 0
    serves: int | None = None
    begun = dying = failed = False
    for index, line in enumerate(parsed):
        message = line.message
        if any(words in message for words in _STARTS):
            start, serves, begun, failed = index, None, True, False
        elif not failed and (serves is None or not begun):
            failed = "ailed" in message and _START_FAILED.search(message) is not None
            if _says_that_it_serves(message):
                serves, begun = (0 if dying else index), True
            elif not begun:
                dying = dying or _DYING.search(message) is not None
                serves = 0 if dying and _DIED_SERVING.search(message) else serves
    return start, serves, begun


def _says_that_it_serves(message: str) -> bool:
    """Whether a line shows a running service; tests for words first, because this runs for every line of a log."""
    seen = "HTTP/" in message or "startup complete" in message or "Avg prompt" in message
    return seen and SERVES.search(message) is not None


def _of_a_start(
    parsed: Sequence[LogLine], start: int, exit_code: int | None
) -> tuple[list[_Candidate], _Candidate | None]:
    """What ended a start, looking in the last one first; an earlier one may explain it if the last has no evidence."""
    for first in dict.fromkeys((start, 0)):
        window = list(_candidates(parsed, first))
        best = _best(window, exit_code)
        if best is None or best.rank <= _Rank.DEATH:
            _, stopped = _ending(parsed, first, exit_code)
            if stopped is not None and (best is None or stopped < best.index):
                best = _stop(parsed, stopped)
        if best is not None and (best.rank >= _Rank.EXCEPTION or first == 0):
            return window, best
    return [], None


def _of_a_service(
    parsed: Sequence[LogLine], serves: int, exit_code: int | None
) -> tuple[list[_Candidate], _Candidate | None]:
    """What ended a serving server; if no line reports an end, what it keeps rejecting, if anything."""
    dying, stopped = _ending(parsed, serves, exit_code)
    if stopped is not None:
        return [], _stop(parsed, stopped)
    if dying is None:
        candidates = list(_candidates(parsed, serves))
        window = [one for one in candidates if one.rank is _Rank.DEATH or _ends_a_server(one)]
        best = _best(window, exit_code) or _last_words(parsed, candidates, exit_code)
        return window, best or _refusal(parsed, serves, exit_code)
    named = bool(parsed[dying].process)
    window = [one for one in _candidates(parsed, dying) if not _of_a_request(parsed, one, named)]
    best = _best(window, exit_code)
    before = [one for one in _candidates(parsed, max(serves, dying - BEFORE_DEATH), dying) if _killed(parsed, one)]
    earlier = _best(before, exit_code)
    named_before = earlier is not None and earlier.rank >= _Rank.NAMED_IN_A_RECORD
    if named_before and (best is None or best.rank <= _Rank.EXCEPTION or _may_be(earlier, best)):
        return [*before, *window], earlier
    if best is None or (best.rank < _Rank.EXCEPTION and earlier is not None and earlier.rank >= _Rank.EXCEPTION):
        best = earlier
    return window, best


def _may_be(earlier: _Candidate | None, best: _Candidate) -> bool:
    """Whether the earlier line shows the same cause as the best line, or the fault behind an NCCL error."""
    return earlier is not None and best.cause in (earlier.cause, Cause.NCCL)


def _ending(parsed: Sequence[LogLine], first: int, exit_code: int | None) -> tuple[int | None, int | None]:
    """The first report of a death, or an external stop before anything failed.

    An engine, with or without Ray, reports every SIGTERM, including the one it gets because its API server was killed.
    """
    own, killed = False, exit_code in SIGKILL_CODES
    for index in range(first, len(parsed)):
        message = parsed[index].message
        dying, by_itself, stop = _ENDINGS.of(message)
        if dying is not None:
            return index, None
        own = own or by_itself is not None
        aside = ((own or killed) and "EngineCore: trigger" in message) or (killed and "*** SIGTERM received" in message)
        if stop is not None and not aside:
            return None, index
    return None, None


def _stop(parsed: Sequence[LogLine], index: int) -> _Candidate:
    """An external stop; less certain if only the engine mentions a signal, since its own server sends it one too."""
    sure = "EngineCore" not in parsed[index].message
    return _Candidate(index, _Rank.DEATH, STOPPED if sure else replace(STOPPED, confidence=0.7))


def _last_words(parsed: Sequence[LogLine], window: Sequence[_Candidate], exit_code: int | None) -> _Candidate | None:
    """An exception that nothing follows: it ended the process, although this part of the log reports no death."""
    if exit_code in SIGKILL_CODES or exit_code == 0:
        return None
    near = [one for one in window if one.rank >= _Rank.EXCEPTION and one.index >= len(parsed) - BEFORE_DEATH]
    if not near:
        return None
    last = near[-1]
    rest = [line for line in parsed[last.index + 1 :] if line.message.strip()]
    ended = parsed[last.index].level == "" and len(rest) <= 3 and not any(SERVES.search(line.message) for line in rest)
    return _best(near, exit_code) if ended else None


def _refusal(parsed: Sequence[LogLine], serves: int, exit_code: int | None) -> _Candidate | None:
    """What a healthy server rejects because of how it was started."""
    if exit_code in SIGKILL_CODES:
        return None
    refused: int | None = None
    served = False
    for index in range(serves, len(parsed)):
        line = parsed[index]
        if "POST /v1/" in line.message and (found := _ALL_REFUSED.search(line.message)):
            served = served or found["status"] != "400"
            refused = index if refused is None and found["status"] == "400" else refused
            continue
        rule = None if line.harmless or CODE.match(line.message) else _REFUSALS.of(line.message)[0]
        if rule is not None:
            return _Candidate(index, _Rank.NAMED, REFUSED_REQUESTS[rule])
    return _Candidate(refused, _Rank.ERROR_RECORD, _REFUSES) if refused is not None and not served else None


def _of_a_request(parsed: Sequence[LogLine], one: _Candidate, named: bool) -> bool:
    """Whether it is a request handler's reaction to a dead engine. ``named``: log lines name their process."""
    process = parsed[one.index].process
    by_handler = process.startswith("APIServer") or (named and not process)
    return by_handler and one.rank >= _Rank.EXCEPTION and not _ends_a_server(one)


def _ends_a_server(one: _Candidate) -> bool:
    return one.cause in ENDS_A_SERVER or one.topic in (Topic.KERNEL_CRASH, Topic.MAIN_MEMORY)


def _killed(parsed: Sequence[LogLine], one: _Candidate) -> bool:
    """Whether a line before the first report of a death may have caused it: written by the engine itself, or fatal."""
    return _ends_a_server(one) or _ENGINE.match(parsed[one.index].process) is not None


def _best(window: Sequence[_Candidate], exit_code: int | None) -> _Candidate | None:
    """The candidate of highest rank, the earliest among equals."""
    if exit_code in SIGKILL_CODES:
        window = [one for one in window if one.rank >= _Rank.NAMED_IN_A_RECORD]
    stopped = next((at for at, one in enumerate(window) if one.cause is Cause.INTERRUPTED), None)
    if stopped is not None:
        before = [one for one in window[:stopped] if one.rank >= _Rank.EXCEPTION]
        window = before or [window[stopped]]
    best = max(window, key=lambda one: (one.rank, -one.index), default=None)
    if best is None or best.rank is not _Rank.NAMED:
        return best
    same = (one for one in window if one.rank is _Rank.NAMED_IN_A_RECORD and _says_the_same(one, best))
    first = next(same, best)  # vLLM or NCCL may have reported it earlier in its own words
    return best if first.index > best.index else _Candidate(first.index, best.rank, first.rule)


def _says_the_same(one: _Candidate, best: _Candidate) -> bool:
    return one.cause is best.cause or (best.cause is Cause.NCCL and one.topic is Topic.NCCL_WARNING)


def _candidates(parsed: Sequence[LogLine], first: int, end: int | None = None) -> Iterable[_Candidate]:
    """Candidate lines. Of uninformative exceptions, only the first per process counts."""
    seen: set[str] = set()
    without_memory: Counter[str] = Counter()
    for index in range(first, len(parsed) if end is None else end):
        line = parsed[index]
        if line.harmless or CODE.match(line.message):
            continue
        if _out_of_memory_in(line.message):
            without_memory[line.process] += 1
            if without_memory[line.process] > MOST_ALIKE:
                continue
        exception = EXCEPTION.match(line.message)
        wordless = exception is not None and _says_nothing(line.message)
        if wordless and line.process in seen:
            continue
        candidate = _exception(parsed, index, exception) if exception else _record(parsed, index)
        if candidate is None:
            continue
        if wordless and candidate.rank is _Rank.EXCEPTION:
            seen.add(line.process)
        yield candidate


def _record(parsed: Sequence[LogLine], index: int) -> _Candidate | None:
    """A line that is not an exception; it counts if it names a cause, reports a death, or is an error record."""
    line = parsed[index]
    if rule := _named(line):
        if rule.topic is Topic.NCCL_WARNING:
            return _Candidate(index, _Rank.NAMED_IN_A_RECORD, _warned_by_nccl(line.message, rule))
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
    line = parsed[index]
    above = traceback_above(parsed, index)
    if is_ignored(parsed, above):
        return None
    if _PYDANTIC.search(exception["text"] or "") and (refused_at := pydantic_error_line(parsed, index)) is not None:
        return _Candidate(refused_at, _Rank.NAMED, _refused(parsed, refused_at))
    if line.message.startswith("MemoryError") and any("safetensors" in one for one in lines_of(parsed, above, index)):
        return _Candidate(index, _Rank.NAMED, DAMAGED_WEIGHTS)
    if rule := _named(line):
        return _behind_nccl(parsed, index, rule, _Rank.NAMED)
    if _out_of_memory_in(line.message):
        return _Candidate(index, _Rank.NAMED, _out_of_memory(parsed, above, index))
    death = _death(line.message) or _silent_death(parsed, index)
    if death is None and _QUOTES.search(line.message):
        return _Candidate(index, _Rank.EXCEPTION)
    if _is_aftermath(line.message):
        return _Candidate(index, _Rank.DEATH if death else _Rank.AFTERMATH, death)
    if is_wrapped(parsed, index):
        return _Candidate(index, _Rank.AFTERMATH)
    return _Candidate(index, _Rank.EXCEPTION, death or _by_place(parsed, above, index, exception["type"]))


def _behind_nccl(parsed: Sequence[LogLine], index: int, rule: FailureVerdict, rank: _Rank) -> _Candidate:
    """The fault behind an NCCL error: other faults often show there first, and the lines below state them."""
    process = parsed[index].process
    last = min(index + 8, len(parsed)) if rule.cause is Cause.NCCL else index
    for below in range(index + 1, last):
        line = parsed[below]
        if line.process != process:
            continue
        if line.message.startswith("Traceback ") or ends_another(line.message):
            break
        behind = _rule(line.message)
        if behind is None and _out_of_memory_in(line.message):
            behind = OUT_OF_MEMORY_ELSEWHERE
        if behind is not None and behind.cause is not Cause.NCCL:
            return _Candidate(below, rank, behind)
    return _Candidate(index, rank, rule)


def _warned_by_nccl(message: str, rule: FailureVerdict) -> FailureVerdict:
    """The reason given in NCCL's warning, marked as such."""
    behind = OUT_OF_MEMORY_ELSEWHERE if _out_of_memory_in(message) else _rule(message.partition("NCCL WARN")[2])
    return replace(behind, topic=Topic.NCCL_WARNING) if behind is not None else rule


def _rule(message: str) -> FailureVerdict | None:
    found = _WORDS.of(message)[0]
    return None if found is None else RULES[found]


def _death(message: str) -> FailureVerdict | None:
    found = _WORDS.of(message)[1]
    return None if found is None else DEATHS[found]


def _silent_death(parsed: Sequence[LogLine], index: int) -> FailureVerdict | None:
    """The API server misses its engine, whose log just ends. Without any line of the engine, its log is elsewhere."""
    if "Failed core proc(s): {}" not in parsed[index].message:
        return None
    before = parsed[:index]
    heard = any(_ENGINE.match(line.process) for line in before)
    return _SILENT if heard and not any(line.level in ("ERROR", "CRITICAL") for line in before) else None


def _says_nothing(message: str) -> bool:
    """Whether its text matches none of the known expressions."""
    return not _WORDS.any_in(message) and "validation error" not in message


def _out_of_memory_in(message: str) -> bool:
    return _WORDS.of(message)[2] is not None


def _is_aftermath(message: str) -> bool:
    return _WORDS.of(message)[3] is not None


def _named(line: LogLine) -> FailureVerdict | None:
    """The rule that a line matches. Only the API server uses the server's port; other processes use internal ones."""
    rule = _rule(line.message)
    inside = rule is not None and rule.cause is Cause.PORT_IN_USE and _ENGINE.match(line.process)
    return INTERNAL_ADDRESS if inside else rule


def _refused(parsed: Sequence[LogLine], index: int) -> FailureVerdict | None:
    """The meaning of a pydantic error line: a value of the wrong type or size, or the message of vLLM's own check."""
    message = parsed[index].message
    if rule := _rule(message):
        return rule
    own = message.lstrip().startswith(("Value error,", "Assertion failed,"))
    if own and not names_a_flag(message):
        return None
    return FailureVerdict(Cause.INVALID_FLAG_VALUE, REFUSED, 0.75 if own else 0.95)


def _by_place(parsed: Sequence[LogLine], above: int, index: int, kind: str) -> FailureVerdict | None:
    """The meaning of an exception that names no cause, from where it was raised."""
    places = functions(parsed, above, index)
    for place, message, verdict in PLACES:
        if message.search(parsed[index].message) and any(map(place.fullmatch, places)):
            return verdict
    if any(TOKENIZER_PLACES.fullmatch(place) for place in places) and not NOT_THE_TOKENIZER.search(kind):
        return TOKENIZER_PLACE
    checked = any(CONFIG_PLACES.fullmatch(place) for place in places)
    if checked and not _NO_FAULT_OF_FLAGS.search(kind) and names_a_flag(parsed[index].message):
        return FailureVerdict(Cause.INVALID_FLAG_VALUE, REFUSED, 0.7)
    return None


def _out_of_memory(parsed: Sequence[LogLine], first: int, index: int) -> FailureVerdict:
    """The meaning of running out of memory, from where it happened.

    Judged by its traceback, else by the same exception's traceback further down (which may be less truncated), else by
    how far the start had come.
    """
    frames = lines_of(parsed, first, index)
    if rule := _by_frames(frames):
        return rule
    below = repeated(parsed, index)
    if below is not None:
        again = lines_of(parsed, traceback_above(parsed, below), below)
        if rule := _by_frames(again):
            return rule
    inside = any(MODEL_RUNS.search(frame) for frame in frames)
    return _by_stage(parsed, index, inside) or (OUT_OF_MEMORY_INSIDE if inside else OUT_OF_MEMORY_UNPLACED)


def _by_frames(frames: Sequence[str]) -> FailureVerdict | None:
    found = (rule for pattern, rule in OUT_OF_MEMORY_PLACES if any(pattern.search(frame) for frame in frames))
    return next(found, None)


def _by_stage(parsed: Sequence[LogLine], index: int, inside: bool) -> FailureVerdict | None:
    """Judge by how far the start had come. ``inside`` means that the model was running, so its weights were loaded."""
    for above in range(index - 1, max(-1, index - MOST_TRACEBACK_LINES), -1):
        message = parsed[above].message
        if inside and _KV_TAKEN.search(message):
            return GRAPHS_TOO_LARGE  # between cache and service, only graph warm-up runs
        rule = next((rule for pattern, rule in OUT_OF_MEMORY_STAGES if pattern.search(message)), None)
        if rule is not None or SERVES.search(message):
            return None if inside and rule is WEIGHTS_TOO_LARGE else rule or OUT_OF_MEMORY_ELSEWHERE
    return None


# -- tracebacks in a log that several processes write to --------------------------------------------------------------


MOST_TRACEBACK_LINES = 400
"""Maximum lines of one traceback, including lines of other processes in between."""

EXCEPTION = lazy_pattern(
    r"(?P<type>(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*)?(?:Error|Exception|Interrupt|Exit|Timeout|NotFound|Failure|Failed)"
    r"(?:\(\w+\))?|(?:[a-z_]\w*\.)+[A-Z]\w*|socket\.gaierror|struct\.error)(?:: (?P<text>.*))?$"
)
"""The last line of a traceback."""

CODE = lazy_pattern(r"\s+(?!what\(\): )|File \"|Traceback |raise |return |[\^~]+$|$")
"""Other lines of a traceback."""

_CHAIN = lazy_pattern(r"The above exception was the direct cause|During handling of the above exception")
_FUNCTION = lazy_pattern(r"\s*File \"(?P<file>[^\"]*)\", line \d+, in (?P<function>\S+)")
_FIELD = lazy_pattern(r"[a-z][a-z0-9_.]*")


def traceback_above(parsed: Sequence[LogLine], index: int) -> int:
    """Where the traceback that ends at ``index`` begins, as far as this log shows it.

    Also works if its lines lost their indentation; without its first line, uses the lines directly above.
    """
    process = parsed[index].process
    close = index
    near = True
    for above in range(index - 1, max(-1, index - MOST_TRACEBACK_LINES), -1):
        line = parsed[above]
        if line.process != process:
            continue  # lines of several processes are interleaved
        if line.message.startswith("Traceback "):
            return above
        if line.harmless or EXCEPTION.match(line.message):
            break
        near = near and CODE.match(line.message) is not None
        if near:
            close = above
    return close


def functions(parsed: Sequence[LogLine], first: int, index: int) -> tuple[str, ...]:
    """The functions in a traceback, outermost first."""
    process = parsed[index].process
    found = (_FUNCTION.match(line.message) for line in parsed[first:index] if line.process == process)
    return tuple(match["function"] for match in found if match)


def lines_of(parsed: Sequence[LogLine], first: int, index: int) -> list[str]:
    """The lines of a traceback, without those of other processes."""
    process = parsed[index].process
    return [line.message for line in parsed[first:index] if line.process == process]


def repeated(parsed: Sequence[LogLine], index: int) -> int | None:
    """Where the same exception appears again, if it does: it may be logged once, and again when the process ends."""
    message = parsed[index].message
    for below in range(index + 1, min(index + MOST_TRACEBACK_LINES, len(parsed))):
        if parsed[below].message == message:
            return below
    return None


def ends_another(message: str) -> bool:
    """Whether a line is an exception other than one of NCCL's error names (``ncclSystemError: …``)."""
    return not message.startswith("nccl") and EXCEPTION.match(message) is not None


def is_ignored(parsed: Sequence[LogLine], first: int) -> bool:
    """Whether Python marks the traceback's exception as ignored."""
    return any("Exception ignored in" in parsed[above].message for above in range(max(0, first - 2), first))


def is_wrapped(parsed: Sequence[LogLine], index: int) -> bool:
    """Whether another exception, which then has the details, was raised in its place."""
    process = parsed[index].process
    for below in range(index + 1, min(index + 40, len(parsed))):
        line = parsed[below]
        if line.process == process and line.message.strip():
            return _CHAIN.search(line.message) is not None
    return False


def pydantic_error_line(parsed: Sequence[LogLine], index: int) -> int | None:
    """The error below a ValidationError; of several, the first about a set flag, as others may follow from it."""
    found = []
    for below in range(index + 1, min(index + MOST_PYDANTIC_LINES, len(parsed))):
        message = parsed[below].message.lstrip()
        if message.startswith(("Value error,", "Assertion failed,")) or "[type=" in message:
            found.append(below)
        elif below - (found[-1] if found else index) >= LINES_OF_AN_ERROR:
            break
    if len(found) < 2:
        return found[0] if found else None
    given = next((line.message for line in reversed(parsed[:index]) if "non-default args: " in line.message), "")
    return next((below for below in found if f"'{parsed[below - 1].message.strip()}': " in given), found[0])


def whole_message(parsed: Sequence[LogLine], index: int) -> str:
    """A line's text; if an exception's message begins below it (``RuntimeError:``), with the message's first line."""
    line = parsed[index]
    text = line.message.strip()
    if not text.endswith(":") or not EXCEPTION.match(f"{text} "):
        return text
    below = (one.message.strip() for one in parsed[index + 1 : index + 8] if one.process == line.process)
    return f"{text} {next(filter(None, below), '')}".strip()


def pydantic_field(parsed: Sequence[LogLine], index: int) -> str:
    """The flag of a ValidationError's line, as ``--flag: ``; pydantic names it only in the line above."""
    if "[type=" not in parsed[index].message or index == 0:
        return ""
    field = parsed[index - 1].message.strip()
    name = field.partition(".dict[")[0]
    return f"--{name.replace('_', '-')}: " if _FIELD.fullmatch(name) else ""
