"""``vllm-console diagnose LOGFILE``: why the vLLM that wrote a log failed, and what would mend it."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from vllm_console.cli.common import Document, add_json, print_json
from vllm_console.fleet.api import FleetError
from vllm_console.text import plain

MOST_BYTES = 32 << 20
"""Of a longer log the beginning is left out: what ended it stands in its last part."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's words."""
    parser.add_argument("logfile", help="a file with vLLM's output, or - for standard input")
    parser.add_argument("--exit-code", type=int, metavar="N", help="what the process ended with, where that is known")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Read and name it."""
    from vllm_console.diagnosis.diagnose import diagnose
    from vllm_console.diagnosis.document import diagnosis_document, diagnosis_lines
    from vllm_launchers.secrets import redact

    found = diagnose([redact(_shown(line)) for line in _read(args.logfile).split("\n")], args.exit_code)
    document: Document = diagnosis_document(found)
    if args.json:
        print_json(document)
    else:
        print("\n".join(map(plain, diagnosis_lines(found))))
    return 0


def _read(name: str) -> str:
    try:
        if name == "-":
            data = sys.stdin.buffer.read()[-MOST_BYTES:]
        else:
            with Path(name).open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - MOST_BYTES))
                data = file.read(MOST_BYTES)
    except OSError as error:
        raise FleetError(f"{name}: cannot be read: {error.strerror}") from error
    return data.decode("utf-8", "replace")


def _shown(line: str) -> str:
    """What a terminal shows of a line in the end: a progress bar writes over itself with carriage returns."""
    return line.rstrip("\r").rpartition("\r")[2]
