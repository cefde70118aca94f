"""A plan as a Kubernetes Deployment (LeaderWorkerSet for several nodes) with Service and a volume for models. Pure."""

from __future__ import annotations

import math

from msgspec.structs import replace

from vllm_launchers.plan.choices.nodes import HEADLESS, MASTER_ADDR, MASTER_PORT, NODE_FLAGS, NODES, RANK
from vllm_launchers.plan.command_line import line_word
from vllm_launchers.plan.export.container import CACHE, ENTRYPOINT, STARTUP_SECONDS, Container, Mount, container
from vllm_launchers.plan.export.quoting import Yaml, comment, label, yaml_document
from vllm_launchers.plan.export.systemd import stop_seconds
from vllm_launchers.plan.model import Plan
from vllm_launchers.plan.nodes import NodesPlan

SHARED_MEMORY = "16Gi"
LEAST_VOLUME_GIB = 50
OWN_ADDRESS = "VLLM_HOST_IP"
"""Variable from which vLLM reads the address where other nodes reach it."""
PROBE_SECONDS = 10


def kubernetes(plan: Plan, *, name: str = "") -> str:
    """Three documents: a volume claim for downloaded models, the Deployment or LeaderWorkerSet, and its Service.

    A model in a folder on this machine becomes a ``hostPath``: the node must have it under the same path. Kubernetes
    decides which GPUs of a node it gets. Secrets come from a named Secret.

    Raises:
        ExportError: the engine has no such image, the model is a relative folder, or an argument is not text.
    """
    shared = {flag: value for flag, value in plan.flags.items() if flag not in NODE_FLAGS}
    inside = container(plan if plan.nodes is None else replace(plan, flags=shared))
    app = label(name or plan.preset)
    downloads = not plan.model.startswith("/")
    if plan.nodes is None:
        documents = [_deployment(plan, inside, app, downloads=downloads), _service(plan, app, app, labels_of(app))]
    else:
        workers = container(replace(plan, flags={**shared, HEADLESS: True}))
        documents = [
            _leader_worker_set(plan, plan.nodes, inside, workers, app, downloads=downloads),
            _service(plan, f"{app}-leader", app, labels_of(app, "leader")),
        ]
    if downloads:
        documents.insert(0, claim(plan, inside, app))
    lines = ["Apply with: kubectl apply -f FILE", *inside.notes, *secret_lines(plan, app)]
    if "VLLM_API_KEY" not in plan.secrets:
        lines.append("Anything that runs in the cluster can use this server: it has no API key (VLLM_API_KEY).")
    if inside.mounts:
        paths = ", ".join(line_word(mount.path) for mount in inside.mounts)
        lines.append(f"{'The node' if plan.nodes is None else 'Each node'} must have {paths}")
    if plan.nodes is not None:
        lines.append("The cluster must have LeaderWorkerSet (https://lws.sigs.k8s.io), 0.6 or later.")
        if downloads:
            lines.append("The volume must be one that several nodes can mount; download the model into it first.")
    return comment(*lines) + "---\n".join(yaml_document(document) for document in documents)


def secret_lines(plan: Plan, app: str) -> list[str]:
    """How to create the Secret with the plan's secrets; empty if it has none."""
    if not plan.secrets:
        return []
    return [
        f"First, from a file of NAME=value lines ({', '.join(plan.secrets)}):",
        f"  kubectl create secret generic {app} --from-env-file={app}.env",
    ]


def labels_of(app: str, part: str = "") -> dict[str, Yaml]:
    """The labels of an object, or of a part of it."""
    return {"app.kubernetes.io/name": app, **({"app.kubernetes.io/component": part} if part else {})}


def claim(plan: Plan, inside: Container, app: str) -> dict[str, Yaml]:
    """A volume claim with room for the model."""
    nodes = 1 if plan.nodes is None else len(plan.nodes.nodes)
    mode = "ReadWriteOnce" if nodes == 1 else "ReadWriteMany"
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": f"{app}-models", "labels": labels_of(app)},
        "spec": {"accessModes": [mode], "resources": {"requests": {"storage": volume_size(plan, inside.gpus * nodes)}}},
    }


def volume_size(plan: Plan, gpus: int) -> str:
    """Room for the model's files: 1.5 times its weights on all GPUs."""
    weights = plan.memory.weights_gib * gpus if plan.memory is not None else 0.0
    return f"{max(LEAST_VOLUME_GIB, math.ceil(weights * 1.5 / 10) * 10)}Gi"


def _deployment(plan: Plan, inside: Container, app: str, *, downloads: bool) -> dict[str, Yaml]:
    volumes, mounts = pod_volumes(inside, app, downloads=downloads)
    served = pod_container(plan, inside, app, mounts) | served_parts(plan, inside)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": app, "labels": labels_of(app)},
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels_of(app)},
            "template": {"metadata": {"labels": labels_of(app)}, "spec": pod(plan, served, volumes)},
        },
    }


def _leader_worker_set(
    plan: Plan, nodes: NodesPlan, leader: Container, worker: Container, app: str, *, downloads: bool
) -> dict[str, Yaml]:
    """The machines as a group of pods, which is recreated when one of them ends."""
    volumes, mounts = pod_volumes(leader, app, downloads=downloads)
    first = pod_container(plan, leader, app, mounts, _joining(nodes, "0")) | served_parts(plan, leader)
    others = pod_container(plan, worker, app, mounts, _joining(nodes, "$(LWS_WORKER_INDEX)"))
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": app, "labels": labels_of(app)},
        "spec": {
            "replicas": 1,
            "leaderWorkerTemplate": {
                "size": len(nodes.nodes),
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": {
                    "metadata": {"labels": labels_of(app, "leader")}, "spec": pod(plan, first, volumes),
                },
                "workerTemplate": {
                    "metadata": {"labels": labels_of(app, "worker")}, "spec": pod(plan, others, volumes),
                },
            },
        },
    }  # fmt: skip


def _joining(nodes: NodesPlan, rank: str) -> tuple[str, ...]:
    """The multi-node flags of a pod, with the variables that LeaderWorkerSet sets."""
    return (
        f"--{NODES}", str(len(nodes.nodes)), f"--{RANK}", rank,
        f"--{MASTER_ADDR}", "$(LWS_LEADER_ADDRESS)", f"--{MASTER_PORT}", str(nodes.master_port),
    )  # fmt: skip


def pod(plan: Plan, inside: dict[str, Yaml], volumes: list[Yaml]) -> dict[str, Yaml]:
    """A pod with one container."""
    return {
        # Otherwise a Service named vllm would set VLLM_PORT to something other than a number, and vLLM would exit.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": stop_seconds(plan),
        "containers": [inside],
        "volumes": volumes,
    }


def pod_container(
    plan: Plan, inside: Container, app: str, mounts: list[Yaml], joining: tuple[str, ...] = ()
) -> dict[str, Yaml]:
    """A container; ``joining`` are additional arguments, in which Kubernetes expands variables."""
    own = {key: value for key, value in inside.environment.items() if not (joining and key == OWN_ADDRESS)}
    environment: list[Yaml] = [{"name": key, "value": literal(value)} for key, value in own.items()]
    if joining:
        environment.append({"name": OWN_ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    for secret in plan.secrets:
        environment.append({"name": secret, "valueFrom": {"secretKeyRef": {"name": app, "key": secret}}})
    return {
        "name": "vllm",
        "image": inside.image,
        "command": list(ENTRYPOINT),
        "args": [*(literal(word) for word in inside.arguments), *joining],
        "env": environment,
        "resources": {"limits": {"nvidia.com/gpu": inside.gpus}},
        "volumeMounts": mounts,
    }


def served_parts(plan: Plan, inside: Container) -> dict[str, Yaml]:
    """The parts that only a container with an HTTP server has."""
    return {
        "ports": [{"name": "http", "containerPort": plan.port}],
        "startupProbe": _probe(inside, period=PROBE_SECONDS, failures=STARTUP_SECONDS // PROBE_SECONDS),
        "readinessProbe": _probe(inside, period=5, failures=3),
        "livenessProbe": _probe(inside, period=15, failures=6),
    }


def _probe(inside: Container, *, period: int, failures: int) -> dict[str, Yaml]:
    ask: dict[str, Yaml] = {"path": "/health", "port": "http", **({"scheme": "HTTPS"} if inside.tls else {})}
    return {"httpGet": ask, "periodSeconds": period, "timeoutSeconds": 10, "failureThreshold": failures}


def pod_volumes(inside: Container, app: str, *, downloads: bool) -> tuple[list[Yaml], list[Yaml]]:
    """The pod's volumes, and their mount points."""
    volumes: list[Yaml] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY}}]
    mounts: list[Yaml] = [{"name": "shm", "mountPath": "/dev/shm"}]
    downloaded: dict[str, Yaml] = {"persistentVolumeClaim": {"claimName": f"{app}-models"}}
    volumes.append({"name": "models", **(downloaded if downloads else {"emptyDir": {}})})
    mounts.append({"name": "models", "mountPath": CACHE})
    for number, mount in enumerate(inside.mounts):
        volumes.append({"name": f"host-{number}", "hostPath": {"path": mount.path}})
        mounts.append(_host_mount(f"host-{number}", mount))
    return volumes, mounts


def _host_mount(name: str, mount: Mount) -> dict[str, Yaml]:
    return {"name": name, "mountPath": mount.path, **({} if mount.writable else {"readOnly": True})}


def _service(plan: Plan, name: str, app: str, selected: dict[str, Yaml]) -> dict[str, Yaml]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels_of(app)},
        "spec": {"selector": selected, "ports": [{"name": "http", "port": plan.port, "targetPort": "http"}]},
    }


def literal(text: str) -> str:
    """Escape text so that Kubernetes expands no ``$(VARIABLE)`` in it."""
    return text.replace("$", "$$")
