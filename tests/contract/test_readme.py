"""The README says what the program says."""

from __future__ import annotations

from pathlib import Path

from vllm_console.cli.main import COMMANDS
from vllm_console.ui.readme_keys import with_keys

README = Path(__file__).parents[2] / "README.md"


def test_the_table_of_keys_is_current() -> None:
    text = README.read_text()
    assert with_keys(text) == text, "run: python -m vllm_console.ui.readme_keys README.md"
    assert "`[`" in text


def test_every_command_is_named() -> None:
    text = README.read_text()
    for command in COMMANDS:
        assert f"`{command}" in text, command
