"""Who holds how much of a GPU, and how much one user may take. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

import msgspec
from msgspec.structs import replace

from vllm_launchers.host.gpu.host import Gpu, Holder, Host, HostError, MigInstance
from vllm_launchers.patterns import lazy_pattern

DRIVER_GIB = 1.5
"""Memory of an unused GPU that the driver itself keeps (frame buffer, firmware); less than this has no holder."""

DESKTOP_GIB = 1.5
"""A desktop's windows use up to this much of a GPU; more is real work."""

_MOST_GIB = 1e6
_AMOUNT = lazy_pattern(r"(\d{1,6}(?:\.\d{1,6})?)\s*(GiB|GB|G|%)?", re.IGNORECASE)


class GpuShare(msgspec.Struct, frozen=True):
    """Maximum of one GPU that all of this user's servers may hold: GiB, or a fraction from 0 to 1."""

    gpu: int
    gib: float | None = None
    fraction: float | None = None

    def limit(self, gpu: Gpu) -> float | None:
        """The limit in GiB; None if the GPU's size is unknown."""
        if self.gib is not None:
            return self.gib
        if self.fraction is None or gpu.memory_gib is None:
            return None
        return self.fraction * gpu.memory_gib


class Holdings(msgspec.Struct, frozen=True):
    """Who holds how many GiB of a GPU: ``ours`` by server, ``others`` by user, ``unseen`` by no visible process."""

    ours: Mapping[str, float] = msgspec.field(default_factory=dict)
    others: Mapping[str, float] = msgspec.field(default_factory=dict)
    unseen: float = 0.0
    free: float | None = None

    @property
    def ours_gib(self) -> float:
        """Total GiB held by our servers."""
        return sum(self.ours.values())

    @property
    def others_gib(self) -> float:
        """Total GiB held by others, visible or not."""
        return sum(self.others.values()) + self.unseen


def holdings(gpu: Gpu) -> Holdings:
    """Who holds what of a GPU now."""
    ours: dict[str, float] = {}
    others: dict[str, float] = {}
    for holder in gpu.holders:
        into, name = (ours, holder.server) if holder.server else (others, holder_user(holder))
        into[name] = round(into.get(name, 0.0) + (holder.gib or 0.0), 3)
    seen = sum(ours.values()) + sum(others.values())
    unseen = max(0.0, (gpu.used_gib or 0.0) - seen)
    # If a process's memory is not reported, attribute the unexplained rest to it.
    silent = [holder for holder in gpu.holders if holder.gib is None]
    if silent and unseen > DRIVER_GIB:
        first = silent[0]
        into, name = (ours, first.server) if first.server else (others, holder_user(first))
        into[name], unseen = round(into.get(name, 0.0) + unseen, 3), 0.0
    return Holdings(ours, others, round(unseen, 3) if unseen > DRIVER_GIB else 0.0, gpu.free_gib)


def is_desktop(holder: Holder) -> bool:
    """Whether a process only draws windows."""
    return holder.kind == "graphics" and not holder.server and (holder.gib or 0.0) < DESKTOP_GIB


def is_held(gpu: Gpu) -> bool:
    """Whether a GPU is in use by more than desktop windows and the driver itself."""
    return bool(holdings(gpu).unseen) or any(not is_desktop(holder) for holder in gpu.holders)


def is_held_by_others(gpu: Gpu) -> bool:
    """Whether others use a GPU, visible or not."""
    return bool(holdings(gpu).unseen) or any(not h.server and not is_desktop(h) for h in gpu.holders)


def holder_user(holder: Holder) -> str:
    """The user of a process, or a description if the process is invisible."""
    return holder.user or f"pid {holder.pid} (not seen from here)"


def available_gib(gpu: Gpu, shares: Iterable[GpuShare] = ()) -> float | None:
    """GiB that a new server of ours may take of a GPU: the free memory, within this user's share."""
    limit, free = own_limit(gpu, shares), gpu.free_gib
    if limit is None:
        return free
    left = max(0.0, limit - holdings(gpu).ours_gib)
    return left if free is None else min(free, left)


def own_limit(gpu: Gpu, shares: Iterable[GpuShare]) -> float | None:
    """GiB of a GPU that this user's servers may hold in total; None without a limit."""
    limits = [limit for share in shares if share.gpu == gpu.index and (limit := share.limit(gpu)) is not None]
    return min(limits, default=None)


def format_share(gpu: Gpu, shares: Iterable[GpuShare]) -> str:
    """How a share limits the use of a GPU, in a few words; empty if it does not."""
    limit, taken = own_limit(gpu, shares), holdings(gpu).ours_gib
    if limit is None:
        return ""
    if gpu.free_gib is not None and limit - taken >= gpu.free_gib:
        return ""
    return f"GPU {gpu.index}: your share is {limit:.1f} GiB" + (f", {taken:.1f} of them taken" if taken else "")


def parse_share(gpu: int, value: str | float) -> GpuShare:
    """Parse a share: ``"24 GiB"``, ``24`` (GiB), ``"50%"``, or ``0.5`` (a fraction, up to 1).

    Raises:
        HostError: it has none of these forms; one sentence.
    """
    if isinstance(value, int) and abs(value) > _MOST_GIB:
        value = math.inf  # an integer may be too long for Python or a float
    expected = f"GPU {gpu}: {str(value)[:40]!r} is not a valid share of its memory; expected '24 GiB', '50%' or 0.5"
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise HostError(expected)
    if isinstance(value, str):
        found = _AMOUNT.fullmatch(value.strip())
        if found is None:
            raise HostError(expected)
        number, unit = float(found[1]), (found[2] or "").lower()
    else:
        number, unit = float(value), ""
    if not 0 <= number < _MOST_GIB or (unit == "%" and number > 100):
        raise HostError(expected)
    if unit == "%":
        return GpuShare(gpu, fraction=number / 100)
    return GpuShare(gpu, fraction=number) if not unit and number <= 1 else GpuShare(gpu, gib=number)


def without_server(host: Host | None, name: str, hidden_on: Mapping[int, float] | None = None) -> Host | None:
    """The host as if one of our servers had ended: what it certainly holds counts as free for its next start.

    ``hidden_on``: the GPUs on which it holds memory, with the most GiB that it may hold there. If the driver lists none
    of its processes (in some containers), up to that much of what no visible process holds counts as its own.
    """
    if host is None:
        return None
    if hidden_on is None or any(holder.server == name for gpu in host.gpus for holder in gpu.holders):
        hidden_on = {}
    return replace(host, gpus=tuple(_freed(gpu, name, hidden_on.get(gpu.index)) for gpu in host.gpus))


def _freed(gpu: Gpu, name: str, hidden: float | None) -> Gpu:
    parts = (_whole_freed(slice_gpu(gpu, part), name, hidden) for part in gpu.mig)
    mig = tuple(replace(part, free_gib=freed.free_gib) for part, freed in zip(gpu.mig, parts, strict=True))
    return replace(_whole_freed(gpu, name, hidden), mig=mig)


def _whole_freed(gpu: Gpu, name: str, hidden: float | None) -> Gpu:
    own = [holder for holder in gpu.holders if holder.server == name]
    if hidden is not None:
        own = [h for h in gpu.holders if not (h.server or h.seen or is_desktop(h))] or [Holder(0)]
    if not own:
        return gpu
    others = tuple(holder for holder in gpu.holders if holder not in own)
    if gpu.free_gib is None or gpu.used_gib is None:  # of memory shared with the CPU, it also has a part as a process
        return replace(gpu, used_by=others, free_gib=None)
    if hidden is not None and len(own) > 1:  # which of them is the server's is unknown
        return gpu
    gib = sum(holder.gib or 0.0 for holder in own)
    unreported = gpu.used_gib - gib - sum(holder.gib or 0.0 for holder in others)
    # Where others report no sizes either, it is unknown who holds what.
    alone = all(holder.gib is not None or is_desktop(holder) for holder in others)
    if alone and unreported > DRIVER_GIB and any(holder.gib is None for holder in own):
        gib += unreported
    gib = gib if hidden is None else min(gib, hidden)
    return replace(gpu, used_by=others, free_gib=gpu.free_gib + gib, used_gib=max(0.0, gpu.used_gib - gib))


# -- MIG slices -------------------------------------------------------------------------------------------------------


_FREE_SHARE = 0.9
"""A slice counts as free if this fraction of its memory is free."""


def slice_gpu(gpu: Gpu, part: MigInstance) -> Gpu:
    """A slice as a GPU of its size, with its free memory and processes. Unattributed memory counts as used."""
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
    """The slice to take without knowing more about the server: the largest free one, else the one with the most room.

    None if there is no slice of known size.
    """
    shares = tuple(shares)
    found = [(gpu, slice_gpu(gpu, part)) for gpu in gpus for part in gpu.mig if part.memory_gib is not None]

    def room(pair: tuple[Gpu, Gpu]) -> tuple[bool, float, int]:
        whole, one = pair
        # A GPU's share applies to all its slices together.
        size, give = one.memory_gib or 0.0, available_gib(replace(whole, free_gib=one.free_gib), shares)
        if give is None:
            return not is_held(one), size, -one.index
        return not is_held(one) and give >= size * _FREE_SHARE, give, -one.index

    best = max(found, key=room, default=None)
    return best[1] if best is not None else None


def on_slice(host: Host | None, devices: str | None, shares: Iterable[GpuShare] = ()) -> Host | None:
    """The host as seen by a server on a MIG slice: that slice is its only GPU.

    ``devices``: ``CUDA_VISIBLE_DEVICES``. If None and every usable GPU is in MIG mode, uses the slice that would be
    taken; if it names no slice, returns the host unchanged.
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
