"""How the fleet judges servers: by their history, by the GPUs around, and by a request where one seems to hang."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_console.config import Config, ConfigError, gpu_reserves, read_settings
from vllm_console.diagnosis.model import Severity
from vllm_console.fleet import one_token
from vllm_console.fleet.board import SharedBoard
from vllm_console.fleet.details import Details, pack
from vllm_console.fleet.gpus import GpuSource
from vllm_console.fleet.judging import Judge, slowest_link
from vllm_console.fleet.one_token import OneToken
from vllm_console.fleet.watched import HISTORY, Around, WatchedServer
from vllm_console.telemetry.gpu_looks import GPU_LOOKS
from vllm_console.telemetry.history import Writer
from vllm_console.telemetry.model import EngineSample, Histogram, Sample
from vllm_launchers.keeper.records import Generation, LaunchSpec, ServerRecord, State
from vllm_launchers.machine.board.model import Board, Claim
from vllm_launchers.machine.gpu.host import Gpu, Host, Link
from vllm_launchers.machine.gpu.sharing import Share
from vllm_launchers.machine.model import Engine, EngineKind
from vllm_launchers.presets.model import Objectives

NOW = 2_000_000.0
GOALS = Objectives(ttft_p99_seconds=2.0, itl_p99_seconds=0.1, kv_cache_usage=0.8, preemption_rate=0.02)
BOUNDS = (0.01, 0.1, 1.0, float("inf"))


def sample(at: float, *, usage: float = 0.5, tokens: float | None = None) -> Sample:
    """A look at a server that has served evenly since the beginning; ``tokens`` stops its counters there."""
    done = (at - NOW + 3600) * 10 if tokens is None else tokens
    itl = Histogram(BOUNDS, (0.0, done, done, done), done * 0.03)
    ttft = Histogram(BOUNDS, (0.0, done / 20, done / 20, done / 20), done / 20 * 0.05)
    engine = EngineSample(
        requests_running=4, requests_waiting=0, kv_cache_usage=usage, preemptions_total=0,
        prefix_cache_queries_total=done, prefix_cache_hits_total=done / 2, prompt_tokens_total=done,
        generation_tokens_total=done, requests_finished_total=done / 20, histograms={"itl": itl, "ttft": ttft},
    )  # fmt: skip
    return Sample(at, {"0": engine}, kv_cache_tokens=50_000, model_name="m")


def record(port: int = 1, state: State = State.READY, reason: str = "", flags: Any = None) -> ServerRecord:
    details = Details(preset="chatbot", model="Qwen/Qwen3-8B-AWQ", flags=flags or {}, objectives=GOALS, gpus=(0,))
    spec = LaunchSpec(("vllm",), "127.0.0.1", port, details=pack(details))
    generation = Generation(1, spec, NOW - 3600, ready_at=NOW - 3500)
    return ServerRecord("chat", state, NOW - 300, NOW - 3600, (generation,), reason=reason)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A server's folder whose history is of ten minutes under pressure."""
    writer = Writer(tmp_path / HISTORY)
    for second in range(600):
        writer.append(sample(NOW - 600 + second, usage=0.9))
    writer.close()
    return tmp_path


def test_a_selected_server_is_judged_by_its_history_and_the_others_are_not(folder: Path) -> None:
    watched = WatchedServer(folder, charts=False)
    assert watched.view(record(), NOW, selected=False, load="", around=Around()).conditions == ()
    (condition,) = watched.view(record(), NOW, selected=True, load="", around=Around()).conditions
    assert condition.code == "kv_cache_pressure"
    assert condition.measures[0].source == "objectives of preset chatbot"
    assert condition.since <= NOW - 570
    watched.close()


def test_a_queue_that_came_long_before_the_first_look_and_stays_is_named(tmp_path: Path) -> None:
    """Rows by ten seconds do not tell how short it was; those by the second reach back half an hour."""
    writer = Writer(tmp_path / HISTORY)
    for second in range(0, 1200, 3):
        seen = sample(NOW - 1200 + second)
        engine = replace(seen.engines["0"], requests_waiting=0 if second < 300 else 40)
        writer.append(replace(seen, engines={"0": engine}))
    writer.close()
    watched = WatchedServer(tmp_path, charts=False)
    (found,) = watched.view(record(), NOW, selected=True, load="", around=Around()).conditions
    watched.close()
    assert found.code == "oversubscribed_compute"
    assert abs(found.since - (NOW - 900)) <= 10


def test_a_console_judges_every_server(folder: Path) -> None:
    watched = WatchedServer(folder, charts=True)
    view = watched.view(record(), NOW, selected=False, load="", around=Around())
    assert [condition.code for condition in view.conditions] == ["kv_cache_pressure"]
    for state in (State.STOPPED, State.STARTING):
        gone = watched.view(record(state=state), NOW, selected=True, load="", around=Around())
        assert gone.conditions == ()
    watched.close()


def test_nothing_is_said_of_a_server_without_a_history(tmp_path: Path) -> None:
    watched = WatchedServer(tmp_path, charts=True)
    assert watched.view(record(), NOW, selected=True, load="", around=Around()).conditions == ()


def test_health_503_is_a_dead_engine(tmp_path: Path) -> None:
    watched = WatchedServer(tmp_path, charts=True)
    dead = record(state=State.UNRESPONSIVE, reason="/health on port 1: answer 503, 3 times in a row")
    (condition,) = watched.view(dead, NOW, selected=False, load="", around=Around()).conditions
    assert condition.code == "engine_dead"
    assert condition.since == NOW - 300


def judged(gpu: Gpu, around: Around, *, flags: Any = None) -> dict[str, Any]:
    """What is found of a server under pressure whose GPU is looked at for a minute."""
    judge = Judge("chat")
    for second in range(120):
        judge.append(sample(NOW - 120 + second, usage=0.9), 1)
        judge.look(Host(gpus=(gpu,)), (0,), NOW - 120 + second)
    details = Details(preset="chatbot", model="Qwen/Qwen3-8B-AWQ", flags=flags or {}, objectives=GOALS, gpus=(0,))
    return {one.code: one for one in judge.conditions(record(), details, around, NOW)}


CARD = Gpu(index=0, name="NVIDIA L40S", memory_gib=45.0, free_gib=6.0, used_gib=39.0, used_by=(), utilization=90.0)


def test_remedies_are_those_that_the_gpu_can_do_and_the_tenants_leave() -> None:
    def offered(around: Around, gpu: Gpu = CARD) -> list[dict[str, Any]]:
        found = judged(gpu, around, flags={"gpu-memory-utilization": 0.8})
        return [dict(remedy.changes.set) for remedy in found["kv_cache_pressure"].remedies]

    more = {"gpu-memory-utilization": 0.83}
    assert offered(Around())[:2] == [{"kv-cache-dtype": "fp8"}, more]
    assert more not in offered(Around(reserves=(Share(0, gib=5.0),)))
    assert more not in offered(Around(shares=(Share(0, gib=1.0),)))
    assert {"kv-cache-dtype": "fp8"} not in offered(Around(), replace(CARD, name="Tesla T4"))


def test_a_simulated_server_has_the_gpu_that_it_simulates() -> None:
    def offered(**environment: str) -> list[dict[str, Any]]:
        judge = Judge("chat")
        for second in range(120):
            judge.append(sample(NOW - 120 + second, usage=0.9), 1)
        simulated = Engine(EngineKind.SIMULATED, (), "0.33.0", "simulated", "")
        details = Details(model="Qwen/Qwen3-8B", engine=simulated, environment=environment, objectives=GOALS)
        (found,) = judge.conditions(record(), details, Around(), NOW)
        return [dict(remedy.changes.set) for remedy in found.remedies]

    fp8_cache, fp8_weights = {"kv-cache-dtype": "fp8"}, {"quantization": "fp8"}
    assert offered()[0] == fp8_cache  # an A6000, which does not compute in FP8
    assert offered(SIMULATED_GPU="H100 80GB")[:2] == [fp8_weights, fp8_cache]
    assert fp8_cache not in offered(SIMULATED_GPU="Tesla T4")


def test_the_reserve_comes_from_the_settings() -> None:
    assert "gpu_memory_below_reserve" in judged(CARD, Around(reserves=(Share(0, fraction=0.2),)))
    assert "gpu_memory_below_reserve" not in judged(CARD, Around(reserves=(Share(0, fraction=0.1),)))


def test_nothing_is_concluded_from_the_gpus_of_a_recorded_host() -> None:
    source = GpuSource(Path("4xa6000"))
    assert source.host() is not None
    assert Around(source).host is None


def hot_since(at: float, until: float = NOW) -> list[str]:
    """Lines of the file of looks: GPU 0 is too hot from a moment on."""
    lines = []
    for seen in range(int(NOW) - 600, int(until), 5):
        gpu = {"index": 0, "name": "NVIDIA L40S", "utilization": 90, "throttle": ["too hot (hardware)"][: seen >= at]}
        lines.append(json.dumps({"at": float(seen), "gpus": [gpu], "links": []}, separators=(",", ":")))
    return lines


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """A server's folder within a state folder, and ten minutes in which it served well."""
    folder = tmp_path / "servers" / "chat"
    folder.mkdir(parents=True)
    writer = Writer(folder / HISTORY)
    for second in range(0, 600, 2):
        writer.append(sample(NOW - 600 + second))
    writer.close()
    return folder


@pytest.mark.parametrize("charts", [False, True], ids=["command", "console"])
def test_what_recorders_saw_of_the_gpus_is_known_from_the_first_look_on(served: Path, charts: bool) -> None:
    def found(*lines: str, gpus: GpuSource | None = None, board: SharedBoard | None = None) -> dict[str, float]:
        (served.parents[1] / GPU_LOOKS).write_text("\n".join(lines))
        watched = WatchedServer(served, charts=charts)
        view = watched.view(record(), NOW, selected=True, load="", around=Around(gpus, board=board))
        watched.close()
        return {one.code: one.since for one in view.conditions}

    assert "gpu_throttled" not in found()
    told = found(*hot_since(NOW - 300), "", '{"at":', "no json")
    assert abs(told["gpu_throttled"] - (NOW - 300)) <= 10, "since when, though nobody else was there to see"
    assert "gpu_throttled" not in found(*hot_since(NOW - 300, until=NOW - 60)), "nobody has looked for a minute"
    assert "gpu_throttled" not in found(*hot_since(NOW - 300), gpus=GpuSource(Path("4xa6000")))
    board = SharedBoard(served, watched=False, read_only=True)
    claim = Claim((0,), NOW - 200, time.time() + 3600, "training", uid=os.getuid() + 1, user="anna")
    board.latest = lambda: Board(served, NOW, (claim,))  # type: ignore[method-assign]
    assert abs(found(*hot_since(NOW), board=board)["gpu_claimed"] - (NOW - 200)) <= 10


def test_gpus_as_they_were_before_the_driver_hung_say_nothing_of_now() -> None:
    judge = Judge("chat")
    hot = replace(CARD, throttle=("too hot (hardware)",))
    for second in range(120):
        judge.append(sample(NOW - 120 + second), 1)
        judge.look(Host(gpus=(hot,), problem="driver not answering since 12:00:00"), (0,), NOW - 120 + second)
    found = judge.conditions(record(), Details(objectives=GOALS, gpus=(0,)), Around(), NOW)
    assert [one.code for one in found] == ["healthy"]


def test_the_slowest_link_of_several_gpus() -> None:
    links = (Link(0, 1, "NV4"), Link(0, 2, "SYS"), Link(1, 2, "PHB"))
    host = Host(gpus=tuple(Gpu(index=index) for index in range(4)), links=links)
    assert slowest_link(host, (0, 1)) == "NV4"
    assert slowest_link(host, (0, 1, 2)) == "SYS"
    assert slowest_link(host, (0, 1, 3)) == ""
    assert slowest_link(host, (0,)) == ""


Answering = Callable[..., SimpleNamespace]


@pytest.fixture
def answering() -> Iterator[Answering]:
    """``answering(status)`` is a server on a port of its own; with 0 it answers when its event is set."""
    servers = []

    def start(status: int) -> SimpleNamespace:
        seen = SimpleNamespace(requests=[], release=threading.Event())

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                seen.requests.append((self.path, self.headers, self.rfile.read(int(self.headers["content-length"]))))
                if not status:
                    seen.release.wait(20)
                self.send_response(status or 200)
                self.end_headers()

            def log_message(self, *words: object) -> None:
                """Quiet."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append((server, seen))
        seen.port = server.server_address[1]
        return seen

    yield start
    for server, seen in servers:
        seen.release.set()
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(("status", "silent"), [(200, 0.0), (401, None), (404, None), (500, None)])
def test_an_answer_counts_only_when_it_comes_from_the_engine(answering: Answering, status: int, silent: Any) -> None:
    seen = answering(status)
    request = OneToken()
    assert request.silent_seconds is None
    request.ask("0.0.0.0", seen.port, "m")
    request.wait(10)
    assert request.silent_seconds == silent


def test_one_token_is_asked_for_once_a_minute_with_the_key(answering: Answering, monkeypatch: Any) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    seen = answering(200)
    request = OneToken()
    for _ in range(3):
        request.ask("127.0.0.1", seen.port, "m")
        request.wait(10)
        request.forget()
    ((path, headers, body),) = seen.requests
    assert path == "/v1/completions"
    assert headers["authorization"] == "Bearer secret"
    assert b'"max_tokens": 1' in body


def test_a_request_without_an_answer_is_silence_that_grows(answering: Answering, monkeypatch: Any) -> None:
    monkeypatch.setattr(one_token, "DEADLINE_SECONDS", 0.2)
    seen = answering(0)
    request = OneToken()
    request.ask("127.0.0.1", seen.port, "m")
    request.wait(10)
    first = request.silent_seconds
    assert first is not None
    assert 0.2 <= first < request.silent_seconds  # type: ignore[operator]
    request.forget()
    assert request.silent_seconds is None


def test_nobody_is_asked_where_nothing_listens() -> None:
    request = OneToken()
    request.ask("127.0.0.1", 1, "m")
    request.wait(10)
    assert request.silent_seconds is None
    assert "refused" in request.refused


def test_a_key_that_no_header_can_hold_is_said(answering: Answering, monkeypatch: Any) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sec\nret")
    request = OneToken()
    request.ask("127.0.0.1", answering(200).port, "m")
    request.wait(10)
    assert request.silent_seconds is None
    assert request.refused.startswith("it could not be sent: VLLM_API_KEY")


def silent(judge: Judge, seconds: int = 120) -> None:
    """Requests run, and nothing moves."""
    for second in range(seconds):
        judge.append(sample(NOW - seconds + second, tokens=5000.0), 1)


def test_a_hang_is_named_only_when_the_request_confirms_it(answering: Answering, monkeypatch: Any) -> None:
    monkeypatch.setattr("vllm_console.fleet.judging.HUNG_AFTER_SECONDS", 0.3)
    monkeypatch.setattr("vllm_console.diagnosis.conditions.engine.HUNG_AFTER_SECONDS", 0.3)
    hung, busy = answering(0), answering(200)
    for seen, expected in ((hung, ["engine_hung"]), (busy, [])):
        judge = Judge("chat")
        silent(judge)
        found = judge.conditions(record(seen.port), Details(objectives=GOALS), Around(), NOW, wait=True)
        assert [one.code for one in found] == expected
        assert len(seen.requests) == 1


def test_one_engine_that_hangs_is_named_without_a_request_that_another_would_answer(answering: Answering) -> None:
    def in_part(stands_still: float) -> Judge:
        """Engine 1 stops after so many seconds of three minutes; the others go on."""
        judge = Judge("chat")
        for second in range(180):
            at = NOW - 180 + second
            moves, stopped = sample(at).engines["0"], sample(NOW - 180 + min(second, stands_still)).engines["0"]
            judge.append(Sample(at, {"0": moves, "1": stopped, "2": moves}, 50_000, "m"), 1)
        return judge

    seen = answering(200)
    (found,) = in_part(60).conditions(record(seen.port), Details(objectives=GOALS), Around(), NOW, wait=True)
    assert (found.code, found.severity) == ("engine_hung", Severity.WARNING)
    assert (
        found.symptom
        == "Part of it seems to hang: requests run on engine 1, and no token has come for 2m00s from there."
    )
    assert seen.requests == []
    well = in_part(150).conditions(record(seen.port), Details(objectives=GOALS), Around(), NOW, wait=True)
    assert [one.code for one in well] == ["healthy"], "half a minute may be one long step"


def test_a_server_that_moves_and_a_read_only_console_ask_nothing(answering: Answering) -> None:
    seen = answering(200)
    judge = Judge("chat")
    silent(judge)
    (found,) = judge.conditions(record(seen.port), Details(), Around(may_ask=False), NOW, wait=True)
    assert (found.code, found.severity) == ("engine_hung", Severity.WARNING)
    assert found.cause == ("Not confirmed by a request for one token, which would tell: read-only sends none.")
    moving = Judge("chat")
    for second in range(120):
        moving.append(sample(NOW - 120 + second), 1)
    found = moving.conditions(record(seen.port), Details(objectives=GOALS), Around(), NOW, wait=True)
    assert [one.code for one in found] == ["healthy"]
    assert seen.requests == []


def test_reserves_in_the_config_file(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[reserve]\n0 = "4 GiB"\n1 = "10 %"\n')
    assert gpu_reserves(read_settings(path)) == (Share(0, gib=4.0), Share(1, fraction=0.1))
    assert gpu_reserves(Config()) == ()
    for line in ('0 = "much"', 'first = "4 GiB"'):
        path.write_text(f"[reserve]\n{line}\n")
        with pytest.raises(ConfigError, match="reserve"):
            read_settings(path)
