"""The facts about a model that a plan needs. None means unknown; ``missing`` names the unknown facts."""

from __future__ import annotations

import re
from enum import StrEnum

import msgspec
from msgspec.structs import replace

from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.vllm.release_defaults import Release, scales_yarn

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "half": 2, "float": 4}
"""Bytes of one number of these types."""


class LayerKind(StrEnum):
    """How a layer stores past tokens."""

    FULL = "full"
    SLIDING = "sliding"
    """Attention over a window of the last tokens."""
    CHUNKED = "chunked"
    LINEAR = "linear"
    """A state of fixed size: gated delta nets, Mamba, …"""
    NONE = "none"


class ModelFactsError(Exception):
    """A model's facts are unavailable; the message is one sentence for users: what, where, and what to do."""


UNKNOWN_FORMAT = "unknown"
"""The method of weights of which only the number of bits is known."""


class Quantization(msgspec.Struct, frozen=True):
    """How a checkpoint's weights are stored. ``method`` is vLLM's name (``awq``, ``gptq``, ``fp8``, …), or unknown.

    ``group_size`` is the number of weights that share a scale (-1: a whole column); ``block`` the shape of FP8 blocks.
    """

    method: str
    bits: int | None = None
    group_size: int | None = None
    block: tuple[int, int] | None = None
    floating: bool = False
    """Whether 8-bit compressed-tensors weights are FP8 rather than INT8, as far as known."""
    ordered: bool = False
    """Whether GPTQ groups follow the order of activations (``desc_act``)."""
    symmetric: bool = True
    """Whether GPTQ weights are symmetric around zero, as far as known."""


class Encoder(msgspec.Struct, frozen=True):
    """A vision or audio encoder. Its input is cut into patches (or frames), several of which may become one token.

    ``width`` and ``inner`` are the sizes of its layers; ``patch_values`` is the number of values per patch.
    ``item_tokens`` is the number of tokens of the largest image, video or sound; each token gets ``levels`` embeddings
    of the model's width. ``token_pixels`` is the number of pixels per token if images may have any size, else 0.
    ``videos``: it accepts videos of as many such images as fit in the context.
    """

    width: int
    inner: int
    gated: bool
    rotary: bool
    patch_values: int
    patches_per_token: float
    item_tokens: int
    levels: int = 1
    token_pixels: int = 0
    videos: bool = False


class ModelFacts(msgspec.Struct, frozen=True):
    """A model. Lengths in tokens, sizes in bytes.

    ``layers`` has one entry per layer that uses cache memory, in order. ``source`` is ``folder``, ``cache``, ``hub`` or
    ``table``. ``weight_bytes`` is the size of the weight files; ``parameters`` is the number of weights, if only that
    is known. ``gated`` (access not granted) and ``files_missing`` (missing weight files) are reasons why a start would
    fail.
    """

    model: str
    source: str = ""
    folder: str | None = None
    architecture: str | None = None
    model_type: str | None = None
    layers: tuple[LayerKind, ...] = ()
    hidden_size: int | None = None
    intermediate_size: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    full_kv_heads: int | None = None
    """KV heads of full-attention layers if they differ from those of the sliding ones (Gemma 4), else None."""
    full_head_dim: int | None = None
    """Head size of full-attention layers if it differs from that of the sliding ones, else None."""
    kv_lora_rank: int | None = None
    """Set for multi-head latent attention (MLA), whose cache is one vector per token and layer."""
    qk_rope_head_dim: int | None = None
    window: int | None = None
    experts: int | None = None
    experts_per_token: int | None = None
    expert_intermediate_size: int | None = None
    """Width of one expert; ``intermediate_size`` is that of dense layers if a model has both."""
    expert_hidden_size: int | None = None
    """Width of the vectors that experts take, if it is not ``hidden_size``."""
    expert_layers: int | None = None
    """Number of layers with experts; None if unknown."""
    vocabulary: int | None = None
    tied: bool | None = None
    """Whether its output layer is the embedding, so that weight files have it once."""
    max_context: int | None = None
    stretched_context: int | None = None
    """As ``max_context``, for releases that multiply the original length by YaRN's factor; see `longest_context`."""
    positions: int | None = None
    """The config's ``max_position_embeddings`` if that alone is ``max_context``: no rotary scaling changes it."""
    dtype: str | None = None
    """From the config: ``bfloat16``, ``float16``, ``float32``."""
    quantization: Quantization | None = None
    kv_cache_quantization: str | None = None
    weight_bytes: int | None = None
    parameters: int | None = None
    counted: int | None = None
    """Parameters counted from the config's shape; None if it does not specify them."""
    size_from: str = ""
    """The source of ``weight_bytes`` if not the weight files themselves: the name of their index."""
    multimodal: bool = False
    encoder: Encoder | None = None
    """None for a text-only model, and if the encoder's size is unknown."""
    needs_remote_code: bool = False
    own_draft: bool = False
    """Whether its config is in the speculators format: it is a draft, and names the model that vLLM serves with it."""
    tokenizer_missing: bool = False
    """Whether its folder certainly has no tokenizer."""
    gated: bool | None = None
    files_missing: tuple[str, ...] = ()
    bytes_to_download: int | None = None
    """Bytes still to download: from file sizes, else parameters × precision; 0 if complete, None if unknown."""
    state_bytes: int | None = None
    """Bytes of state per linear-attention layer and request, before any split over GPUs; None if unknown."""
    state_bytes_per_draft_token: int | None = None
    """Bytes that each speculative token adds to ``state_bytes``: one row of the convolution's state."""
    missing: tuple[str, ...] = ()

    @property
    def certain(self) -> bool:
        """Whether they come from the model's own files, here or on the hub, not from a table or its name."""
        return self.source != "table"

    @property
    def mla(self) -> bool:
        """Whether it uses multi-head latent attention."""
        return self.kv_lora_rank is not None

    @property
    def attention_free(self) -> bool:
        """Whether it has layers with a state, and no attention."""
        return LayerKind.LINEAR in self.layers and {*self.layers} <= {LayerKind.LINEAR, LayerKind.NONE}

    def longest_context(self, release: Release | None) -> int | None:
        """Tokens of prompt plus output that a release accepts by default; an unknown release counts as the newest."""
        return self.stretched_context if scales_yarn(release) and self.stretched_context else self.max_context


# -- what a model's name contains -------------------------------------------------------------------------------------


_QUANTIZED: tuple[tuple[str, Quantization], ...] = (
    ("awq-8bit", Quantization("awq", 8)),
    ("awq", Quantization("awq", 4, 128)),
    ("gptq-int8", Quantization("gptq", 8, 128)),
    ("gptq-8bit", Quantization("gptq", 8, 128)),
    ("gptq", Quantization("gptq", 4, 128)),
    ("bnb-4bit", Quantization("bitsandbytes", 4)),
    ("bnb-8bit", Quantization("bitsandbytes", 8)),
    ("quantized.w4a16", Quantization("compressed-tensors", 4, 128)),
    ("quantized.w8a8", Quantization("compressed-tensors", 8)),
    ("quantized.w8a16", Quantization("compressed-tensors", 8)),
    ("w4a16", Quantization("compressed-tensors", 4, 128)),
    ("w8a16", Quantization("compressed-tensors", 8)),
    ("w8a8", Quantization("compressed-tensors", 8)),
    ("nvfp4", Quantization("modelopt_fp4", 4, 16)),
    ("mxfp4", Quantization("mxfp4", 4, 32)),
    ("fp4", Quantization("modelopt_fp4", 4, 16)),
    ("fp8-dynamic", Quantization("compressed-tensors", 8, floating=True)),
    ("fp8-block", Quantization("compressed-tensors", 8, floating=True)),
    ("fp8", Quantization("fp8", 8)),
    ("int4", Quantization("compressed-tensors", 4, 128)),
    ("int8", Quantization("compressed-tensors", 8)),
    ("gguf", Quantization("gguf")),
    ("4bit", Quantization(UNKNOWN_FORMAT, 4, 64)),
    ("4-bit", Quantization(UNKNOWN_FORMAT, 4, 64)),
    ("8bit", Quantization(UNKNOWN_FORMAT, 8)),
    ("8-bit", Quantization(UNKNOWN_FORMAT, 8)),
)
"""Keywords in model names and their meaning in most checkpoints. Longer ones come first."""

_FP8_BLOCKS = (128, 128)
"""Qwen's FP8 checkpoints have one scale per block of this shape."""

_SIZE = lazy_pattern(r"(?<![\w.])(?:(\d{1,3})x)?(\d{1,5}(?:\.\d{1,3})?)([bmt])(?![a-z0-9])")
_UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}
_SHARED = 0.83
"""Experts of an ``8x7B`` share all but their MLPs: Mixtral 8x7B has 46.7B parameters, 8x22B has 141B."""


def split_quantization(model: str) -> tuple[str, Quantization | None]:
    """Return a hub id's last part in lower case without its quantization keyword, and that keyword's meaning."""
    name = model.rsplit("/", 1)[-1].lower().replace("_", "-")
    for word, quantization in _QUANTIZED:
        found = re.search(rf"(?:^|[-.]){re.escape(word)}(?![a-z0-9])", name)
        if found:
            if quantization.method == "fp8" and model.startswith("Qwen/"):
                quantization = replace(quantization, block=_FP8_BLOCKS)
            rest = (name[: found.start()] + name[found.end() :]).strip("-.")
            return re.sub(r"-(?:int[48]|[48]bit|g128|128g|block|dynamic)$", "", rest), quantization
    return name, None


def decode_context_problem(facts: ModelFacts, tensor: int, shards: int) -> str:
    """Why the KV cache cannot be split over ``shards`` of ``tensor`` GPUs, in a few words; empty if it can.

    A rule for models without MLA (``ModelConfig.verify_with_parallel_config``): only copies of KV heads are split.
    """
    heads, kv_heads = facts.heads, facts.kv_heads
    if shards <= 1 or facts.mla or not kv_heads:
        return ""
    if tensor <= kv_heads:
        return f"needs more GPUs per engine than its {kv_heads} KV heads"
    if shards > tensor // kv_heads:
        return f"can be at most {tensor // kv_heads}: each of its {kv_heads} KV heads is on as many GPUs"
    if heads and heads // kv_heads % shards:
        return f"must divide its {heads // kv_heads} query heads per KV head"
    return ""


def parameters_in(name: str) -> int | None:
    """Return the number of parameters in a lower-case name, or None."""
    found = _SIZE.search(name)
    if found is None:
        return None
    each = float(found[2]) * _UNITS[found[3]]
    return int(each * int(found[1]) * _SHARED) if found[1] else int(each)


# -- how many GPUs vLLM can split a model over. Pure -------------------------------------------------------------------


def split_problem(facts: ModelFacts, tensor: int) -> str:
    """Why a model cannot be split over this many GPUs, in a few words; empty if it can, or if unknown.

    vLLM splits attention by heads (``ModelConfig.verify_with_parallel_config``), and rows of quantized layers only by
    whole groups or blocks (``awq.py``, ``gptq.py``, ``compressed_tensors_wNa16.py``, ``fp8.py``).
    """
    heads, kv_heads = facts.heads, facts.kv_heads
    if heads and heads % tensor:
        return f"its {heads} attention heads can't be dealt evenly to {tensor} GPUs"
    if kv_heads and not facts.mla and (tensor % kv_heads if tensor > kv_heads else kv_heads % tensor):
        return f"its {kv_heads} KV heads can't be dealt evenly to {tensor} GPUs"
    stored, inner = facts.quantization, facts.intermediate_size
    if stored is None or not inner or facts.experts or tensor == 1:
        return ""
    unit = stored.block[1] if stored.block else _split_group(stored)
    if unit and (inner % tensor or (inner // tensor) % unit):
        kind = "blocks" if stored.block else "groups"
        return f"its quantization {kind} of {unit} do not divide {inner} / {tensor} columns"
    return ""


def expert_split_problem(facts: ModelFacts, ranks: int) -> str:
    """Why each expert cannot be split over this many GPUs, in a few words; empty if it can, or if unknown.

    vLLM splits each expert's columns evenly, and quantized ones only by whole groups or blocks
    (``fused_moe/config.py``, ``compressed_tensors_moe_wna16.py``, ``fp8.py``). ``--enable-expert-parallel`` keeps
    experts whole instead.
    """
    width = facts.expert_intermediate_size or facts.intermediate_size
    if not facts.experts or ranks == 1 or not width:
        return ""
    if width % ranks:
        return f"its experts of {width} columns can't be cut evenly over {ranks} GPUs"
    stored = facts.quantization
    if stored is None:
        return ""
    unit = stored.block[0] if stored.block else _split_group(stored)
    if unit and stored.method in _HALVED:
        unit = min(unit, _SMALLEST_HALF)
    if unit and (width // ranks) % unit:
        kind = "blocks" if stored.block else "groups"
        return f"its quantization {kind} of {unit} do not divide experts of {width} / {ranks} columns"
    return ""


_HALVED = frozenset({"awq", "awq_marlin", "gptq", "gptq_marlin"})
"""Methods whose experts' groups vLLM halves until they divide their columns (``moe_wna16.py``)."""

_SMALLEST_HALF = 32

_GROUPED = _HALVED | {"compressed-tensors"}


def _split_group(stored: Quantization) -> int | None:
    """The number of rows that vLLM keeps together on a GPU because they share a scale; None if it splits any."""
    size = stored.group_size
    return size if stored.method in _GROUPED and size is not None and size > 0 else None
