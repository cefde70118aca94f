"""Parameters counted from configs, compared with the totals that publishers state for their checkpoints."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_launchers.vllm.modelfacts.config import facts_from_config
from vllm_launchers.vllm.modelfacts.known import known_facts

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": False,
}  # fmt: skip
SMALL_QWEN3 = QWEN3 | {
    "hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
    "num_experts_per_tok": 2, "sliding_window": None, "tie_word_embeddings": False,
}  # fmt: skip
QWEN2 = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": 3072, "vocab_size": 50257}
DEEPSEEK_LITE = {
    "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": None,
    "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
    "num_experts_per_tok": 6, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "published", "off"),
    [
        (LLAMA, 6_738_415_616, 0.0),
        (QWEN2, 7_615_616_512, 0.0),
        (QWEN3, 8_190_735_360, 0.0),
        (SMALL_QWEN3, 4_022_468_096, 0.0),
        (QWEN3_MOE, 30_532_122_624, 0.0),
        (MIXTRAL, 46_702_792_704, 0.0),
        (DEEPSEEK_LITE, 15_706_484_224, 0.0001),
        (GPT2, 124_439_808, 0.01),
    ],
)
def test_counted_parameters_match_the_published_total(config: dict[str, Any], published: int, off: float) -> None:
    counted = facts_from_config("org/model", config).counted
    assert counted is not None
    assert abs(counted - published) <= off * published


@pytest.mark.parametrize(
    ("name", "total", "kv_heads"), [("7b", 6_738_415_616, 32), ("13b", 13_015_864_320, 40), ("70b", 68_976_648_192, 8)]
)
@pytest.mark.parametrize("form", ["meta-llama/Llama-2-{}-hf", "meta-llama/Llama-2-{}-chat-hf"])
def test_llama_2_is_known(name: str, total: int, kv_heads: int, form: str) -> None:
    facts = known_facts(form.format(name))
    assert facts is not None
    assert (facts.parameters, facts.kv_heads, facts.max_context) == (total, kv_heads, 4096)


def test_quantized_llama_2_is_known() -> None:
    facts = known_facts("TheBloke/Llama-2-13B-chat-AWQ")
    assert facts is not None
    assert facts.quantization is not None
    assert (facts.parameters, facts.quantization.method) == (13_015_864_320, "awq")


@pytest.mark.parametrize("left_out", ["intermediate_size", "hidden_size", "vocab_size"])
def test_class_defaults_are_not_treated_as_written(left_out: str) -> None:
    config = {name: value for name, value in QWEN3.items() if name != left_out}
    if left_out == "intermediate_size":
        assert facts_from_config("org/model", config).counted is None
    else:
        assert facts_from_config("org/model", config | {"model_type": "made_up"}).counted is None


def test_layers_with_unknown_weights_are_not_counted() -> None:
    mamba = {**LLAMA, "model_type": "falcon_mamba", "state_size": 16}
    assert facts_from_config("org/model", mamba).counted is None
    no_width = {name: value for name, value in DEEPSEEK_LITE.items() if name != "moe_intermediate_size"}
    assert facts_from_config("org/model", no_width).counted is None


def test_vision_tower_counts() -> None:
    tower = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584, "hidden_act": "silu",
             "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}  # fmt: skip
    config = {**QWEN2, "model_type": "qwen2_5_vl", "vision_config": tower}
    counted = facts_from_config("org/model", config).counted
    assert counted is not None
    assert abs(counted - 8_292_166_656) < 0.002 * 8_292_166_656


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (QWEN3_MOE, 48),
        (QWEN3_MOE | {"decoder_sparse_step": 2}, 24),
        (DEEPSEEK_LITE, 26),
        (MIXTRAL | {"model_type": "jamba", "expert_layer_period": 2, "expert_layer_offset": 1}, 16),
        (LLAMA, None),
    ],
)
def test_layers_with_experts_are_counted(config: dict[str, Any], layers: int | None) -> None:
    assert facts_from_config("org/model", config).expert_layers == layers


def test_experts_may_take_narrower_vectors() -> None:
    assert facts_from_config("org/model", QWEN3_MOE).expert_hidden_size is None
    assert facts_from_config("org/model", QWEN3_MOE | {"moe_latent_size": 1024}).expert_hidden_size == 1024
