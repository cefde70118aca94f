"""``vllm-console load``: what is sent for its arguments, and the exit code."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from vllm_console.cli.main import main
from vllm_console.cli.progress import ProgressLine

if TYPE_CHECKING:
    from conftest import Stub
else:
    Stub = Any

FEW = ("--requests", "20", "--concurrency", "1")


def load(folder: Path, url: str, *words: str) -> int:
    return main(["--state", str(folder / "state"), "load", url, *words])


@pytest.mark.parametrize(
    ("words", "code"),
    [((), 1), (("--max-failed", "10%"), 1), (("--max-failed", "20%"), 0), (("--max-failed", "0.2"), 0)],
)
def test_exit_code_depends_on_the_allowed_failures(
    tmp_path: Path, stub: Stub, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int
) -> None:
    stub.refuse_every = 5
    assert load(tmp_path, stub.url, *FEW, *words) == code
    assert "4 of 20 requests failed: HTTP 500: refused (4 times)" in capsys.readouterr().err


def test_no_answers_are_always_a_failure(tmp_path: Path, stub: Stub) -> None:
    stub.refuse_every = 1
    assert load(tmp_path, stub.url, "--requests", "2", "--rate", "50", "--max-failed", "100%") == 1


def test_interrupted_load_reports_what_it_measured_and_exits_with_130(
    tmp_path: Path, stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.hang_after = 1  # token

    def interrupt() -> None:
        while len(stub.bodies) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    words = ("--requests", "50", "--concurrency", "2", "--max-failed", "100%", "--json")
    assert load(tmp_path, stub.url, *words) == 130
    thread.join()
    report = json.loads(capsys.readouterr().out)
    assert (report["sent"], report["unfinished"]) == (2, 2)


def test_lengths_are_exact_unless_a_distribution_is_requested(
    tmp_path: Path, stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load(tmp_path, stub.url, *FEW, "--input-tokens", "30", "--output-p95", "9", "--json") == 0
    assert {len(body["prompt"]) for body in stub.bodies} == {30}
    assert len({body["max_tokens"] for body in stub.bodies}) > 2
    report = json.loads(capsys.readouterr().out)
    assert report["prompt_tokens"] == 600
    assert report["shape"].startswith("closed loop, 1 in flight · prompt tokens 30, output tokens up to 9 (95%)")


@pytest.mark.parametrize(
    ("words", "loop"),
    [
        (("--requests", "3", "--rate", "100"), "open loop, 100 req/s, at most 256 in flight · "),
        (
            ("--requests", "3", "--rate", "100", "--concurrency", "1"),
            "open loop, 100 req/s, at most 1 in flight · ",
        ),
        (("--duration", "0.2"), "open loop, 1.0 req/s, at most 256 in flight · "),
        (("--duration", "0.2", "--concurrency", "2"), "closed loop, 2 in flight · "),
    ],
)
def test_loop_type_is_reported(
    tmp_path: Path, stub: Stub, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], loop: str
) -> None:
    assert load(tmp_path, stub.url, *words, "--output-tokens", "2") == 0
    assert capsys.readouterr().out.startswith(loop)


@pytest.mark.parametrize(
    "words",
    [
        ("--input-tokens", "0"),
        ("--input-tokens", "-5"),
        ("--output-tokens", "1e3"),
        ("--concurrency", "0"),
        ("--requests", "0"),
        ("--max-failed", "2"),
        ("--max-failed", "nan"),
        ("--prefix-reuse", "many"),
        ("--input-tokens", "5", "--input-p95", "5"),
        ("--requests", "5", "--duration", "5"),
        ("--rate", "0"),
        ("--rate", "nan"),
    ],
)
def test_invalid_options_are_usage_errors(tmp_path: Path, stub: Stub, words: tuple[str, ...]) -> None:
    try:
        code: object = load(tmp_path, stub.url, *words)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert stub.bodies == []


def test_background_load_does_not_write_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output would appear on the screen of the program in the foreground."""
    import vllm_console.cli.progress as command

    monkeypatch.setattr(command.os, "tcgetpgrp", lambda _descriptor: 1)
    assert not command.waited_for()
    monkeypatch.setattr(command.os, "tcgetpgrp", lambda _descriptor: command.os.getpgrp())
    assert command.waited_for() is hasattr(command.sys.stderr, "fileno")


def test_progress_lines_are_printed_if_stderr_is_not_a_terminal(
    tmp_path: Path, stub: Stub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm_console.cli.progress as command

    monkeypatch.setattr(command, "LINE_SECONDS", 0.001)
    assert load(tmp_path, stub.url, *FEW) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"sending to {stub.url}: 20 requests, at most 1 in flight"
    assert lines[-1].endswith("20 sent, 0 in flight, 20 answered")
    assert load(tmp_path, stub.url, *FEW, "--json") == 0
    assert capsys.readouterr().err == ""


def test_requests_held_back_by_the_limit_are_in_the_progress() -> None:
    from vllm_console.cli.load import _progress_text
    from vllm_console.load.run import LoadProgress

    text = _progress_text(LoadProgress(60.0, 400, 144, 0, 256, 0, 40, 256))
    assert text == "1m00s: 400 sent, 256 in flight, 144 answered, 40 sent late: at most 256 in flight"


def test_open_loop_reports_its_limit_and_late_requests(
    tmp_path: Path, stub: Stub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm_console.cli.progress as command

    monkeypatch.setattr(command, "LINE_SECONDS", 0.001)
    assert load(tmp_path, stub.url, "--rate", "1000", "--requests", "20", "--concurrency", "1") == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"sending to {stub.url}: 20 requests at 1000 req/s, at most 1 in flight"
    assert "sent late: at most 1 in flight" in lines[-1]


def test_progress_lines_are_frequent_at_first_then_once_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    line = ProgressLine(first="sending")
    for half in range(2 * 200):
        elapsed = half / 2 + 0.1
        line.show(f"{elapsed:.0f}s", elapsed)
    at = capsys.readouterr().err.splitlines()
    assert at == ["sending", "10s", "20s", "30s", "40s", "50s", "60s", "120s", "180s"]
