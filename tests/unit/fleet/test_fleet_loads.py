"""The load that a console sends: its message after success, after failures, or if it could not start."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_console.fleet.background_commands import Loads, child_options
from vllm_launchers.keeper.records import Generation, LaunchSpec, ServerRecord, State
from vllm_launchers.launch.details import Details, pack
from vllm_launchers.presets.model import Workload

REPORT = {"sent": 1035, "completed": 11, "failed": 1000, "ttft_seconds": {"p99": 0.5}, "itl_seconds": {"p99": 0.024}}

WORK = Workload(input_tokens_p95=1500, output_tokens_p95=400, prefix_reuse=0.6, concurrency=64)

DONE = "load done: 11 of 1035 answered, 1000 failed, 24 unfinished when it ended"


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Replace the command that sends load by a script; returns the file to which it writes its arguments."""

    def put(script: str) -> Path:
        program, words = tmp_path / "python", tmp_path / "words"
        program.write_text(f'#!/bin/sh\necho "$@" > {words}\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        return words

    return put


def loads_of(workload: Workload | None, state: Path) -> Loads:
    """The loads of a fleet that has a server with this workload."""
    spec = LaunchSpec((), "127.0.0.1", 8000, details=pack(Details(workload=workload)))
    server = ServerRecord("chat", State.READY, 0.0, 0.0, (Generation(1, spec, 0.0),))
    access = SimpleNamespace(adopt_ours=lambda name: server, refuse_read_only=lambda: None)
    return Loads(child_options(state, Path("/c.toml"), None), access)  # type: ignore[arg-type]


def ended(loads: Loads, name: str) -> str:
    deadline = time.monotonic() + 60
    while not (result := loads.result(name)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert loads.describe(name) == "", "nothing is being sent"
    return result


def test_requests_cut_off_at_the_end_are_not_called_failed(pretend: Callable[[str], Path], tmp_path: Path) -> None:
    report = {**REPORT, "sent": 271, "completed": 207, "failed": 64, "unfinished": 64, "held_back": 196}
    pretend(f"echo '{json.dumps(report)}'")
    loads = loads_of(WORK, tmp_path)
    loads.start("chat")
    assert ended(loads, "chat").startswith(
        "load done: 207 of 271 answered, 64 unfinished when it ended, 196 sent late: too many in flight, "
        "TTFT p99 500ms from the scheduled arrival"
    )


def test_report_counts_despite_some_failed_requests(pretend: Callable[[str], Path], tmp_path: Path) -> None:
    pretend(f"echo 'vllm-console: 1024 of 1035 requests failed: timeout' >&2; echo '{json.dumps(REPORT)}'; exit 0")
    loads = loads_of(WORK, tmp_path)
    loads.start("chat")
    assert ended(loads, "chat") == f"{DONE}, TTFT p99 500ms, ITL p99 24ms"
    loads.close()


def test_quantile_known_only_as_a_bound_is_shown_as_one(pretend: Callable[[str], Path], tmp_path: Path) -> None:
    ttft = {"p99": None, "p99_above": 60.0}
    pretend(f"echo '{json.dumps(REPORT | {'ttft_seconds': ttft, 'itl_seconds': {'p99': None}})}'; exit 1")
    loads = loads_of(WORK, tmp_path)
    loads.start("chat")
    assert ended(loads, "chat") == f"{DONE}, TTFT p99 >60s, ITL p99 –"
    loads.close()


def test_result_is_shown_for_a_limited_time(
    pretend: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(f"echo '{json.dumps(REPORT)}'")
    loads = loads_of(WORK, tmp_path)
    loads.start("chat")
    ended(loads, "chat")
    monkeypatch.setattr("vllm_console.fleet.background_commands.RESULT_SECONDS", 0.0)
    assert (loads.describe("chat"), loads.result("chat")) == ("", "")
    loads.close()


def test_without_a_report_its_last_line_is_shown(pretend: Callable[[str], Path], tmp_path: Path) -> None:
    pretend("echo 'vllm-console: chat is stopped, so it takes no requests; wait' >&2; exit 1")
    loads = loads_of(WORK, tmp_path)
    loads.start("chat")
    assert ended(loads, "chat") == "load failed: chat is stopped, so it takes no requests; wait"
    loads.close()


@pytest.mark.parametrize(("printed", "figures"), [(json.dumps(REPORT), DONE.removeprefix("load done")), ("", "")])
def test_load_ends_with_its_server(pretend: Callable[[str], Path], tmp_path: Path, printed: str, figures: str) -> None:
    begun, report = tmp_path / "begun", tmp_path / "report"
    report.write_text(printed)
    pretend(f"trap 'kill $!; cat {report}; exit' TERM; sleep 1000 & touch {begun}; wait")
    loads = loads_of(WORK, tmp_path)
    loads.server_ended("chat")  # no load is sent to it
    loads.start("chat")
    while not begun.exists():
        time.sleep(0.01)
    loads.server_ended("chat")
    assert loads.describe("chat") in ("load ended with the server", "")
    assert ended(loads, "chat").startswith(f"load ended with the server{figures}")
    loads.server_ended("chat")
    loads.close()


def test_requests_in_flight_are_limited_to_the_presets_concurrency(
    pretend: Callable[[str], Path], tmp_path: Path
) -> None:
    pretend("exec sleep 1000")
    loads = loads_of(WORK, tmp_path)
    loads.start("chat")
    assert ", at most 64 in flight, " in loads.describe("chat")
    words = pretend("exit 0")
    loads.start("chat")
    assert ended(loads, "chat") == "load ended without a report"
    assert "--config=/c.toml load chat" in words.read_text()
    assert "--concurrency 64" in words.read_text()
    loads.close()


def test_requests_in_flight_without_a_workload_are_not_limited(pretend: Callable[[str], Path], tmp_path: Path) -> None:
    words = pretend("exit 0")
    loads = loads_of(None, tmp_path)
    loads.start("chat")
    ended(loads, "chat")
    assert "--rate 1 " in words.read_text()
    assert "--concurrency" not in words.read_text()
    loads.close()
