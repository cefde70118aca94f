"""``engines remove`` lists the servers that were started with the engine."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from vllm_console.cli import engines
from vllm_launchers.errors import RefusedError
from vllm_launchers.keeper import client
from vllm_launchers.keeper.records import Generation, LaunchSpec, ServerRecord, State
from vllm_launchers.vllm.engines import MARKER


def test_removing_an_engine_names_the_servers_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "vllm-console/engines/0.32.0-cpu"
    place.mkdir(parents=True)
    (place / MARKER).touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    records = [
        _record("chat", place / "bin/vllm"),
        _record("other", tmp_path / "vllm-console/engines/0.32.0/bin/vllm"),
    ]
    monkeypatch.setattr(client, "list_records", lambda _state: (records, []))
    args = argparse.Namespace(
        verb="remove", version="0.32.0-cpu", state=tmp_path, json=False, yes=False, read_only=False, config=None
    )
    with pytest.raises(RefusedError, match="It started chat, which can't be restarted without it"):
        engines._remove(args)
    assert place.is_dir()
    args.yes = True
    assert engines._remove(args) == 0
    assert "It started chat:" in capsys.readouterr().out
    assert not place.exists()


def _record(name: str, executable: Path) -> ServerRecord:
    spec = LaunchSpec((str(executable), "serve", "m"), "127.0.0.1", 8000)
    return ServerRecord(name, State.STOPPED, 0.0, 0.0, (Generation(1, spec, 0.0),))
