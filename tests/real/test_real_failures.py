"""Failures of real vLLM that can be provoked on a CPU: the logged cause and the fix.

A killed engine is tested in `test_real_findings`.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from vllm_console.diagnosis.failure.diagnose import diagnose
from vllm_console.diagnosis.finding import Cause, Diagnosis

if TYPE_CHECKING:
    from conftest import RealServer, StartServer
else:
    RealServer = StartServer = Any

pytestmark = pytest.mark.real

SIDE_BY_SIDE = 3
"""Number of servers started concurrently; importing vLLM is half waiting."""

WITH_A_WORKER = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


@dataclass(frozen=True, slots=True)
class Failed:
    """An ended server: exit code, log and diagnosis."""

    server: RealServer
    code: int
    lines: list[str]
    diagnosis: Diagnosis


Get = Callable[[str], Failed]


@pytest.fixture(scope="module")
def failed(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Get]:
    """Return a case by name. The first call starts all cases, a few at a time, the longest first."""
    nowhere = tmp_path_factory.mktemp("models") / "nope"
    cases: Mapping[str, Callable[[], RealServer]] = {
        "killed worker": lambda: killed(start_server(env=WITH_A_WORKER, titled=True), "VLLM::Worker"),
        "context over the KV cache": lambda: start_server("--max-model-len", "2048", "--num-gpu-blocks-override", "8"),
        "interrupted": lambda: interrupted(start_server),
        "port": lambda: on_a_taken_port(start_server),
        "model": lambda: start_server(model=nowhere),
        "context over the model's": lambda: start_server("--max-model-len", "9999"),
        "utilization": lambda: start_server("--gpu-memory-utilization", "1.5"),
        "choice": lambda: start_server("--dtype", "foo"),
        "unknown flag": lambda: start_server("--no-such-flag"),
        "experts": lambda: start_server("--enable-expert-parallel"),
        "speculation": lambda: start_server("--speculative-config", '{"method": "ngram"}'),
    }
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        futures: dict[str, Future[Failed]] = {name: pool.submit(ended, start) for name, start in cases.items()}
        yield lambda name: futures[name].result()
        for future in futures.values():
            future.cancel()


def ended(start: Callable[[], RealServer]) -> Failed:
    server = start()
    code = server.wait_exit()
    lines = server.log_lines()
    found = diagnose(lines, code)
    return Failed(server, code, lines, found)


def killed(server: RealServer, name: str) -> RealServer:
    """Kill one of its processes while it serves."""
    server.wait_ready()
    family = psutil.Process(server.process.pid).children(recursive=True)
    next(one for one in family if name in " ".join([one.name(), *one.cmdline()])).kill()
    return server


def interrupted(start_server: StartServer) -> RealServer:
    """Like Ctrl+C during engine startup: asyncio delays the signal until the engine is up, then the server ends."""
    server: RealServer = start_server()
    server.wait_for("Initializing a V1 LLM engine")
    server.process.send_signal(signal.SIGINT)
    server.wait_exit()
    return server


def on_a_taken_port(start_server: StartServer) -> RealServer:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server: RealServer = start_server(port=taken.getsockname()[1])
        server.wait_exit()
    return server


@pytest.mark.parametrize(
    ("name", "code", "cause", "text"),
    [
        ("unknown flag", 2, Cause.UNKNOWN_FLAG, "unrecognized arguments: --no-such-flag"),
        ("choice", 2, Cause.INVALID_FLAG_VALUE, "argument --dtype: invalid choice: 'foo'"),
        ("utilization", 1, Cause.INVALID_FLAG_VALUE, "less than or equal to 1"),
        ("context over the model's", 1, Cause.INVALID_FLAG_VALUE, "max_model_len (9999)"),
        ("port", 1, Cause.PORT_IN_USE, "Address already in use"),
        ("model", 1, Cause.MODEL_NOT_FOUND, "Repo id must be"),
        ("context over the KV cache", 1, Cause.KV_CACHE_TOO_SMALL, "KV cache"),
        ("interrupted", -2, Cause.INTERRUPTED, "KeyboardInterrupt"),
        ("experts", 1, Cause.INVALID_FLAG_VALUE, "Number of experts in the model must be greater than 0"),
        ("speculation", 1, Cause.INVALID_FLAG_VALUE, "num_speculative_tokens must be provided"),
        ("killed worker", 0, Cause.ENGINE_DIED, "Worker proc VllmWorker-0 died unexpectedly"),
    ],
)
def test_cause_and_log_line(failed: Get, name: str, code: int, cause: Cause, text: str) -> None:
    case = failed(name)
    found = case.diagnosis
    assert (case.code, found.cause) == (code, cause), "\n".join(case.lines[-40:])
    assert found.line is not None
    shown = case.lines[found.line - 1].strip()
    assert text in found.evidence
    # A line that does not name its flag is prefixed with the flag's name.
    assert found.evidence in shown or found.evidence.endswith(shown)


@pytest.mark.parametrize(
    ("name", "sets", "unsets", "why"),
    [
        ("unknown flag", {}, ("no-such-flag",), "remove it"),
        ("choice", {}, ("dtype",), "default"),
        ("utilization", {}, ("gpu-memory-utilization",), "default"),
        ("context over the model's", {"max-model-len": 4096}, (), "4,096 tokens"),
        ("port", {}, (), "another --port"),
        ("model", {}, (), "folder"),
        ("context over the KV cache", {"max-model-len": 224}, (), "224 tokens"),
        ("interrupted", {}, (), "Start it again"),
        ("experts", {}, ("enable-expert-parallel",), "no experts"),
        (
            "speculation",
            {"speculative-config": '{"method": "ngram", "num_speculative_tokens": 3}'},
            (),
            "draft tokens per step",
        ),
        ("killed worker", {}, (), "dmesg"),
    ],
)
def test_suggested_fix(failed: Get, name: str, sets: dict[str, object], unsets: tuple[str, ...], why: str) -> None:
    fix = failed(name).diagnosis.fixes[0]
    assert (dict(fix.changes.set), tuple(fix.changes.unset)) == (sets, unsets)
    assert why in fix.why


def test_cause_of_too_long_context_is_far_above_end_of_log(failed: Get) -> None:
    case = failed("context over the KV cache")
    assert case.diagnosis.line is not None
    assert len(case.lines) - case.diagnosis.line > 50  # the end of the log only points to it


def test_suggested_context_length_starts(failed: Get, start_server: StartServer) -> None:
    length = failed("context over the KV cache").diagnosis.fixes[0].changes.set["max-model-len"]
    start_server("--max-model-len", str(length), "--num-gpu-blocks-override", "8").wait_ready()
