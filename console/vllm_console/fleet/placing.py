"""Which GPUs a launch gets: the best set or the one asked for, checked against what is free and one's own share.

A host in, a place or a sentence out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from vllm_console.fleet.api import NoPlaceError, UsageError
from vllm_console.fleet.gpus import DEFAULT_UTILIZATION
from vllm_launchers.machine.gpu.host import Gpu, Host, with_claims
from vllm_launchers.machine.gpu.matrix import spans
from vllm_launchers.machine.gpu.sharing import Share, available_gib
from vllm_launchers.plan.model import Engine, EngineKind, Flags
from vllm_launchers.plan.placement import Need, Placement, rank_placements, takes_uuids
from vllm_launchers.plan.placement_words import need_words

AUTO, OFFERED = "auto", "offered"
VISIBLE = "CUDA_VISIBLE_DEVICES"
GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Place:
    """GPUs for a server. ``environment`` is set where indices do not say enough (a slice of a GPU).

    ``chosen`` is whether they were found for it, not named by a person: then it may be given others later.
    """

    gpus: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    warnings: tuple[str, ...] = ()
    sets: tuple[Placement, ...] = ()
    chosen: bool = False


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

    def need(self, gpu: Gpu) -> float | None:
        """GiB that vLLM wants free on a GPU (or a slice of that size), or it refuses to start; None if not known.

        It checks ``gpu-memory-utilization`` of all memory also where the KV cache's size is given in bytes.
        """
        share = self.flags.get("gpu-memory-utilization", DEFAULT_UTILIZATION)
        if gpu.memory_gib is None or isinstance(share, bool) or not isinstance(share, int | float):
            return None
        cache = self.flags.get("kv-cache-memory-bytes")
        least = cache / GIB if isinstance(cache, int) and not isinstance(cache, bool) else 0.0
        return round(max(share * gpu.memory_gib, least), 1)


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
    ranking = rank_placements(host, wanted.gpus, need_gib=wanted.need, shares=shares)
    sets = ranking.placements
    if place in (AUTO, OFFERED):
        best = ranking.best
        if best is None:
            hint = _lower_hint(sets[0], host, shares) if sets else ""
            raise NoPlaceError(f"no GPUs can be given to it: {ranking.problem}{hint}", sets)
        return replace(_place(best, wanted, host, sets, shares), chosen=True)
    if place:
        named = rank_placements(with_claims(host, {}), wanted.gpus, need_gib=wanted.need, shares=shares).placements
        found = next((one for one in named if one.mig is not None and one.mig.uuid == place), None)
        if found is None:
            raise NoPlaceError(f"there is no MIG slice {place[:60]} that this server could have", sets)
        return _place(found, wanted, host, sets, shares)
    if not gpus:
        return Place(sets=sets)
    return _asked_for(wanted, host, gpus, sets, shares)


def find_place_again(
    wanted: Wanted, host: Host | None, gpus: Sequence[int], *, chosen: bool, shares: Sequence[Share] = ()
) -> Place:
    """The GPUs for a restart: those that it has, unless it works on another number of them now.

    ``host`` is without what the server itself holds. Where its GPUs were ``chosen`` for it, others are; where a person
    named them, too few are refused and too many are kept.

    Raises:
        NoPlaceError: it needs more GPUs, and there are none for it or they are a person's to name.
    """
    kept = Place(tuple(gpus), chosen=chosen)
    if not gpus or wanted.gpus == len(gpus) or wanted.engine.build == "cpu":
        return kept
    if chosen and host is not None and host.gpus:
        found = find_place(wanted, host, AUTO, (), shares)
        if found.gpus == kept.gpus:
            return found
        told = f"it works on {wanted.gpus} now, so it moves from GPU {spans(list(gpus))} to {spans(list(found.gpus))}"
        return replace(found, warnings=(told, *found.warnings))
    if wanted.gpus > len(gpus):
        raise NoPlaceError(
            f"it has GPU {spans(list(gpus))} and would work on {wanted.gpus} now: stop it and start it under the same "
            "name with --gpus auto, or with as many named"
        )
    return kept


def _asked_for(
    wanted: Wanted, host: Host, gpus: Sequence[int], sets: tuple[Placement, ...], shares: Sequence[Share]
) -> Place:
    """The GPUs that a person named: taken, with all there is to say of them; a share holds all the same."""
    known = [gpu.index for gpu in host.gpus]
    missing = [index for index in gpus if index not in known]
    if missing:
        raise UsageError(f"there is no GPU {spans(missing)} here; there are {spans(sorted(known))}")
    one = _only(host, gpus, wanted.need, shares)
    if one is None:
        lost = [gpu.label for gpu in host.gpus if gpu.index in gpus and (gpu.lost or gpu.mig_mode)]
        return Place(tuple(gpus), warnings=(f"{' and '.join(lost)} cannot be used whole",), sets=sets)
    place = replace(_place(one, wanted, host, sets, shares), gpus=tuple(gpus))
    if one.fits or not one.needs_gib:
        return place
    unshared = _only(host, gpus, wanted.need, ())
    shared = any(share.gpu in gpus for share in shares) and (unshared is None or one.free_gib != unshared.free_gib)
    free = f"{one.free_gib or 0.0:.1f} GiB to give"
    short = (
        f"it takes {need_words(one.needs_gib)} of each GPU, and GPU {spans(list(gpus))} "
        f"{'has' if len(gpus) == 1 else 'have'} {free}"
    )
    if shared:
        told = f" ({'; '.join(one.warnings)})" if one.warnings else ""
        raise NoPlaceError(f"{short}{told}{_lower_hint(one, host, shares)}", sets)
    return replace(place, warnings=(f"{short}: vLLM will not start", *place.warnings))


def _only(host: Host, gpus: Sequence[int], need: Need, shares: Sequence[Share]) -> Placement | None:
    """What is to be said of just this set."""
    chosen = with_claims(replace(host, gpus=tuple(gpu for gpu in host.gpus if gpu.index in gpus)), {})
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


def _lower_hint(found: Placement, host: Host, shares: Sequence[Share]) -> str:
    """The utilization with which the set would do, as the way out."""
    if not found.needs_gib:
        return ""
    sizes = [(gpu.memory_gib, available_gib(gpu, shares)) for gpu in host.gpus if gpu.index in found.gpus]
    if found.mig is not None:
        sizes = [(found.mig.memory_gib, found.mig.free_gib)]
    parts = [free / memory for memory, free in sizes if memory and free]
    fitting = math.floor(min(parts) * 100) / 100 if parts and len(parts) == len(sizes) else 0.0
    return f". It would do with --gpu-memory-utilization {fitting:g}, if the model fits into that" if fitting else ""


def kept_slice(environment: Mapping[str, str]) -> dict[str, str]:
    """What keeps a server on its MIG slice at a restart; empty for one on whole GPUs."""
    if not environment.get(VISIBLE, "").startswith("MIG-"):
        return {}
    return {name: value for name, value in environment.items() if name in (VISIBLE, "CUDA_DEVICE_ORDER")}
