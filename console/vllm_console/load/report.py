"""What a load came to: counts, failures by kind, latencies as the client saw them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_console.format import UNKNOWN
from vllm_console.format import seconds as latency_text

SAMPLES_KEPT = 100_000
KINDS_KEPT = 20


@dataclass(frozen=True, slots=True)
class Latency:
    """Observations of one latency: how many, their sum and quantiles, in seconds. No quantiles of nothing: None."""

    count: int = 0
    sum: float = 0.0
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None

    def document(self) -> dict[str, float | None]:
        """As the JSON contract has it."""
        return {"count": self.count, "sum": self.sum, "p50": self.p50, "p90": self.p90, "p99": self.p99}


class Samples:
    """Observations in bounded memory: all of them up to ``limit``, then a uniform choice (reservoir sampling).

    Count and sum stay exact; quantiles are exact up to ``limit``.
    """

    def __init__(self, limit: int = SAMPLES_KEPT, seed: int = 0) -> None:
        self._limit = limit
        self._rng = random.Random(seed)
        self._kept: list[float] = []
        self.count = 0
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Take in one observation, in seconds."""
        self.count += 1
        self.sum += value
        if len(self._kept) < self._limit:
            self._kept.append(value)
        elif (slot := self._rng.randrange(self.count)) < self._limit:
            self._kept[slot] = value

    def latency(self) -> Latency:
        """Count, sum and quantiles of what was added."""
        if not self._kept:
            return Latency()
        ordered = sorted(self._kept)
        return Latency(self.count, self.sum, *(quantile(ordered, share) for share in (0.5, 0.9, 0.99)))


def quantile(ordered: list[float], share: float) -> float:
    """The quantile of sorted values, with linear interpolation between neighbours (numpy's default)."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A load that is over. ``sent`` = ``completed`` + ``failed``; ``failures`` counts the failed by kind.

    ``duration_s`` is from the first request to the last answer. ``held_back`` requests were sent later than they were
    due because ``max_in_flight`` others were under way, ``not_sent`` never. Latencies count from the sending.
    """

    sent: int
    completed: int
    failed: int
    duration_s: float
    output_tokens: int
    ttft: Latency
    itl: Latency
    e2e: Latency
    failures: Mapping[str, int] = field(default_factory=dict)
    held_back: int = 0
    not_sent: int = 0

    @property
    def failure(self) -> str:
        """What failed, the most frequent first, in one line; empty when nothing did."""
        kinds = sorted(self.failures.items(), key=lambda kind: -kind[1])
        return "; ".join(kind if count == 1 else f"{kind} ({count} times)" for kind, count in kinds)

    def document(self) -> dict[str, Any]:
        """The JSON contract of ``vllm-console load --json``."""
        return {
            "sent": self.sent,
            "completed": self.completed,
            "failed": self.failed,
            "duration_s": self.duration_s,
            "output_tokens": self.output_tokens,
            "ttft_seconds": self.ttft.document(),
            "itl_seconds": self.itl.document(),
            "e2e_seconds": self.e2e.document(),
        }

    def summary(self) -> str:
        """A few lines for people."""
        rate = self.output_tokens / self.duration_s if self.duration_s > 0 else None
        tokens = UNKNOWN if rate is None else f"{rate:.1f}" if rate < 100 else f"{rate:.0f}"
        lines = [
            f"{self.completed} of {self.sent} requests answered in {self.duration_s:.1f} s, "
            f"{self.output_tokens} tokens, {tokens} tokens/s",
            f"{'':12} {'p50':>8} {'p90':>8} {'p99':>8}",
        ]
        for title, latency in (("TTFT", self.ttft), ("ITL", self.itl), ("end-to-end", self.e2e)):
            cells = (f"{latency_text(value):>8}" for value in (latency.p50, latency.p90, latency.p99))
            lines.append(f"{title:12} {' '.join(cells)}")
        if self.held_back:
            lines.append(f"{self.held_back} requests were sent late: as many as allowed were under way already")
        if self.not_sent:
            lines.append(f"{self.not_sent} requests were not sent: the load ended before their turn")
        if self.failed:
            lines.append(f"failed: {self.failure}")
        return "\n".join(lines)


class Tally:
    """Counts a load while it runs."""

    def __init__(self, seed: int = 0) -> None:
        self.sent = 0
        self.completed = 0
        self.output_tokens = 0
        self.held_back = 0
        self.failures: Counter[str] = Counter()
        self.ttft = Samples(seed=seed)
        self.itl = Samples(seed=seed)
        self.e2e = Samples(seed=seed)

    def fail(self, kind: str) -> None:
        """One request failed, for a reason in one sentence. Reasons beyond the first few kinds are counted together."""
        known = kind in self.failures or len(self.failures) < KINDS_KEPT
        self.failures[kind if known else "other reasons"] += 1

    @property
    def failed(self) -> int:
        """How many requests failed so far."""
        return self.failures.total()

    @property
    def in_flight(self) -> int:
        """How many requests are under way."""
        return self.sent - self.completed - self.failed

    def report(self, duration_s: float, planned: int) -> LoadReport:
        """The end of it: ``duration_s`` seconds after the first request, of ``planned`` requests."""
        return LoadReport(
            sent=self.sent,
            completed=self.completed,
            failed=self.failed,
            duration_s=duration_s,
            output_tokens=self.output_tokens,
            ttft=self.ttft.latency(),
            itl=self.itl.latency(),
            e2e=self.e2e.latency(),
            failures=dict(self.failures),
            held_back=self.held_back,
            not_sent=max(0, planned - self.sent),
        )
