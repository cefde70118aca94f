"""Preset, engine and changes become a plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vllm_launchers.plan.choices.choice import Choice, Source
from vllm_launchers.plan.findings import PlanError
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
    assert made.findings == ()
    assert set(made.reasons) == set(made.flags)


def test_changes_override_the_preset_and_say_so(plan: MakePlan) -> None:
    made = plan(set={"--max_num_seqs": 128, "enforce-eager": True, "max-model-len": 4096}, unset=("kv-cache-dtype",))
    assert made.flags["max-num-seqs"] == 128
    assert made.reasons["max-num-seqs"] == "set by you"
    assert "set by you" not in made.reasons["max-model-len"]  # same value as the preset's, whose reason remains
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
def test_invalid_changes_are_refused(plan: MakePlan, name: str) -> None:
    with pytest.raises(PlanError):
        plan(set={name: "x"})


@pytest.mark.parametrize("model", ["--trust-remote-code", " ", "a\0b"])
def test_model_is_never_parsed_as_a_flag(plan: MakePlan, model: str) -> None:
    with pytest.raises(PlanError, match="model"):
        plan(model=model)


def test_gpus(plan: MakePlan) -> None:
    made = plan(gpus=(2, 3), set={"tensor-parallel-size": 2}, environment={"A": "1"})
    assert made.environment == {"A": "1", "CUDA_VISIBLE_DEVICES": "2,3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert made.gpus == (2, 3)
    assert made.findings == ()
    with pytest.raises(PlanError, match="different indices"):
        plan(gpus=(1, 1))


def test_metrics_requests_are_not_logged(plan: MakePlan) -> None:
    flag = "disable-access-log-for-endpoints"
    assert plan().flags[flag] == "/health,/metrics"
    assert plan().reasons[flag]
    assert flag not in plan(version="0.15.1").flags
    assert flag not in plan(version=None).flags
    assert plan(build="simulated").flags[flag] == "/health,/metrics"
    assert flag not in plan(unset=(flag,)).flags
    assert plan(set={flag: "/x"}).flags[flag] == "/x"


def test_cpu_build_drops_the_utilization(plan: MakePlan) -> None:
    made = plan(build="cpu")
    assert "gpu-memory-utilization" not in made.flags
    assert made.environment["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert [(found.code, found.level) for found in made.findings] == [("cpu_kv_cache", "advice")]
    for variables in ({"environment": {"VLLM_CPU_KVCACHE_SPACE": "1"}}, {"inherited": {"VLLM_CPU_KVCACHE_SPACE": "1"}}):
        quiet = plan(build="cpu", **variables)
        assert quiet.findings == ()
        assert quiet.environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    mine = plan(build="cpu", set={"gpu-memory-utilization": 0.3})
    assert mine.flags["gpu-memory-utilization"] == 0.3
    assert "VLLM_CPU_KVCACHE_SPACE" not in mine.environment
    assert [(found.code, found.level) for found in mine.findings] == [("cpu_utilization", "warning")]
    assert "cpu_no_gpu" in [found.code for found in plan(build="cpu", gpus=(0,)).findings]


def test_every_flag_has_its_source(plan: MakePlan) -> None:
    made = plan(set={"max-num-seqs": 128})
    sources = {choice.flag: choice.source for choice in made.choices}
    assert sources["max-num-seqs"] == "you"
    assert sources["max-model-len"] == "preset"
    assert sources["disable-access-log-for-endpoints"] == "console"
    assert {choice.flag for choice in made.choices if choice.value is not None} == set(made.flags)


def test_earlier_choices_are_kept(plan: MakePlan) -> None:
    choices = (
        Choice("max-num-seqs", 32, "few at once", Source.WORKLOAD),
        Choice("kv-cache-dtype", None, "there is room", Source.MACHINE),
    )
    made = plan(choices=choices, version="0.15.0")
    assert dict(made.flags) == {"max-num-seqs": 32}
    assert made.reasons == {"max-num-seqs": "few at once"}
    assert made.choices == choices
    assert made.argv[-2:] == ("--max-num-seqs", "32")
