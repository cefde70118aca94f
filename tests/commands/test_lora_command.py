"""lora: adapters of a simulated server, which has vLLM's runtime routes. The JSON is a contract."""

from __future__ import annotations

import json

import httpx
import pytest

from vllm_launchers.vllm.model_folder import RUNTIME_LORA

ROUTES = ("--env", f"{RUNTIME_LORA}=true")


def start(program, *words):
    return program.json("start", "chatbot", "--engine", "simulated", "--name", "chat", "--no-warm-up", "--wait", *words)


@pytest.fixture
def adapter(tmp_path):
    def make(name, rank, **more):
        folder = tmp_path / name
        folder.mkdir()
        config = {"r": rank, "base_model_name_or_path": "Qwen/Qwen3-8B-AWQ", **more}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        (folder / "adapter_model.safetensors").write_bytes(bytes(1000))
        return str(folder)

    return make


def test_adapter_is_loaded_used_listed_and_unloaded(program, adapter):
    port = start(program, "--set", "enable-lora=true", *ROUTES)["port"]
    path = adapter("poems", 8)
    loaded = program.json("lora", "load", "chat", "poems", path)
    assert {**loaded, "notes": len(loaded["notes"])} == {"server": "chat", "name": "poems", "path": path, "notes": 1}
    body = {"model": "poems", "prompt": "one two", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()  # closing it would end the request
        next(lines)
        busy = program.json("lora", "list", "chat")
    assert busy == {
        "server": "chat", "enabled": True, "updates": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": 16,
        "adapters": [{
            "name": "poems", "path": path, "base_model": "Qwen/Qwen3-8B-AWQ", "rank": 8, "size": 1000,
            "running": True, "waiting": False,
        }],
    }  # fmt: skip
    other = program.json("lora", "load", "chat", "other", adapter("other", 16, base_model_name_or_path="a/b"))
    assert other["notes"][0] == "it was trained on a/b, and chat serves Qwen/Qwen3-8B-AWQ"
    assert "--max-cpu-loras" in other["notes"][1]

    too_high = program("lora", "load", "chat", "high", adapter("high", 48))
    assert (too_high.returncode, "--set max-lora-rank=64" in too_high.stderr) == (4, True)
    assert program("lora", "load", "chat", "poems", path).returncode == 4
    assert program("lora", "load", "chat", "new", path + "/nowhere").returncode == 2
    assert program("lora", "load", "chat", "dora", adapter("dora", 8, use_dora=True)).returncode == 2
    refused = program("--read-only", "lora", "unload", "chat", "poems")
    assert (refused.returncode, "read-only" in refused.stderr) == (4, True)

    program.json("lora", "unload", "chat", "poems")
    assert program("lora", "unload", "chat", "poems").returncode == 3
    assert [one["name"] for one in program.json("lora", "list", "chat")["adapters"]] == ["other"]


def test_suggested_restart_enables_lora(program, adapter):
    start(program)
    path = adapter("poems", 8)
    refused = program("lora", "load", "chat", "poems", path)
    assert refused.returncode == 4
    words = refused.stderr.split("vllm-console restart ")[1].split()
    assert words == ["chat", "--set", "enable-lora=true", *ROUTES]
    assert program.json("lora", "list", "chat")["enabled"] is False
    assert "lora_adapter" not in program("logs", "chat").stdout, "it is not asked"

    program.json("restart", "chat", "--set", "enable-lora=true", "--wait")
    refused = program("lora", "load", "chat", "poems", path)
    assert (refused.returncode, f"restart chat --env {RUNTIME_LORA}=true" in refused.stderr) == (4, True)
    program.json("restart", "chat", *ROUTES, "--wait")
    program.json("lora", "load", "chat", "poems", path)
