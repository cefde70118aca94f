"""Servers as the configuration of a proxy: nginx, llama-swap, LiteLLM. Pure; never contains a secret."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import combinations

import msgspec

from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.plan.export.container import STARTUP_SECONDS
from vllm_launchers.plan.export.quoting import ExportError, Yaml, checked, comment, label, yaml_document
from vllm_launchers.plan.export.systemd import stop_seconds
from vllm_launchers.plan.flags import VISIBLE, flag_words, served_names
from vllm_launchers.plan.model import Plan
from vllm_launchers.secrets import API_KEY, redact_argv, redact_environment
from vllm_launchers.vllm.flags.changes import whole_number

NGINX_ADDRESS = "127.0.0.1:8080"
"""The address that nginx listens on, unless the file is edited."""

CONCURRENT_REQUESTS = 1000
"""The fewest parallel requests that llama-swap lets through; it answers 429 to more, where vLLM would queue them."""

_NGINX_HOST = lazy_pattern(r"[A-Za-z0-9._:\[\]-]+")


class ProxyForm(StrEnum):
    """The proxies that servers can be exported for."""

    NGINX = "nginx"
    LLAMA_SWAP = "llama-swap"
    LITELLM = "litellm"


class ProxiedServer(msgspec.Struct, frozen=True):
    """A server's name and its plan."""

    name: str
    plan: Plan

    @property
    def model(self) -> str:
        """The model name that its clients use."""
        return self.plan.served_name


def export_for_proxy(servers: Sequence[ProxiedServer], form: ProxyForm) -> str:
    """Return a proxy's configuration file for these servers; the first is preferred, e.g. the newer of two.

    Raises:
        ExportError: they cannot be expressed in that form.
    """
    forms: dict[ProxyForm, Callable[[Sequence[ProxiedServer]], str]] = {
        ProxyForm.NGINX: nginx,
        ProxyForm.LLAMA_SWAP: llama_swap,
        ProxyForm.LITELLM: litellm,
    }
    return checked(forms[form](servers), "the configuration")


def shared_model(servers: Sequence[ProxiedServer]) -> str:
    """The first model name that all of these servers accept; empty if there is none."""
    first, *others = [served_names(server.plan.flags, server.plan.model) for server in servers]
    return next((name for name in first if all(name in names for names in others)), "")


def differing_models(servers: Sequence[ProxiedServer]) -> str:
    """Why one of these servers can't answer for another: their model names differ. Empty if each can."""
    if shared_model(servers):
        return ""
    unlike = next((pair for pair in combinations(servers, 2) if not shared_model(pair)), None)
    if unlike is None:
        return "no model name is served by all of these servers"
    one, other = unlike
    return f"{one.name} serves {one.model}, {other.name} serves {other.model}"


def proxy_warning(servers: Sequence[ProxiedServer], form: ProxyForm) -> str:
    """What a configuration does not do, though it may be expected of several servers; empty if nothing."""
    different = differing_models(servers)
    if not different:
        return ""
    proxy = {ProxyForm.LITELLM: "LiteLLM", ProxyForm.LLAMA_SWAP: "llama-swap"}.get(form, str(form))
    return f"{different}: {proxy} routes each request to the server of its model, and none takes over for another"


def nginx(servers: Sequence[ProxiedServer]) -> str:
    """An upstream whose first server gets all requests, and the others only while it does not answer.

    Raises:
        ExportError: one of them uses TLS and another does not, or they have different models.
    """
    first = servers[0]
    if len({server.plan.tls for server in servers}) > 1:
        raise ExportError("one of these servers uses TLS and another does not: an nginx upstream needs all or none")
    if different := differing_models(servers):
        raise ExportError(
            f"{different}: nginx does not look at a request's model, and the other server would answer it with 404. "
            f"Export them one by one, give both the same --served-model-name, or use {ProxyForm.LITELLM} or "
            f"{ProxyForm.LLAMA_SWAP}"
        )
    places = [server.plan.url.partition("://")[2] for server in servers]
    if not all(map(_NGINX_HOST.fullmatch, places)):
        raise ExportError("the address of a server can't be written for nginx")
    upstream = label(first.name).replace("-", "_")
    lines = [f"upstream {upstream} {{", f"    server {places[0]};  # {first.name}"]
    lines += [
        f"    server {place} backup;  # {server.name}: only while the others do not answer"
        for place, server in zip(places[1:], servers[1:], strict=True)
    ]
    lines += [
        "    keepalive 32;",
        "}",
        "",
        "server {",
        f"    listen {NGINX_ADDRESS};",
        "    client_max_body_size 64m;  # prompts with images are long",
        "    location / {",
        f"        proxy_pass {'https' if first.plan.tls else 'http'}://{upstream};",
        "        proxy_http_version 1.1;",
        '        proxy_set_header Connection "";',
        "        proxy_set_header Host $host;",
        "        proxy_next_upstream error non_idempotent;  # a completion may be retried",
        "        proxy_buffering off;  # each token as it comes",
        "        proxy_read_timeout 3600s;  # a response that is not streamed comes all at once",
        "    }",
        "}",
    ]
    about = [
        "nginx in front of vLLM; belongs in the http block, such as /etc/nginx/conf.d/. Check: nginx -t",
        "Clients send their API key themselves; nginx passes it on.",
    ]
    if len({frozenset(served_names(server.plan.flags, server.plan.model)) for server in servers}) > 1:
        about.append(f"All of these servers answer to the model name {shared_model(servers)}: clients should use it.")
    head = comment(*about)
    return head + "\n".join(lines) + "\n"


def llama_swap(servers: Sequence[ProxiedServer]) -> str:
    """llama-swap starts and stops the servers itself; servers that share a GPU replace each other.

    Raises:
        ExportError: an argument of a command would be taken for one of llama-swap's macros.
    """
    warning = proxy_warning(servers, ProxyForm.LLAMA_SWAP)
    document: dict[str, Yaml] = {
        "healthCheckTimeout": STARTUP_SECONDS,
        "models": {server.name: _swapped_model(server) for server in servers},
    }
    if len(servers) > 1:
        members: dict[str, Yaml] = {
            "swap": _share_gpus(servers), "exclusive": False, "members": [server.name for server in servers],
        }  # fmt: skip
        document["groups"] = {label(servers[0].name): members}
    secrets = sorted({name for server in servers for name in server.plan.secrets})
    lines = ["llama-swap starts these servers itself, on ports of its own: stop those of vllm-console first."]
    if secrets:
        lines.append(f"Export {', '.join(secrets)} in the environment of llama-swap; its servers inherit them.")
    lines.append("ttl: seconds without a request after which a server is stopped; 0: never.")
    lines.append("concurrencyLimit: far above what vLLM runs at once, so that vLLM queues requests itself.")
    lines.append("unloadTimeout: seconds for a server to stop; llama-swap kills it after 10 by default.")
    return comment(*lines, *([f"{warning}."] if warning else [])) + yaml_document(document)


def _swapped_model(server: ProxiedServer) -> dict[str, Yaml]:
    plan = server.plan
    words = redact_argv((*plan.engine.command, "serve", plan.model, "--host", "127.0.0.1", *flag_words(plan.flags)))
    environment = [f"{name}={value}" for name, value in redact_environment(plan.environment).items()]
    if any("${" in text or "\n" in text for text in (*words, *environment)):
        raise ExportError(f"{server.name}: llama-swap can't take a command with ${{ or a line break in it")
    model: dict[str, Yaml] = {
        "cmd": f"{shlex.join(words)} --port ${{PORT}}",
        "proxy": f"{'https' if server.plan.tls else 'http'}://127.0.0.1:${{PORT}}",
        "checkEndpoint": "/health",
        "ttl": 0,
        "useModelName": server.model,
        "concurrencyLimit": max(CONCURRENT_REQUESTS, 2 * whole_number(plan.flags, "max-num-seqs", 0)),
        "unloadTimeout": stop_seconds(plan),
    }
    return model | ({"env": environment} if environment else {})


def _share_gpus(servers: Sequence[ProxiedServer]) -> bool:
    """Whether two of them use the same GPU, or might."""
    sets = [set(server.plan.environment.get(VISIBLE, "").split(",")) for server in servers]
    if all(server.plan.engine.build == "cpu" for server in servers):
        return False
    return any(not one - {""} or one & other for at, one in enumerate(sets) for other in sets[:at] or [set()])


def litellm(servers: Sequence[ProxiedServer]) -> str:
    """One deployment per server. If they have the same model, the first is tried first."""
    warning = proxy_warning(servers, ProxyForm.LITELLM)
    ordered = len(servers) > 1 and not warning
    models: list[Yaml] = []
    for number, server in enumerate(servers, 1):
        model = shared_model(servers) if ordered else server.model
        parameters: dict[str, Yaml] = {"model": f"hosted_vllm/{model}", "api_base": f"{server.plan.url}/v1"}
        if API_KEY in server.plan.secrets:
            parameters["api_key"] = f"os.environ/{API_KEY}"
        if ordered:
            parameters["order"] = number
        models.append({"model_name": model, "litellm_params": parameters, "model_info": {"id": server.name}})
    document: dict[str, Yaml] = {"model_list": models}
    if ordered:
        document["router_settings"] = {"enable_pre_call_checks": True}
    lines = ["Start with: LITELLM_MASTER_KEY=... litellm --config FILE; clients send that key to LiteLLM."]
    if any(API_KEY in server.plan.secrets for server in servers):
        lines.append(f"{API_KEY} is read from the environment of LiteLLM.")
    if ordered:
        lines.append("order: the lowest is tried first, the others if it fails (enable_pre_call_checks).")
    if warning:
        lines.append(f"{warning}.")
    return comment(*lines) + yaml_document(document)
