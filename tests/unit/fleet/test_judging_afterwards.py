"""Findings of hours without a console, evaluated from the stored history and recorded once."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from vllm_console.cli import check, restart
from vllm_console.cli.main import parse
from vllm_console.cli.runs_text import run_lines
from vllm_console.fleet.backfill import judge_past
from vllm_console.fleet.judge import Judge
from vllm_console.fleet.runs import RunRecorder
from vllm_console.fleet.snapshot import FleetSnapshot
from vllm_console.fleet.watched_server import JudgeContext
from vllm_console.history.store import HISTORY, HistoryWriter
from vllm_console.metrics.sample import EngineSample, Histogram, Sample
from vllm_launchers.keeper import folders
from vllm_launchers.keeper.records import Generation, LaunchSpec, ServerRecord, State
from vllm_launchers.launch.details import Details, pack
from vllm_launchers.presets.model import Objectives
from vllm_launchers.vllm.flags.changes import Changes

OBJECTIVES = Objectives(ttft_p99_seconds=2.0, itl_p99_seconds=0.1, kv_cache_usage=0.8, preemption_rate=0.02)
HOUR = 3600


def poll(at: float, begun: float, usage: float) -> Sample:
    done = (at - begun) * 10
    engine = EngineSample(
        requests_running=4, requests_waiting=0, kv_cache_usage=usage, preemptions_total=0, prompt_tokens_total=done,
        generation_tokens_total=done, requests_finished_total=done / 20,
    )  # fmt: skip
    return Sample(at, {"0": engine}, kv_cache_tokens=50_000, model_name="m")


@pytest.fixture
def night(tmp_path: Path) -> tuple[RunRecorder, ServerRecord]:
    """Two hours that ended an hour ago: the first under pressure, the second with light load."""
    begun = time.time() - 3 * HOUR
    details = Details(preset="chatbot", model="m", flags={"max-num-seqs": 8}, objectives=OBJECTIVES)
    spec = LaunchSpec(("vllm",), "127.0.0.1", 1, details=pack(details))
    generation = Generation(1, spec, begun - 60, ready_at=begun, ended_at=begun + 2 * HOUR)
    record = ServerRecord("chat", State.STOPPED, begun + 2 * HOUR, begun - 60, (generation,))
    folder = folders.server_folder(tmp_path, "chat")
    folder.mkdir(parents=True)
    writer = HistoryWriter(folder / HISTORY)
    for second in range(0, 2 * HOUR, 10):
        writer.append(poll(begun + second, begun, 0.95 if second < HOUR else 0.2))
    writer.close()
    recorder = RunRecorder(tmp_path, 0.0, read_only=False)
    recorder.enter(record)
    return recorder, record


def test_night_without_a_console_is_judged_later(night):
    recorder, record = night
    assert recorder.open().runs("chat")[0].findings == {}
    assert recorder.judge_past([record]) == ""
    (run,) = recorder.open().runs("chat")
    assert run.findings["kv_cache_pressure"] == pytest.approx(60, abs=3)
    assert run.judged_until == record.current.ended_at
    assert not {"engine_hung", "healthy"} & set(run.findings)


def test_judged_time_is_not_counted_twice(night):
    recorder, record = night
    recorder.judge_past([record])
    first = recorder.open().runs("chat")[0].findings
    assert recorder.judge_past([record]) == ""
    assert recorder.open().runs("chat")[0].findings == first
    (run,) = recorder.open().runs("chat")
    since = record.current.ready_at
    name = client_name(run)
    recorder.open().note_findings(name, {"kv_cache_pressure": [(since + 600, since + 1200)]}, run.judged_until)
    assert recorder.open().runs("chat")[0].findings == first


def client_name(run):
    from vllm_console.runs.store import RunName

    return RunName(run.key, run.server, run.generation)


def test_damaged_history_is_reported_and_judged_when_readable(night, tmp_path):
    recorder, record = night
    path = folders.server_folder(tmp_path, "chat") / HISTORY
    whole = path.read_bytes()
    path.write_bytes(b"no history" * 1000)
    assert "history" in recorder.judge_past([record])
    assert recorder.open().runs("chat")[0].judged_until is None
    path.write_bytes(whole)
    assert recorder.judge_past([record]) == ""
    assert "kv_cache_pressure" in recorder.open().runs("chat")[0].findings


def test_read_only_console_records_nothing(night, tmp_path):
    _, record = night
    RunRecorder(tmp_path, 0.0, read_only=True).judge_past([record])
    assert RunRecorder(tmp_path, 0.0, read_only=True).open().runs("chat")[0].judged_until is None


def served(folder: Path, waiting: Callable[[int], float], *, step: int = 10, slow: float = 0.0) -> set[str]:
    """Findings for forty recorded minutes with that queue, sampled every ``step`` seconds.

    There are twenty requests per second, of which the share ``slow`` has a TTFT above two seconds.
    """
    begun = 1e9
    spec = LaunchSpec(
        ("vllm",), "127.0.0.1", 1, details=pack(Details(flags={"max-num-seqs": 8}, objectives=OBJECTIVES))
    )
    generation = Generation(1, spec, begun - 60, ready_at=begun, ended_at=begun + 2400)
    record = ServerRecord("chat", State.STOPPED, begun + 2400, begun - 60, (generation,))
    writer = HistoryWriter(folder / HISTORY)
    for second in range(0, 2400, step):
        engine = poll(begun + second, begun, 0.2).engines["0"]
        ended = second * 20.0
        ttft = Histogram((1.0, 2.0, 4.0, math.inf), (ended * (1 - slow),) * 2 + (ended,) * 2, ended)
        engine = replace(engine, requests_waiting=waiting(second), histograms={"ttft": ttft})
        writer.append(Sample(begun + second, {"0": engine}, kv_cache_tokens=50_000, model_name="m"))
    writer.close()
    return set(judge_past(folder, record, 0, begun, begun + 2400))


def test_short_bursts_in_coarse_rows_are_not_a_growing_queue(tmp_path):
    """Each row has the longest queue of its ten seconds, although most of the time nothing waited."""
    sizes = random.Random(1)
    assert served(tmp_path, lambda _: sizes.randrange(5, 60)) == set()


def test_growing_queue_is_found_now_and_by_ttft_before(tmp_path):
    """The last half hour has one-second rows; earlier, a TTFT above its objective indicates the queue."""
    now, before = tmp_path / "now", tmp_path / "before"
    now.mkdir()
    before.mkdir()
    assert served(now, lambda second: max(0.0, second - 2000.0), step=2) == {"oversubscribed_compute"}
    assert served(before, lambda second: second % 1200, slow=0.5) == {"slow_first_token"}


def test_slow_sparse_traffic_is_one_finding(tmp_path):
    """With a request every hundred seconds, each once had a period of its own."""
    begun = 1e9
    spec = LaunchSpec(("vllm",), "127.0.0.1", 1, details=pack(Details(objectives=OBJECTIVES)))
    generation = Generation(1, spec, begun - 60, ready_at=begun, ended_at=begun + 1200)
    record = ServerRecord("chat", State.STOPPED, begun + 1200, begun - 60, (generation,))
    writer = HistoryWriter(tmp_path / HISTORY)
    for second in range(0, 1200, 5):
        gaps = 100.0 * (second // 100)
        itl = Histogram((0.1, 1.0, math.inf), (0.0, gaps, gaps), gaps / 2)
        counted = {"prompt_tokens_total": gaps, "generation_tokens_total": gaps, "requests_finished_total": gaps / 100}
        engine = replace(EngineSample(0, 0, 0.0), **counted, histograms={"itl": itl})
        writer.append(Sample(begun + second, {"0": engine}, kv_cache_tokens=50_000, model_name="m"))
    writer.close()
    recorder = RunRecorder(tmp_path, 0.0, read_only=False)
    recorder.open().note_findings(recorder.name(record), judge_past(tmp_path, record, 0, begun, begun + 1200))
    ((code, since, until),) = recorder.open().findings(1)
    assert (code, since) == ("slow_tokens", begun + 90)
    assert until >= begun + 1100


SERVING = Details(preset="chatbot", objectives=OBJECTIVES)


def serving(begun: float = 1e9) -> ServerRecord:
    spec = LaunchSpec(("vllm",), "127.0.0.1", 1, details=pack(SERVING))
    return ServerRecord("chat", State.READY, begun, begun - 60, (Generation(1, spec, begun - 60, ready_at=begun),))


def first_tokens(slow: Callable[[int], float], begun: float = 1e9) -> Iterator[Sample]:
    """Twenty minutes with twenty requests per second, of which the share ``slow`` has a TTFT above its objective.

    The others have one between half of it and all of it. There are none while the share is negative.
    """
    ended = late = 0.0
    for second in range(0, 1200, 2):
        share = slow(second)
        if share >= 0:
            ended, late = ended + 40, late + 40 * share
        ttft = Histogram((1.0, 2.0, 4.0, math.inf), (0.0, ended - late, ended, ended), ended)
        counted = {"prompt_tokens_total": ended, "generation_tokens_total": ended, "requests_finished_total": ended}
        engine = replace(EngineSample(4.0 if share >= 0 else 0.0, 0, 0.1), **counted, histograms={"ttft": ttft})
        yield Sample(begun + second, {"0": engine}, kv_cache_tokens=50_000, model_name="m")


def recorded(folder: Path, samples: Iterable[Sample]) -> dict[str, float]:
    """Seconds for which each finding of these twenty minutes is recorded."""
    record = serving()
    writer = HistoryWriter(folder / HISTORY)
    for one in samples:
        writer.append(one)
    writer.close()
    recorder = RunRecorder(folder, 0.0, read_only=False)
    recorder.open().note_findings(recorder.name(record), judge_past(folder, record, 0, 1e9, 1e9 + 1200))
    held: dict[str, float] = {}
    for code, since, until in recorder.open().findings(1):
        held[code] = held.get(code, 0.0) + until - since
    return held


def test_silence_after_slow_requests_is_not_recorded(tmp_path):
    """A minute of them once counted as more than five."""
    held = recorded(tmp_path, first_tokens(lambda second: -1.0 if second >= 360 else 0.5 if second >= 300 else 0.0))
    assert 50 <= held["slow_first_token"] <= 70


def slow_for_two_minutes(second: int) -> float:
    return 0.5 if 300 <= second < 420 else 0.0


def test_recovery_is_not_recorded(tmp_path):
    assert 110 <= recorded(tmp_path, first_tokens(slow_for_two_minutes))["slow_first_token"] <= 200


def test_finding_ends_after_five_minutes_within_its_objective():
    """TTFTs between 90% and 100% of it once kept the finding open for ever."""
    judge, record, found = Judge("chat"), serving(), {}
    for one in first_tokens(slow_for_two_minutes):
        judge.append(one, 1)
        found[one.at - 1e9] = judge.findings(record, SERVING, JudgeContext(may_ask=False), one.at)
    (held,) = found[420]
    (recovering,) = found[720]
    assert (held.code, held.recovering) == ("slow_first_token", False)
    assert (recovering.code, recovering.recovering) == ("slow_first_token", True)
    assert "5m within the objective" in recovering.cause
    assert [one.code for one in found[800]] == ["healthy"]


def test_run_list_shows_findings_and_their_coverage(night):
    recorder, record = night
    recorder.judge_past([record])
    text = "\n".join(run_lines(recorder.open().runs("chat"), time.time()))
    assert "findings: KV cache pressure for " in text
    assert "(findings about GPUs not included)" in text


class CheckedFleet:
    """A fleet with one stopped server, as ``check`` uses it."""

    def __init__(self, view, trouble):
        self.view, self.trouble, self.asked = view, trouble, []
        self.history = self

    def snapshot(self, _selected):
        return FleetSnapshot(time.time(), "box", (self.view,))

    def judge_past(self, name):
        self.asked.append(name)
        return self.trouble


def test_check_judges_the_past_of_its_server(fakes, monkeypatch, capsys, tmp_path):
    view = replace(fakes.stopped(fakes.NOW), log_path=str(tmp_path / "server.log"))
    fleet = CheckedFleet(view, "runs.sqlite is full")
    monkeypatch.setattr(check, "open_fleet", lambda _args: fleet)
    assert check.run(parse(["check", "old", "--allow-idle"])) == 1
    assert fleet.asked == ["old"]
    output = capsys.readouterr()
    assert output.out, "the server's problem is still reported"
    assert output.err == "vllm-console: runs.sqlite is full\n"


def test_restart_with_several_changes_warns_about_attribution(capsys):
    flags = {"max-num-seqs": 64, "enable-prefix-caching": True, "kv-cache-dtype": "fp8"}
    restart.say_several(flags, Changes({"max-num-seqs": 32, "enable-prefix-caching": True}))
    assert capsys.readouterr().err == "", "one of the two is already set"
    restart.say_several(flags, Changes({"max-num-seqs": 32}, unset=("kv-cache-dtype", "max-model-len")))
    output = capsys.readouterr().err
    assert "2 changes at once (max-num-seqs, kv-cache-dtype)" in output
    assert "can't attribute the effect" in output
