"""The benchmark that compares the budget with real startups, run on a folder of test data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[3] / "benchmarks" / "budget_accuracy.py"

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
START = {
    "vllm_version": "0.19.0",
    "model": "made/up-1B",
    "gpu": "2x RTX A6000",
    "n_gpus_tp": 2,
    "max_model_len": 1024,
    "model_load_gib": 1.0,
    "available_kv_gib": 40.0,
    "max_concurrency": 40960.0,
    "bytes_per_token_expected": 1024,
    "model_config": "model_configs/one.json",
}


def test_benchmark_prints_its_four_values(tmp_path: Path) -> None:
    (tmp_path / "model_configs").mkdir()
    (tmp_path / "model_configs" / "one.json").write_text(json.dumps(CONFIG))
    unsaid = {**START, "vllm_version": None, "gpu": None, "available_kv_gib": None, "max_concurrency": None}
    (tmp_path / "startups.jsonl").write_text(f"{json.dumps(START)}\n{json.dumps(unsaid)}\n")
    done = subprocess.run(
        [sys.executable, PROGRAM, tmp_path, "--json"], capture_output=True, text=True, timeout=60, check=True
    )
    figures = json.loads(done.stdout)
    assert figures["bytes per token, exact"] == "2 of 2"
    assert figures["concurrency, KV GiB given, plain"].endswith("worst 0.00%  n=1")
    assert figures["KV GiB, weights' size known"].endswith("n=1")
    assert figures["concurrency, KV GiB given, sliding"] == "nothing to compare"
