"""NVLink ports of one GPU: state, version, far end, counters of traffic and errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pynvml

from vllm_launchers.machine.gpu.host import NvLink
from vllm_launchers.machine.gpu.nvml import Nvml

MOST_LINKS = 36
VERSIONS = {1: "1.0", 2: "2.0", 3: "2.2", 4: "3.0", 5: "3.1", 6: "4.0", 7: "5.0", 8: "6.0"}
"""What ``nvmlDeviceGetNvLinkVersion`` numbers mean (``NVML_NVLINK_VERSION_…``)."""

_SPEED = getattr(pynvml, "NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON", 90)
_COUNT = getattr(pynvml, "NVML_FI_DEV_NVLINK_LINK_COUNT", 91)
_SENT = getattr(pynvml, "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", 138)
_RECEIVED = getattr(pynvml, "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", 139)
_SENT_BYTES = getattr(pynvml, "NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES", 202)
_RECEIVED_BYTES = getattr(pynvml, "NVML_FI_DEV_NVLINK_COUNT_RCV_BYTES", 204)
_COUNTERS = ((_SENT, _RECEIVED, 1), (_SENT_BYTES, _RECEIVED_BYTES, 1024))
"""Traffic counters and how many of their units make a KiB: NVLink 2 to 4 count KiB, NVLink 5 counts bytes."""

_ERRORS = (
    ("replay", pynvml.NVML_NVLINK_ERROR_DL_REPLAY),
    ("recovery", pynvml.NVML_NVLINK_ERROR_DL_RECOVERY),
    ("crc", pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT),
)
_KIB_PER_GB = 1e9 / 1024


@dataclass(frozen=True, slots=True)
class _Counters:
    """KiB sent and received by each port, at ``at`` (Unix seconds)."""

    at: float
    sent: list[int | None]
    received: list[int | None]


class LinkReader:
    """Keeps what was read last, to make rates of counters."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._links: tuple[NvLink, ...] = ()
        self._wanted: list[tuple[int, int]] = []
        self._per_kib = 1
        self._before: _Counters | None = None
        self.speed_mbs: float | None = None
        self.traffic: tuple[float | None, float | None] = (None, None)
        """GB/s sent and received over all links since the look before."""

    @property
    def links(self) -> tuple[NvLink, ...]:
        """Its ports as last read."""
        return self._links

    def seldom(self, handle: Any, by_bus: dict[str, int]) -> None:
        """Read state, version, far end and errors of each port."""
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
        """Read the traffic counters of all ports, in one call."""
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
        # Where the driver does not say what it is: a far end that is none of the GPUs is a switch.
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
    """A PCI bus id to compare by: lower case, domain of four digits."""
    return (bus.decode("ascii", "replace") if isinstance(bus, bytes) else bus).lower()[-12:]


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known), 3) if known else None


def _rates(seconds: float, before: Sequence[int | None], now: Sequence[int | None]) -> list[float | None]:
    """GB/s of each counter. One that fell was set back by a reset of the GPU."""
    return [
        None
        if old is None or new is None or new < old or seconds <= 0
        else round((new - old) / _KIB_PER_GB / seconds, 3)
        for old, new in zip(before, now, strict=True)
    ]
