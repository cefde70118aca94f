"""What a line of a vLLM server's log is: its level, the traceback it belongs to, and how it is made fit to show."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from vllm_console.text import plain

LINE_CHARACTERS = 2000
"""Longer lines are shown cut, with a mark."""

_KEPT_BYTES = 8 * LINE_CHARACTERS
"""Of a longer line no more is decoded."""


class Level(IntEnum):
    """How bad a line is. The numbers are those of `logging`."""

    DEBUG = 10
    INFO = 20
    WARNING = 30
    ERROR = 40


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a log, fit to be shown: no escape codes, no secrets, bounded length.

    ``offset`` and ``end`` are where it begins and where the next one does. ``level`` is None where the line names
    none. ``complete`` is False for the last line while its newline is not written yet.
    """

    offset: int
    end: int
    text: str
    level: Level | None = None
    complete: bool = True


_LEVELS = {
    "DEBUG": Level.DEBUG,
    "INFO": Level.INFO,
    "WARNING": Level.WARNING,
    "WARN": Level.WARNING,
    "ERROR": Level.ERROR,
    "CRITICAL": Level.ERROR,
}

_PROCESS = r"(?:\([\w.-]+ pid=\d+\)\s?)?"

# vLLM's own records stand with "(EngineCore pid=7) " before them or without; uvicorn writes "INFO:     "; torch's
# glog form is "W1120 10:02:46"; JSON records name "levelname".
_LEVEL = re.compile(
    rf"{_PROCESS}(?:(?P<name>DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL)(?=[\s:])"
    r"|\[?(?P<glog>[IWEF])\d{4} \d\d:\d\d:\d\d"
    r'|\{.*"levelname": ?"(?P<json>[A-Z]+)")'
)
_GLOG = {"I": Level.INFO, "W": Level.WARNING, "E": Level.ERROR, "F": Level.ERROR}

_TRACEBACK = re.compile(
    rf"{_PROCESS}(?:Traceback \(most recent call last\):"
    r'|\s+File "[^"]*", line \d+'
    r"|(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit)(?::|$)"
    r"|vllm(?: \w+)?: error: "
    r"|terminate called |Segmentation fault|!!!!!!! Segfault)"
)
_WARNINGS = re.compile(r"\S+:\d+: \w*Warning: ")
_INDENTED = re.compile(rf"{_PROCESS}\s+\S")


def level_of(text: str) -> Level | None:
    """The level that a line names, or that it shows by being part of a traceback; None when it does neither."""
    match = _LEVEL.match(text)
    if match:
        name, glog, json = match.group("name", "glog", "json")
        return _GLOG[glog] if glog else _LEVELS.get(name or json)
    if _TRACEBACK.match(text):
        return Level.ERROR
    return Level.WARNING if _WARNINGS.match(text) else None


def mark_tracebacks(lines: Sequence[Line]) -> list[Line]:
    """Give the source lines inside tracebacks, which name no level themselves, the level of the traceback."""
    marked = list(lines)
    # Backwards first: a page may begin in the middle of a traceback, before one of its ``File`` lines.
    inside = False
    for index in range(len(marked) - 1, -1, -1):
        inside = _spread(marked, index, inside) and "Traceback (" not in marked[index].text
    inside = False
    for index in range(len(marked)):
        inside = _spread(marked, index, inside)
    return marked


def _spread(lines: list[Line], index: int, inside: bool) -> bool:
    line = lines[index]
    if line.level is None and inside and _INDENTED.match(line.text):
        lines[index] = replace(line, level=Level.ERROR)
        return True
    return line.level is Level.ERROR and _TRACEBACK.match(line.text) is not None


def make_line(offset: int, raw: bytes, clean: Callable[[str], str]) -> Line:
    """Make a `Line` of the bytes at ``offset``, its newline included; ``clean`` takes out secrets."""
    end = offset + len(raw)
    complete = raw.endswith(b"\n")
    body = raw.rstrip(b"\r\n")
    text = None
    if len(body) > _KEPT_BYTES or b"\r" in body:
        body, cut = _last_state(body)
        if cut:
            text = plain(body.decode("utf-8", "replace"), LINE_CHARACTERS)
            text = f"{clean(text)} … [cut: a line of {_size(end - offset)}]"
    if text is None:
        text = body.decode("utf-8", "replace")
        whole = len(text)
        text = clean(plain(text, LINE_CHARACTERS))
        if whole > LINE_CHARACTERS and len(text) >= LINE_CHARACTERS:
            text = f"{text} … [cut: a line of {_size(end - offset)}]"
    return Line(offset, end, text, level_of(text), complete)


def _last_state(body: bytes) -> tuple[bytes, bool]:
    """What a terminal would show of a line redrawn with carriage returns, and whether that had to be cut."""
    state = body[body.rfind(b"\r") + 1 :]
    return state[:_KEPT_BYTES], len(state) > _KEPT_BYTES


def _size(count: int) -> str:
    for limit, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= limit:
            return f"{count / limit:.1f} {unit}"
    return f"{count} bytes"
