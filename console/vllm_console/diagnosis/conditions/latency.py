"""Conditions of latency: long prompts that hold up the streams of others."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from vllm_console.diagnosis.conditions.cures import chunked, present, setting
from vllm_console.diagnosis.conditions.rule import Situation, Verdict
from vllm_console.diagnosis.model import Condition, Measure, Remedy, Severity
from vllm_console.format import seconds
from vllm_console.telemetry.frames import Frame
from vllm_console.telemetry.window import quantile
from vllm_launchers.plan.flags import token_count

SPIKE = 3.0
"""An ITL p99 of so many times the usual one is a spike."""

DEFAULT_STEP_TOKENS = 2048
"""``max-num-batched-tokens`` on a GPU of less than 70 GiB where the flag is not set."""

LEAST_STEP_TOKENS = 512


def itl_p99(frame: Frame) -> float | None:
    """The 99th percentile of ITL within a frame, in seconds."""
    histogram = frame.histogram("itl")
    if histogram is None or histogram.count < 20:
        return None
    return quantile(0.99, histogram.bounds, histogram.counts)


def _prompt_tokens(frame: Frame) -> float:
    return frame.grown.prompt_tokens_total or 0.0


class PrefillContention:
    """ITL spikes when long prompts arrive, and not with load."""

    code = "prefill_contention"
    FRAMES, SPIKES, SHARE = 18, 3, 0.7

    def verdicts(self, situation: Situation) -> Sequence[Verdict]:
        """By the frames of the last three minutes: spikes that come with prompts and not with running sequences."""
        frames = situation.frames
        return [self._verdict(situation, frames[max(0, at - self.FRAMES + 1) : at + 1]) for at in range(len(frames))]

    def _verdict(self, situation: Situation, span: Sequence[Frame]) -> Verdict:
        latencies = [itl_p99(frame) for frame in span]
        known = [(frame, value) for frame, value in zip(span, latencies, strict=True) if value is not None]
        if latencies[-1] is None:
            return Verdict.UNKNOWN
        if len(known) < 6:
            return Verdict.BETWEEN
        spikes, calm = self._split(situation, known)
        if len(spikes) < self.SPIKES or not calm:
            return Verdict.GOOD if not spikes else Verdict.BETWEEN
        return Verdict.BAD if self._by_prompts(spikes, calm) else Verdict.GOOD

    @staticmethod
    def _split(situation: Situation, known: Sequence[tuple[Frame, float]]) -> tuple[list[Frame], list[Frame]]:
        """Frames with a spike above the objective, and the others."""
        usual = statistics.quantiles([value for _, value in known], n=4)[0]
        limit = max(situation.goals.itl_p99_seconds, SPIKE * usual)
        return [one for one, value in known if value > limit], [one for one, value in known if value <= limit]

    def _by_prompts(self, spikes: Sequence[Frame], calm: Sequence[Frame]) -> bool:
        prompts = statistics.median(map(_prompt_tokens, calm))
        heavy = sum(_prompt_tokens(frame) > 2 * prompts + 1 for frame in spikes)
        load = statistics.median(frame.running_max or 0.0 for frame in calm)
        loaded = statistics.median(frame.running_max or 0.0 for frame in spikes)
        return heavy >= self.SHARE * len(spikes) and loaded <= 1.5 * load + 2

    def describe(self, situation: Situation, since: float) -> Condition:
        """How high the spikes are, and what comes with them."""
        known = [(frame, value) for frame in situation.last(self.FRAMES) if (value := itl_p99(frame)) is not None]
        spikes, calm = self._split(situation, known)
        peak = max((value for _, value in known), default=0.0)
        usual = statistics.median([value for frame, value in known if frame in calm] or [0.0])
        goal = situation.goals.itl_p99_seconds
        measures = (
            Measure("ITL p99 in spikes", seconds(peak), seconds(goal), situation.goals_source),
            Measure("ITL p99 between them", seconds(usual)),
            Measure("prompt tokens in a spike's 10 s", f"{max(map(_prompt_tokens, spikes), default=0.0):,.0f}"),
        )
        symptom = f"ITL p99 jumps from {seconds(usual)} to {seconds(peak)} when long prompts arrive."
        cause = "A prompt's prefill shares its step with the tokens of all streams, and makes that step long."
        return Condition(self.code, Severity.WARNING, since, symptom, cause, measures, self._remedies(situation))

    @staticmethod
    def _remedies(situation: Situation) -> tuple[Remedy, ...]:
        tokens = token_count(situation.flags.get("max-num-batched-tokens")) or DEFAULT_STEP_TOKENS
        less = max(LEAST_STEP_TOKENS, situation.max_num_seqs, tokens // 2)
        smaller = None
        if less < tokens and situation.flags.get("enable-chunked-prefill") is not False:
            why = f"Steps of {less:,} tokens instead of {tokens:,} are shorter."
            smaller = setting("max-num-batched-tokens", less, why, "TTFT of long prompts grows.")
        return present((chunked(situation), smaller))
