"""How much an engine's speed, and the time that requests spend in the front end, differ between two starts. Pure.

A machine's clocks, temperature and other load differ after a restart. The effect of a changed flag can't be separated
from that, so every prediction allows for it. Other load hardly slows steps that wait for a GPU, but it does slow the
API server, which handles every request: the two drift independently.

From start to start, the logarithm of either changes by Student's t with 4 degrees of freedom, so that one start on a
busy machine does not determine the scale (Lange, Little and Taylor, Robust Statistical Modeling Using the t
Distribution, 1989). The scale is unknown. Its prior is log-normal, each start adds information, and the next change is
drawn from all scales by their probability: the posterior predictive distribution (Gelman et al., Bayesian Data
Analysis, 1.3), on a grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median, pstdev

from vllm_console.prediction.evidence import TrafficEvidence
from vllm_launchers.engine_model.step_cost import StepCost

USUAL, USUAL_FROM_METRICS = 0.01, 0.025
"""Prior median of the scale. With 0.01, nine of ten starts are within 3.5%, as with a normal distribution with a
standard deviation of 2.1%. A step cost fitted to metrics is less exact.
"""
USUAL_FRONT = 0.15
"""The same for the time in the front end. Based on real vLLM on the CPU, with real-time priority next to other load,
where half of eight restarts changed it by 10% or more.
"""
UNSURE = 0.9
"""Prior standard deviation of the scale's logarithm: machines differ, nine of ten by a factor of up to 4.4."""
_GRID = tuple(place / 4 for place in range(-14, 15))
"""Grid of the scale's logarithm, in standard deviations."""
_DEGREES = 4
WINDOWS = 10
_FEWEST_STEPS = 5
_HALVINGS = 30


def drift(cost: StepCost, evidence: TrafficEvidence) -> float | None:
    """How much slower steps typically are than ``cost`` predicts: 0.05 is 5%. None if single steps are unknown."""
    if evidence.ends:
        return None
    ratios = _ratios(cost, evidence)
    return median(ratios) - 1 if ratios else None


def at_speed_of(cost: StepCost, evidence: TrafficEvidence) -> StepCost:
    """``cost`` at the speed of these steps, the reference for a later run's `drift`."""
    return cost.scaled(1 + (drift(cost, evidence) or 0.0))


def front_drift(before: float, evidence: TrafficEvidence) -> float | None:
    """How much longer requests spend in the front end than ``before`` (seconds): 0.05 is 5%. None if unknown."""
    return evidence.front / before - 1 if before and evidence.front else None


def next_speeds(evidence: TrafficEvidence, cost: StepCost, drifts: Sequence[float], count: int) -> list[float]:
    """Factors by which the next start may change the engine's speed: ``count`` equally likely values, in order.

    ``drifts`` are those of earlier starts. The speed variation within this run is used if it is larger than usual.
    """
    # The scale of a t is about three quarters of a normal distribution's standard deviation; half allows for UNSURE.
    usual = USUAL_FROM_METRICS if evidence.ends else max(USUAL, _variation(evidence, cost) / 2)
    return _next(usual, drifts, count)


def next_fronts(drifts: Sequence[float], count: int) -> list[float]:
    """Factors by which the next start may change the time in the front end, see `next_speeds`."""
    return _next(USUAL_FRONT, drifts, count)


def _next(usual: float, drifts: Sequence[float], count: int) -> list[float]:
    scales = _scales(usual, [math.log1p(one) for one in drifts if -1 < one < math.inf])
    upper = [_quantile(scales, place / (count + 1)) for place in range(count // 2 + 1, count + 1)]
    return [math.exp(one) for one in (*(-one for one in reversed(upper[count % 2 :])), *upper)]


def _scales(usual: float, changes: Sequence[float]) -> list[tuple[float, float]]:
    """The posterior of the scale, given the changes so far: scales with their probabilities."""
    scales = [usual * math.exp(UNSURE * place) for place in _GRID]
    logs = [
        -(place**2) / 2 + sum(_log_density(one / scale) - math.log(scale) for one in changes)
        for place, scale in zip(_GRID, scales, strict=True)
    ]
    most = max(logs)
    chances = [math.exp(one - most) for one in logs]
    return [(scale, chance / sum(chances)) for scale, chance in zip(scales, chances, strict=True)]


def _log_density(value: float) -> float:
    """Log density of Student's t, up to a constant."""
    return -(_DEGREES + 1) / 2 * math.log1p(value**2 / _DEGREES)


def _below(value: float) -> float:
    """Cumulative distribution of Student's t with 4 degrees of freedom."""
    share = value**2 / (_DEGREES + value**2)
    return 0.5 + math.copysign(math.sqrt(share) * (3 - share) / 4, value)


def _quantile(scales: Sequence[tuple[float, float]], share: float) -> float:
    """A quantile (``share`` at least 0.5) of the mixture of these scales."""

    def below(value: float) -> float:
        return sum(chance * _below(value / scale) for scale, chance in scales)

    low, high = 0.0, 1.0
    while below(high) < share:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < share else (low, middle)
    return high


def _variation(evidence: TrafficEvidence, cost: StepCost) -> float:
    """Standard deviation of the logarithm of the speed between parts of this run."""
    ratios = _ratios(cost, evidence)
    size = max(_FEWEST_STEPS, -(-len(ratios) // WINDOWS))
    parts = [ratios[begin : begin + size] for begin in range(0, len(ratios), size)]
    logs = [math.log(median(part)) for part in parts if len(part) >= _FEWEST_STEPS]
    return pstdev(logs) if len(logs) > 1 else 0.0


def _ratios(cost: StepCost, evidence: TrafficEvidence) -> list[float]:
    """The ratio of each step's duration to its cost, in time order; without steps of no measured duration."""
    return [
        step.seconds / cost.seconds(step.sequences, step.tokens, step.reads, step.pairs)
        for step in evidence.steps
        if step.seconds > 0
    ]
