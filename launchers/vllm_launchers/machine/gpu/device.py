"""What NVML says of one GPU: what never changes, what seldom does, and what changes every second."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml

from vllm_launchers.machine.gpu.host import Gpu, Holder, MigInstance
from vllm_launchers.machine.gpu.nvlinks import LinkReader
from vllm_launchers.machine.gpu.nvml import GpuLostError, Nvml

GIB = 1024**3
AFFINITY_WORDS = 16
"""64-bit words of a CPU or node mask: 1,024 bits."""

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
"""Bits of ``nvmlClocksEventReason…`` in words."""

KEPT_OF_A_LOST = (
    "index", "uuid", "name", "memory_gib", "pci_bus_id", "architecture", "compute_capability", "numa_node",
    "cpu_affinity", "pcie_generation_max", "pcie_width_max", "xid", "xid_at",
)  # fmt: skip
"""What stays true of a GPU that answers no more."""

GONE = "is no longer listed by the driver: it comes back with a reset or a restart"

_PROCESSES = {
    "compute": ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"),
    "graphics": ("nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v2"),
}


class Device:
    """One GPU and the handle that NVML knows it by. A lost one is asked again by `seldom` only."""

    def __init__(self, nvml: Nvml, index: int) -> None:
        self._nvml = nvml
        self.index = index
        self.handle: Any = None
        self.listens = False
        """Whether its Xid errors are heard; a new handle hears nothing yet."""
        self._gpu = Gpu(index=index)
        self._links = LinkReader(nvml)

    @property
    def gpu(self) -> Gpu:
        """What is known of it now."""
        return self._gpu

    def attach(self) -> None:
        """Find it and read what never changes. A lost one is marked so."""
        try:
            if self.handle is None:
                self.handle = self._find()
            if self.handle is not None:
                self._gpu = replace(self._gpu, **self._fixed(), lost="")
            elif self._gpu.uuid is not None and not self._gpu.lost:
                self._lose(GONE)
        except GpuLostError as error:
            self._lose(str(error))

    def let_go(self) -> None:
        """Forget its handle, as of a driver that is closed; `seldom` finds it again."""
        self.handle, self.listens = None, False

    def _find(self) -> Any:
        """Its handle. One that was known before is found by its bus id: without it others may have moved up."""
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
        """Read what changes seldom; also tries whether a lost GPU is back. ``by_bus``: indices by PCI bus id."""
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
        """Read what changes every second, at ``at`` (Unix seconds)."""
        if self.handle is None or self._gpu.lost:
            return
        try:
            changing = self._changing()
            self._links.often(self.handle, at)
        except GpuLostError as error:
            self._lose(str(error))
            return
        sent, received = self._links.traffic
        self._gpu = replace(
            self._gpu, **changing, nvlinks=self._links.links, nvlink_sent_gbs=sent, nvlink_received_gbs=received
        )

    def saw_xid(self, xid: int, at: float) -> None:
        """The driver reported an Xid error on it."""
        self._gpu = replace(self._gpu, xid=xid, xid_at=at)

    def give_holders(self, holders: tuple[Holder, ...]) -> None:
        """Its processes with what was found out about them."""
        self._gpu = replace(self._gpu, used_by=holders)

    def _lose(self, why: str) -> None:
        """Keep what never changes, forget the rest; after a reset it has another handle."""
        self._gpu = Gpu(**{name: getattr(self._gpu, name) for name in KEPT_OF_A_LOST}, lost=why)
        self._links = LinkReader(self._nvml)
        self.let_go()

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
        }

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
        memory = self._nvml.first(("memory_v2", "nvmlDeviceGetMemoryInfo"), handle)
        use = call("nvmlDeviceGetUtilizationRates", handle)
        power = call("nvmlDeviceGetPowerUsage", handle)
        reasons = self._nvml.first(
            ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"), handle
        )
        return {
            "memory_gib": gib(memory.total) if memory is not None else None,
            "used_gib": gib(memory.used) if memory is not None else None,
            "free_gib": gib(memory.free) if memory is not None else None,
            "utilization": use.gpu if use is not None else None,
            "memory_utilization": use.memory if use is not None else None,
            "temperature_c": self._nvml.first(("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"), handle, 0),
            "power_w": None if power is None else power / 1000,
            "clock_mhz": call("nvmlDeviceGetClockInfo", handle, pynvml.NVML_CLOCK_SM),
            "memory_clock_mhz": call("nvmlDeviceGetClockInfo", handle, pynvml.NVML_CLOCK_MEM),
            "throttle": None if reasons is None else tuple(word for bit, word in THROTTLE_REASONS if reasons & bit),
            "pcie_generation": call("nvmlDeviceGetCurrPcieLinkGeneration", handle),
            "pcie_width": call("nvmlDeviceGetCurrPcieLinkWidth", handle),
            "pcie_replays": call("nvmlDeviceGetPcieReplayCounter", handle),
            "used_by": self._processes(),
            "mig": self._mig() if self._gpu.mig_mode else (),
        }

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
                        gib=gib(process.usedGpuMemory) if process.usedGpuMemory is not None else None,
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
            memory_gib=gib(memory.total) if memory is not None else None,
            free_gib=gib(memory.free) if memory is not None else None,
            gpu_instance=call("nvmlDeviceGetGpuInstanceId", handle),
            compute_instance=call("nvmlDeviceGetComputeInstanceId", handle),
        )


def gib(count: int) -> float:
    """Bytes as GiB, to a MiB."""
    return round(count / GIB, 3)


def bits_of(words: Any) -> list[int]:
    """The numbers of the bits that are set in a mask of 64-bit words."""
    mask = sum(int(word) << (64 * position) for position, word in enumerate(words))
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]


def ranges(numbers: list[int]) -> str | None:
    """``0-3,8`` for 0, 1, 2, 3 and 8; None for none."""
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
