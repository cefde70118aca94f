"""A fleet without servers: fixed values under a fixed clock, and a record of requested actions.

Each snapshot advances the clock by ``step`` seconds (0 by default, so that screenshots are reproducible).
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vllm_console.attached import Endpoint
from vllm_console.diagnosis.finding import Cause, Diagnosis, Finding, Fix, Measure, Severity
from vllm_console.diagnosis.objectives import judge_window
from vllm_console.fleet.adapters import Adapters, Loaded
from vllm_console.fleet.background_commands import RampView
from vllm_console.fleet.gpu_charts import GpuChart
from vllm_console.fleet.leftovers import Leftovers, Removed
from vllm_console.fleet.markers import Marker, MarkerKind
from vllm_console.fleet.probe import ProbeView, RequestsSeen, listed
from vllm_console.fleet.rolling import AnswerComparison
from vllm_console.fleet.snapshot import FIRST, FleetSnapshot, ServerView, SleepView, StateThen
from vllm_console.fleet.types import NothingToCompareError, PresetProblem, Replay
from vllm_console.history.gpu_history import card_of
from vllm_console.history.probe_records import EngineStep, FinishedRequest
from vllm_console.history.time_view import LIVE, TimeView
from vllm_console.load.tuner_progress import TunerBest, TunerFigure, TunerProgress, TunerStep
from vllm_console.logs.startup import Progress, Startup
from vllm_console.logs.startup_facts import Stage
from vllm_console.metrics.quantile import Quantile, Quantiles
from vllm_console.metrics.sample import EngineSample, Sample, Series, Window
from vllm_console.prediction.score import KeptPrediction
from vllm_launchers.errors import NotFoundError, OperationError
from vllm_launchers.host.board import Board
from vllm_launchers.host.gpu.host import Gpu
from vllm_launchers.keeper.records import Exit, SleepStep, State
from vllm_launchers.launch.request import AS_CONFIGURED, LaunchRequest, RestartOptions
from vllm_launchers.plan import findings as plan_findings
from vllm_launchers.plan.budget.budget import EngineReport, GpuBudget, MemoryBudget
from vllm_launchers.plan.choices.choice import Choice, Source
from vllm_launchers.plan.findings import by_weight
from vllm_launchers.plan.flags import flag_words, token_count
from vllm_launchers.plan.model import Plan
from vllm_launchers.presets.model import FlagSetting, Objectives, Preset, Workload
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.changes import Changes, Flags
from vllm_launchers.vllm.flags.flag_table import FlagSpec, FlagTable, ValueKind
from vllm_launchers.vllm.modelfacts.local import LocalModels

if TYPE_CHECKING:
    from vllm_console.fleet.predictions import PredictedChange
    from vllm_console.history.workload import SeenWorkload
    from vllm_console.runs.compare import Comparison
    from vllm_console.runs.store import Run

NOW = 1_767_271_267.0
"""2026-01-01 12:41:07 UTC."""

VLLM = Engine(EngineKind.VLLM, ("/opt/vllm/bin/vllm",), "0.33.0", "cuda", "/opt/vllm/bin/vllm")
SIMULATED = Engine(EngineKind.SIMULATED, ("python", "-m", "vllm_launchers.simulated"), "0.33.0", "simulated", "")
OBJECTIVES = Objectives(ttft_p99_seconds=1.0, itl_p99_seconds=0.1, kv_cache_usage=0.85, preemption_rate=0.02)
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
    """A smooth value between ``low`` and ``high`` that depends only on the clock."""
    return low + (high - low) * (0.5 + 0.5 * math.sin(at / period))


BUCKETS = {
    "ttft": (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0),
    "itl": (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
}
LONG_BUCKETS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0)


def in_bucket(latency: str, value: float) -> Quantile:
    """A quantile with that value and the vLLM bucket that contains it."""
    bounds = (0.0, *BUCKETS.get(latency, LONG_BUCKETS))
    low, high = next(pair for pair in itertools.pairwise(bounds) if value <= pair[1])
    return Quantile(value, low, high)


def window_at(at: float, pressure: float) -> Window:
    """The last minute of a server under ``pressure`` from 0 to 1."""
    usage = min(0.99, wave(at, 0.75, 1.0, 11) * (0.25 + 0.75 * pressure))
    slow = 1 + 9 * pressure**4

    def spread(latency: str, median: float) -> Quantiles:
        value = median * wave(at, 0.9, 1.1, 7)
        parts = (in_bucket(latency, value * times) for times in (1, 1.6, 1.5 + slow / 3))
        return Quantiles(240, value * 1.3, *parts)

    return Window(
        start=at - 60,
        end=at,
        requests_running=round(wave(at, 60, 64, 5) * pressure),
        requests_waiting=round(wave(at, 8, 16, 3)) if pressure > 0.8 else 0,
        longest_wait=round(wave(at, 2, 9, 3)) if pressure > 0.8 else None,
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
            "ttft": spread("ttft", 0.21 * slow**0.5 * 1.2),
            "itl": spread("itl", 0.021 * slow**0.2),
            "queue": spread("queue", 0.012 * slow),
            "prefill": spread("prefill", 0.18),
            "decode": spread("decode", 3.9),
            "e2e": spread("e2e", 4.1),
        },
    )


def series_at(at: float, pressure: float, step: float = 5.0, count: int = 180) -> Series:
    """15 minutes that rise to ``pressure``."""
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
            "ttft_p50": tuple(wave(t, 0.2, 0.5, 60) * r for t, r in zip(times, rise, strict=True)),
            "itl_p50": tuple(wave(t, 0.02, 0.03, 50) * r for t, r in zip(times, rise, strict=True)),
            "ttft_p99": tuple(wave(t, 0.3, 1.9, 60) * r for t, r in zip(times, rise, strict=True)),
            "itl_p99": tuple(wave(t, 0.03, 0.08, 50) * r for t, r in zip(times, rise, strict=True)),
        },
    )


def requests_at(at: float, count: int = 240, span: float = 900.0) -> RequestsSeen:
    """15 minutes of finished requests: long ones, preempted ones, and a few aborted ones."""
    found = []
    for number in range(count):
        end = at - span * (1 - (number + 1) / count)
        prompt, output = round(wave(number, 60, 3400, 3.7)), round(wave(number, 20, 900, 5.3))
        preemptions = (number % 9 == 0) + (number % 27 == 0)
        queue, prefill = wave(number, 0.01, 4.0, 11) * (1 + preemptions), prompt / 4000 + 0.05
        decode = output * 0.024 * (1 + preemptions / 2)
        reason = "abort" if number % 60 == 7 else "length" if number % 4 else "stop"
        whole = queue + prefill + decode + 0.02
        found.append(FinishedRequest(f"chatcmpl-{number:08x}", end - whole, end, 0, prompt, output, prompt // 3, queue,
                                     prefill, decode, whole, preemptions, reason, 0))  # fmt: skip
    return listed(found, at - span, at)


def probe_at(at: float, step: float = 5.0, count: int = 180) -> ProbeView:
    """Probe records: growing batches and a burst of prompts."""
    end = at - at % step
    times = [end - step * (count - 1 - index) for index in range(count)]
    burst = [1.0 + 6 * (100 <= index < 112) for index in range(count)]
    values = {
        "running": tuple(wave(t, 40, 64, 90) for t in times),
        "waiting": tuple(12.0 if b > 1 else 0.0 for b in burst),
        "decode_tokens": tuple(wave(t, 40, 64, 90) for t in times),
        "prompt_tokens": tuple(wave(t, 120, 220, 35) * b for t, b in zip(times, burst, strict=True)),
        "step_p50": tuple(wave(t, 0.021, 0.026, 90) for t in times),
        "step_p99": tuple(0.03 * b for b in burst),
    }
    last = EngineStep(at - 0.5, 0, 62, 12, 0.93, None, 0, 0, 0, 62, 0, 62, 0.024, 0.024, None, None, None, 0)
    return ProbeView(Series(end, step, values), last, requests_at(at))


def ready(name: str, at: float, pressure: float, **more: object) -> ServerView:
    """A serving server under ``pressure`` from 0 to 1."""
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
        objectives=OBJECTIVES,
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
    return judged(replace(view, **more))  # type: ignore[arg-type]


def judged(view: ServerView, held: float | None = None) -> ServerView:
    """The server with its objectives evaluated on its window; ``held`` replaces the current usage."""
    window = view.window
    if window is None:
        return replace(view, judged=())
    usage = held if held is not None else window.kv_cache_usage_max or window.kv_cache_usage
    looks = [Sample(view_at, {"0": EngineSample(kv_cache_usage=usage)}) for view_at in (0.0, 10.0, 20.0)]
    return replace(view, judged=judge_window(window, looks, view.objectives, view.preset))


def chat(at: float) -> ServerView:
    """Ready, over its objectives."""
    return ready("chat", at, 1.0)


def coder(at: float) -> ServerView:
    """Ready and calm, simulated."""
    return ready(
        "coder", at, 0.2, preset="code-generation", engine=SIMULATED, port=8001, gpus=(1,), recorded_host="gpubox",
        state_since=NOW - 2460, previous_flags=None, generation=1, downtime_seconds=None,
        flags={"gpu-memory-utilization": 0.88},
    )  # fmt: skip


def sleeper(at: float) -> ServerView:
    """Able to sleep; its partner sleeps."""
    view = coder(at)
    return replace(view, name="sleeper", partner="asleep", flags={**view.flags, "enable-sleep-mode": True})


def asleep(at: float) -> ServerView:
    """Asleep at level 1, while its partner serves."""
    return ready(
        "asleep", at, 0.0, preset="batch", state=State.ASLEEP, state_since=NOW - 600, port=8005, gpus=(1,),
        partner="sleeper", sleep=SleepView(SleepStep.ASLEEP, 1, NOW - 600, host_gib=15.3),
        flags={"enable-sleep-mode": True}, findings=(), judged=(),
    )  # fmt: skip


def docs(at: float) -> ServerView:
    """Starting, in its third stage."""
    return ready(
        "docs", at, 0.5, preset="long-document", state=State.STARTING, state_since=NOW - 34, port=8002, gpus=(2, 3),
        sample=None, window=None,
        stages=(
            Stage("process", NOW - 34, 0.4),
            Stage("config", NOW - 33.6, 3.1),
            Stage("weights", NOW - 30.5, None, "61%"),
        ),
    )  # fmt: skip


def broken(at: float) -> ServerView:
    """Failed, with the log line that shows the cause."""
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


REPLAY = Replay(7, "gone@2", NOW - 10_800, NOW - 3600, NOW - 3605, removed=True)
"""Two hours of a server that was removed."""


def ended_run(replay: Replay, at: float) -> ServerView:
    """A replayed run under pressure, at a moment of it."""
    return ready(
        replay.name, at, 0.9, state=State.STOPPED, state_since=replay.ended_at, engine=SIMULATED, port=0, gpus=(2,),
        pid=None, argv=(), reasons={}, previous_flags=None, generation=2, reason="stopped as requested, exit code 0",
        sample=None, moment=at, then=StateThen(State.READY, replay.started_at + 40, 2), replayed=True,
        removed=replay.removed, workload=None, findings=tuple(replace(one, fixes=()) for one in PRESSED),
    )  # fmt: skip


def hung(at: float) -> ServerView:
    """Unresponsive; its metrics are two minutes old."""
    return ready(
        "vision", at, 0.9, state=State.UNRESPONSIVE, state_since=NOW - 120, port=8005, gpus=(5,),
        reason="/health has not answered for 2 minutes", sample=Sample(NOW - 120, {"0": EngineSample()}),
    )  # fmt: skip


def observed(at: float) -> ServerView:
    """A foreign server."""
    return ready(
        "anna-8100", at, 0.4, ours=False, owner="anna", preset="", port=8100, gpus=(6,), argv=(), flags={},
        reasons={}, objectives=None, previous_flags=None, log_path="",
    )  # fmt: skip


PRESSED = (
    Finding(
        "preempting", Severity.CRITICAL, NOW - 300, "18 preemptions a minute, 7% of the requests.",
        "The KV cache is full: requests are evicted and recomputed from the prompt.",
        (
            Measure("requests preempted", "7.2%", "2.0%", "objectives of preset chatbot"),
            Measure("preemptions", "18/min", "10/min", "built-in"),
            Measure("ITL p99", "74ms, 3.1× its median"),
        ),
        (
            Fix(Changes({"kv-cache-dtype": "fp8"}), "Half the bytes per token: twice the tokens fit.",
                   "A little precision; check the answers."),
            Fix(Changes({"max-num-seqs": 128}), "Fewer sequences hold fewer tokens.",
                   "About 4 % less throughput at this load."),
            Fix(Changes(), "Send less traffic to it, or share the load with a second server."),
        ),
    ),
    Finding(
        "kv_cache_pressure", Severity.WARNING, NOW - 420,
        "KV cache usage peaked at 91% in the last minute and is rising.",
        "Running requests hold more tokens than the cache should; once it is full, requests are preempted.",
        (Measure("KV cache usage (peak)", "91%", "85%", "objectives of preset chatbot"),),
        (Fix(Changes({"max-num-seqs": 128}), "Fewer sequences hold fewer tokens."),),
    ),
)  # fmt: skip
"""Findings of a server whose KV cache is too small for its traffic."""

HEALTHY = (
    Finding(
        "healthy", Severity.GOOD, NOW - 1260, "Healthy.", "Nothing is found that would hold it up.",
        (Measure("KV cache usage (sustained)", "24%", "85%", "objectives of preset code-generation"),
         Measure("ITL p99", "21ms", "100ms", "objectives of preset code-generation")),
    ),
)  # fmt: skip


def there(at: float, name: str = "box/chat", **more: object) -> ServerView:
    """This user's server on an attached machine."""
    return replace(ready(name, at, 0.3, ours=False, remote="box", remote_ours=True), **more)


def lost(at: float) -> ServerView:
    """The attached machine while unreachable."""
    return ServerView(
        "box", State.UNRESPONSIVE, at - 3, ours=False, attached=Endpoint("ssh://box"), contacted=True,
        reason="ssh: connect to host box port 22: No route to host",
    )  # fmt: skip


def pressed(at: float) -> ServerView:
    """Ready, under KV cache pressure and preempting, with fixes."""
    return replace(chat(at), findings=PRESSED)


def tuned(at: float) -> ServerView:
    """Ready, while a tuner measures its second candidate."""
    progress = TunerProgress(
        "goodput",
        "requests/s",
        TunerStep.MEASURING,
        at - 40,
        at + 700,
        4,
        trial=2,
        set={"max-num-seqs": 128, "max-num-batched-tokens": 8192},
        was={"max-num-seqs": 256, "max-num-batched-tokens": 2048},
        original=TunerFigure(7.9),
        best=TunerBest(1, {"max-num-seqs": 128}, TunerFigure(9.1)),
        first_run=1,
        last_run=3,
        pid=4711,
    )
    return replace(pressed(at), tuner=progress, generation=3)


def calm(at: float) -> ServerView:
    """Ready, without problems."""
    return replace(coder(at), findings=HEALTHY)


def diagnosed(at: float) -> ServerView:
    """Failed, with a named cause."""
    evidence = "ValueError: To serve at least one request with the models's max seq len (131072), 16.00 GiB is needed"
    found = Diagnosis(
        Cause.KV_CACHE_TOO_SMALL, 0.99, 143, evidence,
        "One request of the full context length does not fit into the KV cache.",
        (
            Fix(Changes({"max-model-len": 40960}), "The longest context that fits, by vLLM's own estimate.",
                   "Longer requests are rejected."),
            Fix(Changes({"kv-cache-dtype": "fp8"}), "Half the bytes per token.", "A little precision."),
        ),
        (Cause.FREE_MEMORY_BELOW_UTILIZATION,),
    )  # fmt: skip
    return replace(broken(at), diagnosis=found, flags={**CHAT_FLAGS, "max-model-len": 131072})


def loading(at: float) -> ServerView:
    """Starting, compared with an earlier start, with the engine's memory report so far."""
    return replace(
        docs(at),
        stages=(*docs(at).stages[:2], Stage("download", NOW - 30.5, 20.0, "15.0 GiB, 812 MiB/s"),
                Stage("weights", NOW - 10.5, None, "61%")),
        startup=Startup(Progress(0.4, 52.0, 86.0), None, EngineReport(weights_gib=15.0)),
    )  # fmt: skip


def silent(at: float) -> ServerView:
    """Starting, without output for longer than usual."""
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
        objectives=OBJECTIVES,
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
            FlagSpec("enforce-eager", ValueKind.BOOL, "false", group="ModelConfig", negatable=True,
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
    """Memory of an 8B model in AWQ on one 24 GB GPU, with these flags."""
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
    """Each flag with its reason, and one at vLLM's default."""
    given = {
        name: Choice(name, value, REASONS.get(name, "set by you"), Source.PRESET if name in REASONS else Source.YOU)
        for name, value in flags.items()
    }
    given["max-model-len"] = replace(
        given["max-model-len"], source=Source.WORKLOAD, tradeoff="Longer conversations are refused."
    ) if "max-model-len" in given else Choice("max-model-len", None, "the model's own", Source.MODEL)  # fmt: skip
    return (*given.values(), Choice("kv-cache-dtype", None, "There is room without FP8 KV.", Source.MACHINE))


def gpu_chart_at(gpu: Gpu, at: float, step: float = 5.0, count: int = 180) -> GpuChart:
    """GPU history of the last 15 minutes: busy half of the time, above its limits at the end."""
    card = card_of(gpu)
    end = at - at % step
    times = [end - step * (count - 1 - index) for index in range(count)]
    busy = [index > count // 2 for index in range(count)]
    power, heat = float(card.power_limit_w or 300), float(card.temperature_slowdown_c or 95)
    late = [index > count * 9 // 10 for index in range(count)]
    values: dict[str, tuple[float | None, ...]] = dict.fromkeys(card.keys, (None,) * count)
    values |= {
        "utilization": tuple(97.0 if b else 0.0 for b in busy),
        "memory_utilization": tuple(wave(t, 50, 75, 40) if b else 0.0 for t, b in zip(times, busy, strict=True)),
        "used_gib": tuple((gpu.memory_gib or 48.0) * (0.9 if b else 0.1) for b in busy),
        "power_w": tuple(power * (1.08 if over else 0.7 if b else 0.1) for b, over in zip(busy, late, strict=True)),
        "temperature_c": tuple(heat + 4 if over else 60.0 if b else 34.0 for b, over in zip(busy, late, strict=True)),
        "clock_mhz": tuple(1800.0 if b else 210.0 for b in busy),
        "pcie_sent_gbs": tuple(wave(t, 0.1, 0.4, 30) for t in times),
        "pcie_received_gbs": tuple(wave(t, 0.2, 0.9, 50) for t in times),
    }
    for link in card.links:
        values[link.key("sent_gbs")] = tuple(wave(t, 1, 6, 20 + link.number) if b else 0.0
                                             for t, b in zip(times, busy, strict=True))  # fmt: skip
    return GpuChart(card, Series(end, step, values, recorded_from=at - 86_400))


class FakeFleet:
    """Implements `vllm_console.fleet.local.LocalFleet` over a list of functions from the clock to a server."""

    def __init__(self, *servers: object, step: float = 0.0) -> None:
        self.history = self
        """The methods of `vllm_console.fleet.runs.RunHistory` are the fake's own."""
        self.claims = SimpleNamespace(board=self.board, claim=self.claim, release=self.release)
        self.loads = SimpleNamespace(start=self.start_load, stop=self.stop_load)
        self.ramps = SimpleNamespace(start=self.start_ramp, view=self.ramp, cancel=self.cancel_ramp)
        self.leftovers = SimpleNamespace(find=self.find_leftovers, remove=self.remove_leftovers)
        self.replays = SimpleNamespace(find=self.replay, removed_at=self.removed_at)
        self.engine_check = SimpleNamespace(close=self.stop_judging, memory_mib=None, unused="")
        self.predictions = SimpleNamespace(
            staged=SimpleNamespace(ask=self.predict_staged, cancel=lambda: None), keep=self.keep_prediction
        )
        self.read_only = False
        self.tariff = None
        self.read_only_by = ""
        self.judge_launches = False
        self.makers = list(servers)
        self.at = NOW
        self.step = step
        self.calls: list[tuple[object, ...]] = []
        self.predicted: list[Changes] = []
        """Changes staged long enough to be predicted. Not in ``calls`` because prediction is delayed."""
        self.looks = 0
        self.error: Exception | None = None
        """Raised by the next action."""
        self.look_error: Exception | None = None
        self.markers: tuple[Marker, ...] = ()
        self.then = StateThen(State.READY, NOW - 7200, 2)
        """Events of the selected server."""
        self.no_findings = ""
        """Why findings of an earlier time are unknown."""
        self.times: list[TimeView] = []
        self.gpus: dict[str, object] = {}
        """A snapshot's host fields: ``host``, ``host_problem``, ``host_recorded``, ``gpu_shares``."""
        self.gpu_charts: dict[int, GpuChart] = {}
        """A snapshot's data of a GPU whose charts are requested, by index."""
        self.local_models = LocalModels()
        """Result of `models`."""
        self.flag_table = FLAG_TABLE
        """Result of `flags`; None for a vLLM whose flags are not learned yet."""
        self.workloads: dict[str, SeenWorkload] = {}
        """Result of `seen_workload`, by server."""
        self.suggestions: dict[str, tuple[Choice, ...]] = {}
        """Result of `suggest`, by server."""
        self.memory: MemoryBudget | str | None = "as flags say"
        """Set to a budget, or to None for a model with too few known facts."""
        self.choices: tuple[Choice, ...] | None = None
        """Set to replace those derived from the flags."""
        self.findings: tuple[plan_findings.PlanFinding, ...] = ()
        """Findings of every plan."""
        self.findings_after: tuple[plan_findings.PlanFinding, ...] = ()
        """Additional findings of the plan of a restart with changes."""
        self.planned: list[tuple[str, Changes]] = []
        """Restarts whose plan was requested."""
        self.lora: Adapters | None = None
        """Result of `adapters`; None for a server without LoRA."""
        self.lora_problem: Exception | None = None
        """Raised by `load_adapter`."""
        self.predictable: dict[tuple[object, ...], PredictedChange | Exception] = {}
        """Result or exception of `predict_staged`, by staged values; None for others."""
        self.plan_error: Exception | None = None
        """Raised by `plan_restart`."""
        self.finished: dict[str, Sequence[FinishedRequest]] = {}
        """Result of `requests`, by server."""
        self.known_runs: Sequence[Run] = ()
        """Result of `runs`."""
        self.replayed: dict[str, Replay] = {}
        """Result of `replay`, by name; the run is shown as `ended_run`."""
        self.ramp_views: dict[str, RampView] = {}
        """Result of `ramp`, by server."""
        self.left = Leftovers()
        """Result of `find_leftovers`."""
        self.comparison: Comparison | None = None
        """Result of `compare`; None for a server without an earlier run."""
        self.comparisons: Sequence[Comparison] = ()
        """Additional results of `compare_again`, by run numbers."""
        self.judged, self.past_trouble = 0, ""
        """Number of calls of `judge_past`, and its result."""
        self.last_changes: dict[str, Comparison] = {}
        """Result of `last_change`, by server."""
        self.outcomes: dict[tuple[int, int], KeptPrediction] = {}
        """Result of `outcome`, by run numbers."""
        self.on_board = Board(Path("/board"), NOW)
        """Result of `board`."""
        self.open = threading.Event()
        """While cleared, snapshots block until it is set."""
        self.open.set()

    def snapshot(self, selected: str | None = None, time: TimeView = LIVE) -> FleetSnapshot:
        self.open.wait(20)
        self.looks += 1
        if self.look_error is not None:
            raise self.look_error
        self.at += self.step
        views = [maker(self.at) for maker in self.makers]  # type: ignore[operator]
        selected = selected or (views[0].name if selected == FIRST and views else None)
        views = [self._in_time(view, time) if view.name == selected else view for view in views]
        chosen = next((view for view in views if view.name == selected and view.ours), None)
        earlier = None
        if chosen is not None and time.at is not None:
            figures = window_at(time.at, 0.5)
            earlier = replace(chosen, moment=time.at, sample=None, window=figures, findings=(), judged=())
            earlier = replace(earlier, then=self.then, no_findings=self.no_findings)
        replay = next((one for one in self.replayed.values() if one.run == time.run), None)
        chart = self.gpu_charts.get(time.gpu) if time.gpu is not None else None
        self.times.append(time)
        return FleetSnapshot(self.at, "gpubox", tuple(views), earlier=earlier, gpu_chart=chart,
                             replay=self._replayed(replay, time) if replay is not None else None, **self.gpus)  # type: ignore[arg-type]  # fmt: skip

    def _replayed(self, replay: Replay, time: TimeView) -> ServerView:
        """An ended run at the requested time."""
        at = time.at if time.at is not None else replay.ended_at
        view = ended_run(replay, at)
        length = replay.ended_at - replay.started_at
        series = series_at(
            time.end or replay.ended_at, 1.0, time.range.step, round(time.range.seconds / time.range.step)
        )
        return replace(view, series=replace(series, recorded_from=replay.started_at), markers=(
            Marker(replay.started_at, MarkerKind.START, "r2", "Restarted: run 2: --max-num-seqs 512 → 256"),
            Marker(replay.started_at + length / 2, MarkerKind.FINDING, "!", "Finding began: preempting"),
            Marker(replay.ended_at, MarkerKind.STOP, "s", "Stopped on request"),
        ))  # fmt: skip

    def _in_time(self, view: ServerView, time: TimeView) -> ServerView:
        """The selected server with its charts."""
        pressure = {"chat": 1.0, "coder": 0.2, "vision": 0.9}.get(view.name, 0.5)
        series = series_at(time.end or self.at, pressure, time.range.step, time.range.points)
        probe = probe_at(time.end or self.at) if view.ours else None
        return replace(view, series=replace(series, recorded_from=self.at - 86_400), markers=self.markers, probe=probe)

    def _did(self, *call: object) -> None:
        self.calls.append(call)
        if self.error is not None:
            raise self.error

    def _view(self, name: str) -> ServerView:
        for maker in self.makers:
            view: ServerView = maker(self.at)  # type: ignore[operator]
            if view.name == name:
                return view
        raise OperationError(f"no server '{name}'")

    def presets(self) -> tuple[Sequence[Preset], Sequence[PresetProblem]]:
        return PRESETS, ()

    def engines(self) -> Sequence[Engine]:
        return (VLLM, SIMULATED)

    def models(self) -> LocalModels:
        return self.local_models

    def flags(self, engine: Engine | None = None) -> FlagTable:
        return self.flag_table

    def seen_workload(self, name: str) -> SeenWorkload | None:
        return self.workloads.get(name)

    def suggest(self, name: str, seen: SeenWorkload, keep: Collection[str] = ()) -> Sequence[Choice]:
        return [choice for choice in self.suggestions.get(name, ()) if choice.flag not in keep]

    def launch_name(self, request: LaunchRequest) -> str:
        return request.name or request.preset

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

    def judged_plan(self, request: LaunchRequest) -> Plan | None:
        self.calls.append(("judged_plan", request))
        return self.plan(request)

    def stop_judging(self) -> None:
        self.calls.append(("stop_judging",))

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

    def predict_staged(self, name: str, changes: Changes) -> PredictedChange | None:
        self.predicted.append(changes)
        found = self.predictable.get(tuple(changes.set.values()))
        if isinstance(found, Exception):
            raise found
        return found

    def keep_prediction(self, name: str, generation: int, prediction: PredictedChange) -> None:
        self.calls.append(("keep_prediction", name, generation, prediction))

    def start(self, request: LaunchRequest) -> ServerView:
        self._did("start", request)
        return docs(self.at)

    def restart(self, name: str, changes: Changes, options: RestartOptions = AS_CONFIGURED) -> ServerView:
        self._did("restart", name, changes)
        view = self._view(name)
        return replace(view, generation=view.generation + 1)

    def switch(self, name: str, preset: str, options: RestartOptions = AS_CONFIGURED) -> ServerView:
        self._did("switch", name, preset)
        return self._view(name)

    def start_beside(self, name: str, changes: Changes, options: RestartOptions = AS_CONFIGURED) -> ServerView:
        self._did("start_beside", name, changes)
        return replace(self._view(name), name=f"{name}-2", state=State.STARTING)

    def compare_answers(self, old: str, new: str) -> AnswerComparison:
        self._did("compare_answers", old, new)
        return AnswerComparison(4)

    def cancel_restart(self, name: str) -> ServerView:
        self._did("cancel_restart", name)
        return self._view(name)

    def sleep(
        self, name: str, *, level: int = 1, drain_seconds: float = 60.0, say: Callable[[str], None] | None = None
    ) -> ServerView:
        self._did("sleep", name)
        return self._view(name)

    def wake(
        self, name: str, *, level: int = 1, drain_seconds: float = 60.0, say: Callable[[str], None] | None = None
    ) -> ServerView:
        self._did("wake", name)
        return self._view(name)

    def listener(self, name: str) -> None:
        self._did("listener", name)

    def stop(self, name: str) -> ServerView:
        self._did("stop", name)
        return self._view(name)

    def forget(self, name: str, *, purge: bool = False) -> bool:
        self._did("forget", name, *(["purge"] if purge else []))
        return not purge

    def start_load(self, name: str) -> None:
        self._did("start_load", name)

    def stop_load(self, name: str) -> None:
        self._did("stop_load", name)

    def start_ramp(self, name: str, *, others_allowed: bool = False) -> None:
        self._did("start_ramp", name, *(["others"] if others_allowed else []))

    def ramp(self, name: str) -> RampView | None:
        return self.ramp_views.get(name)

    def cancel_ramp(self, name: str) -> None:
        self._did("cancel_ramp", name)

    def find_leftovers(self) -> Leftovers:
        self._did("leftovers")
        return self.left

    def remove_leftovers(self, wanted: Leftovers) -> Removed:
        self._did("remove_leftovers", wanted)
        return Removed(wanted.processes, wanted.files)

    def requests(self, name: str, since: float | None = None) -> Sequence[FinishedRequest]:
        return [request for request in self.finished.get(name, ()) if since is None or request.finished_at >= since]

    def runs(self, name: str | None = None) -> tuple[Sequence[Run], Sequence[str]]:
        return self.known_runs, ()

    def has_others(self, server: str, shown: Collection[int]) -> bool:
        return any(run.id not in shown for run in self.known_runs)

    def replay(self, word: str, at: float | None = None) -> Replay:
        if word not in self.replayed:
            raise NotFoundError(f"no run '{word}' is known; see 'vllm-console runs'")
        return self.replayed[word]

    def removed_at(self, name: str, at: float) -> Replay | None:
        return next((one for one in self.replayed.values() if one.name.startswith(f"{name}@") and one.removed), None)

    def used_presets(self) -> Sequence[str]:
        return list(dict.fromkeys(run.preset for run in self.known_runs))

    def compare(self, before: str, after: str | None = None) -> Comparison:
        self._did("compare", before, after)
        if self.comparison is None:
            raise NothingToCompareError(f"{before}@1 has no earlier run that served: nothing to compare with")
        return self.comparison

    def last_change(self, name: str) -> Comparison | None:
        return self.last_changes.get(name)

    def compare_again(self, before: int, after: int) -> Comparison:
        self._did("compare_again", before, after)
        known = [*self.comparisons, *self.last_changes.values(), self.comparison]
        runs = [(found, found.before.run.id, found.after.run.id) for found in known if found is not None]
        found = next((found for found, *ids in runs if ids == [before, after]), None)
        if found is None:
            raise NotFoundError(f"there is no run {before} or {after}")
        return found

    def outcome(self, found: Comparison) -> KeptPrediction | None:
        return self.outcomes.get((found.before.run.id, found.after.run.id))

    def judge_past(self, name: str | None = None) -> str:
        self.judged += 1
        return self.past_trouble

    def board(self) -> Board:
        self._did("board")
        return self.on_board

    def adapters(self, name: str) -> Adapters:
        """Result of ``lora``."""
        return self.lora if self.lora is not None else Adapters(name, False, False, None, None, None, ())

    def load_adapter(self, name: str, adapter: str, folder: str) -> Loaded:
        self._did("load_adapter", name, adapter, folder)
        if self.lora_problem is not None:
            raise self.lora_problem
        return Loaded(name, adapter, folder, ("it is gone after a restart",))

    def unload_adapter(self, name: str, adapter: str) -> Loaded:
        self._did("unload_adapter", name, adapter)
        return Loaded(name, adapter, "/a")

    def claim(self, gpus: Sequence[int], until: float, why: str = "") -> Board:
        self._did("claim", tuple(gpus), until, why)
        return self.on_board

    def release(self, gpus: Sequence[int] = ()) -> Board:
        self._did("release", tuple(gpus))
        return self.on_board

    def close(self) -> None:
        self._did("close")
