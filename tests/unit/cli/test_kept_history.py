"""``remove`` and ``detach`` say that the history is kept and how to see it."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest

from vllm_console.cli import attach, stop


@pytest.mark.parametrize("command", ["removed", "detached"])
def test_replay_of_kept_history_is_named(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = SimpleNamespace(forget=lambda name, purge: True, attached=SimpleNamespace(detach=lambda name: True))
    for module in (attach, stop):
        monkeypatch.setattr(module, "open_fleet", lambda args, **options: fleet)
    args = argparse.Namespace(name="chat", json=False, purge=False)
    assert (stop.run_remove if command == "removed" else attach.run_detach)(args) == 0
    output = capsys.readouterr().out
    assert output == f"chat: {command}; 'vllm-console replay chat' shows its newest run, for 30 days\n"
