"""``vllm-console compare NAME --engine A --engine B``: is a server slower on another vLLM, with the same traffic?"""

from __future__ import annotations

import argparse
import textwrap
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_console.cli.fleet_access import open_fleet, refuse_read_only
from vllm_console.cli.options import changes_from
from vllm_console.cli.output import complain, show
from vllm_console.cli.waiting import is_settled, undone_at_end, wait_until
from vllm_console.text import duration, plain
from vllm_console.text import seconds as latency
from vllm_launchers.errors import OperationError, UsageError
from vllm_launchers.keeper.records import State
from vllm_launchers.launch.errors import NoPlaceError
from vllm_launchers.plan.findings import Level
from vllm_launchers.presets.model import Workload
from vllm_launchers.units import counted
from vllm_launchers.vllm.flags.changes import Changes

if TYPE_CHECKING:
    from vllm_console.fleet.local import LocalFleet
    from vllm_console.load.shape import RecordedTraffic
    from vllm_console.load.upgrade import EngineTurn, UpgradeComparison
    from vllm_launchers.vllm.engines import Engine

WARM_UP_SHARE, WARM_UP_MOST = 0.1, 16
"""Warm-up requests, sent first with other tokens and not counted: share of the recorded ones, and maximum."""
START_SECONDS, STOP_SECONDS = 1800.0, 300.0
_FLAG_CODES = frozenset({"flag_unknown", "flag_too_new", "flag_dead"})
_TITLES = {"ttft": "TTFT", "tpot": "time per output token", "e2e": "end-to-end"}


class _Side(msgspec.Struct):
    """One of the two engines: its temporary server's name, its flag changes, and its runs."""

    engine: Engine
    name: str
    changes: Changes
    runs: list[str]


class _Traffic(msgspec.Struct):
    """The traffic of each turn: recorded requests, or the preset's shape at a rate."""

    recorded: RecordedTraffic | None
    warm_up: RecordedTraffic | None
    workload: Workload
    rate: float
    seconds: float
    source: str


def run_upgrade(args: argparse.Namespace) -> int:
    """Run rounds on both engines and print the verdict; exit code 1 if the second is slower or there is no verdict.

    Raises:
        UsageError: not two engines, or too few rounds.
        OperationError: an engine does not exist, or its turn failed.
        NoPlaceError, UnfitError: there is no room for a second server, or vLLM would reject its flags.
    """
    from vllm_console.load.upgrade import FEWEST_ROUNDS, compare_engines

    refuse_read_only(args)
    if len(args.engine) != 2 or args.after is not None:
        raise UsageError("compare NAME takes two engines, --engine A --engine B, and no second run")
    if args.rounds < FEWEST_ROUNDS:
        raise UsageError(f"--rounds {args.rounds}: fewer than {FEWEST_ROUNDS} rounds can't tell a change from noise")
    fleet = open_fleet(args)
    sides, notes = _sides(fleet, args)
    traffic = _traffic(fleet, args)
    if not args.json:
        print("\n".join([*(f"! {plain(note)}" for note in notes), *_heading(args, sides, traffic)]), flush=True)
    rounds: list[tuple[EngineTurn, EngineTurn]] = []
    with undone_at_end(partial(_remove, fleet, sides)):
        for number in range(args.rounds):
            order = (0, 1) if number % 2 == 0 else (1, 0)
            turns = {at: _play(fleet, args, sides[at], traffic, number) for at in order}
            rounds.append((turns[0], turns[1]))
    found = compare_engines(rounds)
    show(args, lambda: _document(args.before, sides, notes, traffic, found), lambda: _result(sides, found))
    return 0 if found.verdict in ("faster", "no significant difference") else 1


# -- before the first turn -------------------------------------------------------------------------------------------


def _sides(fleet: LocalFleet, args: argparse.Namespace) -> tuple[tuple[_Side, _Side], list[str]]:
    """Both engines with the flags that both accept, and notes on flags that were dropped or renamed.

    Raises:
        UnfitError: vLLM would reject the remaining flags.
    """
    from vllm_launchers.launch.refusal import refuse_unfit

    snapshot = fleet.snapshot()
    used = {server.name for server in snapshot.servers}
    sides = tuple(
        _Side(fleet.engine(word), f"{args.before}-upgrade-{letter}", changes_from(args), [])
        for word, letter in zip(args.engine, "ab", strict=True)
    )
    if taken := sorted(used & {side.name for side in sides}):
        raise OperationError(
            f"a server named {taken[0]} already exists, perhaps from an earlier check: stop and remove it"
        )
    notes: list[str] = []
    for _ in range(8):  # each pass handles what the passes before it uncovered
        changed = False
        for side in sides:
            try:
                plan = fleet.plan_trial(args.before, side.engine, side.changes)
            except NoPlaceError as error:
                hint = f"free GPUs, or stop {args.before} during the check"
                raise NoPlaceError(f"{str(error).removesuffix('.')}: {hint}", error.sets) from error
            for one in plan.findings:
                if one.level is not Level.ERROR or one.code not in _FLAG_CODES or one.fix is None:
                    continue
                changed = True
                notes.append(f"{one.message}; {'renamed there' if one.fix.set else 'left out on both'}")
                for other in (side,) if one.fix.set else sides:
                    kept = {name: value for name, value in other.changes.set.items() if name not in one.fix.unset}
                    unset = dict.fromkeys((*other.changes.unset, *one.fix.unset))
                    other.changes = Changes(set={**kept, **one.fix.set}, unset=tuple(unset))
        if not changed:
            break
    for side in sides:
        refuse_unfit(fleet.plan_trial(args.before, side.engine, side.changes), force=False)
    return (sides[0], sides[1]), notes


def _traffic(fleet: LocalFleet, args: argparse.Namespace) -> _Traffic:
    """The server's newest recorded requests, or else its preset's traffic."""
    from vllm_console.load.shape import FEWEST_RECORDED, RecordedTraffic, served_requests, suggested_rate

    server = fleet.snapshot().server(args.before)
    workload = (server.workload if server is not None else None) or Workload(1000, 200, 0.0, 8)
    try:
        found = served_requests(fleet.probes.requests(args.before))
    except OperationError:  # it has no probe
        found = []
    newest = max((one.arrived_at for one in found), default=0.0)
    found = [one for one in found if one.arrived_at > newest - args.seconds]
    if len(found) >= FEWEST_RECORDED:
        first = found[: max(4, min(WARM_UP_MOST, round(len(found) * WARM_UP_SHARE)))]
        recorded, warm_up = RecordedTraffic(found), RecordedTraffic(first, seed=1)
        return _Traffic(recorded, warm_up, workload, 0.0, recorded.due[-1], recorded.words())
    rate = suggested_rate(workload)
    words = f"the preset's traffic at {rate:g} requests/s, as fewer than {FEWEST_RECORDED} requests are recorded"
    return _Traffic(None, None, workload, rate, args.seconds, words)


def _heading(args: argparse.Namespace, sides: tuple[_Side, _Side], traffic: _Traffic) -> list[str]:
    text = (
        f"{args.before}: {sides[0].engine.label} and {sides[1].engine.label}, {args.rounds} rounds; each of the "
        f"{2 * args.rounds} turns starts a server, sends {traffic.source} ({duration(traffic.seconds)}) and ends it"
    )
    return textwrap.wrap(plain(text), 79)


# -- turns -----------------------------------------------------------------------------------------------------------


def _play(fleet: LocalFleet, args: argparse.Namespace, side: _Side, traffic: _Traffic, number: int) -> EngineTurn:
    """One turn: start, warm up, send, stop. Raises OperationError if the server did not start, or did not respond."""
    import asyncio

    from vllm_console.load.client import LoadError
    from vllm_console.load.report import Times
    from vllm_console.load.run import run_load
    from vllm_console.load.upgrade import EngineTurn

    server = fleet.start_trial(args.before, side.name, side.engine, side.changes)
    side.runs.append(f"{server.name}@{server.generation}")
    server = wait_until(fleet, side.name, is_settled, quiet=args.json, timeout=START_SECONDS)
    if server.state is not State.READY:
        raise OperationError(f"{side.engine.label} did not start: {server.reason or server.state}")
    send: Any = partial(
        run_load, server.url, None, traffic.workload, lookup=partial(fleet.listener, side.name),
        max_in_flight=max(4 * traffic.workload.concurrency, 256),
    )  # fmt: skip
    answers: dict[int, Times] = {}
    try:
        if traffic.recorded is not None:
            asyncio.run(send(None, traffic.seconds, recorded=traffic.warm_up))
            report = asyncio.run(send(None, traffic.seconds, recorded=traffic.recorded, answers=answers))
        else:
            asyncio.run(send(None, 1.0, requests=4, seed=1))
            report = asyncio.run(send(traffic.rate, traffic.seconds, answers=answers))
    except LoadError as error:
        raise OperationError(f"{side.engine.label}: {error}") from error
    _stop(fleet, side)
    if not args.json:
        words = f"round {number + 1}, {side.engine.label}"
        answered = f"{report.completed} of {counted(report.sent, 'request')} answered"
        print(plain(f"{words}: {answered}, e2e p50 {report.e2e.cell('p50')}"), flush=True)
    return EngineTurn(report.sent, answers)


def _stop(fleet: LocalFleet, side: _Side) -> None:
    """Stop its server and wait until it has ended, since the next one needs its memory."""
    server = fleet.snapshot().server(side.name)
    if server is None or not server.state.alive:
        return
    fleet.stop(side.name)
    wait_until(fleet, side.name, lambda view: not view.state.alive, quiet=True, timeout=STOP_SECONDS)


def _remove(fleet: LocalFleet, sides: tuple[_Side, _Side]) -> None:
    """Stop and remove the temporary servers; their runs and histories are kept."""
    for side in sides:
        try:
            if fleet.snapshot().server(side.name) is not None:
                _stop(fleet, side)
                fleet.forget(side.name)
        except OperationError as error:
            complain(f"{side.name} is still there: {error}; 'vllm-console stop {side.name}' ends it")


# -- output ---------------------------------------------------------------------------------------------------------


def upgrade_text(found: UpgradeComparison, second: str) -> str:
    """The verdict on the second engine as text."""
    if found.verdict == "not comparable":
        first, other = counted(found.failed[0], "request"), found.failed[1]
        return f"Not comparable: {first} failed on the first engine, {other} on the second."
    if found.verdict == "not enough data":
        return "Not enough data: too few requests were answered on both engines in every round."
    significant = [one for one in found.figures if one.verdict != "no significant difference"]
    if significant:
        parts = [f"{_TITLES[one.name]} {one.change:+.1%} ({one.low:+.1%} to {one.high:+.1%})" for one in significant]
        mixed = found.verdict == "mixed"
        verdict = "faster in some figures and slower in others" if mixed else found.verdict
        return f"{second} is {verdict}: {', '.join(parts)}."
    most = max(one.high for one in found.figures)
    return f"No significant difference; a slowdown of more than {most:.1%} is ruled out."


def _result(sides: tuple[_Side, _Side], found: UpgradeComparison) -> list[str]:
    lines = [""]
    if found.figures:
        lines.append(f"{'':22} {'first':>8} {'second':>8} {'change':>8}  95% interval")
    for one in found.figures:
        cells = f"{latency(one.first):>8} {latency(one.second):>8} {one.change:>+8.1%}"
        lines.append(f"{_TITLES[one.name]:22} {cells}  {one.low:+.1%} to {one.high:+.1%}")
    lines += textwrap.wrap(plain(upgrade_text(found, sides[1].engine.label)), 79)
    runs = ", ".join(run for side in sides for run in side.runs)
    return [*lines, *textwrap.wrap(f"Kept as runs: {plain(runs)}", 79)]


def _document(
    name: str, sides: tuple[_Side, _Side], notes: list[str], traffic: _Traffic, found: UpgradeComparison
) -> dict[str, Any]:
    """What ``--json`` prints (a contract)."""
    engines = [
        {
            "kind": str(side.engine.kind), "version": side.engine.version, "path": side.engine.path, "runs": side.runs,
            "failed": failed,
        }
        for side, failed in zip(sides, found.failed, strict=True)
    ]  # fmt: skip
    return {
        "server": name,
        "verdict": str(found.verdict),
        "sentence": upgrade_text(found, sides[1].engine.label),
        "engines": engines,
        "rounds": found.rounds,
        "requests": found.requests,
        "traffic": traffic.source,
        "notes": notes,
        "figures": [{**msgspec.structs.asdict(one), "unit": "s", "verdict": str(one.verdict)} for one in found.figures],
    }
