"""A server's startup, read from its log: stages with start, duration and progress. For vLLM 0.8 to 0.33.

Pure: the log is passed in as text, times come from its lines. vLLM's lines have month, day and time without a year, in
the server's own time zone; the process's start time resolves both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

import msgspec
from msgspec.structs import replace

from vllm_console.logs.startup_facts import Stage, StartupFacts
from vllm_console.logs.vllm_lines import LogLine, parse_line
from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.plan.budget.budget import EngineReport
from vllm_launchers.plan.budget.engine_report import GRAPHS, KV_MEMORY, KV_TOKENS, WEIGHTS, ReportReader

_LINE = lazy_pattern(
    r"(?P<loaded>Directly load (?:AOT compilation|the compiled graph))|(?P<compiled>Compiling a graph for )"
    r"|(?P<failed>Compiling model again due to a load failure|Cannot load aot compilation from)"
    r"|(?P<saved>saved AOT compiled function to)|(?P<disabled>torch\.compile cache is disabled)"
    r"|torch\.compile (?:took|takes) (?P<compile>\d+(?:\.\d+)?) s in total"
    r"|Loading weights took (?P<weights>\d+(?:\.\d+)?) seconds"
    r"|(?P<profiled>Initial profiling/warmup run took)|(?P<available>Available KV cache memory:)"
    r"|(?P<pinned>specified by kv_cache_memory_bytes config and skipped memory profiling)"
    r"|(?P<planned>Applying persisted startup plan)"
    r"|prepared in (?P<prepared>\d+(?:\.\d+)?) s"
    r"|weights read ahead: (?P<read>\d+(?:\.\d+)?) of (?P<size>\d+(?:\.\d+)?) GiB"
)


class FactReader:
    """Collects facts line by line. Of several workers, the slowest counts."""

    def __init__(self) -> None:
        self._seen: dict[str, str] = {}
        self._compile: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._profiled_at: float | None = None
        self._measured: float | None = None

    def line(self, process: str, text: str, at: float) -> None:
        """Process one line's message; ``at`` is its time, or that of the last line with one (Unix seconds)."""
        found = _LINE.search(text)
        if found is None:
            return
        values = {name: value for name, value in found.groupdict().items() if value is not None}
        self._seen.update(values)
        if "compile" in values:  # a model of several parts reports each
            self._compile[process] = self._compile.get(process, 0.0) + float(values["compile"])
        elif "weights" in values:  # likewise a model with a draft model
            self._weights[process] = self._weights.get(process, 0.0) + float(values["weights"])
        elif "profiled" in values:
            self._profiled_at = at
        elif {"available", "pinned"} & values.keys() and self._profiled_at is not None:
            self._measured = max(self._measured or 0.0, at - self._profiled_at)

    @property
    def facts(self) -> StartupFacts:
        """The facts so far."""
        seen = self._seen

        def number(name: str) -> float | None:
            return float(seen[name]) if name in seen else None

        return StartupFacts(
            compile_cache=self._cache(),
            compile_seconds=max(self._compile.values(), default=None),
            weights_seconds=max(self._weights.values(), default=None),
            kv_measure_seconds=self._measured,
            kv_pinned="plan" if "planned" in seen else "flag" if "pinned" in seen else "",
            prepared_seconds=number("prepared"),
            read_ahead_gib=number("read"),
            weights_gib=number("size"),
        )

    def _cache(self) -> str:
        seen = self._seen
        if "disabled" in seen:
            return "disabled"
        if "failed" in seen and "loaded" not in seen:
            return "failed"
        if "compiled" in seen:
            return "partly" if "loaded" in seen else "new"
        return "hit" if "loaded" in seen else "new" if "saved" in seen else ""


# -- the stages of a start --------------------------------------------------------------------------------------------


Durations = Mapping[str, float]
"""Duration in seconds by stage, in stage order."""

DOWNLOAD = "download"
"""A stage that the next start does not have; it is not part of the progress."""

FIRST = "imports"
"""The stage from which progress is measured; there is none before it."""

LINEAR_SHARE = 0.8
"""Up to this fraction of a stage's usual time, progress is proportional to time; after that it slows down."""

LATE = 1.5
"""A stage that takes this many times its usual time, and `GRACE_SECONDS` more, is overdue."""
GRACE_SECONDS = 5.0

QUIET_SECONDS: Durations = {
    "process": 60,
    "imports": 90,
    "config": 120,
    "download": 60,
    "weights": 180,
    "compile": 300,
    "memory profile": 180,
    "kv cache": 90,
    "graphs": 180,
    "warm-up": 180,
    "server": 60,
    "first request": 300,
}
"""How long a stage may be silent: large weights, compilation and CUDA graphs print nothing for minutes."""
QUIET_TIMES = 3.0
"""A stage that took long before may be silent for this many times its earlier duration."""


class Progress(msgspec.Struct, frozen=True):
    """``share`` of the startup, from 0 to 1, and seconds left (None if a stage takes longer than before).

    ``usual`` is the total time of the earlier start, without a download.
    """

    share: float
    seconds_left: float | None
    usual: float


class Startup(msgspec.Struct, frozen=True):
    """Startup progress beyond the stages. ``progress`` is None if no earlier start is known or the startup is over.

    ``quiet_seconds`` is how long neither log nor model cache has grown, if that is longer than usual; ``report`` is the
    engine's memory report, ``facts`` what made the start fast or slow.
    """

    progress: Progress | None = None
    quiet_seconds: float | None = None
    report: EngineReport = msgspec.field(default_factory=EngineReport)
    facts: StartupFacts = StartupFacts()


def startup_progress(stages: Sequence[Stage], earlier: Durations, now: float) -> Progress | None:
    """Progress of a start, estimated from the stage durations of an earlier one; None if these do not apply.

    Stages that took time before but have not begun count as done once a later one has begun.
    """
    usual = _joined(earlier)
    whole = sum(usual.values())
    if not stages or whole <= 0:
        return None
    stages = [replace(stages[0], name=FIRST), *stages[1:]]
    present = stages[-1]
    if present.name == FIRST:
        present = replace(present, started_at=stages[0].started_at)
    order = list(usual)
    begun = {stage.name for stage in stages[:-1]}
    furthest = max((order.index(stage.name) for stage in stages if stage.name in usual), default=-1)
    passed = {name for name in usual if name in begun or order.index(name) < furthest} - {present.name}
    done = sum(usual[name] for name in passed)
    rest = sum(seconds for name, seconds in usual.items() if name not in passed and name != present.name)
    if present.seconds is not None:
        done += usual.get(present.name, 0.0)
        return Progress(min(1.0, done / whole), rest, whole)
    if present.name not in usual:
        return Progress(min(1.0, done / whole), None, whole)
    expected, spent = usual[present.name], max(0.0, now - present.started_at)
    share = present.share
    inner = share if share is not None else _by_clock(spent, expected)
    overdue = spent > LATE * expected + GRACE_SECONDS
    left = None if overdue else max(0.0, expected - spent) + rest
    return Progress(min(1.0, (done + inner * expected) / whole), left, whole)


def _joined(earlier: Durations) -> dict[str, float]:
    """The stages of the estimate. Process and imports are merged: the first log line comes late in the imports."""
    usual = {FIRST: 0.0}
    for name, seconds in earlier.items():
        if name != DOWNLOAD:
            joined = FIRST if name == "process" else name
            usual[joined] = usual.get(joined, 0.0) + max(0.0, seconds)
    return usual


def _by_clock(spent: float, expected: float) -> float:
    """The fraction of a stage that the elapsed time represents; never quite all of it."""
    if expected <= 0:
        return 0.0
    share = spent / expected
    if share <= LINEAR_SHARE:
        return share
    beyond = (share - LINEAR_SHARE) / (1 - LINEAR_SHARE)
    return LINEAR_SHARE + (1 - LINEAR_SHARE) * (1 - 1 / (1 + beyond))


def too_quiet(stages: Sequence[Stage], earlier: Durations, silent_seconds: float) -> float | None:
    """``silent_seconds`` if that exceeds what is normal for the present stage, otherwise None."""
    if not stages or stages[-1].seconds is not None:
        return None
    name = stages[-1].name
    limit = max(QUIET_SECONDS.get(name, 180.0), QUIET_TIMES * earlier.get(name, 0.0))
    return silent_seconds if silent_seconds > limit else None


def durations(stages: Sequence[Stage], prepared_seconds: float | None) -> Durations:
    """The durations to store of a finished start, for estimating the next one.

    ``prepared_seconds`` were spent on the imports before the start; the next start may have to do these itself.
    """
    took = {stage.name: stage.seconds for stage in stages if stage.seconds is not None and stage.name != DOWNLOAD}
    if prepared_seconds:
        took[FIRST] = took.get(FIRST, 0.0) + prepared_seconds
    return took


FIRST_REQUEST = "first request"
"""The stage in which the keeper waits for a first completion; according to the log, the server is already up."""

_PHASE = {"process": 0, "imports": 1, "config": 2, "download": 3, "weights": 4, "server": 6}
_ENGINE_PHASE = 5

_MARKERS: tuple[tuple[str, str], ...] = (
    ("imports", r"Automatically detected platform|Triton (?:is )?(?:not )?installed|Triton not available"
                r"|Importing from "),
    ("config", r"vLLM (?:API )?server version|[█▄▀ ]  version \d|non-default args:|^args: Namespace"
               r"|Resolved architecture:|Using max model len|Initializing an? (?:V[01] )?LLM engine"),
    ("weights", r"Starting to load model|Loading drafter model|Loading model weights took|Loading weights took"
                r"|Time spent downloading weights|checkpoint shards|Model loading took|Initializing model took"),
    ("compile", r"Starting torch\.compile|for vLLM's torch\.compile|Dynamo bytecode transform time"
                r"|Compiling a graph for|Directly load the compiled graph|torch\.compile (?:takes|took)"
                r"|Warming up model for the compilation"),
    ("memory profile", r"Initial profiling/warmup run took|Estimated CUDA graph memory|[Mm]emory profiling takes"),
    ("kv cache", r"Available KV cache memory|KV cache size: [\d,]+ tokens|# (?:GPU|CPU|cuda) blocks"
                 r"|GiB for KV cache on node|GiB memory for KV Cache|Overriding num_gpu_blocks"),
    ("graphs", r"Capturing [^:]{0,60}?CUDA ?graph|Capturing cudagraphs|Graph capturing finished"),
    ("warm-up", r"JIT kernel warmup (?:starting|finished)|Warming up (?:sampler|kernels)|init engine \("),
    ("server", r"Starting vLLM (?:API )?server|Available routes are|Started server process"
               r"|Waiting for application startup|Application startup complete"),
)  # fmt: skip
_ANY = lazy_pattern("|".join(f"(?P<m{number}>{pattern})" for number, (_, pattern) in enumerate(_MARKERS)))
_AFTERWARDS = lazy_pattern(
    r"(?:init engine \(|warmup run took|profiling takes|Graph capturing finished)[^\d]*([\d.]+) s"
)
"""Lines that end a stage, with its duration in seconds."""
_TRACED = lazy_pattern(r"Dynamo bytecode transform time: (\d+(?:\.\d+)?) s")
"""The first part of compilation; its line is the first that vLLM prints about it."""
_TIME = lazy_pattern(
    r"(?:(?:\d{4}-)?(?P<month>\d\d)-|(?P<name>[A-Z][a-z]{2}) )(?P<day>[ \d]\d)[ T]"
    r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)"
)
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_DETAILS: tuple[tuple[str, re.Pattern[str], str], ...] = (
    ("weights", lazy_pattern(r"checkpoint shards.*?(\d+)% Completed"), "{}%"),
    ("weights", WEIGHTS, "{} GiB"),
    ("kv cache", KV_TOKENS, "{} tokens"),
    ("kv cache", KV_MEMORY, "{} GiB"),
    ("graphs", lazy_pattern(r"Capturing [^:]{0,60}?CUDA ?graph[^:]{0,60}:\s*(\d+)%"), "{}%"),
    ("graphs", GRAPHS, "{} GiB"),
)
_DOWNLOADED = lazy_pattern(r"Time spent downloading weights for \S+: (\d+(?:\.\d+)?) seconds")
_FIGURE = lazy_pattern(r"\d+(?:\.\d+)?")
_BREAK = lazy_pattern(rb"[\r\n]")
_TAIL_LIMIT = 64 * 1024


class StartupWatch:
    """Follows one startup, from ``started_at`` (Unix seconds), as its log grows: feed it text, then read the stages."""

    def __init__(self, started_at: float) -> None:
        self.started_at = started_at
        self.complete = False
        """Whether the log shows that the server is up; later lines are ignored."""
        self.memory = ReportReader()
        """The engine's memory report so far."""
        self.facts = FactReader()
        """What made it fast or slow."""
        self._tail = b""
        self._begun: dict[str, float] = {"process": started_at}
        self._details: dict[str, str] = {}
        self._time = self._marked_at = self._loaded_at = started_at
        self._zones: dict[int, float] = {}

    def feed(self, data: bytes) -> None:
        """Add new log text; lines may be cut anywhere and may end in ``\\r`` (progress bars)."""
        if self.complete:
            return
        *whole, tail = _BREAK.split(self._tail + data)
        for line in whole:
            self.line(line.decode("utf-8", "replace"))
        self._tail = tail[-_TAIL_LIMIT:]
        if b"%" in self._tail:
            # A progress bar's newest state has no line end yet. Rereading it later does no harm.
            self.line(self._tail.decode("utf-8", "replace"))

    def line(self, line: str) -> None:
        """Process one line."""
        if self.complete or not line:
            return
        for part in parse_line(0, line):
            self._take(part)

    def _take(self, line: LogLine) -> None:
        text = line.message
        if self.complete:
            return
        self._tell_time(line.clock)
        self.memory.line(text)
        self.facts.line(line.process, text, self._time)
        found = _ANY.search(text)
        if found is None or found.lastgroup is None:
            return
        name = _MARKERS[int(found.lastgroup[1:])][0]
        if (spent := _DOWNLOADED.search(text)) and float(spent[1]) >= 1:
            self._download(self._time - float(spent[1]))
        over = _AFTERWARDS.search(text)
        took = float(over[1]) if over is not None and _FIGURE.fullmatch(over[1]) else 0.0
        self._reach(name, max(self._marked_at, self._time - took))
        if name == "weights":
            self._loaded_at = self._time
        elif (traced := _TRACED.search(text)) is not None and "compile" in self._begun:
            began = max(self._loaded_at, self._time - float(traced[1]))
            self._begun["compile"] = min(self._begun["compile"], began)
        self._marked_at = self._time
        for stage, pattern, form in _DETAILS:
            if stage == name and (match := pattern.search(text)):
                self._note(stage, form.format(_short(match[1])))
        if "Application startup complete" in text:
            self.complete = True

    def downloaded(self, at: float, detail: str) -> None:
        """Record that the model's cache has grown (Unix seconds): vLLM itself prints nothing while it downloads.

        Ignored once weights are loaded: it then grows for another process.
        """
        begun_later = any(_PHASE.get(name, _ENGINE_PHASE) > _PHASE["weights"] for name in self._begun)
        if self.complete or begun_later or "weights" in self._details:
            return
        self._download(at)
        self._note("download", detail)

    def first_request(self, at: float) -> None:
        """Record that the keeper sent the warm-up request (Unix seconds)."""
        if FIRST_REQUEST not in self._begun:
            self._begun[FIRST_REQUEST] = at
            self._time = max(self._time, at)

    def stages(self, now: float, ready_at: float | None = None, ended: bool = False) -> tuple[Stage, ...]:
        """The stages seen so far, in the order in which they began.

        The last one is still running, unless the server is ready (since ``ready_at``) or its process ``ended``: then it
        lasted until that, or until the log's last line. ``now`` bounds the times of a log with a wrong clock.
        """
        last = min(max(self._time, self.started_at), max(now, self.started_at))
        begun = [(name, min(at, last)) for name, at in self._begun.items()]
        stages = []
        for place, (name, at) in enumerate(begun):
            if place + 1 < len(begun):
                seconds: float | None = begun[place + 1][1] - at
            elif ready_at is not None:
                seconds = max(0.0, ready_at - at)
            else:
                seconds = max(0.0, last - at) if ended else None
            stages.append(Stage(name, at, seconds, self._details.get(name, "")))
        return tuple(stages)

    def _reach(self, name: str, at: float) -> None:
        """Begin a stage, unless it or a later one has begun: workers and engines repeat each other."""
        if name in self._begun:
            return
        reached = max(_PHASE.get(known, _ENGINE_PHASE) for known in self._begun)
        if _PHASE.get(name, _ENGINE_PHASE) >= reached:
            self._begun[name] = at

    def _download(self, at: float) -> None:
        """Begin the download stage: what vLLM calls loading the model includes it."""
        loading = self._begun.pop("weights", None)
        if "download" not in self._begun:
            self._begun["download"] = max(self.started_at, at if loading is None else min(at, loading))

    def _note(self, stage: str, detail: str) -> None:
        if stage not in self._begun:
            return
        # A KV cache's tokens are more useful than its bytes, and a final figure more than progress.
        known = self._details.get(stage, "")
        if known.endswith(" tokens") or (known.endswith(" GiB") and detail.endswith("%")):
            return
        self._details[stage] = detail

    def _tell_time(self, clock: str) -> None:
        match = _TIME.fullmatch(clock)
        if match is None:
            return
        month = _MONTHS.index(match["name"]) + 1 if match["name"] in _MONTHS else int(match["month"] or 0)
        moment = _moment(self.started_at, month, *(int(match[name]) for name in ("day", "hour", "minute", "second")))
        if moment is None:
            return
        if len(clock) not in self._zones:  # each time format may have its own zone
            # A log in another time zone is off by a multiple of 15 minutes; a slow start by less than half an hour.
            off = moment - self.started_at
            self._zones[len(clock)] = round(off / 900) * 900.0 if off < -60 or off > 1800 else 0.0
        self._time = max(self._time, moment - self._zones[len(clock)])


def stages(
    lines: Iterable[str],
    started_at: float,
    now: float,
    ready_at: float | None,
    ended: bool,
    first_request_at: float | None = None,
) -> tuple[Stage, ...]:
    """The stages in a log's lines; see `StartupWatch.stages`."""
    return watched(lines, started_at, first_request_at).stages(now, ready_at, ended)


def watched(lines: Iterable[str], started_at: float, first_request_at: float | None = None) -> StartupWatch:
    """Follow a startup from the lines of its log; ``first_request_at`` is when the keeper sent the warm-up request."""
    watch = StartupWatch(started_at)
    for line in lines:
        for part in line.replace("\r", "\n").split("\n"):
            watch.line(part)
    if first_request_at is not None:
        watch.first_request(first_request_at)
    return watch


def _moment(near: float, month: int, day: int, hour: int, minute: int, second: int) -> float | None:
    """Unix seconds of a local time without a year, in the year closest to ``near``."""
    year = datetime.fromtimestamp(near).year
    moments = []
    for candidate in (year - 1, year, year + 1):
        try:
            moments.append(datetime(candidate, month, day, hour, minute, second).timestamp())
        except (ValueError, OverflowError):
            continue
    return min(moments, key=lambda moment: abs(moment - near), default=None)


def _short(figure: str) -> str:
    """``14.9890`` as ``15.0``; whole numbers and thousands unchanged."""
    return f"{float(figure):.1f}" if "." in figure and _FIGURE.fullmatch(figure.lstrip("-")) else figure
