"""When a finding begins and ends: three of four frames bad, three in a row good, minutes silent, or frames unknown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_console.diagnosis.live.rule import SILENT_FRAMES, Judgment, above, holds_since
from vllm_console.history.frames import Frame
from vllm_console.metrics.sample import EngineSample

LETTERS = {"b": Judgment.BAD, "-": Judgment.BETWEEN, "g": Judgment.GOOD, "?": Judgment.UNKNOWN}
LETTERS |= {"s": Judgment.SILENT}
PAUSE = "s" * (SILENT_FRAMES - 1)


def since(verdicts: str) -> float | None:
    frames = [Frame(1, at * 10.0, at * 10.0 + 10, EngineSample()) for at in range(len(verdicts))]
    return holds_since([LETTERS[letter] for letter in verdicts], frames)


@pytest.mark.parametrize(
    ("verdicts", "begun"),
    [
        ("", None),
        ("bb", None),
        ("bbb", 0.0),
        ("gbgbb", 10.0),
        ("bgbgbgbg", None),  # alternating frames are not a finding
        ("bbbggb", 0.0),  # two good frames do not end it
        ("bbbggg", None),
        ("bbb---", 0.0),
        ("bbbg-gg", None),  # a frame in between does not interrupt the good ones
        ("bbbgggbbb", 60.0),
        ("bbb??", 0.0),
        ("bbb???", None),
        ("bb?b", 0.0),
        (f"bbb{PAUSE}", 0.0),  # a pause is ignored
        (f"bbb{PAUSE}s", None),  # a longer pause ends it
        (f"bbb{PAUSE}-{PAUSE}b{PAUSE}", 0.0),
        (f"bbbgg{PAUSE}g", None),  # good frames still end it
        (f"bb{PAUSE}b", None),  # a pause does not make it begin earlier
    ],
)
def test_finding_begins_and_ends(verdicts: str, begun: float | None) -> None:
    assert since(verdicts) == begun


@given(st.text("g-?s", max_size=40))
def test_no_finding_without_bad_frames(verdicts: str) -> None:
    assert since(verdicts) is None


@given(st.text("bg-?s", max_size=40))
def test_finding_begins_only_in_a_bad_frame(verdicts: str) -> None:
    begun = since(verdicts)
    assert begun is None or verdicts[int(begun // 10)] == "b"


def test_value_against_two_thresholds() -> None:
    assert [above(value, 0.85, 0.8) for value in (0.9, 0.83, 0.8, None)] == [
        Judgment.BAD,
        Judgment.BETWEEN,
        Judgment.GOOD,
        Judgment.UNKNOWN,
    ]
