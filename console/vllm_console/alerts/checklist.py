"""The checklist before a launch: each item is ok, or has a message and a fix. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from vllm_console.runs.measurement import RAMP
from vllm_console.runs.store import Run
from vllm_console.text import gib, rate
from vllm_launchers.launch.refusal import fix_options
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.plan.flags import token_count
from vllm_launchers.plan.model import Plan
from vllm_launchers.presets.model import Workload
from vllm_launchers.secrets import API_KEY

Status = Literal["ok", "unknown", "warning", "error"]

LEAST_FREE_GIB = 5.0
"""Compiled kernels and graphs of one model take up to several GiB; a full disk aborts a start."""

_ITEMS: Mapping[str, Collection[str]] = {
    "context": ("context_over_model", "context_below_traffic", "context_not_limited", "workload_not_held"),
    "memory": (
        "weights_do_not_fit", "kv_too_small", "kv_cache_too_large", "states_too_few", "memory_held", "gpu_shared",
        "gpu_claimed", "gpu_lost", "no_gpus", "gpus_too_few", "cpu_utilization", "cpu_kv_cache", "weights_offloaded",
        "offload_over_memory",
    ),
    "links": ("tp_over_pcie", "gpus_differ", "gpus_left_idle", "gpus_unused", "tensor_parallel_faster", "shm_small"),
    "port": ("port_taken", "unwatchable"),
    "key": ("open_to_all_without_key",),
    "disk": ("disk_for_download",),
    "model": ("model_missing", "model_incomplete", "model_gated", "facts_missing", "remote_code"),
}  # fmt: skip
"""The plan's findings by item; all others belong to the flags."""


class ChecklistItem(msgspec.Struct, frozen=True):
    """One item: ``fix`` is what to do, empty if nothing; ``codes`` are the plan's findings behind it."""

    name: str
    status: Status
    message: str
    fix: str = ""
    codes: tuple[str, ...] = ()


class Monitoring(msgspec.Struct, frozen=True):
    """A Prometheus server's scraped addresses and alerting rules; ``problem`` is why they are unknown."""

    url: str
    targets: tuple[str, ...] = ()
    alerts: tuple[str, ...] = ()
    problem: str = ""


class Disk(msgspec.Struct, frozen=True):
    """A folder that the server writes to, and its free space in GiB."""

    what: str
    path: str
    free_gib: float


class ChecklistInputs(msgspec.Struct, frozen=True):
    """Inputs of the checklist besides the plan.

    ``wanted_alerts`` are the names of our rules, ``problems`` those found by ``doctor`` (``what``, ``do``), ``webhook``
    whether findings are sent to one.
    """

    gpu_kind: str
    hosts: tuple[str, ...]
    """Names and addresses of this machine."""
    runs: Sequence[Run]
    disks: Sequence[Disk]
    monitoring: Monitoring
    wanted_alerts: tuple[str, ...]
    problems: Sequence[Mapping[str, Any]] = ()
    webhook: bool = False
    model_missing: bool = False
    """Whether the start would download the model."""


def checklist(plan: Plan, workload: Workload, around: ChecklistInputs) -> tuple[ChecklistItem, ...]:
    """All items, in the order in which operators check them."""
    by_item: dict[str, list[PlanFinding]] = {}
    item_of = {code: name for name, codes in _ITEMS.items() for code in codes}
    for finding in plan.findings:
        by_item.setdefault(item_of.get(finding.code, "flags"), []).append(finding)
    well = {
        "model": plan.model,
        "context": _context(plan, workload),
        "memory": _memory(plan),
        "links": _links(plan),
        "flags": f"no problems with {plan.engine.label}",
        "port": f"port {plan.port} is free",
        "key": "an API key is set" if API_KEY in plan.secrets else f"it listens on {plan.host} only",
    }
    items = [_of_plan(name, by_item.get(name, ()), text) for name, text in well.items()]
    if around.model_missing:
        items = [_to_download(plan) if (one.name, one.status) == ("model", "ok") else one for one in items]
    if plan.memory is None:
        items = [_not_known(plan) if (one.name, one.status) == ("memory", "ok") else one for one in items]
    items += [_disks(by_item.get("disk", ()), around.disks), _scraping(plan, around), _alerts(plan, around)]
    items += [_ramp(plan, around), _machine(around.problems)]
    return tuple(items)


def _of_plan(name: str, found: Iterable[PlanFinding], well: str) -> ChecklistItem:
    """An item decided by the plan; advice alone does not make it a warning."""
    found = [one for one in found if one.level is not Level.ADVICE]
    if not found:
        return ChecklistItem(name, "ok", well)
    status: Status = "error" if any(one.level is Level.ERROR for one in found) else "warning"
    fixes = [fix_options(one.fix) for one in found if one.fix is not None]
    message = "; ".join(one.message for one in found)
    return ChecklistItem(name, status, message, " or ".join(fixes), tuple(one.code for one in found))


def _context(plan: Plan, workload: Workload) -> str:
    wanted = workload.input_tokens_p95 + workload.output_tokens_p95
    held = plan.memory.max_model_len if plan.memory is not None else token_count(plan.flags.get("max-model-len"))
    at_most = f"{held:,} tokens per request" if held else "as long as the model supports"
    return f"{at_most}; the preset's traffic needs {wanted:,} at p95"


def _to_download(plan: Plan) -> ChecklistItem:
    text = f"{plan.model} is not on this machine: vLLM would download it at startup"
    return ChecklistItem("model", "warning", text, f"vllm-console models get {plan.model}")


def _not_known(plan: Plan) -> ChecklistItem:
    """The memory item of a launch without a memory estimate."""
    model = bool(plan.gpus) or plan.engine.build == "cpu"
    missing = "too little is known about the model" if model else "no GPU is known"
    fix = "--model with a folder or an id whose config.json is on this machine" if model else ""
    return ChecklistItem("memory", "unknown", f"unknown whether it fits: {missing}", fix)


def _memory(plan: Plan) -> str:
    memory = plan.memory
    if memory is None:
        return ""
    kv = f"weights {gib(memory.weights_gib)}, KV cache {gib(memory.kv_gib)}" + (" per GPU" if plan.gpus else "")
    many = f", {memory.served_p95:.0f} requests at p95 length" if memory.served_p95 else ""
    return f"{kv}{many} ({memory.source})"


def _links(plan: Plan) -> str:
    if len(plan.gpus) < 2:
        return "no links between GPUs are used"
    return plan.placement or f"GPUs {','.join(map(str, plan.gpus))}"


def _disks(found: Iterable[PlanFinding], disks: Sequence[Disk]) -> ChecklistItem:
    if found := list(found):
        return _of_plan("disk", found, "")
    low = [disk for disk in disks if disk.free_gib < LEAST_FREE_GIB]
    if low:
        places = "; ".join(f"{disk.what} ({disk.path}) has {gib(disk.free_gib)} free" for disk in low)
        return ChecklistItem(
            "disk", "warning", places, f"free up space: compiled kernels may take {LEAST_FREE_GIB:.0f} GiB"
        )
    return ChecklistItem(
        "disk", "ok", ", ".join(f"{disk.what} {gib(disk.free_gib)} free" for disk in disks) or "nothing known"
    )


def _scraping(plan: Plan, around: ChecklistInputs) -> ChecklistItem:
    seen, export = around.monitoring, "vllm-console export scrape"
    if seen.problem:
        return ChecklistItem(
            "scraping", "warning", seen.problem, f"{export} writes the configuration; or --prometheus URL"
        )
    mine = {f"{host}:{plan.port}" for host in around.hosts}
    if mine & set(seen.targets):
        return ChecklistItem("scraping", "ok", f"{seen.url} scrapes port {plan.port} of this machine")
    return ChecklistItem("scraping", "warning", f"{seen.url} does not scrape port {plan.port} of this machine", export)


def _alerts(plan: Plan, around: ChecklistInputs) -> ChecklistItem:
    seen, export = around.monitoring, f"vllm-console export prometheus {plan.preset}"
    missing = [name for name in around.wanted_alerts if name not in seen.alerts]
    if not missing:
        return ChecklistItem("alerts", "ok", f"{seen.url} has all {len(around.wanted_alerts)} alerting rules")
    if around.webhook:
        return ChecklistItem("alerts", "ok", "findings go to the webhook of config.toml")
    if seen.problem:
        return ChecklistItem("alerts", "warning", "no alerting rules are known, and no webhook is set", export)
    some = f"{len(missing)} of {len(around.wanted_alerts)} alerting rules are missing"
    return ChecklistItem("alerts", "warning", f"{some} at {seen.url}: {', '.join(missing)}", export)


def _ramp(plan: Plan, around: ChecklistInputs) -> ChecklistItem:
    same = (plan.preset, plan.model, around.gpu_kind)
    found = [
        (one, run.name)
        for run in around.runs
        if (run.preset, run.model, run.gpu_kind) == same
        for one in run.measurements
        if one.kind == RAMP
    ]
    where = around.gpu_kind or "this machine"
    if not found:
        text = f"no ramp of {plan.preset} with {plan.model} on {where}: its ceiling is unknown"
        return ChecklistItem("ramp", "warning", text, "after the launch: vllm-console ramp NAME")
    newest, run = max(found, key=lambda pair: pair[0].at)
    ceiling = newest.ceiling_requests_per_second
    if ceiling is None:
        again = f"vllm-console ramp {run.partition('@')[0]} --budget 20m"
        return ChecklistItem("ramp", "warning", f"the ramp of {run} found no ceiling: {newest.sentence}", again)
    return ChecklistItem("ramp", "ok", f"the objectives held up to {rate(ceiling, 'req')} ({run})")


def _machine(problems: Sequence[Mapping[str, Any]]) -> ChecklistItem:
    if not problems:
        return ChecklistItem("machine", "ok", "doctor finds no problem")
    first = problems[0]
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    return ChecklistItem(
        "machine", "warning", f"{first['what']}{more}", f"{first['do']}; vllm-console doctor lists all"
    )
