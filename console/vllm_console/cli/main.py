"""The ``vllm-console`` command: parse the arguments, run one command, turn errors into a message and an exit code."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from vllm_console import __version__
from vllm_console.cli.output import OutputError, forget, guard, refuse_closed_output
from vllm_console.cli.picture_options import add_picture_arguments
from vllm_console.text import plain


class Command(NamedTuple):
    """A command: its help line and the module of this package that implements it.

    A module named like the command has ``add_arguments`` and ``run``. A module shared by several commands has
    ``add_NAME_arguments`` and ``run_NAME``.
    """

    help: str
    module: str = ""
    changes: bool = False
    """Whether it changes something or sends load; refused in read-only mode."""
    elsewhere: bool = False
    """Whether it acts on one server; for HOST/NAME it runs on the attached machine HOST."""
    forgiving: bool = False
    """Whether an error in the settings is only a warning, because it stops or shows what is running."""


COMMANDS = {
    "presets": Command("list the presets, or show one with the reason for each flag"),
    "plan": Command("plan a launch without starting it: flags, memory, findings", elsewhere=True),
    "start": Command("launch a server from a preset", changes=True, elsewhere=True),
    "list": Command("list all servers", module="servers", forgiving=True),
    "status": Command("show one server, with its metrics", module="servers", elsewhere=True, forgiving=True),
    "check": Command("check a server against its objectives, for scripts", elsewhere=True),
    "watch": Command("report findings as they begin and end: log, terminal, webhook"),
    "export": Command("write configuration for Prometheus, Grafana or a proxy"),
    "attach": Command("add a vLLM endpoint on another machine (read-only), or all servers of a machine", changes=True),
    "remote": Command("serve a console on another machine, over SSH (run by attach)"),
    "detach": Command(
        "forget an attached endpoint or machine; its runs can still be replayed", module="attach", changes=True
    ),
    "restart": Command(
        "restart a server with changed flags, the previous flags, or another preset", changes=True, elsewhere=True
    ),
    "sleep": Command(
        "put a server to sleep, to free its GPUs for another one", module="stop", changes=True, elsewhere=True
    ),
    "wake": Command(
        "wake a server up; its partner in a standby pair goes to sleep first",
        module="stop",
        changes=True,
        elsewhere=True,
    ),
    "stop": Command("stop a server", changes=True, elsewhere=True, forgiving=True),
    "remove": Command(
        "remove a stopped server; its runs can still be replayed", module="stop", changes=True, elsewhere=True
    ),
    "leftovers": Command("list or remove what ended servers left behind: processes, files in /dev/shm"),
    "logs": Command("print or follow a server's log", elsewhere=True, forgiving=True),
    "chat": Command("chat with a server, on screen or in a pipe", changes=True, elsewhere=True),
    "load": Command("send load to a server and measure it", changes=True, elsewhere=True),
    "ramp": Command("find the highest request rate at which a server's objectives hold", changes=True, elsewhere=True),
    "bench": Command(
        "run 'vllm bench serve' with the preset's traffic and keep the result",
        changes=True,
        elsewhere=True,
    ),
    "requests": Command("list finished requests with the time spent in each stage", elsewhere=True),
    "predict": Command("predict the effect of changed flags or more traffic", elsewhere=True),
    "tune": Command("find better flags: predict every combination, measure the best few", changes=True, elsewhere=True),
    "lora": Command("list, load or unload a running server's LoRA adapters", elsewhere=True),
    "runs": Command("list past and present runs, with flags and figures", elsewhere=True),
    "replay": Command("open the console on a past run, even of a removed server", module="console"),
    "compare": Command("compare two runs: did the change help?", elsewhere=True),
    "metrics": Command("parse a /metrics page from a URL or a file"),
    "diagnose": Command("explain a vLLM failure from its log, with fixes"),
    "host": Command("show this machine's GPUs and what uses them"),
    "topology": Command("draw the GPU topology", module="host"),
    "gpus": Command("print the best set of free GPUs, for scripts", module="host"),
    "board": Command("show claimed GPUs and running servers of all users"),
    "claim": Command("claim GPUs on the shared board until a time", module="board", changes=True),
    "release": Command("release your GPU claims", module="board", changes=True),
    "doctor": Command("check this installation and collect data for a bug report", forgiving=True),
    "models": Command("list, download, remove or search models, and show which fit"),
    "engines": Command("list, install or remove vLLM installations"),
    "web": Command("serve the console to a browser on this machine"),
    "demo": Command("open the console on two simulated servers under traffic", changes=True),
}

ON_SCREEN = frozenset({"chat", "demo", "replay", "web"})
"""Commands that open a console, or may."""

_OF_A_SCREEN = ("at", "picture", "screen", "server", "size", "keys")
"""Options before a command that only apply to a console."""

CHANGING = frozenset(name for name, command in COMMANDS.items() if command.changes)
"""Commands that are refused in read-only mode."""


def implementation(command: str, function: str) -> Callable[[Any], Any]:
    """Import a command's module and return its ``add_arguments`` or ``run``."""
    owner = COMMANDS[command].module if command in COMMANDS else ""
    module = importlib.import_module(f"vllm_console.cli.{owner or command}")
    names = {"add_arguments": f"add_{command}_arguments", "run": f"run_{command}"} if owner else {}
    found: Callable[[Any], Any] = getattr(module, names.get(function, function))
    return found


OBJECTS_BETWEEN_COLLECTIONS = 150_000
"""Garbage collection threshold. Python's default of 700 repeatedly traverses everything imported: about 10 ms per
command.

The console has 65,000 objects when it exempts them from collection (`ui.threads.favor_the_screen`).
"""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help as wide as the terminal. argparse would call shutil, which imports every archive format."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_columns() - 2)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Keep multi-line text as it is; wrap prose."""
        if "\n" in text:
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)


def _columns() -> int:
    """Like `shutil.get_terminal_size`."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    try:
        return os.get_terminal_size(sys.__stdout__.fileno()).columns or 80  # type: ignore[union-attr] # None: closed
    except (AttributeError, ValueError, OSError):
        return 80


class _Parser(argparse.ArgumentParser):
    """Reports a bad command line without the secrets typed into it."""

    def error(self, message: str) -> NoReturn:
        from vllm_launchers.secrets import redact

        super().error(plain(redact(message)))


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; import only the command's module. Raises SystemExit on --help or an error."""
    parser = _global_parser()
    args = parser.parse_args(words)
    typed = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not typed:
        args.command = None
        return args
    args.words, (args.command, *rest) = typed, typed
    if args.command not in COMMANDS:
        parser.error(f"no command is called {args.command!r}; {_suggestion(args.command)}")
    taken = ("at",) if args.command == "web" else _OF_A_SCREEN if args.command in ON_SCREEN else ()
    if given := [one for one in _OF_A_SCREEN if one not in taken and getattr(args, one) is not None]:
        parser.error(f"--{given[0]} applies only to the console; '{args.command}' does not accept it")
    summary, args.forgiving = COMMANDS[args.command].help, COMMANDS[args.command].forgiving
    command = _Parser(
        prog=f"{parser.prog} {args.command}",
        description=f"{summary[0].upper()}{summary[1:].removesuffix('?')}{'?' if summary.endswith('?') else '.'}",
        formatter_class=_Help,
    )
    importlib.import_module("vllm_console.msgspec_import")
    implementation(args.command, "add_arguments")(command)
    if command.get_default("more") is None or "--" not in rest:
        return command.parse_args(rest, args)
    # argparse rejects arguments after "--" if options come between them and the other arguments.
    at = rest.index("--")
    command.parse_args(rest[:at], args)
    args.more = [*args.more, *rest[at + 1 :]]
    return args


def _global_parser() -> argparse.ArgumentParser:
    """The parser of the global options, with a help line for each command."""
    parser = _Parser(
        prog="vllm-console",
        usage="%(prog)s [options] [COMMAND ...]",
        description="Launch, supervise, monitor and tune local vLLM servers. Without a command it opens the console.",
        epilog="\n".join(("commands:", *(f"  {name:<12}{command.help}" for name, command in COMMANDS.items()))),
        formatter_class=_Help,
    )
    parser.add_argument("--version", action="version", version=f"vllm-console {__version__}")
    parser.add_argument("--read-only", action="store_true", help="show everything, change nothing")
    parser.add_argument("--config", type=_path, metavar="FILE", help="use this config.toml")
    parser.add_argument("--state", type=_path, metavar="DIR", help="keep server records in this folder")
    parser.add_argument(
        "--refresh", type=_refresh, metavar="DURATION", help="refresh interval of the console (default 1s)"
    )
    parser.add_argument(
        "--at", type=_moment, metavar="TIME", help='open the console at an earlier moment, e.g. "2026-11-22 03:10"'
    )
    parser.add_argument("--ascii", action="store_true", help="draw with ASCII characters only")
    parser.add_argument(
        "--host",
        dest="host_file",
        type=_path,
        metavar="FILE",
        help="use a recorded host instead of this machine's GPUs",
    )
    add_picture_arguments(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


def _path(text: str) -> Path:
    """Reject an empty path, which Python would treat as the working directory."""
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return Path(text)


def _refresh(text: str) -> float:
    from vllm_console.cli.options import duration_type

    return duration_type(0.1, 60)(text)


def _moment(text: str) -> float:
    """Parse ``--at`` into Unix seconds."""
    from vllm_console.history.time_view import moment_from

    try:
        return moment_from(text, time.time())
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _suggestion(name: str) -> str:
    import difflib

    begun = [command for command in COMMANDS if command.startswith(name)]
    near = begun if len(begun) == 1 else difflib.get_close_matches(name, COMMANDS, 1)
    return f"did you mean '{near[0]}'?" if near else "see 'vllm-console --help'"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code (0 done, 1 failed, 2 usage, 3 unknown, 4 refused)."""
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    atexit.register(gc.freeze)  # otherwise Python traverses every object again at exit: 20 ms per command
    words = list(sys.argv[1:] if argv is None else argv)
    guard()
    try:
        try:
            return _run(words)
        finally:  # also after --help, which raises SystemExit
            sys.stdout.flush()
    except OutputError as error:
        forget()
        return _say(str(error), 1)
    except BrokenPipeError:
        # The reader of our output is gone (``| head``). Keep the interpreter from complaining about it at exit.
        forget()
        return 128 + signal.SIGPIPE  # like a program ended by this signal, which Python ignores
    except KeyboardInterrupt:
        return 130


def _run(words: Sequence[str]) -> int:
    """Parse and run; report errors and turn them into an exit code."""
    args = parse(words)
    run = implementation(args.command or "console", "run")
    from vllm_launchers.errors import OperationError

    try:
        if args.command in CHANGING:
            refuse_closed_output()
            importlib.import_module("vllm_console.cli.fleet_access").refuse_read_only(args)
        if args.command and COMMANDS[args.command].elsewhere and any("/" in word for word in words):
            from vllm_console.cli.elsewhere import run_elsewhere

            if (code := run_elsewhere(args)) is not None:
                return code
        return int(run(args))
    except OperationError as error:
        return _say(_error_text(error), error.exit_code)
    except (OutputError, BrokenPipeError):
        raise
    except Exception as error:  # noqa: BLE001 - program boundary: reported, with the location
        from vllm_console.crash_report import write_report

        return _say(write_report(error, words, args.state, demo=args.command == "demo"), 1)


def _error_text(error: Exception) -> str:
    """The error in one line, or a plan's errors in one line each."""
    text = str(error)
    if "\n" in text:
        from vllm_launchers.launch.errors import UnfitError

        if isinstance(error, UnfitError):
            return "\n".join(map(plain, text.split("\n")))
    return plain(text)


def _say(sentence: str, code: int) -> int:
    """Report an error on standard error if possible; returns the exit code."""
    with contextlib.suppress(OSError):
        print(f"vllm-console: {sentence}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
