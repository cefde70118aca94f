"""Predicts a server's performance with other limits or other traffic, with intervals, or says why it can't. Pure.

The recorded requests are replayed with the fitted step cost twice: with the current and with the changed settings. A
prediction is the measured value times the ratio of the two, so the model's error in the present cancels out.

The interval is a parametric bootstrap (Davison and Hinkley, Bootstrap Methods and their Application, 1997): the range
of `DRAWS` more replays without the `CUT` lowest and highest. Each draws what is unknown about the next run:

- the step cost: one of the parameter sets that reproduce the present about equally well, with its own ratio,
- the engine's speed after a start, and the time that requests spend in the front end (see `drift`),
- the requests: blocks of the recorded ones, drawn twice. The recorded requests are one sample of this traffic, and
  those of the next run will be another, so their difference has twice the variance of one sample,
- how much of the model's error in the present carries over: between zero and two times the error.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import islice, pairwise, zip_longest
from statistics import median

import msgspec
from msgspec.structs import replace

from vllm_console.metrics.quantile import each_once
from vllm_console.prediction.drift import next_fronts, next_speeds
from vllm_console.prediction.evidence import TrafficEvidence
from vllm_console.prediction.figures import RATES, Figures, Spread, mapped
from vllm_console.prediction.fit import CostFit, step_noise
from vllm_launchers.engine_model.step_cost import StepCost, StepNoise
from vllm_launchers.engine_model.traffic_replay import Arrival, EngineLimits, Replayed, replay_traffic
from vllm_launchers.units import counted

DRAWS, CUT = 39, 1
"""Of exchangeable values, the next lies between the second lowest and second highest of 39 in 36 of 40 cases."""
FEWEST_DRAWS = 20
"""A figure that is known in fewer draws gets no interval."""
MODELS = 12
"""Number of engine models, each with its own ratio, that the draws use in turn."""
SHIFTS = (0.0, 0.05, 0.1, 0.15, 0.2)
"""Shifts of the noise in time, in seconds."""
MOST_LOAD = 0.85
"""Above this share of the capacity, small differences decide how long requests wait."""
MOST_MISSED = 0.15
"""If a replay misses the present medians by more than this share, the model does not fit the server."""
MOST_BETWEEN = 0.1
"""A modeled median TTFT is near the measured one if at most this share of requests lies between them."""
_LEAST_SECONDS = 0.004
"""Smaller differences do not count: arrival times are not known more precisely."""
MOST_TIMES_OBSERVED = 2.0
"""Batches and prefills beyond this multiple of the observed ones are extrapolation."""
_BLOCK_OF_REQUESTS = 10
_TIMES_A_REQUEST = 10.0
"""Denser traffic is replayed for this many request durations (at most as long as it was recorded): otherwise it would
end before it fills the engine.
"""
_MOST_RESIDUAL = 2.0
_PREEMPTING = "Requests would be preempted, or nearly so; traffic reconstructed from metrics is too inaccurate there."


class Estimate(msgspec.Struct, frozen=True):
    """A value and the interval in which it is expected in nine of ten cases; None is unknown."""

    value: float | None = None
    low: float | None = None
    high: float | None = None


class EstimatedSpread(msgspec.Struct, frozen=True):
    """A latency's quantiles and mean, in seconds."""

    p50: Estimate = Estimate()
    p90: Estimate = Estimate()
    p99: Estimate = Estimate()
    mean: Estimate = Estimate()


class Estimates(msgspec.Struct, frozen=True):
    """`Figures` with intervals."""

    ttft_seconds: EstimatedSpread = EstimatedSpread()
    itl_seconds: EstimatedSpread = EstimatedSpread()
    e2e_seconds: EstimatedSpread = EstimatedSpread()
    tokens_per_second: Estimate = Estimate()
    requests_waiting: Estimate = Estimate()
    preemptions_per_minute: Estimate = Estimate()
    kv_cache_usage: Estimate = Estimate()


class Prediction(msgspec.Struct, frozen=True):
    """The measured and the predicted figures.

    ``outside`` is a sentence explaining why the prediction is unreliable or missing; or empty. ``load`` is the share of
    capacity that the traffic would take.
    """

    now: Estimates
    predicted: Estimates = Estimates()
    outside: str = ""
    load: float | None = None


class Change(msgspec.Struct, frozen=True):
    """The limits before and after. ``kv_bytes`` is the factor by which the bytes of a cached token change."""

    now: EngineLimits
    after: EngineLimits
    traffic_scale: float = 1.0
    kv_bytes: float = 1.0


def measured(evidence: TrafficEvidence) -> Prediction:
    """The measured figures without a prediction. A quantile known only to a bucket has the bucket as its interval."""
    return Prediction(_estimates(evidence.observed, evidence.ends))


def predict(
    evidence: TrafficEvidence,
    fitted: CostFit,
    change: Change,
    others: Sequence[tuple[TrafficEvidence, CostFit]] = (),
    drifts: Sequence[float] = (),
    front_drifts: Sequence[float] = (),
) -> Prediction:
    """Predict the effect of a change. If it goes far beyond what the server has shown, it is flagged, or not predicted.

    ``others`` are alternative reconstructions of the traffic, each with its fit: all are replayed. ``drifts`` are the
    factors by which earlier starts changed the engine's speed, ``front_drifts`` the time in the front end (see
    `drift`).
    """
    now = measured(evidence)
    if outside := unusable(evidence, change):
        return replace(now, outside=outside)
    cases = ((evidence, fitted), *others)
    present = Change(change.now, change.now)
    baseline = [one for case in cases for one in _outcomes(*case, present)]
    modeled = _middle([one.figures for one in baseline])
    if outside := _missed(evidence, modeled, baseline[0].replayed):
        return replace(now, outside=outside)
    outcomes = [one for case in cases for one in _outcomes(*case, change)]
    value = _corrected(_middle([one.figures for one in outcomes]), _residual(modeled, evidence))
    speeds = next_speeds(evidence, fitted.start, drifts, DRAWS)
    draws = _draws(cases, change, speeds, next_fronts(front_drifts, DRAWS) if evidence.front else ())
    if evidence.ends and any(one.preemptions_per_minute for one in (value, *draws)):
        return replace(now, outside=_PREEMPTING)
    arrivals = _scaled(evidence.arrivals, change.traffic_scale)
    load = _load(evidence, arrivals, change.after, *_engine(evidence, fitted, change))
    return replace(
        now,
        predicted=_estimates(value, draws, CUT),
        outside=_outside(evidence, outcomes[0].replayed, baseline[0].replayed, load),
        load=load,
    )


def _engine(evidence: TrafficEvidence, fitted: CostFit, change: Change) -> tuple[StepCost, StepNoise]:
    """The best step cost after the change, and its noise."""
    return with_kv_bytes(fitted.costs[0], change.kv_bytes), step_noise(fitted.start, evidence)


def with_kv_bytes(cost: StepCost, factor: float) -> StepCost:
    """A step's cost if a cached token has ``factor`` times as many bytes."""
    return replace(cost, per_read=cost.per_read * factor)


class _Outcome(msgspec.Struct, frozen=True):
    replayed: Replayed
    figures: Figures


def _outcomes(evidence: TrafficEvidence, fitted: CostFit, change: Change) -> list[_Outcome]:
    """Replays of the recorded requests; several, with shifted slow periods, if the machine is slower at times."""
    cost, noise = _engine(evidence, fitted, change)
    repeated = _repeated_traffic(evidence, change.traffic_scale)
    arrivals = _scaled(repeated.arrivals, change.traffic_scale)
    noises = [replace(noise, shift=shift) for shift in SHIFTS] if noise.decode else [noise]
    return [_outcome(repeated, arrivals, change, cost, one, recorded_requests=evidence.requests) for one in noises]


def _outcome(
    evidence: TrafficEvidence,
    arrivals: Sequence[Arrival],
    change: Change,
    cost: StepCost,
    noise: StepNoise,
    front: float = 1.0,
    *,
    recorded_requests: int,
) -> _Outcome:
    """Replay requests, with ``front`` times the recorded time in the front end.

    ``recorded_requests`` of them were recorded; the others repeat them.
    """
    since, until = arrivals[evidence.first].at, arrivals[evidence.end - 1].at
    found = replay_traffic(arrivals, change.after, cost, noise, since=since, until=until)
    return _Outcome(found, _figures(evidence, found, until - since, front, recorded_requests))


def _middle(found: Sequence[Figures]) -> Figures:
    """The median of each figure."""

    def middle(*values: float | None) -> float | None:
        known = [value for value in values if value is not None]
        return median(known) if known else None

    return mapped(Figures, Spread, middle, *found)


def _figures(
    evidence: TrafficEvidence, found: Replayed, seconds: float, front: float, recorded_requests: int
) -> Figures:
    """Figures of the judged requests in a replay, with ``front`` times the recorded time in the front end."""
    judged = slice(evidence.first, evidence.end)
    both = zip(found.requests[judged], evidence.fronts[judged], strict=True)
    pairs = [(one, front * spent) for one, spent in both if one is not None]
    return Figures(
        ttft_seconds=Spread.of(
            each_once(one.ttft_seconds + before for one, before in pairs), independent=recorded_requests
        ),
        itl_seconds=Spread.of(found.intervals),
        e2e_seconds=Spread.of(
            each_once(one.e2e_seconds + before for one, before in pairs), independent=recorded_requests
        ),
        tokens_per_second=found.tokens / seconds,
        requests_waiting=found.waiting / seconds,
        preemptions_per_minute=found.preemptions / seconds * 60,
        kv_cache_usage=found.kv_usage / seconds,
    )


def _repeated_traffic(evidence: TrafficEvidence, scale: float) -> TrafficEvidence:
    """Repeat the judged requests so that they last long enough at ``scale`` times their rate."""
    if scale <= 1:
        return evidence
    wanted = evidence.seconds
    if evidence.e2e.mean is not None:
        wanted = min(wanted, _TIMES_A_REQUEST * evidence.e2e.mean)
    times = math.ceil(wanted * scale / evidence.seconds)
    if times <= 1:
        return evidence
    first, end = evidence.first, evidence.end
    arrivals, fronts = evidence.arrivals, evidence.fronts
    judged = arrivals[first:end]
    period = evidence.seconds * len(judged) / (len(judged) - 1)
    again = [replace(one, at=one.at + place * period) for place in range(1, times) for one in judged]
    rest = [replace(one, at=one.at + (times - 1) * period) for one in arrivals[end:]]
    return replace(
        evidence,
        arrivals=(*arrivals[:end], *again, *rest),
        fronts=(*fronts[:end], *fronts[first:end] * (times - 1), *fronts[end:]),
        end=first + times * len(judged),
        until=evidence.until + (times - 1) * period,
    )


def _scaled(arrivals: Sequence[Arrival], scale: float) -> list[Arrival]:
    return [replace(one, at=one.at / scale) for one in arrivals]


# -- intervals ---------------------------------------------------------------------------------------------------------


class _Model(msgspec.Struct, frozen=True):
    """One engine model for one traffic, and the factors by which it misses the present."""

    evidence: TrafficEvidence
    cost: StepCost
    noise: StepNoise
    residual: Figures


def _models(cases: Sequence[tuple[TrafficEvidence, CostFit]], now: EngineLimits) -> list[_Model]:
    """Models from the best parameter sets, alternating between cases."""
    by_case = [
        [(evidence, cost, step_noise(fitted.start, evidence)) for cost in fitted.costs] for evidence, fitted in cases
    ]
    ranked = (one for rank in zip_longest(*by_case) for one in rank if one is not None)
    found = []
    for evidence, cost, noise in islice(ranked, MODELS):
        outcome = _outcome(
            evidence, evidence.arrivals, Change(now, now), cost, noise, recorded_requests=evidence.requests
        )
        found.append(_Model(evidence, cost, noise, _residual(outcome.figures, evidence)))
    return found


def _draws(
    cases: Sequence[tuple[TrafficEvidence, CostFit]],
    change: Change,
    speeds: Sequence[float],
    fronts: Sequence[float] = (),
) -> list[Figures]:
    """Possible outcomes of the next run, one per speed in ``speeds``, each with a factor of ``fronts``, if any."""
    dice = random.Random(DRAWS)
    speeds, fronts = list(speeds), list(fronts) or [1.0] * len(speeds)
    dice.shuffle(speeds)
    random.Random(DRAWS + 3).shuffle(fronts)  # in an order uncorrelated with that of the speeds
    models = _models(cases, change.now)
    found = []
    for place, (speed, front) in enumerate(zip(speeds, fronts, strict=True)):
        model = models[place % len(models)]
        cost = with_kv_bytes(model.cost.scaled(speed), change.kv_bytes)
        repeated = _repeated_traffic(model.evidence, change.traffic_scale)
        arrivals = _redrawn(model.evidence, repeated, change.now.scheduler.block_size, dice, change.traffic_scale)
        noise = replace(model.noise, shift=dice.random() * model.noise.span)
        recorded_requests = model.evidence.requests
        figures = _outcome(repeated, arrivals, change, cost, noise, front, recorded_requests=recorded_requests).figures
        found.append(_corrected(figures, model.residual, carried=2 * dice.random()))
    return found


def _redrawn(
    evidence: TrafficEvidence, repeated: TrafficEvidence, block_size: int, dice: random.Random, scale: float
) -> list[Arrival]:
    """The same kind of traffic at another time: its blocks recombined (a moving-block bootstrap, Künsch, 1989), twice;
    the second time to the length of ``repeated``.

    Shared prefixes stay in place, since their order matters; only the rest of each prompt is drawn.
    """
    arrivals = evidence.arrivals
    gaps = [later.at - one.at for one, later in pairwise(arrivals)]
    order = _blocks_of(_blocks_of(range(len(gaps)), len(gaps), dice), len(repeated.arrivals) - 1, dice)
    at, drawn = 0.0, [arrivals[0]]
    for place, chosen in enumerate(order, 1):
        at += gaps[chosen] / scale
        one, other = repeated.arrivals[place], arrivals[chosen + 1]
        prompt = _shared(one, block_size) + other.prompt_tokens - _shared(other, block_size)
        drawn.append(Arrival(at, prompt, other.output_tokens, one.prefix))
    return drawn


def _shared(one: Arrival, block_size: int) -> int:
    """Number of prompt tokens in shared blocks; the last token is always computed."""
    return min(len(one.prefix) * block_size, one.prompt_tokens - 1)


def _blocks_of(order: Sequence[int], count: int, dice: random.Random) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        begin = dice.randrange(len(order))
        found += order[begin : begin + _BLOCK_OF_REQUESTS]
    return found[:count]


def _estimates(value: Figures, drawn: Sequence[Figures], cut: int = 0) -> Estimates:
    return mapped(Estimates, EstimatedSpread, lambda one, *others: _estimate(one, others, cut), value, *drawn)


def _estimate(value: float | None, drawn: Sequence[float | None], cut: int) -> Estimate:
    """The range of the draws without the ``cut`` lowest and highest, extended to include the value itself.

    With a ``cut``, no range if fewer than `FEWEST_DRAWS` draws have the figure.
    """
    known = sorted(one for one in drawn if one is not None)
    if value is None and len(known) < max(1, len(drawn)):
        return Estimate()
    if cut and len(known) < FEWEST_DRAWS:
        return Estimate(value)
    ends = [*known[cut : len(known) - cut], *([] if value is None else [value])]
    return Estimate(value, min(ends), max(ends))


def _residual(modeled: Figures, evidence: TrafficEvidence) -> Figures:
    """The factors between the measured figures and a replay of the present, at most `_MOST_RESIDUAL`.

    A value within its bucket counts as exact.
    """

    def factor(one: float | None, *others: float | None) -> float:
        other = _nearest(one, *others)
        if not one or not other:
            return 1.0
        return min(_MOST_RESIDUAL, max(1 / _MOST_RESIDUAL, other / one))

    return mapped(Figures, Spread, factor, modeled, *(evidence.ends or (evidence.observed,)))


def _nearest(value: float | None, *known: float | None) -> float | None:
    """The value in the known range that is nearest to ``value``: itself if it lies within."""
    ends = [one for one in known if one is not None]
    return min(max(ends), max(min(ends), value)) if ends and value is not None else None


def _corrected(found: Figures, residual: Figures, carried: float = 1.0) -> Figures:
    """Correct a replay's latencies and tokens per second by ``residual`` to the power ``carried``."""

    def times(value: float | None, factor: float | None) -> float | None:
        return None if value is None or factor is None else value * factor**carried

    corrected = mapped(Figures, Spread, times, found, residual)
    return replace(corrected, **{name: getattr(found, name) for name in RATES if name != "tokens_per_second"})


# -- what can't be predicted -------------------------------------------------------------------------------------------


def unusable(evidence: TrafficEvidence, change: Change) -> str:
    """A sentence explaining why this evidence can't be replayed with the change; empty if it can."""
    if evidence.flaw:
        known = "The records don't cover" if not evidence.ends else "The metrics don't show"
        return f"{known} all traffic: {evidence.flaw}."
    if change.after.prefix_caching and not change.now.prefix_caching:
        return "Turning prefix caching on can't be predicted: the records don't show which prompts share a prefix."
    about = "About " if evidence.ends else ""
    longest = change.after.scheduler.max_model_len
    refused = sum(one.prompt_tokens + one.output_tokens > longest for one in evidence.arrivals)
    if refused:
        return f"{about}{_of_recorded(refused, evidence, 'is', 'are')} longer than {longest} tokens."
    step = change.after.scheduler.max_num_batched_tokens
    refused = sum(one.prompt_tokens + one.output_tokens > step for one in evidence.arrivals)
    if refused and not change.after.scheduler.chunked_prefill:
        longer = f"{about}{_of_recorded(refused, evidence, 'is', 'are')} longer than a step of {step} tokens"
        return f"{longer}, which vLLM rejects without chunked prefill."
    largest = (change.after.blocks - 1) * change.after.scheduler.block_size
    refused = sum(one.prompt_tokens + one.output_tokens > largest for one in evidence.arrivals)
    if refused:
        needs = _of_recorded(refused, evidence, "needs", "need")
        return f"{about}{needs} more than the whole KV cache of {largest} tokens."
    return ""


def _of_recorded(number: int, evidence: TrafficEvidence, one: str, more: str) -> str:
    """``2 of the 40 recorded requests are``; ``one`` and ``more`` are the singular and plural verb."""
    return f"{number} of the {len(evidence.arrivals)} recorded requests {one if number == 1 else more}"


def _missed(evidence: TrafficEvidence, modeled: Figures, baseline: Replayed) -> str:
    """A sentence if a replay of the present does not match the measurements; else empty."""
    cached = sum(one.cached_tokens for one in baseline.requests[evidence.first : evidence.end] if one is not None)
    if abs(cached - evidence.cached_tokens) > MOST_MISSED * max(evidence.cached_tokens, 1) + 0.02 * _prompts(evidence):
        return "The records don't show which prompts share a prefix, which matters for this server."
    known = evidence.ends or (evidence.observed,)
    names = (("TTFT", "ttft_seconds"), ("ITL", "itl_seconds"), ("end-to-end time", "e2e_seconds"))
    pairs = []
    for part, kind in (("p50", "median"), ("mean", "mean")) if evidence.ends else (("p50", "median"),):
        for name, key in names:
            one = getattr(getattr(modeled, key), part)
            pairs.append((f"{kind} {name}", one, _nearest(one, *(getattr(getattr(end, key), part) for end in known))))
    pairs.append(("tokens per second", modeled.tokens_per_second, evidence.observed.tokens_per_second))
    for name, one, other in pairs:
        if one is None or other is None:
            continue
        least = _LEAST_SECONDS if name.endswith("TTFT") else 0.0
        if name == "median TTFT" and _is_near_median(modeled.ttft_seconds, evidence):
            continue
        if abs(one - other) > max(MOST_MISSED * other, least):
            far = f"{abs(one / other - 1):.0%} {'above' if one > other else 'below'}" if other else "far above"
            far = f"{one / other:.0f} times" if one > 3 * other > 0 else far
            return f"No prediction: the replay's {name} is {far} what this server measured."
    return ""


def _is_near_median(ttft: Spread, evidence: TrafficEvidence) -> bool:
    """Whether about half of the requests had their first token before the modeled median, and the mean TTFT matches.

    If some requests wait in the queue and others don't, the median lies between the two groups, where few requests are.
    A replay in which slightly more or fewer requests wait then has a very different median.
    """
    mean = evidence.observed.ttft_seconds.mean
    if ttft.p50 is None or ttft.mean is None or mean is None or abs(ttft.mean - mean) > MOST_MISSED * mean:
        return False
    engine = ttft.p50 - evidence.front
    for (share, low), (next_share, high) in pairwise(evidence.ttft.points):
        if low <= engine < high:
            return abs(share + (next_share - share) * (engine - low) / (high - low) - 0.5) <= MOST_BETWEEN
    return False


def _prompts(evidence: TrafficEvidence) -> int:
    return sum(one.prompt_tokens for one in evidence.arrivals[evidence.first : evidence.end])


def _load(
    evidence: TrafficEvidence, arrivals: Sequence[Arrival], limits: EngineLimits, cost: StepCost, noise: StepNoise
) -> float:
    """The share of its time that the server would need for this traffic if it always ran at full batch."""
    judged = arrivals[evidence.first : evidence.end]
    together = [replace(one, at=0.0) for one in judged]
    return replay_traffic(together, limits, cost, noise).busy / (judged[-1].at - judged[0].at)


def _outside(evidence: TrafficEvidence, found: Replayed, baseline: Replayed, load: float) -> str:
    """A sentence on what limits a prediction's reliability; empty if nothing does."""
    if load > MOST_LOAD:
        return (
            f"This traffic would take about {load:.0%} of what the server can serve: above {MOST_LOAD:.0%} only "
            "direction and order of magnitude are reliable."
        )
    batch = _typical_most(found.batches)
    if batch > MOST_TIMES_OBSERVED * max(evidence.most_running, 1):
        return (
            f"Up to {counted(batch, 'request')} would run at once, but at most {evidence.most_running} were "
            "observed on this server: step times are extrapolated."
        )
    if found.prefill_tokens > MOST_TIMES_OBSERVED * max(baseline.prefill_tokens, 1):
        return (
            f"Steps would compute up to {found.prefill_tokens:,} prompt tokens, but at most "
            f"{baseline.prefill_tokens:,} were observed on this server: step times are extrapolated."
        )
    return ""


def _typical_most(batches: dict[int, float]) -> int:
    """The batch size that is exceeded in only 5% of the busy time."""
    left = 0.95 * sum(batches.values())
    for count in sorted(batches):
        left -= batches[count]
        if left <= 0:
            return count
    return max(batches, default=0)
