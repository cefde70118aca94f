from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_launchers.presets.load import PresetError, read_presets
from vllm_launchers.presets.model import Preset

Write = Callable[..., Path]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    folder = tmp_path / "presets"
    folder.mkdir()
    return folder


@pytest.fixture
def write(own: Path) -> Write:
    """Write a user's preset: ``write("mine", "extends = …")``."""

    def write(name: str, text: str) -> Path:
        path = own / f"{name}.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def read(own: Path) -> Callable[[], tuple[dict[str, Preset], list[PresetError]]]:
    return lambda: read_presets(own)


@pytest.fixture
def complaint(own: Path, write: Write) -> Callable[[str], str]:
    """The first error of a preset with that text; the shipped presets must not be affected."""

    def complaint(text: str) -> str:
        path = write("mine", text)
        presets, problems = read_presets(own)
        assert {"chatbot", "code-generation", "long-document", "batch"} == set(presets)
        assert {problem.path for problem in problems} == {path}
        assert str(problems[0]).startswith(f"{path}: ")
        assert "\n" not in str(problems[0])
        return str(problems[0]).removeprefix(f"{path}: ")

    return complaint
