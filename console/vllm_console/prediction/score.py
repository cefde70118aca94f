"""Compares predictions with the measurements after the restart, also as text, and keeps a track record. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from statistics import median

import msgspec
from msgspec.structs import replace

from vllm_console.prediction.drift import drift, front_drift
from vllm_console.prediction.evidence import TrafficEvidence
from vllm_console.prediction.figures import PREDICTED_LATENCIES, Figures, Spread
from vllm_console.prediction.predict import Estimate, Estimates
from vllm_console.text import rate, seconds, took
from vllm_launchers.engine_model.step_cost import StepCost
from vllm_launchers.units import counted

LIKE = 0.25
"""Traffic counts as the predicted one if its rate and lengths differ by at most this share."""
SCORED = ("ttft_seconds.p50", "itl_seconds.p50", "e2e_seconds.p50", "tokens_per_second")
"""The scored figures; for latencies known only to a bucket, the mean is used."""


class Traffic(msgspec.Struct, frozen=True):
    """Requests per second and mean lengths in tokens."""

    requests_per_second: float
    prompt_tokens: float
    output_tokens: float

    @classmethod
    def of(cls, evidence: TrafficEvidence, scale: float = 1.0) -> Traffic:
        """The traffic of recorded requests, at ``scale`` times its rate."""
        judged = evidence.arrivals[evidence.first : evidence.end]
        count = len(judged)
        return cls(
            count / evidence.seconds * scale,
            sum(one.prompt_tokens for one in judged) / count,
            sum(one.output_tokens for one in judged) / count,
        )

    def like(self, other: Traffic) -> bool:
        """Whether the other traffic is similar."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in self.__struct_fields__)
        return all(abs(one - two) <= LIKE * max(one, two) for one, two in pairs)


class KeptPrediction(msgspec.Struct, frozen=True):
    """A stored prediction: when it was made (Unix seconds), for which new flag values and which traffic.

    ``cost`` is the step cost with the change, at the speed before it. Predictions with ``outside`` are not scored.
    After the restart, ``measured`` has the measured figures, unless the traffic was ``unlike``, and ``drift`` how much
    slower the same steps were than before (0.05 is 5%). ``front`` is the seconds that requests spent in the front end
    before the restart, and ``front_drift`` how much longer they spend there after it.
    """

    at: float
    changed: Mapping[str, bool | int | float | str | None]
    predicted: Estimates
    traffic: Traffic
    cost: StepCost
    outside: bool = False
    measured: Figures | None = None
    unlike: bool = False
    drift: float | None = None
    front: float = 0.0
    front_drift: float | None = None
    requests: int = 0
    seconds: float = 0.0
    """Number of measured requests, and the seconds in which they arrived; 0 if unknown."""

    @property
    def settled(self) -> bool:
        """Whether the outcome is known."""
        return self.measured is not None or self.unlike


class TrackRecord(msgspec.Struct, frozen=True):
    """Predictions followed by the restart: their number, median relative error, and the share of measured figures
    within the predicted intervals; None without any.
    """

    predictions: int = 0
    median_error: float | None = None
    covered: float | None = None


def settle(kept: KeptPrediction, evidence: TrafficEvidence) -> KeptPrediction:
    """Add the measurements after the restart."""
    if evidence.flaw or not kept.traffic.like(Traffic.of(evidence)):
        return replace(kept, unlike=True)
    return replace(
        kept,
        measured=_exact(evidence),
        drift=drift(kept.cost, evidence),
        front_drift=front_drift(kept.front, evidence),
        requests=evidence.requests,
        seconds=evidence.seconds,
    )


def _exact(evidence: TrafficEvidence) -> Figures:
    """The exact measurements: without quantiles if only their buckets are known."""
    found = evidence.observed
    if not evidence.ends:
        return found
    return replace(found, **{name: Spread(mean=getattr(found, name).mean) for name in PREDICTED_LATENCIES})


def track_record(kept: Sequence[KeptPrediction]) -> TrackRecord:
    """The accuracy of the settled predictions."""
    errors, inside = [], []
    scored = [one for one in kept if one.measured is not None and not one.outside]
    for one in scored:
        for name in SCORED:
            figure = attrgetter(name)
            if figure(one.measured) is None:
                figure = attrgetter(name.replace("p50", "mean"))
            found = compared(figure(one.predicted), figure(one.measured))
            if found is not None:
                errors.append(found[0])
                inside.append(found[1])
    if not errors:
        return TrackRecord()
    return TrackRecord(len(scored), median(errors), sum(inside) / len(inside))


class PredictionOutcome(msgspec.Struct, frozen=True):
    """A figure as predicted, with its 90% interval, and as measured after the restart; seconds, or tokens/s."""

    name: str
    predicted: float
    low: float
    high: float
    measured: float
    within: bool


def outcomes(kept: KeptPrediction) -> tuple[PredictionOutcome, ...]:
    """Predicted and measured values, for each figure with both; none before it is measured."""
    if kept.measured is None:
        return ()
    found = []
    latencies = [f"{latency}.{part}" for latency in PREDICTED_LATENCIES for part in Spread.__struct_fields__]
    for name in (*latencies, "tokens_per_second"):
        predicted, measured = map(attrgetter(name), (kept.predicted, kept.measured))
        if (known := compared(predicted, measured)) is not None:
            title = name.replace("_seconds.", "_")
            found.append(PredictionOutcome(title, predicted.value, predicted.low, predicted.high, measured, known[1]))
    return tuple(found)


def compared(predicted: Estimate, measured: float | None) -> tuple[float, bool] | None:
    """The relative error, and whether the interval contains the measured value; None if either is unknown."""
    if predicted.value is None or predicted.low is None or predicted.high is None or not measured:
        return None
    return abs(predicted.value / measured - 1), predicted.low <= measured <= predicted.high


TITLES = {
    f"{key}_{part}": f"{title} {part}"
    for key, title in (("ttft", "TTFT"), ("itl", "ITL"), ("e2e", "end-to-end"))
    for part in ("p50", "p90", "p99", "mean")
} | {"tokens_per_second": "tokens/s"}


LEAST_DRIFT = 0.01
"""Smaller differences of the engine's speed are not reported."""


def outcome_lines(kept: KeptPrediction, *, judged: bool = True) -> list[str]:
    """A table of the figures with both values, and sentences; the machine's drift has its own line.

    ``judged``: the runs have been compared. Before that, values are not marked as within or outside.
    """
    if kept.unlike:
        return ["This change was predicted for different traffic than it got, so the prediction can't be scored."]
    lines = [f"  {'':<15}{'PREDICTED':>11}   {'90% INTERVAL':<22}{'MEASURED' if judged else 'SO FAR':>11}"]
    for one in outcomes(kept):
        form = seconds if one.name != "tokens_per_second" else _rate
        interval = f"{form(one.low).removesuffix(' tok/s')} to {form(one.high)}"
        shown = {form(bound) for bound in (one.low, one.high)}  # a value that reads like a bound is not outside
        within = "" if not judged else "within" if one.within or form(one.measured) in shown else "! outside"
        title = TITLES.get(one.name, one.name)
        lines.append(
            f"  {title:<15}{form(one.predicted):>11}   {interval:<22}{form(one.measured):>11}  {within}".rstrip()
        )
    if kept.requests:
        seen = f"{counted(kept.requests, 'request')} that came within {took(kept.seconds)}"
        lines.append(f"Measured over {seen}; the comparison covers other periods.")
    if kept.drift is not None and abs(kept.drift) >= LEAST_DRIFT:
        slower = "slower" if kept.drift > 0 else "faster"
        lines.append(f"Since the restart, the same steps are {abs(kept.drift):.0%} {slower} (machine or engine).")
    if kept.outside:
        lines.append("This prediction was outside the observed range; it does not count in the track record.")
    return lines


def _rate(value: float | None) -> str:
    return rate(value, "tok")
