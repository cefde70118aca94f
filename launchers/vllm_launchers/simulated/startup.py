"""The startup as logged by vLLM 0.33: stage by stage, in about the proportions of a real GPU."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from dataclasses import dataclass
from enum import StrEnum

from vllm_launchers.simulated.memory import MemoryBudgetError, MemoryPlan, MemoryStage, format_gib, plan_memory
from vllm_launchers.simulated.settings import EngineSettings
from vllm_launchers.units import GIB
from vllm_launchers.vllm.release_defaults import SIMULATED_VERSION

_LEVELS = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "CRITICAL": 50}


class Process(StrEnum):
    """The process that a line claims to come from. The simulation is one process, so all share its pid."""

    API = "APIServer"
    ENGINE = "EngineCore"


class Log:
    """Writes lines to stdout and progress bars to stderr, as vLLM does."""

    def __init__(self) -> None:
        name = (os.environ.get("VLLM_LOGGING_LEVEL") or "INFO").upper()
        self._threshold = _LEVELS.get(name, 20)
        self._pid = os.getpid()

    def write(self, process: Process | str, level: str, where: str, message: str) -> None:
        """Write one record, with a prefix for each of its lines. ``where``: vLLM's ``file.py:LINE``."""
        if _LEVELS[level] < self._threshold:
            return
        stamp = time.strftime("%m-%d %H:%M:%S")
        prefix = f"({process} pid={self._pid}) {level} {stamp} [{where}] "
        sys.stdout.write("".join(f"{prefix}{line}\n" for line in message.split("\n")))
        sys.stdout.flush()

    def api(self, where: str, message: str, level: str = "INFO") -> None:
        """Write a line of the API server."""
        self.write(Process.API, level, where, message)

    def engine(self, where: str, message: str, level: str = "INFO", rank: int | None = None) -> None:
        """Write a line of the engine process, or of one of several data-parallel ranks."""
        process = Process.ENGINE if rank is None else f"{Process.ENGINE}_DP{rank}"
        self.write(process, level, where, message)

    def progress(self, text: str) -> None:
        """Write a step of a progress bar, including control characters."""
        sys.stderr.write(text)
        sys.stderr.flush()


SHARD_BYTES = 4.6 * GIB
"""Approximate size of a checkpoint's files."""

_SHARES = {
    "config": 0.10,
    "engine": 0.12,
    "weights": 0.36,
    "compile": 0.18,
    "profile": 0.06,
    "graphs": 0.14,
    "end": 0.04,
}
"""Each stage's fraction of the startup time."""

_LOGO = (
    "",
    "       █     █     █▄   ▄█",
    " ▄▄ ▄█ █     █     █ ▀▄▀ █  version {version}",
    "  █▄█▀ █     █     █     █  model   {model}",
    "   ▀▀  ▀▀▀▀▀ ▀▀▀▀▀ ▀     ▀",
    "",
)


def announce(log: Log, args: argparse.Namespace, gpu: str) -> None:
    """Write the first lines: banner, a note about the simulation, and the given arguments."""
    logo = "\n".join(_LOGO).format(version=SIMULATED_VERSION, model=args.model)
    log.api("api_utils.py:347", logo)
    log.api("simulated.py:1", f"simulated engine: no GPU is used; it is timed as {gpu} by a roofline")
    given = {key: value for key, value in args.given.items() if key != "command"}
    if "api_key" in given:
        given["api_key"] = ["***"]
    log.api("api_utils.py:286", f"non-default args: {given}")
    if args.ignored:
        flags = ", ".join(dict.fromkeys(args.ignored))
        log.api("simulated.py:2", f"simulated engine: accepted but not modeled: {flags}")


def announce_resumed(log: Log) -> None:
    """For an engine that continues from a recording: write a note about that instead of a startup."""
    log.api("simulated.py:4", "simulated engine: continues from a recording; the lines above were simulated earlier")


_Frame = tuple[str, int, str, str]
"""A traceback frame: file within vLLM, line number, function, and source line."""
_CORE = "v1/engine/core.py"
_BEGUN: tuple[_Frame, ...] = (
    (_CORE, 1476, "run_engine_core", "engine_core = EngineCoreProc(*args, engine_index=dp_rank, **kwargs)"),
    (_CORE, 1050, "__init__", "super().__init__("),
)
_LOADING: tuple[_Frame, ...] = (
    *_BEGUN,
    (_CORE, 146, "__init__", "self.model_executor = executor_class(vllm_config)"),
    ("v1/executor/abstract.py", 126, "__init__", "self._init_executor()"),
    ("v1/executor/uniproc_executor.py", 52, "_init_executor", "self.driver_worker.load_model()"),
    ("v1/worker/gpu_worker.py", 370, "load_model", "self.model_runner.load_model(load_dummy_weights=dummy_weights)"),
    ("v1/worker/gpu_model_runner.py", 5062, "load_model", "self.model = model_loader.load_model("),
    ("model_executor/model_loader/base_loader.py", 54, "load_model", "model = initialize_model("),
    ("model_executor/model_loader/utils.py", 57, "initialize_model", "model = model_class(vllm_config=vllm_config)"),
    ("model_executor/layers/linear.py", 496, "__init__", "self.quant_method.create_weights("),
    ("model_executor/layers/linear.py", 217, "create_weights", "data=torch.empty("),
)
_CACHE: tuple[_Frame, ...] = (
    *_BEGUN,
    (_CORE, 158, "__init__", "kv_cache_config = self._initialize_kv_caches(vllm_config)"),
    (_CORE, 289, "_initialize_kv_caches", "kv_cache_configs = get_kv_cache_configs("),
    ("v1/core/kv_cache_utils.py", 2290, "get_kv_cache_configs", "_check_enough_kv_cache_memory("),
)
_FRAMES = {MemoryStage.LOADING: _LOADING, MemoryStage.CACHE: _CACHE}
"""Where vLLM is when a start fails, for its traceback: log readers search for these names."""


def _traceback(stage: MemoryStage) -> str:
    lines = ["Traceback (most recent call last):"]
    for file, number, function, source in _FRAMES[stage]:
        lines += [f'  File "/opt/simulated/vllm/{file}", line {number}, in {function}', f"    {source}"]
    return "\n".join(lines)


@dataclass(slots=True)
class SimulatedStartup:
    """One startup. ``seconds`` is its total duration; 0 is allowed."""

    log: Log
    settings: EngineSettings
    seconds: float

    def run(self) -> MemoryPlan:
        """Run the stages; returns the memory plan.

        Raises RuntimeError if the model does not fit, after logging the reason like vLLM.
        """
        self._configuration()
        try:
            return self._engine()
        except MemoryBudgetError as error:
            self._report(error)
            raise RuntimeError(
                "Engine core initialization failed. See root cause above. Failed core proc(s): {}"
            ) from None

    def _configuration(self) -> None:
        settings, limits = self.settings, self.settings.limits
        log = self.log.api
        if settings.model.note:
            log("simulated.py:3", f"simulated engine: {settings.model.name}: {settings.model.note}")
        log("model.py:733", f"Resolved architecture: {settings.model.architecture}")
        log("model.py:2152", f"Using max model len {limits.max_model_len}")
        self._pass("config")
        if limits.chunked_prefill:
            log(
                "scheduler.py:251",
                f"Chunked prefill is enabled with max_num_batched_tokens={limits.max_num_batched_tokens}.",
            )
        if settings.eager:
            log("vllm.py:1703", "Enforce eager set, disabling torch.compile and CUDAGraphs.", "WARNING")

    def _engine(self) -> MemoryPlan:
        settings = self.settings
        started = time.monotonic()
        text = f"Initializing a V1 LLM engine (v{SIMULATED_VERSION}) with config: {self._config()}"
        self.log.engine("core.py:133", text)
        self._pass("engine")
        world = settings.tensor_parallel * settings.pipeline_parallel
        for rank in range(world):
            tensor, pipeline = rank % settings.tensor_parallel, rank // settings.tensor_parallel
            self.log.engine(
                "parallel_state.py:2350",
                f"rank {rank} in world size {world} is assigned as DP rank 0, PP rank {pipeline}, PCP rank 0, "
                f"TP rank {tensor}, ETP rank {tensor}, EP rank N/A, EPLB rank N/A",
            )
        self.log.engine(
            "cuda.py:366",
            "Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN', 'TRITON_ATTN'].",
        )
        self.log.engine("model_runner.py:412", f"Starting to load model {settings.model.name}...")
        plan = plan_memory(settings)  # raises where a GPU would run out of memory while loading
        self._weights(plan)
        compiled = self._compile()
        self._pool(plan)
        self._graphs(plan)
        self._pass("end")
        took = time.monotonic() - started
        compilation = f" (compilation: {compiled:.2f} s)" if compiled is not None else ""
        self.log.engine(
            "core.py:402", f"init engine (profile, create kv cache, warmup model) took {took:.2f} s{compilation}"
        )
        return plan

    def _weights(self, plan: MemoryPlan) -> None:
        settings = self.settings
        size = settings.model.weight_bytes
        self.log.engine(
            "weight_utils.py:1108",
            f"Filesystem type for checkpoints: EXT4. Checkpoint size: {size / GIB:.2f} GiB. Available RAM: 96.00 GiB.",
        )
        shards = max(1, math.ceil(size / SHARD_BYTES))
        started = time.monotonic()
        for done in range(shards + 1):
            if done:
                self._pass("weights", 1 / shards)
            taken = time.monotonic() - started
            rate = f"{done / taken:.2f}it/s" if done and taken > 0 else "?it/s"
            left = _clock(taken / done * (shards - done)) if done else "?"
            self.log.progress(
                f"\rLoading safetensors checkpoint shards: {100 * done // shards:3d}% Completed | {done}/{shards} "
                f"[{_clock(taken)}<{left}, {rate}]\n"
            )
        self.log.progress("\n")
        taken = time.monotonic() - started
        self.log.engine("default_loader.py:501", f"Loading weights took {taken:.2f} seconds")
        self.log.engine(
            "model_runner.py:458",
            f"Model loading took {format_gib(plan.weights)} GiB memory and {taken + 0.02:.6f} seconds",
        )

    def _compile(self) -> float | None:
        if self.settings.eager:
            self._pass("profile")
            return None
        started = time.monotonic()
        name = "[backbone] "
        self.log.engine("monitor.py:40", f"{name}Starting torch.compile")
        self._pass("compile", 0.4)
        self.log.engine("backends.py:990", f"{name}Dynamo bytecode transform time: {time.monotonic() - started:.2f} s")
        self._pass("compile", 0.6)
        took = time.monotonic() - started
        tokens = self.settings.limits.max_num_batched_tokens
        self.log.engine(
            "backends.py:391", f"{name}Compiling a graph for compile range (1, {tokens}) takes {took * 0.6:.2f} s"
        )
        self.log.engine("monitor.py:60", f"{name}torch.compile took {took:.2f} s in total")
        self._pass("profile")
        self.log.engine("monitor.py:91", f"{name}Initial profiling/warmup run took {self.seconds * 0.06:.2f} s")
        return took

    def _pool(self, plan: MemoryPlan) -> None:
        settings = self.settings
        if settings.fit_length and plan.max_model_len < settings.limits.max_model_len:
            self.log.engine(
                "kv_cache_planning.py:610",
                f"Auto-fit max_model_len: reduced from {settings.limits.max_model_len} to {plan.max_model_len} to fit "
                f"in available KV cache memory ({format_gib(plan.available)} GiB)",
            )
        if plan.graphs:
            self.log.engine(
                "gpu_model_runner.py:6101", f"Estimated CUDA graph memory: {plan.graphs / GIB:.2f} GiB total"
            )
        self.log.engine("gpu_worker.py:612", f"Available KV cache memory: {format_gib(plan.available)} GiB")
        if settings.blocks_override is not None:
            profiled = plan.available // plan.block_bytes
            self.log.engine(
                "kv_cache_utils.py:2619",
                f"Overriding num_gpu_blocks={profiled} with num_gpu_blocks_override={settings.blocks_override}",
            )
        self.log.engine(
            "kv_cache_utils.py:2327",
            f"GPU KV cache size: {plan.tokens:,} tokens, Maximum concurrency for {plan.max_model_len:,} tokens per "
            f"request: {plan.concurrency:.2f}x",
        )

    def _graphs(self, plan: MemoryPlan) -> None:
        if self.settings.eager:
            return
        total = 35 if self.settings.limits.max_num_seqs >= 128 else 19
        started = time.monotonic()
        steps = 7
        for step in range(steps + 1):
            if step:
                self._pass("graphs", 1 / steps)
            done, taken = total * step // steps, time.monotonic() - started
            filled = 10 * step // steps
            rate = f"{done / taken:.2f}it/s" if done and taken > 0 else "?it/s"
            self.log.progress(
                f"\rCapturing CUDA graphs (mixed prefill-decode, PIECEWISE): {100 * step // steps:3d}%|"
                f"{'█' * filled}{' ' * (10 - filled)}| {done}/{total} [{_clock(taken)}<?, {rate}]"
            )
        self.log.progress("\n")
        taken = time.monotonic() - started
        self.log.engine(
            "model_runner.py:840", f"Graph capturing finished in {taken:.0f} secs, took {plan.graphs / GIB:.2f} GiB"
        )

    def _report(self, error: MemoryBudgetError) -> None:
        """Log why the engine fails, with vLLM's lines: the cause, then the traceback."""
        if error.stage is MemoryStage.LOADING:
            self.log.engine(
                "model_runner.py:470",
                "Failed to load model - not enough GPU memory. Try lowering --gpu-memory-utilization to free memory "
                "for weights, increasing --tensor-parallel-size, or using --quantization. See "
                "https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more tips. "
                f"(original error: {error})",
                "ERROR",
            )
        text = f"EngineCore failed to start.\n{_traceback(error.stage)}\n{error.kind}: {error}"
        self.log.engine("core.py:1510", text, "ERROR")

    def _config(self) -> str:
        settings = self.settings
        model = settings.model.name
        return (
            f"model={model!r}, speculative_config=None, tokenizer={model!r}, dtype=torch.bfloat16, "
            f"max_seq_len={settings.limits.max_model_len}, tensor_parallel_size={settings.tensor_parallel}, "
            f"pipeline_parallel_size={settings.pipeline_parallel}, data_parallel_size={settings.data_parallel}, "
            f"quantization={settings.quantization}, enforce_eager={settings.eager}, "
            f"kv_cache_dtype={settings.kv_cache_dtype}, device_config=simulated, "
            f"served_model_name={settings.served_names[0]}, enable_prefix_caching={settings.prefix_caching}, "
            f"enable_chunked_prefill={settings.limits.chunked_prefill}"
        )

    def _pass(self, stage: str, part: float = 1.0) -> None:
        time.sleep(self.seconds * _SHARES[stage] * part)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"
