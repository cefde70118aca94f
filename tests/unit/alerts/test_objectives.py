"""A server's objectives over a window, and the results of ``check``."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from vllm_console.alerts.check import check_server as check_history
from vllm_console.alerts.check import check_window, report_document
from vllm_console.diagnosis.finding import Finding, Severity
from vllm_console.diagnosis.live.findings import findings
from vllm_console.diagnosis.live.rule import Evidence
from vllm_console.diagnosis.objectives import judge_objectives, judge_window, served_window
from vllm_console.fleet.snapshot import ServerView
from vllm_console.history.frames import Frames
from vllm_console.history.store import HISTORY, HistoryEntry, HistoryWriter
from vllm_console.metrics.sample import EngineSample, Histogram, Sample, Window
from vllm_console.metrics.window import window
from vllm_console.runs.windows import Windows
from vllm_launchers.keeper.records import State
from vllm_launchers.presets.model import Objectives
from vllm_launchers.probe.plugin import vllm_console_probe as plugin

NOW = 1_000_000.0
INF = float("inf")
OBJECTIVES = Objectives(ttft_p99_seconds=1.0, itl_p99_seconds=0.1, kv_cache_usage=0.85, preemption_rate=0.02)
SERVER = ServerView("chat", State.READY, NOW - 900, preset="chatbot", objectives=OBJECTIVES, generation=2)


def engine(
    tick: float, *, usage: float = 0.4, running: float = 1, preempted: float = 0.0, **more: object
) -> EngineSample:
    """An engine that finishes one request per second, with TTFT up to 0.5 s and ITL up to 0.05 s."""
    latency = Histogram((0.5, 2.0, INF), (tick, tick, tick), tick * 0.3)
    gaps = Histogram((0.05, 0.2, INF), (tick * 9, tick * 9, tick * 9), tick * 0.3)
    fields: dict[str, object] = {
        "requests_running": running,
        "requests_waiting": 0.0,
        "kv_cache_usage": usage,
        "preemptions_total": preempted,
        "requests_finished_total": tick,
        "generation_tokens_total": tick * 10,
        "prompt_tokens_total": tick * 100,
        "histograms": {"ttft": latency, "itl": gaps},
    }
    return EngineSample(**{**fields, **more})  # type: ignore[arg-type]


def entries_of(*engines: EngineSample, generation: int = 2) -> list[HistoryEntry]:
    """One entry per second up to now."""
    begin = NOW - len(engines) + 1
    return [
        HistoryEntry(at, begin + at, generation, Sample(begin + at, {"0": one} if one != EngineSample() else {}))
        for at, one in enumerate(engines)
    ]


def values(*engines: EngineSample) -> dict[str, float | None]:
    judged = judge_objectives(served_window([entry.sample for entry in entries_of(*engines)]), OBJECTIVES, "chatbot")
    return {one.name: one.value for one in judged}


STEADY = tuple(engine(tick) for tick in range(120))


def test_steady_service_meets_every_objective() -> None:
    report = check_window(SERVER, entries_of(*STEADY), NOW, 300)
    assert report.ok
    assert report.problems == ()
    document = report_document(report)
    assert set(document) >= {"name", "ok", "objectives", "findings"}
    assert [one["name"] for one in document["objectives"]] == [
        "kv_cache_usage", "preemption_rate", "ttft_p99_seconds", "itl_p99_seconds",
    ]  # fmt: skip
    assert all(one["ok"] and one["source"] == "objectives of preset chatbot" for one in document["objectives"])
    assert document["objectives"][0]["value"] == 0.4
    assert document["objectives"][0]["limit"] == 0.85


def test_latencies_are_exact_when_the_probe_recorded_all_requests(tmp_path: Path) -> None:
    now, begin = time.time(), time.monotonic() - 119
    entries = [
        entry._replace(at=now - 119 + tick, sample=replace(entry.sample, at=now - 119 + tick))
        for tick, entry in enumerate(entries_of(*STEADY))
    ]
    segments = {kind: plugin.Segments(tmp_path, kind, {}) for kind in ("steps", "first_tokens")}
    for at in (begin + tick + 0.5 for tick in range(119)):
        segments["steps"].write([plugin.STEP.pack(at, 0, 1, 0, 0.5, *[-1] * 3, 9, 9, 0, 9, 0.02, 0.02, -1, -1, -1, 0)])
        segments["first_tokens"].write([plugin.FIRST_TOKEN.pack(at, 0, 1.25, 0)])
    ttft, itl = report_document(check_window(SERVER, entries, now, 300, probe=tmp_path))["objectives"][2:]
    assert (ttft["value"], ttft["exact"], ttft["ok"]) == (1.25, True, False)
    assert (itl["value"], itl["exact"], itl["ok"]) == (pytest.approx(0.02), True, True)
    segments["first_tokens"].write([plugin.FIRST_TOKEN.pack(begin + 60, 0, 1.25, 0)] * 3)
    ttft, itl = report_document(check_window(SERVER, entries, now, 300, probe=tmp_path))["objectives"][2:]
    assert not ttft["exact"], "more than vLLM has counted: these are other requests"
    assert ttft["value_below"] == 0.5


def test_each_missed_objective_is_one_sentence_with_its_source() -> None:
    slow = Histogram((0.5, 2.0, INF), (0.0, 200.0, 200.0), 300.0)
    broken = engine(119, usage=0.95, preempted=20, histograms={"ttft": slow, "itl": STEADY[-1].histograms["itl"]})
    full = [replace(one, kv_cache_usage=0.95) for one in STEADY[:-1]]
    report = check_window(SERVER, entries_of(*full, broken), NOW, 300)
    assert not report.ok
    assert [problem.split(" is ")[0] for problem in report.problems] == [
        "chat: KV cache usage (sustained peak)", "chat: preemptions per request", "chat: TTFT p99",
    ]  # fmt: skip
    assert report.problems[0] == (
        "chat: KV cache usage (sustained peak) is 95.0%, above its limit of 85.0% (objectives of preset chatbot)"
    )


def test_only_sustained_usage_misses_the_objective() -> None:
    def with_peak(length: int) -> float | None:
        engines = [engine(tick, usage=0.99 if 40 <= tick < 40 + length else 0.3) for tick in range(120)]
        return values(*engines)["kv_cache_usage"]

    assert with_peak(8) == 0.3
    assert with_peak(45) == 0.99


def samples_every(step: int, peaks: Callable[[int], float], count: int) -> list[Sample]:
    return [Sample(NOW + step * at, {"0": engine(step * at, usage=peaks(at))}) for at in range(count)]


def test_peaks_in_minute_rows_are_not_sustained() -> None:
    """A minute row has the maximum of its minute."""
    assert served_window(samples_every(60, lambda at: 0.99, 30)).usage is None
    assert served_window(samples_every(10, lambda at: 0.99 if at in (5, 6, 7) else 0.3, 30)).usage == 0.99
    gap = [one for at, one in enumerate(samples_every(10, lambda at: 0.99 if at in (5, 7, 8) else 0.3, 30)) if at != 6]
    assert served_window(gap).usage == 0.3
    coarse = served_window(samples_every(60, lambda at: 0.99, 30), samples_every(10, lambda at: 0.4, 90))
    assert (coarse.usage, coarse.usage_seconds) == (0.4, 900.0)


def test_long_window_is_judged_by_its_ten_second_rows(tmp_path: Path) -> None:
    """With one peak per minute, the minute rows of such a window show nothing else."""
    writer = HistoryWriter(tmp_path / HISTORY)
    for at in (-40_000, *range(-600, 1, 10)):
        writer.append(Sample(NOW + at, {"0": engine(50_000 + at, usage=0.3 if at % 60 else 0.99)}), 2)
    writer.close()
    server = replace(SERVER, folder=str(tmp_path))
    report = check_history(server, NOW, 40_001)
    assert report.problems == ()
    assert (report.objectives[0].value, report.objectives[0].seconds) == (0.3, 610.0)
    assert report.objectives[0].sentence.endswith("; known for 10m10s of the window")
    assert [one["window_seconds"] for one in report_document(report)["objectives"]] == [610.0, *[40_000.0] * 3]


def test_fullest_engine_counts() -> None:
    samples = [Sample(NOW + at, {"0": engine(at, usage=0.2), "1": engine(at, usage=0.9)}) for at in range(60)]
    assert served_window(samples).usage == 0.9


def test_engine_restart_in_the_window_loses_no_counts() -> None:
    before = [engine(100 + tick, preempted=5) for tick in range(20)]
    after = [engine(tick, preempted=3) for tick in range(200)]
    done = served_window([entry.sample for entry in entries_of(*before, *after)])
    assert done.counted is not None
    assert done.counted.requests_finished_total == 19 + 199
    assert done.counted.preemptions_total == 3


def test_preemptions_count_in_full_when_no_request_has_ended() -> None:
    stuck = [engine(0, preempted=tick / 10) for tick in range(60)]
    assert values(*stuck)["preemption_rate"] == pytest.approx(5.9)


def test_only_the_current_generation_counts() -> None:
    bad = entries_of(*[engine(tick, usage=0.99) for tick in range(60)], generation=1)
    good = entries_of(*STEADY[:40])
    report = check_window(SERVER, [entry._replace(at=entry.at - 60) for entry in bad] + good, NOW, 300)
    assert report.ok
    assert report.window_seconds == pytest.approx(39)


IDLE = tuple(engine(50, running=0, usage=0.0) for _ in range(60))


def test_idle_server_is_ok_only_with_allow_idle() -> None:
    strict = check_window(SERVER, entries_of(*IDLE), NOW, 300)
    assert not strict.ok
    assert "served nothing in the last 59s" in strict.problems[0]
    assert "--allow-idle" in strict.problems[0]
    kind = check_window(SERVER, entries_of(*IDLE), NOW, 300, allow_idle=True)
    assert kind.ok
    assert [one.ok for one in kind.objectives] == [True, None, None, None]


def test_idle_but_full_server_fails_the_check() -> None:
    full = [replace(one, kv_cache_usage=0.99) for one in IDLE]
    report = check_window(SERVER, entries_of(*full), NOW, 300, allow_idle=True)
    assert not report.ok
    assert len(report.problems) == 1


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        (State.STARTING, "is not serving: starting"),
        (State.FAILED, "is not serving: failed for 15m00s: out of memory"),
        (State.STOPPED, "is not serving: stopped"),
        (State.UNRESPONSIVE, "is not serving: unresponsive"),
    ],
)
def test_server_that_does_not_serve_fails_even_with_allow_idle(state: State, problem: str) -> None:
    server = replace(SERVER, state=state, reason="out of memory" if state is State.FAILED else "")
    report = check_window(server, entries_of(*STEADY), NOW, 300, allow_idle=True)
    assert not report.ok
    assert len(report.problems) == 1
    assert problem in report.problems[0]


@pytest.mark.parametrize("code", ["engine_dead", "engine_hung"])
def test_dead_or_hung_engine_fails_the_check(code: str) -> None:
    finding = Finding(code, Severity.CRITICAL, NOW - 60, "3 requests run, and no token has come.", "It hangs.")
    report = check_window(replace(SERVER, findings=(finding,)), entries_of(*STEADY), NOW, 300)
    assert report.problems == ("chat: 3 requests run, and no token has come. It hangs.",)
    assert report_document(report)["findings"][0]["code"] == code


def test_other_findings_do_not_fail_the_check() -> None:
    finding = Finding("context_unused", Severity.NOTE, NOW - 60, "Short.", "Long context.")
    report = check_window(replace(SERVER, findings=(finding,)), entries_of(*STEADY), NOW, 300)
    assert report.ok
    assert report.findings == (finding,)


@pytest.mark.parametrize("prompt_tokens", [0, 800], ids=["one long prefill", "pooling"])
def test_running_requests_without_generated_tokens_are_no_hang_by_themselves(prompt_tokens: int) -> None:
    """Whether the engine makes progress is for the finding to say: it also knows prompts and the KV cache."""
    served = [
        engine(50, running=3, usage=tick / 400, prompt_tokens_total=prompt_tokens * tick + 5000.0)
        for tick in range(300)
    ]
    assert check_window(SERVER, entries_of(*served), NOW, 300).problems == ()


@pytest.mark.parametrize(
    ("entries", "now", "trouble", "problem"),
    [
        ([], NOW, "", "nothing recorded"),
        (entries_of(*STEADY), NOW + 120, "", "last read 2m00s ago"),
        (entries_of(engine(1)), NOW, "", "only one sample"),
        ([], NOW, "it is damaged", "can't be judged: it is damaged"),
        (entries_of(*(EngineSample() for _ in range(30))), NOW, "", "--disable-log-stats"),
    ],
)
def test_check_without_data_fails_with_the_reason(
    entries: list[HistoryEntry], now: float, trouble: str, problem: str
) -> None:
    report = check_window(SERVER, entries, now, 300, allow_idle=True, trouble=trouble)
    assert not report.ok
    assert problem in report.problems[0]


def test_default_objectives_are_used_without_a_preset() -> None:
    report = check_window(replace(SERVER, objectives=None, preset=""), entries_of(*STEADY), NOW, 300)
    assert report.ok
    assert {one.source for one in report.objectives} == {"default objectives, no preset"}


def test_value_just_above_its_limit_is_not_rounded_to_the_limit() -> None:
    (judged,) = [one for one in judge_objectives(served_window([]), OBJECTIVES, "x") if one.name == "ttft_p99_seconds"]
    assert "1.004s, above its limit of 1.0s" in replace(judged, value=1.004, ok=False).sentence


def latency(limit: float, counts: tuple[float, ...], bounds: tuple[float, ...] = (0.3, 0.5, INF)) -> dict[str, object]:
    """A TTFT objective's document with these counts per bucket; the rest of the service is steady."""
    objectives = Objectives(ttft_p99_seconds=limit, itl_p99_seconds=0.1, kv_cache_usage=0.85, preemption_rate=0.02)
    ttft = Histogram(bounds, counts, 1.0)
    last = engine(119, histograms={"ttft": ttft, "itl": STEADY[-1].histograms["itl"]})
    none = Histogram(bounds, (0.0,) * len(bounds), 0.0)
    before = [replace(one, histograms={**one.histograms, "ttft": none}) for one in STEADY[:-1]]
    report = check_window(replace(SERVER, objectives=objectives), entries_of(*before, last), NOW, 300)
    assert report.ok is (report.objectives[2].ok is not False)
    return report_document(report)["objectives"][2] | {"sentence": report.objectives[2].sentence}


def test_objective_is_judged_by_a_bound_when_the_value_is_unknown() -> None:
    met = latency(0.5, (100.0, 100.0, 100.0))
    assert (met["value"], met["value_below"], met["ok"]) == (None, 0.3, True)
    assert "TTFT p99 is <300ms, within its limit of 500ms" in str(met["sentence"])
    missed = latency(0.4, (0.0, 0.0, 100.0))
    assert (missed["value"], missed["value_above"], missed["ok"]) == (None, 0.5, False)
    assert "TTFT p99 is >500ms, above its limit of 400ms" in str(missed["sentence"])


def test_objective_inside_the_first_bucket_is_not_judged() -> None:
    unknown = latency(0.1, (100.0, 100.0, 100.0))
    assert (unknown["value"], unknown["ok"]) == (None, None)
    assert "TTFT p99 is <300ms, so it can't be judged against its limit of 100ms" in str(unknown["sentence"])
    beyond = latency(9.0, (0.0, 0.0, 100.0))
    assert (beyond["value"], beyond["value_above"], beyond["ok"]) == (None, 0.5, None)


def test_ttft_without_waiting_requests_says_so() -> None:
    waiting = Window(NOW - 60, NOW, requests_running=4.0, requests_waiting=36.0, longest_wait=49.0)
    report = check_window(replace(SERVER, window=waiting), entries_of(*STEADY), NOW, 300)
    ending = "; 36 waiting requests are not included yet, the longest has waited at least 49s"
    assert [one.sentence.endswith(ending) for one in report.objectives] == [False, False, True, False]
    assert "not included" not in check_window(SERVER, entries_of(*STEADY), NOW, 300).objectives[2].sentence


@pytest.mark.parametrize(
    ("running", "finished", "expected"),
    [(8.0, 0.0, 5.0), (8.0, 1.0, 5.0), (8.0, 80.0, 0.5), (0.0, 0.0, None), (0.0, 4.0, 10.0)],
)
def test_preemptions_per_request_are_the_same_everywhere(
    running: float, finished: float, expected: float | None
) -> None:
    """In `check_window`, the panes, a run's minutes and the finding: 40 preemptions in a minute."""
    frozen = replace(engine(50), requests_waiting=4.0)
    begun = [
        Sample(
            NOW + at,
            {"0": replace(frozen, requests_running=running, preemptions_total=at * 2 / 3,
                          requests_finished_total=50 + finished * at / 60)},
        )
        for at in range(0, 61, 5)
    ]  # fmt: skip
    checked = judge_objectives(served_window(begun), OBJECTIVES, "chatbot")[1]
    shown = window(begun[0], begun[-1])
    in_pane = judge_window(shown, begun, OBJECTIVES, "chatbot")[1]
    minutes = Windows()
    minute = next(found for found in map(minutes.append, begun) if found is not None)
    frames = Frames()
    for sample in begun:
        frames.append(sample)
    evidence = Evidence(now=NOW + 60, ready_at=NOW - 60, frames=frames.since(0.0), preset_objectives=OBJECTIVES)
    finding = next(one for one in findings(evidence) if one.code == "preempting")
    figures = [checked.value, in_pane.value, shown.preemption_share, minute.figures.get("preemption_share")]
    assert figures == [None if expected is None else pytest.approx(expected)] * 4
    assert checked.ok is in_pane.ok is (None if expected is None else False)
    assert finding.measures[0].value == ("–" if expected is None else f"{expected:.2g}")
