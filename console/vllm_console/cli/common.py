"""What several commands share: options, the fleet they act on, how a server is written as JSON or as text."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm_console.fleet.api import Fleet, FleetError, RefusedError, UsageError
from vllm_console.fleet.model import Changes, ServerView, State
from vllm_console.text import plain

if TYPE_CHECKING:
    from vllm_console.config import Settings

Document = dict[str, Any]


def settings(args: argparse.Namespace) -> Settings:
    """What holds: the administrator's config file, and the person's or the one that the command line names.

    Raises:
        UsageError: the config file is wrong.
    """
    from vllm_console.config import ConfigError, read_settings

    try:
        return read_settings(args.config)
    except ConfigError as error:
        raise UsageError(str(error)) from error


def read_only_by(args: argparse.Namespace, config: Settings) -> str:
    """What makes this command read-only: the administrator's file before the command line; empty where nothing does."""
    return config.read_only_by or ("--read-only" if args.read_only else "")


def refuse_read_only(args: argparse.Namespace) -> None:
    """End a command that changes something before it has done any part of it.

    Raises:
        RefusedError: the command line or a config file says read-only.
    """
    from vllm_console.fleet.refusing import read_only_words

    if why := read_only_by(args, settings(args)):
        raise RefusedError(read_only_words(why))


def _ends_at_logout() -> tuple[str, ...]:
    """A notice for a console that starts servers where a logout would end them."""
    from vllm_launchers.machine.session_end import session_end

    return tuple(filter(None, (session_end(),)))


def open_fleet(
    args: argparse.Namespace,
    config: Settings | None = None,
    *,
    charts: bool = False,
    observe: bool = True,
    check: bool = True,
) -> Fleet:
    """The person's servers, as the command line's global options say; ``observe`` looks for others' too, ``check``
    that their folder is this person's alone.

    Raises:
        UsageError: the config file, which is read where ``config`` is not given, is wrong.
    """
    from vllm_console.config import gpu_reserves, gpu_shares
    from vllm_console.fleet.service import LocalFleet

    config = config or settings(args)
    read_only = read_only_by(args, config)
    seen = check_state(args, config) if check else []
    return LocalFleet(
        args.state,
        read_only=bool(read_only),
        read_only_by=read_only,
        notices=(*(seen if charts else ()), *config.notices, *(_ends_at_logout() if charts else ())),
        board=config.board,
        vllm_paths=config.vllm,
        observe=observe,
        charts=charts,
        host_file=args.host_file,
        shares=gpu_shares(config),
        reserves=gpu_reserves(config),
    )


def check_state(args: argparse.Namespace, config: Settings) -> list[str]:
    """See that the state folder is this person's alone, and mend it where that is allowed; says what was not.

    The sentences go to standard error, and back to whoever can show them too.
    """
    from vllm_console.text import plain
    from vllm_launchers.keeper.store import default_root
    from vllm_launchers.private import check

    told = [plain(one) for one in check(args.state or default_root(), mend=not read_only_by(args, config))]
    for sentence in told:
        print(f"vllm-console: {sentence}", file=sys.stderr)
    return told


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json``: print for scripts."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_changes(parser: argparse.ArgumentParser) -> None:
    """``--set`` and ``--unset``."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="FLAG=VALUE", help="set a vLLM flag, e.g. max-num-seqs=128"
    )
    parser.add_argument("--unset", action="append", default=[], metavar="FLAG", help="leave a flag of the preset out")


def changes_from(args: argparse.Namespace) -> Changes:
    """What ``--set`` and ``--unset`` ask for.

    Raises:
        UsageError: a word is no ``flag=value``, or names a flag that must not be set this way.
    """
    from vllm_launchers.plan.flags import FlagError, normalise, parse_set

    try:
        pairs = dict(parse_set(word) for word in args.set)
        return Changes(set=pairs, unset=tuple(normalise(word) for word in args.unset))
    except FlagError as error:
        raise UsageError(str(error)) from error


def complain(sentence: str) -> None:
    """Say on standard error, in one line, what is wrong."""
    print(f"vllm-console: {plain(sentence)}", file=sys.stderr)


def print_json(document: object) -> None:
    """Write one JSON document to standard output."""
    json.dump(document, sys.stdout, indent=2)
    sys.stdout.write("\n")


def server_document(server: ServerView) -> Document:
    """A server as ``start``, ``restart`` and ``stop`` print it (a contract); a ``notice`` only where there is one."""
    return {
        "name": server.name,
        "preset": server.preset or None,
        "engine": str(server.engine.kind) if server.engine else None,
        "port": server.port or None,
        "state": str(server.state),
        "pid": server.pid,
        "argv": list(server.argv),
        "generation": server.generation,
        "log": server.log_path or None,
        **({"notice": server.notice} if server.notice else {}),
    }


def status_document(server: ServerView) -> Document:
    """A server as ``status`` and ``list`` print it (a contract): with its end and its metrics."""
    from vllm_console.telemetry.document import metrics_document

    return server_document(server) | {
        "exit": asdict(server.exit) if server.exit else None,
        "metrics": metrics_document(server.sample) if server.sample else None,
        "reason": server.reason or None,
        "notice": server.notice or None,
        "owner": server.owner or None,
        "ours": server.ours,
        "engine_version": server.engine.version if server.engine else None,
        "model": server.model or None,
        "downtime_seconds": server.downtime_seconds,
        "stages": [asdict(stage) for stage in server.stages],
        "diagnosis": _diagnosis(server),
        "conditions": _conditions(server),
    }


def _diagnosis(server: ServerView) -> Document | None:
    if server.diagnosis is None:
        return None
    from vllm_console.diagnosis.document import diagnosis_document

    return diagnosis_document(server.diagnosis)


def _conditions(server: ServerView) -> list[Document]:
    if not server.conditions:
        return []
    from vllm_console.diagnosis.document import condition_document

    return [condition_document(condition) for condition in server.conditions]


def wait_until(
    fleet: Fleet, name: str, done: Callable[[ServerView], bool], *, quiet: bool, timeout: float
) -> ServerView:
    """Look at a server until ``done`` says so; shows the way up on a terminal.

    Raises:
        FleetError: it took longer than ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    show = sys.stderr.isatty() and not quiet
    told = ""
    while True:
        server = fleet.snapshot().server(name)
        if server is None:
            raise FleetError(f"{name} is gone: its record was removed while this command waited")
        if done(server):
            break
        if time.monotonic() > deadline:
            raise FleetError(
                f"{name} is still {server.state} after {timeout:.0f} s; it goes on. "
                f"See 'vllm-console logs {name}', or wait longer with --timeout"
            )
        stage = server.stages[-1] if server.stages else None
        line = f"{name}: {server.state}" + (f" · {stage.name} {stage.detail}" if stage else "")
        if show and line != told:
            sys.stderr.write(f"\r\x1b[2K{plain(line)}")
            sys.stderr.flush()
            told = line
        time.sleep(0.2)
    if show:
        sys.stderr.write("\r\x1b[2K")
    return server


def settled(server: ServerView) -> bool:
    """Whether a server came up or came down for good."""
    if server.state is State.FAILED:
        return server.next_attempt_at is None
    return server.state in (State.READY, State.STOPPED)


def report(args: argparse.Namespace, server: ServerView, *, wanted: State | None) -> int:
    """Print a server; exit code 1, with the reason on stderr, when it is not in the ``wanted`` state."""
    if args.json:
        print_json(server_document(server))
    else:
        mark = " (simulated)" if server.simulated else ""
        print(f"{server.name}{mark}: {server.state}, generation {server.generation}, {server.url}")
        if server.notice:
            print(f"  note: {plain(server.notice)}")
    if server.state is State.FAILED or (wanted is not None and server.state is not wanted):
        complain(f"{server.name} is {server.state}: {server.reason}")
        return 1
    return 0
