"""Finds the highest request rate at which a server meets its objectives, by sending it its preset's traffic."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
from msgspec.structs import replace

from vllm_console.history.energy import Energy, Tariff, energy_within, totals_of
from vllm_console.load.client import (
    ApiAccess,
    LoadError,
    Lookup,
    Sender,
    check_url,
    fetch_body,
    find_served_model,
    find_vocabulary,
    lookup_of,
    open_client,
    own_access,
    wait,
)
from vllm_console.load.ramp_search import (
    FEWEST_REQUESTS,
    FEWEST_SECONDS,
    TOLERANCE,
    NextStep,
    StepFigures,
    StepOutcome,
    bracket,
    ceiling,
    judge_step,
    next_step,
    step_seconds,
)
from vllm_console.load.report import Latency, Tally
from vllm_console.load.shape import USUAL_ITL_SECONDS, Exact, TrafficShape, mean_length, request_count, suggested_rate
from vllm_console.metrics.parse import NotMetricsError, Parser
from vllm_console.metrics.quantile import exact_quantile
from vllm_console.metrics.sample import EngineSample, Sample
from vllm_console.metrics.window import combine, growths, highest_usage
from vllm_console.text import percent
from vllm_console.text import seconds as latency_text
from vllm_launchers.presets.model import Objectives, Workload
from vllm_launchers.units import counted, three_digits

if TYPE_CHECKING:
    from vllm_launchers.host.gpu.host import Host

DEFAULT_BUDGET_SECONDS = 600.0
WATCH_SECONDS = 0.5
"""How often a running step is evaluated."""

SAMPLE_SECONDS = 1.0
POLL_SECONDS = 3.0
"""How long to watch a server for other traffic before anything is sent."""

LOWEST, HIGHEST = 0.01, 10_000.0
"""Bounds of the searched rates, in requests per second."""

START_SHARE = 0.125
"""The first rate, as a share of the rate that is estimated to keep the preset's concurrency in flight."""

MOST_DOWN = 32
"""The lowest rate tried is the first one divided by this."""

WARM_UP_REQUESTS = 4
WARM_UP_TOKENS = 32
SHORTEST_WARM_UP, LONGEST_WARM_UP = 3.0, 60.0
LIKE_BEFORE = 1.1
"""After a step that held at a rate this close, about the right number of requests is already in flight."""
LONGEST_STEP = 120.0
SHORTEST_STEP = 8.0
OTHERS_ALLOWED = 5
"""Requests beyond ours that a server may count before they are called other traffic: the two counts race slightly."""

FEW_REQUESTS = 100
"""With fewer requests, a single one can decide the p99."""

MOST_IN_FLIGHT = 1024
LONGEST_WAIT = 5.0


class RampStep(msgspec.Struct, frozen=True):
    """The measurements at one rate (requests per second), without the warm-up.

    ``sent`` includes requests still in flight at the end of the step, besides ``completed`` and ``failed``; in the
    latencies these are unfinished. ``waiting`` is the server's queue at the end, ``kv_cache_usage`` a median (share
    from 0 to 1).
    """

    outcome: StepOutcome
    sent: int
    completed: int
    failed: int
    ttft: Latency
    itl: Latency
    e2e: Latency
    tokens_per_second: float | None
    kv_cache_usage: float | None
    preemptions: float | None
    waiting: float | None
    goodput: float | None = None
    """Completed requests per second with TTFT and mean ITL within their limits."""
    energy: Energy | None = None
    """Energy used by the server's GPUs; None if unknown."""

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.outcome.rate

    def document(self) -> dict[str, Any]:
        """The JSON contract of a step."""
        return {
            "rate": self.rate,
            "sent": self.sent,
            "completed": self.completed,
            "failed": self.failed,
            "ttft_seconds": self.ttft.document(),
            "itl_seconds": self.itl.document(),
            "e2e_seconds": self.e2e.document(),
            "tokens_per_second": self.tokens_per_second,
            "kv_cache_usage": self.kv_cache_usage,
            "preemptions": self.preemptions,
            "waiting": self.waiting,
            "attained": self.outcome.attained,
            "ok": self.outcome.ok,
            **_energy(self.energy),
        }


class Ramp(msgspec.Struct, frozen=True):
    """A finished ramp. ``ceiling`` (requests per second) is None if no rate held, or none failed.

    ``interval`` contains the ceiling in nine of ten cases, or is what is left to search.
    """

    steps: tuple[RampStep, ...]
    ceiling: float | None
    goodput: float | None
    limited_by: str
    sentence: str
    complete: bool = True
    """Whether it ran to completion: it was not canceled, and the server kept answering."""
    energy: Energy | None = None
    """Energy of the step nearest to the ceiling."""
    interval: tuple[float, float] | None = None

    def document(self) -> dict[str, Any]:
        """The JSON contract of ``vllm-console ramp --json``."""
        return {
            "steps": [step.document() for step in self.steps],
            "ceiling_requests_per_second": self.ceiling,
            "ceiling_interval": list(self.interval) if self.interval is not None else None,
            "goodput": self.goodput,
            "limited_by": self.limited_by or None,
            "sentence": self.sentence,
            **_energy(self.energy),
        }


def _energy(found: Energy | None) -> dict[str, Any]:
    """The key is present only if the energy is known."""
    return {"energy": found.document()} if found is not None else {}


class RampProgress(msgspec.Struct, frozen=True):
    """Progress of a ramp: the current step's rate, whether it is warming up, and seconds since the ramp began."""

    rate: float
    warming_up: bool
    elapsed: float
    in_flight: int


class RampOptions(msgspec.Struct, frozen=True):
    """How to search: fixed ``rates`` or none, the first rate (None: estimated), and the total time."""

    rates: tuple[float, ...] = ()
    start: float | None = None
    budget_seconds: float = DEFAULT_BUDGET_SECONDS
    seed: int = 0
    others_allowed: bool = False
    """Whether to continue if the server has other traffic."""


async def traffic_of_others(url: str, lookup: Lookup | None, access: ApiAccess | None = None) -> str:
    """A server's activity while we send nothing: ``has 1 request in progress``; empty if idle or unknown."""
    base = check_url(url, allow_remote=True)
    async with open_client(base, access or own_access(), lookup if access else lookup or lookup_of(base)) as client:
        return await _Signals(client).others()


async def run_ramp(
    url: str,
    workload: Workload,
    objectives: Objectives,
    options: RampOptions,
    *,
    exact: Exact | None = None,
    lookup: Lookup | None = None,
    allow_remote: bool = False,
    access: ApiAccess | None = None,
    meter: EnergyMeter | None = None,
    stop: asyncio.Event | None = None,
    on_step: Callable[[RampStep], None] | None = None,
    on_progress: Callable[[RampProgress], None] | None = None,
) -> Ramp:
    """Send a workload at one rate after the other, until the highest one that holds is known, or time is up.

    ``exact``, ``lookup`` and ``access`` are as for `run_load`; ``meter`` reads the server's GPUs. ``stop`` discards the
    current step.

    Raises:
        LoadError: the server does not answer, or is not on this machine.
    """
    base = check_url(url, allow_remote=allow_remote or lookup is not None)
    if lookup is None and not allow_remote:
        lookup = lookup_of(base)
    stop, access = stop or asyncio.Event(), access or own_access()
    async with open_client(base, access, lookup) as client:
        target = await find_served_model(client, None, access)
        vocabulary = await find_vocabulary(client, target.model)
        shape = TrafficShape(
            workload, exact=exact, seed=options.seed, max_model_len=target.max_model_len, vocabulary=vocabulary
        )
        if misfit := shape.misfit():
            raise LoadError(misfit)
        signals = _Signals(client, meter)
        most = max(4 * workload.concurrency, MOST_IN_FLIGHT)
        sender = Sender(client, target.model, Tally(), most)
        run = _Run(sender, shape, signals, objectives, options, stop, on_progress)
        try:
            return await run.search(on_step)
        finally:
            await sender.cancel("the ramp ended before the answer was complete")


class _Signals:
    """The server's own metrics: a sample of ``/metrics`` per second while it reports them."""

    def __init__(self, client: httpx.AsyncClient, meter: EnergyMeter | None = None) -> None:
        self._client, self._meter = client, meter
        self._parser = Parser()

    async def sample(self) -> Sample | None:
        """A sample now; None if there is none."""
        try:
            async with asyncio.timeout(2 * SAMPLE_SECONDS):
                status, body = await fetch_body(self._client, "GET", "/metrics")
            return self._parser.parse(body.decode(errors="replace"), time.time()) if status == 200 else None
        except (httpx.HTTPError, TimeoutError, NotMetricsError):
            return None

    async def collect(self, into: list[Sample]) -> None:
        """Sample until canceled."""
        while True:
            began = time.perf_counter()
            if (sample := await self.sample()) is not None:
                into.append(sample)
            if self._meter is not None:
                self._meter.sample()
            await asyncio.sleep(max(0.1, SAMPLE_SECONDS - (time.perf_counter() - began)))

    def energy(self, samples: Sequence[Sample]) -> Energy | None:
        """Energy used by the server's GPUs while these samples were collected."""
        return self._meter.energy(samples) if self._meter is not None else None

    async def others(self) -> str:
        """See `traffic_of_others`."""
        before = await self.sample()
        await asyncio.sleep(POLL_SECONDS)
        after = await self.sample()
        if before is None or after is None:
            return ""
        now = combine(after.engines.values())
        busy = int((now.requests_running or 0) + (now.requests_waiting or 0))
        if busy:
            return f"has {counted(busy, 'request')} in progress"
        moved = sum(
            (one.requests_finished_total or 0) + (one.generation_tokens_total or 0) for one in growths(before, after)
        )
        return "has answered requests in the last seconds" if moved else ""


class _Run:
    def __init__(
        self,
        sender: Sender,
        shape: TrafficShape,
        signals: _Signals,
        objectives: Objectives,
        options: RampOptions,
        stop: asyncio.Event,
        on_progress: Callable[[RampProgress], None] | None,
    ) -> None:
        self._sender, self._shape, self._signals = sender, shape, signals
        self._objectives, self._options, self._stop = objectives, options, stop
        self._on_progress = on_progress or (lambda _: None)
        self._begin = time.perf_counter()
        self._mean_output = shape.exact.output_tokens or mean_length(shape.workload.output_tokens_p95)
        self._request_seconds = self._mean_output * USUAL_ITL_SECONDS
        """How long a request takes, according to the newest step that held."""
        self._tallies: list[Tally] = []
        self._first: Sample | None = None
        self._steps: list[RampStep] = []
        self._end = ""
        """Why the ramp ended early, as a code."""

    @property
    def _left(self) -> float:
        return self._options.budget_seconds - (time.perf_counter() - self._begin)

    async def search(self, on_step: Callable[[RampStep], None] | None) -> Ramp:
        """Try one rate after the other, and conclude."""
        self._first = await self._signals.sample()
        await self._measure_one()
        out_of_time = False
        while not self._end and (wanted := self._next()) is not None:
            warm_up = self._warm_up_seconds(wanted.rate)
            shortest = max(SHORTEST_STEP, FEWEST_REQUESTS / wanted.rate)
            if self._left < warm_up + shortest:
                out_of_time = True
                break
            step = await self._step(wanted, max(shortest, self._step_seconds() - warm_up))
            if step is None:
                break
            self._steps.append(step)
            if on_step is not None:
                on_step(step)
            await self._check()
        ended = self._end or ("canceled" if self._stop.is_set() else "")
        fixed = bool(self._options.rates)
        return conclude(self._steps, self._objectives, fixed=fixed, ended=ended, out_of_time=out_of_time)

    def _next(self) -> NextStep | None:
        fixed, done = self._options.rates, len(self._steps)
        if fixed:
            return NextStep(fixed[done]) if done < len(fixed) else None
        start = self._options.start or max(LOWEST, suggested_rate(self._shape.workload) * START_SHARE)
        wanted = next_step([step.outcome for step in self._steps], start, max(LOWEST, start / MOST_DOWN), HIGHEST)
        return NextStep(float(f"{wanted.rate:.4g}"), wanted.full) if wanted is not None else None

    def _step_seconds(self) -> float:
        """Maximum duration of the next step with its warm-up."""
        fixed = self._options.rates
        if fixed:
            return min(LONGEST_STEP, self._left / (len(fixed) - len(self._steps)))
        return step_seconds([step.outcome for step in self._steps], self._left, LONGEST_STEP)

    async def _measure_one(self) -> None:
        """Send a few short requests: they fill the prefix cache, warm up the server, and show a request's duration."""
        tally = self._new_tally()
        short = [
            msgspec.structs.replace(request, output_tokens=min(request.output_tokens, WARM_UP_TOKENS))
            for request in self._shape.at([0.0] * WARM_UP_REQUESTS)
        ]
        await self._sender.play(short, self._stop)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(LONGEST_WARM_UP, self._options.budget_seconds)):
                await self._sender.drain(self._stop)
        self._learn(tally)
        if not tally.completed and not self._stop.is_set():
            failure = tally.report(0.0, 0).failure
            raise LoadError(f"it answers no request of its traffic: {failure or 'none in a minute'}")

    def _learn(self, tally: Tally) -> None:
        if tally.ttft.count and tally.itl.count:
            itl = tally.itl.sum / tally.itl.count
            first = tally.ttft.sum / tally.ttft.count
            self._request_seconds = first + itl * self._mean_output

    def _warm_up_seconds(self, rate: float) -> float:
        """Time until about the right number of requests for this rate is in flight."""
        if self._steps and warm(rate, self._steps[-1].outcome):
            return SHORTEST_WARM_UP
        wanted = min(LONGEST_WARM_UP, max(SHORTEST_WARM_UP, 2 * self._request_seconds))
        return min(
            wanted, max(SHORTEST_WARM_UP, 0.25 * self._options.budget_seconds / max(1, len(self._options.rates)))
        )

    def _new_tally(self) -> Tally:
        objectives = self._objectives
        tally = Tally(self._options.seed, (objectives.ttft_p99_seconds, objectives.itl_p99_seconds))
        self._tallies.append(tally)
        self._sender.tally = tally
        return tally

    async def _step(self, wanted: NextStep, seconds: float) -> RampStep | None:
        """Run one rate: warm-up, then measurement; None if the ramp was stopped."""
        rate = wanted.rate
        await self._sender.trim(max(1, round(rate * self._request_seconds)))
        self._new_tally()
        warm_up = self._warm_up_seconds(rate)
        with self._during(rate, warming_up=True) as over:
            asyncio.get_running_loop().call_later(warm_up, over.set)
            await self._sender.play(self._shape.stream(rate, warm_up), over)
            await wait(over, warm_up)
        samples: list[Sample] = []
        scraping = asyncio.create_task(self._signals.collect(samples))
        try:
            with self._during(rate, warming_up=False) as over:
                return None if self._stop.is_set() else await self._measured(wanted, seconds, samples, over)
        finally:
            scraping.cancel()

    @contextlib.contextmanager
    def _during(self, rate: float, *, warming_up: bool) -> Iterator[asyncio.Event]:
        """Report the progress of one part of a step; the event is set when the ramp is stopped."""
        over = asyncio.Event()

        async def stopped() -> None:
            await self._stop.wait()
            over.set()

        async def report() -> None:
            while True:
                elapsed = time.perf_counter() - self._begin
                self._on_progress(RampProgress(rate, warming_up, elapsed, self._sender.in_flight))
                await asyncio.sleep(WATCH_SECONDS)

        tasks = [asyncio.create_task(stopped()), asyncio.create_task(report())]
        try:
            yield over
        finally:
            for task in tasks:
                task.cancel()

    async def _measured(
        self, wanted: NextStep, seconds: float, samples: list[Sample], over: asyncio.Event
    ) -> RampStep | None:
        """Send until the outcome is clear or time is up, then report."""
        rate, tally = wanted.rate, self._new_tally()
        counted, begin = self._output_tokens(), time.perf_counter()
        due = self._shape.arrivals(request_count(rate, seconds), seconds)
        sending = asyncio.create_task(self._sender.play(self._shape.at(due), over))
        in_flight: list[float] = []
        fewest = min(max(FEWEST_SECONDS, 2 * self._request_seconds), seconds)
        outcome: StepOutcome | None = None
        try:
            while outcome is None:
                await wait(over, WATCH_SECONDS)
                if self._stop.is_set():
                    return None
                in_flight.append(float(self._sender.in_flight))
                now = time.perf_counter()
                figures = self._figures(rate, now - begin, tally, in_flight, samples)
                outcome = judge_step(
                    figures,
                    self._objectives,
                    fewest_seconds=fewest,
                    final=now - begin >= seconds,
                    early=not wanted.full,
                )
        finally:
            over.set()
            await asyncio.gather(sending, return_exceptions=True)
        now = time.perf_counter()
        elapsed = now - begin
        tokens = (self._output_tokens() - counted) / elapsed
        if (sample := await self._signals.sample()) is not None:
            samples.append(sample)
        await self._wait_for_first_tokens(tally)
        for answer in self._sender.under_way(tally):
            answer.cut_off(time.perf_counter(), gap_limit=self._objectives.itl_p99_seconds)
        tally.never_sent([elapsed - at for at in due[tally.sent :] if at < elapsed])
        return self._finished(tally, samples, outcome, tokens)

    async def _wait_for_first_tokens(self, tally: Tally) -> None:
        """Send nothing until each request of a step has its first token, or has missed its objective anyway."""
        limit = min(LONGEST_WAIT, self._objectives.ttft_p99_seconds)

        def open_ended() -> bool:
            now = time.perf_counter()
            return any(not one.begun and one.age(now) <= limit for one in self._sender.under_way(tally))

        while open_ended() and not self._stop.is_set():
            await asyncio.sleep(0.02)

    def _output_tokens(self) -> int:
        return sum(tally.output_tokens for tally in self._tallies)

    def _figures(
        self, rate: float, seconds: float, tally: Tally, in_flight: Sequence[float], samples: Sequence[Sample]
    ) -> StepFigures:
        limits = self._objectives
        late = sum(
            1
            for answer in self._sender.under_way(tally)
            if not answer.begun and answer.age(time.perf_counter()) > limits.ttft_p99_seconds
        )
        grown = _counts_between(samples)
        return StepFigures(
            rate=rate,
            seconds=seconds,
            ttft=(tally.ttft.within, tally.ttft.beyond + late + tally.failed),
            itl=(tally.itl.within, tally.itl.beyond),
            failed=tally.failed,
            in_flight=tuple(in_flight),
            kv_cache_usage=tuple(
                usage for sample in samples if (usage := highest_usage(sample.engines.values())) is not None
            ),
            preemptions=grown.preemptions_total,
            finished=grown.requests_finished_total,
            running=combine(samples[-1].engines.values()).requests_running if samples else None,
            sent=(0, 0) if tally.held_back else (tally.send_delay.within, tally.send_delay.beyond),
        )

    def _finished(self, tally: Tally, samples: Sequence[Sample], outcome: StepOutcome, tokens: float) -> RampStep:
        if outcome.ok:
            self._learn(tally)
        usages = sorted(usage for sample in samples if (usage := highest_usage(sample.engines.values())) is not None)
        ended = tally.completed + tally.failed
        return RampStep(
            outcome=outcome,
            sent=tally.sent,
            completed=tally.completed,
            failed=tally.failed,
            ttft=tally.ttft.latency(exact_quantile),
            itl=tally.itl.latency(exact_quantile),
            e2e=tally.e2e.latency(),
            tokens_per_second=tokens,
            kv_cache_usage=usages[len(usages) // 2] if usages else None,
            preemptions=_counts_between(samples).preemptions_total,
            waiting=combine(samples[-1].engines.values()).requests_waiting if samples else None,
            goodput=outcome.rate * tally.good / ended if ended else None,
            energy=self._signals.energy(samples),
        )

    async def _check(self) -> None:
        """Check after a step whether the server still answers, and whether it has other traffic."""
        if not self._steps[-1].outcome.ok and self._steps[-1].failed:
            try:
                await find_served_model(self._sender.client, self._sender.model)
            except LoadError:
                self._end = "server"
                return
        latest = await self._signals.sample()
        if self._options.others_allowed or self._first is None or latest is None:
            return
        finished = sum(one.requests_finished_total or 0 for one in growths(self._first, latest))
        ours = sum(tally.sent for tally in self._tallies)
        if finished > ours + OTHERS_ALLOWED:
            self._end = "others"


def warm(rate: float, before: StepOutcome) -> bool:
    """Whether the requests in flight after the step ``before`` are about as many as ``rate`` needs."""
    kept_up = before.ok or before.limited_by == "itl_p99_seconds"
    return kept_up and max(rate / before.rate, before.rate / rate) <= LIKE_BEFORE


def _counts_between(samples: Sequence[Sample]) -> EngineSample:
    """The server's counts between the first and the last of these samples."""
    return combine(growths(samples[0], samples[-1])) if len(samples) > 1 else EngineSample()


# -- the result -------------------------------------------------------------------------------------------------------


def conclude(
    steps: Sequence[RampStep],
    objectives: Objectives,
    *,
    fixed: bool = False,
    ended: str = "",
    out_of_time: bool = False,
) -> Ramp:
    """The ceiling that follows from these steps, what limits it, and a sentence about both.

    With ``fixed`` rates, it is the highest rate below which all hold. ``ended`` is why the ramp ended early:
    ``canceled``, ``server`` (it stopped answering) or ``others`` (it has other traffic). ``out_of_time``: the time was
    up first.
    """
    done = [step.outcome for step in steps]
    known = bracket(done)
    found = ceiling(done)
    early = _ENDED.get(ended, "Out of time. " if out_of_time else "")
    if found is None or known.low is None or known.high is None:
        limited_by = "server" if ended == "server" else ""
        if known.high is not None and not limited_by:
            limited_by = _step_at(steps, known.high).outcome.limited_by
        stopped = ended == "server" and known.low is None  # which shows nothing about its objectives
        sentence = early + ("" if stopped else _unlimited(steps, known.low, known.high, objectives))
        return Ramp(tuple(steps), None, None, limited_by, sentence.rstrip(), complete=not ended)
    by_bracket = fixed or found.error is None
    if by_bracket:
        rate, limited_by = known.low, _step_at(steps, known.high).outcome.limited_by
        interval = known.low, known.high
    else:
        rate, limited_by = float(f"{found.rate:.3g}"), found.limited_by
        interval = min(rate, float(f"{found.low:.3g}")), max(rate, float(f"{found.high:.3g}"))
    limited_by = "server" if ended == "server" else limited_by
    failed = sorted((step for step in steps if not step.outcome.ok), key=lambda step: step.rate)
    beyond = next((step for step in failed if step.rate > rate), failed[-1])
    # Misses come in bursts, so a step below the ceiling may fail and be outweighed by its neighbors.
    up_to = _rate(rate) if beyond.rate > rate else f"about {_rate(rate)}, by all steps together"
    sentence = f"{early}The objectives hold up to {up_to}; at {_rate(beyond.rate)}, {_why(beyond, objectives)}."
    if interval[1] / interval[0] > 1 + TOLERANCE:
        how = "" if by_bracket else ", with a probability of 90%"
        sentence += f" The ceiling lies between {_rate(interval[0])} and {_rate(interval[1])}{how}."
    judged = max(step.sent for step in steps if known.low <= step.rate <= known.high)
    if judged < FEW_REQUESTS:
        sentence += f" No rate near it had more than {counted(judged, 'request')}, too few for a p99: allow more time."
    near = min(steps, key=lambda step: abs(step.rate / rate - 1))
    goodput = near.goodput / near.rate * rate if near.goodput is not None else None
    return Ramp(tuple(steps), rate, goodput, limited_by, sentence, not ended, near.energy, interval)


_ENDED = {
    "canceled": "Canceled. ",
    "server": "The server stopped answering, so the ramp ended. ",
    "others": "Other clients sent requests, so the ramp ended. ",
}


def _step_at(steps: Sequence[RampStep], rate: float) -> RampStep:
    """The newest step that failed at a rate."""
    return next(step for step in reversed(steps) if step.rate == rate and not step.outcome.ok)


def _unlimited(steps: Sequence[RampStep], low: float | None, high: float | None, objectives: Objectives) -> str:
    if high is not None:
        why = _why(_step_at(steps, high), objectives)
        sometimes = "reliably " if any(step.outcome.ok for step in steps) else ""
        return f"The objectives did not hold {sometimes}at any rate; at the lowest, {_rate(high)}, {why}."
    if low is None:
        return "No rate was measured, so the ceiling is unknown."
    return f"The objectives held at every rate up to {_rate(low)}: the ceiling was not reached."


def _rate(value: float) -> str:
    return f"{three_digits(value)} req/s"


def _why(step: RampStep, objectives: Objectives) -> str:
    """The missed objective at a rate, with figure and limit."""
    limited_by = step.outcome.limited_by
    if limited_by == "ttft_p99_seconds":
        return f"TTFT p99 was {step.ttft.cell('p99')} (limit {latency_text(objectives.ttft_p99_seconds)})"
    if limited_by == "itl_p99_seconds":
        return f"ITL p99 was {step.itl.cell('p99')} (limit {latency_text(objectives.itl_p99_seconds)})"
    if limited_by == "kv_cache_usage":
        return f"KV cache usage was {percent(step.kv_cache_usage)} (limit {percent(objectives.kv_cache_usage)})"
    if limited_by == "preemption_rate":
        came = (
            counted(round(step.preemptions), "preemption") if step.preemptions is not None else "too many preemptions"
        )
        return f"{came} came (limit {percent(objectives.preemption_rate)} of the requests)"
    if limited_by == "queue":
        return "the queue kept growing"
    if limited_by == "failures":
        return f"{step.failed} of {counted(step.sent, 'request')} failed"
    if limited_by == "client":
        return "this client could not send as fast"
    return "the server stopped answering"


EDGE_SECONDS = 3.0
"""How far the first and last reading may be inside a step; readings are taken every second."""


class EnergyMeter:
    """Collects GPU readings from ``latest``; ``pid`` is the server's process, ``gpus`` those assigned to it."""

    def __init__(
        self, pid: int, gpus: Sequence[int], latest: Callable[[], Host | None], tariff: Tariff | None = None
    ) -> None:
        self._pid, self._gpus, self._latest, self._tariff = pid, set(gpus), latest, tariff
        self._hosts: list[Host] = []

    def sample(self) -> None:
        """Keep the newest reading."""
        host = self._latest()
        if host is not None and (not self._hosts or host.at != self._hosts[-1].at):
            self._hosts.append(host)

    def energy(self, samples: Sequence[Sample]) -> Energy | None:
        """The energy from the first to the last of the server's samples; discards the readings."""
        self.sample()
        hosts, self._hosts = self._hosts, []
        if len(samples) < 2:
            return None
        start, end = samples[0].at, samples[-1].at
        found = energy_within(hosts, self._pid, list(map(totals_of, samples)), start, end, EDGE_SECONDS)
        if found is None or set(found.gpus) != self._gpus:
            return None
        return replace(found, tariff=self._tariff)
