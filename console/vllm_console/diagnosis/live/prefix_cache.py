"""Findings about prefix caching: off though it would help, turned off by vLLM itself, on without hits."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_console.diagnosis.finding import Finding, Fix, Measure, Severity
from vllm_console.diagnosis.live.fixes import (
    WORTH_CACHING,
    cached_states,
    can_cache_prefixes,
    more_cache,
    present,
    setting,
    share_prefixes,
)
from vllm_console.diagnosis.live.frame_sums import MINUTE, observed, totals
from vllm_console.diagnosis.live.rule import Evidence, Judgment, Rule
from vllm_console.history.frames import STEP_SECONDS, Frame, total
from vllm_console.metrics.sample import Histogram
from vllm_console.text import count, percent, seconds
from vllm_launchers.plan.flags import PREFIX, TRANSFER, flag_names
from vllm_launchers.vllm.flags.speculation import SPECULATION_FLAGS
from vllm_launchers.vllm.release_defaults import caches_linear_prefixes, can_cache_linear_prefixes

LARGE_STEP = 64
"""Maximum block size of ordinary models in tokens; models with Mamba layers have hundreds or thousands."""

SMALL = "The overhead is small: disable it only if every millisecond counts."

MOST_TOO_SHORT = 0.9
"""If at least this fraction of prompts is too short for any hit, that is why there are none."""


class PrefixCacheIdle(Rule):
    """Prefix caching is on but has hardly any hits."""

    code = "prefix_cache_idle"
    optional = True
    LOW, ENOUGH, SPAN, TOKENS = 0.02, 0.10, 5 * MINUTE, 20_000

    def verdicts(self, evidence: Evidence) -> Sequence[Judgment]:
        """Judge by the hit rate over five minutes, if enough prompt tokens were looked up."""
        frames = evidence.frames
        if evidence.flags.get(PREFIX) is False:
            return [Judgment.FAILS] * len(frames)
        asked = totals(frames, "prefix_cache_queries_total", self.SPAN)
        found = totals(frames, "prefix_cache_hits_total", self.SPAN)
        return [
            Judgment.UNKNOWN if queries is None else self._verdict(at, queries, hits or 0.0)
            for at, (queries, hits) in enumerate(zip(asked, found, strict=True))
        ]

    def _verdict(self, at: int, queries: float, hits: float) -> Judgment:
        if hits > self.ENOUGH * queries:  # also of few tokens, so that it ends when traffic changes
            return Judgment.FAILS
        if at + 1 < self.SPAN or queries < self.TOKENS:
            return Judgment.UNCLEAR
        return Judgment.HOLDS if hits < self.LOW * queries else Judgment.UNCLEAR

    def describe(self, evidence: Evidence, since: float) -> Finding:
        """The hit rate, and why there are no hits, as far as known."""
        hits = hit_rate(evidence.last(self.SPAN)) or 0.0
        limit = self.LOW if hits < self.LOW else self.ENOUGH  # the limit until which it stays open
        measures = [Measure("prefix cache hit rate", percent(hits, 1), percent(limit), "built-in")]
        symptom = f"Prefix cache hit rate is {percent(hits, 1)}."
        step = evidence.frames[-1].prefix_step
        if step is not None and step > LARGE_STEP:
            return self._in_large_steps(evidence, since, symptom, measures, step)
        if evidence.linear_layers:
            cause = f"Prompts share hardly any prefix, or one that is not kept: {STATES}."
            return Finding(self.code, Severity.NOTE, since, symptom, cause, tuple(measures))
        fix = setting(PREFIX, False, "Hardly any prompt token is found in the cache.",
                         "Shared prefixes would be recomputed every time.")  # fmt: skip
        lengths = observed(evidence.frames, "prompt_tokens", self.SPAN)[-1]
        if step is not None and lengths is not None and lengths.count and lengths.sum / lengths.count < 2 * step:
            measures.append(Measure("prompt length", f"{count(lengths.sum / lengths.count)} tokens on average"))
            cause = f"Prompts share hardly any prefix, or one shorter than a block of {step} tokens."
            return Finding(self.code, Severity.NOTE, since, symptom, f"{cause} {SMALL}", tuple(measures), (fix,))
        if (kept := kept_seconds(evidence, self.SPAN)) is not None and kept < self.SPAN * STEP_SECONDS:
            return self._evicted(evidence, since, symptom, measures, kept, fix)
        cause = f"Prompts share hardly any prefix. {SMALL}"
        return Finding(self.code, Severity.NOTE, since, symptom, cause, tuple(measures), (fix,))

    def _evicted(
        self, evidence: Evidence, since: float, symptom: str, measures: list[Measure], kept: float, fix: Fix
    ) -> Finding:
        """For a cache that is refilled so often that a prefix may be evicted before it repeats."""
        measures.append(Measure("evicted when unused for", f"about {seconds(kept)}", "", "by tokens computed and room"))
        late = f"later than about {seconds(kept)}"
        cause = f"Prompts share hardly any prefix, or a prefix is reused only after its eviction, {late}."
        # Preempted requests find their own blocks again: without the cache, all of them would be computed again.
        preempted = total(evidence.last(self.SPAN), "preemptions_total")
        fixes = (*(() if preempted else (fix,)), *more_cache(evidence))
        return Finding(self.code, Severity.NOTE, since, symptom, cause, tuple(measures), fixes)

    def _in_large_steps(
        self, evidence: Evidence, since: float, symptom: str, measures: list[Measure], step: int
    ) -> Finding:
        """For a model whose prefixes are cached in large blocks: shorter ones are computed each time."""
        lengths = observed(evidence.frames, "prompt_tokens", self.SPAN)[-1]
        short = at_most(lengths, step) if lengths is not None else None
        blocks = f"This model's prefixes are cached in blocks of {count(step)} tokens"
        if short is not None:
            measures.append(Measure(f"prompts of at most {count(step)} tokens", f"at least {percent(short)}"))
        if short is not None and short >= MOST_TOO_SHORT:
            cause = f"{blocks}, and {percent(short)} of the prompts have no more than that: they can't hit the cache."
        else:
            cause = f"{blocks}: prompts share hardly any prefix, or one that is shorter."
        fixes = present((finer_prefixes(evidence, step),))
        return Finding(self.code, Severity.NOTE, since, symptom, cause, tuple(measures), fixes)


def kept_seconds(evidence: Evidence, frames: int) -> float | None:
    """Roughly how long a cached block outlives its last use: until all blocks that no request holds were refilled.

    vLLM evicts the least recently used block first. Judged by the frames with traffic. None if nothing is computed, or
    if blocks are not all alike: models with linear layers or sliding-window attention.
    """
    span = [frame for frame in evidence.last(frames) if frame.grown.generation_tokens_total]
    tokens = evidence.cache_tokens
    usages = [frame.usage_max for frame in span if frame.usage_max is not None]
    if tokens is None or not usages or evidence.linear_layers or evidence.sliding_layers:
        return None
    counted = (total(span, f"{name}_total") or 0.0 for name in ("prompt_tokens", "generation_tokens"))
    filled = (sum(counted) - (total(span, "prefix_cache_hits_total") or 0.0)) / evidence.engines
    seconds_ = sum(frame.seconds for frame in span)
    return (1 - sum(usages) / len(usages)) * tokens * seconds_ / filled if filled > 0 else None


def at_most(lengths: Histogram, tokens: int) -> float | None:
    """A lower bound of the fraction of lengths that are at most ``tokens``; None without observations."""
    if not lengths.count:
        return None
    counts = [known for bound, known in zip(lengths.bounds, lengths.counts, strict=True) if bound <= tokens]
    return counts[-1] / lengths.count if counts else 0.0


STATES = "of models with Mamba or linear-attention layers, vLLM keeps what prompts end with, and shared whole blocks"

UNIT = "prefix-match-unit"
UNITS = (64, 32, 16)
"""Candidate units in tokens; a unit must divide the block size."""
UNIT_SINCE = (0, 32, 0)
"""First release with which it was tested: prompts that were sent again or continued had hits."""
NO_UNIT = ("decode-context-parallel-size", TRANSFER, *SPECULATION_FLAGS, UNIT)
"""Flags to which other rules apply."""


def finer_prefixes(evidence: Evidence, step: int) -> Fix | None:
    """Hits within a block, for models with linear layers and otherwise full attention."""
    unit = next((size for size in UNITS if step % size == 0), None)
    able = evidence.linear_layers and not evidence.sliding_layers and not evidence.attention_free
    if unit is None or not able or evidence.release is None or evidence.release < UNIT_SINCE:
        return None
    if not flag_names(evidence.flags).isdisjoint(NO_UNIT):
        return None
    why = f"Repeated or continued prompts, such as a chat's next turn, are then found in steps of {unit} tokens."
    tradeoff = "Shared beginnings shorter than a block, such as a system prompt, are still computed each time."
    return setting(UNIT, unit, why, tradeoff)


def hit_rate(frames: Sequence[Frame]) -> float | None:
    """Fraction of prompt tokens found in the prefix cache; None if none was looked up."""
    asked = total(frames, "prefix_cache_queries_total")
    return (total(frames, "prefix_cache_hits_total") or 0.0) / asked if asked else None


class PrefixCacheMissed(Rule):
    """Prefix caching is off although prompts share prefixes.

    While it is off vLLM has no such counters, so the figure is from an earlier run or from the preset.
    """

    code = "prefix_cache_missed"
    ENOUGH_REQUESTS = 20

    def verdicts(self, evidence: Evidence) -> Sequence[Judgment]:
        """Judge by the flag and the known reuse, only while requests arrive."""
        off = evidence.flags.get(PREFIX) is False
        if not off or evidence.reuse[0] <= WORTH_CACHING:
            return [Judgment.FAILS] * len(evidence.frames)
        ended = totals(evidence.frames, "requests_finished_total", len(evidence.frames))
        return [
            Judgment.UNKNOWN if count is None else Judgment.HOLDS if count >= self.ENOUGH_REQUESTS else Judgment.UNCLEAR
            for count in ended
        ]

    def describe(self, evidence: Evidence, since: float) -> Finding:
        """What is recomputed each time."""
        reuse, source = evidence.reuse
        measures = (Measure("prefix reuse", percent(reuse), percent(WORTH_CACHING), source),)
        fixes = present((share_prefixes(evidence),))
        symptom = f"Prompts share a prefix ({percent(reuse)}, {source}) that is recomputed for every request."
        return Finding(self.code, Severity.WARNING, since, symptom, "Prefix caching is off.", measures, fixes)


class PrefixCacheOff(Rule):
    """No prefix is cached although no flag disables it: vLLM turned caching off for this model or platform.

    vLLM logs this only as a debug message, or not at all, and its hit rate stays at 0.
    """

    code = "prefix_cache_off"
    ENOUGH_REQUESTS, SPAN, TOKENS = 20, 5 * MINUTE, 20_000

    def verdicts(self, evidence: Evidence) -> Sequence[Judgment]:
        """Judge by vLLM's reported configuration and its lookups, only while requests arrive."""
        frames = evidence.frames
        unique = evidence.workload is not None and evidence.reuse[0] <= WORTH_CACHING
        if unique or evidence.flags.get(PREFIX) is False:
            return [Judgment.FAILS] * len(frames)
        ended = totals(frames, "requests_finished_total", len(frames))
        sums = (totals(frames, f"{name}_total", self.SPAN) for name in ("prefix_cache_queries", "prompt_tokens"))
        found = []
        for at, (frame, requests, asked, tokens) in enumerate(zip(frames, ended, *sums, strict=True)):
            if frame.prefix_caching is None or requests is None:
                found.append(Judgment.UNKNOWN)
            elif frame.prefix_caching and not self._skipped(at, asked, tokens):
                found.append(Judgment.FAILS)
            else:
                found.append(Judgment.HOLDS if requests >= self.ENOUGH_REQUESTS else Judgment.UNCLEAR)
        return found

    def _skipped(self, at: int, asked: float | None, tokens: float | None) -> bool:
        """Whether vLLM looks up nothing, by its counters, which count each prompt when it is admitted."""
        return at + 1 >= self.SPAN and asked == 0 and (tokens or 0.0) >= self.TOKENS

    def describe(self, evidence: Evidence, since: float) -> Finding:
        """The finding that prefixes are recomputed, and who decided that."""
        reuse, source = evidence.reuse
        worth = reuse > WORTH_CACHING
        measures = [Measure("prefix reuse", percent(reuse), percent(WORTH_CACHING), source)] if worth else []
        if evidence.frames[-1].prefix_caching is False:
            asked = evidence.flags.get(PREFIX) is True
            flags = "although the flags ask for it" if asked else "and no flag says so"
            symptom = f"No prefix is cached: vLLM turned prefix caching off, {flags}."
            cause, fix = turned_off(evidence)
        else:
            symptom = "No prompt is looked up in the prefix cache, although vLLM reports that it is on."
            cause, fix = SKIPPED, None
        severity = Severity.WARNING if worth and fix is not None else Severity.NOTE
        return Finding(self.code, severity, since, symptom, cause, tuple(measures), present((fix,)))


SKIPPED = (
    "The engine turned it off once it had read the model's layers (its log then says 'Disabling prefix caching'), "
    "or all requests skip it, as those that ask for prompt logprobs do."
)


def turned_off(evidence: Evidence) -> tuple[str, Fix | None]:
    """Why vLLM caches no prefixes of this model, as far as known, and what changes it."""
    asked, release = evidence.flags.get(PREFIX) is True, evidence.release
    if evidence.mla and evidence.build == "cpu":
        return "On a CPU, vLLM turns prefix caching off for models with MLA, whatever the flags say.", None
    if evidence.attention_free and not asked:
        return "vLLM caches no prefixes of models without attention unless a flag asks for it.", None
    if evidence.linear_layers and not asked and release is not None and not caches_linear_prefixes(release):
        cause = "Before 0.28, vLLM caches prefixes of models with Mamba or linear-attention layers only if a flag asks."
        return cause, _linear_prefixes(evidence)
    able = release is None or can_cache_linear_prefixes(release, drafts=False)
    if evidence.linear_layers and asked and not able:
        return "This release can't cache prefixes of models with Mamba or linear-attention layers.", None
    return "It does so for some models and platforms; its log may say why.", None


def _linear_prefixes(evidence: Evidence) -> Fix | None:
    if not can_cache_prefixes(evidence):
        return None
    why = "Prefixes that repeat are then computed once."
    tradeoff = "New in this release for such layers; blocks become large, so only long prefixes are found."
    return Fix(cached_states(evidence), why, tradeoff)
