"""Points for charts, one sample at a time."""

from __future__ import annotations

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from vllm_console.history.timeline import SERIES, Timeline
from vllm_console.metrics.sample import Responses


def test_points_hold_peaks_counts_and_rates(engine, sample):
    line = Timeline(step=10.0, points=3)
    for second in range(21):
        at = 1000.0 + second
        line.append(
            sample(
                at,
                engine(
                    usage=0.9 if second == 13 else 0.1,
                    generation=100.0 * second,
                    preemptions=float(second >= 12) + float(second >= 14),
                    ttft=(0, 0, 3 * second, 3 * second),
                ),
            )
        )
    found = line.series()
    assert (found.end, found.step) == (1020.0, 10.0)
    assert set(found.values) == set(SERIES)
    assert found.values["kv_cache_usage"] == (0.1, 0.1, 0.9)
    assert found.values["preemptions"] == (None, 0.0, 2.0)
    assert found.values["generation_tokens_per_second"] == (None, 100.0, 100.0)
    assert found.values["ttft_p99"][2] == pytest.approx(0.995)
    assert found.values["itl_p99"] == (None, None, None)


def test_incomplete_step_shows_the_rate_so_far(engine, sample):
    line = Timeline(step=10.0, points=2)
    for second in range(4):
        line.append(sample(1000.5 + second, engine(generation=50.0 * second)))
    assert line.series().values["generation_tokens_per_second"] == (None, 50.0)


def test_pauses_are_empty_not_zero(engine, sample):
    line = Timeline(step=5.0, points=12)
    for at in (1001.0, 1002.0, 1042.0, 1043.0):
        line.append(sample(at, engine(generation=at, preemptions=at)))
    values = line.series().values
    assert values["requests_running"][-9:] == (1.0, *[None] * 7, 1.0)
    assert values["preemptions"][-9:] == (1.0, *[None] * 7, 1.0)


def test_end_may_be_later_than_the_newest_sample(engine, sample):
    line = Timeline(step=5.0, points=4)
    line.append(sample(1001.0, engine()))
    found = line.series(end=1011.0)
    assert found.end == 1015.0
    assert found.values["requests_running"] == (None, 1.0, None, None)
    assert line.series(end=9999.0).values["requests_running"] == (None,) * 4


def test_sparse_samples_fill_the_steps_between(engine, sample):
    line = Timeline(step=5.0, points=4)
    line.append(sample(1000.0, engine(generation=0.0)))
    line.append(sample(1010.0, engine(running=7.0, generation=100.0)))
    values = line.series().values
    assert values["generation_tokens_per_second"][-2:] == (10.0, 10.0)
    assert values["requests_running"][-2:] == (7.0, 7.0)


def test_restart_gives_no_negative_rate(engine, sample):
    line = Timeline(step=1.0, points=3)
    for at, tokens in ((1001.0, 5000.0), (1002.0, 6000.0), (1003.0, 40.0)):
        line.append(sample(at, engine(generation=tokens)))
    assert line.series().values["generation_tokens_per_second"] == (None, 1000.0, 40.0)


def test_window_covers_a_minute(engine, sample):
    line = Timeline(step=5.0, points=10)
    assert line.window() is None
    for second in range(200):
        line.append(sample(1000.0 + second, engine(generation=float(second**2))))
    found = line.window()
    assert (found.start, found.end) == (1139.0, 1199.0)
    assert found.generation_tokens_per_second == pytest.approx((199**2 - 139**2) / 60)
    assert line.window(10).start == 1189.0


def test_new_generation_begins_a_new_window(engine, sample):
    line = Timeline(step=5.0, points=10)
    line.append(sample(1000.0, engine(generation=0.0)), generation=1)
    line.append(sample(1010.0, engine(generation=500.0)), generation=1)
    line.append(sample(1020.0, engine(generation=900.0)), generation=2)
    assert line.window().generation_tokens_per_second is None
    line.append(sample(1021.0, engine(generation=910.0)), generation=2)
    assert (line.window().start, line.window().generation_tokens_per_second) == (1020.0, 10.0)


def test_old_samples_are_ignored_and_a_clock_set_back_restarts(engine, sample):
    line = Timeline(step=5.0, points=4)
    line.append(sample(1000.0, engine(running=1.0)))
    line.append(sample(999.0, engine(running=9.0)))
    assert line.latest.at == 1000.0
    line.append(sample(500.0, engine(running=5.0)))
    assert line.latest.at == 500.0
    assert line.series().values["requests_running"] == (None, None, None, 5.0)


def test_incremental_and_final_series_are_equal(engine, sample):
    """Points are requested after each sample, or once at the end."""
    samples = [sample(1000.0 + 0.7 * n, engine(running=float(n % 7), generation=n * 3.0)) for n in range(300)]
    asked, silent = Timeline(step=2.0, points=20), Timeline(step=2.0, points=20)
    for item in samples:
        asked.append(item)
        silent.append(item)
        assert all(len(values) == 20 for values in asked.series().values.values())
    assert to_builtins(asked.series()) == to_builtins(silent.series())


def test_empty_timeline():
    assert Timeline(5.0, 2).series(100.0).values["preemptions"] == (None, None)


def test_counts_before_a_runs_first_sample_are_not_charted(engine, sample):
    """For example its warm-up request, which waited for compilation."""
    line = Timeline(step=5.0, points=4)
    line.append(sample(1001.0, engine(generation=10.0, ttft=(1, 1, 1, 1))), generation=1)
    line.append(sample(1004.0, engine(generation=2.0, ttft=(0, 0, 0, 1))), generation=2)
    line.append(sample(1005.0, engine(generation=2.0, ttft=(0, 0, 0, 1))), generation=2)
    assert line.series().values["ttft_p99"][-1] is None
    assert line.series().values["generation_tokens_per_second"][-1] == 0.0


def test_rates_end_with_the_traffic(engine, sample):
    """For a minute after the last request, they were once those of the whole last minute."""
    timeline = Timeline(5.0, 20)
    for second in range(30):
        timeline.append(sample(float(second), engine(running=2.0, generation=50.0 * second, preemptions=second / 5,
                                                     finished=second / 2)))  # fmt: skip
    busy = timeline.window()
    assert busy.generation_tokens_per_second == 50.0
    assert busy.preemption_share == pytest.approx(0.4)
    over = engine(running=0.0, waiting=0.0, generation=50.0 * 29, preemptions=29 / 5, finished=29 / 2)
    for second in range(30, 60):
        timeline.append(sample(float(second), over))
    found = timeline.window()
    assert (found.generation_tokens_per_second, found.requests_per_second, found.preemptions_per_minute) == (0, 0, 0)
    assert found.preemption_share is None, "no share of requests is shown at a rate of zero"


def test_server_that_only_refuses_requests_counts_them(engine, sample):
    line = Timeline(step=1.0, points=10)
    for second in range(30):
        line.append(replace(sample(1000.0 + second, engine(generation=5.0)), responses=Responses(1.0, float(second))))
    found = line.window()
    assert found.generation_tokens_per_second == 0.0
    assert found.responses == Responses(0.0, 29.0)


def test_chart_draws_and_reports_a_bound(engine, sample):
    timeline = Timeline(5.0, 4)
    timeline.append(sample(0.0, engine(ttft=(0, 0, 0, 0))))
    timeline.append(sample(1.0, engine(ttft=(8, 8, 8, 8))))
    timeline.append(sample(6.0, engine(ttft=(8, 8, 16, 16))))
    values = timeline.series().values
    assert values["ttft_p99"][-2:] == (0.1, pytest.approx(0.995))
    assert values["ttft_p99_bound"][-2:] == (1.0, None)
