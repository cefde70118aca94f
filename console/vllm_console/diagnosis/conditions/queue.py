"""Conditions of the queue: more work comes than is done, and what it waits for."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_console.diagnosis.conditions.cures import FULL_STEPS, more_cache, setting
from vllm_console.diagnosis.conditions.rule import Situation, Verdict
from vllm_console.diagnosis.model import Condition, Measure, Remedy, Severity
from vllm_console.format import percent
from vllm_console.telemetry.frames import Frame
from vllm_launchers.plan.model import Changes

GROWTH_FRAMES = 4
LEAST_WAITING = 4.0
"""A queue shorter than this comes and goes."""

AT_THE_LIMIT = 0.95
"""Share of ``max-num-seqs`` from which on the limit is what holds the others back."""


def _growth(frames: Sequence[Frame], at: int) -> Verdict:
    """Whether the queue, at its shortest within each frame, has grown over the last frames."""
    now = frames[at].waiting_min
    if now is None:
        return Verdict.UNKNOWN
    if now < LEAST_WAITING / 2:
        return Verdict.GOOD
    earlier = [frame.waiting_min for frame in frames[max(0, at - GROWTH_FRAMES) : at]]
    known = [value for value in earlier if value is not None]
    if now >= LEAST_WAITING and known and now > min(known) * 1.1 + 1:
        return Verdict.BAD
    return Verdict.BETWEEN


def _measures(situation: Situation) -> tuple[Measure, ...]:
    frame = situation.frames[-1]
    running = f"{frame.running_max or 0:.0f}"
    waiting = f"{frame.waiting_max or 0:.0f}"
    return (
        Measure("waiting", waiting),
        Measure("running", running, str(situation.max_num_seqs), "max-num-seqs"),
        Measure("KV cache usage", percent(frame.usage_max), percent(situation.goals.kv_cache_usage),
                situation.goals_source),
    )  # fmt: skip


class OversubscribedSequences:
    """The queue grows while the KV cache has room: ``max-num-seqs`` holds the others back."""

    code = "oversubscribed_sequences"

    def verdicts(self, situation: Situation) -> Sequence[Verdict]:
        """By growth, where the limit of sequences is reached and the cache is not full."""
        frames = situation.frames
        found = []
        for at, frame in enumerate(frames):
            verdict = _growth(frames, at)
            room = (frame.usage_max or 0.0) <= situation.goals.kv_cache_usage
            limited = (frame.running_max or 0.0) >= AT_THE_LIMIT * situation.max_num_seqs
            found.append(Verdict.GOOD if verdict is Verdict.BAD and not (room and limited) else verdict)
        return found

    def describe(self, situation: Situation, since: float) -> Condition:
        """How many wait, and how many more would fit."""
        frame = situation.frames[-1]
        usage = max(frame.usage_max or 0.0, 0.01)
        fitting = int(situation.max_num_seqs * min(2.0, situation.goals.kv_cache_usage / usage))
        wanted = max(situation.max_num_seqs + 1, fitting // FULL_STEPS * FULL_STEPS)
        why = f"The KV cache has room for about {wanted} sequences of the present length."
        price = "Each stream gets slower (ITL), and the cache fuller."
        symptom = f"The queue grows: {frame.waiting_max or 0:.0f} wait, and only {usage:.0%} of the KV cache is used."
        cause = f"No more than {situation.max_num_seqs} sequences may run at once."
        remedies = (setting("max-num-seqs", wanted, why, price),)
        return Condition(self.code, Severity.WARNING, since, symptom, cause, _measures(situation), remedies)


class OversubscribedMemory:
    """The queue grows and the KV cache is full."""

    code = "oversubscribed_memory"

    def verdicts(self, situation: Situation) -> Sequence[Verdict]:
        """By growth, where the cache is full."""
        frames = situation.frames
        found = []
        for at, frame in enumerate(frames):
            verdict = _growth(frames, at)
            full = (frame.usage_max or 0.0) > situation.goals.kv_cache_usage
            found.append(Verdict.GOOD if verdict is Verdict.BAD and not full else verdict)
        return found

    def describe(self, situation: Situation, since: float) -> Condition:
        """How many wait, and what would hold more."""
        frame = situation.frames[-1]
        symptom = (
            f"The queue grows: {frame.waiting_max or 0:.0f} wait, and the KV cache is {frame.usage_max or 0:.0%} full."
        )
        cause = "More tokens are wanted at once than the KV cache holds: more sequences would only be preempted."
        elsewhere = Remedy(Changes(), "Start a second server on another GPU, or send fewer requests at once.")
        remedies = (*more_cache(situation), elsewhere)
        return Condition(self.code, Severity.CRITICAL, since, symptom, cause, _measures(situation), remedies)


class NotAdmitted:
    """Requests wait and none runs: not one of them finds room."""

    code = "not_admitted"

    def verdicts(self, situation: Situation) -> Sequence[Verdict]:
        """By waiting without running or tokens."""
        found = []
        for frame in situation.frames:
            if frame.waiting_min is None or frame.running_max is None:
                found.append(Verdict.UNKNOWN)
            elif frame.waiting_min >= 1 and frame.running_max == 0 and not frame.grown.generation_tokens_total:
                found.append(Verdict.BAD)
            else:
                found.append(Verdict.GOOD)
        return found

    def describe(self, situation: Situation, since: float) -> Condition:
        """Nothing runs."""
        symptom = f"{situation.frames[-1].waiting_max or 0:.0f} requests wait and none runs."
        cause = "Not even one of them finds room in the KV cache."
        remedies = tuple(more_cache(situation))
        return Condition(self.code, Severity.CRITICAL, since, symptom, cause, _measures(situation), remedies)
