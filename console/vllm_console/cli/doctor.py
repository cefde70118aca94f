"""``vllm-console doctor``: what a maintainer would ask for, and problems of this installation."""

from __future__ import annotations

import argparse

from vllm_console.cli.fleet_access import open_fleet, settings_from, state_of
from vllm_console.cli.options import add_json
from vllm_console.cli.output import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the report; exit code 1 if there are problems."""
    from vllm_console.cli.console import keys_problem
    from vllm_console.cli.host_source import this_host
    from vllm_console.doctor import examine, format_report
    from vllm_console.settings import config_folder
    from vllm_launchers.vllm.engines import engine_problems

    state = state_of(args)
    config = args.config.parent if args.config is not None else config_folder()
    found = settings_from(args)
    engines = tuple(open_fleet(args, found, check=False).engines())
    mistakes = [*found.mistakes, *filter(None, [keys_problem(found)])]
    document = examine(state, config, engines, this_host(args), engine_problems(found.vllm), mistakes)
    show(args, lambda: document, lambda: format_report(document))
    return 1 if document["problems"] else 0
