"""HTTP responses: which count, how many between two samples, and those without a valid key."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from vllm_console.metrics.parse import Parser, parse_metrics
from vllm_console.metrics.sample import Responses, Sample
from vllm_console.metrics.unauthorized import UnauthorizedCounter
from vllm_console.metrics.window import format_unserved, responses_between, window_document
from vllm_console.metrics.window import window as window_of

# As written by vLLM 0.32 after a wrong model name, too long prompts, a wrong key and an unknown route.
BODY = """\
vllm:num_requests_running{engine="0",model_name="m"} 0.0
# HELP http_requests_total Total number of requests by method, status and handler.
# TYPE http_requests_total counter
http_requests_total{handler="/v1/models",method="GET",status="4xx"} 2.0
http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 20.0
http_requests_total{handler="/v1/chat/completions",method="POST",status="4xx"} 3.0
http_requests_total{handler="/v1/completions",method="POST",status="4xx"} 4.0
http_requests_total{handler="/v1/completions",method="POST",status="5xx"} 1.0
http_requests_total{handler="/tokenize",method="POST",status="4xx"} 9.0
http_requests_total{handler="none",method="POST",status="4xx"} 50.0
http_requests_created{handler="/v1/completions",method="POST",status="4xx"} 1.795685346303099e+09
"""


def access(status: str, route: str = "/v1/completions", method: str = "POST", port: int = 47514) -> str:
    return f'INFO:     127.0.0.1:{port} - "{method} {route} HTTP/1.1" {status}\n'


def test_inference_requests_are_counted() -> None:
    assert parse_metrics(BODY, 1.0).responses == Responses(20.0, 7.0, 1.0)


@pytest.mark.parametrize(
    "route", ["/cohere/v2/chat", "/generative_scoring", "/invocations", "/v1/decisions", "/v1/systemone"]
)
def test_every_route_that_makes_the_model_compute_counts(route: str, tmp_path: Path) -> None:
    assert parse_metrics(BODY.replace("/v1/models", route).replace("GET", "POST"), 1.0).responses == Responses(20, 9, 1)
    log = tmp_path / "server.log"
    log.write_text("")
    counter = UnauthorizedCounter(log)
    log.write_text(access("401 Unauthorized", route))
    assert counter.count() == 1
    counter.close()


def test_series_that_appears_later_counts() -> None:
    parser = Parser()
    before = parser.parse(BODY.replace('"5xx"', '"3xx"'), 1.0)
    assert before.responses == Responses(20.0, 7.0, 0.0)
    assert parser.parse(BODY, 2.0).responses == Responses(20.0, 7.0, 1.0)


@pytest.mark.parametrize("body", [BODY.partition("\n")[0] + "\n", BODY.partition("\n")[2]])
def test_responses_are_unknown_without_requests_or_engines(body: str) -> None:
    assert parse_metrics(body, 1.0).responses is None


def answered(responses: Responses | None, at: float = 0.0) -> Sample:
    return replace(parse_metrics(BODY, at), responses=responses)


@pytest.mark.parametrize(
    ("before", "after", "between"),
    [
        (Responses(5.0, 1.0, 0.0), Responses(9.0, 4.0, 2.0), Responses(4.0, 3.0, 2.0)),
        (Responses(5.0, 1.0), Responses(2.0, 1.0), Responses(2.0, 0.0)),  # counted from zero
        (None, Responses(9.0, 4.0), None),
        (Responses(9.0, 4.0), None, None),
        (Responses(5.0, 1.0, 0.0, 7.0), Responses(6.0, 1.0, 0.0, 9.0), Responses(1.0, 0.0, 0.0, 2.0)),
        (Responses(5.0, 1.0, 0.0, 7.0), Responses(6.0, 1.0, 0.0, 2.0), Responses(1.0, 0.0, 0.0, 2.0)),  # new recorder
        (Responses(5.0, 1.0, 0.0), Responses(6.0, 1.0, 0.0, 9.0), Responses(1.0, 0.0, 0.0)),
    ],
)
def test_responses_between_two_samples(
    before: Responses | None, after: Responses | None, between: Responses | None
) -> None:
    assert responses_between(answered(before), answered(after)) == between


def test_window_reports_unserved_requests() -> None:
    found = window_of(answered(Responses()), answered(Responses(120.0, 100.0, 2.0, None), 10.0))
    assert format_unserved(found.responses) == "100 of 222 requests refused (4xx), 2 failed (5xx)"
    assert window_document(found)["responses"] == {"ok": 120, "refused": 100, "failed": 2, "unauthorized": None}
    assert format_unserved(Responses(120.0)) == format_unserved(None) == ""
    assert format_unserved(Responses(9.0, unauthorized=1.0)) == "1 of 10 requests refused (4xx)"


def test_unauthorized_requests_are_counted_over_rotations(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(access("401 Unauthorized"))  # of the previous run
    counter = UnauthorizedCounter(log)
    assert counter.count() == 0
    with log.open("a") as file:
        file.write(access("401 Unauthorized") + access("200 OK") + access("401 Unauthorized", "/v1/models", "GET"))
        file.write(f"(APIServer pid=26315) {access('401 Unauthorized', '/v1/chat/completions?a=b')}")
        file.write(f"Received request: prompt='{access('401 Unauthorized').strip()}'\n")
        file.write(access("401 Unauthorized").rstrip("\n"))
    assert counter.count() == 2
    with log.open("a") as file:
        file.write("\n")  # the end of a line that was half written
    assert counter.count() == 3
    with log.open("a") as file:
        file.write(access("401 Unauthorized"))
    log.rename(tmp_path / "server.log.1")
    assert counter.count() == 4  # before its successor exists
    log.write_text(access("401 Unauthorized") * 2)
    assert counter.count() == 6
    os.truncate(log, 0)
    assert counter.count() == 6
    log.write_text(access("401 Unauthorized"))
    assert counter.count() == 7
    counter.close()


def test_missing_or_unreadable_log_is_not_an_error(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    counter = UnauthorizedCounter(log)
    assert counter.count() == 0
    log.write_text(access("401 Unauthorized"))
    assert (counter.count(), counter.count()) == (0, 1)
    log.unlink()
    log.mkdir()
    assert counter.count() == 1
