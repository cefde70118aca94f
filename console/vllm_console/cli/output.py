"""Output of commands. Errors of standard output (disk full, closed) are reported in one sentence."""

from __future__ import annotations

import io
import json
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from vllm_console.text import plain
from vllm_launchers.private import open_standard_streams

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Sequence

    from vllm_launchers.plan.model import Plan

Document = dict[str, Any]
"""A JSON object."""


class OutputError(Exception):
    """A command's output could not be written. One sentence."""


class Output(io.TextIOWrapper):
    """Standard output whose errors are distinguishable from those of other files. BrokenPipeError is passed through."""

    before: io.TextIOWrapper | None = None
    """The stream this one replaces. Kept alive, since releasing it would close the shared buffer."""

    def write(self, text: str) -> int:
        """Write as usual.

        Raises:
            BrokenPipeError: the reader is gone.
            OutputError: it could not be written.
        """
        try:
            return super().write(text)
        except BrokenPipeError:
            raise
        except OSError as error:
            _refused(error)

    def flush(self) -> None:
        """Flush as usual; raises like `write`."""
        try:
            super().flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            _refused(error)


def _refused(error: OSError) -> NoReturn:
    raise OutputError(f"standard output can't be written: {os.strerror(error.errno or 0)}") from error


class ClosedOutput(io.TextIOBase):
    """Replacement for a standard output that was closed before the program started."""

    def write(self, _text: str) -> int:
        """Raise OutputError."""
        raise OutputError("standard output is closed")


def refuse_closed_output() -> None:
    """Call before a command changes anything, because it could not report what it did.

    Raises:
        OutputError: standard output was closed before the program started.
    """
    if isinstance(sys.stdout, ClosedOutput):
        raise OutputError("standard output is closed, so nothing was done: use >/dev/null to discard the output")


def guard() -> None:
    """Replace standard output with an `Output`, and replace closed standard streams.

    Otherwise the next file opened, such as a database, would get standard output's descriptor.
    """
    open_standard_streams()
    if sys.stdout is None:
        sys.stdout = ClosedOutput()
    elif type(sys.stdout) is io.TextIOWrapper:
        before = sys.stdout
        # Characters that the terminal's encoding lacks must not end a command.
        sys.stdout = Output(
            before.buffer,
            encoding=before.encoding,
            errors="replace",
            line_buffering=before.line_buffering,
            write_through=before.write_through,
        )
        sys.stdout.before = before
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="replace")


def forget() -> None:
    """Discard unwritten output, which Python would otherwise try to write again at exit, and complain."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def complain(sentence: str) -> None:
    """Print an error to standard error, in one line."""
    print(f"vllm-console: {plain(sentence)}", file=sys.stderr)


def fields(value: object, names: str) -> Document:
    """Attributes of a value as JSON, by names separated by spaces. Empty text becomes null, like unknown values."""
    from msgspec import to_builtins

    found = {name: getattr(value, name) for name in names.split()}
    return {name: None if one == "" else to_builtins(one) for name, one in found.items()}


def print_json(document: object) -> None:
    """Write one JSON document to standard output."""
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def show(args: argparse.Namespace, document: Callable[[], object], lines: Callable[[], Iterable[str]]) -> None:
    """Print a result: a JSON document with ``--json``, otherwise lines of text. Only the printed one is made."""
    if args.json:
        print_json(document())
    else:
        print("\n".join(lines()))


def prose(text: str, indent: str = "") -> str:
    """Wrap a sentence at 79 columns, without control characters; further lines are indented."""
    import textwrap

    return textwrap.fill(plain(text), 79, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def ask(question: str, *, silent: bool = False) -> bool | None:
    """Ask on a terminal; None if there is none, or with ``silent``."""
    if silent or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return None
    print(f"{plain(question)} [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def confirmed(args: argparse.Namespace, question: str) -> None:
    """Ask, unless ``--yes`` is given. Raises RefusedError if the answer was no, or there is no terminal."""
    if args.yes or (answer := ask(question, silent=args.json)):
        return
    from vllm_launchers.errors import RefusedError

    raise RefusedError("canceled" if answer is not None else f"{plain(question)} Without a terminal, give --yes")


def row_line(cells: Sequence[str], columns: Sequence[tuple[str, int]]) -> str:
    """Cells in columns; ``columns`` are titles and widths."""
    return "".join(f"{cell:<{width}}" for cell, (_, width) in zip(cells, columns, strict=True)).rstrip()


def table_lines(columns: Sequence[tuple[str, int]], rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows in columns of given widths, below their titles."""
    return [row_line(cells, columns) for cells in ([title for title, _ in columns], *rows)]


def warn_of_plan(plan: Plan) -> None:
    """Print the warnings of a plan that is about to be executed. The code that executes it reports errors."""
    from vllm_launchers.launch.refusal import plan_finding_text
    from vllm_launchers.plan.findings import Level

    for finding in plan.findings:
        if finding.level is Level.WARNING:
            print(plain(f"warning: {plan_finding_text(finding)}"), file=sys.stderr)
