"""``vllm-console diagnose LOGFILE``: why the vLLM that wrote a log failed, and what would mend it."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from vllm_console.cli.common import Document, add_json, print_json
from vllm_console.fleet.api import FleetError
from vllm_console.text import plain

MOST_BYTES = 32 << 20
"""Of a longer log the beginning is left out: what ended it stands in its last part."""

CHUNK_BYTES = 1 << 20


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

    skipped, text = _read(args.logfile)
    found = diagnose([redact(_shown(line)) for line in text.split("\n")], args.exit_code)
    if found.line is not None:
        found = replace(found, line=found.line + skipped)
    document: Document = diagnosis_document(found)
    if args.json:
        print_json(document)
    else:
        print("\n".join(map(plain, diagnosis_lines(found))))
    return 0


def _read(name: str) -> tuple[int, str]:
    """How many lines at the beginning were left out, and the rest."""
    try:
        if name == "-":
            data = sys.stdin.buffer.read()
            skipped = data.count(b"\n", 0, max(0, len(data) - MOST_BYTES))
            data = data[-MOST_BYTES:]
        else:
            with Path(name).open("rb") as file:
                skipped = _lines_before(file, os.fstat(file.fileno()).st_size - MOST_BYTES)
                data = file.read(MOST_BYTES)
    except OSError as error:
        raise FleetError(f"{name}: cannot be read: {error.strerror}") from error
    return skipped, data.decode("utf-8", "replace")


def _lines_before(file: BinaryIO, offset: int) -> int:
    """Read as far as ``offset``, and count the lines that end there."""
    lines = 0
    while offset > 0 and (part := file.read(min(offset, CHUNK_BYTES))):
        lines += part.count(b"\n")
        offset -= len(part)
    return lines


def _shown(line: str) -> str:
    """What a terminal shows of a line in the end: a progress bar writes over itself with carriage returns."""
    return line.rstrip("\r").rpartition("\r")[2]
