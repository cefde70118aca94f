"""Commands on a server of an attached machine, ``HOST/NAME``: the same command runs there, over ssh.

It runs as that user under that machine's rules, and is read-only if it is read-only here. Its output, refusals and exit
code are passed on unchanged.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import threading
from typing import IO, TextIO

from vllm_console.cli.fleet_access import read_only_by, settings_from, state_of
from vllm_console.text import plain
from vllm_launchers.errors import OperationError

POSITIONS = ("name", "server", "also", "preset", "before", "after", "from_requests")
"""Arguments that name a server, a run, or the preset to start."""

READS_INPUT = ("chat",)
"""Commands that receive this command's standard input."""

LONGEST_LINE = 1 << 20
LAST_WORDS_SECONDS = 2.0
"""How long to wait for stderr after ssh ends, since the master of a shared connection may keep its pipe open."""


def run_elsewhere(args: argparse.Namespace) -> int | None:
    """Run the command on the machine that it names. Returns its exit code, or None if it names no machine.

    Raises:
        OperationError: ssh can't be run, the command names two machines, or it needs a terminal there.
    """
    from vllm_console.fleet.remote_hosts import read_hosts, split_host

    named = [getattr(args, name, None) for name in POSITIONS]
    split = [(word, found) for word in named if isinstance(word, str) and (found := split_host(word)) is not None]
    if not split:
        return None
    name = split[0][1][0]
    host = next((one for one in read_hosts(state_of(args)) if one.name == name), None)
    if host is None:
        return None
    others = [word for word, (other, _) in split if other != name]
    server = getattr(args, "server", None)
    if server is not None and split_host(server) is None:
        others.append(server)
    if others:
        raise OperationError(f"{plain(others[0], 200)} is not on {name}: a command can only run on one machine")
    if args.command in READS_INPUT and sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty():
        way = shlex.join(["ssh", "-t", *(["-p", str(host.port)] if host.port else []), host.destination, host.command])
        raise OperationError(
            f"to use it on screen, run it on {name}: {way} {args.command} {plain(split[0][1][1], 200)}"
        )
    there = {word: server for word, (_, server) in split}

    def without_host(word: str) -> str:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        return f"{option}{equals}{there.get(value, value)}"

    read_only = ["--read-only"] if read_only_by(args, settings_from(args)) else []
    # Options before the command belong to this console.
    remote_words = [*read_only, *map(without_host, args.words)]
    try:
        process = subprocess.Popen(
            host.argv(remote_words, terminal=True),
            stdin=None if args.command in READS_INPUT else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        raise OperationError(f"ssh can't be run: {error.strerror}") from error
    errors = threading.Thread(target=_relay, args=(process.stderr, sys.stderr), daemon=True)
    errors.start()
    _relay(process.stdout, sys.stdout)
    code = process.wait()
    errors.join(LAST_WORDS_SECONDS)
    return code


def _relay(lines: IO[bytes] | None, to: TextIO) -> None:
    """Print each line from another machine without escape codes, which must not reach this terminal."""
    while lines is not None and (line := lines.readline(LONGEST_LINE)):
        to.write(plain(line.decode(errors="replace"), LONGEST_LINE) + "\n")
        to.flush()
