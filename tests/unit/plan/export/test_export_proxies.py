"""Servers exported as proxy configurations, each parsed strictly; and never a secret."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from vllm_launchers.plan.export.proxies import ProxiedServer, ProxyForm, export_for_proxy, proxy_warning
from vllm_launchers.plan.export.quoting import ExportError
from vllm_launchers.plan.model import Plan

Make = Callable[..., Plan]
KEY = "hunter2-hunter2"


def pair(make: Make, old_gpus: tuple[int, ...] = (0,), **more: Any) -> list[ProxiedServer]:
    """The two servers of a rolling update, the new one first."""
    flags = {"served-model-name": "qwen"}
    new = make(flags | {"max-num-seqs": 7}, port=8001, gpus=(1,), **more)
    return [ProxiedServer("chat-2", new), ProxiedServer("chat", make(flags, gpus=old_gpus, **more))]


def nginx_blocks(text: str) -> dict[str, list[str]]:
    """The directives of each block of an nginx configuration, without comments; fails on anything else."""
    blocks: dict[str, list[str]] = {}
    stack: list[str] = []
    for line in (re.sub(r"\s*#.*", "", line).strip() for line in text.splitlines()):
        if line.endswith("{"):
            stack.append(line.removesuffix("{").strip())
            blocks["/".join(stack)] = []
        elif line == "}":
            stack.pop()
        elif line:
            assert line.endswith(";"), line
            blocks["/".join(stack)].append(line.removesuffix(";"))
    assert not stack
    return blocks


def test_nginx_prefers_the_new_server_while_it_answers(make: Make) -> None:
    blocks = nginx_blocks(export_for_proxy(pair(make), ProxyForm.NGINX))
    assert blocks["upstream vllm_chat_2"] == [
        "server 127.0.0.1:8001", "server 127.0.0.1:8000 backup", "keepalive 32",
    ]  # fmt: skip
    location = blocks["server/location /"]
    assert {"proxy_pass http://vllm_chat_2", "proxy_buffering off"} <= set(location)
    assert blocks["server"][0] == "listen 127.0.0.1:8080"


def test_nginx_uses_tls_like_its_servers_and_cannot_mix(make: Make) -> None:
    secure = ProxiedServer("secure", make({"ssl-certfile": "/c", "ssl-keyfile": "/k"}, host="::1"))
    blocks = nginx_blocks(export_for_proxy([secure], ProxyForm.NGINX))
    assert blocks["upstream vllm_secure"][0] == "server [::1]:8000"
    assert "proxy_pass https://vllm_secure" in blocks["server/location /"]
    with pytest.raises(ExportError, match="one of these servers uses TLS"):
        export_for_proxy([*pair(make), secure], ProxyForm.NGINX)


def test_llama_swap_starts_the_servers_itself(make: Make) -> None:
    servers = pair(make, environment={"A": "it's $HOME"})
    document = yaml.safe_load(export_for_proxy(servers, ProxyForm.LLAMA_SWAP))
    model = document["models"]["chat-2"]
    words = shlex.split(model["cmd"])
    assert words[:3] == [*servers[0].plan.engine.command, "serve", servers[0].plan.model]
    assert words[-2:] == ["--port", "${PORT}"]
    assert words[words.index("--max-num-seqs") + 1] == "7"
    assert model["proxy"] == "http://127.0.0.1:${PORT}"
    assert (model["checkEndpoint"], model["ttl"], model["useModelName"]) == ("/health", 0, "qwen")
    assert {"A=it's $HOME", "CUDA_VISIBLE_DEVICES=1"} <= set(model["env"])
    assert document["groups"] == {"vllm-chat-2": {"swap": False, "exclusive": False, "members": ["chat-2", "chat"]}}, (
        "each has its own GPU: both may run"
    )


@pytest.mark.parametrize("gpus", [(1,), (0, 1), ()], ids=["the same", "one in common", "unknown"])
def test_llama_swap_runs_one_at_a_time_if_gpus_may_be_shared(make: Make, gpus: tuple[int, ...]) -> None:
    document = yaml.safe_load(export_for_proxy(pair(make, gpus), ProxyForm.LLAMA_SWAP))
    assert document["groups"]["vllm-chat-2"]["swap"] is True


@pytest.mark.parametrize(("flags", "limit", "seconds"), [
    ({}, 1000, 60), ({"max-num-seqs": 256}, 1000, 60), ({"max-num-seqs": 2048, "shutdown-timeout": 30}, 4096, 90),
])  # fmt: skip
def test_llama_swap_leaves_queueing_and_stopping_to_vllm(
    make: Make, flags: dict[str, int], limit: int, seconds: int
) -> None:
    """Its defaults are 10 parallel requests, 429 beyond them, and a SIGKILL 10 seconds after SIGTERM."""
    document = yaml.safe_load(export_for_proxy([ProxiedServer("chat", make(flags))], ProxyForm.LLAMA_SWAP))
    model = document["models"]["chat"]
    assert (model["concurrencyLimit"], model["unloadTimeout"]) == (limit, seconds)


def test_llama_swap_needs_no_group_for_one_server(make: Make) -> None:
    assert "groups" not in yaml.safe_load(export_for_proxy(pair(make)[:1], ProxyForm.LLAMA_SWAP))


@pytest.mark.parametrize("text", ["${PID}", "two\nlines"])
def test_llama_swap_macros_are_refused_in_a_command(make: Make, text: str) -> None:
    server = ProxiedServer("chat", make({"chat-template": text}))
    with pytest.raises(ExportError, match="llama-swap can't take"):
        export_for_proxy([server], ProxyForm.LLAMA_SWAP)


def test_litellm_prefers_the_new_server_under_the_model_name(make: Make) -> None:
    document = yaml.safe_load(export_for_proxy(pair(make), ProxyForm.LITELLM))
    new, old = document["model_list"]
    assert new == {
        "model_name": "qwen",
        "litellm_params": {"model": "hosted_vllm/qwen", "api_base": "http://127.0.0.1:8001/v1", "order": 1},
        "model_info": {"id": "chat-2"},
    }
    assert (old["model_name"], old["litellm_params"]["order"]) == ("qwen", 2)
    assert document["router_settings"] == {"enable_pre_call_checks": True}


def different(make: Make) -> list[ProxiedServer]:
    """Two servers with different models."""
    return [
        ProxiedServer(name, make({"served-model-name": name}, port=port)) for name, port in (("a", 8000), ("b", 8001))
    ]


def test_nginx_refuses_servers_of_different_models(make: Make) -> None:
    with pytest.raises(ExportError, match="a serves a, b serves b: nginx does not look at a request's model"):
        export_for_proxy(different(make), ProxyForm.NGINX)


@pytest.mark.parametrize("form", [ProxyForm.LITELLM, ProxyForm.LLAMA_SWAP])
def test_no_failover_between_different_models_is_reported(make: Make, form: ProxyForm) -> None:
    text = export_for_proxy(different(make), form)
    assert "its model, and none takes over for another." in " ".join(text.replace("#", "").split())
    assert "none takes over" in proxy_warning(different(make), form)
    assert not proxy_warning(pair(make), form)
    if form is ProxyForm.LITELLM:
        document = yaml.safe_load(text)
        assert [model["model_name"] for model in document["model_list"]] == ["a", "b"]
        assert "router_settings" not in document
        assert all("order" not in model["litellm_params"] for model in document["model_list"])


def test_name_with_a_space_is_one_name(make: Make) -> None:
    """vLLM gets it as one argument, and does not serve its parts."""
    servers = [
        ProxiedServer("a", make({"served-model-name": "new qwen"})),
        ProxiedServer("b", make({"served-model-name": "qwen"})),
    ]
    assert "new qwen" in servers[0].plan.argv
    document = yaml.safe_load(export_for_proxy(servers, ProxyForm.LITELLM))
    assert [model["model_name"] for model in document["model_list"]] == ["new qwen", "qwen"]
    assert "none takes over" in proxy_warning(servers, ProxyForm.LITELLM)
    with pytest.raises(ExportError, match="a serves new qwen, b serves qwen"):
        export_for_proxy(servers, ProxyForm.NGINX)


def test_first_of_several_names_is_used_by_clients_of_a_proxy(make: Make) -> None:
    server = ProxiedServer("chat", make({"served-model-name": '["qwen", "default"]'}))
    (model,) = yaml.safe_load(export_for_proxy([server], ProxyForm.LITELLM))["model_list"]
    assert (model["model_name"], model["litellm_params"]["model"]) == ("qwen", "hosted_vllm/qwen")
    swapped = yaml.safe_load(export_for_proxy([server], ProxyForm.LLAMA_SWAP))["models"]["chat"]
    assert swapped["useModelName"] == "qwen"
    assert "--served-model-name qwen default --" in swapped["cmd"]


def named(make: Make, *names: str) -> list[ProxiedServer]:
    """Servers with these served names, each a JSON list or one name."""
    return [ProxiedServer(f"s{at}", make({"served-model-name": name}, port=8000 + at)) for at, name in enumerate(names)]


def test_servers_with_a_common_name_answer_for_each_other(make: Make) -> None:
    servers = named(make, '["qwen-1", "qwen"]', '["qwen-2", "qwen"]')
    text = export_for_proxy(servers, ProxyForm.NGINX)
    assert "server 127.0.0.1:8001 backup;" in text
    assert "answer to the model name qwen: clients should use it." in " ".join(text.replace("#", "").split())
    document = yaml.safe_load(export_for_proxy(servers, ProxyForm.LITELLM))
    assert [one["model_name"] for one in document["model_list"]] == ["qwen", "qwen"]
    assert [one["litellm_params"]["order"] for one in document["model_list"]] == [1, 2]
    assert not any(proxy_warning(servers, form) for form in ProxyForm)
    assert "should use it" not in export_for_proxy(named(make, '["a", "b"]', '["b", "a"]'), ProxyForm.NGINX)


def test_three_servers_must_all_share_a_name(make: Make) -> None:
    apart = named(make, '["a", "b"]', "a", "b")
    with pytest.raises(ExportError, match="s1 serves a, s2 serves b: nginx"):
        export_for_proxy(apart, ProxyForm.NGINX)
    ring = named(make, '["a", "b"]', '["b", "c"]', '["a", "c"]')
    with pytest.raises(ExportError, match="no model name is served by all of these servers: nginx"):
        export_for_proxy(ring, ProxyForm.NGINX)


def test_litellm_reaches_a_server_on_all_addresses_via_loopback(make: Make) -> None:
    (model,) = yaml.safe_load(export_for_proxy([ProxiedServer("chat", make(host="0.0.0.0"))], ProxyForm.LITELLM))[
        "model_list"
    ]
    assert model["litellm_params"]["api_base"] == "http://127.0.0.1:8000/v1"
    assert "order" not in model["litellm_params"]


@pytest.mark.parametrize("form", list(ProxyForm))
def test_key_is_named_and_never_written(make: Make, form: ProxyForm) -> None:
    plan = make(secrets=("VLLM_API_KEY", "HF_TOKEN"))
    plan = replace(plan, environment={**plan.environment, "MY_TOKEN": KEY})
    text = export_for_proxy([ProxiedServer("chat", plan)], form)
    assert KEY not in text
    if form is ProxyForm.LITELLM:
        (model,) = yaml.safe_load(text)["model_list"]
        assert model["litellm_params"]["api_key"] == "os.environ/VLLM_API_KEY"
    elif form is ProxyForm.LLAMA_SWAP:
        assert "# Export HF_TOKEN, VLLM_API_KEY in the environment of llama-swap" in text
