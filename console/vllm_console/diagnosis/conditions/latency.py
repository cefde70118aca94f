"""Conditions of latency: prompts that hold up the streams of others, and goals that are missed for other reasons."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from vllm_console.diagnosis.conditions.cures import (
    AT_THE_LIMIT,
    FOR_SPEED,
    elsewhere,
    fewer_sequences,
    more_sequences,
    present,
    quantize,
    setting,
    share_prefixes,
)
from vllm_console.diagnosis.conditions.rolling import MINUTE, count_above, mean, observed, p50, p99, surely_slow
from vllm_console.diagnosis.conditions.rule import Situation, Verdict
from vllm_console.diagnosis.model import Condition, Measure, Remedy, Severity
from vllm_console.format import seconds
from vllm_console.telemetry.frames import Frame, merged, total
from vllm_console.telemetry.model import Histogram
from vllm_launchers.plan.model import Changes

SPIKE = 3.0
"""An ITL p99 of so many times the median is a spike."""

STALL = 4.0
"""A gap of so many times the goal is felt though it is seldom, and does not reach the p99."""

LEAST_STEP_TOKENS = 256
STEP_ROUND = 256

BACK = 0.8
"""Share of its goal that a latency must come down to, for its condition to end."""


def _prompt_tokens(frame: Frame) -> float:
    return frame.grown.prompt_tokens_total or 0.0


def _peak(frames: Sequence[Frame]) -> float:
    """The most prompt tokens of any of these frames: no step in them had more."""
    return max(map(_prompt_tokens, frames), default=0.0)


def _is_spike(frame: Frame, goal: float, engines: int) -> bool | None:
    """Whether many gaps, or one in half of an engine's streams, are far above the goal; no preemption explains it."""
    itl = frame.histogram("itl")
    if itl is None:
        return None
    usual, worst = p50(itl), p99(itl)
    if not usual or not worst or itl.count < 20 or usual > goal or frame.grown.preemptions_total:
        return False
    stalled = count_above(itl, STALL * goal) >= max(3.0, (frame.running_max or 0.0) / engines / 2)
    return stalled or (worst > goal and worst >= SPIKE * usual)


class PrefillContention:
    """ITL spikes when prompts are computed, and not with load: now and then, or in most frames."""

    code = "prefill_contention"
    FRAMES, SPIKES, SHARE = 18, 3, 0.7
    MOST = 4
    """Of the frames of a minute."""

    def verdicts(self, situation: Situation) -> Sequence[Verdict]:
        """By spikes in most of the last minute, or by those of three minutes that come with prompts."""
        frames, goal, engines = situation.frames, situation.goals.itl_p99_seconds, situation.engines
        spikes = [_is_spike(frame, goal, engines) for frame in frames]
        prefill = observed(frames, "prefill", 5 * MINUTE)
        found = []
        for at, spike in enumerate(spikes):
            begin = max(0, at - self.FRAMES + 1)
            span = range(begin, at + 1)
            if spike is None:
                found.append(Verdict.UNKNOWN)
            elif not any(spikes[one] for one in span):
                found.append(Verdict.GOOD)
            else:
                slow = _is_slow(prefill[at], goal / 2) and _peak(frames[begin : at + 1]) > LEAST_STEP_TOKENS
                most = sum(bool(spikes[one]) for one in span[-MINUTE:]) >= self.MOST
                bad = slow and (most or self._by_prompts(frames, spikes, span))
                found.append(Verdict.BAD if bad else Verdict.BETWEEN)
        return found

    def _by_prompts(self, frames: Sequence[Frame], spikes: Sequence[bool | None], span: range) -> bool:
        """Whether spikes come in frames with more prompt tokens than the calm ones have, and with no more load."""
        hit = [at for at in span if spikes[at]]
        calm = [frames[at] for at in span if spikes[at] is False]
        if len(hit) < self.SPIKES or not calm:
            return False
        usual = statistics.median(map(_prompt_tokens, calm))
        # A prompt is counted with its first token, which may come in the next frame.
        near = [max(map(_prompt_tokens, frames[at : at + 2])) for at in hit]
        heavy = sum(tokens > 2 * usual + 1 for tokens in near)
        load = statistics.median(frame.running_max or 0.0 for frame in calm)
        loaded = statistics.median(frames[at].running_max or 0.0 for at in hit)
        return heavy >= self.SHARE * len(hit) and loaded <= 1.5 * load + 2

    def describe(self, situation: Situation, since: float) -> Condition:
        """How high the spikes are, and what comes with them."""
        frames, goal = situation.last(self.FRAMES), situation.goals.itl_p99_seconds
        itl = merged(frames, "itl")
        peak = highest_gap(itl)
        usual = p50(itl) or 0.0
        spikes = sum(bool(_is_spike(one, goal, situation.engines)) for one in frames)
        measures = (
            Measure("ITL, the longest", seconds(peak), seconds(goal), f"for the p99: {situation.goals_source}"),
            Measure("ITL p50", seconds(usual)),
            Measure("10 s spans with spikes", f"{spikes} of {len(frames)}"),
            Measure("a prompt's prefill, mean", seconds(mean(merged(frames, "prefill")))),
            Measure("peak prompt tokens, 10 s", f"{_peak(frames):,.0f}"),
        )
        symptom = f"ITL jumps from {seconds(usual)} to {seconds(peak)} when prompts are computed."
        cause = "A prompt's prefill shares its step with the tokens of all streams, and makes that step long."
        return Condition(self.code, Severity.WARNING, since, symptom, cause, measures, self._remedies(situation))

    def _remedies(self, situation: Situation) -> tuple[Remedy, ...]:
        tokens = situation.max_num_batched_tokens
        whole = situation.flags.get("enable-chunked-prefill") is False
        fitting = _step_within(situation.last(self.FRAMES), situation.goals.itl_p99_seconds) or tokens / 2
        least = max(LEAST_STEP_TOKENS, situation.max_num_seqs)
        less = max(least, int(min(fitting, tokens / 2)) // STEP_ROUND * STEP_ROUND)
        smaller = None
        longest = min(tokens, _peak(situation.last(self.FRAMES)))
        if less < longest and whole:
            why = f"Long prompts are computed in pieces of {less:,} tokens, between the tokens of the others."
            changes = Changes({"enable-chunked-prefill": True, "max-num-batched-tokens": less})
            smaller = Remedy(changes, why, "TTFT of long prompts grows.")
        elif less < longest:
            why = f"Steps of {less:,} tokens instead of {tokens:,} are shorter."
            smaller = setting("max-num-batched-tokens", less, why, "TTFT of long prompts grows.")
        where = "machine" if situation.build == "cpu" else "GPU"
        apart = Remedy(Changes(), f"Send long prompts to a second server on another {where}.")
        return present((quantize(situation, FOR_SPEED), share_prefixes(situation), smaller, apart))


def _is_slow(prefill: Histogram | None, limit: float) -> bool:
    """Whether prompts, or some of them, take so long: one that is computed in no time can hold nobody up."""
    if prefill is None or not prefill.count:
        return False
    # Within the first bucket quantiles are guesses; the mean is exact.
    return prefill.sum / prefill.count > limit or (p99(prefill) or 0.0) > max(prefill.bounds[0], limit)


def highest_gap(itl: Histogram | None) -> float | None:
    """An upper estimate of the longest gap, as far as all but three of the observations tell."""
    if itl is None or not itl.count:
        return None
    at_least = itl.count - min(3.0, 0.01 * itl.count)
    bounds = zip(itl.bounds, itl.counts, strict=True)
    return next((min(bound, itl.bounds[-2]) for bound, count in bounds if count >= at_least), None)


def _step_within(frames: Sequence[Frame], goal: float) -> float | None:
    """How many prompt tokens are computed in four fifths of the goal, at the pace of the prefills that were seen."""
    prefill = merged(frames, "prefill")
    computed = (total(frames, "prompt_tokens_total") or 0.0) - (total(frames, "prefix_cache_hits_total") or 0.0)
    if prefill is None or prefill.sum <= 0 or computed <= 0:
        return None
    return BACK * goal * computed / prefill.sum


class SlowTokens:
    """ITL p99 above its goal in a minute."""

    code = "slow_tokens"
    key, name = "itl", "ITL"

    def goal(self, situation: Situation) -> float:
        """Its objective, in seconds."""
        return situation.goals.itl_p99_seconds

    def verdicts(self, situation: Situation) -> Sequence[Verdict]:
        """By the minute up to each frame."""
        goal = self.goal(situation)
        return [self._verdict(minute, goal) for minute in observed(situation.frames, self.key)]

    @staticmethod
    def _verdict(minute: Histogram | None, goal: float) -> Verdict:
        if minute is None:
            return Verdict.UNKNOWN
        worst = p99(minute)
        if worst is None or worst <= BACK * goal:
            return Verdict.GOOD
        return Verdict.BAD if surely_slow(minute, goal) else Verdict.BETWEEN

    def describe(self, situation: Situation, since: float) -> Condition:
        """How slow, and what takes the time."""
        frames, goal = situation.last(MINUTE), self.goal(situation)
        found = merged(frames, self.key)
        measures = [
            Measure(f"{self.name} p99", seconds(p99(found)), seconds(goal), situation.goals_source),
            Measure(f"{self.name} p50", seconds(p50(found))),
        ]
        worst = p99(found)
        now = f"{seconds(worst)} again" if worst is not None and worst <= goal else seconds(worst)
        symptom = f"{self.name} p99 is {now}; its goal is {seconds(goal)}."
        if worst is None:
            symptom = f"{self.name} p99 was above its goal of {seconds(goal)}; in the last minute nothing was measured."
        cause, remedies = self.why(situation, frames, measures)
        return Condition(self.code, Severity.WARNING, since, symptom, cause, tuple(measures), remedies)

    def why(
        self, situation: Situation, frames: Sequence[Frame], measures: list[Measure]
    ) -> tuple[str, tuple[Remedy, ...]]:
        """The cause in one sentence, and what would mend it; may add to what is told."""
        running = max((frame.running_max or 0.0 for frame in frames), default=0.0)
        measures.append(situation.running(running))
        running /= situation.engines
        sequences = "1 sequence" if round(running) == 1 else f"{running:.0f} sequences"
        cause = f"Steps with {sequences} take too long on this {'machine' if situation.build == 'cpu' else 'GPU'}."
        fewer = fewer_sequences(situation, 0.5) if running >= 8 else None
        return cause, present((quantize(situation, FOR_SPEED), fewer, elsewhere(situation)))


class SlowFirstToken(SlowTokens):
    """TTFT p99 above its goal in a minute."""

    code = "slow_first_token"
    key, name = "ttft", "TTFT"

    def goal(self, situation: Situation) -> float:
        """Its objective, in seconds."""
        return situation.goals.ttft_p99_seconds

    def why(
        self, situation: Situation, frames: Sequence[Frame], measures: list[Measure]
    ) -> tuple[str, tuple[Remedy, ...]]:
        """Whether requests wait for their turn, or prompts take long."""
        queue, prefill = (mean(merged(frames, key)) or 0.0 for key in ("queue", "prefill"))
        measures += [Measure("time in the queue, mean", seconds(queue)), Measure("prefill, mean", seconds(prefill))]
        if queue > prefill:
            running = max((frame.running_max or 0.0 for frame in frames), default=0.0)
            full = running >= AT_THE_LIMIT * situation.most_running
            limit = f"{situation.max_num_seqs} may run at once{situation.each}"
            held = f": no more than {limit}" if full else " before they are computed"
            cause = f"Requests wait in the queue{held}."
            more = more_sequences(situation) if full else None
            return cause, present((more, share_prefixes(situation), elsewhere(situation)))
        offered = present((quantize(situation, FOR_SPEED), share_prefixes(situation), elsewhere(situation)))
        return "Prompts take long to compute, their own or those before them.", offered
