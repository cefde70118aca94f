"""A load over HTTP: sent as requested, bounded, refused where necessary, with failures distinguished."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from vllm_console.load import client
from vllm_console.load.client import LoadError, Sender
from vllm_console.load.report import Tally
from vllm_console.load.run import LoadProgress, run_load, run_load_sync
from vllm_console.load.shape import ANY_VOCABULARY, Exact
from vllm_launchers.errors import UsageError
from vllm_launchers.presets.model import Workload

if TYPE_CHECKING:
    from conftest import Stub
else:
    Stub = Any


async def test_every_request_is_sent_and_measured(stub: Stub, workload: Workload) -> None:
    stub.token_seconds = 0.001
    report = await run_load(stub.url, "tiny", workload, 20, 1)
    assert (report.sent, report.completed, report.failed, report.not_sent) == (20, 20, 0, 0)
    asked = sum(body["max_tokens"] for body in stub.bodies)
    assert report.output_tokens == asked
    assert report.ttft.count == report.e2e.count == 20
    assert report.itl.count == asked - 20
    assert report.e2e.sum >= report.ttft.sum + report.itl.sum - 1e-6


async def test_requests_have_the_format_that_vllm_expects(stub: Stub, workload: Workload) -> None:
    await run_load(stub.url, None, workload, 10, 0.5)
    body = stub.bodies[0]
    assert body["model"] == "tiny"
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert body["ignore_eos"] is True
    assert all(isinstance(token, int) for token in body["prompt"])
    assert all(len(body["prompt"]) + body["max_tokens"] <= 512 for body in stub.bodies)


async def test_exact_lengths_match_the_servers_counts(stub: Stub, workload: Workload) -> None:
    report = await run_load(stub.url, None, workload, 40, 0.5, exact=Exact(120, 7))
    assert {(len(body["prompt"]), body["max_tokens"]) for body in stub.bodies} == {(120, 7)}
    assert (report.prompt_tokens, report.output_tokens) == (20 * 120, 20 * 7)
    assert (report.other_prompt, report.other_output) == (0, 0)
    assert report.tpot.count == 20


async def test_answers_of_another_length_are_counted_and_reported(stub: Stub, workload: Workload) -> None:
    stub.most_tokens, stub.prompt_extra = 5, 1
    report = await run_load(stub.url, None, workload, 40, 0.5, exact=Exact(120, 7))
    assert (report.completed, report.other_prompt, report.other_output) == (20, 20, 20)
    assert "20 answers with a different length than requested" in report.summary()


async def test_exact_lengths_that_do_not_fit_are_refused_before_sending(stub: Stub, workload: Workload) -> None:
    with pytest.raises(LoadError, match="context of 512"):
        await run_load(stub.url, None, workload, 40, 0.5, exact=Exact(500, 13))
    assert stub.bodies == []


async def test_prompts_use_text_tokens_of_the_servers_tokenizer(stub: Stub, workload: Workload) -> None:
    stub.vocabulary = list(range(5000, 5100))
    await run_load(stub.url, None, workload, 40, 0.5)
    assert {token for body in stub.bodies for token in body["prompt"]} <= set(stub.vocabulary)
    assert stub.tokenized[0]["add_special_tokens"] is False


@pytest.mark.parametrize("vocabulary", [None, [1, 2, 3], "no list", [-4] * 99])
async def test_ordinary_ids_are_sent_without_a_useful_tokenizer(
    stub: Stub, workload: Workload, vocabulary: Any
) -> None:
    stub.vocabulary = vocabulary
    report = await run_load(stub.url, None, workload, 40, 0.5)
    assert report.completed == 20
    assert {token for body in stub.bodies for token in body["prompt"]} <= set(ANY_VOCABULARY)


async def test_closed_loop_keeps_the_requested_number_in_flight(stub: Stub, workload: Workload) -> None:
    stub.token_seconds = 0.005
    report = await run_load(stub.url, None, workload, None, 60, requests=30, max_in_flight=3, exact=Exact(20, 4))
    assert (report.sent, report.completed, report.not_sent, report.held_back) == (30, 30, 0, 0)
    assert stub.most_in_flight == 3
    assert report.duration_s < 60


async def test_closed_loop_ends_with_its_time(stub: Stub, workload: Workload) -> None:
    stub.token_seconds = 0.005
    report = await run_load(stub.url, None, workload, None, 0.4, max_in_flight=2, exact=Exact(20, 4))
    assert report.completed == report.sent > 2
    assert report.not_sent == 0


async def test_closed_loop_does_not_flood_a_server_that_refuses_all(stub: Stub, workload: Workload) -> None:
    stub.status, stub.error = 500, "no"
    report = await run_load(stub.url, None, workload, None, 0.5, max_in_flight=2)
    assert 0 < report.failed <= 2 * 6


async def test_closed_loop_ends_when_no_more_answers_arrive(stub: Stub, workload: Workload) -> None:
    stub.hang_after = 2
    report = await run_load(
        stub.url, None, workload, None, 1, requests=9, max_in_flight=2, exact=Exact(20, 5), grace_seconds=0.3
    )
    assert (report.sent, report.unfinished, report.not_sent) == (2, 2, 7)
    assert "no response for 0.3s" in report.failure


async def test_latency_counts_from_the_scheduled_arrival(stub: Stub, workload: Workload) -> None:
    stub.gate = asyncio.Event()
    load = asyncio.create_task(
        run_load(stub.url, None, workload, 1000, 1, requests=4, max_in_flight=1, exact=Exact(20, 1))
    )
    async with asyncio.timeout(20):
        while not stub.in_flight:
            await asyncio.sleep(0.01)
        held = time.perf_counter()
        await asyncio.sleep(0.3)
        held = time.perf_counter() - held
        stub.open_gate()
        report = await load
    assert report.completed == 4
    assert report.ttft.p50 is not None
    assert report.ttft.p50 >= held, "three of four were due at once and waited for the first"
    assert report.send_delay.p50 is not None
    assert report.send_delay.p50 >= held - 0.05
    assert report.e2e.sum >= report.ttft.sum


async def test_requests_never_sent_count_as_late(stub: Stub, workload: Workload) -> None:
    stub.hang = True
    report = await run_load(stub.url, None, workload, 20, 0.5, max_in_flight=4, grace_seconds=0.3)
    assert (report.sent, report.failed, report.unfinished, report.not_sent) == (4, 4, 10, 6)
    assert (report.ttft.count, report.ttft.unfinished, report.ttft.p50) == (0, 10, None)
    assert report.ttft.above["p99"] >= 0.3
    assert report.failed_share == 1.0


async def test_interrupted_answer_counts_in_e2e_and_itl(stub: Stub, workload: Workload) -> None:
    stub.hang_after = 2
    report = await run_load(stub.url, None, workload, 20, 0.2, grace_seconds=2.0, exact=Exact(20, 5))
    assert (report.completed, report.failed, report.unfinished) == (0, 4, 4)
    assert (report.ttft.count, report.ttft.unfinished) == (4, 0)
    assert (report.itl.count, report.itl.unfinished, report.e2e.unfinished) == (4, 4, 4)


async def test_never_more_in_flight_than_allowed(stub: Stub, workload: Workload) -> None:
    stub.token_seconds = 0.005
    report = await run_load(stub.url, None, workload, 100, 0.3, max_in_flight=3)
    assert stub.most_in_flight == 3
    assert report.completed == 30
    assert report.held_back > 0


async def test_hanging_requests_are_abandoned_after_the_grace_period(stub: Stub, workload: Workload) -> None:
    stub.hang = True
    report = await run_load(stub.url, None, workload, 10, 0.3, grace_seconds=0.2)
    assert (report.sent, report.completed, report.failed) == (3, 0, 3)
    assert "unfinished" in report.failure
    assert report.ttft.count == 0


async def test_stop_ends_the_load_early_with_a_report(stub: Stub, workload: Workload) -> None:
    stub.hang = True
    stop = asyncio.Event()
    load = asyncio.create_task(run_load(stub.url, None, workload, 100, 600, stop=stop, max_in_flight=2))
    async with asyncio.timeout(10):
        while stub.in_flight < 2:
            await asyncio.sleep(0.01)
        stop.set()
        report = await load
    assert report.sent == report.failed == 2
    assert report.not_sent == 60_000 - 2


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({"status": 400, "error": "prompt is too long"}, "HTTP 400: prompt is too long"),
        ({"cut_after": 0}, "ended before its last token"),
        ({"abort": True}, "aborted"),
    ],
)
async def test_failures_state_their_reason(stub: Stub, workload: Workload, knobs: dict[str, Any], reason: str) -> None:
    for knob, value in knobs.items():
        setattr(stub, knob, value)
    report = await run_load(stub.url, None, workload, 25, 0.2)
    assert (report.sent, report.completed, report.failed) == (5, 0, 5)
    assert reason in report.failure


async def test_server_that_goes_away_counts_as_refused(
    new_stub: Callable[[], Stub], workload: Workload, free_port: int
) -> None:
    server = new_stub()
    stop_serving = asyncio.Event()

    def gone(progress: LoadProgress) -> None:
        if progress.completed:
            stop_serving.set()

    with server.listen(free_port) as stub:
        load = asyncio.create_task(run_load(stub.url, None, workload, 10, 2, on_progress=gone))
        await asyncio.wait_for(stop_serving.wait(), 10)
    report = await load
    assert report.completed >= 1
    assert report.failed >= 1
    assert report.sent == report.completed + report.failed == 20
    assert "connection refused" in report.failure


async def test_progress_is_reported_and_ends_with_the_total(stub: Stub, workload: Workload) -> None:
    reported: list[LoadProgress] = []
    report = await run_load(stub.url, None, workload, 10, 0.3, on_progress=reported.append)
    assert reported[0].sent == 0
    assert reported[-1].completed == report.completed == 3
    assert reported[-1].in_flight == 0


async def test_api_key_comes_from_the_environment(
    stub: Stub, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.needs_key = "secret"
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(LoadError, match="VLLM_API_KEY"):
        await run_load(stub.url, None, workload, 25, 0.2)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    report = await run_load(stub.url, None, workload, 25, 0.2)
    assert report.completed == 5


async def test_proxy_variables_are_not_used(stub: Stub, workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    assert (await run_load(stub.url, None, workload, 25, 0.2)).completed == 5


@pytest.mark.parametrize("host", ["192.0.2.7", "example.org", "127.0.0.1.example.org", "[2001:db8::1]"])
async def test_another_machine_is_refused(host: str, workload: Workload) -> None:
    with pytest.raises(LoadError, match="not this machine"):
        await run_load(f"http://{host}:8000", None, workload, 25, 0.2)


@pytest.mark.parametrize("url", ["", "chat", "ftp://127.0.0.1", "http://", "http://127.0.0.1:notaport"])
async def test_invalid_url_is_refused(url: str, workload: Workload) -> None:
    with pytest.raises(UsageError, match="is not a server URL"):
        await run_load(url, None, workload, 25, 0.2)


@pytest.mark.parametrize("url", ["http://xn--:1", "http://xn--80ak6aa92e.xn--:1"])
async def test_invalid_internationalized_name_is_refused(url: str, workload: Workload) -> None:
    with pytest.raises(LoadError, match="is not a server URL"):
        await run_load(url, None, workload, 25, 0.2, allow_remote=True)


@pytest.mark.parametrize(("rate", "seconds"), [(0, 1), (-1, 1), (1, 0), (float("nan"), 1), (1e6, 1e6)])
async def test_invalid_numbers_are_refused(stub: Stub, workload: Workload, rate: float, seconds: float) -> None:
    with pytest.raises(LoadError):
        await run_load(stub.url, None, workload, rate, seconds)
    assert stub.bodies == []


@pytest.mark.parametrize("models", ["<html>hello</html>", "", '{"data": 5}', "[]"])
async def test_server_other_than_vllm_is_refused(stub: Stub, workload: Workload, models: str) -> None:
    stub.models = models
    with pytest.raises(LoadError, match="/v1/models"):
        await run_load(stub.url, None, workload, 25, 0.2)


async def test_unserved_model_is_refused(stub: Stub, workload: Workload) -> None:
    with pytest.raises(LoadError, match="serves tiny, not llama"):
        await run_load(stub.url, "llama", workload, 25, 0.2)


async def test_closed_port_is_one_clear_sentence(free_port: int, workload: Workload) -> None:
    with pytest.raises(LoadError, match="nothing answers"):
        await run_load(f"http://127.0.0.1:{free_port}", None, workload, 25, 0.2)


async def test_hanging_server_is_distinguished_from_a_closed_port(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "CONNECT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(LoadError, match="does it hang"):
            await run_load(f"http://127.0.0.1:{silent.getsockname()[1]}", None, workload, 25, 0.2)


def test_load_runs_without_an_event_loop(stub: Stub, workload: Workload) -> None:
    assert run_load_sync(f"{stub.url}/v1/", None, workload, 25, 0.2).completed == 5


async def test_stop_while_a_slot_is_freed_leaks_no_slot() -> None:
    """A ramp's next step sends with the same slots."""
    stop = asyncio.Event()
    async with httpx.AsyncClient() as unused:
        sender = Sender(unused, "tiny", Tally(), 1)
        assert await sender._take_slot(stop)
        waiting = asyncio.create_task(sender._take_slot(stop))
        for _ in range(3):
            await asyncio.sleep(0)
        sender._slots.release()
        stop.set()
        assert not await waiting
        assert not sender._slots.locked()
