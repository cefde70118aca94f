"""GPUs that a vLLM has no code for: according to its own files if installed, otherwise to the table of releases."""

from __future__ import annotations

import pytest

from vllm_launchers.host.gpu.host import Gpu, Host
from vllm_launchers.plan.checks.hardware import hardware_findings, runs_on
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.flag_table import FlagTable, Limits
from vllm_launchers.vllm.flags.releases import RELEASES, assumed_table, release_table, releases_for
from vllm_launchers.vllm.modelfacts.facts import ModelFacts, Quantization

CUDA_13 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")


@pytest.mark.parametrize(
    ("built", "number", "runs"),
    [
        (CUDA_13, (7, 0), False),
        (CUDA_13, (7, 5), True),
        (CUDA_13, (8, 9), True),
        (CUDA_13, (8, 0), True),
        (CUDA_13, (10, 3), True),
        (CUDA_13, (11, 0), False),
        (CUDA_13, (12, 1), True),
        (("sm_86",), (8, 0), False),
        (("sm_90a",), (9, 0), True),
        (("sm_100a",), (10, 3), False),
        (("sm_100f",), (10, 3), True),
        (("sm_80", "compute_80"), (12, 0), True),
        (("sm_80", "compute_80"), (7, 5), False),
        (("nonsense",), (8, 0), False),
    ],
)
def test_architectures_run_on_later_gpus_of_their_generation(built, number, runs):
    assert runs_on(built, number) is runs


def findings(
    able: str, table: FlagTable, quantization: Quantization | None = None, name: str = "Tesla"
) -> list[PlanFinding]:
    engine = Engine(EngineKind.VLLM, ("/opt/vllm",), table.version, "cuda", "/opt/vllm")
    plan = Plan("chatbot", "org/model", engine, "127.0.0.1", 8000, (), {}, {}, {}, gpus=(0,))
    facts = ModelFacts("org/model", quantization=quantization, dtype="float16")
    host = Host(gpus=(Gpu(0, name=name, memory_gib=32.0, free_gib=31.0, compute_capability=able),))
    return list(hardware_findings(plan, PlanInputs(facts, table, host)))


def test_installed_pytorch_overrides_the_release():
    """A custom build for an old GPU is accepted, and a published one without code for it is refused."""
    own = FlagTable("0.33.0", "installation", {}, limits=Limits(architectures=("sm_70", "sm_75")))
    assert findings("7.0", own) == []
    published = FlagTable("0.33.0", "installation", {}, limits=Limits(architectures=CUDA_13))
    (found,) = findings("7.0", published)
    assert (found.code, found.level, found.surely) == ("gpu_unsupported", Level.ERROR, True)
    assert "0.19.1" in found.message


def test_release_not_installed_may_be_built_differently():
    (found,) = findings("7.0", release_table("0.33.0"))
    assert (found.level, found.surely) == (Level.ERROR, False)
    assert "published" in found.message


def test_below_vllms_minimum_no_pytorch_helps():
    own = FlagTable("0.10.0", "installation", {}, limits=Limits(architectures=("sm_50", "sm_60", "sm_70")))
    (found,) = findings("6.0", own)
    assert found.surely
    assert "7.0 or later" in found.message


def test_gpu_newer_than_the_release_names_the_first_supported():
    (found,) = findings("12.0", release_table("0.10.0"))
    assert "0.10.2" in found.message
    assert findings("12.0", release_table("0.10.2")) == []


FP8 = Quantization("fp8", 8)
TENSORS = Quantization("compressed-tensors", 8, floating=True)
INT8 = Quantization("compressed-tensors", 8)


@pytest.mark.parametrize(
    ("version", "quantization", "able", "level"),
    [
        ("0.33.0", FP8, "7.5", Level.ADVICE),
        ("0.14.1", FP8, "7.5", Level.ADVICE),
        ("0.13.0", FP8, "7.5", Level.ERROR),
        ("0.13.0", FP8, "8.6", Level.ADVICE),
        ("0.33.0", TENSORS, "7.5", Level.ADVICE),
        ("0.14.1", TENSORS, "7.5", Level.ERROR),
        ("0.33.0", INT8, "7.5", None),
        ("0.19.1", Quantization("awq", 4, 128), "7.0", Level.ERROR),
        ("0.19.1", Quantization("gptq", 4, 128), "7.0", None),
        ("0.33.0", Quantization("mxfp4", 4, 32), "7.5", Level.ERROR),
        ("0.33.0", Quantization("mxfp4", 4, 32), "8.0", None),
        ("0.33.0", FP8, "8.9", None),
        ("0.33.0", None, "8.0", None),
    ],
)
def test_formats_by_release_and_gpu(version, quantization, able, level):
    found = findings(able, release_table(version), quantization)
    assert [one.level for one in found] == ([] if level is None else [level])


def test_fp8_on_turing_names_its_benefit():
    (found,) = findings("7.5", release_table("0.33.0"), FP8)
    assert "16 bits" in found.message
    assert "refuse" not in found.message


def test_assumed_limits_are_those_of_the_newest_release():
    (found,) = findings("7.0", assumed_table())
    assert found.message.startswith(f"the PyTorch published with vLLM {RELEASES[-1]} has no code for")
    assert not found.surely


def test_method_without_a_known_requirement_is_not_refused():
    own = FlagTable("0.33.0", "installation", {})
    assert findings("7.0", own, Quantization("awq", 4)) == []


def test_no_matching_release():
    assert releases_for(lambda limits: False) is None
    assert releases_for(lambda limits: True) == ("0.8.5", None)
