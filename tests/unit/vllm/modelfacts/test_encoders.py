"""Encoders, read from the configs of model families and from their processors' settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_launchers.vllm.modelfacts.config import facts_from_config
from vllm_launchers.vllm.modelfacts.encoder import encoder_of, with_pixels
from vllm_launchers.vllm.modelfacts.facts import Encoder
from vllm_launchers.vllm.modelfacts.read import facts_of_files

QWEN_TOWER = {"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "mlp_ratio": 4, "patch_size": 14,
              "spatial_merge_size": 2, "temporal_patch_size": 2}  # fmt: skip
SIGLIP = {"hidden_size": 1152, "intermediate_size": 4304, "image_size": 896, "patch_size": 14}
CLIP = {"hidden_size": 1024, "intermediate_size": 4096, "image_size": 336, "patch_size": 14}
INTERN = {"hidden_size": 1024, "intermediate_size": 4096, "image_size": 448, "patch_size": 14}
PIXTRAL = {"hidden_size": 1024, "intermediate_size": 4096, "image_size": 1540, "patch_size": 14, "rope_theta": 1e4,
           "hidden_act": "silu"}  # fmt: skip
WHISPER = {"d_model": 1280, "encoder_ffn_dim": 5120, "max_source_positions": 1500, "num_mel_bins": 128}


def shape(encoder: Encoder | None) -> tuple[int, int, float, int]:
    assert encoder is not None
    return encoder.width, encoder.inner, encoder.patches_per_token, encoder.item_tokens


@pytest.mark.parametrize(
    ("model_type", "config", "expected"),
    [
        ("qwen2_vl", {"vision_config": QWEN_TOWER}, (1280, 5120, 4.0, 16384)),
        ("qwen2_vl", {}, (1280, 5120, 4.0, 16384)),
        ("qwen2_5_omni", {"thinker_config": {"vision_config": QWEN_TOWER}}, (1280, 5120, 4.0, 16384)),
        ("gemma3", {"vision_config": SIGLIP, "mm_tokens_per_image": 256}, (1152, 4304, 16.0, 256)),
        ("gemma3", {"vision_config": {"hidden_size": 1152}}, (1152, 4608, 16.0, 256)),
        ("llava", {"vision_config": CLIP}, (1024, 4096, 1.0, 576)),
        ("llava_next", {"vision_config": CLIP}, (1024, 4096, 1.0, 2880)),
        ("internvl_chat", {"vision_config": INTERN, "downsample_ratio": 0.5}, (1024, 4096, 4.0, 3328)),
        ("mistral3", {"vision_config": PIXTRAL, "spatial_merge_size": 2}, (1024, 4096, 12100 / 3025, 3025)),
        ("made_up", {"vision_config": CLIP}, (1024, 4096, 1.0, 576)),
        ("whisper", WHISPER, (1280, 5120, 1.0, 1500)),
        ("qwen2_audio", {"audio_config": WHISPER}, (1280, 5120, 2.0, 750)),
        ("both", {"vision_config": CLIP, "audio_config": WHISPER}, (1280, 5120, 2.0, 750)),
    ],
)
def test_encoder_shapes(model_type: str, config: dict[str, Any], expected: tuple[int, int, float, int]) -> None:
    assert shape(encoder_of(config, model_type)) == expected


@pytest.mark.parametrize(
    ("model_type", "config"),
    [("llama", {}), ("made_up", {"vision_config": {"x": 1}}), (None, {}), ("made_up", {"audio_config": {"x": 1}}),
     ("made_up", {"vision_config": {"hidden_size": 64, "patch_size": 14, "image_size": 7}})],
)  # fmt: skip
def test_unknown_encoder(model_type: str | None, config: dict[str, Any]) -> None:
    assert encoder_of(config, model_type) is None


def test_rotary_embeddings_and_gates() -> None:
    plain, turned = encoder_of({"vision_config": CLIP}, "llava"), encoder_of({"vision_config": PIXTRAL}, "made_up")
    assert plain is not None
    assert turned is not None
    assert (plain.rotary, plain.gated) == (False, False)
    assert (turned.rotary, turned.gated) == (True, True)


def test_embeddings_on_several_levels() -> None:
    tower = {**QWEN_TOWER, "patch_size": 16, "deepstack_visual_indexes": [8, 16, 24]}
    found = encoder_of({"vision_config": tower}, "qwen3_vl")
    assert found is not None
    assert (found.levels, found.item_tokens) == (4, 16384)


def test_fewer_pixels_make_fewer_tokens() -> None:
    any_size, fixed = encoder_of({}, "qwen2_vl"), encoder_of({}, "llava")
    assert any_size is not None
    assert fixed is not None
    assert with_pixels(any_size, 1_003_520).item_tokens == 1280
    assert with_pixels(any_size, 1).item_tokens == 1
    assert with_pixels(any_size, None) is any_size
    assert with_pixels(fixed, 1000) is fixed


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [({"max_pixels": 1_003_520}, 1280), ({"size": {"longest_edge": 1_003_520}}, 1280), ({"max_pixels": None}, 16384),
     (None, 16384)],
)  # fmt: skip
def test_preprocessor_config_limits_images(tmp_path: Path, settings: Any, tokens: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_vl", "vision_config": QWEN_TOWER}))
    if settings is not None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    encoder = facts_of_files("org/m", tmp_path).encoder
    assert encoder is not None
    assert encoder.item_tokens == tokens


def test_model_facts_include_the_encoder() -> None:
    text = {"model_type": "qwen2", "hidden_size": 1536}
    assert facts_from_config("org/m", {**text, "model_type": "qwen2_vl", "vision_config": QWEN_TOWER}).encoder
    assert facts_from_config("org/m", text).encoder is None
