"""A response's event stream is read correctly however its bytes are split."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_console.load.client import StreamedAnswer
from vllm_console.load.events import AnswerError, message_of
from vllm_console.load.report import Tally


def token(finish: str | None = None) -> bytes:
    return event({"id": "c", "choices": [{"index": 0, "text": "", "finish_reason": finish}], "usage": None})


def usage(tokens: int) -> bytes:
    return event({"id": "c", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": tokens}})


def event(document: object) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
WHOLE = token() + token() + token("length") + usage(3) + DONE


def test_first_token_gaps_and_tokens() -> None:
    tally = Tally()
    answer = StreamedAnswer(tally, 10.0)
    for at, data in ((10.5, token()), (10.6, token()), (10.9, token("length") + usage(3) + DONE)):
        answer.feed(data, at)
    answer.end()
    assert tally.ttft.latency().p50 == pytest.approx(0.5)
    assert tally.itl.count == 2
    assert tally.itl.sum == pytest.approx(0.4)
    assert tally.output_tokens == 3


@given(st.lists(st.integers(1, len(WHOLE) - 1), max_size=12))
@settings(deadline=None)
def test_cuts_between_bytes_do_not_matter(cuts: list[int]) -> None:
    tally = Tally()
    answer = StreamedAnswer(tally)
    edges = [0, *sorted(cuts), len(WHOLE)]
    for at, (start, end) in enumerate(pairwise(edges)):
        answer.feed(WHOLE[start:end], float(at))
    answer.end()
    assert (tally.ttft.count, tally.itl.count, tally.output_tokens) == (1, 2, 3)


def test_carriage_returns_and_comments_are_parsed() -> None:
    tally = Tally()
    answer = StreamedAnswer(tally)
    answer.feed(b": ping\r\n\r\n" + WHOLE.replace(b"\n", b"\r\n"), 1.0)
    answer.end()
    assert tally.output_tokens == 3


def test_event_with_several_tokens_counts_by_usage() -> None:
    tally = Tally()
    answer = StreamedAnswer(tally)
    answer.feed(token() + token("length") + usage(8) + DONE, 1.0)
    answer.end()
    assert tally.output_tokens == 8


@pytest.mark.parametrize("last", [b"", event({"choices": [], "usage": {"prompt_tokens": 9}})])
def test_without_a_number_of_tokens_every_event_counts_as_one(last: bytes) -> None:
    tally = Tally()
    answer = StreamedAnswer(tally)
    answer.feed(token() + token("length") + last + DONE, 1.0)
    answer.end()
    assert tally.output_tokens == 2


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (token(), "ended before its last token"),
        (DONE, "ended before its last token"),
        (token() + token("abort") + DONE, "aborted"),
        (token() + token("error") + DONE, "aborted"),
    ],
)
def test_truncated_answer_is_a_failure(data: bytes, reason: str) -> None:
    answer = StreamedAnswer(Tally())
    answer.feed(data, 1.0)
    with pytest.raises(AnswerError, match=reason):
        answer.end()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"data: <html>\n\n", "not an event stream"),
        (event({"error": {"message": "EngineCore died", "code": 500}}), "EngineCore died"),
        (b"x" * 2_000_000, "1 MiB"),
    ],
)
def test_invalid_answer_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(AnswerError, match=reason):
        StreamedAnswer(Tally()).feed(data, 1.0)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (b'{"error": {"message": "too\\n long"}}', "too long"),
        (b'{"detail": "not found"}', "not found"),
        (b'{"error": "Unauthorized"}', "Unauthorized"),
        (b"\x1b[31mbad\x1b[0m gateway", "bad gateway"),
        (b"x " * 300, f"{'x ' * 199}x…"),
    ],
)
def test_error_messages_are_one_plain_line(error: bytes, message: str) -> None:
    assert message_of(error) == message
