"""``vllm-console compare BEFORE [AFTER]``: did a change help? Or, with two engines, would an upgrade be slower?"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.options import add_changes, add_json, count_from, seconds_from
from vllm_console.cli.output import print_json
from vllm_console.fleet.verbs import UsageError
from vllm_console.text import rate
from vllm_console.text import seconds as latency

if TYPE_CHECKING:
    from vllm_console.cli.output import Document
    from vllm_console.prediction.score import KeptPrediction

TITLES = {
    f"{key}_{part}": f"{title} {part}"
    for key, title in (("ttft", "TTFT"), ("itl", "ITL"), ("e2e", "end-to-end"))
    for part in ("p50", "p90", "p99", "mean")
} | {"tokens_per_second": "tokens/s"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("before", help="number, NAME@RUN, or NAME (its two newest runs)")
    parser.add_argument("after", nargs="?", help="run to compare with")
    parser.add_argument(
        "--engine", action="append", default=[], metavar="ENGINE",
        help="given twice: start NAME's flags on these two in turns and send both the same traffic; a version or path "
        "as 'engines' lists it, vllm, or simulated",
    )  # fmt: skip
    parser.add_argument("--rounds", type=count_from, default=8, metavar="N", help="turns of each engine (default 8)")
    parser.add_argument(
        "--seconds", type=seconds_from, default=120, metavar="S",
        help="with --engine: of the newest recorded traffic, in each turn (default 120)",
    )  # fmt: skip
    add_changes(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Set them side by side."""
    if args.engine:
        from vllm_console.cli.upgrade import run_upgrade

        return run_upgrade(args)
    if args.set or args.unset:
        raise UsageError("--set and --unset belong to --engine")
    fleet = open_fleet(args, observe=False)
    found = fleet.compare(args.before, args.after)
    kept = fleet.outcome(found)
    if args.json:
        from vllm_console.runs.document import comparison_document

        print_json({**comparison_document(found), "prediction": _document(kept)})
    else:
        from vllm_console.cli.runs_text import comparison_lines

        print("\n".join([*comparison_lines(found), *_lines(kept)]))
    return 0


def _document(kept: KeptPrediction | None) -> Document | None:
    """What was predicted of the change, next to what was measured."""
    if kept is None:
        return None
    import msgspec

    from vllm_console.prediction.score import outcomes

    return {
        "predicted_at": kept.at,
        "outside": kept.outside,
        "same_traffic": not kept.unlike,
        "drift": kept.drift,
        "figures": [msgspec.structs.asdict(one) for one in outcomes(kept)],
    }


def _lines(kept: KeptPrediction | None) -> list[str]:
    """The same for people; the machine's drift on a line of its own."""
    if kept is None:
        return []
    from vllm_console.prediction.score import outcomes

    if kept.unlike:
        return ["", "A prediction was made of this change, for other traffic than came: it can't be judged."]
    lines = ["", f"  {'':<20}{'PREDICTED':>10}   {'90 % INTERVAL':<22}{'MEASURED':>10}"]
    for one in outcomes(kept):
        form = latency if one.name != "tokens_per_second" else _rate
        interval = f"{form(one.low)} to {form(one.high)}"
        within = "within" if one.within else "! outside"
        title = TITLES.get(one.name, one.name)
        lines.append(f"  {title:<20}{form(one.predicted):>10}   {interval:<22}{form(one.measured):>10}  {within}")
    if kept.drift is not None:
        slower = "slower" if kept.drift > 0 else "faster"
        lines.append(f"The same steps are {abs(kept.drift):.0%} {slower} since the restart: the machine or the engine.")
    if kept.outside:
        lines.append("This prediction was outside what the server had shown; it does not count in the track record.")
    return lines


def _rate(value: float | None) -> str:
    return rate(value, "tok")
