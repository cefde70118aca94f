"""A plan as a Docker Compose service. Pure."""

from __future__ import annotations

from vllm_launchers.plan.export.container import (
    CACHE,
    ENTRYPOINT,
    STARTUP_SECONDS,
    Container,
    container,
    published_address,
)
from vllm_launchers.plan.export.quoting import Yaml, comment, label, yaml_document
from vllm_launchers.plan.export.systemd import stop_seconds
from vllm_launchers.plan.model import Plan

SHARED_MEMORY = "16gb"
"""The most that ``/dev/shm`` may grow to, where GPU processes meet; it takes nothing until it is used."""


def compose(plan: Plan, *, name: str = "") -> str:
    """The text of a ``compose.yaml`` with one service on the official image.

    The container gets just the plan's GPUs and listens where the plan does. Files and folders of this machine that the
    plan names, the model's among them, are there under the same paths. Secrets come from a file beside it.

    Raises:
        ExportError: the engine has no such image, the model is a relative folder, or a word is no text.
    """
    inside = container(plan)
    service = label(name or plan.preset)
    lines = [f"Start with: docker compose -f FILE up -d {service}", *inside.notes]
    if plan.secrets:
        lines.append(f"Secrets, one NAME=value a line ({', '.join(plan.secrets)}), in {service}.env beside this file;")
        lines.append(f"only you should be able to read it: install -m 600 /dev/null {service}.env")
    return comment(*lines) + yaml_document({"services": {service: _service(plan, inside, service)}})


def _service(plan: Plan, inside: Container, service: str) -> dict[str, Yaml]:
    document: dict[str, Yaml] = {
        "image": inside.image,
        "entrypoint": list(ENTRYPOINT),
        "command": [_literal(word) for word in inside.arguments],
        "ports": [f"{published_address(plan)}:{plan.port}:{plan.port}"],
        "environment": {key: _literal(value) for key, value in inside.environment.items()},
    }
    if plan.secrets:
        document["env_file"] = [f"{service}.env"]
    return document | {
        "volumes": _volumes(plan, inside),
        "shm_size": SHARED_MEMORY,
        "init": True,
        "ulimits": {"nofile": 65536, "memlock": -1},
        "deploy": {"resources": {"reservations": {"devices": [_devices(plan, inside)]}}},
        "healthcheck": _healthcheck(plan, inside),
        "restart": "unless-stopped",
        "stop_signal": "SIGINT",
        "stop_grace_period": f"{stop_seconds(plan)}s",
    }


def _volumes(plan: Plan, inside: Container) -> list[Yaml]:
    own = plan.environment.get("HF_HOME")
    volumes: list[Yaml] = [f"${{HF_HOME:-~/.cache/huggingface}}:{CACHE}"]  # made if it is not there
    if own:
        volumes = [{"type": "bind", "source": _literal(own), "target": CACHE}]
    for mount in inside.mounts:
        path = _literal(mount.path)
        volume: dict[str, Yaml] = {"type": "bind", "source": path, "target": path}
        volumes.append(volume if mount.writable else volume | {"read_only": True})
    return volumes


def _devices(plan: Plan, inside: Container) -> dict[str, Yaml]:
    which: dict[str, Yaml] = {"device_ids": [str(gpu) for gpu in plan.gpus]} if plan.gpus else {"count": inside.gpus}
    return {"driver": "nvidia", **which, "capabilities": ["gpu"]}


def _healthcheck(plan: Plan, inside: Container) -> dict[str, Yaml]:
    scheme, context = ("https", ", context=ssl._create_unverified_context()") if inside.tls else ("http", "")
    ask = f"import ssl, urllib.request as r; r.urlopen('{scheme}://127.0.0.1:{plan.port}/health', timeout=8{context})"
    return {
        "test": ["CMD", "python3", "-c", ask],
        "interval": "15s",
        "timeout": "10s",
        "retries": 4,
        "start_period": f"{STARTUP_SECONDS}s",
    }


def _literal(text: str) -> str:
    """A text in which Compose sees no variable."""
    return text.replace("$", "$$")
