"""Makes the plan of a launch: preset, engine and a person's changes become argv, environment and warnings. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_launchers.plan.errors import PlanError
from vllm_launchers.plan.flags import flag_words, normalise_setting, spellings
from vllm_launchers.plan.model import Changes, Engine, EngineKind, FlagValue, Plan, same_value
from vllm_launchers.plan.warnings import warnings_for
from vllm_launchers.presets.model import Preset

YOU_SET_IT = "you set it"
QUIET_ENDPOINTS = "/health,/metrics"
CPU_KV_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
CPU_KV_GIB = 2
"""GiB of RAM for the KV cache on a CPU build when nobody said how much."""

_QUIET_SINCE = (0, 16, 0)


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    flags: dict[str, FlagValue]
    reasons: dict[str, str]
    environment: dict[str, str]
    warnings: list[str]


def make_plan(
    preset: Preset,
    engine: Engine,
    changes: Changes | None = None,
    *,
    host: str,
    port: int,
    model: str | None = None,
    environment: Mapping[str, str] | None = None,
    gpus: Sequence[int] = (),
    secrets: Sequence[str] = (),
    inherited: Mapping[str, str] | None = None,
) -> Plan:
    """Resolve a launch.

    ``model`` is the preset's unless given. ``environment`` is what the person adds, without secrets, whose *names*
    stand in ``secrets``. ``gpus`` are indices in the order of the PCI bus, as NVML and nvidia-smi count them.
    ``inherited`` is the environment that the server will inherit; it is only looked at, not passed on.

    Raises:
        PlanError: a change names no flag, a secret, or what is chosen elsewhere; the model's name is unusable.
    """
    changes = changes or Changes()
    model = model or preset.model
    if model.startswith("-") or not model.strip() or "\0" in model:
        raise PlanError("the model must be a name such as Qwen/Qwen3-8B-AWQ, or a folder")
    unset = {spelling for name in changes.unset for spelling in spellings(name)}
    draft = _Draft(
        flags={name: setting.value for name, setting in preset.flags.items() if name not in unset},
        reasons={name: setting.why for name, setting in preset.flags.items() if name not in unset},
        environment={name: setting.value for name, setting in preset.environment.items()} | dict(environment or {}),
        warnings=[],
    )
    chosen = dict(normalise_setting(name, value) for name, value in changes.set.items())
    for name, value in chosen.items():
        if name not in draft.flags or not same_value(draft.flags[name], value):
            draft.flags[name], draft.reasons[name] = value, YOU_SET_IT
    _keep_log_readable(draft, engine, unset)
    if engine.kind is EngineKind.VLLM and engine.build == "cpu":
        _fit_to_cpu(draft, inherited or {})
    _place(draft, gpus, engine)
    draft.warnings += warnings_for(draft.flags, engine, host=host, gpus=gpus, secrets=secrets)
    return Plan(
        preset=preset.name,
        model=model,
        engine=engine,
        host=host,
        port=port,
        argv=(*engine.command, "serve", model, "--host", host, "--port", str(port), *flag_words(draft.flags)),
        flags=draft.flags,
        reasons=draft.reasons,
        environment=draft.environment,
        secrets=tuple(sorted(set(secrets))),
        gpus=tuple(gpus),
        warnings=tuple(draft.warnings),
    )


def _keep_log_readable(draft: _Draft, engine: Engine, unset: set[str]) -> None:
    """vLLM logs every request for ``/metrics``; one a second buries what matters."""
    name = "disable-access-log-for-endpoints"
    release = engine.release
    if release is None or release < _QUIET_SINCE or name in unset or name in draft.flags:
        return
    if draft.flags.get("disable-uvicorn-access-log") is not True:
        draft.flags[name] = QUIET_ENDPOINTS
        draft.reasons[name] = "These are asked every second to watch the server; a line for each would bury its log."


def _fit_to_cpu(draft: _Draft, inherited: Mapping[str, str]) -> None:
    """On a CPU build the utilization is a share of the machine's RAM, and a start fails unless all of it is free.

    (``VLLM_CPU_KVCACHE_SPACE``, in GiB, takes its place. Measured on 0.32.0: 0.92 ends in "Available memory on
    node 0 … is less than desired CPU memory utilization"; with the variable the flag is ignored.)
    """
    name = "gpu-memory-utilization"
    said_otherwise = draft.environment.get(CPU_KV_VARIABLE) or inherited.get(CPU_KV_VARIABLE)
    if draft.reasons.get(name) == YOU_SET_IT:
        if not said_otherwise:
            draft.warnings.append(
                f"on a CPU build --{name} is a share of this machine's RAM, and all of it must be free at the start; "
                f"{CPU_KV_VARIABLE}=GIB (with --env) is the safer way"
            )
        return
    preset_value = draft.flags.pop(name, None)
    draft.reasons.pop(name, None)
    if said_otherwise or "kv-cache-memory-bytes" in draft.flags:
        return
    draft.environment[CPU_KV_VARIABLE] = str(CPU_KV_GIB)
    left_out = (
        f"--{name} {preset_value} is left out, since it would mean RAM here; " if preset_value is not None else ""
    )
    draft.warnings.append(
        f"this is a CPU build: {left_out}the KV cache gets {CPU_KV_GIB} GiB of RAM "
        f"(--env {CPU_KV_VARIABLE}=GIB for another size)"
    )


def _place(draft: _Draft, gpus: Sequence[int], engine: Engine) -> None:
    """Give the server its GPUs, and only those."""
    if not gpus:
        return
    if len(set(gpus)) != len(gpus) or any(gpu < 0 for gpu in gpus):
        raise PlanError(f"GPUs {','.join(map(str, gpus))}: expected different indices from 0, such as 0,1")
    if engine.build == "cpu":
        draft.warnings.append("this is a CPU build: it uses no GPU, whatever is chosen")
        return
    devices = ",".join(map(str, gpus))
    before = draft.environment.get("CUDA_VISIBLE_DEVICES")
    if before is not None and before != devices:
        draft.warnings.append(f"CUDA_VISIBLE_DEVICES={before} gives way to the GPUs that were chosen, {devices}")
    draft.environment["CUDA_VISIBLE_DEVICES"] = devices
    # CUDA counts the fastest GPU first unless told; the indices that people see come from the bus.
    draft.environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
