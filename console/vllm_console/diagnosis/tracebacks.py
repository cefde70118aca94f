"""Tracebacks in a log whose lines several processes write: where one begins, and what it went through. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from vllm_console.telemetry.loglines import LogLine

LONGEST = 400
"""Lines of one traceback, with those of other processes between them."""

EXCEPTION = re.compile(
    r"(?P<type>(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*)?(?:Error|Exception|Interrupt|Exit|Timeout|NotFound|Failure|Failed)"
    r"(?:\(\w+\))?|(?:[a-z_]\w*\.)+[A-Z]\w*)(?:: (?P<text>.*))?$"
)
"""The line that ends a traceback."""

CODE = re.compile(r"\s|File \"|Traceback |raise |return |[\^~]+$|$")
"""Other lines of a traceback."""

_CHAIN = re.compile(r"The above exception was the direct cause|During handling of the above exception")
_FUNCTION = re.compile(r"\s*File \"(?P<file>[^\"]*)\", line \d+, in (?P<function>\S+)")
_FIELD = re.compile(r"[a-z][a-z0-9_.]*")


def traceback_above(parsed: Sequence[LogLine], index: int) -> int:
    """Where the traceback that ends at ``index`` begins, as far as this log shows it.

    Also where its lines have lost their indentation on the way; without its first line, what stands right above.
    """
    process = parsed[index].process
    close = index
    near = True
    for above in range(index - 1, max(-1, index - LONGEST), -1):
        line = parsed[above]
        if line.process != process:
            continue  # processes write between each other's lines
        if line.message.startswith("Traceback "):
            return above
        if line.harmless or EXCEPTION.match(line.message):
            break
        near = near and CODE.match(line.message) is not None
        if near:
            close = above
    return close


def functions(parsed: Sequence[LogLine], first: int, index: int) -> tuple[str, ...]:
    """The functions that a traceback went through, the outermost first."""
    process = parsed[index].process
    found = (_FUNCTION.match(line.message) for line in parsed[first:index] if line.process == process)
    return tuple(match["function"] for match in found if match)


def ends_another(message: str) -> bool:
    """Whether a line is an exception of its own, and none of NCCL's names of errors (``ncclSystemError: …``)."""
    return not message.startswith("nccl") and EXCEPTION.match(message) is not None


def is_ignored(parsed: Sequence[LogLine], first: int) -> bool:
    """Whether Python says in front of the traceback that the exception has no effect."""
    return any("Exception ignored in" in parsed[above].message for above in range(max(0, first - 2), first))


def is_wrapped(parsed: Sequence[LogLine], index: int) -> bool:
    """Whether another exception was raised in its place, which then says more."""
    process = parsed[index].process
    for below in range(index + 1, min(index + 40, len(parsed))):
        line = parsed[below]
        if line.process == process and line.message.strip():
            return _CHAIN.search(line.message) is not None
    return False


def told_by_pydantic(parsed: Sequence[LogLine], index: int) -> int | None:
    """The line under a ValidationError that says what is wrong."""
    for below in range(index + 1, min(index + 8, len(parsed))):
        message = parsed[below].message.lstrip()
        if message.startswith(("Value error,", "Assertion failed,")) or "[type=" in message:
            return below
    return None


def pydantic_field(parsed: Sequence[LogLine], index: int) -> str:
    """The flag that a line of a ValidationError is about, as ``--flag: ``: pydantic names it in the line above only."""
    if "[type=" not in parsed[index].message or index == 0:
        return ""
    field = parsed[index - 1].message.strip()
    return f"--{field.replace('_', '-')}: " if _FIELD.fullmatch(field) else ""
