"""``vllm-console check``: whether a server meets its objectives, or a launch is safe to begin; for cron and CI."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_console.cli.fleet_access import open_fleet, settings_from, state_of
from vllm_console.cli.options import add_changes, add_engine, add_json, changes_from, duration_type
from vllm_console.cli.output import complain, fields, show
from vllm_console.text import duration, plain
from vllm_launchers.errors import RefusedError, UsageError
from vllm_launchers.launch.request import LaunchRequest
from vllm_launchers.presets.model import Preset

if TYPE_CHECKING:
    from vllm_console.alerts.check import Report
    from vllm_console.alerts.checklist import ChecklistInputs, ChecklistItem, Disk
    from vllm_console.fleet.local import LocalFleet
    from vllm_launchers.plan.model import Plan

LOCAL = "http://127.0.0.1:9090"
"""Prometheus's default address."""

WINDOW_SECONDS = 300.0
LONGEST_SECONDS = 30 * 86_400.0
"""History is kept for a month."""

_OF_A_LAUNCH = ("model", "engine", "vllm", "port", "prometheus", "set", "unset")
_OF_A_SERVER = ("window", "allow_idle")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Exit with 0 if the server met every objective of its preset over the window, with 1 if it missed one or is "
        "not ready. Both are printed on standard output. With --before-launch PRESET, run a preflight check instead: "
        "exit with 0 if every item is ok."
    )
    parser.add_argument("name", nargs="?")
    parser.add_argument("--before-launch", metavar="PRESET", help="check a launch of this preset; nothing is started")
    parser.add_argument("--model", metavar="MODEL", help="with --before-launch: replace the preset's model")
    add_engine(parser, "with --before-launch: ")
    parser.add_argument("--port", type=int, metavar="PORT", help="with --before-launch: port to bind (default 8000)")
    parser.add_argument(
        "--prometheus", metavar="URL",
        help=f"with --before-launch: the Prometheus that will scrape it (default {LOCAL})",
    )  # fmt: skip
    add_changes(parser)
    parser.add_argument(
        "--window",
        type=duration_type(1, LONGEST_SECONDS),
        metavar="DURATION",
        help="time window to evaluate (default 5m)",
    )
    parser.add_argument("--allow-idle", action="store_true", help="pass if the server had no requests (default: fail)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Judge the server, or check the launch."""
    if (args.name is None) == (args.before_launch is None):
        raise UsageError("give a server's name or --before-launch PRESET, not both")
    for option in _OF_A_LAUNCH if args.before_launch is None else _OF_A_SERVER:
        if getattr(args, option) not in (None, False, [], "auto"):
            belongs = "to --before-launch" if args.before_launch is None else "to the check of a server"
            raise UsageError(f"--{option.replace('_', '-')} belongs {belongs}")
    return _judge(args) if args.before_launch is None else check_launch(args)


def _judge(args: argparse.Namespace) -> int:
    from vllm_console.alerts.check import check_server, report_document

    fleet = open_fleet(args)
    snapshot = fleet.snapshot(args.name)
    server = snapshot.named(args.name)
    if not server.recorded:
        raise RefusedError(f"{args.name} was not started by vllm-console: no recorded history to judge")
    report = check_server(server, snapshot.at, args.window or WINDOW_SECONDS, allow_idle=args.allow_idle)
    show(args, lambda: report_document(report), lambda: _report_lines(report))
    # Cron often runs while no console is open: record the findings that no console saw.
    if trouble := fleet.history.judge_past(args.name):
        complain(trouble)
    return 0 if report.ok else 1


def _report_lines(report: Report) -> list[str]:
    """A line per objective, and per problem that is not an objective."""
    lines = [f"over the last {duration(report.window_seconds)}:"]
    for one in report.objectives:
        mark = {True: "ok", False: "failed", None: "–"}[one.ok]
        lines.append(f"{mark:<7} {plain(one.sentence)}")
    in_sentences = {f"{report.name}: {one.sentence}" for one in report.objectives}
    return [*lines, *(f"{'failed':<7} {plain(problem)}" for problem in report.problems if problem not in in_sentences)]


def check_launch(args: argparse.Namespace) -> int:
    """Print the checklist; exit code 1 if any item is not ok. Raises NotFoundError if there is no such preset."""
    from vllm_console.alerts.checklist import checklist
    from vllm_console.cli.plan import plan_of

    fleet = open_fleet(args, observe=False)
    preset = fleet.preset(args.before_launch)
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
    document = {"preset": plan.preset, "model": plan.model, "port": plan.port, "ok": not failed}
    document["items"] = [fields(item, "name status message fix codes") for item in items]
    show(args, lambda: document, lambda: (line for item in items for line in _item_lines(item)))
    return 1 if failed else 0


def _item_lines(item: ChecklistItem) -> list[str]:
    import textwrap

    indent = " " * 18
    text = f"{item.status:<8} {item.name:<9}{plain(item.message)}"
    lines = textwrap.wrap(text, 79, subsequent_indent=indent, break_on_hyphens=False)
    if item.fix:
        fix = f"{indent}fix: {plain(item.fix)}"
        lines += textwrap.wrap(fix, 79, subsequent_indent=indent, break_on_hyphens=False)
    return lines


def _surroundings(args: argparse.Namespace, fleet: LocalFleet, plan: Plan, preset: Preset) -> ChecklistInputs:
    from vllm_console.alerts.checklist import ChecklistInputs
    from vllm_console.alerts.monitoring import ask_prometheus
    from vllm_console.alerts.prometheus import AlertTarget, rules
    from vllm_console.cli.host_source import this_host
    from vllm_console.diagnosis.live.rule import objectives_of
    from vllm_console.doctor import NO_VLLM, examine
    from vllm_console.settings import config_folder
    from vllm_launchers.host.gpu.document import read_host
    from vllm_launchers.launch.earlier_starts import gpu_kind

    config, state = settings_from(args), state_of(args)
    host = read_host(args.host_file) if args.host_file is not None else this_host(args)
    gpus = tuple(gpu for index in plan.gpus if (gpu := host.gpu(index)) is not None)
    found = examine(state, config_folder(), tuple(fleet.engines()), host)
    without = NO_VLLM if plan.engine.kind == "simulated" else ""
    target = AlertTarget(*objectives_of(preset.objectives, preset.name), preset.name)
    return ChecklistInputs(
        gpu_kind=gpu_kind(gpus, plan.engine.build),
        hosts=("127.0.0.1", "localhost", "::1", os.uname().nodename, plan.host),
        runs=fleet.history.runs()[0],
        disks=_disks(state),
        monitoring=ask_prometheus(args.prometheus or LOCAL),
        wanted_alerts=tuple(rule.alert for rule in rules(target)),
        problems=[
            one for one in found["problems"] if one["what"] != without and (plan.gpus or "GPU" not in one["what"])
        ],
        webhook=bool(config.alerts.webhook),
        model_missing=plan.engine.kind == "vllm" and args.host_file is None and _is_missing(fleet, plan.model),
    )


def _is_missing(fleet: LocalFleet, model: str) -> bool:
    """Whether this is a hub ID of a model that is not in the cache."""
    from vllm_launchers.vllm.model_folder import HUB_ID

    is_hub_id = HUB_ID.fullmatch(model) is not None and not os.path.isdir(model)  # noqa: PTH112
    return is_hub_id and all(one.model != model for one in fleet.models().models)


def _disks(state: Path) -> list[Disk]:
    """The disks of the caches and the state folder, each once."""
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
