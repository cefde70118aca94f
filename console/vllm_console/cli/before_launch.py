"""``vllm-console check --before-launch PRESET``: what operators check before a launch."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_console.cli.fleet_access import open_fleet, settings_from
from vllm_console.cli.options import changes_from
from vllm_console.cli.output import fields, print_json
from vllm_console.fleet.snapshot import LaunchRequest, Preset
from vllm_console.fleet.verbs import NotFoundError
from vllm_console.text import plain

if TYPE_CHECKING:
    from vllm_console.alerts.checklist import Disk, Item, Surroundings
    from vllm_console.fleet.local import LocalFleet
    from vllm_launchers.plan.model import Plan


def check_launch(args: argparse.Namespace) -> int:
    """Print the list; exit code 1 if any item is not ok.

    Raises:
        NotFoundError: there is no such preset.
    """
    from vllm_console.alerts.checklist import checklist
    from vllm_console.cli.plan import plan_of

    fleet = open_fleet(args, observe=False)
    preset = next((one for one in fleet.presets()[0] if one.name == args.before_launch), None)
    if preset is None:
        raise NotFoundError(f"no preset is called '{plain(args.before_launch)}'; see 'vllm-console presets'")
    request = LaunchRequest(
        preset.name,
        args.model,
        args.engine,
        vllm=args.vllm,
        port=args.port,
        changes=changes_from(args),
        place="offered",
    )
    plan = plan_of(fleet, request, ask=False)
    items = checklist(plan, preset.workload, _surroundings(args, fleet, plan, preset))
    failed = any(item.status != "ok" for item in items)
    if args.json:
        document = {"preset": plan.preset, "model": plan.model, "port": plan.port, "ok": not failed}
        print_json(document | {"items": [fields(item, "name status message fix codes") for item in items]})
    else:
        print("\n".join(line for item in items for line in _item_lines(item)))
    return 1 if failed else 0


def _item_lines(item: Item) -> list[str]:
    import textwrap

    indent = " " * 18
    text = f"{item.status:<8} {item.name:<9}{plain(item.message)}"
    lines = textwrap.wrap(text, 79, subsequent_indent=indent, break_on_hyphens=False)
    if item.fix:
        fix = f"{indent}fix: {plain(item.fix)}"
        lines += textwrap.wrap(fix, 79, subsequent_indent=indent, break_on_hyphens=False)
    return lines


def _surroundings(args: argparse.Namespace, fleet: LocalFleet, plan: Plan, preset: Preset) -> Surroundings:
    """What the list needs to know of this machine, its runs and its monitoring."""
    from vllm_console.alerts.checklist import Surroundings
    from vllm_console.alerts.monitoring import ask_prometheus
    from vllm_console.alerts.prometheus import AlertTarget, rules
    from vllm_console.cli.host_source import this_host
    from vllm_console.diagnosis.objectives import objectives_of
    from vllm_console.doctor import NO_VLLM, examine
    from vllm_console.settings import config_folder
    from vllm_launchers.keeper.client import default_root
    from vllm_launchers.launch.earlier_starts import gpu_kind

    config = settings_from(args)
    state, host = args.state or default_root(), this_host(args)
    gpus = tuple(gpu for index in plan.gpus if (gpu := host.gpu(index)) is not None)
    found = examine(state, config_folder(), tuple(fleet.engines()), host)
    without = NO_VLLM if plan.engine.kind == "simulated" else ""
    target = AlertTarget(*objectives_of(preset.objectives, preset.name), preset.name)
    return Surroundings(
        gpu_kind=gpu_kind(gpus, plan.engine.build),
        hosts=("127.0.0.1", "localhost", "::1", os.uname().nodename, plan.host),
        runs=fleet.runs()[0],
        disks=_disks(state),
        monitoring=ask_prometheus(args.prometheus),
        wanted_alerts=tuple(rule.alert for rule in rules(target)),
        problems=[
            one for one in found["problems"] if one["what"] != without and (plan.gpus or "GPU" not in one["what"])
        ],
        webhook=bool(config.alerts.webhook),
    )


def _disks(state: Path) -> list[Disk]:
    """The disks of the caches and of the state folder, each once."""
    import shutil

    from vllm_console.alerts.checklist import Disk
    from vllm_launchers.host.hub_folders import cache_folder

    vllm = Path(os.environ.get("VLLM_CACHE_ROOT") or Path("~/.cache/vllm").expanduser())
    found: dict[int, Disk] = {}
    for what, path in (("model cache", cache_folder(os.environ)), ("vLLM's cache", vllm), ("state folder", state)):
        there = next((one for one in (path, *path.parents) if one.exists()), None)
        if there is not None:
            free = shutil.disk_usage(there).free / 2**30
            found.setdefault(there.stat().st_dev, Disk(what, str(path), round(free, 1)))
    return list(found.values())
