"""Servers with several engines: limits apply to each of them, and requests and tokens are summed."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from vllm_console.diagnosis.finding import Finding, Severity
from vllm_console.diagnosis.live.findings import findings
from vllm_console.diagnosis.live.rule import Evidence
from vllm_console.history.frames import Frames
from vllm_console.metrics.parse import Parser
from vllm_console.metrics.sample import EngineSample, Histogram, Sample
from vllm_launchers.simulated.flags import parse_flags
from vllm_launchers.simulated.memory import plan_memory
from vllm_launchers.simulated.metrics import Metrics
from vllm_launchers.simulated.settings import Simulated, resolve_settings

START = 1_000_000.0
BOUNDS = (100.0, 200.0, 500.0, 1000.0, 5000.0, math.inf)
BUSY = EngineSample(
    requests_running=60, requests_waiting=0, kv_cache_usage=0.3, preemptions_total=0, prompt_tokens_total=3000,
    generation_tokens_total=4000, requests_finished_total=10,
)  # fmt: skip
"""What each engine does in 2.5 seconds."""


def found(
    one: EngineSample, *, engines: int = 4, growth: float = 0.0, prompt: float = 150.0, answer: float = 300.0,
    cache: int = 50_000, rare: float = 0.0, rare_since: float = 120.0, max_tokens: float = 0.0, **known: Any,
) -> dict[str, Finding]:  # fmt: skip
    """Findings after two minutes with equal samples on each engine, whose queue grows by ``growth`` per sample.

    ``cache`` is each engine's KV cache in tokens; ``prompt`` and ``answer`` are the lengths of all requests, which are
    unknown if ``answer`` is 0, and ``max_tokens`` is what they ask for, if it is reported. One prompt in 200 has the
    length ``rare``, if given, since ``rare_since`` seconds.
    """
    frames = Frames()
    for at in range(49):
        ended = 10.0 * at
        rarely = 0.05 * max(0.0, at - (48 - rare_since / 2.5))
        kinds = {"prompt_tokens": ((ended - rarely, prompt), (rarely, rare or prompt))}
        kinds["generation_tokens"] = ((ended, answer),)
        if max_tokens:
            kinds["max_tokens"] = ((ended, max_tokens),)
        lengths = {
            key: Histogram(
                BOUNDS,
                tuple(sum(many for many, length in kind if length <= bound) for bound in BOUNDS),
                sum(many * length for many, length in kind),
            )
            for key, kind in kinds.items()
            if answer
        }
        counts = {name: value * at for name in COUNTED if (value := getattr(one, name)) is not None}
        engine = replace(one, **counts, requests_waiting=growth * at, histograms=lengths)
        frames.append(Sample(START + 2.5 * at, {str(n): engine for n in range(engines)}, engines * cache))
    now = START + 120
    evidence = {"now": now, "ready_at": START - 60, "frames": frames.since(0.0), "build": "cpu", **known}
    return {finding.code: finding for finding in findings(Evidence(**evidence))}


COUNTED = (
    "preemptions_total", "prompt_tokens_total", "generation_tokens_total", "requests_finished_total",
)  # fmt: skip


def test_cache_per_engine_is_read_from_server_settings() -> None:
    args = parse_flags(["serve", "Qwen/Qwen3-8B-AWQ", "--data-parallel-size", "4"])
    settings = resolve_settings(args, Simulated.from_environment({"SIMULATED_GPU": "RTX A6000"}))
    plan = plan_memory(settings)
    metrics, parser, frames = Metrics(settings, plan), Parser(), Frames()
    for at in (0.0, 5.0, 10.0):
        frames.append(parser.parse(metrics.render().decode(), START + at))
    evidence = Evidence(now=START + 10, ready_at=START, frames=frames.since(0.0))
    assert (evidence.engines, evidence.cache_tokens) == (4, plan.tokens)


def test_sequence_limit_is_reached_when_each_engine_reaches_it() -> None:
    flags = {"max-num-seqs": 256, "max-model-len": 4096}
    half = found(replace(BUSY, requests_running=62), growth=1, flags=flags)
    assert "oversubscribed_compute" in half
    assert "oversubscribed_sequences" not in half, "248 run, and 1024 may"
    full = found(replace(BUSY, requests_running=250), growth=1, flags=flags)["oversubscribed_sequences"]
    assert full.cause == "At most 256 sequences run at once in each engine (max-num-seqs)."
    (running,) = [one for one in full.measures if one.name == "running"]
    assert (running.value, running.limit, running.source) == ("1000", "1024", "max-num-seqs of 4 engines")


def test_fewer_sequences_fit_the_cache_of_each_engine() -> None:
    pressed = replace(BUSY, requests_running=100, kv_cache_usage=0.99, preemptions_total=1)
    finding = found(pressed, prompt=300, answer=400, flags={"max-num-seqs": 128})["preempting"]
    (fix,) = [one for one in finding.fixes if "max-num-seqs" in one.changes.set]
    # Each sequence holds its prompt and at least half of its output, about 500 tokens: 85 are within the objective.
    assert 48 <= int(fix.changes.set["max-num-seqs"]) <= 88
    assert "sequences in each engine" in fix.why
    alone = found(pressed, engines=1, prompt=300, answer=400, flags={"max-num-seqs": 128})["preempting"]
    assert [one.changes for one in alone.fixes] == [one.changes for one in finding.fixes]


def test_without_lengths_fewer_sequences_follow_those_running_per_engine() -> None:
    pressed = replace(BUSY, requests_running=50, kv_cache_usage=0.99, preemptions_total=1)
    (fix,) = found(pressed, answer=0, flags={"max-num-seqs": 128})["preempting"].fixes
    assert fix.changes.set == {"max-num-seqs": 24}, "six tenths of 50, in steps of eight"


def test_prompt_must_fit_into_one_engine() -> None:
    def held(cache: int) -> set[str]:
        seen = found(replace(BUSY, kv_cache_usage=0.6), growth=1, prompt=4500, cache=cache)
        for code, finding in seen.items():
            if code == "oversubscribed_memory":
                assert "4,000 tokens are free in each engine" in finding.cause
                limits = {one.name: one.limit for one in finding.measures}
                assert (limits["KV cache usage"], limits["mean prompt"]) == ("", "4,000 tokens")
        return {code for code in seen if code.startswith("oversubscribed")}

    assert held(10_000) == {"oversubscribed_memory"}, "4,000 are free in each, 16,000 in all"
    assert held(50_000) == {"oversubscribed_compute"}


def test_context_that_no_engine_can_hold() -> None:
    stuck = replace(
        BUSY, requests_running=0, kv_cache_usage=0, prompt_tokens_total=0, generation_tokens_total=0,
        requests_finished_total=0,
    )  # fmt: skip
    finding = found(stuck, growth=1, max_model_len=65_536)["not_admitted"]
    assert finding.cause.startswith("max-model-len allows 65,536 tokens, but the KV cache holds 50,000 in each engine:")
    assert finding.fixes[-1].changes.set == {"max-model-len": 47_488}


def test_context_is_not_unused_when_no_shorter_one_can_be_offered() -> None:
    short = {"prompt": 50.0, "answer": 50.0, "cache": 4000}  # at most 200 tokens according to their buckets
    assert found(BUSY, max_model_len=2048, **short)["context_unused"].fixes[0].changes.set == {"max-model-len": 256}
    assert "context_unused" not in found(BUSY, max_model_len=512, **short), "200 tokens are much of it"
    above = {**short, "prompt": 6000.0}  # in the unbounded last bucket: could be of any length
    assert "context_unused" not in found(BUSY, max_model_len=65_536, **above)


def test_shorter_context_holds_the_longest_request() -> None:
    """6,144 was once offered from the p99 of lengths, so that one request in 200 would have been rejected."""
    usual: dict[str, Any] = {"prompt": 4000.0, "answer": 400.0, "max_model_len": 32_768}  # in buckets to 5,000 and 500
    finding = found(BUSY, **usual)["context_unused"]
    assert finding.fixes[0].changes.set == {"max-model-len": 7168}
    assert "took, or is known to ask for, more than 5,500 tokens; this leaves" in finding.fixes[0].why
    assert "17% of max-model-len" in finding.symptom
    assert "context_unused" not in found(BUSY, **usual, rare=20_000.0)
    assert "context_unused" not in found(BUSY, **usual, rare=20_000.0, rare_since=10.0), "ends at the first one"
    assert "context_unused" not in found(BUSY, **usual, longest_seen=20_000.0), "before a restart"
    assert found(BUSY, **usual, longest_seen=7000.0)["context_unused"].fixes[0].changes.set == {"max-model-len": 10_240}


def test_shorter_context_holds_what_requests_are_known_to_ask_for() -> None:
    """vLLM rejects a prompt with more ``max_tokens`` than remain, however short the answers are."""
    usual: dict[str, Any] = {"prompt": 400.0, "answer": 90.0, "max_model_len": 32_768}  # in buckets to 500 and 100
    unknown = found(BUSY, **usual)["context_unused"].fixes[0]
    assert unknown.changes.set == {"max-model-len": 768}
    assert unknown.tradeoff == "Requests that are longer, or whose max_tokens asks for more, are rejected."
    asked = found(BUSY, **usual, max_tokens=4096)["context_unused"].fixes[0]
    assert asked.changes.set == {"max-model-len": 7168}, "500 and 5,000, and a quarter more"
    assert "or is known to ask for, more than 5,500 tokens" in asked.why
    assert asked.tradeoff == "Longer requests are rejected."
    unset = found(BUSY, **usual, max_tokens=32_768 - 400)["context_unused"].fixes[0]
    assert (unset.changes, unset.tradeoff) == (unknown.changes, unknown.tradeoff), "clients that set none, or so many"
    short = {**usual, "max_model_len": 9000}
    assert "context_unused" in found(BUSY, **short)
    assert "context_unused" not in found(BUSY, **short, max_tokens=4096)


def test_one_full_context_is_a_share_of_one_engine() -> None:
    (measure,) = found(BUSY, max_model_len=25_000)["context_unused"].measures[1:]
    assert measure.value == "50% of the KV cache in each engine"


@pytest.mark.parametrize(
    ("flags", "engines"),
    [({}, 1), ({"data-parallel-size": 32}, 32), ({"data-parallel-size": 8, "data-parallel-external-lb": True}, 1)],
    ids=["one", "too many for history, which keeps them as one", "one of eight behind another's load balancer"],
)
def test_unseen_engines_are_counted_from_the_flags(flags: dict[str, Any], engines: int) -> None:
    evidence = Evidence(now=START, ready_at=START, frames=(), flags=flags)
    assert evidence.engines == engines
    assert evidence.most_running == engines * evidence.max_num_seqs


def hung(*still: int, silent: float | None = None, unasked: str = "") -> dict[str, Finding]:
    """Two minutes of four engines; some are stalled with running requests, and the last is idle."""
    frames = Frames()
    for at in range(49):
        moving = replace(BUSY, **{name: getattr(BUSY, name) * at for name in COUNTED})
        idle = replace(BUSY, requests_running=0, **dict.fromkeys(COUNTED, 0))
        engines = {str(n): BUSY if n in still else idle if n == 3 else moving for n in range(4)}
        frames.append(Sample(START + 2.5 * at, engines, 200_000))
    evidence = Evidence(
        now=START + 120, ready_at=START - 60, frames=frames.since(0.0), silent_seconds=silent, unasked=unasked
    )
    return {finding.code: finding for finding in findings(evidence)}


def test_hang_of_one_engine_is_seen_while_others_run() -> None:
    assert "engine_hung" not in hung()
    (finding,) = hung(1, unasked="another would answer").values()
    assert (finding.code, finding.severity) == ("engine_hung", Severity.WARNING)
    assert "requests run on engine 1, and no token for 2m00s from there" in finding.symptom
    assert finding.measures[0].value == "engine 1 (4 total)"
    (finding,) = hung(0, 2, unasked="another would answer").values()
    assert "requests run on engines 0, 2" in finding.symptom


def test_hang_of_all_engines_is_confirmed_by_a_request() -> None:
    frames = Frames()
    for at in range(49):
        engines = {str(n): replace(BUSY, kv_cache_usage=0.1 * n) for n in range(4)}
        frames.append(Sample(START + 2.5 * at, engines, 200_000))
    evidence = Evidence(now=START + 120, ready_at=START - 60, frames=frames.since(0.0), silent_seconds=20.0)
    (finding,) = findings(evidence)
    assert (finding.code, finding.severity) == ("engine_hung", Severity.CRITICAL)


def uneven(ranks: dict[str, tuple[float, float, float]], *, lockstep: bool = False) -> Finding | None:
    """The finding after two minutes with these running requests, queued requests and KV cache usage per rank.

    With ``lockstep``, all requests of a rank end together, so that none waits every third second.
    """
    frames = Frames()
    for at in range(121):
        engines = {
            label: EngineSample(
                requests_running=running,
                requests_waiting=0 if lockstep and at % 3 == 0 else waiting,
                kv_cache_usage=usage,
                generation_tokens_total=running * 10 * at,
                prompt_tokens_total=running * at,
                preemptions_total=0,
            )
            for label, (running, waiting, usage) in ranks.items()
        }
        frames.append(Sample(START + at, engines, 100_000))
    evidence = Evidence(now=START + 120, ready_at=START - 60, frames=frames.since(0.0), build="cpu")
    return next((one for one in findings(evidence) if one.code == "uneven_ranks"), None)


def test_requests_waiting_on_one_rank_while_another_has_room() -> None:
    pinned = uneven({"0": (8, 5, 0.4), "1": (2, 0, 0.1)})
    assert pinned is not None
    assert "5 requests wait on data-parallel rank 0 while none waits on rank 1" in pinned.symptom
    assert "got more requests than it runs at once" in pinned.cause
    assert "X-data-parallel-rank" in pinned.fixes[0].why
    assert {fix.changes.empty for fix in pinned.fixes} == {True}
    assert [one.value for one in pinned.measures][:3] == ["8, 5", "40%", "800"]
    full = uneven({"0": (8, 5, 0.99), "1": (2, 0, 0.1)})
    assert full is not None
    assert "The KV cache of rank 0 is full" in full.cause


@pytest.mark.parametrize(
    "ranks",
    [
        {"0": (8, 5, 0.9)},
        {"0": (8, 5, 0.9), "1": (8, 5, 0.9)},
        {"0": (8, 1, 0.9), "1": (2, 0, 0.1)},
        {"0": (8, 5, 0.9), "1": (8, 0, 0.9)},
        {"0": (8, 0, 0.9), "1": (1, 0, 0.1)},
    ],
)
def test_single_or_equal_ranks_are_not_uneven(ranks: dict[str, tuple[float, float, float]]) -> None:
    assert uneven(ranks) is None


def test_intermittent_queue_next_to_an_idle_rank_is_uneven() -> None:
    pinned = uneven({"0": (4, 4, 0.4), "1": (0, 0, 0.0)}, lockstep=True)
    assert pinned is not None
    assert "Requests wait on data-parallel rank 0 while rank 1 runs none" in pinned.symptom
    assert uneven({"0": (4, 4, 0.4), "1": (1, 0, 0.0)}, lockstep=True) is None


def test_rank_without_gauges_has_room() -> None:
    frames = Frames()
    for at in range(121):
        busy = replace(BUSY, requests_running=128, requests_waiting=50, generation_tokens_total=100.0 * at)
        unused = EngineSample(generation_tokens_total=0, prompt_tokens_total=0)
        frames.append(Sample(START + at, {"0": busy, "1": unused}, 100_000))
    evidence = Evidence(now=START + 120, ready_at=START - 60, frames=frames.since(0.0), build="cpu")
    assert "none waits on rank 1" in next(one for one in findings(evidence) if one.code == "uneven_ranks").symptom
