from __future__ import annotations

import pytest

from vllm_launchers.vllm.flags.changes import FlagValue
from vllm_launchers.vllm.flags.check_value import CONDITIONS, broken_conditions
from vllm_launchers.vllm.flags.flag_table import FlagSpec, FlagTable, ValueKind

NUMBERS = {
    "tensor-parallel-size": "1",
    "pipeline-parallel-size": "1",
    "prefill-context-parallel-size": "1",
    "decode-context-parallel-size": "1",
    "data-parallel-size": "1",
    "data-parallel-size-local": None,
    "data-parallel-rank": None,
    "data-parallel-start-rank": None,
    "nnodes": "1",
    "node-rank": "0",
    "max-num-seqs": None,
    "max-num-active-seqs": None,
    "long-prefill-token-threshold": "0",
    "max-loras": "1",
    "max-cpu-loras": None,
    "api-server-count": None,
    "sse-keep-alive-interval": "0",
    "offload-group-size": "0",
    "offload-num-in-group": "1",
    "offload-prefetch-step": "1",
    "spec-tokens": None,
    "ubatch-size": "0",
    "dbo-decode-token-threshold": "32",
    "dbo-prefill-token-threshold": "512",
    "max-cudagraph-capture-size": None,
    "cudagraph-capture-sizes": None,
}
SWITCHES = (
    "enable-chunked-prefill enable-lora enable-auto-tool-choice enable-log-outputs enable-log-requests headless "
    "enable-per-request-metrics disable-log-stats enable-eplb enable-expert-parallel data-parallel-external-lb "
    "data-parallel-hybrid-lb data-parallel-multi-port-external-lb enable-elastic-ep numa-bind ray-workers-use-nsight "
    "enable-fault-tolerance enable-flashinfer-autotune async-scheduling enable-dbo "
    "enable-sleep-mode"
)
TEXTS = {
    "show-hidden-metrics-for-version": None,
    "tool-call-parser": None,
    "tool-parser-plugin": "",
    "reasoning-parser": "",
    "reasoning-parser-plugin": "",
    "data-parallel-backend": "mp",
    "offload-backend": "auto",
    "mamba-backend": "triton",
    "mamba-ssu-algorithm": None,
    "distributed-executor-backend": None,
    "otlp-traces-endpoint": None,
    "collect-detailed-traces": None,
    "numa-bind-nodes": None,
    "numa-bind-cpus": None,
    "attention-backend": None,
    "spec-model": None,
    "spec-method": None,
    "per-request-spec-decode-metrics": "none",
    "lora-modules": None,
    "all2all-backend": "allgather_reducescatter",
    "kv-cache-dtype": "auto",
    "dtype": "auto",
    "quantization": None,
    "moe-backend": "auto",
}
OBJECTS = (
    *("attention-config", "compilation-config", "kernel-config", "speculative-config", "kv-transfer-config"),
    *("ec-transfer-config", "structured-outputs-config", "profiler-config", "eplb-config"),
    *("limit-mm-per-prompt", "media-io-kwargs"),
)
LENGTHS = ("max-num-batched-tokens", "max-model-len")
WORDS = {"tool-call-parser": ("hermes", "mistral"), "reasoning-parser": ("deepseek_r1", "qwen3")}


def specs() -> list[FlagSpec]:
    kind = ValueKind
    return [
        *(FlagSpec(name, kind.INT, default) for name, default in NUMBERS.items()),
        *(FlagSpec(name, kind.HUMAN_INT) for name in LENGTHS),
        *(FlagSpec(name, kind.BOOL, "false", negatable=True) for name in SWITCHES.split()),
        *(FlagSpec(name, kind.TEXT, default, words=WORDS.get(name, ())) for name, default in TEXTS.items()),
        *(FlagSpec(name, kind.JSON) for name in OBJECTS),
    ]


def table_of(version: str | None = "0.32.0", without: str = "") -> FlagTable:
    return FlagTable(version, "installation", {spec.name: spec for spec in specs() if spec.name != without})


Flags = dict[str, FlagValue]

CASES: list[tuple[str, Flags, Flags]] = [
    (
        "max-num-seqs",
        {"max-num-seqs": 65, "max-num-batched-tokens": 64},
        {"max-num-seqs": 64, "max-num-batched-tokens": 64},
    ),
    ("max-num-seqs", {"max-num-seqs": 5000, "max-num-batched-tokens": "4k"}, {"max-num-seqs": 5000}),
    (
        "max-num-batched-tokens",
        {"enable-chunked-prefill": False, "max-num-batched-tokens": 2048, "max-model-len": "4K"},
        {"max-num-batched-tokens": 2048, "max-model-len": "4K"},
    ),
    (
        "max-num-batched-tokens",
        {"enable-chunked-prefill": False, "max-num-batched-tokens": 2048, "max-model-len": 2049},
        {"enable-chunked-prefill": False, "max-num-batched-tokens": 2048, "max-model-len": "auto"},
    ),
    (
        "max-num-active-seqs",
        {"max-num-active-seqs": 9, "max-num-seqs": 8},
        {"max-num-active-seqs": 8, "max-num-seqs": 8},
    ),
    ("long-prefill-token-threshold", {"long-prefill-token-threshold": 9, "max-model-len": 8}, {"max-model-len": 8}),
    ("max-loras", {"enable-lora": True, "max-loras": 4, "max-cpu-loras": 2}, {"max-loras": 4, "max-cpu-loras": 2}),
    (
        "data-parallel-size-local",
        {"data-parallel-size-local": 2},
        {"data-parallel-size-local": 2, "data-parallel-size": 2},
    ),
    (
        "enable-auto-tool-choice",
        {"enable-auto-tool-choice": True},
        {"enable-auto-tool-choice": True, "tool-call-parser": "hermes"},
    ),
    ("enable-log-outputs", {"enable-log-outputs": True}, {"enable-log-outputs": True, "enable-log-requests": True}),
    (
        "enable-per-request-metrics",
        {"enable-per-request-metrics": True, "disable-log-stats": True},
        {"enable-per-request-metrics": True},
    ),
    ("sse-keep-alive-interval", {"sse-keep-alive-interval": -1}, {"sse-keep-alive-interval": 0}),
    (
        "decode-context-parallel-size",
        {"tensor-parallel-size": 4, "decode-context-parallel-size": 3},
        {"tensor-parallel-size": 4, "decode-context-parallel-size": 2},
    ),
    ("enable-eplb", {"enable-eplb": True, "data-parallel-size": 2}, {"enable-eplb": False}),
    (
        "enable-eplb",
        {"enable-eplb": True, "enable-expert-parallel": True},
        {"enable-eplb": True, "enable-expert-parallel": True, "tensor-parallel-size": 2},
    ),
    (
        "data-parallel-rank",
        {"data-parallel-external-lb": True},
        {"data-parallel-external-lb": True, "data-parallel-size": 2},
    ),
    ("data-parallel-rank", {"data-parallel-rank": 0}, {"data-parallel-rank": 0, "data-parallel-size": 2}),
    (
        "data-parallel-rank",
        {"data-parallel-rank": 2, "data-parallel-size": 2},
        {"data-parallel-rank": 1, "data-parallel-size": 2},
    ),
    (
        "data-parallel-start-rank",
        {"data-parallel-start-rank": 0, "data-parallel-size": 2, "data-parallel-rank": 0},
        {"data-parallel-start-rank": 0, "data-parallel-size": 2, "data-parallel-size-local": 1},
    ),
    (
        "data-parallel-start-rank",
        {"data-parallel-hybrid-lb": True, "data-parallel-size": 2, "data-parallel-rank": 0},
        {"data-parallel-hybrid-lb": True, "data-parallel-size": 2, "data-parallel-size-local": 1},
    ),
    (
        "data-parallel-hybrid-lb",
        {"data-parallel-hybrid-lb": True},
        {"data-parallel-hybrid-lb": True, "data-parallel-size-local": 1},
    ),
    (
        "data-parallel-multi-port-external-lb",
        {"data-parallel-multi-port-external-lb": True},
        {"data-parallel-multi-port-external-lb": True, "data-parallel-size": 4, "data-parallel-size-local": 2},
    ),
    (
        "node-rank",
        {"nnodes": 2, "node-rank": 2, "tensor-parallel-size": 2},
        {"nnodes": 2, "node-rank": 1, "tensor-parallel-size": 2},
    ),
    ("nnodes", {"nnodes": 3, "tensor-parallel-size": 4}, {"nnodes": 2, "tensor-parallel-size": 4}),
    (
        "nnodes",
        {"nnodes": 2, "tensor-parallel-size": 2, "data-parallel-backend": "ray"},
        {"data-parallel-backend": "ray"},
    ),
    ("api-server-count", {"headless": True, "api-server-count": 1}, {"headless": True}),
    ("enable-elastic-ep", {"enable-elastic-ep": True}, {}),
    ("enable-fault-tolerance", {"enable-fault-tolerance": True}, {}),
    ("numa-bind-nodes", {"numa-bind-nodes": 0}, {"numa-bind-nodes": 0, "numa-bind": True}),
    ("numa-bind-cpus", {"numa-bind-cpus": "0-3"}, {"numa-bind-cpus": "0-3", "numa-bind": True}),
    (
        "collect-detailed-traces",
        {"collect-detailed-traces": "all"},
        {"collect-detailed-traces": "all", "otlp-traces-endpoint": "http://x"},
    ),
    (
        "ray-workers-use-nsight",
        {"ray-workers-use-nsight": True},
        {"ray-workers-use-nsight": True, "distributed-executor-backend": "ray"},
    ),
    ("offload-num-in-group", {"offload-group-size": 2, "offload-num-in-group": 3}, {"offload-num-in-group": 3}),
    ("offload-num-in-group", {"offload-group-size": 2, "offload-prefetch-step": 0}, {"offload-prefetch-step": 0}),
    ("mamba-ssu-algorithm", {"mamba-ssu-algorithm": "x"}, {"mamba-ssu-algorithm": "x", "mamba-backend": "FlashInfer"}),
    (
        "attention-backend",
        {"attention-backend": "X", "attention-config": '{"backend": "Y"}'},
        {"attention-backend": "X", "attention-config": '{"other": 1}'},
    ),
    (
        "attention-backend",
        {"attention-backend": "X", "attention-config.backend": "Y"},
        {"attention-config.backend": "Y"},
    ),
    (
        "cudagraph-capture-sizes",
        {"cudagraph-capture-sizes": 8, "compilation-config.cudagraph_capture_sizes": "[8]"},
        {"cudagraph-capture-sizes": 8, "compilation-config.mode": 3},
    ),
    ("spec-tokens", {"spec-tokens": 3}, {"spec-tokens": 3, "spec-method": "ngram"}),
    ("spec-tokens", {"spec-tokens": 3}, {"spec-tokens": 3, "speculative-config.method": "ngram"}),
    (
        "async-scheduling",
        {"async-scheduling": True, "speculative-config": '{"method": "suffix", "num_speculative_tokens": 3}'},
        {"async-scheduling": True, "speculative-config": '{"method": "mtp", "num_speculative_tokens": 1}'},
    ),
    (
        "speculative-config",
        {"speculative-config": '{"method": "ngram"}'},
        {"speculative-config": '{"method": "ngram", "num_speculative_tokens": 3}'},
    ),
    (
        "speculative-config",
        {"speculative-config": '{"model": "ngram"}'},
        {"speculative-config": '{"method": "eagle", "model": "org/draft"}'},
    ),
    (
        "speculative-config",
        {
            "speculative-config": '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 5, '
            '"prompt_lookup_max": 2}'
        },
        {"speculative-config": '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2}'},
    ),
    ("spec-method", {"spec-method": "ngram_gpu"}, {"spec-method": "mtp", "spec-tokens": 1}),
    (
        "speculative-config",
        {"speculative-config": '{"method": "mtp", "num_speculative_tokens": 0}'},
        {"speculative-config": '{"method": "mtp", "num_speculative_tokens": 1}'},
    ),
    (
        "speculative-config",
        {"speculative-config": '{"method": "eagle3"}'},
        {"speculative-config": '{"method": "eagle3", "model": "org/head"}'},
    ),
    ("speculative-config", {"speculative-config.method": "qwen3_next_mtp"}, {"speculative-config.method": "suffix"}),
    ("spec-method", {"spec-method": "mtp"}, {"spec-method": "eagle", "spec-model": "org/head"}),
    (
        "speculative-config",
        {"speculative-config": '{"model": "org/draft", "draft_tensor_parallel_size": 2}', "tensor-parallel-size": 4},
        {"speculative-config": '{"model": "org/draft", "draft_tensor_parallel_size": 2}', "tensor-parallel-size": 2},
    ),
    (
        "speculative-config",
        {"speculative-config.method": "eagle", "speculative-config.draft_tensor_parallel_size": 2, "spec-model": "a/b"},
        {"speculative-config.method": "suffix", "speculative-config.draft_tensor_parallel_size": 2},
    ),
    (
        "per-request-spec-decode-metrics",
        {"per-request-spec-decode-metrics": "summary"},
        {"per-request-spec-decode-metrics": "summary", "spec-method": "suffix"},
    ),
    (
        "distributed-executor-backend",
        {"distributed-executor-backend": "slurm"},
        {"distributed-executor-backend": "my.module.Executor"},
    ),
    (
        "compilation-config",
        {"compilation-config": '{"custom_ops": ["all", "none"]}'},
        {"compilation-config": '{"custom_ops": ["none", "+rms_norm"]}'},
    ),
    (
        "compilation-config",
        {"compilation-config.custom_ops+": "none,all"},
        {"compilation-config.custom_ops": '["all", "-rms_norm"]'},
    ),
    (
        "compilation-config",
        {"compilation-config.custom_ops": '["rms_norm"]'},
        {"compilation-config.custom_ops+": "+rms_norm,-silu_and_mul,none"},
    ),
    (
        "compilation-config",
        {"compilation-config": '{"custom_ops": ["+rms_norm", "-rms_norm"]}'},
        {"compilation-config": '{"custom_ops": ["+rms_norm", "+rms_norm"]}'},
    ),
    ("ubatch-size", {"ubatch-size": 2}, {"ubatch-size": 2, "all2all-backend": "nixl_ep"}),
    (
        "ubatch-size",
        {"ubatch-size": 33, "all2all-backend": "nixl_ep"},
        {"ubatch-size": 33, "all2all-backend": "nixl_ep", "dbo-decode-token-threshold": 33},
    ),
    (
        "ubatch-size",
        {"enable-dbo": True, "dbo-prefill-token-threshold": 1},
        {"enable-dbo": True, "dbo-prefill-token-threshold": 2, "ubatch-size": 1},
    ),
    ("speculative-config", {"speculative-config": "{}"}, {"speculative-config": '{"method": "suffix"}'}),
    (
        "speculative-config",
        {"speculative-config.model": "package.Drafts"},
        {"speculative-config.model": "package.Drafts", "spec-tokens": 3},
    ),
    (
        "spec-method",
        {"spec-method": "ngram", "spec-model": "org/any"},
        {"spec-method": "draft_model", "spec-model": "package.Drafts"},
    ),
    (
        "speculative-config",
        {"speculative-config": '{"method": "custom_class", "num_speculative_tokens": 3}'},
        {"speculative-config": '{"method": "custom_class", "num_speculative_tokens": 3, "model": "package.Drafts"}'},
    ),
    (
        "speculative-config",
        {"spec-method": "ngram", "spec-tokens": 3, "speculative-config.use_heterogeneous_vocab": True},
        {"spec-method": "ngram", "spec-tokens": 3, "speculative-config.use_heterogeneous_vocab": False},
    ),
    (
        "speculative-config",
        {"spec-method": "ngram", "spec-tokens": 3, "speculative-config.synthetic_acceptance_length": 2},
        {
            "spec-method": "ngram",
            "spec-tokens": 3,
            "speculative-config.synthetic_acceptance_length": 2,
            "speculative-config.rejection_sample_method": "synthetic",
        },
    ),
    (
        "speculative-config",
        {
            "enable-lora": True,
            "spec-method": "ngram",
            "spec-tokens": 3,
            "max-num-seqs": 64,
            "max-num-batched-tokens": 255,
        },
        {
            "enable-lora": True,
            "spec-method": "ngram",
            "spec-tokens": 3,
            "max-num-seqs": 64,
            "max-num-batched-tokens": 256,
        },
    ),
    (
        "limit-mm-per-prompt",
        {"limit-mm-per-prompt": '{"image": "two"}'},
        {"limit-mm-per-prompt": '{"image": 2, "video": {"count": 1, "num_frames": 32}}'},
    ),
    ("limit-mm-per-prompt", {"limit-mm-per-prompt.image": "two"}, {"limit-mm-per-prompt.image": "2"}),
    ("media-io-kwargs", {"media-io-kwargs": '{"video": 40}'}, {"media-io-kwargs": '{"video": {"num_frames": 40}}'}),
    ("lora-modules", {"lora-modules": "adapter"}, {"lora-modules": "name=/path"}),
    ("lora-modules", {"lora-modules": '["a=b", "c"]'}, {"lora-modules": '["a=b", {"name": "c", "path": "d"}]'}),
    ("lora-modules", {"lora-modules": '["a=b", {"name": "c"}]'}, {"lora-modules": '["a=b", "c=d"]'}),
    ("lora-modules", {"lora-modules": "a=b,c=d"}, {"lora-modules": '{"name": "a", "path": "b"}'}),
    ("lora-modules", {"lora-modules": '{"name": "a"}'}, {"lora-modules": '{"name": "a", "path": "b"}'}),
    (
        "speculative-config",
        {"speculative-config": '{"num_speculative_tokens": 3}'},
        {"speculative-config": '{"num-speculative-tokens": 3, "method": "ngram"}'},
    ),
    (
        "speculative-config",
        {"speculative-config": '{"method": "eagle", "num_speculative_tokens": 3}'},
        {"speculative-config": '{"method": "eagle", "num_speculative_tokens": 3}', "spec-model": "org/draft"},
    ),
    (
        "speculative-config",
        {"speculative-config": '{"method": "mtp", "num_speculative_tokens": 1, "tensor_parallel_size": 1}'},
        {"speculative-config": '{"method": "mtp", "num_speculative_tokens": 1, "draft_tensor_parallel_size": 1}'},
    ),
    (
        "spec-tokens",
        {"spec-tokens": 3, "speculative-config": '{"method": "ngram", "num_speculative_tokens": 3}'},
        {"spec-tokens": 3, "speculative-config": '{"method": "ngram"}'},
    ),
    (
        "spec-method",
        {"spec-method": "mtp", "speculative-config.method": "mtp"},
        {"spec-method": "mtp", "speculative-config.num-speculative-tokens": 3},
    ),
    (
        "spec-model",
        {"spec-model": "org/draft", "speculative-config": '{"model": "org/draft"}'},
        {"spec-model": "org/draft", "speculative-config": '{"method": "eagle"}'},
    ),
    (
        "kv-transfer-config",
        {"kv-transfer-config": '{"kv_connector": "NixlConnector"}'},
        {"kv-transfer-config": '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'},
    ),
    (
        "kv-transfer-config",
        {"kv-transfer-config.kv_connector": "NixlConnector", "kv-transfer-config.kv_role": "null"},
        {"kv-transfer-config.kv_connector": "NixlConnector", "kv-transfer-config.kv_role": "kv_both"},
    ),
    ("kv-transfer-config", {"kv-transfer-config": '{"kv_role": "kv_both"}'}, {"kv-transfer-config": "None"}),
    (
        "ec-transfer-config",
        {"ec-transfer-config": '{"ec_connector": "ECExampleConnector"}'},
        {"ec-transfer-config": '{"ec_connector": "ECExampleConnector", "ec_role": "ec_both"}'},
    ),
    (
        "structured-outputs-config",
        {"structured-outputs-config": '{"disable_any_whitespace": true}'},
        {"structured-outputs-config": '{"disable_any_whitespace": true, "backend": "guidance"}'},
    ),
    (
        "structured-outputs-config",
        {"structured-outputs-config": '{"disable_additional_properties": true, "backend": "xgrammar"}'},
        {"structured-outputs-config": '{"disable_additional_properties": true, "backend": "guidance"}'},
    ),
    (
        "profiler-config",
        {"profiler-config.profiler": "torch"},
        {"profiler-config": '{"profiler": "torch", "torch_profiler_dir": "/traces"}'},
    ),
    (
        "profiler-config",
        {"profiler-config": '{"profiler": "proton"}'},
        {"profiler-config": '{"profiler": "proton", "proton_profiler_dir": "/traces"}'},
    ),
    ("profiler-config", {"profiler-config.torch_profiler_dir": "/traces"}, {"profiler-config.profiler": "cuda"}),
    (
        "show-hidden-metrics-for-version",
        {"show-hidden-metrics-for-version": "abc"},
        {"show-hidden-metrics-for-version": "0.31.0rc1"},
    ),
    ("lora-modules", {"lora-modules": "{}"}, {"lora-modules": "{"}),
    (
        "max-model-len",
        {
            "speculative-config": '{"model": "org/draft", "num_speculative_tokens": 3, "max_model_len": 16384}',
            "max-model-len": 8192,
        },
        {
            "speculative-config": '{"model": "org/draft", "num_speculative_tokens": 3, "max_model_len": 16384}',
            "max-model-len": "16K",
        },
    ),
    (
        "max-model-len",
        {"spec-model": "org/draft", "spec-tokens": 3, "speculative-config.max_model_len": 16384, "max-model-len": 8192},
        {"spec-method": "ngram", "spec-tokens": 3, "speculative-config.max_model_len": 16384, "max-model-len": 8192},
    ),
    ("quantization", {"quantization": "fp8", "dtype": "float32"}, {"quantization": "fp8", "dtype": "half"}),
    ("quantization", {"quantization": "fp8_per_tensor", "dtype": "float"}, {"quantization": "awq", "dtype": "float"}),
    ("eplb-config", {"eplb-config.num_redundant_experts": 2}, {"eplb-config.num_redundant_experts": 0}),
    ("reasoning-parser", {"reasoning-parser": "qwen"}, {"reasoning-parser": "qwen3"}),
    ("reasoning-parser", {"reasoning-parser": "own"}, {"reasoning-parser": "own", "reasoning-parser-plugin": "own.py"}),
    (
        "tool-call-parser",
        {"tool-call-parser": "hermess", "enable-auto-tool-choice": True},
        {"tool-call-parser": "hermess"},
    ),
]


@pytest.mark.parametrize(("name", "broken", "kept"), CASES)
def test_condition_is_reported_only_when_broken(name: str, broken: Flags, kept: Flags) -> None:
    found = broken_conditions(table_of(), broken)
    assert name in [flag for flag, _ in found]
    assert all(sentence.startswith("--") and "\n" not in sentence for _, sentence in found)
    assert broken_conditions(table_of(), kept) == []


def test_every_condition_has_a_broken_case() -> None:
    seen = {condition for condition in CONDITIONS for _, flags, _ in CASES if _is_broken(condition, flags)}
    exercised_elsewhere = {
        *("data-parallel-hybrid-lb", "enable-flashinfer-autotune", "max-cudagraph-capture-size"),
        *("kv-cache-dtype", "enable-lora"),
    }
    assert {condition.flags[0] for condition in CONDITIONS if condition not in seen} <= exercised_elsewhere


def _is_broken(condition: object, flags: Flags) -> bool:
    names = {flag for flag, _ in broken_conditions(table_of(), flags)}
    return condition.flags[0] in names  # type: ignore[attr-defined]


def test_both_kinds_of_load_balancing_exclude_each_other() -> None:
    flags: Flags = {
        "data-parallel-hybrid-lb": True,
        "data-parallel-external-lb": True,
        "data-parallel-size": 2,
        "data-parallel-size-local": 1,
    }
    ((name, sentence),) = broken_conditions(table_of(), flags)
    assert (name, "can't both be on" in sentence) == ("data-parallel-hybrid-lb", True)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("enable-flashinfer-autotune", "kernel-config.enable_flashinfer_autotune"),
        ("max-cudagraph-capture-size", "compilation-config.max_cudagraph_capture_size"),
    ],
)
def test_setting_is_not_made_twice(name: str, config: str) -> None:
    value: FlagValue = 8 if "size" in name else True
    assert [flag for flag, _ in broken_conditions(table_of(), {name: value, config: value})] == [name]


def test_condition_applies_only_if_the_installation_has_its_flags() -> None:
    flags: Flags = {"enable-eplb": True}
    assert broken_conditions(table_of(), flags) != []
    assert broken_conditions(table_of(without="enable-expert-parallel"), flags) == []


def test_release_that_always_chunks_accepts_a_small_step() -> None:
    flags: Flags = {"enable-chunked-prefill": False, "max-num-batched-tokens": 128, "max-model-len": 4096}
    assert broken_conditions(table_of("0.11.0"), flags) == []
    assert broken_conditions(table_of("0.11.1"), flags) != []


@pytest.mark.parametrize(
    ("flags", "first"),
    [
        ({"enable-log-outputs": True}, "0.13.0"),
        ({"speculative-config": '{"num_speculative_tokens": 3}'}, "0.11.0"),
        ({"speculative-config": '{"method": "mtp"}'}, "0.32.0"),
        ({"eplb-config": '{"num_redundant_experts": 2}'}, "0.13.0"),
        (
            {"speculative-config": '{"method": "ngram", "num_speculative_tokens": 2, "tensor_parallel_size": 1}'},
            "0.16.0",
        ),
    ],
)
def test_condition_does_not_apply_to_earlier_releases(flags: Flags, first: str) -> None:
    assert broken_conditions(table_of("0.10.2"), flags) == []
    assert broken_conditions(table_of(first), flags) != []
    for no_release in (None, "0.²", f"0.{'9' * 5000}"):
        assert broken_conditions(table_of(no_release), flags) != []


@pytest.mark.parametrize(
    ("method", "more", "release", "most"),
    [
        ("dflash", "", "0.24.0", 14),
        ("dflash", "", "0.28.0", 0),
        ("dspark", "", "0.25.1", 14),
        ("dspark", "", "0.28.0", 0),
        ("eagle3", ', "parallel_drafting": true', "0.24.0", 14),
        ("eagle3", "", "0.24.0", 0),
        ("draft_model", "", "0.17.0", 1),
        ("draft_model", "", "0.16.0", 0),
    ],
)
def test_step_has_room_for_what_a_draft_model_adds(method: str, more: str, release: str, most: int) -> None:
    config = f'{{"method": "{method}", "model": "org/draft", "num_speculative_tokens": 15{more}}}'
    flags: Flags = {"speculative-config": config, "max-num-seqs": 64}
    for tokens, names in ((64 * most, ["speculative-config"] if most else []), (64 * most + 64, [])):
        found = broken_conditions(table_of(release), {**flags, "max-num-batched-tokens": max(tokens, 64)})
        assert [name for name, _ in found] == names


def test_conditions_that_every_release_with_the_flag_has() -> None:
    assert (
        broken_conditions(table_of("0.11.0"), {"structured-outputs-config": '{"disable_any_whitespace": true}'}) != []
    )
    assert broken_conditions(table_of("0.13.0"), {"profiler-config": '{"profiler": "torch"}'}) != []
    drafts: Flags = {
        "speculative-config": '{"method": "eagle", "model": "org/draft", "num_speculative_tokens": 3, '
        '"draft_tensor_parallel_size": 2}',
        "tensor-parallel-size": 4,
    }
    assert broken_conditions(table_of("0.10.2"), drafts) != []


STORE = '{"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}'


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ({"kv-cache-dtype": "bfloat16", "dtype": "half"}, {"kv-cache-dtype": "float16", "dtype": "half"}),
        ({"kv-cache-dtype": "float16", "dtype": "float"}, {"kv-cache-dtype": "float16"}),
        ({"enable-lora": True, "moe-backend": "deep-gemm-mega-moe"}, {"enable-lora": True, "moe-backend": "triton"}),
        (
            {"speculative-config": '{"method": "medusa", "model": "org/draft", "num_speculative_tokens": 3}'},
            {"speculative-config": '{"method": "eagle", "model": "org/draft", "num_speculative_tokens": 3}'},
        ),
        ({"enable-sleep-mode": True, "kv-transfer-config": STORE}, {"kv-transfer-config": STORE}),
    ],
)
def test_what_newly_is_refused_in_0_33(flags: Flags, kept: Flags) -> None:
    assert [name for name, _ in broken_conditions(table_of("0.33.0"), flags)] in ([name] for name in flags)
    assert broken_conditions(table_of("0.32.0"), flags) == []
    assert broken_conditions(table_of("0.33.0"), kept) == []


AHEAD: Flags = {"async-scheduling": True}


def drafted_ahead(method: str) -> Flags:
    config = f'{{"method": "{method}", "model": "org/draft", "num_speculative_tokens": 1}}'
    return {**AHEAD, "speculative-config": config}


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        (drafted_ahead("eagle"), ("0.10.2",)),
        (drafted_ahead("draft_model"), ("0.10.2", "0.13.0")),
        (drafted_ahead("ngram"), ("0.10.2", "0.13.0", "0.16.0", "0.32.0")),
        (drafted_ahead("suffix"), ("0.10.2", "0.13.0", "0.16.0", "0.32.0", "0.33.0")),
        ({**AHEAD, "pipeline-parallel-size": 2}, ("0.10.2", "0.13.0")),
    ],
)
def test_what_async_scheduling_works_with_depends_on_the_release(flags: Flags, refused: tuple[str, ...]) -> None:
    releases = ("0.10.2", "0.13.0", "0.16.0", "0.32.0", "0.33.0")
    found = {one: [name for name, _ in broken_conditions(table_of(one), flags)] for one in releases}
    assert tuple(one for one, names in found.items() if "async-scheduling" in names) == refused


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"max-num-seqs": 300}, "max-num-seqs"),
        ({"max-num-active-seqs": 33}, "max-num-active-seqs"),
        ({"max-num-active-seqs": 9, "max-num-batched-tokens": 8}, "max-num-active-seqs"),
        ({"enable-chunked-prefill": False, "max-num-batched-tokens": 512}, "max-num-batched-tokens"),
        ({"long-prefill-token-threshold": 5000}, "long-prefill-token-threshold"),
    ],
)
def test_resolved_values_are_used_if_known(flags: Flags, name: str) -> None:
    resolved: Flags = {"max-num-seqs": 32, "max-num-batched-tokens": 256, "max-model-len": 4096}
    ((found, sentence),) = broken_conditions(table_of(), flags, resolved)
    assert (found, "as vLLM works out here" in sentence or "without chunked prefill" in sentence) == (name, True)
    assert broken_conditions(table_of(), flags) == []


def test_set_flags_override_resolved_values() -> None:
    resolved: Flags = {"max-num-seqs": 256, "max-num-batched-tokens": 2048, "max-model-len": 4096}
    assert broken_conditions(table_of(), {"max-num-batched-tokens": 64}, resolved) == []
    assert broken_conditions(table_of(), {"max-num-seqs": 4000, "max-num-batched-tokens": 4000}, resolved) == []


def test_condition_accepts_any_spelling_of_a_flag() -> None:
    assert broken_conditions(table_of(), {"max_num_seqs": 65, "max-num-batched": 64}) != []
