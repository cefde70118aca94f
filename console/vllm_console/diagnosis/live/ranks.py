"""Findings about the data-parallel ranks of one deployment: one is full while another has room."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_console.diagnosis.finding import Finding, Fix, Measure, Severity
from vllm_console.diagnosis.live.rule import Evidence, Judgment, Rule
from vllm_console.history.frames import Frame, RankFrame
from vllm_console.text import percent
from vllm_launchers.vllm.flags.changes import Changes

WAITING = 2.0
"""Requests waiting on one rank for a whole frame while another has no queue, or at any time while another is idle."""

ROOM = 0.7
"""A rank has room if it uses at most this fraction of its KV cache and runs fewer requests than the other one."""

CACHE_FULL = 0.95

PINNED = Fix(
    Changes(),
    "Let the API server choose the rank: requests with the header X-data-parallel-rank always go to the one they name.",
)
SPREAD = Fix(
    Changes(),
    "Send fewer requests at once, or shorter ones: waiting requests stay on their rank.",
)


class UnevenRanks(Rule):
    """Requests wait on one data-parallel rank for seconds while another one has room and an empty queue."""

    code = "uneven_ranks"
    of_traffic = True

    def verdicts(self, evidence: Evidence) -> Sequence[Judgment]:
        """Judge by the ranks' queues."""
        return [self._verdict(frame) for frame in evidence.frames]

    @staticmethod
    def _verdict(frame: Frame) -> Judgment:
        known = [one for one in frame.ranks if None not in (one.waiting_min, one.waiting_max, one.running_max)]
        if len(known) < 2:
            return Judgment.UNKNOWN if frame.engines > 1 else Judgment.OVER
        if _pair(frame) is not None:
            return Judgment.HOLDS
        return Judgment.UNCLEAR if any(one.waiting_min for one in known) else Judgment.FAILS

    def describe(self, evidence: Evidence, since: float) -> Finding:
        """Which rank is full, which has room, and why no request moves."""
        found = [(frame, pair) for frame in reversed(evidence.frames) if (pair := _pair(frame)) is not None]
        if not found:  # it ends only after frames that fail; the last ones were unclear
            symptom = "Requests waited on one data-parallel rank while another one had room."
            return Finding(
                self.code, Severity.WARNING, since, symptom, "The ranks' queues are evening out.", recovering=True
            )
        frame, (full, idle) = found[0]
        if _unused(idle) and (full.waiting_min or 0.0) < WAITING:
            symptom = f"Requests wait on data-parallel rank {full.label} while rank {idle.label} runs none."
        else:
            waiting = f"{full.waiting_min:.0f}"
            symptom = (
                f"{waiting} requests wait on data-parallel rank {full.label} while none waits on rank {idle.label}."
            )
        if (full.usage_max or 0.0) >= CACHE_FULL:
            cause = (
                f"The KV cache of rank {full.label} is full because longer requests landed there. A waiting request "
                "stays on its rank."
            )
            fixes = (SPREAD, PINNED)
        else:
            cause = (
                f"Rank {full.label} got more requests than it runs at once. A waiting request stays on its rank: "
                "the API server counts requests when it chooses one, and a client may name one."
            )
            fixes = (PINNED, SPREAD)
        measures = [measure for rank in frame.ranks for measure in _measures(rank)]
        return Finding(self.code, Severity.WARNING, since, symptom, cause, tuple(measures), fixes)


def _pair(frame: Frame) -> tuple[RankFrame, RankFrame] | None:
    """The rank with the longest queue, and one that has room; None if there is no such pair.

    Next to an idle rank, a queue that was empty at times counts too: requests of a batch end together.
    """
    waiting = [one for one in frame.ranks if (one.waiting_min or 0.0) >= WAITING]
    idle = [one for one in frame.ranks if one.waiting_max == 0 and (one.usage_max or 0.0) <= ROOM]
    if not waiting:
        waiting = [one for one in frame.ranks if (one.waiting_max or 0.0) >= WAITING]
        idle = [one for one in idle if _unused(one)]
    if not waiting or not idle:
        return None
    full = max(waiting, key=lambda one: (one.waiting_min or 0.0, one.waiting_max or 0.0))
    roomy = [one for one in idle if (one.running_max or 0.0) < (full.running_max or 0.0)]
    return (full, min(roomy, key=lambda one: one.running_max or 0.0)) if roomy else None


def _unused(rank: RankFrame) -> bool:
    return rank.running_max == 0 and not rank.tokens


def _measures(rank: RankFrame) -> list[Measure]:
    name = f"rank {rank.label}"
    running, waiting = (f"{value:.0f}" if value is not None else "–" for value in (rank.running_max, rank.waiting_max))
    tokens = f"{rank.tokens:,.0f}" if rank.tokens is not None else "–"
    return [
        Measure(f"{name} running, waiting", f"{running}, {waiting}"),
        Measure(f"{name} KV cache usage", percent(rank.usage_max)),
        Measure(f"{name} tokens in 10s", tokens),
    ]
