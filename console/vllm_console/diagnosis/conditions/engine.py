"""Conditions of the engine itself: dead, hung, or with nothing to do."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_console.diagnosis.conditions.rolling import MINUTE
from vllm_console.diagnosis.conditions.rule import Situation, Verdict, holds_since, moments_within
from vllm_console.diagnosis.model import Condition, Measure, Remedy, Severity
from vllm_console.format import duration, percent
from vllm_console.telemetry.frames import Frame
from vllm_launchers.plan.model import Changes

RESTART = Remedy(Changes(), "Restart the server; requests that are in flight are lost.")

LOOK = Remedy(Changes(), "Before that, see where it hangs: py-spy dump --pid of the EngineCore process.")
PAUSED = Remedy(Changes(), "If somebody paused it (POST /pause), POST /resume lets it go on.")

HUNG_AFTER_SECONDS = 15.0
"""A one-token request that is so long without an answer proves a hang; a busy engine answers it much sooner."""

SUSPECTED_FRAMES = 4
"""So many frames in a row nothing must move, where no request can tell a hang from a step that takes long."""

ENGINE_DEAD = "answer 503"
"""What ``/health`` answers when the engine's process has died while the API server lives on."""


def engine_dead(situation: Situation) -> Condition | None:
    """Known at once, and whatever the frames say: the API server says so itself."""
    if ENGINE_DEAD not in situation.health_problem:
        return None
    symptom = "/health answers 503: the engine has died, and the API server still listens."
    cause = "The engine's process ended by an error, which stands in the log some lines above the last."
    measures = (Measure("/health", situation.health_problem, "200", "vLLM"),)
    return Condition("engine_dead", Severity.CRITICAL, situation.health_since, symptom, cause, measures, (RESTART,))


def _silence(frames: Sequence[Frame]) -> list[Verdict]:
    """Bad are frames in which an engine stood still that stands still by now, with requests running."""
    still = frames[-1].still if frames else ()
    found = []
    for frame in frames:
        if frame.grown.generation_tokens_total is None or frame.running_max is None:
            found.append(Verdict.UNKNOWN)
        else:
            found.append(Verdict.BAD if set(still).intersection(frame.still) else Verdict.GOOD)
    return found


def in_part(frames: Sequence[Frame]) -> bool:
    """Whether some engines stand still and others do not: a request would come to one of those and tell nothing."""
    return bool(frames) and 0 < len(frames[-1].still) < frames[-1].engines


def suspected_hang(frames: Sequence[Frame]) -> float | None:
    """Since when (Unix seconds) requests run and nothing moves, or None. To be confirmed by a one-token request."""
    verdicts = _silence(frames)
    if not verdicts or verdicts[-1] is not Verdict.BAD:
        return None
    return holds_since(verdicts, frames)


class EngineHung:
    """Requests run and no token comes, though ``/health`` says 200; a one-token request stays without an answer.

    Where no such request may be sent, or it is refused, a silence of a minute is said to be what it seems to be.
    """

    code = "engine_hung"

    def verdicts(self, situation: Situation) -> Sequence[Verdict]:
        """By frames in which nothing moves, once the request has shown that it is no pause."""
        silent = situation.silent_seconds
        if situation.unasked:
            return self._suspected(_silence(situation.frames))
        if silent is None or silent < HUNG_AFTER_SECONDS:
            return [Verdict.GOOD] * len(situation.frames)
        return _silence(situation.frames)

    @staticmethod
    def _suspected(silence: Sequence[Verdict]) -> list[Verdict]:
        """Bad from the fourth silent frame in a row on."""
        found, row = [], 0
        for verdict in silence:
            row = row + 1 if verdict is Verdict.BAD else 0
            found.append(Verdict.BETWEEN if 0 < row < SUSPECTED_FRAMES else verdict)
        return found

    def describe(self, situation: Situation, since: float) -> Condition:
        """Since when nothing moves, and what shows it."""
        newest = situation.frames[-1]
        running = newest.running_max or 0.0
        since = suspected_hang(situation.frames) or since
        run = "1 request runs" if round(running) == 1 else f"{running:.0f} requests run"
        silent = f"no token has come for {duration(situation.now - since)}"
        symptom = f"{run}, and {silent}."
        more = (Measure("running", f"{running:.0f}"), Measure("/health", "200"))
        remedies = (RESTART, LOOK, PAUSED)
        if in_part(situation.frames):
            which = f"{'engine' if len(newest.still) == 1 else 'engines'} {', '.join(newest.still)}"
            symptom = f"Part of it seems to hang: requests run on {which}, and {silent} from there."
            cause = "The others do not: a request for one token, which would tell, would come to one of them."
            measures = (Measure("stand still", f"{which} ({newest.engines} in all)"), *more)
            return Condition(self.code, Severity.WARNING, since, symptom, cause, measures, (RESTART, LOOK))
        if situation.unasked:
            symptom = f"It seems to hang: {symptom}"
            cause = f"Not confirmed by a request for one token, which would tell: {situation.unasked}."
            asked = Measure("one-token request", situation.unasked)
            return Condition(self.code, Severity.WARNING, since, symptom, cause, (asked, *more), remedies)
        cause = "The engine hangs: the API server lives, and a request for one token stays without an answer."
        asked = Measure("one-token request", f"no answer after {situation.silent_seconds or 0:.0f} s",
                        f"{HUNG_AFTER_SECONDS:.0f} s", "fixed")  # fmt: skip
        return Condition(self.code, Severity.CRITICAL, since, symptom, cause, (asked, *more), remedies)


class StarvedByClients:
    """Nothing waits and the GPU idles: its clients send less than it could do."""

    code = "starved_by_clients"
    IDLE, BUSY = 20.0, 35.0
    """Percent of the time in which the GPU works."""

    def verdicts(self, situation: Situation) -> Sequence[Verdict]:
        """By the GPUs' utilization and the queue; without a look at GPUs nothing is said."""
        found = []
        for frame, moments in moments_within(situation):
            busy = [gpu.utilization for moment in moments for gpu in moment.gpus if gpu.utilization is not None]
            if not busy or frame.waiting_max is None:
                found.append(Verdict.UNKNOWN)
            elif frame.waiting_max >= 1:
                found.append(Verdict.GOOD)
            else:
                used = sum(busy) / len(busy)
                bad = used < self.IDLE
                found.append(Verdict.BAD if bad else Verdict.GOOD if used > self.BUSY else Verdict.BETWEEN)
        return found

    def describe(self, situation: Situation, since: float) -> Condition:
        """How idle it is."""
        busy = [gpu.utilization for gpu in situation.moments[-1].gpus if gpu.utilization is not None]
        running = max((frame.running_max or 0.0 for frame in situation.last(MINUTE)), default=0.0)
        used = sum(busy) / len(busy) / 100 if busy else None
        symptom = f"Nothing waits, and the GPU works {percent(used)} of the time."
        cause = "The clients send less than the server could do: it is not what limits them."
        measures = (
            Measure("GPU utilization", percent(used), percent(self.IDLE / 100), "fixed"),
            situation.running(running, "running at once, most"),
        )
        more = Remedy(Changes(), "Send more requests at once, or give the GPU to others for a while.")
        return Condition(self.code, Severity.NOTE, since, symptom, cause, measures, (more,))
