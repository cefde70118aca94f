"""Bodies of ``/metrics`` in the format of several vLLM versions, and a small HTTP server."""

from __future__ import annotations

import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from vllm_console.metrics.sample import EngineSample, Histogram, Sample

INF = float("inf")
Observations = Sequence[float]

TTFT_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
ITL_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
LATENCY_BOUNDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
LENGTH_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)

NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "0.8.5": {
        "usage": ("gpu_cache_usage_perc",),
        "queries": ("gpu_prefix_cache_queries",),
        "hits": ("gpu_prefix_cache_hits",),
        "itl": ("time_per_output_token_seconds",),
    },
    "0.10.2": {
        "usage": ("gpu_cache_usage_perc", "kv_cache_usage_perc"),
        "queries": ("gpu_prefix_cache_queries", "prefix_cache_queries"),
        "hits": ("gpu_prefix_cache_hits", "prefix_cache_hits"),
        "itl": ("time_per_output_token_seconds", "inter_token_latency_seconds"),
    },
    "0.33.0": {
        "usage": ("kv_cache_usage_perc",),
        "queries": ("prefix_cache_queries",),
        "hits": ("prefix_cache_hits",),
        "itl": ("inter_token_latency_seconds",),
    },
}


def _labels(labels: Mapping[str, str]) -> str:
    def escaped(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in sorted(labels.items())) + "}"


def _histogram(name: str, labels: dict[str, str], bounds: tuple[float, ...], seen: Observations) -> list[str]:
    lines = [f"# HELP vllm:{name} Histogram of {name}.", f"# TYPE vllm:{name} histogram"]
    for bound in (*bounds, INF):
        le = "+Inf" if bound == INF else str(bound)
        lines.append(f"vllm:{name}_bucket{_labels({**labels, 'le': le})} {float(sum(o <= bound for o in seen))}")
    lines.append(f"vllm:{name}_count{_labels(labels)} {float(len(seen))}")
    lines.append(f"vllm:{name}_sum{_labels(labels)} {float(sum(seen))}")
    lines.append(f"vllm:{name}_created{_labels(labels)} 1.79e+09")
    return lines


def _engine_lines(names: dict[str, tuple[str, ...]], labels: dict[str, str], v: Mapping[str, object]) -> list[str]:
    lines: list[str] = []

    def gauge(name: str, value: object) -> None:
        lines.extend([f"# TYPE vllm:{name} gauge", f"vllm:{name}{_labels(labels)} {value}"])

    def counter(name: str, value: object, **more: str) -> None:
        lines.append(f"# TYPE vllm:{name}_total counter")
        lines.append(f"vllm:{name}_total{_labels({**labels, **more})} {value}")
        lines.append(f"vllm:{name}_created{_labels({**labels, **more})} 1.7951688992126844e+09")

    gauge("num_requests_running", v.get("running", 3.0))
    gauge("num_requests_waiting", v.get("waiting", 2.0))
    lines.append(f"vllm:num_requests_waiting_by_reason{_labels({**labels, 'reason': 'capacity'})} 2.0")
    for name in names["usage"]:
        gauge(name, v.get("usage", 0.5))
    for name in names["queries"]:
        counter(name, v.get("queries", 1000.0))
    for name in names["hits"]:
        counter(name, v.get("hits", 400.0))
    counter("num_preemptions", v.get("preemptions", 7.0))
    counter("prompt_tokens", v.get("prompt", 1200.0))
    counter("generation_tokens", v.get("generation", 3400.0))
    finished = float(v.get("finished", 10.0))  # type: ignore[arg-type]
    for reason, share in (("stop", 0.5), ("length", 0.5), ("abort", 0.0)):
        counter("request_success", finished * share, finished_reason=reason)
    lines += _histogram("iteration_tokens_total", labels, (1.0, 8.0, 64.0), [5.0, 9.0])
    lines += _histogram("time_to_first_token_seconds", labels, TTFT_BOUNDS, v.get("ttft", (0.03, 0.2, 0.7)))  # type: ignore[arg-type]
    for name in names["itl"]:
        lines += _histogram(name, labels, ITL_BOUNDS, v.get("itl", (0.02, 0.03, 0.03, 0.4)))  # type: ignore[arg-type]
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
        lines += _histogram(f"{name}_seconds", labels, LATENCY_BOUNDS, v.get(name, (0.4, 3.0)))  # type: ignore[arg-type]
    lines += _histogram("request_prompt_tokens", labels, LENGTH_BOUNDS, (40.0, 800.0))
    lines += _histogram("request_generation_tokens", labels, LENGTH_BOUNDS, (15.0, 5000.0))
    return lines


@pytest.fixture
def body() -> Callable[..., str]:
    """Builds a body: ``body("0.33.0", [{"running": 1.0}, {…}], model="m", config={…})``; one mapping per engine."""

    def build(
        version: str = "0.33.0",
        engines: Sequence[Mapping[str, object]] = ({},),
        model: str = "tiny",
        config: Mapping[str, str] | None = None,
    ) -> str:
        lines = [
            "# HELP python_info Python platform information",
            "# TYPE python_info gauge",
            'python_info{implementation="CPython",version="3.11.7"} 1.0',
            "process_open_fds 41.0",
        ]
        for number, values in enumerate(engines):
            lines += _engine_lines(NAMES[version], {"engine": str(number), "model_name": model}, values)
            settings = {"block_size": "16", "num_gpu_blocks": "100", "cache_dtype": "auto", **(config or {})}
            lines.append(f"vllm:cache_config_info{_labels({**settings, 'engine': str(number)})} 1.0")
        lines.append('http_requests_total{handler="/v1/chat/completions",method="POST",status="2xx"} 27.0')
        return "\n".join(lines) + "\n"

    return build


@pytest.fixture
def engine() -> Callable[..., EngineSample]:
    """Builds an engine's sample; ``ttft`` and ``itl`` are cumulative counts over 0.1, 0.5, 1 and +Inf seconds."""

    def build(
        running: float | None = 1.0,
        waiting: float | None = 0.0,
        usage: float | None = 0.5,
        preemptions: float | None = 0.0,
        generation: float | None = 0.0,
        finished: float | None = 0.0,
        ttft: Sequence[float] | None = None,
        ttft_sum: float = 0.0,
        bounds: tuple[float, ...] = (0.1, 0.5, 1.0, INF),
    ) -> EngineSample:
        return EngineSample(
            requests_running=running,
            requests_waiting=waiting,
            kv_cache_usage=usage,
            preemptions_total=preemptions,
            prefix_cache_queries_total=generation,
            prefix_cache_hits_total=None if generation is None else generation / 4,
            prompt_tokens_total=generation,
            generation_tokens_total=generation,
            requests_finished_total=finished,
            histograms={} if ttft is None else {"ttft": Histogram(bounds, tuple(map(float, ttft)), ttft_sum)},
        )

    return build


@pytest.fixture
def sample() -> Callable[..., Sample]:
    """Builds a sample of engines numbered from 0: ``sample(at, engine, …)``."""

    def build(at: float, *engines: EngineSample, tokens: int | None = 1600) -> Sample:
        return Sample(at, {str(number): engine for number, engine in enumerate(engines)}, tokens, "tiny")

    return build


@pytest.fixture
def until() -> Callable[[Callable[[], object]], None]:
    """Waits until a condition holds; fails after a deadline."""

    def wait(finding: Callable[[], object], seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not finding():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.02)

    return wait


class RawServer(socketserver.ThreadingTCPServer):
    """Sends the bytes of ``answer(path)`` to every request; counts connections and requests."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        self.answer: Callable[[str], bytes | Iterator[bytes]] = lambda path: b""
        self.connections = 0
        self.requests = 0
        self.ending = threading.Event()
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def serve_text(
        self, text: str | bytes, content_type: str = "text/plain; version=0.0.4", status: str = "200 OK"
    ) -> None:
        data = text.encode() if isinstance(text, str) else text
        head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        self.answer = lambda path: head + data


class _Handler(socketserver.StreamRequestHandler):
    server: RawServer

    def handle(self) -> None:
        self.server.connections += 1
        while True:
            request = self.rfile.readline()
            if not request:
                return
            while self.rfile.readline().strip():
                pass
            self.server.requests += 1
            answer = self.server.answer(request.split()[1].decode())
            try:
                for piece in [answer] if isinstance(answer, bytes) else answer:
                    self.wfile.write(piece)
                    self.wfile.flush()
            except OSError:
                return
            if not isinstance(answer, bytes) or b"Content-Length" not in answer or b"Connection: close" in answer:
                return


@pytest.fixture
def server() -> Iterator[RawServer]:
    """A loopback server whose responses are set by the test."""
    with RawServer() as raw:
        thread = threading.Thread(target=raw.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield raw
        raw.ending.set()
        raw.shutdown()
        thread.join()
