"""One launch worked out: flags chosen, GPUs found, memory estimated, everything checked. Looks at nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vllm_console.fleet.api import UsageError
from vllm_console.fleet.placing import Place, kept_slice
from vllm_console.fleet.remembering import find_earlier, kind_of
from vllm_launchers.machine.gpu.host import Gpu, Host
from vllm_launchers.machine.gpu.sharing import available_gib
from vllm_launchers.machine.reports import ReportBook
from vllm_launchers.plan.budget.estimate import estimate
from vllm_launchers.plan.budget.gpus import GpuShape
from vllm_launchers.plan.budget.model import MemoryBudget
from vllm_launchers.plan.budget.report import as_reported
from vllm_launchers.plan.build import choices_of, make_plan
from vllm_launchers.plan.checks.asked import gpus_of
from vllm_launchers.plan.checks.check import check
from vllm_launchers.plan.choices.choose import choose, suggest
from vllm_launchers.plan.choices.model import Choice
from vllm_launchers.plan.errors import PlanError
from vllm_launchers.plan.findings import Finding, Level
from vllm_launchers.plan.knowledge import Knowledge
from vllm_launchers.plan.model import Changes, Engine, EngineKind, Flags, Plan
from vllm_launchers.presets.model import Preset, Workload
from vllm_launchers.simulated.hardware import DEFAULT_GPU, UnknownGpuError, find_gpu

Finder = Callable[[Plan, Host | None], Place]
"""Finds the GPUs for a plan that has none yet, on a host."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be launched. ``environment`` holds no secrets; ``secrets`` are their names.

    ``workload`` is measured traffic in place of the preset's. ``sources`` is set for a server that is made again: its
    flags stay as they are but for ``changes``, and nothing is chosen anew. ``find`` finds its GPUs; without it,
    and on a slice of a GPU, it keeps what it has. ``found`` is what is known to be wrong before planning.
    """

    preset: Preset
    engine: Engine
    changes: Changes
    model: str
    host: str
    port: int
    environment: Mapping[str, str]
    gpus: tuple[int, ...] = ()
    secrets: tuple[str, ...] = ()
    inherited: Mapping[str, str] = field(default_factory=dict)
    workload: Workload | None = None
    sources: Mapping[str, str] | None = None
    find: Finder | None = None
    found: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class Resolved:
    """A plan; the kind of GPU it would run on, and its memory as estimated without what earlier starts reported."""

    plan: Plan
    gpu_kind: str = ""
    estimated: MemoryBudget | None = None
    chosen: bool = False
    """Whether its GPUs were chosen for it, so that others will do as well."""


def resolve(ask: Ask, knowledge: Knowledge, book: ReportBook | None = None) -> Resolved:
    """Work a launch out; ``book`` has the reports of earlier starts.

    Raises:
        UsageError: a change names no flag, or what is chosen elsewhere; the model's name is unusable.
        FleetError: no GPUs can be given to it.
    """
    budget = _Budget(ask, knowledge)
    chosen = False
    try:
        choices = _choices(ask, knowledge, budget)
        if ask.find is not None and not kept_slice(ask.environment):
            found = ask.find(_made(ask, choices, ask.environment, ()), knowledge.host)
            plan = _roomiest_of(ask, choices, found, budget)
            chosen = found.chosen
        else:
            plan = replace(_made(ask, choices, ask.environment, ()), gpus=ask.gpus)
    except PlanError as error:
        raise UsageError(str(error)) from error
    budget.settle(plan)
    kind = kind_of(gpus_of(plan, knowledge), plan.engine.build)
    memory = estimated = budget(plan.flags)
    earlier = find_earlier(book, plan, kind) if book is not None and estimated is not None else None
    if earlier is not None and estimated is not None:
        budget.learned = earlier.learned
        memory = as_reported(estimated, earlier.learned.report) if earlier.same else budget(plan.flags)
    plan = replace(
        plan,
        memory=memory,
        estimated=estimated if memory is not estimated else None,
        findings=(*ask.found, *plan.findings),
    )
    findings = check(plan, knowledge, ask.workload or ask.preset.workload, budget)
    return Resolved(replace(plan, findings=findings), kind, estimated, chosen)


def suggestions(ask: Ask, knowledge: Knowledge) -> tuple[Choice, ...]:
    """What the traffic that is asked for would have changed of the flags, on the GPUs that they run on now."""
    if ask.workload is None:
        return ()
    flags = {name: setting.value for name, setting in ask.preset.flags.items()}
    try:
        return suggest(
            flags,
            ask.workload,
            knowledge.facts,
            knowledge.host,
            ask.engine.release,
            ask.engine.build,
            budget=_Budget(ask, knowledge),
            gpus=ask.gpus,
            shares=knowledge.shares,
        )
    except PlanError as error:
        raise UsageError(str(error)) from error


def _choices(ask: Ask, knowledge: Knowledge, budget: _Budget) -> tuple[Choice, ...]:
    if ask.sources is not None:
        return choices_of(ask.preset, ask.changes, ask.sources)
    return choose(
        ask.preset.flags,
        ask.changes,
        ask.workload or ask.preset.workload,
        knowledge.facts,
        knowledge.host,
        ask.engine.release,
        ask.engine.build,
        over_preset=ask.workload is not None,
        budget=budget,
        gpus=ask.gpus,
        shares=knowledge.shares,
    )


def _made(ask: Ask, choices: Sequence[Choice], environment: Mapping[str, str], gpus: Sequence[int]) -> Plan:
    return make_plan(
        ask.preset,
        ask.engine,
        ask.changes,
        choices=choices,
        model=ask.model,
        host=ask.host,
        port=ask.port,
        environment=environment,
        gpus=gpus,
        secrets=ask.secrets,
        inherited=ask.inherited,
    )


def _roomiest_of(ask: Ask, choices: Sequence[Choice], found: Place, budget: _Budget) -> Plan:
    """The launch on the GPUs that were found; where these were chosen and are too small, on others that are not."""
    plan = _placed(ask, choices, found)
    budget.settle(plan)
    memory = budget(plan.flags)
    if not found.chosen or memory is None or memory.fits:
        return plan
    for other in found.sets:
        if not other.fits or other.uuids == found.sets[0].uuids:
            continue
        environment = other.environment() if other.mig is not None else {}
        place = replace(found, gpus=other.gpus, environment=environment, reason=other.reason, warnings=other.warnings)
        roomier = _placed(ask, choices, place)
        budget.settle(roomier)
        memory = budget(roomier.flags)
        if memory is not None and memory.fits:
            return roomier
    return plan


def _placed(ask: Ask, choices: Sequence[Choice], place: Place) -> Plan:
    environment = {**ask.environment, **place.environment}
    plan = _made(ask, choices, environment, () if place.environment else place.gpus)
    told = "; ".join(filter(None, (place.reason, *place.warnings)))
    moved = ask.sources is not None and place.gpus != ask.gpus
    return replace(
        plan,
        findings=(*plan.findings, Finding("gpus_moved", Level.WARNING, told)) if moved else plan.findings,
        gpus=place.gpus,
        reasons={**plan.reasons, "gpus": told} if told and place.gpus else plan.reasons,
        placement=place.reason,
        sets=place.sets,
    )


class _Budget:
    """What the launch would hold with other flags (`vllm_launchers.plan.choices.situation.BudgetFor`).

    Before its GPUs are found those with the most room stand for them.
    """

    def __init__(self, ask: Ask, knowledge: Knowledge) -> None:
        self._ask, self._knowledge = ask, knowledge
        self.learned = knowledge.learned
        self._environment = {**knowledge.surroundings.environment, **ask.environment}
        self._gpus: Sequence[Gpu | GpuShape] = _roomiest(knowledge.host, ask.gpus, knowledge)
        if ask.engine.kind is EngineKind.SIMULATED and not self._gpus:
            self._gpus = _pretended(self._environment)

    def settle(self, plan: Plan) -> None:
        """From now on it is these GPUs, in this environment."""
        self._environment = {**self._knowledge.surroundings.environment, **plan.environment}
        self._gpus = gpus_of(plan, self._knowledge) or self._gpus

    def __call__(self, flags: Flags, /) -> MemoryBudget | None:
        facts = self._knowledge.facts
        if facts is None:
            return None
        return estimate(
            facts,
            flags,
            self._gpus,
            release=self._ask.engine.release,
            workload=self._ask.workload or self._ask.preset.workload,
            learned=self.learned,
            build=self._ask.engine.build,
            environment=self._environment,
        )


def _roomiest(host: Host | None, chosen: Sequence[int], knowledge: Knowledge) -> list[Gpu]:
    """The GPUs that were chosen, else all usable ones, those with the most to give first."""
    if host is None:
        return []
    known = [gpu for gpu in host.gpus if not gpu.lost and (gpu.index in chosen or not chosen)]
    return sorted(known, key=lambda gpu: -(available_gib(gpu, knowledge.shares) or 0.0))


def _pretended(environment: Mapping[str, str]) -> list[GpuShape]:
    """The GPU that a simulated server pretends to have where there is none."""
    try:
        gpu = find_gpu(environment.get("SIMULATED_GPU") or DEFAULT_GPU)
    except UnknownGpuError:
        return []
    return [GpuShape(gpu.name, usable_gib=gpu.memory_gib)]


def without_server(host: Host | None, name: str) -> Host | None:
    """The host once a server of ours has ended: what it holds now is free for its next start."""
    if host is None:
        return None
    return replace(host, gpus=tuple(_freed(gpu, name) for gpu in host.gpus))


def _freed(gpu: Gpu, name: str) -> Gpu:
    own = [holder for holder in gpu.holders if holder.server == name]
    if not own:
        return gpu
    gib = sum(holder.gib or 0.0 for holder in own)
    return replace(
        gpu,
        used_by=tuple(holder for holder in gpu.holders if holder.server != name),
        free_gib=gpu.free_gib + gib if gpu.free_gib is not None else None,
        used_gib=max(0.0, gpu.used_gib - gib) if gpu.used_gib is not None else None,
    )
