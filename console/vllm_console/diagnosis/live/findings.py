"""All findings of a server at one moment, the most severe first. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from vllm_console.diagnosis.finding import WINDOW, Finding, Measure, Severity, Span
from vllm_console.diagnosis.live.cache import (
    ContextUnused,
    KvCachePressure,
    Preempting,
)
from vllm_console.diagnosis.live.engine import (
    DraftsRejected,
    EngineHung,
    StarvedByClients,
    engine_dead,
    first_request,
    in_hang,
    without_flags,
)
from vllm_console.diagnosis.live.frame_sums import MINUTE, observed, p99, sustained_usage, totals
from vllm_console.diagnosis.live.gpus import GpuThrottled, PcieNarrow, TensorParallelStalls
from vllm_console.diagnosis.live.latency import PrefillContention, SlowFirstToken, SlowTokens
from vllm_console.diagnosis.live.prefix_cache import PrefixCacheIdle, PrefixCacheMissed, PrefixCacheOff
from vllm_console.diagnosis.live.queue import (
    NotAdmitted,
    OversubscribedCompute,
    OversubscribedMemory,
    OversubscribedSequences,
)
from vllm_console.diagnosis.live.ranks import UnevenRanks
from vllm_console.diagnosis.live.refused import RequestsRefused
from vllm_console.diagnosis.live.rule import (
    SILENCE_SECONDS,
    UNJUDGED_SECONDS,
    Evidence,
    Judgment,
    Rule,
    held_spans,
    holds_since,
    is_served,
)
from vllm_console.diagnosis.live.tenants import GpuClaimed, GpuMemoryBelowReserve, GpuMemoryContended
from vllm_console.history.frames import Frame
from vllm_console.history.timeline import IDLE_SECONDS
from vllm_console.metrics.quantile import Quantile
from vllm_console.text import percent, seconds
from vllm_launchers.presets.model import Objectives

RULES: tuple[Rule, ...] = (
    EngineHung(),
    RequestsRefused(),
    Preempting(),
    OversubscribedMemory(),
    OversubscribedSequences(),
    OversubscribedCompute(),
    NotAdmitted(),
    UnevenRanks(),
    KvCachePressure(),
    PrefillContention(),
    TensorParallelStalls(),
    SlowTokens(),
    SlowFirstToken(),
    GpuThrottled(),
    GpuMemoryBelowReserve(),
    GpuMemoryContended(),
    GpuClaimed(),
    PcieNarrow(),
    PrefixCacheMissed(),
    PrefixCacheOff(),
    PrefixCacheIdle(),
    DraftsRejected(),
    ContextUnused(),
    StarvedByClients(),
)
"""All rules that are evaluated."""

OF_TRAFFIC = frozenset(rule.code for rule in RULES if rule.of_traffic)
"""Findings about what requests experience."""

SETTLING_SECONDS = 20.0
"""Nothing is judged for this long after a server becomes ready: first requests warm it up."""

FIX_SETTLES_SECONDS = 60.0
"""A finding's fix may change for this long; after that it stays, so that what a user reads is what gets staged."""

FIX_RENEWED_SECONDS = 600.0
"""Fixes are recomputed at multiples of this on the clock, because traffic changes."""


def findings(evidence: Evidence, rules: Sequence[Rule] = RULES) -> tuple[Finding, ...]:
    """All open findings, most severe, then oldest first; `Healthy` is added if service is good and only notes hold."""
    return _as_far_as_known(_findings(evidence, rules), evidence)


def _as_far_as_known(found: tuple[Finding, ...], evidence: Evidence) -> tuple[Finding, ...]:
    return found if evidence.flags_known else without_flags(found)


def _findings(evidence: Evidence, rules: Sequence[Rule]) -> tuple[Finding, ...]:
    if (dead := engine_dead(evidence)) is not None:
        return (dead,)
    newest = evidence.frames[-1] if evidence.frames else None
    if newest is not None and newest.unanswered and evidence.now - newest.end <= UNJUDGED_SECONDS:
        return (first_request(evidence),)
    judged = _settled(evidence)
    frames = judged.frames
    if not frames or evidence.now - frames[-1].end > UNJUDGED_SECONDS:
        return ()
    held, codes = _held(rules, judged)
    found = [
        (rule, replace(_described(rule, judged, since), held=spans))
        for rule, since, spans in held
        if not codes.intersection(rule.explained_by)
    ]
    if all(finding.severity is Severity.NOTE for _, finding in found):
        well = Healthy()
        if (since := holds_since(well.verdicts(judged), frames)) is not None and well.met(judged):
            found.append((well, well.describe(judged, since)))
    return tuple(finding for _, finding in sorted(found, key=_rank))


_SEVERITIES = list(Severity)


def _rank(found: tuple[Rule, Finding]) -> tuple[int, int, bool, float]:
    """Among equally severe findings, one that a change of flags fixes is more useful."""
    rule, finding = found
    flags = _has_flag_fix(finding)
    among_equals = 2 if rule.optional else (0 if flags else 2) if rule.missed_objective else 1
    return _SEVERITIES.index(finding.severity), among_equals, not flags, finding.since


def _held(rules: Sequence[Rule], evidence: Evidence) -> tuple[list[tuple[Rule, float, tuple[Span, ...]]], set[str]]:
    """The rules whose findings are open, with since when and when they held, and the codes that explain others
    (`Rule.explained_by`)."""
    frames, idle = evidence.frames, evidence.idle_seconds
    if idle >= SILENCE_SECONDS:
        rules = [rule for rule in rules if not rule.of_traffic]
    verdicts = [(rule, rule.verdicts(evidence)) for rule in rules]
    held = [
        (rule, since, held_spans(found, frames, since, of_traffic=rule.of_traffic))
        for rule, found in verdicts
        if (since := holds_since(found, frames)) is not None
    ]
    if idle >= IDLE_SECONDS:
        held = [one for one in held if not one[0].of_traffic or one[0].through_pauses]
    if any(rule.code == EngineHung.code for rule, _, _ in held):
        held = [one for one in held if one[0].code == EngineHung.code]  # others predate the hang
    calm = {rule.code for rule, found in verdicts if idle < IDLE_SECONDS and _is_calm(found)}
    codes = {rule.code for rule, _, _ in held} - calm
    if (served := _served(frames)) < len(frames):
        # What explained a finding before the pause still does until it could have begun again.
        then = frames[:served]
        codes |= {rule.code for rule, found in verdicts if holds_since(found[:served], then) is not None}
    return held, codes


def _is_calm(found: Sequence[Judgment]) -> bool:
    """Whether the subject of these verdicts has paused for a minute; it then explains no ongoing problem."""
    return all(verdict is Judgment.SILENT for verdict in found[-MINUTE:])


def _served(frames: Sequence[Frame]) -> int:
    """Number of frames up to the last pause, if it is ongoing or ended within the last minute; otherwise all."""
    busy = [is_served(one) for one in frames]
    end = len(frames)
    if all(busy[-MINUTE:]):
        return end
    while busy[end - 1]:
        end -= 1
    while end and not busy[end - 1]:
        end -= 1
    return end


def _settled(evidence: Evidence) -> Evidence:
    settled = evidence.ready_at + SETTLING_SECONDS
    frames = tuple(frame for frame in evidence.frames if frame.start >= settled and not frame.compiling)
    return replace(evidence, frames=frames)


def with_minute(found: Sequence[Finding], evidence: Evidence) -> tuple[Finding, ...]:
    """The newest frame's findings with the current figures of the last minute; cause and fixes stay."""
    judged = _settled(evidence)
    rules = {rule.code: rule for rule in RULES if rule.of_the_last_minute}
    renewed = tuple(_renewed(one, rules[one.code], judged) if one.code in rules else one for one in found)
    return _as_far_as_known(renewed, evidence)


def _renewed(found: Finding, rule: Rule, evidence: Evidence) -> Finding:
    now = replace(rule.describe(evidence, found.since), held=found.held)
    if now.recovering or found.recovering:
        return now
    return replace(now, cause=found.cause, fixes=found.fixes)


def _has_flag_fix(finding: Finding) -> bool:
    return any(fix.changes.set or fix.changes.unset for fix in finding.fixes)


def _described(rule: Rule, evidence: Evidence, since: float) -> Finding:
    """The finding with current figures, and with cause and fixes as last computed."""
    now = rule.describe(evidence, since)
    if now.recovering:
        return now  # earlier causes and fixes no longer apply
    settled = max(since + FIX_SETTLES_SECONDS, evidence.now // FIX_RENEWED_SECONDS * FIX_RENEWED_SECONDS)
    frames = tuple(frame for frame in evidence.frames if frame.end <= settled)
    if len(frames) in (0, len(evidence.frames)):
        return now
    moments = tuple(moment for moment in evidence.moments if moment.at <= settled) or evidence.moments
    then = rule.describe(replace(evidence, frames=frames, moments=moments, minute=None), since)
    return now if then.recovering else replace(now, cause=then.cause, fixes=then.fixes)


# -- healthy: requests are served, and within the objectives ----------------------------------------------------------


NEARLY = 1.25
"""A p99 may exceed its objective by up to this factor by chance without ending a healthy state."""


class Healthy(Rule):
    """Requests are served within the objectives."""

    code = "healthy"

    def verdicts(self, evidence: Evidence) -> Sequence[Judgment]:
        """Judge the minute up to each frame; after a hang it begins anew, as the few long gaps do not reach a p99."""
        frames, objectives = evidence.frames, evidence.objectives
        hung = in_hang(frames)
        minutes = (totals(frames, "generation_tokens_total"), observed(frames, "ttft"), observed(frames, "itl"))
        found = []
        for at, (tokens, ttft, itl) in enumerate(zip(*minutes, strict=True)):
            if tokens is None:
                found.append(Judgment.UNKNOWN)
                continue
            if any(hung[max(0, at + 1 - MINUTE) : at + 1]):
                found.append(Judgment.OVER)
                continue
            worst = _worst(p99(ttft), p99(itl), objectives)
            served = tokens > 0
            well = Judgment.HOLDS if worst <= 1.0 else Judgment.UNCLEAR if worst <= NEARLY else Judgment.FAILS
            full = (sustained_usage(frames, at) or 0.0) > objectives.kv_cache_usage
            found.append(well if served and not full else Judgment.FAILS)
        return found

    @staticmethod
    def met(evidence: Evidence) -> bool:
        """Whether the figures of the last minute, exact ones where known, do not contradict it."""
        ttft, itl = (evidence.latency(key).p99 for key in ("ttft", "itl"))
        return _worst(ttft, itl, evidence.objectives) <= NEARLY

    def describe(self, evidence: Evidence, since: float) -> Finding:
        """The figures that have objectives."""
        frames, objectives, source = evidence.last(MINUTE), evidence.objectives, evidence.objectives_source
        usage = sustained_usage(frames, len(frames) - 1) or 0.0
        measures = [Measure("KV cache usage (sustained)", percent(usage), percent(objectives.kv_cache_usage), source)]
        for key, objective in (("ttft", objectives.ttft_p99_seconds), ("itl", objectives.itl_p99_seconds)):
            if (latency := evidence.latency(key).p99) is not None:
                measures.append(Measure(f"{key.upper()} p99", latency.text, seconds(objective), source))
        symptom = f"All objectives met in the {WINDOW}."
        return Finding(self.code, Severity.GOOD, since, symptom, "", tuple(measures))


def _worst(ttft: Quantile | None, itl: Quantile | None, objectives: Objectives) -> float:
    """The highest ratio of a p99 to its objective."""
    return max(_share(ttft, objectives.ttft_p99_seconds), _share(itl, objectives.itl_p99_seconds))


def _share(latency: Quantile | None, objective: float) -> float:
    """The ratio of a p99 to its objective; 0 without one. If only a bound is known, that bound is used."""
    return latency.nearest / objective if latency is not None else 0.0
