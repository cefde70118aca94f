"""``models get``, ``remove`` and ``search`` with a local hub."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from fakes.hub import COMMIT, FakeHub, sha256

CONFIG = json.dumps({
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,
    "num_hidden_layers": 2, "vocab_size": 375, "intermediate_size": 128, "max_position_embeddings": 4096,
}).encode()  # fmt: skip
WEIGHTS = (2).to_bytes(8, "little") + b"{}" + bytes(range(256)) * 40_000
FILES = {"config.json": CONFIG, "model.safetensors": WEIGHTS, "pytorch_model.bin": b"the same once more"}


def hub_env(program: Any, hub: FakeHub) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(program.home / "hf"), "HF_HUB_OFFLINE": "0", "PYTHONPATH": ""}


def test_model_is_downloaded_verified_listed_and_removed(program: Any) -> None:
    with FakeHub({"org/tiny": FILES, "org/other": FILES}) as hub:
        env = hub_env(program, hub)
        asked = program("models", "get", "org/tiny", env=env)
        assert asked.returncode == 4, asked.stderr
        assert "--yes" in asked.stderr
        assert not hub.got.count("model.safetensors")
        got = program.json("models", "get", "org/tiny", "--yes", env=env)
        assert (got["revision"], got["downloaded_bytes"]) == (COMMIT, len(CONFIG) + len(WEIGHTS))
        assert "pytorch_model.bin" not in hub.got
        again = program.json("models", "get", "org/tiny", "--yes", env=env)
        assert again["downloaded_bytes"] == 0
        assert hub.got.count("model.safetensors") == 1
        lines = program("models", "get", "org/tiny", "--yes", env=env).stdout.splitlines()
        assert lines[-2:] == [f"org/tiny: every file verified, {lines[1].split(', ')[1]}",
                             "  vllm-console start PRESET --model org/tiny"]  # fmt: skip
        (listed,) = program.json("models", env=env)
        assert (listed["model"], listed["max_context"], listed["problem"]) == ("org/tiny", 4096, None)
        assert [one["model"] for one in program.json("models", "search", "tiny", env=env)] == ["org/tiny"]
        refused = program("--read-only", "models", "remove", "org/tiny", "--yes", env=env)
        assert refused.returncode == 4
        removed = program.json("models", "remove", "org/tiny", "--yes", env=env)
        assert removed["freed_bytes"] >= len(WEIGHTS)
        assert program.json("models", env=env) == []
        assert program("models", "remove", "org/tiny", "--yes", env=env).returncode == 3


def test_file_with_wrong_checksum_is_deleted(program: Any) -> None:
    with FakeHub({"org/tiny": FILES}, corrupt=True) as hub:
        env = hub_env(program, hub)
        answer = program("models", "get", "org/tiny", "--yes", env=env)
        assert answer.returncode == 1
        assert "model.safetensors does not have the size and checksum" in answer.stderr
        assert not list((program.home / "hf").rglob("model.safetensors"))
        hub.corrupt = False
        assert program("models", "get", "org/tiny", "--yes", env=env).returncode == 0


def test_model_code_is_downloaded_only_on_request_and_never_run(program: Any) -> None:
    ran = program.home / "ran"
    code = f"open({str(ran)!r}, 'w')\n".encode()
    files = {
        "config.json": CONFIG[:-1] + b', "auto_map": {"AutoModel": "m.A"}}',
        "m.py": code,
        "sitecustomize.py": code,
    }
    with FakeHub({"org/coded": files}) as hub:
        env = hub_env(program, hub)
        got = program.json("models", "get", "org/coded", "--yes", "--with-code", env=env)
        assert (got["code"], [one["name"] for one in got["files"]]) == (True, list(files))
        assert program.json("models", env=env)
    assert not ran.exists()


def test_interrupted_download_keeps_complete_files(program: Any) -> None:
    files = {**FILES, "model.safetensors": WEIGHTS * 3}  # written to the disk in parts of 10 MB
    with FakeHub({"org/tiny": files}, hold_after=22_000_000) as hub:
        env = hub_env(program, hub)
        words = [sys.executable, "-m", "vllm_console", "models", "get", "org/tiny", "--yes"]
        child = subprocess.Popen(
            words, env={**program.env, **env}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        assert hub.held.wait(60)
        blobs = program.home / "hf/hub/models--org--tiny/blobs"
        while sum(path.stat().st_size for path in blobs.glob("*incomplete")) < 1_000_000:
            assert child.poll() is None
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 130
        hub.released.set()
        assert program("models", "get", "org/tiny", "--yes", env=env).returncode == 0
        # The first run looked into it and downloaded it; the second found it in the cache.
        assert hub.got.count("config.json") == 2
        assert not list(blobs.glob("*incomplete"))


def test_partial_files_are_deleted_after_completed_download(program: Any) -> None:
    with FakeHub({"org/tiny": FILES}) as hub:
        blobs = program.home / "hf/hub/models--org--tiny/blobs"
        blobs.mkdir(parents=True)
        ours = blobs / f"{sha256(FILES['model.safetensors'])}.c285aba4.incomplete"
        other = blobs / f"{'0' * 64}.c285aba4.incomplete"
        for part in (ours, other):
            part.write_bytes(b"a part")
        assert program("models", "get", "org/tiny", "--yes", env=hub_env(program, hub)).returncode == 0
        assert (ours.exists(), other.exists()) == (False, True)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["org/none"], "is not on the hub"),
        (["org/gated"], "access is not granted"),
        (["org/tiny", "--revision", "v9"], "has no revision 'v9'"),
        (["org/evil"], "leads out of the cache"),
        (["org/coded"], "Python code of its own"),
        (["org/tokenized"], "Python code of its own"),
        (["org/clash"], "is a file too"),
        (["org/bloated"], "too large to be a model's settings"),
        (["../../etc"], "is not a hub id"),
        (["org/\x1b[2Jx"], "is not a hub id"),
        (["org/vast"], "free some"),
    ],
)
def test_failed_download_prints_one_line(program: Any, words: list[str], sentence: str) -> None:
    models = {
        "org/tiny": FILES, "org/gated": FILES, "org/evil": {"../../out": b"x", "config.json": CONFIG},
        "org/coded": {**FILES, "config.json": b'{"auto_map": {}}', "m.py": b"raise SystemExit"}, "org/vast": FILES,
        "org/tokenized": {**FILES, "tokenizer_config.json": b'{"auto_map": {"AutoTokenizer": ["t.T", null]}}'},
        "org/clash": {**FILES, "a": b"a file", "a/b.json": b"{}"},
        "org/bloated": {**FILES, "config.json": b"{" + b" " * 2**24 + b"}"},
    }  # fmt: skip
    with FakeHub(models, gated={"org/gated"}) as hub:
        hub.claimed_bytes = 10**15 if words == ["org/vast"] else None
        answer = program("models", "get", *words, "--yes", env=hub_env(program, hub))
    assert answer.returncode in ((2,) if "not a hub id" in sentence else (1, 4))
    assert sentence in answer.stderr
    assert " 0.0 GiB" not in answer.stderr
    assert answer.stderr.count("\n") == 1
    assert "\x1b" not in answer.stderr
    assert "Traceback" not in answer.stderr
    assert not list(program.home.rglob("*.safetensors"))
    assert not list(program.home.rglob("out"))


def test_offline_prints_one_line(program: Any) -> None:
    for env, sentence in (
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ({"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}, "does not answer"),
    ):
        for words in (["get", "org/tiny"], ["search", "tiny"]):
            answer = program("models", *words, "--yes", env={**env, "HF_HOME": str(program.home / "hf")})
            assert answer.returncode == 1
            assert sentence in answer.stderr
            assert answer.stderr.count("\n") == 1


def test_gguf_files_are_not_offered_for_start(program: Any) -> None:
    with FakeHub({"org/ggufs": {"a-Q4_K_M.gguf": b"GGUF", "README.md": b"about"}}) as hub:
        env = hub_env(program, hub)
        got = program("models", "get", "org/ggufs", "--yes", env=env)
        assert got.returncode == 0, got.stderr
        assert "without one vLLM needs a plugin" in got.stdout
        assert "start PRESET" not in got.stdout
        (listed,) = program.json("models", env=env)
        assert "GGUF files alone" in listed["problem"]
        assert listed["last_used"] is None
