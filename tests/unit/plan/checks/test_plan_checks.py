"""Each check fires on a constructed case, with its level and its fix, and not on a valid one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from vllm_launchers.engine_model.gpu_models import find_model
from vllm_launchers.host.gpu.host import Gpu, Holder, Host, Link, MigInstance
from vllm_launchers.host.gpu.topology import bandwidth
from vllm_launchers.plan.checks.other_tools import other_tools
from vllm_launchers.plan.choices.choice import Choice, Source
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.plan.pace import Pace, Paces
from vllm_launchers.presets.model import Objectives, Workload
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.changes import Changes, Flags
from vllm_launchers.vllm.modelfacts.facts import LayerKind, ModelFacts, Quantization

Find = Callable[..., list[PlanFinding]]


def gpu(index: int = 0, name: str = "NVIDIA RTX A6000", gib: float = 48.0, able: str = "8.6", **more: Any) -> Gpu:
    return Gpu(index, f"GPU-{index}", name, gib, compute_capability=able, **({"free_gib": gib - 0.4} | more))


def machine(*gpus: Gpu, kind: str = "NV4") -> Host:
    links = tuple(Link(a.index, b.index, kind) for a in gpus for b in gpus if a.index < b.index)
    islands = (tuple(one.index for one in gpus),) if kind.startswith("NV") else tuple((one.index,) for one in gpus)
    return Host(gpus=gpus, links=links, islands=islands)


BF16 = ModelFacts(
    model="/models/eight", source="folder", folder="/models/eight", architecture="LlamaForCausalLM",
    layers=(LayerKind.FULL,) * 32, hidden_size=4096, intermediate_size=14336, heads=32, kv_heads=8, head_dim=128,
    vocabulary=128_256, max_context=131_072, dtype="bfloat16", weight_bytes=16 * 10**9, bytes_to_download=0,
)  # fmt: skip
"""Like Llama 3.1 8B."""
AWQ = replace(BF16, quantization=Quantization("awq", 4, 128), weight_bytes=57 * 10**8, dtype="float16")
GPTQ = replace(AWQ, quantization=Quantization("gptq", 4, 128))
MODELOPT = replace(BF16, quantization=Quantization("modelopt_fp4", 4, 16), weight_bytes=6 * 10**9)
GPT_OSS = replace(BF16, quantization=Quantization("mxfp4", 4, 32), model_type="gpt_oss", weight_bytes=6 * 10**9)
FP8 = replace(BF16, quantization=Quantization("fp8", 8), weight_bytes=9 * 10**9)
BLOCKS = replace(FP8, quantization=Quantization("fp8", 8, block=(128, 128)), intermediate_size=10944)
HUB = replace(BF16, model="org/eight", source="hub", folder=None, bytes_to_download=16 * 10**9)
SEVENTY = replace(BF16, layers=(LayerKind.FULL,) * 80, heads=64, hidden_size=8192, intermediate_size=28672,
                  weight_bytes=141 * 10**9)  # fmt: skip
NEARLY_FULL = replace(BF16, weight_bytes=468 * 10**8)
"""It only fits with more than 0.95 of 48 GiB."""

PAIR = machine(gpu(0), gpu(1))
APART = machine(gpu(0), gpu(1), kind="SYS")
BRIDGED = machine(gpu(0), gpu(1), kind="PHB")
H200 = machine(gpu(name="NVIDIA H200", gib=140.4, able="9.0"))
H100 = machine(gpu(name="NVIDIA H100 80GB HBM3", gib=79.6, able="9.0"))
L40S = machine(gpu(name="NVIDIA L40S", gib=45.0, able="8.9"))
T4 = machine(gpu(name="Tesla T4", gib=15.0, able="7.5"))
V100 = machine(gpu(name="Tesla V100-SXM2-32GB", gib=32.0, able="7.0"))
P100 = machine(gpu(name="Tesla P100-SXM2-16GB", gib=16.0, able="6.0"))
RTX5090 = machine(gpu(name="NVIDIA GeForce RTX 5090", gib=31.8, able="12.0"))
A_GPU = machine(gpu())
SMALL = machine(gpu(name="NVIDIA GeForce RTX 4090", gib=24.0, able="8.9"))
HELD = machine(gpu(free_gib=9.4, used_gib=38.6, used_by=(Holder(4711, "anna", 38.2, command="python"),)))
SHARED = machine(gpu(free_gib=45.0, used_gib=3.0, used_by=(Holder(4711, "anna", 2.6, command="python"),)))
LOST = machine(gpu(lost="GPU is lost"))
SLICED = Host(gpus=(gpu(mig_mode=True, mig=(MigInstance("MIG-a", "3g.20gb", 19.6, 19.5, 1, 0),)),))

GOOD: list[dict[str, Any]] = [
    {},
    {"facts": AWQ},
    {"facts": replace(BF16, files_missing=("*.safetensors",)), "set": {"load-format": "dummy"}},
    {"facts": FP8, "host": H100, "set": {"kv-cache-dtype": "fp8"}},
    {"host": PAIR, "gpus": (0, 1), "set": {"tensor-parallel-size": 2}},
    {"facts": replace(HUB, quantization=AWQ.quantization, weight_bytes=AWQ.weight_bytes)},
    {"set": {"quantization": "awq_marlin"}},
    {"set": {"quantization": "humming"}},
    {"facts": GPTQ, "set": {"quantization": "auto_gptq"}},
    {"facts": replace(GPTQ, quantization=Quantization("gptq", 4, ordered=True)), "version": "0.29.0"},
    {
        "facts": replace(FP8, quantization=Quantization("fbgemm_fp8", 8)),
        "host": H100,
        "set": {"allow-deprecated-quantization": True},
    },
    {"facts": replace(BF16, quantization=Quantization("bitsandbytes", 4)), "version": "0.27.1"},
    {"set": {"enable-expert-parallel": True}, "facts": replace(BF16, architecture="MadeMoeForCausalLM")},
    {"set": {"enable-expert-parallel": True}, "facts": replace(BF16, experts=8)},
    {"facts": BF16, "set": {"quantization": "fp8"}, "host": H100},
    {"facts": BF16, "set": {"quantization": "mxfp4"}, "host": H100},
    {"facts": BF16, "set": {"quantization": "torchao", "hf-overrides": '{"quantization_config_file": "/ao.json"}'}},
    {
        "facts": BF16,
        "set": {"quantization": "online", "quantization-config": '{"linear": "fp8_per_tensor"}'},
        "host": H100,
    },
    {"facts": replace(HUB, gated=False)},
    {"preset": "batch", "host": H200},
    {
        "build": "cpu",
        "host": None,
        "set": {"block-size": 64},
        "environment": {"VLLM_CPU_KVCACHE_SPACE": "40", "VLLM_WORKER_MULTIPROC_METHOD": "x"},
    },
    {"environment": {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_LOG_STATS_INTERVAL": "1e1"}},
    {"set": {"enable-chunked-prefill": False, "max-num-batched-tokens": 131072, "runner": "pooling"}},
    {"set": {"block-size": 48}},
    {"set": {"block-size": 7, "attention-backend": "CUSTOM"}},
    {"host": None},
    {"facts": None, "host": None},
    {"environment": {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}, "set": {"max-model-len": 140_000}, "host": H100},
]
"""Valid launches; no check fires on any of them."""

MADE: list[tuple[str, Level, dict[str, Any]]] = [
    ("engine_version_unknown", Level.WARNING, {"version": None, "note": "a wrapper"}),
    ("engine_note", Level.ADVICE, {"note": "an editable install"}),
    ("weights_offloaded", Level.WARNING, {"set": {"cpu-offload-gb": 3}}),
    ("offload_over_memory", Level.WARNING, {"set": {"cpu-offload-gb": 3},
                                            "host": replace(machine(gpu()), memory_gib=2.5)}),
    ("engine_old", Level.WARNING, {"version": "0.9.2"}),
    ("engine_new", Level.ADVICE, {"version": "0.34.0"}),
    ("flag_unknown", Level.ERROR, {"set": {"max-num-sequences": 3}}),
    ("flag_dead", Level.ERROR, {"set": {"swap-space": 4}}),
    ("flag_value", Level.ERROR, {"set": {"dtype": "float7"}}),
    ("flag_value", Level.ERROR, {"set": {"gpu-memory-utilization": 1.5}}),
    ("flag_value", Level.ERROR, {"set": {"gpu-memory-utilization": 1.5}}),
    ("flag_value", Level.ERROR, {"set": {"max-num-seqs": "9" * 23}}),
    ("variable_dead", Level.WARNING, {"environment": {"VLLM_ATTENTION_BACKEND": "FLASHINFER"}}),
    ("model_missing", Level.ERROR, {"facts": None, "model_problem": "there is no such folder"}),
    ("model_missing", Level.ERROR, {"facts": replace(HUB, source="table"), "environment": {"HF_HUB_OFFLINE": "1"}}),
    ("model_gated", Level.ERROR, {"facts": replace(HUB, gated=True)}),
    ("model_gated", Level.WARNING, {"facts": replace(HUB, model="meta-llama/X", source="table"),
                                    "host_environment": {"has_hub_token": False}}),
    ("model_incomplete", Level.ERROR, {"facts": replace(BF16, files_missing=("model-2.safetensors",))}),
    ("model_incomplete", Level.WARNING, {"facts": replace(BF16, source="cache", files_missing=("a.safetensors",))}),
    ("remote_code", Level.WARNING, {"facts": replace(BF16, needs_remote_code=True)}),
    ("facts_missing", Level.ADVICE, {"facts": replace(BF16, missing=("head size",))}),
    ("quantization_dropped", Level.ERROR, {"facts": replace(BF16, quantization=Quantization("bitsandbytes", 4))}),
    ("quantization_dropped", Level.ERROR, {"facts": replace(BF16, quantization=Quantization("gguf"))}),
    ("quantization_without_checkpoint", Level.ERROR, {"facts": BF16, "set": {"quantization": "awq"}}),
    ("quantization_mismatch", Level.WARNING, {"facts": MODELOPT, "set": {"quantization": "awq"}}),
    ("quantization_mismatch", Level.ERROR, {"facts": MODELOPT, "set": {"quantization": "awq"}, "version": "0.31.0"}),
    ("quantization_mismatch", Level.WARNING, {"facts": MODELOPT, "set": {"quantization": "awq"}, "version": None}),
    ("quantization_mismatch", Level.WARNING, {"facts": GPT_OSS, "set": {"quantization": "awq"}}),
    ("quantization_mismatch", Level.ERROR, {"facts": GPT_OSS, "set": {"quantization": "humming"}}),
    ("quantization_mismatch", Level.ERROR, {"facts": AWQ, "set": {"quantization": "awq_marlin"}, "build": "cpu",
                                            "host": None}),
    ("quantization_mismatch", Level.ERROR, {"facts": FP8, "set": {"quantization": "fbgemm_fp8"}, "host": H100}),
    ("quantization_deprecated", Level.ERROR, {"facts": replace(FP8, quantization=Quantization("fbgemm_fp8", 8)),
                                              "host": H100}),
    *(("quantization_dropped", Level.ERROR, {"facts": replace(GPTQ, quantization=Quantization("gptq", *limited))})
      for limited in ((4, 128, None, False, True), (4, 128, None, False, False, False), (3,))),
    ("quantization_dropped", Level.WARNING, {"facts": replace(GPTQ, quantization=Quantization("gptq", 3)),
                                             "version": None}),
    ("quantization_without_checkpoint", Level.ERROR, {"facts": BF16, "set": {"quantization": "torchao"}}),
    ("quantization_without_checkpoint", Level.ERROR, {"facts": BF16, "set": {"quantization": "online"}}),
    ("quantization_mismatch", Level.ERROR, {"facts": AWQ, "set": {"quantization": "gptq"}}),
    ("tp_not_divisor", Level.ERROR, {"set": {"tensor-parallel-size": 3}, "host": machine(*map(gpu, range(3)))}),
    ("tp_not_divisor", Level.ERROR, {"set": {"tensor-parallel-size": 4}, "facts": BLOCKS,
                                     "host": machine(*map(gpu, range(4)))}),
    ("no_experts", Level.ERROR, {"set": {"enable-expert-parallel": True}}),
    ("external_ranks_of_dense", Level.ERROR, {"set": {"data-parallel-size": 2, "data-parallel-rank": 0}}),
    ("external_ranks_of_dense", Level.WARNING, {"set": {"data-parallel-size": 2, "data-parallel-external-lb": True},
                                                "version": "0.20.0"}),
    ("external_ranks_of_dense", Level.ERROR, {"set": {"data-parallel-size": 2, "data-parallel-external-lb": True},
                                              "version": "0.24.0"}),
    ("flag_value", Level.ERROR, {"set": {"enable-dbo": True}}),
    ("flag_value", Level.ERROR, {"set": {"enable-dbo": True}, "version": "0.13.0"}),
    ("flag_value", Level.ERROR, {"set": {"tensor-parallel-size": 2, "decode-context-parallel-size": 2}, "host": PAIR,
                                 "version": "0.13.0"}),
    ("attention_backend", Level.ERROR, {"environment": {"VLLM_ATTENTION_BACKEND": "FLASH_ATTN_MLA"},
                                        "version": "0.13.0"}),
    ("quantization_deprecated", Level.ERROR, {"facts": replace(FP8, quantization=Quantization("fbgemm_fp8", 8)),
                                              "host": H100, "version": "0.16.0"}),
    ("no_mtp_layers", Level.ERROR, {"set": {"spec-method": "mtp", "spec-tokens": 1}}),
    ("no_mtp_layers", Level.ERROR, {"set": {"speculative-config": '{"method": "mtp", "num_speculative_tokens": 1}'}}),
    ("attention_backend", Level.ERROR, {"set": {"attention-backend": "FLASH_ATTN_MLA"}}),
    ("attention_backend", Level.ERROR, {"set": {"attention-backend": "FLASH_ATTN"},
                                        "facts": replace(BF16, kv_lora_rank=512)}),
    ("sleep_unsupported", Level.ERROR, {"set": {"enable-cumem-allocator": True}, "build": "cpu", "host": None}),
    ("pp_over_layers", Level.ERROR, {"set": {"pipeline-parallel-size": 40}, "host": machine(*map(gpu, range(40)))}),
    ("gpus_too_few", Level.ERROR, {"set": {"tensor-parallel-size": 2}, "gpus": (0,)}),
    ("gpus_too_few", Level.ERROR, {"set": {"tensor-parallel-size": 4}}),
    ("gpus_unused", Level.WARNING, {"host": PAIR, "gpus": (0, 1)}),
    ("gpus_differ", Level.WARNING, {"host": machine(gpu(0), gpu(1, "NVIDIA L40S", 45.0, "8.9")),
                                    "set": {"tensor-parallel-size": 2}}),
    ("tp_over_pcie", Level.WARNING, {"host": APART, "gpus": (0, 1), "set": {"tensor-parallel-size": 2}}),
    ("tp_over_pcie", Level.ADVICE, {"host": BRIDGED, "gpus": (0, 1), "set": {"tensor-parallel-size": 2}}),
    ("memory_held", Level.ERROR, {"host": HELD}),
    ("gpu_shared", Level.ADVICE, {"host": SHARED}),
    ("gpu_lost", Level.ERROR, {"host": LOST}),
    ("gpu_in_mig_mode", Level.ERROR, {"host": SLICED, "gpus": (0,)}),
    ("mig_unsupported", Level.WARNING, {"host": SLICED, "environment": {"CUDA_VISIBLE_DEVICES": "MIG-a"},
                                        "version": "0.20.0"}),
    ("weights_do_not_fit", Level.ERROR, {"facts": SEVENTY}),
    ("kv_too_small", Level.ERROR, {"facts": BF16, "host": SMALL, "set": {"max-model-len": 131_072}}),
    ("utilization_high", Level.WARNING, {"set": {"gpu-memory-utilization": 0.97}}),
    ("flag_value", Level.ERROR, {"set": {"num-gpu-blocks-override": 0}}),
    ("context_over_model", Level.ERROR, {"set": {"max-model-len": 140_000}, "host": H100}),
    ("batch_too_small", Level.ERROR, {"set": {"max-num-batched-tokens": 128}}),
    ("batch_too_small", Level.ERROR, {"set": {"max-num-batched-tokens": 2048, "enable-chunked-prefill": False}}),
    ("batch_too_small", Level.ERROR, {"set": {"max-num-batched-tokens": 2048, "enable-chunked-prefill": False},
                                      "unset": ("max-model-len",), "facts": BF16}),
    ("batch_too_small", Level.ERROR, {"set": {"max-num-seqs": 4096}, "unset": ("max-num-batched-tokens",)}),
    ("fp8_unsupported", Level.ERROR, {"host": T4, "set": {"kv-cache-dtype": "fp8"}}),
    ("fp8_unsupported", Level.WARNING, {"set": {"kv-cache-dtype": "fp8"}}),
    ("fp8_unsupported", Level.ERROR, {"host": V100, "facts": FP8, "version": "0.19.1"}),
    ("fp8_unsupported", Level.ERROR, {"host": T4, "facts": FP8, "version": "0.12.0"}),
    ("fp8_unsupported", Level.ADVICE, {"host": T4, "facts": FP8}),
    ("fp8_unsupported", Level.ADVICE, {"facts": FP8}),
    ("fp8_unsupported", Level.WARNING, {"facts": BF16, "set": {"quantization": "fp8"}}),
    ("gpu_unsupported", Level.ERROR, {"host": P100}),
    ("gpu_unsupported", Level.ERROR, {"host": P100, "version": "0.10.0", "facts": FP8}),
    ("gpu_unsupported", Level.ERROR, {"host": V100}),
    ("other_tool", Level.ADVICE, {"host": P100}),
    ("other_tool", Level.ADVICE, {"facts": SEVENTY}),
    ("gpu_unsupported", Level.ERROR, {"host": RTX5090, "version": "0.10.0"}),
    ("block_size", Level.ERROR, {"set": {"block-size": 7}}),
    ("block_size", Level.ERROR, {"build": "cpu", "host": None, "set": {"block-size": 16}}),
    ("block_size", Level.ERROR, {"build": "cpu", "host": None, "set": {"block-size": 8}, "version": "0.28.0"}),
    ("block_size", Level.WARNING, {"build": "cpu", "host": None, "set": {"block-size": 16}, "version": "0.28.0"}),
    ("block_size", Level.WARNING, {"build": "cpu", "host": None, "set": {"block-size": 16}, "version": None}),
    ("variable_value", Level.ERROR, {"environment": {"VLLM_ENGINE_READY_TIMEOUT_S": "abc"}}),
    ("variable_value", Level.ERROR, {"environment": {"VLLM_WORKER_MULTIPROC_METHOD": "thread"}}),
    ("variable_inherited", Level.ERROR, {"host_environment": {"variables": {"VERBOSE": "yes"}}}),
    ("variable_value", Level.WARNING, {"environment": {"VLLM_IMAGE_FETCH_TIMEOUT": "5s"}, "version": "0.10.2"}),
    ("chunked_prefill_off", Level.WARNING, {"set": {"enable-chunked-prefill": False, "max-num-batched-tokens": 32768}}),
    ("chunked_prefill_off", Level.WARNING, {"set": {"enable-chunked-prefill": False, "max-model-len": 512}}),
    ("chunked_prefill_off", Level.WARNING, {"set": {"enable-chunked-prefill": False}, "version": "0.10.2"}),
    ("fp8_kv_slow", Level.ADVICE, {"host": L40S, "set": {"kv-cache-dtype": "fp8"}}),
    ("bf16_unsupported", Level.ERROR, {"host": T4, "set": {"dtype": "bfloat16"}}),
    ("bf16_unsupported", Level.WARNING, {"host": V100, "facts": BF16}),
    ("quantization_unsupported", Level.ERROR, {"host": V100, "version": "0.19.1"}),
    ("port_taken", Level.ERROR, {"host_environment": {"port_problem": "is in use by python (pid 4711, user anna)"}}),
    ("open_to_all_without_key", Level.WARNING, {"host_address": "0.0.0.0"}),
    ("disk_for_download", Level.ERROR, {"facts": HUB, "host_environment": {"model_disk_free_gib": 3.0}}),
    ("file_missing", Level.ERROR, {"set": {"chat-template": "/no"}, "host_environment": {"absent": ("/no",)}}),
    ("file_missing", Level.ERROR, {"set": {"tokenizer": "/none"}, "host_environment": {"absent": ("/none",)}}),
    ("certificate_missing", Level.ERROR, {"set": {"ssl-keyfile": "/key.pem"}}),
    ("open_files_low", Level.WARNING, {"host_environment": {"open_files": 1024}}),
    ("shm_small", Level.WARNING, {"host": PAIR, "set": {"tensor-parallel-size": 2},
                                  "host_environment": {"shm_free_gib": 0.06}}),
    ("another_starting", Level.WARNING, {"host_environment": {"starting": ("docs",)}}),
    ("unwatchable", Level.WARNING, {"set": {"disable-log-stats": True}}),
    ("unwatchable", Level.WARNING, {"set": {"ssl-cert-reqs": 2}}),
    ("unwatchable", Level.WARNING, {"set": {"grpc": True}}),
    ("unwatchable", Level.WARNING, {"set": {"api-server-count": 0}}),
    ("unwatchable", Level.WARNING, {"set": {"api-server-count": -1}}),
    ("cpu_kv_cache", Level.ADVICE, {"build": "cpu", "host": None}),
    ("cpu_utilization", Level.WARNING, {"build": "cpu", "host": None, "set": {"gpu-memory-utilization": 0.3}}),
    ("cpu_no_gpu", Level.WARNING, {"build": "cpu", "gpus": (0,)}),
    ("devices_overridden", Level.WARNING, {"gpus": (0,), "environment": {"CUDA_VISIBLE_DEVICES": "5"}}),
]  # fmt: skip


def _no_budget(_flags: Flags, /) -> None:
    """A budget of which nothing is known."""


@pytest.mark.parametrize("case", GOOD)
def test_valid_launch_has_no_findings(find: Find, case: dict[str, Any]) -> None:
    assert find(**case) == []


@pytest.mark.parametrize(("code", "level", "case"), MADE)
def test_constructed_case_is_found(find: Find, code: str, level: Level, case: dict[str, Any]) -> None:
    found = [one for one in find(**case) if one.code == code]
    assert [one.level for one in found] == [level], [one.message for one in find(**case)]
    assert found[0].message.strip()
    assert "None" not in found[0].message
    assert "{" not in found[0].message


@pytest.mark.parametrize("preset", ["chatbot", "code-generation", "long-document", "batch"])
def test_shipped_presets_have_no_findings_where_their_model_fits(find: Find, preset: str) -> None:
    assert find(preset, host=H100) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]"])
def test_loopback_address_needs_no_key(find: Find, host: str) -> None:
    assert find(host_address=host) == []


def test_key_allows_listening_on_all_addresses(find: Find) -> None:
    assert find(host_address="0.0.0.0", secrets=("VLLM_API_KEY",)) == []


def test_mig_slice_needs_a_recent_vllm_even_if_the_version_is_unknown(find: Find) -> None:
    case: dict[str, Any] = {"host": SLICED, "environment": {"CUDA_VISIBLE_DEVICES": "MIG-a"}, "version": None}
    (found,) = [one for one in find(**case) if one.code == "mig_unsupported"]
    assert found.message == "a MIG slice needs vLLM 0.32 or later, and the version of this vLLM is unknown"


GEMMA = replace(BF16, model_type="gemma3", architecture="Gemma3ForConditionalGeneration")
GEMMA_AWQ = replace(AWQ, model_type="gemma3", architecture="Gemma3ForConditionalGeneration")


@pytest.mark.parametrize(
    ("code", "fix", "case"),
    [
        ("quantization_without_checkpoint", Changes(unset=("quantization",)),
         {"facts": BF16, "set": {"quantization": "awq"}}),
        ("tp_not_divisor", Changes(set={"tensor-parallel-size": 2}),
         {"set": {"tensor-parallel-size": 3}, "host": machine(*map(gpu, range(3)))}),
        ("context_over_model", Changes(set={"max-model-len": 131_072}),
         {"set": {"max-model-len": 140_000}, "host": H100}),
        ("bf16_unsupported", Changes(set={"dtype": "float16"}), {"host": T4, "set": {"dtype": "bfloat16"}}),
        ("bf16_unsupported", Changes(set={"dtype": "float32"}),
         {"host": T4, "set": {"dtype": "bfloat16"}, "facts": GEMMA}),
        ("bf16_unsupported", Changes(set={"dtype": "float32"}), {"host": T4, "facts": GEMMA}),
        ("bf16_unsupported", None, {"host": T4, "facts": GEMMA_AWQ}),
        ("bf16_unsupported", None, {"host": T4, "set": {"dtype": "bfloat16"}, "facts": GEMMA_AWQ}),
        ("bf16_unsupported", None,
         {"host": T4, "facts": replace(GEMMA, quantization=Quantization("compressed-tensors", 4))}),
        ("bf16_unsupported", Changes(set={"dtype": "float32"}),
         {"host": T4, "facts": replace(GEMMA, quantization=Quantization("bitsandbytes", 4))}),
        ("bf16_unsupported", Changes(unset=("quantization",)),
         {"host": T4, "set": {"quantization": "fp8"}, "facts": GEMMA}),
        ("flag_value", Changes(unset=("dtype",)), {"set": {"dtype": "half"}, "facts": GEMMA}),
        ("flag_value", Changes(unset=("dtype",)), {"set": {"dtype": "float32"}, "facts": AWQ}),
        ("memory_held", None, {"host": HELD}),
        ("memory_held", Changes(set={"gpu-memory-utilization": 0.62}),
         {"host": machine(gpu(free_gib=30.0, used_gib=18.0, used_by=(Holder(1, "anna", 17.0, command="x"),)))}),
        ("tp_over_pcie", Changes(set={"tensor-parallel-size": 1, "pipeline-parallel-size": 2}),
         {"host": APART, "gpus": (0, 1), "set": {"tensor-parallel-size": 2}}),
        ("gpus_unused", Changes(set={"tensor-parallel-size": 2}), {"host": PAIR, "gpus": (0, 1)}),
        ("weights_do_not_fit", Changes(set={"tensor-parallel-size": 4}),
         {"facts": SEVENTY, "host": machine(*map(gpu, range(8)))}),
        ("weights_do_not_fit", Changes(set={"gpu-memory-utilization": 0.9}),
         {"facts": BF16, "set": {"gpu-memory-utilization": 0.3}}),
        ("utilization_high", Changes(set={"gpu-memory-utilization": 0.95}), {"set": {"gpu-memory-utilization": 0.97}}),
        ("utilization_high", None, {"set": {"gpu-memory-utilization": 0.99}, "facts": NEARLY_FULL}),
        ("memory_held", Changes(set={"gpu-memory-utilization": 0.95}), {"set": {"gpu-memory-utilization": 1}}),
        ("flag_value", Changes(set={"gpu-memory-utilization": 0.92}), {"set": {"gpu-memory-utilization": 1.5}}),
        ("flag_value", Changes(set={"gpu-memory-utilization": 0.92}), {"set": {"gpu-memory-utilization": 0}}),
        ("batch_too_small", Changes(set={"max-num-seqs": 256}), {"set": {"max-num-seqs": 100_000}}),
        ("batch_too_small", Changes(set={"max-num-seqs": 256}),
         {"set": {"max-num-seqs": 100_000}, "unset": ("max-num-batched-tokens",)}),
        ("weights_do_not_fit", Changes(set={"max-num-seqs": 256}), {"set": {"max-num-seqs": 100_000}}),
        ("batch_too_small", Changes(set={"enable-chunked-prefill": True}),
         {"set": {"max-num-batched-tokens": 2048, "enable-chunked-prefill": False}}),
        ("batch_too_small", Changes(set={"max-num-batched-tokens": 4096}),
         {"set": {"max-num-seqs": 4096}, "unset": ("max-num-batched-tokens",)}),
        ("gpus_unused", None, {"host": machine(*map(gpu, range(3))), "gpus": (0, 1, 2)}),
        ("gpus_unused", Changes(set={"tensor-parallel-size": 2}),
         {"host": machine(*map(gpu, range(4))), "gpus": (0, 1, 2, 3), "set": {"pipeline-parallel-size": 2}}),
    ],
)  # fmt: skip
def test_finding_has_its_fix(find: Find, code: str, fix: Changes | None, case: dict[str, Any]) -> None:
    (found,) = [one for one in find(**case) if one.code == code]
    assert found.fix == fix


@pytest.mark.parametrize(
    ("code", "fix", "case"),
    [
        ("weights_do_not_fit", None, {"gpus": (0,)}),
        ("weights_do_not_fit", None, {"gpus": (0, 1), "set": {"tensor-parallel-size": 2}}),
        ("weights_do_not_fit", None, {"environment": {"CUDA_VISIBLE_DEVICES": "0"}}),
        ("weights_do_not_fit", Changes(set={"tensor-parallel-size": 4}), {"gpus": (0, 1, 2, 3)}),
        ("gpus_too_few", None, {"gpus": (0, 1), "set": {"tensor-parallel-size": 4}}),
        ("gpus_too_few", Changes(set={"tensor-parallel-size": 4}),
         {"gpus": (0, 1, 2, 3), "set": {"tensor-parallel-size": 8}}),
        ("kv_cache_too_large", None, {"gpus": (0,), "set": {"kv-cache-memory-bytes": "1G"}}),
    ],
)  # fmt: skip
def test_no_more_gpus_are_offered_than_named(find: Find, code: str, fix: Changes | None, case: dict[str, Any]) -> None:
    (found,) = [one for one in find(facts=SEVENTY, host=machine(*map(gpu, range(8))), **case) if one.code == code]
    assert found.fix == fix
    assert ("name more GPUs, or use a quantized or smaller model" in found.message) is (fix is None)


def test_offered_blocks_fit_on_every_stage(find: Find) -> None:
    """The first stage lacks more memory, but the second one must give up a larger part of its cache."""
    case: dict[str, Any] = {
        "facts": BF16, "host": machine(gpu(0), gpu(1, free_gib=12.0, used_gib=36.0)), "gpus": (0, 1),
        "environment": {"VLLM_PP_LAYER_PARTITION": "24,8"},
    }  # fmt: skip
    flags = {"pipeline-parallel-size": 2, "num-gpu-blocks-override": 32_768}
    (found,) = [one for one in find(set=flags, **case) if one.code == "kv_cache_too_large"]
    assert found.fix is not None
    again = find(set={**flags, **found.fix.set}, **case)
    assert "kv_cache_too_large" not in [one.code for one in again]


def test_refused_utilization_is_the_only_error(find: Find) -> None:
    errors = [one.code for one in find(set={"gpu-memory-utilization": 1.5}) if one.level is Level.ERROR]
    assert errors == ["flag_value"]


def test_fix_for_a_small_cache_is_the_longest_context(find: Find) -> None:
    """The longest context that fits; a longer one does not."""
    case: dict[str, Any] = {"facts": BF16, "host": SMALL}
    (found,) = [one for one in find(set={"max-model-len": 131_072}, **case) if one.code == "kv_too_small"]
    assert found.fix is not None
    longest = found.fix.set["max-model-len"]
    assert isinstance(longest, int)
    assert longest > 4000
    assert f"{longest:,} would fit" in found.message
    assert [one.code for one in find(set={"max-model-len": longest}, **case)] == ["workload_not_held"]
    assert "kv_too_small" in [one.code for one in find(set={"max-model-len": longest + 512}, **case)]


@pytest.mark.parametrize(("length", "small"), [(5088, False), (5089, True), (5120, True), (8191, True)])
def test_one_block_is_never_used_by_a_request(find: Find, length: int, small: bool) -> None:
    """Of 160 blocks with 5,120 tokens in total, vLLM 0.32 gives 159 to requests; it was said to hold 5,119 tokens."""
    asked = {"max-model-len": length, "num-gpu-blocks-override": 160, "block-size": 32}
    found = [one.message for one in find(set=asked) if one.code == "kv_too_small"]
    assert bool(found) is small
    assert all(one.startswith("the KV cache holds 5,088 tokens, not enough for one request of") for one in found)


def test_fix_never_exceeds_the_models_context(find: Find) -> None:
    asked = {"max-model-len": 9_999_999}
    found = {one.code: one for one in find(facts=replace(BF16, max_context=4000), set=asked)}
    assert found["context_over_model"].fix == found["kv_too_small"].fix == Changes(set={"max-model-len": 4000})
    longer = find(facts=replace(BF16, max_context=4000), set={**asked, "rope-scaling.factor": 4})
    (small,) = [one for one in longer if one.code == "kv_too_small"]
    assert small.fix is not None
    assert small.fix.set["max-model-len"] > 4000, "these flags lift the model's limit"
    numbers = re.findall(r"([\d,]+) (?:tokens, not|would fit)", small.message)
    held, fitting = (int(number.replace(",", "")) for number in numbers)
    assert fitting <= held


def test_step_too_small_for_a_whole_video_is_reported(find: Find) -> None:
    seeing = replace(AWQ, model_type="gemma4", multimodal=True)
    small: dict[str, Any] = {"max-num-batched-tokens": 2048}
    (found,) = [one for one in find(facts=seeing, set=small) if one.code == "batch_too_small"]
    assert (found.level, found.fix) == (Level.ERROR, Changes(set={"max-num-batched-tokens": 2496}))
    for enough in (found.fix.set, {**small, "language-model-only": True}):
        assert "batch_too_small" not in [one.code for one in find(facts=seeing, set=enough)]


def test_step_too_small_in_two_ways_is_enlarged_once(find: Find) -> None:
    small = {"max-num-batched-tokens": 128, "enable-chunked-prefill": False}
    first, second = [one for one in find(set=small) if one.code == "batch_too_small"]
    assert first.fix == Changes(set={"enable-chunked-prefill": True, "max-num-batched-tokens": 2048})
    assert second.fix == Changes(set={"enable-chunked-prefill": True})
    assert "batch_too_small" not in [one.code for one in find(set=first.fix.set)]


@pytest.mark.parametrize(
    ("version", "backend", "refused"),
    [
        ("0.19.0", "deepep_low_latency", False),
        ("0.20.0", "deepep_low_latency", True),
        ("0.33.0", "nixl_ep", True),
        ("0.33.0", "deepep_high_throughput", False),
    ],
)
def test_default_step_with_batched_experts_is_small(find: Find, version: str, backend: str, refused: bool) -> None:
    flags = {"data-parallel-size": 2, "enable-expert-parallel": True, "all2all-backend": backend, "max-num-seqs": 512}
    case: dict[str, Any] = {"facts": MOE, "host": FOUR, "version": version, "unset": ("max-num-batched-tokens",)}
    errors = [one for one in find(**case, set=flags) if one.code == "batch_too_small"]
    assert [one.level for one in errors] == [Level.ERROR] * refused
    assert all("a step has 256 tokens here" in one.message for one in errors)


@pytest.mark.parametrize("version", ["0.10.2", "0.33.0"])
@pytest.mark.parametrize("unset", [(), ("enable-chunked-prefill",)])
def test_prompts_of_encoders_are_never_chunked(find: Find, version: str, unset: tuple[str, ...]) -> None:
    encoder = replace(BF16, architecture="XLMRobertaModel", source="folder")
    flags = {"max-model-len": 8192, "max-num-batched-tokens": 2048, "enable-chunked-prefill": False}
    case: dict[str, Any] = {"facts": encoder, "version": version}
    for name in unset:
        del flags[name]
    (found,) = [one for one in find(**case, set=flags, unset=unset) if "chunk" in one.message]
    assert (found.code, found.level, found.surely) == ("batch_too_small", Level.ERROR, True)
    assert found.fix == Changes(set={"max-num-batched-tokens": 8192})
    asked = {**flags, "enable-chunked-prefill": True}
    (found,) = [one for one in find(**case, set=asked) if "chunk" in one.message]
    assert (found.code, found.level) == ("prompts_not_chunked", Level.WARNING)
    assert found.fix == Changes(set={"max-num-batched-tokens": 8192}, unset=("enable-chunked-prefill",))
    assert not [one for one in find(**case, set=found.fix.set, unset=found.fix.unset) if "chunk" in one.message]


def test_release_that_always_chunks_accepts_a_small_step(find: Find) -> None:
    small = {"max-num-batched-tokens": 2048, "enable-chunked-prefill": False}
    assert [one.code for one in find(set=small, version="0.10.2") if "chunk" in one.message] == ["chunked_prefill_off"]


def test_small_cache_takes_fp8_if_the_traffic_needs_the_length(find: Find) -> None:
    case: dict[str, Any] = {"preset": "long-document", "facts": BF16, "unset": ("kv-cache-dtype",)}
    host = machine(gpu(name="NVIDIA H100 PCIe", gib=30.0, able="9.0"))
    (found,) = [one for one in find(host=host, **case) if one.code == "kv_too_small"]
    assert found.fix == Changes(set={"kv-cache-dtype": "fp8"})


@pytest.mark.parametrize("source", list(Source))
def test_fp8_cache_is_judged_alike_whoever_set_it(find: Find, source: Source) -> None:
    choices = (Choice("kv-cache-dtype", "fp8", "it is small", source), Choice("max-model-len", 4096, "", Source.PRESET))
    (found,) = find(choices=choices)
    assert (found.code, found.level) == ("fp8_unsupported", Level.WARNING)
    assert found.fix == Changes(unset=("kv-cache-dtype",))
    assert "requires SM89+" in found.message
    assert "unless FlashInfer is installed and can compile its kernel (nvcc)" in found.message
    assert "may fail startup" in found.message
    by_name = find(set={"kv-cache-dtype": "fp8", "attention-backend": "FLASHINFER"})
    assert [one.code for one in by_name] == ["fp8_kv_slow"]
    assert "nvcc" in by_name[0].message


@pytest.mark.parametrize(
    ("method", "version", "asked", "fix"),
    [
        ("modelopt_fp4", "0.33.0", "auto", Changes(set={"kv-cache-dtype": "bfloat16"})),
        ("modelopt_fp4", "0.33.0", "fp8", Changes(set={"kv-cache-dtype": "bfloat16"})),
        ("compressed-tensors", "0.33.0", "auto", Changes(set={"kv-cache-dtype": "bfloat16"})),
        ("compressed-tensors", "0.20.0", "bfloat16", None),
    ],
)
def test_fp8_cache_of_the_checkpoint(find: Find, method: str, version: str, asked: str, fix: Changes | None) -> None:
    scaled = replace(BF16, quantization=Quantization(method, 4), kv_cache_quantization="fp8")
    (found,) = [one for one in find(facts=scaled, version=version, set={"kv-cache-dtype": asked})
                if one.code == "fp8_unsupported" and "fail startup" in one.message]  # fmt: skip
    assert (found.level, found.fix) == (Level.WARNING, fix)
    assert ("has scales for" in found.message) is (asked != "fp8")
    old = find(facts=scaled, version="0.13.0", set={"kv-cache-dtype": "auto"})
    assert not [one for one in old if "fail startup" in one.message]


def test_small_cache_takes_fp8_only_where_supported(find: Find) -> None:
    case: dict[str, Any] = {"preset": "long-document", "facts": BF16, "unset": ("kv-cache-dtype",)}
    for name, able, offered in (("NVIDIA RTX A6000", "8.6", False), ("NVIDIA L40S", "8.9", True)):
        found = find(host=machine(gpu(name=name, gib=30.0, able=able)), **case)
        (small,) = [one for one in found if one.code == "kv_too_small"]
        assert (small.fix == Changes(set={"kv-cache-dtype": "fp8"})) == offered


def test_lower_utilization_is_offered_only_if_the_model_fits(find: Find) -> None:
    host = machine(gpu(free_gib=20.0, used_gib=28.0, used_by=(Holder(1, "anna", 27.0, command="x"),)))
    (small,) = [one for one in find(host=host) if one.code == "memory_held"]
    assert small.fix == Changes(set={"gpu-memory-utilization": 0.41})
    (large,) = [
        one for one in find(host=host, facts=replace(BF16, weight_bytes=30 * 10**9)) if one.code == "memory_held"
    ]
    assert large.fix is None


def test_holder_of_the_memory_is_named(find: Find) -> None:
    (found,) = find(host=HELD)
    assert "anna holds 38.2 GiB" in found.message
    assert "9.4 GiB available" in found.message
    assert not found.surely


def test_force_overrides_only_uncertain_findings(find: Find) -> None:
    passing = {"memory_held", "gpu_lost", "gpu_in_mig_mode", "weights_do_not_fit", "kv_too_small", "disk_for_download"}
    for code, level, case in MADE:
        if level is Level.ERROR and code not in ("fp8_unsupported", "gpu_unsupported"):
            (found,) = [one for one in find(**case) if one.code == code]
            assert found.surely is (code not in passing), code


@pytest.mark.parametrize(
    ("name", "kind", "comparison"),
    [
        ("NVIDIA GeForce RTX 3090", "PHB", "63 GB/s: NVLink, available for these GPUs, carries 112 GB/s, 1.8×"),
        ("NVIDIA GeForce RTX 4090", "PHB", "63 GB/s (no NVLink on this GPU model)"),
        ("NVIDIA H100 PCIe", "NODE", "126 GB/s: NVLink, available for these GPUs, carries 600 GB/s, 4.8×"),
        ("something new", "NODE", "63 GB/s; use no more"),
    ],
)
def test_links_are_compared_by_their_bandwidth(find: Find, name: str, kind: str, comparison: str) -> None:
    def advice(width: int) -> str:
        model = find_model(name)
        fast = model.pcie_generation if model is not None else 4
        pair = [replace(gpu(i, name), pcie_generation_max=fast, pcie_width=width) for i in (0, 1)]
        host = Host(gpus=tuple(pair), links=(Link(0, 1, kind, bandwidth(kind, *pair)),))
        found = find(host=host, gpus=(0, 1), set={"tensor-parallel-size": 2})
        (slow,) = [one for one in found if one.code == "tp_over_pcie"]
        return slow.message

    assert f"at {comparison}" in advice(16)
    narrow = advice(8)
    assert comparison not in narrow
    assert "ten times" not in narrow
    if "1.8" in comparison:
        assert "at 31 GB/s" in narrow
        assert "3.6×" in narrow


CROWD: dict[str, Any] = {"facts": BF16, "host": machine(gpu(gib=24.0))}


def test_launch_below_its_workload_is_reported(find: Find) -> None:
    (found,) = [one for one in find(**CROWD) if one.code == "workload_not_held"]
    assert found.level is Level.WARNING
    assert found.fix is not None
    fitting = found.fix.set["max-num-seqs"]
    assert isinstance(fitting, int)
    worst = int(found.message.split(", or ")[1].split()[0])
    assert f"holds about {fitting} of " in found.message, "as many as the fix allows, shown once"
    assert fitting >= 1.3 * worst, "all at p95 of prompt and answer, at full length at once, is a worst case"
    assert "half of its output" in found.message
    (mended,) = [one for one in find(**CROWD, set=found.fix.set) if one.code == "workload_not_held"]
    assert "if that many are that long" in mended.message
    assert mended.fix is None
    (few,) = [one for one in find(**CROWD, set={"max-num-seqs": worst}) if one.code == "workload_not_held"]
    assert "the rest queue" in few.message


def test_context_is_compared_with_the_traffic(find: Find) -> None:
    (short,) = [one for one in find(set={"max-model-len": 2048}) if one.code == "context_below_traffic"]
    assert (short.level, short.fix) == (Level.WARNING, Changes(set={"max-model-len": 4096}))
    few = replace(AWQ, max_context=2048)
    (model,) = [one for one in find(facts=few, set={"max-model-len": 2048}) if one.code == "context_below_traffic"]
    assert model.fix is None
    assert "the model supports at most 2,048" in model.message
    (free,) = [one for one in find(unset=("max-model-len",)) if one.code == "context_not_limited"]
    assert (free.level, free.fix) == (Level.ADVICE, Changes(set={"max-model-len": 4096}))
    assert "131,072" in free.message
    near = replace(AWQ, max_context=8192)
    assert "context_not_limited" not in [one.code for one in find(facts=near, unset=("max-model-len",))]


def test_quantization_may_be_in_capitals(find: Find) -> None:
    assert "quantization_without_checkpoint" not in [one.code for one in find(facts=BF16, set={"quantization": "FP8"})]
    assert "quantization_mismatch" not in [one.code for one in find(facts=AWQ, set={"quantization": "AWQ"})]


def test_finding_from_a_table_is_not_certain(find: Find) -> None:
    (found,) = find(facts=replace(BF16, source="table"), set={"quantization": "awq"}, host=H100)
    assert found.code == "quantization_without_checkpoint"
    assert not found.surely


def test_worst_finding_comes_first(find: Find) -> None:
    levels = [one.level for one in find(host=HELD, set={"dtype": "float7", "kv-cache-dtype": "fp8"}, note="a note")]
    assert levels == sorted(levels, key=list(Level).index)
    assert len(set(levels)) == 3


def test_simulated_start_fails_on_what_the_engine_computes(find: Find) -> None:
    """It uses no GPU and downloads nothing, but refuses flags, lengths, layouts and memory like vLLM."""

    def errors(**more: Any) -> set[str]:
        return {one.code for one in find(build="simulated", **more) if one.level is Level.ERROR}

    assert errors(host=HELD) == set()
    assert errors(host=HELD, facts=SEVENTY) == {"weights_do_not_fit"}
    assert errors(facts=BF16, set={"max-model-len": BF16.max_context + 1}) == {"context_over_model"}
    assert errors(set={"max-model-len": 512, "num-gpu-blocks-override": 4, "block-size": 32}) == {"kv_too_small"}
    assert Level.ERROR in {one.level for one in find(build="simulated", set={"no-such-flag": 1})}


def test_mla_cache_does_not_limit_tensor_parallelism(find: Find) -> None:
    """Multi-head latent attention has one vector per token: its KV heads do not limit tensor parallelism."""
    latent = replace(BF16, heads=128, kv_heads=128, kv_lora_rank=512, qk_rope_head_dim=64)
    host = machine(*(gpu(i, "NVIDIA H100 80GB HBM3", 79.6, "9.0") for i in range(8)))
    assert find(facts=latent, host=host, set={"tensor-parallel-size": 8}) == []


def test_fp8_cache_of_latent_attention_split_over_gpus_fails_everywhere(find: Find) -> None:
    latent = replace(BF16, heads=128, kv_heads=128, kv_lora_rank=512, qk_rope_head_dim=64)
    host = machine(*(gpu(i, "NVIDIA H100 80GB HBM3", 79.6, "9.0") for i in range(8)))
    flags = {"tensor-parallel-size": 8, "decode-context-parallel-size": 8, "kv-cache-dtype": "fp8"}
    (found,) = [one for one in find(facts=latent, host=host, set=flags, version="0.24.0") if "fp8" in one.message]
    assert (found.code, found.level) == ("fp8_unsupported", Level.ERROR)
    assert found.fix == Changes(unset=("kv-cache-dtype",))
    assert "H100" not in found.message
    assert "will fail, at the latest in the first decode step: vLLM before 0.25" in found.message
    assert not [one for one in find(facts=latent, host=host, set=flags, version="0.25.0") if "fp8" in one.message]


def test_more_kv_copies_than_heads_are_allowed(find: Find) -> None:
    host = machine(*(gpu(i, "NVIDIA H100 80GB HBM3", 79.6, "9.0") for i in range(16)))
    assert find(facts=BF16, host=host, set={"tensor-parallel-size": 16}) == []


def test_every_rank_group_is_judged_separately(find: Find) -> None:
    """Pipeline stages exchange little: two pairs joined by NVLink may be far apart."""
    links = (Link(0, 1, "NV4"), Link(2, 3, "NV4"), *(Link(a, b, "SYS") for a in (0, 1) for b in (2, 3)))
    host = Host(gpus=tuple(map(gpu, range(4))), links=links, islands=((0, 1), (2, 3)))
    far = find(host=host, gpus=(0, 1, 2, 3), set={"tensor-parallel-size": 4})
    assert "tp_over_pcie" in [one.code for one in far]
    piped = find(host=host, gpus=(0, 1, 2, 3), set={"tensor-parallel-size": 2, "pipeline-parallel-size": 2})
    assert piped == []


ANNAS, BERTS = (
    replace(HELD.gpus[0], index=n, uuid=f"GPU-{n}a-5b", used_by=(Holder(4711, who, 38.2, command="python"),))
    for n, who in enumerate(("anna", "bert"))
)
SLICES = (MigInstance("MIG-c1", "3g.20gb", 19.6, 19.5, 1, 0), MigInstance("MIG-d2", "3g.20gb", 19.6, 0.5, 2, 0))
BOTH_HELD = Host(gpus=(ANNAS, BERTS, gpu(2, mig_mode=True, mig=SLICES)))


@pytest.mark.parametrize(
    ("devices", "judged"),
    [
        (None, ["anna"]),
        ("0", ["anna"]),
        ("1", ["bert"]),
        (" 1 , 0 ", ["bert", "anna"]),
        ("GPU-0a-5b", ["anna"]),
        ("GPU-1", ["bert"]),
        ("GPU-1a-5b,GPU-0", ["bert", "anna"]),
        ("MIG-d2", ["GPU 2"]),
        ("MIG-d", ["GPU 2"]),
        ("MIG-c1", []),
        *((odd, []) for odd in ("-1", "", "NoDevFiles", "GPU-", "GPU-9", "MIG-", "MIG-9", "7", "-1,0")),
        *((first, ["anna"]) for first in ("0,GPU-9", "0,-1", "0,,1")),
        ("\u0660", []),
        pytest.param("9" * 5000, [], id="long"),
    ],
)
def test_only_gpus_named_by_the_environment_are_judged(find: Find, devices: str | None, judged: list[str]) -> None:
    variables = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    own = find(host=BOTH_HELD, environment=variables)
    inherited = find(host=BOTH_HELD, host_environment={"variables": variables})
    for found in (own, inherited):
        messages = [one.message for one in found if one.code == "memory_held"]
        assert len(messages) == len(judged)
        assert all(name in text for name, text in zip(judged, messages, strict=True))


@pytest.mark.parametrize(
    ("devices", "gpus", "ending"),
    [
        ("0", (), "(tensor × pipeline × data parallel) and CUDA_VISIBLE_DEVICES names 1"),
        ("GPU-0,GPU-1,GPU-2", (), "and CUDA_VISIBLE_DEVICES names 3"),
        ("0,1,2,3", (), None),
        ("0,1,2,3,4,5,6,7", (), None),
        ("0", (0, 1, 2, 3), None),  # GPUs assigned to the launch replace the variable
        (None, (), None),
    ],
)
def test_gpus_that_the_environment_hides_are_not_there(
    find: Find, devices: str | None, gpus: tuple[int, ...], ending: str | None
) -> None:
    variables = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    case = {"host": machine(*map(gpu, range(4))), "gpus": gpus, "set": {"tensor-parallel-size": 4}}
    for where in ({"environment": variables}, {"host_environment": {"variables": variables}}):
        found = [one.message for one in find(**case, **where) if one.code == "gpus_too_few"]
        assert len(found) == (ending is not None)
        assert all(message.endswith(ending or "") for message in found)


def test_devices_hidden_by_a_launch_are_not_judged(find: Find) -> None:
    host_environment = {"variables": {"CUDA_VISIBLE_DEVICES": "0"}}
    assert "memory_held" in [one.code for one in find(host=BOTH_HELD, host_environment=host_environment)]
    hidden = find(host=BOTH_HELD, host_environment=host_environment, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert "memory_held" not in [one.code for one in hidden]


def test_block_override_that_limits_the_cache_is_removed(find: Find) -> None:
    few = {"max-model-len": 512, "num-gpu-blocks-override": 4, "block-size": 32}
    found = {one.code: one for one in find(set=few)}
    small, short = found["kv_too_small"], found["context_below_traffic"]
    assert small.message.endswith("--num-gpu-blocks-override 4 limits it, and without it fits")
    assert small.fix == Changes(unset=("num-gpu-blocks-override",))
    assert short.message.endswith("longer ones are rejected; 4,096 fit without --num-gpu-blocks-override 4")
    assert short.fix == Changes(set={"max-model-len": 4096}, unset=("num-gpu-blocks-override",))
    held = {one.code: one for one in find(set={"num-gpu-blocks-override": 600})}["workload_not_held"]
    assert "--num-gpu-blocks-override 600 limits it: unset it" in held.message
    assert held.fix == Changes(unset=("num-gpu-blocks-override",))
    assert "more GPUs" not in held.message


@pytest.mark.parametrize(
    ("name", "size", "codes"),
    [
        ("kv-cache-memory-bytes", "60G", ["kv_cache_too_large"]),
        ("kv-cache-memory-bytes", "20G", []),
        ("kv-cache-memory-bytes", 20 * 2**30, []),
        ("num-gpu-blocks-override", 1_000_000, ["kv_cache_too_large"]),
        ("num-gpu-blocks-override", "01000000", ["kv_cache_too_large"]),
        ("num-gpu-blocks-override", 4000, []),
    ],
)
def test_fixed_cache_must_fit_next_to_the_weights(find: Find, name: str, size: int | str, codes: list[str]) -> None:
    found = [one for one in find(set={name: size}) if one.level is Level.ERROR]
    assert [one.code for one in found] == codes
    for one in found:
        assert not one.surely
        assert one.fix is not None
        assert [again for again in find(set=one.fix.set) if again.level is Level.ERROR] == []


@pytest.mark.parametrize(
    ("size", "build", "level"),
    [
        (-1, "cuda", Level.ERROR),
        ("-5", "cuda", Level.ERROR),
        (0, "cuda", Level.WARNING),
        (0, "cpu", Level.ERROR),
    ],
)
def test_empty_cache_size_is_refused_or_ignored_like_vllm(
    find: Find, size: int | str, build: str, level: Level
) -> None:
    environment = {"VLLM_CPU_KVCACHE_SPACE": "4"} if build == "cpu" else {}
    found = find(set={"kv-cache-memory-bytes": size}, build=build, environment=environment)
    assert [one.level for one in found if one.code == "flag_value"] == [level]


@pytest.mark.parametrize(
    ("workload", "itl", "flags", "gpus", "reason"),
    [
        (Workload(40_000, 1000, 0.1, 16), 0.04, {}, 2, "a separate prefill instance (disaggregated prefill)"),
        (Workload(40_000, 1000, 0.1, 16), 0.035, {}, 2, ""),  # would be missed even without the prompts
        (Workload(40_000, 1000, 0.1, 16), 0.04, {}, 1, ""),  # there is no GPU for it
        (Workload(40_000, 1000, 0.1, 16), 0.04, {"kv-transfer-config": "{}"}, 2, ""),  # already in use
        (Workload(40_000, 1000, 0.1, 16), 0.04, {"kv-transfer-config.kv_connector": "NixlConnector"}, 2, ""),
        (Workload(4000, 1000, 0.1, 16), 0.04, {}, 2, ""),  # prompts are not what takes the time
        (Workload(40_000, 1000, 0.1, 16), 0.08, {}, 2, ""),  # the objective is met
        (Workload(1000, 500, 0.1, 8), 0.025, {}, 1, "TensorRT-LLM"),
        (Workload(1000, 500, 0.1, 8), 0.019, {}, 1, ""),  # no engine is that fast on this GPU
        (Workload(1000, 500, 0.8, 8), 0.1, {}, 1, "80% of each prompt is shared with other requests: SGLang"),
        (Workload(1000, 500, 0.6, 8), 0.1, {}, 1, ""),
        (Workload(1000, 500, 0.1, 8), 0.1, {"structured-outputs-config": "{}"}, 1, "SGLang"),
    ],
)
def test_workload_that_suits_another_tool_names_it_with_the_reason(
    workload: Workload, itl: float, flags: dict[str, Any], gpus: int, reason: str
) -> None:
    """A launch in which a token takes 20 ms with one request, and 60 ms with all, or 38 ms without their prompts."""
    engine = Engine(EngineKind.VLLM, ("vllm",), "0.33.0", "cuda", "")
    full = workload.concurrency
    paces = Paces(Pace(1, 0.02, 50.0), None, Pace(full, 0.06, full / 0.06), Pace(full, 0.038, full / 0.038))
    plan = Plan("mine", AWQ.model, engine, "127.0.0.1", 8000, (), flags, {}, {}, gpus=(0,), paces=paces)
    host = machine(*(gpu(index) for index in range(gpus)))
    found = list(other_tools(plan, PlanInputs(AWQ, host=host), workload, _no_budget, Objectives(1.0, itl, 0.9, 0.02)))
    assert [reason in one.message for one in found] == ([True] if reason else []), found
    assert all("(source: " in one.message and one.level is Level.ADVICE for one in found)


@pytest.mark.parametrize(
    ("workload", "itl", "hosts"),
    [
        (Workload(40_000, 1000, 0.1, 16), 0.04, machine(gpu(0), gpu(1, free_gib=2.0))),
        (Workload(40_000, 1000, 0.1, 16), 0.04, machine(gpu(0), gpu(1, name="NVIDIA T4", gib=15.0))),
        (Workload(1000, 500, 0.1, 8), 0.025, machine(gpu(0, name="Tesla T4", gib=15.0, able="7.5"))),
        (Workload(1000, 500, 0.8, 8), 0.1, machine(gpu(0, name="Tesla V100", gib=32.0, able="7.0"))),
    ],
    ids=["taken", "smaller", "no TensorRT-LLM", "no SGLang"],
)
def test_tool_that_these_gpus_cannot_run_is_not_named(workload: Workload, itl: float, hosts: Host) -> None:
    engine = Engine(EngineKind.VLLM, ("vllm",), "0.33.0", "cuda", "")
    full = workload.concurrency
    paces = Paces(Pace(1, 0.02, 50.0), None, Pace(full, 0.06, full / 0.06), Pace(full, 0.03, full / 0.03))
    plan = Plan("mine", AWQ.model, engine, "127.0.0.1", 8000, (), {}, {}, {}, gpus=(0,), paces=paces)
    assert not list(
        other_tools(plan, PlanInputs(AWQ, host=hosts), workload, _no_budget, Objectives(1.0, itl, 0.9, 0.02))
    )


@pytest.mark.parametrize(("method", "plugin"), [("gguf", "vllm-gguf-plugin"), ("bitsandbytes", "vllm-bnb-plugin")])
def test_plugin_format_is_refused_without_its_plugin(find: Find, method: str, plugin: str) -> None:
    case = {"facts": replace(BF16, quantization=Quantization(method)), "set": {"quantization": method}}
    dropped = [one for one in find(**case) if one.level is Level.ERROR]
    assert {one.code for one in dropped} == {"quantization_dropped", "flag_value"}
    assert all(plugin in one.message for one in dropped)
    assert [one for one in find(**case, plugins=(plugin,)) if one.level is Level.ERROR] == []


def test_other_tool_is_named_once_and_only_where_applicable(find: Find) -> None:
    small = machine(gpu(name="NVIDIA GeForce RTX 3060", gib=12.0, able="8.6"))
    one = PlanInputs(AWQ, host=small)
    alone, many = (Workload(500, 100, 0.0, concurrency) for concurrency in (1, 8))
    lax = Objectives(1.0, 1.0, 0.9, 0.02)
    engine = Engine(EngineKind.VLLM, ("vllm",), "0.33.0", "cuda", "")
    plan_of = Plan("mine", AWQ.model, engine, "127.0.0.1", 8000, (), {}, {}, {}, gpus=(0,))
    assert "12 GiB" in next(other_tools(plan_of, one, alone, _no_budget, lax)).message
    assert list(other_tools(plan_of, one, many, _no_budget, lax)) == []
    assert list(other_tools(plan_of, PlanInputs(AWQ, host=PAIR), alone, _no_budget, lax)) == []
    (found,) = [one for one in find(host=P100, facts=SEVENTY) if one.code == "other_tool"]
    assert "does not support" in found.message


MOE = replace(
    FP8, architecture="Qwen3MoeForCausalLM", quantization=Quantization("fp8", 8, block=(128, 128)), kv_heads=4,
    experts=128, experts_per_token=8, expert_intermediate_size=768, weight_bytes=31 * 10**9,
)  # fmt: skip
"""Like Qwen3-30B-A3B-FP8: its experts can't be split over 4 GPUs."""
FOUR = machine(*map(gpu, range(4)))
SMALL_FOUR = machine(*(gpu(index, gib=24.0) for index in range(4)))
VLLM_REFUSES = {
    "batch_too_small", "context_over_model", "experts_not_divisible", "flag_dead", "flag_unknown", "flag_value",
    "gpus_too_few", "no_experts", "tp_not_divisor",
}  # fmt: skip


def newly_refused(find: Find, case: dict[str, Any]) -> list[tuple[str, Changes]]:
    """Fixes of a launch after which vLLM would refuse something that it accepts now."""

    def key(one: PlanFinding) -> tuple[str, str]:
        return one.code, one.message if one.code == "flag_value" else ""

    found = find(**case)
    known = {key(one) for one in found}
    wrong = []
    for one in found:
        if one.fix is None:
            continue
        changed = {name: value for name, value in {**case.get("set", {}), **one.fix.set}.items()
                   if name not in one.fix.unset}  # fmt: skip
        again = find(**{**case, "set": changed, "unset": (*case.get("unset", ()), *one.fix.unset)})
        errors = [new for new in again if new.level is Level.ERROR and key(new) not in known]
        wrong += [(one.code, one.fix) for new in errors if new.code in VLLM_REFUSES]
    return wrong


@pytest.mark.parametrize(
    ("code", "fixed", "case"),
    [
        ("context_not_limited", True, {"set": {"long-prefill-token-threshold": 4096}, "unset": ("max-model-len",)}),
        ("context_not_limited", True, {"set": {"long-prefill-token-threshold": 4096}, "unset": ("max-model-len",),
                                       "version": None}),
        ("kv_too_small", False, {"facts": BF16, "host": SMALL, "unset": ("max-model-len",),
                                 "set": {"enable-chunked-prefill": False, "max-num-batched-tokens": 1024}}),
        ("workload_not_held", True, {"facts": BF16, "host": SMALL, "set": {"max-num-active-seqs": 200}}),
        ("gpus_unused", False, {"host": FOUR, "gpus": (0, 1, 2, 3), "facts": MOE}),
        ("gpus_unused", False, {"host": machine(*map(gpu, range(3))), "gpus": (0, 1, 2), "facts": None}),
        ("gpus_too_few", True, {"host": machine(*map(gpu, range(3))), "facts": None,
                                "set": {"tensor-parallel-size": 4}}),
        ("gpus_too_few", True, {"host": FOUR, "facts": MOE, "set": {"tensor-parallel-size": 8}}),
        ("weights_do_not_fit", True, {"host": SMALL_FOUR, "facts": MOE}),
        ("weights_do_not_fit", True, {"host": FOUR, "facts": SEVENTY,
                                      "set": {"tensor-parallel-size": 2, "decode-context-parallel-size": 2}}),
        ("tp_over_pcie", False, {"host": APART, "gpus": (0, 1), "set": {"tensor-parallel-size": 2,
                                                                        "decode-context-parallel-size": 2}}),
        ("no_experts", True, {"host": PAIR, "gpus": (0, 1), "set": {"tensor-parallel-size": 2,
                              "enable-expert-parallel": True, "enable-eplb": True}}),
        ("flag_dead", False, {"set": {"num-redundant-experts": 1}}),
        ("flag_dead", False, {"set": {"guided-decoding-disable-any-whitespace": True}}),
        ("flag_dead", False, {"set": {"override-pooler-config": "x"}}),
        ("variable_dead", False, {"environment": {"VLLM_ATTENTION_BACKEND": "PALLAS"}}),
        ("pp_on_cpu", True, {"build": "cpu", "host": None, "set": {"pipeline-parallel-size": 3}}),
        ("pp_on_cpu", True, {"build": "cpu", "host": None, "facts": None, "set": {"pipeline-parallel-size": 3}}),
    ],
)  # fmt: skip
def test_no_fix_leads_to_flags_that_vllm_refuses(find: Find, code: str, fixed: bool, case: dict[str, Any]) -> None:
    (found,) = [one for one in find(**case) if one.code == code]
    assert (found.fix is not None) is fixed, found
    assert newly_refused(find, case) == []


def test_adapters_on_whole_experts_are_an_error(find: Find) -> None:
    case: dict[str, Any] = {"host": FOUR, "facts": MOE, "version": "0.16.0"}
    flags: dict[str, Any] = {"tensor-parallel-size": 4, "enable-lora": True}
    whole = {**flags, "enable-expert-parallel": True}
    (found,) = [one for one in find(**case, set=whole) if one.code == "flag_value"]
    assert found.level is Level.ERROR
    assert "--enable-expert-parallel does not work with --enable-lora in this release" in found.message
    assert found.fix is None  # the blocks of its experts do not divide over 4 GPUs either
    (found,) = [one for one in find(**case, set={**whole, "tensor-parallel-size": 2}) if one.code == "flag_value"]
    assert found.fix == Changes(unset=("enable-expert-parallel",))
    (found,) = [one for one in find(**case, set=flags) if one.code == "experts_not_divisible"]
    assert found.fix is None
    assert "does not work with --enable-lora in this release" in found.message


@pytest.mark.parametrize(
    ("architecture", "version", "refused"),
    [
        ("MixtralForCausalLM", "0.20.0", True),
        ("MixtralForCausalLM", "0.21.0", False),
        ("MixtralForCausalLM", "0.33.0", False),
        ("Qwen3MoeForCausalLM", "0.33.0", True),
        (None, "0.33.0", True),
    ],
)
def test_adapters_on_whole_experts_of_both_sizes(
    find: Find, architecture: str | None, version: str, refused: bool
) -> None:
    """Only sequence parallelism prevents them since 0.21, and some models don't use it."""
    flags: dict[str, Any] = {"tensor-parallel-size": 2, "data-parallel-size": 2}
    flags |= {"enable-lora": True, "enable-expert-parallel": True}
    found = find(host=FOUR, facts=replace(MOE, architecture=architecture), version=version, set=flags)
    errors = [one for one in found if "does not work with --enable-lora" in one.message]
    assert [one.level for one in errors] == [Level.ERROR] * refused
    assert not any(one.surely for one in errors)


HYBRID = replace(BF16, model_type="qwen3_next", layers=(LayerKind.LINEAR, LayerKind.LINEAR, LayerKind.FULL) * 10)
STATES = replace(HYBRID, state_bytes=32 * 2**20)
DRAFTS = {"speculative-config": '{"method": "qwen3_next_mtp", "num_speculative_tokens": 2}'}
WHOLE_PROMPTS = {"enable-chunked-prefill": False, "max-num-batched-tokens": 16384}


@pytest.mark.parametrize(
    ("flags", "unset", "asked"),
    [
        ({"max-num-seqs": 256}, (), "--max-num-seqs 256"),
        ({}, ("max-num-seqs",), "its own default of 256 sequences (--max-num-seqs)"),
    ],
)
def test_more_sequences_than_states_prevent_the_start(
    find: Find, flags: dict[str, Any], unset: tuple[str, ...], asked: str
) -> None:
    (found,) = [one for one in find(set=flags, unset=unset, facts=STATES) if one.code == "states_too_few"]
    assert (found.level, found.surely) == (Level.ERROR, False)
    assert f"vLLM will refuse {asked}: each sequence needs a KV cache block" in found.message
    assert found.fix is not None
    (fewer,) = found.fix.set.values()
    assert isinstance(fewer, int)
    assert 16 <= fewer < 256
    for sequences, refused in ((fewer, False), (fewer + 8, True)):
        again = find(set={"max-num-seqs": sequences}, facts=STATES)
        assert ("states_too_few" in [one.code for one in again]) is refused


@pytest.mark.parametrize("flags", [DRAFTS, {"kv-transfer-config": '{"kv_connector": "NixlConnector"}'}])
def test_more_sequences_than_states_may_be_accepted_without_graphs_of_whole_steps(
    find: Find, flags: dict[str, Any]
) -> None:
    found = find(set={"max-num-seqs": 256, "enable-prefix-caching": False, **flags}, facts=STATES)
    (few,) = [one for one in found if one.code == "states_too_few"]
    assert few.level is Level.WARNING
    assert "vLLM may refuse --max-num-seqs 256" in few.message


@pytest.mark.parametrize("version", ["0.19.1", "0.33.0"])
@pytest.mark.parametrize("eager", [False, True])
def test_more_sequences_than_states_are_accepted_without_the_check(find: Find, version: str, eager: bool) -> None:
    flags: dict[str, Any] = {"max-num-seqs": 256, **({"enforce-eager": True} if eager else {})}
    codes = [one.code for one in find(set=flags, facts=STATES, version=version)]
    assert ("states_too_few" in codes) is (version == "0.33.0" and not eager)


def test_more_sequences_than_states_are_no_error_of_a_simulated_engine(find: Find) -> None:
    found = find(set={"max-num-seqs": 256}, facts=STATES, build="simulated")
    (few,) = [one for one in found if one.code == "states_too_few"]
    assert few.level is Level.WARNING


@pytest.mark.parametrize(("version", "level"), [("0.21.0", Level.WARNING), ("0.22.0", Level.ERROR)])
def test_latent_attention_had_no_graphs_of_whole_steps_everywhere(find: Find, version: str, level: Level) -> None:
    latent = replace(STATES, kv_lora_rank=512, qk_rope_head_dim=64)
    found = find(set={"max-num-seqs": 1024}, facts=latent, version=version)
    assert [one.level for one in found if one.code == "states_too_few"] == [level]


@pytest.mark.parametrize(
    ("flags", "version", "refused"),
    [
        ({"kv-events-config.publisher": "zmq"}, "0.16.0", "--kv-events-config in this release"),
        ({"kv-events-config.publisher": "zmq"}, "0.20.0", ""),
        ({"kv-transfer-config": '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}'}, "0.16.0", ""),
        ({}, "0.13.0", "the chunked attention of this model and these settings"),
        ({}, "0.14.0", ""),
    ],
)
def test_hybrid_cache_manager_is_asked_for_beside_what_forbids_it(
    find: Find, flags: dict[str, Any], version: str, refused: str
) -> None:
    chunked = replace(BF16, layers=(LayerKind.CHUNKED, LayerKind.FULL) * 15, window=8192)
    found = find(set={"disable-hybrid-kv-cache-manager": False, **flags}, version=version, facts=chunked)
    errors = [one.message for one in found if "--no-disable-hybrid-kv-cache-manager does not work" in one.message]
    assert len(errors) == bool(refused)
    assert all(one.endswith(f"does not work with {refused}") for one in errors)


@pytest.mark.parametrize(
    ("flags", "version", "unset"),
    [
        ({"disable-hybrid-kv-cache-manager": True}, "0.33.0", "disable-hybrid-kv-cache-manager"),
        ({"disable-hybrid-kv-cache-manager": False}, "0.33.0", ""),
        ({"kv-transfer-config": '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}'}, "0.33.0",
         "kv-transfer-config"),
        ({"kv-transfer-config": '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'}, "0.33.0", ""),
        ({"kv-transfer-config": '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'}, "0.20.0",
         "kv-transfer-config"),
        ({"kv-transfer-config": '{"kv_connector": "MoRIIOConnector", "kv_role": "kv_both"}'}, "0.29.0",
         "kv-transfer-config"),
        ({"kv-transfer-config": '{"kv_connector": "MoRIIOConnector", "kv_role": "kv_both"}'}, "0.30.0", ""),
        ({"kv-events-config.publisher": "zmq"}, "0.16.0", "kv-events-config.publisher"),
    ],
)  # fmt: skip
def test_states_beside_attention_need_the_hybrid_cache_manager(
    find: Find, flags: dict[str, Any], version: str, unset: str
) -> None:
    without = ("enable-prefix-caching",)
    found = find(set=flags, unset=without, version=version, facts=HYBRID)
    refused = [one for one in found if "hybrid KV cache manager" in one.message]
    assert [(one.level, one.surely, one.fix) for one in refused] == (
        [(Level.ERROR, True, Changes(unset=(unset,)))] if unset else []
    )
    for one in refused:
        assert ("--no-disable-hybrid-kv-cache-manager keeps it on" in one.message) is (
            version == "0.20.0" and unset == "kv-transfer-config"
        )
    only = replace(HYBRID, layers=(LayerKind.LINEAR, LayerKind.NONE) * 12)
    for facts in (BF16, only):
        messages = [one.message for one in find(set=flags, unset=without, version=version, facts=facts)]
        assert not any("hybrid KV cache manager" in one for one in messages)


SIZE, NATIVE, LMCACHE = (
    {"kv-offloading-size": 4},
    {"kv-offloading-backend": "native"},
    {"kv-offloading-backend": "lmcache"},
)
ONE_KIND = Changes(set={"disable-hybrid-kv-cache-manager": True})


@pytest.mark.parametrize(
    ("flags", "version", "facts", "fix"),
    [
        (SIZE, "0.13.0", BF16, None),
        (SIZE | NATIVE, "0.12.0", BF16, ONE_KIND),
        (SIZE, "0.14.0", BF16, ONE_KIND),
        (SIZE, "0.20.0", BF16, ONE_KIND),
        (SIZE, "0.21.0", BF16, None),
        (SIZE | LMCACHE, "0.21.0", BF16, ONE_KIND),
        (SIZE | LMCACHE, "0.22.0", BF16, None),
        (SIZE | {"disable-hybrid-kv-cache-manager": True}, "0.20.0", BF16, None),
        (SIZE, "0.20.0", HYBRID, Changes(unset=("kv-offloading-size",))),
        (SIZE, "0.21.0", HYBRID, None),
    ],
)
def test_offloading_needed_one_kind_of_cache(
    find: Find, flags: dict[str, Any], version: str, facts: ModelFacts, fix: Changes | None
) -> None:
    found = find(set=flags, unset=("enable-prefix-caching",), version=version, facts=facts)
    refused = [one for one in found if "in this release, --kv-offloading-size" in one.message]
    assert [(one.level, one.surely, one.fix) for one in refused] == ([(Level.ERROR, True, fix)] if fix else [])


@pytest.mark.parametrize(("version", "refused"), [("0.22.0", True), ("0.23.0", False)])
def test_offloading_to_lmcache_turned_off_the_hybrid_cache_manager(find: Find, version: str, refused: bool) -> None:
    found = find(set=SIZE | LMCACHE, unset=("enable-prefix-caching",), version=version, facts=HYBRID)
    errors = [one for one in found if "turns off the hybrid KV cache manager" in one.message]
    assert [one.fix for one in errors] == [Changes(unset=("kv-offloading-size", "kv-offloading-backend"))] * refused


def test_other_connector_of_offloaded_blocks_supports_several_kinds(find: Find) -> None:
    variable = {"VLLM_USE_SIMPLE_KV_OFFLOAD": "1"}
    for version, flags, refused in (("0.18.1", SIZE, True), ("0.20.0", SIZE, False), ("0.20.0", SIZE | LMCACHE, True)):
        found = find(set=flags, version=version, facts=BF16, environment=variable)
        assert any("--kv-offloading-size needs" in one.message for one in found) is refused


@pytest.mark.parametrize(
    ("flags", "version", "model_type", "unset"),
    [
        ({"enable-prefix-caching": True, **DRAFTS}, "0.16.0", "qwen3_next", "enable-prefix-caching"),
        ({"enable-prefix-caching": True, **DRAFTS}, "0.17.0", "qwen3_next", ""),
        ({"enable-prefix-caching": True, **DRAFTS}, "0.16.0", "nemotron_h", "speculative-config"),
        ({"enable-prefix-caching": True, **DRAFTS}, "0.16.0", "kimi_linear", "speculative-config"),
        ({"enable-prefix-caching": False, **DRAFTS}, "0.16.0", "qwen3_next", ""),
        ({"enable-prefix-caching": True, "async-scheduling": True}, "0.16.0", "qwen3_next", "async-scheduling"),
        ({"enable-prefix-caching": True, "async-scheduling": True}, "0.16.0", "nemotron_h", "async-scheduling"),
        ({"enable-prefix-caching": True, "async-scheduling": True}, "0.17.0", "qwen3_next", ""),
        ({"async-scheduling": True}, "0.16.0", "qwen3_next", ""),
        (DRAFTS, "0.10.2", "qwen3_next", ""),
        (DRAFTS, "0.10.2", "falcon_h1", "speculative-config"),
        (DRAFTS, "0.16.0", "falcon_h1", "speculative-config"),
        (DRAFTS, "0.17.0", "falcon_h1", ""),
        ({"speculative-config.method": "ngram", "speculative-config.num_speculative_tokens": 2}, "0.16.0", "falcon_h1",
         "speculative-config.method speculative-config.num_speculative_tokens"),
        ({"enable-prefix-caching": True, **WHOLE_PROMPTS}, "0.16.0", "qwen3_next", "enable-chunked-prefill"),
        ({"enable-prefix-caching": True, **WHOLE_PROMPTS}, "0.14.1", "qwen3_next", ""),
        ({"enable-prefix-caching": True, **WHOLE_PROMPTS}, "0.25.0", "nemotron_h", ""),
        ({"enable-prefix-caching": True, **WHOLE_PROMPTS}, "0.33.0", "nemotron_h", "enable-chunked-prefill"),
        ({"enable-prefix-caching": True, "mamba-cache-mode": "all", **WHOLE_PROMPTS}, "0.30.0", "nemotron_h", ""),
        (WHOLE_PROMPTS, "0.27.0", "qwen3_next", ""),
        (WHOLE_PROMPTS, "0.28.0", "qwen3_next", "enable-chunked-prefill"),
        ({"enable-prefix-caching": False, **WHOLE_PROMPTS}, "0.33.0", "qwen3_next", ""),
        ({"enable-prefix-caching": True, "disable-chunked-mm-input": True}, "0.33.0", "qwen3_next",
         "disable-chunked-mm-input"),
    ],
)  # fmt: skip
def test_flags_that_vllm_refuses_with_cached_states(
    find: Find, flags: dict[str, Any], version: str, model_type: str, unset: str
) -> None:
    facts = replace(HYBRID, model_type=model_type)
    without = tuple({"enable-prefix-caching", "enable-chunked-prefill"} - flags.keys())
    found = find(set=flags, unset=without, version=version, facts=facts)
    refused = [one for one in found if one.level is Level.ERROR and "linear-attention layers" in one.message]
    assert [one.fix for one in refused] == ([Changes(unset=tuple(unset.split()))] if unset else [])
    assert all(one.surely for one in refused)
    warned = "chunked_prefill_off" in [one.code for one in found]
    assert warned is ("enable-chunked-prefill" in flags and not unset)


SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "enable-prefix-caching": st.booleans(),
    "disable-chunked-mm-input": st.just(True),
    "enable-lora": st.booleans(),
    "tensor-parallel-size": st.sampled_from([1, 2, 3, 4, 8]),
    "pipeline-parallel-size": st.sampled_from([1, 2, 3, 40]),
    "data-parallel-size": st.sampled_from([1, 2]),
    "decode-context-parallel-size": st.sampled_from([1, 2, 4]),
    "enable-expert-parallel": st.booleans(),
    "enable-eplb": st.booleans(),
    "enable-chunked-prefill": st.booleans(),
    "max-num-batched-tokens": st.sampled_from([64, 1024, 2048, 8192]),
    "max-num-seqs": st.sampled_from([8, 256, 4000]),
    "max-num-active-seqs": st.sampled_from([8, 300]),
    "max-model-len": st.sampled_from([512, 4096, 131_072, 200_000]),
    "long-prefill-token-threshold": st.sampled_from([256, 4096]),
    "num-gpu-blocks-override": st.sampled_from([10, 5000, 10**6]),
    "gpu-memory-utilization": st.sampled_from([0.4, 0.9, 0.98]),
    "swap-space": st.just(4),
    "num-redundant-experts": st.just(1),
    "kv-cache-dtype": st.just("fp8"),
}


@given(
    flags=st.fixed_dictionaries({}, optional=SETTINGS),
    unset=st.sampled_from([(), ("max-model-len",), ("max-num-batched-tokens", "max-num-seqs")]),
    facts=st.sampled_from([BF16, AWQ, MOE, SEVENTY, HYBRID, None, replace(AWQ, model_type="gemma4", multimodal=True)]),
    host=st.sampled_from([A_GPU, SMALL, PAIR, APART, FOUR, SMALL_FOUR, HELD]),
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_fix_is_refused_for_any_set_flags(
    find: Find, flags: dict[str, Any], unset: tuple[str, ...], facts: ModelFacts | None, host: Host
) -> None:
    unset = tuple(name for name in unset if name not in flags)
    assert newly_refused(find, {"set": flags, "unset": unset, "facts": facts, "host": host}) == []


@pytest.mark.parametrize(("free", "starts"), [(42.9, False), (43.2, True)])
def test_required_memory_is_a_share_of_what_cuda_sees(find: Find, free: float, starts: bool) -> None:
    """47.5 of 48 GiB, of which 0.9 are 42.8; plus what CUDA takes before vLLM measures."""
    held = machine(gpu(free_gib=free, used_gib=48.0 - free, used_by=(Holder(1, "anna", 4.0, command="x"),)))
    found = [one.message for one in find(host=held, set={"gpu-memory-utilization": 0.9}) if one.code == "memory_held"]
    assert (found == []) is starts
    words = "0.9 (43.3 GiB: its share of 47.5 GiB usable, and 0.5 for CUDA itself), so vLLM"
    assert all(words in message for message in found)


def test_offered_utilization_is_free_on_every_gpu(find: Find) -> None:
    held = machine(gpu(0, free_gib=30.0, used_gib=18.0), gpu(1, free_gib=20.0, used_gib=28.0))
    found = [one for one in find(host=held, set={"tensor-parallel-size": 2}) if one.code == "memory_held"]
    assert [one.fix for one in found] == [Changes(set={"gpu-memory-utilization": 0.41})] * 2


@pytest.mark.parametrize(
    "case",
    [
        {"set": {"enable-dbo": True, "all2all-backend": "nixl_ep"}},
        {"set": {"enable-dbo": True}, "build": "cpu", "host": None},
        {"set": {"enable-dbo": True}, "version": "0.12.0"},
    ],
)
def test_overlapped_batches_that_may_run(find: Find, case: dict[str, Any]) -> None:
    assert "flag_value" not in [one.code for one in find(**case)]


@pytest.mark.parametrize(
    ("case", "refused"),
    [
        ({"set": {"kv-cache-dtype": "float16"}}, True),
        ({"set": {"kv-cache-dtype": "bfloat16"}}, False),
        ({"set": {"kv-cache-dtype": "float16", "dtype": "float16"}}, False),
        ({"set": {"kv-cache-dtype": "float16"}, "version": "0.32.0"}, False),
        ({"set": {"kv-cache-dtype": "float16"}, "host": T4}, False),
    ],
)
def test_float_cache_must_have_the_format_of_the_model(find: Find, case: dict[str, Any], refused: bool) -> None:
    found = [one for one in find(facts=BF16, **{"host": H100, **case}) if one.code == "flag_value"]
    assert [one.fix for one in found] == [Changes(unset=("kv-cache-dtype",))] * refused


def test_backends_of_overlapped_batches_depend_on_the_release(find: Find) -> None:
    for version, offered in (("0.20.0", False), ("0.24.0", True)):
        (found,) = [one for one in find(set={"enable-dbo": True}, version=version) if one.code == "flag_value"]
        assert ("nixl_ep" in found.message) == offered


@pytest.mark.parametrize(("version", "sure"), [("0.20.0", True), ("0.23.0", False)])
def test_batches_are_not_overlapped_over_nixl_before_0_24(find: Find, version: str, sure: bool) -> None:
    flags = {"enable-dbo": True, "all2all-backend": "nixl_ep"}
    (found,) = [one for one in find(set=flags, version=version) if "enable-dbo" in one.message]
    assert (found.level, found.surely, found.fix) == (Level.ERROR, sure, Changes(unset=("enable-dbo",)))


def test_unknown_quantization_is_one_error(find: Find) -> None:
    (found,) = [one for one in find(facts=BF16, set={"quantization": "foo"}) if one.level is Level.ERROR]
    assert (found.code, found.message) == ("flag_value", "vLLM 0.33.0 does not support --quantization foo")


def test_attention_backend_is_judged_only_where_surely_refused(find: Find) -> None:
    latent = replace(BF16, kv_lora_rank=512)
    asked = {"attention-backend": "FLASH_ATTN_MLA"}
    for case in (
        {"facts": latent, "set": asked},
        {"facts": replace(BF16, architecture="UnknownForCausalLM"), "set": asked},
        {"facts": BF16, "set": {}, "version": "0.12.0", "environment": {"VLLM_ATTENTION_BACKEND": "FLASH_ATTN_MLA"}},
        {"facts": BF16, "set": asked, "version": None},
        {"facts": BF16, "set": asked, "build": "cpu", "host": None},
        {"facts": latent, "set": {"attention-backend": "FLASH_ATTN"}, "environment": {"VLLM_MLA_DISABLE": "1"}},
    ):
        assert "attention_backend" not in [one.code for one in find(**case)], case


def test_deprecated_format_is_refused_only_where_that_was_checked(find: Find) -> None:
    stored = replace(FP8, quantization=Quantization("fbgemm_fp8", 8))
    for version in ("0.15.1", None):
        assert "quantization_deprecated" not in [one.code for one in find(facts=stored, host=H100, version=version)]


def test_weights_of_torchao_need_its_package(find: Find) -> None:
    case: dict[str, Any] = {"facts": replace(BF16, quantization=Quantization("torchao"))}
    assert find(**case) == []
    (found,) = [one for one in find(**case, lacks=("torchao",)) if one.level is Level.ERROR]
    assert (found.code, found.fix) == ("package_missing", None)
    assert "pip install torchao" in found.message
    (found,) = find(**case, lacks=("torchao",), environment={"PYTHONPATH": "/packages"})
    assert (found.code, found.level) == ("package_missing", Level.WARNING)
    plain: dict[str, Any] = {"facts": BF16, "set": {"quantization": "torchao"}, "lacks": ("torchao",)}
    assert [one.code for one in find(**plain)] == ["quantization_without_checkpoint"]


def test_folder_without_a_tokenizer_needs_another_one(find: Find) -> None:
    bare = replace(AWQ, tokenizer_missing=True)
    (found,) = find(facts=bare)
    assert (found.code, found.level, found.surely) == ("tokenizer_missing", Level.ERROR, True)
    for flags in ({"tokenizer": "org/other"}, {"skip-tokenizer-init": True}):
        assert "tokenizer_missing" not in [one.code for one in find(facts=bare, set=flags)]
    assert "tokenizer_missing" not in [one.code for one in find(facts=bare, build="simulated")]


def test_tensor_parallelism_on_one_gpu_is_turned_off(find: Find) -> None:
    (found,) = [one for one in find(set={"tensor-parallel-size": 2}) if one.code == "gpus_too_few"]
    assert found.fix == Changes(set={"tensor-parallel-size": 1})
    large = replace(AWQ, weight_bytes=57 * 10**9)
    (found,) = [one for one in find(facts=large, set={"tensor-parallel-size": 2}) if one.code == "gpus_too_few"]
    assert found.fix is None
    assert found.message.endswith("it does not fit: use a quantized or smaller model")


def test_tensor_parallelism_on_mig_slices_is_turned_off(find: Find) -> None:
    slices = (MigInstance("MIG-a", "3g.40gb", 39.5), MigInstance("MIG-b", "3g.40gb", 39.5))
    gpus = tuple(Gpu(at, f"GPU-{at}", "NVIDIA H100", 80.0, 79.0, compute_capability="9.0") for at in (0, 1))
    host = Host(
        gpus=tuple(replace(gpu, mig_mode=True, mig=slices[:1] if gpu.index == 0 else slices[1:]) for gpu in gpus)
    )
    named = {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}
    case: dict[str, Any] = {"set": {"tensor-parallel-size": 2}, "host": host, "environment": named}
    (found,) = [one for one in find(**case) if one.code == "gpus_too_few"]
    assert found.fix == Changes(set={"tensor-parallel-size": 1})
    assert "only one MIG slice" in found.message
    large = replace(AWQ, weight_bytes=57 * 10**9)
    messages = [one.message for one in find(facts=large, **case)]
    assert not [one for one in messages if "more GPUs" in one]


@pytest.mark.parametrize(
    ("gib", "count", "share", "way"),
    [
        (400, 8, 0.9, "even all 8 GPUs of this machine are too few, so use several such machines"),
        (93, 2, 0.9, "even both GPUs of this machine are too few, so use several such machines"),
        (141, 8, 0.9, "name more GPUs, or use a quantized or smaller model"),
        (60, 1, 0.9, "; use a quantized or smaller model"),
    ],
)
def test_more_gpus_of_a_machine_are_named_only_if_they_are_enough(
    find: Find, gib: int, count: int, share: float, way: str
) -> None:
    facts = replace(SEVENTY, weight_bytes=gib * 10**9)
    set_: dict[str, Any] = {"gpu-memory-utilization": share}
    found = find(facts=facts, host=machine(*map(gpu, range(count))), gpus=(0,), set=set_)
    (error,) = [one for one in found if one.code == "weights_do_not_fit"]
    assert way in error.message
    assert ("more GPUs" in error.message) is ("name more" in way)
    machines = [one.message for one in found if "such machines, see" in one.message]
    assert not (machines and "more GPUs" in error.message)


def test_missing_memory_is_said_to_be_of_the_share(find: Find) -> None:
    found = find(facts=replace(BF16, weight_bytes=50 * 2**30), gpus=(0,), set={"gpu-memory-utilization": 0.9})
    (error,) = [one for one in found if one.code == "weights_do_not_fit"]
    assert "exceed what --gpu-memory-utilization 0.9 allows (" in error.message


def test_weights_that_take_more_than_a_share_of_all_gpus_need_several_machines(find: Find) -> None:
    facts = replace(SEVENTY, weight_bytes=94 * 2**30)  # 2 GPUs have 96 GiB, of which vLLM can't take all
    found = find(facts=facts, host=PAIR, gpus=(0, 1), set={"tensor-parallel-size": 2})
    (advice,) = [one for one in found if one.code == "other_tool"]
    assert "2 such machines hold weights, activations and the KV cache of a request of full length" in advice.message


def test_number_of_machines_counts_more_than_the_weights(find: Find) -> None:
    facts = replace(SEVENTY, weight_bytes=172 * 2**30)  # twice 0.95 of 96 GiB have room for little else
    found = find(facts=facts, host=PAIR, gpus=(0, 1), set={"tensor-parallel-size": 2})
    (advice,) = [one for one in found if one.code == "other_tool"]
    assert "'plan --nodes 3'" in advice.message


def test_a_longer_context_names_more_gpus_only_if_it_fits_on_them(find: Find) -> None:
    case: dict[str, Any] = {"facts": replace(AWQ, weight_bytes=38 * 10**9), "gpus": (0,)}
    case["set"] = {"max-model-len": 512, "max-num-batched-tokens": 512, "max-num-seqs": 1}
    messages = {}
    for count in (2, 1):
        host = machine(*map(gpu, range(count)))
        found = find("long-document", host=host, **case)
        (messages[count],) = [one.message for one in found if one.code == "context_below_traffic"]
    assert "name more GPUs" in messages[2]
    assert "do not fit either: use a quantized or smaller model" in messages[1]
