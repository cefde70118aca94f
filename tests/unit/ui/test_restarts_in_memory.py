"""The console's memory does not grow with the number of restarts that it has seen."""

from __future__ import annotations

import gc
import tracemalloc

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

        async def grown(restarts: bool) -> int:
            """Bytes more than before as many snapshots, each of another restart or all of the same."""
            before = traced()
            for _ in range(RESTARTS):
                now["generation"] += restarts
                seen, generation = c.app.snapshot, now["generation"]
                await c.until(
                    lambda s=seen, g=generation: (
                        c.app.snapshot is not s and c.app.snapshot.server("chat").generation == g
                    ),
                    "another snapshot",
                )
            return traced() - before

        def traced() -> int:
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        for _ in range(WARM_UP):
            now["generation"] += 1
            await c.until(lambda g=now["generation"]: c.app.snapshot.server("chat").generation == g, "a snapshot")
        tracemalloc.start()
        try:
            # What is kept of each restart grows in both rounds; a module that is first needed meanwhile, in one. What
            # grows with time alone, as a chart that is not full yet, grows without restarts, too.
            rounds = [await grown(restarts=True) - max(0, await grown(restarts=False)) for _ in range(2)]
        finally:
            tracemalloc.stop()
        kept = min(rounds)
        assert kept < RESTARTS * BYTES_EACH, f"{kept / RESTARTS:.0f} bytes for each restart"
        print(f"{kept / RESTARTS:.0f} bytes for each of {RESTARTS} restarts")
