"""When a recorder takes its keeper for dead."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from vllm_console.recorder import KeeperWatch
from vllm_launchers.keeper import client


@pytest.mark.parametrize("died_early", [True, False])
def test_keeper_that_died_before_its_recorder_was_ready_is_replaced(
    died_early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the recorder never had it as its parent."""
    keeper = os.getpid() if died_early else os.getppid()
    (tmp_path / "record.json").write_text(json.dumps({"keeper": {"pid": keeper}}))
    asked: list[Path] = []
    monkeypatch.setattr(client, "adopt_orphans", lambda root: asked.append(root) or [])
    KeeperWatch(tmp_path, tmp_path).check(0.0)
    assert asked == ([tmp_path] if died_early else [])


def test_keeper_without_a_readable_record_is_the_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(client, "adopt_orphans", lambda root: asked.append(root) or [])
    (tmp_path / "record.json").write_text("{")
    KeeperWatch(tmp_path, tmp_path).check(0.0)
    assert asked == []
