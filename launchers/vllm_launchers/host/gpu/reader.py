"""Reads the host document from the driver, once or repeatedly. Blocks as long as the driver does."""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import psutil
import pynvml
from msgspec.structs import replace

from vllm_launchers.host.gpu.device import Device, bus_key
from vllm_launchers.host.gpu.host import DriverError, Gpu, Holder, Host, Link, with_servers
from vllm_launchers.host.gpu.nvml import GpuLostError, Nvml
from vllm_launchers.host.gpu.topology import bandwidth, islands_of
from vllm_launchers.secrets import redact_argv
from vllm_launchers.units import GIB

MOST_COMMAND = 300


class ProcessDetails:
    """Caches process details; refreshes only if the set of pids has changed."""

    def __init__(self) -> None:
        self._known: dict[int, Holder] = {}

    def look(self, pids: Collection[int]) -> None:
        """Look up these processes."""
        wanted = set(pids)
        if wanted == self._known.keys():
            return
        self._known = {pid: self._known.get(pid) or describe(pid) for pid in wanted}

    def complete(self, holder: Holder) -> Holder:
        """The same holder with user, command and age."""
        known = self._known.get(holder.pid)
        if known is None:
            return holder
        return replace(
            known, pid=holder.pid, gib=holder.gib, kind=holder.kind, instance=holder.instance, server=holder.server
        )


def describe(pid: int) -> Holder:
    """The known details of a process; unknown ones are None."""
    try:
        process = psutil.Process(pid)
        started = process.create_time()
    except (psutil.Error, OSError, ValueError, OverflowError):
        return Holder(pid)
    user = command = None
    try:
        with process.oneshot():
            user = process.username()
            command = " ".join(redact_argv(tuple(process.cmdline())))[:MOST_COMMAND] or process.name()
    except (psutil.Error, OSError):
        pass  # both are hidden for another user's process
    return Holder(pid, user=user, command=command, started_at=started, ancestors=_ancestors(process))


def _ancestors(process: psutil.Process) -> tuple[int, ...]:
    """Its parent pids, nearest first, and the leader of its session."""
    pids: list[int] = []
    try:
        pids = [parent.pid for parent in process.parents() if parent.pid > 1]
        leader = os.getsid(process.pid)
    except (psutil.Error, OSError):
        return tuple(pids)
    return tuple(pids) if leader in (0, 1, process.pid) or leader in pids else (*pids, leader)


LEAST_SECONDS = 0.2
"""CPU use over a shorter time is meaningless."""


class SystemReader:
    """Reads CPU, memory and swap; CPU use is measured between two samples."""

    def __init__(self) -> None:
        self._sampled_at: float | None = None

    def host(self, at: float) -> Host:
        """The host without its GPUs, at ``at`` (Unix seconds). ``cpu_percent`` is None the first time."""
        memory, swap = psutil.virtual_memory(), psutil.swap_memory()
        return Host(
            hostname=socket.gethostname(),
            cpu=_cpu_name(),
            cpu_cores=os.cpu_count(),
            cpu_percent=self._cpu_percent(),
            memory_gib=round(memory.total / GIB, 1),
            memory_free_gib=round(memory.available / GIB, 1),
            swap_gib=round(swap.total / GIB, 1),
            swap_used_gib=round(swap.used / GIB, 1),
            at=at,
        )

    def _cpu_percent(self) -> float | None:
        before, now = self._sampled_at, time.monotonic()
        self._sampled_at = now
        percent = psutil.cpu_percent(interval=None)
        return None if before is None or now - before < LEAST_SECONDS else percent


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
"""Samples between two reads of what rarely changes (link states, error counts, limits, lost GPUs)."""

REOPEN_AFTER, MOST_REOPEN_AFTER = 60, 960
"""Samples after which the driver is reopened while a GPU stays lost, doubled each time up to the second: only a fresh
driver may notice a reset, but opening it can take seconds."""

MOST_EVENTS = 64
MOST_GPUS = 64

ANCESTORS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""``nvmlGpuTopologyLevel_t`` as nvidia-smi writes it; 0 is one board with a bridge of its own."""

P2P_BY_NVLINK = 2
"""``NVML_P2P_CAPS_INDEX_NVLINK``."""

P2P_STATUS = {
    0: "ok",
    1: "the chipset does not support it",
    2: "these GPUs do not support it",
    3: "the I/O hub's topology does not support it",
    4: "switched off in the driver (registry key)",
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
        """Samples since a GPU was lost or the driver was last reopened for it, and after how many it is reopened."""
        self._opened = False

    def open(self) -> None:
        """Open the driver and read what never changes.

        Raises:
            DriverError: there is none, or it cannot be asked.
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
        """The host as it is now, at ``at`` (Unix seconds).

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
            problem="" if gpus else "the NVIDIA driver is there, but it has no GPU",
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
            device.let_go()
        self._events = self._nvml.call("nvmlEventSetCreate")

    def _listen(self) -> None:
        """Subscribe to the Xid errors of GPUs without a subscription."""
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
        self._details.look({holder.pid for device in self._devices for holder in device.gpu.holders})
        for device in self._devices:
            if device.gpu.used_by:
                device.give_holders(tuple(map(self._details.complete, device.gpu.used_by)))

    def _pair_links(self, gpus: tuple[Gpu, ...]) -> tuple[Link, ...]:
        """Every pair's link; recomputed only if a port has changed."""
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
        """NVLinks of a pair if the driver hides the far end of a port (as in a virtual machine).

        It still reports who reaches whom over NVLink; the ports are divided evenly among these.
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


def _text(value: Any) -> str | None:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
