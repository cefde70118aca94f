"""``vllm-console engines``: list vLLM installations; ``install`` and ``remove`` manage those of this program."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_console.cli.fleet_access import open_fleet, refuse_read_only, settings_from, state_of
from vllm_console.cli.options import add_json, text_from
from vllm_console.cli.output import Document, complain, confirmed, fields, print_json, prose
from vllm_console.cli.progress import ProgressLine
from vllm_console.text import plain, size
from vllm_launchers.errors import NotFoundError, OperationError, RefusedError, UsageError

if TYPE_CHECKING:
    from vllm_launchers.vllm.engine_install import Build, EnginePlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "List vLLM installations. 'engines install' adds one in its own virtual environment, 'engines remove NAME' "
        "deletes it."
    )
    parser.add_argument("verb", nargs="?", choices=["install", "remove"], help="omit to list them")
    parser.add_argument("version", nargs="?", type=text_from, help="vLLM's version (default: the newest), or the name")
    build = parser.add_mutually_exclusive_group()
    build.add_argument("--cpu", action="store_true", help="the CPU build (default without an NVIDIA driver)")
    build.add_argument("--cuda", action="store_true", help="the CUDA build")
    parser.add_argument("--index", action="append", default=[], metavar="URL", help="an additional package index")
    parser.add_argument(
        "--python", type=text_from, metavar="PATH", help="Python interpreter to use (default: this program's)"
    )
    parser.add_argument("--yes", action="store_true", help="install, remove: do not ask")
    parser.add_argument("--dry-run", action="store_true", help="show what would be installed, then exit")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """List, install or remove; unusable installations are reported on stderr."""
    if args.verb == "install":
        return _install(args)
    if args.verb == "remove":
        return _remove(args)
    from vllm_launchers.vllm.engines import engine_problems, unfinished_engines

    config = settings_from(args)
    engines = open_fleet(args, config).engines()
    for problem in engine_problems(config.vllm):
        complain(problem)
    for folder in unfinished_engines(os.environ):
        version, _, cpu = folder.name.partition("-")
        again = f"vllm-console engines install {version}{' --cpu' if cpu else ''}"
        complain(
            f"{folder.name}: installation incomplete; '{again}' continues it, 'vllm-console engines remove "
            f"{folder.name}' deletes it"
        )
    if args.json:
        print_json([fields(engine, "kind version build path") for engine in engines])
        return 0
    for engine in engines:
        print(plain(f"{engine.label:<28} {engine.path}"))
    if all(engine.kind == "simulated" for engine in engines):
        print(
            prose(
                "No usable vLLM found. 'vllm-console engines install' installs one; --vllm PATH, or vllm in "
                "config.toml, names one."
            )
        )
    return 0


def _install(args: argparse.Namespace) -> int:
    """Plan, ask, install. Raises OperationError if it can't be installed."""
    from vllm_launchers.host.gpu.host import DriverError
    from vllm_launchers.host.gpu.nvml import driver_version
    from vllm_launchers.vllm.engine_install import install_engine, plan_engine, refuse_while_installing
    from vllm_launchers.vllm.engines import MARKER

    if not args.dry_run:
        refuse_read_only(args)
    driver = None
    try:
        driver = None if args.cpu else driver_version()
    except DriverError as error:
        if not args.cuda:
            raise OperationError(f"{error}. For the CPU build use --cpu") from error
    build: Build = "cuda" if args.cuda or driver is not None else "cpu"
    if args.version and not args.dry_run:
        refuse_while_installing(args.version, build)
    if sys.stderr.isatty() and not args.json:
        print("Asking pip what would be installed …", file=sys.stderr, flush=True)
    plan = plan_engine(args.version, build, indexes=args.index, python=args.python, driver=driver)
    there = os.path.isfile(os.path.join(plan.folder, MARKER))  # noqa: PTH113, PTH118
    if not args.json:
        print("\n".join(engine_plan_lines(plan)))
    if plan.problems and not there:
        raise OperationError(". ".join(plan.problems))
    if args.dry_run or there:
        return _installed(args, plan, there=there)
    confirmed(args, f"Install it ({size(plan.download_bytes)} to download)?")
    with ProgressLine(silent=args.json) as line:
        install_engine(plan, line.download(plan.download_bytes))
    return _installed(args, plan, there=True)


def _installed(args: argparse.Namespace, plan: EnginePlan, *, there: bool) -> int:
    if args.json:
        print_json(engine_plan_document(plan) | {"installed": there})
    elif there:
        print(f"{plan.name} is installed")
        print(f"  vllm-console start PRESET --vllm {plan.name}")
    else:
        print("Nothing was installed. Without --dry-run, it asks before it downloads.")
    return 0


def engine_plan_lines(plan: EnginePlan) -> list[str]:
    """The plan as text."""
    unknown = f", and {plan.unknown_sizes} of unknown size" if plan.unknown_sizes else ""
    lines = [
        f"vLLM {plan.version} for {'the CPU' if plan.build == 'cpu' else 'CUDA ' + (plan.cuda or '(release unknown)')}",
        f"  folder     {plan.folder}",
        f"  packages   {len(plan.wheels)}, {size(plan.download_bytes)} to download{unknown}",
        f"  disk       {size(plan.free_bytes)} free",
        f"  Python     {plan.python_version} ({plan.python})",
    ]
    if plan.glibc_needed:
        lines.append(f"  glibc      {plan.glibc or 'unknown'} (needs {plan.glibc_needed} or later)")
    if plan.build != "cpu":
        lines.append(
            f"  driver     {plan.driver or 'none'} (needs {plan.driver_needed or 'an unknown release'} or later)"
        )
    return [*map(plain, lines), *(prose(f"  note: {note}", "    ") for note in plan.notes)]


def engine_plan_document(plan: EnginePlan) -> Document:
    """The plan as JSON."""
    named = "name version build folder python python_version free_bytes glibc glibc_needed cuda driver driver_needed"
    return {
        **fields(plan, f"{named} problems notes"),
        "download_bytes": plan.download_bytes if not plan.unknown_sizes else None,
        "packages": [fields(one, "name version file sha256 bytes") for one in plan.wheels],
    }


def _remove(args: argparse.Namespace) -> int:
    """Delete an environment that this program created. Raises OperationError if it can't be removed."""
    from vllm_launchers.vllm.engine_install import users_of
    from vllm_launchers.vllm.engines import managed_engine, managed_engines, remove_engine

    refuse_read_only(args)
    if args.version is None:
        raise UsageError("engines remove: name the engine, as 'engines' lists it")
    path = managed_engine(args.version, os.environ)
    if path is None:
        names = ", ".join(one.name for one in managed_engines(os.environ)) or "none"
        raise NotFoundError(f"no engine installed here is called '{args.version}'; available: {names}")
    if users := users_of(path):
        raise RefusedError(f"{path.name} is used by process {users[0]}; stop its server first")
    started = ", ".join(_started_from(state_of(args), path))
    note = f" It started {started}, which can't be restarted without it." if started else ""
    confirmed(args, f"Delete {path}?{note}")
    step = f"removing {path.name}"

    def show(done: int, total: int | None, freed: int) -> None:
        counted = f"counting its files, {done:,} so far" if total is None else f"{done:,} of {total:,} files"
        line.say(step, f"{step}: {counted}{f', {size(freed)} freed' if freed else ''}")

    try:
        with ProgressLine(silent=args.json) as line:
            freed = remove_engine(path, show)
    except OSError as error:
        raise OperationError(f"{error.filename}: {os.strerror(error.errno or 0)}") from error
    if args.json:
        print_json({"name": path.name, "removed": True, "freed_bytes": freed})
    else:
        print(f"{path.name}: removed, {size(freed)} freed")
        if started:
            print(f"It started {started}: 'vllm-console remove NAME', then 'start' with another engine.")
    return 0


def _started_from(state: Path, engine: Path) -> Iterator[str]:
    """The recorded servers whose command is in this folder."""
    from vllm_launchers.keeper import client

    records, _ = client.list_records(state)
    for record in records:
        if Path(record.current.spec.argv[0]).is_relative_to(engine):
            yield record.name
