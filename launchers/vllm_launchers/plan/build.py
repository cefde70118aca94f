"""Builds the plan of a launch from preset, engine, and chosen flags: argv, environment, and findings. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from vllm_launchers.plan.checks.sleep import DEVELOPERS
from vllm_launchers.plan.choices.choice import Choice, Source
from vllm_launchers.plan.findings import Level, PlanError, PlanFinding
from vllm_launchers.plan.flags import DEVICE_ORDER, SLEEP_MODE, VISIBLE, flag_words, spellings
from vllm_launchers.plan.model import Plan
from vllm_launchers.presets.model import Preset
from vllm_launchers.secrets import holds_secret
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.changes import Changes, Flags, FlagValue

QUIET_ENDPOINTS = "/health,/metrics"
CPU_KV_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
CPU_KV_GIB = 2
"""Default size of the KV cache with a CPU build, in GiB of RAM."""

_QUIET_SINCE = (0, 16, 0)


class PlanRequest(msgspec.Struct, frozen=True):
    """What a plan is made of besides its flags and GPUs. ``environment`` contains no secrets."""

    preset: Preset
    engine: Engine
    changes: Changes
    model: str
    host: str
    port: int
    environment: Mapping[str, str]
    inherited: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The environment that the server will inherit; it is only read, not passed on."""
    secrets: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Secret values by name."""
    more_secrets: tuple[str, ...] = ()
    """Names of secrets whose values only the server's keeper knows."""

    @property
    def secret_names(self) -> tuple[str, ...]:
        """The names of all secrets."""
        return tuple(sorted({*self.secrets, *self.more_secrets}))


class _Draft:
    """A plan under construction."""

    def __init__(self, choices: Sequence[Choice], environment: Mapping[str, str]) -> None:
        self.choices = {choice.flag: choice for choice in choices}
        self.environment = dict(environment)
        self.findings: list[PlanFinding] = []

    def value(self, name: str) -> FlagValue | None:
        """A flag's value; None if it is left to vLLM."""
        choice = self.choices.get(name)
        return choice.value if choice is not None else None

    def put(self, choice: Choice) -> None:
        self.choices[choice.flag] = choice

    def find(self, code: str, level: Level, message: str) -> None:
        self.findings.append(PlanFinding(code, level, message))


def make_plan(request: PlanRequest, choices: Sequence[Choice], gpus: Sequence[int] = ()) -> Plan:
    """The plan with these flags (`vllm_launchers.plan.choices`), on these GPUs: indices in PCI bus order, as in NVML
    and nvidia-smi.

    Raises:
        PlanError: a change names an invalid flag; the model's name is unusable.
    """
    engine, model = request.engine, request.model
    if model.startswith("-") or not model.strip() or "\0" in model:
        raise PlanError("the model must be a hub id such as Qwen/Qwen3-8B-AWQ, or a folder")
    if holds_secret(model):
        raise PlanError(
            "the model's name contains a key or a password, which every user of this machine can read on the "
            "command line: remove it and export the variable that the model's host expects"
        )
    own = {name: setting.value for name, setting in request.preset.environment.items()}
    draft = _Draft(choices, {**own, **request.environment})
    _keep_log_readable(draft, engine, {spelling for name in request.changes.unset for spelling in spellings(name)})
    if engine.kind is EngineKind.VLLM and engine.build == "cpu":
        _fit_to_cpu(draft, request.inherited)
    if draft.value(SLEEP_MODE) is True:
        draft.environment[DEVELOPERS] = "1"
    _place(draft, gpus, engine)
    flags = {name: choice.value for name, choice in draft.choices.items() if choice.value is not None}
    _check_text(model, flags, draft.environment)
    return Plan(
        preset=request.preset.name,
        model=model,
        engine=engine,
        host=request.host,
        port=request.port,
        argv=command_of(engine, model, request.host, request.port, flags),
        flags=flags,
        reasons={name: draft.choices[name].reason for name in flags},
        environment=draft.environment,
        secrets=request.secret_names,
        gpus=tuple(gpus),
        choices=tuple(draft.choices.values()),
        findings=tuple(draft.findings),
    )


def command_of(engine: Engine, model: str, host: str, port: int, flags: Flags) -> tuple[str, ...]:
    """vLLM's command line. A headless node gets no host and port."""
    address = () if flags.get("headless") is True else ("--host", host, "--port", str(port))
    return (*engine.command, "serve", model, *address, *flag_words(flags))


def _check_text(model: str, flags: Mapping[str, FlagValue], environment: Mapping[str, str]) -> None:
    """Reject raw bytes: arguments may contain any bytes, but records, JSON, and exports are text."""
    named = {"the model": model, **{f"--{name}": value for name, value in flags.items()}, **environment}
    for name, value in named.items():
        try:
            f"{name}{value}".encode()
        except UnicodeEncodeError:
            shown = "".join(c if c.isprintable() else "?" for c in name)
            raise PlanError(f"{shown} contains bytes that are not UTF-8, which a record can't store") from None


def _keep_log_readable(draft: _Draft, engine: Engine, unset: set[str]) -> None:
    """Turn off access lines for ``/metrics``: one per second would bury useful lines."""
    name = "disable-access-log-for-endpoints"
    release = engine.release
    if release is None or release < _QUIET_SINCE or name in unset or name in draft.choices:
        return
    if draft.value("disable-uvicorn-access-log") is not True:
        why = "Polled every second for monitoring; logging each request would flood the log."
        draft.put(Choice(name, QUIET_ENDPOINTS, why, Source.CONSOLE))


def _fit_to_cpu(draft: _Draft, inherited: Mapping[str, str]) -> None:
    """Replace the utilization with ``VLLM_CPU_KVCACHE_SPACE`` (GiB) on a CPU build.

    There, the utilization is a share of the machine's RAM, and vLLM does not start unless all of it is free. On 0.32.0,
    0.92 fails with "Available memory on node 0 … is less than desired CPU memory utilization"; with the variable, the
    flag is ignored.
    """
    name = "gpu-memory-utilization"
    said_otherwise = draft.environment.get(CPU_KV_VARIABLE) or inherited.get(CPU_KV_VARIABLE)
    asked = draft.choices.get(name)
    if asked is not None and asked.source is Source.YOU and asked.value is not None:
        if not said_otherwise:
            text = (
                f"on a CPU build --{name} is a share of this machine's RAM, all of which must be free at startup; "
                f"{CPU_KV_VARIABLE}=GIB (with --env) is safer"
            )
            draft.find("cpu_utilization", Level.WARNING, text)
        return
    without = ""
    if asked is not None and asked.value is not None:
        without = f"--{name} {asked.value} is dropped because it would refer to RAM here; "
        draft.put(replace(asked, value=None, reason="It would refer to RAM on a CPU build.", source=Source.MACHINE))
    if said_otherwise:
        draft.environment[CPU_KV_VARIABLE] = said_otherwise  # so that a restart from another shell keeps it
        return
    if draft.value("kv-cache-memory-bytes") is not None:
        return
    draft.environment[CPU_KV_VARIABLE] = str(CPU_KV_GIB)
    text = (
        f"CPU build: {without}the KV cache gets {CPU_KV_GIB} GiB of RAM (--env {CPU_KV_VARIABLE}=GIB for another size)"
    )
    draft.find("cpu_kv_cache", Level.ADVICE, text)


def _place(draft: _Draft, gpus: Sequence[int], engine: Engine) -> None:
    """Restrict the server to its GPUs."""
    if not gpus:
        return
    if len(set(gpus)) != len(gpus) or any(gpu < 0 for gpu in gpus):
        raise PlanError(f"GPUs {','.join(map(str, gpus))}: expected different indices from 0, such as 0,1")
    if engine.build == "cpu":
        draft.find("cpu_no_gpu", Level.WARNING, "CPU build: it uses no GPU, so the selected GPUs are ignored")
        return
    devices = ",".join(map(str, gpus))
    before = draft.environment.get(VISIBLE)
    if before is not None and before != devices:
        text = f"{VISIBLE}={before} is overridden by the selected GPUs, {devices}"
        draft.find("devices_overridden", Level.WARNING, text)
    draft.environment[VISIBLE] = devices
    # By default, CUDA numbers the fastest GPU first; the indices that users see are in PCI bus order.
    draft.environment.setdefault(DEVICE_ORDER, "PCI_BUS_ID")
