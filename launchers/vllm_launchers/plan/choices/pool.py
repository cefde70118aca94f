"""The GPUs that a launch may be spread over, and which of them are near each other. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from vllm_launchers.machine.gpu.host import Gpu, Host, connected
from vllm_launchers.machine.gpu.links import Level, level_of
from vllm_launchers.machine.gpu.sharing import Share, available_gib, is_held

IDLE_SHARE = 0.9
"""A GPU counts as free with so much of its memory free."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How many GPUs a layer is cut over, how many stages and how many copies there are."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    @property
    def replica(self) -> int:
        """GPUs of one copy."""
        return self.tensor * self.pipeline

    @property
    def total(self) -> int:
        """GPUs in all."""
        return self.replica * self.data


@dataclass(frozen=True, slots=True)
class Pool:
    """GPUs to choose from. ``groups`` are those near enough for tensor parallel; ``link`` says by what they are joined.

    ``memory_gib`` is the smallest GPU's, None where unknown; ``capability`` the oldest GPU's (8.6), None where unknown.
    ``exact`` is whether a person gave these GPUs, so that all of them are to be used.
    """

    groups: tuple[tuple[int, ...], ...]
    memory_gib: float | None
    capability: float | None
    link: str
    name: str = ""
    exact: bool = False
    all_free: bool = True

    @property
    def size(self) -> int:
        """How many GPUs there are."""
        return sum(map(len, self.groups))

    def holds(self, layout: Layout, *, together: bool = False) -> bool:
        """Whether each stage of each copy finds GPUs that are near each other.

        ``together``: so do the copies of a stage, which share the experts of a mixture and exchange data at each layer.
        """
        width = layout.tensor * layout.data if together else layout.tensor
        places = sum(len(group) // width for group in self.groups)
        right = layout.total == self.size if self.exact else layout.total <= self.size
        return right and places >= layout.total // width


def _may(gpu: Gpu, given: tuple[int, ...]) -> bool:
    """Whether it is among those given, or nobody else has claimed it."""
    return gpu.index in given if given else not gpu.claimed


def pool_of(host: Host | None, gpus: Iterable[int] = (), shares: Iterable[Share] = ()) -> Pool | None:
    """The GPUs that a launch may take: those given, else those that nobody works on, else all. None without GPUs.

    Near is one NVLink island; on a machine without NVLink one PCIe switch, across which a tensor-parallel step still
    pays. Where no links are known all GPUs count as near. A GPU in MIG mode lends one slice.
    """
    if host is None:
        return None
    given, shares = tuple(gpus), tuple(shares)
    usable = {gpu.index: gpu for gpu in host.gpus if not gpu.lost and _may(gpu, given)}
    whole = {index: gpu for index, gpu in usable.items() if not gpu.mig_mode}
    if not whole:
        return _slice(usable.values())
    free = {index for index, gpu in whole.items() if _is_free(gpu, shares)}
    chosen = set(given) & set(whole) or free or set(whole)
    # GPUs of one kind: the most memory of all decides which, so that a small one beside does not set the measure.
    if not given:
        chosen = _alike(chosen, whole)
    members = [whole[index] for index in sorted(chosen)]
    groups, link = _groups(host, sorted(chosen))
    sizes = [size for gpu in members if (size := _size(gpu, shares)) is not None]
    capabilities = [known for gpu in members if (known := _capability(gpu)) is not None]
    return Pool(
        groups=groups,
        memory_gib=min(sizes) if sizes and len(sizes) == len(members) else None,
        capability=min(capabilities) if capabilities and len(capabilities) == len(members) else None,
        link=link,
        name=members[0].name or "",
        exact=bool(given),
        all_free=chosen <= free,
    )


def _slice(gpus: Iterable[Gpu]) -> Pool | None:
    slices = [(part.memory_gib, gpu) for gpu in gpus for part in gpu.mig if part.memory_gib is not None]
    if not slices:
        return None
    memory, gpu = max(slices, key=lambda pair: pair[0])
    return Pool(((gpu.index,),), memory, _capability(gpu), "", gpu.name or "")


def _alike(chosen: set[int], gpus: dict[int, Gpu]) -> set[int]:
    kinds: dict[str | None, set[int]] = {}
    for index in chosen:
        kinds.setdefault(gpus[index].name, set()).add(index)
    return max(kinds.values(), key=lambda kind: (sum(gpus[i].memory_gib or 0.0 for i in kind), -min(kind)))


def _groups(host: Host, indices: list[int]) -> tuple[tuple[tuple[int, ...], ...], str]:
    """The parts that are near, and what joins them."""
    pairs = list(_joined(host, indices, Level.MESH))
    if pairs or host.islands_linked:
        return connected(indices, pairs), "NVLink"
    if len(indices) > 1 and not host.links:
        return (tuple(indices),), "links that are not known"
    return connected(indices, _joined(host, indices, Level.PXB)), "one PCIe switch"


def _joined(host: Host, indices: list[int], farthest: Level) -> Iterator[tuple[int, int]]:
    wanted = set(indices)
    for link in host.links:
        if link.a in wanted and link.b in wanted and level_of(link.kind) <= farthest:
            yield link.a, link.b
    if farthest is Level.MESH:
        for island in host.islands:
            members = [index for index in island if index in wanted]
            yield from pairwise(members)


def _is_free(gpu: Gpu, shares: tuple[Share, ...]) -> bool:
    size, free = _size(gpu, shares), available_gib(gpu, shares)
    if size is None or free is None:
        return not is_held(gpu)
    return not is_held(gpu) and free >= size * IDLE_SHARE


def _size(gpu: Gpu, shares: tuple[Share, ...]) -> float | None:
    """What of the GPU is this person's to use, GiB."""
    limits = [limit for share in shares if share.gpu == gpu.index and (limit := share.limit(gpu)) is not None]
    known = [*limits, *([gpu.memory_gib] if gpu.memory_gib is not None else [])]
    return min(known, default=None)


def _capability(gpu: Gpu) -> float | None:
    try:
        return float(gpu.compute_capability or "")
    except ValueError:
        return None
