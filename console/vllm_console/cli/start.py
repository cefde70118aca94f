"""``vllm-console start PRESET``: launch a server."""

from __future__ import annotations

import argparse
import sys

from vllm_console.cli.common import add_changes, add_json, changes_from, open_fleet, report, settled, wait_until
from vllm_console.fleet.api import UsageError
from vllm_console.fleet.model import LaunchRequest, State
from vllm_console.text import plain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's words."""
    parser.add_argument("preset", help="see 'vllm-console presets'")
    parser.add_argument("--model", help="another model than the preset's: a hub id or a folder")
    parser.add_argument("--engine", choices=["auto", "vllm", "simulated"], default="auto")
    parser.add_argument("--vllm", metavar="PATH", help="this vLLM: its executable, or its virtual environment")
    parser.add_argument("--name", help="what the server is called (default: the preset's name)")
    parser.add_argument("--host", help="address to bind (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to bind (default: the first free one from 8000)")
    parser.add_argument("--gpus", metavar="auto|0,1|none", help="the best free set, or indices (default: none)")
    add_changes(parser)
    parser.add_argument("--env", action="append", default=[], metavar="K=V", help="environment of the server")
    parser.add_argument("--restart", choices=["never", "on-failure"], default="never", help="restart by itself?")
    parser.add_argument("--wait", action="store_true", help="return when it is ready, or has failed")
    parser.add_argument("--timeout", type=float, default=1800, metavar="S", help="how long --wait waits")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Launch it."""
    fleet = open_fleet(args)
    request = LaunchRequest(
        preset=args.preset,
        model=args.model,
        engine=args.engine,
        vllm=args.vllm,
        name=args.name,
        host=args.host,
        port=args.port,
        changes=changes_from(args),
        environment=dict(_pair(word) for word in args.env),
        restart=args.restart,
        gpus=_gpus(args.gpus),
        place=args.gpus if args.gpus == "auto" else "",
    )
    server = fleet.start(request)
    if request.place and (why := server.reasons.get("gpus")):
        print(f"GPU {plain(why)}", file=sys.stderr)
    if args.wait:
        server = wait_until(fleet, server.name, settled, quiet=args.json, timeout=args.timeout)
    return report(args, server, wanted=State.READY if args.wait else None)


def _pair(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals or not name:
        raise UsageError(f"--env {word}: expected NAME=VALUE")
    return name, value


def _gpus(text: str | None) -> tuple[int, ...]:
    if not text or text in ("auto", "none"):
        return ()
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise UsageError(f"--gpus {text}: expected auto, none, or indices with commas such as 0,1") from error
