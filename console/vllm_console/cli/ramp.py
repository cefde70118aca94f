"""``vllm-console ramp NAME``: the highest request rate at which the objectives hold."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import textwrap
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from vllm_console.cli.load import MOST_SECONDS
from vllm_console.cli.load_target import Target, add_shape, find_target, shaped
from vllm_console.cli.options import add_json, duration_type, number_type
from vllm_console.cli.output import ask, complain, show
from vllm_console.cli.progress import ProgressLine
from vllm_console.cli.runs_text import step_heading, step_line
from vllm_console.history.energy import cost_line, energy_text
from vllm_console.load.spans import noted, read_spans
from vllm_console.runs.measurement import Measurement, plots
from vllm_console.text import duration, objectives_text, plain, rate
from vllm_launchers.errors import OperationError, RefusedError
from vllm_launchers.private import locked

if TYPE_CHECKING:
    from vllm_console.load.ramp import EnergyMeter, Ramp, RampOptions, RampProgress, RampStep
    from vllm_console.load.spans import LoadNote
    from vllm_launchers.presets.model import Objectives

HIGHEST_RATE = 10_000.0
LOCK = "ramp.lock"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Find the highest request rate at which a server meets its preset's objectives. The preset's traffic is sent "
        "at increasing rates: doubled until the objectives fail, bisected, then measured near the ceiling. Ctrl+c "
        "ends with the result so far."
    )
    parser.add_argument("server", metavar="name", help="a server's name, or a URL such as http://127.0.0.1:8000")
    parser.add_argument(
        "--rates", type=_rates, default=(), metavar="R,R,…", help="measure these rates instead, in requests per second"
    )
    parser.add_argument("--start", type=rate_from, metavar="R", help="the first rate (default: an estimate)")
    parser.add_argument(
        "--budget", type=budget_from, default=600.0, metavar="DURATION",
        help="time limit, such as 90s, 20m or 1h (default 10m)",
    )  # fmt: skip
    add_shape(parser)
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument(
        "--yes",
        action="store_true",
        help="proceed even if other clients use the server, or it is not yours: their requests will wait",
    )
    parser.add_argument("--remote", action="store_true", help="allow an attached endpoint, or another machine")
    add_json(parser)
    parser.add_argument(
        "--events", action="store_true",
        help="print a JSON object per line while it runs: progress, steps, result",
    )  # fmt: skip


rate_from = number_type(0, HIGHEST_RATE, "a rate in (0, 10000] requests per second", above=True)
"""Type for rates in requests per second."""

budget_from = duration_type(10, MOST_SECONDS)
"""Type for the time limit of a measurement."""


def _rates(text: str) -> tuple[float, ...]:
    found = tuple(rate_from(word) for word in text.split(","))
    if len(found) > 100:
        raise argparse.ArgumentTypeError("at most 100 rates are measured in one go")
    return found


def run(args: argparse.Namespace) -> int:
    """Search, print and store. Exit code 1 if no rate held, it was canceled, or the server stopped responding."""
    from vllm_console.diagnosis.live.rule import objectives_of
    from vllm_console.load.ramp import RampOptions

    target = find_target(args, "--yes", others_allowed=args.yes, remote_allowed=args.remote)
    server = target.server
    objectives, source = objectives_of(*((server.objectives, server.preset) if server is not None else (None, "")))
    try:
        others = confirm_load(args, target)
    except ServesOthersError as error:
        if args.events:
            _event("others", error.why)
        raise
    options = RampOptions(args.rates, args.start, args.budget, args.seed, others)
    with only_one(target):
        if args.events:
            _event("begin", {"objectives": asdict(objectives), "budget_seconds": options.budget_seconds})
        elif not args.json:
            print(_heading(target, objectives, source), flush=True)
        found = _search(args, target, objectives, options)
    if server is not None and found.steps:
        keep_ramp(target, server.name, found, objectives)
    if args.events:
        _event("result", found.document())
    else:
        show(args, found.document, lambda: _result_lines(found, objectives))
    return 0 if found.complete and any(step.outcome.ok for step in found.steps) else 1


def _heading(target: Target, objectives: Objectives, source: str) -> str:
    name = target.server.name if target.server is not None else target.url
    simulated = " (simulated engine)" if target.server is not None and target.server.simulated else ""
    text = f"{plain(name)}{simulated}: {objectives_text(objectives)} ({source})"
    return "\n".join([*textwrap.wrap(text, 79), step_heading()])


class ServesOthersError(RefusedError):
    """The server has other clients and this was not confirmed; ``why`` says how that is known."""

    def __init__(self, why: str, cost: str) -> None:
        super().__init__(f"{why}; {cost}: give --yes to continue")
        self.why = why


MAKES_WAIT = "a measurement makes its other clients wait"


def confirm_load(args: argparse.Namespace, target: Target, cost: str = MAKES_WAIT) -> bool:
    """Whether to continue although the server has other clients. ``cost`` is the effect on them.

    Raises:
        RefusedError: a tuner is running on it, which cannot be overridden.
        ServesOthersError: it has other clients, and this was not confirmed.
    """
    if target.server is not None and (tuner := target.server.tuner) is not None:
        left = duration(max(0.0, tuner.until - time.time()))
        raise RefusedError(f"a tuner (pid {tuner.pid}) is running on {_name(target)}, for at most {left}")
    if args.yes:
        return True
    if not (why := _others(target)):
        return False
    silent = args.json or getattr(args, "events", False)
    if ask(f"{why}; {cost}. Continue?", silent=silent):
        return True
    raise ServesOthersError(why, cost)


def _others(target: Target) -> str:
    """Why a server seems to have other clients, as a sentence without a period; empty if it does not."""
    from vllm_console.load.ramp import traffic_of_others

    if target.folder is not None and any(span.ended_at is None for span in read_spans(target.folder, time.time())):
        return f"{_name(target)} is already receiving load"
    why = asyncio.run(traffic_of_others(target.url, target.lookup, target.access))
    return f"{_name(target)} {why}" if why else ""


def _name(target: Target) -> str:
    return target.server.name if target.server is not None else target.url


@contextlib.contextmanager
def only_one(target: Target, rate: float | None = None) -> Iterator[LoadNote]:
    """Allow one measurement of a server at a time; it is noted with its rate, if any, so that charts can mark it.

    Raises:
        RefusedError: another one is running.
    """
    if target.folder is None:
        with noted(None, rate, MOST_SECONDS) as note:
            yield note
        return
    busy = RefusedError(f"a measurement of {_name(target)} is already running")
    with locked(target.folder / LOCK, 0.0, busy), noted(target.folder, rate, MOST_SECONDS) as note:
        yield note


def _search(args: argparse.Namespace, target: Target, objectives: Objectives, options: RampOptions) -> Ramp:
    """Run the ramp. SIGINT and SIGTERM end it early, keeping the results so far.

    Raises:
        OperationError: it could not begin.
    """
    from vllm_console.load.ramp import run_ramp
    from vllm_console.load.run import stop_on_signals
    from vllm_console.load.shape import Exact

    stop = asyncio.Event()
    reports = _Reports(args, stop)

    async def main() -> Ramp:
        stop_on_signals(stop)
        return await run_ramp(
            target.url,
            shaped(args, target.workload),
            objectives,
            options,
            exact=Exact(args.input_tokens, args.output_tokens),
            lookup=target.lookup,
            allow_remote=args.yes or args.remote,
            access=target.access,
            meter=meter,
            stop=stop,
            on_step=reports.step,
            on_progress=reports.progress,
        )

    try:
        with _meter(target) as meter:
            return asyncio.run(main())
    finally:
        reports.end()


@contextlib.contextmanager
def _meter(target: Target) -> Iterator[EnergyMeter | None]:
    """An energy meter for our own server's GPUs; None if it has none, or is not ours."""
    from vllm_console.load.ramp import EnergyMeter
    from vllm_launchers.host.gpu.monitor import GpuMonitor

    server = target.server
    if server is None or not server.ours or server.attached is not None or not (server.pid and server.gpus):
        yield None
        return
    watch = GpuMonitor()
    watch.start()
    try:
        yield EnergyMeter(server.pid, server.gpus, watch.latest, target.fleet.tariff)
    finally:
        watch.close()


def _event(kind: str, content: object, stop: asyncio.Event | None = None) -> None:
    """Print an event. If the reader is gone, set ``stop``, so that the ramp ends and keeps its results."""
    try:
        print(json.dumps({kind: content}), flush=True)
    except BrokenPipeError:
        if stop is not None:
            stop.set()


class _Reports:
    """Prints while the ramp runs: events, or steps with progress on standard error; with --json only the latter.

    ``stop`` is set when the reader of events is gone.
    """

    def __init__(self, args: argparse.Namespace, stop: asyncio.Event) -> None:
        self._args, self._stop = args, stop
        self._line = ProgressLine(silent=args.events)
        self.end = self._line.clear

    def step(self, step: RampStep) -> None:
        self.end()
        if self._args.events:
            _event("step", step.document(), self._stop)
        elif not self._args.json:
            print(step_line(step.document()), flush=True)

    def progress(self, progress: RampProgress) -> None:
        if self._args.events:
            _event("progress", asdict(progress), self._stop)
            return
        what = "warming up at" if progress.warming_up else "measuring"
        left = duration(max(0.0, self._args.budget - progress.elapsed))
        text = f"{what} {rate(progress.rate, 'req')}, {progress.in_flight:,} in flight; at most {left} left"
        self._line.show(text, progress.elapsed)


def _result_lines(found: Ramp, objectives: Objectives) -> list[str]:
    lines = (
        ["! the objectives do not hold at this rate", ""] if any(not one.outcome.ok for one in found.steps) else [""]
    )
    drawn = plots([("*", _measurement(found, objectives))])
    if drawn and found.ceiling is not None:
        lines += [*drawn, "        - - the objective, | the ceiling", ""]
    elif drawn:
        lines += [*drawn, "        - - the objective", ""]
    lines += textwrap.wrap(plain(found.sentence), 78, break_on_hyphens=False)
    if found.goodput is not None:
        lines.append(f"Goodput there: {rate(found.goodput, 'req')} with TTFT and mean ITL within their limits.")
    if found.energy is not None and (figures := energy_text(found.energy)):
        cost = cost_line(found.energy)
        lines.append(f"Energy near it: {figures}{f'; {cost}' if cost else ''}.")
    return lines


def _measurement(found: Ramp, objectives: Objectives) -> Measurement:
    return Measurement.of_ramp(found.document(), time.time(), asdict(objectives))


def keep_ramp(target: Target, name: str, found: Ramp, objectives: Objectives) -> None:
    """Store the result with the server's run. If that fails, report it; the result is not lost."""
    try:
        target.fleet.history.keep_measurement(name, _measurement(found, objectives))
    except OperationError as error:
        complain(f"the result could not be stored: {error}")
