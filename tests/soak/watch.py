"""Checks a soak from outside every few seconds: permanent invariants and resource use of keepers."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from soak.program import LOG_BYTES, LOG_FILES
from soak.schedule import SERVERS
from soak.world import Ours, World
from vllm_launchers.keeper import client, processes
from vllm_launchers.keeper.records import ProcessIdentity
from vllm_launchers.procfs import PROC

EVERY_SECONDS = 2.0
LEFT_SECONDS = 10.0
"""Seconds after a server's end by which all of its processes must be gone."""
LOOKS = 4
"""Minimum number of sightings, so that a paused machine does not look like a leftover process."""
PAGE, TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")


@dataclass
class Use:
    """Resource samples of a keeper: resident bytes and open files."""

    memory: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)


@dataclass
class Watch:
    """Between `start` and `stop`, records violations in the journal."""

    world: World
    use: dict[ProcessIdentity, Use] = field(default_factory=lambda: defaultdict(Use))
    checks: int = 0
    most_processes: int = 0
    most_bytes: int = 0
    """Maximum size of the state folder."""
    cpu: dict[ProcessIdentity, float] = field(default_factory=dict)
    """CPU seconds of each keeper, server and recorder at the last sample."""
    _left: dict[tuple[str, ProcessIdentity], tuple[float, int]] = field(default_factory=dict)
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(EVERY_SECONDS):
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 - a thread's boundary: whatever went wrong is a finding
                self.world.journal.blame(f"the watch: {error!r}")

    def look(self) -> None:
        world = self.world
        self.checks += 1
        ours = world.ours()
        self.most_processes = max(self.most_processes, len(ours))
        for pid, one in ours.items():
            if one.server or "keeper/__main__" in one.words:
                self._measure_cpu(pid)
            for name, value in world.canaries.items():
                if value in one.words:
                    world.journal.blame(f"{name} stands in the command line of pid {pid}: {one.words[:100]}")
        for name in SERVERS:
            self._look_at(name, ours)
        self._look_at_others()
        self._look_at_disk()

    def _look_at(self, name: str, ours: dict[int, Ours]) -> None:
        world = self.world
        before = client.stamp(world.state, name)
        record = world.record(name)
        if record is not None and record.keeper is not None and processes.alive(record.keeper):
            self._measure(record.keeper)
        if record is not None and (record.needs_keeper or client.keeper_alive(world.state, name)):
            self._left = {key: value for key, value in self._left.items() if key[0] != name}
            return
        left = {who for pid, one in ours.items() if one.server == name and (who := processes.identity(pid)) is not None}
        if client.stamp(world.state, name) != before:
            return  # it resumed meanwhile
        now = time.monotonic()
        for who in left:
            since, checks = self._left.get((name, who), (now, 0))
            self._left[name, who] = (since, checks + 1)
            if now - since > LEFT_SECONDS and checks >= LOOKS and processes.alive(who):
                words = ours[who.pid].words[:120]
                state = record.state if record else "absent"
                world.journal.blame(f"{name} is {state}, and pid {who.pid} of it is left: {words}")

    def _measure(self, keeper: ProcessIdentity) -> None:
        with contextlib.suppress(OSError, IndexError):
            resident = int(Path(PROC, str(keeper.pid), "statm").read_text().split()[1]) * PAGE
            files = len(list(Path(PROC, str(keeper.pid), "fd").iterdir()))
            if processes.alive(keeper):
                self.use[keeper].memory.append(resident)
                self.use[keeper].files.append(files)

    def _measure_cpu(self, pid: int) -> None:
        with contextlib.suppress(OSError, IndexError):
            words = Path(PROC, str(pid), "stat").read_text().rpartition(")")[2].split()
            if (who := processes.identity(pid)) is not None:
                self.cpu[who] = (int(words[11]) + int(words[12])) / TICKS

    def _look_at_others(self) -> None:
        for name, process in self.world.others.items():
            if process.poll() is not None:
                self.world.journal.blame(f"the {name} of somebody else has ended: {process.returncode}")
                continue
            with contextlib.suppress(OSError):
                state = Path(PROC, str(process.pid), "stat").read_text().rpartition(")")[2].split()[0]
                if state == "T":
                    self.world.journal.blame(f"the {name} of somebody else was stopped")

    def _look_at_disk(self) -> None:
        total = 0
        for folder, _, names in os.walk(self.world.state):  # `os.walk` tolerates files deleted meanwhile
            for path in (Path(folder, name) for name in names):
                with contextlib.suppress(OSError):
                    size = path.lstat().st_size
                    total += size
                    if path.name.startswith("server.log"):
                        number = int(path.suffix[1:]) if path.suffix != ".log" else 0
                        if size > LOG_BYTES or number >= LOG_FILES:
                            self.world.journal.blame(f"{path}: {size} bytes, though {LOG_FILES} of {LOG_BYTES} are all")
        self.most_bytes = max(self.most_bytes, total)
