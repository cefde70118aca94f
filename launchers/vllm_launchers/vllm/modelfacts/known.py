"""Shapes of popular models, so that a launch can be planned before the download.

Every row is from the publisher's ``config.json``. A row has the number of parameters only if it does not follow from
the shape (vision towers, linear attention).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.vllm.modelfacts.config import facts_from_config
from vllm_launchers.vllm.modelfacts.defaults import SHAPE
from vllm_launchers.vllm.modelfacts.facts import ModelFacts, Quantization, split_quantization

_TYPES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
_MULTIMODAL = frozenset({"gemma3", "qwen3_5"})


class _Row(msgspec.Struct, frozen=True):
    """A model. ``parameters`` is None if it follows from the shape. ``tied``: the embedding is also the output layer.

    ``weight_bytes`` is given if only some of the weights are quantized.
    """

    model_type: str
    shape: tuple[int, ...]
    tied: bool = False
    more: Mapping[str, Any] | None = None
    parameters: int | None = None
    weight_bytes: int | None = None


def _experts(count: int, used: int, size: int) -> dict[str, int]:
    return {"num_experts": count, "num_experts_per_tok": used, "moe_intermediate_size": size}


_MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_DEEPSEEK = _Row(
    "deepseek_v3",
    (61, 128, 128, 192, 7168, 18432, 129280, 163840),
    more={**_MLA, "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}
    | {"n_shared_experts": 1, "first_k_dense_replace": 3, "q_lora_rank": 1536}
    | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    parameters=671_026_419_200,
)
_QWEN_27B = _Row(
    "qwen3_5",
    (64, 24, 4, 256, 5120, 17408, 248320, 262144),
    more={"linear_num_value_heads": 48},
    parameters=27_360_000_000,
)
_MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}, "sliding_window": 128, "num_experts_per_tok": 4}
_NO_WINDOW = {"sliding_window": None}
_MISTRAL_7B = (32, 32, 8, 128, 4096, 14336)
_LLAMA_2 = (32000, 4096)
_LLAMA_8B = (32, 32, 8, 128, 4096, 14336, 128256)
_LLAMA_70B = (80, 64, 8, 128, 8192, 28672, 128256)

_ROWS: dict[str, _Row] = {
    "qwen2.5-0.5b": _Row("qwen2", (24, 14, 2, 64, 896, 4864, 151936, 32768), tied=True),
    "qwen2.5-1.5b": _Row("qwen2", (28, 12, 2, 128, 1536, 8960, 151936, 32768), tied=True),
    "qwen2.5-3b": _Row("qwen2", (36, 16, 2, 128, 2048, 11008, 151936, 32768), tied=True),
    "qwen2.5-7b": _Row("qwen2", (28, 28, 4, 128, 3584, 18944, 152064, 32768)),
    "qwen2.5-14b": _Row("qwen2", (48, 40, 8, 128, 5120, 13824, 152064, 32768)),
    "qwen2.5-32b": _Row("qwen2", (64, 40, 8, 128, 5120, 27648, 152064, 32768)),
    "qwen2.5-72b": _Row("qwen2", (80, 64, 8, 128, 8192, 29568, 152064, 32768)),
    "qwq-32b": _Row("qwen2", (64, 40, 8, 128, 5120, 27648, 152064, 40960)),
    "deepseek-r1-distill-qwen-7b": _Row("qwen2", (28, 28, 4, 128, 3584, 18944, 152064, 131072)),
    "deepseek-r1-distill-qwen-14b": _Row("qwen2", (48, 40, 8, 128, 5120, 13824, 152064, 131072)),
    "deepseek-r1-distill-qwen-32b": _Row("qwen2", (64, 40, 8, 128, 5120, 27648, 152064, 131072)),
    "qwen3-0.6b": _Row("qwen3", (28, 16, 8, 128, 1024, 3072, 151936, 40960), tied=True),
    "qwen3-1.7b": _Row("qwen3", (28, 16, 8, 128, 2048, 6144, 151936, 40960), tied=True),
    "qwen3-4b": _Row("qwen3", (36, 32, 8, 128, 2560, 9728, 151936, 40960), tied=True),
    "qwen3-4b-2507": _Row("qwen3", (36, 32, 8, 128, 2560, 9728, 151936, 262144), tied=True),
    "qwen3-8b": _Row("qwen3", (36, 32, 8, 128, 4096, 12288, 151936, 40960)),
    "qwen3-14b": _Row("qwen3", (40, 40, 8, 128, 5120, 17408, 151936, 40960)),
    "qwen3-32b": _Row("qwen3", (64, 64, 8, 128, 5120, 25600, 151936, 40960)),
    "qwen3-30b-a3b": _Row("qwen3_moe", (48, 32, 4, 128, 2048, 6144, 151936, 40960), more=_experts(128, 8, 768)),
    "qwen3-30b-a3b-2507": _Row("qwen3_moe", (48, 32, 4, 128, 2048, 6144, 151936, 262144), more=_experts(128, 8, 768)),
    "qwen3-coder-30b-a3b": _Row("qwen3_moe", (48, 32, 4, 128, 2048, 6144, 151936, 262144), more=_experts(128, 8, 768)),
    "qwen3-235b-a22b": _Row("qwen3_moe", (94, 64, 4, 128, 4096, 12288, 151936, 40960), more=_experts(128, 8, 1536)),
    "qwen3-235b-a22b-2507": _Row(
        "qwen3_moe", (94, 64, 4, 128, 4096, 12288, 151936, 262144), more=_experts(128, 8, 1536)
    ),
    "qwen3-next-80b-a3b": _Row(
        "qwen3_next",
        (48, 16, 2, 256, 2048, 5120, 151936, 262144),
        more={**_experts(512, 10, 512), "linear_num_value_heads": 32},
        parameters=79_674_391_296,
    ),
    "qwen3.5-9b": _Row("qwen3_5", (32, 16, 4, 256, 4096, 12288, 248320, 262144), parameters=9_410_000_000),
    "qwen3.5-27b": _QWEN_27B,
    "qwen3.8-27b": _QWEN_27B,
    "llama-2-7b": _Row("llama", (32, 32, 32, 128, 4096, 11008, *_LLAMA_2)),
    "llama-2-13b": _Row("llama", (40, 40, 40, 128, 5120, 13824, *_LLAMA_2)),
    "llama-2-70b": _Row("llama", (80, 64, 8, 128, 8192, 28672, *_LLAMA_2)),
    "llama-3-8b": _Row("llama", (*_LLAMA_8B, 8192)),
    "llama-3.1-8b": _Row("llama", (*_LLAMA_8B, 131072)),
    "deepseek-r1-distill-llama-8b": _Row("llama", (*_LLAMA_8B, 131072)),
    "llama-3-70b": _Row("llama", (*_LLAMA_70B, 8192)),
    "llama-3.1-70b": _Row("llama", (*_LLAMA_70B, 131072)),
    "llama-3.3-70b": _Row("llama", (*_LLAMA_70B, 131072)),
    "deepseek-r1-distill-llama-70b": _Row("llama", (*_LLAMA_70B, 131072)),
    "llama-3.1-405b": _Row("llama", (126, 128, 8, 128, 16384, 53248, 128256, 131072)),
    "llama-3.2-1b": _Row("llama", (16, 32, 8, 64, 2048, 8192, 128256, 131072), tied=True),
    "llama-3.2-3b": _Row("llama", (28, 24, 8, 128, 3072, 8192, 128256, 131072), tied=True),
    "tinyllama-1.1b-v1.0": _Row("llama", (22, 32, 4, 64, 2048, 5632, 32000, 2048)),
    "mistral-7b-v0.1": _Row("mistral", (*_MISTRAL_7B, 32000, 32768), more={"sliding_window": 4096}),
    "mistral-7b-v0.2": _Row("mistral", (*_MISTRAL_7B, 32000, 32768), more=_NO_WINDOW),
    "mistral-7b-v0.3": _Row("mistral", (*_MISTRAL_7B, 32768, 32768), more=_NO_WINDOW),
    "mixtral-8x7b-v0.1": _Row("mixtral", (*_MISTRAL_7B, 32000, 32768), more=_NO_WINDOW | _experts(8, 2, 14336)),
    "phi-4": _Row("phi3", (40, 40, 10, 128, 5120, 17920, 100352, 16384)),
    "gemma-2-9b": _Row("gemma2", (42, 16, 8, 256, 3584, 14336, 256000, 8192), tied=True),
    "gemma-2-27b": _Row("gemma2", (46, 32, 16, 128, 4608, 36864, 256000, 8192), tied=True),
    "gemma-3-4b": _Row(
        "gemma3", (34, 8, 4, 256, 2560, 10240, 262208, 131072), more={"sliding_window": 1024}, parameters=4_300_079_472
    ),
    "gemma-3-12b": _Row(
        "gemma3",
        (48, 16, 8, 256, 3840, 15360, 262208, 131072),
        more={"sliding_window": 1024},
        parameters=12_187_325_040,
    ),
    "gemma-3-27b": _Row(
        "gemma3",
        (62, 32, 16, 128, 5376, 21504, 262208, 131072),
        more={"sliding_window": 1024},
        parameters=27_432_406_640,
    ),
    "gpt-oss-20b": _Row(
        "gpt_oss",
        (24, 64, 8, 64, 2880, 2880, 201088, 131072),
        more={**_MXFP4, "num_local_experts": 32},
        parameters=20_914_757_184,
        weight_bytes=13_761_264_768,
    ),
    "gpt-oss-120b": _Row(
        "gpt_oss",
        (36, 64, 8, 64, 2880, 2880, 201088, 131072),
        more={**_MXFP4, "num_local_experts": 128},
        parameters=116_829_156_672,
        weight_bytes=65_248_815_744,
    ),
    "deepseek-v3": _DEEPSEEK,
    "deepseek-v3-0324": _DEEPSEEK,
    "deepseek-v3.1": _DEEPSEEK,
    "deepseek-r1": _DEEPSEEK,
    "deepseek-r1-0528": _DEEPSEEK,
}

_FILLER = lazy_pattern(r"-(?:instruct|chat|base|it|hf|thinking|pt|unsloth)(?=-|$)")
_CODER = lazy_pattern(r"(?<=^qwen2\.5)-coder")
_META = lazy_pattern(r"^meta-(?=llama)")


def known_facts(model: str) -> ModelFacts | None:
    """Facts of a known model, even republished, from its published shape and its name (quantization); else None."""
    base, quantization = split_quantization(model)
    base = _CODER.sub("", _META.sub("", _FILLER.sub("", base)))
    row = _ROWS.get(base)
    if row is None:
        return None
    config = _config(row)
    facts = facts_from_config(model, config)
    return replace(
        facts,
        source="table",
        parameters=row.parameters or facts.counted,
        quantization=quantization or facts.quantization,
        weight_bytes=None if quantization else row.weight_bytes,
        multimodal=row.model_type in _MULTIMODAL,
    )


def _config(row: _Row) -> dict[str, Any]:
    shape = dict(zip(SHAPE, row.shape, strict=True))
    config = {"architectures": [_TYPES[row.model_type]], "model_type": row.model_type, "torch_dtype": "bfloat16"}
    tied = {"tie_word_embeddings": row.tied} if row.parameters is None else {}
    return {**config, **shape, **tied, **(row.more or {})}


# -- quantized checkpoints of well-known models -----------------------------------------------------------------------


_PUBLISHED: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"Qwen/(Qwen2\.5-(?:0\.5|1\.5|3|7|14|32|72)B-Instruct)", (r"Qwen/\1-AWQ", r"Qwen/\1-GPTQ-Int8")),
    (r"Qwen/(Qwen2\.5-Coder-(?:0\.5|1\.5|3|7|14|32)B-Instruct)", (r"Qwen/\1-AWQ", r"Qwen/\1-GPTQ-Int8")),
    (r"Qwen/(Qwen3-(?:4|8|14|32)B)", (r"Qwen/\1-FP8", r"Qwen/\1-AWQ")),
    (r"Qwen/(Qwen3-(?:0\.6|1\.7)B)", (r"Qwen/\1-FP8",)),
    (r"Qwen/(Qwen3-(?:30B-A3B|235B-A22B))", (r"Qwen/\1-FP8", r"Qwen/\1-GPTQ-Int4")),
    (r"Qwen/(Qwen3-(?:4B|30B-A3B|235B-A22B)-(?:Instruct|Thinking)-2507)", (r"Qwen/\1-FP8",)),
    (r"Qwen/(Qwen3-Coder-30B-A3B-Instruct)", (r"Qwen/\1-FP8",)),
    (r"Qwen/(Qwen3-Next-80B-A3B-(?:Instruct|Thinking))", (r"Qwen/\1-FP8",)),
    (r"Qwen/(QwQ-32B)", (r"Qwen/\1-AWQ",)),
    (r"meta-llama/(Llama-3\.3-70B-Instruct)", (r"RedHatAI/\1-FP8-dynamic", r"RedHatAI/\1-quantized.w4a16")),
    (
        r"meta-llama/(?:Meta-)?Llama-3\.1-(8B|70B|405B)-Instruct",
        (r"RedHatAI/Meta-Llama-3.1-\1-Instruct-FP8", r"hugging-quants/Meta-Llama-3.1-\1-Instruct-AWQ-INT4"),
    ),
    (
        r"deepseek-ai/(DeepSeek-R1-Distill-(?:Llama-(?:8|70)B|Qwen-(?:7|14|32)B))",
        (r"RedHatAI/\1-FP8-dynamic", r"RedHatAI/\1-quantized.w4a16"),
    ),
    (r"mistralai/(Mixtral-8x7B-Instruct-v0\.1)", (r"RedHatAI/\1-FP8", r"TheBloke/\1-AWQ")),
    (r"google/(gemma-3-(?:4|12|27)b-it)", (r"RedHatAI/\1-FP8-dynamic", r"RedHatAI/\1-quantized.w4a16")),
    (r"microsoft/(phi-4)", (r"RedHatAI/\1-FP8-dynamic", r"RedHatAI/\1-quantized.w4a16")),
)


def siblings(model: str) -> tuple[str, ...]:
    """Names of quantized checkpoints of this model, best quality first; empty if none is known."""
    for pattern, names in _PUBLISHED:
        if found := re.fullmatch(pattern, model, re.IGNORECASE):
            return tuple(found.expand(name) for name in names)
    return ()


def sibling_facts(facts: ModelFacts) -> Iterator[ModelFacts]:
    """Yield facts of a model's known quantized checkpoints; none if it is quantized itself."""
    if facts.quantization is not None:
        return
    for name in siblings(facts.model):
        known = known_facts(name)
        if known is not None:
            yield known
            continue
        _, quantization = split_quantization(name)
        if quantization is not None:
            yield replace(_without_weights(facts, quantization), model=name)


def _without_weights(facts: ModelFacts, quantization: Quantization) -> ModelFacts:
    return replace(
        facts, source="table", folder=None, weight_bytes=None, quantization=quantization, bytes_to_download=None
    )
