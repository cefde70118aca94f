"""Estimates the memory of a requested launch with any flags, on GPUs that are assumed or that were found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from vllm_launchers.engine_model.gpu_models import DEFAULT_GPU, UnknownGpuError, find_gpu
from vllm_launchers.host.gpu.host import Gpu, Host
from vllm_launchers.host.gpu.sharing import available_gib, best_slice, on_slice
from vllm_launchers.launch.place import PRETENDS
from vllm_launchers.launch.resolved_request import ResolvedRequest
from vllm_launchers.plan.budget.budget import GpuShape, MemoryBudget, shapes
from vllm_launchers.plan.budget.estimate import estimate
from vllm_launchers.plan.budget.memory_flags import MEMORY_FLAGS, batch_sizes
from vllm_launchers.plan.build import make_plan
from vllm_launchers.plan.checks.check import refused_flags
from vllm_launchers.plan.checks.context import unestimated_override
from vllm_launchers.plan.checks.request import gpus_of
from vllm_launchers.plan.choices.choice import overlay
from vllm_launchers.plan.choices.pool import usable_gpus
from vllm_launchers.plan.flags import SEQUENCES, VISIBLE
from vllm_launchers.plan.inputs import EarlierReport, PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.vllm.engines import EngineKind
from vllm_launchers.vllm.flags.changes import Flags, same_value
from vllm_launchers.vllm.modelfacts.facts import ModelFacts


class FlagBudget(msgspec.Struct, frozen=True):
    """The memory budget of a requested launch, depending on its flags, on certain GPUs."""

    request: ResolvedRequest
    inputs: PlanInputs
    gpus: Sequence[Gpu | GpuShape]
    environment: Mapping[str, str]
    assumed: tuple[str, ...]
    refused: Flags
    """The request's values of memory flags that vLLM refuses. With one of them there is no budget."""
    learned: EarlierReport | None = None

    def on(self, plan: Plan) -> FlagBudget:
        """The same on the GPUs of a plan, in its environment."""
        gpus = gpus_of(plan, self.inputs) or self.gpus
        # A GPU in MIG mode that was named as a whole provides only a slice.
        sliced = [gpu for gpu in gpus if isinstance(gpu, Gpu) and gpu.mig_mode]
        best = best_slice(sliced, self.inputs.shares) if sliced else None
        environment = {**self.inputs.environment.variables, **plan.environment}
        return replace(self, gpus=[best] if best is not None else gpus, environment=environment)

    @property
    def gpu_name(self) -> str:
        """The GPU model of the estimate; empty if unknown, or for a part of a GPU."""
        return next((gpu.name or "" for gpu in self.gpus), "")

    def fits(self, flags: Flags) -> bool:
        """Whether the memory suffices, as far as it is known."""
        memory = self.for_flags(flags)
        return memory is None or memory.fits

    def unestimated(self, flags: Flags) -> str:
        """Why there is no budget with these flags, as in `Plan`."""
        table = self.inputs.flags
        vllm = f"vLLM {table.version}" if table.assumed else "vLLM"
        found = [f"--{name} {value}" for name, value in self.refused.items() if same_value(flags.get(name), value)]
        if found:
            return f"{vllm} refuses {' '.join(found)}"
        on_cpu, gpu = self.request.engine.build == "cpu", next(iter(shapes(self.gpus, 1)), None)
        if self.inputs.facts is not None and (changed := unestimated_override(flags)):
            return changed
        if gpu is None and not on_cpu:
            return ""
        release = self.request.engine.release
        sequences, step = batch_sizes(self.inputs.facts, flags, release, None if on_cpu else gpu)
        if sequences <= step:
            return ""
        return f"{vllm} refuses --{SEQUENCES} {sequences} with steps of {step:,} tokens"

    def for_flags(self, flags: Flags) -> MemoryBudget | None:
        """The memory budget with these flags; None if too little is known."""
        facts = self.inputs.facts
        return self.of(facts, flags) if facts is not None else None

    def of(self, facts: ModelFacts, flags: Flags) -> MemoryBudget | None:
        """The memory budget of another checkpoint."""
        if self.unestimated(flags):
            return None
        found = estimate(
            facts,
            flags,
            self.gpus,
            release=self.request.engine.release,
            workload=self.request.workload or self.request.preset.workload,
            learned=self.learned if facts is self.inputs.facts else None,
            build=self.request.engine.build,
            environment=self.environment,
            draft=self.inputs.draft,
        )
        return replace(found, assumed=(*self.assumed, *found.assumed)) if found is not None else None


def assumed_budget(request: ResolvedRequest, inputs: PlanInputs) -> FlagBudget:
    """The budget before GPUs are chosen: it assumes those with the most free memory."""
    environment = {**inputs.environment.variables, **request.environment}
    host = on_slice(inputs.host, request.environment.get(VISIBLE), inputs.shares)
    gpus: Sequence[Gpu | GpuShape] = _by_free_memory(host, request.gpus, inputs)
    assumed: tuple[str, ...] = ()
    if request.engine.kind is EngineKind.SIMULATED and not gpus:
        gpus = _pretended(environment)
        assumed = tuple(f"a simulated {gpu.name} ({PRETENDS} chooses another)" for gpu in gpus)
    return FlagBudget(request, inputs, gpus, environment, assumed, _refused(request, inputs))


def _refused(request: ResolvedRequest, inputs: PlanInputs) -> Flags:
    """The values of memory flags that vLLM refuses, whatever else is chosen."""
    given = make_plan(request, tuple(overlay(request.preset.flags, request.changes).values()))
    names = {name for name in refused_flags(given, inputs) if name.partition(".")[0] in MEMORY_FLAGS}
    return {name: value for name, value in given.flags.items() if name in names or name.partition(".")[0] in names}


def _by_free_memory(host: Host | None, chosen: Sequence[int], inputs: PlanInputs) -> list[Gpu]:
    """The chosen GPUs, else the unused ones, else all; in order of free memory, largest first."""
    if host is None:
        return []
    known = [gpu for gpu in host.gpus if not gpu.lost and (gpu.index in chosen or not chosen)]
    if not chosen:
        known = usable_gpus(host, (), inputs.shares) or known
    return sorted(known, key=lambda gpu: -(available_gib(gpu, inputs.shares) or 0.0))


def _pretended(environment: Mapping[str, str]) -> list[GpuShape]:
    """The GPU that a simulated server imitates on a machine without GPUs."""
    try:
        gpu = find_gpu(environment.get(PRETENDS) or DEFAULT_GPU)
    except UnknownGpuError:
        return []
    return [GpuShape(gpu.name, usable_gib=gpu.usable_gib)]
