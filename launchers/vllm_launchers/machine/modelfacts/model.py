"""What a plan needs to know of a model. None is 'not known'; ``missing`` says which facts are, in words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class LayerKind(StrEnum):
    """How a layer remembers earlier tokens."""

    FULL = "full"
    SLIDING = "sliding"
    """Attention over a window of the last tokens."""
    CHUNKED = "chunked"
    LINEAR = "linear"
    """A state of fixed size: gated delta nets, Mamba, …"""
    NONE = "none"


class ModelFactsError(Exception):
    """A model's facts cannot be had; the text is one sentence for a person: what, where, and what to do."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a checkpoint's weights are stored. ``method`` as vLLM calls it (``awq``, ``gptq``, ``fp8``, …).

    ``group_size`` is the number of weights that share a scale (-1: a whole column); ``block`` the shape of FP8 blocks.
    """

    method: str
    bits: int | None = None
    group_size: int | None = None
    block: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model. Lengths in tokens, sizes in bytes.

    ``layers`` has one entry per layer that counts in memory, in order. ``source`` is ``folder``, ``cache``, ``hub`` or
    ``table``. ``weight_bytes`` is what the weight files hold; ``parameters`` their number, where only that is known.
    ``gated`` and ``files_missing`` are what would end a start: access not granted, weight files not there.
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
    """KV heads of full-attention layers where they differ from those of the sliding ones (Gemma 4), else None."""
    full_head_dim: int | None = None
    """Head size of full-attention layers where it differs from that of the sliding ones, else None."""
    kv_lora_rank: int | None = None
    """Set for multi-head latent attention (MLA), whose cache is one vector per token and layer."""
    qk_rope_head_dim: int | None = None
    window: int | None = None
    experts: int | None = None
    experts_per_token: int | None = None
    expert_intermediate_size: int | None = None
    """Width of one expert; ``intermediate_size`` is that of dense layers where a model has both."""
    vocabulary: int | None = None
    max_context: int | None = None
    dtype: str | None = None
    """As the config has it: ``bfloat16``, ``float16``, ``float32``."""
    quantization: Quantization | None = None
    kv_cache_quantization: str | None = None
    weight_bytes: int | None = None
    parameters: int | None = None
    multimodal: bool = False
    needs_remote_code: bool = False
    gated: bool | None = None
    files_missing: tuple[str, ...] = ()
    bytes_to_download: int | None = None
    """What is still to be fetched before it can be loaded; 0 when all is here, None when not known.

    Estimated by parameters × precision where the files' sizes are not known.
    """
    state_bytes: int | None = None
    """Bytes of state per linear-attention layer and request, before any split over GPUs; None when not known."""
    state_bytes_per_draft_token: int | None = None
    """What each speculative token adds to ``state_bytes``: a row of the convolution's state."""
    missing: tuple[str, ...] = ()

    @property
    def mla(self) -> bool:
        """Whether it uses multi-head latent attention."""
        return self.kv_lora_rank is not None
