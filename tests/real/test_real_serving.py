"""Real vLLM serves, handles the load generator, and preempts when its KV cache is too small for the load."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from vllm_console.load.run import run_load_sync
from vllm_launchers.presets.model import Workload

if TYPE_CHECKING:
    from conftest import RealServer
else:
    RealServer = Any

pytestmark = pytest.mark.real

SHORT = Workload(input_tokens_p95=96, output_tokens_p95=16, prefix_reuse=0.6, concurrency=4)
LONG_ANSWERS = Workload(input_tokens_p95=60, output_tokens_p95=1500, prefix_reuse=0.0, concurrency=12)


@pytest.fixture(scope="module")
def server(shared_server: RealServer) -> RealServer:
    return shared_server


def counter(server: RealServer, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics", trust_env=False).text
    return sum(float(value) for value in re.findall(rf"^vllm:{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


def test_serves_tiny_model(server: RealServer) -> None:
    models = httpx.get(f"{server.url}/v1/models", trust_env=False).json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [("tiny", 512)]


def test_client_and_server_token_counts_match(server: RealServer) -> None:
    generated, prompts = counter(server, "generation_tokens_total"), counter(server, "prompt_tokens_total")
    report = run_load_sync(server.url, None, SHORT, 4, 3)
    assert (report.sent, report.completed, report.failed) == (12, 12, 0)
    assert report.ttft.count == report.e2e.count == 12
    assert report.output_tokens == counter(server, "generation_tokens_total") - generated
    assert counter(server, "prompt_tokens_total") > prompts
    assert report.ttft.p50 is not None
    assert report.e2e.p50 is not None
    assert 0 < report.ttft.sum <= report.e2e.sum  # tokens that arrive together have no gap


def test_shared_prefixes_hit_the_prefix_cache(server: RealServer) -> None:
    hits, queries = (counter(server, f"prefix_cache_{kind}_total") for kind in ("hits", "queries"))
    workload = Workload(input_tokens_p95=400, output_tokens_p95=4, prefix_reuse=0.8, concurrency=4)
    report = run_load_sync(server.url, None, workload, 10, 3, max_in_flight=1, seed=1)
    assert report.completed == 30
    share = (counter(server, "prefix_cache_hits_total") - hits) / (
        counter(server, "prefix_cache_queries_total") - queries
    )
    assert 0.2 < share < 0.8


def test_requests_exceeding_the_kv_cache_are_preempted(server: RealServer) -> None:
    before = counter(server, "num_preemptions_total")
    report = run_load_sync(server.url, None, LONG_ANSWERS, 12, 2, max_in_flight=12)
    assert (report.completed, report.failed) == (24, 0)
    assert counter(server, "num_preemptions_total") > before


def test_unserved_model_is_reported(server: RealServer) -> None:
    from vllm_console.load.client import LoadError

    with pytest.raises(LoadError, match="serves tiny, not llama"):
        run_load_sync(server.url, "llama", SHORT, 1, 1)
