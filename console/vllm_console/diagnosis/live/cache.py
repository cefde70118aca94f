"""Findings about the KV cache: pressure, preemption, reserved context."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from vllm_console.diagnosis.finding import MOST_PREEMPTIONS, Finding, Fix, Measure, Severity
from vllm_console.diagnosis.live.fixes import fewer_sequences, more_cache, present
from vllm_console.diagnosis.live.frame_sums import MINUTE, observed, p50, p99, totals
from vllm_console.diagnosis.live.rule import SILENCE_SECONDS, Evidence, Judgment, Rule, above, over_once_met
from vllm_console.history.frames import Frame, merged
from vllm_console.metrics.sample import LENGTHS, MAX_TOKENS_PARAM, Histogram
from vllm_console.metrics.window import known_max_tokens, load_ended, longest_request, preemptions_per_request
from vllm_console.text import UNKNOWN, clock, percent, round_duration
from vllm_console.text import count as count_text
from vllm_launchers.plan.choices.lengths import LONGER_REJECTED, MAX_TOKENS_REJECTED, fitting_context
from vllm_launchers.units import counted
from vllm_launchers.vllm.flags.changes import Changes

USAGE_MARGIN = 0.05
"""Usage must fall this far below its objective before pressure ends."""

FEWEST_PREEMPTIONS = 2
"""Minimum preemptions per minute: a single one may be chance."""

NEWEST_SECONDS = 20.0
"""A minute that ended less than this ago (two frames) counts as the last one."""

KEPT_WHEN_PREEMPTING = 0.6
"""Fraction of the running sequences to keep: admitted sequences grow until they do not fit, so fewer must run."""


class KvCachePressure(Rule):
    """Usage of the KV cache above the objective."""

    code = "kv_cache_pressure"
    explained_by = ("preempting", "oversubscribed_memory")
    of_traffic = through_pauses = True

    def verdicts(self, evidence: Evidence) -> Sequence[Judgment]:
        """Judge by the highest usage in each frame; while nothing runs, the cache says nothing about requests.

        It also ends after five minutes within the objective.
        """
        objective, frames, quiet = evidence.objectives.kv_cache_usage, evidence.frames, 0
        found: list[Judgment] = []
        met: list[bool | None] = []
        for frame in frames:
            verdict = above(frame.usage_max, objective, objective - USAGE_MARGIN)
            quiet = quiet + 1 if _is_quiet(frame) else 0
            if quiet and verdict is not Judgment.UNKNOWN:
                verdict = Judgment.SILENT if quiet >= MINUTE else Judgment.UNCLEAR
            found.append(verdict)
            met.append(None if quiet or frame.usage_max is None else frame.usage_max <= objective)
        return over_once_met(found, met)

    def describe(self, evidence: Evidence, since: float) -> Finding:
        """The highest usage and its growth in the last minute, or in the last minute in which a request ran."""
        objective, frames, when = evidence.objectives.kv_cache_usage, evidence.last(MINUTE), "the last minute"
        silent = all(map(_is_quiet, frames))
        if silent:
            evidence = replace(evidence, frames=evidence.frames[: _served(evidence.frames)])
            frames = evidence.last(MINUTE)
            when = f"the minute to {clock(frames[-1].end, evidence.now, seconds=True)}"
        usage = max((frame.usage_max or 0.0 for frame in frames), default=0.0)
        symptom = f"KV cache usage peaked at {percent(usage)} in {when}{_trend(frames)}."
        if silent:
            symptom = f"KV cache usage peaked at {percent(usage)} in {when}; no request has run since."
        cause = "Running requests hold more tokens than the cache should; once it is full, requests are preempted."
        within, source = usage <= objective, evidence.objectives_source
        measures = [Measure("KV cache usage (peak)", percent(usage), percent(objective), source, within)]
        if within:
            over = [frame.end for frame in evidence.frames if (frame.usage_max or 0.0) > objective]
            until = f" until {clock(over[-1], evidence.now)}" if over else ""
            symptom = f"KV cache usage was above its objective of {percent(objective)}{until};"
            symptom += f" peak {percent(usage)} in {when}."
            enough, pause = percent(objective - USAGE_MARGIN), round_duration(SILENCE_SECONDS)
            cause = f"Recovering: the finding closes after 30s at {enough} or less, or {pause} within the objective."
            return Finding(self.code, Severity.WARNING, since, symptom, cause, tuple(measures), recovering=True)
        fixes = present((*more_cache(evidence), fewer_sequences(evidence, objective / usage)))
        return Finding(self.code, Severity.WARNING, since, symptom, cause, tuple(measures), fixes)


def _is_quiet(frame: Frame) -> bool:
    return frame.running_max == 0 and not frame.waiting_max


def _served(frames: Sequence[Frame]) -> int:
    """Number of frames up to the last one in which something ran or waited; all if nothing did."""
    return next((at + 1 for at in reversed(range(len(frames))) if not _is_quiet(frames[at])), len(frames))


def _trend(frames: Sequence[Frame]) -> str:
    values = [frame.usage_max for frame in frames if frame.usage_max is not None]
    return " and is rising" if len(values) >= 2 and values[-1] > values[0] + 0.02 else ""


class Preempting(Rule):
    """Requests are evicted from the KV cache and recomputed; bursts that are minutes apart are one finding."""

    code = "preempting"
    of_traffic = through_pauses = of_the_last_minute = True

    def verdicts(self, evidence: Evidence) -> Sequence[Judgment]:
        """Judge by preemptions per request and per minute, over the minute up to each frame.

        It also ends after five minutes within the objective.
        """
        frames, objective = evidence.frames, evidence.objectives.preemption_rate
        found: list[Judgment] = []
        met: list[bool | None] = []
        counted = zip(totals(frames, "preemptions_total"), totals(frames, "requests_finished_total"), strict=True)
        for at, (count, finished) in enumerate(counted):
            if count is None:
                found.append(Judgment.UNKNOWN)
                met.append(None)
                continue
            share = preemptions_per_request(count, finished, frames[at].grown.requests_running)
            rate = count * 60 / _length(frames, at)
            found.append(self._verdict(objective, count, share, rate))
            met.append(all(_within(objective, share, rate)))
        return over_once_met(found, met)

    @staticmethod
    def _verdict(objective: float, count: float, share: float | None, rate: float) -> Judgment:
        if not count:
            return Judgment.SILENT
        if rate > MOST_PREEMPTIONS or (share is not None and share > objective and count >= FEWEST_PREEMPTIONS):
            return Judgment.HOLDS
        few = share is not None and share <= objective / 2
        return Judgment.SILENT if few and rate <= MOST_PREEMPTIONS / 2 else Judgment.UNCLEAR

    def describe(self, evidence: Evidence, since: float) -> Finding:
        """How many preemptions, and the effect on streams; for the last burst if preemption has paused."""
        found = self.verdicts(evidence)
        last = next((at for at in reversed(range(len(found))) if found[at] is not Judgment.SILENT), len(found) - 1)
        if last == len(found) - 1:
            return self._described(evidence, since)
        then = self._described(replace(evidence, frames=evidence.frames[: last + 1], minute=None), since)
        pause = round_duration(SILENCE_SECONDS)
        symptom = f"{then.symptom.removesuffix('.')}; hardly any since."
        cause = f"{then.cause} Preemption comes in bursts: the finding closes after {pause} with hardly any."
        if then.recovering:
            cause = then.cause
        return replace(then, symptom=symptom, cause=cause, recovering=True)

    def _described(self, evidence: Evidence, since: float) -> Finding:
        frames = evidence.last(MINUTE)
        count, finished = (totals(frames, key)[-1] for key in ("preemptions_total", "requests_finished_total"))
        running = frames[-1].grown.requests_running
        share = preemptions_per_request(count, finished, running)
        length = _length(frames, len(frames) - 1)
        rate = (count or 0.0) * 60 / length
        objective = evidence.objectives.preemption_rate
        newest, minute = evidence.now - frames[-1].end < NEWEST_SECONDS, evidence.minute
        # Newer than the frames; after a load has ended, its rates are zero instead of a mean.
        if newest and minute is not None and minute.preemptions_per_minute is not None and not load_ended(minute):
            rate, share, length = minute.preemptions_per_minute, minute.preemption_share, minute.end - minute.start
            running, finished = minute.requests_running, (minute.requests_per_second or 0.0) * length
            length = min(length, 60.0)  # shorter soon after the start
            count = rate * length / 60
        if newest and length <= 60:
            seen = f"{counted(round(count or 0.0), 'preemption')} in the last minute"
        else:
            seen = f"{rate:.0f} preemptions/min in the minute to {clock(frames[-1].end, evidence.now, seconds=True)}"
        symptom = f"{seen}{_per_request(share, finished, running)}."
        shown = UNKNOWN if share is None else f"{share:.2g}"
        few, rare = _within(objective, share, rate)
        measures = [
            Measure("preemptions per request", shown, f"{objective:g}", evidence.objectives_source, few),
            Measure("preemptions", f"{rate:.0f}/min", f"{MOST_PREEMPTIONS:.0f}/min", "built-in", rare),
        ]
        if evidence.resumed is not None and evidence.resumed.tokens:
            found, looked_up = evidence.resumed.cached_tokens, evidence.resumed.tokens
            value = f"{percent(found / looked_up)} of {count_text(looked_up)} tokens"
            measures.append(Measure("still cached when resumed", value))
        histogram = observed(frames, "itl")[-1]
        usual, worst = p50(histogram), p99(histogram)
        if usual is not None and worst is not None:
            times = worst.factor_of(usual)
            measures.append(Measure("ITL p99", f"{worst.text}, {times} its median" if times else worst.text))
        if few and rare:
            pause = round_duration(SILENCE_SECONDS)
            cause = f"Recovering: the finding closes after {pause} with preemptions within their objective."
            symptom = f"Preemptions were above their objective; now {symptom}"
            return Finding(self.code, Severity.CRITICAL, since, symptom, cause, tuple(measures), recovering=True)
        cause = "The KV cache is full: requests are evicted and recomputed from the prompt."
        fixes = present((*more_cache(evidence), fewer_sequences(evidence, KEPT_WHEN_PREEMPTING)))
        return Finding(self.code, Severity.CRITICAL, since, symptom, cause, tuple(measures), fixes)


def _within(objective: float, share: float | None, rate: float) -> tuple[bool, bool]:
    """Whether preemptions per request, and those per minute, are within their limits."""
    return not rate or (share is not None and share <= objective), rate <= MOST_PREEMPTIONS


def _per_request(share: float | None, finished: float | None, running: float | None) -> str:
    if share is None:
        return ""
    return f", {share:.2g} per {'finished' if (finished or 0) >= (running or 0) else 'running'} request"


def _length(frames: Sequence[Frame], at: int) -> float:
    """Seconds of the minute up to a frame; at least 60, also right after the start."""
    return max(60.0, frames[at].end - frames[max(0, at - MINUTE + 1)].start)


class ContextUnused(Rule):
    """``max-model-len`` is far longer than any request."""

    code = "context_unused"
    SHARE, ENOUGH, REQUESTS = 0.25, 0.35, 200
    LONG, MUCH = 8192, 0.05
    """A context that could take a smaller fraction of the KV cache than this is not worth mentioning."""

    def verdicts(self, evidence: Evidence) -> Sequence[Judgment]:
        """Judge by the longest prompt plus output, over all frames so far, or plus the longest output asked for."""
        frames, context = evidence.frames, evidence.max_model_len
        if context is None:
            return [Judgment.UNKNOWN] * len(frames)
        cache = evidence.cache_tokens
        if context < self.LONG and (cache is None or context < self.MUCH * cache):
            return [Judgment.FAILS] * len(frames)
        seen = (observed(frames, key, len(frames)) for key in (*LENGTHS, MAX_TOKENS_PARAM))
        known = evidence.longest_seen
        return [
            self._verdict(prompt, answer, max_tokens, known, context)
            for prompt, answer, max_tokens in zip(*seen, strict=True)
        ]

    def _verdict(
        self,
        prompt: Histogram | None,
        answer: Histogram | None,
        max_tokens: Histogram | None,
        known: float,
        context: int,
    ) -> Judgment:
        if prompt is None or answer is None:
            return Judgment.UNKNOWN
        if min(prompt.count, answer.count) < self.REQUESTS:
            return Judgment.UNCLEAR
        asked, _ = known_max_tokens(max_tokens, prompt, context)
        longest = min(max(longest_request(prompt, answer, asked), known), context)
        if fitting_context(longest) >= context:
            return Judgment.OVER  # nothing to shorten, from the first long request on
        return above(-longest / context, -self.SHARE, -self.ENOUGH)

    def describe(self, evidence: Evidence, since: float) -> Finding:
        """Actual lengths compared with the limit."""
        frames, context = evidence.frames, evidence.max_model_len or 0
        prompt, answer, max_tokens = (merged(frames, key) for key in (*LENGTHS, MAX_TOKENS_PARAM))
        longest, requests, tradeoff = evidence.longest_seen, 0.0, MAX_TOKENS_REJECTED
        if prompt is not None and answer is not None:
            asked, all_known = known_max_tokens(max_tokens, prompt, context)
            longest, requests = max(longest_request(prompt, answer, asked), longest), min(prompt.count, answer.count)
            tradeoff = LONGER_REJECTED if all_known else MAX_TOKENS_REJECTED
        longest = min(longest, context)
        fitting = fitting_context(longest)
        amount = f"up to {longest:,.0f} tokens in {requests:,.0f} requests"
        measures = [Measure("prompt + output", amount, f"{context:,}", "max-model-len")]
        cause = "One long request can take much of the KV cache from the others."
        if cache := evidence.cache_tokens:
            share = f"{percent(min(1.0, context / cache))} of the KV cache{evidence.each}"
            measures.append(Measure("one full context takes", share))
        why = (
            f"No request of the last half hour took, or is known to ask for, more than {longest:,.0f} tokens; this "
            "leaves 25% headroom."
        )
        fixes = (Fix(Changes({"max-model-len": fitting}), why, tradeoff),)
        share = f"{percent(longest / context)} of max-model-len ({context:,} tokens)"
        symptom = f"Requests of the last half hour needed at most {share}."
        return Finding(self.code, Severity.NOTE, since, symptom, cause, tuple(measures), fixes)
