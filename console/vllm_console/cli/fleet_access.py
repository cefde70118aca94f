"""The settings and the fleet that a command uses, based on the global options."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from vllm_console.cli.output import complain
from vllm_console.text import plain
from vllm_launchers.launch.errors import read_only_error
from vllm_launchers.private import check

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_console.fleet.local import LocalFleet
    from vllm_console.settings import Settings


def settings_from(args: argparse.Namespace) -> Settings:
    """The effective settings: the administrator's config file, and the user's or the one named on the command line.

    A command that stops or shows servers ignores invalid keys, after one warning.

    Raises:
        UsageError: the config file is invalid.
    """
    from vllm_console.settings import read_settings

    if (known := getattr(args, "settings", None)) is not None:
        found: Settings = known
        return found
    found = read_settings(args.config, forgiving=getattr(args, "forgiving", False))
    if found.mistakes:
        first = found.mistakes[0]
        complain(f"{first}{'' if first.endswith('?') else '.'} This command ignores it; others refuse to run")
    args.settings = found
    return found


def state_of(args: argparse.Namespace) -> Path:
    """The folder with the records of this user's servers."""
    from vllm_launchers.keeper.folders import default_root

    state: Path | None = args.state
    return state or default_root()


def read_only_by(args: argparse.Namespace, config: Settings) -> str:
    """What makes this command read-only: the administrator's file, or else the command line. Empty if nothing does."""
    return config.read_only_by or ("--read-only" if args.read_only else "")


def refuse_read_only(args: argparse.Namespace) -> None:
    """Refuse a command that changes something before it does anything.

    Raises:
        RefusedError: the command line or a config file says read-only.
    """
    if why := read_only_by(args, settings_from(args)):
        raise read_only_error(why)


def _ends_at_logout() -> tuple[str, ...]:
    """A notice for a console whose servers would end at logout."""
    from vllm_launchers.host.session_end import session_end

    return tuple(filter(None, (session_end(),)))


def open_fleet(
    args: argparse.Namespace,
    config: Settings | None = None,
    *,
    interactive: bool = False,
    observe: bool = True,
    check: bool = True,
    remote: bool = False,
) -> LocalFleet:
    """The user's servers, per the global options.

    ``observe`` also looks for other users' servers, ``check`` verifies that the state folder is private, and ``remote``
    also reads the fleets of attached machines.

    Raises:
        UsageError: the config file, read if ``config`` is not given, is invalid.
    """
    from vllm_console.fleet.local import LocalFleet

    config = config or settings_from(args)
    read_only = read_only_by(args, config)
    seen = check_state(args, config) if check else []
    return LocalFleet(
        args.state,
        config_file=args.config,
        settings=config,
        read_only=bool(read_only),
        read_only_by=read_only,
        notices=(*(seen if interactive else ()), *config.notices, *(_ends_at_logout() if interactive else ())),
        observe=observe,
        interactive=interactive,
        host_file=args.host_file,
        judge_launches=config.prepares_launches,
        remote=remote,
    )


def check_state(args: argparse.Namespace, config: Settings) -> list[str]:
    """Verify that the state folder is private, and fix it if allowed; report any problems.

    The messages go to standard error, and are returned so that the caller can also show them.
    """
    warnings = [plain(one) for one in check(state_of(args), fix=not read_only_by(args, config))]
    for sentence in warnings:
        complain(sentence)
    return warnings
