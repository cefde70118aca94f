"""``vllm-console diagnose LOG``: why the vLLM that wrote a log failed, and how to fix it."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from msgspec.structs import replace

from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.options import add_json
from vllm_console.cli.output import Document, print_json
from vllm_console.logs.file import lines_before
from vllm_console.text import plain, redrawn
from vllm_launchers.errors import OperationError, RefusedError, UsageError
from vllm_launchers.keeper.records import State
from vllm_launchers.secrets import redact

if TYPE_CHECKING:
    from vllm_console.diagnosis.finding import Diagnosis
    from vllm_console.fleet.snapshot import ServerView

MOST_BYTES = 32 << 20
"""Only this much at the end of a log is read, since the failure is there."""

CHUNK_BYTES = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("logfile", metavar="LOG", help="a server's name, vLLM's log file, or - for standard input")
    parser.add_argument("--exit-code", type=int, metavar="N", help="exit code of the process, if known")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Read the log and name the failure."""
    from vllm_console.diagnosis.finding import diagnosis_document, diagnosis_lines

    found, is_log = _diagnosis(args)
    document: Document = diagnosis_document(found)
    if args.json:
        print_json(document)
    else:
        print("\n".join(map(plain, diagnosis_lines(found))))
        if not is_log:
            print("No line has vLLM's log format: is this a vLLM log?")
    return 0


def _diagnosis(args: argparse.Namespace) -> tuple[Diagnosis, bool]:
    """The diagnosis, and whether the input looks like a vLLM log.

    If there is no such file, the name is a server's: uses its last run's log, flags and exit code.
    """
    from vllm_console.diagnosis.failure.diagnose import diagnose
    from vllm_console.logs.vllm_lines import parse_lines

    name: str = args.logfile
    if not name:
        raise UsageError("the name of the log or server is empty")
    here = os.path.exists(name) and not os.path.isdir(name)  # noqa: PTH110, PTH112 - false if the name is too long
    if name != "-" and os.sep not in name and not here:
        return _failure_of(args), True
    skipped, text = _read(name)
    lines = [redact(redrawn(line)) for line in text.split("\n")]
    found = diagnose(lines, args.exit_code)
    if found.line is not None:
        return replace(found, line=found.line + skipped), True
    return found, any(parsed.level for parsed in parse_lines(lines))


def _failure_of(args: argparse.Namespace) -> Diagnosis:
    """Why a server failed.

    Raises:
        OperationError: there is neither a file nor a server of that name.
        RefusedError: it has not failed.
        UsageError: an exit code is given.
    """
    name: str = args.logfile
    server = open_fleet(args).snapshot().server(name)
    if server is None:
        raise OperationError(f"{name}: no such file or server")
    if args.exit_code is not None:
        raise UsageError("--exit-code is for log files; a server's exit code is known")
    if server.diagnosis is None:
        raise RefusedError(_not_failed(server))
    return server.diagnosis


def _not_failed(server: ServerView) -> str:
    """That a server has not failed, and for a running one the command that shows its status."""
    if not server.state.alive:
        return f"{server.name} has not failed: it is {server.state}"
    state = "running" if server.state is State.READY else server.state
    return (
        f"{server.name} is {state} and has not failed: 'vllm-console status {server.name}' shows figures and findings"
    )


def _read(name: str) -> tuple[int, str]:
    """The number of lines skipped at the beginning, and the remaining text."""
    try:
        if name == "-":
            skipped, data = _last_of(sys.stdin.buffer)
        else:
            with Path(name).open("rb") as file:
                skipped = lines_before(file, os.fstat(file.fileno()).st_size - MOST_BYTES)
                data = file.read(MOST_BYTES)
    except OSError as error:
        raise OperationError(f"{name}: can't be read: {error.strerror}") from error
    return skipped, data.decode("utf-8", "replace")


def _last_of(stream: BinaryIO) -> tuple[int, bytes]:
    """The number of lines skipped, and the last part of a stream."""
    kept, skipped = bytearray(), 0
    while part := stream.read(CHUNK_BYTES):
        kept += part
        if len(kept) >= 2 * MOST_BYTES:
            skipped += kept.count(b"\n", 0, len(kept) - MOST_BYTES)
            del kept[:-MOST_BYTES]
    skipped += kept.count(b"\n", 0, max(0, len(kept) - MOST_BYTES))
    return skipped, bytes(kept[-MOST_BYTES:])
