"""Waiting for a server."""

from __future__ import annotations

import signal
from itertools import count
from types import ModuleType, SimpleNamespace

import pytest

from vllm_console.cli import waiting


@pytest.mark.parametrize(("seconds", "quiet", "lines"), [(9, False, 0), (45, False, 4), (45, True, 0)])
def test_long_wait_prints_progress_lines_when_stderr_is_not_a_terminal(
    fakes: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seconds: int,
    quiet: bool,
    lines: int,
) -> None:
    ticks = count()
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)), sleep=lambda _: None)
    monkeypatch.setattr(waiting, "time", clock)
    fleet = fakes.FakeFleet(fakes.observed)
    name = fleet.snapshot().servers[0].name
    polls = count()
    waiting.wait_until(fleet, name, lambda _: next(polls) == seconds, quiet=quiet, timeout=600.0)
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == lines
    assert all(line.startswith(f"{name}: ") for line in printed)


def test_ignored_hangup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert waiting.ending_signals() == (signal.SIGTERM,), "as under nohup"
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert waiting.ending_signals() == (signal.SIGTERM, signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
