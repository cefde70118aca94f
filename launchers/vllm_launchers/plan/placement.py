"""Ranks the sets of GPUs that a server could get, with reasons. Pure.

Sets are ranked by free memory, then by how closely their GPUs are connected: NVLink island, PCIe switch, NUMA node,
across sockets. A GPU filled by another user's process is never used silently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations

import msgspec
from msgspec.structs import replace

from vllm_launchers.host.gpu.host import Gpu, Host, Link, MigInstance, connected
from vllm_launchers.host.gpu.sharing import (
    GpuShare,
    available_gib,
    format_share,
    holdings,
    is_held,
    is_held_by_others,
    own_limit,
    slice_gpu,
)
from vllm_launchers.host.gpu.topology import LinkLevel, near_groups, nvlinks_in, pair_level, spans
from vllm_launchers.units import counted

MOST_SETS = 20_000
"""Up to this many sets, all are evaluated (8 of 16 GPUs: 12,870); beyond that, sets are grown from each GPU."""

IDLE_SHARE = 0.1
"""A GPU with at most this share of its memory in use counts as free if no need was given."""

SLACK_GIB = 0.05
"""Tolerance for comparing free memory: the driver does not report it more precisely."""

FREE_STEPS = 4
"""Steps per GiB in which free memory is compared, so that the order does not flicker."""

BESIDES = 100
"""This many free GPUs left behind at a PCIe switch weigh as much as one left behind in an NVLink island."""

MOST_OFFERED = 8
"""Maximum number of sets of GPUs to offer."""
MOST_EQUAL_SETS = 2
"""Maximum number of equally good sets to offer, which leaves room for other kinds."""

ALIKE_BY = 6
"""Sets are alike if this many leading parts of their keys are equal: all except the GPUs left behind, memory, and
indices."""

Need = float | Callable[[Gpu], float | None] | None
"""GiB that a server needs: the same on each GPU, or as a function of the GPU; None if unknown."""

UUID_SINCE = (0, 32, 0)
"""vLLM 0.32 resolves UUIDs; 0.9 to 0.20 are known to fail with a ValueError; releases in between were not tested."""


def takes_uuids(release: tuple[int, int, int] | None) -> bool:
    """Whether a vLLM release starts with UUIDs in ``CUDA_VISIBLE_DEVICES``; an unknown release counts as old."""
    return release is not None and release >= UUID_SINCE


class Placement(msgspec.Struct, frozen=True):
    """A set of GPUs for one server, in the order in which the server should see them.

    ``free_gib``: available memory of the fullest one. ``bandwidth_gbs``: bandwidth of the slowest pair. ``tier``: 0 if
    all are free (or have enough memory and no other users), 1 if others use them, 2 if the server does not fit.
    ``fits``: the set may be used, because the needed memory is free on each or, without a given need, nobody uses them.
    ``needs_gib``: needed memory on each of ``gpus``; empty if unknown. ``mig`` is set for a slice of a GPU.
    """

    gpus: tuple[int, ...]
    uuids: tuple[str | None, ...]
    level: LinkLevel | None
    bandwidth_gbs: float | None
    free_gib: float | None
    tier: int
    fits: bool
    reason: str
    warnings: tuple[str, ...] = ()
    mig: MigInstance | None = None
    needs_gib: tuple[float, ...] = ()

    def visible_devices(self, *, by_uuid: bool = False) -> str:
        """The value for ``CUDA_VISIBLE_DEVICES``: indices in bus order, or UUIDs.

        CUDA reads indices this way only with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``. A MIG slice has only a UUID. A GPU has
        none if the driver reported none.
        """
        if self.mig is not None:
            return self.mig.uuid
        known = [uuid for uuid in self.uuids if uuid]
        return ",".join(known if by_uuid and len(known) == len(self.gpus) else map(str, self.gpus))

    def environment(self) -> dict[str, str]:
        """The variables that restrict a server to these GPUs."""
        return {"CUDA_VISIBLE_DEVICES": self.visible_devices(), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


class PlacementRanking(msgspec.Struct, frozen=True):
    """The sets, best first. ``problem`` says in one sentence why none fits; empty if one does."""

    placements: tuple[Placement, ...]
    problem: str = ""

    @property
    def best(self) -> Placement | None:
        """The best set that fits, or None."""
        first = self.placements[0] if self.placements else None
        return first if first is not None and first.fits else None


class _Asked(msgspec.Struct, frozen=True):
    """The request, with cached lookups by GPU index."""

    host: Host
    gpus: Mapping[int, Gpu]
    links: Mapping[tuple[int, int], Link]
    tiers: Mapping[int, int]
    frees: Mapping[int, float | None]
    needs: Mapping[int, float | None]
    held: frozenset[int]
    shares: tuple[GpuShare, ...]

    def link(self, a: int, b: int) -> Link | None:
        return self.links.get((a, b) if a < b else (b, a))

    def level(self, a: int, b: int) -> LinkLevel:
        return pair_level(self.host, a, b, self.link(a, b))


def rank_placements(
    host: Host, size: int, *, need_gib: Need = None, shares: Iterable[GpuShare] = ()
) -> PlacementRanking:
    """The best sets of ``size`` GPUs for one tensor-parallel server, at most `MOST_OFFERED` of them.

    ``need_gib``: memory that the server needs on each GPU, or a function of the GPU (called with a GPU of the slice's
    size for a MIG slice). Without it, a GPU counts as free if nearly all of its memory is. Lost GPUs and those claimed
    by other users are left out. GPUs in MIG mode provide slices, for single-GPU servers only.
    """
    if size < 1:
        return PlacementRanking((), "a server needs at least one GPU")
    asked = _ask(host, need_gib, tuple(shares))
    found: list[tuple[_Key, Placement | Sequence[int]]] = [
        (_key(asked, chosen), chosen) for chosen in _sets(asked, sorted(asked.gpus), size)
    ]
    if size == 1:
        sliced = [gpu for gpu in host.gpus if gpu.mig_mode and not (gpu.lost or gpu.claimed)]
        found += [_slice(asked, need_gib, gpu, part) for gpu in sliced for part in gpu.mig]
    found.sort(key=lambda pair: pair[0])
    choices = _different(asked, found)
    placements = tuple(found if isinstance(found, Placement) else _placement(asked, found) for found in choices)
    return PlacementRanking(placements, _problem(asked, size, placements))


_Key = tuple[float, ...]


def _different(
    asked: _Asked, ranked: Sequence[tuple[_Key, Placement | Sequence[int]]]
) -> list[Placement | Sequence[int]]:
    """The first `MOST_OFFERED` choices, with at most `MOST_EQUAL_SETS` of those that differ only in their GPUs."""
    chosen: list[Placement | Sequence[int]] = []
    seen: dict[tuple[object, ...], int] = {}
    for key, choice in ranked:
        if isinstance(choice, Placement):
            kind: tuple[object, ...] = key
        else:
            kind = (*key[:ALIKE_BY], *sorted(asked.gpus[index].name or "" for index in choice))
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= MOST_EQUAL_SETS and len(chosen) < MOST_OFFERED:
            chosen.append(choice)
    return chosen


def _needed(need: Need, gpu: Gpu) -> float | None:
    return need(gpu) if callable(need) else need


def _ask(host: Host, need: Need, shares: tuple[GpuShare, ...]) -> _Asked:
    usable = {gpu.index: gpu for gpu in host.gpus if not (gpu.lost or gpu.mig_mode or gpu.claimed)}
    frees = {index: available_gib(gpu, shares) for index, gpu in usable.items()}
    needs = {index: _needed(need, gpu) for index, gpu in usable.items()}
    return _Asked(
        host=host,
        gpus=usable,
        links={(min(link.a, link.b), max(link.a, link.b)): link for link in host.links},
        tiers={index: _tier(needs[index], gpu, frees[index], shares) for index, gpu in usable.items()},
        frees=frees,
        needs=needs,
        held=frozenset(index for index, gpu in usable.items() if is_held(gpu)),
        shares=shares,
    )


def _tier(need: float | None, gpu: Gpu, free: float | None, shares: Iterable[GpuShare] = ()) -> int:
    """0 if the GPU is free (or has enough memory and no other users), 1 if it is shared, 2 if it is too full."""
    if need is not None:
        return 2 if free is not None and free + SLACK_GIB < need else int(is_held_by_others(gpu))
    # With a share, the rest of the GPU is not available to this user.
    limit = own_limit(gpu, shares)
    whole = limit if limit is not None else gpu.memory_gib
    if free is None or whole is None:
        return int(is_held(gpu))
    if free <= 0 or free < whole * IDLE_SHARE:
        return 2
    return int(is_held(gpu) or free < whole * (1 - IDLE_SHARE))


def _all_known(needs: Iterable[float | None]) -> tuple[float, ...]:
    """The needs, or none if one is unknown."""
    found = tuple(needs)
    return tuple(need for need in found if need is not None) if None not in found else ()


def _fits(needs: Sequence[float], tier: int) -> bool:
    return tier == 0 or (tier == 1 and bool(needs))


def _key(asked: _Asked, indices: Sequence[int]) -> _Key:
    """Sort key of a set: free, same GPU model, close, high bandwidth, then what leaves most for the next server."""
    level, bandwidth = set_level(asked.level, indices), _bandwidth(asked, indices)
    return (
        max(asked.tiers[index] for index in indices),
        float(any(index in asked.held for index in indices)),
        float(len({asked.gpus[index].name for index in indices}) > 1),
        float(level if level is not None else 0),
        float(sum(asked.level(a, b) for a, b in combinations(indices, 2))),
        -(bandwidth if bandwidth is not None else _fewest_nvlinks(asked, indices)),
        _broken(asked, indices),
        _steps(min(asked.frees[index] or 0.0 for index in indices)),
        *map(float, indices),
    )


def _steps(free: float | None) -> float:
    """Free memory as part of a sort key: most first, unknown last."""
    return -math.floor(FREE_STEPS * (free or 0.0))


def _placement(asked: _Asked, indices: Sequence[int]) -> Placement:
    gpus = [asked.gpus[index] for index in indices]
    level, bandwidth = set_level(asked.level, indices), _bandwidth(asked, indices)
    frees = [asked.frees[index] for index in indices]
    known = [free for free in frees if free is not None]
    least = min(known) if len(known) == len(frees) else None
    tier = max(asked.tiers[index] for index in indices)
    order = _in_groups(asked, indices)
    needs = _all_known(asked.needs[index] for index in order)
    sentences = held_by(gpus)
    sentences += [words for gpu in gpus if (words := format_share(gpu, asked.shares))]
    if level is not None and level >= LinkLevel.SYS:
        sentences.append(crossing(order, near_groups(indices, asked.level, asked.host.links), level))
    if len({gpu.name for gpu in gpus if gpu.name}) > 1:
        sentences.append("mixed GPUs: the slowest limits speed, the smallest limits memory")
    return Placement(
        gpus=tuple(order),
        uuids=tuple(asked.gpus[index].uuid for index in order),
        level=level,
        bandwidth_gbs=bandwidth,
        free_gib=least,
        tier=tier,
        fits=_fits(needs, tier),
        reason=reason_for(gpus, level, _pair_links(asked, indices), bandwidth, least, tier),
        warnings=tuple(sentences),
        needs_gib=needs,
    )


def set_level(level: Callable[[int, int], LinkLevel], indices: Sequence[int]) -> LinkLevel | None:
    """The link level of the most distant pair of a set; None for a single GPU.

    If NVLinks connect all GPUs, though not every pair directly, they form a mesh: NCCL's rings stay on NVLink.
    """
    pairs = list(combinations(indices, 2))
    if not pairs:
        return None
    levels = {pair: level(*pair) for pair in pairs}
    farthest = max(levels.values())
    if farthest is not LinkLevel.NVLINK:
        groups = connected(indices, [pair for pair, found in levels.items() if found is LinkLevel.NVLINK])
        if len(groups) == 1:
            return LinkLevel.MESH
    return farthest


def _pair_links(asked: _Asked, indices: Sequence[int]) -> list[Link]:
    return [link for a, b in combinations(indices, 2) if (link := asked.link(a, b)) is not None]


def _bandwidth(asked: _Asked, indices: Sequence[int]) -> float | None:
    """The bandwidth of the slowest pair; for a mesh, the slowest NVLink."""
    links = _pair_links(asked, indices)
    if set_level(asked.level, indices) is LinkLevel.MESH:
        links = [link for link in links if nvlinks_in(link.kind)]
    known = [link.bandwidth_gbs for link in links]
    return min((value for value in known if value is not None), default=None) if None not in known else None


def _fewest_nvlinks(asked: _Asked, indices: Sequence[int]) -> float:
    """Number of NVLinks of the pair with the fewest, if their bandwidth is unknown; 0 if a pair has none."""
    return float(min((nvlinks_in(link.kind) for link in _pair_links(asked, indices)), default=0))


def _broken(asked: _Asked, indices: Sequence[int]) -> float:
    """Weighted number of free GPUs left behind in the NVLink islands and at the PCIe switches that the set uses.

    Keeps free islands, and free pairs at a switch, intact for the next server.
    """
    chosen = set(indices)
    island = {i for found in asked.host.islands if chosen & set(found) for i in found}
    left = [i for i in asked.gpus if i not in chosen and asked.tiers[i] == 0 and i not in asked.held]
    switch = [i for i in left if i not in island and any(asked.level(i, c) <= LinkLevel.PXB for c in chosen)]
    return sum(1.0 for i in left if i in island) + len(switch) / BESIDES


def _in_groups(asked: _Asked, indices: Sequence[int]) -> list[int]:
    """Order the set so that neighbors are adjacent: then the tensor-parallel ranks of a pipeline stage are close."""
    return [index for group in near_groups(indices, asked.level, asked.host.links) for index in group]


def _sets(asked: _Asked, usable: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    if math.comb(len(usable), size) <= MOST_SETS:
        yield from combinations(usable, size)
        return
    seen: set[tuple[int, ...]] = set()
    for start in usable:
        chosen = [start]
        while len(chosen) < size:
            rest = [index for index in usable if index not in chosen]
            chosen.append(min(rest, key=lambda i: (asked.tiers[i], sum(asked.level(i, c) for c in chosen), i)))
        if (found := tuple(sorted(chosen))) not in seen:
            seen.add(found)
            yield found


def _slice(asked: _Asked, need: Need, gpu: Gpu, part: MigInstance) -> tuple[_Key, Placement]:
    """A MIG slice as a placement for a single-GPU server. A user's share applies to all slices of a GPU together."""
    seen = slice_gpu(gpu, part)
    within = replace(gpu, free_gib=part.free_gib)
    limited, give = format_share(within, asked.shares), available_gib(within, asked.shares)
    needs = _all_known([_needed(need, seen)])
    tier = _tier(needs[0] if needs else None, seen, give)
    title = f"{gpu.index}: MIG slice {part.profile or part.uuid}"
    free = "free memory unknown" if give is None else f"{give:.1f} GiB free"
    key = (tier, float(is_held(seen)), 0.0, 0.0, 0.0, 0.0, 0.0, _steps(give), float(gpu.index))
    return key, Placement(
        gpus=(gpu.index,),
        uuids=(part.uuid,),
        level=None,
        bandwidth_gbs=None,
        free_gib=give,
        tier=tier,
        fits=_fits(needs, tier),
        reason=f"{title}, {free}" + ("" if tier < 2 else ", not enough"),
        warnings=(*held_by([seen]), *filter(None, [limited])),
        mig=part,
        needs_gib=needs,
    )


def _problem(asked: _Asked, size: int, placements: Sequence[Placement]) -> str:
    """Why nothing fits, in one sentence."""
    host = asked.host
    if not host.gpus:
        return host.problem or "no GPU on this machine"
    if not placements:
        lost = [gpu.index for gpu in host.gpus if gpu.lost]
        sliced = [gpu.index for gpu in host.gpus if gpu.mig_mode and not gpu.lost]
        why = [f"GPU {spans(lost)} lost"] if lost else []
        why += [f"GPU {gpu.index} {gpu.claimed}" for gpu in host.gpus if gpu.claimed]
        why += [f"GPU {spans(sliced)} in MIG mode (slices serve single-GPU servers only)"] if sliced else []
        return f"{counted(size, 'GPU')} needed, {len(asked.gpus)} usable" + (f" ({'; '.join(why)})" if why else "")
    if placements[0].fits:
        return ""
    nearest = placements[0]
    free = "unknown" if nearest.free_gib is None else f"{nearest.free_gib:.1f} GiB"
    wanted = f"{format_needs(nearest.needs_gib)} free" if nearest.needs_gib else "enough free memory"
    held = f" ({holder})" if (holder := _tightest_held(asked, nearest)) else ""
    claimed = "".join(f"; GPU {gpu.index} {gpu.claimed}" for gpu in host.gpus if gpu.claimed)
    best = f"GPU {spans(nearest.gpus)}"
    if nearest.mig is not None:
        best += f" (MIG slice {nearest.mig.profile or nearest.mig.uuid})"
    comes, least = ("comes", "") if size == 1 else ("come", "at least ")
    what = "a GPU" if size == 1 else f"{size} GPUs, each"
    return f"the server needs {what} with {wanted}; {best} {comes} closest with {least}{free} available{held}{claimed}"


def _tightest_held(asked: _Asked, nearest: Placement) -> str:
    """Who holds memory on the GPU of a set that lacks the most; if nobody does, the first warning, as for a slice."""
    held: list[str] = []
    if nearest.mig is None:
        needs = nearest.needs_gib or (0.0,) * len(nearest.gpus)
        lacks = {index: need - (asked.frees[index] or 0.0) for index, need in zip(nearest.gpus, needs, strict=True)}
        held = held_by([asked.gpus[max(lacks, key=lambda index: lacks[index])]])
    return next(iter((*held, *nearest.warnings)), "")


# -- descriptions of a set of GPUs ------------------------------------------------------------------------------------


MOST_NAMED = 3
IDLE_PERCENT = 10
"""A GPU with lower utilization renders at most a desktop."""


def reason_for(
    gpus: Sequence[Gpu],
    level: LinkLevel | None,
    links: Sequence[Link],
    bandwidth: float | None,
    free: float | None,
    tier: int,
) -> str:
    """Describe a set in one line: ``0,1: NVLink ×4, 112 GB/s, both idle``."""
    parts = [] if level is None else [format_link(level, links)]
    if bandwidth is not None:
        # Rounded down, since the displayed bandwidth must not exceed the link's.
        parts.append(f"{int(bandwidth)} GB/s")
    return f"{spans([gpu.index for gpu in gpus])}: " + ", ".join([*parts, _state(gpus, free, tier)])


def format_link(level: LinkLevel, links: Sequence[Link]) -> str:
    """``NVLink ×4``, ``NVSwitch ×18``, ``one PCIe switch (PIX)``."""
    if level is LinkLevel.NVLINK:
        counts = [nvlinks_in(link.kind) for link in links]
        name = "NVSwitch" if links and all(link.switch for link in links) else "NVLink"
        fewest = min(counts, default=0)
        return f"{name} ×{fewest}" if fewest else name
    kind = f" ({level.name})" if LinkLevel.PIX <= level <= LinkLevel.SYS else ""
    return f"{level.words}{kind}"


def _state(gpus: Sequence[Gpu], free: float | None, tier: int) -> str:
    held = any(is_held(gpu) for gpu in gpus)
    working = any((gpu.utilization or 0) > IDLE_PERCENT for gpu in gpus)
    if free is None:
        return "free memory unknown"
    if not held and tier == 0 and not working:
        many = {1: "idle", 2: "both idle"}.get(len(gpus), "all idle")
        return f"{many}, {free:.1f} GiB free" if len(gpus) == 1 else many
    each = "" if len(gpus) == 1 else "at least "
    return f"{each}{free:.1f} GiB free" + ("" if tier < 2 else ", not enough")


def format_needs(needs: Sequence[float]) -> str:
    """Memory needed on each GPU: ``43.2 GiB``, or ``21.6 to 43.2 GiB`` if they differ.

    Rounded up, so that a shortfall is visible next to the available memory.
    """
    rounded = [math.ceil(round(need * 10, 3)) / 10 for need in needs]
    return " to ".join(f"{need:g}" for need in sorted({min(rounded), max(rounded)})) + " GiB"


def held_by(gpus: Sequence[Gpu]) -> list[str]:
    """One sentence per GPU in use: ``GPU 1: anna holds 38.2 GiB``."""
    return [text for gpu in gpus if is_held(gpu) and (text := format_held(gpu))]


def format_held(gpu: Gpu) -> str:
    """Who holds memory on a GPU now, largest first; empty if nobody does."""
    held = holdings(gpu)
    named = [(f"{user} holds {gib:.1f} GiB", gib) for user, gib in held.others.items()]
    named += [(f"{server} (yours) holds {gib:.1f} GiB", gib) for server, gib in held.ours.items()]
    if held.unseen:
        named.append((f"hidden processes hold {held.unseen:.1f} GiB", held.unseen))
    named.sort(key=lambda pair: -pair[1])
    if not named:
        return ""
    more = f", and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    return f"GPU {gpu.index}: " + ", ".join(text for text, _ in named[:MOST_NAMED]) + more


def crossing(indices: Sequence[int], groups: Sequence[Sequence[int]], level: LinkLevel) -> str:
    """Why tensor parallelism is slow over this set, and what helps."""
    where = spans(sorted(indices))
    if level is LinkLevel.UNKNOWN:
        return f"links between {where} unknown; tensor parallelism is fast only over NVLink or one PCIe switch"
    problem = f"tensor parallelism over {where} crosses the CPU interconnect at every layer"
    sizes = {len(group) for group in groups}
    inner, stages = len(groups[0]), len(groups)
    if len(sizes) == 1 and stages > 1:
        flags = f"--tensor-parallel-size {inner} --pipeline-parallel-size {stages}"
        apart = " and ".join(spans(group) for group in groups) if stages <= 4 else f"{inner} GPU each"
        return f"{problem}; use {flags}, or {stages} servers on {apart} if the model fits"
    flags = f"--tensor-parallel-size 1 --pipeline-parallel-size {len(indices)}"
    return f"{problem}; use {flags}, or several smaller servers if the model fits"
