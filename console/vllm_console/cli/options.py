"""Options shared by several commands, and types for their values."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm_console.cli.output import complain
from vllm_console.text import duration_from, plain, round_duration
from vllm_launchers.errors import UsageError
from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.secrets import holds_secret, is_secret_name
from vllm_launchers.vllm.flags.changes import Changes

if TYPE_CHECKING:
    from vllm_launchers.launch.request import LaunchRequest
    from vllm_launchers.plan.choices.nodes import NodesRequest


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_changes(parser: argparse.ArgumentParser) -> None:
    """Add ``--set`` and ``--unset``."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="FLAG=VALUE", help="set a vLLM flag, e.g. max-num-seqs=128"
    )
    parser.add_argument("--unset", action="append", default=[], metavar="FLAG", help="remove a flag of the preset")


def changes_from(args: argparse.Namespace) -> Changes:
    """The changes requested with ``--set`` and ``--unset``.

    Raises:
        UsageError: an argument is not ``flag=value``, or names a flag that must not be set this way or that the other
            option also names.
    """
    from vllm_launchers.plan.common_flags import parse_set
    from vllm_launchers.plan.flags import normalize

    pairs, unset = dict(parse_set(word) for word in args.set), tuple(normalize(word) for word in args.unset)
    if both := next((name for name in unset if name in pairs), None):
        raise UsageError(f"--set and --unset both name {plain(both, 80)}")
    return Changes(set=pairs, unset=unset)


def add_warm_up(parser: argparse.ArgumentParser) -> None:
    """Add ``--warm-up`` and ``--no-warm-up``, for commands that launch."""
    parser.add_argument(
        "--warm-up",
        action=argparse.BooleanOptionalAction,
        help="send one request before the server is reported ready (default: warm_up in config.toml)",
    )


def add_probe(parser: argparse.ArgumentParser) -> None:
    """Add ``--probe`` and ``--no-probe``, for commands that launch."""
    parser.add_argument(
        "--probe",
        action=argparse.BooleanOptionalAction,
        help="record each request and engine step, without text (default: probe in config.toml)",
    )


def add_restart_method(parser: argparse.ArgumentParser) -> None:
    """Add ``--prepare`` and ``--rollback`` with their ``--no-`` forms, for commands that restart."""
    parser.add_argument(
        "--prepare",
        action=argparse.BooleanOptionalAction,
        help="load vLLM and check the flags while the server still serves (default: prepare_restarts in config.toml)",
    )
    parser.add_argument(
        "--rollback",
        action=argparse.BooleanOptionalAction,
        help="revert to the previous flags if the server fails before it is ready (default: rollback in config.toml)",
    )


def text_from(text: str) -> str:
    """argparse type: a name, path or address. Rejects an empty one, which would mean something else."""
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return text


DAY = 86_400
MOST_SECONDS = 366 * DAY


def number_type(least: float, most: float, what: str, *, above: bool = False) -> Callable[[str], float]:
    """argparse type: a number from ``least`` (exclusive if ``above``) to ``most``, described as ``what`` in errors."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most or (above and value == least):
            raise argparse.ArgumentTypeError(f"must be {what}, not '{plain(text, 40)}'")
        return value

    return parse


def duration_type(least: float, most: float) -> Callable[[str], float]:
    """argparse type: a duration from ``least`` to ``most`` seconds. Zero is always rejected."""
    limits = f"from {_limit(least)} to {_limit(most)}" if least else f"above 0, at most {_limit(most)}"

    def parse(text: str) -> float:
        seconds = duration_from(text)
        if seconds is None or not least <= seconds <= most or not seconds:
            raise argparse.ArgumentTypeError(
                f"must be a duration {limits}, such as 25, 25s, 20m or 1h30m, not '{plain(text, 40)}'"
            )
        return seconds

    return parse


def _limit(seconds: float) -> str:
    """A duration as a user would type it: ``0.1s``, ``1m``, ``24h``, ``30d``."""
    if seconds > DAY and seconds % DAY == 0:
        return f"{seconds // DAY:g}d"
    return f"{seconds:g}s" if seconds < 60 else round_duration(seconds)


timeout_from = duration_type(0, MOST_SECONDS)
"""Type for timeouts of up to 366 days."""


MOST_COUNT = 999_999_999


def count_from(text: str) -> int:
    """argparse type: an integer from 1 to 999,999,999."""
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(MOST_COUNT)) and int(text)):
        raise argparse.ArgumentTypeError(f"'{plain(text, 40)}' must be a whole number from 1 to {MOST_COUNT:,}")
    return int(text)


def share_from(text: str) -> float:
    """argparse type: a share from 0 to 1, or a percentage."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"'{plain(text, 40)}' must be a share from 0 to 1 (or 0% to 100%)")
    return share


def add_request(parser: argparse.ArgumentParser, *, gpus: str) -> None:
    """Add preset, model, engine, port, environment and GPUs. ``gpus`` is the help on the default choice of GPUs."""
    parser.add_argument("preset", type=text_from, help="see 'vllm-console presets'")
    parser.add_argument("--model", type=text_from, help="replace the preset's model: a hub id or a folder")
    add_engine(parser)
    parser.add_argument("--port", type=int, help="port to bind (default: the first free one from 8000)")
    parser.add_argument(
        "--gpus", type=text_from, metavar="auto|0,1|none", help=f"the best free set, or indices (default: {gpus})"
    )
    parser.add_argument(
        "--standby-of", type=text_from, metavar="NAME",
        help="share the GPUs of this server: one of the two sleeps while the other serves",
    )  # fmt: skip
    parser.add_argument("--env", action="append", default=[], metavar="K=V", help="environment variable of the server")


def request_from(args: argparse.Namespace, place: str = "") -> LaunchRequest:
    """The launch requested with `add_request`, `add_changes`, `add_probe` and `add_nodes`.

    ``place`` is `LaunchRequest.place` without ``--gpus``. Raises UsageError if an argument is invalid.
    """
    from vllm_launchers.launch.request import LaunchRequest

    return LaunchRequest(
        preset=args.preset,
        model=args.model,
        engine=args.engine,
        vllm=args.vllm,
        port=args.port,
        changes=changes_from(args),
        environment=pairs_from(args.env),
        gpus=gpus_from(args.gpus),
        place=place_from(args.gpus, place),
        standby_of=args.standby_of or "",
        probe=args.probe,
        nodes=nodes_from(args),
    )


def add_engine(parser: argparse.ArgumentParser, note: str = "") -> None:
    """Add the options that choose the engine; ``note`` is prepended to the help texts."""
    parser.add_argument(
        "--engine", choices=["auto", "vllm", "simulated"], default="auto",
        help=f"{note}engine (default: auto, the first vLLM found)",
    )  # fmt: skip
    parser.add_argument(
        "--vllm", type=text_from, metavar="PATH", help=f"{note}vLLM executable or virtual environment to use"
    )


def add_nodes(parser: argparse.ArgumentParser) -> None:
    """Add the options for several machines."""
    parser.add_argument(
        "--nodes", type=int, metavar="N", help="spread one copy of the model over N machines like this one"
    )
    parser.add_argument(
        "--node-rank",
        type=int,
        metavar="R",
        help="with --nodes: rank of this machine, or of the node that --export writes (default: 0, which serves)",
    )
    parser.add_argument("--master-addr", type=text_from, metavar="ADDR", help="with --nodes: address of node 0")
    parser.add_argument(
        "--master-port", type=int, metavar="P", help="with --nodes: port of node 0 (default: vLLM's, 29501)"
    )
    parser.add_argument(
        "--network", type=float, metavar="GBIT", help="with --nodes: bandwidth between nodes in Gbit/s, one way"
    )


def nodes_from(args: argparse.Namespace) -> NodesRequest | None:
    """The machines requested with `add_nodes`; None for this one alone.

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


_VARIABLE = lazy_pattern(r"[A-Za-z_][A-Za-z0-9_]*")


def pairs_from(words: Sequence[str]) -> dict[str, str]:
    """The variables set with ``--env``. Raises UsageError if an argument is not ``NAME=VALUE``."""
    pairs = dict(_pair(word) for word in words)
    for name, value in pairs.items():
        if value and (is_secret_name(name) or holds_secret(value)):
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
    """The indices given with ``--gpus``; empty for ``auto`` and ``none``. Raises UsageError for anything else."""
    if not text or text in ("auto", "none"):
        return ()
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise UsageError(f"--gpus {text}: expected auto, none, or indices with commas such as 0,1") from error


def place_from(text: str | None, default: str) -> str:
    """`LaunchRequest.place` for ``--gpus``: empty for indices, ``default`` without the option."""
    if text is None:
        return default
    return text if text in ("auto", "none") else ""
