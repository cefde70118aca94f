"""The ``vllm-console`` command: parses its words, runs one command, turns errors into a sentence and an exit code."""

from __future__ import annotations

import argparse
import gc
import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from vllm_console import __version__

COMMANDS = {
    "presets": "list the presets and why they set what they set",
    "plan": "show what a launch would be, what fits, and what stands in its way",
    "start": "launch a server from a preset",
    "list": "list all servers",
    "status": "show one server, with its metrics",
    "check": "say whether a server keeps its objectives, by exit code",
    "watch": "tell what begins and ends on all servers: log, terminal, webhook",
    "export": "write objectives as Prometheus rules, or a Grafana dashboard",
    "restart": "restart a server, with changed flags if you like",
    "stop": "stop a server",
    "remove": "remove a stopped server's record, log and history",
    "leftovers": "show what servers that have ended left: processes, files in /dev/shm",
    "logs": "print or follow a server's log",
    "load": "send a preset's workload to a server and measure it",
    "runs": "list what ran, with which flags, and how it served",
    "compare": "say whether a change helped: two runs side by side",
    "metrics": "read a /metrics page from a URL or a file",
    "diagnose": "name why a vLLM failed, from its log, and what would mend it",
    "host": "show this machine's GPUs and who holds them",
    "topology": "draw how the GPUs are wired",
    "gpus": "print the best set of free GPUs, for scripts",
    "board": "show which GPUs people say are taken, till when, and who runs what",
    "claim": "tell others that GPUs are taken, till when and why",
    "release": "take your claims of GPUs back",
    "doctor": "gather what a maintainer would ask for, and name what is wrong here",
    "engines": "list the vLLM installations that were found",
    "demo": "open the console on two simulated servers under traffic",
}
"""Each command with its line of help; the module of that name in this package does it."""

CHANGING = frozenset({"start", "restart", "stop", "remove", "load", "claim", "release", "demo"})
"""What changes something, or sends load: refused, before any part of it is done, where read-only holds."""

VALUED = ("--config", "--state", "--refresh", "--host")
"""Options before a command that take a value."""

OBJECTS_BETWEEN_COLLECTIONS = 50_000
"""Python's own 700 have it look through all that was imported again and again: some 10 ms of a command."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line without the secrets that were typed into it."""

    def error(self, message: str) -> NoReturn:
        from vllm_console.text import plain
        from vllm_launchers.secrets import redact

        super().error(plain(redact(message)))


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser for all commands. With ``only``, just that command's words are set up, which starts faster."""
    parser = _Parser(
        prog="vllm-console",
        description="Launch, keep, watch and tune local vLLM servers. Without a command it opens the console.",
    )
    parser.add_argument("--version", action="version", version=f"vllm-console {__version__}")
    parser.add_argument("--read-only", action="store_true", help="show everything, change nothing")
    parser.add_argument("--config", type=Path, metavar="FILE", help="use this config.toml")
    parser.add_argument("--state", type=Path, metavar="DIR", help="keep servers' records here")
    parser.add_argument("--refresh", type=float, metavar="SECONDS", help="how often the console looks (default 1)")
    parser.add_argument("--ascii", action="store_true", help="draw the console with ASCII characters only")
    parser.add_argument(
        "--host", dest="host_file", type=Path, metavar="FILE", help="a recorded host in place of this machine's GPUs"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if only in (None, name):
            importlib.import_module(f"vllm_console.cli.{name}").add_arguments(command)
    return parser


def _command_in(words: Sequence[str]) -> str | None:
    """The command that is meant: the first word that is neither an option nor an option's value."""
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            return word if word in COMMANDS else None
        if len(word) > 2 and any(option.startswith(word) for option in VALUED):
            next(rest, None)
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the return value is the exit code (0 done, 1 failed, 2 usage, 3 unknown, 4 refused)."""
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal's encoding lacks must not end a command
            stream.reconfigure(errors="replace")
    args = build_parser(_command_in(words)).parse_args(words)
    module = importlib.import_module(f"vllm_console.cli.{args.command or 'console'}")
    from vllm_console.fleet.api import FleetError
    from vllm_console.text import plain

    try:
        if args.command in CHANGING:
            importlib.import_module("vllm_console.cli.common").refuse_read_only(args)
        return int(module.run(args))
    except FleetError as error:
        print(f"vllm-console: {plain(str(error))}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output went away (``| head``). Keep the interpreter from complaining about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 - the program's boundary: reported, and said where
        from vllm_console.crash import tell

        print(f"vllm-console: {tell(error, words, args.state)}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
