"""Memory growth of a console whose simulated servers are restarted repeatedly.

    python tests/benchmarks/restart_memory.py [--restarts 500] [--servers 3]

The whole console runs (keepers, recorders, the screen without a terminal). After a warm-up it prints the memory every
``--every`` restarts, and at the end the growth per restart of Python's own memory (tracemalloc) and of the process.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import tempfile
import time
import tracemalloc
from pathlib import Path

from vllm_console.fleet.local import LocalFleet
from vllm_console.ui.app import ConsoleApp
from vllm_launchers.keeper.records import State
from vllm_launchers.launch.request import LaunchRequest
from vllm_launchers.vllm.flags.changes import Changes

PAGE = os.sysconf("SC_PAGE_SIZE")
READY_SECONDS = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restarts", type=int, default=500, help="of all servers together, after the warm-up")
    parser.add_argument("--warm-up", type=int, default=40, help="restarts before the first figure that counts")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--top", type=int, default=8, help="what grew most: so many places")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"HOME": home, "SIMULATED_STARTUP_SECONDS": "0"}
        for name in ("STATE", "CONFIG", "CACHE"):
            os.environ[f"XDG_{name}_HOME"] = str(Path(home) / name.lower())
        fleet = LocalFleet(Path(home) / "state", observe=False, gpus=False)
        tracemalloc.start(3)
        try:
            asyncio.run(Soak(fleet, args).run())
        finally:
            for server in fleet.snapshot().servers:
                fleet.stop(server.name)
            fleet.close()


class Soak:
    """Restarts servers concurrently under one console."""

    def __init__(self, fleet: LocalFleet, args: argparse.Namespace) -> None:
        self._fleet, self._args = fleet, args
        self._app = ConsoleApp(fleet, refresh=0.5)
        self._left = args.warm_up
        self._done = 0

    async def run(self) -> None:
        names = [f"s{number}" for number in range(self._args.servers)]
        for name in names:
            request = LaunchRequest("chatbot", engine="simulated", name=name, force=True)
            await asyncio.to_thread(self._fleet.start, request)
        async with self._app.run_test(size=(120, 40)):
            await asyncio.gather(*(self._ready(name, 1) for name in names))
            await asyncio.gather(*(self._restart(name, 2) for name in names))
            first, began = self._memory(), time.monotonic()
            before, start = tracemalloc.take_snapshot(), self._done
            last = first
            while self._done - start < self._args.restarts:
                self._left = min(self._args.every, self._args.restarts - (self._done - start))
                await asyncio.gather(*(self._restart(name, self._generation(name) + 1) for name in names))
                last = self._memory()
                each = (time.monotonic() - began) / (self._done - start)
                print(f"{self._done - start:5} restarts: Python {last[0]:6.0f} KiB, process {last[1]:6.0f} KiB, "
                      f"{each:.1f} s each", flush=True)  # fmt: skip
            count = self._done - start
            print(f"left by each of {count}: Python {1024 * (last[0] - first[0]) / count:.0f} bytes, "
                  f"process {1024 * (last[1] - first[1]) / count:.0f} bytes")  # fmt: skip
            grown = tracemalloc.take_snapshot().compare_to(before, "lineno")
            for one in grown[: self._args.top]:
                print(f"  {one.size_diff / 1024:+8.1f} KiB {one.count_diff:+6}  {one.traceback}")

    def _generation(self, name: str) -> int:
        server = self._app.snapshot.server(name) if self._app.snapshot is not None else None
        return server.generation if server is not None else 0

    async def _restart(self, name: str, generation: int) -> None:
        while self._left > 0:
            self._left -= 1
            changes = Changes({"max-num-seqs": 64 if generation % 2 else 128})
            await asyncio.to_thread(self._fleet.restart, name, changes, force=True)
            await self._ready(name, generation)
            generation += 1
            self._done += 1

    async def _ready(self, name: str, generation: int) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while True:
            server = self._app.snapshot.server(name) if self._app.snapshot is not None else None
            if server is not None and server.generation == generation and server.state is State.READY:
                return
            if time.monotonic() > deadline:
                raise SystemExit(f"{name} is not ready: {server.state if server else 'gone'}")
            await asyncio.sleep(0.05)

    @staticmethod
    def _memory() -> tuple[float, float]:
        """KiB allocated by Python, and KiB resident in the process."""
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
        return tracemalloc.get_traced_memory()[0] / 1024, resident / 1024


if __name__ == "__main__":
    main()
