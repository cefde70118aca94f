"""``vllm-console compare BEFORE [AFTER]``: did a change help? With two engines: would an upgrade be slower?"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import msgspec

from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.options import add_changes, add_json, count_from, timeout_from
from vllm_console.cli.output import print_json
from vllm_launchers.errors import UsageError

if TYPE_CHECKING:
    from vllm_console.cli.output import Document
    from vllm_console.prediction.score import KeptPrediction


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("before", help="number, NAME@RUN, or NAME (its two newest runs)")
    parser.add_argument("after", nargs="?", help="run to compare with")
    parser.add_argument(
        "--engine", action="append", default=[], metavar="ENGINE",
        help="given twice: run NAME's flags on both engines in turn, with the same traffic; a version or path as "
             "'engines' lists it, vllm, or simulated",
    )  # fmt: skip
    parser.add_argument("--rounds", type=count_from, default=8, metavar="N", help="rounds per engine (default 8)")
    parser.add_argument(
        "--seconds", type=timeout_from, default=120, metavar="DURATION",
        help="with --engine: length of the newest recorded traffic to send in each turn (default 2m)",
    )  # fmt: skip
    add_changes(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Compare two runs, or two engines."""
    if args.engine:
        from vllm_console.cli.upgrade import run_upgrade

        return run_upgrade(args)
    if args.set or args.unset:
        raise UsageError("--set and --unset belong to --engine")
    fleet = open_fleet(args, observe=False)
    found = fleet.history.compare(args.before, args.after)
    kept = fleet.history.outcome(found)
    if args.json:
        from vllm_console.runs.document import comparison_document

        print_json({**comparison_document(found, fleet.tariff), "prediction": _document(kept)})
    else:
        from vllm_console.cli.runs_text import comparison_lines
        from vllm_console.prediction.score import outcome_lines
        from vllm_console.runs.compare import ComparisonVerdict

        judged = found.verdict is not ComparisonVerdict.TOO_LITTLE
        prediction = outcome_lines(kept, judged=judged) if kept is not None else []
        print("\n".join([*comparison_lines(found, fleet.tariff), *(["", *prediction] if prediction else [])]))
    return 0


def _document(kept: KeptPrediction | None) -> Document | None:
    """What was predicted for the change, next to what was measured."""
    if kept is None:
        return None
    from vllm_console.prediction.score import outcomes

    return {
        "predicted_at": kept.at,
        "outside": kept.outside,
        "same_traffic": not kept.unlike,
        "drift": kept.drift,
        "figures": [msgspec.structs.asdict(one) for one in outcomes(kept)],
    }
