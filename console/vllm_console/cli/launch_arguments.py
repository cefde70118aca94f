"""The arguments of ``plan``, ``start`` and ``check --before-launch`` that say what to launch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_console.cli.options import text_from
from vllm_console.cli.output import complain
from vllm_console.fleet.verbs import UsageError
from vllm_launchers.secrets import is_secret_name

if TYPE_CHECKING:
    from vllm_launchers.plan.choices.nodes import NodesRequest


def add_request(parser: argparse.ArgumentParser, *, gpus: str) -> None:
    """Preset, model, engine, port, environment and GPUs; ``gpus`` is the help on the default choice of GPUs."""
    parser.add_argument("preset", type=text_from, help="see 'vllm-console presets'")
    parser.add_argument("--model", type=text_from, help="replace the preset's model: a hub id or a folder")
    add_engine(parser)
    parser.add_argument("--port", type=int, help="port to bind (default: the first free one from 8000)")
    parser.add_argument(
        "--gpus", type=text_from, metavar="auto|0,1|none", help=f"the best free set, or indices (default: {gpus})"
    )
    parser.add_argument(
        "--standby-of", type=text_from, metavar="NAME",
        help="share the GPUs of this server of yours: one of the two sleeps while the other serves",
    )  # fmt: skip
    parser.add_argument("--env", action="append", default=[], metavar="K=V", help="environment variable of the server")


def add_engine(parser: argparse.ArgumentParser, note: str = "") -> None:
    """With which engine; ``note`` begins the helps."""
    parser.add_argument(
        "--engine", choices=["auto", "vllm", "simulated"], default="auto",
        help=f"{note}vLLM, or the simulated engine (default: auto, the first vLLM that is found)",
    )  # fmt: skip
    parser.add_argument(
        "--vllm", type=text_from, metavar="PATH", help=f"{note}vLLM to use: its executable or virtual environment"
    )


def add_nodes(parser: argparse.ArgumentParser) -> None:
    """Over several machines."""
    parser.add_argument(
        "--nodes", type=int, metavar="N", help="spread one copy of the model over N machines equal to this one"
    )
    parser.add_argument(
        "--node-rank",
        type=int,
        metavar="R",
        help="with --nodes: which of them this machine is, or --export writes (default: 0, which serves)",
    )
    parser.add_argument("--master-addr", type=text_from, metavar="ADDR", help="with --nodes: address of node 0")
    parser.add_argument("--master-port", type=int, metavar="P", help="with --nodes: its port (default: vLLM's, 29501)")
    parser.add_argument(
        "--network", type=float, metavar="GBIT", help="with --nodes: Gbit/s from node to node, in one direction"
    )


def nodes_from(args: argparse.Namespace) -> NodesRequest | None:
    """The machines that `add_nodes` asks for; None for this one alone.

    Raises:
        UsageError: an option for several machines is given without ``--nodes``.
    """
    if args.nodes is None:
        for name in ("node_rank", "master_addr", "master_port", "network"):
            if getattr(args, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} needs --nodes")
        return None
    if args.nodes == 1:
        return None
    from vllm_launchers.plan.choices.nodes import DEFAULT_PORT, NodesRequest

    port = DEFAULT_PORT if args.master_port is None else args.master_port
    return NodesRequest(args.nodes, args.node_rank or 0, args.master_addr or "", port, args.network)


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def pairs_from(words: Sequence[str]) -> dict[str, str]:
    """The variables that ``--env`` sets.

    Raises:
        UsageError: an argument is not ``NAME=VALUE``.
    """
    pairs = dict(_pair(word) for word in words)
    for name, value in pairs.items():
        if value and is_secret_name(name):
            complain(
                f"--env {name}=…: every user of this machine can read command lines; "
                f"set {name} in the environment of vllm-console instead"
            )
    return pairs


def _pair(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals or not name:
        raise UsageError(f"--env {word}: expected NAME=VALUE")
    if not _VARIABLE.fullmatch(name):
        raise UsageError(f"--env {name[:40]!r}: a variable's name has letters, digits and '_' only")
    return name, value


def gpus_from(text: str | None) -> tuple[int, ...]:
    """The indices that ``--gpus`` names; empty for ``auto`` and ``none``.

    Raises:
        UsageError: it names anything else.
    """
    if not text or text in ("auto", "none"):
        return ()
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise UsageError(f"--gpus {text}: expected auto, none, or indices with commas such as 0,1") from error
