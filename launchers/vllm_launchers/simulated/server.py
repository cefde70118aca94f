"""Serving: the socket, uvicorn, the engines' loops, the stats line, and shutdown by signals."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import logging
import os
import signal
import socket
from collections.abc import Generator
from copy import deepcopy
from typing import Any

import uvicorn
from msgspec.structs import replace
from uvicorn.config import LOGGING_CONFIG

from vllm_launchers.addresses import family_of
from vllm_launchers.engine_model.core import Core
from vllm_launchers.engine_model.roofline import Roofline
from vllm_launchers.simulated.adapters import RuntimeAdapters
from vllm_launchers.simulated.api import Api, ApiOptions
from vllm_launchers.simulated.completions import Style
from vllm_launchers.simulated.engine import Engines, SimulatedEngine, probe_of
from vllm_launchers.simulated.memory import MemoryPlan
from vllm_launchers.simulated.metrics import Metrics
from vllm_launchers.simulated.requests import ServedModel
from vllm_launchers.simulated.settings import REPORTED_VERSION, EngineSettings
from vllm_launchers.simulated.sleep import SleepMode
from vllm_launchers.simulated.startup import Log
from vllm_launchers.simulated.vocabulary import Vocabulary
from vllm_launchers.vllm.model_folder import updates_adapters

STATS_INTERVAL = 10.0
"""Seconds between two stats lines."""
CLOSE_SECONDS = 2
"""Time for connections to close after their requests have ended."""


async def run(
    args: argparse.Namespace,
    settings: EngineSettings,
    plan: MemoryPlan,
    speed: float,
    sock: socket.socket,
    log: Log,
    totals: str = "",
    host_bytes: int | None = None,
) -> None:
    """Assemble engines, metrics and API on ``sock``, and serve until stopped.

    ``totals``: a body of ``/metrics`` from which to continue counting. ``host_bytes``: host memory for the weights of a
    sleeping server.
    """
    statistics = not args.disable_log_stats
    metrics = Metrics(settings, plan, statistics=statistics, totals=totals)
    ranks = [
        SimulatedEngine(
            build_core(settings, plan),
            metrics.engines[rank] if statistics else None,
            speed=speed,
            probe=probe_of(rank) if statistics else None,
        )
        for rank in range(settings.data_parallel)
    ]
    engines = Engines(ranks)
    size = settings.model.vocabulary
    api = ApiOptions(
        served=ServedModel(settings.served_names, plan.max_model_len, Vocabulary(size), size, args.max_logprobs),
        root=args.model,
        style=Style(fingerprint_of(args, settings), usage_details=args.enable_prompt_tokens_details),
        api_keys=tuple(args.api_key or filter(None, [os.environ.get("VLLM_API_KEY")])),
        track_load=args.enable_server_load_tracking,
        developing=os.environ.get("VLLM_SERVER_DEV_MODE") == "1",
        log_requests=args.enable_log_requests,
        updates_adapters=updates_adapters(os.environ),
    )
    host, port = sock.getsockname()[:2]
    scheme = "https" if args.ssl_certfile or args.ssl_keyfile else "http"
    log.api("entry.py:140", f"Starting vLLM server on {scheme}://{f'[{host}]' if ':' in host else host}:{port}")
    sleep = SleepMode(
        engines,
        metrics,
        plan,
        log,
        enabled=args.enable_sleep_mode,
        ranks=settings.tensor_parallel * settings.pipeline_parallel,
        host_bytes=host_bytes,
        speed=speed,
    )
    adapters = RuntimeAdapters(
        api.served.adapters,
        api.served.names,
        metrics,
        enabled=args.enable_lora,
        most=args.max_loras,
        rank=args.max_lora_rank,
    )
    log_stats = statistics and settings.data_parallel == 1  # vLLM writes none with several API servers
    app = Api(api, engines, metrics, log, sleep, adapters).application()
    await serve(app, sock, engines, log, args, log_stats=log_stats)


def fingerprint_of(args: argparse.Namespace, settings: EngineSettings) -> str:
    """``system_fingerprint`` in vLLM's format: version, parallel sizes, and a hash of the configuration."""
    sizes = (("tp", settings.tensor_parallel), ("pp", settings.pipeline_parallel), ("dp", settings.data_parallel))
    parts = [f"{name}{size}" for name, size in sizes if size > 1]
    given = repr(sorted((key, value) for key, value in args.given.items() if key not in ("host", "port", "api_key")))
    return "-".join(("vllm", REPORTED_VERSION, *parts, hashlib.sha256(given.encode()).hexdigest()[:8]))


def build_core(settings: EngineSettings, plan: MemoryPlan) -> Core:
    """Build one data-parallel rank's engine, in virtual time, from resolved flags and the memory plan."""
    roofline = Roofline(
        gpu=settings.gpu,
        model=settings.model,
        kv_element_bytes=settings.kv_element_bytes,
        tensor_parallel=settings.tensor_parallel,
        pipeline_parallel=settings.pipeline_parallel,
        eager=settings.eager,
    )
    limits = replace(settings.limits, max_model_len=plan.max_model_len)
    return Core(limits, plan.blocks, roofline, prefix_caching=settings.prefix_caching)


def bind(host: str | None, port: int) -> socket.socket:
    """Bind the port without listening yet, so that clients are refused until the engine is up. Raises OSError."""
    sock = socket.socket(family_of(host or ""), socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host or "0.0.0.0", port))
    except OSError:
        sock.close()
        raise
    return sock


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers, because the engines must end before the connections do."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _path_of(record: logging.LogRecord) -> str:
    """The path in an access log record, without its query."""
    arguments = record.args
    return str(arguments[2]).partition("?")[0] if isinstance(arguments, tuple) and len(arguments) > 2 else ""


async def serve(
    app: Any, sock: socket.socket, engines: Engines, log: Log, args: argparse.Namespace, *, log_stats: bool
) -> None:
    """Serve until SIGTERM or SIGINT; then abort running requests, or let them finish within the shutdown timeout."""
    config = uvicorn.Config(
        app,
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        log_config=deepcopy(LOGGING_CONFIG),
        timeout_graceful_shutdown=CLOSE_SECONDS,
        timeout_keep_alive=5,
        lifespan="on",
        ws="none",
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
    )
    if args.disable_access_log_for_endpoints:
        paths = frozenset(args.disable_access_log_for_endpoints.split(","))
        logging.getLogger("uvicorn.access").addFilter(lambda record: _path_of(record) not in paths)
    server = _Server(config)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop_or_hurry() -> None:
        if stop.is_set():
            engines.abort_all()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_or_hurry)
    tasks = [asyncio.create_task(engine.run()) for engine in engines.ranks]
    if log_stats:
        tasks.append(asyncio.create_task(_stats(engines, log)))
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((serving, stopping, *tasks), return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        await _shut_down(engines, log, args.shutdown_timeout)
    engines.closing = True
    server.should_exit = True
    await serving
    for task in (stopping, *tasks):
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result  # an engine that died, not one that was canceled
    log.api("launcher.py:304", "[shutdown] API server: shut down")


async def _shut_down(engines: Engines, log: Log, timeout: int) -> None:
    mode = "drain" if timeout else "abort"
    log.api("launcher.py:254", "[shutdown] API server: shutdown triggered")
    log.api("launcher.py:270", f"[shutdown] API server: stopping engine client mode={mode} timeout={timeout}s")
    engines.closing = True
    count = engines.in_flight
    if timeout and count:
        log.engine(
            "core.py:1640", f"[shutdown] EngineCore: draining in-flight requests count={count} timeout={timeout}s"
        )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(engines.drained(), timeout)
    if engines.in_flight:
        log.engine("core.py:1650", f"[shutdown] EngineCore: aborting in-flight requests count={engines.in_flight}")
        engines.abort_all()
    log.engine("core.py:1666", "[shutdown] EngineCore: request processing complete; starting resource teardown")
    log.api("launcher.py:282", "[shutdown] API server: signalling HTTP server shutdown")


async def _stats(engines: Engines, log: Log) -> None:
    """Write each rank's stats line every ten seconds while it is active, and once more afterwards."""
    while True:
        await asyncio.sleep(STATS_INTERVAL)
        for rank, engine in enumerate(engines.ranks):
            line = stats_line(rank, engine, STATS_INTERVAL)
            if line:
                log.api("loggers.py:335", line)


def stats_line(rank: int, engine: SimulatedEngine, seconds: float) -> str:
    """The stats line for the last ``seconds``; empty if this interval and the previous one were idle."""
    seen = engine.throughput
    scheduler = engine.core.scheduler
    prompt, generated = seen.prompt_tokens / seconds, seen.generated / seconds
    idle = not (prompt or generated or engine.in_flight)
    silent = idle and seen.was_idle
    seen.was_idle = idle
    seen.prompt_tokens = seen.generated = 0
    if silent:
        return ""
    return (
        f"Engine {rank:03d}: Avg prompt throughput: {prompt:.1f} tokens/s, "
        f"Avg generation throughput: {generated:.1f} tokens/s, Running: {len(scheduler.running)} reqs, "
        f"Waiting: {len(scheduler.waiting)} reqs, GPU KV cache usage: {scheduler.pool.usage * 100:.1f}%, "
        f"Prefix cache hit rate: {seen.hit_rate * 100:.1f}%"
    )
