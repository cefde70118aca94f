"""A program that simulates a machine with many servers: ``python busy_box.py STATE COUNT``.

It writes records of COUNT ready servers, holds their keepers' locks, and appends to each history once per second, so
that a console has as much to read as with real servers. It prints ``ready`` once everything exists, and ends at end of
input. Commands on standard input: ``flood NAME`` writes that server's log as fast as possible, ``quiet`` stops it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from vllm_console.history.store import HistoryWriter
from vllm_console.metrics.sample import EngineSample, Histogram, Sample
from vllm_launchers.keeper import folders, processes
from vllm_launchers.keeper.records import Generation, LaunchSpec, ServerRecord, State
from vllm_launchers.launch.details import Details, pack
from vllm_launchers.vllm.engines import Engine, EngineKind

BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, float("inf"))
LINE = b"INFO 11-21 12:00:00 [loggers.py:1] Engine 000: Avg prompt throughput: 1.0 tokens/s, Running: 3 reqs\n"


def sample(number: int, at: float) -> Sample:
    """Metrics of server ``number`` at ``at`` (Unix seconds): every displayed value, changing each second."""
    seen = at % 100_000
    counts = tuple(seen * share for share in (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0))
    histograms = {key: Histogram(BOUNDS, counts, seen) for key in ("ttft", "itl", "e2e", "queue", "prefill", "decode")}
    wave = (at + 7 * number) % 60 / 60
    engine = EngineSample(3 + number, int(9 * wave), wave, seen / 9, seen * 9, seen * 3, seen * 900, seen * 200, seen,
                          histograms)  # fmt: skip
    return Sample(at, {"0": engine}, 100_000, "tiny")


def furnish(state: Path, number: int, now: float) -> tuple[int, HistoryWriter]:
    """Create one server's folder, with its keeper's lock and a history of 15 minutes."""
    name = f"s{number:02d}"
    folder = folders.prepare(state, name)
    details = Details("chatbot", "org/model", Engine(EngineKind.SIMULATED, (), None, None, ""), {"max-num-seqs": 64})
    spec = LaunchSpec(("vllm", "serve", "org/model"), "127.0.0.1", 9000 + number, details=pack(details))
    me = processes.identity(os.getpid())
    generation = Generation(1, spec, now - 1000, now - 990)
    folders.write_record(
        folder, ServerRecord(name, State.READY, now - 990, now - 1000, (generation,), server=me, keeper=me)
    )
    (folder / "server.log").write_bytes(LINE * 100)
    lock = folders.take_lock(folder)
    assert lock is not None
    writer = HistoryWriter(folder / "history.sqlite")
    for at in range(int(now) - 60, int(now), 5):
        writer.append(sample(number, at))
    return lock, writer


class Flood(threading.Thread):
    """Writes a log and rotates it at 16 MiB as a keeper does, until ``still`` is set."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self.path = path
        self.still = threading.Event()

    def run(self) -> None:
        while not self.still.is_set():
            with self.path.open("ab") as file:
                while file.tell() < 16 << 20 and not self.still.is_set():
                    file.write(LINE * 500)
                    file.flush()
                    time.sleep(0.01)
            self.path.replace(f"{self.path}.1")


def main(state: Path, count: int) -> None:
    now = time.time()
    furnished = [furnish(state, number, now) for number in range(count)]
    threading.Thread(target=obey, args=(state,), daemon=True).start()
    print("ready", flush=True)
    while True:
        for number, (_, writer) in enumerate(furnished):
            writer.append(sample(number, time.time()))
        time.sleep(1.0)


def obey(state: Path) -> None:
    """Execute commands from the input until it ends, then stop everything."""
    floods: list[Flood] = []
    for order in map(str.split, sys.stdin):
        if order[:1] == ["flood"]:
            floods.append(Flood(folders.server_folder(state, order[1]) / "server.log"))
            floods[-1].start()
        for flood in floods if order == ["quiet"] else ():
            flood.still.set()
        print("done", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
