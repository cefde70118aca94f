"""Which GPUs a launch gets: the best set or the one asked for, checked against what is free and one's own share.

A host in, a place or a sentence out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from vllm_console.fleet.api import NoPlaceError, UsageError
from vllm_console.fleet.gpus import DEFAULT_UTILIZATION
from vllm_launchers.machine.gpu.host import Host
from vllm_launchers.machine.gpu.matrix import spans
from vllm_launchers.machine.gpu.sharing import Share
from vllm_launchers.plan.model import Engine, EngineKind, Flags
from vllm_launchers.plan.placement import Placement, rank_placements, takes_uuids

AUTO, OFFERED = "auto", "offered"
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Place:
    """GPUs for a server. ``environment`` is set where indices do not say enough (a slice of a GPU)."""

    gpus: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    warnings: tuple[str, ...] = ()
    sets: tuple[Placement, ...] = ()


@dataclass(frozen=True, slots=True)
class Wanted:
    """A server as far as its place goes."""

    flags: Flags
    engine: Engine

    def size(self, name: str) -> int:
        """One of its parallel sizes."""
        value = self.flags.get(f"{name}-parallel-size", 1)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1

    @property
    def gpus(self) -> int:
        """How many GPUs it works on."""
        return self.size("tensor") * self.size("pipeline") * self.size("data")

    def need(self, host: Host) -> float | None:
        """GiB that vLLM wants free on each GPU, or it refuses to start; None where that depends on the GPU."""
        sizes = {gpu.memory_gib for gpu in host.gpus}
        share = self.flags.get("gpu-memory-utilization", DEFAULT_UTILIZATION)
        if len(sizes) != 1 or any(gpu.mig_mode for gpu in host.gpus) or "kv-cache-memory-bytes" in self.flags:
            return None
        memory = sizes.pop()
        if memory is None or isinstance(share, bool) or not isinstance(share, int | float):
            return None
        return round(share * memory, 1)


def find_place(
    wanted: Wanted, host: Host | None, place: str, gpus: Sequence[int], shares: Sequence[Share] = ()
) -> Place:
    """The GPUs for a launch; ``place`` and ``gpus`` as in `vllm_console.fleet.model.LaunchRequest`.

    Raises:
        NoPlaceError: nothing fits, or what was asked for goes beyond this person's share.
        UsageError: there is no such GPU.
    """
    if wanted.engine.build == "cpu" and place:
        return Place()
    if host is None or not host.gpus:
        if place == AUTO:
            problem = (host.problem if host is not None else "") or "no GPU is known of on this machine"
            raise NoPlaceError(f"no GPUs can be chosen: {problem}. Leave --gpus out, or name them")
        return Place(tuple(gpus))
    need = wanted.need(host)
    ranking = rank_placements(host, wanted.gpus, need_gib=need, shares=shares)
    sets = ranking.placements
    if place in (AUTO, OFFERED):
        best = ranking.best
        if best is None:
            hint = _lower_hint(sets[0], host, need) if sets else ""
            raise NoPlaceError(f"no GPUs can be given to it: {ranking.problem}{hint}", sets)
        return _place(best, wanted, host, sets, shares)
    if place:
        found = next((one for one in sets if one.mig is not None and one.mig.uuid == place), None)
        if found is None:
            raise NoPlaceError(f"there is no MIG slice {place[:60]} that this server could have", sets)
        return _place(found, wanted, host, sets, shares)
    if not gpus:
        return Place(sets=sets)
    return _asked_for(wanted, host, gpus, sets, shares)


def _asked_for(
    wanted: Wanted, host: Host, gpus: Sequence[int], sets: tuple[Placement, ...], shares: Sequence[Share]
) -> Place:
    """The GPUs that a person named: taken, with all there is to say of them; a share holds all the same."""
    known = [gpu.index for gpu in host.gpus]
    missing = [index for index in gpus if index not in known]
    if missing:
        raise UsageError(f"there is no GPU {spans(missing)} here; there are {spans(sorted(known))}")
    need = wanted.need(host)
    one = _only(host, gpus, need, shares)
    if one is None:
        lost = [gpu.label for gpu in host.gpus if gpu.index in gpus and (gpu.lost or gpu.mig_mode)]
        return Place(tuple(gpus), warnings=(f"{' and '.join(lost)} cannot be used whole",), sets=sets)
    place = replace(_place(one, wanted, host, sets, shares), gpus=tuple(gpus))
    if one.fits or need is None:
        return place
    unshared = _only(host, gpus, need, ())
    shared = any(share.gpu in gpus for share in shares) and (unshared is None or one.free_gib != unshared.free_gib)
    free = f"{one.free_gib or 0.0:.1f} GiB to give"
    short = (
        f"it takes {need:g} GiB of each GPU, and GPU {spans(list(gpus))} {'has' if len(gpus) == 1 else 'have'} {free}"
    )
    if shared:
        told = f" ({'; '.join(one.warnings)})" if one.warnings else ""
        raise NoPlaceError(f"{short}{told}{_lower_hint(one, host, need)}", sets)
    return replace(place, warnings=(f"{short}: vLLM will not start", *place.warnings))


def _only(host: Host, gpus: Sequence[int], need: float | None, shares: Sequence[Share]) -> Placement | None:
    """What is to be said of just this set."""
    chosen = replace(host, gpus=tuple(gpu for gpu in host.gpus if gpu.index in gpus))
    found = rank_placements(chosen, len(gpus), need_gib=need, shares=shares).placements
    return next((one for one in found if one.mig is None), None)


def _place(found: Placement, wanted: Wanted, host: Host, sets: tuple[Placement, ...], shares: Sequence[Share]) -> Place:
    warnings = list(found.warnings)
    size = wanted.size("tensor")
    if found.mig is None and 1 <= size < len(found.gpus):
        # Only the ranks of one tensor-parallel group exchange data at every layer: each group is judged by itself.
        groups = [found.gpus[start : start + size] for start in range(0, len(found.gpus), size)]
        told = [one.warnings for group in groups if (one := _only(host, group, None, shares)) is not None]
        warnings = list(dict.fromkeys(text for words in told for text in words))
    if found.mig is None:
        return Place(found.gpus, reason=found.reason, warnings=tuple(warnings), sets=sets)
    if wanted.engine.kind is EngineKind.VLLM and not takes_uuids(wanted.engine.release):
        warnings.append(f"vLLM {wanted.engine.version or 'of this age'} may not start on a MIG slice; 0.32 does")
    return Place(found.gpus, found.environment(), found.reason, tuple(warnings), sets)


def _lower_hint(found: Placement, host: Host, need: float | None) -> str:
    """The utilization with which the set would do, as the way out."""
    memory = min((gpu.memory_gib or 0.0 for gpu in host.gpus if gpu.index in found.gpus), default=0.0)
    if need is None or not memory or not found.free_gib:
        return ""
    fitting = math.floor(found.free_gib / memory * 100) / 100
    return f". It would do with --gpu-memory-utilization {fitting:g}, if the model fits into that" if fitting else ""


def kept_slice(environment: Mapping[str, str]) -> dict[str, str]:
    """What keeps a server on its MIG slice at a restart; empty for one on whole GPUs."""
    if not environment.get(VISIBLE, "").startswith("MIG-"):
        return {}
    return {name: value for name, value in environment.items() if name in (VISIBLE, "CUDA_DEVICE_ORDER")}
