"""``vllm-console presets``: the available presets, and the reasons for their flags."""

from __future__ import annotations

import argparse

import msgspec

from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.options import add_json, text_from
from vllm_console.cli.output import Document, complain, print_json, show
from vllm_console.text import objectives_text, plain
from vllm_launchers.plan.flags import flag_words
from vllm_launchers.presets.model import Preset


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name", type=text_from, nargs="?", help="show this preset with the reason for each flag")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """List the presets; invalid files are reported on stderr."""
    fleet = open_fleet(args)
    presets, problems = fleet.presets()
    for problem in problems:
        complain(problem.message)
    if args.name:
        chosen = fleet.preset(args.name)
        show(args, lambda: preset_document(chosen), lambda: describe_preset(chosen))
        return 0
    if args.json:
        print_json([preset_document(preset) for preset in presets])
        return 0
    rows = [("NAME", "MODEL", "FOR"), *((one.name, one.model, _purpose(one)) for one in presets)]
    widths = [min(MOST_COLUMN, max(len(row[at]) for row in rows)) for at in (0, 1)]
    for name, model, purpose in rows:
        print(plain(f"{_cut(name, widths[0])}  {_cut(model, widths[1])}  {purpose}"))
    return 0


MOST_COLUMN = 44
"""Maximum width of a column. Of a longer path, the end is shown."""


def _cut(text: str, width: int) -> str:
    return f"{text:<{width}}" if len(text) <= width else f"…{text[1 - width :]}"


def _purpose(preset: Preset) -> str:
    """The summary; for a user's own preset the title, since its summary may be inherited."""
    return preset.summary if preset.shipped else preset.title


def preset_document(preset: Preset) -> Document:
    """A preset as JSON."""
    document: Document = msgspec.to_builtins(preset)
    return document


def describe_preset(preset: Preset) -> list[str]:
    """A preset as text: each flag with its reason."""
    lines = [f"{preset.title} ({preset.name})", f"  {preset.summary}", f"  model   {preset.model}"]
    lines += [f"  from    {preset.source}", "  flags"]
    for flag, setting in preset.flags.items():
        lines.append(f"    {' '.join(flag_words({flag: setting.value}))}")
        lines.append(f"        {setting.why}")
    for name, variable in preset.environment.items():
        lines.append(f"    {name}={variable.value}")
        lines.append(f"        {variable.why}")
    work = preset.workload
    lines.append(
        f"  workload    p95 {work.input_tokens_p95:,} tokens in, {work.output_tokens_p95:,} out, "
        f"{work.prefix_reuse:.0%} of the prompt shared, {work.concurrency} at once"
    )
    lines.append(f"  objectives  {objectives_text(preset.objectives)}")
    return [plain(line) for line in lines]
