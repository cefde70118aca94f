"""The memory-related properties of a model's vision or audio encoder, read from its config. Pure.

vLLM runs the encoder at startup on as many inputs of the largest size as its budget allows, and keeps their embeddings
while the language model is profiled (``GPUModelRunner.profile_run``, ``MultiModalBudget``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from vllm_launchers.vllm.modelfacts.facts import Encoder
from vllm_launchers.vllm.modelfacts.values import Config, mapping, number, whole_numbers

VISION_PARTS = ("vision_config", "vision_encoder", "vision_tower", "mm_vision_tower", "vit_config", "visual")
AUDIO_PARTS = ("audio_config", "audio_processor")
_NESTED = ("thinker_config",)
_COLORS = 3


class _Family(msgspec.Struct, frozen=True):
    """Processor settings of a model family, which configs do not contain; ``encoder`` is its usual one.

    ``pixels`` is the largest image of a family that accepts any size; ``tiles`` is the maximum number of ``image_size``
    tiles per image. ``shrink`` is the number of patches per token if the config does not specify it.
    """

    pixels: int = 0
    tiles: int = 1
    shrink: int = 1
    encoder: Encoder | None = None


def _any_size(
    width: int, inner: int, patch: int, pixels: int, *, gated: bool = False, levels: int = 1, videos: bool = False
) -> _Family:
    unit = (2 * patch) ** 2
    values = _COLORS * patch * patch * 2
    usual = Encoder(width, inner, gated, True, values, 4.0, pixels // unit, levels, unit, videos)
    return _Family(pixels, encoder=usual)


_QWEN2_VL = _any_size(1280, 5120, 14, 12_845_056, videos=True)
_QWEN2_5_VL = _any_size(1280, 3420, 14, 12_845_056, gated=True, videos=True)
_KEYE = _any_size(1152, 4304, 14, 12_845_056)
_QWEN3_VL = _any_size(1152, 4304, 16, 16_777_216, levels=4)
_QWEN3_5 = _any_size(1152, 4304, 16, 16_777_216)
_GLM_4V = _any_size(1536, 13696, 14, 9_633_792, gated=True)
_CLIP = Encoder(1024, 4096, False, False, _COLORS * 14 * 14, 1.0, 576)
_SIGLIP_896 = Encoder(1152, 4304, False, False, _COLORS * 14 * 14, 16.0, 256)
_SIGLIP_384 = Encoder(1152, 4304, False, False, _COLORS * 14 * 14, 1.0, 7290)
_INTERN = Encoder(1024, 4096, False, False, _COLORS * 14 * 14, 4.0, 3328)

_FAMILIES: Mapping[str, _Family] = {
    "qwen2_vl": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_5_VL,
    "qwen2_5_omni": _QWEN2_5_VL,
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": _QWEN3_VL,
    "qwen3_omni_moe": _QWEN3_VL,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "glm4v": _GLM_4V,
    "glm4v_moe": _GLM_4V,
    "keye": _KEYE,
    "keye_vl_1_5": _KEYE,
    "llava": _Family(encoder=_CLIP),
    "llava_next": _Family(tiles=5, encoder=replace(_CLIP, item_tokens=2880)),
    "llava_onevision": _Family(tiles=10, encoder=_SIGLIP_384),
    "gemma3": _Family(encoder=_SIGLIP_896),
    "internvl": _Family(tiles=13, shrink=4, encoder=_INTERN),
    "internvl_chat": _Family(tiles=13, shrink=4, encoder=_INTERN),
    "llama4": _Family(tiles=17, shrink=4),
    "qwen2_audio": _Family(shrink=2),
    "mistral3": _Family(shrink=4),
}
"""By model type. Maximum image sizes are those in the checkpoints' ``preprocessor_config.json``."""

_SECONDS_30 = 1500
"""Maximum number of frames for 30 s of sound, after Whisper's convolutions."""


def encoder_of(config: Config, model_type: str | None) -> Encoder | None:
    """The encoder of a model, or None if it has none or its size is unknown."""
    root = mapping(config, *_NESTED) or config
    family = _FAMILIES.get(model_type or "", _Family())
    vision, audio = mapping(root, *VISION_PARTS), mapping(root, *AUDIO_PARTS)
    if model_type == "whisper":  # an encoder and a decoder, described by one config
        return _audio(root, 1)
    seeing = _vision(root, vision, family) if vision else None
    hearing = _audio(audio, max(family.shrink, 2)) if audio else None
    found = [one for one in (seeing, hearing) if one is not None]
    # vLLM profiles the modality whose largest item has the most tokens.
    return max(found, key=lambda one: one.item_tokens, default=family.encoder)


def with_pixels(encoder: Encoder, pixels: int | None) -> Encoder:
    """The encoder with images limited to this many pixels (``max_pixels`` of a processor that takes any size)."""
    if pixels is None or not encoder.token_pixels:
        return encoder
    return replace(encoder, item_tokens=max(1, pixels // encoder.token_pixels))


def largest_picture(preprocessor: Config) -> int | None:
    """The maximum pixels in a ``preprocessor_config.json``; None if it does not specify it."""
    return number(preprocessor, "max_pixels") or number(mapping(preprocessor, "size"), "longest_edge", "max_pixels")


def inner_width(part: Config, width: int) -> int:
    """The width of the feed-forward layers of a vision encoder."""
    ratio = part.get("mlp_ratio")
    usual = int(width * ratio) if isinstance(ratio, int | float) and 0 < ratio < 100 else 4 * width
    return number(part, "intermediate_size") or usual


def _vision(config: Config, vision: Config, family: _Family) -> Encoder | None:
    usual = family.encoder
    width = number(vision, "embed_dim") or number(vision, "hidden_size", "width") or (usual.width if usual else None)
    patch = number(vision, "patch_size", "spatial_patch_size")
    if width is None or (patch is None and usual is None):
        return None
    inner = inner_width(vision, width)
    gated = usual.gated if usual else vision.get("hidden_act") == "silu"
    levels = 1 + len(whole_numbers(vision, "deepstack_visual_indexes"))
    if usual is not None and family.pixels:
        patch = patch or round(math.sqrt(usual.token_pixels) / 2)
        merge = number(vision, "spatial_merge_size") or 2
        unit = (patch * merge) ** 2
        values = _COLORS * patch * patch * (number(vision, "temporal_patch_size") or 2)
        per_token = float(merge * merge)
        return Encoder(width, inner, gated, True, values, per_token, family.pixels // unit, levels, unit, usual.videos)
    size = number(vision, "image_size", "force_image_size") or number(config, "force_image_size")
    if patch is None or size is None or size < patch:
        return replace(usual, width=width, inner=inner) if usual is not None else None
    patches = (size // patch) ** 2
    tokens = _tokens(config, vision, patches, family)
    rotary = "rope_theta" in vision or "rope_parameters" in vision
    return Encoder(
        width, inner, gated, rotary, _COLORS * patch * patch, patches / tokens, tokens * family.tiles, levels
    )


def _tokens(config: Config, vision: Config, patches: int, family: _Family) -> int:
    """Tokens per image, or per tile of an image."""
    if fixed := number(config, "mm_tokens_per_image"):
        return min(fixed, patches)
    merge = number(vision, "spatial_merge_size") or number(config, "spatial_merge_size")
    ratio = config.get("downsample_ratio", vision.get("pixel_shuffle_ratio"))
    if merge:
        return max(1, patches // merge**2)
    if isinstance(ratio, float) and 0 < ratio < 1:
        return max(1, round(patches * ratio * ratio))
    return max(1, patches // family.shrink)


def _audio(audio: Config, shrink: int) -> Encoder | None:
    """Whisper's encoder and its derivatives: two convolutions, then attention over frames of 20 ms."""
    width = number(audio, "d_model", "hidden_size", "encoder_hidden_size")
    if width is None:
        return None
    inner = number(audio, "encoder_ffn_dim", "intermediate_size") or 4 * width
    frames = min(number(audio, "max_source_positions") or _SECONDS_30, 8 * _SECONDS_30)
    mels = number(audio, "num_mel_bins") or 128
    # Each frame contains two of the first convolution, at twice the rate.
    values = 2 * mels + 4 * width
    return Encoder(width, inner, False, False, values, float(shrink), max(1, frames // shrink))
