"""Time to diagnose a long log, compared with reading and splitting the file in the same run.

    python tests/benchmarks/diagnose_speed.py [--mib 32] [--rounds 5] [--json]

Five logs: a server that served and then died, the same with journald's prefixes, only tracebacks, only distinct
exceptions, and only out-of-memory errors. Measures CPU time of this process; medians over the rounds, with the floor
measured in between.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count, cycle, islice
from pathlib import Path

from vllm_console.diagnosis.failure.diagnose import diagnose

MIB = 1 << 20

SERVED = (
    '(APIServer pid=1) INFO:     10.0.0.1:40000 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
    "(APIServer pid=1) INFO 11-20 10:00:01 [loggers.py:259] Engine 000: Avg prompt throughput: 5.2 tokens/s",
)
DEATH = "(EngineCore pid=7) ERROR 11-20 10:00:02 [core.py:900] EngineCore encountered a fatal error."
TRACEBACK = (
    "Traceback (most recent call last):",
    *(f'  File "/env/vllm/v1/part{number}.py", line {number}, in step{number}' for number in range(10)),
    "RuntimeError: a shape did not go with another one",
)


def served() -> Iterator[str]:
    """A server's access log and metrics."""
    return cycle(SERVED)


def tracebacks() -> Iterator[str]:
    return cycle(TRACEBACK)


def exceptions() -> Iterator[str]:
    """Different exceptions without tracebacks."""
    return (f"RuntimeError: request {number} was not to be answered" for number in count())


def carried() -> Iterator[str]:
    """A server's log with journald's prefixes."""
    return (f"Nov 03 08:05:{number % 60:02d} gpubox vllm[47]: {line}" for number, line in enumerate(cycle(SERVED)))


def out_of_memory() -> Iterator[str]:
    """Out-of-memory errors, all of them different and without a traceback."""
    return (f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {number} MiB." for number in count())


LOGS: dict[str, Callable[[], Iterator[str]]] = {
    "served": served,
    "carried": carried,
    "tracebacks": tracebacks,
    "exceptions": exceptions,
    "out of memory": out_of_memory,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = {name: measure(Path(folder) / name, lines(), args) for name, lines in LOGS.items()}
    if args.json:
        print(json.dumps(figures, indent=2))
        return 0
    for name, found in figures.items():
        print(f"{name:14}{found['seconds']:8.2f} s   {found['ratio']:6.0f} × reading and splitting")
    return 0


def measure(path: Path, lines: Iterator[str], args: argparse.Namespace) -> dict[str, float]:
    """CPU seconds of a diagnosis, and their ratio to the floor."""
    some = list(islice(lines, 1000))
    wanted = args.mib * MIB * len(some) // (len("\n".join(some)) + 1)
    path.write_text("\n".join([*some, *islice(lines, max(0, wanted - len(some))), DEATH]))
    floors, spent = [], []
    for _ in range(args.rounds):
        floors.append(clock(lambda: path.read_bytes().decode("utf-8", "replace").split("\n")))
        text = path.read_text().split("\n")
        spent.append(clock(lambda text=text: diagnose(text)))  # type: ignore[misc]
    seconds, floor = statistics.median(spent), statistics.median(floors)
    return {"seconds": seconds, "floor_seconds": floor, "ratio": seconds / floor}


def clock(do: Callable[[], object]) -> float:
    begin = time.process_time()
    do()
    return time.process_time() - begin


if __name__ == "__main__":
    sys.exit(main())
