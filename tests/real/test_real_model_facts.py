"""Facts that we read from model configs match those of real vLLM."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fakes.forked import Forks
from vllm_launchers.vllm.modelfacts.config import facts_from_config
from vllm_launchers.vllm.modelfacts.facts import LayerKind
from vllm_launchers.vllm.modelfacts.read import model_facts

pytestmark = pytest.mark.real

BASE = {
    "architectures": ["Any"],
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "hidden_size": 2048,
    "intermediate_size": 5000,
    "vocab_size": 300000,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
EXPERTS = {"num_experts_per_tok": 2}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
ALIKE = "exaone4 gemma gemma2 gemma3_text glm4 gpt_oss granite llama llama4_text ministral mistral mixtral olmo2 olmo3 "
ALIKE += "phi phi3 qwen2 qwen3 qwen3_moe qwen3_next qwen3_5_text seed_oss smollm3 starcoder2 falcon jamba"
SPARSE = "gemma gemma2 gemma3_text gpt_oss llama llama4_text mistral mixtral phi3 qwen2 qwen3 qwen3_moe qwen3_next "
SPARSE += "qwen3_5_text starcoder2 exaone4 olmo3 jamba cohere"


def seeing(model_type: str, text_type: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    """A model with a vision encoder."""
    text = {**entries, "model_type": text_type}
    return {**BASE, "model_type": model_type, "text_config": text, "vision_config": {}}


def configs() -> dict[str, dict[str, Any]]:
    """Configs of many architectures, complete and minimal."""
    found = {f"{one}": {**BASE, "model_type": one} for one in ALIKE.split()}
    found |= {
        f"{one}-bare": {"architectures": ["Any"], "model_type": one, "dtype": "float16"} for one in SPARSE.split()
    }
    found["deepseek_v3"] = {**BASE, **MLA, **EXPERTS, "model_type": "deepseek_v3", "n_routed_experts": 64}
    found["qwen2-window"] = {**BASE, "model_type": "qwen2", "sliding_window": 512, "use_sliding_window": True}
    found["qwen2-window"]["max_window_layers"] = 0
    found["linear-rope"] = {**BASE, "model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}}
    found["llama3-rope"] = {**BASE, "model_type": "llama", "rope_scaling": {"rope_type": "llama3", **LLAMA3}}
    found["qwen2_vl"] = {**BASE, "model_type": "qwen2_vl", "vision_config": {}}
    found["llava"] = seeing("llava", "llama", BASE)
    found["gemma3"] = seeing("gemma3", "gemma3_text", BASE)
    found["gemma3-bare"] = seeing("gemma3", "gemma3_text", {"num_hidden_layers": 34, "hidden_size": 2560})
    found["mistral3"] = seeing("mistral3", "mistral", BASE)
    found["llama4"] = seeing("llama4", "llama4_text", BASE)
    found["qwen3_vl"] = seeing("qwen3_vl", "qwen3_vl_text", BASE)
    found["qwen3_5"] = seeing("qwen3_5", "qwen3_5_text", BASE)
    return found


READ = """
import json, sys, tempfile
import vllm.config
from vllm.config.model import _get_and_verify_max_len
from vllm.transformers_utils import model_arch_config_convertor as arch
from vllm.transformers_utils.config import get_config, get_hf_text_config

def read(config):
    folder = tempfile.mkdtemp()
    with open(folder + "/config.json", "w") as file:
        json.dump(config, file)
    whole = get_config(folder, trust_remote_code=False)
    text = get_hf_text_config(whole)
    convertor = arch.MODEL_ARCH_CONFIG_CONVERTORS.get(whole.model_type, arch.ModelArchConfigConvertorBase)
    facts = convertor(whole, text).convert()
    longest = _get_and_verify_max_len(hf_config=text, model_arch_config=facts, tokenizer_config=None,
        max_model_len=None, disable_sliding_window=False, sliding_window=None)
    return dict(layers=facts.total_num_hidden_layers, heads=facts.total_num_attention_heads,
        kv_heads=facts.total_num_kv_heads, head_dim=facts.head_size, hidden=facts.hidden_size,
        vocabulary=facts.vocab_size, experts=facts.num_experts, mla=facts.is_deepseek_mla, longest=longest,
        window=getattr(text, "sliding_window", None), kinds=getattr(text, "layer_types", None))

from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
states = [
    Shapes.gated_delta_net_state_shape(1, 2, 4, 8, 16, 4, 0),
    Shapes.mamba2_state_shape(1, 32, 2, 4, 8, 16, 4),
    Shapes.mamba1_state_shape(1, 4096, 16, 4),
]
configs = {name: read(config) for name, config in json.load(sys.stdin).items()}
print(json.dumps({"configs": configs, "states": states}))
"""


@pytest.fixture(scope="module")
def real(forks: Forks) -> dict[str, Any]:
    """Facts that real vLLM reads from all configs, and their state shapes."""
    printed = forks.run(["-c", READ], json.dumps(configs()), {"VLLM_LOGGING_LEVEL": "ERROR"})
    answer: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
    return answer


def test_config_facts_match_vllm(real: dict[str, Any]) -> None:
    given, theirs = configs(), real["configs"]
    assert len(theirs) == len(given) > 50
    for name, config in given.items():
        facts = facts_from_config("org/some", config)
        ours = {
            "layers": len(facts.layers),
            "heads": facts.heads,
            "kv_heads": theirs[name]["kv_heads"] if facts.mla else facts.kv_heads,
            "head_dim": facts.head_dim,
            "hidden": facts.hidden_size,
            "vocabulary": facts.vocabulary,
            "experts": facts.experts or 0,
            "mla": facts.mla,
            "longest": facts.max_context,
        }
        assert (name, ours) == (name, {key: theirs[name][key] for key in ours})
        if LayerKind.SLIDING in facts.layers:
            assert (name, facts.window) == (name, theirs[name]["window"])
        if kinds := theirs[name]["kinds"]:
            assert (name, [f"{kind}_attention" for kind in facts.layers]) == (name, kinds)


def test_state_shapes_match_vllm(real: dict[str, Any]) -> None:
    linear = {**BASE, "num_hidden_layers": 4}
    delta = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    delta |= {"linear_value_head_dim": 16, "linear_conv_kernel_dim": 4}
    mamba2 = {"mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 16, "conv_kernel": 4}
    mamba1 = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_expand": 2, "mamba_d_state": 16, "mamba_d_conv": 4}
    ours = [
        facts_from_config("a", {**linear, **delta, "model_type": "qwen3_next"}).state_bytes,
        facts_from_config(
            "b", {**linear, **mamba2, "model_type": "nemotron_h", "hybrid_override_pattern": "M*M*"}
        ).state_bytes,
        facts_from_config("c", {**linear, **mamba1, "model_type": "jamba"}).state_bytes,
    ]
    recurrent = (2, 4, 2)  # Nemotron-H keeps this state in float32
    expected = [
        rows * width * 2 + size * math.prod(shape)
        for ((rows, width), shape), size in zip(real["states"], recurrent, strict=True)
    ]
    assert ours == expected


def test_tiny_model_facts(tiny_model: Path) -> None:
    facts = model_facts(str(tiny_model), environ={})
    assert (facts.source, facts.max_context, facts.dtype) == ("folder", 4096, "bfloat16")
    assert (facts.files_missing, facts.missing, facts.bytes_to_download) == ((), (), 0)
    assert facts.weight_bytes == (tiny_model / "model.safetensors").stat().st_size
