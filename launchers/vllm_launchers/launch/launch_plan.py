"""Plans a resolved request: chooses flags, finds GPUs, estimates memory, and checks the result.

Reads only the stored reports of earlier starts, and whether the home folder exists; all else is passed in.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from vllm_launchers import values
from vllm_launchers.errors import OperationError, UsageError
from vllm_launchers.host.gpu.host import Host, MigInstance
from vllm_launchers.host.gpu.sharing import on_slice, without_server
from vllm_launchers.keeper.records import LaunchSpec, NodeSpec, NotRetryable, RestartPolicy, WarmUp
from vllm_launchers.launch.details import Details, pack
from vllm_launchers.launch.earlier_starts import find_earlier, fixed_cache, gpu_kind
from vllm_launchers.launch.errors import NoPlaceError, WayOut
from vllm_launchers.launch.lasting_fixes import with_fix, with_lasting_fixes, with_lasting_way
from vllm_launchers.launch.place import AUTO, OFFERED, PRETENDS, GpuFinder, Place, kept_slice
from vllm_launchers.launch.plan_budget import FlagBudget, assumed_budget
from vllm_launchers.launch.resolved_request import ResolvedRequest
from vllm_launchers.plan.alternatives import Alternative, alternatives_of
from vllm_launchers.plan.attention import BACKEND_VARIABLE
from vllm_launchers.plan.budget.engine_report import as_reported, budget_figures
from vllm_launchers.plan.build import make_plan
from vllm_launchers.plan.checks.check import check_plan
from vllm_launchers.plan.checks.model import HERE
from vllm_launchers.plan.checks.request import gpus_of, on_ray, visible_gpus
from vllm_launchers.plan.checks.sleep import DEVELOPERS, sleeps
from vllm_launchers.plan.choices.choice import PARALLEL_FLAGS, Choice, ChoiceInputs, SeenRoom, overlay
from vllm_launchers.plan.choices.choose import choose, suggest
from vllm_launchers.plan.choices.layout import all_layouts, fixed_layout, held_at_p95, sizes
from vllm_launchers.plan.choices.nodes import NODE_FLAGS, NodesRequest, check_layout, check_nodes, node_choices
from vllm_launchers.plan.choices.pool import first_visible, pool_of
from vllm_launchers.plan.findings import Level, PlanError, PlanFinding
from vllm_launchers.plan.flags import BLOCKS, DEVICE_ORDER, VISIBLE
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.plan.nodes import nodes_plan
from vllm_launchers.plan.pace import timing_of
from vllm_launchers.plan.probe import ProbeWish, plan_probe
from vllm_launchers.secrets import API_KEY
from vllm_launchers.vllm.engines import EngineKind
from vllm_launchers.vllm.flags.changes import Changes
from vllm_launchers.vllm.ray_cluster import ADDRESS
from vllm_launchers.vllm.startup_reports import StartupReportStore, StoredReport

REUSE_PORT_UNTIL = (0, 25, 0)
"""First vLLM release whose server does not set SO_REUSEPORT (with a single API server)."""

HEADLESS_NO_PROBE = "a headless node has no engine of its own"


class LaunchPlan(msgspec.Struct, frozen=True):
    """A plan plus everything else that a keeper needs: details for later consoles, secrets, restart policy."""

    plan: Plan
    details: Details
    secrets: Mapping[str, str] = msgspec.field(default_factory=dict)
    restart: RestartPolicy = msgspec.field(default_factory=RestartPolicy)
    model_here: bool = False
    """Whether the model's configuration is on this machine."""
    model_folder: str = ""
    """The folder that contains it; empty if there is none."""

    def spec(
        self,
        sidecar: Sequence[str] = (),
        not_retryable: Sequence[NotRetryable] = (),
        node: NodeSpec | None = None,
    ) -> LaunchSpec:
        """What the keeper runs: the plan's command and the sidecar.

        ``not_retryable``: log lines that show that another automatic start would fail the same way. ``node``: this
        machine's part of a multi-node server. Node 0, and a server with workers on a Ray cluster, is ready only after a
        completed request; the other nodes have no port.
        """
        plan, headless = self.plan, node is not None and node.headless
        details = replace(self.details, no_probe=HEADLESS_NO_PROBE) if headless else self.details
        ray = on_ray(plan.engine, plan.flags)
        warm_up = self.details.warm_up or sleeps(plan.flags) or node is not None or ray
        return LaunchSpec(
            argv=plan.argv,
            host=plan.host,
            port=0 if headless else plan.port,
            # The output is a file: without this, tracebacks and prints would stay in a buffer.
            environment={"PYTHONUNBUFFERED": "1", **plan.environment},
            probe=bool(plan.probe.variables) and not headless,
            secret_names=plan.secrets,
            cwd=str(Path.home()) if os.path.isdir(Path.home()) else "/",  # noqa: PTH112 - False for a name too long too
            restart=values.replace(self.restart, not_retryable=tuple(not_retryable)),
            drain_seconds=_drain_seconds(plan),
            sidecar=tuple(sidecar),
            tls=plan.tls,
            # A server with sleep mode needs it: its golden prompts are sent this way.
            warm_up=_warm_up(plan) if warm_up and not headless else None,
            reuse_port=_reuses_port(plan),
            sleep_mode=sleeps(plan.flags) and plan.environment.get(DEVELOPERS) == "1" and node is None,
            node=node,
            ray=ray,
            details=pack(details),
        )


def _warm_up(plan: Plan) -> WarmUp:
    """The warm-up requests: one per data-parallel engine that only this server distributes to."""
    size = plan.flags.get("data-parallel-size")
    others = {name for name in plan.flags if name.startswith("data-parallel-")} - {"data-parallel-size"}
    engines = size if isinstance(size, int) and not isinstance(size, bool) and not others else 1
    return WarmUp(max(1, engines), API_KEY if API_KEY in plan.secrets else "")


def _reuses_port(plan: Plan) -> bool:
    """Whether the server is known to bind its port with SO_REUSEPORT."""
    release = plan.engine.release if plan.engine.kind is EngineKind.VLLM else None
    return release is not None and release < REUSE_PORT_UNTIL


def _drain_seconds(plan: Plan) -> float:
    value = plan.flags.get("shutdown-timeout", 0)
    try:
        return float(value)
    except ValueError:
        return 0.0


def plan_launch(
    request: ResolvedRequest,
    inputs: PlanInputs,
    reports: StartupReportStore | None = None,
    own: StoredReport | None = None,
) -> LaunchPlan:
    """Plan a launch. ``reports`` are memory reports of earlier starts; ``own`` is that of the server being replaced.

    Raises:
        UsageError: a change names an invalid flag or a setting that has its own option; the model's name is unusable.
        NoPlaceError: no GPUs are suitable; its way out, if any, was planned and fits.
    """

    def again(fix: Changes) -> Plan:
        changed = replace(request, changes=with_fix(request.changes, fix))
        return _planned(changed, inputs, reports, own, compared=False).plan

    def tried(way: WayOut) -> Plan:
        if way.fix is not None:
            return again(way.fix)
        host = inputs.host
        for name in way.stop:
            host = without_server(host, name)
        return _planned(request, replace(inputs, host=host), reports, own, compared=False).plan

    limited = _host_to_choose_from(request, inputs) != inputs.host
    try:
        launch = _planned(request, inputs, reports, own)
    except NoPlaceError as error:
        ways = [way for way in error.ways if request.beside not in way.stop]
        why = f" ({_assignment(_visible_devices(request, inputs))} hides the other GPUs)" if limited else ""
        raise with_lasting_way(NoPlaceError(f"{error.problem}{why}", error.sets, ways), tried) from error
    return replace(launch, plan=with_lasting_fixes(launch.plan, again))


def _planned(
    request: ResolvedRequest,
    inputs: PlanInputs,
    reports: StartupReportStore | None,
    own: StoredReport | None,
    *,
    compared: bool = True,
) -> LaunchPlan:
    """One plan. Unless it is ``compared`` with alternatives, which takes most of the time, only its errors count."""
    host = _host_to_choose_from(request, inputs)
    inputs = replace(inputs, host=host, limited_from=inputs.host if host != inputs.host else None)
    request = _in_bus_order(_on_cluster(request, inputs), inputs)
    seen = replace(inputs, host=_seen_host(request, inputs))
    budget = assumed_budget(request, seen)
    if request.nodes is not None:
        if request.standby_of:
            raise PlanError("--nodes: a server over several machines can't be another one's standby")
        check_nodes(request.nodes, request.engine, request.preset, request.changes, inputs.flags)
    choices = _choices(request, seen, budget)
    if request.nodes is not None:
        flags = {choice.flag: choice.value for choice in choices if choice.value is not None}
        check_layout(request.nodes, flags, inputs.facts, budget.unestimated(flags))
    plan = _sited(request, inputs, choices, budget)
    budget = budget.on(plan)
    kind = gpu_kind(gpus_of(plan, inputs), plan.engine.build)
    memory = estimated = budget.for_flags(plan.flags)
    earlier = find_earlier(reports, plan, kind, own) if reports is not None and estimated is not None else None
    fixed = fixed_cache(reports, plan, kind, own) if reports is not None else None
    if earlier is not None and estimated is not None:
        budget = replace(budget, learned=earlier.learned)
        if earlier.same:
            memory = as_reported(estimated, earlier.learned.report, limited=BLOCKS in plan.flags)
        else:
            memory = budget.for_flags(plan.flags)
    plan = replace(
        plan,
        memory=memory,
        unestimated=budget.unestimated(plan.flags),
        estimated=estimated if memory is not estimated else None,
        findings=(*request.found, *plan.findings, *filter(None, [fixed])),
    )
    if request.nodes is not None:
        plan = _with_nodes(plan, request, request.nodes, inputs, budget)
    elif compared:
        plan = _with_alternatives(plan, request, inputs, budget)
    workload, objectives = request.workload or request.preset.workload, request.preset.objectives
    findings = check_plan(plan, inputs, workload, budget.for_flags, objectives)
    mla = inputs.facts is not None and inputs.facts.mla
    around = inputs.environment.variables
    inherited = {BACKEND_VARIABLE: around[BACKEND_VARIABLE]} if BACKEND_VARIABLE in around else {}
    wish: ProbeWish = request.probe if request.probe_asked is None else "on" if request.probe_asked else "off"
    probe = plan_probe(
        plan.engine, plan.flags, {**around, **plan.environment}, wish, asked=request.probe_asked is not None
    )
    plan = replace(plan, findings=findings, probe=probe)
    details = replace(
        Details.of(plan, request.preset),
        recorded_host=request.recorded_host if plan.gpus and plan.engine.kind is EngineKind.SIMULATED else None,
        gpu_kind=kind,
        predicted=budget_figures(estimated) if estimated is not None else {},
        warm_up=request.warm_up,
        probe_asked=request.probe_asked,
        mla=mla,
        standby_of=request.standby_of,
        beside=request.beside,
        inherited=inherited,
    )
    here = inputs.facts is not None and inputs.facts.source in HERE
    folder = inputs.facts.folder if inputs.facts is not None and here else None
    return LaunchPlan(plan, details, request.secrets, request.restart, here, folder or "")


def _sited(request: ResolvedRequest, inputs: PlanInputs, choices: Sequence[Choice], budget: FlagBudget) -> Plan:
    """The plan with its GPUs.

    Raises:
        NoPlaceError: there are none.
    """
    plan = make_plan(request, choices)
    if request.gpu_finder is not None and not kept_slice(request.environment):
        estimated = replace(plan, memory=budget.for_flags(plan.flags))
        place = request.gpu_finder.find(estimated, request.gpus, inputs.host, inputs.shares)
        plan = _on_fitting_gpus(request, inputs, choices, place, budget)
    else:
        plan = replace(plan, gpus=request.gpus)
    if request.engine.build == "cpu":
        plan = replace(plan, gpus=())  # a CPU build uses no GPU, so no table may show one
    return plan


def _host_to_choose_from(request: ResolvedRequest, inputs: PlanInputs) -> Host | None:
    """The host, without GPUs that ``CUDA_VISIBLE_DEVICES`` hides from an automatic choice (as on shared machines).

    Raises:
        NoPlaceError: it hides all of them.
    """
    host, finder, devices = inputs.host, request.gpu_finder, _visible_devices(request, inputs)
    if host is None or finder is None or finder.recorded or devices is None:
        return host
    if request.engine.build == "cpu" or inputs.ray is not None:
        return host
    if finder.place not in (AUTO, OFFERED) and not (finder.again and finder.chosen):
        return host
    # Slices are chosen from the GPUs that have them.
    slices: dict[int, tuple[MigInstance, ...]] = {}
    for gpu in visible_gpus(host, devices):
        slices[gpu.index] = tuple(dict.fromkeys((*slices.get(gpu.index, ()), *gpu.mig)))
    kept = [gpu for gpu in host.gpus if gpu.index in slices or gpu.index in request.gpus]
    # A simulated engine needs no GPU.
    if host.gpus and not kept and (finder.place == AUTO or request.engine.kind is EngineKind.VLLM):
        advice = WayOut(": name GPUs with --gpus, or unset it", of_command=True)
        raise NoPlaceError(f"{_assignment(devices)} hides all GPUs", ways=(advice,))
    return replace(host, gpus=tuple(replace(gpu, mig=slices.get(gpu.index, gpu.mig)) for gpu in kept))


def _visible_devices(request: ResolvedRequest, inputs: PlanInputs) -> str | None:
    """``CUDA_VISIBLE_DEVICES`` as requested or inherited; None if it is not set."""
    return {**inputs.environment.variables, **request.environment}.get(VISIBLE)


def _assignment(devices: str | None) -> str:
    return f"{VISIBLE}={devices or repr('')}"


def _in_bus_order(request: ResolvedRequest, inputs: PlanInputs) -> ResolvedRequest:
    """The request with GPUs numbered as in nvidia-smi, if they differ and nobody chooses any or sets their order.

    By default, CUDA numbers the fastest GPU first, which may not be the one that is planned for. vLLM itself assumes
    this order, and asks for it in its log. A restarted server and a standby keep their order, and so their GPUs.
    """
    host, devices, finder = inputs.host, _visible_devices(request, inputs), request.gpu_finder
    if host is None or not request.gpus_unnamed or inputs.ray is not None:
        return request
    if request.engine.kind is not EngineKind.VLLM or request.engine.build not in ("cuda", None):
        return request
    if request.standby_of or (finder is not None and finder.again):
        return request
    if DEVICE_ORDER in {**inputs.environment.variables, **request.environment}:
        return request
    if (devices or "").startswith(("GPU-", "MIG-")):
        return request  # it uses no numbers
    visible = visible_gpus(host, devices)
    if len({gpu.name for gpu in host.gpus}) < 2 or not visible:
        return request
    text = (
        f"GPUs of different models: {DEVICE_ORDER}=PCI_BUS_ID is set, so that they are numbered as in nvidia-smi. The "
        f"first one that vLLM uses is {visible[0].label}; choose others with --gpus"
    )
    return replace(
        request,
        environment={**request.environment, DEVICE_ORDER: "PCI_BUS_ID"},
        found=(*request.found, PlanFinding("gpu_order", Level.ADVICE, text)),
    )


def _seen_host(request: ResolvedRequest, inputs: PlanInputs) -> Host | None:
    """The host, reduced to the GPUs that a layout may use."""
    host, ray = inputs.host, inputs.ray is not None
    if host is None or not request.gpus_unnamed or request.engine.kind is not EngineKind.VLLM or ray:
        return host
    devices = _visible_devices(request, inputs)
    if (devices or "").startswith("MIG-"):
        return host
    return first_visible(host, visible_gpus(host, devices), inputs.shares)


def _on_cluster(request: ResolvedRequest, inputs: PlanInputs) -> ResolvedRequest:
    """The request with the address of the Ray cluster that was checked, so that restarts use the same one."""
    if inputs.ray is None or not inputs.ray.address:
        return request
    return replace(request, environment={**request.environment, ADDRESS: inputs.ray.address})


def _with_alternatives(plan: Plan, request: ResolvedRequest, whole: PlanInputs, budget: FlagBudget) -> Plan:
    """The plan with alternative layouts that have a place, and their expected speed. ``whole`` has all GPUs."""
    inputs = replace(whole, host=_seen_host(request, whole))
    workload = request.workload or request.preset.workload
    if plan.memory is None or inputs.facts is None:
        return plan
    choice_inputs = ChoiceInputs(
        workload, budget.for_flags, inputs.facts, inputs.host, request.engine.release, request.engine.build,
        request.gpus, inputs.shares, environment={**inputs.environment.variables, **plan.environment},
    )  # fmt: skip
    sliced = bool(kept_slice(plan.environment))
    pool = None if sliced else pool_of(inputs.host, request.gpus, inputs.shares)
    found = alternatives_of(choice_inputs, plan.flags, pool, budget.of, _reason(plan))
    others = tuple(one for one in found if one.chosen or _has_place(one, request, whole))
    if others:
        return replace(plan, alternatives=others if len(others) > 1 else (), paces=others[0].paces)
    name = budget.gpu_name if request.engine.build != "cpu" else ""  # a CPU build's speed does not depend on them
    timing = timing_of(inputs.facts, plan.flags, plan.memory, name, request.engine.release) if name else None
    held = held_at_p95(plan.memory)
    paces = timing.paces(workload, held) if timing is not None and plan.memory.fits else None
    return replace(plan, paces=paces)


def _has_place(one: Alternative, request: ResolvedRequest, inputs: PlanInputs) -> bool:
    """Whether there are GPUs for an alternative now, and it fits on them."""
    request = replace(request, changes=with_fix(request.changes, one.changes), model=one.model or request.model)
    if request.gpus and request.sources is None:
        if one.layout.total == len(request.gpus):
            return True  # the plan's own GPUs
        request = replace(request, gpus=(), gpu_finder=GpuFinder(OFFERED))
    seen = replace(inputs, host=_seen_host(request, inputs))
    budget = assumed_budget(request, seen)
    try:
        plan = _sited(request, inputs, _choices(request, seen, budget), budget)
    except OperationError:
        return False
    # The budget of another checkpoint is not known here.
    return one.model is not None or budget.on(plan).fits(plan.flags)


def _with_nodes(
    plan: Plan, request: ResolvedRequest, nodes: NodesRequest, inputs: PlanInputs, budget: FlagBudget
) -> Plan:
    """The plan with each machine's command, and the expected speed if only pipeline stages cross machines."""
    if kept_slice(plan.environment):
        raise UsageError("--nodes: a slice of a GPU (MIG) can't be joined with others; choose whole GPUs with --gpus")
    workload, facts = request.workload or request.preset.workload, inputs.facts
    layout = fixed_layout(plan.flags)
    each, pool = layout.total // nodes.count, pool_of(inputs.host, request.gpus, inputs.shares)
    paces = None
    if facts is not None and plan.memory is not None and plan.memory.fits and pool and layout.tensor <= each:
        link = pool.joining(layout.tensor)
        timing = timing_of(
            facts, plan.flags, plan.memory, budget.gpu_name, request.engine.release,
            tensor_link=link, stage_link=nodes.link,
        )  # fmt: skip
        paces = timing.paces(workload, held_at_p95(plan.memory)) if timing is not None else None
    plan = replace(plan, paces=paces)
    fits_one: bool | None = None
    if pool is not None and facts is not None and request.engine.build != "cpu":
        every = all_layouts(facts, pool.size, plan.flags, request.engine.release)
        layouts = [one for one in every if one.data == 1 and pool.holds(one)]
        alone = {name: value for name, value in plan.flags.items() if name not in (*NODE_FLAGS, *PARALLEL_FLAGS)}
        budgets = (budget.for_flags({**alone, **sizes(layout)}) for layout in layouts)
        known = [found.fits for found in budgets if found is not None]
        fits_one = any(known) if known else None
    found = nodes_plan(plan, nodes, facts, workload, fits_one=fits_one)
    own = found.nodes[nodes.rank]
    return replace(plan, nodes=found, flags=own.flags, argv=own.argv)


def _reason(plan: Plan) -> str:
    """Why the plan has its layout: the reason given for the first parallel size that is set, or for setting none."""
    chosen = {choice.flag: choice for choice in plan.choices if choice.flag in PARALLEL_FLAGS}
    found = [choice for choice in chosen.values() if choice.value is not None] or list(chosen.values())
    return found[0].reason if found else ""


def suggestions(
    request: ResolvedRequest,
    inputs: PlanInputs,
    seen: SeenRoom | None,
    longest: float,
    keep: Collection[str],
) -> tuple[Choice, ...]:
    """The flag changes that ``request.workload`` calls for on the current GPUs. Flags in ``keep`` stay as they are.

    ``longest`` is as in `ChoiceInputs`.
    """
    if request.workload is None:
        return ()
    flags = {name: setting.value for name, setting in request.preset.flags.items()}
    choice_inputs = ChoiceInputs(
        request.workload, assumed_budget(request, inputs).for_flags, inputs.facts, inputs.host,
        request.engine.release, request.engine.build, request.gpus, inputs.shares, seen=seen,
        longest=longest,
    )  # fmt: skip
    return suggest(flags, choice_inputs, keep)


def _choices(request: ResolvedRequest, inputs: PlanInputs, budget: FlagBudget) -> tuple[Choice, ...]:
    """All flags with their reasons. The server's environment may select a MIG slice."""
    if request.sources is not None:
        return tuple(overlay(request.preset.flags, request.changes, request.sources).values())
    choice_inputs = ChoiceInputs(
        request.workload or request.preset.workload,
        budget.for_flags,
        inputs.facts,
        on_slice(inputs.host, request.environment.get(VISIBLE), inputs.shares),
        request.engine.release,
        request.engine.build,
        request.gpus,
        inputs.shares,
        environment={**inputs.environment.variables, **request.environment},
        nodes=request.nodes.count if request.nodes is not None else 1,
        network=request.nodes.link if request.nodes is not None else None,
    )
    over_preset = request.workload is not None
    chosen = choose(request.preset.flags, request.changes, choice_inputs, over_preset=over_preset)
    if request.nodes is None:
        return chosen
    return tuple(sorted((*chosen, *node_choices(request.nodes)), key=lambda choice: choice.value is None))


def _on_fitting_gpus(
    request: ResolvedRequest, inputs: PlanInputs, choices: Sequence[Choice], found: Place, budget: FlagBudget
) -> Plan:
    """The plan on the GPUs found. If they were chosen automatically and are too small: on the first set that is not."""
    plan = _placed(request, inputs, choices, found, budget)
    if not found.chosen or budget.on(plan).fits(plan.flags):
        return plan
    for other in found.sets:
        if not other.fits or other.uuids == found.sets[0].uuids:
            continue
        environment = other.environment() if other.mig is not None else {}
        place = replace(found, gpus=other.gpus, environment=environment, reason=other.reason, warnings=other.warnings)
        roomier = _placed(request, inputs, choices, place, budget)
        if budget.on(roomier).fits(roomier.flags):
            return roomier
    return plan


def _placed(
    request: ResolvedRequest, inputs: PlanInputs, choices: Sequence[Choice], place: Place, budget: FlagBudget
) -> Plan:
    """The plan on these GPUs. On a MIG slice, flags are chosen again: they may assume a slice of another size."""
    pretended = {PRETENDS: place.pretends} if place.pretends else {}
    there = replace(request, environment={**request.environment, **place.environment, **pretended})
    plan = make_plan(there, choices, () if place.environment else place.gpus)
    if place.environment.get(VISIBLE, "").startswith("MIG-"):
        plan = make_plan(there, _choices(there, inputs, budget.on(plan)))
    message = "; ".join(filter(None, (place.reason, *place.warnings)))
    findings = [*plan.findings, *_devices_overridden(request, inputs, place.gpus)]
    if request.sources is not None and place.gpus != request.gpus:
        findings.append(PlanFinding("gpus_moved", Level.WARNING, message))
    return replace(
        plan,
        findings=tuple(findings),
        gpus=place.gpus,
        gpus_chosen=place.chosen,
        reasons={**plan.reasons, "gpus": message} if message and place.gpus else plan.reasons,
        placement=place.reason,
        sets=place.sets,
    )


def _devices_overridden(request: ResolvedRequest, inputs: PlanInputs, gpus: Sequence[int]) -> Iterator[PlanFinding]:
    """GPUs that a user named outside of an inherited ``CUDA_VISIBLE_DEVICES``."""
    host, devices = inputs.host, inputs.environment.variables.get(VISIBLE)
    if host is None or devices is None or VISIBLE in request.environment or request.engine.build == "cpu":
        return
    if request.sources is not None or request.recorded_host is not None:
        return  # the server's own environment counts, or another machine's
    if not {*gpus} <= {gpu.index for gpu in visible_gpus(host, devices)}:
        named = ",".join(map(str, gpus))
        text = f"{_assignment(devices)} from your environment is overridden by the selected GPUs, {named}"
        yield PlanFinding("devices_overridden", Level.WARNING, text)
