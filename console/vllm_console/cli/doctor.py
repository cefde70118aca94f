"""``vllm-console doctor``: what a maintainer would ask for, and what is wrong here."""

from __future__ import annotations

import argparse

from vllm_console.cli.common import add_json, open_fleet, print_json, settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's words."""
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print it; the exit code says whether something is wrong."""
    from vllm_console.cli.host_source import this_host
    from vllm_console.config import config_folder
    from vllm_console.doctor import examine, words
    from vllm_launchers.keeper.client import default_root
    from vllm_launchers.machine.engines import engine_problems

    state = args.state or default_root()
    config = args.config.parent if args.config is not None else config_folder()
    found = settings(args)
    engines = tuple(open_fleet(args, found, check=False).engines())
    document = examine(state, config, engines, this_host(args), engine_problems(found.vllm))
    if args.json:
        print_json(document)
    else:
        print("\n".join(words(document)))
    return 1 if document["problems"] else 0
