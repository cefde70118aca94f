"""``vllm-console engines``: the vLLM installations found."""

from __future__ import annotations

import argparse

from vllm_console.cli.fleet_access import open_fleet, settings_from
from vllm_console.cli.options import add_json
from vllm_console.cli.output import complain, fields, print_json
from vllm_console.text import plain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """List them, the one that ``auto`` picks first; unusable ones are reported on stderr."""
    from vllm_launchers.vllm.engines import engine_problems

    config = settings_from(args)
    engines = open_fleet(args, config).engines()
    for problem in engine_problems(config.vllm):
        complain(problem)
    if args.json:
        print_json([fields(engine, "kind version build path") for engine in engines])
        return 0
    for engine in engines:
        print(plain(f"{engine.label:<28} {engine.path}"))
    if all(engine.kind == "simulated" for engine in engines):
        print("No usable vLLM found: pip install 'vllm-console[vllm]', or name one with --vllm PATH.")
    return 0
