"""Whether and when a failed server is restarted: the limit, the back-off, and whether another start could help."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from vllm_launchers.keeper.records import NotRetryable, RestartMode, RestartPolicy, ServerRecord, SleepStep
from vllm_launchers.private import open_regular
from vllm_launchers.units import counted
from vllm_launchers.values import Value

USAGE_EXIT_CODE = 2
"""The exit code of programs that reject their command line (argparse, getopt, shells)."""
LOG_END_BYTES = 128 * 1024
"""How much of the end of the log to search for failures that are not retryable."""
LONGEST_LINE = 1000
"""Maximum characters of a line: the time of a regular expression may grow quadratically with its length."""


class RetryDecision(Value):
    """``delay``: seconds until the next automatic start, or None; ``why``: why there is none, a clause or empty."""

    delay: float | None
    why: str = ""


def decide_restart(record: ServerRecord, log: Path, note: Callable[[str], None]) -> RetryDecision:
    """Whether the restart policy restarts a server after this failure."""
    policy, attempt = record.current.spec.restart, record.attempt
    if policy.mode is RestartMode.NEVER:
        return RetryDecision(None)
    if record.sleep is not None and record.sleep.step is SleepStep.ASLEEP:
        return RetryDecision(None, "not restarted, because it was asleep and its GPUs may be in use")
    if why := _not_retryable(record, log, note):
        return RetryDecision(None, f"not restarted, because it would fail the same way: {why}")
    delay = retry_delay(policy, attempt)
    return RetryDecision(delay, gave_up(attempt) if delay is None else "")


def gave_up(attempt: int) -> str:
    """The clause ``gave up after 3 automatic restarts``; empty for none."""
    return f"gave up after {counted(attempt, 'automatic restart')}" if attempt else ""


def retry_delay(policy: RestartPolicy, attempt: int) -> float | None:
    """Seconds until the next automatic start after ``attempt`` in a row; None if there is none."""
    if policy.mode is RestartMode.NEVER or attempt >= policy.limit:
        return None
    return min(policy.backoff_seconds * 2.0 ** min(attempt, 32), policy.backoff_cap_seconds)


def remaining(record: ServerRecord, now: float) -> float:
    """Seconds left at ``now`` (Unix seconds) until a server's automatic restart.

    Never more than the whole delay, in case the clock was set back.
    """
    policy = record.current.spec.restart
    whole = retry_delay(policy, record.attempt)
    if whole is None:
        whole = policy.backoff_cap_seconds
    return min(max((record.next_attempt_at or now) - now, 0.0), whole)


def _not_retryable(record: ServerRecord, log: Path, note: Callable[[str], None]) -> str:
    """Why another start would fail the same way; empty if it might not. A server that was ready had a valid spec."""
    if record.current.ready_at is not None:
        return ""
    text = _log_end(log, record)
    for one in record.current.spec.restart.not_retryable:
        if _matches(one, text, note):
            return one.reason
    if record.exit is not None and record.exit.code == USAGE_EXIT_CODE:
        return f"exit code {USAGE_EXIT_CODE} means that it rejects its command line"
    return ""


def _matches(one: NotRetryable, text: str, note: Callable[[str], None]) -> bool:
    try:
        return re.search(one.pattern, text, re.IGNORECASE | re.MULTILINE) is not None
    except re.error as error:
        note(f"{one.pattern!r} is not a regular expression ({error}); ignored")
        return False


def _log_end(path: Path, record: ServerRecord) -> str:
    """The end of the current log file, from the last start on."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            begin = record.log_offset if record.log_inode == os.fstat(file.fileno()).st_ino else 0
            file.seek(max(begin, size - LOG_END_BYTES))
            text = file.read(LOG_END_BYTES).decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(line[:LONGEST_LINE] for line in text.splitlines())
