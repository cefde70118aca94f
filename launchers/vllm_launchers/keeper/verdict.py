"""Whether a server that failed is started again: how often already, how soon, and whether another start could help."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm_launchers.keeper.lifecycle import retry_delay
from vllm_launchers.keeper.records import Hopeless, RestartMode, ServerRecord

USAGE_EXIT_CODE = 2
"""What programs end with that do not understand their command line (argparse, getopt, shells)."""
LOG_END_BYTES = 128 * 1024
"""How much of the end of the log is searched for why it is hopeless."""
LONGEST_LINE = 1000
"""How many characters of a line: expressions may take time that grows with the square of its length."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``delay``: seconds until the next automatic start, None for no more; ``why`` not, as a clause, may be empty."""

    delay: float | None
    why: str = ""


def judge(record: ServerRecord, log: Path, note: Callable[[str], None]) -> Verdict:
    """What follows from a failure nobody asked for."""
    policy, attempt = record.current.spec.restart, record.attempt
    if policy.mode is RestartMode.NEVER:
        return Verdict(None)
    if why := _hopeless(record, log, note):
        return Verdict(None, f"not started again, since that would fail the same way: {why}")
    delay = retry_delay(policy, attempt)
    if delay is None and attempt:
        return Verdict(None, f"gave up after {attempt} automatic restart{'s' if attempt > 1 else ''}")
    return Verdict(delay)


def remaining(record: ServerRecord, now: float) -> float:
    """Seconds that a server which waits to be started again still has to wait at ``now`` (Unix seconds).

    Never more than the whole wait was, should the clock have been set back since.
    """
    policy = record.current.spec.restart
    whole = retry_delay(policy, record.attempt)
    if whole is None:
        whole = policy.backoff_cap_seconds
    return min(max((record.next_attempt_at or now) - now, 0.0), whole)


def _hopeless(record: ServerRecord, log: Path, note: Callable[[str], None]) -> str:
    """Why another start would fail the same way; empty where it may not. What was ready once had a sound spec."""
    if record.current.ready_at is not None:
        return ""
    text = _log_end(log, record)
    for one in record.current.spec.restart.hopeless:
        if _matches(one, text, note):
            return one.reason
    if record.exit is not None and record.exit.code == USAGE_EXIT_CODE:
        return f"exit code {USAGE_EXIT_CODE} says that it does not understand its command line"
    return ""


def _matches(one: Hopeless, text: str, note: Callable[[str], None]) -> bool:
    try:
        return re.search(one.pattern, text, re.IGNORECASE | re.MULTILINE) is not None
    except re.error as error:
        note(f"{one.pattern!r} is no regular expression ({error}); passed over")
        return False


def _log_end(path: Path, record: ServerRecord) -> str:
    """The end of the log since the last start, in the file that is written now."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            begin = record.log_offset if record.log_inode == os.fstat(file.fileno()).st_ino else 0
            file.seek(max(begin, size - LOG_END_BYTES))
            text = file.read(LOG_END_BYTES).decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(line[:LONGEST_LINE] for line in text.splitlines())
