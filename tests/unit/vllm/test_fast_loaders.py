"""Which fast load formats an installation can use for a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.fast_loaders import fast_loaders
from vllm_launchers.vllm.flags.flag_table import FlagSpec, ValueKind

WORDS = ("auto", "runai_streamer", "fastsafetensors", "tensorizer")

Names = Callable[..., list[str]]


@pytest.fixture
def usable(tmp_path: Path) -> Names:
    """The formats for a model with some files and packages in vLLM's environment."""
    packages = tmp_path / "env/lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    python = tmp_path / "env/bin/python"
    python.parent.mkdir()
    python.touch()
    model = tmp_path / "model"
    model.mkdir()

    def names(
        *installed: str,
        files: tuple[str, ...] = ("model.safetensors",),
        words: tuple[str, ...] = WORDS,
        build: str = "cuda",
        flags: dict[str, object] | None = None,
    ) -> list[str]:
        for name in installed:
            (packages / f"{name}-1.0.dist-info").mkdir(exist_ok=True)
        for name in files:
            (model / name).touch()
        engine = Engine(EngineKind.VLLM, (str(python),), "0.33.0", build, str(python))
        spec = FlagSpec("load-format", ValueKind.TEXT, words=words)
        found = fast_loaders(engine, spec, str(model), flags or {}, {})  # type: ignore[arg-type]
        assert all(loader.tradeoff for loader in found)
        return [loader.name for loader in found]

    return names


def test_loader_needs_its_package_and_vllm_support(usable: Names) -> None:
    assert usable() == []
    assert usable("fastsafetensors") == ["fastsafetensors"]
    assert usable("runai_model_streamer") == ["runai_streamer", "fastsafetensors"]
    assert usable(words=("auto", "fastsafetensors")) == ["fastsafetensors"]
    assert usable(build="cpu") == []
    assert usable(flags={"load-format": "dummy"}) == []


def test_loader_needs_a_model_in_its_format(usable: Names) -> None:
    assert usable("runai_model_streamer", "tensorizer", files=("pytorch_model.bin",)) == []
    assert usable(files=("model.tensors",)) == ["tensorizer"]
    assert usable(files=(), flags={"tensor-parallel-size": 2}) == []


def test_loader_that_reads_all_files_is_not_offered_for_weights_stored_twice(usable: Names) -> None:
    assert usable("runai_model_streamer", files=("consolidated.safetensors",)) == ["runai_streamer"]
    assert usable("fastsafetensors", files=("model-00001-of-00002.safetensors",)) == ["fastsafetensors"]
