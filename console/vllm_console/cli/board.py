"""``vllm-console board``, ``claim`` and ``release``: GPU claims on the shared board, and all users' servers.

Claims are advisory; they lock nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING

from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.options import add_json
from vllm_console.cli.output import Document, fields, print_json
from vllm_console.text import UNKNOWN, duration, plain

if TYPE_CHECKING:
    from vllm_launchers.host.board import Announced, Board, Claim


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Show the board."""
    show(open_fleet(args, observe=False).claims.board(), as_json=args.json)
    return 0


def show(board: Board, *, as_json: bool) -> None:
    """Print the board; skipped entries go to standard error."""
    if as_json:
        print_json(board_document(board))
        return
    for notice in board.notices:
        print(f"vllm-console: {plain(notice)}", file=sys.stderr)
    for claim in board.claims:
        print(plain(_claim_line(claim, board.at)))
    if not board.claims:
        print("No GPU is claimed. Claim one with 'vllm-console claim 0 --until 18:00 --why TEXT'.")
    if board.servers:
        print()
        print(f"{'SERVER':<16}{'BY':<12}{'PRESET':<18}{'GPU':<8}{'PORT':<7}{'FOR':<8}MODEL")
    for server in board.servers:
        print(plain(_server_line(server, board.at)))


def board_document(board: Board) -> Document:
    """The board as the commands print it (a contract). Times are Unix seconds."""
    return {
        "folder": str(board.folder),
        "claims": [_claim(one) for one in board.claims],
        "servers": [_server(one) for one in board.servers],
        "notices": list(board.notices),
    }


def _claim(one: Claim) -> Document:
    return {**fields(one, "gpus user uid since until why"), "mine": one.uid == os.getuid()}


def _server(one: Announced) -> Document:
    document = fields(one, "name preset model engine gpus since user uid seen open")
    return {**document, "port": one.port or None, "mine": one.uid == os.getuid()}


def _claim_line(one: Claim, now: float) -> str:
    from vllm_launchers.host.board import format_claim
    from vllm_launchers.host.gpu.host import gpus_text

    words = format_claim(one, now, mine=one.uid == os.getuid())
    return f"{gpus_text(one.gpus)} {words} (since {time.strftime('%H:%M', time.localtime(one.since))})"


def _server_line(one: Announced, now: float) -> str:
    who = "you" if one.uid == os.getuid() else one.user
    gpus = ",".join(map(str, one.gpus)) or UNKNOWN
    seen = "" if one.seen else "  (can't tell from here whether it is running)"
    seen += "  ! others can use it: no API key" if one.open else ""
    return (
        f"{one.name:<15} {who:<11} {one.preset or UNKNOWN:<17} {gpus:<7} {one.port or UNKNOWN:<6} "
        f"{duration(now - one.since):<7} {one.model or UNKNOWN}{seen}"
    )


def add_claim_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("gpus", nargs="+", metavar="GPU", help="GPU indices, e.g. 2 or 0,1")
    parser.add_argument(
        "--until", required=True, metavar="TIME", help="a time (18:00) or duration (2h, 90m, 1d); at most 14 days"
    )
    parser.add_argument("--why", default="", metavar="TEXT", help="reason, shown to others")
    add_json(parser)


def run_claim(args: argparse.Namespace) -> int:
    """Claim the GPUs; refused if another user holds a claim."""
    from vllm_console.fleet.board import parse_gpu_indices, until_from

    fleet = open_fleet(args, observe=False)
    gpus, until = parse_gpu_indices(args.gpus), until_from(args.until, time.time())
    show(fleet.claims.claim(gpus, until, args.why), as_json=args.json)
    return 0


def add_release_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("gpus", nargs="*", metavar="GPU", help="GPU indices, e.g. 2 or 0,1 (default: all your claims)")
    add_json(parser)


def run_release(args: argparse.Namespace) -> int:
    """Release them."""
    from vllm_console.fleet.board import parse_gpu_indices

    gpus = parse_gpu_indices(args.gpus) if args.gpus else ()
    show(open_fleet(args, observe=False).claims.release(gpus), as_json=args.json)
    return 0
