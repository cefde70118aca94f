"""``vllm-console presets``: what can be started, and why it is set as it is."""

from __future__ import annotations

import argparse

from vllm_console.cli.common import Document, add_json, complain, open_fleet, print_json
from vllm_console.fleet.api import NotFoundError
from vllm_console.fleet.model import Preset
from vllm_console.text import plain
from vllm_launchers.plan.flags import flag_words


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's words."""
    parser.add_argument("name", nargs="?", help="show this one with the reason for each flag")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """List them; files that are no use are named on stderr."""
    presets, problems = open_fleet(args).presets()
    for problem in problems:
        complain(problem.message)
    if args.name:
        chosen = [preset for preset in presets if preset.name == args.name]
        if not chosen:
            raise NotFoundError(f"no preset is called '{args.name}'; there are {', '.join(p.name for p in presets)}")
        if args.json:
            print_json(preset_document(chosen[0]))
        else:
            print("\n".join(describe_preset(chosen[0])))
        return 0
    if args.json:
        print_json([preset_document(preset) for preset in presets])
        return 0
    for preset in presets:
        print(plain(f"{preset.name:<18} {preset.model:<38} {preset.summary}"))
    return 0


def preset_document(preset: Preset) -> Document:
    """A preset as JSON."""
    import msgspec

    document: Document = msgspec.to_builtins(preset)
    return document


def describe_preset(preset: Preset) -> list[str]:
    """A preset for people: each flag with its reason."""
    lines = [f"{preset.title} ({preset.name})", f"  {preset.summary}", f"  model   {preset.model}"]
    lines += [f"  from    {preset.source}", "  flags"]
    for flag, setting in preset.flags.items():
        lines.append(f"    {' '.join(flag_words({flag: setting.value}))}")
        lines.append(f"        {setting.why}")
    for name, variable in preset.environment.items():
        lines.append(f"    {name}={variable.value}")
        lines.append(f"        {variable.why}")
    work, goal = preset.workload, preset.objectives
    lines.append(
        f"  workload    p95 {work.input_tokens_p95} tokens in, {work.output_tokens_p95} out, "
        f"{work.prefix_reuse:.0%} of the prompt shared, {work.concurrency} at once"
    )
    lines.append(
        f"  objectives  TTFT p99 {goal.ttft_p99_seconds} s, ITL p99 {goal.itl_p99_seconds * 1000:.0f} ms, "
        f"KV cache {goal.kv_cache_usage:.0%}, preempted {goal.preemption_rate:.0%} of requests"
    )
    return [plain(line) for line in lines]
