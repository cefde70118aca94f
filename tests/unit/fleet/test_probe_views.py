"""Probe records in a server's snapshot."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from vllm_console.fleet import probe as probe_module
from vllm_console.fleet.probe import ORDERS, ServerProbe, exact_window, no_probe_message
from vllm_console.history.probe_records import ProbeReader
from vllm_console.history.time_view import CHART_RANGES, LIVE, TimeView
from vllm_console.metrics.quantile import Quantile, Quantiles
from vllm_console.metrics.sample import EngineSample, Histogram, Sample, Series, Window
from vllm_launchers.keeper.records import LaunchSpec
from vllm_launchers.launch.details import Details, pack
from vllm_launchers.probe.plugin import vllm_console_probe as plugin
from vllm_launchers.vllm.engines import Engine, EngineKind

VLLM = Engine(EngineKind.VLLM, ("vllm",), "0.32.0", "cpu", "")
RANGE = CHART_RANGES[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two requests per second for the last two minutes; every second one was preempted, every tenth one aborted."""
    now = time.monotonic()
    rows: dict[str, list[bytes]] = {kind: [] for kind in plugin.LAYOUTS}
    for second in range(120):
        at = now - 120 + second + 0.5
        # Slightly earlier: each kind of record has its own file with its own clock offset.
        rows["steps"].append(plugin.STEP.pack(at - 0.01, 0, 3, 1, 0.5, -1, 0, 0, 9, 4, 0, 4, 0.02, 0.02, -1, -1, -1, 0))
        for number in range(2):
            rows["first_tokens"].append(plugin.FIRST_TOKEN.pack(at, 0, 0.25, 0))
            end = b"abort" if second % 10 == 0 and number else b"stop"
            times = (100, 20, 0, 0.1, 0.15, second / 10, 0.25 + second / 10)
            name = f"{second}-{number}".encode()
            rows["requests"].append(plugin.REQUEST.pack(name, at - times[-1], at, 0, *times, number, end, 0))
    for kind, records in rows.items():
        plugin.Segments(tmp_path / "probe", kind, {}).write(records)
    return tmp_path / "probe"


def samples(now: float) -> list[Sample]:
    """One sample per second with the counters of those requests."""

    def histogram(count: float) -> Histogram:
        return Histogram((1.0, float("inf")), (count, count), count)

    def engine(second: int) -> EngineSample:
        counts = {"ttft": 2.0, "itl": 4.0, "e2e": 2.0, "queue": 2.0, "prefill": 2.0, "decode": 2.0}
        return EngineSample(histograms={key: histogram(times * second) for key, times in counts.items()})

    return [Sample(now - 60 + second, {"0": engine(60 + second)}) for second in range(61)]


def window(now: float) -> Window:
    rough = Quantiles(120, 0.5, *[Quantile(0.6, 0.5, 1.0)] * 3)
    return Window(now - 60, now, latencies=dict.fromkeys(("ttft", "itl", "e2e", "queue"), rough))


def test_last_minute_has_exact_latencies(folder: Path) -> None:
    now = time.time()
    found = ServerProbe(folder, "chat").window(window(now), samples(now), now).latencies
    assert all(found[key].exact for key in ("ttft", "itl", "e2e", "queue"))
    assert found["ttft"].p99
    assert found["ttft"].p99.text == "250ms"
    past = exact_window(folder, window(now - 5), samples(now)[:-5])
    assert past.latencies["e2e"].exact


def test_estimates_stay_without_records_of_all_requests(folder: Path, tmp_path: Path) -> None:
    now = time.time()
    estimates = window(now)
    assert exact_window(tmp_path / "none", estimates, samples(now)) == estimates
    for path in folder.glob("first_tokens-*"):
        path.unlink()
    found = ServerProbe(folder, "chat").window(estimates, samples(now), now).latencies
    assert found["ttft"] == estimates.latencies["ttft"]
    assert found["e2e"].exact


def seen(folder: Path, time_view: TimeView, begin: float = 0.0) -> Any:
    now = time.time()
    series = Series(now, RANGE.step, {"ttft_p99": (None,) * RANGE.points, "ttft_p50": (None,) * RANGE.points})
    probe = ServerProbe(folder, "chat", begin)
    probe.in_time(series, RANGE, now, time_view, None)
    probe._charts._ranges[(RANGE.seconds, None)].done.wait(20)
    return probe.in_time(series, RANGE, now, time_view, None)


def test_charts_have_step_values_and_exact_points(folder: Path) -> None:
    series, view = seen(folder, LIVE)
    assert [value for value in view.steps.values["running"] if value is not None][-1] == 3.0
    assert 0.25 in series.values["ttft_p99"]
    assert 1.0 in series.values["ttft_exact"]
    assert view.requests is None, "not asked for"


def test_unreadable_requests_are_reported_and_hide_nothing_else(folder: Path) -> None:
    (path,) = folder.glob("requests-*")
    path.rename(folder / "kept")
    path.symlink_to("/dev/zero")
    _, view = seen(folder, TimeView(requests=True))
    assert view.problem == "the requests of chat can't be read: not a regular file"
    assert view.requests is None
    assert view.steps is not None


def test_requests_of_a_range_a_moment_and_a_run(folder: Path) -> None:
    view = seen(folder, TimeView(requests=True))[1].requests
    assert dict(zip(ORDERS, view.counts, strict=True)) == {
        "slowest": 240, "newest": 240, "preempted": 120, "aborted": 12,
    }  # fmt: skip
    slowest, newest, preempted, aborted = view.listed
    assert slowest[0].e2e_seconds == pytest.approx(12.15)
    assert newest[0].finished_at == max(one.finished_at for one in newest)
    assert all(one.preemptions for one in preempted)
    assert {one.finish_reason for one in aborted} == {"abort"}
    assert view.dots[0] == pytest.approx((100.0, 0.25))
    moment = seen(folder, TimeView(at=time.time() - 30, requests=True))[1].requests
    assert 118 <= moment.count <= 122
    assert seen(folder, TimeView(requests=True), begin=time.time() - 10)[1].requests.count <= 22


def test_requests_of_a_moving_range_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []

    class Counted(ProbeReader):
        def __init__(self, *arguments: Any) -> None:
            read.append(arguments)
            super().__init__(*arguments)

    monkeypatch.setattr(probe_module, "ProbeReader", Counted)
    probe, now = ServerProbe(folder, "chat"), time.time()
    for second in range(12):
        end = (now + second) // RANGE.step * RANGE.step
        series = Series(end, RANGE.step, {"ttft_p99": (None,) * RANGE.points, "ttft_p50": (None,) * RANGE.points})
        view = probe.in_time(series, RANGE, now + second, TimeView(requests=True), None)[1].requests
        assert view.count == 240
        assert view.until == now + second
    assert len(read) == 1
    probe.close()


@pytest.mark.parametrize(
    ("details", "ends"),
    [
        (Details(engine=VLLM, no_probe="--no-probe was given"), "'vllm-console restart chat --probe' adds it"),
        (Details(engine=VLLM, no_probe="not tested with it. --probe turns it on"), "--probe' adds it"),
        (
            Details(engine=VLLM, flags={"disable-log-stats": True}, no_probe="--disable-log-stats turns them off"),
            "turns them off",
        ),
        (Details(no_probe="it was started by another program"), "by another program"),
    ],
)
def test_missing_probe_says_why_and_how_to_add_it(details: Details, ends: str, tmp_path: Path) -> None:
    message = no_probe_message("chat", details)
    assert message.startswith("chat has no probe, so its requests are not recorded: ")
    assert message.endswith(ends)
    assert message.count("--probe") <= 1 + message.count("--no-probe")
    spec = LaunchSpec(("vllm",), "127.0.0.1", 1, details=pack(details))
    series = Series(0.0, 5.0, {})
    found, view = ServerProbe(tmp_path / "probe", "chat").of(spec).in_time(series, RANGE, 0.0, LIVE, None)
    assert (found, view.problem) == (series, message)
