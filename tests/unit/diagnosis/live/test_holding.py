"""When a finding begins and ends: it holds in three of four frames, fails in three in a row, or is silent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_console.diagnosis.live.rule import SILENT_FRAMES, Judgment, above, held_spans, holds_since
from vllm_console.history.frames import Frame
from vllm_console.metrics.sample import EngineSample

LETTERS = {"h": Judgment.HOLDS, "-": Judgment.UNCLEAR, "f": Judgment.FAILS, "?": Judgment.UNKNOWN}
LETTERS |= {"s": Judgment.SILENT}
PAUSE = "s" * (SILENT_FRAMES - 1)


def since(verdicts: str) -> float | None:
    frames = [Frame(1, at * 10.0, at * 10.0 + 10, EngineSample()) for at in range(len(verdicts))]
    return holds_since([LETTERS[letter] for letter in verdicts], frames)


@pytest.mark.parametrize(
    ("verdicts", "begun"),
    [
        ("", None),
        ("hh", None),
        ("hhh", 0.0),
        ("fhfhh", 10.0),
        ("hfhfhfhf", None),  # alternating frames are not a finding
        ("hhhffh", 0.0),  # two failing frames do not end it
        ("hhhfff", None),
        ("hhh---", 0.0),
        ("hhhf-ff", None),  # a frame in between does not interrupt the failing ones
        ("hhhfffhhh", 60.0),
        ("hhh??", 0.0),
        ("hhh???", None),
        ("hh?h", 0.0),
        (f"hhh{PAUSE}", 0.0),  # a pause is ignored
        (f"hhh{PAUSE}s", None),  # a longer pause ends it
        (f"hhh{PAUSE}-{PAUSE}h{PAUSE}", 0.0),
        (f"hhhff{PAUSE}f", None),  # failing frames still end it
        (f"hh{PAUSE}h", None),  # a pause does not make it begin earlier
    ],
)
def test_finding_begins_and_ends(verdicts: str, begun: float | None) -> None:
    assert since(verdicts) == begun


@pytest.mark.parametrize("of_traffic", [False, True])
def test_finding_holds_only_in_its_frames_and_not_while_idle(of_traffic: bool) -> None:
    verdicts = "hfffhhh-hhsssh"
    frames = [
        Frame(1, at * 10.0, at * 10.0 + 10, EngineSample(), running_max=0.0 if at == 6 else 1.0)
        for at in range(len(verdicts))
    ]
    judged = [LETTERS[letter] for letter in verdicts]
    begun = holds_since(judged, frames)
    assert begun == 40.0
    held = held_spans(judged, frames, begun, of_traffic=of_traffic)
    assert held == ((40.0, 60.0 if of_traffic else 70.0), (80.0, 100.0), (130.0, 140.0))


@given(st.text("f-?s", max_size=40))
def test_no_finding_without_frames_that_hold(verdicts: str) -> None:
    assert since(verdicts) is None


@given(st.text("hf-?s", max_size=40))
def test_finding_begins_only_in_a_frame_that_holds(verdicts: str) -> None:
    begun = since(verdicts)
    assert begun is None or verdicts[int(begun // 10)] == "h"


def test_value_against_two_thresholds() -> None:
    assert [above(value, 0.85, 0.8) for value in (0.9, 0.83, 0.8, None)] == [
        Judgment.HOLDS,
        Judgment.UNCLEAR,
        Judgment.FAILS,
        Judgment.UNKNOWN,
    ]
