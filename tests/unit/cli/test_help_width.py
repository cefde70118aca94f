"""Help is as wide as the terminal, found without the module that argparse would load for it."""

from __future__ import annotations

import shutil

import pytest

from vllm_console.cli import main


@pytest.mark.parametrize("columns", ["", "0", "wide", "60"])
def test_it_is_as_wide_as_python_says(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main._columns() == shutil.get_terminal_size().columns


def test_help_of_a_command_keeps_to_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    with pytest.raises(SystemExit):
        main.parse(["start", "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert 60 < max(map(len, lines)) <= 70
