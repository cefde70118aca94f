"""How long a request may be by the model's config, derived as vLLM derives it."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_launchers.machine.modelfacts.values import Config, factor, mapping, number, objects, text

_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
_ALREADY_LONG = frozenset({"su", "longrope", "llama3", "deepseek_llama_scaling"})
"""Ways to stretch the rotary embedding whose factor the config's length has in it."""


def max_context(config: Config, model_type: str) -> int | None:
    """Tokens of prompt and answer together, or None when the config does not tell.

    The smallest of the known entries, times the rotary embedding's factor where vLLM applies it. For YaRN releases
    differ (earlier ones stretch the original length, later ones take the config's as it is): the longer is returned,
    so that nothing that a release takes is refused here.
    """
    lengths = [length for name in _LENGTHS if (length := number(config, name))]
    derived = number(config, "model_max_length") or (min(lengths) if lengths else None)
    if derived is None or "gemma3" in model_type:
        return derived
    stretched = derived
    for rope in _ropes(config):
        kind, times = text(rope, "rope_type", "type") or "", factor(rope, "factor")
        if times is None or kind in _ALREADY_LONG:
            continue
        if "yarn" in kind:
            original = number(rope, "original_max_position_embeddings")
            stretched = max(derived, int((original or 0) * times))
        else:
            stretched = int(derived * times)
    return stretched


def _ropes(config: Config) -> Iterator[Config]:
    """Settings of the rotary embedding: one for all layers, or one per kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        settings = mapping(config, name)
        nested = list(objects(settings))
        yield from nested or ([settings] if settings else [])
