"""Conditions of hours that no console saw: judged from the stored history, entered once."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_console.cli import check, restart
from vllm_console.cli.run_lines import run_lines
from vllm_console.fleet.details import Details, pack
from vllm_console.fleet.model import Changes, FleetSnapshot
from vllm_console.fleet.runs import RunBook
from vllm_console.fleet.watched import HISTORY
from vllm_console.telemetry.history import Writer
from vllm_console.telemetry.model import EngineSample, Sample
from vllm_launchers.keeper import client
from vllm_launchers.keeper.records import Generation, LaunchSpec, ServerRecord, State
from vllm_launchers.presets.model import Objectives

GOALS = Objectives(ttft_p99_seconds=2.0, itl_p99_seconds=0.1, kv_cache_usage=0.8, preemption_rate=0.02)
HOUR = 3600


def look(at: float, begun: float, usage: float) -> Sample:
    done = (at - begun) * 10
    engine = EngineSample(
        requests_running=4, requests_waiting=0, kv_cache_usage=usage, preemptions_total=0, prompt_tokens_total=done,
        generation_tokens_total=done, requests_finished_total=done / 20,
    )  # fmt: skip
    return Sample(at, {"0": engine}, kv_cache_tokens=50_000, model_name="m")


@pytest.fixture
def night(tmp_path: Path) -> tuple[RunBook, ServerRecord]:
    """Two hours that ended an hour ago: the first under pressure, the second at ease."""
    begun = time.time() - 3 * HOUR
    details = Details(preset="chatbot", model="m", flags={"max-num-seqs": 8}, objectives=GOALS)
    spec = LaunchSpec(("vllm",), "127.0.0.1", 1, details=pack(details))
    generation = Generation(1, spec, begun - 60, ready_at=begun, ended_at=begun + 2 * HOUR)
    record = ServerRecord("chat", State.STOPPED, begun + 2 * HOUR, begun - 60, (generation,))
    folder = client.folder(tmp_path, "chat")
    folder.mkdir(parents=True)
    writer = Writer(folder / HISTORY)
    for second in range(0, 2 * HOUR, 10):
        writer.append(look(begun + second, begun, 0.95 if second < HOUR else 0.2))
    writer.close()
    book = RunBook(tmp_path, 0.0, read_only=False)
    book.enter(record)
    return book, record


def test_a_night_without_a_console_is_in_the_ledger_in_the_morning(night):
    book, record = night
    assert book.open().runs("chat")[0].conditions == {}
    assert book.judge_past([record]) == ""
    (run,) = book.open().runs("chat")
    assert run.conditions["kv_cache_pressure"] == pytest.approx(60, abs=3)
    assert run.judged_until == record.current.ended_at
    assert not {"engine_hung", "healthy"} & set(run.conditions)


def test_what_was_judged_is_not_counted_twice(night):
    book, record = night
    book.judge_past([record])
    first = book.open().runs("chat")[0].conditions
    assert book.judge_past([record]) == ""
    assert book.open().runs("chat")[0].conditions == first
    (run,) = book.open().runs("chat")
    since = record.current.ready_at
    name = client_name(run)
    book.open().note_past(name, {"kv_cache_pressure": [(since + 600, since + 1200)]}, since, run.judged_until)
    assert book.open().runs("chat")[0].conditions == first


def client_name(run):
    from vllm_console.telemetry.ledger_log import RunName

    return RunName(run.key, run.server, run.generation)


def test_a_damaged_history_is_said_and_judged_when_it_can_be_read(night, tmp_path):
    book, record = night
    path = client.folder(tmp_path, "chat") / HISTORY
    whole = path.read_bytes()
    path.write_bytes(b"no history" * 1000)
    assert "history" in book.judge_past([record])
    assert book.open().runs("chat")[0].judged_until is None
    path.write_bytes(whole)
    assert book.judge_past([record]) == ""
    assert "kv_cache_pressure" in book.open().runs("chat")[0].conditions


def test_a_read_only_console_enters_nothing(night, tmp_path):
    _, record = night
    RunBook(tmp_path, 0.0, read_only=True).judge_past([record])
    assert RunBook(tmp_path, 0.0, read_only=True).open().runs("chat")[0].judged_until is None


def test_a_list_of_runs_says_what_held_and_how_that_is_known(night):
    book, record = night
    book.judge_past([record])
    text = "\n".join(run_lines(book.open().runs("chat"), time.time()))
    assert "held: KV cache pressure" in text
    assert "without GPUs" in text


class Looked:
    """A fleet with one server that does not run, as ``check`` asks it."""

    def __init__(self, view, trouble):
        self.view, self.trouble, self.asked = view, trouble, []

    def snapshot(self, _selected):
        return FleetSnapshot(time.time(), "box", (self.view,))

    def judge_past(self, name):
        self.asked.append(name)
        return self.trouble


def test_a_check_judges_the_past_of_the_server_that_it_looks_at(fakes, monkeypatch, capsys, tmp_path):
    view = replace(fakes.stopped(fakes.NOW), log_path=str(tmp_path / "server.log"))
    fleet = Looked(view, "runs.sqlite is full")
    monkeypatch.setattr(check, "open_fleet", lambda _args: fleet)
    assert check.run(argparse.Namespace(name="old", window=300.0, allow_idle=True, json=False)) == 1
    assert fleet.asked == ["old"]
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "vllm-console: runs.sqlite is full"
    assert len(said) > 1, "what is wrong with the server comes first"


def test_a_restart_with_several_changes_says_that_they_cannot_be_told_apart(capsys):
    flags = {"max-num-seqs": 64, "enable-prefix-caching": True, "kv-cache-dtype": "fp8"}
    restart.say_several(flags, Changes({"max-num-seqs": 32, "enable-prefix-caching": True}))
    assert capsys.readouterr().err == "", "one of the two stands already"
    restart.say_several(flags, Changes({"max-num-seqs": 32}, unset=("kv-cache-dtype", "max-model-len")))
    said = capsys.readouterr().err
    assert "2 changes at once (max-num-seqs, kv-cache-dtype)" in said
    assert "will not tell them apart" in said
