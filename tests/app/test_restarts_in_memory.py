"""The console's memory does not grow with the number of restarts that it has seen."""

from __future__ import annotations

import gc
import tracemalloc

from msgspec.structs import replace

RESTARTS = 24
WARM_UP = 16
ROUNDS = 3
TIMERS = "/asyncio/"
"""Where the event loop creates timers; it keeps canceled timers until they are half of all."""


async def test_restarts_leave_no_objects_in_memory(console, fakes):
    now = {"generation": 1}

    def chat(at):
        server = fakes.chat(at)
        flags = {**server.flags, "max-num-seqs": 64 + now["generation"] % 7}
        return replace(server, generation=now["generation"], flags=flags, pid=1000 + now["generation"])

    async with console(chat) as c:

        async def grown(restarts: bool) -> dict[str, int]:
            """Additional objects by the line that created them, after a number of snapshots: each of another restart,
            or all of the same."""
            before = counts.pop()
            for _ in range(RESTARTS):
                now["generation"] += restarts
                seen, generation = c.app.snapshot, now["generation"]
                await c.until(
                    lambda s=seen, g=generation: (
                        c.app.snapshot is not s and c.app.snapshot.server("chat").generation == g
                    ),
                    "another snapshot",
                )
            counts.append(made())
            return {line: count - before.get(line, 0) for line, count in counts[-1].items()}

        def made() -> dict[str, int]:
            gc.collect()
            found = tracemalloc.take_snapshot().statistics("lineno")
            return {str(one.traceback): one.count for one in found if TIMERS not in one.traceback[0].filename}

        for _ in range(WARM_UP):
            now["generation"] += 1
            await c.until(lambda g=now["generation"]: c.app.snapshot.server("chat").generation == g, "a snapshot")
        tracemalloc.start()
        try:
            counts = [made()]
            rounds = [(await grown(restarts=True), await grown(restarts=False)) for _ in range(ROUNDS)]
        finally:
            tracemalloc.stop()
    # Objects kept per restart grow in every round with restarts. A module imported meanwhile grows only in one of them;
    # what grows with time, such as a chart that is not full yet, also grows in the rounds without restarts.
    kept = {
        line: least
        for line in rounds[0][0]
        if (least := min(more.get(line, 0) - max(0, same.get(line, 0)) for more, same in rounds)) >= RESTARTS
    }
    assert not kept, f"objects that {RESTARTS} restarts leave, by line: {kept}"
