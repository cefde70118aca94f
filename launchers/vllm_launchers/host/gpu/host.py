"""The host document: a machine with its GPUs and their processes at one moment. Immutable, standard library only.

Memory is in GiB (2**30 bytes), bandwidth in GB/s (10**9 bytes, sum of both directions, as vendors state it), times are
Unix seconds. None means not reported, never zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from vllm_launchers.errors import UsageError


class HostError(UsageError):
    """A host document or a saved matrix is unusable."""


class DriverError(Exception):
    """The NVIDIA driver cannot be queried at all: not installed, no permission, version mismatch."""


MOST_GPUS = 64
"""Maximum GPUs of one machine."""

NO_DRIVER = "no NVIDIA driver was found on this machine; GPUs are not shown"


def has_driver() -> bool:
    """Whether NVIDIA's driver is installed, so that GPUs can be queried; very cheap."""
    import ctypes

    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


class Holder(msgspec.Struct, frozen=True):
    """A process that holds GPU memory.

    ``user`` and ``command`` are None for a process that is invisible here (it runs in another container, or has ended).
    ``ancestors``: its parent pids and its session leader, which identify a server's processes. ``server``: the name of
    our server that it belongs to.
    """

    pid: int
    user: str | None = None
    gib: float | None = None
    server: str | None = None
    command: str | None = None
    started_at: float | None = None
    kind: str = "compute"
    instance: int | None = None
    """The MIG GPU instance it runs on."""
    ancestors: tuple[int, ...] = ()

    @property
    def seen(self) -> bool:
        """Whether this console can see the process itself, not only its pid."""
        return self.command is not None or self.user is not None


class MigInstance(msgspec.Struct, frozen=True):
    """A slice of a GPU in MIG mode; CUDA addresses it only by ``uuid``. ``profile`` is for example ``3g.40gb``."""

    uuid: str
    profile: str | None = None
    memory_gib: float | None = None
    free_gib: float | None = None
    gpu_instance: int | None = None
    compute_instance: int | None = None


class NvLink(msgspec.Struct, frozen=True):
    """One NVLink port of a GPU.

    ``remote``: index of the GPU at the other end; None for a switch (``switch`` is then True) or if unknown.
    ``sent_kib`` and ``received_kib`` count data since the driver was loaded; ``sent_gbs`` and ``received_gbs`` are GB/s
    since the previous sample. ``errors`` has the keys ``replay``, ``recovery`` and ``crc``.
    """

    number: int
    active: bool | None = None
    version: str | None = None
    remote: int | None = None
    switch: bool | None = None
    sent_kib: int | None = None
    received_kib: int | None = None
    errors: Mapping[str, int] = msgspec.field(default_factory=dict)
    sent_gbs: float | None = None
    received_gbs: float | None = None


class GpuClaim(msgspec.Struct, frozen=True):
    """A user's claim to a GPU on the shared board.

    ``words``: the claim as text, ``claimed until 18:00 by anna: training``. ``mine``: whether it is this user's own.
    """

    user: str
    until: float
    why: str = ""
    mine: bool = False
    words: str = ""


class Gpu(msgspec.Struct, frozen=True):
    """One GPU. ``index`` is in PCI bus order, as in NVML and nvidia-smi.

    ``utilization`` and ``memory_utilization`` (memory bandwidth in use) are percentages, 0 to 100. ``lost``: why it no
    longer responds; its static facts are kept. ``throttle`` is None if not reported, and empty if nothing slows it
    down. Counters run since the driver was loaded. If the memory is shared with the CPU, ``memory_gib`` and
    ``free_gib`` are the machine's, and ``used_gib`` is None.
    """

    index: int
    uuid: str | None = None
    name: str | None = None
    memory_gib: float | None = None
    free_gib: float | None = None
    used_by: tuple[Holder, ...] | None = None
    utilization: float | None = None
    used_gib: float | None = None
    memory_utilization: float | None = None
    temperature_c: float | None = None
    temperature_slowdown_c: float | None = None
    """Temperature at which the hardware starts to lower its clocks."""
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_mj: int | None = None
    """Energy used by the whole GPU in millijoules, from its own counter (Volta and later)."""
    clock_mhz: int | None = None
    clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    memory_clock_max_mhz: int | None = None
    throttle: tuple[str, ...] | None = None
    ecc: bool | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    xid: int | None = None
    """The newest Xid error seen by the monitor."""
    xid_at: float | None = None
    architecture: str | None = None
    compute_capability: str | None = None
    pci_bus_id: str | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_replays: int | None = None
    pcie_sent_gbs: float | None = None
    """GB/s to the host, measured by the driver over about 20 ms."""
    pcie_received_gbs: float | None = None
    persistence: bool | None = None
    mig_mode: bool | None = None
    mig: tuple[MigInstance, ...] = ()
    numa_node: int | None = None
    cpu_affinity: str | None = None
    nvlinks: tuple[NvLink, ...] = ()
    nvlink_speed_mbs: float | None = None
    """Bandwidth of one link in one direction, in MB/s, as reported by the driver."""
    nvlink_sent_gbs: float | None = None
    nvlink_received_gbs: float | None = None
    lost: str = ""
    claims: tuple[GpuClaim, ...] = ()

    @property
    def claimed(self) -> str:
        """Text of the first claim by another user; empty if there is none."""
        return next((claim.words for claim in self.claims if not claim.mine), "")

    @property
    def label(self) -> str:
        """``GPU 0 (NVIDIA L40S)``."""
        return f"GPU {self.index} ({self.name})" if self.name else f"GPU {self.index}"

    @property
    def capability(self) -> float | None:
        """The compute capability as a number; None if unknown."""
        try:
            return float(self.compute_capability or "")
        except ValueError:
            return None

    @property
    def holders(self) -> tuple[Holder, ...]:
        """The GPU's processes; empty if not reported."""
        return self.used_by or ()


class Link(msgspec.Struct, frozen=True):
    """How two GPUs are connected: ``NV4``, ``PIX``, ``PXB``, ``PHB``, ``NODE`` or ``SYS``, as in nvidia-smi.

    ``switch``: whether the NVLinks go through an NVSwitch. ``p2p``: ``ok``, or why one can't read the other's memory.
    """

    a: int
    b: int
    kind: str
    bandwidth_gbs: float | None = None
    switch: bool | None = None
    p2p: str | None = None


class Host(msgspec.Struct, frozen=True):
    """A machine. ``islands`` are groups of GPUs connected by NVLink; a GPU without NVLink is its own island.

    ``problem``: why there is no GPU data (no driver, …), as a sentence; else empty. ``cpu_percent``: usage of all cores
    together, 0 to 100.
    """

    hostname: str = ""
    driver: str | None = None
    cuda: str | None = None
    cpu: str | None = None
    memory_gib: float | None = None
    gpus: tuple[Gpu, ...] = ()
    links: tuple[Link, ...] = ()
    islands: tuple[tuple[int, ...], ...] = ()
    cpu_cores: int | None = None
    cpu_percent: float | None = None
    memory_free_gib: float | None = None
    swap_gib: float | None = None
    swap_used_gib: float | None = None
    at: float | None = None
    problem: str = ""

    def gpu(self, index: int) -> Gpu | None:
        """The GPU with that index, or None."""
        return next((gpu for gpu in self.gpus if gpu.index == index), None)

    def link(self, a: int, b: int) -> Link | None:
        """The link between these two GPUs, or None if unknown."""
        return next((link for link in self.links if {link.a, link.b} == {a, b}), None)

    @property
    def islands_linked(self) -> bool:
        """Whether any two GPUs are connected by NVLink."""
        return any(len(island) > 1 for island in self.islands)


def connected(indices: Iterable[int], pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Groups of ``indices`` that are connected by ``pairs``, each sorted, ordered by their first member."""
    group = {index: index for index in indices}

    def root(index: int) -> int:
        while group[index] != index:
            group[index] = index = group[group[index]]
        return index

    for a, b in pairs:
        low, high = sorted((root(a), root(b)))
        group[high] = low
    members: dict[int, list[int]] = {}
    for index in sorted(group):
        members.setdefault(root(index), []).append(index)
    return tuple(tuple(found) for found in members.values())


def with_claims(host: Host, claims: Mapping[int, tuple[GpuClaim, ...]]) -> Host:
    """The host with the given claims on its GPUs, by index."""
    if not claims and not any(gpu.claims for gpu in host.gpus):
        return host
    return replace(host, gpus=tuple(replace(gpu, claims=claims.get(gpu.index, ())) for gpu in host.gpus))


def with_servers(host: Host, roots: Mapping[int, str]) -> Host:
    """The host with each process that descends from a pid in ``roots`` marked as that server's.

    Pass both the server's own pid and its keeper's, because the server's orphans descend from the keeper.
    """
    if not roots:
        return host

    def named(holder: Holder) -> Holder:
        name = next((roots[pid] for pid in (holder.pid, *holder.ancestors) if pid in roots), None)
        return replace(holder, server=name) if name is not None and name != holder.server else holder

    gpus = tuple(
        replace(gpu, used_by=tuple(named(holder) for holder in gpu.used_by)) if gpu.used_by else gpu
        for gpu in host.gpus
    )
    return replace(host, gpus=gpus)


def gpus_text(gpus: Sequence[int]) -> str:
    """``GPU 2``, ``GPU 0,1``."""
    return f"GPU {','.join(map(str, gpus))}"
