"""Reading the records of all servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_launchers.keeper import client
from vllm_launchers.launch.server_records import ServerRecords


def test_server_removed_while_records_are_read_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "names", lambda _state: ["removed"])
    assert ServerRecords(tmp_path).read() == ([], [])
