"""Accuracy of predictions: each change is predicted from earlier traffic, applied, and measured.

    python tests/benchmarks/prediction.py [--seeds 2] [--drift 0.02] [--scored 20] [--metrics] [--json]
    python tests/benchmarks/prediction.py --coverage 60 [--drift 0.02] [--scored 20] [--metrics] [--json]
    python tests/benchmarks/prediction.py --learning 16 [--first 20000]
    python tests/benchmarks/prediction.py --speeds 60
    python tests/benchmarks/prediction.py --vllm PATH --model FOLDER [--rate 4] [--seconds 45] [--paced STEP TOKEN]

By default every change runs on the simulated engine in virtual time, under three kinds of traffic: steady (Poisson
arrivals), bursty (the rate changes every ten seconds) and with shared prefixes. A prediction from one traffic is
compared with measurements of another traffic of the same kind (another seed) at another speed, as after a restart, and
of exactly the same requests at the same speed. The logarithm of the speed is normally distributed with standard
deviation ``--drift``. Each change has its own traffic and speed. The noise floor is the difference between the two with
the same flags. ``--scored`` is the number of earlier restarts of this server that were predicted and measured, each at
another speed. Their drift is assumed to be measured exactly; ``--measured-drift`` prints the error of a measured drift.

With ``--metrics``, all that is known of the traffic before a change is what the recorder keeps of ``/metrics``, as for
a server without the probe; measurements are still exact. Means are listed as well, since metrics have them exactly.

Estimating how often the interval contains a measurement of other traffic takes many pairs of traffics: ``--coverage``
predicts that nothing changes for that many pairs, with step costs directly from the regression, and measures the other
traffic.

``--learning`` does the same for several drifts and numbers of scored restarts. Each pair of traffics is replayed at two
speeds, and in between the logarithm of each metric is interpolated linearly over that of the speed. Each pair has
several servers, whose scored and next starts are drawn. ``--speeds`` prints how often the interval of the speed alone
contains the next one, for that many servers of each kind; with odd starts, every tenth is ten times as far off.

With ``--vllm`` the changes are made on real vLLM on the CPU, through the program's own commands: start, load, predict,
restart, load. After each restart, other requests of the same kind come first, from which the next change is predicted,
and then exactly the requests from which this change was predicted. Each change is reverted afterwards, and the revert
is predicted and measured too; the server keeps score of all predictions. Since the initial flags are measured
repeatedly, they provide the noise floor, and repeating the first requests at the end of each kind of traffic provides
that of the same requests. Arrivals are Poisson and lengths are drawn independently, so samples of a traffic differ as
the intervals expect. ``--paced`` makes a step of vLLM take STEP seconds plus TOKEN for each token that it computes,
like a larger model on a GPU; otherwise a step takes as long as the CPU needs.

Results below and above 70% of capacity are listed separately, as are predictions that were flagged as outside.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from operator import attrgetter
from pathlib import Path
from statistics import NormalDist, mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from fakes.virtual_records import Recorded, record, traffic
from vllm_console.fleet.predictions import FIT_REQUESTS, RECONSTRUCTIONS
from vllm_console.history.probe_records import ProbeReader
from vllm_console.prediction.drift import at_speed_of, next_speeds
from vllm_console.prediction.drift import drift as drift_of
from vllm_console.prediction.evidence import MOST_REQUESTS, TrafficEvidence, gather
from vllm_console.prediction.figures import Figures
from vllm_console.prediction.fit import CostFit, fit_step_cost, step_regression
from vllm_console.prediction.predict import CUT, DRAWS, Change, Estimate, _draws, _estimate, predict, with_kv_bytes
from vllm_console.prediction.reconstruct import reconstruct
from vllm_console.prediction.score import SCORED

REQUESTS = 300
BASE = "--max-num-seqs 48 --max-model-len 4096"
TIGHT = f"{BASE} --num-gpu-blocks-override 700"
CHANGES = (
    (BASE, "--max-num-seqs 12 --max-model-len 4096", 1.0),
    ("--max-num-seqs 16 --max-model-len 4096", BASE, 1.0),
    (BASE, f"{BASE} --max-num-batched-tokens 256", 1.0),
    (f"{BASE} --max-num-batched-tokens 512", f"{BASE} --max-num-batched-tokens 4096", 1.0),
    (f"{BASE} --max-num-batched-tokens 4096", f"{BASE} --max-num-batched-tokens 4096 --no-enable-chunked-prefill", 1.0),
    (BASE, TIGHT, 1.0),
    (TIGHT, f"{BASE} --num-gpu-blocks-override 3000", 1.0),
    (TIGHT, f"{TIGHT} --kv-cache-dtype fp8 --num-gpu-blocks-override 1400", 1.0),
    (BASE, f"{BASE} --no-enable-prefix-caching", 1.0),
    (BASE, BASE, 1.5),
)
TRAFFICS: dict[str, dict[str, Any]] = {"steady": {}, "bursty": {"burst": 1.8}, "shared": {"shared": 512}}
RATES = (1.5, 2.6)
OTHERS = 1_000_000
FIGURES = (*SCORED, *(name.replace("p50", "mean") for name in SCORED if "p50" in name))


@dataclass(frozen=True)
class Outcome:
    """One predicted change. For each metric: measured before; predicted; and measured after, on other traffic of its
    kind and on the same requests."""

    change: str
    traffic: str
    load: float | None
    outside: str
    now: dict[str, float | None]
    predicted: dict[str, tuple[float | None, float | None, float | None]]
    measured: dict[str, float | None]
    same: dict[str, float | None]
    noise: dict[str, float | None]


def values(figures: Figures) -> dict[str, float | None]:
    return {name: attrgetter(name)(figures) for name in FIGURES}


def intervals(prediction: Any) -> dict[str, tuple[float | None, float | None, float | None]]:
    found = {}
    for name in FIGURES:
        one: Estimate = attrgetter(name)(prediction)
        found[name] = one.value, one.low, one.high
    return found


# -- the simulated engine ----------------------------------------------------------------------------------------------


def evidence_of(recorded: Recorded, most: int = MOST_REQUESTS) -> TrafficEvidence:
    limits = recorded.limits.scheduler
    return gather(recorded.requests, recorded.steps, limits.block_size, limits.max_num_batched_tokens, most=most)


def reconstructed(recorded: Recorded, seed: int, most: int = MOST_REQUESTS) -> TrafficEvidence:
    limits = recorded.limits.scheduler
    return reconstruct(recorded.samples, limits.max_num_batched_tokens, limits.max_model_len, seed=seed, most=most)


@dataclass(frozen=True)
class Servers:
    """How much a server's speed differs between starts, how many restarts were scored, and whether only metrics are
    seen."""

    drift: float
    scored: int
    metrics: bool

    def drifts(self, seed: int) -> list[float]:
        """Drifts of the scored restarts of one server."""
        dice = random.Random(f"scored {seed}")
        return [math.expm1(dice.gauss(0, self.drift)) for _ in range(self.scored)]


def simulated(seeds: int, servers: Servers, first: int) -> Iterator[Outcome]:
    number = 0
    for _ in range(seeds):
        for kind in TRAFFICS:
            for rate in RATES:
                for before, after, scale in CHANGES:
                    if "prefix" in after and kind != "shared":
                        continue
                    yield one_simulated(before, after, scale, kind, rate, first + number, servers)
                    number += 1


def run(line: str, kind: str, rate: float, seed: int, speed: float = 1.0, sampled: bool = False) -> Recorded:
    return record(line, traffic(REQUESTS, rate, seed=seed, **TRAFFICS[kind]), speed=speed, sampled=sampled)


def other_speed(seed: int, drift: float) -> float:
    """The engine's speed after a restart."""
    return math.exp(random.Random(seed).gauss(0, drift))


def measured_drifts(seeds: int, drift: float, first: int) -> Iterator[str]:
    """Error of a restart's measured drift, for each change of flags."""
    for kind in TRAFFICS:
        errors = []
        for number, (before, after, scale) in enumerate(CHANGES * seeds):
            seed, speed = first + number, other_speed(first + number, drift)
            recorded = run(before, kind, RATES[0], 2 * seed)
            evidence = evidence_of(recorded)
            cost = with_kv_bytes(at_speed_of(step_regression(evidence.steps), evidence), 0.5 if "fp8" in after else 1.0)
            found = drift_of(cost, evidence_of(run(after, kind, RATES[0] * scale, 2 * seed + 1, speed)))
            errors.append(abs(math.log1p(found or 0.0) + math.log(speed)))
        yield f"{kind}: measured drift is off by {median(errors):.2%} in the median, {max(errors):.2%} at most"


Cases = tuple[tuple[TrafficEvidence, CostFit], ...]


def cases_of(recorded: Recorded, metrics: bool) -> Cases:
    if not metrics:
        return ((evidence_of(recorded), fit_step_cost(evidence_of(recorded, FIT_REQUESTS), recorded.limits)),)
    found = []
    for number in range(RECONSTRUCTIONS):
        evidence = reconstructed(recorded, number)
        if evidence.flaw:  # it is refused without a fit
            start = step_regression(evidence.steps)
            return ((evidence, CostFit((start,), 0.0, start)),)
        found.append((evidence, fit_step_cost(reconstructed(recorded, number, FIT_REQUESTS), recorded.limits)))
    return tuple(found)


def covered(pairs: int, servers: Servers, begin: int) -> Iterator[Outcome]:
    metrics = servers.metrics
    for kind in TRAFFICS:
        for pair in range(begin, begin + pairs):
            first = run(BASE, kind, RATES[0], pair, sampled=metrics)
            other = run(BASE, kind, RATES[0], OTHERS + pair, other_speed(pair, servers.drift))
            seen = evidence_of(first)
            known = [reconstructed(first, number) for number in range(RECONSTRUCTIONS)] if metrics else [seen]
            starts = [step_regression(one.steps) for one in known]
            case, *others = [(one, CostFit((start,), 0.0, start)) for one, start in zip(known, starts, strict=True)]
            found = predict(*case, Change(first.limits, first.limits), others, servers.drifts(pair))
            measured = values(evidence_of(other).observed)
            now = values(seen.observed)
            yield Outcome(
                BASE, kind, found.load, found.outside, now, intervals(found.predicted), measured, now, measured
            )


DRIFTS, SCORED_STARTS = (0.0, 0.003, 0.02), (0, 5, 20)
SERVERS = 6
"""Number of servers per pair of traffics."""
SLOWED = 1.03


@dataclass(frozen=True)
class Between:
    """Metrics at the usual speed and at the slower one, by name; in between, each is a power of the speed."""

    usual: dict[str, float | None]
    slowed: dict[str, float | None]

    def at(self, speed: float) -> dict[str, float | None]:
        share = math.log(speed) / math.log(SLOWED)
        return {
            name: value * (slowed / value) ** share if value and (slowed := self.slowed[name]) else None
            for name, value in self.usual.items()
        }


def learning(pairs: int, begin: int) -> Iterator[str]:
    """Output lines: how often the interval of each metric contains the next measurement."""
    held: dict[tuple[str, float, int, str], list[bool]] = {}
    for kind in TRAFFICS:
        for pair in range(begin, begin + pairs):
            dice = random.Random(f"{kind} {pair}")
            seen, drawn, order, after = replayed_pair(kind, pair)
            for drift, scored in product(DRIFTS, SCORED_STARTS):
                for _ in range(SERVERS):
                    drifts = [math.expm1(dice.gauss(0, drift)) for _ in range(scored)]
                    speeds = next_speeds(seen, step_regression(seen.steps), drifts, DRAWS)
                    found = [one.at(speeds[place]) for one, place in zip(drawn, order, strict=True)]
                    measured = after.at(math.exp(dice.gauss(0, drift)))
                    for name, value in values(seen.observed).items():
                        one = _estimate(value, [draw[name] for draw in found], CUT)
                        inside = one.low <= measured[name] <= one.high
                        held.setdefault((kind, drift, scored, name), []).append(inside)
    short = {name: name.replace("_seconds", "") for name in FIGURES}
    for kind in TRAFFICS:
        yield f"{kind:<17}" + "".join(f"{short[name]:>20}" for name in FIGURES)
        for drift, scored in product(DRIFTS, SCORED_STARTS):
            cells = (held[kind, drift, scored, name] for name in FIGURES)
            # The servers of a pair share its traffics, so a pair counts once.
            texts = (share_text(sum(one) / SERVERS, pairs) for one in cells)
            yield f"{drift:>6.1%}, {scored:>2} scored" + "".join(f"{text:>20}" for text in texts)


def learned_speeds(servers: int, first: int) -> Iterator[str]:
    """Output lines: how wide the interval of the speed is, and how often it contains the next speed."""
    seen = evidence_of(run(BASE, "steady", RATES[0], first))
    start = step_regression(seen.steps)
    for odd in (False, True):
        for drift in (0.001, 0.003, 0.01, 0.02, 0.04):
            for scored in SCORED_STARTS:
                dice = random.Random(f"{first} {odd} {drift}")
                reach, inside = [], []
                for _ in range(servers):
                    factors = [10.0 if odd and dice.random() < 0.1 else 1.0 for _ in range(scored)]
                    drifts = [math.expm1(dice.gauss(0, drift * factor)) for factor in factors]
                    reach.append(math.log(next_speeds(seen, start, drifts, DRAWS)[-1 - CUT]))
                    usual, far = (2 * NormalDist(0, drift * by).cdf(reach[-1]) - 1 for by in (1, 10))
                    inside.append(0.9 * usual + 0.1 * far if odd else usual)
                which = "with odd starts" if odd else ""
                yield f"{drift:>6.1%}, {scored:>2} scored: ±{median(reach):.2%} holds {mean(inside):.0%} {which}"


def replayed_pair(kind: str, pair: int) -> tuple[TrafficEvidence, list[Between], list[int], Between]:
    """Observed values, each draw of the interval with its speed, and the next measurement."""
    first = run(BASE, kind, RATES[0], pair)
    seen = evidence_of(first)
    start = step_regression(seen.steps)
    case = (seen, CostFit((start,), 0.0, start))
    usual, slowed = (_draws((case,), Change(first.limits, first.limits), [speed] * DRAWS) for speed in (1.0, SLOWED))
    drawn = [Between(values(one), values(other)) for one, other in zip(usual, slowed, strict=True)]
    order = list(range(DRAWS))
    random.Random(DRAWS).shuffle(order)
    after = (evidence_of(run(BASE, kind, RATES[0], OTHERS + pair, speed)).observed for speed in (1.0, 1 / SLOWED))
    return seen, drawn, order, Between(*map(values, after))


def one_simulated(
    before: str, after: str, scale: float, kind: str, rate: float, seed: int, servers: Servers
) -> Outcome:
    first, other, speed = 2 * seed, 2 * seed + 1, other_speed(seed, servers.drift)
    recorded = run(before, kind, rate, first, sampled=servers.metrics)
    same, measured = run(after, kind, rate * scale, first), run(after, kind, rate * scale, other, speed)
    eight_bits = "fp8" in after
    change = Change(recorded.limits, same.limits, scale, 0.5 if eight_bits else 1.0)
    case, *others = cases_of(recorded, servers.metrics)
    found = predict(*case, change, others, servers.drifts(seed))
    changed = f"{before} → {after}" if before != after else f"{before}, traffic × {scale:g}"
    now, as_same, as_measured, again = (
        values(evidence_of(one).observed) for one in (recorded, same, measured, run(before, kind, rate, other, speed))
    )
    return Outcome(
        changed, f"{kind} {rate:g}/s", found.load, found.outside, now, intervals(found.predicted), as_measured, as_same,
        again,
    )  # fmt: skip


# -- real vLLM ---------------------------------------------------------------------------------------------------------

PACED = Path(__file__).parents[1] / "real/environment/paced"
REAL_BASE = {"max-num-seqs": 16, "max-model-len": 512, "block-size": 32, "num-gpu-blocks-override": 160}
REAL_DEFAULTS = {"max-num-batched-tokens": 2048, "enable-prefix-caching": True, "enable-chunked-prefill": True}
# each change is made, predicted and measured, and then reverted, which counts as a change as well
REAL_CHANGES: dict[str, tuple[dict[str, Any], ...]] = {
    "steady": (
        {"max-num-seqs": 8}, {"max-num-batched-tokens": 64}, {"num-gpu-blocks-override": 40},
        {"enable-chunked-prefill": False},
    ),
    "bursty": (
        {"max-num-seqs": 10}, {"max-num-batched-tokens": 128}, {"num-gpu-blocks-override": 60},
        {"enable-chunked-prefill": False},
    ),
    "shared": (
        {"max-num-seqs": 6}, {"enable-prefix-caching": False}, {"num-gpu-blocks-override": 40},
        {"max-model-len": 640},
    ),
    "loaded": (
        {"max-num-batched-tokens": 64}, {"max-num-seqs": 10}, {"num-gpu-blocks-override": 60},
    ),
}  # fmt: skip
QUIET = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_HOST_IP": "127.0.0.1",
    "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip
# the loads of each traffic: share of the rate, start and duration (as shares of the total duration), and more arguments
REAL_TRAFFICS: dict[str, tuple[tuple[float, float, float, tuple[str, ...]], ...]] = {
    "steady": ((1.0, 0.0, 1.0, ()),),
    "bursty": ((0.6, 0.0, 1.0, ()), (1.0, 0.15, 0.2, ()), (1.0, 0.6, 0.2, ())),
    "shared": ((1.0, 0.0, 1.0, ("--prefix-reuse", "0.5")),),
    "loaded": ((1.6, 0.0, 1.0, ()),),
}


# Lengths are drawn independently, like those of real users. The load generator's own lengths are stratified, so two
# samples of a traffic would differ less than an interval for other requests allows.
INDEPENDENT = (
    "-c",
    "from vllm_console.load import shape; from vllm_console.cli.main import main; shape.STRATA = 1; exit(main())",
)


def poisson(rng: random.Random, expected: float) -> int:
    """A Poisson-distributed number of arrivals with the given mean."""
    count, at = 0, rng.expovariate(1.0)
    while at < expected:
        count, at = count + 1, at + rng.expovariate(1.0)
    return count


class Program:
    """The program's commands, with a separate state folder."""

    def __init__(self, folder: Path, port: int, paced: Sequence[float]) -> None:
        self.port = port
        self.environment = {
            **os.environ, **QUIET, "HOME": str(folder),
            **{f"XDG_{name}_HOME": str(folder / name.lower()) for name in ("STATE", "CONFIG", "CACHE", "DATA")},
        }  # fmt: skip
        if paced:
            step, token = paced
            self.environment |= {"PYTHONPATH": str(PACED), "PACED_STEP_SECONDS": f"{step}"}
            self.environment |= {"PACED_TOKEN_SECONDS": f"{token}"}
        self.server = folder / "state/vllm-console/servers/bench"

    def command(self, *words: str, run: tuple[str, ...] = ("-m", "vllm_console")) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *run, *words], env=self.environment, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip

    def __call__(self, *words: str, check: bool = True) -> str:
        return self.answer(self.command(*words), check)

    def answer(self, command: subprocess.Popen[str], check: bool = True) -> str:
        printed, errors = command.communicate()
        if check and command.returncode:
            raise SystemExit(f"{command.args}: {errors or printed}")
        return printed

    def start(self, vllm: str, model: str) -> None:
        self("start", "chatbot", "--engine", "vllm", "--vllm", vllm, "--model", model, "--name", "bench", "--wait",
             "--port", str(self.port), "--force", *words_of(REAL_BASE))  # fmt: skip

    def change(self, change: dict[str, Any]) -> None:
        """Restart with a change; an empty change only starts a new recording."""
        self("restart", "bench", "--wait", "--force", *words_of(change))

    def predict(self, change: dict[str, Any]) -> dict[str, Any]:
        """Predict a change; the prediction is kept and scored after the restart."""
        self("predict", "bench", *words_of(change), check=False)
        answer = self("predict", "bench", *words_of(change), "--draft", "--json", check=False)
        found: dict[str, Any] = json.loads(answer)["prediction"]
        return found

    def load(self, kind: str, number: int, rate: float, seconds: float) -> Figures:
        """Send the traffic of a kind and number."""
        began = time.time()
        self._send(kind, rate, seconds, seed=10 * number)
        reader = ProbeReader(self.server / "probe")
        requests = [one for one in reader.requests() if one.arrived_at >= began]
        steps = [one for one in reader.steps() if one.at >= began]
        return gather(requests, steps, REAL_BASE["block-size"], 2048).observed

    def _send(self, kind: str, rate: float, seconds: float, seed: int) -> None:
        began = time.time()
        running: list[subprocess.Popen[str]] = []
        for number, (share, after, part, more) in enumerate(REAL_TRAFFICS[kind]):
            # The load generator sends exactly rate times duration requests, rounded up, so request half of one less.
            count = max(1, poisson(random.Random(seed + number), rate * share * seconds * part))
            time.sleep(max(0.0, began + after * seconds - time.time()))
            running.append(self.command(
                "load", "bench", "--rate", f"{(count - 0.5) / (seconds * part)}", "--duration", f"{seconds * part}",
                "--input-p95", "300", "--output-p95", "200", "--seed", f"{seed + number}", "--max-failed", "1", *more,
                run=INDEPENDENT,
            ))  # fmt: skip
        for one in running:
            self.answer(one)

    def end(self) -> None:
        self("stop", "bench", check=False)
        for _ in range(60):
            if '"alive": true' not in self("status", "bench", "--json", check=False):
                return
            time.sleep(1)


def words_of(change: dict[str, Any]) -> list[str]:
    return [word for name, value in change.items() for word in ("--set", f"{name}={json.dumps(value)}")]


def real(args: argparse.Namespace) -> Iterator[Outcome]:
    with tempfile.TemporaryDirectory(prefix="prediction-") as folder:
        program = Program(Path(folder), args.port, args.paced)
        try:
            program.start(args.vllm, args.model)
            for place, kind in enumerate(args.traffic):
                if place:
                    program.change({})
                yield from real_traffic(program, kind, args.first + 100 * place, args)
        finally:
            program.end()


def real_traffic(program: Program, kind: str, number: int, args: argparse.Namespace) -> Iterator[Outcome]:
    """The outcomes of a traffic's changes, each followed by its revert; ``number`` selects its first requests."""
    flags = REAL_BASE | REAL_DEFAULTS
    changes: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for change in REAL_CHANGES[kind][args.skip : args.changes]:
        back = {name: flags[name] for name in change}
        changes += [(back, change), (change, back)]
    first = now = program.load(kind, number, args.rate, args.seconds)
    found = program.predict(changes[0][1])
    for index, (before, change) in enumerate(changes):
        program.change(change)
        after = program.load(kind, number + index + 1, args.rate, args.seconds)
        # Predict before the same requests come again, so that it is based only on the others.
        following = program.predict(changes[index + 1][1]) if index + 1 < len(changes) else {}
        again = program.load(kind, number + index, args.rate, args.seconds)
        title = ", ".join(f"{name} {before[name]} → {value}" for name, value in change.items())
        floor = values(first) if index and not index % 2 else {}
        yield Outcome(
            title, f"{kind} {args.rate:g}/s", found.get("load"), found.get("outside", ""), values(now),
            predicted_of(found), values(after), values(again), floor,
        )  # fmt: skip
        now, found = after, following
    repeated = values(program.load(kind, number, args.rate, args.seconds))
    floor = {name: error(value, values(first)[name]) for name, value in repeated.items()}
    print(f"{kind}, the first requests again: {json.dumps(floor)}", flush=True)


def predicted_of(found: dict[str, Any]) -> dict[str, tuple[float | None, float | None, float | None]]:
    predicted = {}
    for name in FIGURES:
        latency, _, part = name.partition(".")
        one = found.get("predicted", {}).get(latency) or {}
        one = one.get(part) or {} if part else one
        predicted[name] = one.get("value"), one.get("low"), one.get("high")
    return predicted


# -- the table ---------------------------------------------------------------------------------------------------------


def error(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or not measured else abs(predicted / measured - 1)


def shown(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{median(known):.1%}" if known else "–"


def share_text(count: float, of: int) -> str:
    """A share with its 95% interval (Wilson, Probable Inference, the Law of Succession, and Statistical Inference)."""
    z = 1.96
    middle, weight = (count + z * z / 2) / (of + z * z), of / (of + z * z)
    reach = z * math.sqrt(weight / of * (count / of * (1 - count / of) * weight + z * z / 4 / (of + z * z)))
    return f"{count / of:.0%} ({max(0.0, middle - reach):.0%}–{min(1.0, middle + reach):.0%})"


def summary(outcomes: Sequence[Outcome], title: str) -> Iterator[str]:
    yield f"{title}: {len(outcomes)} changes"
    if not outcomes:
        return
    columns = ("same requests", "other requests", "nothing changes", "noise floor", "in the interval", "direction")
    yield f"  {'median error of':<18}" + "".join(f"{name:>17}" for name in columns)
    for name in FIGURES:
        inside, right, moved = [], 0, 0
        for one in outcomes:
            value, low, high = one.predicted[name]
            measured, now = one.measured[name], one.now[name]
            if low is not None and high is not None and measured is not None:
                inside.append(low <= measured <= high)
            if value is not None and measured and now and abs(measured / now - 1) > 0.2:
                moved += 1
                right += (value > now) == (measured > now)
        cells = (
            shown([error(one.predicted[name][0], one.same.get(name)) for one in outcomes]),
            shown([error(one.predicted[name][0], one.measured[name]) for one in outcomes]),
            shown([error(one.now[name], one.measured[name]) for one in outcomes]),
            shown([error(one.noise.get(name), one.now[name]) for one in outcomes]),
            share_text(sum(inside), len(inside)) if inside else "–",
            f"{right} of {moved}",
        )
        yield f"  {name.replace('_seconds', ''):<18}" + "".join(f"{cell:>17}" for cell in cells)
    yield ""


def each(outcomes: Sequence[Outcome]) -> Iterator[str]:
    for one in outcomes:
        yield f"{one.change} · {one.traffic}" + (f" · load {one.load:.0%}" if one.load is not None else "")
        for name in FIGURES:
            value, low, high = one.predicted[name]
            numbers = (one.now[name], value, low, high, one.measured[name], one.same.get(name), one.noise.get(name))
            cells = "".join(f"{'–' if number is None else f'{number:.4g}':>10}" for number in numbers)
            yield f"  {name.replace('_seconds', ''):<18}{cells}"
        if one.outside:
            yield f"  {one.outside}"


def about_speed(args: argparse.Namespace) -> Iterator[str] | None:
    """Output lines of the speed options; None for other options."""
    if args.learning:
        return learning(args.learning, args.first)
    if args.speeds:
        return learned_speeds(args.speeds, args.first)
    if args.measured_drift:
        return measured_drifts(args.seeds, args.drift, args.first)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    parser.add_argument("--drift", type=float, default=0.02, help="of the speed, between two starts")
    parser.add_argument("--scored", type=int, default=0, help="restarts of each server that were scored before")
    parser.add_argument("--measured-drift", action="store_true", help="how far it is off")
    parser.add_argument("--coverage", type=int, default=0, metavar="PAIRS")
    parser.add_argument("--learning", type=int, default=0, metavar="PAIRS")
    parser.add_argument("--speeds", type=int, default=0, metavar="SERVERS")
    parser.add_argument("--metrics", action="store_true", help="from metrics, as without the probe")
    parser.add_argument("--each", action="store_true", help="list every change, too")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--vllm")
    parser.add_argument("--model")
    parser.add_argument("--changes", type=int, default=4, help="of each traffic")
    parser.add_argument("--skip", type=int, default=0, help="so many of them")
    parser.add_argument("--traffic", nargs="+", choices=tuple(REAL_TRAFFICS), default=tuple(REAL_TRAFFICS))
    parser.add_argument("--rate", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--paced", nargs=2, type=float, default=(), metavar=("STEP", "TOKEN"))
    parser.add_argument("--port", type=int, default=18471)
    args = parser.parse_args()
    if (lines := about_speed(args)) is not None:
        print("\n".join(lines))
        return
    how = Servers(args.drift, args.scored, args.metrics), args.first
    virtual = covered(args.coverage, *how) if args.coverage else simulated(args.seeds, *how)
    outcomes = []
    for one in real(args) if args.vllm else virtual:
        outcomes.append(one)
        if args.vllm or args.each:
            print("\n".join(each([one])), flush=True)
    if args.json:
        print(json.dumps([asdict(one) for one in outcomes]))
        return
    print("\ncolumns of each change: now, predicted, low, high, measured, on the same requests, the first flags again")
    given = [one for one in outcomes if one.predicted[FIGURES[0]][0] is not None]
    for kind in REAL_TRAFFICS if args.vllm else TRAFFICS:
        print("\n".join(summary([one for one in given if one.traffic.split()[0] == kind], kind)))
    for title, part in (
        ("below 70 % of capacity", [one for one in given if one.load is not None and one.load < 0.7]),
        ("70 to 85 %", [one for one in given if one.load is not None and 0.7 <= one.load <= 0.85]),
        ("above 85 %, flagged", [one for one in given if one.load is not None and one.load > 0.85]),
        ("flagged as outside for another reason", [one for one in given if one.outside and (one.load or 0) <= 0.85]),
        ("all that were predicted", given),
    ):
        print("\n".join(summary(part, title)))
    print(f"refused: {len(outcomes) - len(given)}")
    for one in outcomes:
        if one not in given:
            print(f"  {one.change} · {one.traffic}: {one.outside}")


if __name__ == "__main__":
    main()
