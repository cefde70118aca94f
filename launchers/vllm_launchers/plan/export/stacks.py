"""A plan for the stacks that serve vLLM on Kubernetes: KServe, llm-d and vLLM's production-stack. Pure.

Each was checked against the schema of the release in `CHECKED`. All three send requests to a pod over plain HTTP. A
plan over several nodes, of which only the first serves, is left to LeaderWorkerSet (`kubernetes`).
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from vllm_launchers.plan.export.container import STARTUP_SECONDS, Container, container
from vllm_launchers.plan.export.kubernetes import (
    PROBE_SECONDS,
    SHARED_MEMORY,
    claim,
    labels_of,
    literal,
    pod,
    pod_container,
    pod_volumes,
    secret_lines,
    served_parts,
    volume_size,
)
from vllm_launchers.plan.export.quoting import ExportError, Yaml, comment, label, yaml_document
from vllm_launchers.plan.export.systemd import stop_seconds
from vllm_launchers.plan.flags import PREFIX, TENSOR, flag_words
from vllm_launchers.plan.model import Plan
from vllm_launchers.secrets import API_KEY, redact_argv
from vllm_launchers.vllm.flags.changes import whole_number

CHECKED: Mapping[str, str] = {
    "KServe": "InferenceService v1beta1 of KServe 0.20",
    "llm-d": "chart llm-d-modelservice 0.4.12",
    "production-stack": "chart vllm-stack 0.1.12",
}

_SEVERAL_NODES: Mapping[str, str] = {
    "KServe": "KServe runs the nodes of an InferenceService as a Ray cluster, not with vLLM's own --nnodes",
    "llm-d": "llm-d sends requests to every pod of a model, and only the first of several nodes serves",
    "production-stack": "production-stack runs several nodes as a Ray cluster, not with vLLM's own --nnodes",
}
"""Why a stack cannot run a plan over several nodes."""

HF_TOKEN = "HF_TOKEN"
_OWN_CACHE = "HF_HOME"
"""Both charts set it, to their own volume."""


def kserve(plan: Plan, *, name: str = "") -> str:
    """An InferenceService with vLLM as a custom container, and a volume claim for downloaded models.

    Raises:
        ExportError: several nodes, HTTPS, or something that `container` rejects.
    """
    inside, app, downloads = _single(plan, "KServe"), label(name or plan.preset), not plan.model.startswith("/")
    volumes, mounts = pod_volumes(inside, app, downloads=downloads)
    served = pod_container(plan, inside, app, mounts) | served_parts(plan, inside) | {"name": "kserve-container"}
    service: dict[str, Yaml] = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {
            "name": app,
            "labels": labels_of(app),
            # Knative would forbid the volumes, and stop a server that takes more than ten minutes to start.
            "annotations": {"serving.kserve.io/deploymentMode": "Standard"},
        },
        "spec": {
            "predictor": {
                "minReplicas": 1,
                "maxReplicas": 1,
                "deploymentStrategy": {"type": "Recreate"},
                **pod(plan, served, volumes),
            }
        },
    }
    documents = [claim(plan, inside, app), service] if downloads else [service]
    lines = [*_checked("KServe"), "Apply with: kubectl apply -f FILE", *inside.notes, *secret_lines(plan, app)]
    return comment(*lines) + "---\n".join(yaml_document(document) for document in documents)


def llm_d(plan: Plan, *, name: str = "") -> str:
    """Values for llm-d's model service chart: one decode pod, no prefill pods, no routing sidecar.

    Raises:
        ExportError: several nodes, HTTPS, a model in a folder, a variable with ``{{``, or something that `container`
            rejects.
    """
    inside, app = _single(plan, "llm-d"), label(name or plan.preset)
    if plan.model.startswith("/"):
        raise ExportError(
            f"llm-d loads a model from the hub or a volume claim, not from the folder {plan.model}: use kubernetes"
        )
    if unsafe := [key for key, value in inside.environment.items() if "{{" in value]:
        raise ExportError(f"{unsafe[0]} contains '{{{{', which llm-d's chart would read as a template: use kubernetes")
    own = {key: value for key, value in inside.environment.items() if key != _OWN_CACHE}
    others = tuple(secret for secret in plan.secrets if secret != HF_TOKEN)
    volumes, mounts = _extra_volumes(inside, app)
    first = pod_container(replace(plan, secrets=others), replace(inside, environment=own), app, mounts)
    gpus: dict[str, Yaml] = {"nvidia.com/gpu": str(inside.gpus)}
    first |= served_parts(plan, inside) | {
        "modelCommand": "custom",
        "mountModelVolume": True,
        "resources": {"limits": gpus, "requests": gpus},
    }
    values: dict[str, Yaml] = {
        "fullnameOverride": app,
        "modelArtifacts": {
            "name": plan.served_name,
            "uri": f"hf://{plan.model}",
            "size": volume_size(plan, inside.gpus),
            "authSecretName": app if HF_TOKEN in plan.secrets else "",
        },
        "multinode": False,
        "accelerator": {"type": "nvidia"},
        "routing": {"servicePort": plan.port, "proxy": {"enabled": False}},
        "decode": {
            "create": True,
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": stop_seconds(plan),
            "parallelism": {"tensor": whole_number(plan.flags, TENSOR), "data": 1, "dataLocal": 1, "workers": 1},
            "containers": [first],
            "volumes": volumes,
        },
        "prefill": {"create": False},
    }
    lines = [
        *_checked("llm-d"),
        "helm repo add llm-d-modelservice https://llm-d-incubation.github.io/llm-d-modelservice/",
        f"Apply with: helm install {app} llm-d-modelservice/llm-d-modelservice -f FILE",
        "llm-d's router and its InferencePool are installed apart; the pods have the label that the pool selects.",
        *inside.notes,
        *secret_lines(plan, app),
    ]
    return comment(*lines) + yaml_document(values)


def production_stack(plan: Plan, *, name: str = "") -> str:
    """Values for vLLM's production-stack: one model with one engine, behind the stack's router.

    Raises:
        ExportError: several nodes, HTTPS, or something that `container` rejects.
    """
    inside, app = _single(plan, "production-stack"), label(name or plan.preset)
    rest = {flag: value for flag, value in plan.flags.items() if flag not in (PREFIX, TENSOR)}
    repository, _, tag = inside.image.partition(":")
    own = {key: value for key, value in inside.environment.items() if key != _OWN_CACHE}
    environment: list[Yaml] = [{"name": key, "value": literal(value)} for key, value in own.items()]
    environment += [
        {"name": secret, "valueFrom": {"secretKeyRef": {"name": app, "key": secret}}}
        for secret in plan.secrets
        if secret not in (HF_TOKEN, API_KEY)
    ]
    gpus: dict[str, Yaml] = {"nvidia.com/gpu": inside.gpus}
    model: dict[str, Yaml] = {
        "name": app,
        "repository": repository,
        "tag": tag,
        "modelURL": literal(plan.model),
        "replicaCount": 1,
        "resources": {"limits": gpus, "requests": gpus},
        "shmSize": SHARED_MEMORY,
        "vllmConfig": {
            # The chart turns prefix caching off if this is missing, and mounts /dev/shm only with the next one.
            "enablePrefixCaching": plan.flags.get(PREFIX, True) is not False,
            "tensorParallelSize": whole_number(plan.flags, TENSOR),
            "extraArgs": [literal(word) for word in redact_argv(tuple(flag_words(rest)))],
        },
        "env": environment,
    }
    if not plan.model.startswith("/"):
        model |= {"pvcStorage": volume_size(plan, inside.gpus), "pvcAccessMode": ["ReadWriteOnce"]}
    if HF_TOKEN in plan.secrets:
        model["hf_token"] = {"secretName": app, "secretKey": HF_TOKEN}
    volumes, mounts = _extra_volumes(inside, app)
    shared = ("shm",)  # the chart has its own
    if mounted := [one for one in mounts if _name(one) not in shared]:
        model["extraVolumes"] = [one for one in volumes if _name(one) not in shared]
        model["extraVolumeMounts"] = mounted
    engine: dict[str, Yaml] = {
        "containerPort": plan.port,
        "strategy": {"type": "Recreate"},
        "startupProbe": {
            "initialDelaySeconds": 15,
            "periodSeconds": PROBE_SECONDS,
            "failureThreshold": STARTUP_SECONDS // PROBE_SECONDS,
            "httpGet": {"path": "/health", "port": plan.port},
        },
        "livenessProbe": {"httpGet": {"path": "/health", "port": plan.port}},
        "readinessProbe": {"httpGet": {"path": "/health", "port": plan.port}},
        "modelSpec": [model],
    }
    if API_KEY in plan.secrets:
        engine["vllmApiKey"] = {"secretName": app, "secretKey": API_KEY}
    lines = [
        *_checked("production-stack"),
        "helm repo add vllm https://vllm-project.github.io/production-stack",
        f"Apply with: helm install {app} vllm/vllm-stack -f FILE",
        *inside.notes,
        *secret_lines(plan, app),
    ]
    return comment(*lines) + yaml_document({"servingEngineSpec": engine})


def _single(plan: Plan, stack: str) -> Container:
    """The plan as a single container in a pod that the stack routes requests to."""
    if plan.nodes is not None:
        raise ExportError(f"{_SEVERAL_NODES[stack]}: use kubernetes, which writes a LeaderWorkerSet")
    if plan.tls:
        raise ExportError(f"{stack} talks HTTP to the server: leave out --ssl-certfile, and let {stack} serve HTTPS")
    return container(plan)


def _checked(stack: str) -> list[str]:
    return [f"For {stack}; compared with the schema of {CHECKED[stack]}."]


def _extra_volumes(inside: Container, app: str) -> tuple[list[Yaml], list[Yaml]]:
    """Volumes and mount points, except those for models, which the chart adds itself."""
    volumes, mounts = pod_volumes(inside, app, downloads=False)
    return [one for one in volumes if _name(one) != "models"], [one for one in mounts if _name(one) != "models"]


def _name(one: Yaml) -> str:
    return str(one.get("name")) if isinstance(one, Mapping) else ""
