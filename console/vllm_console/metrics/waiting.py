"""A lower bound for the longest wait in a server's queue. Pure: times come from the samples.

vLLM observes a request's queue time and TTFT when the request is served, so neither includes requests that still wait.
A lower bound follows from what is reported: as long as fewer requests can have left the queue since a sample than
waited in it, one of those still waits. Increases in running, finished and preempted requests indicate requests that
left the queue; so do first tokens. None of these shows a request whose client gave up before the first token. But
before running a request, vLLM looks up its prompt in the prefix cache (kv_cache_manager.py), and each prompt has at
least one token, so at most as many requests were admitted as tokens were looked up. Readmitted requests after a
preemption are not counted there and are not relied on. So the bound is mostly the time since a request was last
admitted, and without prefix caching nothing is known.

vLLM reports nothing about requests whose clients give up while they wait, and does not look up prompts whose own
logprobs are requested. If clients in the queue return with a new request, the bound is how long none has been admitted,
not how long one connection has been open.
"""

from __future__ import annotations

from typing import NamedTuple

from vllm_console.metrics.sample import EngineSample, Sample

GAP_SECONDS = 5.0
"""Samples further apart are not joined: a coarse row of history holds only the longest queue of its step."""

MOST_MARKS = 1000


class _Mark(NamedTuple):
    """A sample's time, and how many requests had entered the queue by then: those that left it and those in it."""

    at: float
    entered: float


class Waits:
    """Follows the queue of one generation from sample to sample."""

    def __init__(self) -> None:
        self._marks: list[_Mark] = []
        self._left = 0.0
        self._preempted = 0.0  # since the queue was last empty: that many in it may leave it again, unseen
        self._last: tuple[float, float] | None = None
        self.longest: float | None = None
        """Lower bound of the longest current wait in seconds; None if unknown or none waits, 0 for a new queue."""

    def clear(self) -> None:
        """Forget everything, for a new generation or after a gap."""
        self._marks.clear()
        self._left, self._preempted, self._last, self.longest = 0.0, 0.0, None, None

    def append(self, sample: Sample, total: EngineSample, grown: EngineSample | None) -> None:
        """Add a sample: ``total`` is its engines merged, ``grown`` the counts since the previous one, if known."""
        running, waiting = total.requests_running, total.requests_waiting
        last = self._last
        if running is None or waiting is None or not total.prefix_cache_queries_total:
            self.clear()  # no prompt was ever looked up: prefix caching is off
            return
        if last is not None:
            left = _left(grown, running - last[1]) if grown is not None and sample.at - last[0] <= GAP_SECONDS else None
            if left is None:
                self.clear()
            else:
                self._left += left
                self._preempted += (grown.preemptions_total if grown is not None else None) or 0.0
        self._last = sample.at, running
        if waiting < 1:
            self._marks.clear()
            self._preempted, self.longest = 0.0, None
            return
        gone = next((i for i, mark in enumerate(self._marks) if mark.entered > self._left), len(self._marks))
        del self._marks[:gone]
        self._marks.append(_Mark(sample.at, waiting - self._preempted + self._left))
        if len(self._marks) > MOST_MARKS:
            del self._marks[1:-1:2]  # keep the first, which is the bound; without the others it only drops sooner
        self.longest = sample.at - self._marks[0].at


def _left(grown: EngineSample, more_running: float) -> float | None:
    """Maximum number of requests that left the queue; None if not reported."""
    looked_up = grown.prefix_cache_queries_total
    if grown.requests_finished_total is None or looked_up is None:
        return None
    first = grown.histograms.get("ttft")
    served = more_running + grown.requests_finished_total + (grown.preemptions_total or 0.0)
    return max(0.0, served, first.count if first is not None else 0.0, looked_up)
