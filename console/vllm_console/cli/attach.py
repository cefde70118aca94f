"""``vllm-console attach URL`` and ``detach NAME``: record a vLLM endpoint on another machine, without changing it."""

from __future__ import annotations

import argparse
import time

from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.options import add_json, text_from
from vllm_console.cli.output import complain, print_json, show
from vllm_console.cli.servers import describe_server, servers_table, status_document
from vllm_console.text import plain
from vllm_launchers.errors import UsageError
from vllm_launchers.keeper.records import State

FIRST_ANSWER_SECONDS = 6.0
"""How long to wait for the first response: slightly longer than a single one may take."""

POLL_SECONDS = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Add a vLLM endpoint on another machine, or behind Ray Serve, llm-d or production-stack. Its metrics are "
        "scraped once a second and recorded; it is read-only. Attach it again to change its key or certificate. With "
        "ssh://[user@]host, add all servers of a machine that has vllm-console; they can be stopped and restarted "
        "over your own ssh."
    )
    parser.add_argument("url", type=text_from, help="base URL, e.g. https://gpubox:8000, or ssh://gpubox")
    parser.add_argument("--name", type=text_from, metavar="N", help="its name here (default: from host and port)")
    parser.add_argument(
        "--key-env", default="", metavar="VAR",
        help="environment variable with its API key, which is not stored (default: no key is sent)",
    )  # fmt: skip
    parser.add_argument(
        "--ca", default="", metavar="FILE", help="trust the certificates in this file (PEM) instead of the system's"
    )
    add_json(parser)


def _attach_host(args: argparse.Namespace) -> int:
    if args.key_env or args.ca:
        raise UsageError("--key-env and --ca are for http and https: ssh has keys of its own")
    fleet = open_fleet(args, observe=False, remote=True)
    host = fleet.attached.attach_host(args.url, args.name)
    snapshot = fleet.snapshot()
    fleet.close()
    servers = [server for server in snapshot.servers if server.remote == host.name]
    row = snapshot.server(host.name)
    problem = row.reason or "no answer yet" if row is not None and row.state is not State.READY else None
    if args.json:
        documents = [status_document(server) for server in servers]
        print_json({"name": host.name, "url": host.url, "problem": problem, "servers": documents})
    elif problem is not None:
        print(f"{host.name}: attached, but not reached: {plain(problem)}")
    else:
        print(
            "\n".join(
                [f"{host.name}: attached", *(servers_table(servers, snapshot.at) if servers else ["no servers there"])]
            )
        )
    return 0


def run(args: argparse.Namespace) -> int:
    """Attach the endpoint and print its first response. An endpoint that does not respond stays attached."""
    if args.url.lower().startswith("ssh:"):
        return _attach_host(args)
    fleet = open_fleet(args, observe=False)
    name = fleet.attached.attach(args.url, args.name, key_env=args.key_env, ca=args.ca)
    deadline = time.monotonic() + FIRST_ANSWER_SECONDS
    while True:
        snapshot = fleet.snapshot(name)
        server = snapshot.server(name)
        # If another command reattaches it, its record is briefly moved away.
        if (server is not None and server.contacted) or time.monotonic() > deadline:
            break
        time.sleep(POLL_SECONDS)
    if server is None:
        complain(f"{plain(name)} was detached meanwhile")
        return 1
    show(args, lambda: status_document(server), lambda: describe_server(server, snapshot.at))
    return 0


def add_detach_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name")
    add_json(parser)


def run_detach(args: argparse.Namespace) -> int:
    """Forget the endpoint or machine. Its recorder ends; its history is kept for replays."""
    kept = open_fleet(args, observe=False).attached.detach(args.name)
    if args.json:
        print_json({"name": args.name, "detached": True, "history_kept": kept})
    elif kept:
        print(f"{args.name}: detached; 'vllm-console replay {args.name}' shows its newest run, for 30 days")
    else:
        print(f"{args.name}: detached")
    return 0
