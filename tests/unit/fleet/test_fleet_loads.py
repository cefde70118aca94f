"""The load that a console sends: what it says of one that went well, went badly, or could not begin."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_console.fleet.loads import Loads

REPORT = {"sent": 1035, "completed": 11, "ttft_seconds": {"p99": 0.5}, "itl_seconds": {"p99": 0.024}}


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a script in the place of the command that sends the load; returns the file that it writes its words to."""

    def put(script: str) -> Path:
        program, words = tmp_path / "python", tmp_path / "words"
        program.write_text(f'#!/bin/sh\necho "$@" > {words}\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        return words

    return put


def ended(loads: Loads, name: str) -> str:
    deadline = time.monotonic() + 20
    while loads.describe(name).endswith((" left", "last answers")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return loads.describe(name)


def test_a_report_counts_although_some_requests_failed(pretend: Callable[[str], Path], tmp_path: Path) -> None:
    pretend(f"echo 'vllm-console: 1024 of 1035 requests failed: timeout' >&2; echo '{json.dumps(REPORT)}'; exit 0")
    loads = Loads()
    loads.start("chat", tmp_path, 5, 10)
    assert ended(loads, "chat") == "load done: 11/1035 answered, TTFT99 500ms, ITL99 24ms"
    loads.close()


def test_without_a_report_its_last_sentence_is_told(pretend: Callable[[str], Path], tmp_path: Path) -> None:
    pretend("echo 'vllm-console: chat is stopped, so it takes no requests; wait' >&2; exit 1")
    loads = Loads()
    loads.start("chat", tmp_path, 5, 10)
    assert ended(loads, "chat") == "load failed: chat is stopped, so it takes no requests; wait"
    loads.close()


def test_the_requests_in_flight_are_bounded_when_asked(pretend: Callable[[str], Path], tmp_path: Path) -> None:
    words = pretend("exit 0")
    loads = Loads()
    loads.start("chat", tmp_path, 5, 10, 64)
    assert ended(loads, "chat") == "load ended without a report"
    assert "--concurrency 64" in words.read_text()
    loads.start("chat", tmp_path, 5, 10)
    ended(loads, "chat")
    assert "--concurrency" not in words.read_text()
    loads.close()
