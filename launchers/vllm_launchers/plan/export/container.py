"""What Compose and Kubernetes share: image, arguments, folders and variables of a plan inside a container. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_launchers.addresses import is_loopback
from vllm_launchers.plan.export.errors import ExportError
from vllm_launchers.plan.export.quoting import checked
from vllm_launchers.plan.flags import flag_words
from vllm_launchers.plan.model import EngineKind, Plan
from vllm_launchers.plan.secrets import redact_argv, redact_environment

IMAGE = "vllm/vllm-openai"
ENTRYPOINT = ("vllm", "serve")
"""Said outright, since the image's own changed over the releases."""

CACHE = "/huggingface"
"""Where models are kept inside; ``HF_HOME`` says so."""

STARTUP_SECONDS = 3600
"""How long a server may take to come up: a large model may have to be fetched first."""

_PATH_FLAGS = (
    "tokenizer", "hf-config-path", "chat-template", "generation-config", "ssl-keyfile", "ssl-certfile",
    "ssl-ca-certs", "log-config-file", "tool-parser-plugin", "reasoning-parser-plugin", "allowed-local-media-path",
    "spec-model",
)  # fmt: skip
"""Flags whose value may be a file or folder of this machine."""

_HOST_ONLY = frozenset(
    {
        "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", "CUDA_HOME", "HF_HOME", "HF_HUB_CACHE",
        "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE", "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "XDG_CACHE_HOME",
        "HOME", "PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "VIRTUAL_ENV", "TMPDIR",
    }
)  # fmt: skip
"""Variables that speak of this machine's folders, or of GPUs as they are counted outside."""

_SNAPSHOT = re.compile(r"(/.*/models--[^/]+)/snapshots/[^/]+(?:/.*)?")


@dataclass(frozen=True, slots=True)
class Mount:
    """A file or folder of this machine, under the same path inside."""

    path: str
    writable: bool = False


@dataclass(frozen=True, slots=True)
class Container:
    """A plan as a container."""

    image: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    mounts: tuple[Mount, ...]
    gpus: int
    tls: bool
    notes: tuple[str, ...]


def container(plan: Plan) -> Container:
    """The plan inside the official image.

    Raises:
        ExportError: the engine has no such image, the model is a relative folder, or a word is no text.
    """
    if plan.engine.kind is EngineKind.SIMULATED:
        raise ExportError("the simulated engine has no container image")
    if plan.engine.build not in (None, "cuda"):
        raise ExportError(f"{IMAGE} is for NVIDIA GPUs, and this plan is for a {plan.engine.build} build")
    if plan.model.startswith(("./", "../", "~")):
        raise ExportError(f"a container has no folder of its own: give the whole path of the model {plan.model}")
    version = plan.engine.version.partition("+")[0] if plan.engine.version else None
    notes = () if version else ("Which vLLM the plan is for was not known: put its version in place of 'latest'.",)
    words = redact_argv((plan.model, "--host", "0.0.0.0", "--port", str(plan.port), *flag_words(plan.flags)))
    own = {k: v for k, v in redact_environment(plan.environment).items() if k not in _HOST_ONLY}
    environment = {"HF_HOME": CACHE} | own
    for name, value in environment.items():
        checked(value, name)
    return Container(
        image=f"{IMAGE}:{f'v{version}' if version else 'latest'}",
        arguments=tuple(checked(word, "the command") for word in words),
        environment=environment,
        mounts=tuple(dict.fromkeys(_mounts(plan))),
        gpus=len(plan.gpus) or _world(plan),
        tls="ssl-certfile" in plan.flags,
        notes=notes,
    )


def published_address(plan: Plan) -> str:
    """The address of this machine at which a container's port is to be reached: as narrow as the plan has it."""
    if is_loopback(plan.host):
        return "[::1]" if ":" in plan.host else "127.0.0.1"
    if re.fullmatch(r"[0-9.]+", plan.host):
        return plan.host
    return f"[{plan.host.strip('[]')}]" if ":" in plan.host else "127.0.0.1"


def _world(plan: Plan) -> int:
    """GPUs that the plan takes: tensor × pipeline × data parallel."""
    names = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")
    sizes = [plan.flags.get(name, 1) for name in names]
    return math.prod(size if isinstance(size, int) and size > 0 else 1 for size in sizes)


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
    for path in (*_adapters(plan.flags.get("lora-modules")), *_draft(plan.flags.get("speculative-config"))):
        yield Mount(_whole(path))


def _whole(path: str) -> str:
    """A snapshot in a model cache is made of links to its neighbours, so the model's whole folder is needed."""
    found = _SNAPSHOT.fullmatch(path)
    return found[1] if found else path


def _adapters(value: object) -> Iterator[str]:
    """The folders of ``--lora-modules``: ``NAME=PATH`` or a JSON object."""
    if not isinstance(value, str):
        return
    document = _json(value)
    path = document.get("path") if document else value.partition("=")[2]
    if isinstance(path, str) and path.startswith("/"):
        yield path


def _draft(value: object) -> Iterator[str]:
    """The folder of the draft model of ``--speculative-config``."""
    path = _json(value).get("model") if isinstance(value, str) else None
    if isinstance(path, str) and path.startswith("/"):
        yield path


def _json(text: str) -> dict[str, object]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
