"""``watch`` goes on after a poll that failed."""

from __future__ import annotations

import errno
import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_console.cli import watch


def test_failed_poll_is_reported_once_and_tried_again_until_it_succeeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, polls = threading.Event(), iter(range(4))

    def snapshot() -> object:
        number = next(polls)
        if number < 2:
            raise OSError(errno.ENFILE, "Too many open files in system")
        if number == 3:
            ended.set()
        return number

    fleet: Any = SimpleNamespace(snapshot=snapshot)
    updates: list[object] = []

    def update(found: object) -> tuple[()]:
        updates.append(found)
        return ()

    notifier: Any = SimpleNamespace(update=update, trouble="")
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.0)
    watch._watch(fleet, notifier, ended, as_json=False)
    assert updates == [2, 3]
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"vllm-console: [\d-]+ [\d:]+ \[Errno 23\] Too many open files in system", first)
    assert re.fullmatch(r"vllm-console: [\d-]+ [\d:]+ no longer: \[Errno 23\] Too many open files in system", second)
