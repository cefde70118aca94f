"""What a server's GPUs take while a step of a ramp is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vllm_console.history.energy import Energy, Tariff, energy_within, totals_of

if TYPE_CHECKING:
    from vllm_console.metrics.sample import Sample
    from vllm_launchers.host.gpu.host import Host

EDGE_SECONDS = 3.0
"""By how much the first and the last reading may lie within a step; they are taken every second."""


class EnergyMeter:
    """Keeps what ``latest`` shows of the GPUs; ``pid`` is the server's process, ``gpus`` those that it was given."""

    def __init__(
        self, pid: int, gpus: Sequence[int], latest: Callable[[], Host | None], tariff: Tariff | None = None
    ) -> None:
        self._pid, self._gpus, self._latest, self._tariff = pid, set(gpus), latest, tariff
        self._hosts: list[Host] = []

    def look(self) -> None:
        """Keep the newest reading."""
        host = self._latest()
        if host is not None and (not self._hosts or host.at != self._hosts[-1].at):
            self._hosts.append(host)

    def energy(self, samples: Sequence[Sample]) -> Energy | None:
        """The energy from the first to the last of the server's samples, and let go of the readings."""
        self.look()
        hosts, self._hosts = self._hosts, []
        if len(samples) < 2:
            return None
        start, end = samples[0].at, samples[-1].at
        found = energy_within(hosts, self._pid, list(map(totals_of, samples)), start, end, EDGE_SECONDS)
        if found is None or set(found.gpus) != self._gpus:
            return None
        return replace(found, tariff=self._tariff)
