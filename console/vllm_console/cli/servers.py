"""``vllm-console list`` and ``status NAME``: servers as a table, as a description, and as JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_console.cli.fleet_access import open_fleet, state_of
from vllm_console.cli.options import add_json
from vllm_console.cli.output import Document, complain, fields, print_json
from vllm_console.fleet.leftovers import find_lost, format_lost_here
from vllm_console.fleet.snapshot import STALE_SECONDS, PreparedRestart, ServerView, SleepView
from vllm_console.history.energy import Energy, energy_lines
from vllm_console.metrics.quantile import PARTS, contradicting, p99_of, text_of
from vllm_console.metrics.sample import Window
from vllm_console.metrics.window import format_unserved, in_order, metrics_document, window_document
from vllm_console.text import UNKNOWN, count, duration, percent, plain, seconds, took
from vllm_launchers.errors import NotFoundError
from vllm_launchers.keeper.records import State
from vllm_launchers.values import as_dict

if TYPE_CHECKING:
    from vllm_console.load.tuner_progress import TunerFigure, TunerProgress
    from vllm_launchers.host.gpu.host import Host

START_ONE = "Start one with 'vllm-console start chatbot', or try 'vllm-console demo'"

COLUMNS = (
    ("NAME", 14),
    ("OWNER", 8),
    ("HOST", 5),
    ("PRESET", 16),
    ("STATE", 20),
    ("ENGINE", 22),
    ("PORT", 6),
    ("KV", 5),
    ("RUN", 5),
    ("WAIT", 5),
    ("PREEMPT/min", 12),
    ("TTFT p99", 9),
    ("ITL p99", 9),
    ("TOK/S", 7),
)
"""Title and minimum width of each column."""

LEAST_RATE_SECONDS = 5.0
"""Rates over a shorter time are unknown: nothing has to happen in a second."""

HOST = 2
"""The column that is omitted if all servers run on this machine."""

OMITTED_FIRST = ("ENGINE", "OWNER", "PRESET", "PORT", "TOK/S", "RUN")
"""Columns that a narrow terminal has no room for, the first one first."""

LATENCY_NAMES = {"ttft": "TTFT", "itl": "ITL"}
"""Display names of latencies, where they differ from JSON."""


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "List all servers. KV cache usage, running and waiting requests are current. Preemptions, p99 of TTFT and "
        "ITL, and TOK/S cover the last minute: TOK/S is the mean rate of generated tokens over all requests. – is "
        "unknown: servers that you did not start are read only once, so most of their rates are unknown. On a narrow "
        "terminal, the engine and other columns are left out."
    )
    parser.add_argument("--ours", action="store_true", help="only your own servers")
    add_json(parser)


def run_list(args: argparse.Namespace) -> int:
    """List the servers."""
    snapshot = open_fleet(args, observe=not args.ours, remote=not args.ours).snapshot()
    servers = [server for server in snapshot.servers if server.attached is None or not args.ours]
    for notice in snapshot.notices:
        complain(notice)
    if args.json:
        print_json([status_document(server) for server in servers])
    elif servers:
        print("\n".join(servers_table(servers, snapshot.at, _terminal_width())))
    else:
        lost = format_lost_here(state_of(args), find_lost(state_of(args)))  # with --ours, or if none serves HTTP
        print(plain(f"No servers. {lost or START_ONE}."))
    return 0


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name")
    add_json(parser)


def run_status(args: argparse.Namespace) -> int:
    """Show the server; for an attached machine that can't be reached, the reason."""
    from vllm_console.fleet.remote_hosts import read_hosts

    machine = any(host.name == args.name for host in read_hosts(state_of(args)))
    fleet = open_fleet(args, remote=machine)
    snapshot = fleet.snapshot(args.name)
    if there := [server.name for server in snapshot.servers if server.remote and server.remote == args.name]:
        raise NotFoundError(f"{args.name} is a machine: name one of its servers, {plain(', '.join(there))}")
    server = snapshot.named(args.name)
    energy = fleet.energy(server.name) if server.ours and server.attached is None and server.gpus else None
    if args.json:
        print_json(status_document(server) | {"energy": energy.document() if energy is not None else None})
    else:
        print("\n".join(describe_server(server, snapshot.at, energy)))
        if energy is None and fleet.tariff is not None and (why := no_energy(server, snapshot.host)):
            print(plain(f"  energy      {why}"))
    return 0


# -- as text ----------------------------------------------------------------------------------------------------------


def _terminal_width() -> int | None:
    """Columns of the terminal; None if the output goes elsewhere."""
    if not sys.stdout.isatty():
        return None
    from shutil import get_terminal_size  # imports every archive format

    return get_terminal_size().columns


def servers_table(servers: Sequence[ServerView], now: float, room: int | None = None) -> list[str]:
    """One line per server below a heading, with each reason on its own line below.

    If the columns are wider than ``room``, they are made as narrow as their contents, and the least important ones are
    left out.
    """
    rows = [[plain(cell) for cell in _cells(server, now)] for server in servers]
    widths = [max([least, *(len(row[at]) + 1 for row in rows)]) for at, (_, least) in enumerate(COLUMNS)]
    if not any(server.where for server in servers):
        widths[HOST] = 0
    if room is not None and sum(widths) > room:
        widths = _narrow(widths, rows, room)
    lines = [_line([title for title, _ in COLUMNS], widths)]
    for server, row in zip(servers, rows, strict=True):
        lines.append(_line(row, widths))
        if server.reason and (not server.state.alive or (server.node and server.pid is None)):
            lines.append(f"  {plain(server.reason)}")
        # Its owner already implies that another user's server is read-only, but not that it is open to everybody.
        if server.attached is not None and (why := server.reason or (server.attached.notice if server.machine else "")):
            lines.append(f"  {plain(why)}")
        if notice := server.notice if server.recorded or server.lost else server.exposed:
            lines.append(f"  {plain(notice)}")
        if server.tuner is not None:
            lines.append(f"  tuner: {server.tuner.sentence(now)}")
        if server.window is not None and (age := _age(server, now)) is not None:
            lines.append(f"  these metrics are {duration(age)} old")
    return lines


def _narrow(widths: Sequence[int], rows: Sequence[Sequence[str]], room: int) -> list[int]:
    """Widths whose sum is at most ``room`` if possible. A width of 0 omits a column."""
    titles = [title for title, _ in COLUMNS]
    narrow = [
        max(len(title), *(len(row[at]) for row in rows)) + 1 if widths[at] else 0 for at, title in enumerate(titles)
    ]
    for title in OMITTED_FIRST:
        if sum(narrow) <= room + 1:  # the last column needs no space behind it
            break
        narrow[titles.index(title)] = 0
    return narrow


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True) if width).rstrip()


def _cells(server: ServerView, now: float) -> tuple[str, ...]:
    window = server.window
    latencies = window.latencies if window else {}
    rates = window if window and window.end - window.start >= LEAST_RATE_SECONDS else None
    return (
        server.name,
        "you" if server.ours or server.remote_ours else server.owner or UNKNOWN,
        server.where or "here",
        server.preset or UNKNOWN,
        _state(server, now, " "),
        server.engine.label if server.engine else UNKNOWN,
        str(server.port or UNKNOWN),
        percent(window.kv_cache_usage if window else None),
        count(window.requests_running if window else None),
        count(window.requests_waiting if window else None),
        count(rates.preemptions_per_minute if rates else None),
        p99_of(latencies.get("ttft")),
        p99_of(latencies.get("itl")),
        count(rates.generation_tokens_per_second if rates else None),
    )


def _state(server: ServerView, now: float, between: str) -> str:
    """Its state and for how long, or that it is being tuned. If it was not contacted, only that its process runs."""
    if not server.contacted and server.attached is None:
        return "running (unchecked)"
    if server.tuning:
        return server.tuning
    if server.since_start:
        return server.state_text
    since = f"{between}{duration(now - server.state_since)}" if server.state_since else ""
    return f"{server.state_text}{since}"


def running_text(server: ServerView, now: float) -> str:
    """For a server that was ready when first seen, how long its process has been running; else empty."""
    return f", running for {duration(now - server.state_since)}" if server.since_start else ""


def no_energy(server: ServerView, host: Host | None) -> str:
    """Why a server's energy and cost are unknown, for a user who set a price; empty if none are expected."""
    if not server.ours or server.attached is not None or server.simulated or server.headless:
        return ""
    if server.state is not State.READY:
        return ""
    if host is not None and host.problem:
        return f"unknown, and so is its cost: {host.problem.partition(';')[0]}"
    if not server.gpus:
        return "unknown, and so is its cost: it was not given GPUs of its own (--gpus)"
    return "unknown yet, and so is its cost: it must be alone on GPUs that count their energy"


def describe_server(server: ServerView, now: float, energy: Energy | None = None) -> list[str]:
    """One server in full, as text; ``energy`` is what its GPUs consumed."""
    lines = [
        f"{server.name}  {_state(server, now, ' for ')}{running_text(server, now)}"
        + ("  (simulated: no GPU is used)" if server.simulated else "")
    ]
    if server.reason:
        lines.append(f"  reason      {server.reason}")
    if server.sleep is not None and server.sleep.sentence:
        lines.append(f"  sleep       {server.sleep.sentence}")
    if server.partner:
        lines.append(f"  standby     pair with {server.partner}: one of the two sleeps while the other serves")
    if server.tuner is not None:
        lines.append(f"  tuner       {server.tuner.sentence(now)}")
    if server.notice:
        lines.append(f"  note        {server.notice}")
    facts = {
        "owner": server.owner if not server.ours else "",
        "attached": _attached_text(server),
        "preset": server.preset,
        "model": server.model,
        "engine": server.engine.label if server.engine else "",
        "address": server.address,
        "pid": str(server.pid or ""),
        "GPUs": ",".join(map(str, server.gpus)),
        "run": str(server.generation),
        "probe": f"none: {server.no_probe}" if server.no_probe else "on" if server.ours else "",
        "log": server.log_path,
    }
    lines += [f"  {title:<11} {value}" for title, value in facts.items() if value]
    if server.argv:
        lines.append(f"  command     {' '.join(server.command)}")
    if server.stages:
        lines.append("  start-up    " + "  ".join(f"{s.name} {took(s.seconds)}" for s in server.stages))
    if server.downtime_seconds is not None:
        lines.append(f"  downtime    {took(server.downtime_seconds)} at the last restart")
    lines += _describe_window(server, now)
    if energy is not None:
        lines += [f"  {'' if at else 'energy':<11} {text}" for at, text in enumerate(energy_lines(energy))]
    lines += _describe_fixes(server)
    lines += _describe_conditions(server, now)
    return [plain(line) for line in lines]


def _attached_text(server: ServerView) -> str:
    if server.attached is None:
        return ""
    key = f"API key in {server.attached.key_env}" if server.attached.key_env else "no API key"
    ca = f", certificates of {server.attached.ca}" if server.attached.ca else ""
    return f"from {server.where}, read-only; {key}{ca}"


def _describe_fixes(server: ServerView) -> list[str]:
    """Possible fixes for a failed server, whose reason is shown above."""
    if server.state is not State.FAILED or server.diagnosis is None or not server.diagnosis.fixes:
        return []
    from vllm_console.diagnosis.finding import fix_lines

    return [
        "",
        "  fixes       best first",
        *(f"    {line}" for fix in server.diagnosis.fixes for line in fix_lines(fix)),
    ]


def _describe_conditions(server: ServerView, now: float) -> list[str]:
    if not server.findings:
        return []
    from vllm_console.diagnosis.finding import format_finding

    lines = ["", "  findings    evaluated every 5 s from histograms, so figures can differ slightly from those above"]
    for finding in server.findings:
        since, load = f"for {duration(now - finding.since)}", server.load_behind(finding.code)
        since = f"{since}; {load[0]}, pid {load[1]}" if load is not None else since
        lines += [f"  {line}" for line in format_finding(finding, since)]
    return lines


def _age(server: ServerView, now: float) -> float | None:
    """The age of its metrics if they are not current; servers on other machines report that themselves."""
    if server.sample is None or server.remote or server.state not in (State.READY, State.UNRESPONSIVE):
        return None
    age = now - server.sample.at
    return age if age > STALE_SECONDS else None


def _describe_window(server: ServerView, now: float) -> list[str]:
    window = server.window
    if window is None:
        return []
    lasted = duration(max(1, round(window.end - window.start)))
    age = _age(server, now)
    span, at = (f"in the last {lasted}", "now") if age is None else (f"in the {lasted} before", f"{duration(age)} ago")
    lines = [
        f"  KV cache    {percent(window.kv_cache_usage)} of {count(window.kv_cache_tokens)} tokens {at}, "
        f"prefix hits {percent(window.prefix_hit_rate)} {span}",
        f"  requests    {count(window.requests_running)} running, {count(window.requests_waiting)} waiting {at}"
        f"{_longest_wait(window)}, {count(window.preemptions_per_minute)} preemptions/min {span}",
        *_unserved(window, span),
        f"  tokens/s    {count(window.generation_tokens_per_second)} out, "
        f"{count(window.prompt_tokens_per_second)} in {span}",
    ]
    if (drafted := window.speculation) is not None:
        positions = ", ".join(map(percent, drafted.by_position))
        lines.append(
            f"  speculation acceptance length {drafted.acceptance_length:.2f}, accepted by position {positions} {span}"
        )
    lines += rank_lines(server)
    if window.latencies:
        lines.append(f"  latencies   {span}")
    for name, value in window.latencies.items():
        shown = "  ".join(f"{part} {text_of(getattr(value, part)):<7}" for part, _ in PARTS)
        exact = "  exact" if value.exact else ""
        lines.append(f"  {LATENCY_NAMES.get(name, name):<11} mean {seconds(value.mean):<7}  {shown}{exact}".rstrip())
    if contradicting(window.latencies):
        lines.append("              queue, prefill, decode and e2e: completed requests; TTFT: started requests")
    return lines


def _unserved(window: Window, span: str) -> list[str]:
    """The number of requests that were not served; empty if all were, or if unknown."""
    found = format_unserved(window.responses)
    return [f"  not served  {found} {span}"] if found else []


def rank_lines(server: ServerView) -> list[str]:
    """A line per data-parallel rank; empty for a server with just one."""
    engines = server.sample.engines if server.sample is not None else {}
    return [
        f"  {f'rank {label}':<11} {percent(one.kv_cache_usage)} KV cache, {count(one.requests_running)} running, "
        f"{count(one.requests_waiting)} waiting, {count(one.generation_tokens_total)} tokens since it started"
        for label, one in in_order(engines).items()
        if len(engines) > 1
    ]


def _longest_wait(window: Window) -> str:
    """What is known about waiting requests, which are not counted in queue time and TTFT yet."""
    if not window.requests_waiting or not window.longest_wait or window.longest_wait < 1:
        return ""
    whom = "" if window.requests_waiting == 1 else "one "
    return f" ({whom}for ≥ {duration(window.longest_wait)}, not yet counted in TTFT and queue)"


# -- as a JSON document ------------------------------------------------------------------------------------------------


def server_document(server: ServerView) -> Document:
    """A server as ``start``, ``restart`` and ``stop`` print it (a contract); ``notice`` only if there is one."""
    return {
        **fields(server, "name preset state pid argv generation"),
        "engine": str(server.engine.kind) if server.engine else None,
        "port": server.port or None,
        "log": server.log_path or None,
        **({"notice": server.notice} if server.notice else {}),
    }


def status_document(server: ServerView) -> Document:
    """A server as ``status`` and ``list`` print it (a contract), with its exit and its metrics."""
    return server_document(server) | {
        "env": dict(server.environment),
        "exit": as_dict(server.exit) if server.exit else None,
        "metrics": metrics_document(server.sample) if server.sample else None,
        "metrics_at": server.sample.at if server.sample else None,
        "last_minute": window_document(server.window) if server.window else None,
        "longest_wait_seconds": server.window.longest_wait if server.window else None,
        **fields(server, "reason notice node owner ours elsewhere model downtime_seconds partner rollback stages"),
        "engine_version": server.engine.version if server.engine else None,
        "warm_up": as_dict(server.warm_up) if server.warm_up else None,
        "restart": _restart(server.restart) if server.restart else None,
        "sleep": _sleep(server.sleep) if server.sleep else None,
        "tuner": _tuner(server.tuner) if server.tuner else None,
        "attached": _attached(server),
        "host": server.where or None,
        "probe": {"added": not server.no_probe, "why_not": server.no_probe or None} if server.ours else None,
        "diagnosis": _diagnosis(server),
        "findings": _findings(server),
    }


def _attached(server: ServerView) -> Document | None:
    if server.attached is None:
        return None
    return {"host": server.where, "reachability": server.state_text, **fields(server.attached, "url key_env ca keyed")}


def _restart(restart: PreparedRestart) -> Document:
    """The restart being prepared, or the last one if it did not happen as requested."""
    return fields(restart, "asked_at step changes message memory_mib")


def _tuner(tuner: TunerProgress) -> Document:
    document = fields(tuner, "objective unit step since until trial trials set was pid")
    best = tuner.best
    return {
        **document,
        "original": _measured(tuner.original) if tuner.original else None,
        "best": {**fields(best, "trial set"), "measured": _measured(best.measured)} if best is not None else None,
    }


def _measured(figure: TunerFigure) -> Document:
    return fields(figure, "value bound")


def _sleep(sleep: SleepView) -> Document:
    """How it sleeps, or last slept."""
    document = fields(sleep, "step level since host_gib message")
    return {**document, "golden_prompts": sleep.checked, "answered_differently": list(sleep.differing)}


def _diagnosis(server: ServerView) -> Document | None:
    if server.diagnosis is None:
        return None
    from vllm_console.diagnosis.finding import diagnosis_document

    return diagnosis_document(server.diagnosis)


def _findings(server: ServerView) -> list[Document]:
    if not server.findings:
        return []
    from vllm_console.diagnosis.finding import finding_document

    return [finding_document(finding) for finding in server.findings]
