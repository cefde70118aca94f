"""Parse lines of a vLLM log: the process that wrote them, level, time, and message. Pure.

This is the only module that knows the prefixes of a message: vLLM's own records, JSON, and log collectors.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain

import msgspec

from vllm_console.logs.prefix import NAME, PID, PROCESS, RANK
from vllm_console.text import plain, redrawn
from vllm_launchers.patterns import lazy_pattern

SAMPLE = 400
"""Number of lines sampled from the beginning, from the end, and in between."""

LONGEST_PREFIX = 200

MOST_SHAPES = 12
"""Maximum prefixes of one log: several containers or ranks can share it."""


@cache
def _compiled(expression: str) -> re.Pattern[str]:
    """Compile an expression on first use: a log has few of these forms, and `re.compile`'s own cache is slow."""
    return re.compile(expression)


@cache
def _all_compiled(expressions: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    return tuple(map(_compiled, expressions))


_BEGINS = (
    r"\([A-Za-z][\w.:-]*(?: [\w=.]+)*? pid=\d+|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d"
    r"|(?:INFO|WARNING|ERROR): {4,}\S|Traceback \(most recent call last\):|  File \"[^\"]+\", line \d+, in "
    r"|usage: (?:vllm|api_server)|(?:vllm(?: \w+)?|api_server\.py): error: "
)
"""The beginning of a line of vLLM, uvicorn, argparse or a traceback."""

_PART = (
    r"(?P<name>\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun|Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)\b)"
    r"|(?P<level>\b(?:TRACE|DEBUG|DEBG|INFO|NOTICE|WARN|WARNING|ERROR|ERR|CRITICAL)\b)"
    r"|(?P<number>\d+)|(?P<space> +)|(?P<text>[\s\S])"
)
_SHAPES = {"name": "[A-Z][a-z][a-z]", "level": "[A-Z]+", "number": r"\d+", "space": " +"}
_BAR = r"\d%|[█▏▎▍▌▋▊▉]"
"""A progress bar with the next line attached to it."""


def learn_carriers(lines: Sequence[str], clean: Callable[[str], str]) -> re.Pattern[str] | None:
    """An expression for the prefixes of this log, or None if its lines begin as vLLM wrote them.

    ``clean`` removes escape codes. A prefix counts if at least two lines have it, and at least one in twenty of those
    whose beginning is recognized; plain indentation counts only if most lines have it.
    """
    prefixes = [found for line in _sample(lines) if (found := _prefix_of(clean(line))) is not None]
    shapes = Counter(map(_shape, prefixes))
    if not prefixes and (indent := _indent(lines)):
        return re.compile(indent)
    least = max(2, len(prefixes) // 20)
    kept = [shape for shape, count in shapes.most_common(MOST_SHAPES + 1) if shape and count >= least]
    kept = [shape for shape in kept if shape.strip() or shapes[shape] * 2 > len(prefixes)]
    if not kept:
        return None
    kept.sort(key=len, reverse=True)  # one may be a prefix of another
    return re.compile("|".join(f"(?:{shape})" for shape in kept[:MOST_SHAPES]))


def _sample(lines: Sequence[str]) -> Iterable[str]:
    if len(lines) <= 3 * SAMPLE:
        return lines
    step = len(lines) // SAMPLE
    return chain(lines[:SAMPLE], lines[SAMPLE:-SAMPLE:step], lines[-SAMPLE:])


def _prefix_of(text: str) -> str | None:
    """What precedes vLLM's own text; None if the line's beginning is not recognized."""
    found = _compiled(_BEGINS).search(text)
    if found is None or found.start() > LONGEST_PREFIX:
        return None
    prefix = text[: found.start()]
    return None if _compiled(_BAR).search(prefix) or '{"' in prefix else prefix


def _indent(lines: Sequence[str]) -> str:
    """The common indentation of a short log in which no line's beginning is recognized."""
    written = [line for line in lines[:SAMPLE] if line.strip()]
    return " " * min((len(line) - len(line.lstrip(" ")) for line in written), default=0)


def _shape(prefix: str) -> str:
    """An expression for similar prefixes, with any numbers, dates and levels, and at most the same trailing spaces."""
    body = prefix.rstrip(" ")
    after = len(prefix) - len(body)
    if not body:
        return " " * after
    parts = [
        _SHAPES.get(found.lastgroup or "") or re.escape(found.group())
        for found in _compiled(_PART).finditer(body.lstrip(" "))
    ]  # fmt: skip
    spaces = f"(?: {{{after}}}| *$)" if after else ""
    return " *" + "".join(parts) + spaces


MOST_LINE_CHARACTERS = 4000

_COMPOSE = r"[\w.@/-]+ *\| "  # docker compose, and swarm's service.1.task@node
_KUBECTL = r"\[pod/[^\]]+\] "
_KUBERNETES = r"(?P<clock>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)[\d.,]*(?:Z|[+-]\d\d:?\d\d)? (?:std(?:out|err) [FP] )?"
_DESKTOP = r"(?P<clock>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\.\d{3} \| "  # Docker Desktop's log window
_SENDER = r"[\w.-]+ [^\s:\[]+(?:\[\d+\])?: "  # host and unit
_JOURNAL = rf"(?P<clock>[A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d)(?:\.\d+)? {_SENDER}"
_JOURNAL_FULL = rf"[A-Z][a-z]{{2}} (?P<clock>\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.\d+)? [A-Z]+ {_SENDER}"
_JOURNAL_ISO = rf"(?P<clock>\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d)[\d.,]*(?:Z|[+-]\d\d:?\d\d) {_SENDER}"
_JOURNAL_MONOTONIC = rf"\[ *\d+\.\d+\] {_SENDER}"
# logcli: the time, the stream's labels
_LOKI = r"(?P<clock>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)[\d.,]*(?:Z|[+-]\d\d:?\d\d) \{[^}]*\} "
_PROCESS = rf"\((?P<process>{NAME}){RANK}{PID}"  # vLLM's, Ray's workers
_RAY = r"\((?:(?P<process>raylet)|pid=\d+)(?:, ip=[^)]*)?\) "
# vLLM's records; before 0.8 without the opening bracket
_RECORD = r"(?P<level>[A-Z]+) (?P<clock>\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,]\d+)? \[?[^\]\s]+:\d+\] ?"
# Python's logging, as in Ray and scripts around vLLM
_LOGGING = r"\[?(?P<clock>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[.,]\d+\]?(?: - [\w.]+)?(?: - | )(?P<level>[A-Z]+)(?: - | )"
_RANK = r"\[rank\d+\]: ?"  # torch, on an uncaught exception
# glog form, as torch and NCCL write it: E0716 18:21:22.792000 132331 torch/…/heuristics.py:874]
_GLOG = r"\[?(?P<glog>[IWEF])\d{3,4} \d\d:\d\d:\d\d[.\d]*(?: \d+)? [^\]\s]+:\d+\] ?"
_PLACE = r"\[[\w.]+\.(?:py|cpp):\d+\] "
_UVICORN = r"(?P<level>INFO|WARNING|ERROR|CRITICAL): {2,}"
_WARNING = r"\S+\.py:\d+: (?P<warning>\w*Warning): "

_STAGE = r"\[Stage-\d+\] "  # vLLM-Omni's stages
_INDENTED = rf"\s+(?={PROCESS}|[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d)"
"""Indentation of a pasted log: a line that continues with a prefix is not code."""

_OF_A_BRACKET = (_KUBECTL, _RANK, _STAGE, _GLOG, _PLACE, _LOGGING, _JOURNAL_MONOTONIC)
_OF_A_CAPITAL = (_RECORD, _UVICORN, _GLOG, _JOURNAL, _JOURNAL_FULL, _COMPOSE)
_OF_A_DIGIT = (_JOURNAL_ISO, _LOKI, _KUBERNETES, _LOGGING, _DESKTOP, _COMPOSE)
_SPELLED = r"(?:\^\[|[\ufffd\u241b\u2190?]|#033|\\(?:x1b|u001b|033|e))?\[(?:\d{1,3}(?:;\d{1,3})*)?m"
"""Colors as spelled out by editors, syslog, pastes and broken terminals, or with the escape character lost."""
_COLOR = lazy_pattern(r"\[[\d;]*m")
_OF_OTHERS = (_COMPOSE, _WARNING)
_CLOCK = r"(?P<clock>(?:\d{4}-\d\d-\d\d[T ]|[A-Z][a-z]{2} [ \d]\d )?\d\d:\d\d:\d\d)"
_OF_A_TRACEBACK = r"\s+\S|Traceback \(|(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Interrupt)(?::|$)"
"""Lines that get no prefix from Python's logging itself; with one, a script logged each vLLM line as a record."""
_MOST_PREFIXES = 6
_JSON_PROCESSES = {"MainProcess": "APIServer"}
_MESSAGES = ("message", "log", "MESSAGE", "textPayload", "line", "msg", "@message", "content", "body")
_PAYLOADS = ("jsonPayload", "_source")
_COLLECTORS = frozenset(
    {"log", "MESSAGE", "textPayload", "line", "stream", "kubernetes", "container_id", "container_name", "insertId",
     "source_type", "labels", "ecs_cluster", "@timestamp", "@message"}
)  # fmt: skip
"""Names that collectors write, but no formatter of Python's logging does."""
_GLOG_LEVELS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
_LEVELS = frozenset({"TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"})


class LogLine(msgspec.Struct, frozen=True):
    """One line. ``number`` counts from 1; ``process`` and ``level`` are empty if the line has none.

    ``message`` keeps its indentation, without prefix and escape codes. ``clock`` is the line's time, verbatim
    (``11-20 10:03:58``, ``2026-11-20 10:03:58``, ``Aug 17 18:42:18``), preferring vLLM's own to the collector's.
    """

    number: int
    process: str
    level: str
    message: str
    clock: str = ""

    @property
    def harmless(self) -> bool:
        """Whether its level marks it as harmless."""
        return self.level in ("TRACE", "DEBUG", "INFO", "WARNING")


def parse_lines(lines: Iterable[str]) -> Iterator[LogLine]:
    """Parse the lines of a whole log, in the formats of vLLM 0.7 to 0.33.

    Up to 0.30 every line begins with the process, from 0.31 only vLLM's own records do; colors may appear anywhere. A
    JSON record whose message spans several lines yields several lines with the same number. Prefixes of unknown
    collectors are learned from the log (`learn_carriers`).
    """
    written = lines if isinstance(lines, Sequence) else list(lines)
    carriers = learn_carriers(written, _clean)
    for number, raw in enumerate(written, 1):
        yield from parse_line(number, raw, carriers)


def parse_line(number: int, raw: str, carriers: re.Pattern[str] | None = None) -> Iterator[LogLine]:
    """Parse one line; see `parse_lines`. ``carriers`` are learned prefixes of its log."""
    line = _parse(number, _clean(raw), carriers)
    if not line.message.startswith("{") or (record := _json_record(raw[raw.find("{") :])) is None:
        yield line
        return
    for part in record.message.splitlines():
        inner = _parse(number, _clean(part), carriers)
        process, level = inner.process or record.process, inner.level or record.level
        yield LogLine(number, process, level, inner.message, inner.clock or record.clock or line.clock)


def _clean(raw: str) -> str:
    """The line as a terminal would show it, without colors."""
    text = plain(redrawn(raw), MOST_LINE_CHARACTERS)
    return _compiled(_SPELLED).sub("", text) if _COLOR.search(text) else text


def _parse(number: int, text: str, carriers: re.Pattern[str] | None = None) -> LogLine:
    process = level = clock = ""
    at = 0
    if carriers is not None and (carried := carriers.match(text)):
        at = carried.end()
        clock = found["clock"] if (found := _compiled(_CLOCK).search(text, 0, at)) else ""
    if text[at : at + 1].isspace() and (indented := _compiled(_INDENTED).match(text, at)):
        at = indented.end()
    weak = False
    for _ in range(_MOST_PREFIXES):  # they nest in any order: (Worker pid=1) [rank0]:E0716 …
        found = _prefix(text, at)
        if found is None:
            break
        at = found.end()
        groups = found.groupdict()
        if weak:
            level = ""  # a script's logger wrote the whole vLLM line, not its own
        weak = found.re.pattern == _LOGGING
        process = groups.get("process") or process
        level = _level(groups) or level
        clock = groups.get("clock") or clock
    if weak and _compiled(_OF_A_TRACEBACK).match(text, at):
        level = ""
    return LogLine(number, process, level, text[at:], clock)


def _prefix(text: str, at: int) -> re.Match[str] | None:
    """The prefix at ``at``. Only formats allowed by its first character are tried."""
    first = text[at : at + 1]
    if first == "(":
        return _compiled(_PROCESS).match(text, at) or _compiled(_RAY).match(text, at)
    if not first or first.isspace():
        return None
    kinds: tuple[str, ...]
    if first == "[":
        kinds = _OF_A_BRACKET
    elif first.isdigit():
        kinds = _OF_A_DIGIT
    else:
        kinds = _OF_A_CAPITAL if first.isupper() else _OF_OTHERS
    for kind in _all_compiled(kinds):
        found = kind.match(text, at)
        if found is not None and found.groupdict().get("level", "INFO") in _LEVELS:
            return found
    return None


def _level(groups: dict[str, str | None]) -> str:
    if groups.get("warning"):
        return "WARNING"
    return groups.get("level") or _GLOG_LEVELS.get(groups.get("glog") or "", "")


class _JsonRecord(msgspec.Struct, frozen=True):
    """A parsed JSON record. ``level`` is empty if it is the collector's, which only knows the line's stream."""

    process: str
    level: str
    message: str
    clock: str


def _json_record(raw: str) -> _JsonRecord | None:
    """A JSON record from vLLM's formatter (from 0.31) or another one, or a line packed by a collector."""
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    record = next((inner for name in _PAYLOADS if isinstance(inner := record.get(name), dict)), {}) | record
    message = next((text for name in _MESSAGES if (text := _text_of(record.get(name)))), None)
    if message is None:
        return None
    parts = [message, *_texts(record, "exc_info", "stack_info", "exception")]
    process, level, clock = (
        next(_texts(record, *names), "")
        for names in (("processName",), ("levelname", "level", "severity"), ("asctime", "timestamp", "time"))
    )
    level = "" if _COLLECTORS.intersection(record) else level.upper()
    return _JsonRecord(_JSON_PROCESSES.get(process, process), level, "\n".join(parts), clock[:19])


def _text_of(value: object) -> str:
    """A message as text; journald writes one with escape codes as a list of bytes."""
    if isinstance(value, list) and value and all(isinstance(one, int) and 0 <= one < 256 for one in value):
        return bytes(value).decode("utf-8", "replace")
    return value if isinstance(value, str) else ""


def _texts(record: Mapping[str, object], *names: str) -> Iterator[str]:
    return (value for name in names if isinstance(value := record.get(name), str) and value)
