"""Queue findings: more work arrives than is done, and what requests wait for.

They begin while the queue grows, and stay until it is short.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from vllm_console.diagnosis.finding import Finding, Fix, Measure, Severity
from vllm_console.diagnosis.live.fixes import (
    AT_THE_LIMIT,
    FOR_SPEED,
    chunked,
    more_cache,
    more_capacity,
    more_sequences,
    no_more_sequences,
    present,
    quantize,
    reduce_load,
    setting,
    share_prefixes,
    slow_steps,
)
from vllm_console.diagnosis.live.frame_sums import MINUTE, mean, observed
from vllm_console.diagnosis.live.rule import Evidence, Judgment, Rule
from vllm_console.history.frames import Frame
from vllm_console.text import percent, seconds
from vllm_launchers.vllm.flags.changes import Changes

GROWTH_FRAMES = 4
LEAST_WAITING = 4.0
"""Shorter queues come and go."""


class Bottleneck(Enum):
    """What waiting requests wait for."""

    SEQUENCES = "sequences"
    MEMORY = "memory"
    STEPS = "steps"
    """Prefill capacity: prompts arrive faster than they are computed."""


def _growth(frames: Sequence[Frame], at: int) -> Judgment:
    """Whether the queue, at its shortest within each frame, grew over the last frames."""
    now = frames[at].waiting_min
    if now is None:
        return Judgment.UNKNOWN
    if now < LEAST_WAITING / 2:
        return Judgment.FAILS
    known = [value for frame in frames[max(0, at - GROWTH_FRAMES) : at] if (value := frame.waiting_min) is not None]
    if now >= LEAST_WAITING and known and now > min(known) * 1.1 + 1:
        return Judgment.HOLDS
    return Judgment.FAILS if known and now < 0.5 * max(known) else Judgment.UNCLEAR


def _bottleneck_of(evidence: Evidence, frame: Frame, prompt: float) -> Bottleneck:
    """What limits the queue in a frame; ``prompt`` is a typical prompt's length in tokens."""
    usage = frame.usage_max or 0.0
    if usage > evidence.objectives.kv_cache_usage or frame.grown.preemptions_total:
        return Bottleneck.MEMORY
    if (frame.running_max or 0.0) >= AT_THE_LIMIT * evidence.most_running:
        return Bottleneck.SEQUENCES
    # A request is admitted when its whole prompt fits, so with long prompts much of the cache stays empty.
    cache = evidence.cache_tokens
    room = (1 - usage) * cache if cache is not None else None
    return Bottleneck.MEMORY if room is not None and room < prompt else Bottleneck.STEPS


def _prompts(frames: Sequence[Frame]) -> list[float]:
    """Per frame, the mean length of all prompts up to it, in tokens."""
    return [mean(one) or 0.0 for one in observed(frames, "prompt_tokens", len(frames))]


def _newest(evidence: Evidence, bottleneck: Bottleneck) -> tuple[Frame, float]:
    """The newest frame with this bottleneck, as proof, and the mean prompt length in tokens at that time."""
    found = list(zip(evidence.frames, _prompts(evidence.frames), strict=True))
    limited = (one for one in reversed(found) if _bottleneck_of(evidence, *one) is bottleneck)
    return next(limited, found[-1])


def _computes(frame: Frame) -> bool:
    return bool(frame.grown.generation_tokens_total or frame.grown.prompt_tokens_total)


def _verdicts(evidence: Evidence, bottleneck: Bottleneck) -> list[Judgment]:
    """Judge by the queue's growth, if this is the bottleneck."""
    frames = evidence.frames
    prompts = _prompts(frames)
    found = []
    for at, frame in enumerate(frames):
        verdict = _growth(frames, at)
        waits = verdict in (Judgment.HOLDS, Judgment.UNCLEAR)
        if waits and _bottleneck_of(evidence, frame, prompts[at]) is not bottleneck:
            verdict = Judgment.FAILS
        if verdict is Judgment.HOLDS and bottleneck is Bottleneck.STEPS and not _computes(frame):
            verdict = Judgment.UNCLEAR  # it seems to hang, or was paused: more compute would not help
        found.append(verdict)
    return found


def _queue(evidence: Evidence) -> str:
    last = evidence.last(MINUTE)
    first, now, most = last[0].waiting_min or 0.0, last[-1].waiting_min or 0.0, last[-1].waiting_max or 0.0
    if most < 1:
        return "The queue just emptied"
    trend = "grows" if now > first else "shrinks" if now < first else "is not shrinking"
    return f"The queue {trend}: {most:.0f} waiting"


def _measures(evidence: Evidence, frame: Frame) -> list[Measure]:
    usage, most = frame.usage_max, evidence.objectives.kv_cache_usage
    measures = [
        Measure("waiting", f"{frame.waiting_max or 0:.0f}"),
        evidence.running(frame.running_max or 0.0),
        Measure("KV cache usage", percent(usage), percent(most), evidence.objectives_source, (usage or 0.0) <= most),
    ]
    if (longest := evidence.latency("queue").p99) is not None:
        # Requests are counted when they end, so those waiting now are not included.
        measures.append(Measure("queue time p99 (finished requests)", longest.text))
    return measures


class OversubscribedSequences(Rule):
    """Requests wait although the KV cache has room: ``max-num-seqs`` is the limit."""

    code = "oversubscribed_sequences"
    explained_by = ("not_admitted", "uneven_ranks")
    of_traffic = of_the_last_minute = True

    def verdicts(self, evidence: Evidence) -> Sequence[Judgment]:
        """Judge by growth, if the sequence limit is reached and the cache is not full."""
        return _verdicts(evidence, Bottleneck.SEQUENCES)

    def describe(self, evidence: Evidence, since: float) -> Finding:
        """How many requests wait, and how many more would fit."""
        limit = evidence.max_num_seqs
        frame, _ = _newest(evidence, Bottleneck.SEQUENCES)
        symptom = f"{_queue(evidence)}, with {percent(frame.usage_max)} of the KV cache in use."
        cause = f"At most {limit} sequences run at once{evidence.each} (max-num-seqs).{no_more_sequences(evidence)}"
        fixes = present((more_sequences(evidence), reduce_load(evidence)))
        measures = _measures(evidence, frame)
        if (itl := slow_steps(evidence)) is not None:
            objective = evidence.objectives.itl_p99_seconds
            source = evidence.objectives_source
            measures.insert(1, Measure("ITL mean", seconds(itl), seconds(objective), source, itl <= objective))
            cause = (
                f"Demand exceeds what this {evidence.hardware} can serve: with {limit} sequences{evidence.each} ITL is "
                f"{seconds(itl)} on average. More sequences slow every stream; fewer lengthen the queue."
            )
            faster = present((quantize(evidence, FOR_SPEED), share_prefixes(evidence)))
            fixes = (*faster, more_capacity(evidence))
        if not evidence.flags_known:
            cause = "Requests wait although the KV cache has room: the limit of running requests may be reached."
        return Finding(self.code, Severity.WARNING, since, symptom, cause, tuple(measures), fixes)


class OversubscribedMemory(Rule):
    """Requests wait and the KV cache has no room for the next one."""

    code = "oversubscribed_memory"
    explained_by = ("not_admitted", "uneven_ranks")
    of_traffic = of_the_last_minute = True

    def verdicts(self, evidence: Evidence) -> Sequence[Judgment]:
        """Judge by growth, if the cache is full."""
        return _verdicts(evidence, Bottleneck.MEMORY)

    def describe(self, evidence: Evidence, since: float) -> Finding:
        """How many requests wait, and what would make room for more."""
        frame, prompt = _newest(evidence, Bottleneck.MEMORY)
        usage, cache = frame.usage_max or 0.0, evidence.cache_tokens
        symptom = f"{_queue(evidence)}, and the KV cache is {percent(usage)} full."
        cause = "Demand exceeds the KV cache: more sequences would only cause preemptions."
        fixes = (*more_cache(evidence), reduce_load(evidence))
        measures = _measures(evidence, frame)
        if usage <= evidence.objectives.kv_cache_usage and not frame.grown.preemptions_total and cache is not None:
            free = f"{(1 - usage) * cache:,.0f}"
            cause = f"A request is admitted when its whole prompt fits, and {free} tokens are free{evidence.each}."
            measures = [one if one.name != "KV cache usage" else Measure(one.name, one.value) for one in measures]
            measures.append(Measure("mean prompt", f"{prompt:,.0f} tokens", f"{free} tokens", "free in the KV cache"))
        return Finding(self.code, Severity.CRITICAL, since, symptom, cause, tuple(measures), fixes)


class OversubscribedCompute(Rule):
    """Requests wait though there is room for sequences and tokens: the GPU cannot compute the prompts in time."""

    code = "oversubscribed_compute"
    explained_by = ("not_admitted", "uneven_ranks")
    of_traffic = of_the_last_minute = True

    def verdicts(self, evidence: Evidence) -> Sequence[Judgment]:
        """Judge by growth, if neither the sequence limit nor the cache is the bottleneck."""
        return _verdicts(evidence, Bottleneck.STEPS)

    def describe(self, evidence: Evidence, since: float) -> Finding:
        """How many requests wait, and what makes prompts cheaper."""
        symptom = f"{_queue(evidence)}, though max-num-seqs and the KV cache have room."
        cause = f"Prompts arrive faster than the {evidence.hardware} prefills them."
        offered = present((quantize(evidence, FOR_SPEED), share_prefixes(evidence), chunked(evidence)))
        fixes = (*offered, reduce_load(evidence))
        if not offered:
            cause = (
                f"Demand exceeds what this {evidence.hardware} can serve: prompts arrive faster than it prefills them."
            )
            fixes = (more_capacity(evidence),)
        if not evidence.flags_known:
            symptom = f"{_queue(evidence)}, though the KV cache has room."
            cause = "Either prompts arrive faster than they are prefilled, or the limit of running requests is reached."
        measures = tuple(_measures(evidence, evidence.frames[-1]))
        return Finding(self.code, Severity.WARNING, since, symptom, cause, measures, fixes)


class NotAdmitted(Rule):
    """Requests wait and none runs, because none fits."""

    code = "not_admitted"
    of_traffic = of_the_last_minute = True

    def verdicts(self, evidence: Evidence) -> Sequence[Judgment]:
        """Holds in frames with waiting requests but no running ones and no tokens."""
        found = []
        for frame in evidence.frames:
            if frame.waiting_min is None or frame.running_max is None:
                found.append(Judgment.UNKNOWN)
            elif frame.waiting_min >= 1 and frame.running_max == 0 and not frame.grown.generation_tokens_total:
                found.append(Judgment.HOLDS)
            else:
                found.append(Judgment.FAILS)
        return found

    def describe(self, evidence: Evidence, since: float) -> Finding:
        """Nothing runs: either the cache cannot hold a full context, or the engine was paused.

        vLLM refuses to start if a full context does not fit, but older versions check only memory, not
        ``num-gpu-blocks-override``. After ``/pause`` and ``/sleep`` it admits no requests (tested on 0.32).
        """
        frame, context = evidence.frames[-1], evidence.max_model_len
        waiting = round(frame.waiting_max or 0)
        symptom = "1 request waiting, none running." if waiting == 1 else f"{waiting} requests waiting, none running."
        if frame.running_max:
            symptom = "Requests waited while none ran; some run again now."
        cache, each = evidence.cache_tokens, evidence.each
        measures = tuple(_measures(evidence, frame))
        if cache is not None and context is not None and context > cache:
            held = f"the KV cache holds {cache:,}{each}"
            cause = f"max-model-len allows {context:,} tokens, but {held}: the first request does not fit."
            fixes = (*more_cache(evidence), *self._shorter(evidence))
        else:
            cause = "They would fit: the engine is paused, asleep, or blocked."
            wake = "If it was paused or put to sleep: POST /resume or /wake_up. Otherwise restart it."
            fixes = (Fix(Changes(), wake, "A restart loses the waiting requests."), *present((chunked(evidence),)))
        return Finding(self.code, Severity.CRITICAL, since, symptom, cause, measures, fixes)

    @staticmethod
    def _shorter(evidence: Evidence) -> tuple[Fix, ...]:
        if not (fitting := evidence.longest_held):
            return ()
        why = "Requests that can never fit are then rejected at once instead of blocking others."
        return (setting("max-model-len", fitting, why, "Longer requests are rejected."),)
