"""Latency findings: prompts that delay other streams, and objectives missed for other reasons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_console.diagnosis.finding import Finding, Fix, Measure, Severity
from vllm_console.diagnosis.live.fixes import (
    AT_THE_LIMIT,
    FOR_SPEED,
    PROMPT_TOKENS,
    another_place,
    more_capacity,
    more_sequences,
    no_more_sequences,
    present,
    quantize,
    queue_delays,
    reduce_load,
    setting,
    share_prefixes,
    shorter_steps,
    slow_steps,
)
from vllm_console.diagnosis.live.frame_sums import (
    MINUTE,
    SLOW_SHARE,
    count_above,
    mean,
    observed,
    p50,
    p99,
    surely_slow,
)
from vllm_console.diagnosis.live.rule import (
    ELSEWHERE,
    HELD_UP,
    SILENCE_SECONDS,
    Evidence,
    Judgment,
    Rule,
    over_once_met,
)
from vllm_console.history.frames import Frame, merged, total
from vllm_console.history.slow_steps import SlowSteps, slow_steps_of
from vllm_console.metrics.quantile import text_of
from vllm_console.metrics.sample import Histogram
from vllm_console.text import UNKNOWN, clock, round_duration, seconds
from vllm_launchers.plan.budget.memory_flags import least_step
from vllm_launchers.plan.flags import BATCHED, token_count
from vllm_launchers.vllm.flags.changes import Changes, Flags, whole_number
from vllm_launchers.vllm.flags.speculation import sequence_tokens
from vllm_launchers.vllm.model_folder import updates_adapters

if TYPE_CHECKING:
    from vllm_console.runs.store import PastRun

SPIKE = 3.0
"""An ITL p99 of this many times the median is a spike."""

API_SERVERS_SINCE = (0, 9, 2)
"""First known release with ``api-server-count``."""
RUST_FRONTEND = "VLLM_RUST_FRONTEND_PATH"
"""With it, or one of these flags, vLLM rejects a second API server or starts only one."""
LONG_PREFILL = "long-prefill-token-threshold"
_ONE_API_SERVER = ("enable-elastic-ep", "enable-fault-tolerance", "headless")

STALL = 4.0
"""A gap of this many times the objective is noticeable, though too rare to reach the p99."""

LEAST_STEP_TOKENS = 256
STEP_ROUND = 256
SLOWER_PROMPTS = "TTFT of long prompts rises, and fewer prompt tokens are computed per second."

MOSTLY = 0.5
"""Fraction of the slow steps that must compute prompts before prefill is their cause; also of a time."""

OFTEN = 1 / 3
"""Fraction of the slow steps that must exceed a limit of tokens per step before lowering the limit helps."""

FEWEST_STEPS = 5
"""Minimum number of recorded slow steps before they show a cause."""

BACK = 0.8
"""A latency must fall to this fraction of its objective before its finding ends."""


def _prompt_tokens(frame: Frame) -> float:
    return frame.grown.prompt_tokens_total or 0.0


def _peak(frames: Sequence[Frame], prompts: Histogram | None, most_running: int) -> float:
    """An upper bound on the prompt tokens of a step: those of a frame, and the bucket of the longest prompt.

    The longest 1%, at most three, are ignored: too few for spikes. If requests wait for no limit, as many may begin in
    one step.
    """
    peak = max(map(_prompt_tokens, frames), default=0.0)
    if prompts is None or not prompts.count:
        return peak
    _, longest = longest_of(prompts, min(3.0, 0.01 * prompts.count))
    free = (one.waiting_max or 0.0 for one in frames if (one.running_max or 0.0) < AT_THE_LIMIT * most_running)
    return min(peak, longest * (1 + max(free, default=0.0)))


def contention_span(evidence: Evidence) -> tuple[float, float]:
    """The time over which prefill contention is described (Unix seconds), for which step records are needed."""
    frames = evidence.when_observed("itl").last(PrefillContention.FRAMES)
    return (frames[0].start, frames[-1].end) if frames else (0.0, 0.0)


def _slow_steps(evidence: Evidence) -> SlowSteps | None:
    """The recorded steps in which a token came too late; None if there are too few to show a cause."""
    most: float = math.inf
    if evidence.flags.get("enable-chunked-prefill") is not False:
        most = min(evidence.max_num_batched_tokens, whole_number(evidence.flags, LONG_PREFILL, 0) or math.inf)
    found = slow_steps_of(evidence.steps, evidence.objectives.itl_p99_seconds, most)
    return found if len(found.prompt_tokens) >= FEWEST_STEPS else None


def _is_spike(frame: Frame, objective: float, engines: int) -> bool | None:
    """Whether many gaps, or one in half of an engine's streams, far exceed the objective without any preemption."""
    itl = frame.histogram("itl")
    if itl is None:
        return None
    usual, worst = p50(itl), p99(itl)
    if usual is None or worst is None or itl.count < 20 or frame.grown.preemptions_total:
        return False
    if usual.within(objective) is False:
        return False
    stalled = count_above(itl, STALL * objective) >= max(3.0, (frame.running_max or 0.0) / engines / 2)
    return stalled or (worst.within(objective) is False and worst.nearest >= SPIKE * usual.nearest)


class PrefillContention(Rule):
    """ITL spikes when prompts are computed, independent of load: occasionally, or in most frames."""

    code = "prefill_contention"
    of_traffic = through_pauses = True
    FRAMES, SPIKES, SHARE = 18, 3, 0.7
    SPIKES_PER_MINUTE = 4
    """Minimum number of frames with spikes in a minute."""

    def verdicts(self, evidence: Evidence) -> Sequence[Judgment]:
        """Judge by spikes in most of the last minute, or by those within three minutes that coincide with prompts."""
        frames, objective, engines = evidence.frames, evidence.objectives.itl_p99_seconds, evidence.engines
        spikes = [_is_spike(frame, objective, engines) for frame in frames]
        recorded = _slow_steps(evidence)
        if recorded is not None and not _due_to_prompts(recorded):
            return [Judgment.FAILS] * len(frames)
        prefill, prompts = (observed(frames, key, 5 * MINUTE) for key in ("prefill", "prompt_tokens"))
        minutes = observed(frames, "itl")
        found = []
        for at, spike in enumerate(spikes):
            begin = max(0, at - self.FRAMES + 1)
            span = range(begin, at + 1)
            if spike is None:
                found.append(Judgment.UNKNOWN)
            elif _is_silent(minutes[at], frames[at]):
                found.append(Judgment.SILENT)
            elif not any(spikes[one] for one in span):
                found.append(Judgment.FAILS)
            else:
                lengths = prompts[at] if recorded is None else None
                long = _peak(frames[begin : at + 1], lengths, evidence.most_running) > LEAST_STEP_TOKENS
                slow = _is_slow(prefill[at], objective / 2) and long
                most = sum(bool(spikes[one]) for one in span[-MINUTE:]) >= self.SPIKES_PER_MINUTE
                delayed = slow and (most or self._by_prompts(frames, spikes, span))
                found.append(Judgment.HOLDS if delayed else Judgment.UNCLEAR)
        return found

    def _by_prompts(self, frames: Sequence[Frame], spikes: Sequence[bool | None], span: range) -> bool:
        """Whether spikes coincide with more prompt tokens than calm frames have, but not with more load."""
        hit = [at for at in span if spikes[at]]
        calm = [frames[at] for at in span if spikes[at] is False]
        if len(hit) < self.SPIKES or not calm:
            return False
        from statistics import median  # its own imports take 3 ms, which a quiet server need not spend

        usual = median(map(_prompt_tokens, calm))
        # A prompt is counted at its first token, which may come in the next frame.
        near = [max(map(_prompt_tokens, frames[at : at + 2])) for at in hit]
        heavy = sum(tokens > 2 * usual + 1 for tokens in near)
        load = median(frame.running_max or 0.0 for frame in calm)
        loaded = median(frames[at].running_max or 0.0 for at in hit)
        return heavy >= self.SHARE * len(hit) and loaded <= 1.5 * load + 2

    def describe(self, evidence: Evidence, since: float) -> Finding:
        """How high the spikes are, and what coincides with them."""
        minute = merged(evidence.last(MINUTE), "itl")
        then = evidence if minute is not None and minute.count else evidence.when_observed("itl")
        frames, objective = then.last(self.FRAMES), evidence.objectives.itl_p99_seconds
        itl = merged(frames, "itl")
        low, high = longest_of(itl)
        usual = text_of(p50(itl))
        span = round_duration(frames[-1].end - frames[0].start)
        spikes = sum(bool(_is_spike(one, objective, evidence.engines)) for one in frames)
        measures = [
            Measure(f"ITL p99 in {span}", text_of(p99(itl)), seconds(objective), evidence.objectives_source),
            Measure(f"ITL max in {span}", _range(low, high)),
            Measure(f"ITL p50 in {span}", usual),
            Measure("ten-second windows with spikes", f"{spikes} of {len(frames)}"),
            Measure(f"prefill mean in {span}", seconds(mean(merged(frames, "prefill")))),
            Measure("peak prompt tokens in 10s", f"{_peak(frames, None, 0):,.0f}"),
        ]
        if (slow := _slow_steps(evidence)) is not None:
            measures.append(Measure(f"steps above {seconds(objective)} with prompts", f"{slow.share_above(0):.0%}"))
        when = f"In the last {span}" if then is evidence else f"In the {span} to {_end(then)}"
        symptom = f"{when}, ITL jumped from {usual} to {_range(low, high)} during prefill."
        cause = "Prefill and decode share a step: a long prefill delays every running stream."
        return Finding(self.code, Severity.WARNING, since, symptom, cause, tuple(measures), self._fixes(then))

    def _fixes(self, evidence: Evidence) -> tuple[Fix, ...]:
        tokens = evidence.max_num_batched_tokens
        whole = evidence.flags.get("enable-chunked-prefill") is False
        fitting = _step_within(evidence.last(self.FRAMES), evidence.objectives.itl_p99_seconds) or tokens / 2
        full = evidence.max_num_seqs * sequence_tokens(evidence.flags, evidence.release)
        whole_inputs = least_step(
            {**evidence.flags, "enable-chunked-prefill": True},
            evidence.release,
            mm_item=evidence.max_tokens_per_mm_item,
            state_block=evidence.state_block,
        )
        # Prompts need room in addition to a full batch's own tokens.
        least = max(LEAST_STEP_TOKENS, full + PROMPT_TOKENS, whole_inputs)
        less = max(-(-least // STEP_ROUND), int(min(fitting, tokens / 2)) // STEP_ROUND) * STEP_ROUND
        smaller = None
        prompts, slow = observed(evidence.frames, "prompt_tokens", 5 * MINUTE), _slow_steps(evidence)
        longest = min(tokens, _peak(evidence.last(self.FRAMES), prompts[-1], evidence.most_running))
        if slow is not None:
            longest = tokens if slow.share_above(less) >= OFTEN else 0
        if less < longest and whole:
            why = f"Long prompts are prefilled in chunks of {less:,} tokens between decode steps."
            changes = Changes({"enable-chunked-prefill": True, "max-num-batched-tokens": less})
            smaller = Fix(changes, why, SLOWER_PROMPTS)
        elif less < longest:
            why = f"Shorter steps: {less:,} tokens instead of {tokens:,}."
            smaller = setting("max-num-batched-tokens", less, why, SLOWER_PROMPTS)
        where = another_place(evidence) or "on another machine"
        second_server = Fix(Changes(), f"Send long prompts to a second server {where}.")
        return present((quantize(evidence, FOR_SPEED), share_prefixes(evidence), smaller, second_server))


def _due_to_prompts(slow: SlowSteps) -> bool:
    """Whether most slow steps computed prompts, and many of them long ones."""
    return slow.share_above(0) >= MOSTLY and slow.share_above(LEAST_STEP_TOKENS) >= OFTEN


def answered_by_shorter_steps(flags: Flags, earlier: Sequence[PastRun]) -> bool:
    """Whether one of the last two of these runs (newest first) had prefill contention and longer steps than now."""
    now = token_count(flags.get(BATCHED))
    return now is not None and any(
        any(code == PrefillContention.code for code, _, _ in run.findings)
        and (token_count(run.flags.get(BATCHED)) or math.inf) > now
        for run in earlier[:2]
    )


def _is_silent(minute: Histogram | None, frame: Frame) -> bool:
    """Whether nothing was observed in a minute and no request can still be observed at the end of the frame.

    Requests that wait, or whose prompt is being computed, are not counted yet: their silence is not good news.
    """
    return minute is not None and not minute.count and not frame.running_max and not frame.waiting_max


def _end(evidence: Evidence) -> str:
    return clock(evidence.frames[-1].end, evidence.now, seconds=True)


def _is_slow(prefill: Histogram | None, limit: float) -> bool:
    """Whether prompts, or some of them, take long enough to delay other streams."""
    if prefill is None or not prefill.count:
        return False
    longest = p99(prefill)
    return prefill.sum / prefill.count > limit or (longest is not None and longest.within(limit) is False)


def longest_of(histogram: Histogram | None, but: float = 0.0) -> tuple[float, float]:
    """Bounds of the bucket of the longest observation ``but`` so many: above the first, at most the second."""
    if histogram is None or not histogram.count:
        return 0.0, math.inf
    buckets = zip((0.0, *histogram.bounds), histogram.bounds, histogram.counts, strict=False)
    return next((low, high) for low, high, count in buckets if count >= histogram.count - but)


def _range(low: float, high: float) -> str:
    """A bucket as text: ``2.5s–5.0s``, ``<5.0s`` for the first one, ``>80s`` for the open one."""
    if math.isinf(high):
        return f">{seconds(low)}" if low else UNKNOWN
    return f"{seconds(low)}–{seconds(high)}" if low else f"<{seconds(high)}"


def _step_within(frames: Sequence[Frame], objective: float) -> float | None:
    """Number of prompt tokens computed in four fifths of the objective, at the observed prefill rate.

    Requests prefilled side by side count the same seconds each: they took at most as long as the frames.
    """
    prefill = merged(frames, "prefill")
    computed = (total(frames, "prompt_tokens_total") or 0.0) - (total(frames, "prefix_cache_hits_total") or 0.0)
    if prefill is None or prefill.sum <= 0 or computed <= 0:
        return None
    return BACK * objective * computed / min(prefill.sum, sum(frame.seconds for frame in frames))


class SlowTokens(Rule):
    """ITL p99 above its objective for a minute."""

    code = "slow_tokens"
    explained_by: tuple[str, ...] = (
        *HELD_UP,
        "kv_cache_pressure",
        "prefill_contention",
        "tensor_parallel_stalls",
        "gpu_throttled",
    )
    of_traffic = through_pauses = of_the_last_minute = missed_objective = True
    key, name = "itl", "ITL"

    def objective(self, evidence: Evidence) -> float:
        """The objective in seconds."""
        return evidence.objectives.itl_p99_seconds

    def verdicts(self, evidence: Evidence) -> Sequence[Judgment]:
        """Judge the minute up to each frame; it also ends after five minutes within the objective."""
        objective, frames = self.objective(evidence), evidence.frames
        minutes = observed(frames, self.key)
        found = [self._verdict(minute, objective, frame) for minute, frame in zip(minutes, frames, strict=True)]
        return over_once_met(found, (_is_met(minute, objective) for minute in minutes))

    @staticmethod
    def _verdict(minute: Histogram | None, objective: float, frame: Frame) -> Judgment:
        if minute is None:
            return Judgment.UNKNOWN
        worst = p99(minute)
        if worst is None:
            return Judgment.SILENT if _is_silent(minute, frame) else Judgment.UNCLEAR
        if worst.within(BACK * objective):
            return Judgment.FAILS
        return Judgment.HOLDS if surely_slow(minute, objective) else Judgment.UNCLEAR

    def describe(self, evidence: Evidence, since: float) -> Finding:
        """How slow it is, and why; over the minute up to the last observation if the last minute has none."""
        objective, then = self.objective(evidence), evidence
        if not evidence.latency(self.key).count:
            then = evidence.when_observed(self.key)
        found = then.latency(self.key)
        worst = found.p99
        within = worst is not None and worst.within(objective) is True
        measures = [
            Measure(f"{self.name} p99", text_of(worst), seconds(objective), evidence.objectives_source, within),
            Measure(f"{self.name} p50", text_of(found.p50)),
        ]
        silent = then is not evidence
        if within:
            now = f"{text_of(worst)} in the minute to {_end(then)}" if silent else f"now {text_of(worst)}"
            return self._recovering(evidence, since, now, measures)
        symptom = f"{self.name} p99 of the last minute is {text_of(worst)}; the objective is {seconds(objective)}."
        if silent:
            symptom = (
                f"{self.name} p99 was {text_of(worst)} in the minute to {_end(then)}, and nothing was measured since; "
                f"the objective is {seconds(objective)}."
            )
        cause, fixes = self.why(then, then.last(MINUTE), measures)
        return Finding(self.code, Severity.WARNING, since, symptom, cause, tuple(measures), fixes)

    def _recovering(self, evidence: Evidence, since: float, now: str, measures: Sequence[Measure]) -> Finding:
        """Within its objective again (``now``), but not for long enough. No fix, since the cause may be gone."""
        objective, minutes = self.objective(evidence), observed(evidence.frames, self.key)
        worst = [p99(minute) for minute in minutes]
        slow = [at for at, found in enumerate(worst) if found is not None and found.within(objective) is False]
        pause = round_duration(SILENCE_SECONDS)
        until = f" until {clock(evidence.frames[slow[-1]].end, evidence.now)}" if slow else ""
        symptom = f"{self.name} p99 was above its objective of {seconds(objective)}{until}; {now}."
        cause = (
            f"Recovering: the finding closes after 30s below {seconds(BACK * objective)}, {pause} within the "
            f"objective, or {pause} without requests."
        )
        return Finding(self.code, Severity.WARNING, since, symptom, cause, tuple(measures), recovering=True)

    def why(self, evidence: Evidence, frames: Sequence[Frame], measures: list[Measure]) -> tuple[str, tuple[Fix, ...]]:
        """The cause in one sentence, and its fixes; may append to ``measures``."""
        running = max((frame.running_max or 0.0 for frame in frames), default=0.0)
        measures.append(evidence.running(running, "peak running"))
        running /= evidence.engines
        if not _slower_with_load(frames, self.objective(evidence)):
            return _rare_gaps(evidence, frames, self.objective(evidence)), ()
        sequences = "1 sequence" if round(running) == 1 else f"{running:.0f} sequences"
        past = evidence.past
        cause = f"Steps with {sequences}{past} {'took' if past else 'take'} too long on this {evidence.hardware}."
        if queue_delays(evidence):
            cause += " Fewer at once would lengthen the queue, and TTFT is above its objective, too."
            return cause, present((quantize(evidence, FOR_SPEED), share_prefixes(evidence), more_capacity(evidence)))
        fewer = shorter_steps(evidence) if running >= 8 else None
        return cause, present((quantize(evidence, FOR_SPEED), fewer, reduce_load(evidence)))


def _is_met(minute: Histogram | None, objective: float) -> bool | None:
    """Whether the p99 of a minute is within its objective; None without observations."""
    if minute is None or not minute.count:
        return None
    return count_above(minute, objective) <= SLOW_SHARE * minute.count


def _slower_with_load(frames: Sequence[Frame], objective: float) -> bool:
    """Whether steps are slow because of the sequences in them: steps in general, or those of busier frames.

    A step with n sequences counts as n gaps, so the median gap is one of a busy step.
    """
    usual = p50(merged(frames, "itl"))
    if usual is None or not usual.within(objective / 2):
        return True
    slow, fast = _sequences(frames, objective)
    return bool(slow and fast) and sum(slow) / len(slow) > 1.25 * sum(fast) / len(fast)


def _sequences(frames: Sequence[Frame], objective: float) -> tuple[list[float], list[float]]:
    """Running sequences of the frames in which more than 1% of the gaps were too long, and of the other frames."""
    slow: list[float] = []
    fast: list[float] = []
    for frame in frames:
        if (itl := frame.histogram("itl")) is not None and itl.count:
            over = count_above(itl, objective) > 0.01 * itl.count
            (slow if over else fast).append(frame.running_max or 0.0)
    return slow, fast


def _rare_gaps(evidence: Evidence, frames: Sequence[Frame], objective: float) -> str:
    """Describe a few long gaps among many short ones: how many there are, and how many sequences ran then.

    Metrics don't show what made them long. So other work is given as a possible cause, except on a simulated GPU;
    prompts too, unless recorded steps refute that.
    """
    itl = merged(frames, "itl")
    if itl is None:
        return "Nothing was measured in the last minute."
    share = count_above(itl, objective) / itl.count
    text = f"{share:.1%} of {itl.count:,.0f} gaps between tokens took longer than {seconds(objective)}."
    slow, fast = _sequences(frames, objective)
    if slow and fast:
        text += (
            f" Up to {max(slow):.0f} sequences ran in the ten-second windows with such gaps, {max(fast):.0f} in others."
        )
    if evidence.simulated:
        return f"{text} No fix is known: simulated steps also take longer while the CPU is busy."
    if (steps := _slow_steps(evidence)) is not None and not _due_to_prompts(steps):
        without = 1 - steps.share_above(0)
        count = f"{round(without * len(steps.prompt_tokens)):,} of {len(steps.prompt_tokens):,}"
        if without >= MOSTLY:
            text = f"{text} {count} such steps computed no prompt."
        else:
            text = f"{text} Few such steps computed long prompts."
        return f"{text} A possible cause is other work on this {evidence.hardware}."
    return f"{text} Possible causes: other work on this {evidence.hardware}, steps with long prompts."


ABOUT_STEPS = (PrefillContention.code, SlowTokens.code)
"""Findings whose causes recorded steps confirm or refute."""


class SlowFirstToken(SlowTokens):
    """TTFT p99 above its objective for a minute."""

    code = "slow_first_token"
    explained_by = (*HELD_UP, "kv_cache_pressure", "tensor_parallel_stalls", "gpu_throttled")
    key, name = "ttft", "TTFT"

    def objective(self, evidence: Evidence) -> float:
        """The objective in seconds."""
        return evidence.objectives.ttft_p99_seconds

    def why(self, evidence: Evidence, frames: Sequence[Frame], measures: list[Measure]) -> tuple[str, tuple[Fix, ...]]:
        """Whether requests queue, prompts take long, or neither, in which case time passes outside the engine."""
        queue, prefill = (mean(merged(frames, key)) or 0.0 for key in ("queue", "prefill"))
        measures += [
            Measure(f"{name} mean", seconds(evidence.latency(key).mean))
            for key, name in (("queue", "queue time"), ("prefill", "prefill"))
        ]
        if (outside := _outside_engine(evidence, frames)) is not None:
            measures.append(Measure("neither queue nor prefill", seconds(outside)))
            if _steps_were_short(frames, outside):
                cause = (
                    "Most of this time is spent in the API server: before requests reach the engine, or after their "
                    "tokens left it."
                )
                return cause, present((_more_api_servers(evidence), reduce_load(evidence)))
            cause = (
                "Most of this time is spent in the API server, or waiting for the end of a long step, since the engine "
                "reads new requests only between steps."
            )
            return cause, present((reduce_load(evidence),))
        if queue > prefill:
            running = max((frame.running_max or 0.0 for frame in frames), default=0.0)
            full = evidence.flags_known and running >= AT_THE_LIMIT * evidence.most_running
            limit = f"{evidence.max_num_seqs} run at once{evidence.each}"
            held = f": only {limit}" if full else " before prefill"
            cause = f"Requests wait in the queue{held}.{no_more_sequences(evidence) if full else ''}"
            if full and (itl := slow_steps(evidence)) is not None:
                cause = (
                    f"Requests wait in the queue{held}. More would slow every stream: ITL is {seconds(itl)} on average."
                )
                faster = present((quantize(evidence, FOR_SPEED), share_prefixes(evidence)))
                return cause, (*faster, more_capacity(evidence))
            more = more_sequences(evidence) if full else None
            return cause, present((more, share_prefixes(evidence), reduce_load(evidence)))
        offered = present((quantize(evidence, FOR_SPEED), share_prefixes(evidence), reduce_load(evidence)))
        return "Prefill is slow, of the request's own prompt or of those ahead of it.", offered


def _outside_engine(evidence: Evidence, frames: Sequence[Frame]) -> float | None:
    """Mean seconds to the first token spent neither in the queue nor in prefill, if that is most of the time and can't
    be anything else; otherwise None.

    vLLM observes queue and prefill only when a request ends. While a queue grows, those of the requests that get their
    first token now are missing, so waiting requests count too: they take waiting / rate seconds (Little's law). So do
    requests that waited before ``frames``, as they may have been answered since. Before it counts as queued, a request
    also waits for the end of the running step: that takes up to a gap between tokens, and longer if the engine made no
    progress in a whole frame.
    """
    ttft, queue, prefill = (merged(frames, key) for key in ("ttft", "queue", "prefill"))
    whole, queued, computed = mean(ttft), mean(queue), mean(prefill)
    if ttft is None or queue is None or whole is None or queued is None or computed is None:
        return None
    span = sum(frame.end - frame.start for frame in frames)
    since = frames[0].start - whole
    waiting = [one.waiting_max for one in evidence.frames if one.end > since and one.waiting_max is not None]
    gap = p99(merged(frames, "itl"))
    if any(one.still for one in evidence.frames if one.end > since):
        return None
    if not waiting or gap is None or span <= 0 or queue.count < ttft.count / 2:
        return None
    inside = max(queued, sum(waiting) / len(waiting) * span / ttft.count) + computed
    outside = whole - inside
    return outside if outside > inside and gap.within(outside / 2) else None


def _steps_were_short(frames: Sequence[Frame], outside: float) -> bool:
    """Whether tokens show that requests can't have spent most of ``outside`` (seconds) waiting for the end of a step.

    A step without running streams shows in no gap, so there must have been some most of the time.
    """
    itl = merged(frames, "itl")
    _, longest = longest_of(itl)
    running = max((frame.running_max or 0.0 for frame in frames), default=0.0)
    streamed = itl.sum / running if itl is not None and running else 0.0
    return longest <= outside / 2 and streamed >= MOSTLY * sum(frame.seconds for frame in frames)


def _more_api_servers(evidence: Evidence) -> Fix | None:
    """A second API server, if one serves all requests and vLLM allows two.

    None on a CPU, where the engine needs the cores itself, and for the simulated engine, which has one process.
    """
    if evidence.engines > 1 or evidence.flags.get("api-server-count") not in (None, 1):
        return None
    if evidence.build == "cpu" or evidence.simulated:
        return None
    if evidence.release is not None and evidence.release < API_SERVERS_SINCE:
        return None
    alone = any(evidence.flags.get(name) for name in _ONE_API_SERVER + ELSEWHERE)
    if alone or updates_adapters(evidence.environment) or RUST_FRONTEND in evidence.environment:
        return None
    return setting(
        "api-server-count", 2, "A second process then reads requests and writes tokens.",
        "It needs a CPU core. vLLM stops logging its throughput, and exact latencies become estimates.",
    )  # fmt: skip
