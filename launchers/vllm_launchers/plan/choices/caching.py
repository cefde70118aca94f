"""Prefix caching and chunked prefill, from the traffic. Pure."""

from __future__ import annotations

from vllm_launchers.machine.modelfacts.model import LayerKind
from vllm_launchers.plan.choices.model import Choice, Source
from vllm_launchers.plan.choices.situation import CHUNKED, PREFIX, Situation

REUSED = 0.35
"""Above this share of reused prompt tokens prefix caching is worth being asked for."""

UNIQUE = 0.1
"""Up to this share prompts count as unique."""

SHORT_PROMPT = 512
IDLE_REQUESTS = 2
"""Prompts up to so many tokens, with at most so many requests in flight, leave chunked prefill nothing to do."""


def prefix_caching(situation: Situation) -> Choice:
    """On where prompts begin alike, off where they are unique, else vLLM's default."""
    reuse = situation.workload.prefix_reuse
    share = f"{reuse:.0%} of prompt tokens come again"
    if reuse > REUSED:
        linear = situation.facts is not None and LayerKind.LINEAR in situation.facts.layers
        price = "Next to nothing where prompts differ."
        if linear:
            price = "Young in vLLM for layers with a state instead of a cache: watch the hit rate."
        return Choice(PREFIX, True, f"{share}: they are computed once and shared.", Source.WORKLOAD, price)
    if reuse <= UNIQUE:
        return Choice(
            PREFIX,
            False,
            f"Prompts are unique ({share}): there is nothing to share.",
            Source.WORKLOAD,
            "Gains next to nothing either; turn it on when questions about the same text follow.",
        )
    reason = f"{share}: too little to insist, too much to forgo; vLLM caches prefixes unless told otherwise."
    return Choice(PREFIX, None, reason, Source.WORKLOAD)


def chunked_prefill(situation: Situation) -> Choice:
    """On, but for short prompts on an idle GPU, where it is left to vLLM.

    It is never switched off: since 0.11 vLLM warns that a generative model may then crash, and before it ignored that.
    """
    work = situation.workload
    if work.input_tokens_p95 <= SHORT_PROMPT and work.concurrency <= IDLE_REQUESTS:
        reason = (
            f"Prompts of {work.input_tokens_p95:,} tokens fit into one step and hardly anyone waits: nothing to cut."
        )
        return Choice(CHUNKED, None, reason, Source.WORKLOAD)
    return Choice(
        CHUNKED,
        True,
        f"Prompts of up to {work.input_tokens_p95:,} tokens are read in pieces between other requests' tokens, "
        "so that no stream stalls.",
        Source.WORKLOAD,
        "A long prompt's own first token comes a little later under load.",
    )
