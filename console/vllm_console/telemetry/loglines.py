"""Lines of a vLLM log, taken apart: which process wrote them, how grave they are, when, and what they say. Pure.

The one place that knows what stands in front of a message: vLLM's own records, JSON, and whoever carried the line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from vllm_console.text import plain, redrawn

LONGEST = 4000

_COMPOSE = re.compile(r"[\w.-]+ +\| ")
_KUBECTL = re.compile(r"\[pod/[^\]]+\] ")
_KUBERNETES = re.compile(
    r"(?P<clock>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)[\d.,]*(?:Z|[+-]\d\d:?\d\d)? (?:std(?:out|err) [FP] )?"
)
_DESKTOP = re.compile(r"(?P<clock>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\.\d{3} \| ")  # Docker Desktop's log window
_JOURNAL = re.compile(r"(?P<clock>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d) \S+ [^\s:\[]+\[\d+\]: ")
_JOURNAL_ISO = re.compile(r"(?P<clock>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)[\d.,]*[+-]\d\d:?\d\d [\w.-]+ [^\s:\[]+\[\d+\]: ")
_PROCESS = re.compile(r"\((?P<process>[\w.-]+)(?: \w+=\S+)*? pid=\d+(?:, ip=[^)]*)?\) ?")  # vLLM's, Ray's workers
_RAY = re.compile(r"\((?:(?P<process>raylet)|pid=\d+)(?:, ip=[^)]*)?\) ")
# vLLM's records; before 0.8 without the opening bracket
_RECORD = re.compile(r"(?P<level>[A-Z]+) (?P<clock>\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,]\d+)? \[?[^\]\s]+:\d+\] ?")
# Python's logging, as Ray and scripts around vLLM have it
_LOGGING = re.compile(
    r"\[?(?P<clock>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[.,]\d+\]?(?: - [\w.]+)?(?: - | )(?P<level>[A-Z]+)(?: - | )"
)
_RANK = re.compile(r"\[rank\d+\]: ?")  # torch, on an uncaught exception
# glog form, as torch and NCCL write it: E0716 18:21:22.792000 132331 torch/…/heuristics.py:874]
_GLOG = re.compile(r"\[?(?P<glog>[IWEF])\d{3,4} \d\d:\d\d:\d\d[.\d]*(?: \d+)? [^\]\s]+:\d+\] ?")
_PLACE = re.compile(r"\[[\w.]+\.(?:py|cpp):\d+\] ")
_UVICORN = re.compile(r"(?P<level>INFO|WARNING|ERROR|CRITICAL): {2,}")
_WARNING = re.compile(r"\S+\.py:\d+: (?P<warning>\w*Warning): ")

_STAGE = re.compile(r"\[Stage-\d+\] ")  # vLLM-Omni's stages
_INDENTED = re.compile(r"\s+(?=\([\w.-]+(?: \w+=\S+)*? pid=\d+|[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d)")
"""A log that was pasted with an indentation: what begins with a prefix is no code."""

_OF_A_BRACKET = (_KUBECTL, _RANK, _STAGE, _GLOG, _PLACE, _LOGGING)
_OF_A_CAPITAL = (_RECORD, _UVICORN, _GLOG, _JOURNAL, _COMPOSE)
_OF_A_DIGIT = (_JOURNAL_ISO, _KUBERNETES, _LOGGING, _DESKTOP, _COMPOSE)
_SPELT = re.compile(r"(?:\^\[|\ufffd|#033|\\(?:x1b|u001b|033))\[[\d;]*m")
"""Colours as editors, syslog and broken terminals spell them out."""
_OF_OTHERS = (_COMPOSE, _WARNING)
_MOST_PREFIXES = 6
_JSON_PROCESSES = {"MainProcess": "APIServer"}
_GLOG_LEVELS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
_LEVELS = frozenset({"TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"})


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line. ``number`` counts from 1; ``process`` and ``level`` are empty where the line does not say.

    ``message`` keeps its indentation and has neither prefix nor escape codes. ``clock`` is what the line says of its
    time, as it stands there (``11-20 10:03:58``, ``2026-11-20 10:03:58``, ``Aug 17 18:42:18``), vLLM's own before that
    of whoever carried the line.
    """

    number: int
    process: str
    level: str
    message: str
    clock: str = field(default="", compare=False)

    @property
    def harmless(self) -> bool:
        """Whether its writer said that it is no error."""
        return self.level in ("TRACE", "DEBUG", "INFO", "WARNING")


def parse_lines(lines: Iterable[str]) -> Iterator[LogLine]:
    """Take lines apart, in the forms of vLLM 0.7 to 0.33.

    Up to 0.30 every line carries the process in front, from 0.31 only vLLM's own records do; colours may stand
    anywhere. A record in JSON whose message spans lines gives several of the same number.
    """
    for number, raw in enumerate(lines, 1):
        yield from parse_line(number, raw)


def parse_line(number: int, raw: str) -> Iterator[LogLine]:
    """One line taken apart; see `parse_lines`."""
    text = plain(redrawn(raw), LONGEST)
    if "[0" in text and "m" in text:
        text = _SPELT.sub("", text)
    line = _parse(number, text)
    if not line.message.startswith("{") or (record := _json_record(raw[raw.find("{") :])) is None:
        yield line
        return
    process, level, message, clock = record
    for part in message.splitlines():
        yield LogLine(number, process, level, plain(part, LONGEST), clock or line.clock)


def _parse(number: int, text: str) -> LogLine:
    process = level = clock = ""
    at = 0
    if text[:1].isspace() and (indented := _INDENTED.match(text)):
        at = indented.end()
    for _ in range(_MOST_PREFIXES):  # they nest in any order: (Worker pid=1) [rank0]:E0716 …
        found = _prefix(text, at)
        if found is None:
            break
        at = found.end()
        groups = found.groupdict()
        process = groups.get("process") or process
        level = _level(groups) or level
        clock = groups.get("clock") or clock
    return LogLine(number, process, level, text[at:], clock)


def _prefix(text: str, at: int) -> re.Match[str] | None:
    """What a writer put in front of what stands at ``at``. Only what its first character allows is tried."""
    first = text[at : at + 1]
    if first == "(":
        return _PROCESS.match(text, at) or _RAY.match(text, at)
    if not first or first.isspace():
        return None
    kinds: tuple[re.Pattern[str], ...]
    if first == "[":
        kinds = _OF_A_BRACKET
    elif first.isdigit():
        kinds = _OF_A_DIGIT
    else:
        kinds = _OF_A_CAPITAL if first.isupper() else _OF_OTHERS
    for kind in kinds:
        found = kind.match(text, at)
        if found is not None and found.groupdict().get("level", "INFO") in _LEVELS:
            return found
    return None


def _level(groups: dict[str, str | None]) -> str:
    """How grave the prefix says that it is."""
    if groups.get("warning"):
        return "WARNING"
    return groups.get("level") or _GLOG_LEVELS.get(groups.get("glog") or "", "")


def _json_record(raw: str) -> tuple[str, str, str, str] | None:
    """Process, level, message and time of a record as JSON formatters write it: vLLM's own (from 0.31) or another."""
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("message"), str):
        return None
    parts = [record["message"], *_texts(record, "exc_info", "stack_info", "exception")]
    process, level, clock = (
        next(_texts(record, *names), "")
        for names in (("processName",), ("levelname", "level", "severity"), ("asctime", "timestamp", "time"))
    )
    return _JSON_PROCESSES.get(process, process), level.upper(), "\n".join(parts), clock[:19]


def _texts(record: dict[str, object], *names: str) -> Iterator[str]:
    return (value for name in names if isinstance(value := record.get(name), str) and value)
