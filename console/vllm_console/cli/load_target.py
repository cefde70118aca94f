"""Where a command sends traffic, and its shape: from the server's preset unless overridden."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.options import count_from, share_from
from vllm_console.cli.output import complain
from vllm_console.fleet.attached_servers import endpoint_access
from vllm_console.fleet.snapshot import ServerView
from vllm_launchers.addresses import ServerUrl, base_url, is_loopback, server_url
from vllm_launchers.errors import NotFoundError, OperationError, RefusedError
from vllm_launchers.keeper.records import State
from vllm_launchers.presets.model import Workload

if TYPE_CHECKING:
    from vllm_console.fleet.local import LocalFleet
    from vllm_console.load.client import ApiAccess, Lookup


class Target(msgspec.Struct, frozen=True):
    """A server to send to, and its preset's traffic. Only our own servers have ``lookup`` and (record) ``folder``."""

    url: str
    workload: Workload
    fleet: LocalFleet
    server: ServerView | None = None
    lookup: Lookup | None = None
    folder: Path | None = None
    access: ApiAccess | None = None
    """How to reach it, if not in the same way as this user's servers."""


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Add ``--preset`` and the options that override its lengths."""
    parser.add_argument("--preset", help="use this preset's workload")
    prompt, output = parser.add_mutually_exclusive_group(), parser.add_mutually_exclusive_group()
    prompt.add_argument("--input-tokens", type=count_from, metavar="N", help="every prompt has exactly N tokens")
    prompt.add_argument("--input-p95", type=count_from, metavar="N", help="95th percentile of prompt tokens")
    output.add_argument("--output-tokens", type=count_from, metavar="N", help="every answer has exactly N tokens")
    output.add_argument("--output-p95", type=count_from, metavar="N", help="95th percentile of output tokens")
    parser.add_argument(
        "--prefix-reuse", type=share_from, metavar="SHARE", help="share of each prompt that is a common prefix"
    )


def shaped(args: argparse.Namespace, workload: Workload) -> Workload:
    """A workload modified by the options from `add_shape`."""
    return Workload(
        input_tokens_p95=args.input_p95 or workload.input_tokens_p95,
        output_tokens_p95=args.output_p95 or workload.output_tokens_p95,
        prefix_reuse=workload.prefix_reuse if args.prefix_reuse is None else args.prefix_reuse,
        concurrency=getattr(args, "concurrency", None) or workload.concurrency,
    )


def find_target(args: argparse.Namespace, flag: str, *, others_allowed: bool, remote_allowed: bool = False) -> Target:
    """The server that ``args.server`` names, or the URL itself.

    ``flag`` is the option that allows other users' servers, if any; a server that this user started by hand does not
    need it. ``remote_allowed`` is whether ``--remote`` allows attached endpoints.

    Raises:
        NotFoundError: there is no such server or preset.
        RefusedError: it is another user's, and ``others_allowed`` is not set.
        UsageError: it is not a server's URL.
        OperationError: it is not ready.
    """
    from vllm_launchers.host.ports import user_name

    fleet = open_fleet(args)
    if "://" in args.server:
        url = server_url(args.server)
        server = _attached_at(fleet, url)
        if server is None:
            _refuse_others(fleet, url, flag, allowed=others_allowed)
            return Target(url.base, _workload(args, fleet, None), fleet)
    else:
        server = fleet.snapshot().server(args.server)
        if server is None:
            hint = ", or give a URL" if others_allowed or flag else ""
            raise NotFoundError(f"no server is called '{args.server}'; see 'vllm-console list'{hint}")
    if server.attached is not None and not remote_allowed:
        allowed = "without --remote" if flag else "by this command; 'load' and 'ramp' take --remote"
        raise RefusedError(f"{server.name} is attached from {server.url}: nothing is sent to it {allowed}")
    by_hand = bool(flag) and server.owner == user_name(os.getuid())
    if server.attached is None and not server.ours and not ((others_allowed or by_hand) and server.port):
        owner = server.owner or "another user"
        without = f" without {flag}" if server.port and flag else ""
        raise RefusedError(f"{server.name} was started by {owner} outside this console: nothing is sent to it{without}")
    if server.headless:
        raise RefusedError(f"{server.name} is {server.node}: it serves no requests; node 0 does")
    if server.state not in (State.READY, State.UNRESPONSIVE):
        why = f": {server.reason}" if server.reason else ". Try again when it is."
        raise OperationError(f"{server.name} is {server.state_text}, not ready{why}")
    folder = Path(server.folder) if server.folder else None
    workload = _workload(args, fleet, server.workload)
    if server.attached is not None:
        return Target(server.url, workload, fleet, server, None, folder, endpoint_access(server.attached))
    if not server.ours:
        return Target(server.url, workload, fleet)
    return Target(server.url, workload, fleet, server, partial(fleet.listener, server.name), folder)


def warn_of_tuner(target: Target, what: str) -> None:
    """Warn on stderr if a tuner measures the server that ``what`` is sent to."""
    if target.server is not None and (tuner := target.server.tuner) is not None:
        complain(
            f"warning: a tuner (pid {tuner.pid}) is measuring {target.server.name}: {what} will distort its results"
        )


def _attached_at(fleet: LocalFleet, url: ServerUrl) -> ServerView | None:
    """The attached endpoint at a URL, whose key is used; a server of this user's own takes precedence."""
    servers, own = fleet.snapshot().servers, f"{base_url(url.host, url.port, tls=url.tls)}{url.path}"
    if any(server.ours and server.port and server.url == own for server in servers):
        return None
    there = (one for one in servers if one.attached is not None and not one.machine and one.attached.address == url)
    return next(there, None)


def _workload(args: argparse.Namespace, fleet: LocalFleet, known: Workload | None) -> Workload:
    """The traffic of the preset asked for, or of the server, or of the chatbot preset."""
    if known is not None and not args.preset:
        return known
    return fleet.preset(args.preset or "chatbot").workload


def _refuse_others(fleet: LocalFleet, url: ServerUrl, flag: str, *, allowed: bool) -> None:
    """Refuse another user's server on this machine, and an attached one. One that this user started by hand is allowed.

    Raises:
        RefusedError: the port belongs to such a server, and that is not allowed.
    """
    if allowed or not is_loopback(url.host):
        return
    if whose := _whose([server for server in fleet.snapshot().servers if server.port == url.port]):
        without = f" without {flag}" if flag else ""
        raise RefusedError(f"{url.base} is {whose}: nothing is sent to it{without}")


def _whose(servers: Sequence[ServerView]) -> str:
    """Whose server is on a port of this machine, if not this user's; ``servers`` have that port number."""
    from vllm_launchers.host.ports import user_name

    own = any(server.ours for server in servers)
    for server in servers:
        if server.attached is not None:
            if is_loopback(server.attached.host) and not own:
                return f"attached as {server.name}"
        elif not server.ours and server.owner not in (None, user_name(os.getuid())):
            return f"a server of {server.owner}"
    return ""
