"""Makes the plan of a launch: preset, engine and a person's changes become argv, environment and findings. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from vllm_launchers.plan.choices.model import Choice, Source
from vllm_launchers.plan.errors import PlanError
from vllm_launchers.plan.findings import Finding, Level
from vllm_launchers.plan.flags import flag_words, normalise_setting, spellings
from vllm_launchers.plan.model import Changes, Engine, EngineKind, FlagValue, Plan, same_value
from vllm_launchers.presets.model import Preset
from vllm_launchers.secrets import holds_secret

YOU_SET_IT = "you set it"
QUIET_ENDPOINTS = "/health,/metrics"
CPU_KV_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
CPU_KV_GIB = 2
"""GiB of RAM for the KV cache on a CPU build when nobody said how much."""

_QUIET_SINCE = (0, 16, 0)


class _Draft:
    """A plan in the making."""

    def __init__(self, choices: Sequence[Choice], environment: Mapping[str, str]) -> None:
        self.choices = {choice.flag: choice for choice in choices}
        self.environment = dict(environment)
        self.findings: list[Finding] = []

    def value(self, name: str) -> FlagValue | None:
        """What a flag is set to, None where it is left to vLLM."""
        choice = self.choices.get(name)
        return choice.value if choice is not None else None

    def put(self, choice: Choice) -> None:
        self.choices[choice.flag] = choice

    def find(self, code: str, level: Level, message: str) -> None:
        self.findings.append(Finding(code, level, message))


def choices_of(preset: Preset, changes: Changes, sources: Mapping[str, str] | None = None) -> tuple[Choice, ...]:
    """The preset's flags with a person's changes, and nothing that follows from traffic, model or machine.

    ``sources`` says where a flag came from that is not the preset's own (of a launch that is made again).

    Raises:
        PlanError: a change names no flag, a secret, or what is chosen elsewhere.
    """
    sources = sources or {}
    unset = {spelling for name in changes.unset for spelling in spellings(name)}
    chosen = {
        name: Choice(name, setting.value, setting.why, Source(sources.get(name, Source.PRESET)))
        for name, setting in preset.flags.items()
        if name not in unset
    }
    for name, value in dict(normalise_setting(name, value) for name, value in changes.set.items()).items():
        if name not in chosen or not same_value(chosen[name].value, value):
            chosen[name] = Choice(name, value, YOU_SET_IT, Source.YOU)
    return tuple(chosen.values())


def make_plan(
    preset: Preset,
    engine: Engine,
    changes: Changes | None = None,
    *,
    host: str,
    port: int,
    choices: Sequence[Choice] | None = None,
    model: str | None = None,
    environment: Mapping[str, str] | None = None,
    gpus: Sequence[int] = (),
    secrets: Sequence[str] = (),
    inherited: Mapping[str, str] | None = None,
) -> Plan:
    """Resolve a launch.

    ``choices`` are all flags, worked out before (`vllm_launchers.plan.choices.choose`); without them the preset's
    flags with ``changes`` are taken. ``model`` is the preset's unless given. ``environment`` is what the person adds,
    without secrets, whose *names* stand in ``secrets``. ``gpus`` are indices in the order of the PCI bus, as NVML and
    nvidia-smi count them. ``inherited`` is the environment that the server will inherit; it is only looked at, not
    passed on.

    Raises:
        PlanError: a change names no flag, a secret, or what is chosen elsewhere; the model's name is unusable.
    """
    changes = changes or Changes()
    model = model or preset.model
    if model.startswith("-") or not model.strip() or "\0" in model:
        raise PlanError("the model must be a name such as Qwen/Qwen3-8B-AWQ, or a folder")
    if holds_secret(model):
        raise PlanError(
            "the model's name holds a key or a password, and every user of this machine can read it on the command "
            "line: leave it out, and export the variable that the model's host knows"
        )
    draft = _Draft(
        choices if choices is not None else choices_of(preset, changes),
        {name: setting.value for name, setting in preset.environment.items()} | dict(environment or {}),
    )
    _keep_log_readable(draft, engine, {spelling for name in changes.unset for spelling in spellings(name)})
    if engine.kind is EngineKind.VLLM and engine.build == "cpu":
        _fit_to_cpu(draft, inherited or {})
    _place(draft, gpus, engine)
    flags = {name: choice.value for name, choice in draft.choices.items() if choice.value is not None}
    _check_text(model, flags, draft.environment)
    return Plan(
        preset=preset.name,
        model=model,
        engine=engine,
        host=host,
        port=port,
        argv=(*engine.command, "serve", model, "--host", host, "--port", str(port), *flag_words(flags)),
        flags=flags,
        reasons={name: draft.choices[name].reason for name in flags},
        environment=draft.environment,
        secrets=tuple(sorted(set(secrets))),
        gpus=tuple(gpus),
        choices=tuple(draft.choices.values()),
        findings=tuple(draft.findings),
    )


def _check_text(model: str, flags: Mapping[str, FlagValue], environment: Mapping[str, str]) -> None:
    """Words can hold any bytes, but records, JSON and exports are text."""
    named = {"the model": model, **{f"--{name}": value for name, value in flags.items()}, **environment}
    for name, value in named.items():
        try:
            f"{name}{value}".encode()
        except UnicodeEncodeError:
            shown = "".join(c if c.isprintable() else "?" for c in name)
            raise PlanError(f"{shown} holds bytes that are no UTF-8 text, and a record could not hold them") from None


def _keep_log_readable(draft: _Draft, engine: Engine, unset: set[str]) -> None:
    """vLLM logs every request for ``/metrics``; one a second buries what matters."""
    name = "disable-access-log-for-endpoints"
    release = engine.release
    if release is None or release < _QUIET_SINCE or name in unset or name in draft.choices:
        return
    if draft.value("disable-uvicorn-access-log") is not True:
        why = "These are asked every second to watch the server; a line for each would bury its log."
        draft.put(Choice(name, QUIET_ENDPOINTS, why, Source.CONSOLE))


def _fit_to_cpu(draft: _Draft, inherited: Mapping[str, str]) -> None:
    """On a CPU build the utilization is a share of the machine's RAM, and a start fails unless all of it is free.

    (``VLLM_CPU_KVCACHE_SPACE``, in GiB, takes its place. Measured on 0.32.0: 0.92 ends in "Available memory on
    node 0 … is less than desired CPU memory utilization"; with the variable the flag is ignored.)
    """
    name = "gpu-memory-utilization"
    said_otherwise = draft.environment.get(CPU_KV_VARIABLE) or inherited.get(CPU_KV_VARIABLE)
    asked = draft.choices.get(name)
    if asked is not None and asked.source is Source.YOU and asked.value is not None:
        if not said_otherwise:
            text = (
                f"on a CPU build --{name} is a share of this machine's RAM, and all of it must be free at the start; "
                f"{CPU_KV_VARIABLE}=GIB (with --env) is the safer way"
            )
            draft.find("cpu_utilization", Level.WARNING, text)
        return
    without = ""
    if asked is not None and asked.value is not None:
        without = f"--{name} {asked.value} is left out, since it would mean RAM here; "
        draft.put(replace(asked, value=None, reason="It would mean RAM on a CPU build.", source=Source.MACHINE))
    if said_otherwise or draft.value("kv-cache-memory-bytes") is not None:
        return
    draft.environment[CPU_KV_VARIABLE] = str(CPU_KV_GIB)
    text = (
        f"this is a CPU build: {without}the KV cache gets {CPU_KV_GIB} GiB of RAM "
        f"(--env {CPU_KV_VARIABLE}=GIB for another size)"
    )
    draft.find("cpu_kv_cache", Level.ADVICE, text)


def _place(draft: _Draft, gpus: Sequence[int], engine: Engine) -> None:
    """Give the server its GPUs, and only those."""
    if not gpus:
        return
    if len(set(gpus)) != len(gpus) or any(gpu < 0 for gpu in gpus):
        raise PlanError(f"GPUs {','.join(map(str, gpus))}: expected different indices from 0, such as 0,1")
    if engine.build == "cpu":
        draft.find("cpu_no_gpu", Level.WARNING, "this is a CPU build: it uses no GPU, whatever is chosen")
        return
    devices = ",".join(map(str, gpus))
    before = draft.environment.get("CUDA_VISIBLE_DEVICES")
    if before is not None and before != devices:
        text = f"CUDA_VISIBLE_DEVICES={before} gives way to the GPUs that were chosen, {devices}"
        draft.find("devices_overridden", Level.WARNING, text)
    draft.environment["CUDA_VISIBLE_DEVICES"] = devices
    # CUDA counts the fastest GPU first unless told; the indices that people see come from the bus.
    draft.environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
