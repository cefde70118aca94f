"""Conditions of the KV cache and of what it keeps: pressure, preemption, prefix caching, reserved context."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_console.diagnosis.conditions.cures import WORTH_CACHING, fewer_sequences, more_cache, present, setting
from vllm_console.diagnosis.conditions.rule import Situation, Verdict, above
from vllm_console.diagnosis.model import Condition, Measure, Remedy, Severity
from vllm_console.format import percent, seconds
from vllm_console.telemetry.frames import Frame, merged, total
from vllm_console.telemetry.window import quantile, quantiles
from vllm_launchers.plan.model import Changes

MINUTE = 6
"""Frames of ten seconds in a minute."""

USAGE_MARGIN = 0.05
"""So far below its goal usage must fall before pressure is over."""

MOST_PREEMPTIONS = 10.0
"""A minute: more than this is too many, whatever the share of requests."""


class KvCachePressure:
    """Usage of the KV cache above the objective."""

    code = "kv_cache_pressure"

    def verdicts(self, situation: Situation) -> Sequence[Verdict]:
        """By the highest usage in each frame."""
        goal = situation.goals.kv_cache_usage
        return [above(frame.usage_max, goal, goal - USAGE_MARGIN) for frame in situation.frames]

    def describe(self, situation: Situation, since: float) -> Condition:
        """How full, and how it grows."""
        goal = situation.goals.kv_cache_usage
        usage = max((frame.usage_max or 0.0 for frame in situation.last(MINUTE)), default=0.0)
        symptom = f"{usage:.0%} of the KV cache is used{_trend(situation.last(MINUTE))}."
        cause = "The running requests keep more tokens than the cache should hold; when it is full, some are preempted."
        measures = [Measure("KV cache usage", percent(usage), percent(goal), situation.goals_source)]
        factor = goal / usage if usage > goal else 0.9
        remedies = present((*more_cache(situation), fewer_sequences(situation, factor)))
        return Condition(self.code, Severity.WARNING, since, symptom, cause, tuple(measures), remedies)


def _trend(frames: Sequence[Frame]) -> str:
    values = [frame.usage_max for frame in frames if frame.usage_max is not None]
    return " and rising" if len(values) >= 2 and values[-1] > values[0] + 0.02 else ""


class Preempting:
    """Requests are thrown out of the KV cache and computed again."""

    code = "preempting"

    def verdicts(self, situation: Situation) -> Sequence[Verdict]:
        """By share of requests and by rate, over the minute up to each frame."""
        frames = situation.frames
        return [self._verdict(situation, frames[max(0, at - MINUTE + 1) : at + 1]) for at in range(len(frames))]

    @staticmethod
    def _verdict(situation: Situation, minute: Sequence[Frame]) -> Verdict:
        if minute[-1].grown.preemptions_total is None:
            return Verdict.UNKNOWN
        share, rate = _preemption(minute)
        if rate > MOST_PREEMPTIONS or (share > situation.goals.preemption_rate and rate >= 2):
            return Verdict.BAD
        return Verdict.GOOD if share <= situation.goals.preemption_rate / 2 else Verdict.BETWEEN

    def describe(self, situation: Situation, since: float) -> Condition:
        """How many, and what it does to the streams."""
        minute = situation.last(MINUTE)
        share, rate = _preemption(minute)
        goal = situation.goals.preemption_rate
        symptom = f"{rate:.0f} preemptions a minute, {min(share, 9.99):.0%} of the requests."
        measures = [
            Measure("requests preempted", percent(share, 1), percent(goal, 1), situation.goals_source),
            Measure("preemptions", f"{rate:.0f}/min", f"{MOST_PREEMPTIONS:.0f}/min", "fixed"),
        ]
        histogram = merged(minute, "itl")
        if histogram is not None and (found := quantiles(histogram)).p50 and found.p99:
            times = found.p99 / found.p50
            measures.append(Measure("ITL p99", f"{seconds(found.p99)}, {times:.1f}× its median"))
        cause = "The KV cache is full: requests lose their tokens and are computed again from the prompt on."
        usage = max((frame.usage_max or 0.0 for frame in minute), default=0.0)
        factor = min(0.75, situation.goals.kv_cache_usage / usage) if usage else 0.75
        remedies = present((*more_cache(situation), fewer_sequences(situation, factor)))
        return Condition(self.code, Severity.CRITICAL, since, symptom, cause, tuple(measures), remedies)


def _preemption(minute: Sequence[Frame]) -> tuple[float, float]:
    """Preemptions per finished request, and per minute; where nothing finished each one counts whole."""
    count = total(minute, "preemptions_total") or 0.0
    finished = total(minute, "requests_finished_total") or 0.0
    length = minute[-1].end - minute[0].start
    return count / max(1.0, finished), count * 60 / length if length > 0 else 0.0


class PrefixCacheIdle:
    """Prefix caching is on and finds nothing."""

    code = "prefix_cache_idle"
    LOW, ENOUGH, SPAN, TOKENS = 0.02, 0.10, 5 * MINUTE, 20_000

    def verdicts(self, situation: Situation) -> Sequence[Verdict]:
        """By the hit rate over five minutes, where enough prompt tokens were looked up."""
        if situation.flags.get("enable-prefix-caching") is False:
            return [Verdict.GOOD] * len(situation.frames)
        frames = situation.frames
        return [self._verdict(frames[max(0, at - self.SPAN + 1) : at + 1]) for at in range(len(frames))]

    def _verdict(self, span: Sequence[Frame]) -> Verdict:
        asked = total(span, "prefix_cache_queries_total") or 0.0
        if len(span) < self.SPAN or asked < self.TOKENS:
            return Verdict.BETWEEN
        hits = (total(span, "prefix_cache_hits_total") or 0.0) / asked
        return Verdict.BAD if hits < self.LOW else Verdict.GOOD if hits > self.ENOUGH else Verdict.BETWEEN

    def describe(self, situation: Situation, since: float) -> Condition:
        """The hit rate, and that it costs little."""
        span = situation.last(self.SPAN)
        asked = total(span, "prefix_cache_queries_total") or 0.0
        hits = (total(span, "prefix_cache_hits_total") or 0.0) / asked if asked else 0.0
        measures = (Measure("prefix cache hit rate", percent(hits, 1), percent(self.LOW), "fixed"),)
        remedy = setting("enable-prefix-caching", False, "Prompts begin differently: nothing is shared.",
                         "Shared prefixes, should they come, are computed every time.")  # fmt: skip
        symptom = f"Prefix caching finds {hits:.1%} of the prompt tokens."
        cause = "The prompts do not begin alike. It costs little: leave it, unless each millisecond counts."
        return Condition(self.code, Severity.NOTE, since, symptom, cause, measures, (remedy,))


class PrefixCacheMissed:
    """Prefix caching is off though prompts begin alike."""

    code = "prefix_cache_missed"
    ENOUGH_REQUESTS = 20

    def verdicts(self, situation: Situation) -> Sequence[Verdict]:
        """By the flag and the reuse that the workload names; judged only while requests come."""
        workload = situation.workload
        off = situation.flags.get("enable-prefix-caching") is False
        missed = off and workload is not None and workload.prefix_reuse > WORTH_CACHING
        if not missed:
            return [Verdict.GOOD] * len(situation.frames)
        counted = 0.0
        verdicts = []
        for frame in situation.frames:
            counted += frame.grown.requests_finished_total or 0.0
            verdicts.append(Verdict.BAD if counted >= self.ENOUGH_REQUESTS else Verdict.BETWEEN)
        return verdicts

    def describe(self, situation: Situation, since: float) -> Condition:
        """What is computed again and again."""
        reuse = situation.workload.prefix_reuse if situation.workload else 0.0
        measures = (Measure("prefix reuse", percent(reuse), percent(WORTH_CACHING), "workload of its preset"),)
        remedy = setting("enable-prefix-caching", True, "The shared beginning is computed once.", "Next to none.")
        symptom = f"{reuse:.0%} of each prompt repeats and is computed every time."
        cause = "Prefix caching is off."
        return Condition(self.code, Severity.WARNING, since, symptom, cause, measures, (remedy,))


class ContextUnused:
    """``max-model-len`` is far longer than any request."""

    code = "context_unused"
    SHARE, REQUESTS, ROUND = 0.25, 200, 1024

    def verdicts(self, situation: Situation) -> Sequence[Verdict]:
        """By the p99 of prompt and answer together, over all that was seen up to each frame."""
        if situation.max_model_len is None:
            return [Verdict.UNKNOWN] * len(situation.frames)
        if len(situation.frames) < MINUTE:
            return [Verdict.BETWEEN] * len(situation.frames)
        # Lengths change slowly: one look at all of them serves every frame.
        longest, requests = _lengths(situation.frames)
        if longest is None or requests < self.REQUESTS:
            verdict = Verdict.BETWEEN
        else:
            verdict = Verdict.BAD if longest < self.SHARE * situation.max_model_len else Verdict.GOOD
        return [verdict] * len(situation.frames)

    def describe(self, situation: Situation, since: float) -> Condition:
        """Real lengths against what is reserved."""
        longest, requests = _lengths(situation.frames)
        context = situation.max_model_len or 0
        fitting = -(-int((longest or 0.0) * 1.25) // self.ROUND) * self.ROUND
        told = f"{longest or 0:,.0f} tokens in {requests:,.0f} requests"
        measures = (Measure("p99 of prompt and answer", told, f"{context:,}", "max-model-len"),)
        why = f"99 % of the requests stay below {longest or 0:,.0f} tokens."
        price = f"Requests of more than {fitting:,} tokens are refused."
        remedies: tuple[Remedy, ...] = (Remedy(Changes({"max-model-len": fitting}), why, price),)
        symptom = f"Requests use {(longest or 0) / context:.0%} of the context of {context:,} tokens."
        cause = "One long request could take a large part of the KV cache; a shorter limit allows more sequences."
        return Condition(self.code, Severity.NOTE, since, symptom, cause, measures, remedies)


def _lengths(frames: Sequence[Frame]) -> tuple[float | None, float]:
    """An upper estimate of the p99 of prompt and answer together, in tokens, and of how many requests it is."""
    prompt, answer = merged(frames, "prompt_tokens"), merged(frames, "generation_tokens")
    if prompt is None or answer is None:
        return None, 0.0
    longest = [quantile(0.99, histogram.bounds, histogram.counts) for histogram in (prompt, answer)]
    if longest[0] is None or longest[1] is None:
        return None, 0.0
    return longest[0] + longest[1], min(prompt.count, answer.count)
