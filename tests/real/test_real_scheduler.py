"""The model of vLLM's scheduler compared with the real one: the same requests, tokens and preemptions in every
iteration, with and without prefix caching and chunked prefill.

This includes the cost of preemption: the prompt and the generated tokens are recomputed in chunks within the token
budget, except what remains in the prefix cache.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fakes.forked import Forks
from vllm_launchers.engine_model.scheduler import BlockPool, Request, Scheduler, SchedulerLimits

pytestmark = pytest.mark.real

PROGRAM = str(Path(__file__).with_name("environment") / "schedule.py")
CASES = 24
BLOCK = 16


def made(dice: random.Random, model: Path, *, caching: bool, chunked: bool) -> dict[str, Any]:
    """Requests that fill the KV cache: prompts up to a third of it, outputs that exceed it."""
    blocks = dice.choice([40, 64, 100])
    longest = (blocks - 1) * BLOCK // 3
    length = 2048 if chunked else dice.choice([2 * longest, 3 * longest])  # whole prompts must fit in the budget
    common = [dice.randrange(20, 250) for _ in range(longest)]
    requests = []
    for number in range(dice.randint(8, 24)):
        prompt = dice.randint(1, longest)
        shared = dice.choice([0, prompt // 2])
        tokens = common[:shared] + [dice.randrange(20, 250) for _ in range(prompt - shared)]
        output, step = dice.randint(1, longest), dice.randint(0, 60)
        requests.append({"id": str(number), "step": step, "prompt": tokens, "output": output})
    return {
        "model": str(model),
        "length": length,
        "blocks": blocks,
        "block": BLOCK,
        "seqs": dice.choice([4, 8, 16]),
        "budget": dice.choice([32, 64, 256]) if chunked else length,
        "chunked": chunked,
        "caching": caching,
        "requests": requests,
    }


def steps_of(case: Mapping[str, Any]) -> list[Any]:
    """Our scheduler's steps for a case."""
    limits = SchedulerLimits(case["seqs"], case["budget"], case["length"], case["block"], case["chunked"])
    scheduler = Scheduler(limits, BlockPool(case["blocks"], caching=case["caching"]))
    waiting = [
        (one["step"], Request(one["id"], list(one["prompt"]), one["output"], one["output"], seed=index))
        for index, one in enumerate(case["requests"])
    ]
    steps: list[Any] = []
    while waiting or scheduler.busy:
        for step, request in list(waiting):
            if step <= len(steps):
                scheduler.add(request)
                waiting.remove((step, request))
        before = {request.id: request.preemptions for request in scheduler.running}
        batch = scheduler.schedule(0.0)
        counts = {share.request.id: share.count for share in batch.shares}
        preempted = [one.id for one in scheduler.waiting if one.preemptions > before.get(one.id, one.preemptions)]
        steps.append([counts, sorted(preempted)])
        scheduler.complete(batch, 0.0)
    return steps


def recomputed(case: Mapping[str, Any], steps: list[Any]) -> int:
    """Tokens computed more than once."""
    whole = sum(len(one["prompt"]) + one["output"] - 1 for one in case["requests"])
    return sum(sum(counts.values()) for counts, _ in steps) - whole


def test_every_iteration_matches_vllm(forks: Forks, tiny_model: Path) -> None:
    dice = random.Random(7)
    cases = [made(dice, tiny_model, caching=number % 2 == 1, chunked=number % 4 < 2) for number in range(CASES)]
    printed = forks.run([PROGRAM], "\n".join(map(json.dumps, cases)), {"VLLM_LOGGING_LEVEL": "ERROR"})
    answers = [json.loads(line) for line in printed.splitlines() if line.startswith("[[")]
    assert len(answers) == CASES
    for number, (case, theirs) in enumerate(zip(cases, answers, strict=True)):
        ours = steps_of(case)
        for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert one == other, f"case {number}, step {step}"
        assert sum(len(preempted) for _, preempted in ours) >= 1
        assert recomputed(case, ours) > 0 or case["caching"]
