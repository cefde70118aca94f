"""Findings about the engine itself: dead, hung, idle, run with unknown flags, drafts rejected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from vllm_console.diagnosis.finding import Finding, Fix, Measure, Severity
from vllm_console.diagnosis.live.frame_sums import MINUTE, mean, observed
from vllm_console.diagnosis.live.rule import Evidence, Judgment, Rule, holds_since, moments_within
from vllm_console.history.frames import Frame
from vllm_console.metrics.sample import ACCEPTED
from vllm_console.text import duration, percent
from vllm_launchers.units import counted
from vllm_launchers.vllm.flags.changes import Changes
from vllm_launchers.vllm.flags.speculation import speculation_flags

RESTART = Fix(Changes(), "Restart the server; requests in flight are lost.")

INSPECT = Fix(Changes(), "First see where it hangs: py-spy dump --pid PID of the EngineCore process.")
PAUSED = Fix(Changes(), "If it was paused (POST /pause), resume it with POST /resume.")

HUNG_AFTER_SECONDS = 15.0
"""A one-token request unanswered for this long proves a hang; a busy engine answers it much sooner."""

SUSPECTED_FRAMES = 4
"""Consecutive frames without progress, when no request can distinguish a hang from a long step."""

FIRST_REQUEST = "first_request"

ENGINE_DEAD = "HTTP 503"
"""The keeper's message when the API server lives but its engine has died."""


def engine_dead(evidence: Evidence) -> Finding | None:
    """Reported at once, regardless of the frames, since the API server itself reports it."""
    if ENGINE_DEAD not in evidence.health_problem:
        return None
    symptom = "/health returns 503: the engine has died; the API server still listens."
    cause = "The engine process ended with an error; see the log a few lines above its end."
    measures = (Measure("/health", evidence.health_problem, "200", "vLLM"),)
    return Finding("engine_dead", Severity.CRITICAL, evidence.health_since, symptom, cause, measures, (RESTART,))


def first_request(evidence: Evidence) -> Finding:
    """The finding while a run's first requests are served without a warm-up."""
    first = [frame for frame in evidence.frames if frame.compiling]
    since, running = first[0].start, first[-1].running_max or 0.0
    which = "The first request has" if round(running) == 1 else "The first requests have"
    symptom = f"{which} run for {duration(evidence.now - since)} without a token while kernels are compiled."
    cause = "There was no warm-up request. These requests are not judged or compared."
    measures = (Measure("running", f"{running:.0f}"),)
    return Finding(FIRST_REQUEST, Severity.NOTE, since, symptom, cause, measures)


def _silence(frames: Sequence[Frame]) -> list[Judgment]:
    """Holds in frames in which an engine that is stuck now was already stuck, with requests running."""
    still = frames[-1].still if frames else ()
    found = []
    for frame in frames:
        if frame.grown.generation_tokens_total is None or frame.running_max is None:
            found.append(Judgment.UNKNOWN)
        else:
            found.append(Judgment.HOLDS if set(still).intersection(frame.still) else Judgment.FAILS)
    return found


def in_hang(frames: Sequence[Frame]) -> list[bool]:
    """Per frame, whether an engine was stuck in it, and for longer than a one-token request may take; also if over."""
    found = [False] * len(frames)
    begun: dict[str, int] = {}
    for at, frame in enumerate(frames):
        begun = {label: begun.get(label, at) for label in frame.still}
        for begin in begun.values():
            if frame.end - frames[begin].start > HUNG_AFTER_SECONDS:
                found[begin : at + 1] = [True] * (at + 1 - begin)
    return found


def in_part(frames: Sequence[Frame]) -> bool:
    """Whether only some engines are stuck: a request would reach one of the others and prove nothing."""
    return bool(frames) and 0 < len(frames[-1].still) < frames[-1].engines


def suspected_hang(frames: Sequence[Frame]) -> float | None:
    """Since when (Unix seconds) requests run without progress, or None. To be confirmed by a one-token request."""
    verdicts = _silence(frames)
    if not verdicts or verdicts[-1] is not Judgment.HOLDS:
        return None
    return holds_since(verdicts, frames)


class EngineHung(Rule):
    """Requests run without tokens though ``/health`` returns 200; a one-token request stays unanswered.

    If no such request may be sent, or it is rejected, a minute of silence counts as a hang.
    """

    code = "engine_hung"

    def verdicts(self, evidence: Evidence) -> Sequence[Judgment]:
        """Judge by frames without progress, once the request has proved that it is not a pause."""
        silent = evidence.silent_seconds
        if evidence.unasked:
            return self._suspected(_silence(evidence.frames))
        if silent is None or silent < HUNG_AFTER_SECONDS:
            return [Judgment.FAILS] * len(evidence.frames)
        return _silence(evidence.frames)

    @staticmethod
    def _suspected(silence: Sequence[Judgment]) -> list[Judgment]:
        """Holds from the fourth consecutive silent frame on."""
        found, row = [], 0
        for verdict in silence:
            row = row + 1 if verdict is Judgment.HOLDS else 0
            found.append(Judgment.UNCLEAR if 0 < row < SUSPECTED_FRAMES else verdict)
        return found

    def describe(self, evidence: Evidence, since: float) -> Finding:
        """Since when there is no progress, and the evidence."""
        newest = evidence.frames[-1]
        running = newest.running_max or 0.0
        since = suspected_hang(evidence.frames) or since
        run = "1 request runs" if round(running) == 1 else f"{running:.0f} requests run"
        silent = f"no token for {duration(evidence.now - since)}"
        symptom = f"{run}, and {silent}."
        more = (Measure("running", f"{running:.0f}"), Measure("/health", "200"))
        fixes = (RESTART, INSPECT, PAUSED)
        if in_part(evidence.frames):
            which = f"{'engine' if len(newest.still) == 1 else 'engines'} {', '.join(newest.still)}"
            symptom = f"Some engines seem to hang: requests run on {which}, and {silent} from there."
            cause = "Other engines respond, so a one-token test request could reach one of them and prove nothing."
            measures = (Measure("stalled", f"{which} ({newest.engines} total)"), *more)
            return Finding(self.code, Severity.WARNING, since, symptom, cause, measures, (RESTART, INSPECT))
        if evidence.unasked:
            symptom = f"It seems to hang: {symptom}"
            cause = f"Not confirmed by a one-token test request: {evidence.unasked}."
            asked = Measure("one-token request", evidence.unasked)
            return Finding(self.code, Severity.WARNING, since, symptom, cause, (asked, *more), fixes)
        cause = "The engine hangs: the API server responds, but a one-token test request gets no answer."
        asked = Measure("one-token request", f"no answer after {duration(evidence.silent_seconds or 0)}",
                        duration(HUNG_AFTER_SECONDS), "built-in")  # fmt: skip
        return Finding(self.code, Severity.CRITICAL, since, symptom, cause, (asked, *more), fixes)


class StarvedByClients(Rule):
    """Requests run all the time, none waits, and the GPU is mostly idle: clients send less than it could serve.

    Traffic with pauses is excluded: there an idle GPU is expected, and each request would report it again.
    """

    code = "starved_by_clients"
    explained_by = ("not_admitted",)
    of_traffic = True
    IDLE, BUSY = 20.0, 35.0
    """Percent of the time that the GPU is busy."""
    PAUSES = 2
    """With this many frames without a request in a minute, traffic is not steady."""

    def verdicts(self, evidence: Evidence) -> Sequence[Judgment]:
        """Judge by GPU utilization and the queue, in minutes of steady traffic; unknown without GPU samples."""
        found, served = [], [bool(frame.running_max or frame.waiting_max) for frame in evidence.frames]
        for at, (frame, moments) in enumerate(moments_within(evidence)):
            busy = [gpu.utilization for moment in moments for gpu in moment.gpus if gpu.utilization is not None]
            minute = served[max(0, at - MINUTE + 1) : at + 1]
            if not busy or frame.waiting_max is None:
                found.append(Judgment.UNKNOWN)
            elif frame.waiting_max >= 1 or minute.count(False) >= self.PAUSES:
                found.append(Judgment.FAILS)
            elif sum(minute) < MINUTE:
                found.append(Judgment.UNCLEAR)
            else:
                used = sum(busy) / len(busy)
                idle = used < self.IDLE
                found.append(Judgment.HOLDS if idle else Judgment.FAILS if used > self.BUSY else Judgment.UNCLEAR)
        return found

    def describe(self, evidence: Evidence, since: float) -> Finding:
        """How idle it is."""
        busy = [gpu.utilization for gpu in evidence.moments[-1].gpus if gpu.utilization is not None]
        running = max((frame.running_max or 0.0 for frame in evidence.last(MINUTE)), default=0.0)
        used = sum(busy) / len(busy) / 100 if busy else None
        symptom = f"Queue empty, GPU utilization {percent(used)}."
        cause = "Clients send less than the server can handle; the server is not the bottleneck."
        measures = (
            Measure("GPU utilization", percent(used), percent(self.IDLE / 100), "built-in"),
            evidence.running(running, "peak running"),
        )
        more = Fix(Changes(), "Send more concurrent requests, or free the GPU for other work.")
        return Finding(self.code, Severity.NOTE, since, symptom, cause, measures, (more,))


# -- servers whose flags are unknown ----------------------------------------------------------------------------------

ELSEWHERE = Fix(Changes(), "Its flags are unknown here, so no flag changes are offered: check how it was started.")

RESTART_THERE = Fix(Changes(), "Restart it where it was started; requests in flight are lost.")

OF_DEFAULTS = frozenset({"prefix_cache_idle", "prefix_cache_off", "context_unused"})
"""Findings that follow from a flag's value alone."""


def without_flags(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings without those and without fixes that follow from a flag, which may be set differently."""
    return tuple(_without_flags(finding) for finding in findings if finding.code not in OF_DEFAULTS)


def _without_flags(finding: Finding) -> Finding:
    kept = (fix for fix in finding.fixes if not (fix.changes.set or fix.changes.unset))
    fixes = tuple(RESTART_THERE if fix == RESTART else fix for fix in kept)
    if finding.severity is not Severity.GOOD and len(fixes) < len(finding.fixes):
        fixes = (*fixes, ELSEWHERE)
    return replace(finding, fixes=fixes)


class DraftsRejected(Rule):
    """Speculative decoding is on, and hardly any draft token is accepted.

    How long a step would take without drafts is unknown, so this does not judge speed: below this acceptance, there is
    next to nothing to gain, however fast the steps are.
    """

    code = "drafts_rejected"
    of_traffic = through_pauses = True
    optional = True
    LOW, ENOUGH, SPAN, DRAFTS = 0.1, 0.2, 5 * MINUTE, 500
    """Accepted tokens per draft (holds below, fails above), frames, and the minimum number of drafts in them."""

    def verdicts(self, evidence: Evidence) -> Sequence[Judgment]:
        """Judge by accepted tokens per draft over five minutes, if there were enough drafts."""
        found = []
        for at, accepted in enumerate(observed(evidence.frames, ACCEPTED, self.SPAN)):
            per_draft = mean(accepted)
            if accepted is None:
                found.append(Judgment.UNKNOWN)
            elif per_draft is None:
                found.append(Judgment.OVER)
            elif accepted.count < self.DRAFTS or at + 1 < self.SPAN:
                found.append(Judgment.UNCLEAR)
            else:
                few, enough = per_draft < self.LOW, per_draft > self.ENOUGH
                found.append(Judgment.HOLDS if few else Judgment.FAILS if enough else Judgment.UNCLEAR)
        return found

    def describe(self, evidence: Evidence, since: float) -> Finding:
        """How many of the draft tokens are accepted."""
        accepted = observed(evidence.frames, ACCEPTED, self.SPAN)[-1]
        per_draft = mean(accepted) or 0.0
        most = len(accepted.bounds) - 1 if accepted is not None else 0
        limit = self.LOW if per_draft < self.LOW else self.ENOUGH  # the limit until which it stays open
        measures = (Measure("acceptance length", f"{1 + per_draft:.2f}", f"{1 + limit:g}", "built-in"),)
        symptom = f"Speculative decoding drafts up to {counted(most, 'token')}, of which {per_draft:.2f} are accepted."
        cause = "These answers are hard to draft. Drafting and verifying takes time in each step."
        flags = speculation_flags(evidence.flags)
        why = f"Without drafts a step gives 1 token per sequence instead of {1 + per_draft:.2f}, and computes fewer."
        fix = Fix(Changes(unset=flags), why, "Traffic that is easier to draft would be served more slowly.")
        return Finding(self.code, Severity.NOTE, since, symptom, cause, measures, (fix,) if flags else ())
