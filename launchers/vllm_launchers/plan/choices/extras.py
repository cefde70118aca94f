"""Flags that are set only when asked for: speculative decoding and LoRA adapters. Pure."""

from __future__ import annotations

import json

from vllm_launchers.plan.choices.model import Choice, Source
from vllm_launchers.plan.choices.situation import SPECULATION, Release

METHODS = ("ngram", "mtp", "suffix")
"""Ways to guess tokens without a model of its own beside the served one."""

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What ``--max-lora-rank`` takes in every release from 0.8.5 to 0.33; 1 came later."""

MOST_GUESSED = 32
DRAFT_MODELS_SINCE: Release = (0, 14, 0)


def with_speculation(model: str, tokens: int, release: Release | None = None) -> tuple[Choice, ...]:
    """``--speculative-config`` that guesses ``tokens`` tokens ahead.

    ``model`` is a draft model or EAGLE head (vLLM tells which), or one of `METHODS`: ``ngram`` looks guesses up in the
    text so far, ``suffix`` in earlier answers too, ``mtp`` takes the model's own prediction layers.

    Raises:
        ValueError: no model, or an impossible number of tokens; one sentence.
    """
    if not model.strip() or model.startswith("-"):
        raise ValueError(f"speculative decoding needs a draft model, or one of {', '.join(METHODS)}")
    if not 1 <= tokens <= MOST_GUESSED:
        raise ValueError(f"{tokens} tokens cannot be guessed ahead; 1 to {MOST_GUESSED}, and 3 to 5 pay most often")
    config: dict[str, str | int] = {"method" if model in METHODS else "model": model, "num_speculative_tokens": tokens}
    if model == "ngram":
        config["prompt_lookup_max"] = 4
    price = "Slower when guesses are wrong or the batch is large; the draft takes memory from the KV cache."
    if model in METHODS:
        price = "Slower when guesses are wrong or the batch is large."
    if model not in METHODS and release is not None and release < DRAFT_MODELS_SINCE:
        price += " vLLM 0.13 and before take EAGLE and MTP heads only, no other draft models."
    reason = f"You asked for it: up to {tokens} tokens are guessed and checked in one step, for fewer steps per answer."
    return (Choice(SPECULATION, json.dumps(config), reason, Source.YOU, price),)


def with_lora(rank: int, count: int, release: Release | None = None) -> tuple[Choice, ...]:
    """Flags for ``count`` LoRA adapters in one batch, of a rank up to ``rank``.

    Raises:
        ValueError: a rank or count that vLLM does not take; one sentence.
    """
    del release  # the same in all releases so far
    if not 1 <= rank <= LORA_RANKS[-1]:
        raise ValueError(f"a LoRA rank of {rank} is not possible: vLLM takes 1 to {LORA_RANKS[-1]}")
    if count < 1:
        raise ValueError("at least one adapter must fit into a batch")
    step = next(known for known in LORA_RANKS if known >= rank)
    asked = "You asked for adapters beside the model"
    return (
        Choice("enable-lora", True, f"{asked}.", Source.YOU, "Each step takes somewhat longer, with or without one."),
        Choice("max-loras", count, f"{asked}: {count} in one batch.", Source.YOU, "Memory for each, used or not."),
        Choice("max-lora-rank", step, f"The next that vLLM takes for rank {rank}.", Source.YOU),
    )
