"""A fleet without servers: fixed numbers under a fixed clock, and a record of what it was asked to do.

Each look moves the clock by ``step`` seconds (0 by default, so that pictures of it are always the same).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_console.diagnosis.causes import Cause
from vllm_console.diagnosis.model import Condition, Diagnosis, Measure, Remedy, Severity
from vllm_console.fleet.api import FleetError, PresetProblem
from vllm_console.fleet.leftovers import Leftovers, Removed
from vllm_console.fleet.model import Changes, Exit, FleetSnapshot, LaunchRequest, ServerView, Stage, State
from vllm_console.telemetry.model import EngineSample, Quantiles, Sample, Series, Window
from vllm_console.telemetry.progress import Progress, Startup
from vllm_launchers.machine.board.model import Board
from vllm_launchers.machine.flags.model import FlagSpec, FlagTable, ValueKind
from vllm_launchers.plan.budget.model import EngineReport, GpuBudget, MemoryBudget
from vllm_launchers.plan.choices.model import Choice, Source
from vllm_launchers.plan.findings import Finding, by_weight
from vllm_launchers.plan.flags import flag_words, token_count
from vllm_launchers.plan.model import Engine, EngineKind, Flags, Plan
from vllm_launchers.presets.model import FlagSetting, Objectives, Preset, Workload

if TYPE_CHECKING:
    from vllm_console.telemetry.comparison import Comparison
    from vllm_console.telemetry.ledger import Run
    from vllm_console.telemetry.workload import SeenWorkload

NOW = 1_767_271_267.0
"""2026-01-01 12:41:07 UTC."""

VLLM = Engine(EngineKind.VLLM, ("/opt/vllm/bin/vllm",), "0.33.0", "cuda", "/opt/vllm/bin/vllm")
SIMULATED = Engine(EngineKind.SIMULATED, ("python", "-m", "vllm_launchers.simulated"), "0.33.0", "simulated", "")
GOALS = Objectives(ttft_p99_seconds=1.0, itl_p99_seconds=0.1, kv_cache_usage=0.85, preemption_rate=0.02)
WORK = Workload(input_tokens_p95=1500, output_tokens_p95=400, prefix_reuse=0.6, concurrency=64)
CHAT_FLAGS = {
    "gpu-memory-utilization": 0.92,
    "max-num-seqs": 256,
    "max-model-len": 4096,
    "enable-prefix-caching": True,
}
REASONS = {
    "gpu-memory-utilization": "the server has the card for itself",
    "max-num-seqs": "many short chats at once",
    "max-model-len": "95 % of conversations stay below 4k tokens; longer ones would take cache from all others",
    "enable-prefix-caching": "system prompts repeat",
}


def wave(at: float, low: float, high: float, period: float) -> float:
    """A smooth figure between ``low`` and ``high`` that depends on the clock alone."""
    return low + (high - low) * (0.5 + 0.5 * math.sin(at / period))


def window_at(at: float, pressure: float) -> Window:
    """The last minute of a server under ``pressure`` from 0 to 1."""
    usage = min(0.99, wave(at, 0.75, 1.0, 11) * (0.25 + 0.75 * pressure))
    slow = 1 + 9 * pressure**4

    def spread(median: float) -> Quantiles:
        value = median * wave(at, 0.9, 1.1, 7)
        return Quantiles(240, value * 1.3, value, value * 1.6, value * (1.5 + slow / 3))

    return Window(
        start=at - 60,
        end=at,
        requests_running=round(wave(at, 60, 64, 5) * pressure),
        requests_waiting=round(wave(at, 8, 16, 3)) if pressure > 0.8 else 0,
        kv_cache_usage=usage,
        kv_cache_usage_max=usage,
        kv_cache_tokens=441_000,
        preemptions_per_minute=round(wave(at, 14, 22, 9)) if pressure > 0.8 else 0,
        preemption_share=wave(at, 0.06, 0.08, 9) if pressure > 0.8 else 0.0,
        prefix_hit_rate=wave(at, 0.58, 0.64, 30),
        prompt_tokens_per_second=wave(at, 7800, 8600, 6) * pressure,
        generation_tokens_per_second=wave(at, 1900, 2200, 4) * pressure,
        requests_per_second=wave(at, 4.0, 4.6, 5) * pressure,
        latencies={
            "ttft": spread(0.21 * slow**0.5 * 1.2),
            "itl": spread(0.021 * slow**0.2),
            "queue": spread(0.012 * slow),
            "prefill": spread(0.18),
            "decode": spread(3.9),
            "e2e": spread(4.1),
        },
    )


def series_at(at: float, pressure: float, step: float = 5.0, count: int = 180) -> Series:
    """A quarter of an hour that rises to ``pressure``."""
    end = at - at % step
    times = [end - step * (count - 1 - index) for index in range(count)]
    rise = [min(1.0, 0.3 + 0.9 * index / count) for index in range(count)]
    usage = [min(0.99, (0.25 + 0.75 * pressure) * r * wave(t, 0.85, 1.0, 40)) for t, r in zip(times, rise, strict=True)]
    busy = [pressure > 0.8 and value > 0.84 for value in usage]
    return Series(
        end=end,
        step=step,
        values={
            "kv_cache_usage": (None,) * 20 + tuple(usage[20:]),
            "preemptions": tuple(
                round(wave(t, 0, 4, 13)) * 1.0 if b else 0.0 for t, b in zip(times, busy, strict=True)
            ),
            "requests_running": tuple(64 * pressure * r for r in rise),
            "requests_waiting": tuple(wave(t, 2, 14, 21) if b else 0.0 for t, b in zip(times, busy, strict=True)),
            "generation_tokens_per_second": tuple(
                2100 * pressure * r * wave(t, 0.8, 1.0, 25) for t, r in zip(times, rise, strict=True)
            ),
            "prompt_tokens_per_second": tuple(8000 * pressure * r for r in rise),
            "requests_per_second": tuple(4.2 * pressure * r for r in rise),
            "ttft_p99": tuple(wave(t, 0.3, 1.9, 60) * r for t, r in zip(times, rise, strict=True)),
            "itl_p99": tuple(wave(t, 0.03, 0.08, 50) * r for t, r in zip(times, rise, strict=True)),
        },
    )


def ready(name: str, at: float, pressure: float, **more: object) -> ServerView:
    """A server that serves, under ``pressure`` from 0 to 1."""
    view = ServerView(
        name=name,
        state=State.READY,
        state_since=NOW - 7800,
        preset="chatbot",
        model="meta-llama/Llama-3.1-8B-Instruct",
        engine=VLLM,
        port=8000,
        pid=4242,
        gpus=(0,),
        argv=("/opt/vllm/bin/vllm", "serve", "meta-llama/Llama-3.1-8B-Instruct", "--max-num-seqs", "256",
              "--max-model-len", "4096", "--gpu-memory-utilization", "0.92", "--enable-prefix-caching"),
        flags=CHAT_FLAGS,
        reasons=REASONS,
        previous_flags={**CHAT_FLAGS, "max-num-seqs": 512},
        generation=3,
        downtime_seconds=41.2,
        workload=WORK,
        objectives=GOALS,
        stages=(
            Stage("process", NOW - 7840, 0.4),
            Stage("config", NOW - 7839.6, 3.1),
            Stage("weights", NOW - 7836.5, 21.7, "15.0 GiB"),
            Stage("kv cache", NOW - 7814.8, 14.6, "441k tokens"),
        ),
        log_path="",
        sample=Sample(at, {"0": EngineSample()}),
        window=window_at(at, pressure),
    )  # fmt: skip
    return replace(view, **more)  # type: ignore[arg-type]


def chat(at: float) -> ServerView:
    """Ready, over its objectives."""
    return ready("chat", at, 1.0)


def coder(at: float) -> ServerView:
    """Ready and calm, simulated."""
    return ready(
        "coder", at, 0.2, preset="code-generation", engine=SIMULATED, port=8001, gpus=(1,), state_since=NOW - 2460,
        previous_flags=None, generation=1, downtime_seconds=None, flags={"gpu-memory-utilization": 0.88},
    )  # fmt: skip


def docs(at: float) -> ServerView:
    """Starting, in its third stage."""
    return ready(
        "docs", at, 0.5, preset="long-document", state=State.STARTING, state_since=NOW - 34, port=8002, gpus=(2, 3),
        sample=None, window=None,
        stages=(
            Stage("process", NOW - 34, 0.4),
            Stage("config", NOW - 33.6, 3.1),
            Stage("weights", NOW - 30.5, None, "61 %"),
        ),
    )  # fmt: skip


def broken(at: float) -> ServerView:
    """Failed, with the line of the log that shows why."""
    reason = "Exited with code 1: ValueError: No available memory for the cache blocks."
    return ready(
        "nightly", at, 0.5, preset="batch", state=State.FAILED, state_since=NOW - 200, port=8003, gpus=(4,), pid=None,
        reason=reason, exit=Exit(NOW - 200, 1, None, False, reason), sample=None, window=None,
    )  # fmt: skip


def stopped(at: float) -> ServerView:
    """Stopped on request."""
    return ready(
        "old", at, 0.5, preset="batch", state=State.STOPPED, state_since=NOW - 86_400, port=8004, gpus=(), pid=None,
        reason="stopped on request", sample=None, window=None, previous_flags=None,
    )  # fmt: skip


def hung(at: float) -> ServerView:
    """Unresponsive: its numbers are two minutes old."""
    return ready(
        "vision", at, 0.9, state=State.UNRESPONSIVE, state_since=NOW - 120, port=8005, gpus=(5,),
        reason="/health has not answered for 2 minutes", sample=Sample(NOW - 120, {"0": EngineSample()}),
    )  # fmt: skip


def observed(at: float) -> ServerView:
    """Somebody else's."""
    return ready(
        "anna-8100", at, 0.4, ours=False, owner="anna", preset="", port=8100, gpus=(6,), argv=(), flags={},
        reasons={}, objectives=None, previous_flags=None, log_path="",
    )  # fmt: skip


PRESSED = (
    Condition(
        "preempting", Severity.CRITICAL, NOW - 300, "18 preemptions a minute, 7% of the requests.",
        "The KV cache is full: requests lose their tokens and are computed again from the prompt on.",
        (
            Measure("requests preempted", "7.2%", "2.0%", "objectives of preset chatbot"),
            Measure("preemptions", "18/min", "10/min", "fixed"),
            Measure("ITL p99", "74ms, 3.1× its median"),
        ),
        (
            Remedy(Changes({"kv-cache-dtype": "fp8"}), "Half the bytes per token: twice the tokens fit.",
                   "A little precision; check the answers."),
            Remedy(Changes({"max-num-seqs": 128}), "Fewer sequences hold fewer tokens.",
                   "About 4 % less throughput at this load."),
            Remedy(Changes(), "Send less traffic to it, or share the load with a second server."),
        ),
    ),
    Condition(
        "kv_cache_pressure", Severity.WARNING, NOW - 420, "91% of the KV cache is used and rising.",
        "The running requests keep more tokens than the cache should hold; when it is full, some are preempted.",
        (Measure("KV cache usage", "91%", "85%", "objectives of preset chatbot"),),
        (Remedy(Changes({"max-num-seqs": 128}), "Fewer sequences hold fewer tokens."),),
    ),
)  # fmt: skip
"""What is found of a server whose KV cache is too small for its traffic."""

HEALTHY = (
    Condition(
        "healthy", Severity.GOOD, NOW - 1260, "Healthy.", "Nothing is found that would hold it up.",
        (Measure("KV cache usage", "24%", "85%", "objectives of preset code-generation"),
         Measure("ITL p99", "21ms", "100ms", "objectives of preset code-generation")),
    ),
)  # fmt: skip


def pressed(at: float) -> ServerView:
    """Ready, under KV cache pressure and preempting, with remedies."""
    return replace(chat(at), conditions=PRESSED)


def calm(at: float) -> ServerView:
    """Ready, and found to be well."""
    return replace(coder(at), conditions=HEALTHY)


def diagnosed(at: float) -> ServerView:
    """Failed, with a named cause."""
    evidence = "ValueError: To serve at least one request with the models's max seq len (131072), 16.00 GiB is needed"
    found = Diagnosis(
        Cause.KV_CACHE_TOO_SMALL, 0.99, 143, evidence,
        "One request of the full context length does not fit into the KV cache.",
        (
            Remedy(Changes({"max-model-len": 40960}), "The longest context that fits, by vLLM's own estimate.",
                   "Longer requests are refused."),
            Remedy(Changes({"kv-cache-dtype": "fp8"}), "Half the bytes per token.", "A little precision."),
        ),
        (Cause.FREE_MEMORY_BELOW_UTILIZATION,),
    )  # fmt: skip
    return replace(broken(at), diagnosis=found, flags={**CHAT_FLAGS, "max-model-len": 131072})


def loading(at: float) -> ServerView:
    """Starting, measured by an earlier start, with what its engine said of its memory so far."""
    return replace(
        docs(at),
        stages=(*docs(at).stages[:2], Stage("download", NOW - 30.5, 20.0, "15.0 GiB, 812 MiB/s"),
                Stage("weights", NOW - 10.5, None, "61 %")),
        startup=Startup(Progress(0.4, 52.0, 86.0), None, EngineReport(weights_gib=15.0)),
    )  # fmt: skip


def silent(at: float) -> ServerView:
    """Starting, and without a sign of life for longer than is usual."""
    stages = (*docs(at).stages[:2], Stage("compile", NOW - 330, None))
    return replace(docs(at), name="translate", startup=Startup(quiet_seconds=312.0), stages=stages)


EVERY_STATE = (chat, coder, docs, broken, stopped, hung, observed)

PRESETS = tuple(
    Preset(
        name=name,
        title=title,
        summary=title,
        model="meta-llama/Llama-3.1-8B-Instruct",
        flags={"max-num-seqs": FlagSetting(256, "many at once")},
        workload=WORK,
        objectives=GOALS,
    )
    for name, title in (
        ("chatbot", "Many short conversations"),
        ("code-generation", "Completions, latency first"),
        ("long-document", "Few, long contexts"),
        ("batch", "Throughput over latency"),
    )
)

FLAG_TABLE = FlagTable(
    version="0.33.0",
    source="installation",
    flags={
        spec.name: spec
        for spec in (
            FlagSpec(
                "dtype", ValueKind.TEXT, "auto", ("auto", "half", "float16", "bfloat16", "float", "float32"),
                help="Data type for model weights and activations.", group="ModelConfig",
            ),
            FlagSpec("enable-chunked-prefill", ValueKind.BOOL, None, group="SchedulerConfig", negatable=True,
                     help="Prefill requests can be chunked."),
            FlagSpec("enable-prefix-caching", ValueKind.BOOL, None, group="CacheConfig", negatable=True,
                     help="Whether to enable prefix caching."),
            FlagSpec("enforce-eager", ValueKind.BOOL, "False", group="ModelConfig", negatable=True,
                     help="Always use eager-mode PyTorch, no CUDA graphs."),
            FlagSpec("gpu-memory-utilization", ValueKind.FLOAT, "0.92", group="CacheConfig", above=0, maximum=1,
                     help="The fraction of GPU memory to be used for the model executor."),
            FlagSpec("kv-cache-dtype", ValueKind.TEXT, "auto", ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"),
                     help="Data type for the KV cache.", group="CacheConfig"),
            FlagSpec("kv-transfer-config", ValueKind.JSON, None, group="VllmConfig", help="Distributed KV transfer."),
            FlagSpec("max-model-len", ValueKind.HUMAN_INT, None, words=("auto",), group="ModelConfig",
                     help="Model context length (prompt and output)."),
            FlagSpec("max-num-batched-tokens", ValueKind.HUMAN_INT, None, group="SchedulerConfig", minimum=1,
                     help="The most tokens processed in one step."),
            FlagSpec("max-num-seqs", ValueKind.INT, None, group="SchedulerConfig", minimum=1,
                     help="The most sequences processed in one step."),
            FlagSpec("quantization", ValueKind.TEXT, None, ("awq", "awq_marlin", "fp8", "gptq", "gptq_marlin"),
                     aliases=("q",), help="Method used to quantize the weights.", group="ModelConfig"),
            FlagSpec("tensor-parallel-size", ValueKind.INT, "1", aliases=("tp",), group="ParallelConfig", minimum=1,
                     help="Number of tensor parallel groups."),
        )
    },
    variables=frozenset({"VLLM_API_KEY", "VLLM_LOGGING_LEVEL"}),
)  # fmt: skip

CARD_GIB = 23.99
"""An RTX 4090."""
KV_BYTES_PER_TOKEN = 131_072
"""Llama 3.1 8B with a 16-bit cache."""


def memory_of(flags: Flags) -> MemoryBudget:
    """An 8B model in AWQ on one 24 GB GPU, as the flags leave it."""
    share = flags.get("gpu-memory-utilization", 0.92)
    weights, overhead, graphs = 5.35, 1.25, 0.45
    kv = CARD_GIB * (share if isinstance(share, float) else 0.92) - weights - overhead - graphs
    per_token = KV_BYTES_PER_TOKEN // (2 if str(flags.get("kv-cache-dtype", "")).startswith("fp8") else 1)
    tokens = max(0, int(kv * 2**30 / per_token))
    length = token_count(flags.get("max-model-len")) or 131_072
    return MemoryBudget(
        weights, overhead, graphs, kv, per_token, tokens, length, tokens / length, concurrency_p95=tokens / 1900,
        per_gpu=(GpuBudget(0, CARD_GIB, weights, overhead, graphs, max(0.0, kv), others_gib=0.31),),
        assumed=("no workload was measured yet",),
    )  # fmt: skip


def choices_of(flags: Flags) -> tuple[Choice, ...]:
    """Each flag with its reason, and one that was left to vLLM."""
    given = {
        name: Choice(name, value, REASONS.get(name, "you set it"), Source.PRESET if name in REASONS else Source.YOU)
        for name, value in flags.items()
    }
    given["max-model-len"] = replace(
        given["max-model-len"], source=Source.WORKLOAD, price="Longer conversations are refused."
    ) if "max-model-len" in given else Choice("max-model-len", None, "the model's own", Source.MODEL)  # fmt: skip
    return (*given.values(), Choice("kv-cache-dtype", None, "There is room without FP8 KV.", Source.MACHINE))


class FakeFleet:
    """Implements `vllm_console.fleet.api.Fleet` over a list of functions from the clock to a server."""

    def __init__(self, *servers: object, step: float = 0.0) -> None:
        self.read_only = False
        self.read_only_by = ""
        self.makers = list(servers)
        self.at = NOW
        self.step = step
        self.calls: list[tuple[object, ...]] = []
        self.looks = 0
        self.error: Exception | None = None
        """Raised by the next verb."""
        self.look_error: Exception | None = None
        self.gpus: dict[str, object] = {}
        """What a snapshot says of the host: ``host``, ``host_problem``, ``host_recorded``, ``gpu_shares``."""
        self.flag_table: FlagTable | None = FLAG_TABLE
        """What `flags` gives: set it to None for a vLLM that is still to be learned."""
        self.workloads: dict[str, SeenWorkload] = {}
        """What `seen_workload` gives, by server."""
        self.suggestions: dict[str, tuple[Choice, ...]] = {}
        """What `suggest` gives, by server."""
        self.memory: MemoryBudget | str | None = "as flags say"
        """Set to a budget, or to None for a model of which too little is known."""
        self.choices: tuple[Choice, ...] | None = None
        """Set to replace those of the flags."""
        self.findings: tuple[Finding, ...] = ()
        """What every plan finds."""
        self.findings_after: tuple[Finding, ...] = ()
        """What the plan of a restart with changes finds besides."""
        self.planned: list[tuple[str, Changes]] = []
        """Of which restarts the plan was asked for."""
        self.plan_error: Exception | None = None
        """Raised by the plan of a restart."""
        self.known_runs: Sequence[Run] = ()
        """What `runs` gives."""
        self.left = Leftovers()
        """What `leftovers` gives."""
        self.comparison: Comparison | None = None
        """What `compare` gives; None for a server without an earlier run."""
        self.judged, self.past_trouble = 0, ""
        """How often `judge_past` was asked, and what it gives."""
        self.last_changes: dict[str, Comparison] = {}
        """What `last_change` gives, by server."""
        self.on_board = Board(Path("/board"), NOW)
        """What `board` gives."""
        self.open = threading.Event()
        """Cleared, looks hang until it is set."""
        self.open.set()

    def snapshot(self, selected: str | None = None) -> FleetSnapshot:
        self.open.wait(20)
        self.looks += 1
        if self.look_error is not None:
            raise self.look_error
        self.at += self.step
        views = [maker(self.at) for maker in self.makers]  # type: ignore[operator]
        pressure = {"chat": 1.0, "coder": 0.2, "vision": 0.9}
        views = [
            replace(view, series=series_at(self.at, pressure.get(view.name, 0.5))) if view.name == selected else view
            for view in views
        ]
        return FleetSnapshot(self.at, "gpubox", tuple(views), **self.gpus)  # type: ignore[arg-type]

    def _did(self, *call: object) -> None:
        self.calls.append(call)
        if self.error is not None:
            raise self.error

    def _view(self, name: str) -> ServerView:
        for maker in self.makers:
            view: ServerView = maker(self.at)  # type: ignore[operator]
            if view.name == name:
                return view
        raise FleetError(f"no server '{name}'")

    def presets(self) -> tuple[Sequence[Preset], Sequence[PresetProblem]]:
        return PRESETS, ()

    def engines(self) -> Sequence[Engine]:
        return (VLLM, SIMULATED)

    def flags(self, engine: Engine | None = None) -> FlagTable | None:
        return self.flag_table

    def seen_workload(self, name: str) -> SeenWorkload | None:
        return self.workloads.get(name)

    def suggest(self, name: str, workload: Workload) -> Sequence[Choice]:
        return self.suggestions.get(name, ())

    def plan(self, request: LaunchRequest) -> Plan:
        flags = {name: value for name, value in CHAT_FLAGS.items() if name not in request.changes.unset}
        flags |= request.changes.set
        model = request.model or PRESETS[0].model
        argv = ("/opt/vllm/bin/vllm", "serve", model, *flag_words(flags))
        return Plan(
            request.preset, model, VLLM, "127.0.0.1", 8000, argv, flags, REASONS, {},
            gpus=request.gpus,
            choices=self.choices if self.choices is not None else choices_of(flags),
            memory=memory_of(flags) if isinstance(self.memory, str) else self.memory,
            findings=by_weight(self.findings),
        )  # fmt: skip

    def plan_restart(self, name: str, changes: Changes) -> Plan:
        self.planned.append((name, changes))
        if self.plan_error is not None:
            raise self.plan_error
        view = self._view(name)
        flags = {flag: value for flag, value in view.flags.items() if flag not in changes.unset} | dict(changes.set)
        plan = self.plan(LaunchRequest(view.preset, changes=Changes(unset=tuple(CHAT_FLAGS))))
        found = self.findings_after if not changes.empty else ()
        return replace(
            plan, flags=flags, findings=by_weight((*self.findings, *found)),
            memory=memory_of(flags) if isinstance(self.memory, str) else self.memory,
        )  # fmt: skip

    def start(self, request: LaunchRequest) -> ServerView:
        self._did("start", request)
        return docs(self.at)

    def restart(self, name: str, changes: Changes, *, force: bool = False) -> ServerView:
        self._did("restart", name, changes)
        view = self._view(name)
        return replace(view, generation=view.generation + 1)

    def switch(self, name: str, preset: str, *, force: bool = False) -> ServerView:
        self._did("switch", name, preset)
        return self._view(name)

    def stop(self, name: str) -> ServerView:
        self._did("stop", name)
        return self._view(name)

    def forget(self, name: str) -> None:
        self._did("forget", name)

    def start_load(self, name: str, rate: float | None = None, seconds: float = 60.0) -> None:
        self._did("start_load", name)

    def stop_load(self, name: str) -> None:
        self._did("stop_load", name)

    def leftovers(self) -> Leftovers:
        self._did("leftovers")
        return self.left

    def remove_leftovers(self, wanted: Leftovers) -> Removed:
        self._did("remove_leftovers", wanted)
        return Removed(wanted.processes, wanted.files)

    def runs(self, name: str | None = None) -> tuple[Sequence[Run], Sequence[str]]:
        return self.known_runs, ()

    def compare(self, before: str, after: str | None = None) -> Comparison:
        self._did("compare", before, after)
        if self.comparison is None:
            raise FleetError(f"{before} has no earlier run that served: there is nothing to compare with")
        return self.comparison

    def last_change(self, name: str) -> Comparison | None:
        return self.last_changes.get(name)

    def judge_past(self, name: str | None = None) -> str:
        self.judged += 1
        return self.past_trouble

    def board(self) -> Board:
        self._did("board")
        return self.on_board

    def claim(self, gpus: Sequence[int], until: float, why: str = "") -> Board:
        self._did("claim", tuple(gpus), until, why)
        return self.on_board

    def release(self, gpus: Sequence[int] = ()) -> Board:
        self._did("release", tuple(gpus))
        return self.on_board

    def close(self) -> None:
        self._did("close")
