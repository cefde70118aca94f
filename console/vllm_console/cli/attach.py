"""``vllm-console attach URL``: add a vLLM endpoint of another machine to the table, recorded and never changed."""

from __future__ import annotations

import argparse
import time

from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.options import add_json, text_from
from vllm_console.cli.output import complain, print_json
from vllm_console.cli.server_table import describe, status_document
from vllm_console.text import plain

FIRST_ANSWER_SECONDS = 6.0
"""How long the first answer is waited for: a little longer than one may take."""

LOOK_SECONDS = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Add a vLLM endpoint that runs elsewhere: another machine, or behind Ray Serve, llm-d or production-stack. It "
        "is asked for its metrics once a second and recorded, and never changed. Attaching it again by its name takes "
        "another key or certificate."
    )
    parser.add_argument("url", type=text_from, help="its base URL, such as https://gpubox:8000")
    parser.add_argument("--name", type=text_from, metavar="N", help="its name here (default: made of host and port)")
    parser.add_argument(
        "--key-env", default="", metavar="VAR",
        help="the environment variable that holds its API key, which is stored nowhere (default: no key is sent)",
    )  # fmt: skip
    parser.add_argument(
        "--ca", default="", metavar="FILE", help="trust the certificates in this file (PEM) instead of this machine's"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Attach it, and report its first answer; an endpoint that does not answer stays attached."""
    fleet = open_fleet(args, observe=False)
    name = fleet.attach(args.url, args.name, key_env=args.key_env, ca=args.ca)
    deadline = time.monotonic() + FIRST_ANSWER_SECONDS
    while True:
        snapshot = fleet.snapshot(name)
        server = snapshot.server(name)
        if server is None or server.probed or time.monotonic() > deadline:
            break
        time.sleep(LOOK_SECONDS)
    if server is None:
        complain(f"{plain(name)} was detached meanwhile")
        return 1
    if args.json:
        print_json(status_document(server))
    else:
        print("\n".join(describe(server, snapshot.at)))
    return 0
