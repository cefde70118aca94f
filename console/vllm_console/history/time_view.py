"""Which part of a server's history is shown: a time range that ends now or earlier, and a moment in it. Pure."""

from __future__ import annotations

import msgspec

from vllm_console.text import plain


class ChartRange(msgspec.Struct, frozen=True):
    """How far back charts reach, and the seconds per point."""

    name: str
    seconds: float
    step: float

    @property
    def points(self) -> int:
        """How many points it has."""
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
"""Minimum width of a chart, however young its server is."""


class TimeView(msgspec.Struct, frozen=True):
    """The requested view: the range, its end, and the moment whose figures are shown (Unix seconds).

    Without ``end`` it ends now; without ``at`` figures are those of now. ``gpu`` is the index of the GPU whose
    charts are wanted, if any; ``run`` the number of the run that is replayed, if one is; ``requests`` whether finished
    requests are wanted.
    """

    range: ChartRange = DEFAULT_RANGE
    end: float | None = None
    at: float | None = None
    gpu: int | None = None
    run: int | None = None
    requests: bool = False


LIVE = TimeView()


def range_for(wanted: ChartRange, recorded: float) -> ChartRange:
    """The range with steps that suit the available part of ``wanted``; ``recorded`` is the seconds recorded."""
    span = min(wanted.seconds, max(recorded, 0.0))
    return next(one for one in CHART_RANGES if one.seconds >= span)


def points_shown(wanted: ChartRange, recorded: float, step: float) -> int:
    """How many points of ``step`` seconds fill the width of a chart.

    The recorded data decides until the range is full. The number grows by a sixteenth at a time, so that a chart is not
    redrawn with each point.
    """
    known = max(FEWEST_POINTS, -int(-min(wanted.seconds, max(recorded, 0.0)) // step))
    part = max(1, (1 << (known.bit_length() - 1)) // 16)
    return min(max(FEWEST_POINTS, round(wanted.seconds / step)), -(-known // part) * part)


_MOMENT = r"(?:(?:(\d{4})-)?(\d\d?)-(\d\d?)[ T])?(\d\d?):(\d\d)(?::(\d\d))?"


def moment_from(text: str, now: float) -> float:
    """An earlier local time (Unix seconds): ``2026-11-22 03:10``, ``11-22 03:10``, ``03:10:30``.

    Without a date it is the latest such time before ``now``; likewise without a year.

    Raises:
        ValueError: it is in none of these forms, not a valid date, or in the future; the text is one sentence.
    """
    import re
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
    except (ValueError, OverflowError, OSError):  # the first and last years of the calendar are no Unix seconds
        raise wanted from None
    if at > today:
        raise wanted
    return moment
