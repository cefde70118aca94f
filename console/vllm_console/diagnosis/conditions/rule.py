"""How a condition is found: a verdict on every frame, and from the verdicts since when it holds.

A condition begins when three of the last four frames are bad and ends when three in a row are good, so that it does not
flap; a frame that says neither leaves things as they are. Where nothing was reported for a while it is quiet. All of it
is worked out from the frames anew at every look, so that every console and command says the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from vllm_console.diagnosis.model import Condition, Measure
from vllm_console.telemetry.frames import Frame
from vllm_launchers.machine.gpu.host import Gpu
from vllm_launchers.plan.flags import token_count
from vllm_launchers.plan.model import Flags
from vllm_launchers.presets.model import Objectives, Workload

DEFAULT_OBJECTIVES = Objectives(ttft_p99_seconds=2.0, itl_p99_seconds=0.1, kv_cache_usage=0.85, preemption_rate=0.02)
"""For servers whose launch says nothing of objectives."""

DEFAULT_SEQUENCES = {False: 256, True: 1024}
DEFAULT_STEP_TOKENS = {False: 2048, True: 8192}
"""``max-num-seqs`` and ``max-num-batched-tokens`` where the flags are not set, on a large GPU or not."""

ELSEWHERE = (
    "data-parallel-rank", "data-parallel-external-lb", "data-parallel-hybrid-lb", "data-parallel-size-local",
    "data-parallel-multi-port-external-lb", "nnodes",
)  # fmt: skip
"""With one of these only some of ``data-parallel-size`` engines, or one, stand behind the server's port."""

ENTER, OF = 3, 4
LEAVE = 3
QUIET_AFTER = 3
"""Frames in a row without a report, after which nothing is said."""


class Verdict(Enum):
    """What one frame says of one condition."""

    BAD = "bad"
    BETWEEN = "between"
    """Neither bad enough to begin nor good enough to end."""
    GOOD = "good"
    UNKNOWN = "unknown"
    """What it is judged by was not reported."""


@dataclass(frozen=True, slots=True)
class GpuMoment:
    """The server's GPUs at one moment (Unix seconds), as far as they were looked at."""

    at: float
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything that conditions are judged by. ``frames`` are those of the present generation, oldest first.

    ``ready_at`` is when it began to serve. ``moments`` are looks at its GPUs, oldest first, empty where none is known.
    ``link`` is how its GPUs reach each other (``NV4``, ``PIX``, ``SYS``, …), the slowest pair. ``silent_seconds`` is
    how long a one-token request has been without an answer, None when none was sent, and 0 when it was answered.
    ``health_problem`` is what ``/health`` said when it did not say 200 (``answer 503``), since ``health_since``.
    """

    now: float
    ready_at: float
    frames: Sequence[Frame]
    flags: Flags = field(default_factory=dict)
    objectives: Objectives | None = None
    workload: Workload | None = None
    preset: str = ""
    release: tuple[int, int, int] | None = None
    max_model_len: int | None = None
    health_problem: str = ""
    health_since: float = 0.0
    moments: Sequence[GpuMoment] = ()
    link: str = ""
    server: str = ""
    reserve_gib: Mapping[int, float] = field(default_factory=dict)
    """Per GPU index, what is kept for other tenants."""
    spare_gib: Mapping[int, float] = field(default_factory=dict)
    """Per GPU index, what this server may still take: free now, within this person's share, the reserve left alone."""
    earlier_reuse: float | None = None
    """The prefix cache's hit rate in its generation before, where caching was on and that is known."""
    weights_gib: float | None = None
    """What its weights take of each GPU, as far as that was estimated."""
    cache_gib: float | None = None
    """What its KV cache takes of each GPU, as far as that was estimated."""
    cache_free_gib: float | None = None
    """What it would take if no flag made it of one size; None where that is not known."""
    build: str | None = None
    """The engine's build: ``cuda``, ``cpu``, …; a CPU build has no GPU to tune for."""
    compute_capability: tuple[int, int] | None = None
    large_gpu: bool = False
    """Whether vLLM takes its larger defaults: 70 GiB or more, and no A100."""
    quantized: bool | None = None
    """Whether its weights are quantized; None where that is not known."""
    silent_seconds: float | None = None
    unasked: str = ""
    """Why it is not sent a one-token request though it seems to hang (``this console is read-only``), else empty."""

    @property
    def goals(self) -> Objectives:
        """The thresholds: its preset's, or for a server without one ours."""
        return self.objectives or DEFAULT_OBJECTIVES

    @property
    def goals_source(self) -> str:
        """Where the thresholds come from, as a person reads it."""
        if self.objectives is None:
            return "our default, as it has no preset"
        return f"objectives of preset {self.preset}" if self.preset else "objectives of its preset"

    @property
    def engines(self) -> int:
        """Its engines (data-parallel ranks): limits hold for each, requests and tokens are counted over all of them.

        As seen; by its flag where it has so many that history keeps them as one.
        """
        seen = self.frames[-1].engines if self.frames else 1
        if seen > 1 or any(name in self.flags for name in ELSEWHERE):
            return seen
        return token_count(self.flags.get("data-parallel-size")) or 1

    @property
    def max_num_seqs(self) -> int:
        """How many sequences may run at once in each engine; vLLM's own default where the flag is not set."""
        return token_count(self.flags.get("max-num-seqs")) or DEFAULT_SEQUENCES[self.large_gpu]

    @property
    def most_running(self) -> int:
        """How many sequences may run at once over all engines."""
        return self.engines * self.max_num_seqs

    def running(self, count: float, name: str = "running") -> Measure:
        """How many sequences run, beside how many may."""
        source = f"max-num-seqs of {self.engines} engines" if self.engines > 1 else "max-num-seqs"
        return Measure(name, f"{count:.0f}", str(self.most_running), source)

    @property
    def each(self) -> str:
        """What is said after a figure that holds for each engine; empty where there is but one."""
        return " in each engine" if self.engines > 1 else ""

    @property
    def cache_tokens(self) -> int | None:
        """Tokens that the KV cache of one engine holds."""
        tokens = self.frames[-1].kv_cache_tokens if self.frames else None
        return tokens // self.engines if tokens is not None else None

    @property
    def max_num_batched_tokens(self) -> int:
        """How many tokens a step may have; vLLM's own default where the flag is not set."""
        default = max(DEFAULT_STEP_TOKENS[self.large_gpu], token_count(self.flags.get("max-num-seqs")) or 0)
        return token_count(self.flags.get("max-num-batched-tokens")) or default

    @property
    def tensor_parallel(self) -> int:
        """Over how many GPUs each layer is split."""
        return token_count(self.flags.get("tensor-parallel-size")) or 1

    @property
    def reuse(self) -> tuple[float, str]:
        """The share of prompts that repeats, and where that is known from; 0 where it is not."""
        if self.earlier_reuse is not None:
            return self.earlier_reuse, "measured in the generation before"
        return (self.workload.prefix_reuse, "by its preset") if self.workload is not None else (0.0, "")

    def last(self, count: int) -> Sequence[Frame]:
        """The newest frames."""
        return self.frames[-count:]


def moments_within(situation: Situation) -> Iterator[tuple[Frame, Sequence[GpuMoment]]]:
    """Each frame with the looks at the GPUs that fall into it; none where nobody looked."""
    moments = situation.moments
    begin = 0
    for frame in situation.frames:
        while begin < len(moments) and moments[begin].at < frame.start:
            begin += 1
        end = begin
        while end < len(moments) and moments[end].at < frame.end:
            end += 1
        yield frame, moments[begin:end]
        begin = end


class Rule(Protocol):
    """One condition."""

    code: str

    def verdicts(self, situation: Situation) -> Sequence[Verdict]:
        """One verdict per frame of the situation."""

    def describe(self, situation: Situation, since: float) -> Condition:
        """The condition as it stands now."""


def holds_since(verdicts: Sequence[Verdict], frames: Sequence[Frame]) -> float | None:
    """When the condition that holds at the end began (the start of its first bad frame), or None if none holds."""
    begun: float | None = None
    good = unknown = 0
    for index, verdict in enumerate(verdicts):
        unknown = unknown + 1 if verdict is Verdict.UNKNOWN else 0
        if unknown >= QUIET_AFTER:
            begun, good = None, 0
        if begun is not None:
            good = good + 1 if verdict is Verdict.GOOD else 0 if verdict is Verdict.BAD else good
            if good >= LEAVE:
                begun, good = None, 0
        elif verdict is Verdict.BAD:
            last = range(max(0, index - OF + 1), index + 1)
            bad = [at for at in last if verdicts[at] is Verdict.BAD]
            if len(bad) >= ENTER:
                begun, good = frames[bad[0]].start, 0
    return begun


def above(value: float | None, begins: float, ends: float) -> Verdict:
    """Bad above ``begins``, good up to ``ends``, neither between."""
    if value is None:
        return Verdict.UNKNOWN
    return Verdict.BAD if value > begins else Verdict.GOOD if value <= ends else Verdict.BETWEEN
