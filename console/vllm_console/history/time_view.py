"""Which part of a server's history is shown: a time range that ends now or earlier, and a moment in it. Pure."""

from __future__ import annotations

import re

import msgspec

from vllm_console.text import plain


class ChartRange(msgspec.Struct, frozen=True):
    """How far back charts reach, and the seconds per point."""

    name: str
    seconds: float
    step: float

    @property
    def points(self) -> int:
        """Number of points."""
        return round(self.seconds / self.step)


CHART_RANGES = (
    ChartRange("5m", 300.0, 5.0),
    ChartRange("15m", 900.0, 5.0),
    ChartRange("1h", 3600.0, 20.0),
    ChartRange("6h", 21_600.0, 120.0),
    ChartRange("24h", 86_400.0, 480.0),
    ChartRange("7d", 604_800.0, 3600.0),
    ChartRange("all", 2_592_000.0, 14_400.0),
)
"""The selectable ranges; the last one is as long as history is kept."""

DEFAULT_RANGE = CHART_RANGES[1]

FEWEST_POINTS = 12
"""Minimum width of a chart, even for a new server."""


class TimeView(msgspec.Struct, frozen=True):
    """The requested view: the range, its end, and the moment whose figures are shown (Unix seconds).

    Without ``end`` it ends now; without ``at`` the figures are current. ``gpu`` is the index of the GPU whose charts
    are wanted, if any; ``run`` the number of the replayed run, if any; ``requests`` whether finished requests are
    wanted.
    """

    range: ChartRange = DEFAULT_RANGE
    end: float | None = None
    at: float | None = None
    gpu: int | None = None
    run: int | None = None
    requests: bool = False


LIVE = TimeView()


def range_for(wanted: ChartRange, recorded: float) -> ChartRange:
    """The range whose step suits the available part of ``wanted``; ``recorded`` is how many seconds are recorded."""
    span = min(wanted.seconds, max(recorded, 0.0))
    return next(one for one in CHART_RANGES if one.seconds >= span)


def points_shown(wanted: ChartRange, recorded: float, step: float) -> int:
    """Number of points of ``step`` seconds that fill the width of a chart.

    Determined by the recorded data until the range is full. It grows by a sixteenth at a time, so that a chart is not
    rescaled with each point.
    """
    known = max(FEWEST_POINTS, -int(-min(wanted.seconds, max(recorded, 0.0)) // step))
    part = max(1, (1 << (known.bit_length() - 1)) // 16)
    return min(max(FEWEST_POINTS, round(wanted.seconds / step)), -(-known // part) * part)


_MOMENT = r"(?:(?:(\d{4})-)?(\d\d?)-(\d\d?)[ T])?(\d\d?):(\d\d)(?::(\d\d))?"


def moment_from(text: str, now: float) -> float:
    """Parse an earlier local time into Unix seconds: ``2026-11-22 03:10``, ``11-22 03:10``, ``03:10:30``.

    Without a date, the latest such time before ``now``; likewise without a year.

    Raises:
        ValueError: the text has none of these forms, is not a valid date, or is in the future (one sentence).
    """
    from datetime import datetime, timedelta  # charts need neither

    found = re.fullmatch(_MOMENT, text.strip(), re.ASCII)
    wanted = ValueError(f"'{plain(text, 40)}': expected an earlier time such as '2026-11-22 03:10' or 03:10")
    if found is None:
        raise wanted
    year, month, day, hour, minute, second = (int(part) if part else None for part in found.groups())
    today = datetime.fromtimestamp(now)
    try:
        at = datetime(year or today.year, month or today.month, day or today.day, hour or 0, minute or 0, second or 0)
        if at > today and day is None:
            at -= timedelta(days=1)
        elif at > today and year is None:
            at = at.replace(year=at.year - 1)
        moment = at.timestamp()
    except (ValueError, OverflowError, OSError):  # the calendar's first and last years have no Unix time
        raise wanted from None
    if at > today:
        raise wanted
    return moment
