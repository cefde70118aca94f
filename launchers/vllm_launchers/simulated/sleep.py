"""Sleep mode, with the routes of a server with ``VLLM_SERVER_DEV_MODE=1``.

Level 0 pauses scheduling. Level 1 also moves the weights to host memory, and level 2 discards them; both discard the KV
cache. Requests that arrive meanwhile wait. After level 2, the weights are garbage until they are reloaded, and so are
the answers; nothing reports that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_launchers.simulated.memory import MemoryPlan, bytes_asleep
from vllm_launchers.units import GIB

if TYPE_CHECKING:
    from vllm_launchers.simulated.engine import Engines
    from vllm_launchers.simulated.metrics import Metrics
    from vllm_launchers.simulated.startup import Log

TAGS = frozenset({"weights", "kv_cache"})
COPY_BYTES = 20e9
"""Bytes per second between host and GPU."""
RELOAD_BYTES = 3e9
"""Bytes per second when loading a checkpoint from the page cache."""
PAGE_SECONDS = 0.1
"""Time for unmapping or mapping all memory of a GPU."""
GARBAGE = 0x5EED
"""Changes every answer that is computed with garbage weights."""


class WorkerError(RuntimeError):
    """A call to the workers failed; vLLM answers 500."""


class SleepMode:
    """The sleep state of a server's engines.

    ``enabled``: ``--enable-sleep-mode``; without it nothing is moved or freed. ``ranks``: number of GPUs per engine.
    ``host_bytes``: host memory for weights (None: enough). ``speed`` 2 halves every duration.
    """

    def __init__(
        self,
        engines: Engines,
        metrics: Metrics,
        plan: MemoryPlan,
        log: Log,
        *,
        enabled: bool,
        ranks: int = 1,
        host_bytes: int | None = None,
        speed: float = 1.0,
    ) -> None:
        self._engines, self._metrics, self._plan, self._log = engines, metrics, plan, log
        self._enabled, self._ranks, self._host_bytes, self._speed = enabled, ranks, host_bytes, speed
        self._asleep: set[str] = set()
        self._paused = False
        self._level = 0
        self.garbage = False
        """Whether answers are garbage, because the weights were discarded and not reloaded."""

    @property
    def sleeping(self) -> bool:
        """Whether the server sleeps, at any level."""
        return self._paused or bool(self._asleep)

    async def sleep(self, level: int) -> None:
        """End all requests and go to sleep. Raises `WorkerError` if the weights do not fit in host memory."""
        self._engines.abort_all()
        self._paused = True
        for engine in self._engines.ranks:
            engine.pause()
            if level:
                engine.core.scheduler.pool.forget()
        if level and not self._asleep and self._enabled:
            await self._free(level)
        self._level = level
        self._tell(level)

    async def _free(self, level: int) -> None:
        plan, offloaded = self._plan, self._plan.weights * self._ranks * len(self._engines.ranks)
        if level == 1 and self._host_bytes is not None and offloaded > self._host_bytes:
            raise WorkerError(f"CUDA error: out of memory (pinned host memory for {offloaded / GIB:.2f} GiB)")
        await self._take(PAGE_SECONDS + (plan.weights / COPY_BYTES if level == 1 else 0.0))
        self._asleep |= TAGS
        self.garbage = level == 2
        kept = bytes_asleep(self._ranks)
        freed = max(0, plan.requested - kept)
        self._log.engine(
            "gpu_worker.py:326",
            f"Sleep mode freed {freed / GIB:.2f} GiB memory, {kept / GIB:.2f} GiB memory is still in use.",
        )

    async def wake(self, tags: Sequence[str]) -> bool:
        """Wake the parts named by ``tags`` (default: all); returns whether all are awake, so that requests continue."""
        wanted = {tag for tag in tags if tag != "scheduling"} if tags else set(TAGS)
        if self._asleep and wanted <= (self._asleep if tags else TAGS):
            moved = "weights" in wanted and self._level == 1
            await self._take(PAGE_SECONDS + (self._plan.weights / COPY_BYTES if moved else 0.0))
            self._asleep -= wanted
        elif wanted:
            self._log.engine("abstract.py:396", "Executor is not sleeping.")
        if not self._asleep:
            self._paused = False
            for engine in self._engines.ranks:
                engine.resume()
            self._tell(None)
        return not self._asleep

    async def reload_weights(self) -> None:
        """Reload the weights in place. Raises `WorkerError` if their memory is not mapped."""
        if "weights" in self._asleep:
            raise WorkerError("CUDA error: an illegal memory access was encountered")
        await self._take(self._plan.weights * self._ranks / RELOAD_BYTES)
        self.garbage = False

    def forget_prefixes(self) -> bool:
        """Empty the prefix cache; False while requests hold blocks."""
        emptied = [engine.core.scheduler.pool.forget() for engine in self._engines.ranks]
        return all(emptied)

    async def _take(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self._speed)

    def _tell(self, level: int | None) -> None:
        for metrics in self._metrics.engines:
            metrics.slept(level)
