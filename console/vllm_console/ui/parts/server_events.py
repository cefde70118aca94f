"""Events between two snapshots: state changes, findings that began or ended. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace
from rich.style import Style

from vllm_console.diagnosis.finding import Severity, title_of_code
from vllm_console.fleet.snapshot import ServerView
from vllm_console.load.tuner_progress import TunerProgress
from vllm_console.text import took
from vllm_console.ui.theme import BAD, OK, WARN
from vllm_launchers.keeper.records import State


class ServerEvent(msgspec.Struct, frozen=True):
    """An event of a server, in one sentence. ``aloud``: it is shown as a message, not just recorded.

    ``state`` is the new state, for a change of state.
    """

    server: str
    text: str
    style: Style | None = None
    aloud: bool = False
    state: State | None = None


class SeenServer(msgspec.Struct, frozen=True):
    """A server as seen in a snapshot: state, problems by code, last restart, rollback and tuner."""

    state: State
    problems: frozenset[str]
    restart: tuple[float, str] | None = None
    """When the restart was requested, and its step."""
    rollback: str = ""
    tuner: TunerProgress | None = None


def seen_of(servers: Sequence[ServerView]) -> dict[str, SeenServer]:
    """Extract what the next snapshot is compared with."""
    return {
        server.name: SeenServer(server.state, _problems(server), _restart_of(server), server.rollback, server.tuner)
        for server in servers
    }


def events_between(before: Mapping[str, SeenServer], servers: Sequence[ServerView]) -> list[ServerEvent]:
    """Return the events since ``before``; none for new servers."""
    events: list[ServerEvent] = _machine_events(before, servers)
    for server in servers:
        then = before.get(server.name)
        if then is None:
            continue
        if then.state is not server.state:
            events.append(_change_of_state(server, then.state))
        events += filter(None, (_restart_event(server, then), _tuner_event(server, then.tuner)))
        now = _problems(server)
        name = server.name
        events += [
            ServerEvent(name, f"{name}: finding began: {title_of_code(code)}.", WARN)
            for code in sorted(now - then.problems)
        ]
        if server.state is State.READY and then.state is State.READY:  # otherwise it ended with its run
            ended = sorted(then.problems - now)
            events += [ServerEvent(name, f"{name}: finding ended: {title_of_code(code)}.", OK) for code in ended]
    return events


def _machine_events(before: Mapping[str, SeenServer], servers: Sequence[ServerView]) -> list[ServerEvent]:
    """Machines that became unreachable (one row replaces their servers) or reachable again."""
    events = []
    for server in servers:
        lost = server.machine and server.state is State.UNRESPONSIVE and server.name not in before
        if lost and any(name.startswith(f"{server.name}/") for name in before):
            events.append(ServerEvent(server.name, f"{server.name} is unreachable: {server.reason}", BAD))
    back = dict.fromkeys(server.remote for server in servers if server.remote)
    for name in back:
        if (then := before.get(name)) is not None and then.state is State.UNRESPONSIVE:
            events.append(ServerEvent(name, f"{name} is reachable.", OK))
    return events


def _restart_of(server: ServerView) -> tuple[float, str] | None:
    return (server.restart.asked_at, str(server.restart.step)) if server.restart is not None else None


def _restart_event(server: ServerView, then: SeenServer) -> ServerEvent | None:
    """A restart that failed, was canceled, or was rolled back."""
    name, restart = server.name, server.restart
    if server.rollback and server.rollback != then.rollback:
        return ServerEvent(name, f"{name}: {server.rollback}.", BAD, aloud=True)
    if restart is None or restart.under_way or _restart_of(server) == then.restart:
        return None
    style = WARN if restart.step in ("canceled", "unprepared") else BAD
    return ServerEvent(name, f"{name}: {restart.sentence}.", style, aloud=server.ours)


def _tuner_event(server: ServerView, before: TunerProgress | None) -> ServerEvent | None:
    name, tuner = server.name, server.tuner
    if tuner is not None and before is None:
        return ServerEvent(name, f"{name}: a tuner is running: {tuner.objective}, at most {tuner.trials} trials.")
    if tuner is None and before is not None:
        return ServerEvent(name, f"{name}: the tuner has finished; {name} {_left_by(before, server)}.")
    return None


def _left_by(tuner: TunerProgress, server: ServerView) -> str:
    """The state in which an ended tuner left its server, or what has happened to it since."""
    if server.state is not State.READY:
        return f"is {server.state}"
    if server.generation > tuner.last_run:
        return "was restarted"
    return f"has {tuner.kept(server.flags) or 'its original flags'}"


def _change_of_state(server: ServerView, before: State) -> ServerEvent:
    return replace(_state_event(server, before), state=server.state)


def _state_event(server: ServerView, before: State) -> ServerEvent:
    name, started = server.name, before is State.STARTING and server.ours
    if server.state is State.READY:
        downtime = server.downtime_seconds if started else None
        note = f" ({took(downtime)} downtime)" if downtime is not None else ""
        tuned = f": {server.tuner_restart}" if started and server.tuner_restart else ""
        return ServerEvent(name, f"{name} is {server.state_text}{note}{tuned}.", OK, aloud=started and not tuned)
    if server.state is State.FAILED:
        outcome = "did not start" if before is State.STARTING else "failed"
        return ServerEvent(name, f"{name} {outcome}: {server.reason}", BAD, aloud=server.ours)
    if server.state is State.UNRESPONSIVE:
        why = f": {server.reason}" if server.attached is not None and server.reason else "."
        return ServerEvent(name, f"{name} is {server.state_text}{why}", BAD)
    why = f": {server.tuner_restart}" if server.tuner_restart else ""
    return ServerEvent(name, f"{name} is {server.state_text}{why}.")


def _problems(server: ServerView) -> frozenset[str]:
    severe = (Severity.CRITICAL, Severity.WARNING)
    found = server.findings if server.state.alive else ()
    return frozenset(finding.code for finding in found if finding.severity in severe)
