"""Progress of a startup relative to an earlier one, remaining time, and when it has been silent for too long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_console.logs.startup import FIRST_REQUEST, QUIET_SECONDS, durations, startup_progress, too_quiet
from vllm_console.logs.startup_facts import Stage

EARLIER = {"process": 1.0, "config": 9.0, "weights": 50.0, "compile": 30.0, "graphs": 10.0}

STAGES = (
    *("process", "imports", "config", "download", "weights", "compile", "memory profile", "kv cache", "graphs"),
    *("warm-up", "server", FIRST_REQUEST),
)
"""All stages in their usual order."""


def progress_of(*stages, now, earlier=EARLIER):
    """The progress for stages as (name, start time); the last one is still running."""
    made = [
        Stage(name, at, (stages[index + 1][1] - at) if index + 1 < len(stages) else None, *detail)
        for index, (name, at, *detail) in enumerate(stages)
    ]
    return startup_progress(made, earlier, now)


def test_half_the_usual_time_is_half_the_progress():
    found = progress_of(("process", 0.0), ("config", 1.0), ("weights", 10.0), now=50.0)
    assert found is not None
    assert found.share == pytest.approx(0.5)
    assert found.seconds_left == pytest.approx(50)
    assert found.usual == 100


def test_no_progress_without_an_earlier_start():
    assert progress_of(("process", 0.0), now=5.0, earlier={}) is None
    assert progress_of(now=5.0) is None


def test_stages_own_percentage_overrides_the_clock():
    found = progress_of(("process", 0.0), ("config", 1.0), ("weights", 10.0, "10 %"), now=50.0)
    assert found is not None
    assert found.share == pytest.approx(0.15)


def test_stage_longer_than_before_has_no_remaining_time():
    late = progress_of(("process", 0.0), ("config", 1.0), ("weights", 10.0), now=500.0)
    assert late is not None
    assert late.seconds_left is None
    assert late.share < 0.6


def test_skipped_stage_counts_as_done_once_a_later_one_began():
    found = progress_of(("process", 0.0), ("weights", 1.0), ("graphs", 40.0), now=40.0)
    assert found is not None
    assert found.share == pytest.approx(0.9)
    assert found.seconds_left == pytest.approx(10)


def test_new_stage_keeps_the_share_without_remaining_time():
    found = progress_of(("process", 0.0), ("config", 1.0), ("download", 10.0), now=99.0)
    assert found is not None
    assert found.share == pytest.approx(0.1)
    assert found.seconds_left is None


def test_imports_count_before_the_first_log_line():
    """The process stage includes the time of the imports."""
    earlier = {"process": 0.0, "imports": 20.0, "config": 20.0}
    found = progress_of(("process", 0.0), now=10.0, earlier=earlier)
    assert found is not None
    assert (found.share, found.seconds_left) == (pytest.approx(0.25), pytest.approx(30))
    later = progress_of(("process", 0.0), ("imports", 0.1), now=10.0, earlier=earlier)
    assert later is not None
    assert (later.share, later.seconds_left) == (pytest.approx(0.25), pytest.approx(30))


def test_download_is_not_stored_or_counted():
    stages = [Stage("process", 0.0, 1.0), Stage("download", 1.0, 600.0), Stage("weights", 601.0, 9.0)]
    assert durations(stages, None) == {"process": 1.0, "weights": 9.0}
    found = progress_of(("process", 0.0), now=0.5, earlier={"process": 1.0, "download": 600.0, "weights": 9.0})
    assert found is not None
    assert found.usual == 10


@given(
    usual=st.lists(st.floats(0, 300), min_size=len(STAGES), max_size=len(STAGES)),
    taken=st.lists(st.floats(0, 600), min_size=len(STAGES), max_size=len(STAGES)),
    present=st.sets(st.sampled_from(STAGES), min_size=1),
)
def test_share_never_decreases_and_stays_within_0_and_1(usual, taken, present):
    earlier = dict(zip(STAGES, usual, strict=True))
    begun: list[Stage] = []
    at, last = 0.0, 0.0
    for name, seconds in zip(STAGES, taken, strict=True):
        if name not in present:
            continue
        for part in (0.0, 0.3, 0.7, 0.99):
            found = startup_progress([*begun, Stage(name, at, None)], earlier, at + seconds * part)
            if found is not None:
                assert last - 1e-9 <= found.share <= 1
                assert found.seconds_left is None or found.seconds_left >= 0
                last = found.share
        begun.append(Stage(name, at, seconds))
        at += seconds


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_may_be_silent_for_a_limited_time(stage):
    limit = QUIET_SECONDS[stage]
    stages = [Stage(stage, 0.0, None)]
    assert too_quiet(stages, {}, limit - 1) is None
    assert too_quiet(stages, {}, limit + 1) == limit + 1
    assert too_quiet(stages, {stage: limit}, limit + 1) is None, "it took that long before"
    assert too_quiet([Stage(stage, 0.0, 5.0)], {}, 9999) is None, "it is over"


@pytest.mark.parametrize(
    ("detail", "share"),
    [("61 %", 0.61), ("4.2 of about 15.0 GiB, 85 MiB/s, 28 %", 0.28), ("15.0 GiB", None), ("a %", None), ("%", None),
     ("900 %", None), ("", None)],
)  # fmt: skip
def test_percentage_is_parsed_from_the_detail(detail, share):
    assert Stage("weights", 0.0, detail=detail).share == share
