"""Many refused requests are reported with their number, reason and, if possible, a fix."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from vllm_console.diagnosis.finding import Finding
from vllm_console.diagnosis.live.findings import findings
from vllm_console.diagnosis.live.rule import Evidence
from vllm_console.history.frames import Frame
from vllm_console.logs.refusals import Refusals
from vllm_console.metrics.sample import EngineSample, Responses

NOW = 100_000.0
UNKNOWN = Refusals()
NOT_FOUND = (("404 Not Found", 40),)
BAD = (("400 Bad Request", 40),)


def frames(answers: Sequence[Responses | None], kv_cache_tokens: int = 100_000) -> tuple[Frame, ...]:
    """Frames of ten seconds until now; tokens are generated, so the server is healthy except for refused requests."""
    served = EngineSample(generation_tokens_total=100.0, requests_running=1.0, requests_waiting=0.0)
    begin = NOW - 10 * len(answers)
    return tuple(
        Frame(1, begin + 10 * at, begin + 10 * at + 10, served, kv_cache_tokens=kv_cache_tokens, responses=one)
        for at, one in enumerate(answers)
    )


def named(answers: Sequence[Responses | None], refusals: Refusals = UNKNOWN, **more: object) -> dict[str, Finding]:
    evidence = Evidence(NOW, NOW - 3600, frames(answers), refusals=refusals, **more)  # type: ignore[arg-type]
    return {one.code: one for one in findings(evidence)}


def refused(refusals: Refusals, **more: object) -> Finding:
    return named([Responses(10.0, 10.0)] * 12, refusals, **more)["requests_refused"]


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ([Responses(10.0)] * 12, False),
        ([Responses(10.0, 10.0)] * 12, True),
        ([Responses(0.0, 10.0)] * 12, True),
        ([Responses(10.0, unauthorized=10.0)] * 12, True),
        ([Responses(1000.0, 10.0)] * 12, False),  # one percent
        ([Responses(1.0, 1.0), *[Responses(0.0)] * 5] * 2, False),  # too few to tell
        ([None] * 12, False),
        ([*[Responses(10.0, 10.0)] * 6, *[Responses(10.0)] * 6], False),  # none in the last minute
    ],
)
def test_refused_share_of_the_requests_in_a_minute(answers: list[Responses | None], found: bool) -> None:
    codes = named(answers)
    assert ("requests_refused" in codes) == found
    assert ("healthy" in codes) == (not found)


def test_refused_requests_are_counted() -> None:
    finding = refused(UNKNOWN)
    assert finding.symptom == "60 of 120 requests in the last minute were refused (4xx)."
    assert (finding.measures[0].value, finding.measures[0].limit) == ("50% (60 of 120)", "5%")
    assert "unknown here" in finding.cause
    assert [fix.changes.empty for fix in finding.fixes] == [True]


@pytest.mark.parametrize("name", ["gpt-4", "my model", "--trust-remote-code"])
def test_unserved_model_name_is_reported_but_not_added_to_the_server(name: str) -> None:
    finding = refused(Refusals(NOT_FOUND, ((name, 40),)), model_name="org/model")
    assert name in finding.cause
    assert "org/model" in finding.cause
    assert [fix.why for fix in finding.fixes] == ["Have these clients request org/model."]
    # vLLM would take "org/model gpt-4" as one name, and serve neither of the two.
    assert finding.fixes[0].changes.empty


def test_unlogged_name_is_most_likely_a_model() -> None:
    finding = refused(Refusals(NOT_FOUND), model_name="org/model")
    assert finding.cause.startswith("Most likely")
    assert [fix.changes.empty for fix in finding.fixes] == [True, True]
    assert "org/model" in finding.fixes[0].why
    assert "does not log why" in refused(Refusals(NOT_FOUND)).cause, "nothing is known of its name"


def test_missing_key_is_not_a_flag_problem() -> None:
    finding = refused(Refusals((("401 Unauthorized", 40),)))
    assert "API key" in finding.cause
    assert [fix.changes.empty for fix in finding.fixes] == [True]


@pytest.mark.parametrize(
    ("longest", "most", "length"),
    [
        (5000, 32_768, 8192),
        (None, 32_768, 8192),
        (5000, 6000, 6000),  # the model's maximum
        (50_000, 32_768, None),  # too long in any case
        (5000, 4096, None),
        (5000, None, None),  # nothing is known about the model
    ],
)
def test_longer_context_is_offered_where_it_fits(longest: int | None, most: int | None, length: int | None) -> None:
    finding = refused(Refusals(BAD, (), True, longest), max_model_len=4096, max_context=most)
    assert "max-model-len" in finding.cause
    offered = [fix.changes.set["max-model-len"] for fix in finding.fixes if fix.changes.set]
    assert offered == ([length] if length is not None else [])


@pytest.mark.parametrize(("cache", "length"), [(60_000, 56_992), (52_000, None)])
def test_longest_context_leaves_some_of_the_kv_cache(cache: int, length: int | None) -> None:
    """The next start may measure a little less memory, and one block always stays empty."""
    evidence = Evidence(NOW, NOW - 3600, frames([Responses(10.0, 10.0)] * 12, cache), max_model_len=32_768,
                        max_context=131_072, refusals=Refusals(BAD, (), True, 50_000))  # fmt: skip
    (finding,) = [one for one in findings(evidence) if one.code == "requests_refused"]
    offered = [fix.changes.set["max-model-len"] for fix in finding.fixes if fix.changes.set]
    assert offered == ([length] if length is not None else [])


def test_context_above_the_kv_cache_is_not_offered() -> None:
    evidence = Evidence(NOW, NOW - 3600, frames([Responses(10.0, 10.0)] * 12, 4100), max_model_len=4096,
                        max_context=32_768, refusals=Refusals(BAD, (), True, 5000))  # fmt: skip
    (finding,) = [one for one in findings(evidence) if one.code == "requests_refused"]
    assert [fix.changes.empty for fix in finding.fixes] == [True]
    assert "4,100" in finding.fixes[0].why


@pytest.mark.parametrize(
    ("now", "limit"),
    [
        (7900, "The KV cache holds 8,000 tokens, enough for a context of 7,900. Send"),
        (4096, "The KV cache holds 8,000 tokens, enough for a context of 7,600. Send"),
        (9000, "The KV cache holds 8,000 tokens. Send"),
    ],
)
def test_cache_is_enough_for_the_present_context(now: int, limit: str) -> None:
    evidence = Evidence(NOW, NOW - 3600, frames([Responses(10.0, 10.0)] * 12, 8000), max_model_len=now,
                        max_context=131_072, refusals=Refusals(BAD, (), True, 50_000))  # fmt: skip
    (fix,) = next(one for one in findings(evidence) if one.code == "requests_refused").fixes
    assert fix.why.startswith(limit)


def test_no_flag_is_offered_without_a_logged_reason() -> None:
    finding = refused(Refusals(BAD), max_model_len=4096, max_context=32_768)
    assert finding.cause == "vLLM answers 400 Bad Request and does not log why."
    assert all(fix.changes.empty for fix in finding.fixes)
    assert "32,768" in finding.fixes[1].why
    assert len(refused(Refusals(BAD), max_model_len=4096, max_context=4096).fixes) == 1
