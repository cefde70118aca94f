"""The console's memory does not grow with the number of restarts that it has seen."""

from __future__ import annotations

import gc
import tracemalloc
from itertools import pairwise

from msgspec.structs import replace

RESTARTS = 24
WARM_UP = 16
BYTES_EACH = 2048
"""The least that was ever kept of a restart by mistake was a base of its history: 8 KiB."""


async def test_restarts_leave_nothing(console, fakes):
    now = {"generation": 1}

    def chat(at):
        server = fakes.chat(at)
        flags = {**server.flags, "max-num-seqs": 64 + now["generation"] % 7}
        return replace(server, generation=now["generation"], flags=flags, pid=1000 + now["generation"])

    async with console(chat) as c:
        held = []
        try:
            for generation in range(2, WARM_UP + 2 * RESTARTS + 1):
                if generation == WARM_UP:
                    tracemalloc.start()
                now["generation"] = generation
                await c.until(lambda g=generation: c.app.snapshot.server("chat").generation == g, "a snapshot of it")
                if generation >= WARM_UP and (generation - WARM_UP) % RESTARTS == 0:
                    gc.collect()
                    held.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        # What is kept of each restart grows in both halves; a module that is first needed meanwhile, in one.
        grown = min(after - before for before, after in pairwise(held))
        assert grown < RESTARTS * BYTES_EACH, f"{grown / RESTARTS:.0f} bytes for each restart"
        print(f"{grown / RESTARTS:.0f} bytes for each of {RESTARTS} restarts")
