"""What is around the GPUs: CPU, memory, swap."""

from __future__ import annotations

import functools
import os
import socket
import time

import psutil

from vllm_launchers.machine.gpu.host import Host

GIB = 1024**3
LEAST_SECONDS = 0.2
"""Over less time than this a use of cores says nothing."""


class MachineReader:
    """Looks at CPU, memory and swap; remembers when, since the use of cores is counted between two looks."""

    def __init__(self) -> None:
        self._looked_at: float | None = None

    def host(self, at: float) -> Host:
        """The host without its GPUs, at ``at`` (Unix seconds). ``cpu_percent`` is None the first time."""
        memory, swap = psutil.virtual_memory(), psutil.swap_memory()
        return Host(
            hostname=socket.gethostname(),
            cpu=_cpu_name(),
            cpu_cores=os.cpu_count(),
            cpu_percent=self._cpu_percent(),
            memory_gib=round(memory.total / GIB, 1),
            memory_free_gib=round(memory.available / GIB, 1),
            swap_gib=round(swap.total / GIB, 1),
            swap_used_gib=round(swap.used / GIB, 1),
            at=at,
        )

    def _cpu_percent(self) -> float | None:
        before, now = self._looked_at, time.monotonic()
        self._looked_at = now
        percent = psutil.cpu_percent(interval=None)
        return None if before is None or now - before < LEAST_SECONDS else percent


@functools.cache
def _cpu_name() -> str | None:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() in ("model name", "Model", "cpu model"):
                    return value.strip() or None
    except OSError:
        return None
    return None
