"""Check the logs of a soak: each worker's numbered lines, none missing, duplicated or out of order."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from soak.engine import TEXT
from soak.program import LOG_FILES
from soak.schedule import TREES
from soak.world import World
from vllm_launchers.keeper import folders

LINE = re.compile(rb"flood (\w{8}) (\d{8}) " + TEXT.encode() + rb"\n")

Said = dict[str, tuple[str, int]]
"""Maps a worker to its server and the number of lines it wrote."""


@dataclass
class Logs:
    """Result: lines written and found, and the gaps between them."""

    workers: int = 0
    written: int = 0
    found: int = 0
    gaps: list[int] = field(default_factory=list)


def check(world: World) -> Logs:
    """Compare the lines reported by workers with the logs of existing servers."""
    logs, said = Logs(), Said()
    servers = {port: name for name, port in world.ports.items()}
    for note in world.notes.glob("flood-*"):
        port, count = note.read_text().split()
        if (server := servers.get(int(port))) is None:
            world.journal.blame(f"a server served on port {port}, which is none of those that were asked for")
            continue
        said[note.name.removeprefix("flood-")] = (server, int(count))
        logs.workers += 1
        logs.written += int(count)
    for server in TREES:
        folder = folders.server_folder(world.state, server)
        older = sorted(folder.glob("server.log.*"), key=lambda path: -int(path.suffix[1:]))
        text = b"".join(path.read_bytes() for path in [*older, folder / "server.log"] if path.exists())
        seen: dict[str, list[int]] = defaultdict(list)
        for found in LINE.finditer(text):
            seen[found[1].decode()].append(int(found[2]))
        if text.count(b"flood ") - sum(map(len, seen.values())) > 1 + _keepers_killed(world, server):
            world.journal.blame(f"{server}: lines of its log are torn")
        for worker in _unseen(world, server, said, seen) if len(older) < LOG_FILES - 1 else ():
            world.journal.blame(f"{server}: not one line of worker {worker} is in its log")
        for place, (worker, numbers) in enumerate(seen.items()):
            logs.found += len(numbers)
            whole = said.get(worker, (server, 0))[1]
            _judge(world, server, worker, numbers, whole, first=place == 0 and len(older) > 0, logs=logs)
    return logs


def _unseen(world: World, server: str, said: Said, seen: Iterable[str]) -> list[str]:
    """Workers of the current record whose complete output is missing although no keeper was killed."""
    record = world.record(server)
    if record is None or _keepers_killed(world, server):
        return []
    return [
        worker
        for worker, (name, count) in said.items()
        if name == server and count and worker not in seen and _written_at(world, worker) > record.created_at
    ]


def _written_at(world: World, worker: str) -> float:
    return (world.notes / f"flood-{worker}").stat().st_mtime


def _keepers_killed(world: World, server: str) -> int:
    return sum(one.server == server and one.part == "keeper" for one in world.journal.injuries)


def _judge(world: World, server: str, worker: str, numbers: list[int], whole: int, *, first: bool, logs: Logs) -> None:
    """``whole``: the number of lines reported as written; ``first``: earlier lines may have been rotated away."""
    if any(after <= before for before, after in itertools.pairwise(numbers)):
        world.journal.blame(f"{server}: lines of worker {worker} are doubled or out of place")
    gaps = [after - before - 1 for before, after in itertools.pairwise(numbers) if after > before + 1]
    if numbers[0] > 0 and not first:
        gaps.append(numbers[0])
    if gaps:
        world.journal.blame(f"{server}: {sum(gaps)} lines of worker {worker} are missing, in {gaps}")
    if (last := whole - numbers[-1] - 1) > 0:
        gaps.append(last)
        world.journal.blame(f"{server}: the last {last} lines of worker {worker} are missing")
    logs.gaps += gaps
