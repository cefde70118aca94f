"""The prompt tokens of slow engine steps, which show whether prompts made them slow. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from vllm_console.history.probe_records import EngineStep

TOGETHER_SECONDS = 0.005
"""Records of one step differ by less than this: several API servers each record the tokens of their own requests."""


class SlowSteps(msgspec.Struct, frozen=True):
    """The prompt tokens that each slow step computed."""

    prompt_tokens: tuple[float, ...] = ()

    def share_above(self, limit: float) -> float:
        """Fraction of the slow steps that computed more prompt tokens than this; 0 without steps."""
        return sum(tokens > limit for tokens in self.prompt_tokens) / max(1, len(self.prompt_tokens))


def slow_steps_of(steps: Sequence[EngineStep], limit: float, most: float) -> SlowSteps:
    """The steps that took longer than ``limit`` seconds; ``steps`` are in order of time.

    A prompt is counted in the step that completes it. It was computed in that step and the ones before, with at most
    ``most`` tokens in each, including one for each running sequence.
    """
    by_engine: dict[int, list[EngineStep]] = defaultdict(list)
    for step in steps:
        by_engine[step.engine].append(step)
    return SlowSteps(tuple(tokens for own in by_engine.values() for tokens in _of_engine(own, limit, most)))


def _of_engine(steps: Sequence[EngineStep], limit: float, most: float) -> list[float]:
    computed = _computed(steps, most)
    times = [step.at for step in steps]
    found, counted = [], 0
    for step in steps:
        took = step.shortest_interval or 0.0  # a request that was preempted waited longer than the step took
        begin = bisect_right(times, step.at - took + TOGETHER_SECONDS, counted)
        end = bisect_right(times, step.at + TOGETHER_SECONDS, counted)
        if took > limit and begin < end:
            found.append(max(computed[begin:end]))
            counted = end
    return found


def _computed(steps: Sequence[EngineStep], most: float) -> list[float]:
    """The prompt tokens that each step computed, including chunks of prompts that later steps completed."""
    if all(step.context_tokens is not None for step in steps):
        return [float(step.context_tokens or 0) for step in steps]
    found, left = [], 0.0
    for step in reversed(steps):
        left += step.prompt_tokens or 0
        part = min(left, max(1.0, most - (step.running or 0)))
        found.append(part)
        left -= part
    return found[::-1]
