"""How a finding is detected: a verdict for every frame, and from the verdicts, since when it holds.

A finding begins when its condition holds in three of the last four frames. It ends when the condition fails in three
consecutive frames, so that it does not flap, or at once if its whole evaluation window has no occurrence; an unclear
frame changes nothing. A missed objective also ends some minutes after it is met again. Findings judged by requests stay
open through a silence of some minutes, because slow traffic has such pauses, and then end. So does preemption while
requests run, since it comes in bursts: if it returns within these minutes, it is the same finding. After a while
without reports, a finding is not shown. Everything is recomputed from the frames each time, so all consoles and
commands agree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum

import msgspec

from vllm_console.diagnosis.finding import Finding, Measure, Span
from vllm_console.diagnosis.live.frame_sums import MINUTE
from vllm_console.history.frames import STEP_SECONDS, Frame, merged
from vllm_console.history.prefix_use import StillCached
from vllm_console.history.probe_records import EngineStep
from vllm_console.logs.refusals import Refusals
from vllm_console.metrics.quantile import Quantiles
from vllm_console.metrics.sample import Window
from vllm_console.metrics.window import quantiles
from vllm_console.text import clock
from vllm_launchers.engine_model.gpu_models import SMALL_BATCHES
from vllm_launchers.host.gpu.host import Gpu
from vllm_launchers.plan.flags import BATCHED, DATA, PREFIX, SEQUENCES, TENSOR
from vllm_launchers.presets.model import Objectives, Workload
from vllm_launchers.vllm.flags.changes import Flags, whole_number

DEFAULT_OBJECTIVES = Objectives(ttft_p99_seconds=2.0, itl_p99_seconds=0.1, kv_cache_usage=0.85, preemption_rate=0.02)
"""For servers launched without objectives."""

UNJUDGED_SECONDS = 30.0
"""After this long without a sample, the present state is unknown; recorders take one per second."""

ELSEWHERE = (
    "data-parallel-rank", "data-parallel-external-lb", "data-parallel-hybrid-lb", "data-parallel-size-local",
    "data-parallel-multi-port-external-lb", "nnodes",
)  # fmt: skip
"""With one of these flags, only some of the ``data-parallel-size`` engines, or one, are behind the server's port."""

HELD_SHARE = 0.95
"""At most this share of the KV cache is proposed as the context length, or of its blocks as sequences with a state."""

CONTEXT_ROUND = 16
"""Context lengths are proposed in steps of this many tokens, a usual block size."""

ENTER, OF = 3, 4
LEAVE = 3
QUIET_AFTER = 3
"""Consecutive frames without a report, after which nothing is reported."""
SILENCE_SECONDS = 300.0
"""How long a finding stays open after its last observation: requests a minute or two apart are the same traffic."""
SILENT_FRAMES = round(SILENCE_SECONDS / STEP_SECONDS) - MINUTE + 1
"""Consecutive silent frames that end a finding; the first one follows a whole minute without an observation."""

_NOTHING = Quantiles(count=0.0, mean=None)


class Judgment(Enum):
    """One frame's verdict on one finding."""

    HOLDS = "holds"
    """The finding's condition holds."""
    UNCLEAR = "unclear"
    """The condition does not hold clearly enough to begin a finding, nor fail clearly enough to end it."""
    FAILS = "fails"
    """The condition does not hold."""
    OVER = "over"
    """No occurrence in the whole evaluation window: ends the finding at once, since there is no figure to show."""
    SILENT = "silent"
    """Nothing was observed in a minute without requests, or a burst has paused: ends a finding if it lasts."""
    UNKNOWN = "unknown"
    """The figures to judge by were not reported."""


class GpuMoment(msgspec.Struct, frozen=True):
    """A sample of the server's GPUs (at Unix seconds), as far as they could be read."""

    at: float
    gpus: tuple[Gpu, ...]


def objectives_of(objectives: Objectives | None, preset: str) -> tuple[Objectives, str]:
    """The objectives to judge a server by, its preset's or the defaults, and their source for users."""
    if objectives is None:
        return DEFAULT_OBJECTIVES, "default objectives, no preset"
    return objectives, f"objectives of preset {preset}" if preset else "its preset's objectives"


class Evidence(msgspec.Struct, frozen=True):
    """All inputs for findings. ``frames`` are those of the present generation, oldest first.

    ``ready_at`` is when the generation began to serve. ``moments`` are samples of its GPUs, oldest first, empty if none
    is known. ``link`` is how its GPUs are connected (``NV4``, ``PIX``, ``SYS``, …), for the slowest pair.
    ``silent_seconds`` is how long a one-token request has been unanswered, None if none was sent, and 0 once it was
    answered. ``health_problem`` is the response of ``/health`` if it was not 200 (``HTTP 503``), since
    ``health_since``.
    """

    now: float
    ready_at: float
    frames: Sequence[Frame]
    flags: Flags = msgspec.field(default_factory=dict)
    flags_known: bool = True
    """False for endpoints that were attached by URL: no finding may rest on a flag's value then."""
    preset_objectives: Objectives | None = None
    workload: Workload | None = None
    preset: str = ""
    release: tuple[int, int, int] | None = None
    max_model_len: int | None = None
    max_context: int | None = None
    """The model's own maximum context length, if known."""
    model_name: str | None = None
    """The served model name, as reported."""
    refusals: Refusals = Refusals()
    """Requests refused in the last minute, as far as the log shows them."""
    health_problem: str = ""
    health_since: float = 0.0
    moments: Sequence[GpuMoment] = ()
    link: str = ""
    server: str = ""
    reserve_gib: Mapping[int, float] = msgspec.field(default_factory=dict)
    """GiB reserved for other tenants, by GPU index."""
    spare_gib: Mapping[int, float] = msgspec.field(default_factory=dict)
    """GiB that this server may still use, by GPU index: free now, within this user's share, without the reserve."""
    gpus: int = 0
    """Number of GPUs that this server has."""
    free_gpus: tuple[int, ...] | None = None
    """Other GPUs of its machine, like its own, on which nothing runs; None if unknown."""
    earlier_reuse: float | None = None
    """The prefix cache's hit rate in its previous generation, if caching was on and the rate is known."""
    longest_seen: float = 0.0
    """No request of the last half hour had more tokens, prompt plus answer, also of earlier runs and while this one
    warmed up, which ``frames`` lack; infinite if that is unknown."""
    weights_gib: float | None = None
    """GiB of weights on each GPU, if estimated."""
    cache_gib: float | None = None
    """GiB of KV cache on each GPU, if estimated."""
    cache_free_gib: float | None = None
    """GiB that the KV cache would have if no flag fixed its size; None if unknown."""
    blocks_without_override: float | None = None
    """How many times more KV cache blocks fit without ``num-gpu-blocks-override``, by its log; None if unknown."""
    build: str | None = None
    """The engine's build: ``cuda``, ``cpu``, …; a CPU build has no GPU to tune for."""
    simulated: bool = False
    """Whether it is our simulated engine, whose step times are computed."""
    compute_capability: tuple[int, int] | None = None
    environment: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The server's own variables, and the inherited ones that its record keeps."""
    mla: bool = False
    """Whether the model uses multi-head latent attention."""
    linear_layers: bool = False
    """Whether the model has layers with a state instead of a KV cache: Mamba, linear attention."""
    resumed: StillCached | None = None
    """What requests resumed in the last five minutes still found in the prefix cache; None if unknown."""
    steps: Sequence[EngineStep] = ()
    """The engine steps of the last minutes in order of time, if they were needed and a probe recorded them."""
    sliding_layers: bool = False
    """Whether the model has layers with sliding-window or chunked attention."""
    attention_free: bool = False
    """Whether all its layers have such a state, or none at all."""
    most_sequences: int | None = None
    """The largest ``max-num-seqs`` with which vLLM would start, by its log or an estimate; None if blocks for states do
    not limit it."""
    batch_sizes: tuple[int, int] = SMALL_BATCHES
    """vLLM's defaults of ``max-num-seqs`` and ``max-num-batched-tokens`` for this server."""
    max_tokens_per_mm_item: int = 0
    """Tokens of the largest image, video or sound that must be computed in one step; 0 if vLLM may chunk it."""
    quantized: bool | None = None
    """Whether its weights are quantized; None if unknown."""
    own_fp8_cache: bool = False
    """Whether the checkpoint requests an FP8 KV cache, which vLLM then uses unless a flag says otherwise."""
    silent_seconds: float | None = None
    idle_seconds: float = 0.0
    """How long nothing has run, waited or been counted, as far as known."""
    minute: Window | None = None
    """The last minute as panes show it, latencies exact where a probe has them. None: computed from the frames."""
    unasked: str = ""
    """Why no one-token request is sent though it seems to hang (``this console is read-only``), else empty."""

    @property
    def objectives(self) -> Objectives:
        """The thresholds: those of its preset, or our defaults for a server without one."""
        return objectives_of(self.preset_objectives, self.preset)[0]

    @property
    def objectives_source(self) -> str:
        """The source of the thresholds, for users."""
        return objectives_of(self.preset_objectives, self.preset)[1]

    @property
    def engines(self) -> int:
        """Number of engines (data-parallel ranks). Limits apply to each, requests and tokens are counted over all of
        them.

        As observed, or from its flag if it has so many that history merges them.
        """
        seen = self.frames[-1].engines if self.frames else 1
        if seen > 1 or any(name in self.flags for name in ELSEWHERE):
            return seen
        return whole_number(self.flags, DATA)

    @property
    def max_num_seqs(self) -> int:
        """Maximum running sequences in each engine; vLLM's own default if the flag is not set."""
        return whole_number(self.flags, SEQUENCES, self.batch_sizes[0])

    @property
    def most_running(self) -> int:
        """Maximum running sequences over all engines."""
        return self.engines * self.max_num_seqs

    def running(self, count: float, name: str = "running") -> Measure:
        """Number of running sequences, and the limit if it is known."""
        if not self.flags_known:
            return Measure(name, f"{count:.0f}")
        source = f"max-num-seqs of {self.engines} engines" if self.engines > 1 else "max-num-seqs"
        return Measure(name, f"{count:.0f}", str(self.most_running), source, count < self.most_running)

    @property
    def past(self) -> str:
        """The minute of its newest frames, to follow a figure, if that is not the last minute: `` in the minute to
        12:03``; otherwise empty."""
        end = self.frames[-1].end if self.frames else self.now
        return f" in the minute to {clock(end, self.now)}" if self.now - end >= MINUTE * STEP_SECONDS else ""

    @property
    def hardware(self) -> str:
        """What does the computing: ``GPU``, or ``machine`` for a CPU build."""
        return "machine" if self.build == "cpu" else "GPU"

    @property
    def each(self) -> str:
        """The suffix of a figure that applies to each engine; empty if there is only one."""
        return " in each engine" if self.engines > 1 else ""

    @property
    def cache_tokens(self) -> int | None:
        """Number of tokens that one engine's KV cache holds."""
        tokens = self.frames[-1].kv_cache_tokens if self.frames else None
        return tokens // self.engines if tokens is not None else None

    @property
    def longest_held(self) -> int | None:
        """The longest context that one engine's KV cache surely holds, also after the next start.

        That may measure a little less memory, and vLLM keeps one block empty (``BlockPool.null_block``).
        """
        tokens = self.cache_tokens
        return int(HELD_SHARE * tokens) // CONTEXT_ROUND * CONTEXT_ROUND if tokens is not None else None

    @property
    def max_num_batched_tokens(self) -> int:
        """Maximum tokens per step; vLLM's own default if the flag is not set."""
        return whole_number(self.flags, BATCHED, self.batch_sizes[1])

    @property
    def sizes(self) -> Flags:
        """The flags, with vLLM's own values for unset limits of a step."""
        return {**self.flags, SEQUENCES: self.max_num_seqs, BATCHED: self.max_num_batched_tokens}

    @property
    def state_block(self) -> int:
        """Minimum tokens per step for caching states of linear layers; 0 without such layers.

        Some releases reject smaller steps with ``mamba-cache-mode align`` (0.25.1 does, 0.32.0 does not).
        """
        block = self.frames[-1].prefix_step if self.frames else None
        off = self.flags.get(PREFIX) is False
        return block or 0 if self.linear_layers and not off else 0

    @property
    def tensor_parallel(self) -> int:
        """Number of GPUs over which each layer is split."""
        return whole_number(self.flags, TENSOR)

    @property
    def reuse(self) -> tuple[float, str]:
        """The fraction of prompts that repeats, and its source; 0 if unknown."""
        if self.earlier_reuse is not None:
            return self.earlier_reuse, "measured in the previous run"
        return (self.workload.prefix_reuse, "by its preset") if self.workload is not None else (0.0, "")

    def last(self, count: int) -> Sequence[Frame]:
        """The newest frames."""
        return self.frames[-count:]

    def latency(self, key: str) -> Quantiles:
        """A latency over the last minute."""
        if self.minute is not None:
            return self.minute.latencies.get(key) or _NOTHING
        found = merged(self.last(MINUTE), key)
        return quantiles(found) if found is not None else _NOTHING

    def when_observed(self, key: str) -> Evidence:
        """The evidence up to the last frame in which this latency was observed; all of it if it never was."""
        frames = self.frames
        last = next((at for at in reversed(range(len(frames))) if _counts(frames[at], key)), len(frames) - 1)
        return msgspec.structs.replace(self, frames=frames[: last + 1], minute=None)


def _counts(frame: Frame, key: str) -> bool:
    found = frame.histogram(key)
    return found is not None and found.count > 0


def moments_within(evidence: Evidence) -> Iterator[tuple[Frame, Sequence[GpuMoment]]]:
    """Each frame with the GPU samples taken in it; empty if there were none."""
    moments = evidence.moments
    begin = 0
    for frame in evidence.frames:
        while begin < len(moments) and moments[begin].at < frame.start:
            begin += 1
        end = begin
        while end < len(moments) and moments[end].at < frame.end:
            end += 1
        yield frame, moments[begin:end]
        begin = end


HELD_UP = (
    "preempting", "oversubscribed_memory", "oversubscribed_sequences", "oversubscribed_compute", "not_admitted",
    "uneven_ranks",
)  # fmt: skip
"""Findings that say why requests wait."""


class Rule(ABC):
    """One finding: how it is detected and described, and how it relates to others."""

    code: str
    explained_by: tuple[str, ...] = ()
    """Codes of findings that cause this one: hidden while one is open, so a problem is only reported by its cause."""
    of_traffic = False
    """Whether it is about what requests experience; it then ends with the traffic."""
    through_pauses = False
    """Whether it stays open through pauses of slow traffic: `verdicts` decides when a pause is the end."""
    of_the_last_minute = False
    """Whether its figures include those of the last minute as panes show it (`Evidence.minute`)."""
    missed_objective = False
    """Whether it is a missed objective: ranked before others of the same severity if a change of flags fixes it,
    otherwise after."""
    optional = False
    """Whether its fixes are optional: ranked after others of the same severity."""

    @abstractmethod
    def verdicts(self, evidence: Evidence) -> Sequence[Judgment]:
        """One verdict per frame of the evidence."""

    @abstractmethod
    def describe(self, evidence: Evidence, since: float) -> Finding:
        """The current finding."""


def holds_since(verdicts: Sequence[Judgment], frames: Sequence[Frame]) -> float | None:
    """When the finding that holds at the end began (start of its first frame that holds), or None if none holds."""
    begun: float | None = None
    failed = unknown = silent = 0
    for index, verdict in enumerate(verdicts):
        unknown = unknown + 1 if verdict is Judgment.UNKNOWN else 0
        silent = silent + 1 if verdict is Judgment.SILENT else 0
        if verdict is Judgment.OVER or unknown >= QUIET_AFTER or silent >= SILENT_FRAMES:
            begun, failed = None, 0
        elif begun is not None:
            failed = failed + 1 if verdict is Judgment.FAILS else 0 if verdict is Judgment.HOLDS else failed
            if failed >= LEAVE:
                begun, failed = None, 0
        elif verdict is Judgment.HOLDS:
            last = range(max(0, index - OF + 1), index + 1)
            held = [at for at in last if verdicts[at] is Judgment.HOLDS]
            if len(held) >= ENTER:
                begun, failed = frames[held[0]].start, 0
    return begun


def over_once_met(verdicts: Iterable[Judgment], met: Iterable[bool | None]) -> list[Judgment]:
    """The verdicts, which also end a finding once its objective was met for `SILENCE_SECONDS`.

    ``met`` says for each frame whether the objective was met; None, if there was nothing to judge, changes nothing.
    """
    found, frames = [], 0
    for verdict, well in zip(verdicts, met, strict=True):
        if well is not None:
            frames = frames + 1 if well else 0
        found.append(Judgment.OVER if well and frames * STEP_SECONDS >= SILENCE_SECONDS else verdict)
    return found


def held_spans(
    verdicts: Sequence[Judgment], frames: Sequence[Frame], since: float, *, of_traffic: bool
) -> tuple[Span, ...]:
    """When a finding that began at ``since`` held; one ``of_traffic`` only in frames with requests."""
    spans: list[Span] = []
    for verdict, frame in zip(verdicts, frames, strict=True):
        if verdict is not Judgment.HOLDS or frame.start < since or (of_traffic and not is_served(frame)):
            continue
        joined = bool(spans) and spans[-1][1] >= frame.start
        start = spans.pop()[0] if joined else frame.start
        spans.append((start, frame.end))
    return tuple(spans)


def is_served(frame: Frame) -> bool:
    """Whether a request ran or waited in a frame."""
    return bool(frame.running_max or frame.waiting_max or frame.grown.generation_tokens_total)


def above(value: float | None, begins: float, ends: float) -> Judgment:
    """Holds above ``begins``, fails up to ``ends``, unclear in between."""
    if value is None:
        return Judgment.UNKNOWN
    return Judgment.HOLDS if value > begins else Judgment.FAILS if value <= ends else Judgment.UNCLEAR
