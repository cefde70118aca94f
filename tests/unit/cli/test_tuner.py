"""Output and exit code of a tuning, on a fleet whose servers restart immediately."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import sys
import time
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from vllm_console.cli import progress, tune
from vllm_console.cli.load_target import Target
from vllm_console.cli.main import parse
from vllm_console.cli.progress import WIPE
from vllm_console.fleet.snapshot import FleetSnapshot, ServerView
from vllm_console.fleet.tuning import CandidateRanking
from vllm_console.load.client import LoadError
from vllm_console.load.report import Latency, LoadReport, Times
from vllm_console.load.run import UNFINISHED, LoadProgress
from vllm_console.load.spans import FILE_NAME, LoadWatch
from vllm_console.load.tune_search import Candidate, Measured, MeasuredP99, newly_missed
from vllm_launchers.errors import OperationError, UsageError
from vllm_launchers.keeper.records import (
    Exit,
    Generation,
    LaunchSpec,
    Preparation,
    PreparationStep,
    ServerRecord,
    State,
)
from vllm_launchers.presets.model import Objectives, Workload
from vllm_launchers.values import replace as changed

WORK = Workload(input_tokens_p95=300, output_tokens_p95=50, prefix_reuse=0.5, concurrency=8)
LIMITS = Objectives(1.0, 0.1, 0.9, 0.1)
SPEC = LaunchSpec((), "127.0.0.1", 8000)
TTFT = {4: 1.0, 16: 0.2, 64: 0.9}
"""TTFT in seconds by max-num-seqs."""
ITL_P99 = {}
"""The p99 of ITL in seconds by max-num-seqs, if known."""


class Fleet:
    """One server; restarts change its flags immediately, or fail with ``failing`` from the given restart on."""

    def __init__(self, failing: str = "", begin: int = 0) -> None:
        self.history = self.access = self.predictions = self
        self.server = ServerView("chat", State.READY, 0.0, flags={"max-num-seqs": 4}, generation=1)
        self.failing, self.begin, self.restarts = failing, begin, 0
        self.in_trial = lambda: None
        self.while_measured = None
        """A function that may change the server; if it returns true, the load continues until it is stopped."""
        self.record_has = {}
        self.at_end_of_baseline = None

    def snapshot(self):
        return FleetSnapshot(0.0, "box", (self.server,) if self.server is not None else ())

    def record(self, _name):
        if self.server is None:
            return None
        found = ServerRecord("chat", self.server.state, 0.0, 0.0, (Generation(self.server.generation, SPEC, 0.0),))
        return changed(found, **self.record_has)

    def runs(self, _name):
        return [], []

    def rank(self, _name, _target):
        found = tuple(Candidate({"max-num-seqs": seqs}, TTFT[seqs]) for seqs in (16, 64))
        return CandidateRanking(TTFT[4], found, 5, 0)

    def restart(self, _name, changes):
        self.restarts += 1
        flags = {**self.server.flags, **changes.set}
        if self.restarts < self.begin or not self.failing:
            generation = self.server.generation + 1
            self.server = replace(self.server, state=State.READY, flags=flags, generation=generation)
            self.record_has = {}
        elif self.failing == "refused":
            raise OperationError("the port is taken")
        elif self.failing == "changed by others":
            self.server = replace(self.server, flags={"max-num-seqs": 9}, generation=self.server.generation + 2)
        elif self.failing == "rolled back":
            went = "max-num-seqs 16 failed: back to what ran before"
            self.server = replace(self.server, generation=self.server.generation + 2, rollback=went)
        elif self.failing == "failed":
            self.server = replace(
                self.server, flags=flags, generation=self.server.generation + 1, state=State.FAILED, reason="no memory"
            )
        else:
            self.server = replace(self.server, generation=self.server.generation + 5)
            raise OperationError("it was restarted meanwhile")
        return self.server


@pytest.fixture
def tuned(monkeypatch, capsys):
    """Run the command; returns its exit code, its JSON, and its stderr."""

    def run(fleet, *words, folder=None, rate="1"):
        async def run_load(*_args, answers, on_progress, stop, **_options):
            on_progress(LoadProgress(1.0, 1, 0, 0, 1, 0, 0, 1024))
            if fleet.while_measured is not None and fleet.while_measured():
                await asyncio.wait_for(stop.wait(), 60)
                return LoadReport(0, 0, 0, 10.0, 0, Latency(), Latency(), Latency())
            if fleet.server.flags["max-num-seqs"] != 4:
                fleet.in_trial()
            seconds = TTFT[fleet.server.flags["max-num-seqs"]]
            answers.update({at: Times(seconds * (1 + at % 5 / 100), None, 1.0) for at in range(200)})
            if fleet.at_end_of_baseline is not None and fleet.server.flags["max-num-seqs"] == 4:
                on_progress(LoadProgress(2.0, 200, 200, 0, 0, 0, 0, 1024))
                fleet.at_end_of_baseline()
            itl = Latency(2000, p99=ITL_P99.get(fleet.server.flags["max-num-seqs"]))
            return LoadReport(200, 200, 0, 10.0, 2000, Latency(), itl, Latency())

        monkeypatch.setattr("vllm_console.load.run.run_load", run_load)
        monkeypatch.setattr(tune, "find_target", lambda *_a, **_o: Target("", WORK, fleet, fleet.server, None, folder))
        monkeypatch.setattr(tune, "confirm_load", lambda *_: False)
        asked = ["tune", "chat", "--objective", "ttft", "--trials", "2", "--budget", "1h", *words]
        asked += ["--rate", rate] if rate else []
        code = tune.run(parse(asked))
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_better_candidate_is_kept(tuned):
    fleet = Fleet()
    code, out, _ = tuned(fleet, "--json")
    result = json.loads(out)
    assert (code, result["kept"]) == (0, {"max-num-seqs": 16})
    assert result["sentence"].startswith("max-num-seqs 16 stays: its mean TTFT is 80% lower")
    assert fleet.server.flags == {"max-num-seqs": 16}


def test_candidate_that_newly_misses_an_objective_is_not_kept(tuned, monkeypatch):
    """``max-num-seqs 16 stays: its mean TTFT is 80% lower`` was once said with an ITL beyond its objective."""
    monkeypatch.setattr("vllm_console.diagnosis.live.rule.objectives_of", lambda *_: (LIMITS, "the preset's"))
    for seqs, itl in ((4, 0.08), (16, 0.16), (64, 0.09)):
        monkeypatch.setitem(ITL_P99, seqs, itl)
    monkeypatch.setitem(TTFT, 64, 0.5)
    missed = "max-num-seqs 16 is not kept, although its mean TTFT was 80% lower: ITL p99 160ms now misses its objective"
    code, out, _ = tuned(Fleet(), "--json")
    result = json.loads(out)
    assert (code, result["kept"]) == (0, {"max-num-seqs": 64})
    assert result["sentence"].startswith("max-num-seqs 64 stays: its mean TTFT is 50% lower (")
    assert result["sentence"].endswith(f" {missed} of 100ms.")
    monkeypatch.setitem(TTFT, 64, 1.5)
    fleet = Fleet()
    code, out, _ = tuned(fleet, "--json")
    result = json.loads(out)
    assert (code, result["kept"], result["improvement"]) == (0, None, None)
    assert result["sentence"] == f"The original flags stay. {missed} of 100ms."
    assert fleet.server.flags == {"max-num-seqs": 4}
    assert "ITL p99 160ms now misses its objective of 100ms" in tuned(Fleet())[1].split("The original")[0], "per trial"


def test_p99s_are_those_of_enough_answers_after_the_first():
    itl = Latency(2000, p99=0.05)
    compiling = {at: Times(5.0 if at < 20 else 0.5, None, 1.0) for at in range(200)}
    assert tune.measured_p99s(compiling, itl, LIMITS) == (
        MeasuredP99("TTFT p99", 0.5, 1.0),
        MeasuredP99("ITL p99", 0.05, 0.1),
    )
    assert [one.name for one in tune.measured_p99s(compiling, Latency(), LIMITS)] == ["TTFT p99"]
    assert tune.measured_p99s({at: Times(0.5, None, 1.0) for at in range(30)}, itl, LIMITS) == ()


@pytest.mark.parametrize(
    ("answers", "slow", "missed"), [(38, 1, False), (38, 2, False), (38, 3, True), (500, 8, False), (500, 9, True)]
)
def test_few_slow_answers_do_not_reject_a_candidate(answers, slow, missed):
    """The p99 of fewer than 100 answers is the slowest one, which may be chance."""
    times = [Times(0.5, None, 1.0)] * (answers - slow) + [Times(1.5, None, 2.0)] * slow
    itl = Latency(2000, p99=0.05)
    found = tune.measured_p99s(dict(enumerate(times)), itl, LIMITS)
    met = tune.measured_p99s(dict(enumerate(times[:1] * answers)), itl, LIMITS)
    assert found[0].value == 1.5
    rejected = newly_missed(Measured(1.0, 0.1, p99s=met), Measured(2.0, 0.1, p99s=found))
    assert [one.name for one in rejected] == ["TTFT p99"] * missed
    assert not newly_missed(Measured(1.0, 0.1, p99s=found), Measured(2.0, 0.1, p99s=found))


@pytest.mark.parametrize(("columns", "named"), [(55, "; with max-num"), (120, "left; with max-num-seqs 16")])
def test_measured_candidate_name_is_cut_to_the_line(tuned, monkeypatch, columns, named):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress, "waited_for", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = tuned(Fleet(), "--json")[2].split(WIPE)
    assert all(len(text) < columns for text in lines)
    original, first, _ = (text for text in lines if text.startswith("sending 1.0 req/s"))
    assert original.endswith(" left")
    assert named in first


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        ("refused", "chat does not have max-num-seqs 16 now: the port is taken"),
        ("rolled back", "chat does not have max-num-seqs 16 now: max-num-seqs 16 failed: back to what ran before"),
        ("failed", "chat does not have max-num-seqs 16 now: no memory"),
        ("restarted", "chat does not have max-num-seqs 16 now: it was restarted meanwhile"),
    ],
)
def test_better_candidate_is_not_kept_if_its_restart_fails(tuned, failing, message):
    """Two candidates are tried, so the better one takes a third restart."""
    code, out, err = tuned(Fleet(failing, 3), "--json")
    result = json.loads(out)
    assert (code, result["kept"], result["sentence"]) == (1, None, f"{message}.")
    assert result["improvement"]["value"] == pytest.approx(0.8)
    assert message in err
    code, out, err = tuned(Fleet(failing, 3))
    assert code == 1
    assert "stays" not in out
    assert message in err


def test_failure_to_restore_original_flags_is_reported(tuned, monkeypatch):
    monkeypatch.setitem(TTFT, 16, 1.0)
    monkeypatch.setitem(TTFT, 64, 1.0)
    code, out, err = tuned(Fleet("refused", 3), "--json")
    result = json.loads(out)
    message = "chat does not have its original flags now: the port is taken"
    assert (code, result["kept"], result["sentence"]) == (1, None, f"{message}.")
    assert message in err


@pytest.mark.parametrize("stopped", [False, True])
def test_abandoned_trial_is_named_in_the_error(tuned, capsys, stopped):
    """Its server was killed, which restores the original flags; or another user stopped it, which is respected."""
    fleet = Fleet()
    message = "the server stopped answering"

    def killed():
        if stopped:
            fleet.server = replace(fleet.server, state=State.STOPPED)
        raise LoadError(message)

    fleet.in_trial = killed
    with pytest.raises(OperationError) as raised:
        tuned(fleet)
    if stopped:
        message = "chat was stopped by someone else meanwhile; it is left as it is, with max-num-seqs 16"
    assert str(raised.value) == f"the trial with max-num-seqs 16 was given up: {message}"
    assert fleet.server.flags == {"max-num-seqs": 16 if stopped else 4}
    assert "somebody else" not in capsys.readouterr().err, "it is reported once"


def by_others(fleet, what):
    """What another user does to a server, as first seen in its record."""
    if what == "stopped":
        fleet.server = replace(fleet.server, state=State.STOPPING)
    elif what == "removed":
        fleet.server = None
    elif what == "restarted":
        fleet.server = replace(fleet.server, generation=fleet.server.generation + 1)
    elif what == "restarting":
        fleet.server = replace(fleet.server, state=State.STOPPING)
        fleet.record_has = {"next_spec": SPEC}
    else:
        fleet.record_has = {"preparation": Preparation(1.0, SPEC, PreparationStep.CHECKING)}


@pytest.mark.parametrize("seqs", [4, 16])
@pytest.mark.parametrize("what", ["stopped", "removed", "restarted", "restarting", "preparing a restart"])
def test_measurement_ends_as_soon_as_somebody_else_changes_the_server(tuned, what, seqs):
    fleet = Fleet()

    def change():
        if fleet.server.flags["max-num-seqs"] != seqs:
            return False
        by_others(fleet, what)
        return True

    fleet.while_measured = change
    with pytest.raises(OperationError) as raised:
        tuned(fleet)
    done = what if what in ("stopped", "removed") else "restarted"
    assert f"chat was {done} by someone else meanwhile; it is left as it is" in str(raised.value)
    assert fleet.restarts == (seqs != 4), "it is left alone"


def test_flags_stay_after_a_restart_by_others_that_was_canceled(tuned, monkeypatch):
    fleet = Fleet()
    end = tune._Tuner.end

    def change():
        by_others(fleet, "preparing a restart")
        return True

    def canceled_first(tuner):
        fleet.record_has = {}
        end(tuner)

    def before_trials():
        fleet.while_measured = change

    fleet.at_end_of_baseline = before_trials
    monkeypatch.setattr(tune._Tuner, "end", canceled_first)
    with pytest.raises(OperationError, match=r"it is left as it is, with max-num-seqs 16"):
        tuned(fleet)
    assert fleet.server.flags == {"max-num-seqs": 16}


def test_a_crash_is_not_taken_for_a_stop(tuned):
    """A server that ended by itself is also in state "stopping" while its leftovers are ended."""
    fleet = Fleet()
    crash = Exit(0.0, None, "SIGKILL", False, "was killed")

    def crashed():
        fleet.server = replace(fleet.server, state=State.STOPPING)
        fleet.record_has = {"generations": (Generation(fleet.server.generation, SPEC, 0.0, exit=crash),)}
        fleet.in_trial = lambda: None
        raise LoadError("the server stopped answering")

    fleet.in_trial = crashed
    with pytest.raises(OperationError, match=r"was given up: the server stopped answering$"):
        tuned(fleet)


def test_server_stopped_at_the_end_stays_stopped(tuned, monkeypatch):
    fleet = Fleet()
    end = tune._Tuner.end

    def stopped_first(tuner):
        fleet.server = replace(fleet.server, state=State.STOPPED)
        end(tuner)

    monkeypatch.setattr(tune._Tuner, "end", stopped_first)
    code, out, err = tuned(fleet, "--json")
    message = "chat was stopped by someone else meanwhile; it is left as it is, with max-num-seqs 64"
    assert (code, json.loads(out)["sentence"]) == (1, f"{message}.")
    assert (fleet.restarts, err.count(message)) == (2, 1)


def test_restart_by_others_during_a_trials_restart_is_respected(tuned):
    fleet = Fleet("changed by others", 1)
    with pytest.raises(OperationError) as raised:
        tuned(fleet)
    message = "chat was restarted by someone else meanwhile; it is left as it is, with max-num-seqs 9"
    assert str(raised.value) == message
    assert (fleet.restarts, fleet.server.flags) == (1, {"max-num-seqs": 9})


class GoneTerminal(io.StringIO):
    """Standard output or standard error of a terminal that is closed once ``gone`` is set."""

    gone = False

    def write(self, text):
        if GoneTerminal.gone:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().write(text)


@pytest.mark.parametrize("closed", [True, False])
def test_flags_are_restored_when_nobody_can_read_about_it(tuned, monkeypatch, closed):
    """A terminal that was closed, or a pipe whose reader was ended by the same Ctrl+C."""
    fleet = Fleet()
    monkeypatch.setattr(GoneTerminal, "gone", False)
    monkeypatch.setattr(sys, "stdout", GoneTerminal())
    monkeypatch.setattr(sys, "stderr", GoneTerminal() if closed else sys.stderr)

    def gone():
        GoneTerminal.gone = True
        raise KeyboardInterrupt

    fleet.in_trial = gone
    with pytest.raises(KeyboardInterrupt):
        tuned(fleet)
    assert (fleet.restarts, fleet.server.flags) == (2, {"max-num-seqs": 4})


def test_a_short_budget_and_what_is_needed_have_the_same_units(tuned):
    with pytest.raises(UsageError, match=r"^--budget 1m30s is too short for a single trial: at least \d+m\d\ds are"):
        tuned(Fleet(), "--budget", "90s")


def noted_steps(folder):
    """Each step: its action, trial, flags, the best trial, and the tuner's own runs."""
    lines = [json.loads(text) for text in (folder / FILE_NAME).read_text().splitlines()]
    return [
        (one["step"], one["trial"], one["set"].get("max-num-seqs"), one["best"] and one["best"]["trial"],
         one["first_run"], one["last_run"])
        for one in (line["tuner"] for line in lines if "tuner" in line)
    ]  # fmt: skip


def test_each_step_is_recorded(tuned, tmp_path):
    tuned(Fleet(), folder=tmp_path)
    assert noted_steps(tmp_path) == [
        ("measuring", 0, None, None, 1, 1),
        ("predicting", 0, None, None, 1, 1),
        ("restarting", 1, 16, None, 1, 2),
        ("measuring", 1, 16, None, 1, 2),
        ("restarting", 2, 64, 1, 1, 3),
        ("measuring", 2, 64, 1, 1, 3),
        ("finishing", 0, 16, 1, 1, 3),
        ("finishing", 0, 16, 1, 1, 4),
    ]


def test_what_the_baseline_has_shown_so_far_is_noted(tuned, tmp_path):
    fleet, watch, seen = Fleet(), LoadWatch(tmp_path), []
    fleet.at_end_of_baseline = lambda: seen.append(watch.progress(time.time()))
    fleet.in_trial = lambda: seen.append(watch.progress(time.time()))
    tuned(fleet, folder=tmp_path)
    during, trial, *_ = seen
    assert during.original is None
    assert during.found() == "so far 1.0s"
    assert (trial.so_far, trial.original.value) == (None, pytest.approx(1.02))


def test_canceled_tuner_is_not_read_anymore(tuned, tmp_path):
    fleet, watch, seen = Fleet(), LoadWatch(tmp_path), []

    def canceled():
        seen.append(watch.progress(time.time()))
        raise KeyboardInterrupt

    fleet.in_trial = canceled
    with pytest.raises(KeyboardInterrupt):
        tuned(fleet, folder=tmp_path)
    (during,) = seen
    assert (during.doing(), during.trials, during.pid) == ("measuring max-num-seqs 4 → 16", 2, os.getpid())
    assert during.original.value == pytest.approx(1.02)
    assert watch.progress(time.time()) is None
    assert noted_steps(tmp_path)[-1] == ("finishing", 0, None, None, 1, 3)


@pytest.mark.parametrize(("kind", "pace", "advised"), [
    (f"{UNFINISHED} 1m00s after the last arrival", 2.0, True),
    (f"{UNFINISHED} 1m00s after the last arrival", None, False),
    ("HTTP 500", 2.0, False),
])  # fmt: skip
def test_rate_that_leaves_requests_unfinished_is_named_as_the_reason(
    kind: str, pace: float | None, advised: bool
) -> None:
    report = LoadReport(210, 188, 22, 10.0, 2000, Latency(), Latency(), Latency(), failures={kind: 22})
    text = tune._failed_text(report, pace)
    assert text.startswith("22 of 210 requests failed")
    assert kind in text
    assert text.endswith("choose a lower --rate") is advised


def steady(begin: float, count: int, gap: float) -> list[float]:
    """Arrivals at equal intervals."""
    return [begin + gap * number for number in range(count)]


@pytest.mark.parametrize(
    ("arrivals", "rate"),
    [
        ([], None),
        (steady(0, 19, 1.0), None),
        (steady(0, 20, 0.001), None),
        (steady(0, 300, 1.0), 1.0),
        # One request 18 hours later once made it 0.0046/s, at which nothing could be measured.
        ([*steady(0, 300, 1.0), 65_000.0], 1.0),
        ([*steady(0, 300, 1.0), *steady(1000, 300, 1.0)], 1.0),
        ([*steady(0, 300, 1.0), *steady(65_000, 100, 0.25)], 4.0),
        (steady(0, 100, 120.0), None),
    ],
    ids=["none", "few", "at once", "steady", "one later", "pause", "newest hour", "only pauses"],
)
def test_recorded_rate_leaves_pauses_out(arrivals: list[float], rate: float | None) -> None:
    found = tune.recorded_rate(arrivals[::-1])
    assert found == (None if rate is None else pytest.approx(rate))


def test_ttft_is_measured_at_the_recorded_rate_without_pauses(tuned, monkeypatch):
    requests = [SimpleNamespace(arrived_at=at) for at in [*steady(0, 300, 0.5), 65_000.0]]
    fleet, targets = Fleet(), []
    fleet.probes = SimpleNamespace(requests=lambda _name: requests)
    monkeypatch.setattr(fleet, "rank", lambda _name, target: targets.append(target) or Fleet.rank(fleet, _name, target))
    assert tuned(fleet, rate="")[0] == 0
    assert targets[0].rate == pytest.approx(2.0)
