"""Fits an engine's step cost to the latencies of its requests by replaying them. Pure.

It starts from a regression on the durations of single steps, which replays improve: the quantiles of TTFT, ITL and
end-to-end time must match the observations. Several parameter sets fit almost equally well, since traffic does not
distinguish all of them; they are kept, and their predictions differ where it matters.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from operator import mul
from statistics import mean, median, pstdev

import msgspec
from msgspec.structs import replace

from vllm_console.metrics.quantile import Weighted, each_once, weighted_quantiles
from vllm_console.prediction.evidence import SeenStep, TrafficEvidence
from vllm_console.prediction.figures import weighted_mean
from vllm_launchers.engine_model.roofline import MAX_GRAPH_BATCH
from vllm_launchers.engine_model.step_cost import NO_NOISE, StepCost, StepNoise
from vllm_launchers.engine_model.traffic_replay import EngineLimits, Replayed, replay_traffic

KEPT = 12
"""Maximum number of parameter sets to keep."""
GENERATIONS, POPULATION, ELITE = 5, 12, 4
_FLOOR = 0.001
"""Makes differences well below a millisecond insignificant."""
_QUIET = 0.01
"""Steps with a smaller typical deviation from their cost count as exact."""
_NEARLY = 0.02, 1.25
"""Sets fit almost equally well if their typical error is at most this much above this multiple of the best one's."""


class CostFit(msgspec.Struct, frozen=True):
    """Parameter sets that reproduce the evidence, best first, and the best one's typical error (0.05 is 5%).

    ``start`` is the regression that the fit began with. Steps' deviations from it are noise: see `step_noise`.
    """

    costs: tuple[StepCost, ...]
    error: float
    start: StepCost


Point = tuple[float, ...]
"""A cost's difference from the start: the logarithm of each parameter's factor, and a shift of the share of weights."""

_WIDTH: Point = (0.04, 0.15, 0.15, 0.06, 0.15)
"""Search widths of a step's base, the share of weights in it, and costs per sequence, prompt token and token read."""


def _cost_at(start: StepCost, point: Point) -> StepCost:
    base, share, sequence, token, read = point
    fixed = start.overhead + start.weights
    weights = min(1.0, max(0.0, start.weights / fixed + share)) * fixed
    return replace(
        start,
        overhead=(fixed - weights) * math.exp(base),
        weights=weights * math.exp(base),
        per_sequence=start.per_sequence * math.exp(sequence),
        per_token=start.per_token * math.exp(token),
        per_pair=start.per_pair * math.exp(token),
        prompts=start.prompts * math.exp(token),
        per_read=start.per_read * math.exp(read),
    )


def fit_step_cost(evidence: TrafficEvidence, limits: EngineLimits) -> CostFit:
    """Fit the step cost of a server with these limits to its evidence."""
    dice = random.Random(len(evidence.arrivals))
    start = step_regression(evidence.steps, limits.graphs)

    noise = step_noise(start, evidence)

    def judged(point: Point) -> tuple[float, Point]:
        return _error(evidence, limits, _cost_at(start, point), noise), point

    center: Point = (0.0,) * len(_WIDTH)
    tried = [judged(center)]
    # Search more widely around a bad start.
    wide = 1 + min(4.0, 10 * tried[0][0])
    width: Point = tuple(wide * one for one in _WIDTH)
    for _ in range(GENERATIONS):
        drawn = [tuple(map(dice.gauss, center, width)) for _ in range(POPULATION)]
        tried = sorted(tried + [judged(point) for point in drawn])
        best = [point for _, point in tried[:ELITE]]
        center = tuple(map(mean, zip(*best, strict=True)))
        width = tuple((one + pstdev(values)) / 2 for one, values in zip(width, zip(*best, strict=True), strict=True))
    limit = tried[0][0] * _NEARLY[1] + _NEARLY[0]
    kept = [point for error, point in tried if error <= limit][:KEPT]
    return CostFit(tuple(_cost_at(start, point) for point in kept), tried[0][0], start)


def step_noise(cost: StepCost, evidence: TrafficEvidence) -> StepNoise:
    """The deviations of steps from their cost over time: other load slows them for a while, or delays a single one.

    No noise if they are insignificant, or if single steps are unknown.
    """
    steps = evidence.steps
    if evidence.ends:
        return NO_NOISE
    modeled = [_modeled(cost, step) for step in steps]
    if median(abs(step.seconds / one - 1) for step, one in zip(steps, modeled, strict=True)) < _QUIET:
        return NO_NOISE
    decode, prefill = (
        tuple(
            (step.at, step.seconds / one, max(0.0, step.seconds - one))
            for step, one in zip(steps, modeled, strict=True)
            if (step.prefills > 0) is wanted
        )
        for wanted in (False, True)
    )
    return StepNoise(decode, prefill, steps[-1].at + steps[-1].seconds)


def replayed_latencies(evidence: TrafficEvidence, found: Replayed) -> tuple[Sequence[Weighted], ...]:
    """TTFT, ITL and end-to-end times in the engine, of the evaluated requests of a replay."""
    judged = [one for one in found.requests[evidence.first : evidence.end] if one is not None]
    return (
        each_once(one.ttft_seconds for one in judged),
        found.intervals,
        each_once(one.e2e_seconds for one in judged),
    )


def _error(evidence: TrafficEvidence, limits: EngineLimits, cost: StepCost, noise: StepNoise) -> float:
    """The typical relative error of a replay's latencies; all three latencies have equal weight."""
    found = replay_traffic(evidence.arrivals, limits, cost, noise, since=evidence.since, until=evidence.until)
    errors = []
    for known, values in zip(
        (evidence.ttft, evidence.itl, evidence.e2e), replayed_latencies(evidence, found), strict=True
    ):
        if known.mean is None:
            continue
        if not values:
            return math.inf
        replayed = weighted_quantiles(values, [share for share, _ in known.points])
        pairs = [(one, seconds) for one, (_, seconds) in zip(replayed, known.points, strict=True)]
        pairs += known.weight * [(weighted_mean(values), known.mean)]
        errors.append(mean(math.log((one + _FLOOR) / (other + _FLOOR)) ** 2 for one, other in pairs))
    return math.sqrt(mean(errors))


# -- the start: a regression on single steps ---------------------------------------------------------------------------

_COLUMNS = ("overhead", "weights", "per_sequence", "per_read", "per_token", "per_pair", "ungraphed", "prompts")
_SIMPLE, _WHOLE = _COLUMNS[:5], _COLUMNS[:7]
_ROUNDS = 6
_MOST_STEPS = 1500
_RIDGE = 1e-6
_EXPLAINS_MORE = 0.7


def step_regression(steps: Sequence[SeenStep], graphs: int = MAX_GRAPH_BATCH) -> StepCost:
    """The step cost by least squares on recorded steps, each limited by memory or by compute, whichever takes longer.

    Effects that only large prefills show (query-key pairs, and the lack of CUDA graphs above ``graphs`` tokens) are
    left out if they explain little, because noise would determine them. So is the extra cost of every step with
    prompts.
    """
    found, whole = (_regression(steps, names, graphs) for names in (_SIMPLE, _WHOLE))
    larger = whole.prefill_error < _EXPLAINS_MORE * found.prefill_error
    found = whole if larger else found
    other = _regression(steps, (*(_WHOLE if larger else _SIMPLE), "prompts"), graphs)
    return (other if other.error < _EXPLAINS_MORE * found.error else found).cost


class _Regression(msgspec.Struct, frozen=True):
    """A step cost, and its typical relative errors: of the steps without prompts, and of those with them."""

    cost: StepCost
    decode_error: float
    prefill_error: float

    @property
    def error(self) -> float:
        return self.decode_error + self.prefill_error


def _regression(steps: Sequence[SeenStep], names: Sequence[str], graphs: int) -> _Regression:
    """The cost with these parameters, the others zero.

    Memory limits steps without prompts. What limits the others follows from the cost, so that is determined
    iteratively, starting with compute. Errors are relative: a long prefill has no more weight than a short step.
    """
    typical = median(step.seconds for step in steps)
    decodes = _thinned([step for step in steps if not step.prefills])
    prefills = _thinned([step for step in steps if step.prefills])
    used = decodes + prefills
    # Decode steps are many and similar: give both kinds equal weight.
    weight = min(10.0, math.sqrt(max(1, len(decodes)) / max(1, len(prefills))))
    usual = {bool(kind[0].prefills): median(step.seconds for step in kind) for kind in (decodes, prefills) if kind}
    expected = [usual[bool(step.prefills)] for step in used]
    by_memory = [not step.prefills for step in used]
    columns = [_COLUMNS.index(name) for name in names]
    cost = StepCost(typical, graphs=graphs)
    for _ in range(_ROUNDS):
        by = [(weight if step.prefills else 1.0) / one for step, one in zip(used, expected, strict=True)]
        rows = [_row(step, memory, graphs) for step, memory in zip(used, by_memory, strict=True)]
        scaled = [[row[place] * factor for place in columns] for row, factor in zip(rows, by, strict=True)]
        wanted = [step.seconds * factor for step, factor in zip(used, by, strict=True)]
        cost = StepCost(**dict(zip(names, _not_negative(scaled, wanted), strict=True)), graphs=graphs)
        if not cost.overhead + cost.weights:
            cost = replace(cost, overhead=0.02 * typical)
        used = [*_without_outliers(cost, decodes), *_without_outliers(cost, prefills)]
        expected = [_modeled(cost, step) for step in used]
        by_memory = [not step.prefills or _reads_longer(cost, step) for step in used]
    errors = [median([_off(cost, step) for step in kind]) if kind else 0.0 for kind in (decodes, prefills)]
    return _Regression(cost, errors[0], errors[1] if prefills else errors[0])


def _reads_longer(cost: StepCost, step: SeenStep) -> bool:
    return cost.weights + cost.per_read * step.reads >= cost.per_token * step.tokens + cost.per_pair * step.pairs


def _off(cost: StepCost, step: SeenStep) -> float:
    """A step's deviation from its cost, as a logarithm, so that too short and too long count equally."""
    return abs(math.log(_modeled(cost, step) / step.seconds))


def _thinned(steps: Sequence[SeenStep]) -> list[SeenStep]:
    """An even selection of steps, if there are many."""
    return list(steps[:: -(-len(steps) // _MOST_STEPS) or 1])


def _without_outliers(cost: StepCost, steps: Sequence[SeenStep]) -> list[SeenStep]:
    """The steps of one kind, without those disturbed by something else."""
    errors = [_off(cost, step) for step in steps]
    limit = max(4 * median(errors), 0.002) if errors else 0.0
    return [step for step, error in zip(steps, errors, strict=True) if error <= limit]


def _row(step: SeenStep, by_memory: bool, graphs: int) -> tuple[float, ...]:
    large, prompts = float(step.tokens > graphs), float(step.tokens > step.sequences)
    if by_memory:
        return 1.0, 1.0, float(step.sequences), step.reads, 0.0, 0.0, large, prompts
    return 1.0, 0.0, float(step.sequences), 0.0, float(step.tokens), step.pairs, large, prompts


def _modeled(cost: StepCost, step: SeenStep) -> float:
    return cost.seconds(step.sequences, step.tokens, step.reads, step.pairs)


def _not_negative(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Nonnegative least squares: columns that would get a negative weight are left out."""
    width = len(rows[0])
    columns = [column for column in range(width) if any(row[column] for row in rows)]
    while columns:
        solved = _least_squares([[row[column] for column in columns] for row in rows], values)
        if min(solved) >= 0:
            weights = [0.0] * width
            for column, weight in zip(columns, solved, strict=True):
                weights[column] = weight
            return weights
        columns.pop(min(range(len(columns)), key=lambda place: solved[place] * _norm(rows, columns[place])))
    return [0.0] * width


def _norm(rows: Sequence[Sequence[float]], column: int) -> float:
    return math.sqrt(sum(row[column] ** 2 for row in rows))


def _least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Solve the normal equations, scaled by column. Indistinguishable columns share their effect equally."""
    width = len(rows[0])
    scale = [_norm(rows, i) or 1.0 for i in range(width)]
    columns = [[row[i] / scale[i] for row in rows] for i in range(width)]
    matrix = [
        [math.fsum(map(mul, one, other)) for other in columns] + [math.fsum(map(mul, one, values))] for one in columns
    ]
    for i in range(width):
        matrix[i][i] += _RIDGE
    for i in range(width):
        pivot = max(range(i, width), key=lambda row: abs(matrix[row][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for j in range(width):
            if j != i:
                factor = matrix[j][i] / matrix[i][i]
                matrix[j] = [one - factor * other for one, other in zip(matrix[j], matrix[i], strict=True)]
    return [matrix[i][width] / matrix[i][i] / scale[i] for i in range(width)]
