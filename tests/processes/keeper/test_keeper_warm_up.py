"""A server is ready once it has completed a request; a rejected request is not a failure."""

from __future__ import annotations

import json
import os
import select
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fakes.keeper_bench import Bench
from vllm_launchers.http_connection import HttpConnection, HttpResponse
from vllm_launchers.keeper import health, server_client
from vllm_launchers.keeper.health import HealthTarget
from vllm_launchers.keeper.lifecycle import Event, WarmedUp
from vllm_launchers.keeper.records import (
    RestartMode,
    RestartPolicy,
    ServerRecord,
    State,
    WarmUp,
    WarmUpOutcome,
    WarmUpReport,
)
from vllm_launchers.listeners import Owner

ORDER, RESPONSE = WarmUp(), HttpConnection.response
MODELS = {"object": "list", "data": [{"id": "served", "max_model_len": 4096, "parent": None}]}
COMPLETION = {"choices": [{"index": 0, "text": " a b", "finish_reason": "length"}], "usage": {"completion_tokens": 2}}
ERROR = {"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "code": 500}}


@pytest.fixture(autouse=True)
def asked(tmp_path: Path) -> Path:
    """The file that records the server's requests."""
    return tmp_path / "asked.jsonl"


def launch(bench: Bench, asked: Path, answers: dict[str, Any], *, warm_up: WarmUp = ORDER, **fields: Any) -> None:
    known = {"GET /v1/models": [200, MODELS], "GET /metrics": [200, ""], **answers}
    options = ("--answers", json.dumps(known), "--requests", str(asked))
    bench.launch(bench.spec(*options, warm_up=warm_up, **fields))


def requests(asked: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in asked.read_text().splitlines()] if asked.exists() else []


def sent(asked: Path, to: str = "POST") -> list[dict[str, Any]]:
    return [json.loads(one["body"]) for one in requests(asked) if one["asked"].startswith(to)]


def outcome(record: ServerRecord) -> WarmUpOutcome | None:
    return record.current.warm_up.outcome if record.current.warm_up else None


def test_ready_requires_a_completion(bench: Bench, asked: Path) -> None:
    launch(bench, asked, {"POST /v1/completions": [200, COMPLETION]})
    record = bench.wait(State.READY)
    assert outcome(record) is WarmUpOutcome.COMPLETED
    (body,) = sent(asked)
    assert body["model"] == "served"
    assert len(body["prompt"].split()) >= 32, "a shorter first prompt kills vLLM 0.32 on CPUs with AMX"
    report, current = record.current.warm_up, record.current
    assert report is not None
    assert report.seconds is not None
    assert current.ready_at is not None
    assert current.started_at <= report.at <= report.at + report.seconds <= current.ready_at + 1


def test_no_request_without_warm_up(bench: Bench, asked: Path) -> None:
    bench.ready(bench.spec("--requests", str(asked)))
    assert requests(asked) == []


def test_server_failing_every_request_fails(bench: Bench, asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch(bench, asked, {"POST /v1/completions": [500, ERROR]})
    record = bench.wait(State.FAILED)
    assert outcome(record) is WarmUpOutcome.FAILED
    assert record.current.ready_at is None
    assert "first request failed" in record.reason
    assert "EngineCore encountered an issue" in record.reason
    assert "stopped as requested" not in record.reason
    assert record.exit is not None
    assert not record.exit.requested
    assert len(sent(asked)) == health.ATTEMPTS


def test_warm_up_failure_is_retried_by_restart_policy(bench: Bench, asked: Path) -> None:
    policy = RestartPolicy(RestartMode.ON_FAILURE, limit=1, backoff_seconds=0.05)
    launch(bench, asked, {"POST /v1/completions": [503, ERROR]}, restart=policy)
    record = bench.until(lambda one: one.state is State.FAILED and one.next_attempt_at is None)
    assert record.attempt == 1
    assert "gave up after 1 automatic restart" in record.reason


def test_server_dies_on_first_request(bench: Bench, asked: Path) -> None:
    launch(bench, asked, {"POST /v1/completions": [0, {}]})
    record = bench.wait(State.FAILED)
    assert outcome(record) is WarmUpOutcome.FAILED
    assert "on the first request it exited with code 7" in record.reason


def test_rejected_request_is_not_a_failure(bench: Bench, asked: Path) -> None:
    launch(bench, asked, {f"POST {path}": [400, {"error": {"message": "no"}}] for path in ("/v1/completions",)})
    record = bench.wait(State.READY)
    assert outcome(record) is WarmUpOutcome.REFUSED
    assert record.current.warm_up is not None
    assert "400 no" in record.current.warm_up.detail
    words, tokens = sent(asked)
    assert isinstance(words["prompt"], str)
    assert len(tokens["prompt"]) == 32, "token ids are used without a tokenizer"


@pytest.mark.parametrize(
    ("answers", "detail"),
    [
        ({f"POST {path}": [404, {}] for path in ("/v1/completions", *health._POOLING)}, "no endpoint for text"),
        ({"GET /v1/models": [401, {"error": "Unauthorized"}]}, "401 Unauthorized"),
    ],
    ids=["a transcription model", "another key"],
)
def test_rejected_request_on_ray_is_not_fatal(bench: Bench, asked: Path, answers: dict[str, Any], detail: str) -> None:
    launch(bench, asked, answers, ray=True)
    record = bench.wait(State.READY)
    assert outcome(record) is WarmUpOutcome.REFUSED
    assert record.current.warm_up is not None
    assert detail in record.current.warm_up.detail


def test_embedding_model_gets_embedding_request(bench: Bench, asked: Path) -> None:
    answers = {
        "POST /v1/completions": [404, {"detail": "Not Found"}],
        "POST /v1/embeddings": [200, {"data": [{"embedding": [0.1]}]}],
    }
    launch(bench, asked, answers)
    assert outcome(bench.wait(State.READY)) is WarmUpOutcome.COMPLETED
    assert "input" in sent(asked, "POST /v1/embeddings")[0]
    assert len(sent(asked, "POST /v1/completions")) == 1


def test_model_without_text_endpoint(bench: Bench, asked: Path) -> None:
    paths = ("/v1/completions", "/v1/embeddings", "/pooling", "/classify")
    launch(bench, asked, {f"POST {path}": [404, {"detail": "Not Found"}] for path in paths})
    record = bench.wait(State.READY)
    assert record.current.warm_up is not None
    assert record.current.warm_up.detail == "it has no endpoint for text"
    assert len(sent(asked)) == len(paths)


def test_each_engine_gets_its_own_request(bench: Bench, asked: Path) -> None:
    launch(bench, asked, {"POST /v1/completions": [200, COMPLETION]}, warm_up=WarmUp(engines=3))
    assert outcome(bench.wait(State.READY)) is WarmUpOutcome.COMPLETED
    ranks = [
        [line for line in one["headers"] if "rank" in line]
        for one in requests(asked)
        if one["asked"].startswith("POST")
    ]
    assert ranks == [[f"X-data-parallel-rank: {rank}"] for rank in range(3)], "without a rank any engine may get it"


def test_single_engine_gets_no_rank_header(api: Callable[..., Api]) -> None:
    server = api(Engines())
    assert server.warm_up().outcome is WarmUpOutcome.COMPLETED
    assert {rank for _, rank in server.asked} == {None}


def test_api_key_is_sent_to_own_server(bench: Bench, asked: Path) -> None:
    order = WarmUp(api_key="VLLM_API_KEY")
    known = {"GET /v1/models": [200, MODELS], "GET /metrics": [200, ""], "POST /v1/completions": [200, COMPLETION]}
    options = ("--answers", json.dumps(known), "--requests", str(asked))
    spec = bench.spec(*options, warm_up=order, secret_names=("VLLM_API_KEY",))
    bench.launch(spec, secrets={"VLLM_API_KEY": "sesame"})
    bench.wait(State.READY)
    keys = {one["asked"]: "Authorization: Bearer sesame" in one["headers"] for one in requests(asked)}
    assert keys == {"GET /metrics": False, "GET /v1/models": True, "POST /v1/completions": True}
    assert "sesame" not in (bench.root / "servers" / "one" / "record.json").read_text()


def test_server_that_already_served_gets_no_warm_up(bench: Bench, asked: Path) -> None:
    """For example one that served while it had no keeper."""
    launch(bench, asked, {"GET /metrics": [200, 'vllm:request_success_total{finished_reason="stop"} 3.0\n']})
    assert outcome(bench.wait(State.READY)) is WarmUpOutcome.SKIPPED
    assert sent(asked) == []


def test_adopting_keeper_sends_no_warm_up_to_serving_server(bench: Bench, asked: Path) -> None:
    launch(bench, asked, {"POST /v1/completions": [200, COMPLETION]})
    bench.orphaned(bench.wait(State.READY))
    assert bench.adopt() == ["one"]
    assert bench.until(lambda record: record.adopted).state is State.READY
    assert len(sent(asked)) == 1


def test_stop_does_not_wait_for_warm_up(bench: Bench, asked: Path) -> None:
    """The request stays unanswered; a stop aborts it."""
    launch(bench, asked, {"POST /v1/completions": [-1, {}]})
    bench.until(lambda one: outcome(one) is WarmUpOutcome.UNDER_WAY and sent(asked))
    assert bench.read().state is State.STARTING
    record = bench.stopped()
    assert record.reason.startswith("stopped as requested")


@pytest.mark.parametrize(
    ("length", "tokens", "answer"), [(4096, None, 2), (200, 32, 2), (33, 31, 2), (16, 14, 2), (2, 1, 1)]
)
def test_warm_up_fits_into_context(length: int, tokens: int | None, answer: int) -> None:
    path, body = health.requests({"id": "m", "max_model_len": length})[0]
    assert path == "/v1/completions"
    assert (None if isinstance(body["prompt"], str) else len(body["prompt"])) == tokens
    assert body["max_tokens"] == answer
    assert tokens is None or tokens + answer <= max(length, 2)


def test_warm_up_uses_base_model_not_adapter() -> None:
    data = [{"id": "lora", "parent": "base"}, {"id": "base", "parent": None}]
    found = server_client.base_model({"data": data})
    assert found is not None
    assert found["id"] == "base"
    assert server_client.base_model({"data": []}) is None
    assert server_client.base_model(None) is None


def test_aborted_completion_does_not_count() -> None:
    body = json.dumps({"choices": [{"text": "", "finish_reason": "abort"}]}).encode()
    assert health.judge_response("/v1/completions", server_client.Response(200, body))[0] is WarmUpOutcome.FAILED


class Api:
    """A server in this process.

    ``answers`` maps a path and a rank to status and content. With None, the response is withheld until the test ends,
    and `response` then times out immediately.
    """

    def __init__(self, answers: Callable[[str, str | None], tuple[int, object] | None]) -> None:
        api = self
        self.asked: list[tuple[str, str | None]] = []
        self.over = threading.Event()
        self.held = threading.Semaphore(0)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                rank = self.headers.get("X-data-parallel-rank")
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                api.asked.append((self.path, rank))
                if (answer := answers(self.path, rank)) is None:
                    api.held.release()
                    api.over.wait()
                    return
                content = answer[1] if isinstance(answer[1], str) else json.dumps(answer[1])
                self.send_response(answer[0])
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content.encode())

            do_POST = do_GET  # noqa: N815 (the name that http.server calls)

            def log_message(self, *_: object) -> None:
                """Silent."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def response(self, connection: HttpConnection) -> HttpResponse:
        """Replacement of `HttpConnection.response` that does not depend on a clock."""
        while not select.select([connection.sock], [], [], 0.01)[0]:
            if self.held.acquire(blocking=False):
                raise TimeoutError
        connection.deadline += 60
        return RESPONSE(connection)

    def warm_up(self, order: WarmUp = ORDER, **more: Any) -> WarmUpReport:
        """Run the warm-up and return its report."""
        owner, posted = Owner.of(os.getpid()), list[Event]()
        assert owner is not None
        health.WarmUpRun(HealthTarget(1, owner, "127.0.0.1", self.port, 0.0), order, "", posted.append, **more).run()
        (event,) = posted
        assert isinstance(event, WarmedUp)
        return event.report

    def close(self) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Api]]:
    monkeypatch.setattr(health, "PAUSE_SECONDS", 0.0)
    made: list[Api] = []

    def make(answers: Callable[[str, str | None], tuple[int, object] | None]) -> Api:
        made.append(Api(answers))
        monkeypatch.setattr(HttpConnection, "response", lambda connection: made[-1].response(connection))
        return made[-1]

    yield make
    for one in made:
        one.close()


class Engines:
    """Counts completions like vLLM's ``/metrics``; failures are set per rank."""

    def __init__(self, **bad: tuple[int, object]) -> None:
        self._bad, self._completed = bad, 0

    def __call__(self, path: str, rank: str | None) -> tuple[int, object]:
        if path == "/metrics":
            return 200, f'vllm:request_success_total{{engine="0",finished_reason="length"}} {self._completed}.0\n'
        if path == "/v1/models":
            return 200, MODELS
        status, content = self._bad.get(f"rank_{rank or 0}", (200, COMPLETION))
        self._completed += status == 200
        return status, content


ABORTED = {"choices": [{"index": 0, "text": "", "finish_reason": "abort"}]}


@pytest.mark.parametrize(("status", "content"), [(500, ERROR), (200, ABORTED)])
@pytest.mark.parametrize("bad", ["rank_0", "rank_1"])
def test_warm_up_count_does_not_make_failed_engine_ready(
    api: Callable[..., Api], bad: str, status: int, content: object
) -> None:
    server = api(Engines(**{bad: (status, content)}))
    report = server.warm_up(WarmUp(engines=2))
    assert report.outcome is WarmUpOutcome.FAILED
    assert server.asked.count(("/v1/models", None)) == health.ATTEMPTS


def test_adopting_keeper_ignores_warm_up_requests_of_previous_keeper(api: Callable[..., Api]) -> None:
    server = api(Engines(rank_1=(500, ERROR)))
    assert server.warm_up(WarmUp(engines=2)).outcome is WarmUpOutcome.FAILED
    assert server.warm_up(WarmUp(engines=2), begun=True).outcome is WarmUpOutcome.FAILED
    assert server.warm_up(WarmUp(engines=2)).outcome is WarmUpOutcome.SKIPPED, "like one that served before"


@pytest.mark.parametrize("slow", ["/metrics", "/v1/models"])
def test_late_api_response_is_inconclusive(api: Callable[..., Api], monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    engines = Engines()
    server = api(lambda path, rank: None if path == slow else engines(path, rank))
    report = server.warm_up()
    assert report.outcome is WarmUpOutcome.REFUSED
    assert report.detail.startswith(f"{slow}: no response within ")
    assert server.asked.count((slow, None)) == health.ATTEMPTS


def test_late_api_response_fails_on_ray(api: Callable[..., Api]) -> None:
    report = api(lambda path, rank: None).warm_up(ray=True)
    assert report.outcome is WarmUpOutcome.FAILED
    assert report.detail.startswith("/metrics: no response within ")


def test_late_api_is_retried(api: Callable[..., Api], monkeypatch: pytest.MonkeyPatch) -> None:
    engines, late = Engines(), ["/v1/models", "/metrics"]

    def answers(path: str, rank: str | None) -> tuple[int, object] | None:
        if path in late:
            late.remove(path)
            return None
        return engines(path, rank)

    assert api(answers).warm_up().outcome is WarmUpOutcome.COMPLETED
    assert late == []


def test_connection_timeout_is_inconclusive(api: Callable[..., Api], monkeypatch: pytest.MonkeyPatch) -> None:
    server, connect = api(Engines()), Owner.connect
    tried: list[int] = []

    def refused(owner: Owner, port: int, timeout: float) -> Any:
        tried.append(port)
        if len(tried) > 2:  # /metrics and /v1/models succeeded, so this is the connection for the completion
            raise TimeoutError("timed out")
        return connect(owner, port, timeout)

    monkeypatch.setattr(Owner, "connect", refused)
    report = server.warm_up()
    assert report.outcome is WarmUpOutcome.REFUSED
    assert "no response within" in report.detail
    assert len(tried) > 3


def test_unresponsive_engine_fails(api: Callable[..., Api], monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines()
    server = api(lambda path, rank: None if path == "/v1/completions" else engines(path, rank))
    monkeypatch.setattr(HttpConnection, "response", RESPONSE)
    report = server.warm_up(WarmUp(timeout_seconds=0.3))
    assert report.outcome is WarmUpOutcome.FAILED
    assert report.detail.startswith("/v1/completions: no response within ")
    assert server.asked.count(("/v1/completions", None)) == 1, "its time is up"


def test_slow_api_does_not_hide_earlier_failure(api: Callable[..., Api], monkeypatch: pytest.MonkeyPatch) -> None:
    engines, seen = Engines(rank_0=(500, ERROR)), list[str]()

    def answers(path: str, rank: str | None) -> tuple[int, object] | None:
        seen.append(path)
        return None if seen.count("/v1/models") > 1 else engines(path, rank)

    report = api(answers).warm_up()
    assert report.outcome is WarmUpOutcome.FAILED
    assert "EngineCore" in report.detail
