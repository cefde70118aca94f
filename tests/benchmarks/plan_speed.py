"""How much sooner a plan reports an invalid flag than ``vllm serve``, compared in one run.

    python tests/benchmarks/plan_speed.py --vllm PATH --model FOLDER [--rounds 5] [--json]

Each round requests the same launch with a nonexistent flag in three ways: from a fleet with a warm flag cache, as in a
console; with the command ``vllm-console plan``, including interpreter startup; and with ``vllm serve`` itself. Prints
medians, the CPU time of a plan, and the time to learn the flags without a cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

WRONG = "max-num-sequences"
CODE = "flag_unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="a real vLLM: its command, or its environment")
    parser.add_argument("--model", required=True, help="a model's folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        for name in ("CACHE", "CONFIG", "STATE"):
            os.environ[f"XDG_{name}_HOME"] = str(Path(home) / name.lower())
        figures = measure(args.vllm, args.model, args.rounds)
    if args.json:
        print(json.dumps(figures, indent=2))
    else:
        print(table(figures))
    return 0


def measure(vllm: str, model: str, rounds: int) -> dict[str, float]:
    """Medians over ``rounds`` in seconds; ``ratio`` is vLLM's time divided by the plan's."""
    from vllm_console.fleet.local import LocalFleet
    from vllm_launchers.launch.request import LaunchRequest
    from vllm_launchers.vllm.engines import engine_at
    from vllm_launchers.vllm.flags.cache import FlagCache
    from vllm_launchers.vllm.flags.changes import Changes

    engine = engine_at(vllm)
    learned = clock(lambda: FlagCache().learn(engine))
    fleet = LocalFleet(observe=False)
    request = LaunchRequest("chatbot", vllm=vllm, model=model, changes=Changes(set={WRONG: 3}))

    def plan() -> None:
        codes = [found.code for found in fleet.plan(request).findings]
        assert CODE in codes, codes

    command = [sys.executable, "-m", "vllm_console", "plan", "chatbot", "--vllm", vllm, "--model", model]
    plan()  # imports everything that planning needs
    plans, cpu, commands, serves = [], [], [], []
    for _ in range(rounds):
        before = time.process_time()
        plans.append(clock(plan))
        cpu.append(time.process_time() - before)
        commands.append(clock(lambda: refused([*command, "--set", f"{WRONG}=3"], CODE)))
        serves.append(clock(lambda: refused([*engine.command, "serve", model, f"--{WRONG}", "3"], WRONG)))
    fleet.close()
    found = {
        "learn_s": learned,
        "plan_s": statistics.median(plans),
        "plan_cpu_s": statistics.median(cpu),
        "command_s": statistics.median(commands),
        "vllm_serve_s": statistics.median(serves),
    }
    return found | {
        "ratio": found["vllm_serve_s"] / found["plan_s"],
        "command_ratio": found["vllm_serve_s"] / found["command_s"],
    }


def refused(words: list[str], text: str) -> None:
    """Run a command that must fail with an error containing ``text``."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode != 0, words
    assert text in done.stdout + done.stderr, done.stderr[-2000:]


def clock(do: Callable[[], object]) -> float:
    begin = time.perf_counter()
    do()
    return time.perf_counter() - begin


def table(figures: dict[str, float]) -> str:
    """The results as text."""
    return "\n".join(
        (
            f"plan, flags known      {figures['plan_s'] * 1000:8.1f} ms   ({figures['plan_cpu_s'] * 1000:.1f} ms CPU)",
            f"vllm-console plan      {figures['command_s'] * 1000:8.1f} ms   (the command, interpreter and all)",
            f"vllm serve             {figures['vllm_serve_s'] * 1000:8.1f} ms",
            f"a plan is sooner by    {figures['ratio']:8.0f} ×    (the command {figures['command_ratio']:.0f} ×)",
            f"learning the flags     {figures['learn_s'] * 1000:8.1f} ms   (once for each installation)",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
