"""Commands that name servers and runs of an attached machine are run there, without the machine's name."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from vllm_console.cli.elsewhere import run_elsewhere
from vllm_console.cli.main import parse
from vllm_console.fleet.remote_hosts import RemoteHost, write_hosts
from vllm_launchers.errors import OperationError


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An attached machine that prints the command."""

    def argv(self: RemoteHost, words: Sequence[str], *, terminal: bool = False) -> list[str]:
        return [sys.executable, "-c", "import sys; print(*sys.argv[1:])", *words]

    monkeypatch.setattr(RemoteHost, "argv", argv)
    write_hosts(tmp_path, [RemoteHost("gpubox", "gpubox"), RemoteHost("other", "other")])
    return tmp_path


@pytest.mark.parametrize(
    ("words", "there"),
    [
        ("status gpubox/chat", "status chat"),
        ("load gpubox/chat --from-requests gpubox/chat@3", "load chat --from-requests chat@3"),
        ("load --from-requests=gpubox/chat@3 gpubox/chat", "load --from-requests=chat@3 chat"),
        ("load gpubox/chat --from-requests chat@3", "load chat --from-requests chat@3"),
    ],
)
def test_command_is_run_there(state: Path, capsys: pytest.CaptureFixture[str], words: str, there: str) -> None:
    assert run_elsewhere(parse(["--state", str(state), *words.split()])) == 0
    assert capsys.readouterr().out == f"{there}\n"


@pytest.mark.parametrize(
    ("words", "not_there"),
    [
        ("load gpubox/chat --from-requests other/chat@3", "other/chat@3"),
        ("load chat --from-requests gpubox/chat@3", "chat"),
        ("chat chat --also gpubox/chat", "chat"),
    ],
)
def test_command_about_two_machines_is_refused(state: Path, words: str, not_there: str) -> None:
    with pytest.raises(OperationError, match=f"^{not_there} is not on gpubox: a command can only run on one machine$"):
        run_elsewhere(parse(["--state", str(state), *words.split()]))
