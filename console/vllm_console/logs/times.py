"""Times in a log, and finding the line at a time. vLLM writes month, day and time of day, but no year."""

from __future__ import annotations

from datetime import datetime, timedelta

from vllm_console.logs.file import Line, LogFile
from vllm_console.logs.prefix import PROCESSES
from vllm_console.text import plain
from vllm_launchers.patterns import lazy_pattern

YEAR = 2000
"""Stands in for the newest line's year; it has a February 29."""

HALF_A_YEAR = timedelta(days=183)

NEAR = 64 * 1024
"""Minimum distance in bytes for bisection; below it, lines are read sequentially."""

MOST_SCANNED = 2 * 1024 * 1024
"""Maximum bytes read sequentially; after that, the current place is used."""

PROBE_LINES = 100
PROBES = 20
"""Lines per read, and reads, before a place counts as one without times."""

TAIL_LINES = 400
"""How many lines at the end are searched for the newest time."""

_STAMP = lazy_pattern(
    PROCESSES + r"(?:\[?[IWEF](?P<glog>\d{4}) |\[?(?:[A-Z]+:? )?(?:\d{4}-)?(?P<date>\d\d-\d\d)[ T])"
    r"(?P<clock>\d\d:\d\d:\d\d)"
)
_AGO = lazy_pattern(r"-\s*(\d{1,6})\s*([smhd])")
_MOMENT = lazy_pattern(r"(?:(\d{1,2})-(\d{1,2})\s+)?(\d{1,2}):(\d\d)(?::(\d\d))?")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}

LONGEST_AGO = timedelta(days=366)
"""Maximum distance into the past of a time, since the log has no year."""

HINT = "type 10:03, 10:03:57, 11-20 10:03, or -10m for ten minutes before the end"

FORMS = "10:03, 11-20 10:03, or -10m"
"""The accepted forms, short enough for a line that also quotes the rejected text."""

LONGEST_QUOTE = 24
"""Maximum length of the rejected text in an error message."""


def stamp_of(text: str) -> datetime | None:
    """The time at the beginning of a line, in `YEAR`; None if there is none."""
    found = _STAMP.match(text)
    if found is None:
        return None
    date = found["date"] or f"{found['glog'][:2]}-{found['glog'][2:]}"
    try:
        return datetime.fromisoformat(f"{YEAR}-{date} {found['clock']}")
    except ValueError:
        return None


def newest_stamp(log: LogFile) -> datetime | None:
    """The newest time near the end of a log."""
    for line in reversed(log.before(log.end, TAIL_LINES)):
        if (stamp := stamp_of(line.text)) is not None:
            return stamp
    return None


def parse_moment(text: str, newest: datetime) -> datetime:
    """Parse a time typed by a user, for a log whose newest line was written at ``newest``.

    A time of day means the latest one that is not after the end.

    Raises:
        ValueError: it is not a time; the message states what is expected.
    """
    text = text.strip()
    if ago := _AGO.fullmatch(text):
        return newest - min(timedelta(**{_UNITS[ago[2]]: int(ago[1])}), LONGEST_AGO)
    found = _MOMENT.fullmatch(text)
    if found is None:
        raise ValueError(_refusal(text))
    month, day, hour, minute, second = (int(part) if part else None for part in found.groups())
    try:
        moment = newest.replace(hour=hour or 0, minute=minute or 0, second=second or 0)
        if month is not None and day is not None:
            return _near(moment.replace(year=YEAR, month=month, day=day), newest)
    except ValueError:
        raise ValueError(_refusal(text)) from None
    return moment if moment <= newest else moment - timedelta(days=1)


def check_moment(text: str) -> None:
    """Check a time typed by a user, without a log.

    Raises:
        ValueError: it is not a time; the message states what is expected.
    """
    parse_moment(text, datetime(YEAR, 1, 1))


def _refusal(text: str) -> str:
    return f"'{plain(text, LONGEST_QUOTE)}' is not a time: type {FORMS}"


def find_time(log: LogFile, moment: datetime, newest: datetime) -> int | None:
    """Offset of the first line at or after a time; None if all lines with a time are older.

    In a long stretch of lines without times, such as access lines, a place within that stretch.
    """
    low, high = log.start, log.end
    while high - low > NEAR:
        middle = (low + high) // 2
        found = _stamped_after(log, middle, newest)
        if found is not None and found[1] < moment:
            low = max(found[0].end, low + 1)
        else:
            high = middle
    most = low + MOST_SCANNED
    while low < most:
        lines = log.after(low, PROBE_LINES)
        for line in lines:
            stamp = stamp_of(line.text)
            if stamp is not None and _near(stamp, newest) >= moment:
                return line.offset
        if not lines or lines[-1].end <= low:
            return None
        low = lines[-1].end
    return low


def _stamped_after(log: LogFile, offset: int, newest: datetime) -> tuple[Line, datetime] | None:
    """The first line with a time from ``offset`` on, within a bounded number of lines."""
    here = log.before(offset, 1)
    at = here[0].offset if here else log.start
    for _ in range(PROBES):
        lines = log.after(at, PROBE_LINES, NEAR)
        for line in lines:
            if (stamp := stamp_of(line.text)) is not None:
                return line, _near(stamp, newest)
        if not lines:
            return None
        at = lines[-1].end
    return None


def not_after(moment: datetime, newest: datetime) -> datetime:
    """Limit a time in a year near the newest line's to the log's end."""
    later = moment.replace(year=YEAR)
    return newest if newest < later < newest + HALF_A_YEAR else moment


def _near(stamp: datetime, newest: datetime) -> datetime:
    """Move a time after the newest one into the previous year."""
    if stamp <= newest + timedelta(days=1):
        return stamp
    if (stamp.month, stamp.day) == (2, 29):
        stamp = stamp.replace(month=3, day=1)
    return stamp.replace(year=YEAR - 1)
