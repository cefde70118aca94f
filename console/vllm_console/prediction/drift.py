"""How much the speed of one engine differs between two starts. Pure.

A machine's clocks, temperature and other work are not the same after a restart. What the change of a flag does can't be
told apart from that, so every prediction allows for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median, pstdev

from vllm_console.prediction.evidence import TrafficEvidence
from vllm_launchers.engine_model.step_cost import StepCost

USUAL, USUAL_FROM_METRICS = 0.02, 0.05
"""Standard deviation before any start is known: 0.02 is 2%. A step cost fitted to metrics is less exact itself."""
PRIOR_STARTS = 4
"""As many observed starts count as much as what was expected before."""
WINDOWS = 10
_FEWEST_STEPS = 5


def drift(cost: StepCost, evidence: TrafficEvidence) -> float | None:
    """How much slower steps are than ``cost`` says, typically: 0.05 is 5%. None if single steps are not known."""
    if evidence.ends:
        return None
    ratios = _ratios(cost, evidence)
    return median(ratios) - 1 if ratios else None


def drift_spread(evidence: TrafficEvidence, cost: StepCost, drifts: Sequence[float] = ()) -> float:
    """The standard deviation of the logarithm of the engine's speed from one start to the next.

    It begins with how the speed varied within this run, and learns from the ``drifts`` of earlier starts: the scale of
    the posterior of a normal distribution's variance with known mean (Gelman et al., Bayesian Data Analysis, 2.6).
    """
    prior = USUAL_FROM_METRICS if evidence.ends else max(USUAL, _variation(evidence, cost))
    squares = [math.log1p(one) ** 2 for one in drifts if one > -1]
    return math.sqrt((PRIOR_STARTS * prior**2 + sum(squares)) / (PRIOR_STARTS + len(squares)))


def _variation(evidence: TrafficEvidence, cost: StepCost) -> float:
    """The standard deviation of the logarithm of the speed between parts of this run."""
    ratios = _ratios(cost, evidence)
    size = max(_FEWEST_STEPS, -(-len(ratios) // WINDOWS))
    parts = [ratios[begin : begin + size] for begin in range(0, len(ratios), size)]
    logs = [math.log(median(part)) for part in parts if len(part) >= _FEWEST_STEPS]
    return pstdev(logs) if len(logs) > 1 else 0.0


def _ratios(cost: StepCost, evidence: TrafficEvidence) -> list[float]:
    """Each step's duration over what it should take, in the order of time; without steps that the clock missed."""
    return [
        step.seconds / cost.seconds(step.sequences, step.tokens, step.reads, step.pairs)
        for step in evidence.steps
        if step.seconds > 0
    ]
