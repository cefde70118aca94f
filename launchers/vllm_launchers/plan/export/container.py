"""What Compose and Kubernetes share: image, arguments, folders and variables of a container. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from vllm_launchers.addresses import is_loopback
from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.plan.checks.request import local_ranks
from vllm_launchers.plan.export.quoting import ExportError, Yaml, checked, comment, label, yaml_document
from vllm_launchers.plan.export.systemd import stop_seconds
from vllm_launchers.plan.files import named_files
from vllm_launchers.plan.flags import flag_words
from vllm_launchers.plan.model import Plan
from vllm_launchers.secrets import redact_argv, redact_environment
from vllm_launchers.vllm.engines import EngineKind

IMAGE = "vllm/vllm-openai"
ENTRYPOINT = ("vllm", "serve")
"""Set explicitly, because the image's own entry point changed between releases."""

CACHE = "/huggingface"
"""Folder for models in the container; ``HF_HOME`` points there."""

STARTUP_SECONDS = 3600
"""Maximum startup time: a large model may have to be downloaded first."""

_PATH_FLAGS = (
    "config", "generation-config", "tool-parser-plugin", "reasoning-parser-plugin", "allowed-local-media-path",
)  # fmt: skip
"""Flags whose value may be a file or folder on this machine, besides those of `named_files`."""

_HOST_ONLY = frozenset(
    {
        "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", "CUDA_HOME", "HF_HOME", "HF_HUB_CACHE",
        "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE", "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "XDG_CACHE_HOME",
        "HOME", "PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "VIRTUAL_ENV", "TMPDIR",
    }
)  # fmt: skip
"""Variables that refer to this machine's folders, or to GPU numbers outside the container."""

_SNAPSHOT = lazy_pattern(r"(/.*/models--[^/]+)/snapshots/[^/]+(?:/.*)?")


class Mount(msgspec.Struct, frozen=True):
    """A file or folder on this machine, mounted under the same path."""

    path: str
    writable: bool = False


class Container(msgspec.Struct, frozen=True):
    """A plan as a container."""

    image: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    mounts: tuple[Mount, ...]
    gpus: int
    tls: bool
    notes: tuple[str, ...]


def container(plan: Plan) -> Container:
    """The plan in the official image.

    Raises:
        ExportError: the engine has no such image, the model is a relative folder, or an argument is not text.
    """
    if plan.engine.kind is EngineKind.SIMULATED:
        raise ExportError("the simulated engine has no container image")
    if plan.engine.build not in (None, "cuda"):
        raise ExportError(f"{IMAGE} is for NVIDIA GPUs, and this plan is for a {plan.engine.build} build")
    if plan.model.startswith(("./", "../", "~")):
        raise ExportError(f"in a container, relative paths don't work: give the full path of the model {plan.model}")
    version = plan.engine.public_version
    notes: tuple[str, ...] = ()
    if version is None:
        notes = ("The plan's vLLM version is unknown: replace 'latest' with it.",)
    elif ".dev" in version:
        notes = (f"vLLM {version} is a development build without an image: put a release in place of 'latest'.",)
    address = () if plan.flags.get("headless") is True else ("--host", "0.0.0.0", "--port", str(plan.port))
    words = redact_argv((plan.model, *address, *flag_words(plan.flags)))
    own = {k: v for k, v in redact_environment(plan.environment).items() if k not in _HOST_ONLY}
    environment = {"HF_HOME": CACHE} | own
    for name, value in environment.items():
        checked(value, name)
    return Container(
        image=f"{IMAGE}:{'latest' if notes else f'v{version}'}",
        arguments=tuple(checked(word, "the command") for word in words),
        environment=environment,
        mounts=tuple(dict.fromkeys(_mounts(plan))),
        gpus=plan.nodes.gpus_each if plan.nodes is not None else len(plan.gpus) or local_ranks(plan.flags),
        tls=plan.tls,
        notes=notes,
    )


def published_address(plan: Plan) -> str:
    """The address on this machine for a container's port, as restricted as the plan's."""
    if is_loopback(plan.host):
        return "[::1]" if ":" in plan.host else "127.0.0.1"
    if re.fullmatch(r"[0-9.]+", plan.host):
        return plan.host
    return f"[{plan.host.strip('[]')}]" if ":" in plan.host else "127.0.0.1"


def _mounts(plan: Plan) -> Iterator[Mount]:
    if plan.model.startswith("/"):
        yield Mount(_whole(plan.model))
    for name in _PATH_FLAGS:
        value = plan.flags.get(name)
        if isinstance(value, str) and value.startswith("/"):
            yield Mount(_whole(value))
    folder = plan.flags.get("download-dir")
    if isinstance(folder, str) and folder.startswith("/"):
        yield Mount(folder, writable=True)
    for name, path in named_files(plan.flags, plan.model):
        if name != "config-format":  # a file of the model
            yield Mount(_whole(path))


def _whole(path: str) -> str:
    """For a snapshot in a model cache, return the model's whole folder, since a snapshot only has links into it."""
    found = _SNAPSHOT.fullmatch(path)
    return found[1] if found else path


# -- a plan as a Docker Compose service. Pure -------------------------------------------------------------------------


SHARED_MEMORY = "16gb"
"""Maximum size of ``/dev/shm``, which GPU processes share; unused, it takes no memory."""


def compose(plan: Plan, *, name: str = "") -> str:
    """The text of a ``compose.yaml`` with one service on the official image.

    The container gets exactly the plan's GPUs and listens where the plan does. Files and folders that the plan names,
    including the model's, are mounted under the same paths. Secrets come from a file beside it.

    Raises:
        ExportError: the engine has no such image, the model is a relative folder, or an argument is not text.
    """
    if plan.nodes is not None:
        raise ExportError("nodes find each other on many ports of their machines; use shell, systemd or kubernetes")
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
    volumes: list[Yaml] = [f"${{HF_HOME:-~/.cache/huggingface}}:{CACHE}"]  # created if missing
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
    """Escape text so that Compose expands no variable in it."""
    return text.replace("$", "$$")
