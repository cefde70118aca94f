"""This machine's GPUs, or a recorded host's: samples, memory still held by a stopped server, a server's energy."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from vllm_console.fleet.snapshot import ServerView
from vllm_console.history.energy import Energy, newest_energy, totals_of
from vllm_console.history.gpu_samples import GPU_SAMPLES, KEPT_SECONDS, read_gpu_samples
from vllm_console.history.store import HISTORY, HistoryError, HistoryReader
from vllm_launchers.host.gpu.hardware_warnings import IDLE
from vllm_launchers.host.gpu.host import Gpu, GpuClaim, Holder, Host, has_driver, with_claims, with_servers
from vllm_launchers.host.gpu.vendors import no_driver
from vllm_launchers.keeper import folders, processes
from vllm_launchers.keeper.process_group import recorded
from vllm_launchers.keeper.records import ServerRecord, State
from vllm_launchers.units import GIB
from vllm_launchers.vllm.flags.changes import whole_number
from vllm_launchers.vllm.release_defaults import default_utilization

if TYPE_CHECKING:
    from vllm_launchers.host.board import Board
    from vllm_launchers.host.gpu.monitor import GpuMonitor


class KnownGpus(msgspec.Struct, frozen=True):
    """The known GPUs. ``host`` is None if there are none; ``problem`` says why, or why the data is stale."""

    host: Host | None = None
    problem: str = ""


class FleetGpus:
    """The source of the fleet's GPUs. `latest` never blocks.

    ``file`` names a recorded host, used in place of this machine; ``state`` is the folder of our servers.
    """

    def __init__(self, file: Path | None, state: Path) -> None:
        self._state = state
        self._recorded: Host | None = None
        if file is not None:
            from vllm_launchers.host.gpu.document import read_host

            self._recorded = read_host(file)
        self._servers: Mapping[int, str] = {}
        self.claims: Mapping[int, tuple[GpuClaim, ...]] = {}
        """Claims of this machine's GPUs on the board, by index; set by the fleet."""
        self._occupants: Sequence[ServerView] = ()
        self._watch: GpuMonitor | None = None
        self._problem = ""
        self._closed = False

    @property
    def recorded_host(self) -> str | None:
        """Name of the recorded host; None for this machine."""
        return self._recorded.hostname if self._recorded is not None else None

    @property
    def recorded(self) -> bool:
        """Whether the host is a recorded one."""
        return self._recorded is not None

    def start(self) -> None:
        """Start watching this machine's GPUs, in a thread that imports what that needs."""
        if self._recorded is None:
            threading.Thread(target=self._begin, name="gpus", daemon=True).start()

    def _begin(self) -> None:
        if not has_driver():
            self._problem = no_driver()  # a driver won't appear while the console is open: don't check again
            return
        from vllm_launchers.host.gpu.monitor import GpuMonitor

        watch = GpuMonitor(lambda: self._servers)
        watch.start()
        self._watch = watch
        if self._closed:
            watch.close()

    def update(self, records: Iterable[ServerRecord], views: Iterable[ServerView]) -> None:
        """Set which server owns which processes, and which simulated servers would hold GPUs of a recorded host."""
        self._servers = roots(records, self._state)
        if self._recorded is not None:
            self._occupants = occupants(self._recorded, views)

    @property
    def has_driver(self) -> bool:
        """Whether GPUs can be queried at all; costs next to nothing."""
        return has_driver()

    def latest(self) -> KnownGpus:
        """The GPUs as last seen."""
        if self._recorded is not None:
            return KnownGpus(occupied(self._recorded, self._occupants))
        if self._watch is None:
            return KnownGpus(None, self._problem)
        host = with_claims(self._watch.latest(), self.claims)
        return KnownGpus(host, host.problem)

    def host(self) -> Host | None:
        """The newest host, or None while none is known."""
        return self.latest().host

    def read(self) -> Host:
        """The host now; if nothing watches it, it is read once, which may take a second."""
        seen = self.latest()
        if seen.host is not None and (self._recorded is not None or seen.host.gpus or seen.problem):
            return seen.host
        from vllm_launchers.host.gpu.monitor import read_once

        return with_claims(read_once(lambda: self._servers), self.claims)

    @property
    def watching(self) -> bool:
        """Whether GPUs are known without querying them."""
        host = self.latest().host
        return host is not None and bool(host.gpus)

    def close(self) -> None:
        """Stop watching, without waiting."""
        self._closed = True
        if self._watch is not None:
            self._watch.close()


def earlier_samples(state: Path, since: float, board: Board | None) -> list[Host]:
    """Recorders' samples of this machine's GPUs after ``since`` (Unix seconds), oldest first.

    Holders are labeled with our servers, and board claims count from when they were made.
    """
    from vllm_console.fleet.board import gpu_claims
    from vllm_launchers.launch.server_records import ServerRecords

    hosts = read_gpu_samples(state / GPU_SAMPLES, since)
    servers = roots(ServerRecords(state).read()[0], state) if hosts else {}
    found = [with_servers(host, servers) for host in hosts]
    if board is None or not board.claims:
        return found

    def claims(at: float) -> Mapping[int, tuple[GpuClaim, ...]]:
        return gpu_claims(replace(board, claims=tuple(claim for claim in board.claims if claim.since <= at)))

    return [with_claims(host, claims(host.at or 0.0)) for host in found]


def roots(records: Iterable[ServerRecord], state: Path) -> dict[int, str]:
    """Map pids to server names: of running servers, their keepers, and Ray workers, which descend from neither."""
    alive = [record for record in records if record.state.alive]
    owned = [(identity, record.name) for record in alive for identity in (record.server, record.keeper)]
    found = {identity.pid: name for identity, name in owned if identity is not None}
    for record in alive:
        if record.current.spec.ray:
            members = recorded(folders.server_folder(state, record.name)).members
            found |= {member.pid: record.name for member in members if processes.alive(member)}
    return found


def occupants(host: Host, servers: Iterable[ServerView]) -> list[ServerView]:
    """This user's simulated servers that hold GPUs of a recorded host."""
    return [one for one in servers if one.ours and one.state.alive and one.recorded_host == host.hostname]


def occupied(host: Host, servers: Collection[ServerView]) -> Host:
    """The host with simulated servers on their GPUs: the memory they hold and the load they cause.

    A GPU works while requests run. Its power is then between idle and its limit, rising with the requests per step; a
    GPU without requests is idle.
    """
    taken: dict[int, list[ServerView]] = {}
    for server in servers:
        for index in server.gpus:
            taken.setdefault(index, []).append(server)
    if not taken:
        return host
    gpus = tuple(_held(gpu, taken.get(gpu.index, ())) for gpu in host.gpus)
    asleep = sum(server.sleep.host_gib or 0.0 for server in servers if server.sleep is not None)
    free = max(0.0, host.memory_free_gib - asleep) if host.memory_free_gib is not None else None
    return replace(host, gpus=gpus, memory_free_gib=free)


def _held(gpu: Gpu, servers: Sequence[ServerView]) -> Gpu:
    gpu = _linked(gpu, servers)
    for server in servers:
        if gpu.memory_gib is None or gpu.free_gib is None:
            return gpu
        share = server.flags.get("gpu-memory-utilization")
        if not isinstance(share, int | float):
            share = default_utilization(server.engine.release if server.engine else None)
        gib = round(min(gpu.free_gib, _asleep_gib(server) or share * gpu.memory_gib), 3)
        holder = Holder(pid=server.pid or 0, gib=gib, server=server.name, command="simulated engine")
        gpu = replace(
            gpu,
            used_by=(*gpu.holders, holder),
            free_gib=round(gpu.free_gib - gib, 3),
            used_gib=round((gpu.used_gib or 0.0) + gib, 3),
        )
    running = sum(_running(server) for server in servers)
    return _working(gpu, running) if running else gpu


def _asleep_gib(server: ServerView) -> float | None:
    """GiB that a sleeping simulated server holds on each of its GPUs; None while it is awake."""
    if server.state is not State.ASLEEP:
        return None
    from vllm_launchers.simulated.memory import bytes_asleep

    return bytes_asleep(whole_number(server.flags, "tensor-parallel-size")) / GIB


def _running(server: ServerView) -> float:
    return (server.window.requests_running or 0.0) if server.window is not None else 0.0


def _linked(gpu: Gpu, servers: Sequence[ServerView]) -> Gpu:
    """The GPU with the NVLink traffic of these servers; unchanged if others use it (their traffic is unknown)."""
    if not servers or not gpu.nvlinks or gpu.holders:
        return gpu
    peers = {index for server in servers for index in server.gpus} - {gpu.index}
    used = [link for link in gpu.nvlinks if link.active and (link.switch or link.remote in peers)]
    rate = sum(_exchanged_gbs(server) for server in servers)
    each = round(rate / len(used), 3) if used else 0.0
    links = tuple(
        replace(link, sent_gbs=value, received_gbs=value)
        for link in gpu.nvlinks
        for value in (each if link in used else 0.0,)
    )
    total = round(each * len(used), 3)
    return replace(gpu, nvlinks=links, nvlink_sent_gbs=total, nvlink_received_gbs=total)


def _exchanged_gbs(server: ServerView) -> float:
    """GB/s that each GPU of a tensor-parallel server sends: two 16-bit all-reduces per layer and token."""
    ranks, window = whole_number(server.flags, "tensor-parallel-size"), server.window
    if ranks < 2 or window is None:
        return 0.0
    tokens = (window.generation_tokens_per_second or 0.0) + (window.prompt_tokens_per_second or 0.0)
    return tokens * _bytes_reduced(server.model) * 2 * (ranks - 1) / ranks / 1e9


@lru_cache(maxsize=16)
def _bytes_reduced(model: str) -> int:
    """Bytes per token in the all-reduces of all layers; 0 for an unknown model."""
    from vllm_launchers.simulated.settings import ModelNotFoundError, resolve_model

    try:
        geometry = resolve_model(model)
    except ModelNotFoundError:
        return 0
    return 2 * 2 * geometry.layers * geometry.hidden


BUSY_PERCENT = 97.0
"""GPU utilization that nvidia-smi reports while steps run back to back."""
FULL_BATCH = 64
"""About this many sequences per step drive a GPU to its power limit."""
DEGREES_PER_WATT = 0.15
"""Temperature rise of a card of this size, from the recorded hosts: 71 °C at 265 W, 34 °C at 28 W."""


def _working(gpu: Gpu, running: float) -> Gpu:
    """A GPU that decodes ``running`` sequences: memory-bound, and increasingly compute-bound as they grow in number."""
    batch = min(1.0, running / FULL_BATCH)
    seen = replace(
        gpu,
        utilization=BUSY_PERCENT,
        memory_utilization=max(gpu.memory_utilization or 0.0, round(75 - 30 * batch)),
        clock_mhz=gpu.clock_max_mhz or gpu.clock_mhz,
        memory_clock_mhz=gpu.memory_clock_max_mhz or gpu.memory_clock_mhz,
        pcie_generation=gpu.pcie_generation_max or gpu.pcie_generation,
        throttle=tuple(reason for reason in gpu.throttle if reason != IDLE) if gpu.throttle is not None else None,
    )
    if gpu.power_w is None or gpu.power_limit_w is None:
        return seen
    power = max(gpu.power_w, gpu.power_limit_w * (0.62 + 0.33 * batch))
    warmer = (power - gpu.power_w) * DEGREES_PER_WATT
    heat = round(gpu.temperature_c + warmer) if gpu.temperature_c is not None else None
    return replace(seen, power_w=round(power, 1), temperature_c=heat)


TOLERANCE_GIB = 0.5
"""A driver keeps a little memory for itself; less than this does not count as missing."""

TIMEOUT_SECONDS = 30.0
"""How long memory may take to be freed after the server ended; 80 GiB takes a second or two."""

POLL_SECONDS = 0.25


def still_held(name: str, before: Host, read: Callable[[], Host]) -> str:
    """Wait until an ended server's memory is free; return who still holds it after `TIMEOUT_SECONDS`, or an empty
    string.

    ``before`` is the host before the stop, ``read`` returns the newest.
    """
    from vllm_launchers.host.gpu.monitor import wait_until_freed  # loads psutil and pynvml, which a start need not

    seen = _Before.of(before, name)
    if not seen.wanted:
        return ""
    release = wait_until_freed(lambda: seen.less_growth(read()), seen.wanted, seen.ours, timeout=TIMEOUT_SECONDS)
    return "" if release.freed else f"ended, but {release.reason}"


class Releases:
    """Checks, in a thread per stop, that a server's memory is freed. `notice` never blocks.

    ``latest`` returns the newest host without blocking.
    """

    def __init__(self, latest: Callable[[], Host | None], timeout: float = TIMEOUT_SECONDS) -> None:
        self._latest = latest
        self._timeout = timeout
        self._notices: dict[str, str] = {}
        self._watched: dict[str, threading.Event] = {}

    def watch(self, name: str, ended: Callable[[], bool]) -> None:
        """Start watching when a server is asked to stop; ``ended`` returns whether it has ended."""
        host = self._latest()
        before = _Before.of(host, name) if host is not None else None
        if before is None or not before.wanted:
            return
        self.forget(name)
        over = self._watched[name] = threading.Event()
        args = (name, ended, before, over)
        threading.Thread(target=self._run, args=args, name=f"release-{name}", daemon=True).start()

    def notice(self, name: str) -> str:
        """A sentence on who still holds a stopped server's memory; empty if no one does."""
        return self._notices.get(name, "")

    def forget(self, name: str) -> None:
        """Stop watching a server that was restarted or removed: its old memory no longer matters."""
        if (over := self._watched.pop(name, None)) is not None:
            over.set()
        self._notices.pop(name, None)

    def close(self) -> None:
        """Stop watching, without waiting."""
        for over in self._watched.values():
            over.set()

    def _run(self, name: str, ended: Callable[[], bool], before: _Before, over: threading.Event) -> None:
        from vllm_launchers.host.gpu.monitor import wait_until_freed

        def read() -> Host:
            return before.less_growth(self._latest() or Host())

        while not ended():
            if over.wait(POLL_SECONDS):
                return
        timeout = self._timeout
        while not over.is_set():
            release = wait_until_freed(read, before.wanted, before.ours, timeout=timeout)
            if release.freed:
                self._notices.pop(name, None)
                return
            self._notices[name] = f"ended, but {release.reason}"
            if over.is_set():  # forgotten in the meantime
                self._notices.pop(name, None)
                return
            timeout = 0.0
            over.wait(POLL_SECONDS * 4)


class _Before(msgspec.Struct, frozen=True):
    """State before the stop: free GiB expected by GPU once the server is gone, and what others held."""

    wanted: Mapping[int, float]
    ours: frozenset[int]
    """The server's own processes."""
    others: Mapping[tuple[int, int], float]
    """GiB by GPU and pid."""

    @classmethod
    def of(cls, host: Host, name: str) -> _Before:
        wanted, ours, others = {}, set(), {}
        for gpu in host.gpus:
            held = 0.0
            for holder in gpu.holders:
                if holder.server == name:
                    held += holder.gib or 0.0
                    ours.add(holder.pid)
                else:
                    others[gpu.index, holder.pid] = holder.gib or 0.0
            if held > TOLERANCE_GIB and gpu.free_gib is not None:
                wanted[gpu.index] = gpu.free_gib + held - TOLERANCE_GIB
        return cls(wanted, frozenset(ours), others)

    def less_growth(self, host: Host) -> Host:
        """The host without others' growth since the stop: memory they took was freed by the server."""

        def grown(gpu: Gpu) -> float:
            others = (holder for holder in gpu.holders if holder.pid not in self.ours)
            before = self.others
            return sum(max(0.0, (one.gib or 0.0) - before.get((gpu.index, one.pid), 0.0)) for one in others)

        gpus = (gpu if gpu.free_gib is None else replace(gpu, free_gib=gpu.free_gib + grown(gpu)) for gpu in host.gpus)
        return replace(host, gpus=tuple(gpus))


CURRENT_SECONDS = 30.0
"""Energy that ends longer ago than this is not current."""


def recent_energy(state: Path, record: ServerRecord, gpus: Sequence[int], now: float) -> Energy | None:
    """The energy of a server since it was ready, at most of the half hour before ``now`` (Unix seconds); None if
    unknown.

    ``gpus`` are the GPUs assigned to it.
    """
    ready_at = record.current.ready_at
    if record.server is None or not record.state.alive or ready_at is None:
        return None
    since = max(now - KEPT_SECONDS, ready_at)
    hosts = read_gpu_samples(state / GPU_SAMPLES, since)
    if not any(gpu.energy_mj is not None for host in hosts for gpu in host.gpus):
        return None
    with contextlib.closing(HistoryReader(folders.server_folder(state, record.name) / HISTORY)) as reader:
        try:
            entries = reader.since(since)
        except HistoryError:
            return None  # the snapshot reports the history's problem
    totals = [totals_of(entry.sample) for entry in entries if entry.generation == record.current.number]
    found = newest_energy(hosts, record.server.pid, totals)
    if found is None or set(found.gpus) != set(gpus):
        return None
    return found if now - found.end <= CURRENT_SECONDS else None
