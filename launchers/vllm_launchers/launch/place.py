"""Chooses the GPUs of a launch, or checks the requested ones, by free memory and the user's share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, combinations

import msgspec
from msgspec.structs import replace

from vllm_launchers.engine_model.gpu_models import find_model
from vllm_launchers.errors import UsageError
from vllm_launchers.host.gpu.host import Gpu, Host, with_claims
from vllm_launchers.host.gpu.sharing import GpuShare, available_gib, holdings, slice_gpu, without_server
from vllm_launchers.host.gpu.topology import spans
from vllm_launchers.launch.errors import NoPlaceError, WayOut
from vllm_launchers.plan.budget.budget import HIGHEST_UTILIZATION, MemoryBudget, cuda_gib, needed_gib, share_within
from vllm_launchers.plan.budget.memory_flags import accepted_utilization
from vllm_launchers.plan.checks.request import local_ranks, on_ray
from vllm_launchers.plan.choices.choice import PARALLEL_FLAGS
from vllm_launchers.plan.flags import BYTES, DEVICE_ORDER, QUANTIZATION, TENSOR, UTILIZATION, VISIBLE, token_count
from vllm_launchers.plan.model import Plan
from vllm_launchers.plan.placement import SLACK_GIB, Need, Placement, format_needs, rank_placements, takes_uuids
from vllm_launchers.units import GIB, counted
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.changes import Changes, Flags, FlagValue, flag_text, whole_number

AUTO, OFFERED, NONE = "auto", "offered", "none"
PRETENDS = "SIMULATED_GPU"
"""Environment variable that names the GPU a simulated server imitates."""

MOST_STOPPED = 3
"""At most this many servers are named to be stopped for a launch."""


class Place(msgspec.Struct, frozen=True):
    """GPUs for a server. ``environment`` is set where indices are not enough (MIG slices).

    ``chosen``: they were chosen automatically, not named by a user, so a restart may choose others.
    """

    gpus: tuple[int, ...] = ()
    environment: Mapping[str, str] = msgspec.field(default_factory=dict)
    reason: str = ""
    warnings: tuple[str, ...] = ()
    sets: tuple[Placement, ...] = ()
    chosen: bool = False
    pretends: str = ""
    """The GPU that a simulated server imitates there; empty for a real server, or if unknown."""


class GpuRequest(msgspec.Struct, frozen=True):
    """The properties of a server that matter for placement."""

    flags: Flags
    engine: Engine
    memory: MemoryBudget | None = None
    """Its memory on one of the GPUs with the most free memory; None if unknown."""

    @property
    def gpus(self) -> int:
        """Number of GPUs of this machine that it uses."""
        return local_ranks(self.flags)

    def need(self, gpu: Gpu) -> float | None:
        """GiB that must be free on a GPU (or a slice of that size) for vLLM to start; None if unknown.

        vLLM checks ``gpu-memory-utilization`` × total memory even if the size of the KV cache is given, but then
        allocates only what that size needs.
        """
        if gpu.memory_gib is None:
            return None
        share = accepted_utilization(self.flags, self.engine.release)
        least, memory = (token_count(self.flags.get(BYTES)) or 0) / GIB, self.memory
        if memory is not None and memory.fixed:
            least = memory.taken_gib
        return max(needed_gib(gpu, share) or 0.0, least)


class GpuFinder(msgspec.Struct, frozen=True):
    """How to find the GPUs of a planned server. ``place`` is as in `vllm_launchers.launch.request.LaunchRequest`.

    ``recorded``: the host is a recorded one, whose GPUs a simulated server imitates.
    """

    place: str = ""
    again: bool = False
    """Whether it is a restart, with the same GPUs if possible."""
    chosen: bool = False
    """Whether the GPUs to restart on were chosen automatically."""
    recorded: bool = False
    beyond_shares: bool = False
    """Whether GPUs that a user named are used although they exceed this user's share."""

    def find(self, plan: Plan, gpus: tuple[int, ...], host: Host | None, shares: Sequence[GpuShare]) -> Place:
        """The GPUs for a plan that has none yet. ``gpus``: those that a user named, or those to restart on.

        Raises:
            NoPlaceError: nothing fits, or the requested GPUs exceed this user's share.
            UsageError: there is no such GPU, Ray chooses them, or the server is to imitate another one.
        """
        if on_ray(plan.engine, plan.flags):
            if not self.again and (gpus or self.place not in ("", AUTO, OFFERED)):
                raise UsageError("Ray chooses the GPUs of its workers: omit --gpus")
            return Place()
        wanted = GpuRequest(plan.flags, plan.engine, plan.memory)
        if self.again:
            found = find_place_again(wanted, host, gpus, chosen=self.chosen, shares=shares)
        else:
            found = find_place(wanted, host, self.place, gpus, shares, beyond_shares=self.beyond_shares)
        if not self.recorded or plan.engine.kind is not EngineKind.SIMULATED:
            return found
        # At a restart, the GPU that it has imitated so far came from its placement.
        return _imitated(found, host, "" if self.again else plan.environment.get(PRETENDS, ""))


def _imitated(found: Place, host: Host | None, pretends: str) -> Place:
    """The placement of a simulated server that imitates the GPU found there.

    Raises:
        UsageError: ``pretends`` names another GPU.
    """
    gpu = host.gpu(found.gpus[0]) if host is not None and found.gpus else None
    model = find_model(gpu.name) if gpu is not None and gpu.name else None
    if gpu is None or model is None or model.bf16_flops is None:
        return found
    if pretends and find_model(pretends) != model:
        raise UsageError(f"{PRETENDS}={pretends}, but the recorded host's {gpu.label} is selected; drop one of them")
    return replace(found, pretends=gpu.name or "")


def find_place(
    wanted: GpuRequest,
    host: Host | None,
    place: str,
    gpus: Sequence[int],
    shares: Sequence[GpuShare] = (),
    *,
    beyond_shares: bool = False,
) -> Place:
    """The GPUs for a launch; the options are as in `vllm_launchers.launch.request.LaunchRequest`.

    Raises:
        NoPlaceError: nothing fits, or the requested GPUs exceed this user's share.
        UsageError: there is no such GPU.
    """
    if wanted.engine.build == "cpu" and place:
        return Place()
    if host is None or not host.gpus:
        if place == AUTO:
            problem = (host.problem if host is not None else "") or "no GPU found on this machine"
            advice = WayOut(". Leave --gpus out, or name them", of_command=True)
            raise NoPlaceError(f"no GPUs can be chosen: {problem}", ways=(advice,))
        return Place(tuple(gpus))
    ranking = rank_placements(host, wanted.gpus, need_gib=wanted.need, shares=shares)
    sets = ranking.placements
    if place in (AUTO, OFFERED):
        best = ranking.best
        if best is None:
            raise NoPlaceError(ranking.problem, sets, tuple(_ways_out(sets, wanted, host, shares)) if sets else ())
        return replace(_place(best, wanted, host, sets, shares), chosen=True)
    if place:
        # A ranking of the whole host has few of the slices that are alike.
        named = tuple(replace(gpu, mig=(part,)) for gpu in host.gpus for part in gpu.mig if part.uuid == place)
        alone = with_claims(replace(host, gpus=named), {})
        ranked = rank_placements(alone, wanted.gpus, need_gib=wanted.need, shares=shares).placements
        found = next((one for one in ranked if one.mig is not None), None)
        if found is None:
            raise NoPlaceError(f"no MIG slice {place[:60]} that fits this server", sets)
        return _place(found, wanted, host, sets, shares)
    if not gpus:
        return Place(sets=sets)
    return _asked_for(wanted, host, gpus, sets, shares, beyond_shares=beyond_shares)


def find_place_again(
    wanted: GpuRequest, host: Host | None, gpus: Sequence[int], *, chosen: bool, shares: Sequence[GpuShare] = ()
) -> Place:
    """The GPUs for a restart: the same ones, unless the server now needs another number of GPUs.

    Then, GPUs that were ``chosen`` automatically are chosen again; of GPUs that a user named, too few are refused and
    too many are kept. What the server itself holds must count as free in ``host``.

    Raises:
        NoPlaceError: it needs more GPUs, and none are suitable or a user has to name them.
    """
    kept = Place(tuple(gpus), chosen=chosen)
    if not gpus or wanted.gpus == len(gpus) or wanted.engine.build == "cpu":
        return kept
    if chosen and host is not None and host.gpus:
        found = find_place(wanted, host, AUTO, (), shares)
        if found.gpus == kept.gpus:
            return found
        message = (
            f"needs {counted(wanted.gpus, 'GPU')} now: moves from GPU {spans(list(gpus))} to {spans(list(found.gpus))}"
        )
        return replace(found, warnings=(message, *found.warnings))
    if wanted.gpus > len(gpus):
        advice = WayOut(
            ": stop it and start it under the same name with --gpus auto, or with that many GPUs named", of_command=True
        )
        raise NoPlaceError(f"needs {wanted.gpus} GPUs but has GPU {spans(list(gpus))}", ways=(advice,))
    return kept


def _asked_for(
    wanted: GpuRequest,
    host: Host,
    gpus: Sequence[int],
    sets: tuple[Placement, ...],
    shares: Sequence[GpuShare],
    *,
    beyond_shares: bool,
) -> Place:
    """Accept the GPUs that a user named, with warnings. The user's share is enforced unless ``beyond_shares``."""
    known = [gpu.index for gpu in host.gpus]
    missing = [index for index in gpus if index not in known]
    if missing:
        raise UsageError(f"there is no GPU {spans(missing)} here; there are {spans(sorted(known))}")
    one = _only(host, gpus, wanted.need, shares)
    if one is None:
        lost = [gpu.label for gpu in host.gpus if gpu.index in gpus and (gpu.lost or gpu.mig_mode)]
        return Place(tuple(gpus), warnings=(f"{' and '.join(lost)} can't be used as a whole GPU",), sets=sets)
    place = replace(_place(one, wanted, host, sets, shares), gpus=tuple(gpus))
    if one.fits or not one.needs_gib:
        return place
    unshared = _only(host, gpus, wanted.need, ())
    shared = any(share.gpu in gpus for share in shares) and (unshared is None or one.free_gib != unshared.free_gib)
    free = f"{one.free_gib or 0.0:.1f} GiB available"
    short = (
        f"the server needs {format_needs(one.needs_gib)} on each GPU, but GPU {spans(list(gpus))} "
        f"{'has' if len(gpus) == 1 else 'have'} {free}"
    )
    if shared and not beyond_shares:
        warnings = f" ({'; '.join(one.warnings)})" if one.warnings else ""
        raise NoPlaceError(f"{short}{warnings}", sets, tuple(_lower_shares([one], wanted, host, shares)))
    return replace(place, warnings=(f"{short}: vLLM will not start", *place.warnings))


def _only(host: Host, gpus: Sequence[int], need: Need, shares: Sequence[GpuShare]) -> Placement | None:
    """The rating of this set alone; None if it cannot be used as whole GPUs."""
    chosen = with_claims(replace(host, gpus=tuple(gpu for gpu in host.gpus if gpu.index in gpus)), {})
    found = rank_placements(chosen, len(gpus), need_gib=need, shares=shares).placements
    return next((one for one in found if one.mig is None), None)


def _place(
    found: Placement, wanted: GpuRequest, host: Host, sets: tuple[Placement, ...], shares: Sequence[GpuShare]
) -> Place:
    warnings = list(found.warnings)
    size = whole_number(wanted.flags, "tensor-parallel-size")
    if found.mig is None and 1 <= size < len(found.gpus):
        # Only the ranks of one tensor-parallel group exchange data at every layer, so each group is rated separately.
        groups = [found.gpus[start : start + size] for start in range(0, len(found.gpus), size)]
        found_warnings = [one.warnings for group in groups if (one := _only(host, group, None, shares)) is not None]
        warnings = list(dict.fromkeys(text for texts in found_warnings for text in texts))
    if found.mig is None:
        return Place(found.gpus, reason=found.reason, warnings=tuple(warnings), sets=sets)
    if wanted.engine.kind is EngineKind.VLLM and not takes_uuids(wanted.engine.release):
        warnings.append(f"vLLM {wanted.engine.version or '(version unknown)'} may not start on a MIG slice; 0.32 does")
    return Place(found.gpus, found.environment(), found.reason, tuple(warnings), sets)


def _ways_out(
    sets: Sequence[Placement], wanted: GpuRequest, host: Host, shares: Sequence[GpuShare]
) -> Iterator[WayOut]:
    """What may make the launch fit, best first: a plan has to confirm it."""
    if BYTES in wanted.flags:
        yield WayOut(f". It would fit without --{BYTES}", fix=Changes(unset=(BYTES,)))
    yield from _lower_shares(sets, wanted, host, shares)
    yield from _fewer_gpus(wanted)
    yield from _stops(wanted, host, shares)
    yield WayOut(f": choose a smaller model and a lower --{UTILIZATION}")


def _lower_shares(
    sets: Sequence[Placement], wanted: GpuRequest, host: Host, shares: Sequence[GpuShare]
) -> Iterator[WayOut]:
    """The utilization that would fit on each set: alone, then with the layout, which may otherwise change with it."""
    layout: dict[str, FlagValue] = {TENSOR: whole_number(wanted.flags, TENSOR)}
    layout |= {name: wanted.flags[name] for name in (*PARALLEL_FLAGS, QUANTIZATION) if name in wanted.flags}
    unsure = ", if the model itself fits" if wanted.memory is None else ""
    for share in dict.fromkeys(_fitting_share(found, wanted, host, shares) for found in sets):
        for fix in ({UTILIZATION: share}, {UTILIZATION: share, **layout}) if share else ():
            words = " ".join(f"--{name} {flag_text(value)}" for name, value in fix.items())
            yield WayOut(f". It would fit with {words}{unsure}", fix=Changes(set=fix))


def _fewer_gpus(wanted: GpuRequest) -> Iterator[WayOut]:
    """Half as many GPUs, a quarter, and so on: more were chosen for the workload, but fewer may have room."""
    size = whole_number(wanted.flags, TENSOR) // 2
    while size:
        yield WayOut(f". It would fit with --{TENSOR} {size}", fix=Changes(set={TENSOR: size}))
        size //= 2


def _fitting_share(found: Placement, wanted: GpuRequest, host: Host, shares: Sequence[GpuShare]) -> float:
    """The utilization that would fit on a set. 0 if none does, or if the weights (or, with a KV cache of fixed size,
    the total) would exceed it.
    """
    memory = wanted.memory
    if not found.needs_gib:
        return 0.0
    gpus = [gpu for gpu in host.gpus if gpu.index in found.gpus]
    room = [(gpu, available_gib(gpu, shares)) for gpu in gpus]
    if found.mig is not None:
        room = [(slice_gpu(gpu, found.mig), found.mig.free_gib) for gpu in gpus]
    parts = [share for gpu, free in room if (share := share_within(gpu, free))]
    share = min(HIGHEST_UTILIZATION, min(parts, default=0.0))
    fitting = math.floor(share * 100) / 100 if len(parts) == len(room) else 0.0
    least = 0.0 if memory is None else memory.taken_gib if memory.fixed else memory.weights_gib
    return 0.0 if any(fitting * size <= least for gpu, _ in room if (size := cuda_gib(gpu))) else fitting


def _stops(wanted: GpuRequest, host: Host, shares: Sequence[GpuShare]) -> Iterator[WayOut]:
    """The fewest servers of this user whose memory would make room on enough whole GPUs."""
    ours = sorted({name for gpu in host.gpus for name in holdings(gpu).ours})
    for names in chain.from_iterable(combinations(ours, count) for count in range(1, MOST_STOPPED + 1)):
        freed: Host | None = host
        for name in names:
            freed = without_server(freed, name)
        if freed is not None and _roomy_gpus(wanted, freed, shares) >= wanted.gpus:
            yield WayOut(f": stop {' and '.join(names)} to make room", stop=names)


def _roomy_gpus(wanted: GpuRequest, host: Host, shares: Sequence[GpuShare]) -> int:
    """Number of whole GPUs with room for the server."""
    usable = [gpu for gpu in host.gpus if not (gpu.lost or gpu.mig_mode or gpu.claimed)]
    room = [(available_gib(gpu, shares), wanted.need(gpu)) for gpu in usable]
    return sum(free is not None and need is not None and free + SLACK_GIB >= need for free, need in room)


def kept_slice(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that keep a server on its MIG slice at a restart; empty for one on whole GPUs."""
    if not environment.get(VISIBLE, "").startswith("MIG-"):
        return {}
    return _devices(environment)


def kept_devices(environment: Mapping[str, str], gpus: Sequence[int]) -> dict[str, str]:
    """The variables that keep a server, or its standby, on its GPUs; empty if their indices do."""
    return kept_slice(environment) if gpus else _devices(environment)


def _devices(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name in (VISIBLE, DEVICE_ORDER)}
