"""Displayed and predicted values on a GPU, compared with vLLM and ``nvidia-smi``. The model must fit on it.

    python tests/benchmarks/on_gpu.py --vllm PATH --model FOLDER [--gpus 0] [--rate 16] [--seconds 15]

It starts one server with the chatbot preset, sends it load, restarts it with fewer sequences (prepared) and with sleep
mode (not prepared), and puts it to sleep and wakes it up at both levels. That takes about six minutes with an 8B model.
It prints:

- the plan's memory and vLLM's own, from its log
- GPU memory, power, temperature and clock from NVML and from ``nvidia-smi``, under load
- recorded steps and the plan's roofline: medians by sequences and tokens
- the prediction of the restart, and the measurement after it with the same load
- downtimes, and the maximum number of processes listed by ``nvidia-smi`` while a restart was prepared (objective: one)
- the time to sleep and to wake up, and the GPU memory in use before and after

Without ``nvidia-smi``, as with ``--gpus none`` and vLLM's CPU build, everything that needs a GPU is skipped.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from harness import Bench, bench, median

from vllm_console.history.probe_records import ProbeReader
from vllm_console.prediction.evidence import SeenStep, gather
from vllm_launchers.engine_model.roofline import Roofline, Work
from vllm_launchers.host.gpu.monitor import read_once
from vllm_launchers.plan.budget.budget import MemoryBudget
from vllm_launchers.plan.pace import timing_of
from vllm_launchers.typed_decoding import convert
from vllm_launchers.vllm.modelfacts.read import model_facts

NAME, PORT = "one", 8599
FEWER = 24
BESIDE = 5
"""Number of paired readings of NVML and nvidia-smi."""
SMI = {"used_gib": "memory.used", "power_w": "power.draw", "temperature_c": "temperature.gpu", "clock_mhz": "clocks.sm"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--gpus", default="0", help="one GPU, or none (default 0)")
    parser.add_argument("--rate", type=float, default=16.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=15.0, help="of load")
    parser.add_argument("--set", action="append", default=[], metavar="FLAG=VALUE", dest="flags")
    parser.add_argument("--fewer", type=int, default=FEWER, help=f"sequences after the restart (default {FEWER})")
    args = parser.parse_args()
    with bench() as made:
        measure(made, args)


def measure(made: Bench, args: argparse.Namespace) -> None:
    """Run everything on one server."""
    given = ["chatbot", "--vllm", args.vllm, "--model", args.model, "--gpus", args.gpus]
    given += [word for flag in args.flags for word in ("--set", flag)]
    plan = made("plan", *given)
    began = time.monotonic()
    made("start", *given, "--name", NAME, "--port", str(PORT), "--probe", "--wait")
    print(f"start: {time.monotonic() - began:.0f} s")
    print_memory(plan["memory"], Path(made("status", NAME)["log"]).read_text(errors="replace"))
    load(made, args.rate, args.seconds, sampled=True)
    print_steps(made, plan)

    change = ("--set", f"max-num-seqs={args.fewer}")
    predicted = predict(made, *change)
    with gpu_processes() as seen:
        made("restart", NAME, *change, "--prepare", "--wait")
    print(f"prepared restart: down for {made('status', NAME)['downtime_seconds']:.1f} s", end="")
    print(f"; at most {max(seen, default=0)} processes on the GPUs" if seen else "")
    load(made, args.rate, args.seconds)
    print_prediction(predicted, predict(made, "--traffic-scale", "1.01")["now"])

    if not shutil.which("nvidia-smi"):
        return
    made("restart", NAME, "--set", "enable-sleep-mode=true", "--no-prepare", "--wait")
    print(f"restart: down for {made('status', NAME)['downtime_seconds']:.1f} s")
    for level in ("1", "2"):
        before = smi("memory.used")
        slept = timed(made, "sleep", NAME, "--level", level)
        asleep = smi("memory.used")
        woke = timed(made, "wake", NAME)
        print(f"level {level}: asleep after {slept:.1f} s, awake after {woke:.1f} s", end="")
        print(f"; {before:.0f} → {asleep:.0f} MiB in use")


def predict(made: Bench, *change: str) -> dict[str, Any]:
    """A prediction, or the reason why there is none (exit code 1)."""
    words = made.words("predict", NAME, *change, "--json")
    answer = subprocess.run(words, env=made.env, capture_output=True, text=True, check=False)
    if not answer.stdout:
        raise SystemExit(answer.stderr)
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def timed(made: Bench, *words: str) -> float:
    began = time.monotonic()
    made(*words)
    return time.monotonic() - began


def smi(field: str) -> float:
    """A field of the first GPU as reported by nvidia-smi."""
    words = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", "--id=0"]
    return float(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def print_memory(planned: dict[str, Any], log: str) -> None:
    """The plan's memory next to the engine's."""
    for name, key, pattern in (
        ("weights, GiB", "weights_gib", r"Model loading took ([\d.]+) GiB"),
        ("KV cache, tokens", "kv_tokens", r"KV cache size: ([\d,]+) tokens"),
    ):
        found = re.findall(pattern, log)
        print(f"{name}: planned {planned[key]:,}, vLLM {found[-1] if found else 'does not say'}")


def load(made: Bench, rate: float, seconds: float, *, sampled: bool = False) -> None:
    """Send load; if ``sampled``, compare NVML with nvidia-smi meanwhile."""
    sending = made.load(NAME, rate, seconds)
    if sampled and shutil.which("nvidia-smi"):
        time.sleep(seconds / 2)
        for _ in range(BESIDE):
            gpu = made("host")["gpus"][0]
            smi_values = {key: smi(field) for key, field in SMI.items()}
            smi_values["used_gib"] /= 1024
            print("  ".join(f"{key} {gpu[key]:g} / {smi_values[key]:g}" for key in SMI), "(NVML / nvidia-smi)")
    sending.wait()


class gpu_processes:  # noqa: N801 - reads as a function
    """Counts the processes that nvidia-smi lists, every 0.4 s."""

    def __init__(self) -> None:
        self._seen: list[int] = []
        self._ended = threading.Event()

    def __enter__(self) -> list[int]:
        if shutil.which("nvidia-smi"):
            threading.Thread(target=self._run, daemon=True).start()
        return self._seen

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _run(self) -> None:
        words = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
        while not self._ended.wait(0.4):
            self._seen.append(len(subprocess.run(words, capture_output=True, text=True, check=False).stdout.split()))


def batch_budget(made: Bench) -> int:
    """Maximum tokens per step as reported by the engine, since vLLM's default depends on the GPU."""
    log = Path(made("status", NAME)["log"]).read_text(errors="replace")
    found = re.findall(r"max_num_batched_tokens=(\d+)", log)
    if not found:
        raise SystemExit("vLLM's log does not say max_num_batched_tokens: its steps can't be told apart.")
    return int(found[-1])


def print_steps(made: Bench, plan: dict[str, Any]) -> None:
    reader = ProbeReader(made.servers / NAME / "probe")
    evidence = gather(reader.requests(), reader.steps(), 16, batch_budget(made))
    print(f"scheduled ahead: {'yes' if evidence.ahead else 'no'}")
    planned = roofline(plan)
    for kind, steps in (("decode", [one for one in evidence.steps if not one.prefills]),
                        ("with prompts", [one for one in evidence.steps if one.prefills])):  # fmt: skip
        for group in by_tokens(steps):
            tokens, sequences, reads, pairs, took = (
                median([getattr(one, name) for one in group])
                for name in ("tokens", "sequences", "reads", "pairs", "seconds")
            )
            estimate = ""
            if planned is not None:
                work = Work(round(tokens), round(sequences), reads, pairs)
                estimate = f", roofline {1000 * planned.latency(work):.1f} ms"
            print(f"{kind}: {sequences:.0f} sequences, {tokens:.0f} tokens: {1000 * took:.1f} ms{estimate}")


def roofline(plan: dict[str, Any]) -> Roofline | None:
    """The plan's timing of steps; None without a GPU, or if unknown."""
    if not plan["memory"]["per_gpu"] or not shutil.which("nvidia-smi"):
        return None
    memory = convert({**plan["memory"], "per_gpu": []}, MemoryBudget)
    timing = timing_of(model_facts(plan["model"]), plan["flags"], memory, read_once().gpus[0].name)
    return timing.roofline if timing is not None else None


def by_tokens(steps: Sequence[SeenStep], least: int = 8) -> Iterator[list[SeenStep]]:
    """Steps grouped by the power of two of their tokens."""
    groups: dict[int, list[SeenStep]] = {}
    for one in steps:
        groups.setdefault(round(math.log2(max(1, one.tokens))), []).append(one)
    return (groups[key] for key in sorted(groups) if len(groups[key]) >= least)


def print_prediction(predicted: dict[str, Any], measured: dict[str, Any]) -> None:
    """Predicted interval and measured value of each inter-token metric."""
    if predicted["outside"]:
        print(predicted["outside"])
    for part in ("p50", "p90", "p99", "mean"):
        one, came = predicted["predicted"]["itl_seconds"][part], measured["itl_seconds"][part]["value"]
        low, high = one["low"], one["high"]
        if came is None or low is None or high is None:
            held = "not judged"
        else:
            held = "held" if low <= came <= high else "missed"
        interval = f"{milliseconds(low)} to {milliseconds(high)}"
        print(f"ITL {part}: predicted {milliseconds(one['value'])} ({interval}), measured {milliseconds(came)}, {held}")


def milliseconds(seconds: float | None) -> str:
    """A time as text, or "unknown"."""
    return f"{1000 * seconds:.1f} ms" if seconds is not None else "unknown"


if __name__ == "__main__":
    main()
