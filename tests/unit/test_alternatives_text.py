"""Alternatives as text: what the table cuts is written out below it."""

from __future__ import annotations

import pytest

from vllm_console.alternatives_text import LONGEST_LABEL, alternative_text, alternatives_table
from vllm_launchers.plan.alternatives import Alternative
from vllm_launchers.plan.choices.pool import Layout
from vllm_launchers.vllm.flags.changes import Changes

LONG = "hugging-quants/Meta-Llama-3.1-405B-Instruct-AWQ-INT4"


def way(model: str | None, tradeoff: str = "another checkpoint: compare its outputs") -> Alternative:
    return Alternative(
        layout=Layout(4),
        expert_parallel=False,
        kv_cache_dtype="auto",
        quantization=None,
        model=model,
        weights_gib=50.5,
        kv_gib=19.3,
        kv_tokens=100_000,
        concurrent_requests=44.0,
        fits=True,
        serves=True,
        paces=None,
        tradeoff=tradeoff,
        reason="Not chosen automatically.",
        chosen=False,
        changes=Changes(),
    )


@pytest.mark.parametrize("model", [LONG, "Qwen/Qwen3-8B-FP8"])
def test_another_model_is_named_in_full_below_the_table(model: str) -> None:
    one = way(model)
    assert alternative_text(one).split()[-2:] == ["Model:", model]
    assert (len(one.label) > LONGEST_LABEL) is ("…" in alternatives_table([one])[1])


def test_the_same_model_is_not_repeated() -> None:
    assert alternative_text(way(None)) == "Not chosen automatically. Another checkpoint: compare its outputs."
