"""``vllm-console plan``: JSON, exit codes, exports, and the same checks at start."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path

import pytest

from vllm_console.cli.main import main
from vllm_launchers.host import environment
from vllm_launchers.host.ports import PortUse

KEYS = {"argv", "env", "gpus", "port", "memory", "choices", "findings"}
MEMORY = {"weights_gib", "overhead_gib", "kv_gib", "kv_bytes_per_token", "kv_tokens", "max_concurrency", "per_gpu"}
HOSTS = ("1xrtx4090", "2xrtx3090", "4xa6000", "8xh100", "8xl40s")
RELEASE = ("--vllm-version", "0.33.0")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder like that of an 8B model; weights are sparse files."""
    folder = tmp_path / "eight"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256,
        "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    name = "model-00001-of-00001.safetensors"
    index = {"metadata": {"total_size": 16_060_522_496}, "weight_map": {"lm_head.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with (folder / name).open("wb") as file:
        file.truncate(16_060_522_496)  # sparse files take no disk space
    return folder


def codes(document: dict[str, object], level: str = "error") -> list[str]:
    return [found["code"] for found in document["findings"] if found["level"] == level]  # type: ignore[index, attr-defined]


@pytest.mark.parametrize("host", HOSTS)
def test_json_document(program, model: Path, host: str):
    document = program.json("plan", "chatbot", "--host", host, *RELEASE, "--model", str(model), "--gpus", "auto")
    assert set(document) >= KEYS
    assert set(document["memory"]) >= MEMORY
    assert document["argv"][1:3] == ["serve", str(model)]
    assert document["gpus"]
    assert document["env"]["CUDA_VISIBLE_DEVICES"]
    eight_bit = document["flags"].get("kv-cache-dtype") == "fp8"
    assert document["memory"]["kv_bytes_per_token"] == (65_536 if eight_bit else 131_072) / document["flags"].get(
        "tensor-parallel-size", 1
    )
    assert document["memory"]["max_concurrency"] >= 1
    assert len(document["memory"]["per_gpu"]) == len(document["gpus"])
    assert {"flag", "value", "reason", "source"} <= set(document["choices"][0])
    assert codes(document) == []


def test_plan_for_two_nodes(program, model: Path):
    words = ("plan", "chatbot", "--host", "2xrtx3090", *RELEASE, "--model", str(model), "--gpus", "0,1")
    assert program.json(*words)["nodes"] is None
    document = program.json(*words, "--nodes", "2", "--network", "100")
    nodes = document["nodes"]
    assert (nodes["count"], nodes["gpus_per_node"], nodes["master_addr"], nodes["across_nodes"]) == (
        2,
        2,
        None,
        "pipeline",
    )
    assert [(node["rank"], node["headless"], len(node["per_gpu"])) for node in nodes["per_node"]] == [
        (0, False, 2), (1, True, 2),
    ]  # fmt: skip
    assert nodes["per_node"][0]["argv"] == document["argv"]
    assert nodes["network"]["given_gbits"] == 100
    text = program(*words, "--nodes", "2").stdout
    assert "node 1, which serves no HTTP:" in text
    assert "--master-addr ADDRESS_OF_NODE_0" in text
    answer = program("plan", "chatbot", "--master-addr", "10.0.0.1")
    assert (answer.returncode, "--master-addr needs --nodes" in answer.stderr) == (2, True)


def test_plan_uses_memory_of_mig_slice(program, model: Path):
    """The only free slice has 10 GiB, and the model 15."""
    answer = program("plan", "chatbot", "--host", "1xa100-mig", *RELEASE, "--model", str(model), "--json")
    assert answer.returncode == 1
    document = json.loads(answer.stdout)
    assert document["env"]["CUDA_VISIBLE_DEVICES"].startswith("MIG-")
    assert codes(document) == ["weights_do_not_fit"]
    assert document["memory"]["per_gpu"][0]["total_gib"] < 10


@pytest.mark.parametrize("given", [(), ("--gpus", "auto"), ("--gpus", "0")])
def test_reasons_and_memory_refer_to_the_same_slice(program, given: tuple[str, ...]):
    """The largest slice is in use by another user; no reason may be based on its size."""
    words = ("plan", "chatbot", "--host", "1xa100-mig", *RELEASE, "--model", "Qwen/Qwen3-8B-AWQ", "--json")
    document = json.loads(program(*words, *given).stdout)
    held = document["memory"]["concurrency_p95"]
    claimed = [
        float(found[1].replace(",", ""))
        for choice in document["choices"]
        for found in re.finditer(r"about ([\d,]+) requests", f"{choice['reason']} {choice['tradeoff']}")
    ]
    assert all(held / 2.1 <= count <= 2.1 * held for count in claimed), (claimed, held)


def test_plan_for_a_release_that_is_not_installed(program, model: Path):
    words = ("plan", "chatbot", "--host", "8xh100", "--model", str(model), "--set", "swap-space=4", "--json")
    old = program(*words, "--vllm-version", "0.17.0")
    assert old.returncode == 0, old.stderr
    new = program(*words, "--vllm-version", "0.33.0")
    assert new.returncode == 1
    (dead,) = [found for found in json.loads(new.stdout)["findings"] if found["level"] == "error"]
    assert dead["code"] == "flag_dead"
    assert "swap-space" in dead["fix"]["unset"]


def test_no_suitable_gpus(program, model: Path):
    """The JSON lists every obstacle and who holds the memory."""
    tensor = ("--set", "tensor-parallel-size=4", "--set", "gpu-memory-utilization=0.9", "--gpus", "auto")
    answer = program("plan", "chatbot", "--host", "4xa6000", *RELEASE, "--model", str(model), *tensor, "--json")
    assert answer.returncode == 1
    document = json.loads(answer.stdout)
    assert set(codes(document)) == {"no_gpus", "memory_held"}
    assert any("anna" in found["message"] for found in document["findings"])


def test_text_output(program, model: Path):
    words = ("plan", "chatbot", "--host", "1xrtx4090", *RELEASE, "--model", str(model))
    answer = program(*words, "--set", "max-model-len=131072", "--unset", "kv-cache-dtype")
    assert answer.returncode == 1
    assert "█" in answer.stdout
    assert "[kv_too_small]" in answer.stdout
    assert "--set max-model-len=" in answer.stdout
    assert f"vllm serve {model}" in answer.stdout
    plain = program("--ascii", *words)
    assert plain.returncode == 0
    assert plain.stdout.isascii() or "–" in plain.stdout
    assert "concurrency:" in plain.stdout


def test_no_vllm_installed(program, model: Path):
    env = {"PATH": "/usr/bin:/bin", "VIRTUAL_ENV": "", "CONDA_PREFIX": ""}
    answer = program("plan", "chatbot", "--model", str(model), "--vllm", "/nowhere/vllm", "--json", env=env)
    assert answer.returncode == 1
    assert "engine_missing" in codes(json.loads(answer.stdout))


def test_plan_for_recorded_host_without_vllm_installed(program, model: Path):
    """The recorded host may have vLLM; a start here is still refused."""
    env = {"PATH": "/usr/bin:/bin", "VIRTUAL_ENV": "", "CONDA_PREFIX": ""}
    words = ("chatbot", "--model", str(model))
    answer = program("plan", *words, "--host", "8xh100", "--json", env=env)
    assert answer.returncode == 0, answer.stderr
    levels = {finding["code"]: finding["level"] for finding in json.loads(answer.stdout)["findings"]}
    assert levels["engine_missing"] == "advice"
    for gpus in ((), ("--gpus", "none")):
        refused = program("--host", "8xh100", "start", *words, *gpus, env=env)
        assert refused.returncode == 4, refused.stderr
        assert "no vLLM was found here" in refused.stderr


def test_verdict_comes_first(program, model: Path):
    words = ("plan", "chatbot", *RELEASE, "--model", str(model))
    fits = program(*words, "--host", "8xh100").stdout.splitlines()
    assert next(line for line in fits[1:4] if line.startswith("Fits")), fits[:4]
    refused = program(*words, "--host", "8xh100", "--set", "dtype=float7").stdout.splitlines()
    assert any(line.startswith("Error: ") for line in refused[1:4]), refused[:4]


@pytest.mark.parametrize(
    ("form", "part"),
    [
        ("shell", " serve "),
        ("config", "max-model-len: 4096"),
        ("systemd", "[Service]"),
        ("systemd-user", "[Service]"),
        ("compose", "services:"),
        ("kubernetes", "kind: Deployment"),
    ],
)
def test_exports(program, model: Path, tmp_path: Path, form: str, part: str):
    command = tmp_path / "vllm"
    command.write_text('#!/bin/sh\nexec /opt/vllm/bin/vllm "$@"\n')
    command.chmod(0o755)
    words = ("plan", "chatbot", "--host", "8xh100", "--vllm", str(command), "--model", str(model), "--export", form)
    answer = program(*words, env={"VLLM_API_KEY": "sk-very-secret-1", "TRANSFORMERS_OFFLINE": "1"})
    assert answer.returncode == 0, answer.stderr
    assert "TRANSFORMERS_OFFLINE" in answer.stderr
    assert part in answer.stdout
    assert "sk-very-secret-1" not in answer.stdout


@pytest.mark.parametrize("form", ["compose", "kubernetes", "systemd", "shell", "config"])
def test_export_ignores_problems_of_this_machine(program, tmp_path: Path, form: str):
    """Offline and without the model: reported on stderr, but the file is complete."""
    missing = tmp_path / "models" / "not-here"
    for model, env in (("org/model-7B", {"HF_HUB_OFFLINE": "1"}), (str(missing), {})):
        words = ("plan", "chatbot", "--host", "8xh100", *RELEASE, "--model", model)
        assert program(*words, env=env).returncode == 1
        answer = program(*words, "--export", form, env=env)
        assert answer.returncode == 0, answer.stderr
        assert "[model_missing]" in answer.stderr
        assert "on this machine" in answer.stderr
        assert model in answer.stdout or form in ("kubernetes",)


def test_export_fails_for_machine_independent_errors(program):
    words = ("plan", "chatbot", "--host", "8xh100", *RELEASE, "--model", "org/model-7B", "--set", "dtype=float7")
    answer = program(*words, "--export", "compose", env={"HF_HUB_OFFLINE": "1"})
    assert answer.returncode == 1
    assert "services:" in answer.stdout
    assert "this would not start" in answer.stderr
    assert "[flag_value]" in answer.stderr
    assert "[model_missing]" in answer.stderr


@pytest.mark.parametrize("form", ["compose", "systemd"])
def test_export_uses_vllm_default_port(program, monkeypatch, capsys, form: str):
    """Runs in this process: occupying the real port 8000 would affect servers of other tests."""
    for name in ("HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, program.env[name])
    monkeypatch.setattr(environment, "check_port", lambda _host, port: PortUse(4711) if port < 8002 else None)
    words = ["plan", "chatbot", *RELEASE, "--export", form]
    assert main(words) == 0
    answer = capsys.readouterr()
    assert "8000" in answer.out
    assert "8002" not in answer.out
    assert "port 8000 is in use on this machine" in answer.err
    assert "[port_taken]" not in answer.err
    assert main([*words, "--port", "8123"]) == 0
    given = capsys.readouterr()
    assert "8123" in given.out
    assert "8000" not in given.out
    assert "is taken" not in given.err


def test_unsupported_export(program):
    answer = program("plan", "chatbot", "--engine", "simulated", "--export", "kubernetes")
    assert answer.returncode == 1
    assert "kubernetes" in answer.stderr


def test_no_secret_is_printed(program, model: Path):
    env = {"VLLM_API_KEY": "sk-very-secret-1", "HF_TOKEN": "hf_verysecret2"}
    for form in ((), ("--json",)):
        answer = program("plan", "chatbot", "--host", "8xh100", *RELEASE, "--model", str(model), *form, env=env)
        assert answer.returncode == 0, answer.stderr
        assert "verysecret" not in answer.stdout.replace("-", "")


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("plan", "chatbt"), 3, "did you mean 'chatbot'"),
        (("plan", "chatbot", "--vllm-version", "newest"), 2, "expected a release"),
        (("plan", "chatbot", "--vllm-version", "0.33.0", "--vllm", "/x"), 2, "--vllm-version"),
        (("plan", "chatbot", "--host", "/nowhere.json"), 2, "/nowhere.json"),
        (("plan", "chatbot", "--set", "oops"), 2, "oops"),
        (("plan", "chatbot", "--gpus", "first"), 2, "--gpus first"),
        (("plan", "chatbot", "--engine", "simulated", "--env", "oops"), 2, "NAME=VALUE"),
    ],
)
def test_invalid_arguments(program, words, code, text):
    answer = program(*words)
    assert answer.returncode == code, answer.stderr
    assert text in answer.stderr
    assert "Traceback" not in answer.stderr


def test_refused_start_lists_all_errors_and_leaves_nothing(program):
    answer = program("start", "chatbot", "--engine", "simulated", "--name", "no", "--set", "swap-space=4",
                     "--set", "max-num-sequences=3", "--force")  # fmt: skip
    assert answer.returncode == 1
    assert "[flag_dead]" in answer.stderr
    assert "[flag_unknown]" in answer.stderr
    assert "--unset swap-space" in answer.stderr
    assert program("status", "no").returncode == 3


def test_warnings_do_not_prevent_start(program):
    answer = program("start", "chatbot", "--engine", "simulated", "--set", "disable-log-stats=true", "--json")
    assert answer.returncode == 0, answer.stderr
    assert "warning: " in answer.stderr
    assert "[unwatchable]" in answer.stderr
    assert json.loads(answer.stdout)["state"] == "starting"


def test_refused_restart_does_not_affect_server(program):
    before = program.json("start", "chatbot", "--engine", "simulated", "--name", "chat", "--wait")
    answer = program("restart", "chat", "--set", "no-such-flag=1")
    assert answer.returncode == 1
    assert "[flag_unknown]" in answer.stderr
    switched = program("restart", "chat", "--preset", "batch", "--json")
    assert switched.returncode == 0, switched.stderr
    assert json.loads(switched.stdout)["generation"] == before["generation"] + 1


def test_port_in_use_is_detected(program):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        answer = program("plan", "chatbot", "--engine", "simulated", "--port", str(port), "--json")
    assert answer.returncode == 1
    (taken,) = json.loads(answer.stdout)["findings"]
    assert taken["code"] == "port_taken"
    assert str(os.getpid()) in taken["message"]
    assert taken["message"].endswith("choose another --port, or start without it to get a free one")


def test_unit_export_warns_of_folders_its_account_cannot_enter(program, tmp_path):
    command = tmp_path / "mine" / "vllm"
    command.parent.mkdir(mode=0o700)
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    tmp_path.chmod(0o755)
    stderr = program("plan", "chatbot", "--vllm", str(command), "--export", "systemd").stderr
    assert "note: the unit runs as vllm, which can't enter /" in stderr
    assert "systemd-user" in stderr
    own = program("plan", "chatbot", "--vllm", str(command), "--export", "systemd-user").stderr
    assert "can't enter" not in own


@pytest.mark.parametrize("gpus", [(), ("--gpus", "0")])
def test_plan_beyond_a_share_is_printed_with_the_error(program, model: Path, tmp_path: Path, gpus: tuple[str, ...]):
    config = tmp_path / "config" / "vllm-console" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text('[shares]\n0 = "24 GiB"\n')
    words = ("--host", "1xh100", "plan", "chatbot", *RELEASE, "--model", str(model), *gpus)
    answer = program(*words, "--json")
    assert answer.returncode == 1
    document = json.loads(answer.stdout)
    assert document["gpus"] == [0]
    problem = next(found for found in document["findings"] if found["code"] == "no_gpus")
    assert problem["level"] == "error"
    assert "your share is 24.0 GiB" in problem["message"]
    held = next(found["message"] for found in document["findings"] if found["code"] == "memory_held")
    assert held.startswith("GPU 0: your share is 24.0 GiB: 24.0 GiB available")
    text = program(*words)
    assert text.returncode == 1
    assert "your share is 24.0 GiB" in text.stdout
    started = program("--host", "1xh100", "start", "chatbot", "--engine", "simulated", "--name", "one", *gpus)
    assert started.returncode == 1
    assert "your share is 24.0 GiB" in started.stderr


def test_empty_gpu_selection_on_recorded_host(program):
    words = ("--host", "4xa6000", "plan", "chatbot", "--engine", "simulated")
    assert program.json(*words)["gpus"]
    assert program.json(*words, "--gpus", "none")["gpus"] == []


# -- the engine's verdict ---------------------------------------------------------------------------------------------


def test_engine_is_not_run_without_option(program):
    assert program.json("plan", "chatbot", "--engine", "simulated")["vllm_verdict"] is None


def test_engine_accepts_or_rejects_plan(program):
    document = program.json("plan", "chatbot", "--engine", "simulated", "--ask-vllm")
    assert document["vllm_verdict"] == {
        "verdict": "accepted", "message": None, "version": None, "parser_only": False,
    }  # fmt: skip
    done = program("plan", "chatbot", "--engine", "simulated", "--ask-vllm", "--set", "no-such-flag=1", "--json")
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert document["vllm_verdict"]["verdict"] == "refused"
    assert codes(document) == ["vllm_refuses"], "instead of the plan's own check of the flag"


def test_engine_check_requires_installed_release(program, model: Path):
    done = program("plan", "chatbot", *RELEASE, "--model", str(model), "--ask-vllm")
    assert "can't be asked about these flags: it is not installed here" in done.stdout


def test_engine_check_starts_no_process_in_read_only_mode(program):
    assert program("--read-only", "plan", "chatbot", "--engine", "simulated", "--ask-vllm").returncode == 4
