"""Help is as wide as the terminal, without loading the module that argparse would use for that."""

from __future__ import annotations

import shutil

import pytest

from vllm_console.cli import main


@pytest.mark.parametrize("columns", ["", "0", "wide", "60"])
def test_help_width_matches_python(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main._columns() == shutil.get_terminal_size().columns


def test_command_help_keeps_to_the_width(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    with pytest.raises(SystemExit):
        main.parse(["start", "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert 60 < max(map(len, lines)) <= 70
