"""The ceiling found by a ramp, compared with an exhaustive search on the simulated engine, and its spread.

    python tests/benchmarks/ramp.py [--runs 5] [--budget 600] [--cases "chatbot,16 sequences"]
    python tests/benchmarks/ramp.py --server NAME [--runs 5] [--budget 300]

In virtual time, ramps with different seeds search the ceiling with the decisions of ``vllm-console ramp`` (`next_step`,
`judge_step`, `ceiling`). The exhaustive search measures every rate of a 2% grid around their results, for ``--seconds``
after a warm-up of a minute, with several seeds. Its ceiling is where the fewest outcomes are on the wrong side; the
first rate that fails by chance is lower than the rate from which on they fail. With ``--shares``, for cases limited by
ITL, it is instead where the share of slow gaps reaches its limit, from a line through the logarithms of the shares at
three rates.

With ``--server``, the command itself is run on a running server, for example on real vLLM, and the spread of the
ceilings is printed.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from vllm_console.load.ramp import (
    LONGEST_STEP,
    LONGEST_WARM_UP,
    SHORTEST_STEP,
    SHORTEST_WARM_UP,
    START_SHARE,
    warm,
)
from vllm_console.load.ramp_search import (
    FEWEST_REQUESTS,
    FEWEST_SECONDS,
    StepFigures,
    StepOutcome,
    ceiling,
    judge_step,
    next_step,
    step_seconds,
)
from vllm_console.load.report import Tally
from vllm_console.load.shape import LoadRequest, TrafficShape, mean_length, request_count, suggested_rate
from vllm_launchers.engine_model.core import Core
from vllm_launchers.engine_model.scheduler import Request
from vllm_launchers.presets.model import ATTAINED, Objectives, Workload
from vllm_launchers.simulated.flags import parse_flags
from vllm_launchers.simulated.memory import plan_memory
from vllm_launchers.simulated.server import build_core
from vllm_launchers.simulated.settings import Simulated, resolve_settings

GRID = 1.02
REACH = 1.2
"""Default distance of the exhaustive search from the median ramp."""
WATCH = 0.5


@dataclass(frozen=True)
class Case:
    """A server, its traffic and its objectives."""

    flags: str
    workload: Workload
    objectives: Objectives
    model: str = "Qwen/Qwen3-8B-AWQ"
    environment: dict[str, str] = field(default_factory=dict)


CASES = {
    "chatbot": Case(
        "--max-num-seqs 256 --max-model-len 4096 --max-num-batched-tokens 4096 --gpu-memory-utilization 0.92",
        Workload(3072, 768, 0.5, 64), Objectives(1.0, 0.1, 0.85, 0.02),
    ),
    "short chats": Case(
        "--max-num-seqs 256 --max-model-len 4096 --gpu-memory-utilization 0.92",
        Workload(512, 256, 0.5, 64), Objectives(1.0, 0.05, 0.85, 0.02),
    ),
    "16 sequences": Case(
        "--max-num-seqs 16 --max-model-len 4096", Workload(512, 128, 0.3, 32), Objectives(1.0, 0.1, 0.95, 0.02),
    ),
    "small KV cache": Case(
        "--max-num-seqs 128 --max-model-len 4096 --num-gpu-blocks-override 2000", Workload(1024, 256, 0.1, 16),
        Objectives(2.0, 0.2, 0.85, 0.02),
    ),
}  # fmt: skip


class VirtualServer:
    """One simulated engine in virtual time, and its requests in flight."""

    def __init__(self, case: Case, seed: int) -> None:
        settings = resolve_settings(
            parse_flags(["serve", case.model, *case.flags.split()]), Simulated.from_environment(case.environment)
        )
        self.core: Core = build_core(settings, plan_memory(settings))
        self.shape = TrafficShape(case.workload, seed=seed, max_model_len=4096)
        self.goals = case.objectives
        self.now = 0.0
        self._ids = 0
        self._tally_of: dict[str, Tally] = {}
        self.under_way: dict[str, Request] = {}
        self.preemptions = 0
        self.finished = 0
        self.usages: list[tuple[float, float]] = []

    def play(self, requests: list[LoadRequest], until: float, tally: Tally) -> Iterator[float]:
        """Advance to ``until`` with these arrivals (relative to now), yielding twice a second."""
        begin = self.now
        queue = [(begin + one.at, index, one) for index, one in enumerate(requests)]
        heapq.heapify(queue)
        tick = self.now + WATCH
        end = begin + until
        while self.now < end:
            while queue and queue[0][0] <= self.now:
                self._add(queue[0][0], heapq.heappop(queue)[2], tally)
            if self.core.busy:
                seconds = self.core.begin(self.now)
                self.usages.append((self.now, self.core.scheduler.pool.usage))
                self.now += seconds
                self._take(self.core.finish(seconds, self.now))
            else:
                self.now = min(end, queue[0][0] if queue else end)
            while self.now >= tick:
                yield tick
                tick += WATCH

    def _add(self, at: float, one: LoadRequest, tally: Tally) -> None:
        self._ids += 1
        name = str(self._ids)
        request = Request(name, one.prompt, one.output_tokens, one.output_tokens, arrival=at, seed=self._ids)
        tally.sent += 1
        self._tally_of[name] = tally
        self.under_way[name] = request
        self.core.scheduler.add(request)

    def _take(self, report) -> None:  # type: ignore[no-untyped-def]
        self.preemptions += report.batch.preempted
        first = {request.id for request in report.prefilled}
        gaps = iter(report.itls)
        for request in report.advanced:
            tally = self._tally_of.get(request.id)
            if tally is None:
                continue
            if request.id in first:
                tally.ttft.add(self.now - request.arrival)
            else:
                tally.itl.add(next(gaps))
            if request.finished is not None:
                tally.completed += 1
                self.finished += 1
                tally.output_tokens += request.generated
                del self.under_way[request.id], self._tally_of[request.id]

    def late(self, tally: Tally) -> int:
        """Number of requests that have been without a first token for longer than the limit."""
        return sum(
            1 for name, request in self.under_way.items()
            if self._tally_of[name] is tally and not request.generated
            and self.now - request.arrival > self.goals.ttft_p99_seconds
        )  # fmt: skip

    def trim(self, keep: int) -> None:
        """Abort as `Sender.trim` does."""
        ordered = sorted(self.under_way.items(), key=lambda one: not one[1].generated)
        for name, request in ordered[keep:]:
            self.core.scheduler.abort(request)
            del self.under_way[name], self._tally_of[name]


class VirtualRamp:
    """The steps of a ramp in virtual time."""

    def __init__(self, case: Case, seed: int) -> None:
        self.server = VirtualServer(case, seed)
        self.case = case
        tally = Tally()
        shape = self.server.shape
        short = list(shape.at([0.0] * 4))
        for _ in self.server.play(short, 30.0, tally):
            pass
        self.request_seconds = 1.0
        self.last: StepOutcome | None = None
        self.learn(tally)

    def learn(self, tally: Tally) -> None:
        first, itl = tally.ttft.sum / tally.ttft.count, tally.itl.sum / max(1, tally.itl.count)
        self.request_seconds = first + itl * mean_length(self.case.workload.output_tokens_p95)

    def warm_up(self, rate: float) -> float:
        if self.last is not None and warm(rate, self.last):
            return SHORTEST_WARM_UP
        return min(LONGEST_WARM_UP, max(SHORTEST_WARM_UP, 2 * self.request_seconds))

    def step(self, rate: float, seconds: float, *, warm_up: float | None = None, early: bool = True):  # type: ignore[no-untyped-def]
        server, goals = self.server, self.case.objectives
        warming = self.warm_up(rate) if warm_up is None else warm_up
        server.trim(max(1, round(rate * self.request_seconds)))
        for _ in server.play(list(server.shape.stream(rate, warming)), warming, Tally()):
            pass
        tally, begin = Tally(limits=(goals.ttft_p99_seconds, goals.itl_p99_seconds)), server.now
        preempted, finished = server.preemptions, server.finished
        server.usages.clear()
        in_flight: list[float] = []
        fewest = min(max(FEWEST_SECONDS, 2 * self.request_seconds), seconds)
        requests = list(server.shape.at(server.shape.arrivals(request_count(rate, seconds), seconds)))
        figures = None
        for now in server.play(requests, seconds, tally):
            in_flight.append(len(server.under_way))
            final = now - begin >= seconds - WATCH
            if not early and not final:
                continue
            figures = StepFigures(
                rate, now - begin, (tally.ttft.within, tally.ttft.beyond + server.late(tally)),
                (tally.itl.within, tally.itl.beyond), 0, tuple(in_flight), tuple(one for _, one in server.usages[::20]),
                float(server.preemptions - preempted), float(server.finished - finished), float(len(server.under_way)),
            )  # fmt: skip
            outcome = judge_step(figures, goals, fewest_seconds=fewest, final=final)
            if outcome is not None:
                break
        if outcome.ok:
            self.learn(tally)
        self.last = outcome
        return outcome, warming + (server.now - begin)


@dataclass(frozen=True)
class Found:
    """What a ramp found with its 90% interval, the seconds it took, and its steps."""

    ceiling: float
    interval: tuple[float, float]
    limited_by: str
    seconds: float
    steps: int


def ramp(case: Case, seed: int, budget: float) -> Found:
    run = VirtualRamp(case, seed)
    start = suggested_rate(case.workload) * START_SHARE
    tried: list[StepOutcome] = []
    spent = 0.0
    while (wanted := next_step(tried, start, start / 32, 10_000)) is not None:
        rate = float(f"{wanted.rate:.4g}")
        shortest = max(SHORTEST_STEP, FEWEST_REQUESTS / rate)
        warming = run.warm_up(rate)
        if budget - spent < warming + shortest:
            break
        seconds = step_seconds(tried, budget - spent, LONGEST_STEP) - warming
        outcome, took = run.step(rate, max(shortest, seconds), early=not wanted.full)
        spent += took
        tried.append(outcome)
    found = ceiling(tried)
    if found is None:
        return Found(0.0, (0.0, 0.0), "", spent, len(tried))
    return Found(found.rate, (found.low, found.high), found.limited_by, spent, len(tried))


def exhaustive(case: Case, around: float, seconds: float, seeds: int, reach: float) -> float:
    """The rate at which outcomes turn from holding to failing, on a grid from ``around`` / ``reach`` to ``around`` *
    ``reach``."""
    steps = round(math.log(reach) / math.log(GRID))
    rates = [around * GRID**step for step in range(-steps, steps + 1)]
    held = []
    for rate in rates:
        runs = (VirtualRamp(case, 1000 + seed) for seed in range(seeds))
        held.append(sum(run.step(rate, seconds, warm_up=60.0, early=False)[0].ok for run in runs))
    wrong = [sum(seeds - one for one in held[:place]) + sum(held[place:]) for place in range(len(rates) + 1)]
    best = [place for place, number in enumerate(wrong) if number == min(wrong)]
    return float(rates[0] * GRID ** (statistics.median(best) - 0.5))  # between the rates on both sides


def by_shares(case: Case, around: float, seconds: float, seeds: int) -> float:
    """The rate at which the share of slow gaps is 1%."""
    points = []
    for by in (-0.05, 0.0, 0.05):
        runs = (VirtualRamp(case, 1000 + seed) for seed in range(seeds))
        shares = [run.step(around * math.exp(by), seconds, warm_up=60.0, early=False)[0].itl for run in runs]
        within, beyond = map(sum, zip(*shares, strict=True))
        points.append((by, math.log(beyond / (within + beyond))))
    slope, level = statistics.linear_regression(*zip(*points, strict=True))
    return around * math.exp((math.log(1 - ATTAINED) - level) / slope)


def virtual(args: argparse.Namespace) -> None:
    print(
        f"{'case':16}{'exhaustive':>11}{'ramps':>30}{'median error':>14}{'worst':>8}{'within 5%':>11}"
        f"{'in interval':>15}  limited by"
    )
    errors: list[float] = []
    covered = 0
    for name in args.cases.split(","):
        case = CASES[name.strip()]
        found = [ramp(case, seed, args.budget) for seed in range(args.first, args.first + args.runs)]
        known = [one.ceiling for one in found]
        middle = statistics.median(known)
        if args.shares:
            truth = by_shares(case, middle, args.seconds, args.seeds)
        else:
            truth = exhaustive(case, middle, args.seconds, args.seeds, args.reach)
        apart = sorted(abs(one / truth - 1) if truth else 1.0 for one in known)
        errors += apart
        within = sum(1 for one in apart if one <= 0.05)
        held = sum(1 for one in found if one.interval[0] <= truth <= one.interval[1])
        covered += held
        shown = " ".join(f"{one:.3g}" for one in known)
        why = ", ".join(sorted({one.limited_by for one in found}))
        print(
            f"{name:16}{truth:>11.3g}{shown:>30}{statistics.median(apart):>14.1%}{apart[-1]:>8.1%}"
            f"{within:>6} of {len(apart)}{held:>10} of {len(apart)}  {why}; "
            f"{statistics.median(one.seconds for one in found):.0f} s",
            flush=True,
        )
    within = sum(1 for one in errors if one <= 0.05)
    print(
        f"all: median error {statistics.median(errors):.1%}, within 5%: {within} of {len(errors)}, "
        f"in the 90% interval: {covered}"
    )


def on_server(args: argparse.Namespace) -> None:
    """Run the command several times, and print the spread."""
    found = []
    for seed in range(args.runs):
        words = [sys.executable, "-m", "vllm_console", "ramp", args.server, "--json", "--budget", f"{args.budget:g}"]
        words += ["--seed", str(seed), *(["--input-p95", str(args.input_p95)] if args.input_p95 else [])]
        words += ["--output-p95", str(args.output_p95)] if args.output_p95 else []
        done = subprocess.run(words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if not done.stdout:
            raise SystemExit(done.stderr)
        result = json.loads(done.stdout)
        found.append(result["ceiling_requests_per_second"] or 0.0)
        print(f"{seed}: {len(result['steps'])} steps. {result['sentence']}", flush=True)
    middle = statistics.median(found)
    print(f"median {middle:.3g} req/s, from {min(found) / middle - 1:+.1%} to {max(found) / middle - 1:+.1%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first ramp's seed")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--budget", type=float, default=600.0, help="seconds per ramp")
    parser.add_argument("--seconds", type=float, default=600.0, help="of each rate of the exhaustive search")
    parser.add_argument("--seeds", type=int, default=3, help="of each rate of the exhaustive search")
    parser.add_argument("--shares", action="store_true", help="search by shares of slow gaps")
    parser.add_argument("--reach", type=float, default=REACH, help="how far from the median ramp it looks, as a factor")
    parser.add_argument("--server", default="", help="a server of yours, instead of virtual time")
    parser.add_argument("--input-p95", type=int, help="with --server: as of ramp")
    parser.add_argument("--output-p95", type=int, help="with --server: as of ramp")
    args = parser.parse_args()
    (on_server if args.server else virtual)(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
