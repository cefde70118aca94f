"""Frames of ten seconds: their counts, their highest gauges, and restarts after a gap."""

from __future__ import annotations

from msgspec.structs import replace

from vllm_console.history.frames import Frames, merged, total
from vllm_console.metrics.sample import EngineSample, Histogram, Sample


def poll(at: float, tokens: float, usage: float = 0.5, waiting: float = 0.0, ttft: float = 0.0) -> Sample:
    histogram = Histogram((1.0, float("inf")), (ttft, ttft), ttft * 0.5)
    one = EngineSample(
        generation_tokens_total=tokens, kv_cache_usage=usage, requests_waiting=waiting, histograms={"ttft": histogram}
    )
    return Sample(at, {"0": one}, kv_cache_tokens=1000)


def test_frame_sums_counters_and_keeps_gauge_peaks() -> None:
    frames = Frames()
    for second in range(21):
        frames.append(poll(100.0 + second, second * 10.0, 0.9 if second == 4 else 0.5, float(second == 7), second))
    first, second_frame = frames.since(0)
    assert (first.start, first.end, first.grown.generation_tokens_total) == (100.0, 110.0, 100.0)
    assert (first.usage_max, first.waiting_max, first.waiting_min) == (0.9, 1.0, 0.0)
    assert second_frame.usage_max == 0.5
    assert total((first, second_frame), "generation_tokens_total") == 200.0
    histogram = merged((first, second_frame), "ttft")
    assert histogram is not None
    assert histogram.count == 20.0
    assert first.grown.prompt_tokens_total is None


def test_gaps_and_other_generations_do_not_count() -> None:
    frames = Frames()
    for at, tokens, generation in [(0, 0, 1), (10, 50, 1), (60, 900, 1), (70, 950, 1), (75, 0, 2), (85, 30, 2)]:
        frames.append(poll(float(at), float(tokens)), generation)
    assert [(one.start, total([one], "generation_tokens_total")) for one in frames.since(0)] == [
        (0.0, 50.0),
        (60.0, 50.0),
        (75.0, 30.0),
    ]
    assert [one.start for one in frames.since(0, generation=2)] == [75.0]
    assert [one.start for one in frames.since(50.0)] == [60.0, 75.0]


def test_earlier_sample_is_ignored() -> None:
    frames = Frames()
    for at in (0.0, 5.0, 4.0, 10.0):
        frames.append(poll(at, at))
    (only,) = frames.since(0)
    assert (only.start, only.end) == (0.0, 10.0)


def test_only_the_last_frames_are_kept() -> None:
    frames = Frames(step=1.0, keep=3)
    for at in range(10):
        frames.append(poll(float(at), 0.0))
    assert [one.start for one in frames.since(0)] == [6.0, 7.0, 8.0]


def test_gauge_minimum_needs_several_samples() -> None:
    """A coarse row of history is one sample with the highest gauges of its step."""
    coarse, fine = Frames(), Frames()
    for second in range(0, 61, 10):
        coarse.append(poll(float(second), second, waiting=7.0))
    for second in range(0, 61, 3):
        fine.append(poll(float(second), second, waiting=float(second % 2)))
    assert [(one.waiting_max, one.waiting_min) for one in coarse.since(0)] == [(7.0, None)] * 6
    assert {(one.waiting_max, one.waiting_min) for one in fine.since(0)} == {(1.0, 0.0)}


def test_engine_with_requests_but_no_progress_is_stalled() -> None:
    def still(*polls: EngineSample) -> tuple[str, ...]:
        frames = Frames()
        for at, one in enumerate(polls):
            moving = replace(one, generation_tokens_total=float(at))
            frames.append(Sample(at * 5.0, {"0": moving, "7": one}))
        (frame,) = frames.since(0)
        assert frame.engines == 2
        return frame.still

    hung = EngineSample(requests_running=2, kv_cache_usage=0.3, generation_tokens_total=50, prompt_tokens_total=9)
    assert still(hung, hung, hung) == ("7",)
    assert still(hung, hung, replace(hung, generation_tokens_total=51)) == ()
    assert still(hung, hung, replace(hung, prompt_tokens_total=10)) == ()
    assert still(hung, replace(hung, kv_cache_usage=0.4), hung) == (), "a long prompt takes block after block"
    assert still(replace(hung, kv_cache_usage=0.2), hung, hung) == ()
    assert still(hung, hung, replace(hung, requests_running=0)) == ()
    unknown = replace(hung, generation_tokens_total=None)
    assert still(unknown, unknown, unknown) == ()


def test_frames_are_computed_once() -> None:
    """A console polls every second; values computed from half an hour of frames are computed once per frame."""
    frames = Frames()
    for at in range(11):
        frames.append(poll(float(at), 0.0))
    found = frames.since(0.0, 1)
    frames.append(poll(11.0, 0.0))
    assert frames.since(0.0, 1) is found
    assert frames.since(5.0, 1) == ()
    assert frames.since(0.0, 1) is found, "also after other frames were asked for"
    for at in range(12, 21):
        frames.append(poll(float(at), 0.0))
    assert [one.start for one in frames.since(0.0, 1)] == [0.0, 10.0]
