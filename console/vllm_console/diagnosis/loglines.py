"""Lines of a vLLM log, taken apart: which process wrote them, how grave they are, and what they say. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from vllm_console.text import plain

LONGEST = 4000

_COMPOSE = re.compile(r"[\w.-]+ +\| ")
_KUBECTL = re.compile(r"\[pod/[^\]]+\] ")
_KUBERNETES = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[\d.,]*(?:Z|[+-]\d\d:?\d\d)? (?:std(?:out|err) [FP] )?")
_JOURNAL = re.compile(r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ [^\s:\[]+\[\d+\]: ")
_PROCESS = re.compile(r"\((?P<process>[\w.-]+)(?: \w+=\S+)*? pid=\d+(?:, ip=[^)]*)?\) ?")  # vLLM's, Ray's workers
_RAY = re.compile(r"\((?:(?P<process>raylet)|pid=\d+)(?:, ip=[^)]*)?\) ")
# vLLM's records; before 0.8 without the opening bracket
_RECORD = re.compile(r"(?P<level>[A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)? \[?[^\]\s]+:\d+\] ?")
# Python's logging, as Ray and scripts around vLLM have it
_LOGGING = re.compile(r"\[?\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.,]\d+\]?(?: - [\w.]+)?(?: - | )(?P<level>[A-Z]+)(?: - | )")
_RANK = re.compile(r"\[rank\d+\]: ?")  # torch, on an uncaught exception
# glog form, as torch and NCCL write it: E0716 18:21:22.792000 132331 torch/…/heuristics.py:874]
_GLOG = re.compile(r"\[?(?P<glog>[IWEF])\d{3,4} \d\d:\d\d:\d\d[.\d]*(?: \d+)? [^\]\s]+:\d+\] ?")
_PLACE = re.compile(r"\[[\w.]+\.(?:py|cpp):\d+\] ")
_UVICORN = re.compile(r"(?P<level>INFO|WARNING|ERROR|CRITICAL): {2,}")
_WARNING = re.compile(r"\S+\.py:\d+: (?P<warning>\w*Warning): ")

_OF_A_BRACKET = (_KUBECTL, _RANK, _GLOG, _PLACE, _LOGGING)
_OF_A_CAPITAL = (_RECORD, _UVICORN, _GLOG, _JOURNAL, _COMPOSE)
_OF_A_DIGIT = (_KUBERNETES, _LOGGING, _COMPOSE)
_OF_OTHERS = (_COMPOSE, _WARNING)
_MOST_PREFIXES = 6
_GLOG_LEVELS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
_LEVELS = frozenset({"TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"})


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line. ``number`` counts from 1; ``process`` and ``level`` are empty where the line does not say.

    ``message`` keeps its indentation and has neither prefix nor escape codes.
    """

    number: int
    process: str
    level: str
    message: str

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
        text = plain(raw, LONGEST)
        if text.startswith("{") and (record := _json_record(raw)) is not None:
            process, level, message = record
            for part in message.splitlines():
                yield LogLine(number, process, level, plain(part, LONGEST))
        else:
            yield _parse(number, text)


def _parse(number: int, text: str) -> LogLine:
    process = level = ""
    at = 0
    for _ in range(_MOST_PREFIXES):  # they nest in any order: (Worker pid=1) [rank0]:E0716 …
        found = _prefix(text, at)
        if found is None:
            break
        at = found.end()
        groups = found.groupdict()
        process = groups.get("process") or process
        level = _level(groups) or level
    return LogLine(number, process, level, text[at:])


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


def _json_record(raw: str) -> tuple[str, str, str] | None:
    """Process, level and message of a record as vLLM's JSON formatter writes it (from 0.31)."""
    try:
        record = json.loads(raw)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("message"), str):
        return None
    parts = [
        record["message"],
        *(record[key] for key in ("exc_info", "stack_info") if isinstance(record.get(key), str)),
    ]
    return str(record.get("processName") or ""), str(record.get("levelname") or ""), "\n".join(parts)
