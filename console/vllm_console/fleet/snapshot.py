"""The state of all servers at one moment: immutable, ready to be drawn or printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from vllm_console.attached import Endpoint
from vllm_console.fleet.leftovers import format_lost_here
from vllm_console.logs.startup_facts import Stage
from vllm_console.metrics.sample import Sample, Series, Window
from vllm_console.text import plain
from vllm_launchers.addresses import base_url
from vllm_launchers.errors import NotFoundError, OperationError
from vllm_launchers.keeper.folders import command_text
from vllm_launchers.keeper.records import Exit, PreparationStep, SleepStep, State, WarmUpReport
from vllm_launchers.plan.command_line import assignments, line_word
from vllm_launchers.presets.model import Objectives, Workload
from vllm_launchers.vllm.engines import Engine
from vllm_launchers.vllm.flags.changes import Flags

if TYPE_CHECKING:
    from vllm_console.diagnosis.finding import Diagnosis, Finding
    from vllm_console.diagnosis.objectives import Judged
    from vllm_console.fleet.gpu_charts import GpuChart
    from vllm_console.fleet.markers import Marker
    from vllm_console.fleet.probe import ProbeView
    from vllm_console.load.tuner_progress import TunerProgress
    from vllm_console.logs.startup import Startup

    # Not needed to list servers, and a large part of a command's startup time.
    from vllm_launchers.host.gpu.host import Host
    from vllm_launchers.host.gpu.sharing import GpuShare


TUNES, TESTS = "a tuner is running", "a load test is running"
"""Our own sources of load on a server."""

FIRST = ""
"""In place of a name: the first server of a snapshot."""

STALE_SECONDS = 5.0
"""Metrics older than this are shown with their age, since they are read once a second."""

REACHABILITY = {State.READY: "reachable", State.UNRESPONSIVE: "unreachable"}
"""The displayed states of an attached endpoint."""


class StateThen(msgspec.Struct, frozen=True):
    """A server's state at an earlier moment, since when, and its generation, as far as its record shows.

    ``state`` is None if it is unknown, or if the server was not launched yet (``before``).
    """

    state: State | None = None
    since: float | None = None
    generation: int | None = None
    before: bool = False


class PreparedRestart(msgspec.Struct, frozen=True):
    """A restart that is being prepared while the server serves, or the outcome of the last preparation.

    Times are Unix seconds: when it was ``asked_at``, and when its step began. ``changes`` are the changed flags as
    text. ``message`` is a sentence on how it ended (vLLM's own if the step is ``refused``); while ``checking``, a
    clause on what else is being done. ``memory_mib`` is the host memory of its process.
    """

    asked_at: float
    step: PreparationStep
    since: float
    changes: tuple[str, ...] = ()
    message: str = ""
    memory_mib: int | None = None
    diagnosis: Diagnosis | None = None
    """The cause of a refusal, and its fixes."""

    @property
    def under_way(self) -> bool:
        """Whether the server still serves and will be restarted."""
        return self.step.under_way

    @property
    def abandoned(self) -> bool:
        """Whether it ended before affecting the server."""
        return self.step in (PreparationStep.REFUSED, PreparationStep.FAILED, PreparationStep.CANCELED)

    @property
    def doing(self) -> str:
        """The current activity while it is under way."""
        match self.step:
            case PreparationStep.IMPORTING:
                return "loading vLLM"
            case PreparationStep.CHECKING:
                return self.message or "vLLM is checking the flags"
        return "vLLM accepted the flags"

    @property
    def sentence(self) -> str:
        """Its activity or outcome as a sentence."""
        flags = f" ({', '.join(self.changes)})" if self.changes else ""
        match self.step:
            case PreparationStep.IMPORTING | PreparationStep.CHECKING:
                return f"preparing a restart{flags}: {self.doing}; the server keeps serving"
            case PreparationStep.ACCEPTED:
                return f"restarting{flags}: {self.doing}"
            case PreparationStep.UNPREPARED:
                return f"restarted without preparation: {self.message}"
            case PreparationStep.REFUSED:
                return f"restart refused: {self.message}{flags}; the server was not touched"
            case PreparationStep.FAILED:
                return f"restart not prepared: {self.message}{flags}; the server was not touched"
            case PreparationStep.CANCELED:
                return f"restart canceled{flags}: {self.message}"


class SleepView(msgspec.Struct, frozen=True):
    """How a server sleeps, or last slept. ``since`` is when its step began (Unix seconds).

    ``host_gib`` is about how much host memory its weights take, None if none or unknown. ``checked`` is how many golden
    prompts were compared after waking; ``differing`` lists those that were answered differently.
    """

    step: SleepStep
    level: int
    since: float
    message: str = ""
    host_gib: float | None = None
    checked: int = 0
    differing: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """Its activity or outcome as a sentence; empty once it serves as before."""
        host = f", about {self.host_gib:.1f} GiB of weights in host memory" if self.host_gib is not None else ""
        match self.step:
            case SleepStep.DRAINING:
                return "going to sleep: waiting for its requests to end"
            case SleepStep.SUSPENDING:
                return f"going to sleep, level {self.level}"
            case SleepStep.ASLEEP:
                return f"asleep, level {self.level}{host or (', weights discarded' if self.level == 2 else '')}"
            case SleepStep.WAKING:
                return "waking up" + (": reloading its weights" if self.level == 2 else "")
            case SleepStep.CHECKING:
                return "awake: comparing its answers with earlier ones"
            case SleepStep.CANCELED:
                return f"did not go to sleep: {self.message}"
            case SleepStep.FAILED | SleepStep.MISMATCH:
                return f"restarted: {self.message}"
            case SleepStep.AWAKE:
                return self.message


class UnsetFlags(msgspec.Struct, frozen=True):
    """vLLM's values for flags that a server does not set; None if unknown."""

    max_num_seqs: int | None = None
    max_model_len: int | None = None


class ServerView(msgspec.Struct, frozen=True):
    """One server. ``ours`` is False for a server that this user's keepers did not start: shown, never touched."""

    name: str
    state: State
    state_since: float
    since_start: bool = False
    """Whether it was ready when first seen: ``state_since`` is then the start of its process."""
    ours: bool = True
    owner: str = ""
    preset: str = ""
    model: str = ""
    engine: Engine | None = None
    host: str = "127.0.0.1"
    port: int = 0
    tls: bool = False
    pid: int | None = None
    gpus: tuple[int, ...] = ()
    recorded_host: str | None = None
    """Name of the recorded host whose GPUs it simulates; None if it simulates none of a recorded host."""
    argv: tuple[str, ...] = ()
    environment: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The variables set by its plan, without secrets."""
    flags: Flags = msgspec.field(default_factory=dict)
    reasons: Mapping[str, str] = msgspec.field(default_factory=dict)
    unset: UnsetFlags = UnsetFlags()
    """vLLM's values for some unset flags; unknown outside a console."""
    fp8_cache_problem: str = ""
    """Why vLLM cannot keep its KV cache in FP8 on these GPUs; empty if it can, or if unknown."""
    previous_flags: Flags | None = None
    generation: int = 1
    attempt: int = 0
    reason: str = ""
    """Why it is in this state, in one sentence; for a failed server, with the log line that shows it."""
    diagnosis: Diagnosis | None = None
    """For a failed server: the named cause, the evidence, and the fixes."""
    findings: tuple[Finding, ...] = ()
    """Its findings while it runs, the most severe first; only `healthy` if there are none."""
    judged: tuple[Judged, ...] = ()
    """Its objectives over the last minute; empty if they are not evaluated. See `missed`."""
    contacted: bool = True
    """Whether its state is known. Another user's server may not have answered yet, or have an unknown port;
    ``starting`` then only means that its process runs.
    """
    notice: str = ""
    """Other things to know: adopted by a new keeper, open to others without an API key, …"""
    exposed: str = ""
    """If others can use it: where it listens without an API key (also part of ``notice``); else empty."""
    lost: str = ""
    """The folder of our server that it is, if that was deleted while the server ran; else empty. It has no record."""
    attached: Endpoint | None = None
    """Its location, if it is an attached endpoint: read over HTTP, never changed. ``ours`` is then False."""
    remote: str = ""
    """The attached machine whose fleet it belongs to, and whose rules apply to changes; ``ours`` is then False."""
    remote_ours: bool = False
    """Whether it is this user's own server there."""
    folder: str = ""
    """The folder with its history; empty if none is kept."""
    elsewhere: str = ""
    """Where it runs, if on another machine or in another container: ``on HOST, …``; it is then read-only here."""
    exit: Exit | None = None
    next_attempt_at: float | None = None
    downtime_seconds: float | None = None
    restart: PreparedRestart | None = None
    """The restart being prepared, or the last one if it did not happen as requested."""
    sleep: SleepView | None = None
    """How it sleeps, or last slept; None for a server that never slept."""
    node: str = ""
    """Its part in a multi-node server: ``node 1 of 2, headless``; empty for a single-node server."""
    partner: str = ""
    """The other server of its standby pair: one of the two sleeps while the other serves."""
    rollback: str = ""
    """Why it runs the flags of an earlier generation; empty if it does not."""
    workload: Workload | None = None
    objectives: Objectives | None = None
    warm_up: WarmUpReport | None = None
    """Its keeper's warm-up request, if there was one: its tokens are part of the totals."""
    stages: tuple[Stage, ...] = ()
    startup: Startup | None = None
    """Its startup progress, how long it has been silent if too long, and the engine's memory report."""
    log_path: str = ""
    sample: Sample | None = None
    """The newest sample of its metrics; its age is ``snapshot.at - sample.at``."""
    window: Window | None = None
    """The last minute."""
    last_window: Window | None = None
    """In a console, a failed server's last minute (if it had been ready), without running and waiting requests."""
    series: Series | None = None
    """Its charts over the requested range; only for the selected server."""
    no_probe: str = ""
    """A clause explaining why it has no probe; empty if it has one, or if that is unknown."""
    probe: ProbeView | None = None
    """Its probe's records of that range; only for the selected server."""
    markers: tuple[Marker, ...] = ()
    """Its events, oldest first; only for the selected server."""
    moment: float | None = None
    """In a snapshot's ``earlier``: the moment (Unix seconds) of ``window``, ``findings`` and ``judged``; else None."""
    no_findings: str = ""
    """A clause explaining why the findings of ``moment`` are unknown; empty if they are known."""
    then: StateThen = StateThen()
    """Its state at ``moment``; ``state`` and flags are current, because keys act on what runs."""
    load: str = ""
    """The load that this console is sending to it, in a few words; empty if none."""
    tuner: TunerProgress | None = None
    """The tuner running on it; None if there is none."""
    load_test: int | None = None
    """The pid of another command of ours that is sending load to it; None if there is none."""
    load_result: str = ""
    """The result of a load that has just ended; empty if there was none."""
    replayed: bool = False
    """Whether it is an ended run named ``NAME@GENERATION``, not a server; no action applies to it."""
    removed: bool = False
    """Whether the server of a replayed run was removed: its log was deleted with it."""

    @property
    def tuner_restart(self) -> str:
        """Why the tuner has restarted it, or is restarting it; empty if the running tuner did not start its run."""
        tuner = self.tuner
        if tuner is None:
            return ""
        stopping = self.state is State.STOPPING and tuner.started(self.generation + 1)
        return tuner.restart if stopping or tuner.started(self.generation) else ""

    @property
    def tuning(self) -> str:
        """``tuning 2/4``: its displayed state while a tuner measures it; else empty."""
        ready = self.state is State.READY and self.moment is None
        return f"tuning {self.tuner.short_place}".rstrip() if self.tuner is not None and ready else ""

    def load_behind(self, code: str) -> tuple[str, int] | None:
        """Our own load that may cause the finding of this code: `TUNES` or `TESTS`, and its pid.

        None if there is none, for findings that load can't cause, and in the past.
        """
        pid = self.tuner.pid if self.tuner is not None else self.load_test
        if pid is None or self.moment is not None:
            return None
        from vllm_console.diagnosis.live.findings import OF_TRAFFIC

        if code not in OF_TRAFFIC:
            return None
        return TUNES if self.tuner is not None else TESTS, pid

    @property
    def simulated(self) -> bool:
        """Whether the engine is simulated; every place that shows it must say so."""
        return self.engine is not None and self.engine.kind == "simulated"

    @property
    def headless(self) -> bool:
        """Whether it is a node that serves no HTTP: it has no address and no metrics."""
        return bool(self.node) and not self.port

    @property
    def recorded(self) -> bool:
        """Whether its history is kept: one of ours, or attached."""
        return self.ours or self.attached is not None

    @property
    def machine(self) -> bool:
        """Whether it is not a server but the row of an attached machine that can't be reached or has no servers."""
        return self.attached is not None and self.attached.url.startswith("ssh://")

    @property
    def state_text(self) -> str:
        """Its displayed state; of an attached endpoint, only its reachability is known."""
        if self.attached is None:
            return str(self.state)
        return REACHABILITY.get(self.state, "attached") if self.contacted else "attached"

    @property
    def foreign(self) -> str:
        """A clause, following its name, why no action is possible from here; empty for one of ours."""
        if self.ours:
            return ""
        if self.remote:
            why = (
                "it can only be stopped and restarted from here"
                if self.remote_ours
                else "it belongs to another user there"
            )
            return f"runs on {self.remote}; {why}"
        if self.lost:
            return f"is {lost_text(Path(self.lost))}"
        if self.attached is not None and self.machine:
            return f"is an attached machine ({self.attached.url}), not a server"
        if self.attached is not None:
            return f"is attached from {self.attached.url}: read over the network, it can only be changed there"
        return f"was started by {self.owner or 'another user'} outside this console: read-only"

    @property
    def where(self) -> str:
        """The machine that it runs on, as far as its address says; empty for this one."""
        return self.remote or (self.attached.host if self.attached is not None else "")

    @property
    def marked_name(self) -> str:
        """Its name as shown in titles: marked if its engine is simulated."""
        return plain(self.name) + (" sim" if self.simulated else "")

    def missed(self, objective: str) -> bool:
        """Whether an objective is missed now; marks and colors follow it."""
        if not (self.judged or self.findings):
            return False
        from vllm_console.diagnosis.objectives import missed

        return missed(objective, self.judged, self.findings)

    @property
    def command(self) -> tuple[str, ...]:
        """The words of its shell command, quoted: the variables set by its plan, and its command line."""
        return (*assignments(self.environment), *map(line_word, self.argv)) if self.argv else ()

    @property
    def url(self) -> str:
        """Base URL of its API, as this machine reaches it."""
        if self.attached is not None:
            return self.attached.url
        return base_url(self.host, self.port, tls=self.tls)

    @property
    def address(self) -> str:
        """Its displayed base URL, with the machine where it is valid; empty while it has no port."""
        if not self.port:
            return ""
        return f"{self.url} on {self.remote}" if self.remote else self.url


class FleetSnapshot(msgspec.Struct, frozen=True):
    """Every server at one moment (Unix seconds), sorted by name, ours first."""

    at: float
    hostname: str
    servers: tuple[ServerView, ...] = ()
    notices: tuple[str, ...] = ()
    """Problems (an unreadable record, …), one sentence each."""
    earlier: ServerView | None = None
    """The selected server at the requested earlier moment; in ``servers`` it is current."""
    replay: ServerView | None = None
    """The replayed run at the requested moment; not one of ``servers``."""
    host: Host | None = None
    """The machine with its GPUs; None if GPUs are not read or cannot be."""
    host_problem: str = ""
    """A sentence explaining why no GPU is shown, or why the data is stale."""
    host_recorded: bool = False
    """Whether the host is a recorded one instead of this machine."""
    gpu_shares: tuple[GpuShare, ...] = ()
    """How much of each GPU this user's servers may hold."""
    gpu_chart: GpuChart | None = None
    """The chart of the requested GPU over the shown range."""

    def server(self, name: str | None) -> ServerView | None:
        """The server of that name, or None."""
        return next((server for server in self.servers if server.name == name), None)

    def gpus_of(self, server: ServerView) -> tuple[int, ...]:
        """The server's GPUs if they belong to ``host``: a simulated server is only on those of its recorded host."""
        if self.host_recorded:
            here = self.host is not None and server.recorded_host == self.host.hostname
        else:
            here = not server.simulated
        return server.gpus if here and not (server.remote or server.elsewhere) else ()

    def named(self, name: str) -> ServerView:
        """The server of that name.

        Raises:
            OperationError: its record cannot be read.
            NotFoundError: there is none.
        """
        if (server := self.server(name)) is not None:
            return server
        if broken := next((notice for notice in self.notices if f"/{name}/record.json" in notice), None):
            raise OperationError(broken)
        folders = [Path(server.lost) for server in self.servers if server.lost and not server.remote]
        if lost := [folder for folder in folders if folder.name == name]:
            raise NotFoundError(format_lost_here(lost[0].parent.parent, lost))
        raise NotFoundError(f"no server is called '{plain(name)}'; see 'vllm-console list'")


def lost_text(folder: Path) -> str:
    """A clause about a running server of ours whose folder was deleted."""
    ends = command_text(folder.parent.parent, "leftovers --remove")
    return f"{folder.name}, whose folder was deleted while it ran: only {ends} can end it"


def paired(servers: Sequence[ServerView], now: float) -> list[ServerView]:
    """Fill in partner names: a standby knows its partner; the partner gets the standby's name here.

    If both servers of a pair sleep, both get a finding: neither serves, as after a switch whose command was killed.
    """
    standbys = {server.partner: server.name for server in servers if server.partner and server.state.alive}
    named = {server.name: server for server in servers}
    found = []
    for server in servers:
        partner = server.partner if server.partner in named else standbys.get(server.name, "")
        if partner != server.partner:
            server = replace(server, partner=partner)
        if partner and server.state is State.ASLEEP and (other := named[partner]).state is State.ASLEEP:
            from vllm_console.diagnosis.live.sleep import pair_asleep

            steps = [one.sleep.step for one in (server, other) if one.sleep is not None]
            since = max(server.state_since, other.state_since)
            if (neither := pair_asleep((server.name, partner), steps, since, now)) is not None:
                server = replace(server, findings=(neither, *server.findings))
        found.append(server)
    return found
