"""``vllm-console load`` compared with ``vllm bench serve``: the same load on the same real vLLM server.

    python tests/benchmarks/load_accuracy.py --vllm PATH --model FOLDER [--rounds 5] [--json]

One server is started on the CPU. In each round both clients send the same number of requests of exactly the same
lengths, one after the other and in alternating order: once in a closed loop, once in an open one. Prints medians over
the rounds of what each client reports, and the median of the rounds' ratios (ours / theirs). Prefix caching is off, so
that no client profits from the other's prompts. Both send prompts as token ids, because the server's tokenization of
text would count in TTFT. ``vllm bench serve`` has no option for that, so its data set's prompts are replaced by their
ids; with ``--text`` it sends text as usual.

The server itself is the reference: it counts TTFT and e2e of every request in ``/metrics``, up to the moment when it
has the token. Printed last is how far each client's mean exceeds that. The excess is time of the network and the client
itself, so the smaller one is more accurate. Before measuring, ``vllm bench serve`` sends one additional request that
counts there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

READY_SECONDS = 180
STOP_SECONDS = 30
CLIENT_SECONDS = 180
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
}
WITH_TOKEN_IDS = """
import sys
from vllm.benchmarks.datasets import datasets
from vllm.entrypoints.cli.main import main

text = datasets.RandomDataset.sample

def sample(self, tokenizer, *args, **kwargs):
    requests = text(self, tokenizer, *args, **kwargs)
    for request in requests:
        request.prompt = tokenizer(request.prompt, add_special_tokens=False).input_ids
    return requests

datasets.RandomDataset.sample = sample
sys.argv[0] = "vllm"
main()
"""
"""``vllm`` with a random data set that yields token ids instead of text."""
SERVER_FIGURES = {
    "TTFT (mean) above the server's, ms": "vllm:time_to_first_token_seconds",
    "e2e (mean) above the server's, ms": "vllm:e2e_request_latency_seconds",
}
"""Histograms of ``/metrics`` whose means are compared with the clients' means."""
FIGURES = {
    "TTFT, ms": ("median_ttft_ms", "ttft_seconds"),
    "TPOT, ms": ("median_tpot_ms", "tpot_seconds"),
    "ITL (mean), ms": ("mean_itl_ms", "itl_seconds"),
    "e2e, ms": ("median_e2el_ms", "e2e_seconds"),
}


@dataclass(frozen=True)
class Shape:
    """The requests that both clients send."""

    input_tokens: int
    output_tokens: int
    requests: int


@dataclass(frozen=True)
class Loop:
    """A sending mode, as options of each client."""

    name: str
    ours: tuple[str, ...]
    theirs: tuple[str, ...]


def main() -> int:
    """Measure and print; exit code 1 if a ratio is further from 1 than ``--within``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="a real vLLM: its command")
    parser.add_argument("--model", required=True, help="a model's folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=60, help="requests per client, loop and round")
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=4, help="of the closed loop")
    parser.add_argument("--rate", type=float, default=8.0, help="requests per second of the open loop")
    parser.add_argument("--loops", default="closed,open", help="which loops to run")
    parser.add_argument("--within", type=float, default=0.05, help="how far medians may lie apart")
    parser.add_argument("--text", action="store_true", help="let vllm bench serve send its prompts as text")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    shape = Shape(args.input_tokens, args.output_tokens, args.requests)
    many, rate = str(args.concurrency), str(args.rate)
    loops = [
        Loop(f"closed loop, {many} in flight", ("--concurrency", many), ("--max-concurrency", many)),
        Loop(f"open loop, {rate} requests/s", ("--rate", rate), ("--request-rate", rate)),
    ]
    with tempfile.TemporaryDirectory() as home:
        os.environ |= QUIET
        for name in ("CACHE", "CONFIG", "STATE"):
            os.environ[f"XDG_{name}_HOME"] = str(Path(home) / name.lower())
        with serving(args.vllm, args.model, Path(home), args.port) as url:
            bench = Bench(args.vllm, args.model, url, Path(home), shape, text=args.text)
            bench.warm_up()
            found = {loop.name: bench.rounds(loop, args.rounds) for loop in loops if loop.name.split()[0] in args.loops}
    print(json.dumps(found, indent=2) if args.json else table(found, shape))
    apart = [
        abs(row["ratio"] - 1) for rows in found.values() for name, row in rows.items() if name not in SERVER_FIGURES
    ]
    return int(max(apart) > args.within)


@contextlib.contextmanager
def serving(vllm: str, model: str, folder: Path, port: int) -> Iterator[str]:
    """Run a server on the CPU; it and its children are ended afterwards."""
    if not port:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
    words = [vllm, "serve", model, "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--max-model-len", "2048", "--enforce-eager", "--block-size", "32", "--num-gpu-blocks-override", "512"]
    words += ["--no-enable-prefix-caching"]
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + READY_SECONDS
        while not answers(f"{url}/health"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not come up:\n{log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def totals(url: str) -> dict[str, float]:
    """Sums and counts of `SERVER_FIGURES` in ``/metrics``, over all engines."""
    found: dict[str, float] = {}
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/metrics", timeout=5) as answer:
        for line in answer.read().decode().splitlines():
            name = line.partition("{")[0]
            if name.removesuffix("_sum").removesuffix("_count") in SERVER_FIGURES.values():
                found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
    return found


def answers(url: str) -> bool:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


class Bench:
    """Both clients on one server."""

    def __init__(self, vllm: str, model: str, url: str, folder: Path, shape: Shape, *, text: bool) -> None:
        self._vllm = vllm
        self._model = model
        self._url = url
        self._folder = folder
        self._shape = shape
        self._text = text
        self._seed = 0

    def warm_up(self) -> None:
        """Send a few requests that are not measured."""
        self._run([*self._load_words(), "--concurrency", "2", "--requests", "8"])

    def rounds(self, loop: Loop, count: int) -> dict[str, dict[str, float]]:
        """Medians over the rounds by metric: ``ours``, ``theirs``, ``ratio`` and the ratio's extremes."""
        ours: list[dict[str, float]] = []
        theirs: list[dict[str, float]] = []
        for number in range(count):
            self._seed += 1
            both = [(ours, self._ours), (theirs, self._theirs)]
            for found, client in both if number % 2 else reversed(both):
                found.append(self._judged(client, loop))
            print(f"{loop.name}: round {number + 1} of {count}", file=sys.stderr, flush=True)
        rows = {}
        for name in ours[0]:
            ratios = [mine[name] / other[name] for mine, other in zip(ours, theirs, strict=True)]
            rows[name] = {
                "theirs": statistics.median(row[name] for row in theirs),
                "ours": statistics.median(row[name] for row in ours),
                "ratio": statistics.median(ratios),
                "lowest": min(ratios),
                "highest": max(ratios),
            }
        return rows

    def _judged(self, client: Callable[[Loop], dict[str, float]], loop: Loop) -> dict[str, float]:
        """The client's report; means of `SERVER_FIGURES` are given as the excess over the server's own values."""
        before = totals(self._url)
        found = client(loop)
        after = totals(self._url)
        for name, series in SERVER_FIGURES.items():
            seconds, count = (after[series + part] - before[series + part] for part in ("_sum", "_count"))
            if count != self._shape.requests:
                raise SystemExit(f"the server counted {count:g} requests in {series}; {self._shape} was asked for")
            found[name] -= seconds / count * 1000
        return found

    def _load_words(self) -> list[str]:
        words = [sys.executable, "-m", "vllm_console", "load", self._url, "--json", "--prefix-reuse", "0"]
        shape = self._shape
        words += ["--input-tokens", str(shape.input_tokens), "--output-tokens", str(shape.output_tokens)]
        return [*words, "--seed", str(self._seed)]

    def _ours(self, loop: Loop) -> dict[str, float]:
        answer = self._run([*self._load_words(), "--requests", str(self._shape.requests), *loop.ours])
        report = json.loads(answer)
        self._check(report["completed"], report["prompt_tokens"], report["output_tokens"])
        found = {name: report[key]["mean" if "mean" in name else "p50"] * 1000 for name, (_, key) in FIGURES.items()}
        found["output tokens/s"] = report["output_tokens_per_s"]
        means = (report[key]["mean"] * 1000 for key in ("ttft_seconds", "e2e_seconds"))
        return found | dict(zip(SERVER_FIGURES, means, strict=True))

    def _theirs(self, loop: Loop) -> dict[str, float]:
        shape = self._shape
        program = [self._vllm] if self._text else [str(Path(self._vllm).with_name("python")), "-c", WITH_TOKEN_IDS]
        words = [*program, "bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions"]
        words += ["--base-url", self._url, "--model", self._model, "--served-model-name", "tiny", "--ignore-eos"]
        words += ["--dataset-name", "random", "--random-input-len", str(shape.input_tokens)]
        words += ["--random-output-len", str(shape.output_tokens), "--num-prompts", str(shape.requests)]
        words += ["--seed", str(self._seed), "--percentile-metrics", "ttft,tpot,itl,e2el", "--disable-tqdm"]
        words += ["--save-result", "--result-dir", str(self._folder), "--result-filename", "theirs.json", *loop.theirs]
        self._run(words)
        report = json.loads((self._folder / "theirs.json").read_text())
        self._check(report["completed"], report["total_input_tokens"], report["total_output_tokens"])
        found: dict[str, float] = {name: report[key] for name, (key, _) in FIGURES.items()}
        found["output tokens/s"] = report["output_throughput"]
        return found | dict(zip(SERVER_FIGURES, (report["mean_ttft_ms"], report["mean_e2el_ms"]), strict=True))

    def _check(self, completed: int, prompt_tokens: int, output_tokens: int) -> None:
        """Check that both sent the requested load; prompts of ``vllm bench serve`` may be off by a token (text)."""
        shape = self._shape
        prompts = shape.requests * shape.input_tokens
        if (completed, output_tokens) != (shape.requests, shape.requests * shape.output_tokens):
            raise SystemExit(f"{completed} requests were answered with {output_tokens} tokens; {shape} was asked for")
        if abs(prompt_tokens / prompts - 1) > 0.02:
            raise SystemExit(f"the prompts had {prompt_tokens} tokens instead of {prompts}")

    def _run(self, words: list[str]) -> str:
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=CLIENT_SECONDS
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        return done.stdout


def table(found: dict[str, dict[str, dict[str, float]]], shape: Shape) -> str:
    """The results as text."""
    lines = [f"{shape.requests} requests of {shape.input_tokens} + {shape.output_tokens} tokens per client and round"]
    for loop, rows in found.items():
        lines.append(f"\n{loop:28} {'vllm bench':>12} {'load':>12} {'ratio':>8}   rounds")
        for name, row in rows.items():
            span = f"{row['lowest']:.3f} to {row['highest']:.3f}"
            lines.append(f"{name:28} {row['theirs']:12.2f} {row['ours']:12.2f} {row['ratio']:8.3f}   {span}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
