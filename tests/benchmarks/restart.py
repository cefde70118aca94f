"""Downtime of a restart: prepared, unprepared, and a stop with a cold start, compared.

    python tests/benchmarks/restart.py --vllm PATH --model FOLDER [--rounds 5]

Real vLLM on the CPU. In each round the same server is stopped and started again, restarted without preparation, and
restarted with it, each time with another ``--max-num-seqs``, while a client sends a request every 50 ms. Then, once per
round, vLLM rejects a flag, and a generation fails before it is ready and is rolled back. It prints medians:

- downtime according to the record, and from the client's first failed request to its last
- a prepared restart's downtime relative to a stop and a cold start (objective: at most 0.55)
- the number of requests that failed while a flag was rejected (objective: none), and how long the rejection took
  compared with ``vllm serve``'s own rejection of the same flag (objective: no longer)
- the downtime of a restart that is rolled back, in cold starts (objective: at most 1.2, in addition to the time of the
  failing generation)
- memory used by the prepared process
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from harness import Bench, bench

NAME, PORT, EVERY_SECONDS = "one", 8499, 0.05
REFUSED = 'kv-transfer-config={"kv_role":"none"}'
"""vLLM's own check rejects it; the plan does not."""
FAILING = ("max-model-len=4096", "num-gpu-blocks-override=4")
"""The flags are accepted, but the engine then fails because the KV cache is smaller than the longest request."""
MORE = ("max-model-len=512", "block-size=32", "num-gpu-blocks-override=40")
EAGER = "enforce-eager=true"


class Client(threading.Thread):
    """Sends a request every 50 ms and records failures."""

    def __init__(self, model: str) -> None:
        super().__init__(daemon=True)
        self._body = json.dumps({"model": model, "prompt": [1, 2, 3], "max_tokens": 1}).encode()
        self._done = threading.Event()
        self.failed: list[float] = []
        """When the failed requests were sent (Unix seconds)."""

    def run(self) -> None:
        while not self._done.wait(EVERY_SECONDS):
            began = time.time()
            request = urllib.request.Request(
                f"http://127.0.0.1:{PORT}/v1/completions", self._body, {"Content-Type": "application/json"}
            )
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    answer.read()
            except (OSError, urllib.error.URLError):
                self.failed.append(began)

    def finish(self) -> float:
        """Stop it; returns the seconds from the first failed request to the end of the last one."""
        self._done.set()
        self.join()
        return self.failed[-1] - self.failed[0] + EVERY_SECONDS if self.failed else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="with torch.compile, which is part of each start")
    args = parser.parse_args()
    with bench() as box:
        # A separate worker would busy-wait for its next step and occupy one of two cores.
        box.env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
        settings = MORE if args.compile else (*MORE, EAGER)
        words = [word for setting in settings for word in ("--set", setting)]
        box("start", "chatbot", "--vllm", args.vllm, "--model", args.model, "--name", NAME, "--port", str(PORT), *words,
            "--wait")  # fmt: skip
        results = [one_round(box, args, number) for number in range(args.rounds)]
    show(results)


def one_round(box: Bench, args: argparse.Namespace, number: int) -> dict[str, float]:
    """All methods once, in a changing order."""
    result: dict[str, float] = {}
    ways = [("prepared", "--prepare"), ("unprepared", "--no-prepare")]
    for name, option in ways if number % 2 else reversed(ways):
        print(f"round {number + 1}: {name}", file=sys.stderr, flush=True)
        result |= restarted(box, args.model, name, option, 8 + (name == "prepared"))
    print(f"round {number + 1}: stopped and started", file=sys.stderr)
    began = time.monotonic()
    box("stop", NAME)
    result["stop"] = time.monotonic() - began
    box("restart", NAME, "--wait")
    generation = box.record(NAME)["generations"][-1]
    result["cold"] = generation["ready_at"] - generation["started_at"]
    print(f"round {number + 1}: refused", file=sys.stderr)
    result |= refused(box, args)
    print(f"round {number + 1}: rolled back", file=sys.stderr)
    result |= rolled_back(box, args.model)
    return result


def restarted(box: Bench, model: str, name: str, option: str, sequences: int) -> dict[str, float]:
    """Measure one restart while requests are sent."""
    client, memory = Client(model), Memory(box)
    client.start()
    memory.start()
    box("restart", NAME, "--set", f"max-num-seqs={sequences}", option, "--wait")
    window = client.finish()
    found = {f"{name}": float(box.record(NAME)["downtime_seconds"]), f"{name}, client": window}
    return found | ({"memory": memory.finish()} if name == "prepared" else {})


class Memory(threading.Thread):
    """Peak memory of the prepared process in MB."""

    def __init__(self, box: Bench) -> None:
        super().__init__(daemon=True)
        self._box, self._done, self._most = box, threading.Event(), 0.0

    def run(self) -> None:
        """Sample ten times per second."""
        while not self._done.wait(0.1):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                pid = self._box.record(NAME)["preparation"]["process"]["pid"]
                pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
                self._most = max(self._most, int(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6)

    def finish(self) -> float:
        """Stop sampling; returns the maximum."""
        self._done.set()
        self.join()
        return self._most


def refused(box: Bench, args: argparse.Namespace) -> dict[str, float]:
    """A flag that vLLM rejects, compared with ``vllm serve``'s own rejection."""
    client = Client(args.model)
    client.start()
    began = time.monotonic()
    words = box.words("restart", NAME, "--set", REFUSED, "--force", "--wait", "--json")
    answer = subprocess.run(words, env=box.env, capture_output=True, text=True, check=False)
    ours = time.monotonic() - began
    client.finish()
    if answer.returncode != 1:
        raise SystemExit(f"vLLM did not refuse {REFUSED}: {answer.stdout}{answer.stderr}")
    began = time.monotonic()
    name, _, value = REFUSED.partition("=")
    serve = [args.vllm, "serve", args.model, f"--{name}", value, "--port", str(PORT + 1)]
    alone = subprocess.run(serve, env=box.env, capture_output=True, check=False)
    if not alone.returncode:
        raise SystemExit(f"vllm serve did not refuse {REFUSED}")
    theirs = time.monotonic() - began
    return {"refused": ours, "refused by vllm serve": theirs, "failed while refused": float(len(client.failed))}


def rolled_back(box: Bench, model: str) -> dict[str, float]:
    """A generation that fails before it is ready: the downtime, and the duration of the failed start."""
    client = Client(model)
    client.start()
    settings = [word for setting in FAILING for word in ("--set", setting)]
    words = box.words("restart", NAME, *settings, "--force", "--wait", "--json")
    answer = subprocess.run(words, env=box.env, capture_output=True, text=True, check=False)
    client.finish()
    record: dict[str, Any] = box.record(NAME)
    failed = record["generations"][-2]
    if answer.returncode != 1 or record["generations"][-1]["rollback"] is None:
        raise SystemExit(f"it was not rolled back: {answer.stderr}")
    back = record["generations"][-1]
    return {
        "rolled back": float(record["downtime_seconds"]),
        "failing start": failed["ended_at"] - failed["started_at"],
        "back after the failure": back["ready_at"] - failed["ended_at"],
    }


def show(results: list[dict[str, float]]) -> None:
    """Print medians and the ratios of the rounds."""

    def median(name: str) -> float:
        return statistics.median(result[name] for result in results)

    def ratio(above: str, *below: str) -> float:
        return statistics.median(result[above] / sum(result[each] for each in below) for result in results)

    print(f"medians of {len(results)} rounds")
    print(f"stop {median('stop'):.1f} s, cold start {median('cold'):.1f} s")
    for name in ("unprepared", "prepared"):
        print(f"{name} restart: downtime {median(name):.1f} s, for the client {median(f'{name}, client'):.1f} s")
    print(f"prepared / (stop + cold start): {ratio('prepared', 'stop', 'cold'):.2f}  objective 0.55")
    print(f"unprepared / (stop + cold start): {ratio('unprepared', 'stop', 'cold'):.2f}")
    beyond = max(result["prepared, client"] - result["prepared"] for result in results)
    print(f"client's errors beyond the reported downtime: {beyond:+.2f} s at most  objective 0.2 s")
    print(
        f"refused: {median('refused'):.1f} s, vllm serve {median('refused by vllm serve'):.1f} s, "
        f"ratio {ratio('refused', 'refused by vllm serve'):.2f}  objective 1; "
        f"failed requests {sum(result['failed while refused'] for result in results):.0f}  objective 0"
    )
    print(
        f"rolled back: downtime {median('rolled back'):.1f} s, of it {median('failing start'):.1f} s for the failing "
        f"start; back after {ratio('back after the failure', 'cold'):.2f} cold starts  objective 1.2"
    )
    print(f"prepared process: {median('memory'):.0f} MB")


if __name__ == "__main__":
    main()
