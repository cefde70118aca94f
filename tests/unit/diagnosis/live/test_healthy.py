"""Healthy means that all objectives are met: KV cache usage that stays above its limit is not healthy, a peak is."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from vllm_console.diagnosis.live.findings import findings
from vllm_console.diagnosis.live.frame_sums import sustained_usage
from vllm_console.diagnosis.live.rule import Evidence
from vllm_console.history.frames import Frame
from vllm_console.metrics.quantile import Quantile, Quantiles
from vllm_console.metrics.sample import EngineSample, Histogram, Window


def frames(*usages: float | None) -> list[Frame]:
    """Frames of ten seconds in which tokens were generated."""
    grown = EngineSample(generation_tokens_total=500.0, requests_running=2.0)
    return [
        Frame(1, 10.0 * at, 10.0 * at + 10, grown, usage_max=usage, running_max=2.0) for at, usage in enumerate(usages)
    ]


@pytest.mark.parametrize(
    ("usages", "share"),
    [((), None), ((None, None), None), ((0.9,), 0.9), ((0.2, 0.99, 0.3), 0.2), ((0.5, 0.9, 0.95, 0.92), 0.9),
     ((0.9, None, 0.9, 0.9), 0.9), ((0.99, 0.99, 0.99, *[0.1] * 6), 0.1)],
)  # fmt: skip
def test_short_peak_is_not_sustained(usages: tuple[float | None, ...], share: float | None) -> None:
    assert sustained_usage(frames(*usages), len(usages) - 1) == share


@pytest.mark.parametrize(("usages", "healthy"), [([0.4, 0.99, 0.4, 0.4] * 4, True), ([0.97] * 16, False)])
def test_healthy_contradicts_no_objective(usages: list[float], healthy: bool) -> None:
    found = findings(Evidence(now=160.0, ready_at=0.0, frames=frames(*usages)))
    good = [one for one in found if one.code == "healthy"]
    assert bool(good) is healthy
    for one in good:
        assert (one.measures[0].value, one.measures[0].limit) == ("40%", "85%")


def stalled(frame: Frame) -> Frame:
    """The frame, in which the engine made no progress."""
    return replace(frame, grown=replace(frame.grown, generation_tokens_total=0.0), still=("0",))


@pytest.mark.parametrize(
    ("silent", "served", "since"),
    [(range(10, 15), 0, None), (range(10, 15), 1, None), (range(10, 15), 7, None), (range(10, 15), 8, 200.0),
     (range(10, 12), 8, 170.0), (range(10, 11), 1, 0.0), ((10, 12), 1, 0.0)],
)  # fmt: skip
def test_healthy_begins_anew_after_a_hang(silent: Sequence[int], served: int, since: float | None) -> None:
    """Frames of ten seconds: healthy for 100 s, some in which the engine is stuck, and some that are served again."""
    seen = [stalled(one) if at in silent else one for at, one in enumerate(frames(*[0.4] * (silent[-1] + 1 + served)))]
    found = findings(Evidence(now=seen[-1].end, ready_at=-60.0, frames=seen))
    assert [one.since for one in found if one.code == "healthy"] == ([] if since is None else [since])


@pytest.mark.parametrize(("exact", "shown"), [(1.1, ["1.1s"]), (1.9, ["1.9s"]), (4.5, [])])
def test_exact_latencies_replace_estimates(exact: float, shown: list[str]) -> None:
    """The estimate is about 1.99 s, in a bucket up to 5 s; the objective is 2 s."""
    ttft = Histogram((1.0, 2.0, 5.0, math.inf), (0.0, 10.0, 10.0, 10.0), 15.0)
    grown = EngineSample(generation_tokens_total=500.0, requests_running=2.0, histograms={"ttft": ttft})
    seen = [Frame(1, 10.0 * at, 10.0 * at + 10, grown, usage_max=0.4, running_max=2.0) for at in range(16)]
    known = Quantile(exact, exact, exact)
    minute = Window(100.0, 160.0, latencies={"ttft": Quantiles(60.0, 1.0, known, known, known, exact=True)})
    found = findings(Evidence(now=160.0, ready_at=0.0, frames=seen, minute=minute))
    measures = [one for finding in found if finding.code == "healthy" for one in finding.measures]
    assert [one.value for one in measures if one.name == "TTFT p99"] == shown
