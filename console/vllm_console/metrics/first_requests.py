"""The first requests of a run without warm-up: kernels are compiled for them, so they are not representative.

Pure: times come from the samples.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm_console.metrics.sample import Sample
from vllm_console.metrics.window import combine

MOST_SECONDS = 300.0
"""This long after the first of them arrived they count like any others: it is not compilation then."""

COMPILED_SECONDS = 3.0
"""If a token comes sooner, no significant compilation happened, and they count like any others."""


class FirstRequests:
    """Follows one run from its first sample: until as many requests have ended as waited for the first token.

    Already over for a run that had served something at the first sample, or does not report how many ended.
    """

    def __init__(self) -> None:
        self.over = False
        self.since: float | None = None
        """When the first of them was seen running (Unix seconds)."""
        self.answered = False
        """Whether a token has come."""
        self.compiled = False
        """Whether they waited long enough for it that kernels were compiled."""
        self._held = 1.0
        self._started = False

    def add(self, sample: Sample) -> bool:
        """Add the next sample; returns whether they are over."""
        if not self.over:
            self.over = self._ends_with(sample)
        return self.over

    def _ends_with(self, sample: Sample) -> bool:
        total = combine(sample.engines.values())
        ended, tokens = total.requests_finished_total, total.generation_tokens_total
        first, self._started = not self._started, True
        if ended is None or (first and (ended or tokens)):
            return True
        if self.since is None and total.requests_running:
            self.since = sample.at
        waited = sample.at - self.since if self.since is not None else 0.0
        if not tokens and not ended:
            self._held = max(self._held, (total.requests_running or 0.0) + (total.requests_waiting or 0.0))
            self.compiled = waited >= COMPILED_SECONDS
            return waited > MOST_SECONDS
        self.answered = True
        return not self.compiled or ended >= self._held or waited > MOST_SECONDS


def traffic(samples: Iterable[Sample]) -> list[Sample]:
    """The samples of one run, oldest first, without those in which kernels were compiled for its first requests."""
    first, kept = FirstRequests(), list[Sample]()
    for sample in samples:
        over = first.over
        first.add(sample)
        if not over and first.compiled:
            kept.clear()
        kept.append(sample)
    return kept if first.over or not first.compiled else []
