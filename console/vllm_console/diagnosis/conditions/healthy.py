"""That all is well, said plainly: requests are served, and within the objectives."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_console.diagnosis.conditions.rolling import MINUTE, held, observed, p99, totals
from vllm_console.diagnosis.conditions.rule import Situation, Verdict
from vllm_console.diagnosis.model import Condition, Measure, Severity
from vllm_console.format import percent, seconds
from vllm_console.telemetry.frames import merged

NEARLY = 1.25
"""So many times its goal a p99 may be by chance, and what was healthy stays so."""


class Healthy:
    """Requests are served within the objectives. Here a bad verdict is a good minute: it is how conditions begin."""

    code = "healthy"

    def verdicts(self, situation: Situation) -> Sequence[Verdict]:
        """By the minute up to each frame."""
        frames, goals = situation.frames, situation.goals
        minutes = (totals(frames, "generation_tokens_total"), observed(frames, "ttft"), observed(frames, "itl"))
        found = []
        for at, (tokens, ttft, itl) in enumerate(zip(*minutes, strict=True)):
            if tokens is None:
                found.append(Verdict.UNKNOWN)
                continue
            first, between = p99(ttft), p99(itl)
            worst = max((first or 0.0) / goals.ttft_p99_seconds, (between or 0.0) / goals.itl_p99_seconds)
            served = tokens > 0
            well = Verdict.BAD if worst <= 1.0 else Verdict.BETWEEN if worst <= NEARLY else Verdict.GOOD
            full = (held(frames, at) or 0.0) > goals.kv_cache_usage
            found.append(well if served and not full else Verdict.GOOD)
        return found

    def describe(self, situation: Situation, since: float) -> Condition:
        """The figures that its objectives are about."""
        frames, goals, source = situation.last(MINUTE), situation.goals, situation.goals_source
        usage = held(frames, len(frames) - 1) or 0.0
        measures = [Measure("KV cache usage held", percent(usage), percent(goals.kv_cache_usage), source)]
        for key, goal in (("ttft", goals.ttft_p99_seconds), ("itl", goals.itl_p99_seconds)):
            if (latency := p99(merged(frames, key))) is not None:
                measures.append(Measure(f"{key.upper()} p99", seconds(latency), seconds(goal), source))
        symptom = "Requests are served within the objectives."
        return Condition(self.code, Severity.GOOD, since, symptom, "", tuple(measures))
