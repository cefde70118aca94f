"""A plan as a Kubernetes Deployment with its Service and a volume for its models. Pure."""

from __future__ import annotations

import math

from vllm_launchers.plan.export.container import CACHE, ENTRYPOINT, STARTUP_SECONDS, Container, Mount, container
from vllm_launchers.plan.export.quoting import Yaml, comment, label, yaml_document
from vllm_launchers.plan.export.systemd import stop_seconds
from vllm_launchers.plan.model import Plan
from vllm_launchers.plan.shell_quoting import line_word

SHARED_MEMORY = "16Gi"
LEAST_VOLUME_GIB = 50
_PROBE_SECONDS = 10


def kubernetes(plan: Plan, *, name: str = "") -> str:
    """Three documents: a claim on a volume for downloaded models, the Deployment and its Service.

    A model in a folder on this machine becomes a ``hostPath``: the node must have it under the same path. Kubernetes
    decides which GPUs of a node it gets. Secrets come from a named Secret.

    Raises:
        ExportError: the engine has no such image, the model is a relative folder, or an argument is not text.
    """
    inside = container(plan)
    app = label(name or plan.preset)
    downloads = not plan.model.startswith("/")
    documents = [_deployment(plan, inside, app, downloads=downloads), _service(plan, app)]
    if downloads:
        documents.insert(0, _claim(plan, inside, app))
    lines = ["Apply with: kubectl apply -f FILE", *inside.notes]
    if plan.secrets:
        lines.append(f"First, from a file of NAME=value lines ({', '.join(plan.secrets)}):")
        lines.append(f"  kubectl create secret generic {app} --from-env-file={app}.env")
    if "VLLM_API_KEY" not in plan.secrets:
        lines.append("Whatever runs in the cluster can use this server: it has no API key (VLLM_API_KEY).")
    if inside.mounts:
        paths = ", ".join(line_word(mount.path) for mount in inside.mounts)
        lines.append(f"The node must have {paths}")
    return comment(*lines) + "---\n".join(yaml_document(document) for document in documents)


def _labels(app: str) -> dict[str, Yaml]:
    return {"app.kubernetes.io/name": app}


def _claim(plan: Plan, inside: Container, app: str) -> dict[str, Yaml]:
    weights = plan.memory.weights_gib * inside.gpus if plan.memory is not None else 0.0
    size = max(LEAST_VOLUME_GIB, math.ceil(weights * 1.5 / 10) * 10)
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": f"{app}-models", "labels": _labels(app)},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": f"{size}Gi"}}},
    }


def _deployment(plan: Plan, inside: Container, app: str, *, downloads: bool) -> dict[str, Yaml]:
    volumes, mounts = _volumes(inside, app, downloads=downloads)
    pod: dict[str, Yaml] = {
        # Otherwise a Service named vllm gives the pod a VLLM_PORT that is not a number, and vLLM ends on it.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": stop_seconds(plan),
        "containers": [_container(plan, inside, app, mounts)],
        "volumes": volumes,
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": app, "labels": _labels(app)},
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": _labels(app)},
            "template": {"metadata": {"labels": _labels(app)}, "spec": pod},
        },
    }


def _container(plan: Plan, inside: Container, app: str, mounts: list[Yaml]) -> dict[str, Yaml]:
    environment: list[Yaml] = [{"name": key, "value": _literal(value)} for key, value in inside.environment.items()]
    for secret in plan.secrets:
        environment.append({"name": secret, "valueFrom": {"secretKeyRef": {"name": app, "key": secret}}})
    return {
        "name": "vllm",
        "image": inside.image,
        "command": list(ENTRYPOINT),
        "args": [_literal(word) for word in inside.arguments],
        "env": environment,
        "ports": [{"name": "http", "containerPort": plan.port}],
        "resources": {"limits": {"nvidia.com/gpu": inside.gpus}},
        "startupProbe": _probe(inside, period=_PROBE_SECONDS, failures=STARTUP_SECONDS // _PROBE_SECONDS),
        "readinessProbe": _probe(inside, period=5, failures=3),
        "livenessProbe": _probe(inside, period=15, failures=6),
        "volumeMounts": mounts,
    }


def _probe(inside: Container, *, period: int, failures: int) -> dict[str, Yaml]:
    ask: dict[str, Yaml] = {"path": "/health", "port": "http", **({"scheme": "HTTPS"} if inside.tls else {})}
    return {"httpGet": ask, "periodSeconds": period, "timeoutSeconds": 10, "failureThreshold": failures}


def _volumes(inside: Container, app: str, *, downloads: bool) -> tuple[list[Yaml], list[Yaml]]:
    """The pod's volumes, and their mount points."""
    volumes: list[Yaml] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY}}]
    mounts: list[Yaml] = [{"name": "shm", "mountPath": "/dev/shm"}]
    claim: dict[str, Yaml] = {"persistentVolumeClaim": {"claimName": f"{app}-models"}}
    volumes.append({"name": "models", **(claim if downloads else {"emptyDir": {}})})
    mounts.append({"name": "models", "mountPath": CACHE})
    for number, mount in enumerate(inside.mounts):
        volumes.append({"name": f"host-{number}", "hostPath": {"path": mount.path}})
        mounts.append(_host_mount(f"host-{number}", mount))
    return volumes, mounts


def _host_mount(name: str, mount: Mount) -> dict[str, Yaml]:
    return {"name": name, "mountPath": mount.path, **({} if mount.writable else {"readOnly": True})}


def _service(plan: Plan, app: str) -> dict[str, Yaml]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": app, "labels": _labels(app)},
        "spec": {"selector": _labels(app), "ports": [{"name": "http", "port": plan.port, "targetPort": "http"}]},
    }


def _literal(text: str) -> str:
    """Escape text so that Kubernetes expands no ``$(VARIABLE)`` in it."""
    return text.replace("$", "$$")
