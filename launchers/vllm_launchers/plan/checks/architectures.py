"""Features that architectures which vLLM loads as plain transformers are known to lack. Pure."""

from __future__ import annotations

from vllm_launchers.vllm.modelfacts.facts import ModelFacts

_DENSE = frozenset(
    f"{name}ForCausalLM"
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3", "Phi3", "Falcon", "OPT")
)
"""Architectures known to be dense. The configs of others may name experts in a way that is not known here."""

_WITH_EXPERTS = frozenset(f"{name}ForCausalLM" for name in ("Mixtral", "Qwen2Moe", "Qwen3Moe", "GptOss"))


def is_dense(facts: ModelFacts) -> bool:
    """Whether it certainly has no experts."""
    return not facts.experts and facts.architecture in _DENSE


def is_plain(facts: ModelFacts) -> bool:
    """Whether it certainly has neither latent attention (MLA) nor multi-token prediction layers (MTP)."""
    return not facts.mla and facts.architecture in _DENSE | _WITH_EXPERTS
