"""What a keeper writes down about its server, and how it is read back. Standard library only."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

RECORD_VERSION = 1


class State(StrEnum):
    """The lifecycle of a server. Only its keeper changes it."""

    STARTING = "starting"
    READY = "ready"
    UNRESPONSIVE = "unresponsive"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def alive(self) -> bool:
        """Whether a process is expected to exist in this state."""
        return self not in (State.STOPPED, State.FAILED)


class RestartMode(StrEnum):
    """When a keeper starts its server again by itself."""

    NEVER = "never"
    ON_FAILURE = "on-failure"


@dataclass(frozen=True, slots=True)
class Hopeless:
    """A line of the log that matches ``pattern`` (a regular expression, upper and lower case alike) shows that another
    start would fail the same way; ``reason`` is one sentence for people."""

    pattern: str
    reason: str


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Restart by itself: when, how often at most in a row, and the first back-off (doubled up to the cap).

    A server that ends before it was ever ready is not started again when its log shows one of ``hopeless``.
    """

    mode: RestartMode = RestartMode.NEVER
    limit: int = 3
    backoff_seconds: float = 2.0
    backoff_cap_seconds: float = 60.0
    hopeless: tuple[Hopeless, ...] = ()


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process that cannot be mistaken: pids are reused, pid + start time within one boot are not.

    ``start_time`` is field 22 of ``/proc/PID/stat``, in clock ticks since boot.
    """

    pid: int
    start_time: int
    boot_id: str


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """What a keeper is told to run.

    ``environment`` is laid over what the keeper inherited; a secret's *name* stands in ``secret_names`` and its
    value only in the memory of the keeper and its server. ``companion`` is a command run beside the server and
    ended with it; ``{pid}``, ``{start_time}`` and ``{generation}`` in its words are filled in. ``details`` is the
    console's own (preset, engine, flags, …): the keeper stores it and never looks inside.
    """

    argv: tuple[str, ...]
    host: str
    port: int
    environment: Mapping[str, str] = field(default_factory=dict)
    secret_names: tuple[str, ...] = ()
    cwd: str = "/"
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    drain_seconds: float = 0.0
    """How long a serving server may finish its requests after SIGTERM, on top of the ladder's own patience."""
    log_bytes: int = 64 * 1024 * 1024
    log_files: int = 4
    companion: tuple[str, ...] = ()
    tls: bool = False
    """Whether it answers over TLS (https) in place of plain HTTP."""
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Exit:
    """How a server's process ended. ``code`` and ``signal`` are None when nobody could know (adopted server)."""

    at: float
    code: int | None
    signal: str | None
    requested: bool
    reason: str
    """One sentence for people."""

    @property
    def status(self) -> int | None:
        """As Python gives it: the exit code, or the negative number of the signal; None when nobody could know."""
        if self.signal is not None and self.signal in signal.Signals.__members__:
            return -signal.Signals[self.signal].value
        return self.code


@dataclass(frozen=True, slots=True)
class Generation:
    """One run of a server that is over, or the present one: number, spec and times (Unix seconds)."""

    number: int
    spec: LaunchSpec
    started_at: float
    ready_at: float | None = None
    ended_at: float | None = None
    exit: Exit | None = None


@dataclass(frozen=True, slots=True)
class Inherited:
    """What a server has from the shell that it was launched in, as far as it may be written down.

    ``values`` are variables that decide how a server runs and hold no secret; of all ``others`` only the names are
    known. ``umask`` is the file mode mask.
    """

    values: Mapping[str, str]
    others: tuple[str, ...]
    umask: int


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """``record.json``: everything that is known about a server across consoles, keepers and reboots.

    ``generations`` holds the last ones, oldest first; the last of them is the present one. ``log_inode`` and
    ``log_offset`` say where in the log the present generation begins. ``attempt`` counts automatic restarts within
    a generation. ``downtime_seconds`` is how long the last requested restart kept the server from answering.
    ``then`` is what a restart under way will start once the present generation is gone. ``owed``: the process of the
    present generation is being started, and nobody waits to hear whether it was: if the keeper dies, the next one
    starts it. ``unwritten`` says why ``record.json`` could not be written: only what a keeper answers over its socket
    has it, the file never does.
    """

    name: str
    state: State
    state_since: float
    created_at: float
    generations: tuple[Generation, ...]
    attempt: int = 0
    reason: str = ""
    server: ProcessIdentity | None = None
    keeper: ProcessIdentity | None = None
    companion: ProcessIdentity | None = None
    adopted: bool = False
    next_attempt_at: float | None = None
    downtime_seconds: float | None = None
    log_inode: int | None = None
    log_offset: int = 0
    then: LaunchSpec | None = None
    owed: bool = False
    inherited: Inherited | None = None
    unwritten: str = ""
    version: int = RECORD_VERSION

    @property
    def current(self) -> Generation:
        """The present generation."""
        return self.generations[-1]

    @property
    def needs_keeper(self) -> bool:
        """Whether a keeper should be there: the server lives, or waits to be started again."""
        return self.state.alive or self.next_attempt_at is not None

    @property
    def exit(self) -> Exit | None:
        """How the present generation's process ended, if it did."""
        return self.current.exit
