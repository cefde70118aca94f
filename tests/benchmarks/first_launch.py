"""Time of a first launch from the key to ready: unprepared, and prepared while the user reads the plan.

    python tests/benchmarks/first_launch.py --vllm PATH --model FOLDER [--rounds 3]

Real vLLM on the CPU. In each round, in changing order, the same server is launched without preparation, and 5 and 30
seconds after the launch screen started to prepare it. Prints medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

from vllm_console.fleet.local import LocalFleet
from vllm_launchers.keeper import client
from vllm_launchers.launch.request import LaunchRequest
from vllm_launchers.vllm.flags.changes import Changes

NAME, PORT, WAIT_SECONDS = "one", 8498, 600.0
FLAGS = {
    **{"max-model-len": 512, "block-size": 32, "num-gpu-blocks-override": 40, "max-num-seqs": 8},
    "enforce-eager": True,
}
WAYS = {"as usual": 0.0, "after 5 s": 5.0, "after 30 s": 30.0}
"""Seconds of preparation while the plan is read; zero means no preparation."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    # A separate worker would busy-wait for its next step and occupy one of two cores.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    request = LaunchRequest(
        "chatbot", args.model, "vllm", args.vllm, NAME, port=PORT, changes=Changes(set=FLAGS), warm_up=True
    )
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(args.rounds):
        for way in WAYS if number % 2 else reversed(WAYS):
            with tempfile.TemporaryDirectory() as folder:
                found[way].append(launched(Path(folder), request, WAYS[way]))
            print(f"round {number + 1}, {way}: {found[way][-1]:.1f} s", flush=True)
    usual = statistics.median(found["as usual"])
    for way, seconds in found.items():
        print(f"{way}: {statistics.median(seconds):.1f} s to ready, ratio {statistics.median(seconds) / usual:.2f}")


def launched(state: Path, request: LaunchRequest, reading: float) -> float:
    fleet = LocalFleet(state)
    try:
        if reading:
            threading.Thread(target=fleet.judged_plan, args=(request,), daemon=True).start()
            time.sleep(reading)
        began = time.monotonic()
        fleet.start(request)
        if fleet.engine_check.unused:
            raise SystemExit(f"what was prepared was not used: {fleet.engine_check.unused}")
        record = client.wait_for(state, NAME, lambda record: record.state != "starting", WAIT_SECONDS)
        if record.state != "ready":
            raise SystemExit(f"it is {record.state}: {record.reason}")
        seconds = time.monotonic() - began
        client.stop(state, NAME)
        client.wait_for(state, NAME, lambda record: not record.needs_keeper, WAIT_SECONDS)
        return seconds
    finally:
        fleet.close()


if __name__ == "__main__":
    main()
