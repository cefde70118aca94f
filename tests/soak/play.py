"""A complete soak: the actions of a seed run for some minutes, then everything is checked."""

from __future__ import annotations

import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from soak import invariants, logs
from soak.actors import act
from soak.journal import Journal
from soak.schedule import DECK, SERVERS, schedule
from soak.watch import Watch
from soak.world import World

AT_ONCE = 6
"""Maximum number of concurrent actions; the next one waits."""
ROUND = sum(DECK.values())
PACE = 2.0
"""Mean pause between actions in seconds. Two seconds use about half a core, including a sixth of a core for eight
servers."""
MEGABYTE = 1 << 20
KEEPER_BYTES = 40 * MEGABYTE
"""Maximum memory of a keeper; it starts at about 16 MB."""
GROWTH_BYTES = 4 * MEGABYTE
GROWTH_FILES = 8
"""Allowed growth of a keeper's memory and open files between its first and last samples."""
SETTLED = 5
"""Number of samples compared at each end of a keeper's life."""
MUST = ("SIGKILL to keeper", "SIGKILL to api", "SIGKILL to engine", "SIGKILL to worker", "SIGKILL to recorder",
        "SIGTERM to keeper", "SIGSTOP to keeper", "SIGSTOP to api", "load was answered", "flood", "done: restart",
        "done: stop", "console quit", "console killed", "console hung up", "console closed",
        "console read-only")  # fmt: skip
"""Events that must happen for the soak to be meaningful."""


@dataclass
class Result:
    seed: int
    journal: Journal
    seconds: float = 0.0
    lines: list[str] = field(default_factory=list)
    """Observations, as text."""

    @property
    def text(self) -> str:
        wrong = [f"WRONG {text}" for text in self.journal.wrong] or ["nothing was lost, nobody was hurt"]
        return "\n".join([f"soak, seed {self.seed}: {self.seconds:.0f} s", *self.lines, *wrong])


def soak(seed: int, minutes: float, home: Path, pace: float = PACE) -> Result:
    """Run the actions of a seed for some minutes, at least one round; ``pace`` as in `schedule`."""
    journal = Journal(home / "actions.log")
    world = World(home / "home", journal)
    watch, result, began = Watch(world), Result(seed, journal), time.monotonic()
    journal.say(f"seed {seed}, {minutes:g} minutes, pace {pace:g}")
    try:
        world.open()
        watch.start()
        played = _play(world, seed, minutes * 60.0, pace)
        result.lines.append(f"{played} actions: {', '.join(f'{n} {k}' for k, n in sorted(journal.counts.items()))}")
        _judge(world, watch, result)
    finally:
        watch.stop()
        world.close()
        result.seconds = time.monotonic() - began
        journal.say(result.text)
    return result


def _play(world: World, seed: int, seconds: float, pace: float) -> int:
    deadline, played = time.monotonic() + seconds, 0
    table = threading.Semaphore(AT_ONCE)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for action in schedule(seed, pace):
            if time.monotonic() > deadline and played >= ROUND:
                break
            time.sleep(action.pause)
            table.acquire()
            world.journal.say(f"{action} …")
            pool.submit(act, world, action).add_done_callback(lambda _: table.release())
            played += 1
    return played


def _judge(world: World, watch: Watch, result: Result) -> None:
    """Check everything that must hold when idle and after all servers are stopped."""
    journal, say = world.journal, result.lines.append
    records = invariants.rest(world)
    invariants.states(world, records)
    say("at rest: " + ", ".join(f"{name} {one.state}" for name, one in records.items()))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: world.command("stop", name, "--json"), records))
    for name in records:
        if (record := world.record(name)) is not None and record.state.alive:
            journal.blame(f"{name} could not be stopped: {record.state}, {record.reason}")
    found = logs.check(world)
    say(f"logs: {found.found} of {found.written} lines of {found.workers} workers are in files that rotate;")
    say(f"  {sum(found.gaps)} lines went with killed keepers, in {len(found.gaps)} gaps")
    say(f"runs in the ledger: {invariants.runs(world, {n: r for n in SERVERS if (r := world.record(n)) is not None})}")
    shared, named = invariants.nothing_left(world)
    watch.stop()
    say(f"shared memory left by killed engines: {shared} files, {named} of them named by leftovers")
    say(f"files below state and cache, none with a secret in it: {invariants.files(world)}")
    invariants.others(world)
    _judge_keepers(watch, result)
    for what in MUST:
        if not journal.counts[f"({what})"]:
            journal.blame(f"never happened: {what}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    say(f"CPU: consoles {used.ru_utime + used.ru_stime:.0f} s, keepers, servers and recorders "
        f"{sum(watch.cpu.values()):.0f} s, this test {time.process_time():.0f} s")  # fmt: skip
    say(f"{watch.checks} checks from outside; {watch.most_processes} processes and "
        f"{watch.most_bytes / MEGABYTE:.1f} MB of state at most")  # fmt: skip


def _judge_keepers(watch: Watch, result: Result) -> None:
    """A keeper's memory and open files must not grow."""
    uses = watch.use.values()
    result.lines.append(
        f"keepers: {len(watch.use)}, {max(max(use.memory) for use in uses) / MEGABYTE:.1f} MB and "
        f"{max(max(use.files) for use in uses)} open files at most"
    )
    for who, use in watch.use.items():
        if max(use.memory) > KEEPER_BYTES:
            result.journal.blame(f"keeper pid {who.pid} came to {max(use.memory)} bytes")
        for what, seen, most in (("bytes", use.memory, GROWTH_BYTES), ("files", use.files, GROWTH_FILES)):
            if len(seen) >= 3 * SETTLED:
                grown = min(seen[-SETTLED:]) - max(seen[SETTLED : 2 * SETTLED])
                if grown > most:
                    result.journal.blame(f"keeper pid {who.pid} has {grown} {what} more than in its first minute")
