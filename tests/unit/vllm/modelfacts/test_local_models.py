"""Models on this machine, listed without the network and within bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_launchers.vllm.modelfacts import local
from vllm_launchers.vllm.modelfacts.facts import Quantization
from vllm_launchers.vllm.modelfacts.local import LocalModels, local_models


def listed(tmp_path: Path, *folders: Path) -> LocalModels:
    return local_models([str(folder) for folder in folders], {"HF_HUB_CACHE": str(tmp_path / "hub"), "HOME": "/none"})


def whole(make: Any, **more: Any) -> dict[str, Any]:
    return {"config.json": {**make.config, **more}, "model.safetensors": make.safetensors({"a": ("BF16", 3000)})}


def test_cached_models_with_size_precision_parameters_and_context(tmp_path: Path, make: Any) -> None:
    files = whole(make, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 128})
    make.cached("org/Model-AWQ", files)
    make.cached("org/plain", whole(make))
    found = listed(tmp_path)
    assert [one.model for one in found.models] == ["org/Model-AWQ", "org/plain"]
    quantized, plain = found.models
    assert quantized.facts is not None
    assert (quantized.place, quantized.facts.quantization) == ("cache", Quantization("awq", 4, 128))
    assert quantized.disk_bytes is not None
    assert quantized.disk_bytes >= 3000
    assert plain.facts is not None
    assert (plain.facts.parameters, plain.facts.max_context) == (1500, 4096)
    assert found.problems == ()


def test_incomplete_model_is_reported_and_listed_last(tmp_path: Path, make: Any) -> None:
    make.cached("a/tokenizer", {"tokenizer.json": "{}"})
    make.cached("b/half", {"config.json": make.config, "model.safetensors.index.json": make.index(3, 9000)})
    make.cached("c/whole", whole(make))
    found = listed(tmp_path).models
    assert [(one.model, one.problem) for one in found] == [
        ("b/half", "3 weight files missing: its download is not finished"),
        ("c/whole", ""),
        ("a/tokenizer", "no config.json in the cache: vLLM would download it"),
    ]
    assert found[-1].facts is None


def test_model_folders_and_folders_of_models(tmp_path: Path, make: Any) -> None:
    one = make.folder("single", whole(make))
    make.folder("many/org/name", whole(make))
    make.folder("many/flat", whole(make))
    make.folder("many/.hidden", whole(make))
    make.folder("many/a/b/too-deep", whole(make))
    make.folder("many/other", {"readme.md": "x", "w.gguf": b"GGUF"})
    make.cached("org/cached", whole(make), hub="many/shared")
    found = listed(tmp_path, one, tmp_path / "many")
    names = [Path(model.model).relative_to(tmp_path).as_posix() for model in found.models]
    snapshot = f"many/shared/models--org--cached/snapshots/{make.commit}"
    assert sorted(names) == sorted(["single", "many/flat", "many/org/name", "many/other/w.gguf", snapshot])
    assert all(model.place == "folder" for model in found.models)


def test_missing_folder_is_named_and_others_are_listed(tmp_path: Path, make: Any) -> None:
    make.cached("org/whole", whole(make))
    found = listed(tmp_path, tmp_path / "gone")
    assert len(found.models) == 1
    assert found.problems == (f"models: {tmp_path / 'gone'} is not a folder",)


def test_unreadable_config_affects_only_its_model(tmp_path: Path, make: Any) -> None:
    make.folder("many/good", whole(make))
    make.folder("many/bad", {"config.json": "{not json", "model.safetensors": b""})
    good, bad = listed(tmp_path, tmp_path / "many").models
    assert good.facts is not None
    assert (bad.facts, "config.json is not valid JSON" in bad.problem) == (None, True)


def test_number_of_models_and_names_is_limited(tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(8):
        make.folder(f"many/m{number}", whole(make))
    monkeypatch.setattr(local, "MOST_MODELS", 5)
    found = listed(tmp_path, tmp_path / "many")
    assert len(found.models) == 5
    assert found.problems == ("more than 5 models: the others are not listed",)
    monkeypatch.setattr(local, "MOST_ENTRIES", 3)
    found = listed(tmp_path, tmp_path / "many")
    assert len(found.models) == 3
    assert "more than 3 entries" in found.problems[0]
    monkeypatch.setattr(local, "MOST_ENTRIES", 100)
    monkeypatch.setattr(local, "MOST_FOLDERS", 4)  # including the top folder
    found = listed(tmp_path, tmp_path / "many")
    assert len(found.models) == 3
    assert "more than 4 folders" in found.problems[0]


def test_circular_link_terminates(tmp_path: Path, make: Any) -> None:
    folder = make.folder("many/org", {})
    (folder / "again").symlink_to(tmp_path / "many")
    make.folder("many/org/name", whole(make))
    assert len(listed(tmp_path, tmp_path / "many").models) >= 1


def test_link_to_a_parent_folder_lists_no_model_twice(tmp_path: Path, make: Any) -> None:
    make.folder("many/name", whole(make))
    (tmp_path / "many" / "again").symlink_to(tmp_path / "many")
    assert [Path(one.model).name for one in listed(tmp_path, tmp_path / "many").models] == ["name"]


@pytest.mark.parametrize("data", [b"abc", b"", (2**63).to_bytes(8, "little") + b"{}", b"x" * 50])
def test_invalid_weight_files_are_reported(tmp_path: Path, make: Any, data: bytes) -> None:
    make.folder("many/one", {"config.json": make.config, "model.safetensors": data})
    make.folder("many/two", {"w.gguf": data})
    one, two = listed(tmp_path, tmp_path / "many").models
    assert one.problem == "model.safetensors is not a safetensors file; fetch it again"
    assert two.problem.endswith("w.gguf is not a GGUF file: it does not begin with 'GGUF'; fetch it again")
    assert (one.facts, two.facts) == (None, None)
