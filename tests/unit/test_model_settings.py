"""``models`` in the config file: folders with models."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_console import settings
from vllm_console.settings import ConfigError, read_settings


def read(folder: Path, text: str) -> tuple[str, ...]:
    path = folder / "config.toml"
    path.write_text(text)
    return read_settings(path).models


def test_folders_are_absolute_or_in_the_home_folder(tmp_path: Path) -> None:
    assert read(tmp_path, "") == ()
    assert read(tmp_path, 'models = ["/data/models", "~/models"]') == ("/data/models", "~/models")
    with pytest.raises(ConfigError, match=r"models: 'models' is not an absolute path"):
        read(tmp_path, 'models = ["/data", "models"]')


def test_administrators_folders_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_administrators", lambda _notices: {"models": ["/data", "/shared"]})
    assert read(tmp_path, 'models = ["~/own", "/data"]') == ("~/own", "/data", "/shared")
