"""Configs describe models in many dialects; each is read like vLLM reads it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_launchers.vllm.model_folder import config_from_params
from vllm_launchers.vllm.modelfacts.config import facts_from_config
from vllm_launchers.vllm.modelfacts.facts import UNKNOWN_FORMAT, LayerKind, ModelFacts, Quantization
from vllm_launchers.vllm.release_defaults import Release

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5000,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


def read(**more: Any) -> ModelFacts:
    """Facts of a small Llama with these entries changed."""
    return facts_from_config("org/some", {**LLAMA, **more})


def kinds(facts: ModelFacts) -> str:
    """First letters: f(ull), s(liding), c(hunked), l(inear), n(one)."""
    return "".join(kind.value[0] for kind in facts.layers)


def test_config_in_the_speculators_format_brings_a_draft() -> None:
    assert read(speculators_config={"verifier": {"name_or_path": "org/target"}}).own_draft
    assert not read(speculators_config=None).own_draft
    assert not read().own_draft


def test_plain_model() -> None:
    facts = read()
    assert facts.layers == (LayerKind.FULL,) * 6
    assert (facts.heads, facts.kv_heads, facts.head_dim) == (16, 4, 128)
    assert (facts.hidden_size, facts.intermediate_size, facts.vocabulary) == (2048, 5000, 1000)
    assert (facts.max_context, facts.dtype, facts.architecture) == (8192, "bfloat16", "LlamaForCausalLM")
    assert facts.quantization is None
    assert facts.window is None
    assert facts.experts is None
    assert not facts.mla
    assert not facts.multimodal
    assert facts.missing == ()


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"head_dim": 256}, (16, 4, 256)),
        ({"head_dim": None, "num_key_value_heads": None}, (16, 16, 128)),
        ({"model_type": "falcon", "multi_query": True, "num_key_value_heads": 16}, (16, 1, 128)),
        (
            {"model_type": "falcon", "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 8},
            (16, 8, 128),
        ),
        ({"model_type": "gpt_bigcode", "multi_query": True}, (16, 1, 128)),
        ({"model_type": "chatglm", "num_key_value_heads": None, "multi_query_group_num": 2}, (16, 2, 128)),
        ({"num_key_value_heads": None, "attn_config": {"kv_n_heads": 8}}, (16, 8, 128)),
        (
            {
                "num_key_value_heads": None,
                "block_configs": [{"attention": {"no_op": True}}] + [{"attention": {"n_heads_in_group": 8}}] * 5,
            },
            (16, 2, 128),
        ),
    ],
)
def test_heads(entries: dict[str, Any], expected: tuple[int, int, int]) -> None:
    facts = read(**entries)
    assert (facts.heads, facts.kv_heads, facts.head_dim) == expected


def test_old_config_names() -> None:
    old = {"model_type": "gpt2", "n_layer": 3, "n_head": 4, "n_embd": 64, "n_positions": 512, "torch_dtype": "float32"}
    facts = facts_from_config("gpt2", old)
    assert (len(facts.layers), facts.heads, facts.kv_heads, facts.head_dim) == (3, 4, 4, 16)
    assert (facts.max_context, facts.dtype) == (512, "float32")


@pytest.mark.parametrize(
    ("entries", "layers", "window"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 64}, "sfsfsf", 64),
        ({"layer_types": ["sliding_attention", "full_attention"] * 3}, "ffffff", None),
        ({"layer_types": ["sliding_attention", "full_attention"] * 5, "sliding_window": 64}, "sfsfsf", 64),
        ({"model_type": "mistral", "sliding_window": 64}, "ssssss", 64),
        ({"model_type": "mistral", "sliding_window": None}, "ffffff", None),
        ({"model_type": "mistral"}, "ssssss", 4096),
        ({"sliding_window": 0}, "ffffff", None),
        ({"model_type": "qwen2", "sliding_window": 64, "max_window_layers": 4}, "ffffff", None),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}, "ffffff", None),
        (
            {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 4},
            "ffffss",
            64,
        ),
        ({"model_type": "gemma2", "sliding_window": 64}, "sfsfsf", 64),
        ({"model_type": "gemma3_text", "sliding_window": 64}, "sssssf", 64),
        ({"model_type": "gemma3_text", "sliding_window": 64, "sliding_window_pattern": 3}, "ssfssf", 64),
        ({"model_type": "gemma3n_text", "sliding_window": 64, "num_kv_shared_layers": 2}, "ssssnn", 64),
        ({"model_type": "gemma4_text", "num_hidden_layers": 8}, "sssssfsf", 512),
        ({"model_type": "cohere2", "sliding_window": 64}, "sssfss", 65),
        ({"model_type": "olmo3"}, "sssfss", 4096),
        ({"model_type": "exaone4", "sliding_window": 64, "sliding_window_pattern": "LLG"}, "ssfssf", 64),
        ({"model_type": "gpt_oss"}, "sfsfsf", 128),
        ({"sliding_window": [64, None, None]}, "sffsff", 64),
        ({"hybrid_layer_pattern": [0, 1, 1, 1, 1, 0], "sliding_window_size": 64}, "fssssf", 64),
        ({"model_type": "llama4_text"}, "cccfcc", 8192),
        ({"model_type": "llama4_text", "no_rope_layers": [1, 0, 1, 0, 1, 0]}, "cfcfcf", 8192),
        ({"model_type": "llama4_text", "attention_chunk_size": None}, "ffffff", None),
        ({"block_configs": [{"attention": {"no_op": True}}, {"attention": {}}] * 3}, "nfnfnf", None),
        ({"model_type": "jamba", "attn_layer_period": 3, "attn_layer_offset": 1}, "lfllfl", None),
        ({"model_type": "bamba", "attn_layer_indices": [2]}, "llflll", None),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*ME"}, "lnlfln", None),
        ({"model_type": "mamba"}, "llllll", None),
        ({"model_type": "falcon_h1"}, "lf" * 6, None),
        ({"model_type": "zamba2", "hybrid_layer_ids": [2]}, "lllflll", None),
        ({"layers_block_type": ["mamba", "attention", "mlp"] * 2}, "lfnlfn", None),
        ({"attn_type_list": [0, 0, 1, 0, 0, 1]}, "llfllf", None),
        ({"model_type": "qwen3_next"}, "lllfll", None),
        ({"model_type": "qwen3_5_text", "full_attention_interval": 2}, "lflflf", None),
        ({"model_type": "kimi_linear", "linear_attn_config": {"full_attn_layers": [4]}}, "lllfll", None),
    ],
)
def test_layers_by_kind(entries: dict[str, Any], layers: str, window: int | None) -> None:
    facts = read(**entries)
    assert kinds(facts) == layers
    assert facts.window == window


def test_full_layers_with_their_own_heads() -> None:
    gemma = read(
        model_type="gemma4_text",
        head_dim=256,
        num_key_value_heads=8,
        num_global_key_value_heads=2,
        global_head_dim=512,
        attention_k_eq_v=True,
    )
    assert (gemma.kv_heads, gemma.head_dim, gemma.full_kv_heads, gemma.full_head_dim) == (8, 256, 2, 512)
    mimo = read(swa_num_key_value_heads=8, swa_head_dim=192)
    assert (mimo.kv_heads, mimo.head_dim, mimo.full_kv_heads, mimo.full_head_dim) == (8, 192, 4, 128)
    assert read().full_kv_heads is None


def test_multi_head_latent_attention_where_vllm_uses_it() -> None:
    entries = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128}
    facts = read(model_type="deepseek_v3", **entries)
    assert facts.mla
    assert (facts.kv_lora_rank, facts.qk_rope_head_dim, facts.kv_heads, facts.head_dim) == (512, 64, 1, 576)
    assert read(model_type="deepseek_v2", **entries).mla
    assert not read(model_type="minicpm3", **entries).mla
    assert any("index" in word for word in read(model_type="deepseek_v32", index_head_dim=128, **entries).missing)


def test_linear_model_has_a_state_size() -> None:
    delta = {
        "model_type": "qwen3_next",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
    }
    row = (2 * 2 * 8 + 4 * 16) * 2
    assert read(**delta).state_bytes == 3 * row + 4 * 16 * 8 * 2
    assert read(**delta).state_bytes_per_draft_token == row
    assert read(**delta, mamba_ssm_dtype="float32").state_bytes == 3 * row + 4 * 16 * 8 * 4
    # The pages of Qwen3.5-9B have 528 tokens of 4096 bytes: the smallest multiple of 16 that holds this state.
    published = read(model_type="qwen3_5_text", hidden_size=4096, head_dim=256)
    assert published.state_bytes == 2_146_304
    assert -(-published.state_bytes // 4096 // 16) * 16 == 528
    mamba2 = {"mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 16, "conv_kernel": 4}
    nemotron = read(model_type="nemotron_h", hybrid_override_pattern="M*", num_hidden_layers=2, **mamba2)
    assert nemotron.state_bytes == 3 * (32 + 2 * 2 * 16) * 2 + 4 * 8 * 16 * 4
    mamba1 = read(model_type="jamba", mamba_expand=2, mamba_d_state=16, mamba_d_conv=4)
    assert mamba1.state_bytes == 3 * 4096 * 2 + 4096 * 16 * 2
    conv = read(layer_types=["conv", "full_attention"] * 3, conv_L_cache=3, conv_dim=2048)
    assert conv.state_bytes == 2 * 2048 * 2
    kimi = {"full_attn_layers": [4], "num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4}
    assert read(model_type="kimi_linear", linear_attn_config=kimi).state_bytes == 3 * 3 * 32 * 2 + 4 * 8 * 8 * 4
    unknown = read(layer_types=["linear_attention", "full_attention"] * 3)
    assert unknown.state_bytes is None
    assert any("state" in word for word in unknown.missing)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({}, 8192),
        ({"max_seq_len": 4096}, 4096),
        ({"model_max_length": 16384}, 16384),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 16384),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4}}, 32768),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}}, 8192),
        ({"rope_scaling": {"type": "longrope", "factor": 8.0}}, 8192),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}}, 8192),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}}, 8192),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, 8192),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}}, 16384),
        ({"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 8192),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, 8192),
        ({"max_position_embeddings": "many"}, None),
    ],
)
def test_longest_context(entries: dict[str, Any], expected: int | None) -> None:
    facts = read(**entries)
    assert facts.max_context == expected
    assert ("longest context" in facts.missing) is (expected is None)


@pytest.mark.parametrize(("release", "expected"), [((0, 29, 0), 65_536), ((0, 30, 0), 131_072), (None, 131_072)])
def test_before_release_0_30_the_original_length_times_the_factor_of_yarn_is_the_longest_context(
    release: Release | None, expected: int
) -> None:
    """As in vLLM's ``_get_and_verify_max_len``."""
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32_768}
    facts = read(max_position_embeddings=131_072, rope_scaling=yarn)
    assert facts.longest_context(release) == expected


def test_yarn_lengthens_the_context_only_in_earlier_releases() -> None:
    facts = read(rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192})
    assert (facts.max_context, facts.stretched_context) == (8192, 32768)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, Quantization("awq", 4, 128)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, Quantization("awq", 4, 64)),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, Quantization("gptq", 8, -1)),
        *(
            ({"quant_method": "gptq", "bits": 4, "group_size": size, **more}, Quantization("gptq", 4, size, **expected))
            for size, more, expected in (
                (128, {"desc_act": True}, {"ordered": True}),
                (-1, {"desc_act": True}, {}),
                (128, {"desc_act": False, "dynamic": {"-:mlp": {}}}, {}),
                (128, {"desc_act": False, "dynamic": {"+:mlp": {"desc_act": True}}}, {"ordered": True}),
                (-1, {"desc_act": True, "dynamic": {"mlp": {"group_size": 64}}}, {"ordered": True}),
                (128, {"sym": False}, {"symmetric": False}),
            )
        ),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, Quantization("fp8", 8, None, (128, 128))),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, Quantization("bitsandbytes", 4)),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, Quantization("bitsandbytes", 8)),
        ({"quant_method": "mxfp4"}, Quantization("mxfp4", 4, 32)),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, Quantization("modelopt_fp4", 4, 16)),
        (
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
            Quantization("modelopt", 8),
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32, "type": "int"}}},
            },
            Quantization("compressed-tensors", 4, 32),
        ),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, Quantization("compressed-tensors", 8)),
        (
            {
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 4, "group_size": 128}},
                    "group_1": {"weights": {"num_bits": 8, "group_size": None}},
                },
            },
            Quantization("compressed-tensors", 4),
        ),
        (
            {"quant_method": "compressed_tensors", "format": "nvfp4-pack-quantized"},
            Quantization("compressed-tensors", 4),
        ),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}},
            Quantization("quark", 8),
        ),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}}},
            Quantization("quark", 4, 32),
        ),
        ({"quant_method": "torchao"}, Quantization("torchao")),
        ({"bits": 4}, Quantization(UNKNOWN_FORMAT, 4)),
        ({}, None),
    ],
)
def test_quantization(settings: dict[str, Any], expected: Quantization | None) -> None:
    assert read(quantization_config=settings).quantization == expected


def test_quantization_from_a_separate_file_or_the_text_part() -> None:
    separate_file = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"},
    }
    facts = facts_from_config("org/some", LLAMA, separate_file)
    assert facts.quantization == Quantization("modelopt_fp4", 4, 16)
    assert facts.kv_cache_quantization == "fp8"
    own = facts_from_config("org/some", {**LLAMA, "quantization_config": {"quant_method": "awq"}}, separate_file)
    assert own.quantization == Quantization("awq", 4)
    nested = {"model_type": "llava", "text_config": {**LLAMA, "quantization_config": {"quant_method": "fp8"}}}
    assert facts_from_config("org/some", nested).quantization == Quantization("fp8", 8)


def test_tied_embeddings() -> None:
    assert read().tied is False
    assert read(tie_word_embeddings=True).tied is True
    gemma = {"model_type": "gemma3", "text_config": {**LLAMA, "model_type": "gemma3_text"}}
    assert facts_from_config("org/gemma", gemma).tied is True
    assert facts_from_config("org/gemma", {**gemma, "tie_word_embeddings": False}).tied is False


def test_kv_cache_scales() -> None:
    scheme = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    assert read(quantization_config=scheme).kv_cache_quantization == "fp8"
    assert read(quantization_config={"quant_method": "fp8"}).kv_cache_quantization is None


@pytest.mark.parametrize("name", ["text_config", "llm_config", "language_config"])
def test_language_part_of_a_vision_model(name: str) -> None:
    config = {
        "architectures": ["SeesForConditionalGeneration"],
        "model_type": "sees",
        name: LLAMA,
        "vision_config": {"num_hidden_layers": 99, "hidden_size": 77},
    }
    facts = facts_from_config("org/sees", config)
    assert facts.multimodal
    assert (facts.architecture, facts.model_type) == ("SeesForConditionalGeneration", "sees")
    assert (len(facts.layers), facts.kv_heads, facts.max_context, facts.dtype) == (6, 4, 8192, "bfloat16")


def test_missing_config_entries_use_the_class_defaults() -> None:
    gemma = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "num_hidden_layers": 12,
            "sliding_window": 64,
        },
        "vision_config": {},
        "torch_dtype": "bfloat16",
    }
    facts = facts_from_config("org/gemma", gemma)
    assert (facts.heads, facts.kv_heads, facts.head_dim, facts.max_context) == (8, 4, 256, 131072)
    assert kinds(facts) == "sssssf" * 2
    assert facts.missing == ()


def test_model_without_attention_has_no_heads() -> None:
    facts = read(model_type="mamba2", num_heads=4, head_dim=8, n_groups=2, state_size=16, conv_kernel=4)
    assert (facts.heads, facts.kv_heads, facts.head_dim) == (None, None, None)
    assert facts.state_bytes
    assert facts.missing == ()


def test_experts() -> None:
    assert (read(num_experts=64, num_experts_per_tok=4).experts, read(num_experts=1).experts) == (64, None)
    for name in ("n_routed_experts", "num_local_experts", "moe_num_experts"):
        assert read(**{name: 8, "num_experts_per_tok": 2}).experts == 8
    assert read(num_experts=8, top_k_experts=2).experts_per_token == 2
    assert read(ffn_config={"moe_num_experts": 16, "moe_top_k": 4}).experts_per_token == 4


def test_remote_code_only_if_certainly_needed() -> None:
    code = {"auto_map": {"AutoConfig": "configuration_some.SomeConfig"}}
    assert facts_from_config("org/a", {**LLAMA, **code, "model_type": "internvl_chat"}).needs_remote_code
    assert not read(**code).needs_remote_code
    assert not facts_from_config("org/a", {**LLAMA, "model_type": "internvl_chat"}).needs_remote_code


def test_mistral_config_file() -> None:
    params = {
        "dim": 2048,
        "n_layers": 4,
        "n_heads": 16,
        "n_kv_heads": 4,
        "head_dim": 64,
        "hidden_dim": 5000,
        "vocab_size": 1000,
        "max_seq_len": 32768,
        "moe": {"num_experts": 8, "num_experts_per_tok": 2},
        "quantization": {"qformat_weight": "fp8_e4m3"},
    }
    facts = facts_from_config("org/mistral", config_from_params(params))
    assert (len(facts.layers), facts.heads, facts.kv_heads, facts.head_dim) == (4, 16, 4, 64)
    assert kinds(facts) == "ffff"
    assert (facts.max_context, facts.experts, facts.architecture) == (32768, 8, "MixtralForCausalLM")
    assert facts.quantization == Quantization("fp8", 8)


def test_absurd_values_are_unknown() -> None:
    facts = read(num_hidden_layers=10**12, hidden_size=-1, vocab_size=True, num_attention_heads=2.5, torch_dtype=7)
    assert facts.layers == ()
    assert (facts.hidden_size, facts.vocabulary, facts.dtype) == (None, None, None)
    assert {"hidden size", "number format", "number and kind of layers"} <= set(facts.missing)
    assert facts_from_config("org/none", {}).missing


MORE_WORDS = """
text_config layer_types sliding_window sliding_window_pattern block_configs rope_scaling linear_attn_config factor
quantization_config config_groups weights attention num_bits auto_map no_rope_layers attn_type_list group_size
hybrid_override_pattern ffn_config kv_cache_scheme attn_layer_period attn_layer_offset linear_num_value_heads
full_attention_interval
"""
WORDS = st.sampled_from([*LLAMA, *MORE_WORDS.split()])
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.integers(),
    st.floats(),
    st.sampled_from(
        ["llama4", "gemma4_text", "jamba", "qwen2", "deepseek_v3", "mamba", "zamba2", "full_attention", "L"]
    ),
    st.text(max_size=5),
)
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=5))


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(WORDS, JSON, max_size=8), st.dictionaries(WORDS, JSON, max_size=4))
def test_any_config_is_read_without_an_exception(config: dict[str, Any], separate_file: dict[str, Any]) -> None:
    facts = facts_from_config("org/any", {**LLAMA, **config}, separate_file)
    assert len(facts.layers) <= 4000
    for value in (facts.heads, facts.kv_heads, facts.head_dim, facts.max_context, facts.state_bytes, facts.window):
        assert value is None or (isinstance(value, int) and value > 0)
    assert facts_from_config("org/any", json.loads(json.dumps(config))).model == "org/any"


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({}, 8192),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 8192),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, None),
        ({"rope_scaling": {"type": "yarn", "factor": 1.0}}, None),
        ({"model_max_length": 16384}, None),
    ],
)
def test_positions_are_known_only_if_they_alone_are_the_context(entries: dict[str, Any], expected: int | None) -> None:
    assert read(**entries).positions == expected


@pytest.mark.parametrize("heads", ["8", -8, 0, 2.5, [4, 8]])
def test_number_of_kv_heads_that_cannot_be_read_is_unknown(heads: object) -> None:
    facts = read(num_key_value_heads=heads)
    assert facts.kv_heads is None
    assert any("KV heads" in one for one in facts.missing)


def test_without_a_number_of_kv_heads_they_are_the_attention_heads() -> None:
    facts = read(num_key_value_heads=None)
    assert (facts.kv_heads, facts.missing) == (16, ())


def test_format_without_a_method_is_unknown() -> None:
    assert read(quantization={"bits": 4, "group_size": 64}).quantization == Quantization(UNKNOWN_FORMAT, 4, 64)
