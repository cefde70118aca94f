"""Sleep mode of the simulated engine: vLLM's routes and their effect on output, metrics and memory."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

BODY = {"prompt": "one two three", "max_tokens": 5, "ignore_eos": True, "temperature": 0}


def answer(client: httpx.Client) -> str:
    text = client.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
    return str(text)


def sleeps(client: httpx.Client) -> bool:
    return bool(client.get("/is_sleeping").json()["is_sleeping"])


@pytest.fixture(scope="module")
def sleeper(launcher_in: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    launcher = launcher_in(tmp_path_factory.mktemp("sleeper"))
    yield launcher("--enable-sleep-mode", VLLM_SERVER_DEV_MODE="1", SIMULATED_SPEED="20").ready()
    launcher.end()


@pytest.fixture
def client(sleeper: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=sleeper.url, timeout=60) as client:
        yield client
        client.post("/wake_up")
        client.post("/collective_rpc", json={"method": "reload_weights"})


def test_sleep_routes_require_dev_mode(server: Any) -> None:
    assert httpx.post(f"{server.url}/sleep").status_code == 404
    assert httpx.get(f"{server.url}/is_sleeping").status_code == 404


def test_level_1_preserves_output(client: httpx.Client, sleeper: Any) -> None:
    before = answer(client)
    assert client.post("/sleep?level=1").json() == {"status": "sleeping", "level": 1}
    assert sleeps(client)
    assert sleeper.healthy()
    page = httpx.get(f"{sleeper.url}/metrics").text
    assert re.search(r'vllm:engine_sleep_state\{.*sleep_state="weights_offloaded"\} 1.0', page)
    assert re.search(r'vllm:engine_sleep_state\{.*sleep_state="awake"\} 0.0', page)
    assert "Sleep mode freed" in sleeper.text
    assert client.post("/wake_up").json() == {"status": "awake", "tags": None}
    assert not sleeps(client)
    assert answer(client) == before


def test_level_2_output_is_garbage_until_weights_are_reloaded(client: httpx.Client) -> None:
    before = answer(client)
    client.post("/sleep?level=2")
    assert client.post("/collective_rpc", json={"method": "reload_weights"}).status_code == 500
    assert client.post("/wake_up?tags=weights").json() == {"status": "sleeping", "tags": ["weights"]}
    assert client.post("/wake_up?tags=kv_cache").json() == {"status": "awake", "tags": ["kv_cache"]}
    assert answer(client) != before
    assert client.post("/collective_rpc", json={"method": "reload_weights"}).status_code == 200
    assert answer(client) == before


def test_invalid_sleep_level_is_rejected(client: httpx.Client) -> None:
    assert client.post("/sleep?level=3").status_code == 400
    assert not sleeps(client)


async def test_requests_wait_while_engine_sleeps(sleeper: Any, until: Callable[..., Any]) -> None:
    async with httpx.AsyncClient(base_url=sleeper.url, timeout=60) as client:
        going = asyncio.create_task(client.post("/v1/completions", json={**BODY, "max_tokens": 3000}))
        await until(lambda: sleeper.metric("vllm:num_requests_running") == 1)
        await client.post("/sleep")
        assert (await going).json()["choices"][0]["finish_reason"] == "abort"
        held = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await until(lambda: sleeper.metric("vllm:num_requests_waiting") == 1)
        assert not held.done()
        await client.post("/wake_up")
        assert (await held).json()["usage"]["completion_tokens"] == 5


def test_level_1_requires_host_memory_for_weights(launch: Any) -> None:
    small = launch("--enable-sleep-mode", VLLM_SERVER_DEV_MODE="1", SIMULATED_HOST_GIB="0.01").ready()
    assert httpx.post(f"{small.url}/sleep?level=1", timeout=60).status_code == 500
    assert httpx.post(f"{small.url}/sleep?level=2", timeout=60).status_code == 200


def test_sleep_clears_prefix_cache(client: httpx.Client, sleeper: Any) -> None:
    long = {**BODY, "prompt": "word " * 200}
    client.post("/v1/completions", json=long)
    hits = sleeper.metric("vllm:prefix_cache_hits_total")
    assert client.post("/reset_prefix_cache").json() == {"success": True}
    client.post("/v1/completions", json=long)
    assert sleeper.metric("vllm:prefix_cache_hits_total") == hits
