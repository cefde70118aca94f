"""The results of a load: counts, failures by kind, and latencies as measured by the client."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from vllm_console.text import rate, took
from vllm_console.text import seconds as latency_text
from vllm_launchers.units import counted

CLIENT_LATENCIES = ("ttft", "tpot", "itl", "e2e", "send_delay")
_COUNTS = (
    "sent", "completed", "failed", "prompt_tokens", "output_tokens", "held_back", "cut_off", "overdue", "other_prompt",
    "other_output",
)  # fmt: skip

SAMPLES_KEPT = 100_000
KINDS_KEPT = 20

LATE_SECONDS = 0.25
"""A request that is sent this long after it was due is late."""


class Times(NamedTuple):
    """Times of one answer, in seconds; ``tpot`` is None if it had one token."""

    ttft: float
    tpot: float | None
    e2e: float


class Latency(msgspec.Struct, frozen=True):
    """Observations of one latency, in seconds.

    ``count`` and ``sum`` cover those that ended. ``unfinished`` ones had not ended when the load did: only their lower
    bounds are known. A quantile that depends on one of them is None, and its lower bound is in ``above``.
    """

    count: int = 0
    sum: float = 0.0
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    unfinished: int = 0
    above: Mapping[str, float] = msgspec.field(default_factory=dict)

    @property
    def mean(self) -> float | None:
        """The mean in seconds; None without observations, and while some are unfinished."""
        return self.sum / self.count if self.count and not self.unfinished else None

    def document(self) -> dict[str, float | None]:
        """The JSON contract; ``p99_above`` and the like appear only beside a quantile that is null."""
        known = {"count": self.count, "sum": self.sum, "mean": self.mean, "unfinished": self.unfinished}
        quantiles = {"p50": self.p50, "p90": self.p90, "p99": self.p99}
        return known | quantiles | {f"{name}_above": bound for name, bound in self.above.items()}

    def cell(self, name: str) -> str:
        """A quantile as text: ``24ms``, or ``>60s`` if only a lower bound is known."""
        if name in self.above:
            return f">{latency_text(self.above[name])}"
        return latency_text({"p50": self.p50, "p90": self.p90, "p99": self.p99}[name])


def sorted_quantile(ordered: list[float], share: float) -> float:
    """The quantile of sorted values, with linear interpolation between neighbors (numpy's default)."""
    place = share * (len(ordered) - 1)
    low = int(place)
    between = place - low
    if not between:
        return ordered[low]
    return ordered[low] + (ordered[low + 1] - ordered[low]) * between if ordered[low] < math.inf else math.inf


class Samples:
    """Observations in bounded memory: all of them up to ``limit``, then a uniform sample (reservoir sampling).

    Counts and sum stay exact; quantiles are exact up to ``limit``. Observations ``within`` and ``beyond`` the
    ``bound``, in seconds, are also counted; unfinished ones are never within.
    """

    def __init__(self, limit: int = SAMPLES_KEPT, seed: int = 0, bound: float = math.inf) -> None:
        self._limit = limit
        self._bound = bound
        self._rng = random.Random(seed)
        self._kept: list[float] = []
        self._unfinished: set[int] = set()
        """Indices in ``_kept`` of values that are lower bounds."""
        self.count = 0
        self.sum = 0.0
        self.unfinished = 0
        self.within = self.beyond = 0

    def add(self, value: float) -> None:
        """Add one observation, in seconds."""
        self.count += 1
        self.sum += value
        if value <= self._bound:
            self.within += 1
        else:
            self.beyond += 1
        if (slot := self._keep(value)) is not None:
            self._unfinished.discard(slot)

    def add_unfinished(self, value: float) -> None:
        """Add an observation that had lasted ``value`` seconds when the load ended, a lower bound."""
        self.unfinished += 1
        self.beyond += value > self._bound
        if (slot := self._keep(value)) is not None:
            self._unfinished.add(slot)

    def _keep(self, value: float) -> int | None:
        """Store a value; return its index, or None if the sampling drops it."""
        if len(self._kept) < self._limit:
            self._kept.append(value)
            return len(self._kept) - 1
        slot = self._rng.randrange(self.count + self.unfinished)
        if slot >= self._limit:
            return None
        self._kept[slot] = value
        return slot

    def latency(self, quantile: Callable[[list[float], float], float] = sorted_quantile) -> Latency:
        """Counts, sum and quantiles of the observations; ``quantile`` computes one of sorted values.

        With `metrics.quantile.exact_quantile`, the p99 is within a limit exactly if 99% of the observations are.
        """
        least = sorted(self._kept)
        most = sorted(math.inf if at in self._unfinished else value for at, value in enumerate(self._kept))
        known: dict[str, float | None] = {"p50": None, "p90": None, "p99": None}
        above: dict[str, float] = {}
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)) if least else ():
            bound = quantile(least, share)
            if quantile(most, share) == bound:
                known[name] = bound
            else:
                above[name] = bound
        return Latency(self.count, self.sum, **known, unfinished=self.unfinished, above=above)


class LoadReport(msgspec.Struct, frozen=True):
    """A finished load. ``sent`` = ``completed`` + ``failed``; ``failures`` counts the failed by kind.

    ``duration_s`` is from the start of the load to the last answer, or to its end. ``held_back`` requests were sent
    late because ``max_in_flight`` others were in flight, ``not_sent`` never. ``unfinished`` requests had no complete
    answer at the end: failed ones that were cut off, and ``overdue`` ones, scheduled but never sent. TTFT and e2e count
    from the scheduled arrival; ``send_delay`` is the part before the request was sent. ``other_prompt`` and
    ``other_output`` count lengths that differ from the requested ones, by the server's own count.
    """

    sent: int
    completed: int
    failed: int
    duration_s: float
    output_tokens: int
    ttft: Latency
    itl: Latency
    e2e: Latency
    failures: Mapping[str, int] = msgspec.field(default_factory=dict)
    held_back: int = 0
    not_sent: int = 0
    tpot: Latency = msgspec.field(default_factory=Latency)
    send_delay: Latency = msgspec.field(default_factory=Latency)
    prompt_tokens: int = 0
    cut_off: int = 0
    overdue: int = 0
    other_prompt: int = 0
    other_output: int = 0
    stopped: bool = False
    shape: str = ""
    """A description of the traffic sent."""

    @property
    def unfinished(self) -> int:
        """Requests that were due and had no complete answer when the load ended."""
        return self.cut_off + self.overdue

    @property
    def failed_share(self) -> float:
        """Share of due requests that failed or were never sent; those cut off by the user's stop do not count."""
        if self.stopped:
            judged, failed = self.sent - self.cut_off, self.failed - self.cut_off
        else:
            judged, failed = self.sent + self.overdue, self.failed + self.overdue
        return failed / judged if judged else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens per second over the whole load."""
        return self.output_tokens / self.duration_s if self.duration_s > 0 else None

    @property
    def failure(self) -> str:
        """The failures, most frequent first, in one line; empty if there are none."""
        kinds = sorted(self.failures.items(), key=lambda kind: -kind[1])
        return "; ".join(kind if count == 1 else f"{kind} ({count} times)" for kind, count in kinds)

    def document(self) -> dict[str, Any]:
        """The JSON contract of ``vllm-console load --json``."""
        counts = ("sent", "completed", "failed", "unfinished", "not_sent", "held_back")
        sizes = ("shape", "duration_s", "prompt_tokens", "output_tokens")
        return {
            **{name: getattr(self, name) for name in counts},
            "failures": dict(self.failures),
            **{name: getattr(self, name) for name in sizes},
            "output_tokens_per_s": self.tokens_per_second,
            "other_length": {"prompt": self.other_prompt, "output": self.other_output},
            **{f"{name}_seconds": getattr(self, name).document() for name in CLIENT_LATENCIES},
        }

    def summary(self) -> str:
        """A few lines of text."""
        lines = [self.shape] if self.shape else []
        lines += [
            f"{self.completed:,} of {counted(self.sent, 'request')} answered in {took(self.duration_s)}, "
            f"{self.output_tokens:,} tokens, {rate(self.tokens_per_second, 'tok')}",
            f"{'':12} {'mean':>8} {'p50':>8} {'p90':>8} {'p99':>8}",
        ]
        rows = (("TTFT", self.ttft), ("TPOT", self.tpot), ("ITL", self.itl), ("end-to-end", self.e2e))
        for title, latency in (*rows, ("send delay", self.send_delay)):
            cells = (latency_text(latency.mean), *(latency.cell(name) for name in ("p50", "p90", "p99")))
            line = f"{title:12} {' '.join(f'{cell:>8}' for cell in cells)}"
            lines.append(f"{line}  between events, which may have several tokens" if title == "ITL" else line)
        return "\n".join(lines + self._remarks())

    def _remarks(self) -> list[str]:
        remarks = (
            (
                self.cut_off,
                "request",
                "unfinished when the load ended: counted as failed and as longer in the latencies",
            ),
            (self.overdue, "request", "due but not sent when the load ended: counted as longer in the latencies"),
            (self.held_back, "request", "sent late: the limit of requests in flight was reached"),
            (self.not_sent, "request", "of the schedule never sent: the load ended first"),
            (self.other_prompt, "prompt", "with a different length than requested, by the server's count"),
            (
                self.other_output,
                "answer",
                "with a different length than requested: the server stops or limits them itself",
            ),
        )
        lines = [f"{counted(number, thing)} {words}" for number, thing, words in remarks if number]
        return [*lines, f"failed: {self.failure}"] if self.failed else lines


class Tally:
    """Tallies a load while it runs. Answers with TTFT and TPOT within ``limits`` are ``good``.

    ``limits`` in seconds are that of TTFT, and that of ITL and TPOT.
    """

    def __init__(self, seed: int = 0, limits: tuple[float, float] = (math.inf, math.inf)) -> None:
        self._limits = limits
        self.answers: dict[int, Times] | None = None
        """If not None, the times of each finished answer, by its index in the load."""
        self.good = 0
        self.sent = self.completed = self.held_back = self.cut_off = self.overdue = 0
        self.prompt_tokens = self.output_tokens = self.other_prompt = self.other_output = 0
        self.failures: Counter[str] = Counter()
        self.ttft = Samples(seed=seed, bound=limits[0])
        self.tpot = Samples(seed=seed)
        self.itl = Samples(seed=seed, bound=limits[1])
        self.e2e = Samples(seed=seed)
        self.send_delay = Samples(seed=seed, bound=LATE_SECONDS)

    def finish(self, place: int, ttft: float, tpot: float | None, e2e: float) -> None:
        """Count the times (seconds) of a finished answer; ``tpot`` is None if it had one token."""
        if self.answers is not None:
            self.answers[place] = Times(ttft, tpot, e2e)
        self.e2e.add(e2e)
        if tpot is not None:
            self.tpot.add(tpot)
        self.good += ttft <= self._limits[0] and (tpot or 0.0) <= self._limits[1]

    def fail(self, kind: str) -> None:
        """Count a failed request, with a one-sentence reason. After the first few, new reasons are counted together."""
        known = kind in self.failures or len(self.failures) < KINDS_KEPT
        self.failures[kind if known else "other reasons"] += 1

    def never_sent(self, waits: Sequence[float]) -> None:
        """Count scheduled requests that were never sent; ``waits``: seconds from due time to the end of the load."""
        self.overdue += len(waits)
        for waited in waits:
            for samples in (self.ttft, self.e2e, self.send_delay):
                samples.add_unfinished(waited)

    @property
    def failed(self) -> int:
        """Number of failed requests so far."""
        return self.failures.total()

    @property
    def in_flight(self) -> int:
        """Number of requests in flight."""
        return self.sent - self.completed - self.failed

    def report(self, duration_s: float, planned: int, *, stopped: bool = False, shape: str = "") -> LoadReport:
        """The report of a load of ``planned`` requests that took ``duration_s``; ``stopped``: a user ended it."""
        counts = {name: getattr(self, name) for name in _COUNTS}
        latencies = {name: getattr(self, name).latency() for name in CLIENT_LATENCIES}
        return LoadReport(
            **counts,
            **latencies,
            duration_s=duration_s,
            failures=dict(self.failures),
            not_sent=max(0, planned - self.sent),
            stopped=stopped,
            shape=shape,
        )
