"""Preset, engine and changes come to a plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vllm_launchers.plan.errors import PlanError
from vllm_launchers.plan.model import Plan

MakePlan = Callable[..., Plan]


def test_argv_of_a_preset(plan: MakePlan) -> None:
    made = plan("long-document", version="0.15.0", port=8003)
    assert made.argv == (
        *("/opt/venv/bin/vllm", "serve", "Qwen/Qwen3-4B-Instruct-2507-FP8", "--host", "127.0.0.1", "--port", "8003"),
        *("--gpu-memory-utilization", "0.9", "--max-model-len", "131072", "--max-num-seqs", "16"),
        *("--max-num-batched-tokens", "8192", "--enable-chunked-prefill", "--kv-cache-dtype", "fp8"),
        "--no-enable-prefix-caching",
    )
    assert made.warnings == ()
    assert set(made.reasons) == set(made.flags)


def test_changes_win_and_say_so(plan: MakePlan) -> None:
    made = plan(set={"--max_num_seqs": 128, "enforce-eager": True, "max-model-len": 4096}, unset=("kv-cache-dtype",))
    assert made.flags["max-num-seqs"] == 128
    assert made.reasons["max-num-seqs"] == "you set it"
    assert "you set it" not in made.reasons["max-model-len"]  # the same value as the preset's: its reason stays
    assert "--enforce-eager" in made.argv


def test_unset(plan: MakePlan) -> None:
    made = plan(unset=("--max_num_seqs", "no-enable-prefix-caching", "never-set"))
    assert "max-num-seqs" not in made.flags
    assert "enable-prefix-caching" not in made.flags
    assert not any("prefix" in word for word in made.argv)


def test_true_is_not_one(plan: MakePlan) -> None:
    assert plan(set={"enable-prefix-caching": 1}).flags["enable-prefix-caching"] == 1
    assert plan(set={"enable-prefix-caching": 1}).argv[-1] != "--enable-prefix-caching"


@pytest.mark.parametrize("name", ["api-key", "host", "port", "not a flag"])
def test_changes_that_cannot_be_made(plan: MakePlan, name: str) -> None:
    with pytest.raises(PlanError):
        plan(set={name: "x"})


@pytest.mark.parametrize("model", ["--trust-remote-code", " ", "a\0b"])
def test_a_model_is_never_taken_for_a_flag(plan: MakePlan, model: str) -> None:
    with pytest.raises(PlanError, match="model"):
        plan(model=model)


def test_gpus(plan: MakePlan) -> None:
    made = plan(gpus=(2, 3), set={"tensor-parallel-size": 2}, environment={"A": "1"})
    assert made.environment == {"A": "1", "CUDA_VISIBLE_DEVICES": "2,3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert made.gpus == (2, 3)
    assert made.warnings == ()
    assert "will use 1" in plan(gpus=(0, 1)).warnings[0]
    assert "wants 4 GPUs" in plan(gpus=(0, 1), set={"tp": 4}).warnings[0]
    with pytest.raises(PlanError, match="different indices"):
        plan(gpus=(1, 1))


def test_metrics_do_not_fill_the_log(plan: MakePlan) -> None:
    flag = "disable-access-log-for-endpoints"
    assert plan().flags[flag] == "/health,/metrics"
    assert plan().reasons[flag]
    assert flag not in plan(version="0.15.1").flags
    assert flag not in plan(version=None).flags
    assert plan(build="simulated").flags[flag] == "/health,/metrics"
    assert flag not in plan(unset=(flag,)).flags
    assert plan(set={flag: "/x"}).flags[flag] == "/x"


def test_on_a_cpu_build_the_utilization_would_be_ram(plan: MakePlan) -> None:
    made = plan(build="cpu")
    assert "gpu-memory-utilization" not in made.flags
    assert made.environment["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert any("CPU build" in warning for warning in made.warnings)
    for said in ({"environment": {"VLLM_CPU_KVCACHE_SPACE": "1"}}, {"inherited": {"VLLM_CPU_KVCACHE_SPACE": "1"}}):
        quiet = plan(build="cpu", **said)
        assert quiet.warnings == ()
        assert quiet.environment.get("VLLM_CPU_KVCACHE_SPACE") != "2"
    mine = plan(build="cpu", set={"gpu-memory-utilization": 0.3})
    assert mine.flags["gpu-memory-utilization"] == 0.3
    assert "VLLM_CPU_KVCACHE_SPACE" not in mine.environment
    assert "share of this machine's RAM" in mine.warnings[0]
    assert "uses no GPU" in plan(build="cpu", gpus=(0,)).warnings[1]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"host": "0.0.0.0"}, "without an API key"),
        ({"host": "gpubox"}, "without an API key"),
        ({"set": {"gpu-memory-utilization": 0.97}}, "leaves 3% of the GPU"),
        ({"set": {"gpu-memory-utilization": 1.5}}, "vLLM will refuse --gpu-memory-utilization 1.5"),
        ({"set": {"max-num-batched-tokens": 128}}, "each of 256 sequences"),
        ({"set": {"max-num-batched-tokens": 2048, "enable-chunked-prefill": False}}, "without chunked prefill"),
        ({"set": {"disable-log-stats": True}}, "cannot be watched"),
        ({"set": {"ssl-keyfile": "/k"}}, "plain HTTP"),
        ({"set": {"grpc": True}}, "never be seen ready"),
    ],
)
def test_warnings(plan: MakePlan, arguments: dict[str, object], part: str) -> None:
    (warning,) = plan(**arguments).warnings
    assert part in warning


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]"])
def test_no_warning_on_loopback(plan: MakePlan, host: str) -> None:
    assert plan(host=host).warnings == ()


def test_no_warning_with_a_key(plan: MakePlan) -> None:
    assert plan(host="0.0.0.0", secrets=("VLLM_API_KEY",)).warnings == ()


@pytest.mark.parametrize("name", ["chatbot", "code-generation", "long-document", "batch"])
def test_shipped_presets_warn_of_nothing(plan: MakePlan, name: str) -> None:
    assert plan(name).warnings == ()
    # Chunked prefill is switched off by one key: that must not lead to a refusal where the whole prompt fits.
    if name in ("chatbot", "batch"):
        assert plan(name, set={"enable-chunked-prefill": False}).warnings == ()
