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
    """The process is alive and holds little GPU memory; it serves no requests until it is woken up."""
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def alive(self) -> bool:
        """Whether a process is expected to exist in this state."""
        return self not in (State.STOPPED, State.FAILED)


class RestartMode(StrEnum):
    """Whether a keeper restarts its server automatically."""

    NEVER = "never"
    ON_FAILURE = "on-failure"


class NotRetryable(Value):
    """A failure that is not retryable: a log line that matches ``pattern`` (a case-insensitive regular expression)
    shows that another start would fail the same way. ``reason`` is a sentence for users."""

    pattern: str
    reason: str


class RestartPolicy(Value):
    """Automatic restarts: whether, the maximum number in a row, and the initial back-off (doubled up to the cap).

    A server that ends before it was ready is not restarted if its log matches one of ``not_retryable``.
    """

    mode: RestartMode = RestartMode.NEVER
    limit: int = 3
    backoff_seconds: float = 2.0
    backoff_cap_seconds: float = 60.0
    not_retryable: tuple[NotRetryable, ...] = ()


class ProcessIdentity(Value):
    """The identity of a process: pids are reused, but pid and start time are unique within one boot.

    ``start_time`` is field 22 of ``/proc/PID/stat``, in clock ticks since boot.
    """

    pid: int
    start_time: int
    boot_id: str


class WarmUp(Value):
    """A request that the keeper sends before it calls a server ready, so that "ready" means a completed request.

    ``engines``: the number of data-parallel engines, and of requests sent. Each engine of a generating server gets one;
    a pooling server distributes them itself. ``api_key``: the name of the server's API key among ``secret_names``,
    empty if it has none. ``timeout_seconds``: time limit for a response.
    """

    engines: int = 1
    api_key: str = ""
    timeout_seconds: float = 1800.0


class WarmUpOutcome(StrEnum):
    """The outcome of a warm-up request."""

    UNDER_WAY = "under way"
    COMPLETED = "completed"
    SKIPPED = "skipped"
    """The server had already completed requests."""
    REFUSED = "refused"
    """The request did not reach the engine (a 4xx response, no endpoint, no response from the API in time), so it is
    unknown whether the server can serve. With Ray workers, no response in time is a failure."""
    FAILED = "failed"
    """The server accepted the request but could not serve it."""


class WarmUpReport(Value):
    """The warm-up of one generation: sent ``at`` (Unix seconds); it took ``seconds``, None while under way.

    The server's counters, which are totals, include its tokens. ``detail``: why it was not completed, as a clause.
    """

    at: float
    outcome: WarmUpOutcome = WarmUpOutcome.UNDER_WAY
    seconds: float | None = None
    detail: str = ""


class GoldenAnswer(Value):
    """A greedy answer to a golden prompt. ``tokens`` is empty if vLLM does not return token ids."""

    prompt: str
    text: str
    tokens: tuple[int, ...] = ()


class Location(Value):
    """Where a keeper runs: pids are comparable only within one boot and one PID namespace (given by its inode)."""

    hostname: str
    machine_id: str
    boot_id: str
    pid_namespace: int


class NodeSpec(Value):
    """This machine's part of a server with ``count`` nodes: node ``rank``; node 0 serves.

    The keepers of all nodes are linked through ``master`` (node 0's address) and ``port``; see `node_link`.
    ``seconds``: how long they wait for each other. ``fingerprint``: what must be equal on all nodes, by label
    (versions, hashes, flags); an empty value means unknown.
    """

    rank: int
    count: int
    master: str
    port: int
    seconds: float = 600.0
    fingerprint: Mapping[str, str] = NOTHING

    @property
    def headless(self) -> bool:
        """Whether this node serves no HTTP."""
        return self.rank > 0

    @property
    def text(self) -> str:
        """The node's description for users."""
        return f"node {self.rank} of {self.count}" + (", headless" if self.headless else "")


class LaunchSpec(Value):
    """What a keeper runs.

    ``environment`` is added to what the keeper inherited. ``secret_names`` holds only the *names* of secrets; their
    values exist only in the memory of the keeper and its server. ``sidecar``: a command that runs beside the server and
    is ended with it; ``{pid}``, ``{start_time}`` and ``{generation}`` in it are filled in. ``details`` belongs to the
    console (preset, engine, flags, …): the keeper stores it without interpreting it.
    """

    argv: tuple[str, ...]
    host: str
    port: int
    environment: Mapping[str, str] = NOTHING
    secret_names: tuple[str, ...] = ()
    cwd: str = "/"
    restart: RestartPolicy = RestartPolicy()
    drain_seconds: float = 0.0
    """Time to finish requests after SIGTERM, on top of the stop sequence's own timeout."""
    log_bytes: int = 64 * 1024 * 1024
    log_files: int = 4
    sidecar: tuple[str, ...] = ()
    probe: bool = False
    """Whether to load the probe, which records into the folder ``probe`` beside the record."""
    tls: bool = False
    """Whether the server uses TLS (https) instead of plain HTTP."""
    warm_up: WarmUp | None = None
    """If None, the server is ready as soon as ``/health`` returns 200."""
    reuse_port: bool = False
    """Whether the server binds its port with SO_REUSEPORT, as vLLM up to 0.24 does."""
    prepared_argv: tuple[str, ...] = ()
    """Starts the same server as ``argv`` in two steps (`preparation`); empty if it can't or shouldn't be prepared."""
    rollback: bool = False
    """Whether to return to the previous flags if this generation fails before it is ready."""
    sleep_mode: bool = False
    """Whether the server can sleep: vLLM's sleep mode and its development routes are enabled."""
    node: NodeSpec | None = None
    """The part in a multi-node server; None for a single-node server. A headless node has port 0."""
    ray: bool = False
    """Whether Ray runs the workers: they are children of the raylet on each machine, not of the server."""
    details: Mapping[str, Any] = NOTHING


class Exit(Value):
    """How a server's process ended. ``code`` and ``signal`` are None if unknown (an adopted server)."""

    at: float
    code: int | None
    signal: str | None
    requested: bool
    reason: str
    """One sentence for users."""

    @property
    def status(self) -> int | None:
        """Python's return code: the exit code, or the negative signal number; None if unknown."""
        if self.signal is not None and self.signal in signal.Signals.__members__:
            return -signal.Signals[self.signal].value
        return self.code


class Rollback(Value):
    """Why a generation runs the flags of an earlier one: generation ``failed`` ended before it was ready.

    ``to``: the generation whose flags it has. ``reason``: how the failed one ended, as a clause. In the log, the failed
    one begins at ``log_inode`` and ``log_offset``, and ends at ``log_end``.
    """

    failed: int
    to: int
    reason: str
    log_inode: int | None = None
    log_offset: int = 0
    log_end: int = 0


class Generation(Value):
    """One run of a server, past or current: number, spec and times (Unix seconds).

    ``rollback`` is set if it replaces one that failed. ``golden``: answers to the golden prompts when it first became
    ready; only a server with sleep mode has them.
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
    """Progress of the preparation of a restart."""

    IMPORTING = "importing"
    """The process starts and loads its code."""
    CHECKING = "checking"
    """The process has loaded its code and is checking its flags."""
    ACCEPTED = "accepted"
    """The flags are accepted; the current generation is being stopped."""
    UNPREPARED = "unprepared"
    """The start can't be prepared, or the prepared process can't be used: restarted without it."""
    REFUSED = "refused"
    """The server rejected the flags, with its own message. Nothing was restarted."""
    FAILED = "failed"
    """The process ended or took too long. Nothing was restarted."""
    CANCELED = "canceled"
    """A person canceled it, or the console that requested it has ended. Nothing was restarted."""

    @property
    def under_way(self) -> bool:
        """Whether the preparation is still in progress."""
        return self in (PreparationStep.IMPORTING, PreparationStep.CHECKING, PreparationStep.ACCEPTED)


class Preparation(Value):
    """The preparation of a restart: a new process loads and checks everything while the current generation serves.

    ``asked_at`` (Unix seconds) identifies it. ``step_at``: when the current step began. ``process`` is set while that
    is alive. ``console``: the process that waits; if that ends, the preparation is canceled; None to continue
    regardless. ``message``: a sentence, the server's own if it refused; ``output``: the end of what the process
    printed.
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
    """Progress or outcome of going to sleep or waking up."""

    DRAINING = "draining"
    """The server keeps serving until no request is left."""
    SUSPENDING = "suspending"
    """``/sleep`` was sent; weights are being offloaded or dropped."""
    ASLEEP = "asleep"
    WAKING = "waking"
    """``/wake_up`` was sent; after level 2, weights are reloaded."""
    CHECKING = "checking"
    """The server is awake; its answers to the golden prompts are compared with the recorded ones."""
    AWAKE = "awake"
    CANCELED = "canceled"
    """The server did not go to sleep and keeps serving."""
    FAILED = "failed"
    """The server could not be woken up and was restarted."""
    MISMATCH = "mismatch"
    """The server answered the golden prompts differently after waking up and was restarted."""

    @property
    def under_way(self) -> bool:
        """Whether the operation is still in progress."""
        return self in (SleepStep.DRAINING, SleepStep.SUSPENDING, SleepStep.WAKING, SleepStep.CHECKING)


class Sleep(Value):
    """The last time a server went to sleep or woke up. Times are Unix seconds.

    ``asked_at`` identifies the request. ``step_at``: when the current step began. ``console``: the process that waits
    while requests drain; if that ends, the sleep is canceled. ``message``: how it ended, as a clause. ``checked``: how
    many golden prompts were compared. ``differing``: the prompts that were answered differently.
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

    ``generations``: the earlier ones. ``started_at`` and ``ready_at`` (Unix seconds): those of the current one.
    ``log_offset``: where the current one begins in the log.
    """

    generations: tuple[Generation, ...]
    started_at: float
    ready_at: float
    log_offset: int = 0


class Inherited(Value):
    """What a server inherited from the shell that launched it, as far as it may be recorded.

    ``values``: variables that affect how a server runs and hold no secret. ``others``: the names of all others.
    """

    values: Mapping[str, str]
    others: tuple[str, ...]
    umask: int


class ServerRecord(Value):
    """``record.json``: everything known about a server across consoles, keepers and reboots.

    ``generations``: the last ones, oldest first; the last is the current one, which begins in the log at ``log_inode``
    and ``log_offset``. ``attempt``: number of automatic restarts within a generation. ``downtime_seconds``: how long
    the server was unavailable during the last requested restart. ``next_spec``: what a restart in progress starts once
    the current generation is gone. ``start_pending``: the current generation's process is being started and no console
    waits for it, so if the keeper dies, the next one starts it. ``location``: where keeper and server run; None for an
    attached endpoint. ``unwritten``: why ``record.json`` could not be written; present only in a keeper's socket
    answers, never in the file. ``preparation``: that of a restart while the server still serves, or of one that ended
    at that stage. ``sleep``: the last time the server went to sleep or woke up; None if it never slept.
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
        """The current generation."""
        return self.generations[-1]

    @property
    def needs_keeper(self) -> bool:
        """Whether the server should have a keeper: it is alive, or waits for an automatic restart."""
        return self.state.alive or self.next_attempt_at is not None

    @property
    def exit(self) -> Exit | None:
        """How the current generation's process ended, if it did."""
        return self.current.exit
