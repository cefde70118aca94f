"""The ramps that a console runs: their events, ramps that could not start, and canceled ramps."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_console.fleet.background_commands import Ramps, RampView
from vllm_launchers.errors import RefusedError
from vllm_launchers.keeper.records import Generation, LaunchSpec, ServerRecord, State

STEP: dict[str, Any] = {"rate": 2.0, "ok": True, "ttft_seconds": {"p99": 0.2}}
RESULT = {"steps": [STEP], "ceiling_requests_per_second": 2.0, "goodput": None, "limited_by": None, "sentence": "So."}
BEGIN = {"begin": {"objectives": {"ttft_p99_seconds": 1.0}, "budget_seconds": 60.0}}


def says(*events: object) -> str:
    return "".join(f"echo '{json.dumps(event)}'\n" for event in events)


@pytest.fixture
def ramps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Ramps]]:
    """Begin a ramp on ``chat`` whose process is a script."""
    spec = LaunchSpec((), "127.0.0.1", 8000)
    server = ServerRecord("chat", State.READY, 0.0, 0.0, (Generation(1, spec, 0.0),))
    access = SimpleNamespace(adopt_ours=lambda name: server, refuse_read_only=lambda: None)
    made = Ramps((f"--state={tmp_path}", "--config=/c.toml"), access)  # type: ignore[arg-type]

    def begin(script: str) -> Ramps:
        program = tmp_path / "python"
        program.write_text(f'#!/bin/bash\necho "$@" > {tmp_path / "words"}\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        made.start("chat")
        return made

    yield begin
    made.close()


def ended(ramps: Ramps) -> RampView:
    ramps._ramps["chat"].reader.join(20)
    view = ramps.view("chat")
    assert view is not None
    assert not view.running
    return view


def test_events_become_steps_limits_and_a_result(ramps: Callable[[str], Ramps], tmp_path: Path) -> None:
    progress = {"rate": 2.0, "warming_up": True, "elapsed": 3.0, "in_flight": 1}
    view = ended(ramps(says(BEGIN, {"progress": progress}, {"step": STEP}, {"result": RESULT})))
    assert (view.steps, view.budget_seconds, view.problem) == ((STEP,), 60.0, "")
    assert view.result is not None
    assert (view.result.ceiling_requests_per_second, view.result.sentence) == (2.0, "So.")
    assert view.result.limits == {"ttft_p99_seconds": 1.0}
    assert "--config=/c.toml ramp chat" in (tmp_path / "words").read_text()
    assert "--yes" not in (tmp_path / "words").read_text()


def test_ramp_that_could_not_start_says_why(ramps: Callable[[str], Ramps]) -> None:
    began = ramps("echo 'vllm-console: a measurement of chat is already running' >&2; exit 4")
    assert ended(began).problem == "a measurement of chat is already running"


def test_server_with_other_requests_asks_for_confirmation(ramps: Callable[[str], Ramps]) -> None:
    view = ended(ramps(says({"others": "chat has 1 request in progress"}) + "echo 'vllm-console: refused' >&2; exit 4"))
    assert (view.others, view.problem) == ("chat has 1 request in progress", "")


def test_canceled_ramp_keeps_its_result_and_only_one_runs(ramps: Callable[[str], Ramps]) -> None:
    waits = 'while [ -z "$over" ]; do sleep 0.01; done\n'
    began = ramps("trap over=1 TERM\n" + says(BEGIN) + waits + says({"result": RESULT}))
    with pytest.raises(RefusedError, match="a ramp runs on chat already"):
        began.start("chat")
    view = began.view("chat")
    while view is not None and not view.limits:  # until it has set its trap
        view = began.view("chat")
    began.cancel("chat")
    view = ended(began)
    assert view.canceled
    assert view.result is not None
