"""MIG slices presented as GPUs. Pure.

Placement, memory, findings and choices get slices from here, so that all use the same one.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from vllm_launchers.host.gpu.host import Gpu, Host, MigInstance
from vllm_launchers.host.gpu.sharing import GpuShare, available_gib, is_held

_FREE_SHARE = 0.9
"""A slice counts as free if this share of its memory is free."""


def slice_gpu(gpu: Gpu, part: MigInstance) -> Gpu:
    """One slice as a GPU of its size, with its free memory and processes.

    Memory held by no visible process still counts as used.
    """
    held = tuple(h for h in gpu.holders if h.instance is not None and h.instance == part.gpu_instance)
    known = part.memory_gib is not None and part.free_gib is not None
    used = (part.memory_gib or 0.0) - (part.free_gib or 0.0) if known else None
    return replace(
        gpu,
        memory_gib=part.memory_gib,
        free_gib=part.free_gib,
        used_gib=used,
        used_by=held,
        mig_mode=False,
        mig=(part,),
    )


def best_slice(gpus: Iterable[Gpu], shares: Iterable[GpuShare] = ()) -> Gpu | None:
    """The slice to take if nothing more is known about the server: the largest free one, else the one with most room.

    None if there is no slice of known size.
    """
    shares = tuple(shares)
    found = [(gpu, slice_gpu(gpu, part)) for gpu in gpus for part in gpu.mig if part.memory_gib is not None]

    def room(pair: tuple[Gpu, Gpu]) -> tuple[bool, float, int]:
        whole, one = pair
        # A share of a GPU applies to its slices together.
        size, give = one.memory_gib or 0.0, available_gib(replace(whole, free_gib=one.free_gib), shares)
        if give is None:
            return not is_held(one), size, -one.index
        return not is_held(one) and give >= size * _FREE_SHARE, give, -one.index

    best = max(found, key=room, default=None)
    return best[1] if best is not None else None


def on_slice(host: Host | None, devices: str | None, shares: Iterable[GpuShare] = ()) -> Host | None:
    """The host as seen by a server on a MIG slice: that slice is its only GPU.

    ``devices`` is ``CUDA_VISIBLE_DEVICES``. If it is None and every usable GPU is in MIG mode, the slice that would be
    taken is used; if it names no slice, the host is returned unchanged.
    """
    if host is None:
        return None
    if devices is not None and devices.startswith("MIG-"):
        named = [slice_gpu(gpu, part) for gpu in host.gpus for part in gpu.mig if part.uuid.startswith(devices)]
        return replace(host, gpus=(named[0],), links=(), islands=((named[0].index,),)) if len(named) == 1 else host
    usable = [gpu for gpu in host.gpus if not gpu.lost]
    if devices is not None or not usable or not all(gpu.mig_mode for gpu in usable):
        return host
    best = best_slice([gpu for gpu in usable if not gpu.claimed] or usable, shares)
    return replace(host, gpus=(best,), links=(), islands=((best.index,),)) if best is not None else host
