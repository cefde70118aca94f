"""The simulated engine as a process: HTTP API, startup, failures and shutdown."""

from __future__ import annotations

import asyncio
import json
import math
import re
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fakes.simulated_servers import DEADLINE
from vllm_console.diagnosis.failure.diagnose import diagnose
from vllm_console.diagnosis.finding import Cause
from vllm_console.metrics.parse import parse_metrics
from vllm_console.metrics.sample import Responses

PREFIX = re.compile(
    r"^\((APIServer|EngineCore) pid=\d+\) (INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d \[[\w.]+:\d+\] "
)


QUESTIONS = 12


def events(body: str) -> list[Any]:
    lines = [line for line in body.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_models_list_context_length(server: Any) -> None:
    cards = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["small", "other"]
    assert {card["max_model_len"] for card in cards} == {2048}
    assert cards[0]["root"] == "Qwen/Qwen3-8B-AWQ"


def test_small_routes(server: Any) -> None:
    assert httpx.get(f"{server.url}/ping").status_code == 200
    assert httpx.get(f"{server.url}/version").json()["version"].startswith("0.33.0")
    assert httpx.get(f"{server.url}/load").json() == {"server_load": 0}
    answer = httpx.post(f"{server.url}/tokenize", json={"prompt": "one two three"}).json()
    assert (answer["count"], answer["max_model_len"]) == (3, 2048)
    assert httpx.get(f"{server.url}/nothing").status_code == 404


def test_completion(server: Any) -> None:
    body = {"model": "other", "prompt": list(range(50)), "max_tokens": 20, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body).json()
    assert answer["object"] == "text_completion"
    assert answer["model"] == "other"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert len(answer["choices"][0]["text"].split()) == 20
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (50, 20, 70)
    again = httpx.post(f"{server.url}/v1/completions", json=body).json()
    details = {"cached_tokens": 48, "created_cache_tokens": None, "multimodal_tokens": None}
    assert again["usage"]["prompt_tokens_details"] == details
    assert again["choices"][0]["text"] == answer["choices"][0]["text"]


def test_streamed_completion_has_the_same_text(server: Any) -> None:
    body = {"prompt": "tell me of caches", "max_tokens": 30, "ignore_eos": True}
    whole = httpx.post(f"{server.url}/v1/completions", json=body).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = httpx.post(f"{server.url}/v1/completions", json=body | options)
    assert answer.headers["content-type"].startswith("text/event-stream")
    parts = events(answer.text)
    assert "".join(part["choices"][0]["text"] for part in parts[:-1]) == whole["choices"][0]["text"]
    assert parts[-2]["choices"][0]["finish_reason"] == "length"
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"]["completion_tokens"] == 30


def test_chat_with_and_without_streaming(server: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"text": "Hi"}]}]
    body = {"model": "small", "messages": messages, "max_completion_tokens": 25, "min_tokens": 5}
    whole = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()
    assert whole["object"] == "chat.completion"
    assert whole["choices"][0]["message"]["role"] == "assistant"
    assert 5 <= whole["usage"]["completion_tokens"] <= 25
    parts = events(httpx.post(f"{server.url}/v1/chat/completions", json=body | {"stream": True}).text)
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(part["choices"][0]["delta"].get("content", "") for part in parts)
    assert text == whole["choices"][0]["message"]["content"]
    assert "usage" not in parts[-1]


def test_next_turn_of_conversation_hits_prefix_cache(server: Any) -> None:
    messages = [{"role": "user", "content": "Write about the keeper of servers. " * 10}]
    body = {"messages": messages, "max_tokens": 100, "ignore_eos": True}
    first = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()
    messages += [first["choices"][0]["message"], {"role": "user", "content": "And now?"}]
    second = httpx.post(f"{server.url}/v1/chat/completions", json=body | {"messages": messages}).json()
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > first["usage"]["total_tokens"] - 32


def test_unknown_model_error_lists_served_models(server: Any) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "model": "huge"})
    error = answer.json()["error"]
    assert answer.status_code == error["code"] == 404
    assert error["message"] == "The model `huge` does not exist. Valid aliases: small, other."


def test_stop_string_is_excluded_from_text_and_stream(server: Any) -> None:
    body: dict[str, Any] = {"prompt": [3] * 30, "max_tokens": 200, "ignore_eos": True}
    whole = httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]["text"]
    stop = whole[100:140]
    cut = httpx.post(f"{server.url}/v1/completions", json=body | {"stop": ["never", stop]}).json()
    assert cut["choices"][0]["text"] == whole[: whole.index(stop)]
    assert (cut["choices"][0]["finish_reason"], cut["choices"][0]["stop_reason"]) == ("stop", stop)
    assert cut["usage"]["completion_tokens"] < 200
    streamed = events(httpx.post(f"{server.url}/v1/completions", json=body | {"stop": stop, "stream": True}).text)
    text = ""
    for event in streamed:
        text += event["choices"][0]["text"]
        assert whole.startswith(text)
    assert text == whole[: whole.index(stop)]
    kept = httpx.post(f"{server.url}/v1/completions", json=body | {"stop": stop, "include_stop_str_in_output": True})
    assert kept.json()["choices"][0]["text"] == whole[: whole.index(stop) + len(stop)]


def test_detokenize_restores_text(server: Any) -> None:
    text = "Nine keepers wait <|start|> for one server, at 17:45.\n  Every block is cached."
    tokens = httpx.post(f"{server.url}/tokenize", json={"prompt": text}).json()["tokens"]
    assert httpx.post(f"{server.url}/detokenize", json={"tokens": tokens}).json() == {"prompt": text}
    unseen = httpx.post(f"{server.url}/detokenize", json={"tokens": [77_777]}).json()["prompt"]
    assert httpx.post(f"{server.url}/tokenize", json={"prompt": unseen}).json()["tokens"] == [77_777]


def named_events(body: str) -> list[Any]:
    """Events of the Anthropic API; each name equals the type in its data."""
    found = []
    for event in body.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_anthropic_api_matches_chat(server: Any) -> None:
    body = {"model": "small", "messages": [{"role": "user", "content": "Tell me of caches"}], "max_tokens": 30}
    chat = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()
    whole = httpx.post(f"{server.url}/v1/messages", json=body).json()
    assert whole["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    usage = whole["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    assert (whole["stop_reason"], usage["output_tokens"]) == ("max_tokens", 30)
    counted = httpx.post(f"{server.url}/v1/messages/count_tokens", json=body).json()
    assert counted["input_tokens"] == chat["usage"]["prompt_tokens"]
    streamed = named_events(httpx.post(f"{server.url}/v1/messages", json=body | {"stream": True}).text)
    assert [event["type"] for event in streamed[:2]] == ["message_start", "content_block_start"]
    assert [event["type"] for event in streamed[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(event["delta"]["text"] for event in streamed[2:-3])
    assert text == whole["content"][0]["text"]
    assert streamed[0]["message"]["usage"] == {"input_tokens": chat["usage"]["prompt_tokens"], "output_tokens": 0}
    assert streamed[-2]["usage"]["output_tokens"] == 30


def test_anthropic_api_reports_stop_sequence(server: Any) -> None:
    body = {"model": "small", "messages": [{"role": "user", "content": "Tell me of stops"}], "max_tokens": 60}
    text = httpx.post(f"{server.url}/v1/messages", json=body).json()["content"][0]["text"]
    stop = text[20:26]
    cut = body | {"stop_sequences": ["never", stop]}
    whole = httpx.post(f"{server.url}/v1/messages", json=cut).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", stop)
    assert whole["content"][0]["text"] == text[: text.index(stop)]
    streamed = named_events(httpx.post(f"{server.url}/v1/messages", json=cut | {"stream": True}).text)
    assert streamed[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": stop}
    assert "".join(event["delta"]["text"] for event in streamed[2:-3]) == text[: text.index(stop)]


@pytest.mark.parametrize(
    "prompt", ["one", "Nine keepers wait <|start|> for one server, at 17:45.\n  All is cached.", "é ∑"]
)
def test_token_counts_agree_across_apis(server: Any, prompt: str) -> None:
    def post(path: str, **body: Any) -> Any:
        return httpx.post(f"{server.url}{path}", json={"model": "small", **body}).json()

    tokens = post("/tokenize", prompt=prompt)
    answer = post("/v1/completions", prompt=prompt, max_tokens=1, return_token_ids=True)
    assert answer["choices"][0]["prompt_token_ids"] == tokens["tokens"]
    assert answer["usage"]["prompt_tokens"] == tokens["count"] == len(tokens["tokens"])
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}]
    tokens = post("/tokenize", messages=messages)
    answer = post("/v1/chat/completions", messages=messages, max_tokens=1, return_token_ids=True)
    assert answer["prompt_token_ids"] == tokens["tokens"]
    assert answer["usage"]["prompt_tokens"] == tokens["count"]
    assert post("/v1/responses", input=messages, max_output_tokens=1)["usage"]["input_tokens"] == tokens["count"]
    assert post("/v1/messages/count_tokens", messages=messages)["input_tokens"] == tokens["count"]


def test_end_of_output_does_not_depend_on_max_tokens(server: Any) -> None:
    def ended(number: int, most: int, **more: Any) -> tuple[int, str]:
        body = {"prompt": f"question {number}", "max_tokens": most, **more}
        answer = client.post(f"{server.url}/v1/completions", json=body).json()
        return answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]

    def check(number: int) -> None:
        length, reason = ended(number, 2000)
        assert reason == "stop"
        assert ended(number, length - 1) == (length - 1, "length")
        assert ended(number, length + 1) == (length, "stop")
        assert ended(number, 16) == (16, "length")
        assert ended(number, length + 5, ignore_eos=True) == (length + 5, "length")
        # The final token comes after the required ones.
        assert ended(number, length + 5, min_tokens=length) == (length + 1, "stop")
        assert ended(number, length + 5, min_tokens=length + 5) == (length + 5, "length")

    # Concurrent requests share the engine's steps; creating a client per request would take longer than those.
    with httpx.Client() as client, ThreadPoolExecutor(QUESTIONS) as pool:
        assert len(list(pool.map(check, range(QUESTIONS)))) == QUESTIONS


def test_logprobs_match_output_tokens(server: Any) -> None:
    body = {"prompt": [4] * 20, "max_tokens": 30, "ignore_eos": True, "logprobs": 3}
    choice = httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    offsets = zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
    assert all(choice["text"].startswith(token, offset) for offset, token in offsets)
    assert all(value < 0 for value in logprobs["token_logprobs"])
    sums = [sum(math.exp(value) for value in top.values()) for top in logprobs["top_logprobs"]]
    assert max(sums) < 1
    streamed = events(httpx.post(f"{server.url}/v1/completions", json=body | {"stream": True}).text)
    parts = [event["choices"][0]["logprobs"] for event in streamed]
    for key in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [value for part in parts for value in part[key]] == logprobs[key]


def test_each_choice_is_a_separate_sequence(server: Any) -> None:
    def computed() -> float:
        """Prompt tokens that were not in the cache."""
        total: float = server.metric("vllm:request_prefill_kv_computed_tokens_sum")
        return total

    generated, prompts = server.metric("vllm:generation_tokens_total"), server.metric("vllm:prompt_tokens_total")
    ended, asked = server.metric("vllm:request_success_total"), server.metric("vllm:request_params_n_count")
    choices = server.metric("vllm:request_params_n_sum")
    tokens, before = server.metric("vllm:iteration_tokens_total_sum"), computed()
    body = {"prompt": [[5] * 40, [6] * 60], "n": 3, "max_tokens": 10, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert len({choice["text"] for choice in answer["choices"]}) == 6
    assert answer["usage"]["prompt_tokens"] == 100
    assert answer["usage"]["completion_tokens"] == 60
    assert server.metric("vllm:generation_tokens_total") == generated + 60
    assert server.metric("vllm:prompt_tokens_total") == prompts + 300
    assert server.metric("vllm:request_success_total") == ended + 6
    assert server.metric("vllm:request_params_n_count") == asked + 2, "once per prompt, for all its choices"
    assert server.metric("vllm:request_params_n_sum") == choices + 6
    assert server.metric("vllm:iteration_tokens_total_sum") == tokens + computed() - before + 60


def test_max_tokens_is_capped_by_context(server: Any) -> None:
    body = {"prompt": [5] * 2040, "max_tokens": 500, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] == 8


def test_responses_are_counted_by_route_and_status(launch: Any) -> None:
    server = launch("--api-key", "key").ready()
    headers = {"authorization": "Bearer key"}
    wrong = {"model": "gpt-4", "prompt": "a", "max_tokens": 1}

    def answered() -> Responses | None:
        return parse_metrics(httpx.get(f"{server.url}/metrics").text, 0.0).responses

    assert answered() is None
    for _ in range(2):
        assert httpx.post(f"{server.url}/v1/completions", json=wrong, headers=headers).status_code == 404
    assert httpx.post(f"{server.url}/v1/completions", json=wrong).status_code == 401  # vLLM omits it
    assert httpx.post(f"{server.url}/v1/nothing", headers=headers).status_code == 404
    served = httpx.get(f"{server.url}/v1/models", headers=headers).json()["data"][0]["id"]
    httpx.post(f"{server.url}/v1/completions", json={**wrong, "model": served}, headers=headers).raise_for_status()
    assert answered() == Responses(ok=1.0, refused=2.0)


def test_metrics_parse_and_are_consistent(server: Any) -> None:
    before = server.metric("vllm:generation_tokens_total")
    httpx.post(f"{server.url}/v1/completions", json={"prompt": [9] * 40, "max_tokens": 10, "ignore_eos": True})
    assert server.metric("vllm:generation_tokens_total") == before + 10
    families = {item.name: item for item in text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)}
    assert families["vllm:num_requests_running"].samples[0].labels == {"model_name": "small", "engine": "0"}
    assert families["vllm:kv_cache_usage_perc"].samples[0].value == 0
    info = families["vllm:cache_config_info"].samples[0].labels
    assert int(info["kv_cache_size_tokens"]) == int(info["num_gpu_blocks"]) * int(info["block_size"])
    finished = {
        s.labels["finished_reason"]: s.value for s in families["vllm:request_success"].samples if "total" in s.name
    }
    assert set(finished) == {"stop", "length", "abort", "error", "repetition"}
    buckets = {
        name: [s.labels["le"] for s in families[f"vllm:{name}"].samples if s.name.endswith("_bucket")]
        for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds")
    }
    assert [len(edges) for edges in buckets.values()] == [23, 20, 22]
    assert families["vllm:iteration_tokens_total"].type == "histogram"
    lengths = [s.labels["le"] for s in families["vllm:request_prompt_tokens"].samples if s.name.endswith("_bucket")]
    assert lengths[-2:] == ["2000.0", "+Inf"]
    queued = server.metric("vllm:request_queue_time_seconds_count")
    assert queued == server.metric("vllm:e2e_request_latency_seconds_count") == sum(finished.values())


def test_counters_have_creation_time(server: Any) -> None:
    body = httpx.get(f"{server.url}/metrics").text
    for name in ("num_preemptions", "request_success", "iteration_tokens_total", "time_to_first_token_seconds"):
        assert f"# TYPE vllm:{name}_created gauge" in body
    assert "vllm:prompt_tokens_by_source_total{" in body
    assert "process_resident_memory_bytes" in body


async def test_client_disconnect_aborts_request(launch: Any, until: Callable[..., Any]) -> None:
    server = launch("--max-model-len", "4096").ready()
    body = {"prompt": [1] * 500, "max_tokens": 3000, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=DEADLINE) as client:
        async with client.stream("POST", f"{server.url}/v1/completions", json=body | {"stream": True}) as answer:
            pieces = answer.aiter_bytes()
            await anext(pieces)
            waiting = asyncio.create_task(client.post(f"{server.url}/v1/completions", json=body))
            await until(lambda: server.metric("vllm:num_requests_running") == 2)
            assert server.metric("vllm:kv_cache_usage_perc") > 0
            waiting.cancel()
        await until(lambda: server.metric("vllm:num_requests_running") == 0)
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.metric("vllm:request_success_total") == 0, "vLLM does not count disconnected clients"
    assert server.metric("http_requests_total") == 2, "as answered: they are no errors of the clients"
    assert 'status="4xx"' not in httpx.get(f"{server.url}/metrics").text


async def test_client_disconnect_aborts_all_sequences(launch: Any, until: Callable[..., Any]) -> None:
    server = launch("--max-model-len", "4096").ready()
    body = {"prompt": [[1] * 500, [2] * 500], "n": 4, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient(timeout=DEADLINE) as client:
        async with client.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            pieces = answer.aiter_bytes()
            await anext(pieces)
            await until(lambda: server.metric("vllm:num_requests_running") == 8)
        await until(lambda: server.metric("vllm:num_requests_running") == 0)
    assert server.metric("vllm:num_requests_waiting") == 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0, "all blocks are freed"


def test_preemptions_are_counted(launch: Any) -> None:
    line = "--max-model-len 512 --num-gpu-blocks-override 40 --max-num-seqs 16 --block-size 16"
    server = launch(*line.split(), SIMULATED_SPEED="20").ready()

    async def ask() -> list[int]:
        async with httpx.AsyncClient(timeout=DEADLINE) as client:
            bodies = [{"prompt": [n] * 60, "max_tokens": 200, "ignore_eos": True} for n in range(12)]
            answers = await asyncio.gather(*(client.post(f"{server.url}/v1/completions", json=body) for body in bodies))
            return [answer.json()["usage"]["completion_tokens"] for answer in answers]

    assert asyncio.run(ask()) == [200] * 12
    assert server.metric("vllm:num_preemptions_total") > 3
    assert server.metric("vllm:request_num_preemptions_sum") == server.metric("vllm:num_preemptions_total")


def test_data_parallel_ranks_have_separate_series(launch: Any) -> None:
    server = launch("--max-model-len", "2048", "--data-parallel-size", "2", SIMULATED_SPEED="20").ready()

    async def ask() -> None:
        async with httpx.AsyncClient(timeout=DEADLINE) as client:
            bodies = [{"prompt": [n] * 20, "max_tokens": 50, "ignore_eos": True} for n in range(6)]
            await asyncio.gather(*(client.post(f"{server.url}/v1/completions", json=body) for body in bodies))

    asyncio.run(ask())
    body = httpx.get(f"{server.url}/metrics").text
    for rank in "01":
        line = next(x for x in body.splitlines() if x.startswith(f'vllm:generation_tokens_total{{engine="{rank}"'))
        assert float(line.rsplit(" ", 1)[1]) == 150


@pytest.mark.parametrize("by", ["flag", "environment"])
def test_api_key_protects_only_v1_routes(launch: Any, by: str) -> None:
    server = launch("--api-key", "s3cret") if by == "flag" else launch(VLLM_API_KEY="s3cret")
    server.ready()
    assert httpx.get(f"{server.url}/metrics").status_code == 200
    refused = httpx.get(f"{server.url}/v1/models")
    assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})
    for given, status in (("Bearer s3cret", 200), ("Bearer wrong", 401), ("Basic s3cret", 401)):
        assert httpx.get(f"{server.url}/v1/models", headers={"authorization": given}).status_code == status
    assert "s3cret" not in server.text


def test_startup_log_matches_vllm(launch: Any) -> None:
    server = launch("--max-model-len", "4096", "--seed", "1", SIMULATED_STARTUP_SECONDS="0.3").ready()
    server.until(lambda: "GET /health" in server.text, "the access log line")
    text = server.text
    marks = [
        "version 0.33.0",
        "simulated engine: no GPU is used",
        "non-default args: {'model_tag': 'Qwen/Qwen3-8B-AWQ'",
        "accepted but not modeled: --seed",
        "Resolved architecture: Qwen3ForCausalLM",
        "Using max model len 4096",
        "Initializing a V1 LLM engine (v0.33.0) with config:",
        "Starting to load model Qwen/Qwen3-8B-AWQ...",
        "Loading safetensors checkpoint shards:   0% Completed | 0/2 [00:00<?, ?it/s]",
        "Loading safetensors checkpoint shards: 100% Completed | 2/2 [",
        "Loading weights took ",
        "Model loading took 5.76 GiB memory and ",
        "torch.compile took ",
        "Available KV cache memory: ",
        "GPU KV cache size: ",
        "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE): 100%|",
        "Graph capturing finished in ",
        "init engine (profile, create kv cache, warmup model) took ",
        f"Starting vLLM server on http://127.0.0.1:{server.port}",
        "INFO:     Application startup complete.",
        '"GET /health HTTP/1.1" 200',
    ]
    places = [text.find(mark) for mark in marks]
    assert -1 not in places, marks[places.index(-1)]
    # stdout and stderr may interleave; each stream is in order.
    bars = [place for mark, place in zip(marks, places, strict=True) if mark.startswith(("Loading s", "Capturing"))]
    rest = [place for mark, place in zip(marks, places, strict=True) if not mark.startswith(("Loading s", "Capturing"))]
    assert bars == sorted(bars)
    assert rest == sorted(rest)
    assert all(PREFIX.match(line) for line in text.splitlines() if line.startswith("("))
    found = re.search(
        r"GPU KV cache size: ([\d,]+) tokens, Maximum concurrency for 4,096 tokens per request: ([\d.]+)x", text
    )
    assert found is not None
    assert int(found[1].replace(",", "")) / 4096 == pytest.approx(float(found[2]), rel=0.01)


def test_eager_mode_skips_compilation_and_graph_capture(launch: Any) -> None:
    text = launch("--enforce-eager").ready().text
    assert "torch.compile took" not in text
    assert "Capturing CUDA graphs" not in text


def test_connections_are_refused_until_ready(launch: Any) -> None:
    server = launch(SIMULATED_STARTUP_SECONDS="30")
    server.until(lambda: "Using max model len" in server.text, "it starts")
    with socket.socket() as sock:
        assert sock.connect_ex(("127.0.0.1", server.port)) == 111
        with pytest.raises(OSError, match="Address already in use"):
            sock.bind(("127.0.0.1", server.port))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -2), (signal.SIGTERM, -15)])
def test_signal_during_startup(launch: Any, number: int, code: int) -> None:
    server = launch(SIMULATED_STARTUP_SECONDS="30")
    server.until(lambda: "Using max model len" in server.text, "it starts")
    server.popen.send_signal(number)
    assert server.wait() == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_serving_exits_0_and_cuts_streams(launch: Any, number: int) -> None:
    server = launch("--max-model-len", "4096").ready()
    body = {"prompt": [1] * 10, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=DEADLINE) as answer:
        pieces = answer.iter_text()
        text = next(pieces)
        server.popen.send_signal(number)
        text += "".join(pieces)
    assert text.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"abort"' in text
    assert server.wait() == 0
    assert "[shutdown] API server: shutdown triggered" in server.text
    assert "mode=abort timeout=0s" in server.text


def test_shutdown_timeout_lets_requests_finish(launch: Any) -> None:
    server = launch("--max-model-len", "4096", "--shutdown-timeout", "30", SIMULATED_SPEED="5").ready()
    body = {"prompt": [1] * 10, "max_tokens": 300, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=DEADLINE) as answer:
        pieces = answer.iter_text()
        text = next(pieces)
        server.popen.send_signal(signal.SIGTERM)
        text += "".join(pieces)
    assert events(text)[-1]["choices"][0]["finish_reason"] == "length"
    assert server.wait() == 0
    assert "draining in-flight requests count=1 timeout=30s" in server.text


def test_draining_rejects_requests_and_second_signal_aborts(launch: Any) -> None:
    server = launch("--max-model-len", "4096", "--shutdown-timeout", "60").ready()
    body = {"prompt": [1] * 10, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(timeout=DEADLINE) as other,
        httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer,
    ):
        other.get(f"{server.url}/health")
        pieces = answer.iter_text()
        text = next(pieces)
        server.popen.send_signal(signal.SIGTERM)
        server.until(lambda: "draining in-flight requests" in server.text, "it drains")
        assert other.post(f"{server.url}/v1/completions", json={"prompt": "x"}).status_code == 503
        server.popen.send_signal(signal.SIGTERM)
        text += "".join(pieces)
    assert '"finish_reason":"abort"' in text
    assert server.wait() == 0


def test_port_in_use_ends_startup(launch: Any) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        server = launch(port=sock.getsockname()[1])
        assert server.wait() == 1
    assert server.text.rstrip().endswith("OSError: [Errno 98] Address already in use")


@pytest.mark.parametrize(
    ("flags", "model", "code", "last"),
    [
        (["--no-such-flag"], "m", 2, "vllm: error: unrecognized arguments: --no-such-flag"),
        (["--dtype", "foo"], "m", 2, "vllm serve: error: argument --dtype: invalid choice: 'foo'"),
        (["--gpu-memory-utilization", "1.5"], "Qwen/Qwen3-8B", 1, "    For further information visit https://errors"),
        ([], "nope", 1, "huggingface_hub.errors.HFValidationError: Repo id must be in the form"),
        ([], "meta-llama/Llama-3.3-70B-Instruct", 1, "RuntimeError: Engine core initialization failed. See root cause"),
        (
            ["--num-gpu-blocks-override", "9"],
            "Qwen/Qwen3-8B",
            1,
            "RuntimeError: Engine core initialization failed. See",
        ),
    ],
)
def test_failed_start_exits_like_vllm(launch: Any, flags: list[str], model: str, code: int, last: str) -> None:
    server = launch(*flags, model=model)
    assert server.wait() == code
    assert server.text.splitlines()[-1].startswith(last)


def test_root_cause_precedes_last_log_line(launch: Any) -> None:
    server = launch("--num-gpu-blocks-override", "9")
    server.wait()
    lines = server.text.splitlines()
    assert any("ERROR" in line and "EngineCore failed to start." in line for line in lines)
    cause = next(line for line in lines if "ValueError: To serve at least one request" in line)
    assert "the estimated maximum model length is 128. Try increasing `gpu_memory_utilization`" in cause
    assert PREFIX.match(cause)
    server = launch(model="meta-llama/Llama-3.3-70B-Instruct")
    server.wait()
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate" in server.text
    assert ", in load_model\n" in server.text
    assert diagnose(server.text.splitlines(), 1).cause is Cause.WEIGHTS_DO_NOT_FIT


def test_log_stats_can_be_disabled(launch: Any) -> None:
    server = launch("--disable-log-stats").ready()
    httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 2})
    body = httpx.get(f"{server.url}/metrics").text
    assert "vllm:" not in body
    assert "process_cpu_seconds_total" in body


def test_access_log_can_exclude_paths(launch: Any) -> None:
    server = launch("--disable-access-log-for-endpoints", "/metrics,/health").ready()
    httpx.get(f"{server.url}/metrics?x=1")
    httpx.get(f"{server.url}/version")
    server.until(lambda: "GET /version" in server.text, "the access log line")
    assert "GET /metrics" not in server.text
    assert "GET /health" not in server.text


async def test_paused_engine_admits_no_request_until_resumed(launch: Any, until: Callable[..., Any]) -> None:
    paused = launch(VLLM_SERVER_DEV_MODE="1", SIMULATED_SPEED="20").ready()
    body = {"prompt": "one two three", "max_tokens": 5, "ignore_eos": True}
    long = {**body, "max_tokens": 4000}
    async with httpx.AsyncClient(base_url=paused.url, timeout=60) as client:
        going = asyncio.create_task(client.post("/v1/completions", json=long))
        await until(lambda: paused.metric("vllm:num_requests_running") == 1)
        assert (await client.post("/pause")).json() == {"status": "paused"}
        assert (await going).json()["choices"][0]["finish_reason"] == "abort"
        held = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: paused.metric("vllm:num_requests_waiting") == 1)
        assert paused.metric("vllm:num_requests_running") == 0
        assert paused.healthy()
        assert not held.done()
        await client.post("/resume")
        assert (await held).json()["usage"]["completion_tokens"] == 5

        going = asyncio.create_task(client.post("/v1/completions", json=long))
        await until(lambda: paused.metric("vllm:num_requests_running") == 1)
        await client.post("/pause?mode=keep")
        generated = paused.metric("vllm:generation_tokens_total")
        assert not (await client.post("/pause?mode=nonsense")).is_success
        assert paused.metric("vllm:generation_tokens_total") == generated
        assert paused.metric("vllm:num_requests_running") == 1
        await client.post("/resume")
        assert (await going).json()["usage"]["completion_tokens"] == 4000


def test_pause_route_is_absent_by_default(server: Any) -> None:
    assert httpx.post(f"{server.url}/pause").status_code == 404
