"""How much of a chart's range is shown, and in which steps."""

from __future__ import annotations

import pytest

from vllm_console.history.time_view import CHART_RANGES, FEWEST_POINTS, points_shown, range_for

NAMED = {one.name: one for one in CHART_RANGES}


@pytest.mark.parametrize(
    ("wanted", "recorded", "expected"),
    [
        ("15m", 40.0, "5m"),
        ("15m", 86_400.0, "15m"),
        ("all", 2 * 3600.0, "6h"),
        ("7d", 3 * 86_400.0, "7d"),
        ("all", 40 * 86_400.0, "all"),
        ("5m", -1.0, "5m"),
    ],
)
def test_range_suits_the_recorded_time(wanted, recorded, expected):
    assert range_for(NAMED[wanted], recorded) is NAMED[expected]


def test_minute_old_server_fills_the_chart():
    assert points_shown(NAMED["15m"], 60.0, 5.0) == 12
    assert points_shown(NAMED["15m"], 3.0, 5.0) == FEWEST_POINTS
    assert points_shown(NAMED["15m"], 3600.0, 5.0) == 180


def test_growing_chart_is_not_redrawn_with_each_point():
    counts = {points_shown(NAMED["15m"], float(age), 5.0) for age in range(450, 900)}
    assert len(counts) < 30
    for age in range(60, 900):
        shown = points_shown(NAMED["15m"], float(age), 5.0)
        assert age / 5 <= shown <= age / 5 * 1.16 + 1
