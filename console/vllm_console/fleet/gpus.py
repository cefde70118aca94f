"""What the console knows of GPUs: this machine's, or those of a recorded host with our simulated servers put on it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_console.fleet.api import UsageError
from vllm_console.fleet.model import ServerView
from vllm_launchers.keeper.records import ServerRecord
from vllm_launchers.machine.gpu.errors import NO_DRIVER, HostError
from vllm_launchers.machine.gpu.host import Gpu, GpuClaim, Holder, Host, with_claims, with_servers

if TYPE_CHECKING:
    from vllm_launchers.machine.board.model import Board
    from vllm_launchers.machine.gpu.watch import GpuWatch

DRIVER_LIBRARY = "libnvidia-ml.so.1"

DEFAULT_UTILIZATION = 0.92
"""vLLM's own ``gpu-memory-utilization``."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known now. ``host`` is None where no GPU can be; ``problem`` says why, or why it is not fresh."""

    host: Host | None = None
    problem: str = ""


class GpuSource:
    """Where the fleet's GPUs come from. `latest` never blocks.

    ``file`` names a recorded host that stands in place of this machine.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._recorded = _read(file) if file is not None else None
        self._servers: Mapping[int, str] = {}
        self.claims: Mapping[int, tuple[GpuClaim, ...]] = {}
        """What people claim of GPUs, by index; told by the fleet."""
        self._occupants: Sequence[ServerView] = ()
        self._watch: GpuWatch | None = None
        self._problem = ""
        self._closed = False

    @property
    def recorded(self) -> bool:
        """Whether the host is a recorded one."""
        return self._recorded is not None

    def start(self) -> None:
        """Begin to watch this machine's GPUs, in a thread that loads what that needs."""
        if self._recorded is None:
            threading.Thread(target=self._begin, name="gpus", daemon=True).start()

    def _begin(self) -> None:
        import ctypes

        try:
            ctypes.CDLL(DRIVER_LIBRARY)
        except OSError:
            # No driver, and none will come while the console is open: not worth asking again.
            self._problem = NO_DRIVER
            return
        from vllm_launchers.machine.gpu.watch import GpuWatch

        watch = GpuWatch(lambda: self._servers)
        watch.start()
        self._watch = watch
        if self._closed:
            watch.close()

    def tell(self, records: Iterable[ServerRecord], views: Iterable[ServerView]) -> None:
        """Take in which processes are whose, and which simulated servers would hold GPUs of a recorded host."""
        self._servers = roots(records)
        if self._recorded is not None:
            self._occupants = [view for view in views if view.ours and view.simulated and view.state.alive]

    @cached_property
    def has_driver(self) -> bool:
        """Whether GPUs can be asked after at all; costs next to nothing."""
        import ctypes

        try:
            ctypes.CDLL(DRIVER_LIBRARY)
        except OSError:
            return False
        return True

    def latest(self) -> Seen:
        """What is known now."""
        if self._recorded is not None:
            return Seen(with_claims(occupied(self._recorded, self._occupants), self.claims))
        if self._watch is None:
            return Seen(None, self._problem)
        watched = self._watch.latest()
        return Seen(with_claims(watched.host, self.claims), watched.problem or watched.host.problem)

    def host(self) -> Host | None:
        """The newest host, or None while none is known."""
        return self.latest().host

    def read(self) -> Host:
        """The host now; where nothing watches it, it is looked at once, which may take a second."""
        seen = self.latest()
        if seen.host is not None and (self._recorded is not None or seen.host.gpus or seen.problem):
            return seen.host
        from vllm_launchers.machine.gpu.watch import read_once

        return with_claims(read_once(lambda: self._servers), self.claims)

    @property
    def watching(self) -> bool:
        """Whether GPUs are in sight without asking for them."""
        host = self.latest().host
        return host is not None and bool(host.gpus)

    def close(self) -> None:
        """Stop watching, without waiting."""
        self._closed = True
        if self._watch is not None:
            self._watch.close()


def earlier_looks(state: Path, since: float, board: Board | None) -> list[Host]:
    """What recorders saw of this machine's GPUs after ``since`` (Unix seconds), oldest first.

    Our servers are named, and what the board says now is said of all looks since it was written there.
    """
    from vllm_console.fleet.board import gpu_claims
    from vllm_console.fleet.records import Records
    from vllm_console.telemetry.gpu_looks import GPU_LOOKS, read_looks

    hosts = read_looks(state / GPU_LOOKS, since)
    servers = roots(Records(state).read()[0]) if hosts else {}
    found = [with_servers(host, servers) for host in hosts]
    if board is None or not board.claims:
        return found

    def claims(at: float) -> Mapping[int, tuple[GpuClaim, ...]]:
        return gpu_claims(replace(board, claims=tuple(claim for claim in board.claims if claim.since <= at)))

    return [with_claims(host, claims(host.at or 0.0)) for host in found]


def roots(records: Iterable[ServerRecord]) -> dict[int, str]:
    """Pids of servers that run and of their keepers, each with its server's name."""
    alive = [record for record in records if record.state.alive]
    owned = [(identity, record.name) for record in alive for identity in (record.server, record.keeper)]
    return {identity.pid: name for identity, name in owned if identity is not None}


def occupied(host: Host, servers: Iterable[ServerView]) -> Host:
    """The host with simulated servers on the GPUs that they were given, holding what their flags take."""
    taken: dict[int, list[ServerView]] = {}
    for server in servers:
        for index in server.gpus:
            taken.setdefault(index, []).append(server)
    return replace(host, gpus=tuple(_held(gpu, taken.get(gpu.index, ())) for gpu in host.gpus)) if taken else host


def _held(gpu: Gpu, servers: Sequence[ServerView]) -> Gpu:
    for server in servers:
        if gpu.memory_gib is None or gpu.free_gib is None:
            return gpu
        share = server.flags.get("gpu-memory-utilization")
        share = share if isinstance(share, int | float) else DEFAULT_UTILIZATION
        gib = round(min(gpu.free_gib, share * gpu.memory_gib), 3)
        holder = Holder(pid=server.pid or 0, gib=gib, server=server.name, command="simulated engine")
        gpu = replace(
            gpu,
            used_by=(*gpu.holders, holder),
            free_gib=round(gpu.free_gib - gib, 3),
            used_gib=round((gpu.used_gib or 0.0) + gib, 3),
        )
    return gpu


def _read(file: Path) -> Host:
    from vllm_launchers.machine.gpu.document import read_host

    try:
        return read_host(file)
    except HostError as error:
        raise UsageError(str(error)) from error
