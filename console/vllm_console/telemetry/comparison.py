"""What a comparison of two runs comes to: the answer's shape. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from vllm_console.telemetry.ledger import FlagChange, Run


class Verdict(StrEnum):
    """What can be said of a change. `MIXED` is for the whole only: some figures are better, others worse."""

    BETTER = "better"
    WORSE = "worse"
    MIXED = "mixed"
    NO_DIFFERENCE = "no difference seen"
    NOT_COMPARABLE = "not comparable"
    TOO_LITTLE = "too little data"


class Likeness(StrEnum):
    """How alike something of the traffic was."""

    ALIKE = "alike"
    ROUGHLY = "roughly alike"
    DIFFERENT = "different"
    UNKNOWN = "not reported"


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure before and after: medians over windows, in ``unit`` (``s``, ``/s``, ``share``, ``/min``).

    ``change`` is after minus before, ``low`` and ``high`` hold it with all judged figures together at 95 %. ``verdict``
    is None for figures that are only shown. ``goal`` is the objective, where there is one.
    """

    key: str
    name: str
    unit: str
    before: float | None
    after: float | None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    verdict: Verdict | None = None
    goal: float | None = None

    def share(self, value: float | None) -> float | None:
        """A change as a share of the figure before; None where that is nothing."""
        return value / self.before if value is not None and self.before else None

    @property
    def meets(self) -> tuple[bool, bool] | None:
        """Whether the objective was met before, and after."""
        if self.goal is None or self.before is None or self.after is None:
            return None
        return self.before <= self.goal, self.after <= self.goal


@dataclass(frozen=True, slots=True)
class Factor:
    """One side of the traffic before and after, as medians over windows."""

    key: str
    name: str
    unit: str
    before: float | None
    after: float | None
    likeness: Likeness

    @property
    def change(self) -> float | None:
        """By what share it was more afterwards."""
        return (self.after - self.before) / self.before if self.before and self.after is not None else None


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two runs: how many windows it has, were compared, and are still needed, and how long each is."""

    run: Run
    windows: int
    compared: int
    missing: int
    seconds: float

    @property
    def minutes_missing(self) -> float:
        """How many more minutes of traffic are needed."""
        return self.missing * self.seconds / 60


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs side by side. ``sentence`` is the verdict in words; ``notes`` what to bear in mind, one sentence each.

    ``traffic`` says how alike the traffic was as a whole. ``differences`` are what the two ran with: flags, and
    ``model``, ``engine`` or ``GPUs`` where these differ.
    """

    before: Side
    after: Side
    verdict: Verdict
    sentence: str
    traffic: Likeness
    factors: tuple[Factor, ...]
    figures: tuple[Figure, ...]
    differences: tuple[FlagChange, ...]
    notes: tuple[str, ...] = ()

    @property
    def judged(self) -> tuple[Figure, ...]:
        """The figures that the verdict rests on."""
        return tuple(figure for figure in self.figures if figure.verdict is not None)
