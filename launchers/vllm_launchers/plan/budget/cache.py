"""vLLM's KV cache layout for a model: groups of layers that share one pool of equally sized blocks.

Follows vLLM's ``v1/core/kv_cache_utils.py`` and ``v1/kv_cache_interface.py``. Layers of one kind form groups with as
many layers as the rarest kind has. A block has one page for each layer of a group, so groups that are not full waste
some.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from vllm_launchers.plan.budget.memory_flags import EffectiveFlags
from vllm_launchers.vllm.modelfacts.facts import BYTES, LayerKind, ModelFacts
from vllm_launchers.vllm.release_defaults import Release

_PACKED_MLA = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
_SPARSE_MLA = frozenset({"deepseek_v32", "glm_moe_dsa"})
_INDEXER_BYTES = 132
"""Sparse MLA: a 128-byte index key and its 4-byte scale, per token and layer."""
_SCALED = {"int8_per_token_head": 1.0, "fp8_per_token_head": 1.0, "int4_per_token_head": 0.5}
_STATE_ALIGNMENT = 16
_TWO_KINDS_ALIKE: tuple[tuple[Release, float], ...] = (((0, 18, 0), 1.5), ((0, 12, 0), 1.25), ((0, 0, 0), 1.0))
"""If kinds' layer counts differ by less than this factor, groups have the larger size, which pads fewer layers."""


class Group(msgspec.Struct, frozen=True):
    """Layers with one block table. ``layers`` are their indices in the model, ``block_tokens`` the tokens per block."""

    kind: LayerKind
    layers: tuple[int, ...]
    block_tokens: int


class CacheLayout(msgspec.Struct, frozen=True):
    """All groups of a model and the bytes of one layer in a block, on one GPU.

    ``own_bytes`` has the size of each layer if layers of different sizes count as one kind; otherwise it is empty.
    """

    groups: tuple[Group, ...]
    page_bytes: int
    settings: EffectiveFlags
    window: int
    layer_bytes: Mapping[LayerKind, int]
    own_bytes: tuple[int, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether every layer keeps every token."""
        return all(group.kind is LayerKind.FULL for group in self.groups) and len(self.groups) == 1

    def block_bytes(self, stage: range | None = None) -> int:
        """Bytes of one block on a pipeline stage, given as its layers; without a stage, of the whole model."""
        if self.own_bytes:
            return sum(self.own_bytes if stage is None else self.own_bytes[stage.start : stage.stop])
        counts = [
            len(group.layers) if stage is None else sum(layer in stage for layer in group.layers)
            for group in self.groups
        ]
        return self.page_bytes * max(counts, default=0)

    def request_blocks(self, length: int) -> int:
        """Maximum number of blocks that a request of this many tokens holds."""
        return sum(self._blocks(group, length) for group in self.groups)

    def _blocks(self, group: Group, length: int) -> int:
        settings, block = self.settings, group.block_tokens
        if group.kind is LayerKind.LINEAR:
            if settings.states_per_block:
                return _ceil(length, block) + settings.draft_tokens
            return (2 if settings.keep_states else 1) + settings.draft_tokens
        if group.kind is LayerKind.SLIDING:
            # One block more, since a window rarely begins at a block boundary.
            return _ceil(min(self.window - 1 + settings.in_flight, length), block) + 1
        if group.kind is LayerKind.CHUNKED:
            return _ceil(min(self.window + settings.in_flight, length), block)
        return _ceil(_ceil(length, settings.decode_context), block)

    def tokens(self, blocks: int, length: int | None) -> int:
        """Tokens in the cache, as vLLM logs them: since 0.21 derived from the full-length requests that fit."""
        if self.settings.release >= (0, 21, 0) and length is not None:
            return int(blocks / self.request_blocks(length) * length)
        attending = [group.block_tokens for group in self.groups if group.kind is not LayerKind.LINEAR]
        return blocks // len(self.groups) * min(attending, default=length or 1) * self.settings.decode_context

    def token_bytes(self, stage: range, length: int | None) -> float | None:
        """Bytes per token of context on a stage; with windowed layers, the average over a request of full length."""
        if self.plain and self.own_bytes:
            return self.block_bytes(stage) / self.groups[0].block_tokens
        if self.plain:
            return float(sum(layer in stage for layer in self.groups[0].layers) * self.layer_bytes[LayerKind.FULL])
        if not length:
            return None
        return self.request_blocks(length) * self.block_bytes(stage) / length


def layout(facts: ModelFacts, settings: EffectiveFlags, assumed: list[str]) -> CacheLayout | None:
    """Compute the groups; None if the layers or their sizes are unknown, which is noted in ``assumed``."""
    layers = [*facts.layers, *(LayerKind.FULL for _ in range(settings.draft_layers))]
    kinds = _one_kind(layers, settings, facts)
    present = [kind for kind in dict.fromkeys(kinds) if kind is not LayerKind.NONE]
    if not facts.layers or not present:
        assumed.append("the model's layers are unknown, so the number of tokens that fit is, too")
        return None
    sizes: dict[LayerKind, int] = {}
    for kind in present:
        if kind is not LayerKind.LINEAR:
            size = attention_bytes(facts, settings, kind)
            if size is None:
                assumed.append("the size of the model's KV heads is unknown, so the number of tokens that fit is, too")
                return None
            sizes[kind] = size
    if facts.model_type not in _SPARSE_MLA:
        assumed += [f"unknown and not counted: {fact}" for fact in facts.missing if "KV cache" in fact]
    state = _state(facts, settings, assumed) if LayerKind.LINEAR in present else 0
    block, page = _page(settings, sizes, state)
    alike = next(factor for since, factor in _TWO_KINDS_ALIKE if settings.release >= since)
    groups = _groups(kinds, {kind: _block_tokens(block, page, sizes.get(kind)) for kind in present}, alike)
    own = () if kinds == layers else _own_bytes(facts, settings, layers, block)
    return CacheLayout(tuple(groups), page, settings, facts.window or 1, sizes, own)


def _one_kind(kinds: Sequence[LayerKind], settings: EffectiveFlags, facts: ModelFacts) -> list[LayerKind]:
    """Count windowed layers as full ones if vLLM does not separate them, or if their window is unknown."""
    windowed = (LayerKind.SLIDING, LayerKind.CHUNKED)
    separate = settings.hybrid_cache and facts.window
    if separate or (facts.window and LayerKind.FULL not in kinds):
        return list(kinds)
    return [LayerKind.FULL if kind in windowed else kind for kind in kinds]


def _own_bytes(facts: ModelFacts, settings: EffectiveFlags, kinds: Sequence[LayerKind], block: int) -> tuple[int, ...]:
    """Bytes of each layer in a block, if they differ and one table serves all; else empty."""
    if LayerKind.LINEAR in kinds:
        return ()
    sizes = [0 if kind is LayerKind.NONE else attention_bytes(facts, settings, kind) or 0 for kind in kinds]
    return tuple(block * size for size in sizes) if len(set(sizes) - {0}) > 1 else ()


def attention_bytes(facts: ModelFacts, settings: EffectiveFlags, kind: LayerKind = LayerKind.FULL) -> int | None:
    """Bytes per token of one attention layer on one GPU; None if the heads are unknown.

    2 · max(1, kv_heads // TP) · head_dim · bytes of the format; MLA (kv_lora_rank + qk_rope_head_dim) · bytes, the same
    on every GPU.
    """
    dtype = settings.dtype if settings.kv_dtype == "auto" else settings.kv_dtype
    if facts.kv_lora_rank is not None:
        sparse = facts.model_type in _SPARSE_MLA
        packed = _PACKED_MLA.get("fp8_ds_mla" if sparse and dtype.startswith("fp8") else dtype)
        rank = facts.kv_lora_rank + (facts.qk_rope_head_dim or 0)
        return (packed or int(rank * _element(dtype))) + (_INDEXER_BYTES if sparse else 0)
    heads, size = _heads(facts, kind)
    if not heads or not size:
        return None
    both = size + (facts.v_head_dim or size)
    here = max(1, heads // settings.tensor)
    if dtype in _SCALED:
        return int(here * (both * _SCALED[dtype] + 8))
    return int(here * both * _element(dtype))


def _heads(facts: ModelFacts, kind: LayerKind) -> tuple[int | None, int | None]:
    """KV heads and their size. Full layers between windowed ones may have other values (Gemma 4)."""
    heads, size = facts.kv_heads, facts.head_dim
    if size is None and facts.hidden_size and facts.heads:
        size = facts.hidden_size // facts.heads
    if kind is LayerKind.FULL and LayerKind.SLIDING in facts.layers:
        return facts.full_kv_heads or heads, facts.full_head_dim or size
    return heads, size


def _element(dtype: str) -> float:
    """Bytes per number: one, unless the name says otherwise."""
    return BYTES.get(dtype, 0.5625 if "4bit" in dtype or dtype.startswith("nvfp4") else 1.0)


def _state(facts: ModelFacts, settings: EffectiveFlags, assumed: list[str]) -> int:
    if facts.state_bytes is None:
        assumed.append("the size of the model's linear-attention states is unknown: 2 MiB per layer assumed")
        return 2 * 2**20 // settings.tensor
    drafts = settings.draft_tokens * (facts.state_bytes_per_draft_token or 0)
    return (facts.state_bytes + drafts) // settings.tensor


def _page(settings: EffectiveFlags, sizes: Mapping[LayerKind, int], state: int) -> tuple[int, int]:
    """Tokens per block and bytes per page. A block grows until a layer's tokens take as much as a state."""
    block = settings.block_size
    if not sizes:
        return settings.max_model_len or block, max(1, state)
    widest = max(sizes.values())
    if state > block * widest:
        block = _ceil(state, _STATE_ALIGNMENT * widest) * _STATE_ALIGNMENT
    return block, block * widest


def _block_tokens(block: int, page: int, size: int | None) -> int:
    """Tokens per block for layers of this size: more for smaller layers if that fills the page exactly."""
    return block if size is None or page % (block * size) else page // size


def _groups(kinds: Sequence[LayerKind], block_tokens: Mapping[LayerKind, int], alike: float) -> list[Group]:
    """Split the layers of each kind into groups of equal size, round-robin."""
    places = {kind: [at for at, known in enumerate(kinds) if known is kind] for kind in block_tokens}
    fewest, most = min(map(len, places.values())), max(map(len, places.values()))
    size = most if most < fewest * alike else fewest
    groups: list[Group] = []
    for kind, layers in places.items():
        count = _ceil(len(layers), size)
        groups += [Group(kind, tuple(layers[at::count]), block_tokens[kind]) for at in range(count)]
    return groups


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
