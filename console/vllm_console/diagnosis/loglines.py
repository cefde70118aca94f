"""Lines of a vLLM log, taken apart: which process wrote them, how grave they are, and what they say. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from vllm_console.text import plain

LONGEST = 4000

_PREFIXES = (
    re.compile(r"[\w.-]+ +\| "),  # docker compose
    re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[\d.,]*(?:Z|[+-]\d\d:?\d\d)? "),  # docker, kubernetes
    re.compile(r"\((?P<process>[\w.-]+) pid=\d+(?:, ip=[^)]*)?\) ?"),  # vLLM's processes, Ray's workers
    # vLLM's records; before 0.8 without the opening bracket
    re.compile(r"(?P<level>[A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)? \[?[^\]\s]+:\d+\] ?"),
    re.compile(r"\[rank\d+\]: ?"),  # torch, on an uncaught exception
    # glog form, as torch and NCCL write it: E0716 18:21:22.792000 132331 torch/…/heuristics.py:874]
    re.compile(r"\[?(?P<glog>[IWEF])\d{3,4} \d\d:\d\d:\d\d[.\d]*(?: \d+)? [^\]\s]+:\d+\] ?"),
    re.compile(r"\[[\w.]+\.(?:py|cpp):\d+\] "),
    re.compile(r"(?P<level>INFO|WARNING|ERROR|CRITICAL): {2,}"),  # uvicorn
)
_GLOG = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
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
    for prefix in _PREFIXES * 2:  # they nest in any order: (Worker pid=1) [rank0]:E0716 …
        found = prefix.match(text, at)
        if found is None:
            continue
        groups = found.groupdict()
        named = groups.get("level") or _GLOG.get(groups.get("glog") or "", "")
        if "level" in groups and named not in _LEVELS:
            continue
        at = found.end()
        process = groups.get("process") or process
        level = named or level
    return LogLine(number, process, level, text[at:])


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
