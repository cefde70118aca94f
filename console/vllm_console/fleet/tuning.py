"""Predicts which batch sizes and memory shares would improve a running server for its own traffic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from vllm_console.fleet.predictions import evidence_of, limits_after, limits_of, present_run, reported_cache
from vllm_console.load.tune_search import THROUGHPUT, TTFT, Candidate, Set, combinations, ranked
from vllm_console.prediction.capacity import ReplayedEngine, held_rate, replay_at, saturated_tokens
from vllm_console.prediction.fit import fit_step_cost, step_noise
from vllm_console.prediction.predict import MOST_TIMES_OBSERVED
from vllm_launchers.errors import OperationError
from vllm_launchers.launch.details import unpack
from vllm_launchers.plan.budget.memory_flags import least_step, max_tokens_per_mm_item, needs_unknown_items_whole
from vllm_launchers.vllm.flags.changes import Changes
from vllm_launchers.vllm.flags.speculation import sequence_tokens
from vllm_launchers.vllm.modelfacts.facts import LayerKind

if TYPE_CHECKING:
    from vllm_console.prediction.evidence import TrafficEvidence
    from vllm_launchers.engine_model.traffic_replay import Arrival, EngineLimits
    from vllm_launchers.keeper.records import ServerRecord
    from vllm_launchers.plan.model import Plan
    from vllm_launchers.presets.model import Objectives
    from vllm_launchers.vllm.modelfacts.facts import ModelFacts

_LOWEST_SHARE = 1 / 32
"""If the current server meets the objectives at no rate, this part of the expected rate counts as its goodput."""

_DECIDES = ("kv-cache-memory-bytes", "num-gpu-blocks-override")
"""With one of these flags, the memory share has no effect on the KV cache."""


class TuneTarget(msgspec.Struct, frozen=True):
    """What to improve: an objective of `tune_search`, the limits of a goodput, and the traffic to send.

    ``rate`` (requests per second) is where a goodput is expected and at which TTFT is measured; ``in_flight`` is the
    constant number of requests in flight while throughput is measured.
    """

    objective: str
    limits: Objectives
    rate: float
    in_flight: int


class CandidateRanking(msgspec.Struct, frozen=True):
    """Candidates that are predicted to be better, best first, and the objective's value without a change.

    Of ``considered`` combinations, ``refused`` would not start or are not modeled.
    """

    original: float
    candidates: tuple[Candidate, ...]
    considered: int
    refused: int


def rank_changes(
    state: Path,
    record: ServerRecord,
    facts: ModelFacts | None,
    plan_of: Callable[[Changes], Plan],
    target: TuneTarget,
) -> CandidateRanking:
    """Predict every combination of batch sizes and memory shares around a running server's own.

    ``plan_of`` plans its restart with a change. Takes from seconds to a minute.

    Raises:
        OperationError: too little is recorded, or the server does not answer.
    """
    details = unpack(record.current.spec.details)
    cache = reported_cache(record)
    limits = limits_of(details.flags, details, facts, cache)
    evidence, fitted_to = evidence_of(present_run(state, record), record.name, limits)
    if evidence.flaw:
        raise OperationError(f"{record.name}: the records don't cover all traffic: {evidence.flaw}")
    limits = replace(limits, ahead=evidence.ahead)
    before = plan_of(Changes())
    utilization = None
    if before.memory is not None and not any(flag in details.flags for flag in _DECIDES):
        share = before.flags.get("gpu-memory-utilization")
        utilization = float(share) if isinstance(share, int | float) else None
    # Some releases refuse steps that are smaller than a block of cached states.
    states = cache.prefix_caching and facts is not None and LayerKind.LINEAR in facts.layers
    release = details.engine.release if details.engine is not None else None
    least = least_step(
        details.flags,
        release,
        facts=facts,
        context=limits.scheduler.max_model_len,
        mm_item=max_tokens_per_mm_item(facts, details.flags),
        state_block=cache.block_size if states else 0,
    )
    if needs_unknown_items_whole(facts, details.flags):
        least = limits.scheduler.max_num_batched_tokens
    each, sizes = sequence_tokens(details.flags, release), limits.scheduler
    wanted = combinations(sizes.max_num_seqs, sizes.max_num_batched_tokens, utilization, least, each)
    known = []
    for change in wanted:
        then = limits_after(details, facts, cache, before, plan_of(Changes(set=change)))
        if not isinstance(then, str):
            known.append((change, replace(then, ahead=evidence.ahead)))
    original, candidates = predict_each(evidence, fitted_to, limits, known, target)
    return CandidateRanking(original, candidates, len(wanted), len(wanted) - len(known))


def predict_each(
    evidence: TrafficEvidence,
    fitted_to: TrafficEvidence,
    limits: EngineLimits,
    changes: Sequence[tuple[Set, EngineLimits]],
    target: TuneTarget,
) -> tuple[float, tuple[Candidate, ...]]:
    """The objective's value with the current ``limits``, and the ``changes`` that are predicted to improve it, best
    first.

    ``fitted_to`` is the part of the ``evidence`` that the step cost is fitted to.
    """
    fitted = fit_step_cost(fitted_to, limits)
    cost, noise = fitted.costs[0], step_noise(fitted.start, evidence)
    traffic = _at_one_per_second(evidence.arrivals)
    original, _ = _value(target, traffic, ReplayedEngine(limits, cost, noise), target.rate)
    if original is None:
        original = target.rate * _LOWEST_SHARE
    found = []
    for change, then in changes:
        value, running = _value(target, traffic, ReplayedEngine(then, cost, noise), original, at_least=True)
        if value is not None:
            full = target.objective != THROUGHPUT and running >= then.scheduler.max_num_seqs
            found.append(Candidate(change, value, _guess(running, evidence), full))
    return original, tuple(ranked(found, original, target.objective))


def _at_one_per_second(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """The same requests in the same order, one per second on average: the last one ``len(arrivals) - 1`` seconds after
    the first, so that they can be repeated every ``len(arrivals)`` seconds.
    """
    by = (len(arrivals) - 1) / (arrivals[-1].at - arrivals[0].at)
    return [replace(one, at=(one.at - arrivals[0].at) * by) for one in arrivals]


def _value(
    target: TuneTarget, traffic: Sequence[Arrival], engine: ReplayedEngine, near: float, *, at_least: bool = False
) -> tuple[float | None, int]:
    """The objective's value with an engine (None if there is none), and how many requests would run at once."""
    if target.objective == THROUGHPUT:
        running = min(engine.limits.scheduler.max_num_seqs, target.in_flight)
        return saturated_tokens(traffic, engine, target.in_flight) or None, running
    if target.objective == TTFT:
        outcome = replay_at(traffic, engine, target.limits, target.rate)
        return outcome.ttft or None, outcome.running
    rate = held_rate(traffic, engine, target.limits, near, at_least=at_least)
    return rate, 0 if rate is None else replay_at(traffic, engine, target.limits, rate).running


def _guess(running: int, evidence: TrafficEvidence) -> str:
    if running > MOST_TIMES_OBSERVED * max(evidence.most_running, 1):
        return f"up to {running} requests would run at once, and at most {evidence.most_running} were observed"
    return ""
