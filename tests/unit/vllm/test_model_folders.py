"""A model given as a folder is checked before vLLM starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_launchers.vllm.model_folder import model_folder_problem


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B-AWQ", "gpt2", "s3://bucket/model", "org/name.v1-2"])
def test_non_folder_is_accepted(model: str) -> None:
    assert model_folder_problem(model) is None


def test_model_folder_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "x.gguf").write_bytes(b"")
    assert model_folder_problem(str(tmp_path)) is None
    assert model_folder_problem(str(tmp_path / "x.gguf")) is None


def test_invalid_model_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "config.json").write_text("{}")
    (tmp_path / "file.txt").write_text("x")
    for model, part in {
        str(tmp_path / "gone"): "no such folder",
        str(tmp_path / "empty"): "no config.json",
        str(tmp_path): f"did you mean {tmp_path / 'cut'}?",
        str(tmp_path / "cut"): "no weights",
        str(tmp_path / "file.txt"): "is a file",
        "./cut": "write the whole path",
        "~/models/x": "does not know '~'",
        "a/b/c": "neither a folder here nor a hub id",
    }.items():
        problem = model_folder_problem(model)
        assert problem is not None
        assert part in problem
        assert problem.startswith("model ")
