"""Facts from a model's name, and well-known models."""

from __future__ import annotations

import pytest

from vllm_launchers.presets.load import read_presets
from vllm_launchers.vllm.modelfacts.facts import Quantization, parameters_in, split_quantization
from vllm_launchers.vllm.modelfacts.known import known_facts
from vllm_launchers.vllm.modelfacts.read import model_facts


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("some-7b-instruct", 7e9),
        ("some-0.5b", 0.5e9),
        ("some-350m", 350e6),
        ("some-1t", 1e12),
        ("some-30b-a3b", 30e9),
        ("mixed-8x7b", 8 * 7e9 * 0.83),
        ("qwen2.5", None),
        ("some-v3", None),
        ("some-4bit", None),
        ("some-e4b", None),
    ],
)
def test_size_in_a_name(name: str, expected: float | None) -> None:
    assert parameters_in(name) == (None if expected is None else int(expected))


@pytest.mark.parametrize(
    ("model", "base", "expected"),
    [
        ("org/Some-7B", "some-7b", None),
        ("org/Some-7B-AWQ", "some-7b", Quantization("awq", 4, 128)),
        ("org/Some-7B-Instruct-GPTQ-Int8", "some-7b-instruct", Quantization("gptq", 8, 128)),
        ("org/Some-7B-GPTQ-Int4", "some-7b", Quantization("gptq", 4, 128)),
        ("org/Some-7B-FP8", "some-7b", Quantization("fp8", 8)),
        ("Qwen/Qwen3-30B-A3B-FP8", "qwen3-30b-a3b", Quantization("fp8", 8, block=(128, 128))),
        ("org/Some-7B-FP8-dynamic", "some-7b", Quantization("compressed-tensors", 8, floating=True)),
        ("org/Some-7B-quantized.w4a16", "some-7b", Quantization("compressed-tensors", 4, 128)),
        ("org/Some-7B-NVFP4", "some-7b", Quantization("modelopt_fp4", 4, 16)),
        ("org/Some-7b-bnb-4bit", "some-7b", Quantization("bitsandbytes", 4)),
        ("org/Some-7B-GGUF", "some-7b", Quantization("gguf")),
        ("org/Lawqer-7B", "lawqer-7b", None),
    ],
)
def test_quantization_in_a_name(model: str, base: str, expected: Quantization | None) -> None:
    assert split_quantization(model) == (base, expected)


@pytest.mark.parametrize(
    ("model", "layers", "kv_heads", "head_dim", "context", "parameters"),
    [
        ("Qwen/Qwen3-8B", 36, 8, 128, 40960, 8_190_735_360),
        ("Qwen/Qwen3-4B-Instruct-2507", 36, 8, 128, 262144, 4_022_468_096),
        ("Qwen/Qwen3-30B-A3B", 48, 4, 128, 40960, 30_532_122_624),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", 28, 4, 128, 32768, 7_615_616_512),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", 32, 8, 128, 131072, 8_030_261_248),
        ("meta-llama/Llama-3.1-70B", 80, 8, 128, 131072, 70_553_706_496),
        ("mistralai/Mistral-7B-Instruct-v0.3", 32, 8, 128, 32768, 7_248_023_552),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", 32, 8, 128, 32768, 46_702_792_704),
        ("Qwen/Qwen3.8-27B-FP8", 64, 4, 256, 262144, 27_360_000_000),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 22, 4, 64, 2048, 1_100_048_384),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-unsloth-bnb-4bit", 32, 8, 128, 131072, 8_030_261_248),
        ("google/gemma-2-9b-it", 42, 8, 256, 8192, 9_241_705_984),
        ("microsoft/phi-4", 40, 10, 128, 16384, 14_659_507_200),
        ("deepseek-ai/DeepSeek-R1-0528", 61, 1, 576, 163840, 671_026_419_200),
    ],
)
def test_well_known_models(
    model: str, layers: int, kv_heads: int, head_dim: int, context: int, parameters: int
) -> None:
    facts = known_facts(model)
    assert facts is not None
    assert (len(facts.layers), facts.kv_heads, facts.head_dim) == (layers, kv_heads, head_dim)
    assert (facts.max_context, facts.parameters, facts.source) == (context, parameters, "table")
    assert facts.missing == ()


def test_known_models_with_more_facts() -> None:
    gpt, gemma = known_facts("openai/gpt-oss-20b"), known_facts("google/gemma-3-27b-it")
    assert gpt is not None
    assert gemma is not None
    assert (gpt.window, gpt.experts, gpt.quantization) == (128, 32, Quantization("mxfp4", 4, 32))
    assert gpt.weight_bytes is not None
    qwen = known_facts("Qwen/Qwen3.5-9B")
    assert qwen is not None
    assert (qwen.state_bytes, qwen.multimodal) == (2_146_304, True)
    first, third = known_facts("mistralai/Mistral-7B-Instruct-v0.1"), known_facts("mistralai/Mistral-7B-v0.3")
    assert first is not None
    assert third is not None
    assert (first.window, first.vocabulary, third.window, third.vocabulary) == (4096, 32000, None, 32768)
    assert (gemma.window, gemma.multimodal, len(gemma.layers)) == (1024, True, 62)


def test_similar_name_is_not_a_known_model() -> None:
    for model in ("org/Qwen3-8B-Mine", "org/my-llama-3.1-8b", "org/qwen3"):
        assert known_facts(model) is None


def test_every_shipped_preset_can_be_planned_before_its_download() -> None:
    models = {preset.model for preset in read_presets()[0].values() if preset.shipped and preset.model}
    assert models
    for model in models:
        facts = model_facts(model, environ={"HF_HOME": "/nowhere"})
        assert facts.layers
        assert facts.parameters
        assert facts.max_context
