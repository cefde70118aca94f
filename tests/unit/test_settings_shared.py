"""Whether vLLM checks launches automatically: not on a machine that is shared according to the settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_console import settings
from vllm_console.settings import read_settings


@pytest.mark.parametrize(
    ("text", "prepares"),
    [
        ("", True),
        ('board = "/srv/board"', False),
        ('shares = { 0 = "50 %" }', False),
        ('reserve = { 0 = "4 GiB" }', False),
        ('board = "/srv/board"\nprepare_launches = "on"', True),
        ('prepare_launches = "off"', False),
    ],
)
def test_board_or_share_disables_prepared_launches(tmp_path: Path, text: str, prepares: bool) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    assert read_settings(path).prepares_launches is prepares


def test_administrators_board_or_share_has_the_same_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_administrators", lambda *_lists: {"models": ["/data"]})
    path = tmp_path / "config.toml"
    path.write_text("")
    assert read_settings(path).prepares_launches is False
    path.write_text('prepare_launches = "on"')
    assert read_settings(path).prepares_launches is True
