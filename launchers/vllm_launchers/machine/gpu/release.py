"""After a stop: did the memory really come back, and if not, who holds it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from vllm_launchers.machine.gpu.host import Gpu, Host
from vllm_launchers.machine.gpu.sharing import owner


@dataclass(frozen=True, slots=True)
class Release:
    """Whether memory came back after a stop; if not, ``reason`` says who holds it, in one sentence."""

    freed: bool
    reason: str = ""


def wait_until_freed(
    look: Callable[[], Host],
    wanted: Mapping[int, float],
    ours: Collection[int] = (),
    *,
    timeout: float = 30.0,
    poll: float = 0.25,
) -> Release:
    """Poll until each GPU has as many GiB free as ``wanted`` says, or name who holds them.

    ``look`` gives the newest host, such as ``lambda: watch.latest().host``; ``ours`` are the pids of the server that
    was stopped: where they are known no other is named, for what others hold is theirs.
    """
    deadline = time.monotonic() + timeout
    while True:
        host = look()
        short = [gpu for gpu in host.gpus if gpu.free_gib is not None and gpu.free_gib < wanted.get(gpu.index, 0.0)]
        if not short and not host.problem:
            return Release(True)
        if time.monotonic() >= deadline:
            return Release(False, host.problem or "; ".join(_held(gpu, wanted[gpu.index], ours) for gpu in short))
        time.sleep(poll)


def _held(gpu: Gpu, wanted: float, ours: Collection[int]) -> str:
    free = gpu.free_gib or 0.0
    holders = sorted(gpu.holders, key=lambda holder: -(holder.gib or 0.0))
    holders = [holder for holder in holders if not ours or holder.pid in ours]
    if not holders:
        return f"GPU {gpu.index}: {wanted - free:.1f} GiB did not come back, and no process is seen that holds them"
    holder = holders[0]
    size = f"{holder.gib:.1f} GiB" if holder.gib is not None else "memory"
    return (
        f"GPU {gpu.index}: {wanted - free:.1f} GiB did not come back; pid {holder.pid} of {owner(holder)} still "
        f"holds {size}"
    )
