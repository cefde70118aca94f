"""A server's way up, read from its log: which stages, since when, how long, how far. For vLLM 0.8 to 0.33.

Pure: the log comes in as text, times come from its lines. vLLM's lines carry month, day and time without a year, in
the server's own time zone; both are put right by the moment the process was started.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime

from vllm_console.telemetry.loglines import LogLine, parse_line
from vllm_console.telemetry.model import Stage
from vllm_launchers.plan.budget.report import GRAPHS, KV_MEMORY, KV_TOKENS, WEIGHTS, ReportReader

__all__ = ["STAGES", "Stage", "StartupWatch", "stages"]

STAGES = (
    "process",
    "imports",
    "config",
    "download",
    "weights",
    "compile",
    "memory profile",
    "kv cache",
    "graphs",
    "warm-up",
    "server",
)
"""All stages in their usual order. Between weights and server vLLM's versions differ in it; the log decides."""

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
_ANY = re.compile("|".join(f"(?P<m{number}>{pattern})" for number, (_, pattern) in enumerate(_MARKERS)))
_AFTERWARDS = re.compile(r"(?:init engine \(|warmup run took|profiling takes|Graph capturing finished)[^\d]*([\d.]+) s")
"""Lines that come when their stage is over, with the seconds it took."""
_TIME = re.compile(
    r"(?:(?:\d{4}-)?(?P<month>\d\d)-|(?P<name>[A-Z][a-z]{2}) )(?P<day>[ \d]\d)[ T]"
    r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)"
)
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_DETAILS: tuple[tuple[str, re.Pattern[str], str], ...] = (
    ("weights", re.compile(r"checkpoint shards.*?(\d+)% Completed"), "{} %"),
    ("weights", WEIGHTS, "{} GiB"),
    ("kv cache", KV_TOKENS, "{} tokens"),
    ("kv cache", KV_MEMORY, "{} GiB"),
    ("graphs", re.compile(r"Capturing [^:]{0,60}?CUDA ?graph[^:]{0,60}:\s*(\d+)%"), "{} %"),
    ("graphs", GRAPHS, "{} GiB"),
)
_DOWNLOADED = re.compile(r"Time spent downloading weights for \S+: (\d+(?:\.\d+)?) seconds")
_FIGURE = re.compile(r"\d+(?:\.\d+)?")
_BREAK = re.compile(rb"[\r\n]")
_TAIL_LIMIT = 64 * 1024


class StartupWatch:
    """Follows one start-up as its log grows: feed it what is new, ask for the stages.

    ``started_at`` is when the process was started (Unix seconds).
    """

    def __init__(self, started_at: float) -> None:
        self.started_at = started_at
        self.complete = False
        """Whether the log says that the server is up; what comes after is not looked at."""
        self.memory = ReportReader()
        """What the engine has said of its memory so far."""
        self._tail = b""
        self._begun: dict[str, float] = {"process": started_at}
        self._details: dict[str, str] = {}
        self._time = self._marked_at = started_at
        self._zones: dict[int, float] = {}

    def feed(self, data: bytes) -> None:
        """Take in what the log has grown by; lines may be cut anywhere, ends of line may be ``\\r`` (progress bars)."""
        if self.complete:
            return
        *whole, tail = _BREAK.split(self._tail + data)
        for line in whole:
            self.line(line.decode("utf-8", "replace"))
        self._tail = tail[-_TAIL_LIMIT:]
        if b"%" in self._tail:
            # A progress bar's newest state has no end of line yet. Reading it again later does no harm.
            self.line(self._tail.decode("utf-8", "replace"))

    def line(self, line: str) -> None:
        """Take in one line."""
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
        found = _ANY.search(text)
        if found is None or found.lastgroup is None:
            return
        name = _MARKERS[int(found.lastgroup[1:])][0]
        if (spent := _DOWNLOADED.search(text)) and float(spent[1]) >= 1:
            self._download(self._time - float(spent[1]))
        over = _AFTERWARDS.search(text)
        took = float(over[1]) if over is not None and _FIGURE.fullmatch(over[1]) else 0.0
        self._reach(name, max(self._marked_at, self._time - took))
        self._marked_at = self._time
        for stage, pattern, form in _DETAILS:
            if stage == name and (match := pattern.search(text)):
                self._note(stage, form.format(_short(match[1])))
        if "Application startup complete" in text:
            self.complete = True

    def downloaded(self, at: float, detail: str) -> None:
        """The model's cache was seen to grow (Unix seconds): vLLM itself says nothing while it downloads.

        Ignored once weights are being read: then it grows for somebody else.
        """
        begun_later = any(_PHASE.get(name, _ENGINE_PHASE) > _PHASE["weights"] for name in self._begun)
        if self.complete or begun_later or "weights" in self._details:
            return
        self._download(at)
        self._note("download", detail)

    def stages(self, now: float, ready_at: float | None = None, ended: bool = False) -> tuple[Stage, ...]:
        """The stages seen so far, in the order they began.

        The last one still runs, unless the server is ready (since ``ready_at``) or its process ``ended``: then it
        lasted until that, or until the log's last line. ``now`` bounds what a log with a wrong clock may say.
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
        """Begin a stage, unless it or one of a later phase has begun: workers and engines repeat each other."""
        if name in self._begun:
            return
        reached = max(_PHASE.get(known, _ENGINE_PHASE) for known in self._begun)
        if _PHASE.get(name, _ENGINE_PHASE) >= reached:
            self._begun[name] = at

    def _download(self, at: float) -> None:
        """What vLLM calls loading the model begins with the download, where there is one."""
        loading = self._begun.pop("weights", None)
        if "download" not in self._begun:
            self._begun["download"] = max(self.started_at, at if loading is None else min(at, loading))

    def _note(self, stage: str, detail: str) -> None:
        if stage not in self._begun:
            return
        # The tokens of a KV cache say more than its bytes, and a finished figure more than a progress.
        known = self._details.get(stage, "")
        if known.endswith(" tokens") or (known.endswith(" GiB") and detail.endswith(" %")):
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
        if len(clock) not in self._zones:  # each way to write a time may have a zone of its own
            # A log in another time zone is off by whole quarters of an hour; a slow start by less than half an hour.
            off = moment - self.started_at
            self._zones[len(clock)] = round(off / 900) * 900.0 if off < -60 or off > 1800 else 0.0
        self._time = max(self._time, moment - self._zones[len(clock)])


def stages(
    lines: Iterable[str], started_at: float, now: float, ready_at: float | None, ended: bool
) -> tuple[Stage, ...]:
    """The stages that a log's lines show; see `StartupWatch.stages`."""
    watch = StartupWatch(started_at)
    for line in lines:
        for part in line.replace("\r", "\n").split("\n"):
            watch.line(part)
    return watch.stages(now, ready_at, ended)


def _moment(near: float, month: int, day: int, hour: int, minute: int, second: int) -> float | None:
    """Unix seconds of a local time without a year, in the year that brings it nearest to ``near``."""
    year = datetime.fromtimestamp(near).year
    moments = []
    for candidate in (year - 1, year, year + 1):
        try:
            moments.append(datetime(candidate, month, day, hour, minute, second).timestamp())
        except (ValueError, OverflowError):
            continue
    return min(moments, key=lambda moment: abs(moment - near), default=None)


def _short(figure: str) -> str:
    """``14.9890`` as ``15.0``; whole numbers and thousands as they stand."""
    return f"{float(figure):.1f}" if "." in figure and _FIGURE.fullmatch(figure.lstrip("-")) else figure
