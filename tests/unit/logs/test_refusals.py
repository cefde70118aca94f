"""Why requests were refused, according to vLLM's log."""

from __future__ import annotations

from pathlib import Path

from vllm_console.logs.refusals import Refusals, read_refusals, refusals_in

# vLLM 0.32; in earlier releases, the message precedes its access line as well.
WRONG_MODEL = (
    "(APIServer pid=26315) ERROR 11-26 09:29:06 [serving.py:274] Error with model error=ErrorInfo(message='The model "
    "`gpt-4` does not exist. Valid aliases: <path>', type='NotFoundError', param='model', code=404)"
)
TOO_LONG = (
    "ValueError: This model's maximum context length is 512 tokens. However, you requested 600 tokens (500 in the "
    "messages, 100 in the completion). Please reduce the length of the messages or completion."
)


def access(status: str, route: str = "/v1/chat/completions", method: str = "POST") -> str:
    return f'INFO:     127.0.0.1:48356 - "{method} {route} HTTP/1.1" {status}'


def test_statuses_and_reasons_of_the_newest_requests() -> None:
    lines = [
        *[WRONG_MODEL.replace("gpt-4", "older"), access("404 Not Found")] * 5,
        *[WRONG_MODEL, access("404 Not Found"), access("200 OK")] * 3,
        TOO_LONG,
        access("400 Bad Request"),
        access("404 Not Found", "/robots.txt", "GET"),
        access("404 Not Found", "/v1/nothing"),
    ]
    found = refusals_in(lines, 4)
    assert found == Refusals((("404 Not Found", 3), ("400 Bad Request", 1)), (("gpt-4", 3),), True, 600)
    assert (found.share("404"), found.share("401")) == (0.75, 0.0)


def test_message_after_the_last_request_is_ignored() -> None:
    assert refusals_in([access("400 Bad Request"), WRONG_MODEL], 5) == Refusals((("400 Bad Request", 1),))
    assert refusals_in([WRONG_MODEL], 5) == Refusals()


def test_missing_log_has_no_refusals(tmp_path: Path) -> None:
    assert read_refusals(tmp_path / "server.log", 5) == Refusals()
