"""The process that predicts staged changes: its arguments, its errors, and its end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vllm_console.fleet.background_commands import StagedPredictions, child_options
from vllm_console.fleet.predictions import PredictedChange
from vllm_console.prediction.predict import Estimates, Prediction
from vllm_console.prediction.score import TrackRecord
from vllm_launchers.errors import OperationError
from vllm_launchers.vllm.flags.changes import Changes

FOUND = PredictedChange((), Prediction(Estimates(), outside="A guess."), 100, 2.0, "the probe's records", TrackRecord())
OPTIONS = child_options(Path("/s"), Path("/c.toml"), Path("/h.json"))
CHANGES = Changes(set={"max-num-seqs": 64, "enable-prefix-caching": False}, unset=("kv-cache-dtype",))


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Replace the program by a script; returns the file to which it writes its arguments."""

    def put(script: str) -> Path:
        program, words = tmp_path / "python", tmp_path / "words"
        program.write_text(f'#!/bin/sh\necho "$$ $@" > {words}\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        return words

    return put


def test_prediction_runs_the_command_and_keeps_nothing(pretend: Callable[[str], Path], tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    answer.write_bytes(msgspec.json.encode(FOUND))
    words = pretend(f"cat {answer}; exit 1")
    assert StagedPredictions(OPTIONS).ask("chat", CHANGES) == FOUND
    changes = "--set max-num-seqs=64 --set enable-prefix-caching=false --unset kv-cache-dtype"
    assert words.read_text().endswith(
        f" -m vllm_console --state=/s --config=/c.toml --host=/h.json predict chat --draft {changes}\n"
    )


def test_prediction_error_is_the_commands(pretend: Callable[[str], Path]) -> None:
    pretend("echo 'vllm-console: chat: a prediction needs more' >&2; exit 1")
    with pytest.raises(OperationError, match=r"^chat: a prediction needs more$"):
        StagedPredictions(OPTIONS).ask("chat", CHANGES)


def test_prediction_times_out(pretend: Callable[[str], Path]) -> None:
    pretend("exec sleep 60")
    with pytest.raises(OperationError, match="no prediction within"):
        StagedPredictions(OPTIONS, deadline=0.2).ask("chat", CHANGES)


@pytest.mark.parametrize("end", [StagedPredictions.cancel, StagedPredictions.close])
def test_prediction_is_canceled(pretend: Callable[[str], Path], end: Callable[[StagedPredictions], None]) -> None:
    words, asked, answers = pretend("exec sleep 60"), StagedPredictions(OPTIONS), list[object]()
    thread = threading.Thread(target=lambda: answers.append(asked.ask("chat", CHANGES)))
    thread.start()
    deadline = time.monotonic() + 60
    while not (words.exists() and words.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    end(asked)
    thread.join(20)
    assert answers == [None]
    with pytest.raises(ProcessLookupError):
        os.kill(int(words.read_text().split()[0]), 0)


@pytest.mark.parametrize("end", [StagedPredictions.cancel, StagedPredictions.close])
def test_ending_a_prediction_does_not_wait_for_its_process_to_start(
    pretend: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, end: Callable[[StagedPredictions], None]
) -> None:
    pretend("exec sleep 60")
    asked, begin, ended = StagedPredictions(OPTIONS), subprocess.Popen, list[bool]()

    def begin_slowly(*given: Any, **options: Any) -> subprocess.Popen[bytes]:
        ending = threading.Thread(target=end, args=(asked,), daemon=True)
        ending.start()
        ending.join(20)
        ended.append(not ending.is_alive())
        return begin(*given, **options)

    monkeypatch.setattr(subprocess, "Popen", begin_slowly)
    assert asked.ask("chat", CHANGES) is None
    assert ended == [True]
