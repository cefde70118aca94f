"""Conditions of the queue: more work comes than is done, and what it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from vllm_console.diagnosis.conditions.cures import (
    AT_THE_LIMIT,
    FOR_SPEED,
    WORTH_MORE,
    chunked,
    elsewhere,
    more_cache,
    more_sequences,
    present,
    quantize,
    setting,
    share_prefixes,
)
from vllm_console.diagnosis.conditions.rolling import MINUTE, mean, observed, p99
from vllm_console.diagnosis.conditions.rule import Situation, Verdict
from vllm_console.diagnosis.model import Condition, Measure, Remedy, Severity
from vllm_console.format import percent, seconds
from vllm_console.telemetry.frames import Frame, merged
from vllm_launchers.plan.model import Changes

GROWTH_FRAMES = 4
LEAST_WAITING = 4.0
"""A queue shorter than this comes and goes."""


class Held(Enum):
    """What those that wait are waiting for."""

    SEQUENCES = "sequences"
    MEMORY = "memory"
    STEPS = "steps"
    """Room in the steps: prompts come faster than they are computed."""


def _growth(frames: Sequence[Frame], at: int) -> Verdict:
    """Whether the queue, at its shortest within each frame, has grown over the last frames."""
    now = frames[at].waiting_min
    if now is None:
        return Verdict.UNKNOWN
    if now < LEAST_WAITING / 2:
        return Verdict.GOOD
    known = [value for frame in frames[max(0, at - GROWTH_FRAMES) : at] if (value := frame.waiting_min) is not None]
    if now >= LEAST_WAITING and known and now > min(known) * 1.1 + 1:
        return Verdict.BAD
    return Verdict.GOOD if known and now < 0.5 * max(known) else Verdict.BETWEEN


def _held_by(situation: Situation, frame: Frame, prompt: float) -> Held:
    """What holds the queue back in a frame; ``prompt`` is a usual prompt's length in tokens."""
    usage = frame.usage_max or 0.0
    if usage * WORTH_MORE > situation.goals.kv_cache_usage:
        return Held.MEMORY
    if (frame.running_max or 0.0) >= AT_THE_LIMIT * situation.most_running:
        return Held.SEQUENCES
    # A request is let in when its whole prompt fits: with long prompts much of the cache stays empty.
    cache = situation.cache_tokens
    room = (1 - usage) * cache if cache is not None else None
    return Held.MEMORY if room is not None and room < prompt else Held.STEPS


def _computes(frame: Frame) -> bool:
    return bool(frame.grown.generation_tokens_total or frame.grown.prompt_tokens_total)


def _verdicts(situation: Situation, held: Held) -> list[Verdict]:
    """By growth, where this is what holds the queue back."""
    frames = situation.frames
    prompts = observed(frames, "prompt_tokens", len(frames))
    found = []
    for at, frame in enumerate(frames):
        verdict = _growth(frames, at)
        if verdict is Verdict.BAD and _held_by(situation, frame, mean(prompts[at]) or 0.0) is not held:
            verdict = Verdict.GOOD
        if verdict is Verdict.BAD and held is Held.STEPS and not _computes(frame):
            verdict = Verdict.BETWEEN  # it seems to hang, or was paused: more computing power is no cure
        found.append(verdict)
    return found


def _queue(situation: Situation) -> str:
    last = situation.last(MINUTE)
    first, now, most = last[0].waiting_min or 0.0, last[-1].waiting_min or 0.0, last[-1].waiting_max or 0.0
    if most < 1:
        return "The queue has just emptied"
    return f"The queue {'grows' if now > first else 'does not empty'}: {most:.0f} wait"


def _measures(situation: Situation) -> list[Measure]:
    frame = situation.frames[-1]
    usage, goal = percent(frame.usage_max), percent(situation.goals.kv_cache_usage)
    measures = [
        Measure("waiting", f"{frame.waiting_max or 0:.0f}"),
        situation.running(frame.running_max or 0.0),
        Measure("KV cache usage", usage, goal, situation.goals_source),
    ]
    queued = merged(situation.last(MINUTE), "queue")
    if (longest := p99(queued)) is not None:
        measures.append(Measure("time in the queue, p99", seconds(longest)))
    return measures


class OversubscribedSequences:
    """The queue grows while the KV cache has room: ``max-num-seqs`` holds the others back."""

    code = "oversubscribed_sequences"

    def verdicts(self, situation: Situation) -> Sequence[Verdict]:
        """By growth, where the limit of sequences is reached and the cache is not full."""
        return _verdicts(situation, Held.SEQUENCES)

    def describe(self, situation: Situation, since: float) -> Condition:
        """How many wait, and how many more would fit."""
        limit = situation.max_num_seqs
        usage = max((one.usage_max or 0.0 for one in situation.last(MINUTE)), default=0.0)
        symptom = f"{_queue(situation)}, and {usage:.0%} of the KV cache is used."
        cause = f"No more than {limit} sequences may run at once{situation.each}."
        remedies = present((more_sequences(situation), elsewhere(situation)))
        measures = tuple(_measures(situation))
        return Condition(self.code, Severity.WARNING, since, symptom, cause, measures, remedies)


class OversubscribedMemory:
    """The queue grows and the KV cache has no room for the next request."""

    code = "oversubscribed_memory"

    def verdicts(self, situation: Situation) -> Sequence[Verdict]:
        """By growth, where the cache is full."""
        return _verdicts(situation, Held.MEMORY)

    def describe(self, situation: Situation, since: float) -> Condition:
        """How many wait, and what would hold more."""
        symptom = f"{_queue(situation)}, and the KV cache is {situation.frames[-1].usage_max or 0:.0%} full."
        cause = "More tokens are wanted at once than the KV cache holds: more sequences would only be preempted."
        remedies = (*more_cache(situation), elsewhere(situation))
        measures = tuple(_measures(situation))
        return Condition(self.code, Severity.CRITICAL, since, symptom, cause, measures, remedies)


class OversubscribedCompute:
    """The queue grows though there is room for sequences and for tokens: the GPU cannot compute the prompts in time."""

    code = "oversubscribed_compute"

    def verdicts(self, situation: Situation) -> Sequence[Verdict]:
        """By growth, where neither the limit of sequences nor the cache holds the others back."""
        return _verdicts(situation, Held.STEPS)

    def describe(self, situation: Situation, since: float) -> Condition:
        """How many wait, and what makes prompts cheaper."""
        symptom = f"{_queue(situation)}, though sequences and KV cache have room."
        cause = "Prompts come faster than the GPU computes them."
        offered = present((quantize(situation, FOR_SPEED), share_prefixes(situation), chunked(situation)))
        measures = tuple(_measures(situation))
        return Condition(self.code, Severity.WARNING, since, symptom, cause, measures, (*offered, elsewhere(situation)))


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
        """Nothing runs: a context that the cache cannot hold keeps them out, else somebody has stopped the engine.

        vLLM refuses to start where one full context does not fit; older ones look only at memory, and not at
        ``num-gpu-blocks-override``. With ``/pause`` and ``/sleep`` it lets nobody in (tried on 0.32).
        """
        frame, context = situation.frames[-1], situation.max_model_len
        waiting = round(frame.waiting_max or 0)
        symptom = "1 request waits and none runs." if waiting == 1 else f"{waiting} requests wait and none runs."
        if frame.running_max:
            symptom = "Requests waited while none ran; now some run again."
        cache, each = situation.cache_tokens, situation.each
        measures = tuple(_measures(situation))
        if cache is not None and context is not None and context > cache:
            held = f"the KV cache holds {cache:,}{each}"
            cause = f"A request may have {context:,} tokens, and {held}: the first finds no room."
            remedies = (*more_cache(situation), self._shorter(cache))
        else:
            cause = "They would find room: the engine was paused or put to sleep, or waits for something itself."
            wake = "If it was paused or put to sleep, let it go on: POST /resume, or /wake_up. Else restart it."
            remedies = (
                Remedy(Changes(), wake, "With a restart those that wait are lost."),
                *present((chunked(situation),)),
            )
        return Condition(self.code, Severity.CRITICAL, since, symptom, cause, measures, remedies)

    @staticmethod
    def _shorter(cache: int) -> Remedy:
        why = "What never fits is then refused at once, and holds up nobody."
        return setting("max-model-len", cache // 16 * 16, why, "Longer requests are refused.")
