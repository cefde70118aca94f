"""Cost of the probe in real vLLM at full load: one server whose probe is toggled between batches.

    python tests/benchmarks/probe_cost.py --vllm PATH --model FOLDER [--rounds 100]

Real vLLM on the CPU with one engine thread, in one process with its API server, so that the probe's threads take time
from the engine. All batches are equal and as large as the server runs at once. A round has four: with the probe,
without, without, with; or the reverse. So a machine that slows down does so for both. A plugin of this script decides
at each step whether the probe is called. It prints, with 95% intervals from resampling the pairs:

- tokens per second with the probe, relative to without (objective: at least 0.99)
- CPU time of the server's process with the probe, relative to without
- both for the two equal batches in the middle of each round: the noise
- separately, the time of a step record in vLLM's thread and in the writing thread, by number of concurrent requests
- the numbers of written and of lost records
"""

from __future__ import annotations

import argparse
import json
import random
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

NAME, PORT = "probed", 8491
PROMPT_TOKENS = 64
RECORDS, REPEATS = 10_000, 5
RESAMPLED = 4_000

SWITCH = "VLLMCONSOLE_PROBE_SWITCH"
SWITCHING = f"""
import mmap, os

def register():
    try:
        import vllm_console_probe
    except ImportError:
        return
    with open(os.environ["{SWITCH}"], "r+b") as file:
        switch = mmap.mmap(file.fileno(), 1)
    record = vllm_console_probe.Probe.record
    if record.__name__ == "record":
        vllm_console_probe.Probe.record = lambda self, *stats: record(self, *stats) if switch[0] else None
"""
"""A general plugin of vLLM: a byte in a file decides whether the probe is called."""


class Load(NamedTuple):
    """Measurements of one batch."""

    tokens_per_second: float
    cpu_seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32, help="requests at once")
    parser.add_argument("--tokens", type=int, default=60, help="tokens that each generates")
    args = parser.parse_args()
    isolated()
    with bench() as box, tempfile.TemporaryDirectory() as folder:
        switch = write_plugin(Path(folder))
        box.env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
        box.env |= {"PYTHONPATH": folder, SWITCH: str(switch)}
        settings = ("max-model-len=512", "block-size=32", f"num-gpu-blocks-override={args.batch * 16}",
                    f"max-num-seqs={args.batch}", "enable-prefix-caching=false", "enforce-eager=true")  # fmt: skip
        words = [word for setting in settings for word in ("--set", setting)]
        words += ["--env", f"PYTHONPATH={folder}", "--env", f"{SWITCH}={switch}"]
        pid = box("start", "chatbot", "--vllm", args.vllm, "--model", args.model, "--name", NAME, "--port", str(PORT),
                  "--probe", "--force", "--wait", *words)["pid"]  # fmt: skip
        for _ in range(4):
            load(args, pid)
        before = len(ProbeReader(box.servers / NAME / "probe").steps())
        rounds = [one_round(args, number, pid, switch) for number in range(args.rounds)]
        time.sleep(1.0)
        show(args, box, rounds, before)


def write_plugin(folder: Path) -> Path:
    """Make a folder that adds the switch to a server with it on its ``PYTHONPATH``; returns the file with the
    switch."""
    (folder / "probe_switch.py").write_text(SWITCHING)
    info = folder / "probe_switch-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: probe-switch\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nprobe_switch = probe_switch:register\n")
    switch = folder / "switch"
    switch.write_bytes(b"\1")
    return switch


def isolated() -> None:
    """Print the cost of one step record, best of several rounds."""
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
                recorder.close()  # ends the writing thread, so that this thread writes
                for _ in range(RECORDS):
                    Probe(recorder).record(scheduler, iteration)
                began = time.thread_time()
                recorder.flush()
                written.append(time.thread_time() - began)
        ours, thread = (min(values) / RECORDS * 1e6 for values in (recorded, written))
        print(
            f"{batch:>4} requests at once: {ours:.1f} µs per step in vLLM's thread, {thread:.1f} µs in the writing one"
        )


class Round(NamedTuple):
    """Four batches: two with the probe and two without; the middle two are equal."""

    pairs: tuple[tuple[Load, Load], tuple[Load, Load]]
    """With and without."""
    same: tuple[Load, Load]
    """Both with, or both without."""


def one_round(args: argparse.Namespace, number: int, pid: int, switch: Path) -> Round:
    """With, without, without, with; or the reverse."""
    if number % 25 == 0:
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
    order = (True, False, False, True) if number % 2 else (False, True, True, False)
    found = []
    for on in order:
        with switch.open("r+b") as file:  # never shorter than its mapping
            file.write(bytes([on]))
        found.append(load(args, pid))
    first, second = found[:2], found[2:]
    one, other = (first, second[::-1]) if order[0] else (first[::-1], second)
    return Round(((one[0], one[1]), (other[0], other[1])), (found[1], found[2]))


def load(args: argparse.Namespace, pid: int) -> Load:
    """Send one batch as a single request, so that the client costs next to nothing."""
    prompts = [[3 + (at * 7 + which) % 300 for at in range(PROMPT_TOKENS)] for which in range(args.batch)]
    body = json.dumps({"model": args.model, "prompt": prompts, "max_tokens": args.tokens, "ignore_eos": True}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions", body, {"Content-Type": "application/json"}
    )
    used, began = cpu_seconds(pid), time.monotonic()
    with urllib.request.urlopen(request, timeout=600) as answer:
        tokens = json.loads(answer.read())["usage"]["completion_tokens"]
    return Load(tokens / (time.monotonic() - began), cpu_seconds(pid) - used)


def show(args: argparse.Namespace, box: Bench, rounds: list[Round], before: int) -> None:
    pairs = [pair for one in rounds for pair in one.pairs]

    def ratio(title: str, values: list[float]) -> None:
        resampled = sorted(median(random.choices(values, k=len(values))) for _ in range(RESAMPLED))
        low, high = resampled[RESAMPLED // 40], resampled[-RESAMPLED // 40]
        print(f"{title:<58} {median(values):7.4f}  ({low:.4f} to {high:.4f})")

    def cpu(chosen: list[tuple[Load, Load]]) -> float:
        return sum(one.cpu_seconds for one, _ in chosen) / sum(other.cpu_seconds for _, other in chosen)

    print(f"{len(pairs)} pairs of {args.batch} requests x {args.tokens} tokens")
    print(f"tokens/s without: {median([other.tokens_per_second for _, other in pairs]):.0f}")
    ratio("tokens/s, with / without", [one.tokens_per_second / other.tokens_per_second for one, other in pairs])
    same = [one.same for one in rounds]
    ratio("noise: both alike", [one.tokens_per_second / other.tokens_per_second for one, other in same])
    print(f"{'CPU of the process, with / without':<58} {cpu(pairs):7.4f}   noise: {cpu(same):.4f}")
    steps = ProbeReader(box.servers / NAME / "probe").steps()[before:]
    most = max(one.running or 0 for one in steps)
    print(f"records of steps: {len(steps)}, lost: {steps[-1].dropped}; at most {most} requests at once")


if __name__ == "__main__":
    main()
