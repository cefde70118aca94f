"""Our KV cache layout compared with real vLLM's, for models with every kind of layer."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fakes.forked import Forks
from vllm_launchers.plan.budget.budget import GpuShape
from vllm_launchers.plan.budget.cache import CacheLayout, layout
from vllm_launchers.plan.budget.memory_flags import effective_flags
from vllm_launchers.plan.budget.weights import pipeline_stages
from vllm_launchers.vllm.modelfacts.facts import LayerKind, ModelFacts

pytestmark = pytest.mark.real

PROGRAM = Path(__file__).with_name("environment") / "kv_blocks.py"
CASES = 300
AVAILABLE = 20 * 2**30
GPU = GpuShape("one of ours", usable_gib=40)
PATTERNS = (
    ("full",),
    ("sliding",),
    ("sliding", "full"),
    ("full", "full", "sliding"),
    ("sliding",) * 5 + ("full",),
    ("chunked",) * 3 + ("full",),
    ("linear",) * 3 + ("full",),
)


def made(dice: random.Random) -> tuple[ModelFacts, dict[str, Any], int]:
    """A model, its flags, and its number of pipeline stages."""
    pattern = dice.choice(PATTERNS)
    kinds = tuple(map(LayerKind, (pattern * 12)[: dice.randint(len(pattern), 60)]))
    heads, size = dice.choice([(8, 128), (4, 64), (8, 256), (1, 128)])
    full = dice.choice([(None, None), (2, 512), (4, 256), (1, 512)]) if LayerKind.SLIDING in kinds else (None, None)
    if LayerKind.FULL not in kinds:
        full = None, None
    bounded = LayerKind.SLIDING in kinds or LayerKind.CHUNKED in kinds
    facts = ModelFacts(
        model="made",
        layers=kinds,
        heads=heads,
        kv_heads=heads,
        head_dim=size,
        full_kv_heads=full[0],
        full_head_dim=full[1],
        window=dice.choice([128, 1000, 1024, 4096]) if bounded else None,
        max_context=dice.choice([1, 100, 4096, 33000, 131072]),
        dtype="bfloat16",
        state_bytes=dice.choice([65536, 500_000, 2_146_304]),
    )
    flags = {
        "max-num-batched-tokens": dice.choice([512, 2048, 8192]),
        "max-num-seqs": 64,
        "enable-prefix-caching": dice.random() < 0.5,
        "disable-hybrid-kv-cache-manager": LayerKind.LINEAR not in kinds and dice.random() < 0.2,
    }
    return facts, flags, dice.randint(1, min(5, len(kinds)))


def question(facts: ModelFacts, flags: Mapping[str, Any], pipeline: int, ours: CacheLayout) -> dict[str, Any]:
    block = next((group.block_tokens for group in ours.groups if group.kind is LayerKind.FULL), 16)
    return {
        "kinds": [kind.value for kind in facts.layers],
        "heads": facts.kv_heads,
        "size": facts.head_dim,
        "full_heads": facts.full_kv_heads or facts.kv_heads,
        "full_size": facts.full_head_dim or facts.head_dim,
        "window": facts.window,
        "length": facts.max_context,
        "state": facts.state_bytes,
        "page": ours.page_bytes,
        "block": block if LayerKind.LINEAR in facts.layers else 16,
        "in_flight": ours.settings.in_flight,
        "mode": "align" if flags["enable-prefix-caching"] else "none",
        "one_kind": flags["disable-hybrid-kv-cache-manager"],
        "available": AVAILABLE,
        "pipeline": pipeline,
    }


def test_blocks_and_concurrency_match_vllm(forks: Forks) -> None:
    dice = random.Random(20)
    asked, ours = [], []
    for _ in range(CASES):
        facts, flags, pipeline = made(dice)
        settings = effective_flags(facts, {**flags, "pipeline-parallel-size": pipeline}, (0, 32, 0), {}, GPU, [])
        one_stage = effective_flags(facts, flags, (0, 32, 0), {}, GPU, [])
        known = layout(facts, one_stage, [])
        assert known is not None
        assert facts.max_context is not None
        asked.append(json.dumps(question(facts, flags, pipeline, known)))
        blocks = AVAILABLE // known.block_bytes()
        stages = [[stage.start, stage.stop] for stage in pipeline_stages(len(facts.layers), settings, {})]
        ours.append((known.block_bytes(), blocks / known.request_blocks(facts.max_context), stages))
    printed = forks.run([str(PROGRAM)], "\n".join(asked), {"VLLM_LOGGING_LEVEL": "ERROR"})
    answers = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert len(answers) == CASES
    for case, (block_bytes, concurrency, stages), theirs in zip(asked, ours, answers, strict=True):
        assert (block_bytes, stages) == (theirs["block_bytes"], theirs["stages"]), case
        assert concurrency == pytest.approx(theirs["concurrency"]), case
