"""Evidence of a server's behavior: its requests and steps as the probe recorded them, ready for replay. Pure.

The records lack the time at which a request reached the engine. It is derived from the request's end, which both clocks
record, less its time in queue, prefill and decode. The rest of its end-to-end time was spent before that, in the front
end, or waiting for the step that was running when it arrived: vLLM counts a request as queued only after that step.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations, islice
from statistics import median, median_low

import msgspec
from msgspec.structs import replace

from vllm_console.history.probe_records import EngineStep, FinishedRequest
from vllm_console.metrics.quantile import Weighted, each_once
from vllm_console.prediction.figures import Figures, Known, Spread
from vllm_launchers.engine_model.traffic_replay import Arrival
from vllm_launchers.units import counted

FEWEST_REQUESTS = 30
MOST_REQUESTS = 500
FEWEST_STEPS = 100
"""If fewer steps had no preempted request, steps that a preempted request hardly affects count, too."""
MOST_DISTURBED = 0.25
"""Maximum share of preempted requests in a step: the number of their cached tokens is known only approximately."""
RESUMED_AFTER = 1.5
"""A request's interval this many times the shortest of its step includes a pause."""
MOST_SECONDS = 900.0
PAUSE_SECONDS = 60.0
"""Traffic before a pause of this length is not considered part of the same traffic."""
VANISHED = 1.15
"""If this factor more requests are in flight than were recorded, some have vanished."""
VANISHED_SECONDS = 1.0
"""Minimum duration of that excess, because the two are counted at slightly different moments."""
NO_QUEUE_SECONDS = 0.1
"""A request that waited no longer than this found no queue, but waited for a step to end."""
_SAME_STEP = 0.02
_CLOCKS_DIFFER = 0.05
"""Maximum difference in seconds between the times of a request and of its step."""
_MOST_CHOICES = 200
_MOSTLY_FOUND = 0.5


class NoEvidenceError(Exception):
    """There are too few records to predict from. The message is one sentence."""


class SeenStep(msgspec.Struct, frozen=True):
    """A recorded step: its start, its duration (seconds), and its work, counted as in `roofline.Work`. ``prefills`` is
    the number of prompts it had a part of.
    """

    at: float
    seconds: float
    sequences: int
    tokens: int
    reads: float
    pairs: float
    prefills: int = 0


class TrafficEvidence(msgspec.Struct, frozen=True):
    """Recorded traffic. Times are seconds since the first arrival.

    ``arrivals`` are in time order, with ``fronts``, the seconds that each spent in the front end. Those from ``first``
    to ``end`` are evaluated; the others only share the server with them. ``since`` and ``until`` are the first and last
    evaluated arrival. ``observed`` are the measured figures, ``ttft`` and ``e2e`` the known parts of them in the
    engine. ``flaw`` is a clause explaining why the records don't show all traffic; empty if they do. ``ends`` are the
    lowest and highest figures consistent with the observations; empty if they are exact. ``ahead``: steps are scheduled
    ahead, see `EngineLimits`. ``front``: the typical seconds in the front end; 0 if unknown.
    """

    arrivals: tuple[Arrival, ...]
    fronts: tuple[float, ...]
    first: int
    end: int
    since: float
    until: float
    observed: Figures
    ttft: Known
    itl: Known
    e2e: Known
    cached_tokens: int
    steps: tuple[SeenStep, ...]
    most_running: int
    flaw: str = ""
    ends: tuple[Figures, ...] = ()
    ahead: bool = False
    front: float = 0.0

    @property
    def requests(self) -> int:
        """Number of evaluated requests."""
        return self.end - self.first

    @property
    def seconds(self) -> float:
        """The time over which they arrived."""
        return self.until - self.since


class _CompleteRequest(msgspec.Struct, frozen=True):
    """A request with complete data. Times in Unix seconds."""

    record: FinishedRequest
    at: float
    """When it reached the engine."""
    first_token_at: float
    prompt: int
    output: int
    cached: int
    queue: float
    prefill: float
    decode: float

    @property
    def finished_at(self) -> float:
        return self.record.finished_at


def _known(record: FinishedRequest) -> _CompleteRequest | None:
    needed = (record.queue_seconds, record.prefill_seconds, record.decode_seconds, record.prompt_tokens)
    if None in needed or not record.output_tokens:
        return None
    queue, prefill, decode = (value or 0.0 for value in needed[:3])
    at = record.finished_at - queue - prefill - decode
    return _CompleteRequest(
        record, at, record.finished_at - decode, record.prompt_tokens or 1, record.output_tokens,
        record.cached_tokens or 0, queue, prefill, decode,
    )  # fmt: skip


def format_few(number: int, thing: str, one: str, more: str) -> str:
    """``no request has ended``, ``only 12 requests have ended``; ``one`` and ``more``: singular and plural verb."""
    return f"{'only ' if number else 'no '}{counted(number, thing) if number else thing} {one if number < 2 else more}"


def _too_few(what: str) -> str:
    return f"{what}; a prediction needs at least {FEWEST_REQUESTS}"


def gather(
    requests: Sequence[FinishedRequest],
    steps: Sequence[EngineStep],
    block_size: int,
    budget: int,
    *,
    most: int = MOST_REQUESTS,
) -> TrafficEvidence:
    """The evidence of a run's newest traffic, up to the last pause; ``budget`` is the server's tokens per step.

    Raises:
        NoEvidenceError: there are too few requests, or too little is known of them.
    """
    known = [one for record in requests if (one := _known(record)) is not None]
    front = _usual_front(known, _durations(steps))
    known = sorted(_with_step_waits(known, _durations(steps), front), key=lambda one: one.at)
    if len(known) < FEWEST_REQUESTS:
        few = format_few(len(known), "usable request", "is recorded", "are recorded")
        raise NoEvidenceError(f"{_too_few(few)}: try again after more traffic")
    if len({record.engine for record in requests}) > 1:
        raise NoEvidenceError("it has several engines, whose requests can't be told apart well enough yet")
    unpaused = _newest_without_pause(known)
    judged = _judged(unpaused, steps, most)
    if len(judged) < FEWEST_REQUESTS:
        usable = f"{'only ' if judged else ''}{len(judged)} of {len(unpaused)} recorded requests can be used"
        raise NoEvidenceError(
            f"{_too_few(usable)}. Others that ran at the same time have not ended yet: try again later"
        )
    begin, end = judged[0].at, judged[-1].at
    if end - begin < 1.0:
        raise NoEvidenceError("its requests all arrived at once: a prediction needs traffic spread over time")
    # From the last moment without a queue before them, including requests in flight then, until the last one ended.
    last = max(one.finished_at for one in judged)
    calm = max(
        (one.at for one in unpaused if one.at <= begin and one.queue <= NO_QUEUE_SECONDS), default=unpaused[0].at
    )
    around = [one for one in unpaused if one.finished_at > calm and one.at <= last]
    first = next(index for index, one in enumerate(around) if one is judged[0])
    zero = around[0].at
    timed = [one for one in _durations(steps) if begin <= one[0].at <= end]
    itl = _intervals(timed)
    joined = _first_token_steps(around, timed)
    ahead = _scheduled_ahead(joined, timed, budget)
    prefixes = _prefixes(around, block_size)
    arrivals = tuple(
        Arrival(one.at - zero, one.prompt, one.output, prefix) for one, prefix in zip(around, prefixes, strict=True)
    )
    return TrafficEvidence(
        arrivals=arrivals,
        fronts=tuple(_front(one) for one in around),
        first=first,
        end=first + len(judged),
        since=begin - zero,
        until=end - zero,
        observed=_observed(judged, timed, itl, end - begin),
        ttft=Known.of(each_once(one.queue + one.prefill for one in judged)),
        itl=Known.of(itl),
        e2e=Known.of(each_once(one.queue + one.prefill + one.decode for one in judged)),
        cached_tokens=sum(one.cached for one in judged),
        steps=tuple(_work(around, joined, timed, budget, ahead, zero)),
        most_running=max((max(step.running or 0, step.intervals) for step, _ in timed), default=0),
        flaw=_flaw(requests, steps, unpaused, around, timed, end - begin),
        ahead=ahead,
        front=front,
    )


def _front(one: _CompleteRequest) -> float:
    return max(0.0, (one.record.e2e_seconds or 0.0) - one.queue - one.prefill - one.decode)


def _usual_front(known: Sequence[_CompleteRequest], timed: Sequence[tuple[EngineStep, float]]) -> float:
    """The typical time of requests in the front end.

    For each request only a range is known: all its time before it was queued, or that less the duration of the step
    that had just ended. The value closest to all ranges is the median of their ends.
    """
    steps = [step.at for step, _ in timed]
    ends = []
    for one in known:
        place = bisect_right(steps, one.at)
        beside = timed[max(0, place - 1) : place + 1]
        off, took = min(((abs(step.at - one.at), took) for step, took in beside), default=(math.inf, 0.0))
        before = _front(one)
        ends += [max(0.0, before - took) if off < took / 2 else before, before]  # otherwise nothing was running
    return median(ends) if ends else 0.0


def _with_step_waits(
    known: Sequence[_CompleteRequest], timed: Sequence[tuple[EngineStep, float]], front: float
) -> list[_CompleteRequest]:
    """Count the wait for the step that was running at a request's arrival as queue time.

    It is the request's time before it was queued, beyond the usual time in the front end, but at most that step's
    duration.
    """
    if not timed:
        return list(known)
    ends = [step.at for step, _ in timed]
    found = []
    for one in known:
        place = bisect_right(ends, one.at)
        # Both clocks lag slightly, so the step that had just ended is one of these two.
        longest = max(took for _, took in timed[max(0, place - 1) : place + 1])
        wait = min(max(0.0, _front(one) - front), longest)
        found.append(replace(one, at=one.at - wait, queue=one.queue + wait))
    return found


def _newest_without_pause(known: Sequence[_CompleteRequest]) -> list[_CompleteRequest]:
    """The newest requests without a pause between them, if there are enough; else all."""
    begin, busy_until = 0, known[0].finished_at
    for index, one in enumerate(known):
        if one.at - busy_until > PAUSE_SECONDS and len(known) - index >= FEWEST_REQUESTS:
            begin = index
        busy_until = max(busy_until, one.finished_at)
    return list(known[begin:])


def _judged(unpaused: Sequence[_CompleteRequest], steps: Sequence[EngineStep], most: int) -> list[_CompleteRequest]:
    """The newest requests for which all concurrent requests are known, as far as can be determined."""
    last = max(one.finished_at for one in unpaused)
    whole = sorted(one.queue + one.prefill + one.decode for one in unpaused)
    long = whole[int(0.95 * (len(whole) - 1))]
    idle = bool(steps) and not steps[-1].running and not steps[-1].waiting
    ended = [one for one in unpaused if idle or one.at <= last - long]
    recent = [one for one in ended if one.at >= ended[-1].at - MOST_SECONDS][-most:] if ended else []
    if recent:
        whole_since = _vanished_until(unpaused, steps, recent[-1].at)
        undisturbed = [one for one in recent if one.at > whole_since]
        recent = undisturbed if len(undisturbed) >= FEWEST_REQUESTS else recent
    if recent and recent[0] is unpaused[0]:
        return recent
    # Older requests than the longest are no longer in flight, so all in flight at its beginning are known.
    return [one for one in recent if one.at >= unpaused[0].at + long]


def _vanished_until(known: Sequence[_CompleteRequest], steps: Sequence[EngineStep], until: float) -> float:
    """The last moment up to ``until`` with requests in flight that left no record; -inf if there is none.

    These are requests whose clients disconnected, as at the end of a load run. The traffic after that is complete
    again.
    """
    arrived, finished = [one.at for one in known], sorted(one.finished_at for one in known)

    def in_flight(at: float) -> int:
        return bisect_right(arrived, at) - bisect_right(finished, at)

    found, since, before = float("-inf"), None, 0
    for step in steps:
        if step.at > until:
            break
        now = in_flight(step.at)
        if (step.running or 0) + (step.waiting or 0) > max(before, now) * VANISHED + 1:
            since = step.at if since is None else since
            found = step.at if step.at - since >= VANISHED_SECONDS else found
        else:
            since = None
        before = now
    return found


def _durations(steps: Sequence[EngineStep]) -> list[tuple[EngineStep, float]]:
    """Each step with its duration in seconds: the shortest interval between tokens, measured by the engine's clock."""
    found = []
    before = None
    for step in steps:
        gap = step.at - before.at if before is not None else 0.0
        took = step.shortest_interval if step.intervals and step.shortest_interval else None
        if took is None:
            idle = before is None or not (before.running or before.waiting)
            took = min(gap, 0.05) if idle else min(gap, 5.0)
        found.append((step, took))
        before = step
    return found


def _intervals(timed: Sequence[tuple[EngineStep, float]]) -> list[tuple[float, int]]:
    """Times between tokens with their counts: in a step nearly all are equal, and the longest is known."""
    found: list[tuple[float, int]] = []
    for step, took in timed:
        if not step.intervals or step.shortest_interval is None:
            continue
        longest = step.longest_interval or took
        if step.intervals > 1 and longest > took * (1 + _SAME_STEP):
            found += [(took, step.intervals - 1), (longest, 1)]
        else:
            found.append((took, step.intervals))
    return found


def _observed(
    judged: Sequence[_CompleteRequest],
    timed: Sequence[tuple[EngineStep, float]],
    itl: Sequence[Weighted],
    seconds: float,
) -> Figures:
    waiting = [(step.waiting, took) for step, took in timed if step.waiting is not None]
    usage = [(step.kv_usage, took) for step, took in timed if step.kv_usage is not None]
    tokens = sum(step.generation_tokens or 0 for step, _ in timed)
    return Figures(
        ttft_seconds=Spread.of(each_once(one.record.ttft_seconds or one.queue + one.prefill for one in judged)),
        itl_seconds=Spread.of(itl),
        e2e_seconds=Spread.of(
            each_once(one.record.e2e_seconds or one.queue + one.prefill + one.decode for one in judged)
        ),
        tokens_per_second=tokens / seconds if tokens else None,
        requests_waiting=sum(count * took for count, took in waiting) / seconds if waiting else None,
        preemptions_per_minute=sum(step.preempted or 0 for step, _ in timed) / seconds * 60 if timed else None,
        kv_cache_usage=sum(share * took for share, took in usage) / seconds if usage else None,
    )


def _work(
    around: Sequence[_CompleteRequest],
    joined: Sequence[tuple[_CompleteRequest, int]],
    timed: Sequence[tuple[EngineStep, float]],
    budget: int,
    ahead: bool,
    zero: float,
) -> list[SeenStep]:
    """The work of each step, from the requests in flight: a request's tokens grow evenly while it decodes.

    A prefill's chunks are as large as the budget allows, first come, first served, and its last step computes the rest.
    Steps with a preempted request are left out, because the records don't show when it was preempted. If too few others
    remain, only those are left out in which a request was preempted or recomputed, or that had many preempted ones.
    """
    took = [seconds for _, seconds in timed]
    begins: dict[int, list[_CompleteRequest]] = {}
    ends: dict[int, list[_CompleteRequest]] = {}
    for one, place in joined:
        begin = place - _prefill_steps(one, place, timed) + 1
        ends.setdefault(place, []).append(one)
        begins.setdefault(min(place, begin + (ahead and not _idle_before(timed, begin))), []).append(one)
    prefilling: list[tuple[_CompleteRequest, int]] = []
    cached = _CachedTokens(around)
    preempted = deque(sorted(one.at + one.queue for one in around if one.record.preemptions))
    disturbed = 0
    work: list[tuple[int, list[tuple[_CompleteRequest, int, int]], float]] = []
    preempted_in: dict[int, int] = {}
    for place, (step, seconds) in enumerate(timed):
        for one in begins.get(place, ()):
            prefilling.append((one, one.prompt - one.cached))
        while preempted and preempted[0] <= step.at:
            preempted.popleft()
            disturbed += 1
        ending = ends.get(place, ())
        chunks, prefilling = _chunks(prefilling, budget - step.intervals, ending)
        disturbed -= sum(bool(one.record.preemptions) for one in cached.forget(step.at - seconds / 2))
        work.append((place, chunks, cached.at(step.at - seconds)))
        cached.add(step.at + seconds / 2)
        if step.shortest_interval is None:  # its duration is then that of a prefill computed entirely in this step
            whole = [
                one.prefill
                for one, count, _ in chunks
                if any(one is other for other in ending) and count == one.prompt - one.cached
            ]
            took[place] = _after_the_one_before(whole[0], place, timed, took) if whole else 0.0
        if not step.preempted and step.generation_tokens in (None, step.intervals + len(ending)):
            preempted_in[place] = disturbed
    kept = _with_known_work(preempted_in, timed)
    if ahead:
        prefills = [
            bool(chunks) or (step.generation_tokens or 0) > step.intervals
            for (_, chunks, _), (step, _) in zip(work, timed, strict=True)
        ]
        took = _own_durations(took, prefills, [step.intervals > 0 for step, _ in timed])
    found = []
    for place, chunks, decoding in work:
        step, seconds = timed[place][0], took[place]
        if place not in kept or seconds <= 0 or not (step.intervals or chunks):
            continue
        reads = decoding + step.intervals
        pairs = reads + sum(count * (done + (count + 1) / 2) for _, count, done in chunks)
        found.append(
            SeenStep(
                step.at - seconds - zero,
                seconds,
                step.intervals + len(chunks),
                step.intervals + sum(count for _, count, _ in chunks),
                reads + sum(count + done for _, count, done in chunks),
                pairs,
                len(chunks),
            )
        )
    return found


def _with_known_work(preempted_in: Mapping[int, int], timed: Sequence[tuple[EngineStep, float]]) -> set[int]:
    """The steps whose work is known, by their numbers of preempted requests: those without, if there are enough."""
    kept = {place for place, number in preempted_in.items() if not number}
    if len(kept) >= FEWEST_STEPS:
        return kept
    nearly = (place for place, number in preempted_in.items() if number <= MOST_DISTURBED * timed[place][0].intervals)
    return kept | {place for place in nearly if not any(map(_resumes, timed[place : place + 2]))}


def _resumes(timed: tuple[EngineStep, float]) -> bool:
    """Whether a request got a token in this step after a pause: it was recomputed in this step or the previous one."""
    step = timed[0]
    if step.shortest_interval is None or step.longest_interval is None:
        return False
    return step.longest_interval > RESUMED_AFTER * step.shortest_interval


class _CachedTokens:
    """The cached tokens of decoding requests, at increasing moments."""

    def __init__(self, around: Sequence[_CompleteRequest]) -> None:
        self._joining = deque(sorted(around, key=lambda one: one.first_token_at))
        self._leaving = deque(sorted(around, key=lambda one: one.finished_at))
        self._constant = self._slope = 0.0

    def add(self, until: float) -> None:
        """Add the requests with a first token up to ``until``."""
        while self._joining and self._joining[0].first_token_at <= until:
            constant, slope = _growth(self._joining.popleft())
            self._constant, self._slope = self._constant + constant, self._slope + slope

    def forget(self, until: float) -> list[_CompleteRequest]:
        """Remove the requests that ended up to ``until``; return them."""
        gone = []
        while self._leaving and self._leaving[0].finished_at <= until:
            gone.append(self._leaving.popleft())
            constant, slope = _growth(gone[-1])
            self._constant, self._slope = self._constant - constant, self._slope - slope
        return gone

    def at(self, moment: float) -> float:
        """The tokens at ``moment``."""
        return max(0.0, self._constant + self._slope * moment)


def _first_token_steps(
    around: Sequence[_CompleteRequest], timed: Sequence[tuple[EngineStep, float]]
) -> list[tuple[_CompleteRequest, int]]:
    """Each request with the index of the step that produced its first token. A step's first tokens are those beyond its
    intervals, and their prompt lengths add up to its ``prompt_tokens``.

    Times alone are insufficient, because the records' clocks differ by as much as the duration of a short step.
    Requests that match no step are left out. If hardly any match, the release counts prompt tokens differently, and
    only their order is used.
    """
    found = _joined(around, timed, by_length=True)
    possible = sum(timed[0][0].at <= one.first_token_at <= timed[-1][0].at for one in around) if timed else 0
    if len(found) >= _MOSTLY_FOUND * possible:
        return found
    return max(found, _joined(around, timed, by_length=False), key=len)


def _joined(
    around: Sequence[_CompleteRequest], timed: Sequence[tuple[EngineStep, float]], *, by_length: bool
) -> list[tuple[_CompleteRequest, int]]:
    coming = deque(sorted(around, key=lambda one: one.first_token_at))
    waiting: list[_CompleteRequest] = []
    found: list[tuple[_CompleteRequest, int]] = []
    for place, (step, took) in enumerate(timed):
        slack = took + _CLOCKS_DIFFER
        while coming and coming[0].first_token_at <= step.at + slack:
            waiting.append(coming.popleft())
        waiting = [one for one in waiting if one.first_token_at >= step.at - slack - _CLOCKS_DIFFER]
        if step.generation_tokens is None:
            chosen: Sequence[_CompleteRequest] = [one for one in waiting if one.first_token_at <= step.at + took / 2]
        else:
            prompts = step.prompt_tokens if by_length else None
            chosen = _adding_up(waiting, step.generation_tokens - step.intervals, prompts)
        for one in chosen:
            waiting.remove(one)
            found.append((one, place))
    return found


def _adding_up(waiting: Sequence[_CompleteRequest], count: int, prompts: int | None) -> Sequence[_CompleteRequest]:
    """The first ``count`` requests, in order, whose prompts have ``prompts`` tokens in total; else none."""
    if not 0 < count <= len(waiting):
        return ()
    if prompts is None or sum(one.prompt for one in waiting[:count]) == prompts:
        return waiting[:count]
    for chosen in islice(combinations(waiting, count), _MOST_CHOICES):
        if sum(one.prompt for one in chosen) == prompts:
            return chosen
    return ()


def _prefill_steps(one: _CompleteRequest, place: int, timed: Sequence[tuple[EngineStep, float]]) -> int:
    """The number of steps of a prefill that ended with step ``place``: those of which it covers more than half."""
    count, left = 1, one.prefill - timed[place][1]
    while count <= place and not _idle_before(timed, place - count + 1) and left > timed[place - count][1] / 2:
        left -= timed[place - count][1]
        count += 1
    return count


def _idle_before(timed: Sequence[tuple[EngineStep, float]], place: int) -> bool:
    """Whether there was nothing to do when step ``place`` began, as far as recorded."""
    before = timed[place - 1][0] if place > 0 else None
    return before is not None and not (before.running or before.waiting)


def _after_the_one_before(
    prefill: float, place: int, timed: Sequence[tuple[EngineStep, float]], took: Sequence[float]
) -> float:
    """Seconds between the ends of the previous step and of step ``place``, whose entire work is a prefill that lasted
    ``prefill`` seconds; the previous step is subtracted if the prefill was scheduled while it ran.
    """
    if not place or _idle_before(timed, place):
        return prefill
    before = took[place - 1]
    gap = timed[place][0].at - timed[place - 1][0].at
    return prefill - before if gap < prefill - before / 2 else prefill


def _scheduled_ahead(
    joined: Sequence[tuple[_CompleteRequest, int]], timed: Sequence[tuple[EngineStep, float]], budget: int
) -> bool:
    """Whether vLLM schedules a step while the previous one runs: a prefill that needs one step then lasts two."""
    lasted = [
        _prefill_steps(one, place, timed)
        for one, place in joined
        if timed[place][0].intervals and one.prompt - one.cached <= (budget - timed[place][0].intervals) / 2
    ]
    return bool(lasted) and median_low(lasted) > 1


def _own_durations(took: Sequence[float], prefills: Sequence[bool], decodes: Sequence[bool]) -> list[float]:
    """Each step's own duration with asynchronous scheduling. Launching a prefill, which has no CUDA graph of its whole
    batch, delays the previous step's result, so that one seems long and the prefill short.

    ``took`` are the seconds between results, 0 if unknown; ``prefills`` says which steps had prompts and ``decodes``
    which had an interval. A step before a prefill is assumed to last as long as the last decode-only step that is not
    before a prefill. The sum stays the same. Launching a prefill also delays the result of another prefill, which the
    records don't show, and which is nothing if that one takes longer than the launch.
    """
    own = list(took)
    usual = None
    for place, seconds in enumerate(took):
        if prefills[place] or not decodes[place]:
            continue
        if place + 1 == len(took) or not prefills[place + 1]:
            usual = seconds
        elif usual is not None and usual < seconds:
            own[place] = usual
            if own[place + 1]:
                own[place + 1] += seconds - usual
    return own


def _growth(one: _CompleteRequest) -> tuple[float, float]:
    """A request's tokens while it decodes, as a line over time: its value at time 0, and tokens per second."""
    rate = one.output / one.decode if one.decode > 0 else 0.0
    return one.prompt - rate * one.first_token_at, rate


def _chunks(
    prefilling: Sequence[tuple[_CompleteRequest, int]], room: int, ending: Collection[_CompleteRequest]
) -> tuple[list[tuple[_CompleteRequest, int, int]], list[tuple[_CompleteRequest, int]]]:
    """The prompt chunks in a step (request, tokens, tokens before them), and what is left for later steps.

    ``ending`` are the requests that get their first token in it.
    """
    chunks, left = [], []
    for one, missing in prefilling:
        last = any(one is other for other in ending)
        count = missing if last else min(missing - 1, max(0, room))
        if count > 0:
            chunks.append((one, count, one.prompt - missing))
            room -= count
        if not last:
            left.append((one, missing - count))
    return chunks, left


def _flaw(
    requests: Sequence[FinishedRequest],
    steps: Sequence[EngineStep],
    unpaused: Sequence[_CompleteRequest],
    around: Sequence[_CompleteRequest],
    timed: Sequence[tuple[EngineStep, float]],
    seconds: float,
) -> str:
    """Why the records don't show all traffic; empty if they do."""
    if not timed:
        return "no steps were recorded"
    if requests[-1].dropped > requests[0].dropped or timed[-1][0].dropped > timed[0][0].dropped:
        return "its probe dropped records"
    counted = sum(((step.running or 0) + (step.waiting or 0)) * took for step, took in timed)
    begin, end = timed[0][0].at, timed[-1][0].at
    known = sum(max(0.0, min(one.finished_at, end) - max(one.at, begin)) for one in around)
    if counted > known * VANISHED + 0.5 * seconds:
        if _vanished(unpaused, steps, timed) > (counted - known) / 2:
            why = "more requests ran than ended: clients disconnected, which leaves no record"
            return f"{why}; try again after more traffic"
        return "some of its requests have not ended yet"
    made = sum(step.generation_tokens or 0 for step, _ in timed)
    emitted = sum(step.intervals for step, _ in timed) + len(around)
    if made > 1.2 * emitted:
        return "it generates several tokens per step, which is not modeled"
    return ""


def _vanished(
    known: Sequence[_CompleteRequest], steps: Sequence[EngineStep], timed: Sequence[tuple[EngineStep, float]]
) -> float:
    """Total time in seconds of requests in these steps that have no record and never will.

    Requests that have not ended yet are in flight in each later step, so there are at most as many of them as the
    minimum number of unknown ones.
    """
    arrived, finished = sorted(one.at for one in known), sorted(one.finished_at for one in known)

    def unknown(step: EngineStep) -> int:
        in_flight = bisect_right(arrived, step.at) - bisect_right(finished, step.at)
        return max(0, (step.running or 0) + (step.waiting or 0) - in_flight)

    end = timed[-1][0].at
    unfinished = min(unknown(step) for step in steps if step.at >= end)
    return sum(max(0, unknown(step) - unfinished) * took for step, took in timed)


def _prefixes(around: Sequence[_CompleteRequest], block_size: int) -> list[tuple[int, ...]]:
    """The blocks that requests share, as far as their cached tokens show.

    A request that found blocks shares them with an earlier one: the one that shared this length before, or else the
    last one that is long enough.
    """
    owner: dict[int, int] = {}
    shared = [0] * len(around)
    parent: list[int | None] = [None] * len(around)
    for index, one in enumerate(around):
        blocks = one.cached // block_size
        if not blocks or one.record.preemptions:
            continue
        if blocks not in owner:
            fits = (
                other for other in range(index - 1, -1, -1)
                if (around[other].prompt + around[other].output - 1) // block_size >= blocks
            )  # fmt: skip
            found = next(fits, None)
            owner[blocks] = index if found is None else found
        parent[index] = owner[blocks] if owner[blocks] != index else None
        shared[index] = max(shared[index], blocks)
        shared[owner[blocks]] = max(shared[owner[blocks]], blocks)
    chains: list[tuple[int, ...]] = []
    for index, count in enumerate(shared):
        origin = parent[index]
        own = around[index].cached // block_size
        head = chains[origin][:own] if origin is not None else ()
        chains.append(head + tuple((index + 1) << 20 | place for place in range(len(head), count)))
    return chains
