"""The size of a model's weights on each GPU."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

import msgspec

from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.plan.budget.memory_flags import EffectiveFlags, decimal, whole
from vllm_launchers.plan.flags import OFFLOAD, OFFLOAD_BACKEND, OFFLOAD_GROUPS
from vllm_launchers.units import GIB
from vllm_launchers.vllm.flags.changes import Flags
from vllm_launchers.vllm.modelfacts.facts import BYTES, UNKNOWN_FORMAT, ModelFacts, parameters_in, split_quantization

_SCALE_BITS = {"mxfp4": 8.0, "gpt_oss_mxfp4": 8.0, "modelopt_fp4": 8.0, "mxfp8": 8.0, "modelopt_mxfp8": 8.0}
_BITS = {"bitsandbytes": 4, "gguf": 5, "awq": 4, "awq_marlin": 4, "gptq": 4, "gptq_marlin": 4, "mxfp4": 4}
_ONLINE = {"bitsandbytes": 4.5, "mxfp4": 4.25, "modelopt_fp4": 4.5, "nvfp4": 4.5}
_ONLINE_8 = lazy_pattern(r"fp8|mxfp8|ptpc_fp8|int8|experts_int8|fp8_per_(?:tensor|block|token|channel)\w*|int8_per_\w+")
_COUNT = lazy_pattern(r"[0-9]{1,6}")
_BITS_IN_NAME = (
    (lazy_pattern(r"nvfp4|mxfp4|fp4", re.IGNORECASE), 4.5),
    (lazy_pattern(r"int4|w4a\d+|awq|gptq|4-?bit|q4", re.IGNORECASE), 4.25),
    (lazy_pattern(r"fp8|int8|w8a\d+|8-?bit", re.IGNORECASE), 8.0),
)
_SCALED_GROUP = 128
_TILE, _TILE_ROWS = 256, 128
"""Marlin needs hidden sizes and widths of experts that are multiples of these."""
_EXPERTS_SHARE = 0.9
"""Assumed if the experts' width is unknown; in published mixtures they are nine tenths or more."""


class LoadedWeights(msgspec.Struct, frozen=True):
    """Bytes of all weights in GPU memory, and the parts that are distributed differently.

    ``embedding`` is one matrix of token embeddings. ``ends`` are embedding and output layer together: one such matrix
    if they are tied, which stages of their own keep twice. ``experts`` is a share.
    """

    total: float
    embedding: float
    ends: float
    experts: float
    layers: int
    draft: float = 0.0
    """Bytes of a draft model on each GPU with the last layers."""
    expert_count: int = 0
    expert_width: int = 0
    hidden: int = 0

    def on_gpu(self, settings: EffectiveFlags, stage: range) -> float:
        """Bytes on each GPU of a pipeline stage, given as its layers; a draft's layers come after the model's own.

        vLLM's tensor parallelism splits embeddings too; experts are spread over all TP × DP ranks. With expert
        parallelism they stay whole, so the fullest rank has one more if they do not divide evenly.
        """
        part, layers = self.total, self.layers or settings.pipeline
        last = stage.stop >= layers
        if settings.pipeline > 1:
            own = min(stage.stop, layers) - stage.start
            part = (self.total - self.ends) * own / layers + self.embedding * ((stage.start == 0) + last)
        ranks = settings.tensor * settings.data
        share = 1 / ranks
        if settings.expert_parallel and self.expert_count:
            share = math.ceil((self.expert_count + settings.redundant_experts) / ranks) / self.expert_count
        spread = self.experts * share * self._padding(settings, ranks) + (1 - self.experts) / settings.tensor
        return part * spread + (self.draft if last else 0.0)

    def _padding(self, settings: EffectiveFlags, ranks: int) -> float:
        """How much larger experts are in memory (``mxfp4_round_up_hidden_size_and_intermediate_size``)."""
        if not (settings.pads_experts and self.expert_width and self.hidden):
            return 1.0
        width = self.expert_width if settings.expert_parallel else self.expert_width / ranks
        return math.ceil(width / _TILE_ROWS) * _TILE_ROWS / width * math.ceil(self.hidden / _TILE) * _TILE / self.hidden


def weights_of(facts: ModelFacts, flags: Flags, settings: EffectiveFlags, assumed: list[str]) -> LoadedWeights | None:
    """Actual bytes if known, else parameters × precision; None if neither is known."""
    own = float(BYTES.get(facts.dtype or "", 2))
    embedding = (facts.vocabulary or 0) * (facts.hidden_size or 0) * own
    loaded = BYTES.get(settings.dtype, 2)
    stored = facts.weight_bytes
    if stored is not None and facts.size_from:
        assumed.append(f"some weights are missing here: their size, {stored / GIB:.1f} GiB, is from {facts.size_from}")
    assumed += _assumed_precision(facts)
    if stored is None:
        count = parameters(facts)
        if count is None:
            assumed.append("the size of the weights and the number of parameters are unknown")
            return None
        if facts.certain and facts.parameters is not None and facts.parameters == facts.counted:
            assumed.append(f"the weights are not here: {count / 1e9:.2f} billion parameters, counted from the config")
        # Assume the checkpoint's precision; the flags' effect follows below.
        kept = min(embedding / own * _matrices(facts), count / 3) if _bits(facts) < 16 else 0.0
        stored = int(kept * 2 + (count - kept) * (_bits(facts) / 8 if facts.quantization else own))
    embedding = min(embedding, stored / 4)
    total, ends = float(stored), embedding * _matrices(facts)
    if facts.quantization is None:
        bits, grown = _online_bits(flags), loaded / own
        total = ends * grown + (total - ends) * (bits / 8 / own if bits is not None else grown)
        embedding, ends = embedding * grown, ends * grown
    return LoadedWeights(
        total,
        embedding,
        ends,
        _experts_share(facts, total),
        len(facts.layers),
        expert_count=facts.experts or 0,
        expert_width=facts.expert_intermediate_size or 0,
        hidden=facts.hidden_size or 0,
    )


def _matrices(facts: ModelFacts) -> int:
    """The number of matrices that embedding and output layer are; small models of unknown kind are assumed to tie."""
    tied = facts.tied if facts.tied is not None else (parameters(facts) or 2e9) < 2e9
    return 1 if tied else 2


def _assumed_precision(facts: ModelFacts) -> Iterator[str]:
    """What is assumed about the number of bits per weight."""
    stored = facts.quantization
    if stored is None and facts.dtype is None:
        yield "the number format of the weights is unknown: 16 bits assumed"
    if stored is None or facts.weight_bytes is not None:
        return
    if stored.method == UNKNOWN_FORMAT and split_quantization(facts.model)[1] == stored:
        yield f"the precision of the weights is taken from the name: {_bits(facts):g} bits per weight"
    elif stored.bits is None:
        yield f"the precision of the weights is unknown: {_bits(facts):g} bits per weight ({stored.method}) assumed"


def parameters(facts: ModelFacts) -> int | None:
    """A model's number of parameters: as stated, else counted from its config, else from its name; None if unknown."""
    return facts.parameters or facts.counted or parameters_in(split_quantization(facts.model.rstrip("/"))[0])


def bits_per_weight(facts: ModelFacts, flags: Flags) -> float:
    """Bits per weight in GPU memory, including its scale: the average of all except the embeddings."""
    online = _online_bits(flags) if facts.quantization is None else None
    return online if online is not None else min(_bits(facts), 16.0)


def offloaded_bytes(flags: Flags) -> float:
    """Bytes per GPU that ``cpu-offload-gb`` keeps in main memory (the flag is in GiB).

    vLLM ignores it while it prefetches groups of layers instead (``vllm/config/offload.py``).
    """
    if flags.get(OFFLOAD_BACKEND) == "prefetch" or _prefetches(flags):
        return 0.0
    gib = decimal(flags.get(OFFLOAD)) or 0.0
    return max(0.0, gib) * GIB


def offloads(flags: Flags) -> bool:
    """Whether weights are kept in main memory and read over PCIe in each step."""
    return offloaded_bytes(flags) > 0 or _prefetches(flags)


def _prefetches(flags: Flags) -> bool:
    return flags.get(OFFLOAD_BACKEND) != "uva" and whole(flags, OFFLOAD_GROUPS, 0) > 0


def _bits(facts: ModelFacts) -> float:
    """Bits per weight, including its scale; 16 or more for an unquantized checkpoint."""
    quantization = facts.quantization
    if quantization is None:
        return 8.0 * BYTES.get(facts.dtype or "", 2)
    bits = quantization.bits or _BITS.get(quantization.method)
    if bits is None:
        return next((found for words, found in _BITS_IN_NAME if words.search(facts.model)), 8.0)
    if bits > 8 or (bits == 8 and quantization.method not in _SCALE_BITS):
        return float(bits)
    group = quantization.group_size
    # A 16-bit scale and a zero point per group; MX formats have 8-bit scales.
    return bits + _SCALE_BITS.get(quantization.method, 16.0 + bits) / (group if group and group > 0 else _SCALED_GROUP)


def _online_bits(flags: Flags) -> float | None:
    """Bits per weight after ``--quantization`` converts an unquantized checkpoint, or None."""
    method = str(flags.get("quantization", ""))
    return 8.0 if _ONLINE_8.fullmatch(method) else _ONLINE.get(method)


def _experts_share(facts: ModelFacts, total: float) -> float:
    if not facts.experts or total <= 0:
        return 0.0
    width, hidden = facts.expert_intermediate_size, facts.expert_hidden_size or facts.hidden_size
    if not width or not hidden:
        return _EXPERTS_SHARE
    layers = facts.expert_layers or len(facts.layers)
    size = 3.0 * width * hidden * facts.experts * layers * _bits(facts) / 8
    return min(size / total, 0.98)


def pipeline_stages(layers: int, settings: EffectiveFlags, environment: Mapping[str, str]) -> list[range]:
    """Layers of each pipeline stage, as vLLM's ``get_pp_indices`` splits them.

    The remainder goes to the stages before the last, starting with the second-last. ``VLLM_PP_LAYER_PARTITION``
    overrides this.
    """
    count = settings.pipeline
    sizes = [layers // count] * count
    for back in range(2, layers % count + 2):
        sizes[-back] += 1
    words = environment.get("VLLM_PP_LAYER_PARTITION", "").split(",")
    if len(words) == count and all(_COUNT.fullmatch(word.strip()) for word in words):
        wanted = [int(word) for word in words]
        sizes = wanted if sum(wanted) == layers else sizes
    starts = [sum(sizes[:at]) for at in range(count)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
