"""Actions of a soak: user actions, monitoring, load, and faults."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from soak import people
from soak.journal import REMOVE, RUN, STOP
from soak.schedule import SERVERS, Action
from soak.world import Said, World
from vllm_launchers.keeper import processes
from vllm_launchers.keeper.records import ProcessIdentity, State

Act = Callable[[World, Action], str]


def act(world: World, action: Action) -> None:
    try:
        outcome = ACTS[action.kind](world, action)
    except Exception as error:  # noqa: BLE001 - a thread's boundary: whatever went wrong is a finding
        world.journal.blame(f"{action}: {error!r}")
        outcome = "fault"
    world.journal.acted(action, outcome)


def _told(said: Said) -> str:
    return f"exit {said.code}" + (f": {said.err.strip().splitlines()[-1][:160]}" if said.code and said.err else "")


# -- the operator ------------------------------------------------------------------------------------------------------


def order(world: World, server: str, verb: str, words: tuple[str, ...] = ()) -> Said:
    """Run one of the user's actions."""
    match verb:
        case "start":
            return world.start(server)
        case "stop":
            return world.order(server, STOP, "stop", server, "--json")
        case "remove":
            return world.order(server, REMOVE, "remove", server, "--json")
        case "switch":
            return world.order(server, RUN, "restart", server, "--preset", *(words or ("batch",)), "--force", "--json")
        case "previous":
            return world.order(server, RUN, "restart", server, "--previous", "--force", "--json")
        case _:
            flag = f"{words[0]}={words[1]}" if words else "max-num-seqs=48"
            return world.order(server, RUN, "restart", server, "--set", flag, "--force", "--json")


def _order(world: World, action: Action) -> str:
    said = order(world, action.server, action.kind, action.words)
    if said.code == 0:
        world.journal.happened(f"done: {action.kind}")
    return _told(said)


def _renew(world: World, action: Action) -> str:
    """Stop, remove and start again under the same name."""
    told = [_told(order(world, action.server, verb)) for verb in ("stop", "remove", "start")]
    return ", ".join(told)


def _at_once(world: World, action: Action) -> str:
    """Two concurrent commands for the same server."""
    with ThreadPoolExecutor(2) as pool:
        return ", ".join(pool.map(lambda verb: _told(order(world, action.server, verb)), action.words))


def _look(world: World, action: Action) -> str:
    what = action.words[0]
    named = [action.server] if what in ("status", "check", "logs") else []
    return _told(world.command(what, *named, *(("--allow-idle",) if what == "check" else ()), "--json"))


def _load(world: World, action: Action) -> str:
    rate, seconds = action.words
    size = ("--input-p95", "200", "--output-p95", "40", "--max-failed", "100%", "--seed", str(action.number))
    server = next((name for name in _from(action.server) if _is_ready(world, name)), action.server)
    said = world.command("load", server, "--rate", rate, "--duration", seconds, *size, "--json")
    if said.code == 0:
        world.journal.happened("load was answered")
    return f"{server}: {_told(said)}"


def _is_ready(world: World, server: str) -> bool:
    record = world.record(server)
    return record is not None and record.state is State.READY


# -- faults ------------------------------------------------------------------------------------------------------------


def _from(server: str) -> tuple[str, ...]:
    """All servers, starting with this one, so that an action is not wasted on a server that is down."""
    begin = SERVERS.index(server)
    return (*SERVERS[begin:], *SERVERS[:begin])


def _find(world: World, server: str, *parts: str) -> tuple[str, dict[str, ProcessIdentity]]:
    """The first server, starting with this one, that has all these parts; an empty name if none has."""
    found = ((name, world.parts(name)) for name in _from(server))
    return next(((name, who) for name, who in found if set(parts) <= who.keys()), ("", {}))


def _strike(world: World, server: str, number: signal.Signals, parts: tuple[str, ...]) -> str:
    """Signal these parts of a server one after the other."""
    name, who = _find(world, server, *parts)
    if not name:
        return "no server has that now"
    for part in parts:
        world.journal.injure(name, part)
        if number is signal.SIGKILL:
            world.journal.kill(who[part].pid)
        if processes.send(who[part], number):
            world.journal.happened(f"{number.name} to {part}")
    return f"{number.name} to {' and '.join(f'{part} (pid {who[part].pid})' for part in parts)} of {name}"


def _kill(world: World, action: Action) -> str:
    parts = action.words or (action.kind.removeprefix("kill "),)
    return _strike(world, action.server, signal.SIGKILL, parts)


def _end_keeper(world: World, action: Action) -> str:
    """Like a shutdown: the keeper ends, its server keeps running."""
    return _strike(world, action.server, signal.SIGTERM, ("keeper",))


def _freeze(world: World, action: Action) -> str:
    """SIGSTOP to a server or its keeper, and always SIGCONT after a while."""
    part = "keeper" if action.kind == "freeze keeper" else "api"
    name, parts = _find(world, action.server, part)
    who = parts.get(part)
    if who is None or not processes.send(who, signal.SIGSTOP):
        return "no server has that now"
    world.journal.happened(f"SIGSTOP to {part}")
    try:
        time.sleep(float(action.words[0]))
    finally:
        processes.send(who, signal.SIGCONT)
    return f"the {part} of {name}, pid {who.pid}, stood still for {action.words[0]} s"


def _flood(world: World, action: Action) -> str:
    """Make a worker write several thousand lines."""
    name, who = _find(world, action.server, "worker")
    if not name or not processes.send(who["worker"], signal.SIGUSR1):
        return "no server has a worker now"
    world.journal.happened("flood")
    return f"{name}, pid {who['worker'].pid}"


ACTS: dict[str, Act] = {
    **dict.fromkeys(("start", "stop", "restart", "previous", "switch"), _order),
    **dict.fromkeys(("kill keeper", "kill api", "kill engine", "kill worker", "kill recorder", "kill two"), _kill),
    **dict.fromkeys(("freeze server", "freeze keeper"), _freeze),
    "renew": _renew,
    "at once": _at_once,
    "end keeper": _end_keeper,
    "look": _look,
    "load": _load,
    "flood": _flood,
    "console quit": people.quits,
    "console killed": people.is_killed,
    "console hung up": people.is_hung_up,
    "console closed": people.is_closed,
    "console ended": people.is_ended,
    "console read-only": people.may_only_look,
    "console acting": people.acts,
}
