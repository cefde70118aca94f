"""What the probe costs a real vLLM at full load: two servers, one with it and one without, loaded in turn.

    python tests/benchmarks/probe_cost.py --vllm PATH --model FOLDER [--rounds 9]

Real vLLM on the CPU, one thread for its engine. Both servers run all the time, so that a machine that gets slower does
so for both. In each round both get the same batch of prompts, in an order that changes; the batch is as large as they
run at once. The one without is loaded once more per round: what differs then is noise. Printed are medians over the
rounds, with the smallest and the largest:

- tokens per second with the probe, of those without (objective: at least 0.99)
- CPU time of the API server's process, in which the probe runs, with and without
- both again for two loads of the server without it
- apart from that, how long a step's record takes in vLLM's thread and in the writing one, with so many requests at once
- how many records were written, and how many were lost
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from harness import Bench, bench, cpu_seconds, median

from vllm_console.history.probe_records import ProbeReader
from vllm_launchers.probe.plugin.vllm_console_probe import Probe, Recorder

WITH, WITHOUT = "with", "without"
PORTS = {WITH: 8491, WITHOUT: 8492}
PROMPT_TOKENS = 64
RECORDS, REPEATS = 10_000, 5


class Load(NamedTuple):
    """What one batch took."""

    tokens_per_second: float
    cpu_seconds: float


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch", type=int, default=32, help="requests at once")
    parser.add_argument("--tokens", type=int, default=300, help="tokens that each generates")
    args = parser.parse_args()
    isolated()
    with bench() as box:
        box.env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
        settings = ("max-model-len=512", "block-size=32", f"num-gpu-blocks-override={args.batch * 16}",
                    f"max-num-seqs={args.batch}", "enable-prefix-caching=false", "enforce-eager=true")  # fmt: skip
        words = [word for setting in settings for word in ("--set", setting)]
        pids = {}
        for name, option in ((WITH, "--probe"), (WITHOUT, "--no-probe")):
            started = box("start", "chatbot", "--vllm", args.vllm, "--model", args.model, "--name", name, "--port",
                          str(PORTS[name]), option, "--force", "--wait", *words)  # fmt: skip
            pids[name] = started["pid"]
            for _ in range(2):
                load(args, name, pids[name])
        rounds = [one_round(args, number, pids) for number in range(args.rounds)]
        time.sleep(1.0)
        show(args, box, rounds)


def isolated() -> None:
    """Print what a record of a step costs, the best of several times."""
    scheduler = SimpleNamespace(
        num_running_reqs=1, num_waiting_reqs=0, num_skipped_waiting_reqs=0, kv_cache_usage=0.5, iteration_details=None,
        kv_cache_eviction_events=[], prefix_cache_stats=SimpleNamespace(queries=0, hits=0),
    )  # fmt: skip
    for batch in (4, 64, 256):
        iteration = SimpleNamespace(
            num_prompt_tokens=0, num_generation_tokens=batch, num_preempted_reqs=0, finished_requests=[],
            inter_token_latencies_iter=[0.01 + at * 1e-6 for at in range(batch)],
        )  # fmt: skip
        recorded, written = [], []
        for _ in range(REPEATS):
            with tempfile.TemporaryDirectory() as folder:
                recorder = Recorder(Path(folder), {})
                probe = Probe(recorder)
                began = time.thread_time()
                for _ in range(RECORDS):
                    probe.record(scheduler, iteration)
                recorded.append(time.thread_time() - began)
                recorder.close()
                recorder = Recorder(Path(folder), {})
                recorder.close()  # without a thread: it is written here
                for _ in range(RECORDS):
                    Probe(recorder).record(scheduler, iteration)
                began = time.thread_time()
                recorder.flush()
                written.append(time.thread_time() - began)
        ours, thread = (min(values) / RECORDS * 1e6 for values in (recorded, written))
        print(
            f"{batch:>4} requests at once: {ours:.1f} µs per step in vLLM's thread, {thread:.1f} µs in the writing one"
        )


def one_round(args: argparse.Namespace, number: int, pids: dict[str, int]) -> tuple[Load, Load, Load]:
    """With, without, and without once more; the first two in an order that changes."""
    print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
    order = (WITH, WITHOUT) if number % 2 else (WITHOUT, WITH)
    found = {name: load(args, name, pids[name]) for name in order}
    return found[WITH], found[WITHOUT], load(args, WITHOUT, pids[WITHOUT])


def load(args: argparse.Namespace, name: str, pid: int) -> Load:
    """Send one batch as a single request, so that the client costs next to nothing."""
    prompts = [[3 + (at * 7 + which) % 300 for at in range(PROMPT_TOKENS)] for which in range(args.batch)]
    body = json.dumps({"model": args.model, "prompt": prompts, "max_tokens": args.tokens, "ignore_eos": True}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORTS[name]}/v1/completions", body, {"Content-Type": "application/json"}
    )
    used, began = cpu_seconds(pid), time.monotonic()
    with urllib.request.urlopen(request, timeout=600) as answer:
        tokens = json.loads(answer.read())["usage"]["completion_tokens"]
    return Load(tokens / (time.monotonic() - began), cpu_seconds(pid) - used)


def show(args: argparse.Namespace, box: Bench, rounds: list[tuple[Load, Load, Load]]) -> None:
    """Print the medians."""

    def ratio(title: str, values: list[float]) -> None:
        print(f"{title:<58} {median(values):7.4f}  ({min(values):.4f} to {max(values):.4f})")

    print(f"{len(rounds)} rounds of {args.batch} requests x {args.tokens} tokens")
    print(f"tokens/s without: {median([one.tokens_per_second for _, one, _ in rounds]):.0f}")
    ratio("tokens/s, with / without", [a.tokens_per_second / b.tokens_per_second for a, b, _ in rounds])
    ratio("noise: the same server twice", [c.tokens_per_second / b.tokens_per_second for _, b, c in rounds])
    ratio("CPU of the API server's process, with / without", [a.cpu_seconds / b.cpu_seconds for a, b, _ in rounds])
    ratio("noise: the same server twice", [c.cpu_seconds / b.cpu_seconds for _, b, c in rounds])
    steps = ProbeReader(box.servers / WITH / "probe").steps()
    most = max(one.running or 0 for one in steps)
    print(f"records of steps: {len(steps)}, lost: {steps[-1].dropped}; at most {most} requests at once")


if __name__ == "__main__":
    main()
