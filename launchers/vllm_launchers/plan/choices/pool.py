"""The GPUs that a launch may use, and which of them are close to each other. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, pairwise

import msgspec
from msgspec.structs import replace

from vllm_launchers.engine_model.gpu_models import Interconnect, over_nvlink, over_pcie_slot
from vllm_launchers.host.gpu.host import Gpu, Host, Link, connected
from vllm_launchers.host.gpu.sharing import GpuShare, available_gib, best_slice, is_held, own_limit
from vllm_launchers.host.gpu.topology import LinkLevel, link_level

IDLE_SHARE = 0.9
"""A GPU counts as free if this share of its memory is free."""


class Layout(msgspec.Struct, frozen=True):
    """How many GPUs share a layer, how many pipeline stages there are, and how many copies."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    @property
    def replica(self) -> int:
        """GPUs of one copy."""
        return self.tensor * self.pipeline

    @property
    def total(self) -> int:
        """Total number of GPUs."""
        return self.replica * self.data


class Pool(msgspec.Struct, frozen=True):
    """GPUs to choose from. ``groups`` are close enough for tensor parallelism; ``link`` is what joins them.

    ``memory_gib`` is the smallest GPU's, ``capability`` the oldest GPU's (8.6); None if unknown. ``exact``: a user gave
    these GPUs, so all of them must be used. ``near`` is the link within a group and ``far`` the link between the two
    most distant GPUs, which ``far_link`` names; None if unknown.
    """

    groups: tuple[tuple[int, ...], ...]
    memory_gib: float | None
    capability: float | None
    link: str
    name: str = ""
    exact: bool = False
    all_free: bool = True
    near: Interconnect | None = None
    far: Interconnect | None = None
    far_link: str = ""

    @property
    def size(self) -> int:
        """Number of GPUs."""
        return sum(map(len, self.groups))

    def holds(self, layout: Layout, *, together: bool = False) -> bool:
        """Whether each stage of each copy gets GPUs that are close to each other.

        ``together``: the copies of a stage must be close too, because they share a mixture's experts and exchange data
        at each layer.
        """
        width = layout.tensor * layout.data if together else layout.tensor
        places = sum(len(group) // width for group in self.groups)
        right = layout.total == self.size if self.exact else layout.total <= self.size
        return right and places >= layout.total // width

    def joining(self, gpus: int) -> Interconnect | None:
        """The link between this many GPUs that exchange data: that of a group, if one is large enough."""
        return self.near if any(len(group) >= gpus for group in self.groups) else self.far


def _may(gpu: Gpu, given: tuple[int, ...]) -> bool:
    """Whether a GPU is among the given ones; if none are given, whether no other user has claimed it."""
    return gpu.index in given if given else not gpu.claimed


def usable_gpus(host: Host, gpus: Iterable[int] = (), shares: Iterable[GpuShare] = ()) -> list[Gpu]:
    """Whole GPUs that a launch may use: the given ones, else unused ones, else all that no other user has claimed."""
    given, shares = tuple(gpus), tuple(shares)
    whole = [gpu for gpu in host.gpus if not gpu.lost and not gpu.mig_mode and _may(gpu, given)]
    named = [gpu for gpu in whole if gpu.index in given]
    return named or [gpu for gpu in whole if is_free(gpu, shares)] or whole


def first_visible(host: Host, visible: Sequence[Gpu], shares: Iterable[GpuShare] = ()) -> Host:
    """The host as seen by a server whose GPUs nobody chooses: vLLM takes the first visible ones.

    Drops GPUs after one that is in use or of another model, because a layout cannot use them.
    """
    shares = tuple(shares)
    if not visible:
        return host
    kept = [visible[0]]
    for gpu in visible[1:]:
        if gpu.name != kept[0].name or not all(is_free(one, shares) for one in (kept[-1], gpu)):
            break
        kept.append(gpu)
    return replace(host, gpus=tuple(kept))


def pool_of(host: Host | None, gpus: Iterable[int] = (), shares: Iterable[GpuShare] = ()) -> Pool | None:
    """The GPUs that a launch may use: the given ones, else unused ones, else all. None if there are none.

    GPUs are close within one NVLink island or, on a machine without NVLink, behind one PCIe switch, over which tensor
    parallelism still pays off. If no links are known, all GPUs count as close. A GPU in MIG mode provides one slice.
    """
    if host is None:
        return None
    given, shares = tuple(gpus), tuple(shares)
    usable = {gpu.index: gpu for gpu in host.gpus if not gpu.lost and _may(gpu, given)}
    whole = {index: gpu for index, gpu in usable.items() if not gpu.mig_mode}
    if not whole:
        return _slice(usable.values(), shares)
    free = {index for index, gpu in whole.items() if is_free(gpu, shares)}
    chosen = {gpu.index for gpu in usable_gpus(host, given, shares)}
    # Only GPUs of one model: the model with the most total memory, so that a small extra GPU does not decide.
    if not given:
        chosen = _alike(chosen, whole)
    members = [whole[index] for index in sorted(chosen)]
    groups, link = _groups(host, sorted(chosen))
    far = _farthest(host, sorted(chosen))
    sizes = [size for gpu in members if (size := _size(gpu, shares)) is not None]
    capabilities = [known for gpu in members if (known := gpu.capability) is not None]
    return Pool(
        groups=groups,
        memory_gib=min(sizes) if sizes and len(sizes) == len(members) else None,
        capability=min(capabilities) if capabilities and len(capabilities) == len(members) else None,
        link=link,
        name=members[0].name or "",
        exact=bool(given),
        all_free=chosen <= free,
        near=_slowest(host, [pair for group in groups for pair in combinations(group, 2)], nvlink=link == "NVLink"),
        far=_slowest(host, list(combinations(sorted(chosen), 2))),
        far_link=_LINK_NAMES.get(far, "") if far is not None else "",
    )


def _slice(gpus: Iterable[Gpu], shares: tuple[GpuShare, ...]) -> Pool | None:
    best = best_slice(gpus, shares)
    if best is None:
        return None
    return Pool(((best.index,),), _size(best, shares), best.capability, "", best.name or "")


def _alike(chosen: set[int], gpus: dict[int, Gpu]) -> set[int]:
    kinds: dict[str | None, set[int]] = {}
    for index in chosen:
        kinds.setdefault(gpus[index].name, set()).add(index)
    return max(kinds.values(), key=lambda kind: (sum(gpus[i].memory_gib or 0.0 for i in kind), -min(kind)))


def _groups(host: Host, indices: list[int]) -> tuple[tuple[tuple[int, ...], ...], str]:
    """The groups of GPUs that are close to each other, and what joins them."""
    pairs = list(_joined(host, indices, LinkLevel.MESH))
    if pairs or host.islands_linked:
        return connected(indices, pairs), "NVLink"
    if len(indices) > 1 and not host.links:
        return (tuple(indices),), "unknown links"
    return connected(indices, _joined(host, indices, LinkLevel.PXB)), "one PCIe switch"


_LINK_NAMES = {
    LinkLevel.NVLINK: "NVLink",
    LinkLevel.PIX: "one PCIe switch",
    LinkLevel.PXB: "several PCIe switches",
    LinkLevel.PHB: "one PCIe host bridge",
    LinkLevel.NODE: "PCIe between host bridges",
    LinkLevel.SYS: "the CPU interconnect",
}
"""The link between two GPUs, as the end of a sentence."""


def _farthest(host: Host, indices: list[int]) -> LinkLevel | None:
    """The level of the link between the two most distant GPUs; None for one GPU, or if links are unknown."""
    links = [host.link(a, b) for a, b in combinations(indices, 2)]
    return (
        max((link_level(link.kind) for link in links if link is not None), default=None) if None not in links else None
    )


def _slowest(host: Host, pairs: Sequence[tuple[int, int]], *, nvlink: bool = False) -> Interconnect | None:
    """The slowest link among pairs; with ``nvlink``, only among NVLinks. None if one is unknown."""
    links = [host.link(a, b) for a, b in pairs]
    known = [link for link in links if link is not None]
    if nvlink:
        known = [link for link in known if link_level(link.kind) is LinkLevel.NVLINK]
    elif None in links:
        return None
    found = [_interconnect(host, link) for link in known]
    rates = [one for one in found if one is not None]
    return min(rates, key=lambda one: one.bandwidth) if rates and len(rates) == len(found) else None


def _interconnect(host: Host, link: Link) -> Interconnect | None:
    """A link's bandwidth in one direction. GeForce drivers do not let a GPU read another's memory over PCIe."""
    rate = link.bandwidth_gbs
    if rate is None:
        return None
    level = link_level(link.kind)
    if level is LinkLevel.NVLINK:
        return over_nvlink(rate / 2 * 1e9)
    geforce = any("GeForce" in (gpu.name or "") for gpu in host.gpus if gpu.index in (link.a, link.b))
    blocked = link.p2p not in (None, "ok") or (link.p2p is None and geforce)
    return over_pcie_slot(rate / 2 * 1e9, by_cpu=blocked or level >= LinkLevel.SYS)


def _joined(host: Host, indices: list[int], farthest: LinkLevel) -> Iterator[tuple[int, int]]:
    wanted = set(indices)
    for link in host.links:
        if link.a in wanted and link.b in wanted and link_level(link.kind) <= farthest:
            yield link.a, link.b
    if farthest is LinkLevel.MESH:
        for island in host.islands:
            members = [index for index in island if index in wanted]
            yield from pairwise(members)


def is_free(gpu: Gpu, shares: tuple[GpuShare, ...]) -> bool:
    """Whether this user may take all of a GPU: nothing significant is on it."""
    size, free = _size(gpu, shares), available_gib(gpu, shares)
    if size is None or free is None:
        return not is_held(gpu)
    return not is_held(gpu) and free >= size * IDLE_SHARE


def _size(gpu: Gpu, shares: tuple[GpuShare, ...]) -> float | None:
    """GiB of a GPU that this user may use."""
    return min((gib for gib in (own_limit(gpu, shares), gpu.memory_gib) if gib is not None), default=None)
