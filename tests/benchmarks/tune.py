"""Share of a full grid's goodput that the tuner reaches, and restarts that it needs, on the simulated engine.

    python tests/benchmarks/tune.py [--trials 4] [--budget 2400] [--cases "chatbot,16 sequences"]

In virtual time, from several initial flags for each case of `ramp.py`. The tuner decides like ``vllm-console tune``:
its prediction is fitted to what the probe would record, and its trials are ramps. The grid contains every combination
that the tuner considers, each measured by a long ramp; a restart takes a minute. The four best combinations, the
initial flags and the final flags are then judged by the median of nine more ramps, because the best of a grid is also
the luckiest.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from functools import cache
from pathlib import Path
from statistics import median, stdev

sys.path.insert(0, str(Path(__file__).parents[1]))

from ramp import CASES, Case, VirtualRamp

from fakes.virtual_records import record
from vllm_console.cli.tune import EVIDENCE_REQUESTS, EVIDENCE_SHARE
from vllm_console.fleet.tuning import TuneTarget, predict_each
from vllm_console.load.ramp import LONGEST_STEP, SHORTEST_STEP, START_SHARE
from vllm_console.load.ramp_search import FEWEST_REQUESTS, StepOutcome, next_step, step_seconds
from vllm_console.load.shape import TrafficShape, suggested_rate
from vllm_console.load.tune_search import (
    AGAIN_SHARE,
    GOODPUT,
    UNSURE,
    Measured,
    Trial,
    baseline_seconds,
    combinations,
    decide,
    measured_ceiling,
    measured_of,
    next_trial,
    pooled,
    trial_start,
)
from vllm_console.prediction.evidence import gather
from vllm_launchers.engine_model.scheduler import Request, SchedulerLimits
from vllm_launchers.engine_model.traffic_replay import EngineLimits
from vllm_launchers.simulated.flags import parse_flags
from vllm_launchers.simulated.memory import plan_memory
from vllm_launchers.simulated.server import build_core
from vllm_launchers.simulated.settings import Simulated, resolve_settings

RESTART_SECONDS = 60.0
JUDGES, FINALISTS = 9, 4
SCATTERED = {"chatbot": (64, 256), "short chats": (64, 2048), "16 sequences": (64, 256), "small KV cache": (64, 256)}
STARTS = ((16, 512), (256, 8192), (64, 2048))
"""Initial flags: sequences, and tokens per step."""


def with_flags(case: Case, seqs: int, batched: int) -> Case:
    words = case.flags.split()
    kept = [
        word for place, word in enumerate(words)
        if not {"--max-num-seqs", "--max-num-batched-tokens"} & {word, words[max(0, place - 1)]}
    ]  # fmt: skip
    line = " ".join([*kept, f"--max-num-seqs {seqs} --max-num-batched-tokens {batched}"])
    return Case(line, case.workload, case.objectives, case.model, case.environment)


@cache
def limits_of(flags: str, model: str) -> EngineLimits:
    settings = resolve_settings(parse_flags(["serve", model, *flags.split()]), Simulated.from_environment({}))
    core = build_core(settings, plan_memory(settings))
    one = core.scheduler.limits
    kept = SchedulerLimits(
        one.max_num_seqs, one.max_num_batched_tokens, one.max_model_len, one.block_size, one.chunked_prefill
    )
    return EngineLimits(kept, core.scheduler.pool.total, core.scheduler.pool.caching)


def ramp(case: Case, seed: int, budget: float, start: float | None) -> Measured | None:
    run = VirtualRamp(case, seed)
    start = start or suggested_rate(case.workload) * START_SHARE
    tried: list[StepOutcome] = []
    spent = 0.0
    while (wanted := next_step(tried, start, start / 32, 10_000)) is not None:
        rate = float(f"{wanted.rate:.4g}")
        warming, shortest = run.warm_up(rate), max(SHORTEST_STEP, FEWEST_REQUESTS / rate)
        if budget - spent < warming + shortest:
            break
        seconds = step_seconds(tried, budget - spent, LONGEST_STEP) - warming
        outcome, took = run.step(rate, max(shortest, seconds), early=not wanted.full)
        spent += took
        tried.append(outcome)
    return measured_ceiling(tried, budget)


def tune(case: Case, seqs: int, batched: int, args: argparse.Namespace) -> tuple[dict[str, int], int]:
    """The flags that the tuner ends with, and its restarts."""
    present = with_flags(case, seqs, batched)
    begin = baseline_seconds(GOODPUT, args.budget, args.trials, RESTART_SECONDS)
    original = ramp(present, 1, begin, None)
    assert original is not None
    if original.error > UNSURE and not original.bound:
        again = ramp(present, 3, AGAIN_SHARE * begin, trial_start(original.value, original))
        original = pooled([original, again]) or original if again is not None else original
        begin *= 1 + AGAIN_SHARE
    pace = EVIDENCE_SHARE * original.value
    shape = TrafficShape(case.workload, seed=2, max_model_len=4096)
    sent = [
        Request(str(index), one.prompt, one.output_tokens, one.output_tokens, arrival=one.at, seed=index)
        for index, one in enumerate(shape.stream(pace, EVIDENCE_REQUESTS / pace))
    ]
    recorded = record(present.flags, sent, model=case.model)
    limits = recorded.limits
    known = [
        gather(recorded.requests, recorded.steps, limits.scheduler.block_size, limits.scheduler.max_num_batched_tokens,
               most=most) for most in (500, 250)
    ]  # fmt: skip
    choices = [
        (change, limits_of(with_flags(case, *_of(change, seqs, batched)).flags, case.model))
        for change in combinations(seqs, batched, None)
    ]
    goal = TuneTarget(GOODPUT, case.objectives, original.value, case.workload.concurrency)
    predicted, candidates = predict_each(known[0], known[1], limits, choices, goal)
    left = args.budget - begin - EVIDENCE_REQUESTS / pace
    done: list[Trial] = []
    gains = [one.predicted / predicted for one in candidates]
    restarts = 0
    while True:
        following = next_trial(
            gains, done, original, GOODPUT, trials=args.trials, seconds_left=left,
            restart_seconds=RESTART_SECONDS,
        )  # fmt: skip
        if following is None:
            break
        one = candidates[following.place]
        expected = original.value * one.predicted / predicted
        start = trial_start(expected, measured_of(following.place, done), guess=bool(one.outside))
        trial = with_flags(case, *_of(one.set, seqs, batched))
        done.append(Trial(following.place, ramp(trial, 10 + len(done), following.seconds, start)))
        left -= following.seconds + RESTART_SECONDS * following.restart
        restarts += following.restart
    decision = decide(original, done, GOODPUT, gains)
    if decision.significant and decision.place is not None:
        running = done[-1].place == decision.place
        return dict(candidates[decision.place].set), restarts + (not running)
    return {}, restarts + bool(done)


def _of(change, seqs: int, batched: int) -> tuple[int, int]:  # type: ignore[no-untyped-def]
    return change.get("max-num-seqs", seqs), change.get("max-num-batched-tokens", batched)


@cache
def truth(name: str, seqs: int, batched: int, budget: float, seed: int = 100) -> float:
    """The goodput of one combination, measured by one ramp."""
    found = ramp(with_flags(CASES[name], seqs, batched), seed, budget, None)
    return 0.0 if found is None or found.bound == "most" else found.value


@cache
def judged(name: str, seqs: int, batched: int, budget: float) -> float:
    """The same as the median of more ramps, because the best of a grid is also the luckiest."""
    return median(truth(name, seqs, batched, budget, seed) for seed in range(200, 200 + JUDGES))


def scatter() -> None:
    """Print the scatter of ramps of different lengths that begin near the ceiling."""
    for name, (seqs, batched) in SCATTERED.items():
        case = with_flags(CASES[name], seqs, batched)
        middle = median(truth(name, seqs, batched, 900.0, seed) for seed in range(5))
        for budget in (120.0, 260.0, 900.0):
            found = [ramp(case, seed, budget, trial_start(middle, None)) for seed in range(12)]
            values = [math.log(one.value) for one in found if one is not None]
            print(f"{name:16}{budget:>6.0f} s{stdev(values):>8.1%}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--budget", type=float, default=2400.0, help="seconds per tuning, in virtual time")
    parser.add_argument("--grid", type=float, default=600.0, help="seconds of each ramp of the grid")
    parser.add_argument(
        "--scatter", action="store_true", help="print how much ramps of the same flags scatter, instead"
    )
    parser.add_argument("--cases", default=",".join(CASES))
    args = parser.parse_args()
    if args.scatter:
        scatter()
        return 0
    print(f"{'case':16}{'begins with':>14}{'ends with':>14}{'of the best':>12}{'began with':>12}{'restarts':>10}  grid")
    shares, parts = [], []
    for name in args.cases.split(","):
        for seqs, batched in STARTS:
            name = name.strip()
            began = time.monotonic()
            kept, restarts = tune(CASES[name], seqs, batched, args)
            took = time.monotonic() - began
            places = [(seqs, batched), *(_of(change, seqs, batched) for change in combinations(seqs, batched, None))]
            grid = {place: truth(name, *place, args.grid) for place in places}
            finest = sorted(grid, key=lambda place: -grid[place])[:FINALISTS]
            last, first = _of(kept, seqs, batched), (seqs, batched)
            known = {place: judged(name, *place, args.grid) for place in {*finest, last, first}}
            best = max(finest, key=lambda place: known[place])
            share, before = known[last] / known[best], known[first] / known[best]
            shares.append(share)
            parts.append(restarts / len(grid))
            print(
                f"{name:16}{f'{seqs}, {batched}':>14}{f'{last[0]}, {last[1]}':>14}{share:>12.1%}{before:>12.1%}"
                f"{restarts:>4} of {len(grid):<3}  best {best[0]}, {best[1]}; {known[best]:.3g} req/s; {took:.0f} s",
                flush=True,
            )
    reached = sum(share >= 0.95 for share in shares)
    print(
        f"all: {reached} of {len(shares)} reach 95% of the grid's best; median {median(shares):.1%}, least "
        f"{min(shares):.1%}; restarts {median(parts):.1%} of the grid's"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
