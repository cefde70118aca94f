"""Startup cost of ``--help``, ``list``, the console's first paint, and a plan, each compared with its floor.

    python tests/benchmarks/startup_cost.py [--rounds 10] [--before CHECKOUT] [--vllm PATH --model FOLDER]

CPU time in milliseconds, medians over the rounds. A target and its floor alternate within a round, so that a busy
machine slows down both. The floor of a command is an empty Python program, that of the console an empty Textual app.
With ``--vllm`` and ``--model``, ``plan --json`` is compared with ``vllm serve`` rejecting the same wrong flag (elapsed
time). With ``--before``, each short command alternates with the same one of another checkout. The exit code is 1 if a
target is missed.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from harness import Bench, bench, cpu_seconds, drain, in_terminal, median

EMPTY_APP = "from textual.app import App; App().run()"
HELP_MS, LIST_MS, PAINT_RATIO, PLAN_RATIO = 60, 80, 1.5, 40
"""Targets: CPU of a command, CPU relative to an empty Textual app, and how many times sooner a plan responds."""

WRONG_FLAG = "max-num-sequences"


def main() -> int:
    """Measure and print; returns 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--vllm", help="a real vLLM's executable, to time a plan against")
    parser.add_argument("--model", help="a model's folder, for the plan")
    parser.add_argument(
        "--before", type=Path, metavar="CHECKOUT", help="another checkout, to compare short commands with"
    )
    args = parser.parse_args()
    met = []
    with bench() as box:
        if others := len(box("list")):
            print(f"{others} servers of others run here: list and the console watch them too, and cost more than alone")
        met.append(command_cost(box, "--help", ["--help"], args.rounds, HELP_MS))
        box.start("chat")
        met.append(command_cost(box, "list --json, one server", ["list", "--json"], args.rounds, LIST_MS))
        if args.before:
            compare_commands(box, args.before, args.rounds)
        met.append(first_paint(box, args.rounds))
        if args.vllm and args.model:
            met.append(plan_verdict(box, args.vllm, args.model, args.rounds))
    return 0 if all(met) else 1


def _cpu(words: list[str], env: dict[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, env=env, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def command_cost(box: Bench, title: str, words: list[str], rounds: int, target: float) -> bool:
    """CPU of a command as a whole process, compared with an empty Python."""
    _cpu(box.words(*words), box.env)  # the first one may compile bytecode
    pairs = [(_cpu(box.words(*words), box.env), _cpu([sys.executable, "-c", ""], box.env)) for _ in range(rounds)]
    ours, floor = (1000 * median(column) for column in zip(*pairs, strict=True))
    print(f"{title:<26} {ours:4.0f} ms   empty Python {floor:4.0f} ms   ratio {ours / floor:4.1f}   target {target} ms")
    return ours <= target


COMMANDS = (
    ("--help",), ("list", "--ours", "--json"), ("status", "chat", "--json"),
    ("plan", "chatbot", "--engine", "simulated", "--json"),
    ("start", "chatbot", "--engine", "simulated", "--name", "other"), ("stop", "other"), ("remove", "other", "--purge"),
)  # fmt: skip
"""In this order: the first starts what the next ones stop and remove."""


def compare_commands(box: Bench, before: Path, rounds: int) -> None:
    """CPU of short commands, compared with another checkout."""
    here = Path(__file__).parents[2]
    spent: dict[tuple[str, Path], list[float]] = {}
    for number in range(rounds + 1):
        for tree in (before, here):
            env = {**box.env, "PYTHONPATH": f"{tree / 'console'}:{tree / 'launchers'}"}
            for words in COMMANDS:
                cost = _cpu(box.words(*words), env)
                if number:  # the first one may compile bytecode
                    spent.setdefault((" ".join(words[:1]), tree), []).append(1000 * cost)
    print("against another checkout:")
    for words in COMMANDS:
        old, new = (median(spent[words[0], tree]) for tree in (before, here))
        print(f"  {words[0]:<24} {new:4.0f} ms   before       {old:4.0f} ms   {new / old - 1:+.0%}")


def first_paint(box: Bench, rounds: int) -> bool:
    """CPU until the first screen is shown, compared with an empty Textual app."""
    _paint(box, box.words())  # the first one may compile bytecode
    pairs = [(_paint(box, box.words()), _paint(box, [sys.executable, "-c", EMPTY_APP])) for _ in range(rounds)]
    ours, floor = (1000 * median(column) for column in zip(*pairs, strict=True))
    title = "first paint, one server"
    print(f"{title:<26} {ours:4.0f} ms   empty app    {floor:4.0f} ms   ratio {ours / floor:4.2f}   "
          f"target {PAINT_RATIO}")  # fmt: skip
    return ours / floor <= PAINT_RATIO


def _paint(box: Bench, words: list[str]) -> float:
    """CPU seconds of a program in a terminal until its first screen is shown."""
    with in_terminal(words, box.env) as (process, master):
        # Painted once there was output and then none for a while.
        while not drain(master, 0.1):
            pass
        while drain(master, 0.35) > 2000:
            pass
        return cpu_seconds(process.pid)


def plan_verdict(box: Bench, vllm: str, model: str, rounds: int) -> bool:
    """How many times sooner ``plan --json`` reports a wrong flag than ``vllm serve`` rejects it."""
    plan = [*box.words("plan", "chatbot", "--vllm", vllm, "--model", model), "--set", f"{WRONG_FLAG}=3", "--json"]
    serve = [vllm, "serve", model, f"--{WRONG_FLAG}", "3"]
    _refused(plan, box.env)  # learns this vLLM's flags, once per installation
    pairs = [(_refused(plan, box.env), _refused(serve, box.env)) for _ in range(rounds)]
    ours, theirs = (1000 * median(column) for column in zip(*pairs, strict=True))
    title = "plan --json, wrong flag"
    print(f"{title:<26} {ours:4.0f} ms   vllm serve   {theirs:4.0f} ms   ratio {theirs / ours:4.1f}   "
          f"target {PLAN_RATIO}")  # fmt: skip
    return theirs / ours >= PLAN_RATIO


def _refused(words: list[str], env: dict[str, str]) -> float:
    """Elapsed seconds until a command ended with an error that names the wrong flag."""
    began = time.perf_counter()
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    elapsed = time.perf_counter() - began
    if not done.returncode or WRONG_FLAG not in done.stdout + done.stderr:
        raise SystemExit(f"{' '.join(words)}: expected an error about {WRONG_FLAG}: {done.stderr[-2000:]}")
    return elapsed


if __name__ == "__main__":
    sys.exit(main())
