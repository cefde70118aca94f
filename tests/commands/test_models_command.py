"""``vllm-console models``: models in the cache and in named folders, and what fits."""

from __future__ import annotations

import json
from pathlib import Path


def make_model(folder: Path, layers: int = 32) -> None:
    """Make a folder like that of an 8B model; weights are sparse files."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": layers, "vocab_size": 128256,
        "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    name = "model-00001-of-00001.safetensors"
    total = 500_000_000 * layers
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": {"lm_head.weight": name}})
    )
    with (folder / name).open("wb") as file:
        file.write((2).to_bytes(8, "little") + b"{}")
        file.truncate(total)  # sparse files take no disk space


def test_models_are_listed_with_plan(program, tmp_path):
    make_model(tmp_path / "models/org/eight")
    make_model(tmp_path / "models/org/large", layers=300)
    config = tmp_path / "config/vllm-console/config.toml"
    config.parent.mkdir(parents=True)
    config.write_text(f'models = ["{tmp_path / "models"}", "{tmp_path / "gone"}"]\n')
    eight, large = program.json("models")
    assert eight["model"] == str(tmp_path / "models/org/eight")
    assert (eight["place"], eight["max_context"], eight["quantization"]) == ("folder", 131_072, None)
    assert "fits" not in eight
    planned = program.json("--host", "4xa6000", "models", "--fits", "chatbot", "--gpus", "1")
    assert [one["fits"] for one in planned] == [True, False]
    assert planned[0]["kv_tokens"] > 10_000
    assert large["model"] == planned[1]["model"]
    told = program("--host", "4xa6000", "models", "--fits", "chatbot", "--gpus", "1")
    assert "too large" in told.stdout
    assert "On GPU 1: eight." in told.stdout
    assert [one["gpus"] for one in planned] == [[1], []]
    assert "is not a folder" in told.stderr
    assert program("models", "--fits", "nothing").returncode == 3
