"""The data that a keeper records about its server."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from vllm_launchers.values import NOTHING, Value

RECORD_VERSION = 1


class State(StrEnum):
    """The lifecycle of a server. Only its keeper changes it."""

    STARTING = "starting"
    READY = "ready"
    UNRESPONSIVE = "unresponsive"
    ASLEEP = "asleep"
    """Its process lives and holds little GPU memory; it answers nobody until it is woken up."""
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def alive(self) -> bool:
        """Whether a process is expected to exist in this state."""
        return self not in (State.STOPPED, State.FAILED)


class RestartMode(StrEnum):
    """When a keeper restarts its server automatically."""

    NEVER = "never"
    ON_FAILURE = "on-failure"


class NotRetryable(Value):
    """A failure that is not retryable: a log line that matches ``pattern`` (a regular expression, case-insensitive)
    shows that another start would fail the same way. ``reason`` is one sentence for users."""

    pattern: str
    reason: str


class RestartPolicy(Value):
    """Automatic restarts: when, how many in a row at most, and the first back-off (doubled up to the cap).

    A server that ends before it was ready is not restarted if its log shows one of ``not_retryable``.
    """

    mode: RestartMode = RestartMode.NEVER
    limit: int = 3
    backoff_seconds: float = 2.0
    backoff_cap_seconds: float = 60.0
    not_retryable: tuple[NotRetryable, ...] = ()


class ProcessIdentity(Value):
    """The identity of a process: pids are reused, pid + start time within one boot are not.

    ``start_time`` is field 22 of ``/proc/PID/stat``, in clock ticks since boot.
    """

    pid: int
    start_time: int
    boot_id: str


class WarmUp(Value):
    """One request that the keeper sends before it calls a server ready, so that "ready" means a completed request.

    ``engines`` is the number of data-parallel engines: that many requests are sent. Each engine of a generating server
    gets one; a pooling server distributes them itself. ``api_key`` names the server's API key among ``secret_names``,
    empty for none. ``timeout_seconds``: how long a response may take.
    """

    engines: int = 1
    api_key: str = ""
    timeout_seconds: float = 1800.0


class WarmUpOutcome(StrEnum):
    """The outcome of a warm-up request."""

    UNDER_WAY = "under way"
    COMPLETED = "completed"
    SKIPPED = "skipped"
    """The server had completed requests already."""
    REFUSED = "refused"
    """It did not reach the engine (a 4xx response, no endpoint, no response from the API in time): whether the server
    can serve is unknown. No response in time is a failure if Ray runs its workers."""
    FAILED = "failed"
    """The server accepted it and could not serve it."""


class WarmUpReport(Value):
    """The warm-up of one generation: ``at`` (Unix seconds) it was sent; it took ``seconds``, None while under way.

    Its tokens are part of the server's counters, which are totals. ``detail`` says why it was not completed, a clause.
    """

    at: float
    outcome: WarmUpOutcome = WarmUpOutcome.UNDER_WAY
    seconds: float | None = None
    detail: str = ""


class GoldenAnswer(Value):
    """A greedy answer to a golden prompt. ``tokens`` are empty for a vLLM that does not return token ids."""

    prompt: str
    text: str
    tokens: tuple[int, ...] = ()


class Location(Value):
    """Where a keeper runs: pids are comparable within one boot and one PID namespace (its inode)."""

    hostname: str
    machine_id: str
    boot_id: str
    pid_namespace: int


class NodeSpec(Value):
    """This machine's part of a server over ``count`` machines: node ``rank`` of them; node 0 serves.

    The keepers of all nodes are linked over ``master`` (node 0's address) and ``port``: see `node_link`. ``seconds`` is
    how long they wait for each other. ``fingerprint`` is what has to be equal on all nodes, by label: versions, hashes,
    flags; an empty value means unknown.
    """

    rank: int
    count: int
    master: str
    port: int
    seconds: float = 600.0
    fingerprint: Mapping[str, str] = NOTHING

    @property
    def headless(self) -> bool:
        """Whether it serves no HTTP."""
        return self.rank > 0

    @property
    def text(self) -> str:
        """Which it is, for people."""
        return f"node {self.rank} of {self.count}" + (", headless" if self.headless else "")


class LaunchSpec(Value):
    """What a keeper runs.

    ``environment`` is added to what the keeper inherited. ``secret_names`` holds only the *names* of secrets; their
    values exist only in the memory of the keeper and its server. ``sidecar`` is a command that runs beside the server
    and is ended with it; ``{pid}``, ``{start_time}`` and ``{generation}`` in it are filled in. ``details`` belongs to
    the console (preset, engine, flags, …): the keeper stores it and does not interpret it.
    """

    argv: tuple[str, ...]
    host: str
    port: int
    environment: Mapping[str, str] = NOTHING
    secret_names: tuple[str, ...] = ()
    cwd: str = "/"
    restart: RestartPolicy = RestartPolicy()
    drain_seconds: float = 0.0
    """How long a serving server may finish its requests after SIGTERM, on top of the stop sequence's own timeout."""
    log_bytes: int = 64 * 1024 * 1024
    log_files: int = 4
    sidecar: tuple[str, ...] = ()
    probe: bool = False
    """Whether it gets the probe, which records in the folder ``probe`` beside its record."""
    tls: bool = False
    """Whether it serves TLS (https) instead of plain HTTP."""
    warm_up: WarmUp | None = None
    """None: it is ready as soon as ``/health`` returns 200."""
    reuse_port: bool = False
    """Whether it binds its port with SO_REUSEPORT, as vLLM up to 0.24 does."""
    prepared_argv: tuple[str, ...] = ()
    """Starts the same server as ``argv`` in two steps (`preparation`); empty if it can't, or shall not, be
    prepared."""
    rollback: bool = False
    """Whether a restart goes back to the earlier flags if this generation fails before it is ready."""
    sleep_mode: bool = False
    """Whether it can sleep: vLLM's sleep mode, with its routes for developers."""
    node: NodeSpec | None = None
    """Its part of a server over several machines; None for a server of its own. A headless one has port 0."""
    ray: bool = False
    """Whether Ray runs its workers: they are children of Ray's own process on each machine (the raylet), not of it."""
    details: Mapping[str, Any] = NOTHING


class Exit(Value):
    """How a server's process ended. ``code`` and ``signal`` are None if they are unknown (an adopted server)."""

    at: float
    code: int | None
    signal: str | None
    requested: bool
    reason: str
    """One sentence for people."""

    @property
    def status(self) -> int | None:
        """As Python gives it: the exit code, or the negative number of the signal; None if unknown."""
        if self.signal is not None and self.signal in signal.Signals.__members__:
            return -signal.Signals[self.signal].value
        return self.code


class Rollback(Value):
    """Why a generation runs the flags of an earlier one: generation ``failed`` ended before it was ready.

    ``to`` is the generation whose flags it has; ``reason`` says how the other one ended, a clause. ``log_inode`` and
    ``log_offset`` say where in the log the failed one begins, ``log_end`` where it ends.
    """

    failed: int
    to: int
    reason: str
    log_inode: int | None = None
    log_offset: int = 0
    log_end: int = 0


class Generation(Value):
    """One run of a server, past or present: number, spec and times (Unix seconds).

    ``rollback``: set if it replaces one that failed. ``golden`` are its answers to the golden prompts when it first
    became ready; only a server with sleep mode has them.
    """

    number: int
    spec: LaunchSpec
    started_at: float
    ready_at: float | None = None
    ended_at: float | None = None
    exit: Exit | None = None
    warm_up: WarmUpReport | None = None
    rollback: Rollback | None = None
    golden: tuple[GoldenAnswer, ...] = ()


class PreparationStep(StrEnum):
    """How far the preparation of a restart is."""

    IMPORTING = "importing"
    """The process starts and loads its code."""
    CHECKING = "checking"
    """It has loaded its code, and judges its flags."""
    ACCEPTED = "accepted"
    """The flags are accepted; the present generation is being stopped."""
    UNPREPARED = "unprepared"
    """It can't be prepared, or what was prepared can't be used: restarted without that."""
    REFUSED = "refused"
    """The flags are refused, in the server's own words. Nothing was restarted."""
    FAILED = "failed"
    """It ended, or took too long. Nothing was restarted."""
    CANCELED = "canceled"
    """A person canceled it, or the console that asked for it has ended. Nothing was restarted."""

    @property
    def under_way(self) -> bool:
        """Whether it is still in progress."""
        return self in (PreparationStep.IMPORTING, PreparationStep.CHECKING, PreparationStep.ACCEPTED)


class Preparation(Value):
    """The preparation of a restart: its process loads and judges everything while the present generation serves.

    ``asked_at`` (Unix seconds) identifies it. ``step_at`` is when its present step began. ``process`` is set while it
    lives. ``console`` is the process that waits for it: without that, it is canceled; None to continue by itself.
    ``message`` is a sentence, of the server itself where the step is refused; ``output`` is the end of what it printed.
    """

    asked_at: float
    spec: LaunchSpec
    step: PreparationStep = PreparationStep.IMPORTING
    step_at: float = 0.0
    process: ProcessIdentity | None = None
    console: ProcessIdentity | None = None
    message: str = ""
    output: str = ""


class SleepStep(StrEnum):
    """How far going to sleep or waking up is, or how it ended."""

    DRAINING = "draining"
    """It serves until no request is left."""
    SUSPENDING = "suspending"
    """``/sleep`` was sent: weights are moved or dropped."""
    ASLEEP = "asleep"
    WAKING = "waking"
    """``/wake_up`` was sent; after level 2 its weights are loaded again."""
    CHECKING = "checking"
    """It is awake: its answers to the golden prompts are compared with those recorded."""
    AWAKE = "awake"
    CANCELED = "canceled"
    """It did not go to sleep, and serves on."""
    FAILED = "failed"
    """It could not be woken up, and was restarted."""
    MISMATCH = "mismatch"
    """It answered the golden prompts differently after waking up, and was restarted."""

    @property
    def under_way(self) -> bool:
        """Whether it is still in progress."""
        return self in (SleepStep.DRAINING, SleepStep.SUSPENDING, SleepStep.WAKING, SleepStep.CHECKING)


class Sleep(Value):
    """A server's last going to sleep or waking up. Times are Unix seconds.

    ``asked_at`` identifies the request; ``step_at`` is when its present step began. ``console`` is the process that
    waits while it drains: without that, it is canceled. ``message`` says how it ended, a clause. ``checked`` is how
    many golden prompts were compared, ``differing`` lists those that were answered differently.
    """

    level: int
    asked_at: float
    step: SleepStep = SleepStep.DRAINING
    step_at: float = 0.0
    message: str = ""
    console: ProcessIdentity | None = None
    checked: int = 0
    differing: tuple[str, ...] = ()


class Recording(Value):
    """What a simulated server continues from: its runs so far, as if launched earlier. Only the demo has one.

    ``generations`` are the earlier ones; ``started_at`` and ``ready_at`` (Unix seconds) are the present one's, and
    ``log_offset`` says where it begins in the log.
    """

    generations: tuple[Generation, ...]
    started_at: float
    ready_at: float
    log_offset: int = 0


class Inherited(Value):
    """What a server inherited from the shell that launched it, as far as it may be recorded.

    ``values`` are variables that decide how a server runs and hold no secret; ``others`` are the names of all others.
    ``umask`` is the file mode mask.
    """

    values: Mapping[str, str]
    others: tuple[str, ...]
    umask: int


class ServerRecord(Value):
    """``record.json``: everything known about a server across consoles, keepers and reboots.

    ``generations`` holds the last ones, oldest first; the last of them is the present one. ``log_inode`` and
    ``log_offset`` say where in the log the present generation begins. ``attempt`` counts automatic restarts within
    a generation. ``downtime_seconds`` is how long the last requested restart kept the server from answering.
    ``next_spec`` is what a restart in progress starts once the present generation is gone. ``start_pending``: the
    process of the present generation is being started and no console waits for it: if the keeper dies, the next one
    starts it. ``location`` is where keeper and server run; None for an attached endpoint. ``unwritten`` says why
    ``record.json`` could not be written: only what a keeper answers over its socket has it, the file never does.
    ``preparation`` is that of a restart while the server still serves, or of one that ended with that. ``sleep`` is
    the server's last going to sleep or waking up, None for one that never slept.
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
    sidecar: ProcessIdentity | None = None
    adopted: bool = False
    next_attempt_at: float | None = None
    downtime_seconds: float | None = None
    log_inode: int | None = None
    log_offset: int = 0
    next_spec: LaunchSpec | None = None
    start_pending: bool = False
    inherited: Inherited | None = None
    location: Location | None = None
    unwritten: str = ""
    preparation: Preparation | None = None
    sleep: Sleep | None = None
    version: int = RECORD_VERSION

    @property
    def current(self) -> Generation:
        """The present generation."""
        return self.generations[-1]

    @property
    def needs_keeper(self) -> bool:
        """Whether it should have a keeper: the server lives, or waits for an automatic restart."""
        return self.state.alive or self.next_attempt_at is not None

    @property
    def exit(self) -> Exit | None:
        """How the present generation's process ended, if it did."""
        return self.current.exit
