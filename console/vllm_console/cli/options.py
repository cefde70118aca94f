"""Options that several commands have."""

from __future__ import annotations

import argparse
import math

from vllm_console.fleet.snapshot import Changes
from vllm_console.fleet.verbs import UsageError
from vllm_console.text import plain


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json``: print for scripts."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_changes(parser: argparse.ArgumentParser) -> None:
    """``--set`` and ``--unset``."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="FLAG=VALUE", help="set a vLLM flag, e.g. max-num-seqs=128"
    )
    parser.add_argument("--unset", action="append", default=[], metavar="FLAG", help="drop a flag of the preset")


def changes_from(args: argparse.Namespace) -> Changes:
    """The changes that ``--set`` and ``--unset`` ask for.

    Raises:
        UsageError: an argument is not ``flag=value``, or names a flag that must not be set this way.
    """
    from vllm_launchers.plan.flags import FlagError, normalise, parse_set

    try:
        pairs = dict(parse_set(word) for word in args.set)
        return Changes(set=pairs, unset=tuple(normalise(word) for word in args.unset))
    except FlagError as error:
        raise UsageError(str(error)) from error


def add_warm_up(parser: argparse.ArgumentParser) -> None:
    """``--warm-up`` and ``--no-warm-up``, for commands that launch."""
    parser.add_argument(
        "--warm-up",
        action=argparse.BooleanOptionalAction,
        help="send one request before the server counts as ready (default: warm_up in config.toml)",
    )


def add_probe(parser: argparse.ArgumentParser) -> None:
    """``--probe`` and ``--no-probe``, for commands that launch."""
    parser.add_argument(
        "--probe",
        action=argparse.BooleanOptionalAction,
        help="record each request and each engine step, without any text (default: probe in config.toml)",
    )


def add_restart_method(parser: argparse.ArgumentParser) -> None:
    """``--no-prepare`` and ``--no-rollback``, for commands that restart."""
    parser.add_argument(
        "--prepare",
        action=argparse.BooleanOptionalAction,
        help="load vLLM and check the flags while the server still serves (default: prepare_restarts in config.toml)",
    )
    parser.add_argument(
        "--rollback",
        action=argparse.BooleanOptionalAction,
        help="return to the flags before if the server fails before it is ready (default: rollback in config.toml)",
    )


def text_from(text: str) -> str:
    """A name, path or address, for argparse: an empty one would mean something else than was typed."""
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return text


MOST_SECONDS = 366 * 86_400


def seconds_from(text: str) -> float:
    """Maximum seconds to wait, for argparse: a number greater than 0, up to 366 days."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(
            f"'{plain(text, 40)}' must be a number of seconds greater than 0, at most {MOST_SECONDS:,}"
        )
    return seconds


MOST_COUNT = 999_999_999


def count_from(text: str) -> int:
    """How many, for argparse: a whole number from 1 to 999,999,999."""
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(MOST_COUNT)) and int(text)):
        raise argparse.ArgumentTypeError(f"'{plain(text, 40)}' must be a whole number from 1 to {MOST_COUNT:,}")
    return int(text)


def share_from(text: str) -> float:
    """A share from 0 to 1, for argparse; also as a percentage."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"'{plain(text, 40)}' must be a share from 0 to 1 (or 0% to 100%)")
    return share
