"""Synthetic runs and their minutes from a seed, for testing comparisons."""

from __future__ import annotations

import math
import random

from msgspec.structs import replace

from vllm_console.runs.compare import Recorded
from vllm_console.runs.store import FlagChange, Run
from vllm_console.runs.windows import RunWindow

BEGAN = 1_767_263_467.0
NOISE = {"mean": 0.06, "p50": 0.06, "p90": 0.1, "p99": 0.2}
"""Relative scatter of a minute's values. A minute has about 120 requests, few of which are slow."""
SPREAD = {"mean": 1.2, "p50": 1.0, "p90": 2.1, "p99": 4.0}


def minutes(
    seed: int,
    count: int = 10,
    *,
    slower: float = 1.0,
    rate: float = 2.0,
    prompt: float = 800.0,
    answer: float = 200.0,
    preempted: float = 0.0,
    in_flight: float | None = None,
    begins: float = BEGAN + 180,
    seconds: float = 60.0,
    drift: tuple[float, float] = (0.0, 0.0),
) -> list[RunWindow]:
    """Minutes of a steady server; ``slower`` multiplies all latencies.

    With ``in_flight``, that many closed-loop clients determine the request rate; otherwise the load is open-loop with
    ``rate`` requests per second. ``drift`` is the share of its level that a minute keeps from the previous one, and the
    relative scatter of levels.
    """
    chance, wandering = random.Random(seed), random.Random(f"drift {seed}")
    kept, spread = drift
    level = wandering.gauss(0, spread)
    found = []
    for index in range(count):
        moment = slower * math.exp(chance.gauss(0, 0.05) + level)
        level = kept * level + math.sqrt(1 - kept**2) * wandering.gauss(0, spread)
        ttft = 0.15 * moment
        itl = 0.022 * moment * (1 + chance.gauss(0, 0.02))
        e2e = ttft + answer * itl
        came = in_flight / e2e if in_flight is not None else max(0.02, chance.gauss(rate, math.sqrt(rate / seconds)))
        answers = answer * (1 + chance.gauss(0, 0.3 / math.sqrt(came * seconds)))
        figures = {
            "requests": came * seconds,
            "requests_per_second": came,
            "in_flight": in_flight or came * e2e,
            "prompt_length_mean": prompt * (1 + chance.gauss(0, 0.6 / math.sqrt(came * seconds))),
            "prompt_length_p95": prompt * 2.5 * (1 + chance.gauss(0, 0.15)),
            "answer_length_mean": answers,
            "answer_length_p95": answer * 1.5 * (1 + chance.gauss(0, 0.15)),
            "prompt_tokens_per_second": came * prompt,
            "generation_tokens_per_second": came * answers,
            "preemptions_per_minute": 60 * came * preempted,
            "preemption_share": preempted,
            "kv_cache_usage": 0.5,
            "hit_rate": 0.3,
        }
        for key, mean in (("ttft", ttft), ("itl", itl), ("e2e", e2e)):
            calm = 0.3 if key == "itl" else 1.0
            for part, noise in NOISE.items():
                figures[f"{key}_{part}"] = mean * SPREAD[part] * math.exp(chance.gauss(0, noise * calm))
        found.append(RunWindow(begins + index * seconds, seconds, figures))
    return found


def preempted(
    windows: list[RunWindow], seed: int, per_minute: float, drift: tuple[float, float] = (0.0, 0.0)
) -> list[RunWindow]:
    """The minutes with a random number of preemptions, Poisson with this mean; ``drift`` as in `minutes`."""
    chance = random.Random(f"preemptions {seed}")
    kept, spread = drift
    level = chance.gauss(0, spread)
    found = []
    for window in windows:
        mean = per_minute * math.exp(level - spread**2 / 2)
        level = kept * level + math.sqrt(1 - kept**2) * chance.gauss(0, spread)
        count = _poisson(chance, mean) * window.seconds / 60
        counted = {
            "preemptions_per_minute": count * 60 / window.seconds,
            "preemption_share": count / window.figures["requests"],
        }
        found.append(replace(window, figures={**window.figures, **counted}))
    return found


def _poisson(chance: random.Random, mean: float) -> int:
    """The number of arrivals within one unit of time."""
    count, passed = 0, chance.expovariate(1.0)
    while passed < mean:
        count += 1
        passed += chance.expovariate(1.0)
    return count


def run(number: int = 1, flags: dict[str, object] | None = None, **more: object) -> Run:
    known: dict[str, object] = {
        "key": f"key{number}",
        "server": "chat",
        "generation": number,
        "started_at": BEGAN + 3600.0 * number,
        "ready_at": BEGAN + 3600.0 * number + 40,
        "preset": "chatbot",
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "engine": "vllm",
        "version": "0.33.0",
        "build": "cuda",
        "gpus": (0,),
        "gpu_kind": "NVIDIA RTX A6000",
        "flags": {"max-num-seqs": 256} if flags is None else flags,
        "objectives": {"ttft_p99_seconds": 1.0, "itl_p99_seconds": 0.1, "kv_cache_usage": 0.85,
                       "preemption_rate": 0.02},
        "id": number,
        "windows": 12,
    }  # fmt: skip
    return Run(**{**known, **more})  # type: ignore[arg-type]


def pair(
    before: list[RunWindow], after: list[RunWindow], flags: dict[str, object] | None = None, **more: object
) -> tuple[Recorded, Recorded]:
    """Two runs with these minutes, all of them warm; the second has these flags."""
    one = run(
        1, windows=len(before), ended_at=BEGAN + 7200.0, ended={"requested": True, "reason": "stopped as requested"}
    )
    other = run(2, {"max-num-seqs": 64} if flags is None else flags, windows=len(after), **more)
    return Recorded(one, before, 0.0), Recorded(other, after, 0.0)


def runs() -> tuple[Run, ...]:
    """Two runs with their metrics, as a list shows them."""
    figures = {"requests_per_second": 2.0, "ttft_p99": 0.61, "itl_p99": 0.074, "e2e_p99": 11.2,
               "generation_tokens_per_second": 402.0}  # fmt: skip
    changed = (FlagChange("max-num-seqs", 256, 64),)
    return (
        run(2, {"max-num-seqs": 64}, changed=changed, figures=figures, before=1),
        run(1, figures=figures, ended_at=BEGAN + 7200.0, ended={"requested": True, "reason": "stopped as requested"}),
    )
