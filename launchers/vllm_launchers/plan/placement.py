"""Which GPUs to give a server: ranks the sets for a tensor-parallel size and says why. Pure.

First what is free now, then how near the GPUs of a set are to each other: one NVLink island before one PCIe switch
before one NUMA node before across sockets. A GPU that somebody else's process fills is never taken in silence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from vllm_launchers.machine.gpu.host import Gpu, Host, Link, MigInstance, connected
from vllm_launchers.machine.gpu.links import Level, level_of, nvlinks_in, pcie_groups
from vllm_launchers.machine.gpu.matrix import spans
from vllm_launchers.machine.gpu.sharing import Share, available_gib, is_held, is_held_by_others, share_words
from vllm_launchers.plan.placement_words import crossing, held_by, need_words, reason_for

MOST_SETS = 20_000
"""Up to so many sets are all looked at (16 GPUs, 8 of them: 12,870); beyond that, sets are grown from each GPU."""

IDLE_SHARE = 0.1
"""A GPU with no more than this share of its memory held is taken for free when no need was stated."""

FREE_STEPS = 4
"""Free memory is compared in quarters of a GiB, so that the order does not flicker."""

BESIDES = 100
"""So many GPUs behind one's PCIe switch count as much as one of an NVLink island."""

ALIKE = 2
"""Of sets that are equally good so many are offered, to leave room for other kinds."""

ALIKE_BY = 6
"""By so many leading parts of their keys sets are alike: all but what they leave behind, memory and indices."""

Need = float | Callable[[Gpu], float | None] | None
"""GiB that a server takes: the same of each GPU, or depending on the GPU; None where it is not known."""

UUID_SINCE = (0, 32, 0)
"""vLLM 0.32 looks UUIDs up; of earlier ones 0.9 to 0.20 are known to end in a ValueError, those between are unknown."""


def takes_uuids(release: tuple[int, int, int] | None) -> bool:
    """Whether a release of vLLM starts with UUIDs in ``CUDA_VISIBLE_DEVICES``; an unknown one is taken for old."""
    return release is not None and release >= UUID_SINCE


@dataclass(frozen=True, slots=True)
class Placement:
    """A set of GPUs for one server, in the order in which the server should see them.

    ``free_gib`` is what the fullest of them has to give; ``bandwidth_gbs`` what the slowest pair exchanges. ``tier``
    is 0 where all are free (or have what was asked for with nobody else on them), 1 where somebody is on them, 2 where
    it does not fit. ``fits`` is whether it may be taken: what was asked for is free on each, or, where no amount was
    asked for, nobody is on them. ``needs_gib`` is what is taken of each of ``gpus``; empty where it is not known.
    ``mig`` is set for a slice of a GPU.
    """

    gpus: tuple[int, ...]
    uuids: tuple[str | None, ...]
    level: Level | None
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

        Indices mean the same to CUDA only with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``. A MIG slice has a UUID only; so has
        none a GPU whose driver reported none.
        """
        if self.mig is not None:
            return self.mig.uuid
        known = [uuid for uuid in self.uuids if uuid]
        return ",".join(known if by_uuid and len(known) == len(self.gpus) else map(str, self.gpus))

    def environment(self, *, by_uuid: bool = False) -> dict[str, str]:
        """What a server's environment needs so that it gets these GPUs and no others."""
        return {"CUDA_VISIBLE_DEVICES": self.visible_devices(by_uuid=by_uuid), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@dataclass(frozen=True, slots=True)
class Ranking:
    """The sets, the best first. ``problem`` says in one sentence why none fits, or nothing."""

    placements: tuple[Placement, ...]
    problem: str = ""

    @property
    def best(self) -> Placement | None:
        """The best set that fits, or None."""
        first = self.placements[0] if self.placements else None
        return first if first is not None and first.fits else None


@dataclass(frozen=True, slots=True)
class _Asked:
    """The question, and what is looked up again and again to answer it: all but the rest by GPU index."""

    host: Host
    gpus: Mapping[int, Gpu]
    links: Mapping[tuple[int, int], Link]
    tiers: Mapping[int, int]
    frees: Mapping[int, float | None]
    needs: Mapping[int, float | None]
    held: frozenset[int]
    shares: tuple[Share, ...]

    def link(self, a: int, b: int) -> Link | None:
        return self.links.get((a, b) if a < b else (b, a))

    def level(self, a: int, b: int) -> Level:
        link = self.link(a, b)
        if link is not None:
            return level_of(link.kind)
        together = any(a in island and b in island for island in self.host.islands)
        return Level.NVLINK if together else Level.UNKNOWN


def rank_placements(
    host: Host, size: int, *, need_gib: Need = None, shares: Iterable[Share] = (), most: int = 8
) -> Ranking:
    """The best sets of ``size`` GPUs for one tensor-parallel server, at most ``most`` of them.

    ``need_gib`` is what the server takes of each GPU, or says so for a GPU (for a MIG slice it is given a GPU of the
    slice's size); without it a GPU counts as free when nearly all of it is.
    Lost GPUs, and those that somebody else has claimed, are left out; GPUs in MIG mode give their slices to servers on
    one GPU only.
    """
    if size < 1:
        return Ranking((), "a server needs at least one GPU")
    asked = _ask(host, need_gib, tuple(shares))
    found: list[tuple[_Key, Placement | Sequence[int]]] = [
        (_key(asked, chosen), chosen) for chosen in _sets(asked, sorted(asked.gpus), size)
    ]
    if size == 1:
        sliced = [gpu for gpu in host.gpus if gpu.mig_mode and not (gpu.lost or gpu.claimed)]
        found += [_slice(asked, need_gib, gpu, part) for gpu in sliced for part in gpu.mig]
    found.sort(key=lambda pair: pair[0])
    choices = _different(asked, found, most)
    placements = tuple(found if isinstance(found, Placement) else _placement(asked, found) for found in choices)
    return Ranking(placements, _problem(asked, size, placements))


_Key = tuple[float, ...]


def _different(
    asked: _Asked, ranked: Sequence[tuple[_Key, Placement | Sequence[int]]], most: int
) -> list[Placement | Sequence[int]]:
    """The first ``most`` choices, of those that differ in nothing but which GPUs they name `ALIKE` each."""
    chosen: list[Placement | Sequence[int]] = []
    seen: dict[tuple[object, ...], int] = {}
    for key, choice in ranked:
        if isinstance(choice, Placement):
            kind: tuple[object, ...] = key
        else:
            kind = (*key[:ALIKE_BY], *sorted(asked.gpus[index].name or "" for index in choice))
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= ALIKE and len(chosen) < most:
            chosen.append(choice)
    return chosen


def _needed(need: Need, gpu: Gpu) -> float | None:
    return need(gpu) if callable(need) else need


def _ask(host: Host, need: Need, shares: tuple[Share, ...]) -> _Asked:
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


def _tier(need: float | None, gpu: Gpu, free: float | None, shares: Iterable[Share] = ()) -> int:
    """0 where it is free (or has what is needed, and nobody else is on it), 1 where it is shared, 2 where too full."""
    if need is not None:
        return 2 if free is not None and free < need else int(is_held_by_others(gpu))
    # Within a share the rest of the GPU is not ours to count.
    limit = min((value for s in shares if s.gpu == gpu.index and (value := s.limit(gpu)) is not None), default=None)
    whole = limit if limit is not None else gpu.memory_gib
    if free is None or whole is None:
        return int(is_held(gpu))
    if free <= 0 or free < whole * IDLE_SHARE:
        return 2
    return int(is_held(gpu) or free < whole * (1 - IDLE_SHARE))


def _all_known(needs: Iterable[float | None]) -> tuple[float, ...]:
    """The needs, or none where one is not known."""
    found = tuple(needs)
    return tuple(need for need in found if need is not None) if None not in found else ()


def _fits(needs: Sequence[float], tier: int) -> bool:
    return tier == 0 or (tier == 1 and bool(needs))


def _key(asked: _Asked, indices: Sequence[int]) -> _Key:
    """A set's place in the order: free now, alike, near, wide; then what leaves most to the next server."""
    level, bandwidth = set_level(asked.level, indices), _bandwidth(asked, indices)
    return (
        max(asked.tiers[index] for index in indices),
        float(any(index in asked.held for index in indices)),
        float(len({asked.gpus[index].name for index in indices}) > 1),
        float(level if level is not None else 0),
        float(sum(asked.level(a, b) for a, b in combinations(indices, 2))),
        -(bandwidth if bandwidth is not None else _fewest_nvlinks(asked, indices)),
        _broken(asked, indices),
        -math.floor(FREE_STEPS * min(asked.frees[index] or 0.0 for index in indices)),
        *map(float, indices),
    )


def _placement(asked: _Asked, indices: Sequence[int]) -> Placement:
    """What is said of a set."""
    gpus = [asked.gpus[index] for index in indices]
    level, bandwidth = set_level(asked.level, indices), _bandwidth(asked, indices)
    frees = [asked.frees[index] for index in indices]
    known = [free for free in frees if free is not None]
    least = min(known) if len(known) == len(frees) else None
    tier = max(asked.tiers[index] for index in indices)
    order = _in_groups(asked, indices)
    needs = _all_known(asked.needs[index] for index in order)
    sentences = held_by(gpus)
    sentences += [words for gpu in gpus if (words := share_words(gpu, asked.shares))]
    if level is not None and level >= Level.SYS:
        sentences.append(crossing(order, _near_groups(asked, indices), level))
    if len({gpu.name for gpu in gpus if gpu.name}) > 1:
        sentences.append("the GPUs differ: the slowest sets the pace, the smallest sets the memory")
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


def set_level(level: Callable[[int, int], Level], indices: Sequence[int]) -> Level | None:
    """The level of the farthest pair of a set; None for one GPU.

    Where NVLinks connect all of them though not every pair directly, it is a mesh: NCCL's rings stay on NVLink.
    """
    pairs = list(combinations(indices, 2))
    if not pairs:
        return None
    levels = {pair: level(*pair) for pair in pairs}
    farthest = max(levels.values())
    if farthest is not Level.NVLINK:
        groups = connected(indices, [pair for pair, found in levels.items() if found is Level.NVLINK])
        if len(groups) == 1:
            return Level.MESH
    return farthest


def _pair_links(asked: _Asked, indices: Sequence[int]) -> list[Link]:
    return [link for a, b in combinations(indices, 2) if (link := asked.link(a, b)) is not None]


def _bandwidth(asked: _Asked, indices: Sequence[int]) -> float | None:
    """What the slowest pair exchanges; of a mesh, the slowest NVLink."""
    links = _pair_links(asked, indices)
    if set_level(asked.level, indices) is Level.MESH:
        links = [link for link in links if nvlinks_in(link.kind)]
    known = [link.bandwidth_gbs for link in links]
    return min((value for value in known if value is not None), default=None) if None not in known else None


def _fewest_nvlinks(asked: _Asked, indices: Sequence[int]) -> float:
    """NVLinks of the pair with the fewest, where nobody knows what one carries; 0 where a pair has none."""
    return float(min((nvlinks_in(link.kind) for link in _pair_links(asked, indices)), default=0))


def _broken(asked: _Asked, indices: Sequence[int]) -> float:
    """How many free GPUs it leaves behind in the islands it touches, then behind the PCIe switches.

    Free islands, and free pairs behind a switch, stay whole for the next server.
    """
    chosen = set(indices)
    island = {i for found in asked.host.islands if chosen & set(found) for i in found}
    left = [i for i in asked.gpus if i not in chosen and asked.tiers[i] == 0 and i not in asked.held]
    switch = [i for i in left if i not in island and any(asked.level(i, c) <= Level.PXB for c in chosen)]
    return sum(1.0 for i in left if i in island) + len(switch) / BESIDES


def _near_groups(asked: _Asked, indices: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The set's parts that do not cross the CPU interconnect, or its NVLink islands where these are finer."""
    nvlink = connected(indices, [p for p in combinations(indices, 2) if asked.level(*p) is Level.NVLINK])
    groups = pcie_groups(indices, asked.host.links)
    return groups if len(nvlink) == len(indices) else nvlink


def _in_groups(asked: _Asked, indices: Sequence[int]) -> list[int]:
    """The order for the server: neighbours side by side, so that tensor-parallel ranks of a pipeline stage are near."""
    return [index for group in _near_groups(asked, indices) for index in group]


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
    """A MIG slice as a place for a server on one GPU; a share of the GPU holds for its slices together."""
    holders = tuple(h for h in gpu.holders if h.instance is not None and h.instance == part.gpu_instance)
    # What no process is seen to hold is held all the same.
    used = part.memory_gib - part.free_gib if part.memory_gib is not None and part.free_gib is not None else None
    seen = Gpu(gpu.index, name=gpu.name, memory_gib=part.memory_gib, free_gib=part.free_gib, used_by=holders,
               used_gib=used)  # fmt: skip
    within = replace(gpu, free_gib=part.free_gib)
    limited, give = share_words(within, asked.shares), available_gib(within, asked.shares)
    needs = _all_known([_needed(need, seen)])
    tier = _tier(needs[0] if needs else None, seen, give)
    title = f"{gpu.index}: MIG slice {part.profile or part.uuid}"
    free = "free memory unknown" if give is None else f"{give:.1f} GiB free"
    key = (tier, float(is_held(seen)), 0.0, 0.0, 0.0, 0.0, 0.0, -math.floor(give or 0.0), float(gpu.index))
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
        return host.problem or "this machine has no GPU"
    if not placements:
        lost = [gpu.index for gpu in host.gpus if gpu.lost]
        sliced = [gpu.index for gpu in host.gpus if gpu.mig_mode and not gpu.lost]
        why = [f"GPU {spans(lost)} lost"] if lost else []
        why += [f"GPU {gpu.index} {gpu.claimed}" for gpu in host.gpus if gpu.claimed]
        why += [f"GPU {spans(sliced)} in MIG mode, whose slices serve one GPU's servers only"] if sliced else []
        return f"{size} GPUs are wanted and {len(asked.gpus)} can be used" + (f" ({'; '.join(why)})" if why else "")
    if placements[0].fits:
        return ""
    nearest = placements[0]
    free = "unknown" if nearest.free_gib is None else f"{nearest.free_gib:.1f} GiB"
    wanted = f"{need_words(nearest.needs_gib)} free on each" if nearest.needs_gib else "free"
    held = f": {nearest.warnings[0]}" if nearest.warnings else ""
    claimed = "".join(f"; GPU {gpu.index} {gpu.claimed}" for gpu in host.gpus if gpu.claimed)
    best = spans(nearest.gpus)
    if nearest.mig is not None:
        best += f" (MIG slice {nearest.mig.profile or nearest.mig.uuid})"
    return f"no set of {size} is {wanted}; the best, {best}, has {free} to give{held}{claimed}"
