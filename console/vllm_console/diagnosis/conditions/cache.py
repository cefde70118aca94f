"""Conditions of the KV cache and of what it keeps: pressure, preemption, prefix caching, reserved context."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_console.diagnosis.conditions.cures import (
    WORTH_CACHING,
    fewer_sequences,
    more_cache,
    present,
    setting,
    share_prefixes,
)
from vllm_console.diagnosis.conditions.rolling import MINUTE, observed, p50, p99, totals
from vllm_console.diagnosis.conditions.rule import Situation, Verdict, above
from vllm_console.diagnosis.model import Condition, Measure, Remedy, Severity
from vllm_console.format import percent, seconds
from vllm_console.telemetry.frames import Frame, merged, total
from vllm_console.telemetry.model import Histogram
from vllm_launchers.plan.model import Changes

USAGE_MARGIN = 0.05
"""So far below its goal usage must fall before pressure is over."""

MOST_PREEMPTIONS = 10.0
"""A minute: more than this is too many, whatever the share of requests."""

FEWEST_PREEMPTIONS = 2
"""In a minute: one alone is chance."""

KEPT_WHEN_PREEMPTING = 0.6
"""Of the sequences that ran: those that were let in grow until they do not fit, so fewer must be."""


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
        counted = zip(totals(frames, "preemptions_total"), totals(frames, "requests_finished_total"), strict=True)
        return [
            self._verdict(situation.goals.preemption_rate, count, finished, _length(frames, at))
            for at, (count, finished) in enumerate(counted)
        ]

    @staticmethod
    def _verdict(goal: float, count: float | None, finished: float | None, length: float) -> Verdict:
        if count is None:
            return Verdict.UNKNOWN
        share, rate = _preemption(count, finished, length)
        if rate > MOST_PREEMPTIONS or (share > goal and count >= FEWEST_PREEMPTIONS):
            return Verdict.BAD
        return Verdict.GOOD if share <= goal / 2 and rate <= MOST_PREEMPTIONS / 2 else Verdict.BETWEEN

    def describe(self, situation: Situation, since: float) -> Condition:
        """How many, and what it does to the streams."""
        frames = situation.last(MINUTE)
        count, finished = (totals(frames, key)[-1] for key in ("preemptions_total", "requests_finished_total"))
        share, rate = _preemption(count, finished, _length(frames, len(frames) - 1))
        goal = situation.goals.preemption_rate
        symptom = _preempted(count, finished, share, rate)
        measures = [
            Measure("requests preempted", percent(share, 1), percent(goal, 1), situation.goals_source),
            Measure("preemptions", f"{rate:.0f}/min", f"{MOST_PREEMPTIONS:.0f}/min", "fixed"),
        ]
        histogram = observed(frames, "itl")[-1]
        usual, worst = p50(histogram), p99(histogram)
        if usual and worst:
            measures.append(Measure("ITL p99", f"{seconds(worst)}, {worst / usual:.1f}× its median"))
        cause = "The KV cache is full: requests lose their tokens and are computed again from the prompt on."
        remedies = present((*more_cache(situation), fewer_sequences(situation, KEPT_WHEN_PREEMPTING)))
        return Condition(self.code, Severity.CRITICAL, since, symptom, cause, tuple(measures), remedies)


def _preemption(count: float | None, finished: float | None, length: float) -> tuple[float, float]:
    """Preemptions per finished request, and per minute; where nothing finished each one counts whole."""
    share = (count or 0.0) / max(1.0, finished or 0.0)
    return share, (count or 0.0) * 60 / length


def _preempted(count: float | None, finished: float | None, share: float, rate: float) -> str:
    if not count:
        return "Requests were preempted, though none in the last minute."
    of = f"{share:.0%} of the requests that ended" if share < 1 else f"{share:.1f} for each request that ended"
    return f"{rate:.0f} preemptions a minute, {of if finished else 'and no request ended'}."


def _length(frames: Sequence[Frame], at: int) -> float:
    """Seconds of the minute up to a frame; right after the start it is taken to be a whole one."""
    return max(60.0, frames[at].end - frames[max(0, at - MINUTE + 1)].start)


class PrefixCacheIdle:
    """Prefix caching is on and finds nothing."""

    code = "prefix_cache_idle"
    LOW, ENOUGH, SPAN, TOKENS = 0.02, 0.10, 5 * MINUTE, 20_000

    def verdicts(self, situation: Situation) -> Sequence[Verdict]:
        """By the hit rate over five minutes, where enough prompt tokens were looked up."""
        frames = situation.frames
        if situation.flags.get("enable-prefix-caching") is False:
            return [Verdict.GOOD] * len(frames)
        asked = totals(frames, "prefix_cache_queries_total", self.SPAN)
        found = totals(frames, "prefix_cache_hits_total", self.SPAN)
        return [
            Verdict.UNKNOWN if queries is None else self._verdict(at, queries, hits or 0.0)
            for at, (queries, hits) in enumerate(zip(asked, found, strict=True))
        ]

    def _verdict(self, at: int, queries: float, hits: float) -> Verdict:
        if at + 1 < self.SPAN or queries < self.TOKENS:
            return Verdict.BETWEEN
        rate = hits / queries
        return Verdict.BAD if rate < self.LOW else Verdict.GOOD if rate > self.ENOUGH else Verdict.BETWEEN

    def describe(self, situation: Situation, since: float) -> Condition:
        """The hit rate, and that it costs little."""
        hits = hit_rate(situation.last(self.SPAN)) or 0.0
        measures = (Measure("prefix cache hit rate", percent(hits, 1), percent(self.LOW), "fixed"),)
        remedy = setting("enable-prefix-caching", False, "Prompts begin differently: nothing is shared.",
                         "Shared prefixes, should they come, are computed every time.")  # fmt: skip
        symptom = f"Prefix caching finds {hits:.1%} of the prompt tokens."
        cause = "The prompts do not begin alike. It costs little: leave it, unless each millisecond counts."
        return Condition(self.code, Severity.NOTE, since, symptom, cause, measures, (remedy,))


def hit_rate(frames: Sequence[Frame]) -> float | None:
    """Share of the prompt tokens that the prefix cache held; None where none was looked up."""
    asked = total(frames, "prefix_cache_queries_total")
    return (total(frames, "prefix_cache_hits_total") or 0.0) / asked if asked else None


class PrefixCacheMissed:
    """Prefix caching is off though prompts begin alike.

    While it is off vLLM counts nothing of the kind: what is known comes from before, or from the preset.
    """

    code = "prefix_cache_missed"
    ENOUGH_REQUESTS = 20

    def verdicts(self, situation: Situation) -> Sequence[Verdict]:
        """By the flag and the reuse that is known; judged only while requests come."""
        off = situation.flags.get("enable-prefix-caching") is False
        if not off or situation.reuse[0] <= WORTH_CACHING:
            return [Verdict.GOOD] * len(situation.frames)
        ended = totals(situation.frames, "requests_finished_total", len(situation.frames))
        return [
            Verdict.UNKNOWN if count is None else Verdict.BAD if count >= self.ENOUGH_REQUESTS else Verdict.BETWEEN
            for count in ended
        ]

    def describe(self, situation: Situation, since: float) -> Condition:
        """What is computed again and again."""
        reuse, source = situation.reuse
        measures = (Measure("prefix reuse", percent(reuse), percent(WORTH_CACHING), source),)
        remedies = present((share_prefixes(situation),))
        symptom = f"Prompts begin alike ({reuse:.0%}, {source}), and all of each is computed every time."
        return Condition(self.code, Severity.WARNING, since, symptom, "Prefix caching is off.", measures, remedies)


class ContextUnused:
    """``max-model-len`` is far longer than any request."""

    code = "context_unused"
    SHARE, ENOUGH, REQUESTS, ROUND = 0.25, 0.35, 200, 1024
    LONG, MUCH = 8192, 0.05
    """A context that is shorter, and takes less of the KV cache, is not worth a word."""

    def verdicts(self, situation: Situation) -> Sequence[Verdict]:
        """By the p99 of prompt and answer together, over all that was seen up to each frame."""
        frames, context = situation.frames, situation.max_model_len
        if context is None:
            return [Verdict.UNKNOWN] * len(frames)
        cache = situation.cache_tokens
        if context < self.LONG and (cache is None or context < self.MUCH * cache):
            return [Verdict.GOOD] * len(frames)
        seen = (observed(frames, key, len(frames)) for key in ("prompt_tokens", "generation_tokens"))
        return [self._verdict(prompt, answer, context) for prompt, answer in zip(*seen, strict=True)]

    def _verdict(self, prompt: Histogram | None, answer: Histogram | None, context: int) -> Verdict:
        if prompt is None or answer is None:
            return Verdict.UNKNOWN
        longest, answered = _longest(prompt, answer), min(prompt.count, answer.count)
        if longest is None or answered < self.REQUESTS:
            return Verdict.BETWEEN
        return above(-longest / context, -self.SHARE, -self.ENOUGH)

    def describe(self, situation: Situation, since: float) -> Condition:
        """Real lengths against what is allowed."""
        frames, context = situation.frames, situation.max_model_len or 0
        prompt, answer = merged(frames, "prompt_tokens"), merged(frames, "generation_tokens")
        longest = (_longest(prompt, answer) if prompt and answer else None) or 0.0
        requests = min(prompt.count, answer.count) if prompt and answer else 0.0
        fitting = -(-int(longest * 1.25) // self.ROUND) * self.ROUND
        told = f"{longest:,.0f} tokens in {requests:,.0f} requests"
        measures = [Measure("p99 of prompt and answer", told, f"{context:,}", "max-model-len")]
        cause = "One long request may take much of the KV cache from the others."
        if cache := situation.cache_tokens:
            share = f"{min(1.0, context / cache):.0%} of the KV cache{situation.each}"
            measures.append(Measure("one full context takes", share))
        why = f"99% of the requests stay below {longest:,.0f} tokens; the plan then has room for more at once."
        remedies = (Remedy(Changes({"max-model-len": fitting}), why, f"More than {fitting:,} tokens are refused."),)
        symptom = f"Requests use {longest / context:.0%} of the {context:,} tokens that each may have."
        return Condition(self.code, Severity.NOTE, since, symptom, cause, tuple(measures), remedies)


def _longest(prompt: Histogram, answer: Histogram) -> float | None:
    """An upper estimate of the p99 of prompt and answer together, in tokens."""
    longest = p99(prompt), p99(answer)
    return longest[0] + longest[1] if longest[0] is not None and longest[1] is not None else None
