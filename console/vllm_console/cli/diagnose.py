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
from vllm_console.text import plain, redrawn

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
    found = diagnose([redact(redrawn(line)) for line in text.split("\n")], args.exit_code)
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
            skipped, data = _last_of(sys.stdin.buffer)
        else:
            with Path(name).open("rb") as file:
                skipped = _lines_before(file, os.fstat(file.fileno()).st_size - MOST_BYTES)
                data = file.read(MOST_BYTES)
    except OSError as error:
        raise FleetError(f"{name}: cannot be read: {error.strerror}") from error
    return skipped, data.decode("utf-8", "replace")


def _last_of(stream: BinaryIO) -> tuple[int, bytes]:
    """How many lines of a stream were left out, and its last part."""
    kept, skipped = bytearray(), 0
    while part := stream.read(CHUNK_BYTES):
        kept += part
        if len(kept) >= 2 * MOST_BYTES:
            skipped += kept.count(b"\n", 0, len(kept) - MOST_BYTES)
            del kept[:-MOST_BYTES]
    skipped += kept.count(b"\n", 0, max(0, len(kept) - MOST_BYTES))
    return skipped, bytes(kept[-MOST_BYTES:])


def _lines_before(file: BinaryIO, offset: int) -> int:
    """Read as far as ``offset``, and count the lines that end there."""
    lines = 0
    while offset > 0 and (part := file.read(min(offset, CHUNK_BYTES))):
        lines += part.count(b"\n")
        offset -= len(part)
    return lines
