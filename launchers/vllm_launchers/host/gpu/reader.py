"""Reads GPUs from NVML and their processes from the driver, once or repeatedly. Blocks as long as the driver does."""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pynvml
from msgspec.structs import replace

from vllm_launchers.engine_model.gpu_models import is_unified
from vllm_launchers.host.gpu.host import (
    MOST_GPUS,
    DriverError,
    Gpu,
    Holder,
    Host,
    Link,
    MigInstance,
    NvLink,
    with_servers,
)
from vllm_launchers.host.gpu.nvml import GpuLostError, Nvml
from vllm_launchers.host.gpu.topology import bandwidth, islands_of
from vllm_launchers.host.main_memory import main_memory
from vllm_launchers.secrets import redact_argv
from vllm_launchers.units import GIB

MOST_LINKS = 36
VERSIONS = {1: "1.0", 2: "2.0", 3: "2.2", 4: "3.0", 5: "3.1", 6: "4.0", 7: "5.0", 8: "6.0"}
"""NVLink versions by the number from ``nvmlDeviceGetNvLinkVersion`` (``NVML_NVLINK_VERSION_…``)."""

_SPEED = getattr(pynvml, "NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON", 90)
_COUNT = getattr(pynvml, "NVML_FI_DEV_NVLINK_LINK_COUNT", 91)
_SENT = getattr(pynvml, "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", 138)
_RECEIVED = getattr(pynvml, "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", 139)
_SENT_BYTES = getattr(pynvml, "NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES", 202)
_RECEIVED_BYTES = getattr(pynvml, "NVML_FI_DEV_NVLINK_COUNT_RCV_BYTES", 204)
_COUNTERS = ((_SENT, _RECEIVED, 1), (_SENT_BYTES, _RECEIVED_BYTES, 1024))
"""Traffic counters with their units per KiB: NVLink 2 to 4 count KiB, NVLink 5 counts bytes."""

_SLOWDOWN_MARGIN = getattr(pynvml, "NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT", 194)
PCIE_SECONDS = 4.5
"""Minimum time between two measurements of PCIe traffic: each takes the driver 20 ms per direction."""

_ERRORS = (
    ("replay", pynvml.NVML_NVLINK_ERROR_DL_REPLAY),
    ("recovery", pynvml.NVML_NVLINK_ERROR_DL_RECOVERY),
    ("crc", pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT),
)
_KIB_PER_GB = 1e9 / 1024


class _Counters(msgspec.Struct, frozen=True):
    """KiB sent and received by each port, at ``at`` (Unix seconds)."""

    at: float
    sent: list[int | None]
    received: list[int | None]


class LinkReader:
    """Reads a GPU's NVLinks; keeps the last sample, to turn counters into rates."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._links: tuple[NvLink, ...] = ()
        self._wanted: list[tuple[int, int]] = []
        self._per_kib = 1
        self._before: _Counters | None = None
        self.speed_mbs: float | None = None
        self.traffic: tuple[float | None, float | None] = (None, None)
        """GB/s sent and received over all links since the previous sample."""

    @property
    def links(self) -> tuple[NvLink, ...]:
        """The ports as last read."""
        return self._links

    def seldom(self, handle: Any, by_bus: dict[str, int]) -> None:
        """Read the state, version, far end and errors of each port."""
        count, speed = self._nvml.fields(handle, [(_COUNT, 0), (_SPEED, 0)])
        self.speed_mbs = float(speed) if speed else None
        numbers = range(min(int(count), MOST_LINKS)) if count is not None else range(MOST_LINKS)
        links = []
        for number in numbers:
            active = self._nvml.call("nvmlDeviceGetNvLinkState", handle, number)
            version = self._nvml.call("nvmlDeviceGetNvLinkVersion", handle, number)
            if active is None and version is None and count is None:
                break
            links.append(self._link(handle, number, active, version, by_bus))
        self._links = tuple(links)
        self._wanted = []
        for sent, received, per_kib in _COUNTERS if links else ():
            wanted = [(field, link.number) for link in links for field in (sent, received)]
            if any(value is not None for value in self._nvml.fields(handle, wanted)):
                self._wanted, self._per_kib = wanted, per_kib
                break

    def often(self, handle: Any, at: float) -> None:
        """Read the traffic counters of all ports in one call."""
        if not self._wanted:
            return
        read = self._nvml.fields(handle, self._wanted)
        values = [None if value is None else int(value) // self._per_kib for value in read]
        sent, received = values[::2], values[1::2]
        before = self._before
        if before is None or len(before.sent) != len(sent):
            before = _Counters(at, sent, received)
        sent_gbs = _rates(at - before.at, before.sent, sent)
        received_gbs = _rates(at - before.at, before.received, received)
        self._links = tuple(
            replace(link, sent_kib=out, received_kib=into, sent_gbs=out_gbs, received_gbs=into_gbs)
            for link, out, into, out_gbs, into_gbs in zip(
                self._links, sent, received, sent_gbs, received_gbs, strict=True
            )
        )
        self.traffic = _sum(sent_gbs), _sum(received_gbs)
        self._before = _Counters(at, sent, received)

    def _link(
        self, handle: Any, number: int, active: int | None, version: int | None, by_bus: dict[str, int]
    ) -> NvLink:
        call = self._nvml.call
        known = VERSIONS.get(version) if version else None
        if active == 0:
            return NvLink(number, active=False, version=known)
        pci = call("nvmlDeviceGetNvLinkRemotePciInfo", handle, number)
        remote = by_bus.get(bus_key(pci.busId)) if pci is not None else None
        kind = call("nvmlDeviceGetNvLinkRemoteDeviceType", handle, number)
        # If the driver does not report the device type, a far end that is none of the GPUs is a switch.
        unlike = kind is None and pci is not None and remote is None and bool(by_bus)
        counts = {name: call("nvmlDeviceGetNvLinkErrorCounter", handle, number, code) for name, code in _ERRORS}
        return NvLink(
            number,
            active=None if active is None else True,
            version=known,
            remote=remote,
            switch=True if kind == 2 or unlike else (False if kind == 0 or remote is not None else None),
            errors={name: count for name, count in counts.items() if count is not None},
        )


def bus_key(bus: str | bytes) -> str:
    """A PCI bus id in comparable form: lower case, with a four-digit domain."""
    return (bus.decode("ascii", "replace") if isinstance(bus, bytes) else bus).lower()[-12:]


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known), 3) if known else None


def _rates(seconds: float, before: Sequence[int | None], now: Sequence[int | None]) -> list[float | None]:
    """GB/s of each counter; None for one that fell, because a GPU reset sets counters back."""
    return [
        None
        if old is None or new is None or new < old or seconds <= 0
        else round((new - old) / _KIB_PER_GB / seconds, 3)
        for old, new in zip(before, now, strict=True)
    ]


AFFINITY_WORDS = 16
"""64-bit words of a CPU or node mask (1,024 bits)."""

ARCHITECTURES = {
    2: "Kepler", 3: "Maxwell", 4: "Pascal", 5: "Volta", 6: "Turing", 7: "Ampere", 8: "Ada", 9: "Hopper",
    10: "Blackwell", 13: "Rubin",
}  # fmt: skip

THROTTLE_REASONS = (
    (0x1, "idle"),
    (0x2, "clocks set by an application"),
    (0x4, "power limit"),
    (0x8, "hardware slowdown"),
    (0x10, "sync boost"),
    (0x20, "too hot (driver)"),
    (0x40, "too hot (hardware)"),
    (0x80, "power brake"),
    (0x100, "display clocks"),
)
"""Descriptions of the bits of ``nvmlClocksEventReason…``."""

KEPT_OF_A_LOST = (
    "index", "uuid", "name", "memory_gib", "pci_bus_id", "architecture", "compute_capability", "numa_node",
    "cpu_affinity", "pcie_generation_max", "pcie_width_max", "temperature_slowdown_c", "xid", "xid_at",
)  # fmt: skip
"""Facts that remain valid for a GPU that no longer responds."""

GONE = "is no longer listed by the driver: it comes back with a reset or a restart"

_PROCESSES = {
    "compute": ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"),
    "graphics": ("nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v2"),
}


class Device:
    """One GPU and its NVML handle. Only `seldom` queries a lost GPU again."""

    def __init__(self, nvml: Nvml, index: int) -> None:
        self._nvml = nvml
        self.index = index
        self.handle: Any = None
        self.listens = False
        """Whether its Xid errors are subscribed to; not yet for a new handle."""
        self._gpu = Gpu(index=index)
        self._links = LinkReader(nvml)
        self._pcie_at = float("-inf")
        """When PCIe traffic was last measured (Unix seconds)."""

    @property
    def gpu(self) -> Gpu:
        """The current facts."""
        return self._gpu

    def attach(self) -> None:
        """Find the GPU and read its static facts; if it is lost, mark it so."""
        try:
            if self.handle is None:
                self.handle = self._find()
            if self.handle is not None:
                self._gpu = replace(self._gpu, **self._fixed(), lost="")
            elif self._gpu.uuid is not None and not self._gpu.lost:
                self._lose(GONE)
        except GpuLostError as error:
            self._lose(str(error))

    def drop_handle(self) -> None:
        """Drop the handle, because its driver was closed; `seldom` finds the GPU again."""
        self.handle, self.listens = None, False

    def _find(self) -> Any:
        """The GPU's handle. A known GPU is found by its bus id: if it is missing, others may have moved up."""
        known = self._gpu
        if known.pci_bus_id is not None:
            handle = self._nvml.call("nvmlDeviceGetHandleByPciBusId", known.pci_bus_id)
            if handle is not None:
                return handle
        handle = self._nvml.call("nvmlDeviceGetHandleByIndex", self.index)
        if handle is None or known.uuid is None:
            return handle
        return handle if _text(self._nvml.call("nvmlDeviceGetUUID", handle)) == known.uuid else None

    def seldom(self, by_bus: dict[str, int]) -> None:
        """Read slowly changing facts, and check whether a lost GPU is back. ``by_bus``: indices by PCI bus id."""
        if self._gpu.lost or self.handle is None:
            self.attach()
        if self.handle is None or self._gpu.lost:
            return
        try:
            self._links.seldom(self.handle, by_bus)
            self._gpu = replace(self._gpu, **self._slow(), nvlink_speed_mbs=self._links.speed_mbs, lost="")
        except GpuLostError as error:
            self._lose(str(error))

    def often(self, at: float) -> None:
        """Read facts that change every second, at ``at`` (Unix seconds)."""
        if self.handle is None or self._gpu.lost:
            return
        try:
            changing = self._changing() | self._pcie_traffic(at)
            self._links.often(self.handle, at)
        except GpuLostError as error:
            self._lose(str(error))
            return
        sent, received = self._links.traffic
        self._gpu = replace(
            self._gpu, **changing, nvlinks=self._links.links, nvlink_sent_gbs=sent, nvlink_received_gbs=received
        )

    def saw_xid(self, xid: int, at: float) -> None:
        """Record an Xid error that the driver reported."""
        self._gpu = replace(self._gpu, xid=xid, xid_at=at)

    def give_holders(self, holders: tuple[Holder, ...]) -> None:
        """Set the GPU's processes, with their details."""
        self._gpu = replace(self._gpu, used_by=holders)

    def _lose(self, why: str) -> None:
        """Mark as lost: keep static facts and forget the rest. After a reset the GPU has another handle."""
        self._gpu = Gpu(**{name: getattr(self._gpu, name) for name in KEPT_OF_A_LOST}, lost=why)
        self._links = LinkReader(self._nvml)
        self.drop_handle()

    def _fixed(self) -> dict[str, Any]:
        call, handle = self._nvml.call, self.handle
        pci = call("nvmlDeviceGetPciInfo", handle)
        bus = _text(pci.busId) if pci is not None else None
        capability = call("nvmlDeviceGetCudaComputeCapability", handle)
        architecture = call("nvmlDeviceGetArchitecture", handle)
        affinity = call("nvmlDeviceGetCpuAffinity", handle, AFFINITY_WORDS)
        return {
            "uuid": _text(call("nvmlDeviceGetUUID", handle)),
            "name": _text(call("nvmlDeviceGetName", handle)),
            "pci_bus_id": bus,
            "architecture": ARCHITECTURES.get(architecture),
            "compute_capability": f"{capability[0]}.{capability[1]}" if capability else None,
            "clock_max_mhz": call("nvmlDeviceGetMaxClockInfo", handle, pynvml.NVML_CLOCK_SM),
            "memory_clock_max_mhz": call("nvmlDeviceGetMaxClockInfo", handle, pynvml.NVML_CLOCK_MEM),
            "pcie_generation_max": call("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            "pcie_width_max": call("nvmlDeviceGetMaxPcieLinkWidth", handle),
            "cpu_affinity": ranges(bits_of(affinity)) if affinity is not None else None,
            "numa_node": self._numa_node(bus),
            "temperature_slowdown_c": self._slowdown(),
        }

    def _slowdown(self) -> float | None:
        """The slowdown temperature; newer drivers report only the margin to it."""
        call, handle = self._nvml.call, self.handle
        threshold = call("nvmlDeviceGetTemperatureThreshold", handle, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
        if threshold:
            return float(threshold)
        margin, temperature = call("nvmlDeviceGetMarginTemperature", handle), self._temperature()
        (slowdown,) = self._nvml.fields(handle, [(_SLOWDOWN_MARGIN, 0)])
        if margin is None or temperature is None or slowdown is None:
            return None
        # Both are margins to the maximum operating temperature, so the slowdown's is negative.
        return float(temperature + margin - slowdown)

    def _temperature(self) -> int | None:
        found: int | None = self._nvml.first(("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"), self.handle, 0)
        return found

    def _pcie_traffic(self, at: float) -> dict[str, Any]:
        """PCIe traffic if a measurement is due; otherwise empty, so that the last measurement stays."""
        if 0 <= at - self._pcie_at < PCIE_SECONDS:
            return {}
        self._pcie_at = at
        measure = partial(self._nvml.call, "nvmlDeviceGetPcieThroughput", self.handle)
        sent, received = measure(pynvml.NVML_PCIE_UTIL_TX_BYTES), measure(pynvml.NVML_PCIE_UTIL_RX_BYTES)
        return {"pcie_sent_gbs": _kb_as_gb(sent), "pcie_received_gbs": _kb_as_gb(received)}

    def _numa_node(self, bus: str | None) -> int | None:
        mask = self._nvml.call("nvmlDeviceGetMemoryAffinity", self.handle, AFFINITY_WORDS, 0)
        nodes = bits_of(mask) if mask is not None else []
        if len(nodes) == 1:
            return nodes[0]
        try:
            # NVML writes the PCI domain with eight digits, the kernel with four.
            text = Path(f"/sys/bus/pci/devices/{(bus or '-').lower()[-12:]}/numa_node").read_text(encoding="ascii")
            return int(text) if int(text) >= 0 else None
        except (OSError, ValueError):
            return None

    def _slow(self) -> dict[str, Any]:
        call, handle = self._nvml.call, self.handle
        ecc = call("nvmlDeviceGetEccMode", handle)
        persistence = call("nvmlDeviceGetPersistenceMode", handle)
        mig_mode = call("nvmlDeviceGetMigMode", handle)
        limit = call("nvmlDeviceGetEnforcedPowerLimit", handle)
        return {
            "ecc": bool(ecc[0]) if ecc else None,
            "ecc_corrected": call("nvmlDeviceGetTotalEccErrors", handle, 0, 0),
            "ecc_uncorrected": call("nvmlDeviceGetTotalEccErrors", handle, 1, 0),
            "persistence": None if persistence is None else bool(persistence),
            "mig_mode": bool(mig_mode[0]) if mig_mode else None,
            "power_limit_w": None if limit is None else limit / 1000,
        }

    def _changing(self) -> dict[str, Any]:
        call, handle = self._nvml.call, self.handle
        use = call("nvmlDeviceGetUtilizationRates", handle)
        power = call("nvmlDeviceGetPowerUsage", handle)
        reasons = self._nvml.first(
            ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"), handle
        )
        return {
            **self._memory(),
            "utilization": use.gpu if use is not None else None,
            "memory_utilization": use.memory if use is not None else None,
            "temperature_c": self._temperature(),
            "power_w": None if power is None else power / 1000,
            "energy_mj": call("nvmlDeviceGetTotalEnergyConsumption", handle),
            "clock_mhz": call("nvmlDeviceGetClockInfo", handle, pynvml.NVML_CLOCK_SM),
            "memory_clock_mhz": call("nvmlDeviceGetClockInfo", handle, pynvml.NVML_CLOCK_MEM),
            "throttle": None if reasons is None else tuple(word for bit, word in THROTTLE_REASONS if reasons & bit),
            "pcie_generation": call("nvmlDeviceGetCurrPcieLinkGeneration", handle),
            "pcie_width": call("nvmlDeviceGetCurrPcieLinkWidth", handle),
            "pcie_replays": call("nvmlDeviceGetPcieReplayCounter", handle),
            "used_by": self._processes(),
            "mig": self._mig() if self._gpu.mig_mode else (),
        }

    def _memory(self) -> dict[str, Any]:
        memory = self._nvml.first(("memory_v2", "nvmlDeviceGetMemoryInfo"), self.handle)
        if memory is not None:
            sizes = {"memory_gib": memory.total, "used_gib": memory.used, "free_gib": memory.free}
            return {name: to_gib(size) for name, size in sizes.items()}
        if not is_unified(self._gpu.name or ""):
            return dict.fromkeys(("memory_gib", "used_gib", "free_gib"))
        # As vLLM since 0.11.1 measures it. What is in use belongs to the whole machine.
        memory = psutil.virtual_memory()
        return {"memory_gib": to_gib(memory.total), "used_gib": None, "free_gib": to_gib(memory.available)}

    def _processes(self) -> tuple[Holder, ...] | None:
        found: dict[int, Holder] = {}
        reported = False
        for kind, functions in _PROCESSES.items():
            processes = self._nvml.first(functions, self.handle)
            reported = reported or (processes is not None and kind == "compute")
            for process in processes or ():
                instance = getattr(process, "gpuInstanceId", None)
                found.setdefault(
                    process.pid,
                    Holder(
                        pid=process.pid,
                        gib=to_gib(process.usedGpuMemory) if process.usedGpuMemory is not None else None,
                        kind=kind,
                        instance=None if instance in (None, 0xFFFFFFFF) else instance,
                    ),
                )
        return tuple(found[pid] for pid in sorted(found)) if reported or found else None

    def _mig(self) -> tuple[MigInstance, ...]:
        count = self._nvml.call("nvmlDeviceGetMaxMigDeviceCount", self.handle) or 0
        handles = (self._nvml.call("nvmlDeviceGetMigDeviceHandleByIndex", self.handle, i) for i in range(count))
        return tuple(found for handle in handles if handle is not None and (found := self._instance(handle)))

    def _instance(self, handle: Any) -> MigInstance | None:
        call = self._nvml.call
        uuid = _text(call("nvmlDeviceGetUUID", handle))
        if uuid is None:
            return None
        memory = self._nvml.first(("memory_v2", "nvmlDeviceGetMemoryInfo"), handle)
        _, _, profile = (_text(call("nvmlDeviceGetName", handle)) or "").rpartition(" MIG ")
        return MigInstance(
            uuid=uuid,
            profile=profile or None,
            memory_gib=to_gib(memory.total) if memory is not None else None,
            free_gib=to_gib(memory.free) if memory is not None else None,
            gpu_instance=call("nvmlDeviceGetGpuInstanceId", handle),
            compute_instance=call("nvmlDeviceGetComputeInstanceId", handle),
        )


def _kb_as_gb(rate: int | None) -> float | None:
    return None if rate is None else round(rate / 1e6, 3)


def to_gib(count: int) -> float:
    """Bytes as GiB, rounded to 0.001."""
    return round(count / GIB, 3)


def bits_of(words: Any) -> list[int]:
    """Indices of the set bits in a mask of 64-bit words."""
    mask = sum(int(word) << (64 * position) for position, word in enumerate(words))
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]


def ranges(numbers: list[int]) -> str | None:
    """``0-3,8`` for 0, 1, 2, 3 and 8; None if empty."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts) or None


def _text(value: Any) -> str | None:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    return str(value) if value else None


MOST_COMMAND = 300


class ProcessDetails:
    """Caches process details; refreshes them only if the set of pids has changed."""

    def __init__(self) -> None:
        self._known: dict[int, Holder] = {}

    def update(self, pids: Collection[int]) -> None:
        """Look up these processes."""
        wanted = set(pids)
        if wanted == self._known.keys():
            return
        self._known = {pid: self._known.get(pid) or describe_process(pid) for pid in wanted}

    def complete(self, holder: Holder) -> Holder:
        """The holder with user, command and age added."""
        known = self._known.get(holder.pid)
        if known is None:
            return holder
        return replace(
            known, pid=holder.pid, gib=holder.gib, kind=holder.kind, instance=holder.instance, server=holder.server
        )


def describe_process(pid: int) -> Holder:
    """A process's details; None for unknown ones."""
    try:
        process = psutil.Process(pid)
        started = process.create_time()
    except (psutil.Error, OSError, ValueError, OverflowError):
        return Holder(pid)
    user = command = None
    try:
        with process.oneshot():
            user = process.username()
            # A process that sets its own title, such as vLLM's engine, pads it.
            words = tuple(word for word in process.cmdline() if word.strip())
            command = " ".join(redact_argv(words)).strip()[:MOST_COMMAND] or process.name()
    except (psutil.Error, OSError):
        pass  # both are hidden for other users' processes
    return Holder(pid, user=user, command=command, started_at=started, ancestors=_ancestors(process))


def _ancestors(process: psutil.Process) -> tuple[int, ...]:
    """Parent pids, nearest first, then the session leader."""
    pids: list[int] = []
    try:
        pids = [parent.pid for parent in process.parents() if parent.pid > 1]
        leader = os.getsid(process.pid)
    except (psutil.Error, OSError):
        return tuple(pids)
    return tuple(pids) if leader in (0, 1, process.pid) or leader in pids else (*pids, leader)


LEAST_SECONDS = 0.2
"""CPU usage over a shorter time is meaningless."""


class SystemReader:
    """Reads CPU, memory and swap; CPU usage is measured between two samples."""

    def __init__(self) -> None:
        self._sampled_at: float | None = None

    def host(self, at: float) -> Host:
        """The host without its GPUs, at ``at`` (Unix seconds). ``cpu_percent`` is None the first time."""
        memory, swap = main_memory(), psutil.swap_memory()
        return Host(
            hostname=socket.gethostname(),
            cpu=_cpu_name(),
            cpu_cores=os.cpu_count(),
            cpu_percent=self._cpu_percent(),
            memory_gib=_rounded(memory.total_gib),
            memory_free_gib=_rounded(memory.available_gib),
            swap_gib=round(swap.total / GIB, 1),
            swap_used_gib=round(swap.used / GIB, 1),
            at=at,
        )

    def _cpu_percent(self) -> float | None:
        before, now = self._sampled_at, time.monotonic()
        self._sampled_at = now
        percent = psutil.cpu_percent(interval=None)
        return None if before is None or now - before < LEAST_SECONDS else percent


def _rounded(gib: float | None) -> float | None:
    return None if gib is None else round(gib, 1)


@functools.cache
def _cpu_name() -> str | None:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() in ("model name", "Model", "cpu model"):
                    return value.strip() or None
    except OSError:
        return None
    return None


SELDOM_EVERY = 10
"""Samples between two reads of rarely changing facts (link states, error counts, limits, lost GPUs)."""

REOPEN_AFTER, MOST_REOPEN_AFTER = 60, 960
"""Samples after which the driver is reopened while a GPU stays lost; doubled each time, up to the second value. Only a
newly opened driver may notice a reset, but opening it can take seconds."""

MOST_EVENTS = 64

ANCESTORS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""``nvmlGpuTopologyLevel_t`` as nvidia-smi writes it; 0 means one board with its own bridge."""

P2P_BY_NVLINK = 2
"""``NVML_P2P_CAPS_INDEX_NVLINK``."""

P2P_STATUS = {
    0: "ok",
    1: "the chipset does not support it",
    2: "these GPUs do not support it",
    3: "the I/O hub's topology does not support it",
    4: "disabled in the driver (registry key)",
    5: "not supported",
}


class GpuReader:
    """An open driver and its GPUs. Not thread-safe.

    ``servers`` maps pids of our servers (their own and their keepers') to names; called at every sample.
    """

    def __init__(self, servers: Callable[[], Mapping[int, str]] | None = None) -> None:
        self._nvml = Nvml()
        self._machine = SystemReader()
        self._servers = servers
        self._devices: list[Device] = []
        self._details = ProcessDetails()
        self._pairs: dict[tuple[int, int], tuple[str | None, str | None]] = {}
        self._links: tuple[Link, ...] = ()
        self._links_of: object = None
        self._events: Any = None
        self._driver: str | None = None
        self._cuda: str | None = None
        self._sample = 0
        self._waited, self._reopen_after = 0, REOPEN_AFTER
        """Samples since a GPU was lost or the driver was last reopened, and the number after which it is reopened."""
        self._opened = False

    def open(self) -> None:
        """Open the driver and read static facts.

        Raises:
            DriverError: there is no driver, or it can't be queried.
        """
        self._nvml.open()
        self._opened = True
        try:
            self._driver = _text(self._nvml.call("nvmlSystemGetDriverVersion"))
            self._cuda = _cuda(
                self._nvml.first(("nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion"))
            )
            self._devices = list(self._found())
            self._events = self._nvml.call("nvmlEventSetCreate")
        except GpuLostError as error:
            raise DriverError(f"the NVIDIA driver has lost its GPUs: {error}") from error

    def close(self) -> None:
        """Close the driver."""
        if self._opened:
            self._opened = False
            self._nvml.close()

    def sample(self, at: float) -> Host:
        """The current state of the host, at ``at`` (Unix seconds).

        Raises:
            DriverError: the driver is gone.
        """
        machine = self._machine.host(at)
        if self._sample % SELDOM_EVERY == 0:
            by_bus = {bus_key(d.gpu.pci_bus_id): d.index for d in self._devices if d.gpu.pci_bus_id}
            self._reopen_for_the_lost()
            for device in self._devices:
                device.seldom(by_bus)
            self._listen()
        self._sample += 1
        self._drain_events(at)
        for device in self._devices:
            device.often(at)
        self._name_processes()
        gpus = tuple(device.gpu for device in self._devices)
        links = self._pair_links(gpus)
        host = replace(
            machine,
            driver=self._driver,
            cuda=self._cuda,
            gpus=gpus,
            links=links,
            islands=islands_of([gpu.index for gpu in gpus], links),
            problem="" if gpus else "the NVIDIA driver is installed but reports no GPU",
        )
        return with_servers(host, self._servers()) if self._servers is not None else host

    def _found(self) -> Iterator[Device]:
        count = self._nvml.call("nvmlDeviceGetCount")
        for index in range(min(count, MOST_GPUS) if count is not None else MOST_GPUS):
            device = Device(self._nvml, index)
            device.attach()
            if count is None and device.handle is None and not device.gpu.lost:
                return
            yield device

    def _reopen_for_the_lost(self) -> None:
        """Occasionally close and reopen the driver; all GPUs keep their facts and get new handles."""
        if not any(device.gpu.lost for device in self._devices):
            self._waited, self._reopen_after = 0, REOPEN_AFTER
            return
        self._waited += SELDOM_EVERY
        if self._waited < self._reopen_after:
            return
        self._waited, self._reopen_after = 0, min(2 * self._reopen_after, MOST_REOPEN_AFTER)
        self._nvml.close()
        self._nvml.open()
        for device in self._devices:
            device.drop_handle()
        self._events = self._nvml.call("nvmlEventSetCreate")

    def _listen(self) -> None:
        """Subscribe to Xid errors of GPUs that have no subscription yet."""
        for device in self._devices:
            if self._events is not None and device.handle is not None and not device.listens and not device.gpu.lost:
                device.listens = True
                try:
                    kind = pynvml.nvmlEventTypeXidCriticalError
                    self._nvml.call("nvmlDeviceRegisterEvents", device.handle, kind, self._events)
                except GpuLostError:
                    continue

    def _drain_events(self, at: float) -> None:
        if self._events is None:
            return
        for _ in range(MOST_EVENTS):
            try:
                event = self._nvml.call("nvmlEventSetWait", self._events, 0)
            except GpuLostError:
                return
            if event is None:
                return
            for device in self._devices:
                if device.handle is not None and _address(device.handle) == _address(event.device):
                    device.saw_xid(int(event.eventData), at)

    def _name_processes(self) -> None:
        self._details.update({holder.pid for device in self._devices for holder in device.gpu.holders})
        for device in self._devices:
            if device.gpu.used_by:
                device.give_holders(tuple(map(self._details.complete, device.gpu.used_by)))

    def _pair_links(self, gpus: tuple[Gpu, ...]) -> tuple[Link, ...]:
        """The link of each pair; recomputed only if a port has changed."""
        key = [(gpu.lost, gpu.pcie_width, [(p.active, p.remote, p.switch) for p in gpu.nvlinks]) for gpu in gpus]
        if key == self._links_of:
            return self._links
        pairs = [(a, b) for position, a in enumerate(self._devices) for b in self._devices[position + 1 :]]
        found = (self._pair(a, b) for a, b in pairs)
        self._links = tuple(link for link in found if link is not None)
        self._links_of = key
        return self._links

    def _pair(self, a: Device, b: Device) -> Link | None:
        ancestor, p2p = self._pair_facts(a, b)
        direct = max(_ports_to(a.gpu, b.index), _ports_to(b.gpu, a.index))
        switched = min(_switch_ports(a.gpu), _switch_ports(b.gpu))
        count = direct or switched or self._unnamed_ports(a, b)
        kind = f"NV{count}" if count else ancestor
        if kind is None:
            return None
        switch = (direct == 0 and switched > 0) if count else None
        return Link(a.index, b.index, kind, bandwidth(kind, a.gpu, b.gpu), switch=switch, p2p=p2p)

    def _unnamed_ports(self, a: Device, b: Device) -> int:
        """Number of a pair's NVLinks if the driver hides the far ends of ports (as in a virtual machine).

        It still reports which GPUs reach each other over NVLink; the ports are divided evenly among these.
        """
        if not (_hidden_ports(a.gpu) and _hidden_ports(b.gpu)):
            return 0
        partners = [other for other in self._devices if other is not a and self._nvlink_peers(a, other)]
        return max(1, _hidden_ports(a.gpu) // len(partners)) if b in partners else 0

    def _nvlink_peers(self, a: Device, b: Device) -> bool:
        if a.handle is None or b.handle is None:
            return False
        try:
            return bool(self._nvml.call("nvmlDeviceGetP2PStatus", a.handle, b.handle, P2P_BY_NVLINK) == 0)
        except GpuLostError:
            return False

    def _pair_facts(self, a: Device, b: Device) -> tuple[str | None, str | None]:
        """Common ancestor and P2P status; queried once, since they never change."""
        known = self._pairs.get((a.index, b.index))
        if known is not None or a.handle is None or b.handle is None:
            return known or (None, None)
        try:
            level = self._nvml.call("nvmlDeviceGetTopologyCommonAncestor", a.handle, b.handle)
            status = self._nvml.call("nvmlDeviceGetP2PStatus", a.handle, b.handle, 0)
        except GpuLostError:
            return None, None
        found = (ANCESTORS.get(level), P2P_STATUS.get(status) if status is not None else None)
        self._pairs[a.index, b.index] = found
        return found


def _ports_to(gpu: Gpu, other: int) -> int:
    return sum(1 for port in gpu.nvlinks if port.active is not False and port.remote == other)


def _switch_ports(gpu: Gpu) -> int:
    return sum(1 for port in gpu.nvlinks if port.switch and port.active is not False)


def _hidden_ports(gpu: Gpu) -> int:
    return sum(1 for port in gpu.nvlinks if port.active and port.remote is None and not port.switch)


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def _cuda(version: int | None) -> str | None:
    return f"{version // 1000}.{version % 1000 // 10}" if version else None
