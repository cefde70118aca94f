"""What this machine knows about a model: from a folder, the Hugging Face cache, or a table and its name."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_launchers.vllm.modelfacts.facts import ModelFacts, ModelFactsError, Quantization
from vllm_launchers.vllm.modelfacts.read import model_facts


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No network access is allowed; for threads left by an earlier test it is only refused."""
    here, asked = threading.get_ident(), []

    def refuse(*words: object, **_: object) -> None:
        if threading.get_ident() == here:
            asked.append(words)
        raise OSError("there is no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    yield
    assert not asked, "the network was asked"


def read(model: str, tmp_path: Path, **more: Any) -> ModelFacts:
    """Facts read with a separate cache."""
    return model_facts(model, environ={"HF_HUB_CACHE": str(tmp_path / "hub"), "HOME": str(tmp_path)}, **more)


def test_model_folder(tmp_path: Path, make: Any) -> None:
    weights = make.safetensors({"a": ("BF16", 200), "b": ("BF16", 100)})
    folder = make.folder("model", {"config.json": make.config, "model.safetensors": weights})
    facts = read(str(folder), tmp_path)
    assert (facts.model, facts.source, facts.folder) == (str(folder), "folder", str(folder))
    assert (len(facts.layers), facts.kv_heads, facts.head_dim) == (2, 2, 16)
    assert facts.weight_bytes == len(weights)
    assert (facts.parameters, facts.bytes_to_download) == (150, 0)
    assert facts.files_missing == ()
    assert facts.missing == ()
    assert facts.gated is None


def test_folder_without_weights_is_reported(tmp_path: Path, make: Any) -> None:
    folder = make.folder("model-7b", {"config.json": make.config})
    facts = read(str(folder), tmp_path)
    assert facts.files_missing == ("*.safetensors",)
    assert facts.weight_bytes is None
    assert facts.parameters == facts.counted == 139_584  # the config is more reliable than the name
    assert "size of the weights, counted from its config" in facts.missing


def test_folder_with_only_an_index_has_the_size_of_the_index(tmp_path: Path, make: Any) -> None:
    files = {"config.json": make.config, "model.safetensors.index.json": make.index(3, 9000)}
    facts = read(str(make.folder("model-7b", files)), tmp_path)
    assert len(facts.files_missing) == 3
    assert (facts.weight_bytes, facts.size_from) == (9000, "model.safetensors.index.json")
    assert not any("size of the weights" in word for word in facts.missing)


def test_name_is_a_fallback_for_the_config(tmp_path: Path, make: Any) -> None:
    config = {name: value for name, value in make.config.items() if name != "intermediate_size"}
    facts = read(str(make.folder("model-7b", {"config.json": config})), tmp_path)
    assert (facts.counted, facts.parameters) == (None, 7_000_000_000)
    assert "size of the weights, taken from the name" in facts.missing


def test_dtype_comes_from_the_weights_if_not_in_the_config(tmp_path: Path, make: Any) -> None:
    config = {name: value for name, value in make.config.items() if name != "torch_dtype"}
    weights = make.safetensors({"a": ("F16", 200)})
    facts = read(str(make.folder("m", {"config.json": config, "model.safetensors": weights})), tmp_path)
    assert facts.dtype == "float16"
    assert facts.missing == ()


def test_mistral_and_model_optimizer_files(tmp_path: Path, make: Any) -> None:
    params = {"dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "vocab_size": 512}
    mistral = make.folder("mistral", {"params.json": params, "consolidated.safetensors": b"x" * 100})
    facts = read(str(mistral), tmp_path)
    assert (len(facts.layers), facts.kv_heads, facts.weight_bytes) == (3, 2, 100)
    quantized = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    files = {"config.json": make.config, "hf_quant_config.json": quantized, "model.safetensors": b"x"}
    assert read(str(make.folder("opt", files)), tmp_path).quantization == Quantization("modelopt", 8)


def test_gguf_file(tmp_path: Path, make: Any) -> None:
    make.folder(".", {"some-7b.gguf": b"GGUF" + b"x" * 46})
    facts = read(str(tmp_path / "some-7b.gguf"), tmp_path)
    assert (facts.source, facts.weight_bytes, facts.parameters) == ("folder", 50, 7_000_000_000)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"{", "not valid JSON"),
        (b"[1]", "holds no JSON object"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not valid JSON"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git-lfs pointer"),
        (b" " * (17 * 2**20), "longer than 16 MiB"),
    ],
    ids=["cut", "list", "binary", "deep", "huge number", "pointer", "long"],
)
@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json", "model.safetensors.index.json"])
def test_hostile_files_end_in_a_sentence(tmp_path: Path, make: Any, name: str, content: bytes, part: str) -> None:
    folder = make.folder("m", {"config.json": make.config, "model.safetensors": b"x", name: content})
    with pytest.raises(ModelFactsError) as caught:
        read(str(folder), tmp_path)
    assert part in str(caught.value)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_circular_links_and_non_files(tmp_path: Path, make: Any) -> None:
    folder = make.folder("m", {"config.json": make.config})
    (folder / "model.safetensors").symlink_to("model.safetensors")
    os.mkfifo(folder / "other.safetensors")
    (folder / "gone.safetensors").symlink_to("nowhere")
    (folder / "folder.safetensors").mkdir()
    assert read(str(folder), tmp_path).files_missing == ("*.safetensors",)
    circle = tmp_path / "circle"
    circle.mkdir()
    (circle / "config.json").symlink_to("config.json")
    with pytest.raises(ModelFactsError):
        read(str(circle), tmp_path)


@pytest.mark.parametrize("model", ["/nowhere/at/all", "./x", "~/models/x", "a/b/c", "a\0b", "/a\0b", "/x" * 3000, ""])
def test_invalid_model_ends_in_a_sentence(model: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFactsError, match="model"):
        read(model, tmp_path)


def test_unreadable_folder(tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make.folder("m", {"config.json": make.config})

    def refuse(_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ModelFactsError, match="Permission denied"):
        read(str(folder), tmp_path)


def test_cached_model(tmp_path: Path, make: Any) -> None:
    files = {"config.json": make.config, "model.safetensors": make.safetensors({"a": ("BF16", 80)})}
    folder = make.cached("org/some", files)
    facts = read("org/some", tmp_path)
    assert (facts.source, facts.folder) == ("cache", str(folder / "snapshots" / make.commit))
    assert (len(facts.layers), facts.parameters, facts.bytes_to_download) == (2, 40, 0)
    assert facts.files_missing == ()
    assert read("org/some", tmp_path, revision=make.commit).source == "cache"
    assert read("org/some", tmp_path, revision="v2").source == "table"
    assert read("org/some", tmp_path, revision="../../x").source == "table"


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"HF_HUB_CACHE": "{tmp}/a"}, "a"),
        ({"HUGGINGFACE_HUB_CACHE": "{tmp}/b"}, "b"),
        ({"HF_HUB_CACHE": "{tmp}/a", "HF_HOME": "{tmp}/c"}, "a"),
        ({"HF_HOME": "{tmp}/c"}, "c/hub"),
        ({"HF_HOME": "~/c"}, "c/hub"),
        ({"HF_HOME": "$HOME/c"}, "c/hub"),
        ({"XDG_CACHE_HOME": "{tmp}/d"}, "d/huggingface/hub"),
        ({}, ".cache/huggingface/hub"),
        ({"HF_HUB_CACHE": "", "HF_HOME": ""}, ".cache/huggingface/hub"),
    ],
)
def test_cache_location(tmp_path: Path, make: Any, environ: dict[str, str], folder: str) -> None:
    make.cached("org/some", {"config.json": make.config}, folder)
    given = {name: value.format(tmp=tmp_path) for name, value in environ.items()}
    assert model_facts("org/some", environ={**given, "HOME": str(tmp_path)}).source == "cache"


def test_interrupted_download(tmp_path: Path, make: Any) -> None:
    files = {"config.json": make.config, "model.safetensors.index.json": make.index(3, 9000)}
    make.cached("org/some", {**files, "model-00001-of-00003.safetensors": bytes(3000)})
    facts = read("org/some", tmp_path)
    assert facts.files_missing == ("model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors")
    assert (facts.weight_bytes, facts.bytes_to_download) == (9000, 6000)
    make.folder("hub/models--org--some/blobs", {"abc.incomplete": b"x" * 2000})
    assert read("org/some", tmp_path).bytes_to_download == 4000


def test_cached_config_without_weights(tmp_path: Path, make: Any) -> None:
    make.cached("org/some-8b", {"config.json": make.config})
    facts = read("org/some-8b", tmp_path)
    assert facts.source == "cache"
    assert facts.files_missing == ("*.safetensors",)
    assert (facts.weight_bytes, facts.bytes_to_download, facts.parameters) == (None, 279_168, 139_584)


def test_weights_in_a_separate_download_folder(tmp_path: Path, make: Any) -> None:
    make.cached("org/some", {"config.json": make.config})
    weights = make.safetensors({"a": ("BF16", 80)})
    make.cached("org/some", {"model.safetensors": weights}, "big")
    assert read("org/some", tmp_path).files_missing
    facts = read("org/some", tmp_path, download_dir=str(tmp_path / "big"))
    assert facts.files_missing == ()
    assert facts.weight_bytes == len(weights)
    assert len(facts.layers) == 2


def test_broken_cache_is_ignored(tmp_path: Path, make: Any) -> None:
    make.cached("org/some", {"config.json": make.config})
    make.folder("hub/models--org--some/refs", {"main": "../../../etc"})
    assert read("org/some", tmp_path).source == "table"
    make.folder("hub/models--org--some/refs", {"main": "f" * 40})
    assert read("org/some", tmp_path).source == "table"


def test_modelscope_is_reported_as_not_read(tmp_path: Path, make: Any) -> None:
    make.cached("org/some", {"config.json": make.config})
    environ = {"HF_HUB_CACHE": str(tmp_path / "hub"), "VLLM_USE_MODELSCOPE": "True"}
    facts = model_facts("org/some", environ=environ)
    assert facts.source == "table"
    assert any("ModelScope" in word for word in facts.missing)


def test_model_that_is_not_local(tmp_path: Path) -> None:
    known = read("Qwen/Qwen3-8B-AWQ", tmp_path)
    assert (known.source, len(known.layers), known.kv_heads, known.max_context) == ("table", 36, 8, 40960)
    assert known.quantization == Quantization("awq", 4, 128)
    assert any("not cached locally" in word for word in known.missing)
    assert known.bytes_to_download == 8_190_735_360 // 2
    assert read("openai/gpt-oss-20b", tmp_path).bytes_to_download == 13_761_264_768
    named = read("org/unheard-13B-GPTQ", tmp_path)
    assert (named.parameters, named.layers) == (13_000_000_000, ())
    assert named.bytes_to_download == 6_500_000_000
    assert named.missing == ("its config (not cached locally)",)
    assert any("size" in word for word in read("org/unheard", tmp_path).missing)
    assert read("org/unheard", tmp_path).bytes_to_download is None
    assert any("remote" in word for word in read("s3://bucket/some-7b", tmp_path).missing)


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt", "tekken.json", "spiece.model", "qwen.tiktoken"])
def test_folder_without_a_tokenizer(make: Any, name: str) -> None:
    files = {"config.json": make.config, "model.safetensors": make.safetensors({"a": ("BF16", 2000)})}
    folder = make.folder("model-7b", files)
    assert model_facts(str(folder)).tokenizer_missing
    make.folder("model-7b", {name: "{}"})
    assert not model_facts(str(folder)).tokenizer_missing
